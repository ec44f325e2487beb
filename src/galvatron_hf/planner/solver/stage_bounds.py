# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Bounds the cost of a stage of n layers from below, for every n, by Lagrangian relaxation of the memory budget.
For a multiplier l >= 0, `cost + l * (memory - budget)` of a stage that fits is at most its cost. The minimum of that
sum over all options is a shortest path over the layers. The bound is its maximum over l (A. M. Geoffrion, 1974). The
peak of working memory is no sum, so each bound also chooses an allowance for it, one of the values that occur. Options
with more working memory than the allowance are excluded. Array dimensions: Q pairs of a stage and a multiplier, W
allowances, K kinds, S options, Y layouts, p stages.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from galvatron_hf.planner.solver.problem import SearchProblem


# Multipliers are tried in units of (cost of the stage / budget), then between the neighbours of the best.
GRID = np.concatenate([[0.0], np.geomspace(0.004, 40.0, 9)])
REFINED_POINTS, REFINEMENTS = 7, 4


@dataclass(frozen=True)
class Objective:
    """Weights a stage: `first` F + `other` O, minus k F if `without_warmup` (symbols of `problem.py`)."""

    first: int
    other: int
    without_warmup: bool = False

    def weights(self, problem: SearchProblem, stages: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns (Q,) factors of F and of O in each of the stages."""
        warmup = problem.warmup[stages]
        return self.first - self.without_warmup * warmup, np.full(warmup.shape, self.other)


FIRST, TOTAL, MEMORY = Objective(1, 0), Objective(1, 1), Objective(0, 0)
STEADY = Objective(1, 1, without_warmup=True)


@lru_cache(maxsize=256)
def classes_of(kinds: tuple[int, ...]) -> dict[int, list[int]]:
    """Groups layers at which a stage may begin under the earliest one with the same sequence of kinds."""
    groups = {0: [0]}
    for begin in range(1, len(kinds)):
        rest = kinds[begin:]
        equal = (first for first in groups if kinds[first : first + len(rest)] == rest)
        groups.setdefault(next(equal, begin), []).append(begin)
    return groups


def allowances_of(problem: SearchProblem) -> np.ndarray:
    """Returns (W,) bytes of working memory that a layer or an end may need, rising."""
    working = problem.working[problem.allowed], problem.starts.working, problem.finishes.working
    return np.unique(np.concatenate(working))


class StageBounds:
    """Bounds stages of at most `longest` layers; `allowances` are (W,) bytes of working memory, rising."""

    def __init__(self, problem: SearchProblem):
        self.problem, self.allowances, self.longest = problem, allowances_of(problem), problem.longest_stage
        # One stage begins at the first layer, whatever class the others have.
        one_stage = {0: list(range(problem.layers))}
        self.classes = one_stage if problem.stages == 1 else classes_of(tuple(problem.kinds.tolist()))
        self._multipliers: dict[tuple[Objective, int], np.ndarray] = {}

    def class_of(self, begin: int) -> int:
        """Returns the first layer whose sequence of kinds is that from `begin` on."""
        return next(first for first, begins in self.classes.items() if begin in begins)

    def lower(self, objective: Objective, first: int) -> np.ndarray:
        """Returns (p, longest + 1) bounds of each stage with n layers from `first` on; infinite if none fits."""
        bounds, multipliers = self._on_grid(objective, first)
        best = bounds.argmax(axis=0)
        self._multipliers[objective, first] = multipliers[best, np.arange(multipliers.shape[1])[:, None]]
        return bounds.max(axis=0)

    def least_memory(self, first: int) -> np.ndarray:
        """Returns (p, longest + 1) minimum bytes of each stage with n layers from `first` on. With a multiplier of 1
        and no cost the shortest path is memory, which changes of layout do not hold.
        """
        stages = np.arange(self.problem.stages)
        return self._without_moves(MEMORY, first, stages, np.ones(len(stages))) + self.problem.budget

    def multiplier(self, objective: Objective, first: int, stage: int, count: int) -> float:
        """Returns the best multiplier found for a stage of `count` layers."""
        return float(self._multipliers[objective, first][stage, count])

    def _on_grid(self, objective: Objective, first: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns bounds (P, p, longest + 1) and multipliers (P, p)."""
        stages, every = self.problem.stages, np.arange(self.problem.stages)
        free = self._without_moves(objective, first, every, np.zeros(stages))
        middle = max(1, self.problem.layers // stages)
        scale = np.maximum(np.where(np.isfinite(free[:, middle]), free[:, middle], 0.0), 1.0) / self.problem.budget
        multipliers = GRID[:, None] * scale
        flat = self.forward(objective, first, np.tile(every, len(GRID)), multipliers.ravel())
        return flat.reshape(len(GRID), stages, -1), multipliers

    def refine(self, objective: Objective, first: int, stages: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Returns (Q,) better bounds of stages with these numbers of layers, and keeps their multipliers."""
        table = self._multipliers[objective, first]
        best = table[stages, counts]
        ratio = GRID[2] / GRID[1]
        values = self.forward(objective, first, stages, best, counts)[np.arange(len(stages)), counts]
        for _ in range(REFINEMENTS):
            steps = np.geomspace(1 / ratio, ratio, REFINED_POINTS)
            tried = (best[:, None] * steps).ravel()
            of_tried = np.repeat(counts, REFINED_POINTS)
            found = self.forward(objective, first, np.repeat(stages, REFINED_POINTS), tried, of_tried)
            found = found[np.arange(len(tried)), of_tried].reshape(-1, REFINED_POINTS)
            at = found.argmax(axis=1)
            rows = np.arange(len(best))
            better = found[rows, at] > values
            values = np.where(better, found[rows, at], values)
            best = np.where(better, best * steps[at], best)
            ratio = ratio ** (2 / (REFINED_POINTS - 1))
        table[stages, counts] = best
        return values

    # ---- Shortest paths ----

    def option_costs(self, objective: Objective, stages: np.ndarray, multipliers: np.ndarray) -> np.ndarray:
        """Returns (Q, K, S) costs of a layer."""
        problem = self.problem
        first, other = (weights[:, None, None] for weights in objective.weights(problem, stages))
        costs = first * problem.first_cost + other * problem.other_cost
        return costs + multipliers[:, None, None] * problem.memory(stages)

    def costs(self, objective: Objective, stages: np.ndarray, multipliers: np.ndarray) -> np.ndarray:
        """Returns (Q, W, K, S) costs of a layer, infinite if it is not allowed."""
        problem = self.problem
        within = problem.allowed & (problem.working <= self.allowances[:, None, None])
        return np.where(within, self.option_costs(objective, stages, multipliers)[:, None], np.inf)

    @cached_property
    def _by_working(self) -> list[list[tuple[np.ndarray, np.ndarray]]]:
        """Returns for each layout and each kind the allowed options by rising working memory, and (W,) how many of
        them are within each allowance.
        """
        problem = self.problem
        found = []
        for layout in range(problem.first_resharding.shape[0]):
            of_kinds = []
            for allowed, working in zip(problem.allowed, problem.working, strict=True):
                options = np.nonzero(allowed & (problem.layout == layout))[0]
                options = options[np.argsort(working[options], kind="stable")]
                of_kinds.append((options, np.searchsorted(working[options], self.allowances, side="right")))
            found.append(of_kinds)
        return found

    def by_layout(self, objective: Objective, stages: np.ndarray, multipliers: np.ndarray) -> np.ndarray:
        """Returns (Q, W, K, Y) minimum costs of a layer in each layout."""
        costs = self.option_costs(objective, stages, multipliers)
        kinds, groups = costs.shape[1], self._by_working
        found = np.full((len(stages), len(self.allowances), kinds, len(groups)), np.inf)
        for layout, of_kinds in enumerate(groups):
            for kind, (options, counts) in enumerate(of_kinds):
                if len(options):
                    least = np.minimum.accumulate(costs[:, kind, options], axis=1)
                    found[..., kind, layout] = np.where(counts > 0, least[:, np.maximum(counts, 1) - 1], np.inf)
        return found

    def resharding(self, objective: Objective, stages: np.ndarray) -> np.ndarray:
        """Returns (Q, Y, Y) costs of a resharding."""
        first, other = (weights[:, None, None] for weights in objective.weights(self.problem, stages))
        return first * self.problem.first_resharding + other * self.problem.other_resharding

    def opening(self, objective: Objective, stages: np.ndarray, multipliers: np.ndarray) -> np.ndarray:
        """Returns (Q, W, Y) costs before a stage's first layer."""
        problem = self.problem
        held = problem.stage_memory[stages, None] + self.allowances - problem.budget
        first, other = objective.weights(problem, stages)
        fixed = first * problem.stage_first_cost[stages] + other * problem.stage_other_cost[stages]
        constants = fixed[:, None] + multipliers[:, None] * held  # (Q, W)
        found = np.full((len(stages), len(self.allowances), problem.first_resharding.shape[0]), np.inf)
        found[:, :, problem.boundary] = np.where(stages[:, None] > 0, constants, np.inf)
        starts = problem.starts
        for index in np.nonzero(stages == 0)[0]:
            costs = first[index] * starts.first_cost + other[index] * starts.other_cost
            costs = costs + multipliers[index] * starts.memory
            allowed = np.where(starts.working <= self.allowances[:, None], costs, np.inf)  # (W, starts)
            for start, layout in enumerate(starts.layout):
                least = constants[index] + allowed[:, start]
                found[index, :, layout] = np.minimum(found[index, :, layout], least)
        return found

    def closing(self, objective: Objective, stages: np.ndarray, multipliers: np.ndarray) -> np.ndarray:
        """Returns (Q, W, Y) costs after a stage's last layer."""
        problem, finishes = self.problem, self.problem.finishes
        resharding, (first, other) = self.resharding(objective, stages), objective.weights(problem, stages)
        found = np.repeat(resharding[:, None, :, problem.boundary], len(self.allowances), axis=1).astype(float)
        for index in np.nonzero(stages == problem.stages - 1)[0]:
            costs = first[index] * finishes.first_cost + other[index] * finishes.other_cost
            costs = costs + multipliers[index] * finishes.memory
            allowed = np.where(finishes.working <= self.allowances[:, None], costs, np.inf)  # (W, finishes)
            found[index] = (resharding[index][:, finishes.layout] + allowed[:, None]).min(axis=2)
        return found

    def forward(
        self,
        objective: Objective,
        first: int,
        stages: np.ndarray,
        multipliers: np.ndarray,
        counts: np.ndarray | None = None,
    ) -> np.ndarray:
        """Returns (Q, longest + 1) minimums of cost + multiplier * (memory - budget), by number of layers; only those
        of `counts` (Q,) layers if these are given. The minimum with any allowance is at least that with free changes
        of layout. So allowances are left out whose minimum with free changes exceeds that of another one.
        """
        parts = tuple(part(objective, stages, multipliers) for part in (self.by_layout, self.opening, self.closing))
        resharding = self.resharding(objective, stages)
        free = self._free_moves(first, *parts)
        if self.problem.stages == 1 and counts is None:
            counts = np.full(len(stages), self.problem.layers)
        if counts is None:
            rows, places = (each.ravel() for each in np.indices((len(stages), free.shape[2])))
        else:
            rows, places = np.arange(len(stages)), counts - 1
        free, longest = free[rows, :, places], int(places.max()) + 1
        likely = np.unique(free.argmin(axis=1))
        found = self._with_moves(first, longest, resharding, *(part[:, likely] for part in parts))
        others = (free < found[rows, places + 1, None]).any(axis=0)
        others[likely] = False
        if others.any():
            more = self._with_moves(first, longest, resharding, *(part[:, others] for part in parts))
            found = np.minimum(found, more)
        return found

    def _with_moves(
        self,
        first: int,
        longest: int,
        resharding: np.ndarray,
        by_layout: np.ndarray,
        opening: np.ndarray,
        closing: np.ndarray,
    ) -> np.ndarray:
        """Returns (Q, longest + 1) minimums of any allowance of these arrays (Q, W, ...)."""
        kinds, found = self.problem.kinds, np.full((len(opening), self.longest + 1), np.inf)
        # The long axes come last, (..., W, Q), because numpy is fastest along the last axis.
        costs, reached, closing = (
            np.ascontiguousarray(np.moveaxis(part, (0, 1), (-1, -2))) for part in (by_layout, opening, closing)
        )
        moved = np.ascontiguousarray(resharding.transpose(1, 2, 0)[:, :, None])
        for count in range(1, longest + 1):
            reached = _resharded(reached, moved) + costs[kinds[first + count - 1]]
            found[:, count] = (reached + closing).min(axis=(0, 1))
        return found

    def _free_moves(self, first: int, by_layout: np.ndarray, opening: np.ndarray, closing: np.ndarray) -> np.ndarray:
        """Returns (Q, W, n) minimums with each allowance if changes of layout are free, of up to n layers."""
        least = by_layout.min(axis=3)[:, :, self.problem.kinds[first : first + self.longest]]
        return least.cumsum(axis=2) + (opening.min(axis=2) + closing.min(axis=2))[..., None]

    def _without_moves(
        self, objective: Objective, first: int, stages: np.ndarray, multipliers: np.ndarray
    ) -> np.ndarray:
        """Returns (Q, longest + 1) minimums if changes of layout are free."""
        parts = (part(objective, stages, multipliers) for part in (self.by_layout, self.opening, self.closing))
        least = self._free_moves(first, *parts).min(axis=1)
        found = np.full((len(stages), self.longest + 1), np.inf)
        found[:, 1 : 1 + least.shape[1]] = least
        return found


def _resharded(reached: np.ndarray, resharding: np.ndarray) -> np.ndarray:
    """Returns the minimums of (Y, W, Q) in each layout after a resharding (Y, Y, 1, Q) from any layout."""
    found = reached[0] + resharding[0]
    for before, cost in zip(reached[1:], resharding[1:], strict=True):
        np.minimum(found, before + cost, out=found)
    return found


@dataclass(frozen=True, kw_only=True)
class Distances:
    """Holds shortest distances of one stage of n layers, under one objective and a `multiplier` of a byte. `costs` (W,
    K, S) are those of a layer. `before` and `after` (n + 1, W, Y) are minimums from the stage's beginning to after k
    layers, and from there to its end.
    """

    multiplier: float
    costs: np.ndarray
    before: np.ndarray
    after: np.ndarray

    @classmethod
    def from_bounds(cls, bounds: StageBounds, objective: Objective, first: int, stage: int, count: int) -> Distances:
        """Computes the distances with the best multiplier that `bounds` has."""
        multiplier = bounds.multiplier(objective, first, stage, count)
        stages, multipliers = np.array([stage]), np.array([multiplier])
        resharding = bounds.resharding(objective, stages)[0]
        costs = bounds.costs(objective, stages, multipliers)
        by_layout = bounds.by_layout(objective, stages, multipliers)[0]  # (W, K, Y)
        kinds = bounds.problem.kinds[first : first + count]
        before = [bounds.opening(objective, stages, multipliers)[0]]
        for kind in kinds:
            before.append((before[-1][..., None] + resharding).min(axis=1) + by_layout[:, kind])
        after = [bounds.closing(objective, stages, multipliers)[0]]
        for kind in kinds[::-1]:
            after.append((resharding + (by_layout[:, kind] + after[-1])[:, None]).min(axis=2))
        return cls(multiplier=multiplier, costs=costs[0], before=np.array(before), after=np.array(after[::-1]))
