# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""No bound of the search exceeds what the best solution costs or needs."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from galvatron_hf.planner.cost.cost_model import CostModels
from galvatron_hf.planner.cost.step_shape import StepShape
from galvatron_hf.planner.search import search_plan
from galvatron_hf.planner.solver.coarse_bound import coarse_bound
from galvatron_hf.planner.solver.cut_bounds import least_memory
from galvatron_hf.planner.solver.dp import solve
from galvatron_hf.planner.solver.stage_bounds import FIRST, STEADY, TOTAL, StageBounds
from galvatron_hf.planner.space import FEATURES, Limits, layer_strategies, vocabulary_strategies
from galvatron_hf.planner.step_cuts import step_cuts
from planner_cases import random_hardware, random_model, workload
from search_problems import random_problem


@pytest.mark.parametrize("pipeline, virtual", [(1, 1), (2, 1), (2, 4)])
def test_no_problem_is_cheaper_or_smaller_than_its_quick_bounds(pipeline, virtual):
    for seed in range(2):
        model = random_model(seed, layers=4, experts=seed == 1)
        hardware = random_hardware(seed, world_size=4, memory_bytes=1 << 40)
        limits = Limits(pipeline=(pipeline,), virtual_stages=virtual, hybrid_sharding=False, sequence=("ulysses",))
        for cut in step_cuts(CostModels(hardware, model, workload(6, packed=True)), limits):
            for _, bound_of_shape, group in cut.problems(1 << 40):
                for bound, problem in group:
                    assert cut.bound <= bound_of_shape <= bound
                    assert problem.memory_bound <= least_memory(problem.build(1).problem)


def test_quick_bounds_know_the_memory():
    """Compares each problem's quick bound with its solution under budgets that are too little for the fastest one."""
    model, hardware, raised = random_model(1, layers=3), random_hardware(1, world_size=4, memory_bytes=1 << 40), 0
    few = Limits(hybrid_sharding=False, tensor=1, sequence=("ulysses",), micro_batches=(1, 3))
    for (pipeline, virtual), uniform in itertools.product([(1, 1), (2, 1), (2, 3)], (False, True)):
        limits = replace(few, pipeline=(pipeline,), virtual_stages=virtual, uniform=uniform)
        for cut in step_cuts(CostModels(hardware, model, workload(6)), limits):
            for free, problem in itertools.chain.from_iterable(group for *_, group in cut.problems(1 << 40, uniform)):
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
        for cut in step_cuts(CostModels(hardware, model, workload(6)), limits):
            for _, problem in itertools.chain.from_iterable(group for *_, group in cut.problems(1 << 40)):
                least = least_memory(problem.build(1).problem)
                for budget in (int(1.02 * least), int(1.2 * least), int(2 * least)):
                    cost = solve(problem.build(budget).problem).cost
                    without = coarse_bound(problem.without_moves(budget))
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
        for cut in step_cuts(CostModels(hardware, model, workload(4)), limits):
            for *_, problems in cut.problems(1 << 40, True):
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


def test_a_search_after_a_wider_one_of_the_same_case_prices_less_and_finds_the_same():
    narrow = (Limits(uniform=True), Limits(sharding=("zero3",), uniform=True), Limits(tensor=1, pipeline=(1, 2)))
    alone, shared = 0, 0
    for seed in range(4):
        model = random_model(seed, layers=6, tied=seed == 3)
        hardware = random_hardware(seed, world_size=8, memory_bytes=1 << 40)
        case = hardware, model, workload(16, packed=seed == 1)
        budget = int(0.7 * max(search_plan(*case).best.memory_bytes))
        wide = search_plan(*case, memory_bytes=budget)
        for limits in narrow:
            own = search_plan(*case, memory_bytes=budget, limits=limits)
            after = search_plan(*case, memory_bytes=budget, limits=limits, costs=wide.costs)
            assert (after.best, after.least_memory_bytes) == (own.best, own.least_memory_bytes)
            alone, shared = (
                count + len(one.costs.bounds[limits, budget]) for count, one in ((alone, own), (shared, after))
            )
    assert shared < alone


def test_a_poorer_search_of_a_case_forgets_no_bound_and_makes_no_cut_again():
    """A search that ends early knows less than the one before; one of one strategy has the cuts of one of several."""
    model, hardware = random_model(0, layers=6), random_hardware(0, world_size=8, memory_bytes=1 << 40)
    case = hardware, model, workload(16)
    budget = int(0.7 * max(search_plan(*case).best.memory_bytes))
    first = search_plan(*case, memory_bytes=budget)
    options, key = dict(costs=first.costs, memory_bytes=budget), (first.limits, budget)
    known, cuts = dict(first.costs.bounds[key]), first.costs.cuts[first.limits]
    assert search_plan(*case, **options, stop=lambda: True).bound_ms is not None  # stopped before it knew any bound
    after = first.costs.bounds[key]
    assert known and all(after[one] >= bound for one, bound in known.items())
    search_plan(*case, **options, limits=Limits(uniform=True))
    assert first.costs.cuts[first.limits] is cuts and not any(limits.uniform for limits in first.costs.cuts)


def test_bounds_of_limits_are_used_only_within_them():
    """Compares with the strategies that each of two limits allows."""
    model = random_model(0, layers=2, degree=4, experts=True)
    every = [Limits(), Limits(tensor=2), Limits(tensor=4), Limits(expert=2), Limits(recompute=("full",))]
    every += [Limits().without(feature) for feature in FEATURES]

    def allowed(limits: Limits, pipeline: bool) -> set:
        own = limits.without("zero3") if pipeline and not limits.zero3_in_pipeline else limits
        layers = {one for one, _ in layer_strategies(8, model, own)}
        return {*layers, *vocabulary_strategies(8, model, own)}

    covered = 0
    for one, other in itertools.product(every, repeat=2):
        if one.covers(other):
            covered += one != other
            assert all(allowed(other, pipeline) <= allowed(one, pipeline) for pipeline in (False, True))
            assert other.uniform or not one.uniform
        assert one.covers(one)
    assert covered > len(every)


