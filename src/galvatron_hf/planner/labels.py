# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The best solution of a branch, exactly: dynamic programming over layers with every trade of time against memory.

Partial stages are labels (A, B, memory) in a layout. One that is no better in anything than another, even if that had
to pay for going on from another layout, is dropped, and so is one whose completion, by the relaxation's distances,
costs more than what is known. Memory is not rounded: its quantum is a byte. Equal layers make one run of labels serve
every place at which a stage can begin.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from galvatron_hf.planner.branch import Branch, Choice
from galvatron_hf.planner.relaxation import Found, Relaxation, tighten


SLACKS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, np.inf)  # of the bound, under which a solution is looked for first


@dataclass(frozen=True, kw_only=True)
class Labels:
    """N partial stages after the same number of layers: `values` (N, 3), and how each came about."""

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
        self._moves = np.stack([branch.move_a, branch.move_b], axis=2)
        self._detour = branch.detours()[1]

    def best(self, limit: float) -> tuple[int, Choice] | None:
        """The cheapest solution of at most `limit`; None if there is none."""
        self._limit = limit + 1e-9 * abs(limit) + 1.0  # the distances are floating-point sums
        runs: dict[tuple[int, int], list[_Run]] = {}
        for stage in range(self.branch.stages):
            for room in range(len(self.relaxation.allowances)):
                keep = self._worthwhile(stage, room)
                if not any(map(len, keep.values())):
                    continue
                for first, places in self._beginnings(stage, room).items():
                    run = self._run(stage, room, first, places, keep)
                    for place in places:
                        runs.setdefault((stage, place), []).append(run)
        return self._join(runs)

    # ---- What need not be looked at ----

    def _worthwhile(self, stage: int, room: int) -> dict[int, np.ndarray]:
        """By kind, the options that some solution within the limit may have in a stage of this allowance."""
        branch, relaxed = self.branch, self.relaxation
        moves = branch.move_a + relaxed.weights[stage] * branch.move_b
        reached = (relaxed.behind[stage, room, :-1, :, None] + moves).min(axis=1)  # (L, Y)
        through = reached + relaxed.ahead[stage, room, 1:]
        keep = {}
        for kind in np.unique(branch.kinds):
            least = through[branch.kinds == kind].min(axis=0)[branch.layout] + relaxed.costs[stage, room, kind]
            keep[int(kind)] = np.nonzero(np.isfinite(least) & (least <= self._limit))[0]
        return keep

    def _beginnings(self, stage: int, room: int) -> dict[int, list[int]]:
        """Places where a stage may begin, those from which the layers are the same under the earliest of them."""
        branch, relaxed = self.branch, self.relaxation
        # A move costs nothing at least, and the first layer lies behind it.
        least = relaxed.opening[stage] + relaxed.ahead[stage, room].min(axis=1)
        least = least + relaxed.constants[stage, room] * (stage > 0)
        last = branch.layers - (branch.stages - 1 - stage)
        within = np.isfinite(least) & (least <= self._limit) if stage > 0 else np.arange(len(least)) == 0
        groups: dict[int, list[int]] = {}
        for place in np.nonzero(within[:last])[0].tolist():
            rest = branch.kinds[place:]
            alike = (first for first in groups if np.array_equal(branch.kinds[first : first + len(rest)], rest))
            groups.setdefault(next(alike, place), []).append(place)
        return groups

    # ---- One stage ----

    def _run(self, stage: int, room: int, first: int, places: list[int], keep: dict[int, np.ndarray]) -> _Run:
        branch, run = self.branch, _Run(first=first)
        run.steps.append(self._opened(stage, room))
        last = stage == branch.stages - 1
        for count in range(1, branch.layers - first - (branch.stages - 1 - stage) + 1):
            kind = int(branch.kinds[first + count - 1])
            around = self._around(stage, room, count, places)
            labels = self._extended(run.steps[-1], stage, room, kind, keep[kind], around)
            run.steps.append(labels)
            if not len(labels):
                break
            if not last:
                run.closed[count] = self._closed(labels)
            elif any(place + count == branch.layers for place in places):
                run.closed[count] = self._finished(labels, room)
        return run

    def _opened(self, stage: int, room: int) -> Labels:
        branch, allowance = self.branch, self.relaxation.allowances[room]
        constant = np.array([branch.stage_a[stage], branch.stage_b[stage], branch.stage_memory[stage] + allowance])
        if stage > 0:
            one = np.zeros(1, dtype=np.int64)
            return Labels(values=constant[None], layout=one + branch.boundary, option=one - 1, parent=one - 1)
        starts = branch.starts
        values = np.stack([starts.a, starts.b, starts.memory], axis=1) + constant
        fits = np.nonzero((values[:, 2] <= branch.budget) & (starts.working <= allowance))[0]
        return Labels(values=values[fits], layout=starts.layout[fits], option=fits, parent=np.full(len(fits), -1))

    def _extended(
        self, labels: Labels, stage: int, room: int, kind: int, options: np.ndarray, around: np.ndarray
    ) -> Labels:
        """One more layer of `kind`; `around` (Y,) is what all else costs at least."""
        branch, relaxed = self.branch, self.relaxation
        if not len(options) or not len(labels):
            return _none()
        layout = branch.layout[options]
        added = np.stack([branch.a[kind], branch.b[kind], branch.memory(stage)[kind]], axis=1)[options]
        values = labels.values[:, None] + added
        values[:, :, :2] += self._moves[labels.layout[:, None], layout[None]]
        values = values.reshape(-1, 3)
        layout = np.tile(layout, len(labels))
        weight, price = relaxed.weights[stage], relaxed.prices[stage]
        least = values[:, 0] + weight * values[:, 1] + price * (values[:, 2] - branch.budget) + around[layout]
        kept = np.nonzero((values[:, 2] <= branch.budget) & (least <= self._limit))[0]
        kept = kept[self._best_of_layouts(values[kept], layout[kept])]
        self.states += len(kept)
        return Labels(
            values=values[kept],
            layout=layout[kept],
            option=options[kept % len(options)],
            parent=kept // len(options),
        )

    def _best_of_layouts(self, values: np.ndarray, layout: np.ndarray) -> np.ndarray:
        """Indices of what nothing dominates, in its own layout or after the costliest detour from another."""
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
                shifted[:, :2] += self._detour[one, other]
                # Two that dominate each other are equal, and the lower layout stays.
                free &= ~dominated(values[members], shifted, strictly=bool(one > other))
            kept.append(members[free])
        return np.sort(np.concatenate([np.zeros(0, dtype=np.int64), *kept]))

    def _around(self, stage: int, room: int, count: int, places: list[int]) -> np.ndarray:
        """(Y,) what all but `count` layers of a stage cost at least, wherever of `places` it begins."""
        relaxed, layers = self.relaxation, self.branch.layers
        here = np.array([place for place in places if place + count <= layers], dtype=np.int64)
        if not len(here):
            return np.full(self.branch.move_a.shape[0], np.inf)
        return (relaxed.opening[stage, here][:, None] + relaxed.ahead[stage, room, here + count]).min(axis=0)

    def _closed(self, labels: Labels) -> Labels:
        values = labels.values[:, :2] + self._moves[labels.layout, self.branch.boundary]
        kept = nondominated(values)
        return Labels(values=values[kept], layout=labels.layout[kept], option=np.full(len(kept), -1), parent=kept)

    def _finished(self, labels: Labels, room: int) -> Labels:
        branch, finishes = self.branch, self.branch.finishes
        ends = np.stack([finishes.a, finishes.b, finishes.memory], axis=1)
        values = labels.values[:, None] + ends
        values[:, :, :2] += self._moves[labels.layout[:, None], finishes.layout]
        values = values.reshape(-1, 3)
        allowed = np.tile(finishes.working <= self.relaxation.allowances[room], len(labels))
        fits = np.nonzero(allowed & (values[:, 2] <= branch.budget))[0]
        kept = fits[nondominated(values[fits, :2])]
        return Labels(
            values=values[kept, :2],
            layout=labels.layout[kept // len(finishes)],
            option=kept % len(finishes),
            parent=kept // len(finishes),
        )

    # ---- All stages ----

    def _join(self, runs: dict[tuple[int, int], list[_Run]]) -> tuple[int, Choice] | None:
        """Stages one behind the other: at each layer what is not dominated in (sum of A, largest B)."""
        branch = self.branch
        # values (N, 2); of each, its stages so far as (run, place, count, index of the closed label)
        fronts: dict[int, tuple[np.ndarray, list]] = {0: (np.zeros((1, 2), dtype=np.int64), [()])}
        for stage in range(branch.stages):
            found: dict[int, list[tuple[np.ndarray, list]]] = {}
            for place, (values, history) in fronts.items():
                ended = [(run, *item) for run in runs.get((stage, place), []) for item in run.closed.items()]
                for run, count, closed in ended:
                    end = place + count
                    if end > branch.layers or (end == branch.layers) != (stage == branch.stages - 1):
                        continue
                    sums = (values[:, None, 0] + closed.values[None, :, 0]).ravel()
                    tops = np.maximum(values[:, None, 1], closed.values[None, :, 1]).ravel()
                    pairs = np.stack([sums, tops], axis=1)
                    kept = nondominated(pairs)
                    kept = kept[sums[kept] + tops[kept] <= self._limit]
                    width = len(closed)
                    then = [(*history[index // width], (run, place, count, int(index % width))) for index in kept]
                    found.setdefault(end, []).append((pairs[kept], then))
            fronts = {end: _merged(parts) for end, parts in found.items()}
        values, history = fronts.get(branch.layers, (np.zeros((0, 2)), []))
        if not len(values):
            return None
        totals = values.sum(axis=1)
        best = int(np.lexsort((values[:, 1], totals))[0])
        return int(totals[best]), self._traced(history[best])

    @staticmethod
    def _traced(history: tuple) -> Choice:
        bounds, options, start, finish = [0], [], 0, 0
        for stage, (run, place, count, index) in enumerate(history):
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
    return Labels(values=np.zeros((0, 3), dtype=np.int64), layout=empty, option=empty, parent=empty)


def _merged(parts: list[tuple[np.ndarray, list]]) -> tuple[np.ndarray, list]:
    values = np.concatenate([part[0] for part in parts])
    history = [item for part in parts for item in part[1]]
    kept = nondominated(values)
    return values[kept], [history[index] for index in kept]


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


def dominated(values: np.ndarray, by: np.ndarray, *, strictly: bool, block: int = 512) -> np.ndarray:
    """(N,) whether some row of `by` is at most equal in every column, and `strictly` less in one."""
    found = np.zeros(len(values), dtype=bool)
    for begin in range(0, len(by), block):
        rows = by[begin : begin + block, None]
        better = (rows <= values).all(axis=2)
        if strictly:
            better &= (rows < values).any(axis=2)
        found |= better.any(axis=0)
    return found


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


def solve(branch: Branch, limit: float = np.inf, found: Found | None = None) -> Solution:
    """
    The best solution that costs at most `limit`.

    The limit widens from the bound upwards: whatever is found under a limit is the best there is.

    Args:
        branch ([`Branch`]): The problem.
        limit (`float`): What a solution may cost.
        found ([`Found`], *optional*): What [`tighten`] said of it.
    """
    found = found or tighten(branch, limit)
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
