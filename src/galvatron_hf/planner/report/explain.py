# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Splits the predicted time and memory of a plan into parts that add up to its estimate."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from galvatron_hf.plan import ParallelPlan
from galvatron_hf.plan.layout import Layout
from galvatron_hf.planner.cost.cost_model import CostModel, CostModels
from galvatron_hf.planner.cost.step_shape import StepShape
from galvatron_hf.planner.cost.workload import Workload
from galvatron_hf.planner.estimate import Estimate, Estimates
from galvatron_hf.planner.stage_units import stage_units, working_bytes
from galvatron_hf.profiler.profiles.hardware import HardwareProfile
from galvatron_hf.profiler.profiles.model import ModelProfile
from galvatron_hf.utils.drawing import drawing


KINDS = ("weights", "gradients", "optimizer states", "activations", "working")  # of memory


@dataclass(frozen=True, kw_only=True)
class StageParts:
    """Holds the parts of one pipeline rank, which has one stage or several virtual stages.

    Attributes:
        layers (`tuple[tuple[int, int], ...]`): half-open range of layers of each stage.
        computing_ms, communication_ms, layout_ms (`float`): forward and backward of one micro-batch: compute,
            collectives, and changes of layout with messages between stages.
        sync_ms, update_ms (`float`): once in a step: gradient reductions that compute does not hide, and the optimizer
            with gradient additions.
        hidden_ms, hidden_sync_ms (`float`): communication that compute hides, in one micro-batch and once in a step.
        forward_ms, backward_ms (`tuple[float, ...]`): forward and backward of one micro-batch in each stage of the
            rank; their sum is `micro_batch_ms`. Half of `layout_ms` counts as forward.
        state_bytes (`int`): weights, gradients and optimizer state.
        activation_bytes (`int`): activations of all micro-batches in flight.
        working_bytes (`int`): maximum of temporary memory over layers and ends.
        boundary_bytes (`int`): hidden states between stages.
        bytes_by_kind (`dict[str, int]`): the same bytes by [`KINDS`]; their sum is `memory_bytes`. "weights" include
            gathered ones, "activations" the messages between stages.
    """

    layers: tuple[tuple[int, int], ...]
    computing_ms: float
    communication_ms: float
    layout_ms: float
    sync_ms: float
    update_ms: float
    hidden_ms: float
    hidden_sync_ms: float
    state_bytes: int
    activation_bytes: int
    working_bytes: int
    boundary_bytes: int
    forward_ms: tuple[float, ...]
    backward_ms: tuple[float, ...]
    bytes_by_kind: dict[str, int]

    @property
    def micro_batch_ms(self) -> float:
        return self.computing_ms + self.communication_ms + self.layout_ms

    @property
    def memory_bytes(self) -> int:
        return self.state_bytes + self.activation_bytes + self.working_bytes + self.boundary_bytes


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Splits an estimate: the time of the slowest pipeline rank, and its wait for the others. `stages` are by pipeline
    rank, and `slowest` is an index of them. `once_ms` is the constant time of a step.
    """

    estimate: Estimate
    stages: tuple[StageParts, ...]
    slowest: int
    once_ms: float = 0.0

    def plot_memory(self, budget: int | None = None) -> Any:
        """Draws the memory of ranks by kind; returns a `Figure` of matplotlib. See
        [`~galvatron_hf.plots.memory.memory_figure`]. Raises ImportError if matplotlib is missing.
        """
        return drawing("memory").memory_figure(self, budget)

    def plot_timeline(self) -> Any:
        """Draws the predicted step; returns a `Figure` of matplotlib. See
        [`~galvatron_hf.plots.timeline.timeline_figure`]. Raises ImportError if matplotlib is missing.
        """
        return drawing("timeline").timeline_figure(drawing("spans").predicted_timeline(self))

    @property
    def hidden_ms(self) -> float:
        """Returns the milliseconds of weights' and gradients' messages in a step that compute hides."""
        stage = self.stages[self.slowest]
        return self.estimate.plan.micro_batch_count * stage.hidden_ms + stage.hidden_sync_ms

    def step_ms(self) -> dict[str, float]:
        """Returns the milliseconds of a step by purpose; their sum is the estimate's."""
        count, stage = self.estimate.plan.micro_batch_count, self.stages[self.slowest]
        own = {
            "computing": count * stage.computing_ms,
            "communication": count * stage.communication_ms + stage.sync_ms + self.once_ms,
            "layout changes": count * stage.layout_ms,
            "optimizer": stage.update_ms,
        }
        return own | {"bubble": max(0.0, self.estimate.step_ms - sum(own.values()))}


