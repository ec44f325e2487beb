# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Where the predicted time and memory of a plan go: by stage, by what they are for, adding up to the estimate."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from galvatron_hf.plan import ParallelPlan
from galvatron_hf.plan.layout import Layout
from galvatron_hf.planner.cost.cost_model import CostModel, Workload
from galvatron_hf.planner.cost.step_shape import StepShape
from galvatron_hf.planner.cost.strategy_costs import Costs
from galvatron_hf.planner.search import GIB, Estimate, estimate_plan
from galvatron_hf.profiler.profiles.hardware import HardwareProfile
from galvatron_hf.profiler.profiles.model import ModelProfile


if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True, kw_only=True)
class StageParts:
    """
    One stage, or those that interleave on the same ranks, on the rank that has most to do.

    Attributes:
        layers (`tuple[tuple[int, int], ...]`): half-open ranges, one of each round.
        computing_ms, communication_ms, layout_ms (`float`): of a micro-batch, forward and backward: kernels, what they
            wait for, and changes of layout with the sends between stages.
        sync_ms, update_ms (`float`): once in a step: what no computing hides, and the optimizer with adding up
            gradients.
        state_bytes, activation_bytes, working_bytes, boundary_bytes (`int`): weights with gradients and optimizer
            state; of all micro-batches in flight; of the layer or end that needs most; of sends between stages.
    """

    layers: tuple[tuple[int, int], ...]
    computing_ms: float
    communication_ms: float
    layout_ms: float
    sync_ms: float
    update_ms: float
    state_bytes: int
    activation_bytes: int
    working_bytes: int
    boundary_bytes: int

    @property
    def micro_batch_ms(self) -> float:
        """Of one micro-batch in all."""
        return self.computing_ms + self.communication_ms + self.layout_ms

    @property
    def memory_bytes(self) -> int:
        """Of all kinds."""
        return self.state_bytes + self.activation_bytes + self.working_bytes + self.boundary_bytes


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """
    A plan's price in parts: the own time of the stage that has most to do, and what it waits for others.

    Attributes:
        estimate ([`Estimate`]): what is explained.
        stages (`tuple[StageParts, ...]`): in order.
        slowest (`int`): index of the stage that has most to do.
        once_ms (`float`): of a step beside the work of stages.
    """

    estimate: Estimate
    stages: tuple[StageParts, ...]
    slowest: int
    once_ms: float = 0.0

    def step_ms(self) -> dict[str, float]:
        """Milliseconds of a step by what they are for; their sum is the estimate's."""
        count, stage = self.estimate.plan.micro_batches, self.stages[self.slowest]
        own = {
            "computing": count * stage.computing_ms,
            "communication": count * stage.communication_ms + stage.sync_ms + self.once_ms,
            "layout changes": count * stage.layout_ms,
            "optimizer": stage.update_ms,
        }
        return own | {"bubble": max(0.0, self.estimate.step_ms - sum(own.values()))}

    def time_table(self) -> Table:
        """For people."""
        from rich.table import Table

        parts = self.step_ms()
        table = Table(title="Milliseconds of a step (predicted)", title_justify="left")
        for name in (*parts, "all"):
            table.add_column(name, justify="right")
        total = sum(parts.values())
        table.add_row(*(f"{ms:.1f} ({100 * ms / total:.0f}%)" for ms in parts.values()), f"{total:.1f}")
        return table

    def stage_table(self, budget: int) -> Table:
        """For people; `budget` in bytes."""
        from rich.table import Table

        table = Table(title="Stages: ms of a micro-batch, GiB of a rank (predicted)", title_justify="left")
        table.add_column("layers")
        for name in ("computing", "comm.", "layout", "states", "activations", "working", "all GiB", "of budget"):
            table.add_column(name, justify="right")
        for stage in self.stages:
            sizes = (stage.state_bytes, stage.activation_bytes + stage.boundary_bytes, stage.working_bytes)
            table.add_row(
                ", ".join(f"{first}-{last - 1}" for first, last in stage.layers),
                *(f"{ms:.1f}" for ms in (stage.computing_ms, stage.communication_ms, stage.layout_ms)),
                *(f"{size / GIB:.2f}" for size in (*sizes, stage.memory_bytes)),
                f"{100 * stage.memory_bytes / budget:.0f}%",
            )
        return table


