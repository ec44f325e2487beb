# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The best solution of a branch, exactly: dynamic programming over layers with every trade of time against memory.

Partial stages are labels (A, B, memory) in a layout. One that is no better in anything than another, even if that had
to pay for going on from another layout, is dropped, and so is one whose completion, by the bounds, costs more than
what is known. Memory is not rounded: its quantum is a byte. Equal layers make the labels of one stage serve every
place at which it can begin.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from galvatron_hf.planner.solver.cut_bounds import NO_STAGES, CutBounds, joined
from galvatron_hf.planner.solver.pareto import dominated, nondominated
from galvatron_hf.planner.solver.problem import Choice, SearchProblem
from galvatron_hf.planner.solver.stage_bounds import Distances, Objective


# Of the bound: within so much of it a solution is looked for, one limit after the other.
SLACKS_OF_ONE = (0.001, 0.002, 0.003, 0.0045, 0.007, 0.01, 0.015, 0.03, 0.1, 0.3, np.inf)
SLACKS = (0.01, 0.03, 0.1, 0.3, np.inf)
BEAM = 80  # labels of a stage after each layer, when a first solution of a pipeline is looked for


@dataclass(frozen=True, kw_only=True)
class Solution:
    """
    What a search of one branch ended with.

    Attributes:
        bound (`float`): no solution of the branch costs less.
        cost (`int`, *optional*): of the best solution; None if nothing fits the budget and the limit.
        choice ([`Choice`], *optional*): that solution.
        states (`int`): labels that were kept.
    """

    bound: float
    cost: int | None
    choice: Choice | None
    states: int


def solve(branch: SearchProblem, limit: float = np.inf, bounds: CutBounds | None = None) -> Solution:
    """
    The best solution that costs at most `limit`.

    The limit widens from the bound upwards: whatever is found within a limit is the best there is. With several stages
    a wider limit makes little more work, and a tight one little less: there a first solution is looked for with few
    labels, and what it costs is the limit.

    Args:
        branch ([`SearchProblem`]): The problem.
        limit (`float`): What a solution may cost.
        bounds ([`CutBounds`], *optional*): Of this branch, if they were made before.
    """
    bounds = bounds or CutBounds(branch)
    search = ExactSearch(branch, bounds)
    slacks, beam = (SLACKS_OF_ONE, None) if branch.stages == 1 else (SLACKS, BEAM)
    found = None
    for slack in slacks:
        if bounds.bound == np.inf or bounds.bound > limit:
            break
        within = min(limit, bounds.bound + slack * abs(bounds.bound) if slack < np.inf else np.inf)
        bounds.improve(within)
        found = search.best(within, beam)
        if found is not None or within == limit:
            if beam is not None:
                found = search.best(within if found is None else found[0])
            break
    cost, choice = (None, None) if found is None else found
    return Solution(bound=bounds.bound, cost=cost, choice=choice, states=search.states)


@dataclass(frozen=True, kw_only=True)
class Labels:
    """
    N partial stages after the same number of layers: `values` (N, 3), and how each came about.

    Values are A, B without the stage's k times A, and memory: more of any of them is worse on every path.
    """

    values: np.ndarray
    layout: np.ndarray
    option: np.ndarray
    parent: np.ndarray

    def __len__(self) -> int:
        return len(self.layout)


@dataclass(kw_only=True)
class _Run:
    """The labels of one stage: `steps[k]` after k layers, `ends` what is left of them when it closes."""

    steps: list[Labels] = field(default_factory=list)
    ends: Labels | None = None


@dataclass(frozen=True, kw_only=True)
class _Task:
    """A stage of `count` layers from `first` on, and what the other stages leave for it within the limit.

    Attributes:
        distances (`tuple`): of objectives, each with what it may be at most.
    """

    stage: int
    first: int
    count: int
    distances: tuple[tuple[Objective, Distances, float], ...]


