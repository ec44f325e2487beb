# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Bounds the cost of a whole problem from below in a small part of the time of [`CutBounds`], and less closely.
The relaxation is that of `stage_bounds.py`. In addition, changes of layout are free, similar allowances of working
memory are one, and each path of the schedule has the cut of the layers that is best for it. Array dimensions: P
multipliers, p stages, W allowances, K kinds, S options, L layers, N = longest stage.
"""

from __future__ import annotations

import numpy as np

from galvatron_hf.planner.solver.cut_bounds import round_down
from galvatron_hf.planner.solver.problem import Options, SearchProblem
from galvatron_hf.planner.solver.stage_bounds import (
    FIRST,
    GRID,
    STEADY,
    TOTAL,
    Objective,
    allowances_of,
    classes_of,
)


FEW_ALLOWANCES = 16
NEVER = 1e30  # picoseconds of what does not fit: sums and multiples of it stay finite


def coarse_bound(problem: SearchProblem) -> float:
    """Returns a lower bound of the cost of every solution, infinite if nothing fits. The cost of a solution is its
    longest path, and no path of it is shorter than the shortest of that kind over all cuts.
    """
    totals = _least_of_stages(problem, TOTAL)
    if problem.stages == 1:
        firsts = steadies = totals
    else:
        firsts = _least_of_stages(problem, FIRST)
        steadies = _least_of_stages(problem, STEADY) if problem.warmup.any() else totals
    paths = (totals, (2 * totals + steadies) / 3, steadies)
    longest = float(max(_least_of_all_cuts(problem, firsts, paths)))
    return round_down(longest) if longest < NEVER / 2 else np.inf


def _least_of_stages(problem: SearchProblem, objective: Objective) -> np.ndarray:
    """Returns (p, L, N) lower bounds of the objective in a stage, by its first layer and its number of layers."""
    stages, longest = np.arange(problem.stages), problem.longest_stage
    first, other = objective.weights(problem, stages)
    costs = first[:, None, None] * problem.first_cost + other[:, None, None] * problem.other_cost  # (p, K, S)
    costs = np.where(problem.allowed, costs, NEVER)
    starts, finishes = (
        first[place] * end.first_cost + other[place] * end.other_cost
        for place, end in ((0, problem.starts), (-1, problem.finishes))
    )
    fixed = first * problem.stage_first_cost + other * problem.stage_other_cost
    # Multipliers are in units of (cost of a stage / budget), for a stage with its share of the layers.
    share = np.bincount(problem.kinds, minlength=costs.shape[1]) / problem.stages
    mean = fixed + costs.min(axis=2) @ share
    mean[0] += starts.min()
    mean[-1] += finishes.min()
    multipliers = GRID[:, None] * np.where(mean < NEVER, np.maximum(mean, 1.0), 1.0) / problem.budget  # (P, p)
    held, within = _joined_allowances(problem)
    layers = _within_allowances(problem, costs + multipliers[..., None, None] * problem.memory(stages), within)
    rest = fixed + multipliers * (problem.stage_memory - problem.budget)
    rest = rest[..., None] + multipliers[..., None] * held  # (P, p, W)
    for place, end, own in ((0, problem.starts, starts), (-1, problem.finishes, finishes)):
        rest[:, place] += _least_of_end(end, own, multipliers[:, place], within)
    found = np.full((problem.stages, problem.layers, longest), NEVER)
    for begin, begins in classes_of(tuple(problem.kinds.tolist())).items():
        run = layers[..., problem.kinds[begin : begin + longest]].cumsum(axis=3)
        least = (run + rest[..., None]).min(axis=2).max(axis=0)
        for one in begins:
            found[:, one, : problem.layers - one] = least[:, : problem.layers - one]
    return found


def _joined_allowances(problem: SearchProblem) -> tuple[np.ndarray, np.ndarray]:
    """Returns (W,) bytes of working memory that are held, and those with which options are allowed: of allowances that
    are joined the least and the largest.
    """
    allowances = allowances_of(problem)
    count = min(len(allowances), FEW_ALLOWANCES)
    first = np.arange(count) * len(allowances) // count
    return allowances[first], allowances[np.append(first[1:], len(allowances)) - 1]


def _within_allowances(problem: SearchProblem, priced: np.ndarray, within: np.ndarray) -> np.ndarray:
    """Returns (P, p, W, K) the least of the prices (P, p, K, S) of options that are within each allowance."""
    least = np.empty((*priced.shape[:2], len(within), priced.shape[2]))
    for kind, working in enumerate(problem.working):
        order = np.argsort(working, kind="stable")
        rising = np.minimum.accumulate(priced[:, :, kind, order], axis=2)
        counts = np.searchsorted(working[order], within, side="right")
        least[..., kind] = np.where(counts > 0, rising[..., np.maximum(counts, 1) - 1], NEVER)
    return np.minimum(least, NEVER)


def _least_of_end(end: Options, costs: np.ndarray, multipliers: np.ndarray, within: np.ndarray) -> np.ndarray:
    """Returns (P, W) the least of an end's costs, with `multipliers` (P,) of its memory, within each allowance."""
    priced = costs + multipliers[:, None] * end.memory
    return np.where(end.working <= within[:, None], priced[:, None], NEVER).min(axis=2)


def _least_of_all_cuts(problem: SearchProblem, firsts: np.ndarray, paths: tuple[np.ndarray, ...]) -> list[float]:
    """Returns the shortest path of each kind over all cuts, from bounds (p, L, N) of the F and the paths of stages."""
    layers, longest = problem.layers, firsts.shape[2]
    ends = np.arange(1, layers + 1)
    begins = ends[:, None] - np.arange(1, longest + 1)  # (L, N), by the layer after the last and number of layers
    possible = begins >= 0
    places = np.maximum(begins, 0), np.arange(longest)
    # Of the first stages together, by their number of layers.
    before = np.full(layers + 1, NEVER)
    before[0] = 0.0
    reached = [np.where(before == 0, -NEVER, NEVER) for _ in paths]
    for stage in range(problem.stages):
        first = np.where(possible, firsts[stage][places], NEVER)
        earlier = before[places[0]]
        for kind, weight in enumerate(problem.later_stage_weights):
            own = np.where(possible, paths[kind][stage][places], NEVER)
            longer = np.maximum(reached[kind][places[0]] + weight * first, earlier + own)
            reached[kind] = np.append(NEVER, longer.min(axis=1))
        before = np.append(NEVER, (earlier + first).min(axis=1))
    return [found[layers] for found in reached]
