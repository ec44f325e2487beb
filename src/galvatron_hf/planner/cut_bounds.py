# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""What a whole branch costs at least, and what is left for one stage: the bounds of stages, over all cuts."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from galvatron_hf.planner.branch import Branch
from galvatron_hf.planner.pareto import nondominated
from galvatron_hf.planner.stage_bounds import TOTAL, A, B, StageBounds


class CutBounds:
    """
    Bounds for every cut of the layers into stages.

    With a_i and b_i below the A and the B of stage i, and t_i below their sum, a solution costs at least
    `sum a_i + max(max b_i, max (t_i - a_i))`. Over all cuts, pairs (sum, max) that are not dominated are enough.

    Args:
        branch ([`Branch`]): The problem.

    Attributes:
        bound (`float`): no solution costs less.
    """

    def __init__(self, branch: Branch):
        self.branch, self.stages = branch, StageBounds(branch)
        self._lower = {
            first: {objective: self.stages.lower(objective, first) for objective in (A, B, TOTAL)}
            for first in self.stages.classes
        }
        self._hopeless = least_memory(branch) > branch.budget
        self._firsts = [self.stages.class_of(place) for place in range(branch.layers)]
        self.bound = self._whole()

    def _whole(self) -> float:
        if self._hopeless:
            return np.inf
        pairs = self._before[-1].get(self.branch.layers)
        return np.inf if pairs is None else float(pairs.sum(axis=1).min())

    def stage(self, stage: int, place: int, count: int) -> tuple[float, float]:
        """At least A, and at least the excess that counts once for all stages, of `count` layers from `place` on."""
        lower = self._lower[self._firsts[place]]
        least = lower[A][stage, count]
        if not np.isfinite(least):
            return np.inf, np.inf
        return least, max(lower[B][stage, count], lower[TOTAL][stage, count] - least)

    def improve(self, limit: float) -> None:
        """Better prices for every stage and number of layers that some solution within the limit can have."""
        for first, places in self.stages.classes.items():
            pairs = {(i, n) for i, place, n in self.within(limit) if place in places}
            if not pairs:
                continue
            stages, counts = np.array(sorted(pairs)).T
            for objective in (A, TOTAL):
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
                    least, excess = self.stage(stage, place, count)
                    others = self.others(stage, place, count)
                    if others is None or not np.isfinite(least + excess):
                        continue
                    if float((others[:, 0] + np.maximum(others[:, 1], excess)).min()) + least <= limit:
                        found.append((stage, place, count))
        return found

    def others(self, stage: int, place: int, count: int) -> np.ndarray | None:
        """(N, 2) of all other stages, (sum of A, excess), for the best cuts; None where there is none."""
        before, behind = self._before[stage].get(place), self._behind[stage + 1].get(place + count)
        if before is None or behind is None:
            return None
        return _joined(before, behind)

    def _counts(self, stage: int, place: int) -> range:
        """Numbers of layers that a stage can have, all others having one at least."""
        behind = self.branch.stages - 1 - stage
        if behind == 0:
            return range(self.branch.layers - place, self.branch.layers - place + 1)
        return range(1, self.branch.layers - place - behind + 1)

    @cached_property
    def _before(self) -> list[dict[int, np.ndarray]]:
        """By number of stages and of their layers, the pairs of these stages."""
        fronts = [{0: np.zeros((1, 2))}]
        for stage in range(self.branch.stages):
            found: dict[int, list[np.ndarray]] = {}
            for place, pairs in fronts[-1].items():
                for count in self._counts(stage, place):
                    own = np.array([self.stage(stage, place, count)])
                    if np.isfinite(own).all():
                        found.setdefault(place + count, []).append(_joined(pairs, own))
            fronts.append({end: _front(np.concatenate(parts)) for end, parts in found.items()})
        return fronts

    @cached_property
    def _behind(self) -> list[dict[int, np.ndarray]]:
        """By stage and layer, the pairs of this and all later stages from that layer on."""
        fronts: list[dict[int, np.ndarray]] = [{self.branch.layers: np.zeros((1, 2))}]
        for stage in range(self.branch.stages - 1, -1, -1):
            found: dict[int, np.ndarray] = {}
            for place in self._before[stage]:
                parts = []
                for count in self._counts(stage, place):
                    own, rest = np.array([self.stage(stage, place, count)]), fronts[0].get(place + count)
                    if rest is not None and np.isfinite(own).all():
                        parts.append(_joined(own, rest))
                if parts:
                    found[place] = _front(np.concatenate(parts))
            fronts.insert(0, found)
        return fronts


def _joined(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Every pair of one with every pair of the other: sums add up, of the excesses the larger counts."""
    sums = one[:, None, 0] + other[None, :, 0]
    tops = np.maximum(one[:, None, 1], other[None, :, 1])
    return np.stack([sums.ravel(), tops.ravel()], axis=1)


def _front(pairs: np.ndarray) -> np.ndarray:
    return pairs[nondominated(pairs)]


def least_memory(branch: Branch) -> float:
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
