# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""What a whole branch costs at least, and what is left for one stage: the bounds of stages, over all cuts."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from galvatron_hf.planner.solver.pareto import nondominated
from galvatron_hf.planner.solver.problem import SearchProblem
from galvatron_hf.planner.solver.stage_bounds import TOTAL, WAITING, A, Objective, StageBounds


NO_STAGES = np.array([[0, *[-(1 << 60)] * 3]])  # their row: no path, in picoseconds


class CutBounds:
    """
    Bounds for every cut of the layers into stages.

    A run of stages has a row of four figures, each from below: the sum of their A, and what the longest path of each
    kind costs (see `branch.py`): through its slowest stage without a wait, with one, and with two for all behind it.
    Rows of neighbouring runs make that of both; over all cuts, rows that are not dominated are enough.

    Args:
        branch ([`SearchProblem`]): The problem.

    Attributes:
        objectives (`tuple[Objective, ...]`): of stages, that are bounded.
        bound (`float`): no solution costs less.
    """

    def __init__(self, branch: SearchProblem):
        self.branch, self.stages = branch, StageBounds(branch)
        # Of one stage there is nothing but the total; where no micro-batches go ahead, no other path.
        self.objectives = (TOTAL,) if branch.stages == 1 else (TOTAL, A, WAITING) if branch.ahead.any() else (TOTAL, A)
        self._lower = {
            first: {objective: self.stages.lower(objective, first) for objective in self.objectives}
            for first in self.stages.classes
        }
        self._hopeless = least_memory(branch) > branch.budget
        self._firsts = [self.stages.class_of(place) for place in range(branch.layers)]
        self.bound = self._whole()

    def _whole(self) -> float:
        if self._hopeless:
            return np.inf
        rows = self._before[-1].get(self.branch.layers)
        return np.inf if rows is None else below(float(rows[:, 1:].max(axis=1).min()))

    def stage(self, stage: int, place: int, count: int) -> np.ndarray:
        """(4,) at least A, and of each path, of `count` layers from `place` on; infinite where nothing fits."""
        lower = self._lower[self._firsts[place]]
        first, total, waiting = (lower.get(one, lower[TOTAL])[stage, count] for one in (A, TOTAL, WAITING))
        return np.array([first, total, (2 * total + waiting) / 3, waiting])

    def improve(self, limit: float) -> None:
        """Better prices for every stage and number of layers that some solution within the limit can have."""
        for first, places in self.stages.classes.items():
            found = {(i, n) for i, place, n in self.within(limit) if place in places}
            if not found:
                continue
            stages, counts = np.array(sorted(found)).T
            for objective in self.objectives:
                self._lower[first][objective][stages, counts] = self.stages.refine(objective, first, stages, counts)
        for name in ("_before", "_behind"):
            self.__dict__.pop(name, None)
        self.bound = self._whole()

    def within(self, limit: float) -> list[tuple[int, int, int]]:
        """(stage, place, number of layers) that some solution within the limit can have."""
        found = []
        for stage in range(self.branch.stages):
            for place in self._before[stage]:
                for count in self._counts(stage, place):
                    own, others = self.stage(stage, place, count), self.others(stage, place, count)
                    if others is None or not np.isfinite(own).all():
                        continue
                    before, behind = others
                    whole = self._joined(self._joined(before, own[None]), behind)
                    if float(whole[:, 1:].max(axis=1).min()) <= limit:
                        found.append((stage, place, count))
        return found

    def others(self, stage: int, place: int, count: int) -> tuple[np.ndarray, np.ndarray] | None:
        """Rows (N, 4) of the stages before and (M, 4) of those behind, for the best cuts; None where one has none."""
        before, behind = self._before[stage].get(place), self._behind[stage + 1].get(place + count)
        return None if before is None or behind is None else (before, behind)

    def room(self, objective: Objective, limit: float, before: np.ndarray, behind: np.ndarray) -> float:
        """What a stage between two such runs can have of an objective at most, within the limit."""
        waits = self.branch.waits
        if objective in (TOTAL, WAITING):
            times = waits[0] if objective == TOTAL else waits[-1]
            return limit - float(before[:, 0].min() + times * behind[:, 0].min())
        most = limit - before[:, None, 0] - behind[None, :, 1:].max(axis=2)
        for path, times in enumerate(waits, start=1):
            if times:
                most = np.minimum(most, (limit - before[:, None, path]) / times - behind[None, :, 0])
        return float(most.max())

    def _counts(self, stage: int, place: int) -> range:
        """Numbers of layers that a stage can have, all others having one at least."""
        behind = self.branch.stages - 1 - stage
        if behind == 0:
            return range(self.branch.layers - place, self.branch.layers - place + 1)
        return range(1, self.branch.layers - place - behind + 1)

    @cached_property
    def _before(self) -> list[dict[int, np.ndarray]]:
        """By number of stages and of their layers, the rows of these stages."""
        fronts = [{0: NO_STAGES}]
        for stage in range(self.branch.stages):
            found: dict[int, list[np.ndarray]] = {}
            for place, rows in fronts[-1].items():
                for count in self._counts(stage, place):
                    own = self.stage(stage, place, count)[None]
                    if np.isfinite(own).all():
                        found.setdefault(place + count, []).append(self._joined(rows, own))
            fronts.append({end: _front(np.concatenate(parts)) for end, parts in found.items()})
        return fronts

    @cached_property
    def _behind(self) -> list[dict[int, np.ndarray]]:
        """By stage and layer, the rows of this and all later stages from that layer on."""
        fronts: list[dict[int, np.ndarray]] = [{self.branch.layers: NO_STAGES}]
        for stage in range(self.branch.stages - 1, -1, -1):
            found: dict[int, np.ndarray] = {}
            for place in self._before[stage]:
                parts = []
                for count in self._counts(stage, place):
                    own, rest = self.stage(stage, place, count)[None], fronts[0].get(place + count)
                    if rest is not None and np.isfinite(own).all():
                        parts.append(self._joined(own, rest))
                if parts:
                    found[place] = _front(np.concatenate(parts))
            fronts.insert(0, found)
        return fronts

    def _joined(self, one: np.ndarray, other: np.ndarray) -> np.ndarray:
        """Of every run of one with every run of the other behind it."""
        return joined(one, other, self.branch.waits)


