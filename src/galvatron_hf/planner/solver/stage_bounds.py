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

from galvatron_hf.planner.solver.problem import Options, SearchProblem


# Multipliers are tried in units of (cost of the stage / budget), then between the neighbours of the best.
GRID = np.concatenate([[0.0], np.geomspace(0.004, 40.0, 9)])
REFINED_POINTS, REFINEMENTS = 7, 4

# (N,) rows of pairs of a stage and a multiplier, and (N,) indices of allowances.
Pairs = tuple[np.ndarray, np.ndarray]


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
        """Returns (p, longest + 1) bounds of each stage with n layers from `first` on, with which changes of layout
        are free; infinite if none fits.
        """
        every = np.arange(self.problem.stages)
        middle = max(1, self.problem.layers // len(every))
        free = self._without_moves(objective, first, every, np.zeros(len(every)))[:, middle]
        scale = np.maximum(np.where(np.isfinite(free), free, 0.0), 1.0) / self.problem.budget
        found = np.full((len(every), self.longest + 1), -np.inf)
        best = np.zeros(found.shape)
        for point in GRID:
            bounds = self._without_moves(objective, first, every, point * scale)
            best = np.where(bounds > found, (point * scale)[:, None], best)
            found = np.maximum(found, bounds)
        self._multipliers[objective, first] = best
        return found

    def least_memory(self, first: int) -> np.ndarray:
        """Returns (p, longest + 1) minimum bytes of each stage with n layers from `first` on. With a multiplier of 1
        and no cost the shortest path is memory, which changes of layout do not hold.
        """
        stages = np.arange(self.problem.stages)
        return self._without_moves(MEMORY, first, stages, np.ones(len(stages))) + self.problem.budget

    def multiplier(self, objective: Objective, first: int, stage: int, count: int) -> float:
        """Returns the best multiplier found for a stage of `count` layers."""
        return float(self._multipliers[objective, first][stage, count])

    def refine(self, objective: Objective, first: int, stages: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Returns (Q,) better bounds of stages with these numbers of layers, and keeps their multipliers: first the
        best ones if changes of layout are free, then the best of a few nearby ones with the cost of changes.
        """
        table = self._multipliers[objective, first]
        best, ratio = table[stages, counts], GRID[2] / GRID[1]
        for least in [self._least_free] * REFINEMENTS + [self.shortest]:
            steps = np.geomspace(1 / ratio, ratio, REFINED_POINTS)
            tried = best[:, None] * steps
            places = (np.repeat(of_all, REFINED_POINTS) for of_all in (stages, counts))
            found = least(objective, first, next(places), tried.ravel(), next(places)).reshape(tried.shape)
            best = tried[np.arange(len(best)), found.argmax(axis=1)]
            ratio = ratio ** (2 / (REFINED_POINTS - 1))
        table[stages, counts] = best
        return found.max(axis=1)

    # ---- Costs of layers and ends ----

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
    def _by_working(self) -> list[_ByWorking]:
        """Returns the allowed options of each kind of layer."""
        problem, every = self.problem, np.arange(len(self.problem.layout))
        return [
            _ByWorking(every[allowed], working, self.allowances)
            for allowed, working in zip(problem.allowed, problem.working, strict=True)
        ]

    @cached_property
    def _by_layout_and_working(self) -> list[list[_ByWorking]]:
        """Returns the allowed options of each layout and each kind of layer."""
        problem = self.problem
        return [
            [
                _ByWorking(np.nonzero(allowed & (problem.layout == layout))[0], working, self.allowances)
                for allowed, working in zip(problem.allowed, problem.working, strict=True)
            ]
            for layout in range(problem.first_resharding.shape[0])
        ]

    @cached_property
    def _ends_by_working(self) -> list[_ByWorking]:
        """Returns the options of the embedding and of the head."""
        ends = self.problem.starts, self.problem.finishes
        return [_ByWorking(np.arange(len(end)), end.working, self.allowances) for end in ends]

    def resharding(self, objective: Objective, stages: np.ndarray) -> np.ndarray:
        """Returns (Q, Y, Y) costs of a resharding."""
        first, other = (weights[:, None, None] for weights in objective.weights(self.problem, stages))
        return first * self.problem.first_resharding + other * self.problem.other_resharding

    def _end_costs(
        self, end: Options, objective: Objective, stages: np.ndarray, multipliers: np.ndarray
    ) -> np.ndarray:
        """Returns (Q, E) costs of the options of an end."""
        first, other = (weights[:, None] for weights in objective.weights(self.problem, stages))
        return first * end.first_cost + other * end.other_cost + multipliers[:, None] * end.memory

    def _constants(
        self, objective: Objective, stages: np.ndarray, multipliers: np.ndarray, allowances: np.ndarray
    ) -> np.ndarray:
        """Returns the fixed cost of stages with working memory of so many bytes, arrays of any one shape."""
        problem = self.problem
        first, other = objective.weights(problem, stages)
        fixed = first * problem.stage_first_cost[stages] + other * problem.stage_other_cost[stages]
        return fixed + multipliers * (problem.stage_memory[stages] + allowances - problem.budget)

    # ---- Shortest paths ----

    def by_layout(self, objective: Objective, stages: np.ndarray, multipliers: np.ndarray, pairs: Pairs) -> np.ndarray:
        """Returns (N, K, Y) minimum costs of a layer in each layout, for each pair of a row and an allowance."""
        costs, groups = self.option_costs(objective, stages, multipliers), self._by_layout_and_working
        found = np.empty((len(pairs[0]), costs.shape[1], len(groups)))
        for layout, of_kinds in enumerate(groups):
            for kind, group in enumerate(of_kinds):
                found[:, kind, layout] = group.least(costs[:, kind], pairs)
        return found

    def opening(self, objective: Objective, stages: np.ndarray, multipliers: np.ndarray, pairs: Pairs) -> np.ndarray:
        """Returns (N, Y) costs before a stage's first layer."""
        (rows, chosen), problem, starts = pairs, self.problem, self.problem.starts
        constants = self._constants(objective, stages[rows], multipliers[rows], self.allowances[chosen])
        found = np.full((len(rows), problem.first_resharding.shape[0]), np.inf)
        found[:, problem.boundary] = constants
        is_first = stages[rows] == 0
        if is_first.any():
            costs = self._end_costs(starts, objective, stages, multipliers)[rows[is_first]]
            allowed = np.where(starts.working <= self.allowances[chosen[is_first], None], costs, np.inf)
            found[is_first] = np.inf
            for layout in np.unique(starts.layout):
                found[is_first, layout] = constants[is_first] + allowed[:, starts.layout == layout].min(axis=1)
        return found

    def closing(self, objective: Objective, stages: np.ndarray, multipliers: np.ndarray, pairs: Pairs) -> np.ndarray:
        """Returns (N, Y) costs after a stage's last layer."""
        (rows, chosen), problem, finishes = pairs, self.problem, self.problem.finishes
        resharding = self.resharding(objective, stages).astype(float)
        found = resharding[rows, :, problem.boundary]
        is_last = stages[rows] == problem.stages - 1
        if is_last.any():
            costs = self._end_costs(finishes, objective, stages, multipliers)[rows[is_last]]
            allowed = np.where(finishes.working <= self.allowances[chosen[is_last], None], costs, np.inf)
            least = [allowed[:, finishes.layout == layout].min(axis=1) for layout in np.unique(finishes.layout)]
            moved = [resharding[rows[is_last], :, layout] for layout in np.unique(finishes.layout)]
            found[is_last] = np.min([one + cost[:, None] for one, cost in zip(moved, least, strict=True)], axis=0)
        return found

    def shortest(
        self, objective: Objective, first: int, stages: np.ndarray, multipliers: np.ndarray, counts: np.ndarray
    ) -> np.ndarray:
        """Returns (Q,) minimums of cost + multiplier * (memory - budget) of stages of `counts` layers from `first` on.
        The minimum with each allowance is at least that with free changes of layout. So allowances are left out whose
        minimum with free changes is not below what another one has.
        """
        free = self._free(objective, first, stages, multipliers, counts)
        rows = np.arange(len(stages))
        likely = free.argmin(axis=1)
        case = objective, first, stages, multipliers, counts
        found = self._with_moves(*case, (rows, likely))
        others = free < found[:, None]
        others[rows, likely] = False
        pairs = np.nonzero(others)
        np.minimum.at(found, pairs[0], self._with_moves(*case, pairs))
        return found

    def _with_moves(
        self,
        objective: Objective,
        first: int,
        stages: np.ndarray,
        multipliers: np.ndarray,
        counts: np.ndarray,
        pairs: Pairs,
    ) -> np.ndarray:
        """Returns (N,) minimums of pairs of a row and an allowance."""
        order = np.argsort(-counts[pairs[0]], kind="stable")  # the longest stages first
        pairs = pairs[0][order], pairs[1][order]
        lengths, kinds = counts[pairs[0]], self.problem.kinds
        # The long axis comes last, (..., N), because numpy is fastest along the last axis.
        by_layout, opening, closing = (
            np.ascontiguousarray(np.moveaxis(part(objective, stages, multipliers, pairs), 0, -1))
            for part in (self.by_layout, self.opening, self.closing)
        )
        moved = np.ascontiguousarray(self.resharding(objective, stages)[pairs[0]].transpose(1, 2, 0))
        reached, found = opening, np.empty(len(lengths))
        for done in range(1, int(lengths.max(initial=0)) + 1):
            active = int(np.searchsorted(-lengths, -done, side="right"))
            layer = by_layout[kinds[first + done - 1], :, :active]
            reached = _resharded(reached[:, :active], moved[..., :active]) + layer
            ended = lengths[:active] == done
            found[:active][ended] = (reached[:, ended] + closing[:, :active][:, ended]).min(axis=0)
        unordered = np.empty(len(found))
        unordered[order] = found
        return unordered

    # ---- Free changes of layout ----

    def _least_layers(self, objective: Objective, stages: np.ndarray, multipliers: np.ndarray) -> np.ndarray:
        """Returns (Q, W, K) minimum costs of a layer in any layout."""
        costs = self.option_costs(objective, stages, multipliers)
        return np.stack([group.least(costs[:, kind]) for kind, group in enumerate(self._by_working)], axis=2)

    def _least_ends(self, objective: Objective, stages: np.ndarray, multipliers: np.ndarray) -> np.ndarray:
        """Returns (Q, W) minimum costs of a stage besides its layers."""
        found = self._constants(objective, stages[:, None], multipliers[:, None], self.allowances)
        ends = self.problem.starts, self.problem.finishes
        for place, end, group in zip((0, self.problem.stages - 1), ends, self._ends_by_working, strict=True):
            here = stages == place
            if here.any():
                found[here] += group.least(self._end_costs(end, objective, stages[here], multipliers[here]))
        return found

    def _free(
        self, objective: Objective, first: int, stages: np.ndarray, multipliers: np.ndarray, counts: np.ndarray
    ) -> np.ndarray:
        """Returns (Q, W) minimums of stages of `counts` layers with each allowance."""
        least = self._least_layers(objective, stages, multipliers)
        of_kind = self.problem.kinds[first:, None] == np.arange(least.shape[2])
        numbers = np.concatenate([np.zeros((1, least.shape[2]), dtype=np.int64), of_kind.cumsum(axis=0)])[counts]
        found = self._least_ends(objective, stages, multipliers)
        for kind in range(least.shape[2]):
            some = numbers[:, kind] > 0  # zero times infinite is no number
            found[some] += numbers[some, kind, None] * least[some, :, kind]
        return found

    def _least_free(
        self, objective: Objective, first: int, stages: np.ndarray, multipliers: np.ndarray, counts: np.ndarray
    ) -> np.ndarray:
        """Returns (Q,) minimums of stages of `counts` layers, as [`StageBounds.shortest`] does."""
        return self._free(objective, first, stages, multipliers, counts).min(axis=1)

    def _without_moves(
        self, objective: Objective, first: int, stages: np.ndarray, multipliers: np.ndarray
    ) -> np.ndarray:
        """Returns (Q, longest + 1) minimums of stages of n layers."""
        kinds, case = self.problem.kinds[first : first + self.longest], (objective, stages, multipliers)
        least = self._least_layers(*case)[:, :, kinds].cumsum(axis=2)
        least = (least + self._least_ends(*case)[..., None]).min(axis=1)
        found = np.full((len(stages), self.longest + 1), np.inf)
        found[:, 1 : 1 + least.shape[1]] = least
        return found


class _ByWorking:
    """Finds the least of the costs of options within each of (W,) allowances of working memory."""

    def __init__(self, options: np.ndarray, working: np.ndarray, allowances: np.ndarray):
        self.options = options[np.argsort(working[options], kind="stable")]
        self.counts = np.searchsorted(working[self.options], allowances, side="right")

    def least(self, costs: np.ndarray, pairs: Pairs | None = None) -> np.ndarray:
        """Returns (Q, W) minimums of costs (Q, S), infinite if no option is allowed; or (N,) those of pairs."""
        if not len(self.options):
            shape = (len(costs), len(self.counts)) if pairs is None else len(pairs[0])
            return np.full(shape, np.inf)
        least = np.minimum.accumulate(costs[:, self.options], axis=1)
        if pairs is None:
            return np.where(self.counts > 0, least[:, np.maximum(self.counts, 1) - 1], np.inf)
        counts = self.counts[pairs[1]]
        return np.where(counts > 0, least[pairs[0], np.maximum(counts, 1) - 1], np.inf)


def _resharded(reached: np.ndarray, resharding: np.ndarray) -> np.ndarray:
    """Returns the minimums of (Y, N) in each layout after a resharding (Y, Y, N) from any layout."""
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

    @property
    def least(self) -> np.ndarray:
        """Returns (W,) minimums of the whole stage."""
        return (self.before[0] + self.after[0]).min(axis=1)

    @classmethod
    def from_bounds(cls, bounds: StageBounds, objective: Objective, first: int, stage: int, count: int) -> Distances:
        """Computes the distances with the best multiplier that `bounds` has."""
        multiplier = bounds.multiplier(objective, first, stage, count)
        stages, multipliers = np.array([stage]), np.array([multiplier])
        resharding = bounds.resharding(objective, stages)[0]
        costs = bounds.costs(objective, stages, multipliers)
        allowances = np.arange(len(bounds.allowances))
        pairs = np.zeros_like(allowances), allowances
        by_layout = bounds.by_layout(objective, stages, multipliers, pairs)  # (W, K, Y)
        kinds = bounds.problem.kinds[first : first + count]
        before = [bounds.opening(objective, stages, multipliers, pairs)]
        for kind in kinds:
            before.append((before[-1][..., None] + resharding).min(axis=1) + by_layout[:, kind])
        after = [bounds.closing(objective, stages, multipliers, pairs)]
        for kind in kinds[::-1]:
            after.append((resharding + (by_layout[:, kind] + after[-1])[:, None]).min(axis=2))
        return cls(multiplier=multiplier, costs=costs[0], before=np.array(before), after=np.array(after[::-1]))
