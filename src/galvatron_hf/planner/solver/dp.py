# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Finds the exact optimum of a problem by dynamic programming that keeps every trade-off of time and memory.
A partial stage is a label (F, O - k F, memory) in a layout; `problem.py` defines the symbols. A label is dropped if
another one is no worse even after the most expensive resharding from its layout, or if its bound exceeds the limit.
Memory is counted in bytes. The labels of a stage serve every place where the same sequence of kinds begins.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from galvatron_hf.planner.solver.cut_bounds import NO_STAGES, CutBounds, joined
from galvatron_hf.planner.solver.pareto import dominated, nondominated
from galvatron_hf.planner.solver.problem import Options, SearchProblem, Solution
from galvatron_hf.planner.solver.stage_bounds import Distances, Objective


# Relative distances from the bound at which a solution is searched for, one after the other.
SLACKS_OF_ONE_STAGE = (0.0015, 0.002, 0.003, 0.0045, 0.007, 0.01, 0.015, 0.03, 0.1, 0.3, np.inf)
SLACKS = (0.01, 0.03, 0.1, 0.3, np.inf)
# In the search for a first solution of a pipeline: labels kept after each layer, and allowances of a stage.
BEAM, ALLOWANCES_OF_BEAM = 400, 6


@dataclass(frozen=True, kw_only=True)
class SolverResult:
    """Holds the best solution of one problem and its cost; both are None if nothing fits the budget and the limit. No
    solution costs less than `bound`. `states` is the number of labels that were kept.
    """

    bound: float
    cost: int | None
    solution: Solution | None
    states: int


def solve(problem: SearchProblem, limit: float = np.inf, bounds: CutBounds | None = None) -> SolverResult:
    """Finds the best solution that costs at most `limit`; `bounds` are those of this problem, if they exist already.
    The limit widens from the bound upwards, so that the best solution within the first limit that has one is the
    optimum. With several stages a tight limit saves little work; there a beam search finds a first solution, and its
    cost becomes the limit.
    """
    bounds = bounds or CutBounds(problem)
    search = ExactSearch(problem, bounds)
    slacks, beam = (SLACKS_OF_ONE_STAGE, None) if problem.stages == 1 else (SLACKS, BEAM)
    found = None
    for slack in slacks:
        within = bounds.tighten(slack, limit)
        if bounds.bound == np.inf or bounds.bound > limit:
            break
        found = search.best(within, beam)
        if found is not None or within == limit:
            if beam is not None:
                found = search.best(within if found is None else found[0])
            break
    cost, solution = (None, None) if found is None else found
    return SolverResult(bound=bounds.bound, cost=cost, solution=solution, states=search.states)


@dataclass(frozen=True, kw_only=True)
class Labels:
    """Holds N partial stages of equally many layers: `values` (N, 3), and the option and parent label of each. The
    values are F, O - k F and memory. An increase of any of them makes no path shorter.
    """

    values: np.ndarray
    layout: np.ndarray
    option: np.ndarray
    parent: np.ndarray

    def __len__(self) -> int:
        return len(self.layout)


@dataclass(kw_only=True)
class _Run:
    """Holds the labels of one stage: `steps[k]` after k layers, and `ends` of the whole stage."""

    steps: list[Labels] = field(default_factory=list)
    ends: Labels | None = None


@dataclass(frozen=True, kw_only=True)
class _Task:
    """Describes a stage of `count` layers from `first` on. `distances` holds objectives, each with its distances and
    its largest value within the limit.
    """

    stage: int
    first: int
    count: int
    distances: tuple[tuple[Objective, Distances, float], ...]


