# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Searches the fastest plan: one problem per pipeline degree, context degree and micro-batch count, the most promising
first.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import numpy as np

from galvatron_hf.plan.validation import divisors
from galvatron_hf.planner.build_problem import PlanProblem, UnsolvedProblem
from galvatron_hf.planner.cost.cost_model import CostModels
from galvatron_hf.planner.cost.workload import Workload
from galvatron_hf.planner.estimate import Estimate, Estimates, estimate_solution
from galvatron_hf.planner.option_costs import PICOSECONDS
from galvatron_hf.planner.solver.coarse_bound import coarse_bound
from galvatron_hf.planner.solver.cut_bounds import CutBounds
from galvatron_hf.planner.solver.dp import solve
from galvatron_hf.planner.solver.problem import Solution
from galvatron_hf.planner.space import Limits, pipeline_degrees
from galvatron_hf.planner.step_cuts import StepCut, step_cuts
from galvatron_hf.profiler.profiles.hardware import HardwareProfile
from galvatron_hf.profiler.profiles.model import ModelProfile
from galvatron_hf.utils.progress import Step, progress_bar
from galvatron_hf.utils.units import gib_rounded_up


CLOSE = 0.001  # share above a problem's bound within which the bounds of cuts are refined before it is solved
SECONDS_FOR_FEW = 30.0  # for a plan of a small part of the space, if a search is stopped without one


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """Holds the outcome of a search, with what was searched for.

    Attributes:
        best ([`Estimate`], *optional*): the fastest plan that fits; None if none does.
        runners_up (`list[Estimate]`): plans of other pipeline degrees, context degrees and micro-batch counts that
            were the best for a while.
        least_memory_bytes (`int`, *optional*): if nothing fits, the smallest budget with which a plan does.
        bound_ms (`float`, *optional*): if the search was stopped before its end, no plan takes less time.
        cuts, problems, solved, states (`int`): number of ways to cut the step, of the problems of those that their
            bound did not rule out, of the problems that were solved, and of partial solutions that were kept.
        costs ([`CostModels`]): what was priced, for another search of the same case.
    """

    best: Estimate | None
    runners_up: list[Estimate]
    least_memory_bytes: int | None
    bound_ms: float | None
    seconds: float
    cuts: int
    problems: int
    solved: int
    states: int
    hardware: HardwareProfile
    model: ModelProfile
    workload: Workload
    memory_bytes: int
    limits: Limits
    costs: CostModels = field(repr=False, compare=False)

    @property
    def no_plan_message(self) -> str:
        """Explains in one sentence why there is no best plan."""
        if self.bound_ms is not None:
            return f"The search was stopped after {self.seconds:.1f} s without a plan that fits: search longer."
        if self.least_memory_bytes is None:
            return "No plan that fits is as fast as `longest_ms` asks for: allow a longer step."
        return (
            f"No plan fits {gib_rounded_up(self.memory_bytes)} GiB a device: the least is "
            f"{gib_rounded_up(self.least_memory_bytes)} GiB; allow that much, or use more devices, shorter rows or a "
            "smaller global batch."
        )


def search_plan(
    hardware: HardwareProfile,
    model: ModelProfile,
    workload: Workload,
    *,
    memory_bytes: int | None = None,
    limits: Limits | None = None,
    progress: bool = False,
    stop: Callable[[], bool] | None = None,
    costs: CostModels | None = None,
    longest_ms: float = np.inf,
) -> SearchResult:
    """
    Finds the fastest plan under the cost model. The result is exact: no plan of the space is predicted to be faster.
    If it is stopped before, the result has the best plan so far, or that of a small part of the space.

    Args:
        hardware ([`HardwareProfile`]), model ([`ModelProfile`]): The profiles.
        workload ([`Workload`]): The global batch.
        memory_bytes (`int`, *optional*): Memory budget of a rank; None is the device's memory.
        limits ([`Limits`], *optional*): Limits of the space.
        progress (`bool`, defaults to `False`): Whether the first rank shows a bar.
        stop (`Callable`, *optional*): Asked again and again; the search ends when it returns True.
        costs ([`CostModels`], *optional*): Of an earlier search, used if its profiles and workload are these.
        longest_ms (`float`, *optional*): Plans of a longer step are not looked for; if there are no others, the result
            has neither a plan nor the least memory.

    Raises:
        ValueError: if no plan is within the limits.
    """
    begun = time.perf_counter()
    limits = limits or Limits()
    budget = hardware.memory_bytes if memory_bytes is None else memory_bytes
    if budget < 1:
        raise ValueError(f"memory_bytes={budget} is not the memory of a rank: give bytes.")
    _check_limits(limits, hardware.world_size, model, workload)
    if costs is None or (costs.hardware, costs.model, costs.workload) != (hardware, model, workload):
        costs = CostModels(hardware, model, workload)
    cuts = _cuts(costs, limits)
    if not cuts:
        raise ValueError(
            f"No plan for {hardware.world_size} devices and {workload.rows} rows is within the limits; allow more "
            "degrees, or profile the model with more of them."
        )
    with progress_bar(len(cuts), progress) as step:
        known = _known_bounds(costs, limits, budget)
        search = _Search(budget, limits.uniform, stop or (lambda: False), longest_ms, step=step, known=known)
        search.run(cuts)
    costs.bounds[limits, budget] = _largest(costs.bounds.get((limits, budget), {}), search.bounds)
    solutions, ended, any_step = search.solutions, search.stopped_at is None, longest_ms == np.inf
    if not solutions and not ended and any_step:
        solutions = _of_few_plans(costs, limits, budget)
    estimates = [_estimate(costs, *found) for found in solutions]
    estimates.sort(key=lambda estimate: estimate.step_ms)
    return SearchResult(
        best=estimates[0] if estimates else None,
        runners_up=estimates[1:],
        least_memory_bytes=(
            _least_memory(cuts, budget, limits.uniform) if ended and not estimates and any_step else None
        ),
        bound_ms=None if ended else search.stopped_at / PICOSECONDS,
        seconds=time.perf_counter() - begun,
        cuts=len(cuts),
        problems=search.problems,
        solved=search.solved,
        states=search.states,
        hardware=hardware,
        model=model,
        workload=workload,
        memory_bytes=budget,
        limits=limits,
        costs=costs,
    )


