# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Compiles a plan for one model: the ranks, layouts, weight meshes and process groups of every stage and layer.
[`resolve`] runs once; the runtime derives nothing from strategies again. Importing this module needs no torch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from galvatron_hf.plan.layout import AttentionHeads, Layout, block_sizes, vocabulary_layouts
from galvatron_hf.plan.pipeline_shape import PipelineShape
from galvatron_hf.plan.plan import ParallelPlan
from galvatron_hf.plan.strategies import LayerStrategy, Precision, VocabularyStrategy


@dataclass(frozen=True, kw_only=True)
class GroupKey:
    """Names groups of a stage's ranks: `size` ranks that are `stride` apart in the stage's order."""

    stride: int
    size: int

    def groups(self, ranks: Sequence[int]) -> list[tuple[int, ...]]:
        """Returns the groups, which tile a stage's ranks, each in the stage's order. Raises `ValueError` if
        `stride * size` does not divide the number of ranks.
        """
        span = self.stride * self.size
        if span < 1 or len(ranks) % span:
            raise ValueError(
                f"Groups of {self.size} ranks that are {self.stride} apart cannot tile a stage of {len(ranks)} ranks;"
                f" use a stride and a size whose product is a divisor of {len(ranks)}."
            )
        starts = (start + offset for start in range(0, len(ranks), span) for offset in range(self.stride))
        return [tuple(ranks[start : start + span : self.stride]) for start in starts]


