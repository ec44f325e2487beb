# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Computes the cost of storing, gathering and reducing the weights of a layer or an end, by their sharding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from galvatron_hf.models.shape import WeightShape
from galvatron_hf.plan import LayerStrategy, VocabularyStrategy
from galvatron_hf.plan.resolved import MeshShape


MOMENT_BYTES = 8  # of an element that is trained: two moments of AdamW
GRADIENT_BYTES = 4  # of an element of a gradient at rest


class WeightCosts(NamedTuple):
    """Holds the costs of one FSDP unit on one rank.

    Attributes:
        count, elements (`int`): number of weights that are trained, and elements of them on the rank.
        gather_ms, reduce_ms (`float`): in each forward or backward, and in each backward.
        gather_once_ms (`float`): once in a step, for weights that stay gathered.
        replica_reduce_ms (`float`): once in a step, all-reduce of gradients of replicated weights, which may begin
            before later gradients exist.
        shard_reduce_ms (`float`): once in a step, all-reduce of gradient shards between replicas, which follows each
            unit's reduction immediately.
        state_bytes, gathered_bytes, reduce_input_bytes, unsharded_gradient_bytes, new_gradient_bytes, bucket_bytes
            (`int`): as in [`~planner.cost.strategy_costs.StrategyCosts`].
        transient_bytes, next_bytes (`int`): weights that are gathered for each use, and those that are gathered ahead
            while the layer before runs.
        message_bytes (`int`): message that gathers sharded weights; 0 on one rank, which copies its own.
        largest_bytes (`int`): largest weight that is trained.
    """

    count: int
    elements: int
    gather_ms: float
    reduce_ms: float
    gather_once_ms: float
    replica_reduce_ms: float
    shard_reduce_ms: float
    state_bytes: int
    gathered_bytes: int
    reduce_input_bytes: int
    unsharded_gradient_bytes: int
    new_gradient_bytes: int
    bucket_bytes: int
    transient_bytes: int
    next_bytes: int
    message_bytes: int
    largest_bytes: int

    def with_experts(self, experts: WeightCosts) -> WeightCosts:
        """Returns the costs of a layer's unit together with that of its experts, which is gathered after the layer's,
        and before the next layer's.
        """
        largest = (
            "reduce_input_bytes",
            "unsharded_gradient_bytes",
            "new_gradient_bytes",
            "bucket_bytes",
            "message_bytes",
            "largest_bytes",
        )
        values = {}
        for name, own, other in zip(WeightCosts.__annotations__, self, experts, strict=True):
            values[name] = max(own, other) if name in largest else own + other
        return WeightCosts(**values | {"next_bytes": self.next_bytes})


def weight_costs(
    weights: Sequence[WeightShape],
    strategy: LayerStrategy | VocabularyStrategy,
    ranks: int,
    *,
    element: int,
    reduced: int,
    ms: Callable[[str, int, int, float, str], float],
    copying_ms: Callable[[float], float],
) -> WeightCosts:
    """Computes the costs of a layer or an end on a stage of `ranks` ranks.

    Args:
        element, reduced (`int`): Bytes of an element in compute, and in gradient reductions.
        ms (`Callable`): Milliseconds of a collective, from kind, ranks, stride, bytes and calibration factor.
        copying_ms (`Callable`): Milliseconds of copying so many bytes into a message or out of it.
    """
    of_experts = [weight for weight in weights if weight.of_experts]
    others = [weight for weight in weights if not weight.of_experts]
    options = dict(sharding=strategy.sharding, element=element, reduced=reduced, ms=ms, copying_ms=copying_ms)
    costs = _unit_costs(others, MeshShape.from_strategy(strategy, ranks), **options)
    if not of_experts:
        return costs
    return costs.with_experts(_unit_costs(of_experts, MeshShape.of_experts(strategy, ranks), **options))


def _unit_costs(
    weights: Sequence[WeightShape],
    mesh: MeshShape,
    *,
    sharding: str,
    element: int,
    reduced: int,
    ms: Callable[[str, int, int, float, str], float],
    copying_ms: Callable[[float], float],
) -> WeightCosts:
    """Computes the costs of one FSDP unit. It copies the rank's shards into a message, and all weights out of it; all
    gradients into the message that reduces them. Alone, a rank copies its weights once and its gradients twice.
    """
    replicas, shards, tensor = mesh.sizes
    sizes = [weight.shard_elements(tensor, 0, shards) for weight in weights]
    trained, elements = [weight for weight in weights if weight.trained], sum(sizes)
    updated = sum(size for weight, size in zip(weights, sizes, strict=True) if weight.trained)
    gather = ms("all_gather", shards, tensor, elements * element, "weights")
    reduce = ms("reduce_scatter", shards, tensor, shards * updated * reduced, "weights")
    unsharded, gradients, replicated = shards * elements, shards * updated, sharding == "replicate"
    gather = (gather + copying_ms((unsharded + elements * (shards > 1)) * element)) * (elements > 0)
    reduce = (reduce + copying_ms((gradients + updated * (shards == 1)) * reduced)) * (updated > 0)
    # Whole weights are used as they are, unless they are cast.
    cast = shards * sum(size for weight, size in zip(weights, sizes, strict=True) if weight.stored_bytes > element)
    factor = "synchronization" if shards == 1 else "weights"
    all_reduce = ms("all_reduce", replicas, tensor * shards, updated * reduced, factor)
    kept = {"replicate": cast, "zero2": unsharded, "zero3": 0}[sharding]
    largest = max((weight.shard_elements(tensor, 0, 1) for weight in trained), default=0)
    at_rest = sum(weight.stored_bytes * size for weight, size in zip(weights, sizes, strict=True))
    return WeightCosts(
        count=len(trained),
        elements=updated,
        gather_ms=gather if sharding == "zero3" else 0.0,
        reduce_ms=0.0 if replicated else reduce,
        gather_once_ms=gather if sharding == "zero2" else 0.0,
        replica_reduce_ms=all_reduce if shards == 1 else 0.0,
        shard_reduce_ms=0.0 if shards == 1 else all_reduce,
        state_bytes=at_rest + updated * (MOMENT_BYTES + GRADIENT_BYTES) + kept * element,
        gathered_bytes=kept * element,
        reduce_input_bytes=0 if replicated else gradients * reduced,
        unsharded_gradient_bytes=0 if replicated else gradients * element,
        # A gradient that is unsharded at rest is cast before it joins the others.
        new_gradient_bytes=largest * (element + (reduced if replicated and element < 4 else 0)),
        bucket_bytes=gradients * reduced if shards == 1 < replicas and len(trained) > 1 else 0,
        transient_bytes=unsharded * element if sharding == "zero3" else 0,
        next_bytes=unsharded * element if sharding == "zero3" else 0,
        message_bytes=0 if replicated or shards == 1 else unsharded * element,
        largest_bytes=largest * element,
    )
