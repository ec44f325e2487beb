# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Predicts the time and memory of a given plan."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

from galvatron_hf.plan import ParallelPlan
from galvatron_hf.plan.pipeline_shape import PipelineShape, can_order
from galvatron_hf.planner.build_problem import PlanProblem, UnsolvedProblem
from galvatron_hf.planner.cost.cost_model import CostModels
from galvatron_hf.planner.cost.step_shape import StepShape
from galvatron_hf.planner.cost.workload import Workload
from galvatron_hf.planner.option_costs import PICOSECONDS, OptionCosts
from galvatron_hf.planner.solver.problem import Solution, score
from galvatron_hf.planner.stage_units import peak_bytes
from galvatron_hf.profiler.profiles.hardware import HardwareProfile
from galvatron_hf.profiler.profiles.model import ModelProfile
from galvatron_hf.utils.drawing import drawing


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Holds the prediction of a plan; nothing in it was measured.

    Attributes:
        plan ([`ParallelPlan`]): the plan.
        step_ms (`float`): time of one optimizer step.
        samples_per_second (`float`): throughput in rows.
        memory_bytes (`tuple[int, ...]`): what a rank of each pipeline rank needs at most; a search holds plans to it.
        peak_bytes (`tuple[int, ...]`): its predicted peak, which is smaller where layers differ; empty if unknown.
        bubble_ms (`float`): time of the step in which the slowest pipeline rank waits for the others.
    """

    plan: ParallelPlan
    step_ms: float
    samples_per_second: float
    memory_bytes: tuple[int, ...]
    bubble_ms: float = 0.0
    peak_bytes: tuple[int, ...] = ()

    def plot(self) -> Any:
        """Draws the plan with its prediction; returns a `Figure` of matplotlib. See
        [`~galvatron_hf.plots.plan_diagram.plan_figure`]. Raises ImportError if matplotlib is missing.
        """
        return drawing("plan_diagram").plan_figure(self.plan, self)

    def plan_with_prediction(self, workload: Workload) -> ParallelPlan:
        """Returns the plan with the prediction in its `meta`; training compares it with what it measures."""
        predicted = {
            "step_ms": self.step_ms,
            "memory_bytes": list(self.peak_bytes or self.memory_bytes),
            "bubble_ms": self.bubble_ms,
            "rows": workload.rows,
            "length": workload.length,
        }
        return replace(self.plan, meta={**self.plan.meta, "predicted": predicted})


def estimate_plan(hardware: HardwareProfile, model: ModelProfile, workload: Workload, plan: ParallelPlan) -> Estimate:
    """
    Predicts time and memory of a plan, whether it fits or not.

    Raises:
        ValueError: if the cost model cannot price the plan.
    """
    estimates = Estimates(CostModels(hardware, model, workload))
    return estimates.with_peaks(estimates.of(plan))


class Estimates:
    """Estimates many plans of one case. Plans of the same strategies and the same shape of the step share what is
    priced.
    """

    def __init__(self, costs: CostModels):
        self.costs = costs
        self._problems: dict[tuple, PlanProblem] = {}

    def of(self, plan: ParallelPlan) -> Estimate:
        """Returns the estimate of a plan without its peaks; raises `ValueError` as [`estimate_plan`] does."""
        shape = priced_shape(self.costs.hardware, self.costs.model, self.costs.workload, plan)
        strategies, ranks = tuple(dict.fromkeys(plan.layers)), len(plan.stages[0].ranks)
        key = shape, ranks, strategies, plan.embedding, plan.head
        if key not in self._problems:
            costs = self.costs.of_plan(plan, shape)
            options = OptionCosts(costs, shape.pipeline, strategies, [plan.embedding], [plan.head])
            budget = self.costs.hardware.memory_bytes
            self._problems[key] = UnsolvedProblem(options, shape).build(budget, prune=False)
        problem = self._problems[key]
        bounds = (0, *(stage.layers[1] for stage in plan.stages[: shape.pipeline]))
        chosen = tuple(strategies.index(layer) for layer in plan.layers[: problem.problem.layers])
        solution = Solution(bounds=bounds, options=chosen, start=0, finish=0)
        return estimate_solution(problem, solution, self.costs.workload, plan)

    def with_peaks(self, estimate: Estimate) -> Estimate:
        """Returns the estimate with the peaks of its plan's ranks."""
        plan = estimate.plan
        shape = StepShape.from_plan(plan, self.costs.workload, self.costs.model)
        return replace(estimate, peak_bytes=peak_bytes(self.costs.of_plan(plan, shape), plan, shape))


def estimate_solution(problem: PlanProblem, solution: Solution, workload: Workload, plan: ParallelPlan) -> Estimate:
    """Returns the estimate of a solution that stands for `plan`."""
    found = score(problem.problem, solution)
    if found.cost <= 0:
        raise ValueError("The profiles predict a step of 0 ms; profile the hardware and the model again.")
    step_ms = found.cost / PICOSECONDS
    busiest = max(first + other for first, other in zip(found.first_cost, found.other_cost, strict=True))
    return Estimate(
        plan=plan,
        step_ms=step_ms,
        samples_per_second=1e3 * workload.rows / step_ms,
        memory_bytes=found.memory,
        bubble_ms=(found.cost - busiest) / PICOSECONDS,
    )


