# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""No bound of the search exceeds what the best solution costs or needs."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from galvatron_hf.planner.cost.cost_model import CostModels
from galvatron_hf.planner.cost.step_shape import StepShape
from galvatron_hf.planner.search import _cuts
from galvatron_hf.planner.solver.cut_bounds import CutBounds, least_memory
from galvatron_hf.planner.solver.dp import solve
from galvatron_hf.planner.space import Limits
from planner_cases import random_hardware, random_model, workload


@pytest.mark.parametrize("pipeline, virtual", [(1, 1), (2, 1), (2, 4)])
def test_no_problem_is_cheaper_or_smaller_than_its_quick_bounds(pipeline, virtual):
    for seed in range(2):
        model = random_model(seed, layers=4, experts=seed == 1)
        hardware = random_hardware(seed, world_size=4, memory_bytes=1 << 40)
        limits = Limits(pipeline=(pipeline,), virtual_stages=virtual, hybrid_sharding=False, sequence=("ulysses",))
        for cut in _cuts(CostModels(hardware, model, workload(6, packed=True)), limits):
            for bound, problem in itertools.chain.from_iterable(cut.problems(1 << 40)):
                assert cut.bound <= bound
                assert problem.memory_bound <= least_memory(problem.build(1).problem)


def test_quick_bounds_know_the_memory():
    """Compares each problem's quick bound with its solution under budgets that are too little for the fastest one."""
    model, hardware, raised = random_model(1, layers=3), random_hardware(1, world_size=4, memory_bytes=1 << 40), 0
    few = Limits(hybrid_sharding=False, tensor=1, sequence=("ulysses",), micro_batches=(1, 3))
    for (pipeline, virtual), uniform in itertools.product([(1, 1), (2, 1), (2, 3)], (False, True)):
        limits = replace(few, pipeline=(pipeline,), virtual_stages=virtual, uniform=uniform)
        for cut in _cuts(CostModels(hardware, model, workload(6)), limits):
            for free, problem in itertools.chain.from_iterable(cut.problems(1 << 40)):
                least = least_memory(problem.build(1).problem)
                for budget in (int(1.02 * least), int(1.3 * least)):
                    bound, cost = problem.bound(budget), solve(problem.build(budget).problem).cost
                    assert cost is None or max(free, bound) <= cost
                    raised += bound > free
    assert raised


def test_closer_bounds_know_what_each_stage_holds():
    """Compares them with solutions of pipelines whose first stages keep several micro-batches."""
    closer = coarse = 0
    for seed, virtual in itertools.product(range(2), (1, 2)):
        hardware = random_hardware(seed, world_size=4, memory_bytes=1 << 40)
        model = random_model(seed, layers=6, kinds=1 + seed)
        limits = Limits(pipeline=(2, 4), micro_batches=(6,), virtual_stages=virtual, hybrid_sharding=False, tensor=1)
        for cut in _cuts(CostModels(hardware, model, workload(6)), limits):
            for _, problem in itertools.chain.from_iterable(cut.problems(1 << 40)):
                least = least_memory(problem.build(1).problem)
                for budget in (int(1.02 * least), int(1.2 * least), int(2 * least)):
                    cost = solve(problem.build(budget).problem).cost
                    without = CutBounds(problem.without_moves(budget), free_moves=True).bound
                    assert cost is None or max(problem.closer_bound(budget), without) <= cost
                    closer += problem.closer_bound(budget) > problem.bound(budget)
                    coarse += without > problem.closer_bound(budget)
    assert closer and coarse


@pytest.mark.parametrize("virtual", (1, 2))
def test_a_step_takes_at_least_as_long_as_its_fullest_stage_makes_it(virtual):
    """Compares the bound with the best of all cuts into stages, by the paths of a schedule (`solver/problem.py`)."""
    draw, equal = np.random.default_rng(0), 0
    for _ in range(60):
        stages, count = int(draw.integers(1, 5)), int(draw.integers(1, 12))
        schedule = "interleaved" if virtual > 1 else "1f1b"
        if virtual > 1 and (stages == 1 or count < stages):
            continue
        shape = StepShape(
            pipeline=stages, micro_batches=count, schedule=schedule, rows=1, virtual_stages=virtual, context=1
        )
        layers = draw.choice([1.0, 1.0, draw.uniform(1, 2)], size=int(draw.integers(stages, 9)))
        ends = draw.uniform(0, 3, size=2) * draw.integers(0, 2, size=2)
        best = min(
            _step(shape, layers, ends, [0, *inner, len(layers)])
            for inner in itertools.combinations(range(1, len(layers)), stages - 1)
        )
        bound = shape.least_ms(list(layers) * virtual, *ends)
        assert bound <= best * (1 + 1e-9)
        equal += bound == pytest.approx(best)
    assert equal > 10


def _step(shape: StepShape, layers: np.ndarray, ends: np.ndarray, bounds: list[int]) -> float:
    """Returns the time of a step with these cuts, which are those of each round of virtual stages."""
    of_stage = np.array([layers[first:last].sum() for first, last in itertools.pairwise(bounds)])
    extra = np.zeros(shape.pipeline)
    extra[0] += ends[0]
    extra[-1] += ends[1]
    first = of_stage + extra
    other = (shape.passes - 1) * of_stage + (shape.micro_batches - 1) * extra
    if not shape.warmup().any():
        return first.sum() + other.max()
    paths = []
    for stage, warmup in enumerate(shape.warmup()):
        before, after, whole = first[:stage].sum(), first[stage + 1 :].sum(), first[stage] + other[stage]
        for weight, share in zip(shape.later_stage_weights(), (0, 1 / 3, 1), strict=True):
            paths.append(before + whole - share * warmup * first[stage] + weight * after)
    return max(paths)


def test_bounds_of_one_strategy_know_the_fullest_stage():
    """Compares them with the solution of each strategy, under budgets that leave few layers to the first stages."""
    hardware = random_hardware(2, world_size=4, memory_bytes=1 << 40)
    few = Limits(hybrid_sharding=False, tensor=1, sequence=("ulysses",), micro_batches=(1, 4), uniform=True)
    ruled_out = fits = 0
    for kinds, (pipeline, virtual) in itertools.product((1, 2), ((1, 1), (2, 1), (2, 3), (4, 1))):
        model = random_model(2, layers=6, kinds=kinds)
        limits = replace(few, pipeline=(pipeline,), virtual_stages=virtual)
        for cut in _cuts(CostModels(hardware, model, workload(4)), limits):
            for problems in cut.problems(1 << 40):
                every = [problem for _, problem in problems]
                least = min(least_memory(problem.build(1).problem) for problem in every)
                for budget in (least, int(1.2 * least), int(2 * least)):
                    for problem in every:
                        bound = problem._fullest_stage_bounds(budget).max()
                        cost = solve(problem.build(budget).problem).cost
                        assert bound <= (np.inf if cost is None else cost)
                        ruled_out += bound == np.inf
                        fits += cost is not None
    assert ruled_out and fits