def below(bound: float) -> float:
    """A bound that is a sum of floating-point numbers, less what rounding may have added."""
    return bound - 1e-9 * abs(bound) - 1.0


def joined(one: np.ndarray, other: np.ndarray, waits: tuple[int, ...]) -> np.ndarray:
    """(N * M, 4) of (N, 4) runs of stages, each with every one of (M, 4) behind it."""
    one, other = one[:, None], other[None]
    paths = np.maximum(one[..., 1:] + np.array(waits) * other[..., :1], one[..., :1] + other[..., 1:])
    return np.concatenate([one[..., :1] + other[..., :1], paths], axis=2).reshape(-1, 1 + len(waits))


def _front(rows: np.ndarray) -> np.ndarray:
    return rows[nondominated(rows)]


def least_memory(branch: SearchProblem) -> float:
    """The smallest budget, in bytes, under which the branch has a solution."""
    stages = StageBounds(branch)
    tables = {first: stages.least_memory(first) for first in stages.classes}
    fronts = {0: 0.0}
    for stage in range(branch.stages):
        found: dict[int, float] = {}
        behind = branch.stages - 1 - stage
        for place, most in fronts.items():
            own = tables[stages.class_of(place)][stage]
            ends = [branch.layers] if behind == 0 else range(place + 1, branch.layers - behind + 1)
            for end in ends:
                found[end] = min(found.get(end, np.inf), max(most, float(own[end - place])))
        fronts = found
    return fronts[branch.layers]
