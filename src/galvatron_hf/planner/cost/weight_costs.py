# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""What it costs to hold, gather and reduce the weights of a layer or an end, by how they are sharded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from galvatron_hf.models.shape import WeightShape
from galvatron_hf.plan import LayerStrategy, VocabularyStrategy


STATE_BYTES = 12  # of an element: fp32 master weight and two moments of AdamW
GRADIENT_BYTES = 4  # of an element of a gradient at rest


@dataclass(frozen=True, kw_only=True)
class WeightCosts:
    """Of one rank.

    Attributes:
        count, elements (`int`): weights, and what the rank holds of them.
        gather_ms, reduce_ms (`float`): of each forward or backward, and of each backward.
        gather_once_ms (`float`): of a step, of weights that stay.
        copies_ms, shard_copies_ms (`float`): of a step, the sum of gradients of copies: of whole weights, which may
            begin while others are still to come, and of shards, which follows each unit's reduction at once.
        state_bytes, gathered_bytes, reduction_bytes, whole_gradient_bytes, made_gradient_bytes (`int`): as in
            [`~planner.strategy_costs.Costs`].
        joined_bytes (`int`): of gradients of copies, as they are joined to be summed at once.
        passing_bytes (`int`): of the unit's weights where they are gathered for each use.
        message_bytes (`int`): of the message that gathers sharded weights; one rank copies its own without any.
        largest_bytes (`int`): of its largest weight.
    """

    count: int
    elements: int
    gather_ms: float
    reduce_ms: float
    gather_once_ms: float
    copies_ms: float
    shard_copies_ms: float
    state_bytes: int
    gathered_bytes: int
    reduction_bytes: int
    whole_gradient_bytes: int
    made_gradient_bytes: int
    joined_bytes: int
    passing_bytes: int
    message_bytes: int
    largest_bytes: int


def weight_costs(
    weights: Sequence[WeightShape],
    strategy: LayerStrategy | VocabularyStrategy,
    ranks: int,
    *,
    element: int,
    reduced: int,
    ms: Callable[[str, int, int, float, str], float],
) -> WeightCosts:
    """
    Args:
        weights (`Sequence[WeightShape]`): Of the unit.
        strategy ([`LayerStrategy`] or [`VocabularyStrategy`]): Its tensor degree and sharding.
        ranks (`int`): Of its stage.
        element, reduced (`int`): Bytes of an element as it computes, and as gradients are summed.
        ms (`Callable`): Milliseconds of a collective, from its kind, ranks, stride, bytes, and what it is for.
    """
    tensor, shards = strategy.tensor, strategy.resolved_shard_degree(ranks)
    copies = ranks // tensor // shards
    elements = sum(weight.shard_elements(tensor, 0, shards) for weight in weights)
    gather = ms("all_gather", shards, tensor, elements * element, "weights")
    reduce = ms("reduce_scatter", shards, tensor, shards * elements * reduced, "weights")
    whole, casts, replicated = shards * elements, element < 4, strategy.sharding == "replicate"
    factor = "synchronization" if shards == 1 else "weights"
    copied = ms("all_reduce", copies, tensor * shards, elements * reduced, factor)
    kept = {"replicate": whole if casts else 0, "zero2": whole, "zero3": 0}[strategy.sharding]
    largest = max((weight.shard_elements(tensor, 0, 1) for weight in weights), default=0)
    return WeightCosts(
        count=len(weights),
        elements=elements,
        gather_ms=gather if strategy.sharding == "zero3" else 0.0,
        reduce_ms=0.0 if replicated else reduce,
        gather_once_ms=gather if strategy.sharding == "zero2" else 0.0,
        copies_ms=copied if shards == 1 else 0.0,
        shard_copies_ms=0.0 if shards == 1 else copied,
        state_bytes=elements * (STATE_BYTES + GRADIENT_BYTES) + kept * element,
        gathered_bytes=kept * element,
        reduction_bytes=0 if replicated else whole * reduced,
        whole_gradient_bytes=0 if replicated else whole * element,
        # One that is whole at rest is cast before it joins the others.
        made_gradient_bytes=largest * (element + (reduced if replicated and casts else 0)),
        joined_bytes=whole * reduced if shards == 1 < copies and len(weights) > 1 else 0,
        passing_bytes=whole * element if strategy.sharding == "zero3" else 0,
        message_bytes=0 if replicated or shards == 1 else whole * element,
        largest_bytes=largest * element,
    )