@pytest.mark.parametrize("stages", (1, 2, 3))
def test_allowances_that_are_left_out_are_not_missed(stages):
    """Compares the shortest paths of stages with those of every allowance of working memory alone."""
    for seed in range(8):
        problem = random_problem(seed, layers=5, stages=stages, options=8, layouts=3, kinds=2, tightness=0.3)
        bounds, lengths = StageBounds(problem), range(1, problem.longest_stage + 1)
        places, counts = (np.array(column) for column in zip(*itertools.product(range(stages), lengths), strict=True))
        for objective, scale in itertools.product((FIRST, TOTAL, STEADY), (0.0, 0.1, 1.0)):
            case = objective, 0, places, np.full(len(places), scale), counts
            rows = np.arange(len(places))
            every = [
                bounds._with_moves(*case, (rows, np.full(len(rows), index))) for index in range(len(bounds.allowances))
            ]
            found = bounds.shortest(*case)
            assert np.array_equal(found, np.min(every, axis=0))
            # With free changes of layout, each stage alone and all numbers of layers at once are the same.
            free = bounds._without_moves(objective, 0, np.arange(stages), np.full(stages, scale))
            assert np.allclose(free[places, counts], bounds._least_free(*case), rtol=1e-12)
            assert (bounds._least_free(*case) <= found + 1e-9 * np.abs(found)).all()


@pytest.mark.parametrize("stages", (1, 2))
def test_shortest_paths_are_those_of_all_choices(stages):
    """Compares with every choice of options, of which each is at one of the layers of a stage."""
    for seed in range(6):
        problem = random_problem(seed, layers=3, stages=stages, options=4, layouts=2, kinds=2, tightness=0.3)
        bounds = StageBounds(problem)
        for objective, scale, stage in itertools.product((TOTAL, STEADY), (0.0, 0.3), range(stages)):
            for count in range(1, problem.longest_stage + 1):
                least = min(
                    _stage_cost(problem, objective, scale, stage, options, start, finish)
                    for options in itertools.product(range(len(problem.layout)), repeat=count)
                    for start in range(len(problem.starts) if stage == 0 else 1)
                    for finish in range(len(problem.finishes) if stage == stages - 1 else 1)
                )
                case = np.array([stage]), np.array([scale]), np.array([count])
                assert bounds.shortest(objective, 0, *case)[0] == pytest.approx(least, rel=1e-9)


def _stage_cost(problem, objective, scale: float, stage: int, options: tuple, start: int, finish: int) -> float:
    """Returns the cost of a stage that begins at layer 0, with `scale` for each byte above the budget."""
    first_weight, other_weight = (float(one[0]) for one in objective.weights(problem, np.array([stage])))
    last, layout = problem.stages - 1, problem.boundary
    first, other = int(problem.stage_first_cost[stage]), int(problem.stage_other_cost[stage])
    held, working = int(problem.stage_memory[stage]), []

    def add_end(end, index: int) -> None:
        nonlocal first, other, held
        first, other = first + int(end.first_cost[index]), other + int(end.other_cost[index])
        held += int(end.memory[index])
        working.append(int(end.working[index]))

    def move(to: int) -> None:
        nonlocal first, other, layout
        first += int(problem.first_resharding[layout, to])
        other += int(problem.other_resharding[layout, to])
        layout = to

    if stage == 0:
        add_end(problem.starts, start)
        layout = int(problem.starts.layout[start])
    for kind, option in zip(problem.kinds, options, strict=False):
        if not problem.allowed[kind, option]:
            return np.inf
        move(int(problem.layout[option]))
        first, other = first + int(problem.first_cost[kind, option]), other + int(problem.other_cost[kind, option])
        held += int(problem.memory(stage)[kind, option])
        working.append(int(problem.working[kind, option]))
    if stage == last:
        move(int(problem.finishes.layout[finish]))
        add_end(problem.finishes, finish)
    else:
        move(problem.boundary)
    return first_weight * first + other_weight * other + scale * (held + max(working) - problem.budget)


def test_the_least_memory_of_an_unsolved_problem_is_that_of_its_solutions():
    """Compares with problems that are built whole, and, if rows are padded, with all their parts."""
    padded = 0
    for seed in range(3):
        model = random_model(seed, layers=3, experts=seed == 1, kinds=1 + (seed == 2))
        hardware = random_hardware(seed, world_size=8, memory_bytes=1 << 40)
        limits = Limits(pipeline=(1, 2), hybrid_sharding=False, tensor=2, sequence=("ulysses",))
        for cut in step_cuts(CostModels(hardware, model, workload(6)), limits):
            for _, problem in itertools.chain.from_iterable(group for *_, group in cut.problems(1)):
                parts = list(problem.split(1)) if problem.padded else [problem.build(1, prune=False)]
                least = min(least_memory(part.problem) for part in parts)
                assert problem.least_memory() == least >= problem.memory_bound
                padded += problem.padded and least > least_memory(problem.build(1).problem)
    assert padded


def test_limits_may_be_lists():
    case = random_hardware(0, world_size=4, memory_bytes=1 << 40), random_model(0, layers=4), workload(4)
    given = dict(pipeline=[1, 2], micro_batches=[2], context=[1], sharding=["zero3"], sequence=[], recompute=["none"])
    lists = Limits(**given)
    own = Limits(**{name: tuple(values) for name, values in given.items()})
    assert lists == own
    assert search_plan(*case, limits=lists).best == search_plan(*case, limits=own).best
