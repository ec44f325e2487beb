# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""A lower bound of a branch by Lagrangian relaxation: memory and the slowest stage become prices.

For weights w of the stages (w >= 0, sum 1) and prices l >= 0 of their memory,

    sum A_i + max B_i  >=  sum (A_i + w_i B_i + l_i (memory_i - budget)),

and the right side is a shortest path through (stage, layer, layout). Distances to and from each place bound every
solution that goes through it, which is what leaves out options and partial solutions. Source: A. M. Geoffrion,
"Lagrangean relaxation for integer programming" (1974).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from galvatron_hf.planner.branch import Branch, Choice, Options, score


ROUNDS = 30


@dataclass(frozen=True, kw_only=True)
class Relaxation:
    """Distances under fixed prices.

    Attributes:
        weights, prices (`np.ndarray`): (p,) w and l.
        bound (`float`): no solution costs less.
        costs (`np.ndarray`): (p, K, S) of a layer, infinite where it is not allowed.
        ahead (`np.ndarray`): (p, L + 1, Y) least from a place, some layer of the stage behind it, to the end.
        behind (`np.ndarray`): (p, L + 1, Y) least from the beginning to where layer l is next, its input in layout y.
        opening (`np.ndarray`): (p, L + 1) least of all before stage i begins with layer l; without the stage's own.
    """

    weights: np.ndarray
    prices: np.ndarray
    bound: float
    costs: np.ndarray
    ahead: np.ndarray
    behind: np.ndarray
    opening: np.ndarray


@dataclass(frozen=True, kw_only=True)
class Found:
    """The best bound that was found, and the best solution on the way there, if one fitted."""

    relaxation: Relaxation
    choice: Choice | None
    cost: int | None


def tighten(branch: Branch, enough: float = np.inf) -> Found:
    """
    Raises the bound by projected subgradient steps (B. T. Polyak, 1969).

    Args:
        branch ([`Branch`]): Which some choice of options solves, if memory does not count.
        enough (`float`): A bound at which to stop.
    """
    stages = branch.stages
    weights, prices = np.full(stages, 1 / stages), np.zeros(stages)
    best, choice, cost = None, None, None
    step, stalled = 1.0, 0
    for _ in range(ROUNDS):
        problem = _Priced(branch, weights, prices)
        ahead, entering = problem.to_the_end()
        bound = float(np.min(problem.starts + entering[branch.starts.layout]))
        if bound == np.inf:  # no option is allowed somewhere
            best = (bound, weights, prices)
            break
        if best is None or bound > best[0] * (1 + 1e-7):
            best, stalled = (bound, weights, prices), 0
        else:
            stalled += 1
            step, stalled = (step / 2, 0) if stalled == 3 else (step, stalled)
        path = problem.path(ahead, entering)
        found = score(branch, path)
        if max(found.memory) <= branch.budget and (cost is None or found.cost < cost):
            choice, cost = path, found.cost
        if best[0] >= enough or (cost is not None and cost <= best[0] * (1 + 1e-12)):
            break
        target = min(cost if cost is not None else np.inf, max(1.05 * best[0], 1.0))
        weights, prices = _stepped(branch, found.b, found.memory, weights, prices, step * max(target - bound, 0.0))
    return Found(relaxation=relax(branch, *best[1:]), choice=choice, cost=cost)


def _stepped(
    branch: Branch, b: tuple[int, ...], memory: tuple[int, ...], weights: np.ndarray, prices: np.ndarray, gap: float
) -> tuple[np.ndarray, np.ndarray]:
    """One step along the subgradient, measured in shares of the budget and of the mean B."""
    scale = max(float(np.mean(b)), 1.0)
    slope_of_prices = np.array(memory) / branch.budget - 1.0
    slope_of_prices = np.where((prices == 0) & (slope_of_prices < 0), 0.0, slope_of_prices)
    slope_of_weights = np.array(b) / scale - 1.0
    length = float(slope_of_prices @ slope_of_prices + slope_of_weights @ slope_of_weights)
    if length == 0:
        return weights, prices
    prices = np.maximum(prices + gap / length * slope_of_prices / branch.budget, 0.0)
    return _on_simplex(weights + gap / length * slope_of_weights / scale), prices


def _on_simplex(point: np.ndarray) -> np.ndarray:
    """The nearest point with no negative part and sum 1."""
    falling = np.sort(point)[::-1]
    over = (np.cumsum(falling) - 1) / np.arange(1, len(point) + 1)
    return np.maximum(point - over[np.nonzero(falling > over)[0][-1]], 0.0)


def relax(branch: Branch, weights: np.ndarray, prices: np.ndarray) -> Relaxation:
    """The bound for these weights and prices."""
    problem = _Priced(branch, weights, prices)
    ahead, entering = problem.to_the_end()
    behind, opening = problem.from_the_beginning()
    return Relaxation(
        weights=weights,
        prices=prices,
        bound=float(np.min(problem.starts + entering[branch.starts.layout])),
        costs=problem.costs,
        ahead=ahead,
        behind=behind,
        opening=opening,
    )