class ExactSearch:
    """
    Finds the best solution of a branch that costs at most a limit.

    Args:
        branch ([`SearchProblem`]): The problem.
        bounds ([`CutBounds`]): Of its stages.

    Attributes:
        states (`int`): labels that were kept so far.
    """

    def __init__(self, branch: SearchProblem, bounds: CutBounds):
        self.branch, self.bounds = branch, bounds
        self.states = 0
        self._beam: int | None = None
        self._of_stages = [branch.beside_waiting(int(ahead)) for ahead in branch.ahead]
        self._moves = [np.stack([one.move_a, one.move_b], axis=2) for one in self._of_stages]
        self._detours = [one.detours()[1] for one in self._of_stages]

    def best(self, limit: float, beam: int | None = None) -> tuple[int, Choice] | None:
        """
        The cheapest solution of at most `limit`; None if there is none.

        Args:
            limit (`float`): What it may cost.
            beam (`int`, *optional*): Labels to go on with after each layer, those with the least bounds; then what is
                found is a solution, but perhaps not the cheapest. None keeps all that can matter.
        """
        self._beam = beam
        most, limit = limit, limit + 1e-9 * abs(limit) + 1.0 if limit < np.inf else limit  # bounds have been rounded
        groups: dict[tuple[int, int, int], list[int]] = {}
        for stage, place, count in self.bounds.within(limit):
            groups.setdefault((stage, self.bounds.stages.class_of(place), count), []).append(place)
        runs: dict[tuple[int, int], list[tuple[int, _Run]]] = {}
        for (stage, first, count), places in groups.items():
            task = self._task(stage, first, count, places, limit)
            for room in range(len(self.bounds.stages.allowances)):
                run = self._run(task, room)
                if run is not None:
                    for place in places:
                        runs.setdefault((stage, place), []).append((count, run))
        return self._join(runs, most)

    def _task(self, stage: int, first: int, count: int, places: list[int], limit: float) -> _Task:
        others = [self.bounds.others(stage, place, count) for place in places]
        distances = []
        for objective in self.bounds.objectives:
            most = max(self.bounds.room(objective, limit, *runs) for runs in others)
            distances.append((objective, Distances.of(self.bounds.stages, objective, first, stage, count), most))
        return _Task(stage=stage, first=first, count=count, distances=tuple(distances))

    # ---- One stage ----

    def _run(self, task: _Task, room: int) -> _Run | None:
        """Labels of a stage whose largest working memory is this allowance; None if there is no such stage."""
        branch, allowance = self.branch, self.bounds.stages.allowances[room]
        keep = self._worthwhile(task, room)
        kinds = branch.kinds[task.first : task.first + task.count]
        exactly = any((branch.working[kind, keep[kind]] == allowance).any() for kind in keep)
        if task.stage == 0:
            exactly |= bool((branch.starts.working == allowance).any())
        if task.stage == branch.stages - 1:
            exactly |= bool((branch.finishes.working == allowance).any())
        if not exactly:
            return None  # a smaller allowance allows as much
        run = _Run(steps=[self._opened(task.stage, allowance)])
        for done, kind in enumerate(kinds, start=1):
            labels = self._extended(run.steps[-1], task, room, done, int(kind), keep[int(kind)])
            if not len(labels):
                return None
            run.steps.append(labels)
        last = task.stage == branch.stages - 1
        run.ends = self._finished(labels, allowance) if last else self._closed(labels, task.stage)
        return run

    def _worthwhile(self, task: _Task, room: int) -> dict[int, np.ndarray]:
        """By kind, the options that some solution within the limit may have in this stage."""
        branch = self.branch
        kinds = branch.kinds[task.first : task.first + task.count]
        keep = {int(kind): branch.allowed[kind].copy() for kind in np.unique(kinds)}
        for objective, distances, most in task.distances:
            moves = self.bounds.stages.moves(objective, np.array([task.stage]))[0]
            reached = (distances.before[:-1, room, :, None] + moves).min(axis=1)  # (n, Y)
            through = reached + distances.behind[1:, room]
            for kind in keep:
                least = through[kinds == kind].min(axis=0)[branch.layout] + distances.costs[room, kind]
                keep[kind] &= np.isfinite(least) & (least <= most)
        return {kind: np.nonzero(kept)[0] for kind, kept in keep.items()}

    def _opened(self, stage: int, allowance: int) -> Labels:
        branch = self._of_stages[stage]
        constant = np.array([branch.stage_a[stage], branch.stage_b[stage], branch.stage_memory[stage] + allowance])
        if stage > 0:
            one = np.zeros(1, dtype=np.int64)
            return Labels(values=constant[None], layout=one + branch.boundary, option=one - 1, parent=one - 1)
        starts = branch.starts
        values = np.stack([starts.a, starts.b, starts.memory], axis=1) + constant
        fits = np.nonzero((values[:, 2] <= branch.budget) & (starts.working <= allowance))[0]
        return Labels(values=values[fits], layout=starts.layout[fits], option=fits, parent=np.full(len(fits), -1))

    def _extended(self, labels: Labels, task: _Task, room: int, done: int, kind: int, options: np.ndarray) -> Labels:
        """One more layer of `kind`, the `done`-th."""
        branch, ahead = self._of_stages[task.stage], self.branch.ahead[task.stage]
        if not len(options) or not len(labels):
            return _none()
        layout = branch.layout[options]
        added = np.stack([branch.a[kind], branch.b[kind], branch.memory(task.stage)[kind]], axis=1)[options]
        values = labels.values[:, None] + added
        values[:, :, :2] += self._moves[task.stage][labels.layout[:, None], layout[None]]
        values = values.reshape(-1, 3)
        layout = np.tile(layout, len(labels))
        good, bound = values[:, 2] <= branch.budget, np.zeros(len(values))
        for objective, distances, most in task.distances:
            again = objective.of_b * ahead * (not objective.waiting)  # of A, which these values have not in B
            cost = (objective.of_a + again) * values[:, 0] + objective.of_b * values[:, 1]
            least = cost + distances.price * (values[:, 2] - branch.budget) + distances.behind[done, room][layout]
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
        values = labels.values[:, :2] + self._moves[stage][labels.layout, self.branch.boundary]
        kept = nondominated(values)
        return Labels(values=values[kept], layout=labels.layout[kept], option=np.full(len(kept), -1), parent=kept)

    def _finished(self, labels: Labels, allowance: int) -> Labels:
        branch, finishes = self._of_stages[-1], self._of_stages[-1].finishes
        ends = np.stack([finishes.a, finishes.b, finishes.memory], axis=1)
        values = labels.values[:, None] + ends
        values[:, :, :2] += self._moves[-1][labels.layout[:, None], finishes.layout]
        values = values.reshape(-1, 3)
        allowed = np.tile(finishes.working <= allowance, len(labels))
        fits = np.nonzero(allowed & (values[:, 2] <= branch.budget))[0]
        kept = fits[nondominated(values[fits, :2])]
        return Labels(
            values=values[kept, :2],
            layout=labels.layout[kept // len(finishes)],
            option=kept % len(finishes),
            parent=kept // len(finishes),
        )

    # ---- All stages ----

    def _join(self, runs: dict[tuple[int, int], list[tuple[int, _Run]]], limit: float) -> tuple[int, Choice] | None:
        """Stages one behind the other: at each layer the rows (see [`CutBounds`]) that are not dominated."""
        branch = self.branch
        # rows (N, 4); of each, its stages so far as (run, place, count, index of the closed label)
        fronts: dict[int, tuple[np.ndarray, list]] = {0: (NO_STAGES, [()])}
        for stage in range(branch.stages):
            found: dict[int, list[tuple[np.ndarray, list]]] = {}
            for place, (rows, history) in fronts.items():
                for count, run in runs.get((stage, place), []):
                    a, b = run.ends.values.T
                    own = np.stack([a, *branch.paths(stage, a, b + branch.ahead[stage] * a)], axis=1)
                    longer = joined(rows, own, branch.waits)
                    kept = nondominated(longer)
                    kept = kept[longer[kept, 1:].max(axis=1) <= limit]
                    width = len(run.ends)
                    then = [(*history[index // width], (run, place, count, int(index % width))) for index in kept]
                    found.setdefault(place + count, []).append((longer[kept], then))
            fronts = {end: _merged(parts) for end, parts in found.items()}
        rows, history = fronts.get(branch.layers, (np.zeros((0, 4)), []))
        if not len(rows):
            return None
        totals = rows[:, 1:].max(axis=1)
        best = int(np.lexsort((rows[:, 0], totals))[0])
        return int(totals[best]), _traced(history[best])


def _traced(history: tuple) -> Choice:
    bounds, options, start, finish = [0], [], 0, 0
    for stage, (run, place, count, index) in enumerate(history):
        finish = int(run.ends.option[index])
        at, own = int(run.ends.parent[index]), []
        for step in range(count, 0, -1):
            own.append(int(run.steps[step].option[at]))
            at = int(run.steps[step].parent[at])
        start = int(run.steps[0].option[at]) if stage == 0 else start
        options += reversed(own)
        bounds.append(place + count)
    return Choice(bounds=tuple(bounds), options=tuple(options), start=start, finish=finish)


def _best_of_layouts(values: np.ndarray, layout: np.ndarray, detour: np.ndarray) -> np.ndarray:
    """Indices of what nothing dominates, in its own layout or after the costliest detour (Y, Y, 2) from another."""
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
            # Two that dominate each other are equal, and the lower layout stays.
            free &= ~dominated(values[members], shifted, strictly=bool(one > other))
        kept.append(members[free])
    return np.sort(np.concatenate([np.zeros(0, dtype=np.int64), *kept]))


def _none() -> Labels:
    empty = np.zeros(0, dtype=np.int64)
    return Labels(values=np.zeros((0, 3), dtype=np.int64), layout=empty, option=empty, parent=empty)


def _merged(parts: list[tuple[np.ndarray, list]]) -> tuple[np.ndarray, list]:
    values = np.concatenate([part[0] for part in parts])
    history = [item for part in parts for item in part[1]]
    kept = nondominated(values)
    return values[kept], [history[index] for index in kept]
