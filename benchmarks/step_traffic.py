# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The collectives of one training step in closed form: their number, kind, group size and bytes.

The bytes of a collective are those of this rank's input to it. On a ring of n ranks each rank sends
`(n - 1) * input` bytes of an all-gather, `(n - 1) / n * input` of a reduce-scatter or an all-to-all, and
`2 * (n - 1) / n * input` of an all-reduce. The input of an all-to-all includes the part that stays on the rank, unless
stated otherwise. Groups of one rank communicate nothing and are not counted.
"""

import itertools
import math
from collections import Counter
from dataclasses import dataclass

from galvatron_hf.models.shape import ModelShape, WeightShape
from galvatron_hf.plan import LayerStrategy, ParallelPlan, Precision
from galvatron_hf.plan.layout import HEAD_CHUNK_TOKENS, Grid, Layout, block_size, sent_tokens
from galvatron_hf.plan.resolved import EndLayouts, ResolvedLayer, ResolvedPlan, ResolvedVocabulary, resolve
from galvatron_hf.plan.supported import unsupported


KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
_FP32, _FP64 = 4, 8


@dataclass(frozen=True, kw_only=True)
class Collective:
    """
    Describes equal collectives of one rank.

    Args:
        source (`str`): Their purpose, one of "weights" (gathers and gradient reductions of sharded and replicated data
            parallelism), "tensor", "megatron_sp", "ulysses", "layout", "embedding", "head", "partial gradients" (of
            weights that tensor ranks hold whole and use in part), "loss" or "gradient norm".
        kind (`str`): One of `KINDS`.
        ranks (`int`): Ranks of the group.
        bytes (`int`): Bytes of this rank's input to one of them.
        count (`int`): Their number.
    """

    source: str
    kind: str
    ranks: int
    bytes: int
    count: int


@dataclass(frozen=True)
class Traffic:
    """
    Holds the collectives of one rank in one batch.

    Args:
        collectives (`tuple[Collective, ...]`): No two of the same source, kind, ranks and bytes.
    """

    collectives: tuple[Collective, ...]

    def count(self, kind: str | None = None, source: str | None = None) -> int:
        """Returns the number of collectives, of one kind and source or of all."""
        return sum(item.count for item in self._chosen(kind, source))

    def bytes(self, kind: str | None = None, source: str | None = None) -> int:
        """Returns the bytes of this rank's inputs to them."""
        return sum(item.count * item.bytes for item in self._chosen(kind, source))

    def sources(self) -> list[str]:
        """Returns the purposes of the collectives, in a fixed order."""
        return list(dict.fromkeys(item.source for item in self.collectives))

    def _chosen(self, kind: str | None, source: str | None) -> list[Collective]:
        return [item for item in self.collectives if kind in (None, item.kind) and source in (None, item.source)]


