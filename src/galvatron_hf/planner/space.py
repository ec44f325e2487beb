# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Spans the search space: strategies of a layer, the embedding and the head on the ranks of one stage, and schedules.
The strategies form a decision tree (Galvatron, arXiv 2211.13878, section 3): degrees of tensor, Ulysses and data
parallelism, then Megatron sequence parallelism, then sharding, then the expert degree, then recompute. All layers of a
plan have the same context degree. Tensor, Ulysses and expert degrees are those of the model profile, powers of two.
All other degrees divide their ranks. Pipelines use 1F1B, or the interleaved schedule with equal virtual stages and at
least as many micro-batches as pipeline ranks. GPipe is never faster than 1F1B and keeps more activations; but under it
a loss of routers needs no forward of its own. Zero-bubble schedules have no cost formula.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from galvatron_hf.models.shape import WeightShape
from galvatron_hf.plan import LayerStrategy, ParallelPlan, VocabularyStrategy
from galvatron_hf.plan.pipeline_shape import PipelineShape, can_order, in_a_round
from galvatron_hf.plan.resolved import MeshShape
from galvatron_hf.plan.validation import check_choice, check_int, divisors
from galvatron_hf.profiler.profiles.model import ModelProfile


_CHOICES = ("sequence", "sharding", "recompute")  # limits that name what is allowed
_NUMBERS = ("pipeline", "micro_batches", "context")  # limits that list degrees or numbers


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits what the search may use; raises `ValueError` if a degree or number is below 1.

    Args:
        tensor (`int`, *optional*): Maximum tensor degree; None means no maximum.
        sequence (`tuple[str, ...]`): Allowed ones of "none", "megatron" and "ulysses" for tensor-parallel and
            sequence-parallel layers.
        sharding (`tuple[str, ...]`): Allowed ones of "replicate", "zero2" and "zero3".
        hybrid_sharding (`bool`): Whether the shards of a replica may be on fewer ranks than all.
        recompute (`tuple[str, ...]`): Allowed ones of "none" and "full".
        pipeline, micro_batches, context (`tuple[int, ...]`, *optional*): Degrees and numbers; None allows all.
        virtual_stages (`int`): Maximum number of stages on each pipeline rank; more than 1 are interleaved.
        uniform (`bool`): Whether all layers have the same strategy.
        expert (`int`, *optional*): Maximum expert degree; None means no maximum.
        zero3_in_pipeline (`bool`): Whether stages of a pipeline may have "zero3", which gathers weights again for each
            micro-batch.
    """

    tensor: int | None = None
    sequence: tuple[str, ...] = ("none", "megatron", "ulysses")
    sharding: tuple[str, ...] = ("replicate", "zero2", "zero3")
    hybrid_sharding: bool = True
    recompute: tuple[str, ...] = ("none", "full")
    pipeline: tuple[int, ...] | None = None
    micro_batches: tuple[int, ...] | None = None
    context: tuple[int, ...] | None = None
    virtual_stages: int = 4
    uniform: bool = False
    expert: int | None = None
    zero3_in_pipeline: bool = True

    def without(self, feature: str) -> Limits:
        """Returns the limits without one of `FEATURES`; raises `ValueError` for another word."""
        check_choice("a forbidden feature", feature, tuple(FEATURES))
        return FEATURES[feature](self)

    def covers(self, other: Limits) -> bool:
        """Returns whether all plans of one shape of the step within other limits are within these."""

        def most_is_as_large(own: int | None, others: int | None) -> bool:
            return own is None or (others is not None and others <= own)

        return (
            most_is_as_large(self.tensor, other.tensor)
            and most_is_as_large(self.expert, other.expert)
            and all(set(getattr(other, name)) <= set(getattr(self, name)) for name in _CHOICES)
            and self.hybrid_sharding >= other.hybrid_sharding
            and self.zero3_in_pipeline >= other.zero3_in_pipeline
            and self.uniform <= other.uniform
        )

    def allows(self, plan: ParallelPlan, model: ModelProfile) -> bool:
        """Returns whether a plan of a model is within the limits."""
        ranks, stages = len(plan.stages[0].ranks), len(plan.rank_groups)
        chosen = (self.pipeline, stages), (self.micro_batches, plan.micro_batch_count)
        chosen += tuple((self.context, layer.context) for layer in set(plan.layers))
        return (
            all(allowed is None or one in allowed for allowed, one in chosen)
            and len(plan.stages) // stages <= self.virtual_stages
            and not (self.uniform and len({replace(layer, expert=1) for layer in plan.layers}) > 1)
            and not (self.uniform and len(set(expert_degrees(plan, model))) > 1)
            and all(self._allows_layer(layer, ranks) for layer in set(plan.layers))
            and all(self._allows_weights(one, ranks, stages) for one in {*plan.layers, plan.embedding, plan.head})
        )

    def _allows_layer(self, layer: LayerStrategy, ranks: int) -> bool:
        sequence = {"megatron"} if layer.megatron_sp else {"none"} if layer.tensor > 1 else set()
        return (
            sequence | ({"ulysses"} if layer.ulysses > 1 else set()) <= set(self.sequence)
            and layer.recompute in self.recompute
            and layer.expert <= (self.expert or ranks)
        )

    def _allows_weights(self, one: LayerStrategy | VocabularyStrategy, ranks: int, stages: int) -> bool:
        alone = one.sharding == "replicate" and one.tensor == ranks  # there is nothing to shard
        return (
            one.tensor <= (self.tensor or ranks)
            and (alone or one.sharding in self.sharding)
            and (self.hybrid_sharding or one.shard_degree is None)
            and not (stages > 1 and one.sharding == "zero3" and not self.zero3_in_pipeline)
        )

    def __post_init__(self):
        for name in (*_CHOICES, *_NUMBERS):  # lists too: searches remember limits, which must be hashable
            if getattr(self, name) is not None:
                object.__setattr__(self, name, tuple(getattr(self, name)))
        given = {"tensor": (self.tensor,), "expert": (self.expert,), "virtual_stages": (self.virtual_stages,)}
        given |= {name: getattr(self, name) or (None,) for name in _NUMBERS}
        for name, values in given.items():
            for value in values:
                if value is not None:
                    check_int(name, value, high=sys.maxsize)


def expert_degrees(plan: ParallelPlan, model: ModelProfile) -> tuple[int, ...]:
    """Returns the expert degree of each layer. A dense layer, which has none, counts as if it had that of the next
    layer with experts, or of the last one.
    """
    own = [
        layer.expert if model.kinds[kind].experts is not None else None
        for layer, kind in zip(plan.layers, model.layers, strict=True)
    ]
    following, found = next((degree for degree in reversed(own) if degree is not None), 1), []
    for degree in reversed(own):
        following = following if degree is None else degree
        found.append(following)
    return tuple(reversed(found))


def _lacking(limits: Limits, field: str, value: str) -> Limits:
    return replace(limits, **{field: tuple(one for one in getattr(limits, field) if one != value)})


# What `Limits.without` leaves out.
FEATURES: dict[str, Callable[[Limits], Limits]] = {
    "pipeline": lambda limits: replace(limits, pipeline=(1,)),
    "interleaved": lambda limits: replace(limits, virtual_stages=1),
    "zero3-in-pipeline": lambda limits: replace(limits, zero3_in_pipeline=False),
    "tensor": lambda limits: replace(limits, tensor=1),
    "ulysses": lambda limits: _lacking(limits, "sequence", "ulysses"),
    "megatron-sp": lambda limits: _lacking(limits, "sequence", "megatron"),
    "context": lambda limits: replace(limits, context=(1,)),
    "expert": lambda limits: replace(limits, expert=1),
    "zero2": lambda limits: _lacking(limits, "sharding", "zero2"),
    "zero3": lambda limits: _lacking(limits, "sharding", "zero3"),
    "hybrid-sharding": lambda limits: replace(limits, hybrid_sharding=False),
    "recompute": lambda limits: replace(limits, recompute=("none",)),
    "mixed-layers": lambda limits: replace(limits, uniform=True),
}


def pipeline_degrees(world_size: int, layers: int) -> list[int]:
    """Returns the degrees that give every pipeline rank equally many ranks and at least one layer."""
    return [degree for degree in divisors(world_size) if degree <= layers]


def context_degrees(ranks: int, model: ModelProfile, packed: bool, limits: Limits) -> list[int]:
    """Returns the numbers of the `ranks` ranks of a stage that may share a document, 1 first; only 1 unless rows are
    `packed` and the model allows it.
    """
    shared = packed and model.shares_documents
    found = divisors(ranks) if shared else [1]
    return [degree for degree in found if limits.context is None or degree in limits.context]


def micro_batch_sizes(rows: int) -> list[tuple[int, range]]:
    """Returns each possible size of the largest micro-batch, with the numbers of micro-batches that have it."""
    sizes = sorted({-(-rows // count) for count in range(1, rows + 1)}, reverse=True)
    return [(size, range(-(-rows // size), -(-rows // (size - 1)) if size > 1 else rows + 1)) for size in sizes]


def schedules(
    pipeline: int, counts: Sequence[int], layers: Sequence[int], limits: Limits, router_loss: bool = False
) -> Iterator[tuple[str, int, int]]:
    """Yields (schedule, stages on each pipeline rank, number of micro-batches) that may be better than all others.
    At a fixed micro-batch size, whose `counts` rise, more micro-batches take longer and need no less memory, with two
    exceptions. The cost of 1F1B is exact only from as many micro-batches as pipeline ranks on. An interleaved schedule
    keeps fewer activations if fewer micro-batches go through a virtual stage together. `layers` are kinds.
    """
    enough = [count for count in counts if count >= pipeline]
    for count in sorted({counts[0], *enough[:1]}):
        yield "1f1b", 1, count
        if router_loss and pipeline > 1:
            yield "gpipe", 1, count
    most = min(limits.virtual_stages, len(layers) // pipeline)
    for virtual in range(2, 1 + most) if pipeline > 1 else ():
        uniform = tuple(layers[: len(layers) // virtual]) * virtual == tuple(layers)
        shape = PipelineShape(schedule="interleaved", pipeline_rank_of_stage=tuple(range(pipeline)) * virtual)
        least = math.inf
        for count in enough if uniform else []:
            if can_order(shape, count) and in_a_round(pipeline, count) < least:
                least = in_a_round(pipeline, count)
                yield "interleaved", virtual, count


def layer_strategies(
    ranks: int, model: ModelProfile, limits: Limits, context: int = 1
) -> list[tuple[LayerStrategy, int]]:
    """Returns all strategies of a layer of one context degree that the model profile has figures for, each with its
    data degree.
    """
    found = []
    weights = {weight for kind in model.kinds for weight in kind.weights}
    of_experts, dense = ([weight for weight in weights if weight.of_experts is one] for one in (True, False))
    profiled = set.intersection(*(set(kind.saved_bytes) for kind in model.kinds))
    for tensor, megatron_sp, ulysses in sorted(profiled):
        sequence = {"megatron"} if megatron_sp else {"none"} if tensor > 1 else set()
        if not sequence | ({"ulysses"} if ulysses > 1 else set()) <= set(limits.sequence):
            continue
        if ranks % (tensor * ulysses * context) or tensor > (limits.tensor or ranks):
            continue
        for sharding, shard_degree in _shardings(ranks // tensor, limits, tensor, dense):
            for expert, recompute in itertools.product(
                _expert_degrees(ranks, tensor, model, limits), limits.recompute
            ):
                strategy = LayerStrategy(
                    tensor=tensor,
                    megatron_sp=megatron_sp,
                    ulysses=ulysses,
                    context=context,
                    sharding=sharding,
                    shard_degree=shard_degree,
                    expert=expert,
                    recompute=recompute,
                )
                mesh = MeshShape.of_experts(strategy, ranks)
                if all(weight.can_be_sharded(mesh.tensor, mesh.shard) for weight in of_experts):
                    found.append((strategy, ranks // (tensor * ulysses * context)))
    return found


def _expert_degrees(ranks: int, tensor: int, model: ModelProfile, limits: Limits) -> list[int]:
    """Returns the expert degrees that the model profile has figures for; 1 for a dense model."""
    profiled = [set(kind.experts.degrees) for kind in model.kinds if kind.experts is not None]
    found = set.intersection(*profiled) if profiled else {1}
    most = limits.expert or ranks
    return sorted(e for e in found if e == 1 or (e <= most and e % tensor == 0 and ranks % e == 0))


def vocabulary_strategies(ranks: int, model: ModelProfile, limits: Limits) -> list[VocabularyStrategy]:
    """Returns all strategies of the embedding or the head that the model profile has figures for."""
    weights = {*model.embedding.weights, *model.head.weights}
    return [
        VocabularyStrategy(tensor=tensor, sharding=sharding, shard_degree=shard_degree)
        for tensor in sorted(set(model.embedding.times) & set(model.head.times))
        if ranks % tensor == 0 and tensor <= (limits.tensor or ranks)
        for sharding, shard_degree in _shardings(ranks // tensor, limits, tensor, weights)
    ]


def _shardings(
    ranks: int, limits: Limits, tensor: int, weights: Iterable[WeightShape]
) -> Iterator[tuple[str, int | None]]:
    """Yields sharding and shard degree (None: all ranks) of weights that `ranks` ranks hold the same `1 / tensor` of.
    A replica may be a single shard under "zero3", which casts the weights for each use and keeps no cast copy. Under
    "zero2" the cast copy stays, as under "replicate", and gradients need a reduction besides.
    """
    if ranks == 1:
        yield "replicate", None
        if "zero3" in limits.sharding:
            yield "zero3", None
        return
    for sharding, degree in _all_shardings(ranks, limits):
        pieces = 1 if sharding == "replicate" else degree or ranks
        if all(weight.can_be_sharded(tensor, pieces) for weight in weights):
            yield sharding, degree


def _all_shardings(ranks: int, limits: Limits) -> Iterator[tuple[str, int | None]]:
    for sharding in limits.sharding:
        yield sharding, None
        if sharding != "replicate" and limits.hybrid_sharding:
            yield from ((sharding, degree) for degree in divisors(ranks)[:-1] if degree > 1 or sharding == "zero3")
