# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""A lower bound of a branch by Lagrangian relaxation: memory and the slowest stage become prices.

For weights w of the stages (w >= 0, sum 1) and prices l >= 0 of their memory,

    sum A_i + max B_i  >=  sum (A_i + w_i B_i + l_i (memory_i - budget)),

and the right side is a shortest path through (stage, layer, layout). Distances to and from each place bound every
solution that goes through it, which is what leaves out options and partial solutions. A stage's largest working memory
is no sum, so a stage also chooses an allowance for it, one of the values that occur; options above it are not for that
stage. Source: A. M. Geoffrion, "Lagrangean relaxation for integer programming" (1974).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from galvatron_hf.planner.branch import Branch, Choice, Options, score


ROUNDS = 40


@dataclass(frozen=True, kw_only=True)
class Relaxation:
    """Distances under fixed prices; W allowances.

    Attributes:
        weights, prices (`np.ndarray`): (p,) w and l.
        allowances (`np.ndarray`): (W,) bytes, rising.
        bound (`float`): no solution costs less.
        costs (`np.ndarray`): (p, W, K, S) of a layer, infinite where it is not allowed.
        constants (`np.ndarray`): (p, W) of a stage.
        ahead (`np.ndarray`): (p, W, L + 1, Y) least from a place, some layer of the stage behind it, to the end.
        behind (`np.ndarray`): (p, W, L + 1, Y) least from the beginning to where layer l is next, its input in
            layout y.
        opening (`np.ndarray`): (p, L + 1) least of all before stage i begins with layer l; without the stage's own.
    """

    weights: np.ndarray
    prices: np.ndarray
    allowances: np.ndarray
    bound: float
    costs: np.ndarray
    constants: np.ndarray
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
        branch ([`Branch`]): The problem.
        enough (`float`): A bound at which to stop.
    """
    stages = branch.stages
    weights, prices = np.full(stages, 1 / stages), np.zeros(stages)
    best, choice, cost = None, None, None
    step, stalled = 1.0, 0
    for _ in range(ROUNDS):
        problem = _Priced(branch, weights, prices)
        bound = problem.to_the_end()
        if bound == np.inf:  # no option is allowed somewhere
            best = (bound, weights, prices)
            break
        if best is None or bound > best[0] + 1e-7 * abs(best[0]):
            best, stalled = (bound, weights, prices), 0
        else:
            stalled += 1
            step, stalled = (step / 2, 0) if stalled == 3 else (step, stalled)
        path = problem.path()
        found = score(branch, path)
        if max(found.memory) <= branch.budget and (cost is None or found.cost < cost):
            choice, cost = path, found.cost
        if best[0] >= enough or (cost is not None and cost <= best[0] * (1 + 1e-12)):
            break
        target = min(np.inf if cost is None else cost, 1.03 * best[0] + 1.0)
        weights, prices = _stepped(branch, found.b, found.memory, weights, prices, step * max(target - bound, 0.0))
    return Found(relaxation=relax(branch, *best[1:]), choice=choice, cost=cost)


def _stepped(
    branch: Branch, b: tuple[int, ...], memory: tuple[int, ...], weights: np.ndarray, prices: np.ndarray, gap: float
) -> tuple[np.ndarray, np.ndarray]:
    """One step along the subgradient, measured in shares of the budget and of the mean B."""
    scale = max(float(np.mean(b)), 1.0)
    slope_of_prices = np.array(memory) / branch.budget - 1.0
    slope_of_prices = np.where((prices == 0) & (slope_of_prices < 0), 0.0, slope_of_prices)
    slope_of_weights = np.array(b) / scale - np.mean(b) / scale
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
    """The bound for these weights and prices, with all distances."""
    problem = _Priced(branch, weights, prices, every_allowance=True)
    bound = problem.to_the_end()
    behind, opening = problem.from_the_beginning()
    return Relaxation(
        weights=weights,
        prices=prices,
        allowances=problem.allowances,
        bound=bound,
        costs=problem.costs,
        constants=problem.constants,
        ahead=problem.ahead,
        behind=behind,
        opening=opening,
    )


def quick_bound(branch: Branch) -> float:
    """The bound without any prices, each stage weighing the same."""
    return _Priced(branch, np.full(branch.stages, 1 / branch.stages), np.zeros(branch.stages)).to_the_end()


def allowances(branch: Branch) -> np.ndarray:
    """(W,) the working memories that a stage can have at most."""
    return np.unique(np.concatenate([branch.working[branch.allowed], branch.starts.working, branch.finishes.working]))


class _Priced:
    """A branch whose costs are single numbers."""

    def __init__(self, branch: Branch, weights: np.ndarray, prices: np.ndarray, *, every_allowance: bool = False):
        self.branch = branch
        # Where memory has no price, the largest allowance is no worse a bound than all of them.
        self.allowances = allowances(branch) if prices.any() or every_allowance else allowances(branch)[-1:]
        w, price = weights[:, None, None], prices[:, None, None]
        memory = branch.state + branch.in_flight[:, None, None] * branch.activation
        costs = np.where(branch.allowed, branch.a + w * branch.b + price * memory, np.inf)
        within = branch.working <= self.allowances[:, None, None]  # (W, K, S)
        self.costs = np.where(within, costs[:, None], np.inf)
        self.moves = branch.move_a + w * branch.move_b  # (p, Y, Y)
        layouts = branch.move_a.shape[0]
        self.by_layout = np.full((*self.costs.shape[:3], layouts), np.inf)  # (p, W, K, Y)
        for layout in range(layouts):
            members = branch.layout == layout
            if members.any():
                self.by_layout[..., layout] = self.costs[..., members].min(axis=3)
        held = branch.stage_memory[:, None] + self.allowances - branch.budget
        self.constants = (branch.stage_a + weights * branch.stage_b)[:, None] + prices[:, None] * held  # (p, W)
        self.starts = self._ends(branch.starts, weights[0], prices[0]) + self.constants[0][:, None]  # (W, starts)
        self.finishes = self._ends(branch.finishes, weights[-1], prices[-1])  # (W, finishes)
        self.ahead, self.onward = np.zeros(0), np.zeros(0)

    def _ends(self, options: Options, weight: float, price: float) -> np.ndarray:
        costs = options.a + weight * options.b + price * options.memory
        return np.where(options.working <= self.allowances[:, None], costs, np.inf)

    def to_the_end(self) -> float:
        """Fills `ahead` and returns the least from the beginning."""
        branch, boundary = self.branch, self.branch.boundary
        stages, layers, layouts = branch.stages, branch.layers, self.moves.shape[1]
        ahead = np.full((stages, len(self.allowances), layers + 1, layouts), np.inf)
        finished = self.moves[-1][:, branch.finishes.layout] + self.finishes[:, None]  # (W, Y, finishes)
        ahead[-1, :, layers] = finished.min(axis=2)
        onward = np.full((stages, len(self.allowances), layouts), np.inf)
        for layer in range(layers - 1, -1, -1):
            behind = self.by_layout[:, :, branch.kinds[layer]] + ahead[:, :, layer + 1]  # (p, W, Y)
            onward = (self.moves[:, None] + behind[:, :, None, :]).min(axis=3)
            ahead[:, :, layer] = onward
            entered = (self.constants[1:] + onward[1:, :, boundary]).min(axis=1)  # (p - 1,)
            closed = self.moves[:-1, :, boundary] + entered[:, None]
            ahead[:-1, :, layer] = np.minimum(ahead[:-1, :, layer], closed[:, None])
        self.ahead, self.onward = ahead, onward
        return float(np.min(self.starts + onward[0][:, branch.starts.layout]))

    def from_the_beginning(self) -> tuple[np.ndarray, np.ndarray]:
        """`behind` and `opening`."""
        branch, boundary = self.branch, self.branch.boundary
        stages, layers, layouts = branch.stages, branch.layers, self.moves.shape[1]
        behind = np.full((stages, len(self.allowances), layers + 1, layouts), np.inf)
        opening = np.full((stages, layers + 1), np.inf)
        opening[0, 0] = 0.0
        for start, layout in enumerate(branch.starts.layout):
            behind[0, :, 0, layout] = np.minimum(behind[0, :, 0, layout], self.starts[:, start])
        for layer in range(layers):
            reached = (behind[:, :, layer, :, None] + self.moves[:, None]).min(axis=2)
            reached = reached + self.by_layout[:, :, branch.kinds[layer]]
            behind[:, :, layer + 1] = reached
            closed = reached[:-1] + self.moves[:-1, None, :, boundary]
            opening[1:, layer + 1] = closed.min(axis=(1, 2))
            entered = opening[1:, layer + 1, None] + self.constants[1:]
            behind[1:, :, layer + 1, boundary] = np.minimum(behind[1:, :, layer + 1, boundary], entered)
        return behind, opening

    def path(self) -> Choice:
        """A solution of the relaxed problem."""
        branch, boundary = self.branch, self.branch.boundary
        begun = self.starts + self.onward[0][:, branch.starts.layout]
        room, start = np.unravel_index(int(np.argmin(begun)), begun.shape)
        stage, layout, bounds, options = 0, int(branch.starts.layout[start]), [0], []
        for layer, kind in enumerate(branch.kinds):
            behind = self.by_layout[:, :, kind] + self.ahead[:, :, layer + 1]
            onward = self.moves[stage, layout] + behind[stage, room]
            if layer > bounds[-1] and stage + 1 < branch.stages:
                entered = self.moves[stage + 1, boundary] + behind[stage + 1] + self.constants[stage + 1][:, None]
                closed = self.moves[stage, layout, boundary] + entered.min()
                if closed < onward.min():
                    room = int(np.unravel_index(int(np.argmin(entered)), entered.shape)[0])
                    stage, onward = stage + 1, entered[room]
                    bounds.append(layer)
            layout = int(np.argmin(onward))
            members = np.where(branch.layout == layout, self.costs[stage, room, kind], np.inf)
            options.append(int(np.argmin(members)))
        finish = int(np.argmin(self.moves[-1][layout, branch.finishes.layout] + self.finishes[room]))
        return Choice(bounds=(*bounds, branch.layers), options=tuple(options), start=int(start), finish=finish)