def priced_shape(hardware: HardwareProfile, model: ModelProfile, workload: Workload, plan: ParallelPlan) -> StepShape:
    """Returns the shape of a step; raises `ValueError` if the plan does not fit the profiles or has no price."""
    if plan.world_size != hardware.world_size:
        raise ValueError(
            f"The plan is for {plan.world_size} devices and the hardware profile has {hardware.world_size}; make a "
            f"plan for {hardware.world_size}, or profile {plan.world_size}."
        )
    _check_supported(plan)
    if plan.num_layers != len(model.layers):
        raise ValueError(
            f"The plan has {plan.num_layers} layers and the model {len(model.layers)}; make a plan for "
            f"{len(model.layers)} layers."
        )
    if dict(plan.stacks) != model.stack_sizes:
        raise ValueError(
            f"The plan has the stacks {dict(plan.stacks)} and the model {model.stack_sizes}; give the plan those of "
            "the model."
        )
    if model.tied:
        plan.check_tied()
    for index, (layer, kind) in enumerate(zip(plan.layers, model.layers, strict=True)):
        if layer.expert > 1 and model.kinds[kind].experts is None:
            raise ValueError(f"layer {index} has expert={layer.expert}, but no experts; use expert=1.")
    if plan.layers[0].context > 1 and not model.shares_documents:
        raise ValueError(
            f"The plan has context={plan.layers[0].context}, but the profile of {model.name} does not say that ranks "
            "can share its documents; use context=1, or profile the model again."
        )
    shape = StepShape.from_plan(plan, workload, model)
    if shape.virtual_stages > 1:
        _check_virtual_stages(plan, shape, model)
    return shape


def _check_supported(plan: ParallelPlan) -> None:
    """Raises `ValueError` if the cost model has no formula for a part of the plan."""
    if plan.schedule == "zero_bubble" and len(plan.stages) > 1:
        raise ValueError(
            "The cost model has no formula for schedule 'zero_bubble' yet; use '1f1b', 'interleaved' or 'gpipe'."
        )
    sizes = sorted({len(stage.ranks) for stage in plan.stages})
    if len(sizes) > 1:
        raise ValueError(
            f"The cost model has no formula for stages of {sizes} ranks in one plan yet; give each stage equally many."
        )
    if list(itertools.chain(*plan.rank_groups)) != list(range(plan.world_size)):
        raise ValueError(
            f"The cost model has no formula for stages on the ranks {plan.rank_groups} yet; use consecutive ranks, "
            "from 0 on."
        )
    degrees = sorted({layer.context for layer in plan.layers})
    if len(degrees) > 1:
        raise ValueError(
            f"The cost model has no formula for layers of the context degrees {degrees} in one plan yet; use "
            f"context={degrees[-1]} in every layer."
        )
    if plan.precision is not None and plan.precision.float8:
        raise ValueError('The cost model has no times of products in float8 yet; use precision.compute "bf16".')
    if plan.sequence_groups is not None:
        raise ValueError("The cost model has no formula for sequence_groups yet; leave them out.")


def _check_virtual_stages(plan: ParallelPlan, shape: StepShape, model: ModelProfile) -> None:
    """Raises `ValueError` unless the schedule orders the virtual stages and those of each rank are equal."""
    if shape.pipeline == 1:
        raise ValueError(
            f"The plan has {len(plan.stages)} stages, all on the same ranks; use one stage with all layers."
        )
    if shape.micro_batches < shape.pipeline or not can_order(PipelineShape.from_plan(plan), shape.micro_batches):
        cut = "" if shape.micro_batches == plan.micro_batch_count else f" ({plan.micro_batch_count}, but too few rows)"
        raise ValueError(
            f"The cost model has no formula for micro_batches={shape.micro_batches}{cut} interleaved on "
            f"{shape.pipeline} pipeline ranks; use a multiple of {shape.pipeline}, and at least as many rows."
        )
    share = plan.num_layers // shape.virtual_stages
    begins = range(0, plan.num_layers, share)
    cuts = {
        tuple(number - begin for stage in plan.stages[first : first + shape.pipeline] for number in stage.layers)
        for begin, first in zip(begins, range(0, len(plan.stages), shape.pipeline), strict=False)
    }
    layers = {(plan.layers[begin : begin + share], tuple(model.layers[begin : begin + share])) for begin in begins}
    if plan.num_layers % shape.virtual_stages or len(cuts) > 1 or len(layers) > 1:
        raise ValueError(
            f"The cost model has no formula for {shape.virtual_stages} different virtual stages per rank yet; give "
            "each the same cuts, kinds of layers and strategies."
        )