def explain_plan(
    hardware: HardwareProfile, model: ModelProfile, workload: Workload, plan: ParallelPlan
) -> Explanation:
    """Splits the estimate of [`~planner.estimate.estimate_plan`] into parts; raises `ValueError` in the same cases."""
    estimates = Estimates(CostModels(hardware, model, workload))
    estimate = estimates.with_peaks(estimates.of(plan))
    shape = StepShape.from_plan(plan, workload, model)
    costs = estimates.costs.of_plan(plan, shape)
    stages = tuple(_Stage(costs, plan, shape, index).parts() for index in range(shape.pipeline))
    totals = [shape.micro_batches * stage.micro_batch_ms + stage.sync_ms + stage.update_ms for stage in stages]
    return Explanation(
        estimate=replace(estimate, plan=replace(plan, micro_batches=shape.micro_batches)),
        stages=stages,
        slowest=int(np.argmax(totals)),
        once_ms=hardware.step_ms,
    )


class _Stage:
    """Computes the parts of one pipeline rank: its first stage times its virtual stages, and the model's ends."""

    def __init__(self, costs: CostModel, plan: ParallelPlan, shape: StepShape, index: int):
        self.costs, self.plan, self.shape, self.index = costs, plan, shape, index
        self.first, self.last = index == 0, index == shape.pipeline - 1
        self.layers = range(*plan.stages[index].layers)
        self.units = stage_units(costs, plan, shape, index)

    def parts(self) -> StageParts:
        plan, shape, costs, count = self.plan, self.shape, self.costs, self.shape.micro_batches
        share, communication = plan.num_layers // shape.virtual_stages, self._total("communication_ms")
        positions_ms = int(shape.stages_after_first()[self.index]) * costs.later_stage_ms()
        begins = range(0, shape.virtual_stages * share, share)
        layout_ms = self._resharding_ms() + float(costs.received_ms(shape.receives())[self.index])
        working = max(working_bytes(unit, plan, shape) for unit in self.units)
        boundary = int(costs.stage_bytes(shape)[self.index])
        return StageParts(
            layers=tuple(tuple(begin + layer for layer in plan.stages[self.index].layers) for begin in begins),
            computing_ms=self._total("forward_ms") + self._total("backward_ms") - communication + positions_ms,
            communication_ms=communication,
            layout_ms=layout_ms,
            sync_ms=self._total("sync_ms"),
            hidden_ms=self._total("hidden_ms"),
            hidden_sync_ms=self._total("hidden_sync_ms"),
            update_ms=float(sum(unit.virtual_stages * unit.costs.total_update_ms(count)[0] for unit in self.units)),
            state_bytes=sum(unit.state_bytes for unit in self.units),
            activation_bytes=sum(unit.activation_bytes for unit in self.units),
            working_bytes=working,
            boundary_bytes=boundary,
            forward_ms=self._stage_ms("forward_ms", layout_ms / 2, costs.later_stage_ms()),
            backward_ms=self._stage_ms("backward_ms", layout_ms / 2, 0.0),
            bytes_by_kind=self._bytes_by_kind(working, boundary),
        )

    def _stage_ms(self, name: str, layout_ms: float, positions_ms: float) -> tuple[float, ...]:
        """Returns the milliseconds of one micro-batch in each stage of the rank. `layout_ms` is of all of them,
        `positions_ms` of each that is not the model's first.
        """
        stages = self.shape.virtual_stages
        layers_ms = sum(getattr(unit.costs, name)[0] for unit in self.units if unit.costs.part == "layer")
        found = [float(layers_ms) + layout_ms / stages + positions_ms] * stages
        found[0] -= positions_ms * self.first
        for unit in self.units:
            if unit.costs.part != "layer":  # the embedding is in the first stage, the head in the last
                found[0 if unit.costs.part == "embedding" else -1] += float(getattr(unit.costs, name)[0])
        return tuple(found)

    def _bytes_by_kind(self, working: int, boundary: int) -> dict[str, int]:
        states = sum(unit.state_bytes for unit in self.units)
        moments = sum(unit.moment_bytes for unit in self.units)
        gradients = sum(unit.gradient_bytes for unit in self.units)
        freed = sum(unit.freed_bytes for unit in self.units)
        activations = sum(unit.activation_bytes for unit in self.units) - freed
        parts = (states + freed - moments - gradients, gradients, moments, activations + boundary, working)
        return dict(zip(KINDS, parts, strict=True))

    def _total(self, name: str) -> float:
        return float(sum(unit.virtual_stages * getattr(unit.costs, name)[0] for unit in self.units))

    def _resharding_ms(self) -> float:
        costs, plan, boundary = self.costs, self.plan, self.costs.boundary()

        def chain(*layouts: Layout) -> float:
            return sum(costs.resharding_ms(*pair) for pair in zip(layouts[:-1], layouts[1:], strict=True))

        layers = [Layout.from_strategy(plan.layers[layer], costs.ranks) for layer in self.layers]
        opened = [costs.end_layout(plan.embedding.tensor)] * self.first
        closed = [costs.end_layout(plan.head.tensor)] * self.last
        if self.shape.virtual_stages == 1:
            return chain(*(opened or [boundary]), *layers, *(closed or [boundary]))
        ends_ms = sum(chain(layout, boundary) for layout in (*opened, *closed))
        return self.shape.virtual_stages * chain(boundary, *layers, boundary) + ends_ms