def _check_limits(limits: Limits, world_size: int, model: ModelProfile, workload: Workload) -> None:
    """Raises `ValueError` for degrees and counts that no plan can have, so that nobody believes they were searched."""
    layers, rows = len(model.layers), workload.rows
    degrees = pipeline_degrees(world_size, layers)
    if limits.pipeline is not None and not (limits.pipeline and set(limits.pipeline) <= set(degrees)):
        raise ValueError(
            f"pipeline={limits.pipeline}: {world_size} devices and {layers} layers allow only the pipeline degrees "
            f"{', '.join(map(str, degrees))}; use some of these."
        )
    if limits.micro_batches is not None and max(limits.micro_batches, default=rows + 1) > rows:
        raise ValueError(
            f"micro_batches={limits.micro_batches}: a step of {rows} rows has 1 to {rows} micro-batches; use some of "
            "these."
        )
    if limits.context is None:
        return
    if not set(limits.context) <= {1} and not (workload.packed and model.shares_documents):
        reason = f"ranks cannot share documents of {model.name}" if workload.packed else "rows are not packed"
        raise ValueError(f"context={limits.context}: {reason}; use context=(1,).")
    degrees = divisors(world_size)
    if not (limits.context and set(limits.context) <= set(degrees)):
        raise ValueError(
            f"context={limits.context}: {world_size} devices allow only the context degrees "
            f"{', '.join(map(str, degrees))}; use some of these."
        )


def _estimate(known: CostModels, problem: PlanProblem, solution: Solution) -> Estimate:
    """Returns the estimate of a solution, with the peaks of its ranks."""
    plan = problem.plan(solution, known.workload, known.model)
    return Estimates(known).with_peaks(estimate_solution(problem, solution, known.workload, plan))


def _cuts(costs: CostModels, limits: Limits) -> list[StepCut]:
    """Returns the cuts of the step, which searches of one strategy for all layers share with those of several."""
    key = replace(limits, uniform=False)
    if key not in costs.cuts:
        costs.cuts[key] = list(step_cuts(costs, key))
    return costs.cuts[key]


def _of_few_plans(costs: CostModels, limits: Limits, budget: int) -> list[tuple[PlanProblem, Solution]]:
    """Returns what a search finds in a short time within limits that have some plan for almost every case."""
    few = replace(limits, uniform=True, hybrid_sharding=False, virtual_stages=1, context=limits.context or (1,))
    until = time.monotonic() + SECONDS_FOR_FEW
    search = _Search(budget, few.uniform, lambda: time.monotonic() > until)
    search.run(_cuts(costs, few))
    return search.solutions


# A task of the search: it yields bounds, each with another task that may not cost less, or with None, after which it
# waits until no other task has a smaller bound.
_Task = Iterator[tuple[float, "_Task | None"]]


