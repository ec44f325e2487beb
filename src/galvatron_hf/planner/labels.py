# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The best solution of a branch, exactly: dynamic programming over layers with every trade of time against memory.

Partial stages are labels (A, B, memory, working memory) in a layout; one that is no better in anything than another of
the same layout is dropped, and so is one whose completion, by the relaxation's distances, costs more than what is
known. Memory is not rounded: its quantum is a byte. Equal layers make one run of labels serve every place at which a
stage can begin.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from galvatron_hf.planner.branch import Branch, Choice
from galvatron_hf.planner.relaxation import Relaxation, tighten


SLACKS = (0.003, 0.03, 0.3, np.inf)  # of the bound, under which a solution is looked for first


@dataclass(frozen=True, kw_only=True)
class Labels:
    """N partial stages after the same number of layers: `values` (N, 4), and how each came about."""

    values: np.ndarray
    layout: np.ndarray
    option: np.ndarray
    parent: np.ndarray

    def __len__(self) -> int:
        return len(self.layout)


@dataclass(kw_only=True)
class _Run:
    """The labels of one stage from one place on: `steps[n]` after n layers, `closed[n]` what ends there."""

    first: int
    steps: list[Labels] = field(default_factory=list)
    closed: dict[int, Labels] = field(default_factory=dict)


