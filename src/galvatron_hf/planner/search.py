# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The search for a plan: every pipeline degree and micro-batch count is a branch, the most promising first."""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from galvatron_hf.plan import ParallelPlan
from galvatron_hf.plan.pipeline_shape import PipelineShape, orders
from galvatron_hf.plan.validation import divisors
from galvatron_hf.planner.cost.cost_model import CostModel, Workload
from galvatron_hf.planner.cost.step_shape import StepShape
from galvatron_hf.planner.priced_problem import PICOSECONDS, OptionCosts, PricedProblem, UnsolvedProblem
from galvatron_hf.planner.solver.cut_bounds import CutBounds, least_memory
from galvatron_hf.planner.solver.dp import solve
from galvatron_hf.planner.solver.problem import Choice, Score, score
from galvatron_hf.planner.space import Limits, layer_strategies, schedules, vocabulary_strategies
from galvatron_hf.profiler.profiles.hardware import HardwareProfile
from galvatron_hf.profiler.profiles.model import ModelProfile
from galvatron_hf.utils.progress import Step, progress_bar


if TYPE_CHECKING:
    from galvatron_hf.planner.report.report import Report

GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What a plan is predicted to cost; nothing of it was measured.

    Attributes:
        plan ([`ParallelPlan`]): the plan.
        step_ms (`float`): of one optimizer step.
        samples_per_second (`float`): rows of the global batch over it.
        memory_bytes (`tuple[int, ...]`): at most on a rank of each rank list, which are the stages but where
            interleaved ones share their ranks.
    """

    plan: ParallelPlan
    step_ms: float
    samples_per_second: float
    memory_bytes: tuple[int, ...]

    def noted(self, workload: Workload) -> ParallelPlan:
        """The plan with what was predicted of it in its `meta`, beside which training prints what it measures."""
        predicted = {
            "step_ms": self.step_ms,
            "memory_bytes": list(self.memory_bytes),
            "rows": workload.rows,
            "length": workload.length,
        }
        return replace(self.plan, meta={**self.plan.meta, "predicted": predicted})


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """
    Attributes:
        best ([`Estimate`], *optional*): the fastest plan that fits; None if none does.
        runners_up (`list[Estimate]`): plans of other pipeline degrees and micro-batch counts that were the best for a
            while.
        least_memory_bytes (`int`, *optional*): where nothing fits, the smallest budget in which something does.
        seconds (`float`): that the search took.
        hardware, model, workload, memory_bytes, limits: what was searched for.
        branches, solved, states (`int`): problems, those of them that their bound did not rule out, and partial
            solutions that were kept in all.
    """

    best: Estimate | None
    runners_up: list[Estimate]
    least_memory_bytes: int | None
    seconds: float
    branches: int
    solved: int
    states: int
    hardware: HardwareProfile
    model: ModelProfile
    workload: Workload
    memory_bytes: int
    limits: Limits

    def explain(self, *, compare: bool = True, progress: bool = False) -> Report:
        """
        Where the time and the memory of the best plan go; to be printed.

        Args:
            compare (`bool`, defaults to `True`): Whether to search the best DDP, ZeRO-3, Megatron and Ulysses plans
                too, which takes about as long once more.
            progress (`bool`, defaults to `False`): Whether to show bars of these searches.

        Raises:
            ValueError: if nothing fits, with the least memory in which something does.
        """
        from galvatron_hf.planner.report.alternatives import alternatives
        from galvatron_hf.planner.report.explain import explain_plan
        from galvatron_hf.planner.report.report import Report

        case = self.hardware, self.model, self.workload
        if self.best is None:
            raise ValueError(self.nothing_fits)
        budget, rounds = self.memory_bytes, self.limits.rounds
        others = alternatives(*case, memory_bytes=budget, rounds=rounds, progress=progress) if compare else []
        return Report(explanation=explain_plan(*case, self.best.plan), others=others, budget=budget)

    @property
    def nothing_fits(self) -> str:
        """Why there is no best plan, in a sentence."""
        return (
            f"No plan fits {gib(self.memory_bytes)} GiB a device: the least is {gib(self.least_memory_bytes)} GiB; "
            "allow so much, more devices, shorter rows or a smaller global batch."
        )


def gib(size: int) -> str:
    """GiB, rounded up to two decimals or three digits, so that whoever allows as much allows `size` bytes."""
    digits = max(2, 2 - math.floor(math.log10(max(size, 1) / GIB)))
    return f"{math.ceil(size * 10**digits / GIB) / 10**digits:.{digits}f}"


def search_plan(
    hardware: HardwareProfile,
    model: ModelProfile,
    workload: Workload,
    *,
    memory_bytes: int | None = None,
    limits: Limits | None = None,
    progress: bool = False,
) -> SearchResult:
    """
    The fastest plan under the cost model, exactly: no plan of the space is predicted to be faster.

    Args:
        hardware ([`HardwareProfile`]), model ([`ModelProfile`]): What was profiled.
        workload ([`Workload`]): The global batch.
        memory_bytes (`int`, *optional*): Budget of a rank; None is the device's memory.
        limits ([`Limits`], *optional*): Of the space.
        progress (`bool`, defaults to `False`): Whether the first rank shows a bar.

    Raises:
        ValueError: for limits within which there is no plan.
    """
    begun = time.perf_counter()
    limits = limits or Limits()
    budget = hardware.memory_bytes if memory_bytes is None else memory_bytes
    world = hardware.world_size
    _check_limits(limits, world, len(model.layers), workload.rows)
    drafts = list(_drafts(hardware, model, workload, limits))
    if not drafts:
        raise ValueError(
            f"No plan for {world} devices and {workload.rows} rows is within the limits; allow more degrees, or "
            "profile the model with more of them."
        )
    with progress_bar(len(drafts), progress) as step:
        found, solved, states = _best_first(drafts, budget, step)
    estimates = [_estimate(problem, choice, workload, model) for _, problem, choice in found.values()]
    estimates.sort(key=lambda estimate: estimate.step_ms)
    return SearchResult(
        best=estimates[0] if estimates else None,
        runners_up=estimates[1:],
        least_memory_bytes=None if estimates else _least_memory(drafts, budget),
        seconds=time.perf_counter() - begun,
        branches=len(drafts),
        solved=solved,
        states=states,
        hardware=hardware,
        model=model,
        workload=workload,
        memory_bytes=budget,
        limits=limits,
    )


def _best_first(
    drafts: list[UnsolvedProblem], budget: int, step: Step
) -> tuple[dict[tuple, tuple[int, PricedProblem, Choice]], int, int]:
    """Problems that were the best for a while, the last one of all; how many were solved; and partial solutions kept.

    A quick bound says when a problem's real bound is due, and that when it has to be solved.
    """
    numbers = itertools.count()
    queue = [(draft.bound, next(numbers), draft, None, None) for draft in drafts]
    heapq.heapify(queue)
    limit: float = np.inf
    found: dict[tuple, tuple[int, PricedProblem, Choice]] = {}
    solved = states = 0
    while queue:
        bound, _, draft, problem, bounds = heapq.heappop(queue)
        if bound > limit:
            break
        if problem is None:
            problem = draft.problem(budget)
            bounds = CutBounds(problem.branch)
            heapq.heappush(queue, (max(bound, bounds.bound), next(numbers), draft, problem, bounds))
            step("searching for a plan")
            continue
        solution = solve(problem.branch, limit, bounds)
        solved, states = solved + 1, states + solution.states
        if solution.cost is None:
            continue
        if problem.is_priced(solution.choice):
            limit, shape = solution.cost - 1, problem.shape
            found[shape.pipeline, shape.micro_batches, shape.rounds] = solution.cost, problem, solution.choice
            continue
        for part in draft.parts(budget):
            bounds = CutBounds(part.branch)
            heapq.heappush(queue, (max(solution.cost, bounds.bound), next(numbers), draft, part, bounds))
    return found, solved, states


def estimate_plan(hardware: HardwareProfile, model: ModelProfile, workload: Workload, plan: ParallelPlan) -> Estimate:
    """
    What the cost model says of a plan, whether it fits or not.

    Raises:
        ValueError: for a plan that the cost model cannot price.
    """
    if plan.world_size != hardware.world_size:
        raise ValueError(
            f"The plan is for {plan.world_size} devices and the hardware profile has {hardware.world_size}; make a "
            f"plan for {hardware.world_size}, or profile {plan.world_size}."
        )
    _check_priced(plan)
    if plan.num_layers != len(model.layers):
        raise ValueError(
            f"The plan has {plan.num_layers} layers and the model {len(model.layers)}; make a plan for "
            f"{len(model.layers)} layers."
        )
    shape = StepShape.of(workload, plan)
    _check_rounds(plan, shape, model)
    strategies = list(dict.fromkeys(plan.layers))
    costs = CostModel(hardware, model, workload, len(plan.stages[0].ranks), shape.rows, late_head=shape.late_head)
    draft = UnsolvedProblem(OptionCosts(costs, shape.pipeline, strategies, [plan.embedding], [plan.head]), shape)
    problem = draft.problem(hardware.memory_bytes, prune=False)
    bounds = (0, *(stage.layers[1] for stage in plan.stages[: shape.pipeline]))
    options = tuple(strategies.index(layer) for layer in plan.layers[: len(draft.kinds)])
    return _estimate(problem, Choice(bounds=bounds, options=options, start=0, finish=0), workload, model, plan)


def _check_priced(plan: ParallelPlan) -> None:
    """Raises ValueError for what a plan may say and the cost model does not know."""
    if plan.schedule == "zero_bubble" and len(plan.stages) > 1:
        raise ValueError("schedule 'zero_bubble' has no price yet; give a plan with '1f1b', 'interleaved' or 'gpipe'.")
    if len({len(stage.ranks) for stage in plan.stages}) > 1:
        raise ValueError("stages of unequal size have no price yet; give each the same number of ranks.")
    if list(itertools.chain(*plan.rank_groups)) != list(range(plan.world_size)):
        raise ValueError(
            f"stages on the ranks {plan.rank_groups} have no price yet; give them consecutive ranks, from 0 on."
        )
    for name in ("context", "expert"):
        degree = max(getattr(layer, name) for layer in plan.layers)
        if degree > 1:
            raise ValueError(f"{name}={degree} has no price yet; give a plan with {name}=1.")
    if plan.sequence_groups is not None:
        raise ValueError("sequence_groups have no price yet; give a plan without them.")


def _check_rounds(plan: ParallelPlan, shape: StepShape, model: ModelProfile) -> None:
    """Raises ValueError unless all rounds of interleaved stages are alike and the schedule can order them."""
    if shape.rounds == 1:
        return
    if shape.pipeline == 1:
        raise ValueError("stages that are all on the same ranks have no price; give one stage of all layers.")
    if shape.micro_batches < shape.pipeline or not orders(PipelineShape.from_plan(plan), shape.micro_batches):
        have = "" if shape.micro_batches == plan.micro_batches else ", for which alone there are rows,"
        raise ValueError(
            f"micro_batches={shape.micro_batches}{have} interleaved on {shape.pipeline} rank lists have no price; "
            f"give a multiple of {shape.pipeline}, and rows."
        )
    share = plan.num_layers // shape.rounds
    parts = range(0, plan.num_layers, share)
    cuts = {
        tuple(number - start for stage in plan.stages[first : first + shape.pipeline] for number in stage.layers)
        for start, first in zip(parts, range(0, len(plan.stages), shape.pipeline), strict=False)
    }
    layers = {(plan.layers[start : start + share], tuple(model.layers[start : start + share])) for start in parts}
    if plan.num_layers % shape.rounds or len(cuts) > 1 or len(layers) > 1:
        raise ValueError(
            f"The {shape.rounds} rounds of interleaved stages differ, which has no price yet; give each the same cuts "
            "and strategies."
        )


def _pipelines(world: int, layers: int) -> list[int]:
    """Degrees that give every rank list equally many ranks, and a layer."""
    return [degree for degree in divisors(world) if degree <= layers]


def _check_limits(limits: Limits, world: int, layers: int, rows: int) -> None:
    """Raises ValueError for degrees and counts that no plan has: nobody shall believe that they were looked at."""
    degrees = _pipelines(world, layers)
    if limits.pipeline is not None and not (limits.pipeline and set(limits.pipeline) <= set(degrees)):
        raise ValueError(
            f"pipeline={limits.pipeline}: {world} devices and {layers} layers make pipelines of "
            f"{', '.join(map(str, degrees))} rank lists only; give some of these."
        )
    if limits.micro_batches is not None and max(limits.micro_batches, default=rows + 1) > rows:
        raise ValueError(
            f"micro_batches={limits.micro_batches}: a step of {rows} rows has 1 to {rows} of them; give some of these."
        )


def _drafts(
    hardware: HardwareProfile, model: ModelProfile, workload: Workload, limits: Limits
) -> Iterator[UnsolvedProblem]:
    """Every way to cut the step, with the strategies that its stages and micro-batches allow."""
    world = hardware.world_size
    for pipeline in _pipelines(world, len(model.layers)):
        if limits.pipeline is not None and pipeline not in limits.pipeline:
            continue
        ranks = world // pipeline
        endings = _ends(vocabulary_strategies(ranks, model, limits), model.tied)
        every = CostModel(hardware, model, workload, ranks, workload.rows)
        all_strategies = layer_strategies(ranks, model, limits)
        for rows, counts in micro_batchings(workload.rows):
            counts = [count for count in counts if limits.micro_batches is None or count in limits.micro_batches]
            if not counts:
                continue
            for filled in _row_counts(rows, ranks):
                # Every data rank has a row of each micro-batch; rows are added for nothing less.
                strategies = [one for one, data in all_strategies if data <= filled]
                if not strategies or (filled > rows and all(data != filled for _, data in all_strategies)):
                    continue
                ways = list(schedules(pipeline, counts, model.layers, limits))
                for ends in endings:
                    prices = OptionCosts(every.with_rows(filled), pipeline, strategies, ends, ends)
                    for schedule, rounds, count in ways:
                        shape = StepShape(
                            pipeline=pipeline, micro_batches=count, schedule=schedule, rows=filled, rounds=rounds
                        )
                        draft = UnsolvedProblem(prices, shape, added=filled > rows)
                        yield from draft.alike() if limits.alike else [draft]


def _least_memory(drafts: list[UnsolvedProblem], budget: int) -> int:
    """Bytes of the smallest budget in which one of them has a solution."""
    found = np.inf
    least = [least_memory(draft.problem(budget).branch) for draft in drafts]
    for index in np.argsort(least, kind="stable"):
        if least[index] >= found:
            break
        draft, own = drafts[index], least[index]
        if draft.added:
            own = min(least_memory(part.branch) for part in draft.parts(budget))
        found = min(found, own)
    return int(found)


def micro_batchings(rows: int) -> list[tuple[int, range]]:
    """Rows of the largest micro-batch, and the numbers of micro-batches that have such a one."""
    sizes = sorted({-(-rows // count) for count in range(1, rows + 1)}, reverse=True)
    return [(size, range(-(-rows // size), -(-rows // (size - 1)) if size > 1 else rows + 1)) for size in sizes]


def _row_counts(rows: int, ranks: int) -> list[int]:
    """Rows with those that are added: none, or up to a data degree that is larger."""
    return [rows] + [degree for degree in divisors(ranks) if degree > rows]


def _ends(vocabulary: list, tied: bool) -> list[list]:
    """Vocabulary strategies that may go together: tied ones have the same tensor degree."""
    if not tied:
        return [vocabulary]
    by_tensor = itertools.groupby(vocabulary, key=lambda strategy: strategy.tensor)
    return [list(group) for _, group in by_tensor]


def _estimate(
    problem: PricedProblem, choice: Choice, workload: Workload, model: ModelProfile, plan: ParallelPlan | None = None
) -> Estimate:
    found: Score = score(problem.branch, choice)
    if found.cost <= 0:
        raise ValueError("The profiles say that a step takes no time at all; profile the machine and the model.")
    step_ms = found.cost / PICOSECONDS
    return Estimate(
        plan=plan or problem.plan(choice, workload, model),
        step_ms=step_ms,
        samples_per_second=1e3 * workload.rows / step_ms,
        memory_bytes=found.memory,
    )