class _Search:
    """Solves the problems of cuts in the order of their bounds, until the next bound exceeds the best cost.

    Attributes:
        solutions (`list`): solutions that were the best for a while, at most one for each cut of the step.
        problems, solved, states (`int`): as in [`SearchResult`].
        stopped_at (`float`, *optional*): bound at which the search was stopped; None if it came to its end.
        known, bounds (`dict`): lower bounds of groups of problems, by their keys: those of wider searches, and those
            that this search has computed.
    """

    def __init__(
        self,
        budget: int,
        uniform: bool,
        stop: Callable[[], bool],
        longest_ms: float = np.inf,
        *,
        step: Step = lambda what: None,
        known: Mapping[tuple, float] = MappingProxyType({}),
    ):
        self.budget, self.uniform, self.stop, self.step, self.known = budget, uniform, stop, step, known
        self.bounds: dict[tuple, float] = {}
        self.limit = float(np.rint(PICOSECONDS * longest_ms))  # a whole cost again, if it is the step of a plan
        self.problems = self.solved = self.states = 0
        self.stopped_at: float | None = None
        self._found: dict[tuple[int, ...], tuple[PlanProblem, Solution]] = {}

    @property
    def solutions(self) -> list[tuple[PlanProblem, Solution]]:
        return list(self._found.values())

    def run(self, cuts: list[StepCut]) -> None:
        """Searches all cuts of the step."""
        numbers = itertools.count()
        queue = [(cut.bound, next(numbers), self._cut(cut)) for cut in cuts]
        heapq.heapify(queue)
        while queue:
            bound, _, task = heapq.heappop(queue)
            if bound > self.limit:
                return
            if self.stop():
                self.stopped_at = bound
                return
            for own, other in task:
                if max(own, bound) <= self.limit and own < np.inf:
                    heapq.heappush(queue, (max(own, bound), next(numbers), task if other is None else other))
                if other is None:
                    break

    def _cut(self, cut: StepCut) -> _Task:
        for key, bound, group in cut.problems(self.budget, self.uniform):
            yield max(bound, self.known.get(key, bound)), self._group(key, group)
        self.step("searching for a plan")

    def _group(self, key: tuple, problems: Iterator[tuple[float, UnsolvedProblem]]) -> _Task:
        """Enters problems that come in the order of their bounds."""
        for bound, unsolved in problems:
            self.bounds.setdefault(key, bound)
            yield bound, None
            self.problems += 1
            yield bound, self._problem(unsolved)

    def _problem(self, unsolved: UnsolvedProblem) -> _Task:
        """Bounds the problem more and more closely, first without the cost of changes of layout, and solves it."""
        if unsolved.memory_bound <= self.budget:
            yield unsolved.closer_bound(self.budget), None
            yield coarse_bound(unsolved.without_moves(self.budget)), None
            yield from self._solved(unsolved, unsolved.build(self.budget))

    def _solved(self, unsolved: UnsolvedProblem, problem: PlanProblem) -> _Task:
        """Solves a problem. If it has padding rows that its solution does not need, it is split."""
        bounds = CutBounds(problem.problem)
        yield bounds.bound, None
        bounds.tighten(CLOSE, self.limit)
        yield bounds.bound, None
        result = solve(problem.problem, self.limit, bounds)
        self.solved, self.states = self.solved + 1, self.states + result.states
        if result.cost is None:
            return
        if problem.is_exact(result.solution):
            self.limit, shape = result.cost - 1, problem.shape
            of_cut = shape.pipeline, shape.context, shape.micro_batches, shape.virtual_stages
            self._found[of_cut] = problem, result.solution
            return
        for part in unsolved.split(self.budget):
            yield result.cost, self._solved(unsolved, part)


def _known_bounds(costs: CostModels, limits: Limits, budget: int) -> dict[tuple, float]:
    """Returns what earlier searches of the case tell of this one. A bound of all plans of a shape holds for those
    within narrower limits and a smaller budget too.
    """
    found: dict[tuple, float] = {}
    for (others, memory_bytes), bounds in costs.bounds.items():
        if others.covers(limits) and memory_bytes >= budget:
            found = _largest(found, bounds)
    return found


def _largest(bounds: dict[tuple, float], others: dict[tuple, float]) -> dict[tuple, float]:
    """Returns lower bounds by their keys, of which two may have the larger one."""
    return bounds | {key: max(bound, bounds.get(key, bound)) for key, bound in others.items()}


def _least_memory(cuts: list[StepCut], budget: int, uniform: bool) -> int:
    """Returns the bytes of the smallest budget with which some problem has a solution. Groups come in the order of
    their bounds, so that few are looked at more closely.
    """
    groups = []
    for number, cut in enumerate(cuts):
        for key, _, group in cut.problems(budget, uniform):
            if key not in cut.memory_bounds:
                next(group, None)
            groups.append((cut.memory_bounds[key], number, key))
    found = np.inf
    for bound, number, key in sorted(groups, key=lambda one: one[:2]):
        if bound >= found:
            break
        group = next(group for own, _, group in cuts[number].problems(budget, uniform) if own == key)
        for _, unsolved in group:
            if unsolved.memory_bound < found:
                found = min(found, unsolved.least_memory(found))
    return int(found)
