# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The predicted peak of a pipeline rank's memory, against that of a schedule that is followed action by action."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from galvatron_hf import ParallelPlan
from galvatron_hf.plan.schedule import Action, PipelineShape, Work, actions
from galvatron_hf.planner.cost.cost_model import CostModels
from galvatron_hf.planner.estimate import estimate_plan, priced_shape
from galvatron_hf.planner.stage_units import StageUnit, stage_units, working_bytes
from planner_cases import random_hardware, random_model, workload


LAYERS, RANKS, ROWS = 6, 4, 8


def random_plan(seed: int, micro_batches: int, schedule: str) -> ParallelPlan:
    """Returns a plan of two stages, whose layers differ in sharding and recompute."""
    draw = random.Random(seed)
    options = dict(micro_batches=micro_batches, precision=workload(1).precision)
    plan = ParallelPlan.uniform(RANKS, LAYERS, pipeline=2, **options)
    of_layers = [
        replace(
            layer,
            sharding=draw.choice(["replicate", "zero2", "zero3"]),
            recompute=draw.choice(["none", "full"]),
        )
        for layer in plan.layers
    ]
    return replace(plan, layers=tuple(of_layers), schedule=schedule)


def followed(units: Sequence[StageUnit], working: Sequence[int], order: Sequence[Action]) -> float:
    """Returns the most bytes during the backwards of a step. The first backward of a unit makes its gradients. When a
    backward has come to the beginning of the stage, it frees what layers share of a micro-batch, and what the head
    keeps if gradients do not reuse it.
    """
    state, gradient, saved, shared = (
        [float(getattr(unit.costs, name)[0]) for unit in units]
        for name in ("state_bytes", "gradient_bytes", "activation_bytes", "shared_bytes")
    )
    kept = [unit.costs.part == "head" and not unit.reuse_count for unit in units]
    shared = [own if is_kept else one for is_kept, own, one in zip(kept, saved, shared, strict=True)]
    held, peak = sum(state) - sum(gradient), 0.0
    missing = list(gradient)
    for action in order:
        if action.work == Work.FORWARD:
            held += sum(saved)
        elif action.work == Work.BACKWARD:
            for index in reversed(range(len(units))):
                begun = held
                held += missing[index] - (saved[index] - shared[index])
                missing[index] = 0.0
                peak = max(peak, max(begun, held) + working[index])
            held -= sum(shared)
    return peak


@pytest.mark.parametrize("schedule, micro_batches", [("gpipe", 2), ("gpipe", 4), ("1f1b", 2), ("1f1b", 4)])
def test_the_peak_is_that_of_a_schedule_that_is_followed(schedule, micro_batches):
    below = 0
    for seed in range(12):
        model = random_model(seed, layers=LAYERS, kinds=3)
        if schedule == "1f1b" and micro_batches == 4:  # gradients have memory of their own
            model = replace(model, kinds=tuple(replace(kind, bias_heads=4) for kind in model.kinds))
        hardware, work = random_hardware(seed, world_size=RANKS, memory_bytes=1 << 40), workload(ROWS)
        plan = random_plan(seed, micro_batches, schedule)
        estimate, shape = estimate_plan(hardware, model, work, plan), priced_shape(hardware, model, work, plan)
        costs = CostModels(hardware, model, work).of_plan(plan, shape)
        for index, order in enumerate(actions(PipelineShape.from_plan(plan), micro_batches)):
            units = stage_units(costs, plan, shape, index)
            working = [working_bytes(unit, plan, shape) for unit in units]
            wanted = followed(units, working, order) + float(costs.stage_bytes(shape)[index])
            assert estimate.peak_bytes[index] == pytest.approx(wanted, abs=8 * len(units))  # each is rounded
            assert estimate.peak_bytes[index] <= estimate.memory_bytes[index]
            below += estimate.peak_bytes[index] < estimate.memory_bytes[index]
    assert below
