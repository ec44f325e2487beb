# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""What a stage of n layers costs at least, for every n: memory becomes a price, one layer after the other.

For a price l >= 0, `cost + l (memory - budget)` of a stage that fits is at most its cost, and the least of the left
side over all options is a shortest path. The best price makes the bound (Lagrangian relaxation: A. M. Geoffrion,
1974). A stage's largest working memory is no sum, so a stage also chooses an allowance for it, one of the values that
occur; options above it are not for that stage.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from galvatron_hf.planner.solver.problem import SearchProblem


# OptionCosts are tried in units of (cost of the stage / budget), then between the neighbours of the best.
GRID = np.concatenate([[0.0], np.geomspace(0.004, 40.0, 9)])
FINER, ROUNDS = 7, 4


@dataclass(frozen=True)
class Objective:
    """What of a stage is bounded: `of_a` A + `of_b` B, `waiting` without its k times A (see `branch.py`)."""

    of_a: int
    of_b: int
    waiting: bool = False

    def weights(self, branch: SearchProblem, stages: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(Q,) and (Q,) of A and B in each of the stages."""
        ahead = branch.ahead[stages]
        return self.of_a - self.waiting * ahead, np.full(ahead.shape, self.of_b)


A, TOTAL, WAITING, MEMORY = Objective(1, 0), Objective(1, 1), Objective(1, 1, waiting=True), Objective(0, 0)


class StageBounds:
    """
    Bounds of the stages of a branch.

    Args:
        branch ([`SearchProblem`]): The problem.

    Attributes:
        allowances (`np.ndarray`): (W,) bytes of working memory, rising.
        longest (`int`): layers that a stage can have.
    """

    def __init__(self, branch: SearchProblem):
        self.branch = branch
        working = [branch.working[branch.allowed], branch.starts.working, branch.finishes.working]
        self.allowances = np.unique(np.concatenate(working))
        self.longest = branch.layers - (branch.stages - 1)
        self._prices: dict[tuple[Objective, int], np.ndarray] = {}

    @cached_property
    def classes(self) -> dict[int, list[int]]:
        """Places where a stage can begin, those from which the layers are the same under the earliest of them."""
        kinds, groups = self.branch.kinds, {0: [0]}
        for place in range(1, self.branch.layers):
            rest = kinds[place:]
            alike = (first for first in groups if np.array_equal(kinds[first : first + len(rest)], rest))
            groups.setdefault(next(alike, place), []).append(place)
        return groups

    def class_of(self, place: int) -> int:
        """The first place whose layers are those from `place` on."""
        return next(first for first, places in self.classes.items() if place in places)

    def lower(self, objective: Objective, first: int) -> np.ndarray:
        """(p, longest + 1) least of each stage that has n layers from `first` on; infinite where none fits."""
        bounds, prices = self._on_grid(objective, first)
        best = bounds.argmax(axis=0)
        self._prices[objective, first] = prices[best, np.arange(prices.shape[1])[:, None]]
        return bounds.max(axis=0)

    def least_memory(self, first: int) -> np.ndarray:
        """(p, longest + 1) fewest bytes of each stage that has n layers from `first` on.

        With a price of 1 and no cost the shortest path is memory.
        """
        stages = np.arange(self.branch.stages)
        return self.forward(MEMORY, first, stages, np.ones(len(stages)), self.longest) + self.branch.budget

    def price(self, objective: Objective, first: int, stage: int, count: int) -> float:
        """The best price on the grid for a stage of `count` layers."""
        return float(self._prices[objective, first][stage, count])

    def _on_grid(self, objective: Objective, first: int) -> tuple[np.ndarray, np.ndarray]:
        """Bounds (P, p, longest + 1) and prices (P, p)."""
        stages, every = self.branch.stages, np.arange(self.branch.stages)
        free = self.forward(objective, first, every, np.zeros(stages), self.longest)
        middle = max(1, self.branch.layers // stages)
        scale = np.maximum(np.where(np.isfinite(free[:, middle]), free[:, middle], 0.0), 1.0) / self.branch.budget
        prices = GRID[:, None] * scale
        flat = self.forward(objective, first, np.tile(every, len(GRID)), prices.ravel(), self.longest)
        return flat.reshape(len(GRID), stages, -1), prices

    def refine(self, objective: Objective, first: int, stages: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """(Q,) better bounds of some stages with some numbers of layers; their prices are kept."""
        table = self._prices[objective, first]
        best = table[stages, counts]
        ratio = GRID[2] / GRID[1]
        values = self.forward(objective, first, stages, best, int(counts.max()))[np.arange(len(stages)), counts]
        for _ in range(ROUNDS):
            steps = np.geomspace(1 / ratio, ratio, FINER)
            tried = (best[:, None] * steps).ravel()
            found = self.forward(objective, first, np.repeat(stages, FINER), tried, int(counts.max()))
            found = found[np.arange(len(tried)), np.repeat(counts, FINER)].reshape(-1, FINER)
            at = found.argmax(axis=1)
            rows = np.arange(len(best))
            better = found[rows, at] > values
            values = np.where(better, found[rows, at], values)
            best = np.where(better, best * steps[at], best)
            ratio = ratio ** (2 / (FINER - 1))
        table[stages, counts] = best
        return values

    # ---- Shortest paths ----

    def costs(self, objective: Objective, stages: np.ndarray, prices: np.ndarray) -> np.ndarray:
        """(Q, W, K, S) of a layer, infinite where it is not allowed."""
        branch = self.branch
        of_a, of_b = (weights[:, None, None] for weights in objective.weights(branch, stages))
        costs = of_a * branch.a + of_b * branch.b + prices[:, None, None] * branch.memory(stages)
        within = branch.allowed & (branch.working <= self.allowances[:, None, None])
        return np.where(within, costs[:, None], np.inf)

    def by_layout(self, costs: np.ndarray) -> np.ndarray:
        """(Q, W, K, Y) the least cost in each layout."""
        layouts = self.branch.move_a.shape[0]
        found = np.full((*costs.shape[:3], layouts), np.inf)
        for layout in range(layouts):
            members = self.branch.layout == layout
            if members.any():
                found[..., layout] = costs[..., members].min(axis=3)
        return found

    def moves(self, objective: Objective, stages: np.ndarray) -> np.ndarray:
        """(Q, Y, Y) of a change of layout."""
        of_a, of_b = (weights[:, None, None] for weights in objective.weights(self.branch, stages))
        return of_a * self.branch.move_a + of_b * self.branch.move_b

    def opened(self, objective: Objective, stages: np.ndarray, prices: np.ndarray) -> np.ndarray:
        """(Q, W, Y) before a stage's first layer."""
        branch = self.branch
        held = branch.stage_memory[stages, None] + self.allowances - branch.budget
        of_a, of_b = objective.weights(branch, stages)
        fixed = of_a * branch.stage_a[stages] + of_b * branch.stage_b[stages]
        constants = fixed[:, None] + prices[:, None] * held  # (Q, W)
        found = np.full((len(stages), len(self.allowances), branch.move_a.shape[0]), np.inf)
        found[:, :, branch.boundary] = np.where(stages[:, None] > 0, constants, np.inf)
        starts = branch.starts
        for index in np.nonzero(stages == 0)[0]:
            costs = of_a[index] * starts.a + of_b[index] * starts.b + prices[index] * starts.memory
            allowed = np.where(starts.working <= self.allowances[:, None], costs, np.inf)  # (W, starts)
            for start, layout in enumerate(starts.layout):
                least = constants[index] + allowed[:, start]
                found[index, :, layout] = np.minimum(found[index, :, layout], least)
        return found

    def closing(self, objective: Objective, stages: np.ndarray, prices: np.ndarray) -> np.ndarray:
        """(Q, W, Y) after a stage's last layer."""
        branch, finishes = self.branch, self.branch.finishes
        moves, (of_a, of_b) = self.moves(objective, stages), objective.weights(branch, stages)
        found = np.repeat(moves[:, None, :, branch.boundary], len(self.allowances), axis=1).astype(float)
        for index in np.nonzero(stages == branch.stages - 1)[0]:
            costs = of_a[index] * finishes.a + of_b[index] * finishes.b + prices[index] * finishes.memory
            allowed = np.where(finishes.working <= self.allowances[:, None], costs, np.inf)  # (W, finishes)
            found[index] = (moves[index][:, finishes.layout] + allowed[:, None]).min(axis=2)
        return found

    def forward(
        self, objective: Objective, first: int, stages: np.ndarray, prices: np.ndarray, longest: int
    ) -> np.ndarray:
        """(Q, longest + 1) least of cost + price (memory - budget), by number of layers."""
        kinds, found = self.branch.kinds, np.full((len(stages), longest + 1), np.inf)
        # The long axes come last, (..., W, Q): along them the many small steps are quick.
        moves = np.ascontiguousarray(self.moves(objective, stages).transpose(1, 2, 0)[:, :, None])
        by_layout = np.ascontiguousarray(self.by_layout(self.costs(objective, stages, prices)).transpose(2, 3, 1, 0))
        here = np.ascontiguousarray(self.opened(objective, stages, prices).transpose(2, 1, 0))
        closing = np.ascontiguousarray(self.closing(objective, stages, prices).transpose(2, 1, 0))
        for count in range(1, min(longest, len(kinds) - first) + 1):
            here = _moved(here, moves) + by_layout[kinds[first + count - 1]]
            found[:, count] = (here + closing).min(axis=(0, 1))
        return found


def _moved(here: np.ndarray, moves: np.ndarray) -> np.ndarray:
    """The least of (Y, W, Q) in each layout behind moves (Y, Y, 1, Q) from each to each."""
    found = here[0] + moves[0]
    for before, move in zip(here[1:], moves[1:], strict=True):
        np.minimum(found, before + move, out=found)
    return found


@dataclass(frozen=True, kw_only=True)
class Distances:
    """Of one stage with n layers, under one objective and price; W allowances, Y layouts.

    Attributes:
        price (`float`): of a byte.
        costs (`np.ndarray`): (W, K, S) of a layer.
        before (`np.ndarray`): (n + 1, W, Y) least from the stage's beginning to after k layers.
        behind (`np.ndarray`): (n + 1, W, Y) least from after k layers to the stage's end.
    """

    price: float
    costs: np.ndarray
    before: np.ndarray
    behind: np.ndarray

    @classmethod
    def of(cls, bounds: StageBounds, objective: Objective, first: int, stage: int, count: int) -> Distances:
        """With the best price that is known."""
        price = bounds.price(objective, first, stage, count)
        stages, prices = np.array([stage]), np.array([price])
        moves = bounds.moves(objective, stages)[0]
        costs = bounds.costs(objective, stages, prices)
        by_layout = bounds.by_layout(costs)[0]  # (W, K, Y)
        kinds = bounds.branch.kinds[first : first + count]
        before = [bounds.opened(objective, stages, prices)[0]]
        for kind in kinds:
            before.append((before[-1][..., None] + moves).min(axis=1) + by_layout[:, kind])
        behind = [bounds.closing(objective, stages, prices)[0]]
        for kind in kinds[::-1]:
            behind.append((moves + (by_layout[:, kind] + behind[-1])[:, None]).min(axis=2))
        return cls(price=price, costs=costs[0], before=np.array(before), behind=np.array(behind[::-1]))