class _Priced:
    """A branch whose costs are single numbers."""

    def __init__(self, branch: Branch, weights: np.ndarray, prices: np.ndarray):
        self.branch = branch
        w, price = weights[:, None, None], prices[:, None, None]
        memory = branch.state + branch.in_flight[:, None, None] * branch.activation
        self.costs = np.where(branch.allowed, branch.a + w * branch.b + price * memory, np.inf)
        self.moves = branch.move_a + w * branch.move_b  # (p, Y, Y)
        layouts = branch.move_a.shape[0]
        self.by_layout = np.full((*self.costs.shape[:2], layouts), np.inf)  # (p, K, Y)
        for layout in range(layouts):
            members = branch.layout == layout
            if members.any():
                self.by_layout[:, :, layout] = self.costs[:, :, members].min(axis=2)
        # Whatever a stage has, its largest working memory is at least the least one of a layer.
        least = int(np.min(np.where(branch.allowed, branch.working, np.iinfo(np.int64).max)))
        self.stage = branch.stage_a + weights * branch.stage_b
        self.stage = self.stage + prices * (branch.stage_memory + least - branch.budget)
        self.starts = self._ends(branch.starts, 0, weights, prices) + self.stage[0]
        self.finishes = self._ends(branch.finishes, -1, weights, prices)

    @staticmethod
    def _ends(options: Options, stage: int, weights: np.ndarray, prices: np.ndarray) -> np.ndarray:
        return options.a + weights[stage] * options.b + prices[stage] * options.memory

    def to_the_end(self) -> tuple[np.ndarray, np.ndarray]:
        """`ahead`, and (Y,) from before layer 0 in the first stage."""
        branch, boundary = self.branch, self.branch.boundary
        stages, layers, layouts = branch.stages, branch.layers, self.moves.shape[1]
        ahead = np.full((stages, layers + 1, layouts), np.inf)
        ahead[-1, layers] = (self.moves[-1][:, branch.finishes.layout] + self.finishes).min(axis=1)
        onward = np.full((stages, layouts), np.inf)
        for layer in range(layers - 1, -1, -1):
            behind = self.by_layout[:, branch.kinds[layer]] + ahead[:, layer + 1]  # (p, Y)
            onward = (self.moves + behind[:, None, :]).min(axis=2)
            ahead[:, layer] = onward
            closed = self.moves[:-1, :, boundary] + (self.stage[1:] + onward[1:, boundary])[:, None]
            ahead[:-1, layer] = np.minimum(ahead[:-1, layer], closed)
        return ahead, onward[0]

    def from_the_beginning(self) -> tuple[np.ndarray, np.ndarray]:
        """`behind` and `opening`."""
        branch, boundary = self.branch, self.branch.boundary
        stages, layers, layouts = branch.stages, branch.layers, self.moves.shape[1]
        behind = np.full((stages, layers + 1, layouts), np.inf)
        opening = np.full((stages, layers + 1), np.inf)
        opening[0, 0] = 0.0
        np.minimum.at(behind[0, 0], branch.starts.layout, self.starts)
        for layer in range(layers):
            reached = (behind[:, layer, :, None] + self.moves).min(axis=1) + self.by_layout[:, branch.kinds[layer]]
            behind[:, layer + 1] = reached
            opening[1:, layer + 1] = (reached[:-1] + self.moves[:-1, :, boundary]).min(axis=1)
            entered = opening[1:, layer + 1] + self.stage[1:]
            behind[1:, layer + 1, boundary] = np.minimum(behind[1:, layer + 1, boundary], entered)
        return behind, opening

    def path(self, ahead: np.ndarray, entering: np.ndarray) -> Choice:
        """A solution of the relaxed problem."""
        branch, boundary = self.branch, self.branch.boundary
        start = int(np.argmin(self.starts + entering[branch.starts.layout]))
        stage, layout, bounds, options = 0, int(branch.starts.layout[start]), [0], []
        for layer, kind in enumerate(branch.kinds):
            onward = self.moves[stage, layout] + self.by_layout[stage, kind] + ahead[stage, layer + 1]
            if layer > bounds[-1] and stage + 1 < branch.stages:
                behind = self.by_layout[stage + 1, kind] + ahead[stage + 1, layer + 1]
                entered = self.moves[stage + 1, boundary] + behind
                closed = self.moves[stage, layout, boundary] + self.stage[stage + 1] + entered.min()
                if closed < onward.min():
                    stage, onward = stage + 1, entered
                    bounds.append(layer)
            layout = int(np.argmin(onward))
            members = np.where(branch.layout == layout, self.costs[stage, kind], np.inf)
            options.append(int(np.argmin(members)))
        finish = int(np.argmin(self.moves[-1][layout, branch.finishes.layout] + self.finishes))
        return Choice(bounds=(*bounds, branch.layers), options=tuple(options), start=start, finish=finish)