@dataclass(frozen=True, kw_only=True)
class MeshShape:
    """Gives the axes over which weights are spread, tensor innermost: `replicate * shard * tensor` ranks. There are
    `replicate` copies of the weights. `shard` ranks shard one copy, and `tensor` ranks cut each weight; of the experts
    of a layer, these are the ranks over which whole experts are spread.
    """

    replicate: int
    shard: int
    tensor: int

    @classmethod
    def from_strategy(cls, strategy: LayerStrategy | VocabularyStrategy, ranks: int) -> MeshShape:
        shard = strategy.resolved_shard_degree(ranks)
        return cls(replicate=ranks // (shard * strategy.tensor), shard=shard, tensor=strategy.tensor)

    @classmethod
    def of_experts(cls, strategy: LayerStrategy, ranks: int) -> MeshShape:
        """Returns the mesh of a layer's experts. A copy of them spans the ranks of a copy of the layer, or as many as
        `expert` says if they are more. The ranks that are left of a copy shard each expert.
        """
        copy = 1 if strategy.sharding == "replicate" else strategy.resolved_shard_degree(ranks) * strategy.tensor
        shard = copy // strategy.expert if copy % strategy.expert == 0 else 1
        return cls(replicate=ranks // (shard * strategy.expert), shard=shard, tensor=strategy.expert)

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.replicate, self.shard, self.tensor

    @property
    def data_keys(self) -> tuple[GroupKey, GroupKey]:
        """Returns the groups along the axes `replicate` and `shard`, which communicate weights and gradients."""
        copies = GroupKey(stride=self.shard * self.tensor, size=self.replicate)
        return copies, GroupKey(stride=self.tensor, size=self.shard)

    @property
    def tensor_key(self) -> GroupKey:
        """Returns the groups along the axis `tensor`, which communicate activations."""
        return GroupKey(stride=1, size=self.tensor)


@dataclass(frozen=True, kw_only=True)
class ResolvedLayer:
    """Describes one layer on its stage.

    Attributes:
        index (`int`): global index.
        stack (`str`): the name of its stack.
        source (`Layout`, *optional*): layout in which hidden states enter; None if they come from the embedding,
            because its layout depends on the number of rows.
        layout (`Layout`): layout in which the layer computes and returns hidden states.
        source_context (`int`, *optional*): the context degree in whose deal hidden states enter; None if they come
            from the embedding.
        attention_layout (`Layout`): layout of the input of the attention module; Megatron-SP has gathered positions by
            then.
        pack_layout (`Layout`): whole packs of a packed row, to which the layer's sequence ranks attend together.
        weights ([`MeshShape`]): mesh of the weights.
        experts ([`MeshShape`], *optional*): mesh of the weights of its experts; None for a dense layer.
        heads ([`AttentionHeads`]): heads of a rank.
    """

    index: int
    stack: str
    strategy: LayerStrategy
    source: Layout | None
    source_context: int | None
    layout: Layout
    attention_layout: Layout
    pack_layout: Layout
    weights: MeshShape
    experts: MeshShape | None
    heads: AttentionHeads

    @property
    def meshes(self) -> tuple[MeshShape, ...]:
        """Returns the meshes of all its weights."""
        return (self.weights,) if self.experts is None else (self.weights, self.experts)

    @property
    def ulysses(self) -> GroupKey:
        """Returns the ranks that exchange positions for heads."""
        return GroupKey(stride=self.strategy.tensor, size=self.strategy.ulysses)

    @property
    def data_ranks(self) -> GroupKey:
        """Returns the ranks that hold other tokens, for the same heads: those that may share a packed document."""
        return GroupKey(stride=self.pack_layout.replicas, size=self.layout.data)

    def ulysses_index(self, index: int) -> int:
        """Returns the place of rank `index` of the stage among those with which it exchanges positions for heads."""
        return index // self.strategy.tensor % self.strategy.ulysses

    @property
    def token_copies(self) -> GroupKey:
        """Returns the ranks that hold the same hidden states: tensor ranks without Megatron-SP."""
        return GroupKey(stride=1, size=self.layout.replicas)

    @property
    def head_shards(self) -> int:
        """Returns the number of ranks that compute different heads of the same rows."""
        return self.strategy.tensor * self.strategy.ulysses


@dataclass(frozen=True, kw_only=True)
class ResolvedVocabulary:
    """Describes the embedding or the head: its strategy, and the mesh of its weights."""

    strategy: VocabularyStrategy
    weights: MeshShape

    @property
    def meshes(self) -> tuple[MeshShape, ...]:
        return (self.weights,)


@dataclass(frozen=True, kw_only=True)
class StackPart:
    """Describes the layers of one stack on one stage.

    Attributes:
        stack (`str`): the name of the stack.
        reads (`str`, *optional*): the stack whose output the layers read.
        is_first, is_last (`bool`): whether the stack begins, or ends, on the stage.
        is_end (`bool`): whether the head follows.
    """

    stack: str
    reads: str | None
    layers: tuple[ResolvedLayer, ...]
    is_first: bool
    is_last: bool
    is_end: bool


@dataclass(frozen=True, kw_only=True)
class ResolvedStage:
    """Describes one stage, with its global ranks in the plan's order and its stacks in the order of the forward. The
    first stage (`is_first`) has the embedding, and the last stage has the head. `sends` are the stacks whose hidden
    states, or output, go on to the next stage.
    """

    index: int
    ranks: tuple[int, ...]
    pipeline_rank: int
    parts: tuple[StackPart, ...]
    is_first: bool
    is_last: bool
    sends: tuple[str, ...] = ()

    @property
    def layers(self) -> tuple[ResolvedLayer, ...]:
        return tuple(layer for part in self.parts for layer in part.layers)

    @property
    def has_embedding(self) -> bool:
        """Tells whether a stack begins here, and so whether tokens are looked up."""
        return any(part.is_first for part in self.parts)

    @property
    def receives(self) -> tuple[str, ...]:
        """Returns the stacks whose hidden states, or output, come from the stage before; empty at the first stage."""
        if self.is_first:
            return ()
        first = self.parts[0]
        return tuple(name for name in (first.reads, None if first.is_first else first.stack) if name is not None)

    @property
    def span(self) -> range:
        """Returns the global indices of the stage's layers."""
        return range(self.layers[0].index, self.layers[-1].index + 1)


@dataclass(frozen=True, kw_only=True)
class RankGroup:
    """Describes a process group over global `ranks`, numbered in this order. `copies` groups of these ranks are made,
    so that their transfers do not wait for each other. `of_weights` marks a group for weights and their gradients
    alone, because activations use another one of the same ranks: they would wait for weights that are gathered ahead.
    `of_tokens` marks a group for keys and values of documents that its ranks share, so that these move while layers
    are computed.
    """

    ranks: tuple[int, ...]
    copies: int = 1
    joins_stages: bool = False
    of_weights: bool = False
    of_tokens: bool = False


@dataclass(frozen=True, kw_only=True)
class EndLayouts:
    """Holds the layouts of hidden states that the embedding returns, that the head takes, and between two stages."""

    embedding: Layout
    head: Layout
    boundary: Layout


@dataclass(frozen=True, kw_only=True)
class ResolvedPlan:
    """Holds a plan with everything that follows from it for one model; its stages are in execution order.

    Attributes:
        tied (`bool`): whether embedding and head share a weight.
        has_whole_weights (`bool`): whether the model has weights on [`ResolvedPlan.whole_weights`].
        biased (`tuple[str, ...]`): the stacks whose layers share a bias of scores.
        whole_rows (`bool`): whether embedding and head need whole rows on every rank.
    """

    plan: ParallelPlan
    pipeline: PipelineShape
    stages: tuple[ResolvedStage, ...]
    embedding: ResolvedVocabulary
    head: ResolvedVocabulary
    tied: bool
    has_whole_weights: bool = False
    biased: tuple[str, ...] = ()
    whole_rows: bool = False

    @property
    def layers(self) -> tuple[ResolvedLayer, ...]:
        return tuple(layer for stage in self.stages for layer in stage.layers)

    @property
    def precision(self) -> Precision:
        """Returns the plan's number formats, fp32 by default."""
        return self.plan.precision or Precision()

    @property
    def stage_size(self) -> int:
        return len(self.stages[0].ranks)

    @property
    def whole_weights(self) -> MeshShape:
        """Returns the mesh of weights that every rank of a stage holds whole and uses for its own tokens or heads."""
        return MeshShape(replicate=self.stage_size, shard=1, tensor=1)

    @property
    def is_pipeline(self) -> bool:
        return len(self.stages) > 1

    def stages_of_rank(self, rank: int) -> tuple[ResolvedStage, ...]:
        return tuple(stage for stage in self.stages if rank in stage.ranks)

    # ---- Shapes of micro-batches ----

    @cached_property
    def sequence_degree(self) -> int:
        """Returns the least common multiple of the numbers of position pieces of all layers."""
        return math.lcm(*(layer.layout.positions for layer in self.layers))

    @cached_property
    def data_degree(self) -> int:
        """Returns the fewest rows of a micro-batch: the largest data-parallel degree of a layer or an end."""
        return self.stage_size if self.whole_rows else max(layer.layout.data for layer in self.layers)

    def end_layouts(self, rows: int) -> EndLayouts:
        """Returns the layouts outside the layers for a micro-batch of `rows` rows."""
        tensors = self.embedding.strategy.tensor, self.head.strategy.tensor, 1
        embedding, head, boundary = (Layout.from_vocabulary(tensor, self.stage_size, rows) for tensor in tensors)
        return EndLayouts(embedding=embedding, head=head, boundary=boundary)

    def padded(self, rows: int, length: int, *, logits: bool = False) -> tuple[int, int]:
        """Returns the rows and positions of a micro-batch after padding, with which every rank has some in every
        layout. With `logits`, every rank also has logits of a row of its own.
        """
        rows = max(rows, self.stage_size if logits else self.data_degree)
        ends = self.end_layouts(rows)
        degrees = [self.sequence_degree, ends.embedding.positions, ends.head.positions]
        multiple = math.lcm(*degrees, *([ends.boundary.positions] if self.is_pipeline else []))
        return rows, -(-length // multiple) * multiple

    @cached_property
    def packs(self) -> int:
        """Returns the packs of a packed row: a multiple of the data ranks of every layer."""
        return math.lcm(self.data_degree, *(layer.layout.data for layer in self.layers))

    @cached_property
    def pack_end_layouts(self) -> EndLayouts:
        """Returns the layouts of a packed row outside the layers: its packs are split as rows are."""

        def layout(tensor: int) -> Layout:
            return Layout.from_vocabulary(tensor, self.stage_size, math.gcd(self.stage_size // tensor, self.packs))

        embedding, head = (layout(end.strategy.tensor) for end in (self.embedding, self.head))
        return EndLayouts(embedding=embedding, head=head, boundary=layout(1))

    @cached_property
    def pack_multiple(self) -> int:
        """Returns the number of which each pack length is a multiple, so that sequence ranks hold equal shares."""
        ends = self.pack_end_layouts
        positions = ends.embedding.positions, ends.head.positions, ends.boundary.positions
        return math.lcm(self.sequence_degree, *positions)

    def exchanges_heads(self, packs: int) -> bool:
        """Returns whether ranks that share a document over so many packs can exchange its tokens for heads in every
        layer. A layer with fewer data ranks has several packs on a rank, so that fewer ranks share it there, how many
        depends on the packs; each number of them that is possible has to divide the layer's heads.
        """
        for layer in self.layers:
            data, heads = layer.layout.data, layer.heads.query // layer.strategy.ulysses
            fewest, most = -(-packs * data // self.packs), min(packs, data)
            if any(heads % holders for holders in range(fewest, most + 1)):
                return False
        return True

    # ---- Process groups ----

    @cached_property
    def neighbours(self) -> tuple[tuple[int, int], ...]:
        """Returns the pairs of pipeline ranks that exchange hidden states."""
        pairs = itertools.pairwise(self.pipeline.pipeline_rank_of_stage)
        return tuple(sorted({tuple(sorted(pair)) for pair in pairs if pair[0] != pair[1]}))

    @cached_property
    def groups(self) -> tuple[RankGroup, ...]:
        """Returns all process groups in the order in which every rank of the world makes them."""
        groups = []
        for stage in self.stages:
            ends = ([self.embedding] if stage.has_embedding else []) + ([self.head] if stage.is_last else [])
            meshes = [mesh for part in (*stage.layers, *ends) for mesh in part.meshes]
            meshes += [self.whole_weights] if self.has_whole_weights else []
            keys = [GroupKey(stride=1, size=size) for size in self._block_sizes(stage)]
            keys += [layer.ulysses for layer in stage.layers] + [mesh.tensor_key for mesh in meshes]
            of_activations = [ranks for key in keys for ranks in key.groups(stage.ranks)]
            groups += [RankGroup(ranks=ranks) for ranks in of_activations]
            shared = {ranks for ranks in of_activations if len(ranks) > 1}
            for key in (key for mesh in meshes for key in mesh.data_keys):
                groups += [RankGroup(ranks=ranks, of_weights=ranks in shared) for ranks in key.groups(stage.ranks)]
            if self.plan.shares_documents:
                keys = dict.fromkeys(layer.data_ranks for layer in stage.layers if layer.layout.data > 1)
                groups += [RankGroup(ranks=ranks, of_tokens=True) for key in keys for ranks in key.groups(stage.ranks)]
        if self.is_pipeline:
            pipeline_ranks = self.plan.rank_groups
            groups += _joined(pipeline_ranks)
            for pair in self.neighbours:
                groups += _joined([pipeline_ranks[index] for index in pair], copies=2)
            for lists in self._copied_over():
                groups += _joined(lists)
        return tuple(dict.fromkeys(groups))

    @property
    def vocabulary_stages(self) -> tuple[ResolvedStage, ...]:
        """Returns the stages with a copy of the embedding's weight, one for each copy."""
        looking_up = [stage for stage in self.stages for part in stage.parts if part.is_first]
        once = [stage for index, stage in enumerate(looking_up) if stage not in looking_up[:index]]
        return (*once, *([self.stages[-1]] if self.tied and self.is_pipeline else []))

    def stages_of_stack(self, name: str) -> tuple[ResolvedStage, ...]:
        return tuple(stage for stage in self.stages if any(part.stack == name for part in stage.parts))

    def _copied_over(self) -> list[list[tuple[int, ...]]]:
        """Returns for each weight of which several stages hold a copy the different rank lists of these stages."""
        holders = [self.vocabulary_stages, *(self.stages_of_stack(name) for name in self.biased)]
        lists = [list(dict.fromkeys(stage.ranks for stage in stages)) for stages in holders]
        return [one for one in lists if len(one) > 1]

    def _block_sizes(self, stage: ResolvedStage) -> list[int]:
        """Returns the sizes of the aligned blocks in which hidden states are redistributed, and the stage's size."""
        size, chains = len(stage.ranks), []
        for part in stage.parts:
            layouts = [layer.layout for layer in part.layers]
            before = self.embedding.strategy.tensor if part.is_first else 1
            after = self.head.strategy.tensor if part.is_end else 1
            chains.append(layouts)
            chains += [[start, layouts[0]] for start in vocabulary_layouts(before, size)]
            chains += [[layouts[-1], stop] for stop in vocabulary_layouts(after, size)]
            if part.reads is not None:
                chains += [[start, layout] for start in vocabulary_layouts(1, size) for layout in set(layouts)]
        sizes = {size, *(block for chain in chains for block in block_sizes(chain))}
        return sorted(sizes - {1})


def _joined(lists: Iterable[Sequence[int]], copies: int = 1) -> list[RankGroup]:
    """Returns groups of the ranks that have the same index in each of several stages."""
    return [RankGroup(ranks=ranks, copies=copies, joins_stages=True) for ranks in zip(*lists, strict=True)]


def resolve(
    plan: ParallelPlan,
    *,
    heads: Sequence[tuple[int, int]],
    tied: bool,
    experts: Sequence[int] | None = None,
    reads: Mapping[str, str] | None = None,
    has_whole_weights: bool = False,
    biased: Sequence[str] = (),
    whole_rows: bool = False,
) -> ResolvedPlan:
    """Compiles a plan for a model that it fits. `heads` are the attention and key/value heads of each layer, `experts`
    the experts of each layer, 0 for a dense one; by default all are dense. `reads` names for a stack the one whose
    output its layers read.
    """
    pipeline, stages = PipelineShape.from_plan(plan), []
    for index, stage in enumerate(plan.stages):
        parts = []
        for name, first, stop in _stack_spans(plan):
            span = range(max(first, stage.layers[0]), min(stop, stage.layers[1]))
            if not span:
                continue
            layers: list[ResolvedLayer] = []
            for layer in span:
                layout = Layout.from_strategy(plan.layers[layer], len(stage.ranks))
                # The stage moves what it receives to the layout of its first layer.
                source = layers[-1].layout if layers else (layout if layer > first else None)
                before = plan.layers[layer - 1 if layers else layer]
                source_context = None if source is None else before.context
                has_experts = experts is not None and experts[layer] > 0
                layers.append(
                    _resolve_layer(
                        layer,
                        name,
                        plan.layers[layer],
                        len(stage.ranks),
                        source,
                        source_context,
                        heads[layer],
                        has_experts,
                    )
                )
            part = StackPart(
                stack=name,
                reads=(reads or {}).get(name),
                layers=tuple(layers),
                is_first=span.start == first,
                is_last=span.stop == stop,
                is_end=span.stop == plan.num_layers,
            )
            parts.append(part)
        stages.append(
            ResolvedStage(
                index=index,
                ranks=stage.ranks,
                pipeline_rank=pipeline.pipeline_rank_of_stage[index],
                parts=tuple(parts),
                is_first=index == 0,
                is_last=index == len(plan.stages) - 1,
            )
        )
    for index, following in enumerate(stages[1:]):
        stages[index] = replace(stages[index], sends=following.receives)
    embedding, head = (
        ResolvedVocabulary(strategy=strategy, weights=MeshShape.from_strategy(strategy, len(stage.ranks)))
        for strategy, stage in ((plan.embedding, plan.stages[0]), (plan.head, plan.stages[-1]))
    )
    return ResolvedPlan(
        plan=plan,
        pipeline=pipeline,
        stages=tuple(stages),
        embedding=embedding,
        head=head,
        tied=tied,
        has_whole_weights=has_whole_weights,
        biased=tuple(biased),
        whole_rows=whole_rows,
    )


def _stack_spans(plan: ParallelPlan) -> list[tuple[str, int, int]]:
    """Returns the name of each stack with the global index of its first layer, and the index after its last."""
    stops = itertools.accumulate(plan.stacks.values())
    return [(name, stop - plan.stacks[name], stop) for name, stop in zip(plan.stacks, stops, strict=True)]


def _resolve_layer(
    index: int,
    stack: str,
    strategy: LayerStrategy,
    ranks: int,
    source: Layout | None,
    source_context: int | None,
    heads: tuple[int, int],
    has_experts: bool,
) -> ResolvedLayer:
    layout = Layout.from_strategy(strategy, ranks)
    query, key_value = heads
    return ResolvedLayer(
        index=index,
        stack=stack,
        strategy=strategy,
        source=source,
        source_context=source_context,
        layout=layout,
        attention_layout=Layout(layout.data, strategy.ulysses, strategy.tensor),
        pack_layout=Layout(layout.data, 1, ranks // layout.data),
        weights=MeshShape.from_strategy(strategy, ranks),
        experts=MeshShape.of_experts(strategy, ranks) if has_experts else None,
        heads=AttentionHeads.from_degrees(
            query=query, key_value=key_value, tensor=strategy.tensor, ulysses=strategy.ulysses
        ),
    )
