# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Lists the layers and ends of a pipeline rank with their costs, and computes the rank's peak of memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from galvatron_hf.plan import ParallelPlan
from galvatron_hf.planner.cost.cost_model import CostModel
from galvatron_hf.planner.cost.step_shape import StepShape
from galvatron_hf.planner.cost.strategy_costs import StrategyCosts
from galvatron_hf.planner.cost.weight_costs import GRADIENT_BYTES, MOMENT_BYTES


@dataclass(frozen=True)
class StageUnit:
    """Describes a layer or an end in each virtual stage; gradients reuse memory of `reuse_count` micro-batches."""

    costs: StrategyCosts
    virtual_stages: int
    in_flight: int
    reuse_count: int
    micro_batches: int

    @property
    def state_bytes(self) -> int:
        """Returns the state, less the memory that gradients reuse from activations."""
        reused = self.reuse_count * int(self.costs.reused_bytes(self.micro_batches)[0])
        return self.virtual_stages * int(np.ceil(self.costs.state_bytes[0])) - reused - self.end_only_bytes

    @property
    def end_only_bytes(self) -> int:
        return int(self.costs.end_only_bytes(self.micro_batches)[0])

    @property
    def activation_bytes(self) -> int:
        return self.in_flight * int(np.ceil(self.costs.activation_bytes[0]))

    @property
    def moment_bytes(self) -> int:
        """Returns the bytes of the optimizer's moments."""
        return self.virtual_stages * int(self.costs.gradient_bytes[0]) * MOMENT_BYTES // GRADIENT_BYTES

    @property
    def gradient_bytes(self) -> int:
        """Returns the bytes of gradients at rest that have memory of their own while layers run."""
        gradients = self.virtual_stages * int(self.costs.gradient_bytes[0])
        if self.freed_bytes:
            return gradients
        reused = self.reuse_count * int(self.costs.reused_bytes(self.micro_batches)[0])
        return max(0, gradients - reused - self.end_only_bytes)

    @property
    def freed_bytes(self) -> int:
        """Returns the head's activations, if they are free before the layers' backward: `state_bytes` are less by them
        and by its gathered weights then, and its gradient is there.
        """
        return self.activation_bytes if self.costs.part == "head" and self.end_only_bytes else 0

    @property
    def held_bytes(self) -> int:
        """Returns the most bytes of state and activations, before or after the unit's backward."""
        return self.state_bytes + self.activation_bytes

    @property
    def falling_bytes(self) -> int:
        """Returns by how many bytes they fall in the backward of a micro-batch. They rise if the first gradient needs
        more than activations free. The ends in a step of one micro-batch have this in their working memory.
        """
        if self.micro_batches == 1 and self.costs.part != "layer":
            return 0
        freed, gradient = self.costs.released_in_backward(self.micro_batches)[0], self.costs.gradient_bytes[0]
        if self.reuse_count:
            return int(np.floor(freed)) - int(np.ceil(gradient))
        return int(np.floor(self.costs.activation_bytes[0]))

    @property
    def shared_bytes(self) -> int:
        """Returns the activations of a micro-batch that stay until the backward comes to the beginning of the stage:
        those that earlier layers still use, and the few of the head unless gradients reuse their memory.
        """
        is_kept = self.costs.part == "head" and not self.reuse_count
        found = self.costs.activation_bytes if is_kept else self.costs.shared_bytes
        return int(np.ceil(found[0]))

    @property
    def own_bytes(self) -> int:
        """Returns the activations of a micro-batch that the unit's backward frees."""
        return max(0, int(np.floor(self.costs.activation_bytes[0])) - self.shared_bytes)


def stage_units(costs: CostModel, plan: ParallelPlan, shape: StepShape, index: int) -> list[StageUnit]:
    """Returns the embedding, the layers and the head of pipeline rank `index`, those that it has."""
    count, model, strategies = shape.micro_batches, costs.model, plan.layers
    is_first, is_last = index == 0, index == shape.pipeline - 1
    priced: dict[tuple, StrategyCosts] = {}

    def of_layer(layer: int) -> StrategyCosts:
        key = costs.layer_kinds[layer], strategies[layer]
        if key not in priced:
            priced[key] = costs.layer(key[0], [strategies[layer]])
        return priced[key]

    layers = [
        StageUnit(
            of_layer(layer),
            virtual_stages=shape.virtual_stages,
            in_flight=int(shape.in_flight()[index]),
            reuse_count=int(shape.reuse_count()[index]),
            micro_batches=count,
        )
        for layer in range(*plan.stages[index].layers)
    ]
    one_unit = model.tied and is_first and is_last
    embedding = replace(model.embedding, weights=()) if one_unit else model.embedding

    def end(costs: StrategyCosts, flight: int) -> StageUnit:
        return StageUnit(
            costs=costs, virtual_stages=1, in_flight=flight, reuse_count=int(flight == count), micro_batches=count
        )

    first_flight, last_flight = shape.ends_in_flight()
    begin = [end(costs.end(embedding, [plan.embedding], "embedding"), first_flight)] if is_first else []
    head = "tied" if one_unit else "head"
    return begin + layers + ([end(costs.end(model.head, [plan.head], head), last_flight)] if is_last else [])


def working_bytes(unit: StageUnit, plan: ParallelPlan, shape: StepShape) -> int:
    """Returns the peak of a unit's temporary memory."""
    found = unit.costs.peak_working_bytes(
        one_stage=shape.pipeline == 1,
        active_stages=shape.active_stages,
        micro_batches=shape.micro_batches,
        one_layer=plan.num_layers == shape.virtual_stages * shape.pipeline,
    )
    return int(found[0]) + unit.end_only_bytes


def peak_bytes(costs: CostModel, plan: ParallelPlan, shape: StepShape) -> tuple[int, ...]:
    """
    Returns the predicted peak of a rank of each pipeline rank. While a layer's backward runs, later layers have freed
    the activations of that micro-batch already. The search holds plans to a bound that is larger where layers differ:
    the most of every layer, and the largest working memory. Interleaved stages, whose backwards alternate, are given
    the bound.
    """
    return tuple(
        int(boundary) + _peak_of_stage(stage_units(costs, plan, shape, index), plan, shape)
        for index, boundary in enumerate(costs.stage_bytes(shape))
    )


def _peak_of_stage(units: list[StageUnit], plan: ParallelPlan, shape: StepShape) -> int:
    """Returns the peak of state, activations and working memory while the backwards of units run."""
    held = np.array([unit.held_bytes for unit in units])
    working = np.array([working_bytes(unit, plan, shape) for unit in units])
    if shape.virtual_stages > 1:
        return int(held.sum() + working.max())
    falling, shared = (np.array([getattr(unit, name) for unit in units]) for name in ("falling_bytes", "shared_bytes"))
    before, after = held + np.minimum(0, falling), held - np.maximum(0, falling)
    peaks = [_running(before, held + working, held - np.maximum(0, falling - shared)).max()]
    if any(unit.costs.part == "tied" for unit in units):  # its backward comes first and last
        peaks.append(before.sum() + working[0])
    if shape.micro_batches > 1 and any(unit.reuse_count for unit in units):
        # In the backward of the second micro-batch all gradients exist from the beginning.
        own = np.array([unit.own_bytes for unit in units])
        peaks.append(_running(after, after + working, after - own).max())
    return int(max(peaks))


def _running(before: np.ndarray, own: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Returns the bytes while the backward of each unit runs: its own, those of the units in front of it, whose
    backward comes later, and those of the units after it, whose backward has ended.
    """
    return np.cumsum(before) - before + own + after.sum() - np.cumsum(after)