def explain_plan(
    hardware: HardwareProfile, model: ModelProfile, workload: Workload, plan: ParallelPlan
) -> Explanation:
    """
    The parts of [`~planner.search.estimate_plan`]'s estimate.

    Raises:
        ValueError: for a plan that the cost model cannot price.
    """
    estimate = estimate_plan(hardware, model, workload, plan)
    shape = StepShape.of(workload, plan)
    costs = CostModel(hardware, model, workload, len(plan.stages[0].ranks), shape.rows, late_head=shape.late_head)
    stages = tuple(_stage(costs, plan, index, shape) for index in range(shape.pipeline))
    pace = [shape.micro_batches * stage.micro_batch_ms + stage.sync_ms + stage.update_ms for stage in stages]
    return Explanation(
        estimate=replace(estimate, plan=replace(plan, micro_batches=shape.micro_batches)),
        stages=stages,
        slowest=int(np.argmax(pace)),
        once_ms=hardware.step_ms,
    )


def _stage(costs: CostModel, plan: ParallelPlan, index: int, shape: StepShape) -> StageParts:
    """Of a rank list: its stage of the first round as often as there are rounds, and the ends."""
    stage, model, ranks = plan.stages[index], costs.model, costs.ranks
    first, last, alone = index == 0, index == shape.pipeline - 1, shape.pipeline == 1
    flight, at_once, count = int(shape.in_flight()[index]), int(shape.at_once()[index]), shape.micro_batches
    layers = [
        _Part(costs.layer(model.layers[layer], [plan.layers[layer]]), shape.rounds, flight, at_once, count)
        for layer in range(*stage.layers)
    ]
    splits = [Layout.from_strategy(plan.layers[layer], ranks) for layer in range(*stage.layers)]
    ends, boundary = [], costs.boundary()
    opened = [Layout.from_vocabulary(plan.embedding.tensor, ranks, costs.rows)] * first
    closed = [Layout.from_vocabulary(plan.head.tensor, ranks, costs.rows)] * last
    start_flight, finish_flight = shape.ends_in_flight()
    if first:
        own = replace(model.embedding, weights=()) if model.tied and last else model.embedding
        price = costs.end(own, [plan.embedding], "embedding")
        ends.append(_Part(price, 1, start_flight, int(start_flight == count), count))
    if last:
        price = costs.end(model.head, [plan.head], "tied" if model.tied and first else "head")
        ends.append(_Part(price, 1, finish_flight, int(finish_flight == count), count))
    parts = [*layers, *ends]

    def total(name: str) -> float:
        return float(sum(part.rounds * getattr(part.costs, name)[0] for part in parts))

    def moved(*chain: Layout) -> float:
        return sum(costs.move_ms(*pair) for pair in zip(chain[:-1], chain[1:], strict=True))

    received_ms, later = float(costs.received_ms(shape.received())[index]), int(shape.later_stages()[index])
    if shape.rounds > 1:
        ends_ms = sum(moved(split, boundary) for split in (*opened, *closed))
        layout = shape.rounds * moved(boundary, *splits, boundary) + ends_ms
    else:
        layout = moved(*(opened or [boundary]), *splits, *(closed or [boundary]))
    communication = total("communication_ms")
    one_layer = plan.num_layers == shape.rounds * shape.pipeline
    needs = dict(alone=alone, stages=shape.stages_at_work, micro_batches=count, one_layer=one_layer)
    share = plan.num_layers // shape.rounds
    return StageParts(
        layers=tuple(tuple(number * share + layer for layer in stage.layers) for number in range(shape.rounds)),
        computing_ms=total("forward_ms") + total("backward_ms") - communication + later * costs.later_stage_ms(),
        communication_ms=communication,
        layout_ms=layout + received_ms,
        sync_ms=total("sync_ms"),
        update_ms=float(sum(part.rounds * part.costs.updating_ms(count)[0] for part in parts)),
        state_bytes=sum(part.state_bytes for part in parts),
        activation_bytes=sum(part.activation_bytes for part in parts),
        working_bytes=max(int(part.costs.working(**needs)[0]) + part.own_bytes for part in parts),
        boundary_bytes=int(shape.boundary_copies()[index]) * costs.boundary_bytes,
    )


@dataclass(frozen=True)
class _Part:
    """A layer or an end: what it costs in each of so many rounds, of which so many micro-batches are in flight.

    In `at_once` of them gradients take the place of activations.
    """

    costs: Costs
    rounds: int
    flight: int
    at_once: int
    micro_batches: int

    @property
    def state_bytes(self) -> int:
        """With what is first activations and then gradients counted once."""
        shared = self.at_once * int(self.costs.shared_bytes(self.micro_batches)[0])
        return self.rounds * int(np.ceil(self.costs.state_bytes[0])) - shared - self.own_bytes

    @property
    def own_bytes(self) -> int:
        return int(self.costs.own_bytes(self.micro_batches)[0])

    @property
    def activation_bytes(self) -> int:
        return self.flight * int(np.ceil(self.costs.activation_bytes[0]))