class ExactSearch:
    """
    Finds the best solution of a branch that costs at most a limit.

    Args:
        branch ([`Branch`]): The problem.
        relaxation ([`Relaxation`]): Whose distances say what a completion costs at least.

    Attributes:
        states (`int`): labels that were kept so far.
    """

    def __init__(self, branch: Branch, relaxation: Relaxation):
        self.branch, self.relaxation = branch, relaxation
        self.states = 0

    def best(self, limit: float) -> tuple[int, Choice] | None:
        """The cheapest solution of at most `limit`; None if there is none."""
        self._limit = limit * (1 + 1e-9) + 1.0  # the distances are floating-point sums
        self._keep = self._worthwhile()
        runs = {}
        for stage in range(self.branch.stages):
            for first, places in self._beginnings(stage).items():
                runs.update(dict.fromkeys([(stage, place) for place in places], self._run(stage, first, places)))
        return self._join(runs)

    # ---- What need not be looked at ----

    def _worthwhile(self) -> list[dict[int, np.ndarray]]:
        """By stage and kind, the options that some solution within the limit may have."""
        branch, relaxed = self.branch, self.relaxation
        moves = branch.move_a + relaxed.weights[:, None, None] * branch.move_b
        reached = (relaxed.behind[:, :-1, :, None] + moves[:, None]).min(axis=2)  # (p, L, Y)
        through = reached + relaxed.ahead[:, 1:]
        keep = []
        for stage in range(branch.stages):
            by_kind = {}
            for kind in np.unique(branch.kinds):
                least = through[stage, branch.kinds == kind].min(axis=0)[branch.layout]
                by_kind[int(kind)] = np.nonzero(
                    branch.allowed[kind] & (least + relaxed.costs[stage, kind] <= self._limit)
                )[0]
            keep.append(by_kind)
        return keep

    def _beginnings(self, stage: int) -> dict[int, list[int]]:
        """Places where a stage may begin, those from which the layers are the same under the earliest of them."""
        branch = self.branch
        opening = self.relaxation.opening[stage]
        onward = opening + self.relaxation.ahead[stage].min(axis=1)  # moves cost something more
        stage_cost = 0.0 if stage == 0 else self._stage_constant(stage)
        places = [
            place
            for place in range(stage, branch.layers - (branch.stages - 1 - stage))
            if opening[place] < np.inf and (stage == 0 or onward[place] + stage_cost <= self._limit)
        ]
        groups: dict[int, list[int]] = {}
        for place in places:
            rest = branch.kinds[place:]
            alike = (first for first in groups if np.array_equal(branch.kinds[first : first + len(rest)], rest))
            groups.setdefault(next(alike, place), []).append(place)
        return groups

    def _stage_constant(self, stage: int) -> float:
        branch, relaxed = self.branch, self.relaxation
        least = int(np.min(np.where(branch.allowed, branch.working, np.iinfo(np.int64).max)))
        memory = branch.stage_memory[stage] + least - branch.budget
        return float(
            branch.stage_a[stage] + relaxed.weights[stage] * branch.stage_b[stage] + relaxed.prices[stage] * memory
        )

    # ---- One stage ----

    def _run(self, stage: int, first: int, places: list[int]) -> _Run:
        branch, run = self.branch, _Run(first=first)
        run.steps.append(self._opened(stage))
        longest = branch.layers - first - (branch.stages - 1 - stage)
        last = stage == branch.stages - 1
        for count in range(1, longest + 1):
            labels = self._extended(run.steps[-1], stage, int(branch.kinds[first + count - 1]), count, places)
            run.steps.append(labels)
            if not len(labels):
                break
            ends = [place for place in places if place + count <= branch.layers]
            if last and not any(place + count == branch.layers for place in ends):
                continue
            run.closed[count] = self._finished(labels) if last else self._closed(labels, stage)
        return run

    def _opened(self, stage: int) -> Labels:
        branch = self.branch
        constant = np.array([branch.stage_a[stage], branch.stage_b[stage], branch.stage_memory[stage], 0])
        if stage > 0:
            one = np.zeros(1, dtype=np.int64)
            return Labels(values=constant[None], layout=one + branch.boundary, option=one - 1, parent=one - 1)
        starts = branch.starts
        values = np.stack([starts.a, starts.b, starts.memory, starts.working], axis=1) + constant
        fits = np.nonzero(values[:, 2] + values[:, 3] <= branch.budget)[0]
        return Labels(values=values[fits], layout=starts.layout[fits], option=fits, parent=np.full(len(fits), -1))

    def _extended(self, labels: Labels, stage: int, kind: int, count: int, places: list[int]) -> Labels:
        """One more layer of `kind`, the `count`-th of its stage."""
        branch = self.branch
        options = self._keep[stage][kind]
        if not len(options) or not len(labels):
            return _none()
        layout = branch.layout[options]
        added = np.stack([branch.a[kind], branch.b[kind], branch.memory(stage)[kind]], axis=1)[options]
        moved = np.stack([branch.move_a, branch.move_b], axis=2)[labels.layout[:, None], layout[None]]  # (N, S, 2)
        values = np.empty((len(labels), len(options), 4), dtype=np.int64)
        values[:, :, :3] = labels.values[:, None, :3] + added
        values[:, :, :2] += moved
        values[:, :, 3] = np.maximum(labels.values[:, None, 3], branch.working[kind, options])
        values = values.reshape(-1, 4)
        layout = np.tile(layout, len(labels))
        good = values[:, 2] + values[:, 3] <= branch.budget
        good &= self._priced(values, stage) + self._around(stage, count, places)[layout] <= self._limit
        kept = np.nonzero(good)[0]
        kept = kept[_best_by_layout(values[kept], layout[kept])]
        self.states += len(kept)
        return Labels(
            values=values[kept],
            layout=layout[kept],
            option=options[kept % len(options)],
            parent=kept // len(options),
        )

    def _priced(self, values: np.ndarray, stage: int) -> np.ndarray:
        relaxed = self.relaxation
        weight, price = relaxed.weights[stage], relaxed.prices[stage]
        least = int(np.min(np.where(self.branch.allowed, self.branch.working, np.iinfo(np.int64).max)))
        memory = values[:, 2] + np.maximum(values[:, 3], least) - self.branch.budget
        return values[:, 0] + weight * values[:, 1] + price * memory

    def _around(self, stage: int, count: int, places: list[int]) -> np.ndarray:
        """(Y,) what all but `count` layers of a stage cost at least, wherever of `places` it begins."""
        relaxed, layers = self.relaxation, self.branch.layers
        here = np.array([place for place in places if place + count <= layers])
        if not len(here):
            return np.full(self.branch.move_a.shape[0], np.inf)
        return (relaxed.opening[stage, here][:, None] + relaxed.ahead[stage, here + count]).min(axis=0)

    def _closed(self, labels: Labels, stage: int) -> Labels:
        branch = self.branch
        values = labels.values.copy()
        values[:, 0] += branch.move_a[labels.layout, branch.boundary]
        values[:, 1] += branch.move_b[labels.layout, branch.boundary]
        kept = nondominated(values[:, :2])
        return Labels(values=values[kept], layout=labels.layout[kept], option=np.full(len(kept), -1), parent=kept)

    def _finished(self, labels: Labels) -> Labels:
        branch, finishes = self.branch, self.branch.finishes
        values = np.repeat(labels.values[:, None], len(finishes), axis=1)
        values[:, :, 0] += branch.move_a[labels.layout[:, None], finishes.layout] + finishes.a
        values[:, :, 1] += branch.move_b[labels.layout[:, None], finishes.layout] + finishes.b
        values[:, :, 2] += finishes.memory
        values[:, :, 3] = np.maximum(values[:, :, 3], finishes.working)
        values = values.reshape(-1, 4)
        fits = np.nonzero(values[:, 2] + values[:, 3] <= branch.budget)[0]
        kept = fits[nondominated(values[fits, :2])]
        return Labels(
            values=values[kept],
            layout=labels.layout[kept // len(finishes)],
            option=kept % len(finishes),
            parent=kept // len(finishes),
        )

    # ---- All stages ----

    def _join(self, runs: dict[tuple[int, int], _Run]) -> tuple[int, Choice] | None:
        """Stages one behind the other: at each layer what is not dominated in (sum of A, largest B)."""
        branch = self.branch
        # values (N, 2); history (N,) of (place, index before, count, index of the closed label)
        fronts: dict[int, tuple[np.ndarray, list]] = {0: (np.zeros((1, 2), dtype=np.int64), [()])}
        for stage in range(branch.stages):
            found: dict[int, list[tuple[np.ndarray, list]]] = {}
            for place, (values, history) in fronts.items():
                run = runs.get((stage, place))
                for count, closed in (run.closed if run is not None else {}).items():
                    end = place + count
                    if end > branch.layers or (end == branch.layers) != (stage == branch.stages - 1):
                        continue
                    sums = (values[:, None, 0] + closed.values[None, :, 0]).ravel()
                    tops = np.maximum(values[:, None, 1], closed.values[None, :, 1]).ravel()
                    pairs = np.stack([sums, tops], axis=1)
                    kept = nondominated(pairs)
                    kept = kept[sums[kept] + tops[kept] <= self._limit]
                    width = len(closed)
                    then = [(*history[index // width], (place, count, int(index % width))) for index in kept]
                    found.setdefault(end, []).append((pairs[kept], then))
            fronts = {end: _merged(parts) for end, parts in found.items()}
        values, history = fronts.get(branch.layers, (np.zeros((0, 2)), []))
        if not len(values):
            return None
        totals = values.sum(axis=1)
        best = int(np.lexsort((values[:, 1], totals))[0])
        return int(totals[best]), self._traced(runs, history[best])

    def _traced(self, runs: dict[tuple[int, int], _Run], history: tuple) -> Choice:
        bounds, options, start, finish = [0], [], 0, 0
        for stage, (place, count, index) in enumerate(history):
            run = runs[stage, place]
            closed = run.closed[count]
            finish = int(closed.option[index])
            at, own = int(closed.parent[index]), []
            for step in range(count, 0, -1):
                own.append(int(run.steps[step].option[at]))
                at = int(run.steps[step].parent[at])
            start = int(run.steps[0].option[at]) if stage == 0 else start
            options += reversed(own)
            bounds.append(place + count)
        return Choice(bounds=tuple(bounds), options=tuple(options), start=start, finish=finish)


def _none() -> Labels:
    empty = np.zeros(0, dtype=np.int64)
    return Labels(values=np.zeros((0, 4), dtype=np.int64), layout=empty, option=empty, parent=empty)


def _merged(parts: list[tuple[np.ndarray, list]]) -> tuple[np.ndarray, list]:
    values = np.concatenate([part[0] for part in parts])
    history = [item for part in parts for item in part[1]]
    kept = nondominated(values)
    return values[kept], [history[index] for index in kept]


def _best_by_layout(values: np.ndarray, layout: np.ndarray) -> np.ndarray:
    """Indices of what nothing of the same layout dominates."""
    kept = [np.zeros(0, dtype=np.int64)]
    for one in np.unique(layout):
        members = np.nonzero(layout == one)[0]
        kept.append(members[nondominated(values[members])])
    return np.sort(np.concatenate(kept))


def nondominated(values: np.ndarray, block: int = 256) -> np.ndarray:
    """Indices of the rows that no other row is at most equal to in every column; of equal rows the first."""
    count = len(values)
    if count <= 1:
        return np.arange(count)
    order = np.lexsort((np.arange(count), *values.T[::-1]))
    rows = values[order]
    if values.shape[1] == 2:  # by the first column upwards, the second has to fall
        lowest = np.minimum.accumulate(rows[:, 1])
        better = np.concatenate([[True], rows[1:, 1] < lowest[:-1]])
        return order[better]
    kept = np.zeros((0, values.shape[1]), dtype=values.dtype)
    indices = []
    for begin in range(0, count, block):
        part, names = rows[begin : begin + block], order[begin : begin + block]
        if len(kept):
            free = ~(kept[:, None, 1:] <= part[None, :, 1:]).all(axis=2).any(axis=0)
            part, names = part[free], names[free]
        # In order of the first column, a row can only be dominated by an earlier one.
        earlier = (part[:, None, 1:] <= part[None, :, 1:]).all(axis=2)
        free = ~np.triu(earlier, 1).any(axis=0)
        kept = np.concatenate([kept, part[free]])
        indices.append(names[free])
    return np.concatenate(indices)


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


def solve(branch: Branch, limit: float = np.inf) -> Solution:
    """
    The best solution that costs at most `limit`.

    The limit widens from the bound upwards: whatever is found under a limit is the best there is.
    """
    found = tighten(branch, limit)
    bound = found.relaxation.bound
    if bound == np.inf or bound > limit:
        return Solution(bound=bound, cost=None, choice=None, states=0)
    search = ExactSearch(branch, found.relaxation)
    for slack in SLACKS:
        within = min(limit, bound + slack * abs(bound), np.inf if found.cost is None else found.cost)
        best = search.best(within)
        if best is not None:
            return Solution(bound=bound, cost=best[0], choice=best[1], states=search.states)
        if within == limit:
            break
    return Solution(bound=bound, cost=None, choice=None, states=search.states)
