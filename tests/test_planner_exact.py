# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The solver finds what enumeration and a mixed-integer program find, and its bound is below it."""

import pytest

from galvatron_hf.planner.solver import coarse_bound as coarse
from galvatron_hf.planner.solver.coarse_bound import coarse_bound
from galvatron_hf.planner.solver.cut_bounds import CutBounds
from galvatron_hf.planner.solver.dp import solve
from galvatron_hf.planner.solver.problem import score
from galvatron_hf.planner.solver.stage_bounds import allowances_of
from search_problems import brute_force, fast_and_slow, mixed_integer, random_problem


SMALL = [
    dict(layers=layers, stages=stages, options=options, layouts=layouts, kinds=kinds)
    for layers, stages, options, layouts, kinds in [
        (1, 1, 4, 2, 1),
        (4, 1, 4, 2, 1),
        (5, 1, 3, 3, 2),
        (4, 2, 3, 2, 1),
        (5, 2, 3, 2, 2),
        (5, 3, 2, 3, 1),
        (4, 4, 3, 2, 2),
    ]
]


@pytest.mark.parametrize("seeds", fast_and_slow(16, 60))
@pytest.mark.parametrize("sizes", SMALL, ids=str)
def test_the_search_finds_what_enumeration_finds(sizes, seeds):
    for seed in seeds:
        problem = random_problem(seed, **sizes, tightness=[0.0, 0.1, 0.3, 0.6][seed % 4])
        found, best = solve(problem), brute_force(problem)
        assert found.cost == best, seed
        if best is not None:
            again = score(problem, found.solution)
            assert again.cost == best and max(again.memory) <= problem.budget
            assert found.bound <= best


@pytest.mark.parametrize("seeds", fast_and_slow(1, 8))
@pytest.mark.parametrize("stages, layers", [(1, 10), (2, 9), (3, 8)])
def test_the_search_finds_what_a_mixed_integer_program_finds(stages, layers, seeds):
    for seed in seeds:
        sizes = dict(layers=layers, stages=stages, options=5, layouts=3, kinds=1 + seed % 2)
        problem = random_problem(seed, **sizes, tightness=0.1 + 0.2 * (seed % 3))
        assert solve(problem).cost == mixed_integer(problem), seed


def test_the_bound_of_all_cuts_is_below_the_best():
    for seed in range(60):
        problem = random_problem(seed, layers=5, stages=1 + seed % 3, options=3, kinds=1 + seed % 2, tightness=0.2)
        best, bounds = brute_force(problem), CutBounds(problem)
        if best is not None:
            assert max(bounds.bound, coarse_bound(problem)) <= best
            bounds.improve(best)
            assert bounds.bound <= best


def test_the_coarse_bound_is_below_the_best_with_allowances_that_are_joined(monkeypatch):
    """Joins the allowances of working memory to one or two, of which a problem has more."""
    joined = 0
    for few in (1, 2):
        monkeypatch.setattr(coarse, "FEW_ALLOWANCES", few)
        for seed in range(40):
            problem = random_problem(seed, layers=5, stages=1 + seed % 3, options=4, kinds=2, tightness=0.2)
            best = brute_force(problem)
            joined += len(allowances_of(problem)) > few
            assert best is None or coarse_bound(problem) <= best
    assert joined


def test_a_limit_below_the_best_finds_nothing_and_one_at_it_finds_it():
    for seed in range(20):
        problem = random_problem(seed, layers=4, stages=2, options=3, tightness=0.3)
        best = brute_force(problem)
        if best is not None:
            assert solve(problem, limit=best - 1).cost is None
            assert solve(problem, limit=best).cost == best
