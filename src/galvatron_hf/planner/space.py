# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The strategies that a layer, the embedding and the head can have on the ranks of one stage: the decision tree.

First the ranks are shared out to tensor, Ulysses and data parallelism (context and expert degrees, which
[`~galvatron_hf.plan.LayerStrategy`] has too, stay 1 until they run), then positions are split over the tensor ranks or
not, then weights are sharded or copied, then activations are kept or computed again. Tensor and Ulysses degrees are
those of the model profile, powers of two; all other degrees are any that divide what they share out. Pipelines are
1F1B, or interleaved in rounds that are alike, of at least as many micro-batches as rank lists: GPipe takes no less
time and keeps all of a step's activations, the zero-bubble schedules have no price yet.
Source: Galvatron (arXiv 2211.13878), section 3.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from galvatron_hf.models.shape import WeightShape
from galvatron_hf.plan import LayerStrategy, VocabularyStrategy
from galvatron_hf.plan.pipeline_shape import PipelineShape, in_a_round, orders
from galvatron_hf.plan.validation import check_int, divisors
from galvatron_hf.profiler.profiles.model import ModelProfile


@dataclass(frozen=True, kw_only=True)
class Limits:
    """
    What the search may use.

    Args:
        tensor (`int`, *optional*): Largest tensor degree; None leaves it to the profile.
        sequence (`tuple[str, ...]`): Of "none", "megatron" and "ulysses", what may split positions.
        sharding (`tuple[str, ...]`): Of "replicate", "zero2" and "zero3".
        hybrid_sharding (`bool`): Whether fewer ranks than all may hold the pieces of a copy.
        recompute (`tuple[str, ...]`): Of "none" and "full".
        pipeline, micro_batches (`tuple[int, ...]`, *optional*): Degrees and counts; None allows all.
        rounds (`int`): Most stages that a rank list of a pipeline has; more than 1 are interleaved.
        alike (`bool`): Whether all layers have the same strategy.

    Raises:
        ValueError: for degrees and counts below 1.
    """

    tensor: int | None = None
    sequence: tuple[str, ...] = ("none", "megatron", "ulysses")
    sharding: tuple[str, ...] = ("replicate", "zero2", "zero3")
    hybrid_sharding: bool = True
    recompute: tuple[str, ...] = ("none", "full")
    pipeline: tuple[int, ...] | None = None
    micro_batches: tuple[int, ...] | None = None
    rounds: int = 4
    alike: bool = False

    def __post_init__(self):
        given = {"tensor": (self.tensor,), "rounds": (self.rounds,)}
        given |= {"pipeline": self.pipeline or (None,), "micro_batches": self.micro_batches or (None,)}
        for name, values in given.items():
            for value in values:
                if value is not None:
                    check_int(name, value, high=sys.maxsize)


def schedules(
    pipeline: int, counts: Sequence[int], layers: Sequence[int], limits: Limits
) -> Iterator[tuple[str, int, int]]:
    """
    The orders in which a pipeline can go through a step, without those that another one is as good as.

    With rows of one number in a micro-batch, more micro-batches take longer and keep no less. But from as many as rank
    lists on a pipeline is priced as it is, and no longer from above; and interleaved ones keep less where fewer of
    them go through a round together.

    Args:
        pipeline (`int`): rank lists.
        counts (`Sequence[int]`): numbers of micro-batches to choose from, rising, of one number of rows each.
        layers (`Sequence[int]`): kind of each layer.
        limits ([`Limits`]): what may be used.

    Yields:
        `tuple`: schedule, stages on each rank list, micro-batches.
    """
    enough = [count for count in counts if count >= pipeline]
    for count in sorted({counts[0], *enough[:1]}):
        yield "1f1b", 1, count
    for rounds in range(2, 1 + min(limits.rounds, len(layers) // pipeline)) if pipeline > 1 else ():
        alike = tuple(layers[: len(layers) // rounds]) * rounds == tuple(layers)
        shape = PipelineShape(schedule="interleaved", rank_group_of_stage=tuple(range(pipeline)) * rounds)
        least = math.inf
        for count in enough if alike else []:
            if orders(shape, count) and in_a_round(pipeline, count) < least:
                least = in_a_round(pipeline, count)
                yield "interleaved", rounds, count


def layer_strategies(ranks: int, model: ModelProfile, limits: Limits) -> list[tuple[LayerStrategy, int]]:
    """
    All strategies of a layer that the profile has figures for, which are those that the model can have.

    Args:
        ranks (`int`): R, of its stage.
        model ([`ModelProfile`]): What is trained.
        limits ([`Limits`]): What may be used.

    Returns:
        `list[tuple[LayerStrategy, int]]`: each with its data degree.
    """
    found = []
    weights = {weight for kind in model.kinds for weight in kind.weights}
    profiled = set.intersection(*(set(kind.saved_bytes) for kind in model.kinds))
    for tensor, megatron_sp, ulysses in sorted(profiled):
        sequence = {"megatron"} if megatron_sp else {"none"} if tensor > 1 else set()
        if not sequence | ({"ulysses"} if ulysses > 1 else set()) <= set(limits.sequence):
            continue
        if ranks % (tensor * ulysses) or tensor > (limits.tensor or ranks):
            continue
        for sharding, shard_degree in _shardings(ranks // tensor, limits, tensor, weights):
            for recompute in limits.recompute:
                strategy = LayerStrategy(
                    tensor=tensor,
                    megatron_sp=megatron_sp,
                    ulysses=ulysses,
                    sharding=sharding,
                    shard_degree=shard_degree,
                    recompute=recompute,
                )
                found.append((strategy, ranks // (tensor * ulysses)))
    return found


def vocabulary_strategies(ranks: int, model: ModelProfile, limits: Limits) -> list[VocabularyStrategy]:
    """All strategies of the embedding or the head that the profile has figures for."""
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
    """Sharding and shard degree, None for all, of weights that `ranks` ranks hold the same `1 / tensor` of.

    A copy may be one piece under "zero3": it is cast for each use, and no cast copy stays. Under "zero2" one stays as
    if replicated, and gradients are reduced beside it.
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
        if sharding == "replicate":
            yield sharding, None
            continue
        yield sharding, None
        if limits.hybrid_sharding:
            yield from ((sharding, degree) for degree in divisors(ranks)[:-1] if degree > 1 or sharding == "zero3")