class ExactSearch:
    """Finds the best solution of a problem that costs at most a limit; `states` counts the labels that were kept."""

    def __init__(self, problem: SearchProblem, bounds: CutBounds):
        self.problem, self.bounds = problem, bounds
        self.states = 0
        self._beam: int | None = None
        # Stage i counts in F and O - k_i F.
        self._of_stages = [problem.without_warmup(int(warmup)) for warmup in problem.warmup]
        self._resharding = [one.resharding() for one in self._of_stages]
        self._detours = [one.detours()[1] for one in self._of_stages]

    def best(self, limit: float, beam: int | None = None) -> tuple[int, Solution] | None:
        """Returns the cheapest solution of at most `limit` with its cost, or None if there is none. `beam` keeps only
        so many labels with the smallest bounds after each layer. The solution may then not be the cheapest.
        """
        self._beam = beam
        most, limit = limit, limit + 1e-9 * abs(limit) + 1.0 if limit < np.inf else limit  # bounds are rounded
        groups: dict[tuple[int, int, int], list[int]] = {}
        for stage, begin, count in self.bounds.within(limit):
            groups.setdefault((stage, self.bounds.stages.class_of(begin), count), []).append(begin)
        runs: dict[tuple[int, int], list[tuple[int, _Run]]] = {}
        for (stage, first, count), begins in groups.items():
            task = self._task(stage, first, count, begins, limit)
            for index in self._allowances(task):
                run = self._run(task, index)
                if run is not None:
                    for begin in begins:
                        runs.setdefault((stage, begin), []).append((count, run))
        return self._join(runs, most)

    def _task(self, stage: int, first: int, count: int, begins: list[int], limit: float) -> _Task:
        others = [self.bounds.others(stage, begin, count) for begin in begins]
        distances = []
        for objective in self.bounds.objectives:
            most = max(self.bounds.largest(objective, limit, *runs) for runs in others)
            found = Distances.from_bounds(self.bounds.stages, objective, first, stage, count)
            distances.append((objective, found, most))
        return _Task(stage=stage, first=first, count=count, distances=tuple(distances))

    # ---- One stage ----

    def _allowances(self, task: _Task) -> list[int]:
        """Returns the allowances of working memory that a solution within the limit may have in this stage."""
        least = np.stack([distances.least for _, distances, _ in task.distances])  # (objectives, W)
        most = np.array([most for *_, most in task.distances])
        found = np.nonzero((least <= most[:, None]).all(axis=0))[0]
        if self._beam is not None and len(found) > ALLOWANCES_OF_BEAM:
            found = np.sort(found[np.argsort(least[0, found], kind="stable")[:ALLOWANCES_OF_BEAM]])
        return found.tolist()

    def _run(self, task: _Task, index: int) -> _Run | None:
        """Returns the labels of a stage whose peak of working memory is this allowance; None if no stage has it."""
        problem, allowance = self.problem, self.bounds.stages.allowances[index]
        options = self._useful(task, index)
        kinds = problem.kinds[task.first : task.first + task.count]
        reached = any((problem.working[kind, options[kind]] == allowance).any() for kind in options)
        if task.stage == 0:
            reached |= bool((problem.starts.working == allowance).any())
        if task.stage == problem.stages - 1:
            reached |= bool((problem.finishes.working == allowance).any())
        if not reached:
            return None  # a smaller allowance has the same stages
        run = _Run(steps=[self._opened(task.stage, allowance)])
        for done, kind in enumerate(kinds, start=1):
            labels = self._extended(run.steps[-1], task, index, done, int(kind), options[int(kind)])
            if not len(labels):
                return None
            run.steps.append(labels)
        last = task.stage == problem.stages - 1
        run.ends = self._finished(labels, allowance) if last else self._closed(labels, task.stage)
        return run

    def _useful(self, task: _Task, index: int) -> dict[int, np.ndarray]:
        """Returns, by kind, the options that a solution within the limit may have in this stage."""
        problem = self.problem
        kinds = problem.kinds[task.first : task.first + task.count]
        keep = {int(kind): problem.allowed[kind].copy() for kind in np.unique(kinds)}
        for objective, distances, most in task.distances:
            resharding = self.bounds.stages.resharding(objective, np.array([task.stage]))[0]
            reached = (distances.before[:-1, index, :, None] + resharding).min(axis=1)  # (n, Y)
            through = reached + distances.after[1:, index]
            for kind in keep:
                least = through[kinds == kind].min(axis=0)[problem.layout] + distances.costs[index, kind]
                keep[kind] &= np.isfinite(least) & (least <= most)
        return {kind: np.nonzero(kept)[0] for kind, kept in keep.items()}

    def _opened(self, stage: int, allowance: int) -> Labels:
        problem = self._of_stages[stage]
        memory = problem.stage_memory[stage] + allowance
        constant = np.array([problem.stage_first_cost[stage], problem.stage_other_cost[stage], memory])
        if stage > 0:
            one = np.zeros(1, dtype=np.int64)
            return Labels(values=constant[None], layout=one + problem.boundary, option=one - 1, parent=one - 1)
        starts = problem.starts
        values = _values(starts) + constant
        fits = np.nonzero((values[:, 2] <= problem.budget) & (starts.working <= allowance))[0]
        return Labels(values=values[fits], layout=starts.layout[fits], option=fits, parent=np.full(len(fits), -1))

    def _extended(self, labels: Labels, task: _Task, index: int, done: int, kind: int, options: np.ndarray) -> Labels:
        """Returns the labels with one more layer of `kind`, the `done`-th."""
        problem, warmup = self._of_stages[task.stage], self.problem.warmup[task.stage]
        if not len(options) or not len(labels):
            return _no_labels()
        layout = problem.layout[options]
        columns = problem.first_cost[kind], problem.other_cost[kind], problem.memory(task.stage)[kind]
        values = labels.values[:, None] + np.stack(columns, axis=1)[options]
        values[:, :, :2] += self._resharding[task.stage][labels.layout[:, None], layout[None]]
        values = values.reshape(-1, 3)
        layout = np.tile(layout, len(labels))
        good, bound = values[:, 2] <= problem.budget, np.zeros(len(values))
        for objective, distances, most in task.distances:
            again = objective.other * warmup * (not objective.without_warmup)  # the values hold O - k F
            cost = (objective.first + again) * values[:, 0] + objective.other * values[:, 1]
            least = cost + distances.multiplier * (values[:, 2] - problem.budget)
            least = least + distances.after[done, index][layout]
            good &= least <= most
            bound = np.maximum(bound, least)
        kept = np.nonzero(good)[0]
        kept = kept[_best_of_layouts(values[kept], layout[kept], self._detours[task.stage])]
        if self._beam is not None and len(kept) > self._beam:
            kept = np.sort(kept[np.argsort(bound[kept], kind="stable")[: self._beam]])
        self.states += len(kept)
        return Labels(
            values=values[kept],
            layout=layout[kept],
            option=options[kept % len(options)],
            parent=kept // len(options),
        )

    def _closed(self, labels: Labels, stage: int) -> Labels:
        values = labels.values[:, :2] + self._resharding[stage][labels.layout, self.problem.boundary]
        kept = nondominated(values)
        return Labels(values=values[kept], layout=labels.layout[kept], option=np.full(len(kept), -1), parent=kept)

    def _finished(self, labels: Labels, allowance: int) -> Labels:
        problem, finishes = self._of_stages[-1], self._of_stages[-1].finishes
        values = labels.values[:, None] + _values(finishes)
        values[:, :, :2] += self._resharding[-1][labels.layout[:, None], finishes.layout]
        values = values.reshape(-1, 3)
        allowed = np.tile(finishes.working <= allowance, len(labels))
        fits = np.nonzero(allowed & (values[:, 2] <= problem.budget))[0]
        kept = fits[nondominated(values[fits, :2])]
        return Labels(
            values=values[kept, :2],
            layout=labels.layout[kept // len(finishes)],
            option=kept % len(finishes),
            parent=kept // len(finishes),
        )

    # ---- All stages ----

    def _join(self, runs: dict[tuple[int, int], list[tuple[int, _Run]]], limit: float) -> tuple[int, Solution] | None:
        """Joins stages one after the other; at each layer, keeps the rows (see [`CutBounds`]) that none dominates."""
        problem = self.problem
        # rows (N, 4), and for each row its stages so far as (run, first layer, count, index of the closed label)
        fronts: dict[int, tuple[np.ndarray, list]] = {0: (NO_STAGES, [()])}
        for stage in range(problem.stages):
            found: dict[int, list[tuple[np.ndarray, list]]] = {}
            for begin, (rows, history) in fronts.items():
                for count, run in runs.get((stage, begin), []):
                    first, steady = run.ends.values.T
                    paths = problem.path_costs(stage, first, steady + problem.warmup[stage] * first)
                    longer = joined(rows, np.stack([first, *paths], axis=1), problem.later_stage_weights)
                    kept = nondominated(longer)
                    kept = kept[longer[kept, 1:].max(axis=1) <= limit]
                    width = len(run.ends)
                    then = [(*history[index // width], (run, begin, count, int(index % width))) for index in kept]
                    found.setdefault(begin + count, []).append((longer[kept], then))
            fronts = {end: _merged(parts) for end, parts in found.items()}
        rows, history = fronts.get(problem.layers, (np.zeros((0, 4)), []))
        if not len(rows):
            return None
        totals = rows[:, 1:].max(axis=1)
        best = int(np.lexsort((rows[:, 0], totals))[0])
        return int(totals[best]), _traced(history[best])


def _traced(history: tuple) -> Solution:
    """Follows the labels of every stage back to their options."""
    bounds, options, start, finish = [0], [], 0, 0
    for stage, (run, begin, count, index) in enumerate(history):
        finish = int(run.ends.option[index])
        at, own = int(run.ends.parent[index]), []
        for step in range(count, 0, -1):
            own.append(int(run.steps[step].option[at]))
            at = int(run.steps[step].parent[at])
        start = int(run.steps[0].option[at]) if stage == 0 else start
        options += reversed(own)
        bounds.append(begin + count)
    return Solution(bounds=tuple(bounds), options=tuple(options), start=start, finish=finish)


def _best_of_layouts(values: np.ndarray, layout: np.ndarray, detour: np.ndarray) -> np.ndarray:
    """Returns indices of labels not dominated in their layout, or after the largest detour (Y, Y, 2) from another."""
    own = [np.nonzero(layout == one)[0] for one in np.unique(layout)]
    own = [members[nondominated(values[members])] for members in own]
    kept = []
    for members in own:
        free = np.ones(len(members), dtype=bool)
        for others in own:
            if others is members or not free.any():
                continue
            one, other = layout[others[0]], layout[members[0]]
            shifted = values[others].copy()
            shifted[:, :2] += detour[one, other]
            # If two labels dominate each other they are equal, and the lower layout stays.
            free &= ~dominated(values[members], shifted, strictly=bool(one > other))
        kept.append(members[free])
    return np.sort(np.concatenate([np.zeros(0, dtype=np.int64), *kept]))


def _values(end: Options) -> np.ndarray:
    return np.stack([end.first_cost, end.other_cost, end.memory], axis=1)


def _no_labels() -> Labels:
    empty = np.zeros(0, dtype=np.int64)
    return Labels(values=np.zeros((0, 3), dtype=np.int64), layout=empty, option=empty, parent=empty)


def _merged(parts: list[tuple[np.ndarray, list]]) -> tuple[np.ndarray, list]:
    values = np.concatenate([part[0] for part in parts])
    history = [item for part in parts for item in part[1]]
    kept = nondominated(values)
    return values[kept], [history[index] for index in kept]