class _Tally:
    """Adds collectives up by purpose, kind, ranks and bytes."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str, int, int]] = Counter()

    def add(self, source: str, kind: str, ranks: int, size: int, count: int = 1) -> None:
        if ranks > 1 and count > 0:
            self.counts[source, kind, ranks, size] += count

    def traffic(self) -> Traffic:
        return Traffic(
            tuple(
                Collective(source=source, kind=kind, ranks=ranks, bytes=size, count=count)
                for (source, kind, ranks, size), count in self.counts.items()
            )
        )


@dataclass(frozen=True, kw_only=True)
class _MicroBatch:
    """Holds a micro-batch on one rank: its padded `rows` and `length`, and the bytes of elements.

    `element` is an element of an activation, `reduced` one of a gradient reduction.
    """

    resolved: ResolvedPlan
    model: ModelShape
    index: int
    element: int
    reduced: int
    rows: int = 0
    length: int = 0

    @property
    def ends(self) -> EndLayouts:
        return self.resolved.end_layouts(self.rows)

    @property
    def grid(self) -> Grid:
        return Grid(self.rows, self.length)

    def tokens(self, layout: Layout) -> int:
        """Returns rows times positions on the rank under a layout."""
        return self.grid.rectangle(layout, self.index).area


def step_traffic(plan: ParallelPlan, model: ModelShape, *, rows: int, length: int, rank_index: int = 0) -> Traffic:
    """
    Returns the collectives of one rank from a global batch to the norm of its gradients.

    Args:
        plan ([`ParallelPlan`]): A plan of one stage; fp32 if it has no precision.
        model ([`ModelShape`]): The whole model, all of which is trained.
        rows (`int`): Rows of the global batch; micro-batches share them as evenly as possible.
        length (`int`): Positions of a row.
        rank_index (`int`, *optional*, defaults to 0): The rank's index in its stage. Ranks differ if rows do not
            divide evenly, if a layout changes, and in the last piece of the vocabulary.

    Returns:
        [`Traffic`]: All that is sent for the loss, the gradients and their norm; see `docs/communication.md`.

    Raises:
        `ValueError`: if the plan does not run in this release, or not on this model.
    """
    for sentence in unsupported(plan):
        raise ValueError(sentence)
    if len(plan.stages) > 1:
        raise ValueError(
            f"The plan has {len(plan.stages)} pipeline stages, whose traffic has no formula yet; give a plan of one "
            "stage, such as that of a stage's ranks and layers."
        )
    if plan.shares_documents:
        raise ValueError(
            "The plan has ranks share documents of packed rows, and what is sent follows from their lengths; give a "
            "plan with context=1 and without sequence_groups."
        )
    if plan.num_layers != len(model.layers):
        raise ValueError(
            f"The plan has {plan.num_layers} layers and the model has {len(model.layers)}; make a plan for "
            f"{len(model.layers)} layers."
        )
    if any(weight.of_experts for weights in model.layers for weight in weights):
        raise ValueError("The model has experts, and only its router knows how many rows travel; give a dense model.")
    precision = plan.precision or Precision()
    resolved = resolve(plan, heads=[(model.heads, model.kv_heads)] * plan.num_layers, tied=model.tied)
    ranks = resolved.stage_size
    count = min(plan.micro_batch_count, rows)
    tally = _Tally()
    for part in range(count):
        real_rows = (part + 1) * rows // count - part * rows // count
        padded_rows, padded_length = resolved.padded(real_rows, length)
        batch = _MicroBatch(
            resolved=resolved,
            model=model,
            index=rank_index,
            element=_BYTES[precision.compute],
            reduced=_BYTES[precision.reduce],
            rows=padded_rows,
            length=padded_length,
        )
        _embedding(tally, batch)
        for layer in resolved.layers:
            _tensor_regions(tally, batch, layer)
            _ulysses(tally, batch, layer)
            _partial_gradients(tally, batch, layer.strategy, model.layers[layer.index])
        _layout_changes(tally, batch)
        _head(tally, batch)
    _weights(tally, batch, count)
    tally.add("loss", "all_reduce", ranks, _FP32)
    # If every rank has all gradients, it knows their norm.
    parts = (*resolved.layers, resolved.embedding, resolved.head)
    if any(part.weights.tensor > 1 or part.weights.shard > 1 for part in parts):
        tally.add("gradient norm", "all_reduce", ranks, _FP64)
    return tally.traffic()


def _embedding(tally: _Tally, batch: _MicroBatch) -> None:
    """Adds the sum of the lookups of tensor ranks, each in its piece of the vocabulary."""
    tensor, tokens = batch.resolved.embedding.weights.tensor, batch.tokens(batch.ends.embedding)
    tally.add("embedding", "all_reduce", tensor, tokens * batch.model.hidden * batch.element)


def _head(tally: _Tally, batch: _MicroBatch) -> None:
    """Adds gathers of four fp32 statistics per token, chunk by chunk, and the sum of hidden states' gradients."""
    tensor, tokens = batch.resolved.head.weights.tensor, batch.tokens(batch.ends.head)
    whole, rest = divmod(tokens, HEAD_CHUNK_TOKENS)
    tally.add("head", "all_gather", tensor, 4 * _FP32 * HEAD_CHUNK_TOKENS, whole)
    tally.add("head", "all_gather", tensor, 4 * _FP32 * rest, min(rest, 1))
    tally.add("head", "all_reduce", tensor, tokens * batch.model.hidden * batch.element)


