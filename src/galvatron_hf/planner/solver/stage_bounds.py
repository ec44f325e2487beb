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
from functools import cached_property

import numpy as np

from galvatron_hf.planner.solver.problem import SearchProblem


# Multipliers are tried in units of (cost of the stage / budget), then between the neighbours of the best.
GRID = np.concatenate([[0.0], np.geomspace(0.004, 40.0, 9)])
REFINED_POINTS, REFINEMENTS = 7, 4
FEW_ALLOWANCES = 16


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


class StageBounds:
    """Bounds stages of at most `longest` layers; `allowances` are (W,) bytes of working memory, rising. If
    `free_moves`, changes of layout cost nothing and similar allowances are one: that bounds less closely, and takes a
    small part of the time.
    """

    def __init__(self, problem: SearchProblem, *, free_moves: bool = False):
        self.problem, self.free_moves = problem, free_moves
        working = [problem.working[problem.allowed], problem.starts.working, problem.finishes.working]
        self.allowances = np.unique(np.concatenate(working))
        # Of joined allowances, the least is held, and the largest decides which options are allowed.
        self._held = self.allowances
        if free_moves and len(self.allowances) > FEW_ALLOWANCES:
            first = np.arange(FEW_ALLOWANCES) * len(self.allowances) // FEW_ALLOWANCES
            self._held = self.allowances[first]
            self.allowances = self.allowances[np.append(first[1:] - 1, len(self.allowances) - 1)]
        self.longest = problem.layers - (problem.stages - 1)
        self._multipliers: dict[tuple[Objective, int], np.ndarray] = {}

    @cached_property
    def classes(self) -> dict[int, list[int]]:
        """Groups layers at which a stage may begin under the earliest one with the same sequence of kinds."""
        kinds, groups = self.problem.kinds, {0: [0]}
        for begin in range(1, self.problem.layers):
            rest = kinds[begin:]
            equal = (first for first in groups if np.array_equal(kinds[first : first + len(rest)], rest))
            groups.setdefault(next(equal, begin), []).append(begin)
        return groups

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
        and no cost the shortest path is memory.
        """
        stages = np.arange(self.problem.stages)
        return self.forward(MEMORY, first, stages, np.ones(len(stages)), self.longest) + self.problem.budget

    def multiplier(self, objective: Objective, first: int, stage: int, count: int) -> float:
        """Returns the best multiplier found for a stage of `count` layers."""
        return float(self._multipliers[objective, first][stage, count])

    def _on_grid(self, objective: Objective, first: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns bounds (P, p, longest + 1) and multipliers (P, p)."""
        stages, every = self.problem.stages, np.arange(self.problem.stages)
        free = self.forward(objective, first, every, np.zeros(stages), self.longest)
        middle = max(1, self.problem.layers // stages)
        scale = np.maximum(np.where(np.isfinite(free[:, middle]), free[:, middle], 0.0), 1.0) / self.problem.budget
        multipliers = GRID[:, None] * scale
        flat = self.forward(objective, first, np.tile(every, len(GRID)), multipliers.ravel(), self.longest)
        return flat.reshape(len(GRID), stages, -1), multipliers

    def refine(self, objective: Objective, first: int, stages: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Returns (Q,) better bounds of stages with these numbers of layers, and keeps their multipliers."""
        table = self._multipliers[objective, first]
        best = table[stages, counts]
        ratio = GRID[2] / GRID[1]
        values = self.forward(objective, first, stages, best, int(counts.max()))[np.arange(len(stages)), counts]
        for _ in range(REFINEMENTS):
            steps = np.geomspace(1 / ratio, ratio, REFINED_POINTS)
            tried = (best[:, None] * steps).ravel()
            found = self.forward(objective, first, np.repeat(stages, REFINED_POINTS), tried, int(counts.max()))
            found = found[np.arange(len(tried)), np.repeat(counts, REFINED_POINTS)].reshape(-1, REFINED_POINTS)
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
        """Returns for each layout (one stands for all if moves are free) and each kind the allowed options by rising
        working memory, and (W,) how many of them are within each allowance.
        """
        problem = self.problem
        layouts = 0 * problem.layout if self.free_moves else problem.layout
        found = []
        for layout in range(1 if self.free_moves else problem.first_resharding.shape[0]):
            of_kinds = []
            for allowed, working in zip(problem.allowed, problem.working, strict=True):
                options = np.nonzero(allowed & (layouts == layout))[0]
                options = options[np.argsort(working[options], kind="stable")]
                of_kinds.append((options, np.searchsorted(working[options], self.allowances, side="right")))
            found.append(of_kinds)
        return found

    def by_layout(self, objective: Objective, stages: np.ndarray, multipliers: np.ndarray) -> np.ndarray:
        """Returns (Q, W, K, Y) minimum costs of a layer in each layout; Y is 1 if moves are free."""
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
        held = problem.stage_memory[stages, None] + self._held - problem.budget
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
        self, objective: Objective, first: int, stages: np.ndarray, multipliers: np.ndarray, longest: int
    ) -> np.ndarray:
        """Returns (Q, longest + 1) minimums of cost + multiplier * (memory - budget), by number of layers."""
        if self.free_moves or objective == MEMORY:  # changes of layout hold no memory
            return self._without_moves(objective, first, stages, multipliers, longest)
        kinds, found = self.problem.kinds, np.full((len(stages), longest + 1), np.inf)
        # The long axes come last, (..., W, Q), because numpy is fastest along the last axis.
        resharding = np.ascontiguousarray(self.resharding(objective, stages).transpose(1, 2, 0)[:, :, None])
        costs = self.by_layout(objective, stages, multipliers)
        by_layout = np.ascontiguousarray(costs.transpose(2, 3, 1, 0))
        reached = np.ascontiguousarray(self.opening(objective, stages, multipliers).transpose(2, 1, 0))
        closing = np.ascontiguousarray(self.closing(objective, stages, multipliers).transpose(2, 1, 0))
        for count in range(1, min(longest, len(kinds) - first) + 1):
            reached = _resharded(reached, resharding) + by_layout[kinds[first + count - 1]]
            found[:, count] = (reached + closing).min(axis=(0, 1))
        return found

    def _without_moves(
        self, objective: Objective, first: int, stages: np.ndarray, multipliers: np.ndarray, longest: int
    ) -> np.ndarray:
        """Returns lower bounds of what `forward` returns, with any layout at once."""
        kinds, found = self.problem.kinds, np.full((len(stages), longest + 1), np.inf)
        least = self.by_layout(objective, stages, multipliers).min(axis=3)  # (Q, W, K)
        ends = self.opening(objective, stages, multipliers).min(axis=2)
        ends = ends + self.closing(objective, stages, multipliers).min(axis=2)  # (Q, W)
        layers = least[:, :, kinds[first : first + longest]].cumsum(axis=2)
        found[:, 1 : 1 + layers.shape[2]] = (layers + ends[..., None]).min(axis=1)
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
