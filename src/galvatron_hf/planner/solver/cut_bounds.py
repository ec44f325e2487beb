# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Bounds the cost of a whole problem from below over all cuts of the layers, from the bounds of its stages."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from galvatron_hf.planner.solver.pareto import nondominated
from galvatron_hf.planner.solver.problem import SearchProblem
from galvatron_hf.planner.solver.stage_bounds import FIRST, STEADY, TOTAL, Objective, StageBounds


NO_STAGES = np.array([[0, *[-(1 << 60)] * 3]])  # the row of an empty run; no path, in picoseconds


class CutBounds:
    """Bounds every cut of the layers into stages.
    A run of consecutive stages has a row of four lower bounds: the sum of its F, and its longest path of each of the
    three kinds (see `problem.py`). Rows of two neighbouring runs give the row of both. Rows that are not dominated are
    enough to bound all cuts. Stages are bounded for each of `objectives`; no solution costs less than `bound`.
    """

    def __init__(self, problem: SearchProblem):
        self.problem, self.stages = problem, StageBounds(problem)
        # One stage has only the total. Without warm-up all paths of a stage are equal.
        several = (TOTAL, FIRST, STEADY) if problem.warmup.any() else (TOTAL, FIRST)
        self.objectives = (TOTAL,) if problem.stages == 1 else several
        self._lower = {
            first: {objective: self.stages.lower(objective, first) for objective in self.objectives}
            for first in self.stages.classes
        }
        self._refined: set[tuple[int, int, int]] = set()
        self._never_fits = least_memory(problem) > problem.budget
        self._firsts = [self.stages.class_of(begin) for begin in range(problem.layers)]
        self.bound = self._whole()

    def _whole(self) -> float:
        if self._never_fits:
            return np.inf
        rows = self._before[-1].get(self.problem.layers)
        return np.inf if rows is None else round_down(float(rows[:, 1:].max(axis=1).min()))

    @cached_property
    def _own(self) -> np.ndarray:
        """Returns (p, L, longest + 1, 4) bounds of F and of each path of a stage, by first layer and number of layers;
        infinite if nothing fits.
        """
        found = {}
        for begin, lower in self._lower.items():
            first, total, steady = (lower.get(one, lower[TOTAL]) for one in (FIRST, TOTAL, STEADY))
            rows = np.stack([first, total, (2 * total + steady) / 3, steady], axis=2)
            found[begin] = np.where(np.isfinite(rows).all(axis=2, keepdims=True), rows, np.inf)
        return np.stack([found[first] for first in self._firsts], axis=1)

    def tighten(self, slack: float, limit: float = np.inf) -> float:
        """Refines bounds until that raises the bound of all cuts by at most a share `slack`. Returns the cost up to
        which all cuts are refined, at most `limit`.
        """
        while True:
            before = self.bound
            within = min(limit, before + slack * abs(before) if slack < np.inf else np.inf)
            if within == -np.inf or before > limit or before == np.inf:
                return within
            self.improve(within)
            if self.bound <= within:
                return within

    def improve(self, limit: float) -> None:
        """Refines the bounds of every stage and number of layers that a solution within the limit may have, each only
        once.
        """
        possible = self.within(limit)
        for first, begins in self.stages.classes.items():
            found = {(stage, first, count) for stage, begin, count in possible if begin in begins} - self._refined
            if not found:
                continue
            self._refined |= found
            stages, _, counts = np.array(sorted(found)).T
            for objective in self.objectives:
                table, refined = self._lower[first][objective], self.stages.refine(objective, first, stages, counts)
                table[stages, counts] = np.maximum(table[stages, counts], refined)
        for name in ("_own", "_before", "_after"):
            self.__dict__.pop(name, None)
        self.bound = self._whole()

    def within(self, limit: float) -> list[tuple[int, int, int]]:
        """Returns each (stage, first layer, number of layers) that a solution within the limit may have."""
        found, weights = [], self.problem.later_stage_weights
        for stage in range(self.problem.stages):
            for begin, count in self._perhaps_within(stage, limit):
                before, after = self.others(stage, begin, count)
                whole = joined(joined(before, self._own[stage, begin, count][None], weights), after, weights)
                if float(whole[:, 1:].max(axis=1).min()) <= limit:
                    found.append((stage, begin, count))
        return found

    def _perhaps_within(self, stage: int, limit: float) -> list[tuple[int, int]]:
        """Returns each (first layer, number of layers) that is not ruled out by the least of each bound over all runs
        before, and over all runs after.
        """
        layers, weights = self.problem.layers, self.problem.later_stage_weights
        before, after = (
            np.stack([fronts[at].min(axis=0) if at in fronts else np.full(4, np.inf) for at in range(layers + 1)])
            for fronts in (self._before[stage], self._after[stage + 1])
        )
        counts = np.arange(1, self._own.shape[2])
        ends = np.minimum(np.arange(layers)[:, None] + counts, layers)
        possible = np.arange(layers)[:, None] + counts == ends
        with np.errstate(invalid="ignore"):  # zero times infinite, where nothing fits
            whole = _followed(_followed(before[:layers, None], self._own[stage, :, 1:], weights), after[ends], weights)
        possible &= np.isfinite(whole).all(axis=2) & (whole[..., 1:].max(axis=2) <= limit)
        return [(begin, place + 1) for begin, place in np.argwhere(possible).tolist()]

    def others(self, stage: int, begin: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns rows (N, 4) of the earlier stages and (M, 4) of the later ones, if both have a cut."""
        return self._before[stage][begin], self._after[stage + 1][begin + count]

    def largest(self, objective: Objective, limit: float, before: np.ndarray, after: np.ndarray) -> float:
        """Returns the largest value of an objective that a stage between two such runs may have within the limit."""
        weights = self.problem.later_stage_weights
        if objective in (TOTAL, STEADY):
            weight = weights[0] if objective == TOTAL else weights[-1]
            return limit - float(before[:, 0].min() + weight * after[:, 0].min())
        most = limit - before[:, None, 0] - after[None, :, 1:].max(axis=2)
        for path, weight in enumerate(weights, start=1):
            if weight:
                most = np.minimum(most, (limit - before[:, None, path]) / weight - after[None, :, 0])
        return float(most.max())

    @cached_property
    def _before(self) -> list[dict[int, np.ndarray]]:
        """Returns rows of the first stages, by their number and then by their number of layers."""
        fronts, layers = [{0: NO_STAGES}], self.problem.layers
        for stage in range(self.problem.stages):
            begins = sorted(fronts[-1])
            rows, at = _of_places(fronts[-1], begins)
            later = self.problem.stages - 1 - stage
            found: dict[int, np.ndarray] = {}
            for end in [layers] if later == 0 else range(begins[0] + 1, layers - later + 1) if begins else []:
                earlier = np.searchsorted(at, end)
                self._add(found, end, rows[:earlier], self._own[stage, at[:earlier], end - at[:earlier]])
            fronts.append(found)
        return fronts

    @cached_property
    def _after(self) -> list[dict[int, np.ndarray]]:
        """Returns rows of a stage and all later ones, by stage and then by first layer."""
        fronts: list[dict[int, np.ndarray]] = [{self.problem.layers: NO_STAGES}]
        for stage in range(self.problem.stages - 1, -1, -1):
            rows, at = _of_places(fronts[0], sorted(fronts[0]))
            found: dict[int, np.ndarray] = {}
            for begin in self._before[stage]:
                earlier = np.searchsorted(at, begin, side="right")
                self._add(found, begin, self._own[stage, begin, at[earlier:] - begin], rows[earlier:])
            fronts.insert(0, found)
        return fronts

    def _add(self, found: dict[int, np.ndarray], place: int, runs: np.ndarray, later: np.ndarray) -> None:
        """Adds the front of (N, 4) runs each of which goes on with one of (N, 4) later runs, if any fits."""
        rows = _followed(runs, later, self.problem.later_stage_weights)
        rows = rows[np.isfinite(rows[:, 0])]
        if len(rows):
            found[place] = rows[nondominated(rows)]


def round_down(bound: float | np.ndarray) -> float | np.ndarray:
    """Returns a bound less what rounding may have added to its sum of floating-point numbers."""
    return bound - 1e-9 * abs(bound) - 1.0


def joined(runs: np.ndarray, later: np.ndarray, later_stage_weights: tuple[int, ...]) -> np.ndarray:
    """Returns rows (N * M, 4) of each of (N, 4) runs of stages followed by each of (M, 4) runs."""
    return _followed(runs[:, None], later[None], later_stage_weights).reshape(-1, runs.shape[-1])


def _followed(runs: np.ndarray, later: np.ndarray, later_stage_weights: tuple[int, ...]) -> np.ndarray:
    """Returns rows (..., 4) of runs (..., 4) of stages that go on with others (..., 4)."""
    weighted = np.array(later_stage_weights) * later[..., :1]
    paths = np.maximum(runs[..., 1:] + weighted, runs[..., :1] + later[..., 1:])
    return np.concatenate([runs[..., :1] + later[..., :1], paths], axis=-1)


def _of_places(fronts: dict[int, np.ndarray], places: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the rows (N, 4) of several layers at which stages meet, and (N,) these layers."""
    if not places:
        return np.zeros((0, NO_STAGES.shape[1])), np.zeros(0, dtype=np.int64)
    at = np.repeat(places, [len(fronts[place]) for place in places])
    return np.concatenate([fronts[place] for place in places]), at


def least_memory(problem: SearchProblem) -> float:
    """Returns the smallest budget, in bytes, with which the problem has a solution."""
    stages, layers = StageBounds(problem), problem.layers
    tables = {first: stages.least_memory(first) for first in stages.classes}
    own = np.stack([tables[stages.class_of(begin)] for begin in range(layers)], axis=1)  # (p, L, longest + 1)
    counts = np.arange(layers + 1) - np.arange(layers)[:, None]  # (L, L + 1), by first layer and layer after the last
    possible = (counts > 0) & (counts <= stages.longest)
    least = np.where(np.arange(layers + 1) == 0, 0.0, np.inf)  # by number of layers of the first stages
    for stage in range(problem.stages):
        of_stage = np.where(possible, np.take_along_axis(own[stage], np.where(possible, counts, 0), axis=1), np.inf)
        least = np.maximum(least[:-1, None], of_stage).min(axis=0)
    return float(least[layers])