def _tensor_regions(tally: _Tally, batch: _MicroBatch, layer: ResolvedLayer) -> None:
    """Adds the collectives of tensor regions: entry and exit in the forward, in the backward and in recompute.

    Recompute stops at the last tensor that the backward needs, which exists before the exit of the last region.
    """
    strategy, tensor, regions = layer.strategy, layer.weights.tensor, batch.model.regions
    resent = strategy.recompute == "full"
    entered = regions * (1 + resent)
    left = regions * (1 + resent) - (resent and not batch.model.saves_after_last_region)
    tokens = batch.tokens(layer.layout)
    piece = tokens * batch.model.hidden * batch.element
    if strategy.megatron_sp:
        tally.add("megatron_sp", "all_gather", tensor, piece, entered + regions)
        tally.add("megatron_sp", "reduce_scatter", tensor, tensor * piece, left + regions)
    else:
        tally.add("tensor", "all_reduce", tensor, piece, left + regions)


def _ulysses(tally: _Tally, batch: _MicroBatch, layer: ResolvedLayer) -> None:
    """Adds exchanges of queries, keys and values from positions to heads, of the output back, and the reverse."""
    times = 3 if layer.strategy.recompute == "full" else 2
    size = batch.tokens(layer.attention_layout) * batch.model.head_dim * batch.element
    heads = layer.heads
    for sent in (heads.query + 2 * heads.sent_key_value, heads.query):
        tally.add("ulysses", "all_to_all", layer.ulysses.size, sent * size, times)


def _partial_gradients(
    tally: _Tally, batch: _MicroBatch, strategy: LayerStrategy, weights: tuple[WeightShape, ...]
) -> None:
    """Adds the fp32 sum of each weight that tensor ranks use in part."""
    for weight in weights:
        if weight.sums_gradient(strategy.tensor, strategy.megatron_sp):
            tally.add("partial gradients", "all_reduce", strategy.tensor, math.prod(weight.shape) * _FP32)


def _layout_changes(tally: _Tally, batch: _MicroBatch) -> None:
    """Adds the changes of layout of hidden states in the forward and of their gradients in the backward."""
    layouts = [batch.ends.embedding, *(layer.layout for layer in batch.resolved.layers), batch.ends.head]
    for before, after in itertools.pairwise(layouts):
        for pair in ((before, after), (after, before)):
            tokens = sent_tokens(*pair, batch.grid)[batch.index]
            tally.add("layout", "all_to_all", block_size(*pair), tokens * batch.model.hidden * batch.element)


def _weights(tally: _Tally, batch: _MicroBatch, micro_batches: int) -> None:
    """Adds the collectives of data parallelism, unit by unit: each layer, embedding, head and final norm."""
    plan, model = batch.resolved, batch.model
    for layer, weights in zip(plan.layers, model.layers, strict=True):
        # zero3 frees a layer after its forward and gathers it again for its backward
        _unit(tally, batch, layer, weights, micro_batches, gathers=2)
    if model.tied:
        _unit(tally, batch, plan.head, (*model.embedding, *model.final_norm, *model.head), micro_batches)
        return
    # The embedding's backward needs no weights; those of head and norm begin right after their forwards.
    _unit(tally, batch, plan.embedding, model.embedding, micro_batches)
    _unit(tally, batch, plan.head, model.head, micro_batches)
    _unit(tally, batch, plan.head, model.final_norm, micro_batches)


def _unit(
    tally: _Tally,
    batch: _MicroBatch,
    owner: ResolvedLayer | ResolvedVocabulary,
    weights: tuple[WeightShape, ...],
    micro_batches: int,
    gathers: int = 1,
) -> None:
    """Adds the collectives of weights that are gathered and reduced together, under zero3 `gathers` times a batch."""
    replicas, shards, tensor = owner.weights.sizes
    elements = sum(weight.shard_elements(tensor, batch.index % tensor, shards) for weight in weights)
    times = {"zero3": gathers * micro_batches, "zero2": 1, "replicate": 0}[owner.strategy.sharding]
    tally.add("weights", "all_gather", shards, elements * batch.element, times)
    reduces = 1 if owner.strategy.sharding == "replicate" else micro_batches
    tally.add("weights", "reduce_scatter", shards, shards * elements * batch.reduced, reduces)
    # Replicas are summed after the last micro-batch; until then each replica adds its own gradients up.
    tally.add("weights", "all_reduce", replicas, elements * batch.reduced)
