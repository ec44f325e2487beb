# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Simple plans near the fastest one."""

import json
from dataclasses import replace
from itertools import pairwise, product

import pytest
from transformers import LlamaConfig

from galvatron_hf.cli.main import main
from galvatron_hf.plan import LayerStrategy, ParallelPlan, Stage, VocabularyStrategy
from galvatron_hf.planner import simplify
from galvatron_hf.planner.cost.cost_model import CostModels
from galvatron_hf.planner.estimate import Estimates, estimate_plan
from galvatron_hf.planner.search import search_plan
from galvatron_hf.planner.simplify import SIMPLEST, Prices, complexity, simplest, with_recompute
from galvatron_hf.planner.space import Limits, expert_degrees
from planner_cases import random_hardware, random_model, workload


def result_of(seed: int, share: float = 1.0):
    """Returns the result of a search in which memory is scarce, so that plans have several strategies."""
    model = random_model(seed, layers=6)
    hardware = random_hardware(seed, world_size=4, memory_bytes=1 << 40)
    limits = Limits(pipeline=(1, 2), virtual_stages=1)
    most = max(search_plan(hardware, model, workload(8), limits=limits).best.memory_bytes)
    least = search_plan(hardware, model, workload(8), memory_bytes=1, limits=limits).least_memory_bytes
    budget = int(least + share * (most - least))
    return search_plan(hardware, model, workload(8), memory_bytes=budget, limits=limits)


@pytest.mark.parametrize("seed", range(6))
def test_a_simple_plan_is_within_the_tolerance_and_fits(seed):
    result = result_of(seed, share=0.5)
    nodes = result.hardware.devices_per_node
    fewer = 0
    for tolerance in (0.01, 0.1, 0.5):
        found = simplest(result, tolerance)
        assert (
            found.step_ms <= (1 + tolerance) * result.best.step_ms and max(found.memory_bytes) <= result.memory_bytes
        )
        again = estimate_plan(result.hardware, result.model, result.workload, found.plan)
        assert (again.step_ms, again.memory_bytes) == (found.step_ms, found.memory_bytes)
        assert complexity(found.plan, nodes) <= complexity(result.best.plan, nodes)
        fewer = max(fewer, len(set(result.best.plan.layers)) - len(set(found.plan.layers)))
    assert simplest(result, 0.0).step_ms == result.best.step_ms
    assert fewer > 0 or len(set(result.best.plan.layers)) == 1


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("seed", range(6))
def test_a_plan_of_one_strategy_is_found_where_the_search_finds_one(seed, times):
    """Compares with the best plan of one strategy with as many stages and micro-batches, or twice as many where there
    can be, of a search of its own.
    """
    result = result_of(seed, share=0.5)
    best = result.best.plan
    stages, counts = (times * len(best.rank_groups),), (min(8, times * best.micro_batch_count),)
    if stages[0] not in result.limits.pipeline:
        stages = result.limits.pipeline[-1:]
    limits = replace(result.limits, uniform=True, pipeline=stages, micro_batches=counts)
    case = result.hardware, result.model, result.workload
    uniform = search_plan(*case, memory_bytes=result.memory_bytes, limits=limits).best
    if uniform is not None:
        found = simplest(result, uniform.step_ms / result.best.step_ms - 1 + 1e-9)
        assert len(set(found.plan.layers)) == 1


def test_a_plan_without_other_parallelism_is_preferred_to_a_pipeline_of_one_strategy():
    """Compares with a search of its own for data parallelism with shards over all ranks."""
    compared = 0
    for seed in range(6):
        result = result_of(seed, share=0.5)
        limits = result.limits
        for feature in ("pipeline", "tensor", "ulysses", "hybrid-sharding"):
            limits = limits.without(feature)
        case = result.hardware, result.model, result.workload
        plain = search_plan(*case, memory_bytes=result.memory_bytes, limits=limits).best
        if plain is not None and plain.plan != result.best.plan:
            found = simplest(result, plain.step_ms / result.best.step_ms - 1 + 1e-9).plan
            nodes = result.hardware.devices_per_node
            assert complexity(found, nodes) <= complexity(plain.plan, nodes)
            compared += 1
    assert compared >= 2


def test_the_simplest_plans_are_those_of_one_strategy_over_all_ranks():
    for sharding in ("replicate", "zero2", "zero3"):
        assert complexity(plan_of(*[LayerStrategy(sharding=sharding)] * 4), 8) == SIMPLEST
    for parallelism in (dict(tensor=2), dict(ulysses=2), dict(context=2)):
        assert complexity(plan_of(*[LayerStrategy(**parallelism)] * 4), 8) > SIMPLEST
    assert complexity(plan_of(*[LayerStrategy()] * 4, pipeline=2), 8) > SIMPLEST


def test_longer_steps_than_a_limit_are_not_searched():
    """Compares with a search without a limit."""
    for seed in range(4):
        result = result_of(seed, share=0.5)
        case, options = (result.hardware, result.model, result.workload), dict(limits=result.limits)
        options |= dict(memory_bytes=result.memory_bytes)
        within = search_plan(*case, **options, longest_ms=result.best.step_ms)
        assert within.best == result.best and within.problems <= result.problems
        none = search_plan(*case, **options, longest_ms=0.999 * result.best.step_ms)
        assert none.best is None and none.least_memory_bytes is None and none.bound_ms is None


def test_a_step_as_long_as_the_limit_is_found():
    """Costs are whole picoseconds; a limit in milliseconds is a rounded one."""
    for seed in range(40):
        case = random_hardware(seed, world_size=2, memory_bytes=1 << 40), random_model(seed, layers=2), workload(2)
        best = search_plan(*case).best
        assert search_plan(*case, longest_ms=best.step_ms).best == best
        none = search_plan(*case, longest_ms=0.5 * best.step_ms)
        assert none.best is None and "longest_ms" in none.no_plan_message


@pytest.mark.parametrize("seed", range(3))
def test_one_strategy_of_a_model_with_dense_layers_has_an_expert_degree_in_the_others(seed):
    model = random_model(seed, layers=4, kinds=2, experts=True)
    hardware, limits = random_hardware(seed, world_size=4, memory_bytes=1 << 40), Limits().without("mixed-layers")
    limits = limits.without("zero3")
    least = search_plan(hardware, model, workload(8), memory_bytes=1, limits=limits).least_memory_bytes
    result = search_plan(hardware, model, workload(8), memory_bytes=least, limits=limits)
    assert len(set(model.layers)) == 2 and {layer.expert for layer in result.best.plan.layers} == {1, 2}
    assert limits.allows(simplest(result).plan, model) and simplest(result, 0.0).step_ms == result.best.step_ms
    plan = result.best.plan
    # To whoever reads the plan it has one strategy, though dense layers have no expert degree.
    degrees = expert_degrees(plan, model)
    assert set(degrees) == {2} and complexity(plan, 4, degrees)[1] == 1 < complexity(plan, 4)[1]
    experts = [at for at, kind in enumerate(model.layers) if model.kinds[kind].experts is not None]
    fewer = tuple(replace(layer, expert=1) if at == experts[0] else layer for at, layer in enumerate(plan.layers))
    assert limits.allows(replace(plan, layers=fewer), model) is (len(experts) == 1)


def test_no_simple_plan_is_looked_for_outside_the_limits(monkeypatch):
    """Records the searches; a plan from outside the limits could not be returned. Plans of one strategy are searched
    with as many stages as the fastest plan, and with twice as many.
    """
    model, hardware = random_model(0, layers=6), random_hardware(0, world_size=4, memory_bytes=1 << 40)
    compared = 0
    for given in (dict(pipeline=(2,)), dict(pipeline=(2, 4)), dict(tensor=1), {}):
        result, searched = search_plan(hardware, model, workload(8), limits=Limits(**given)), []
        monkeypatch.setattr(
            simplify,
            "search_plan",
            lambda *case, limits, **more: searched.append(limits) or search_plan(*case, limits=limits, **more),
        )
        found = simplify.simplest(result)
        assert searched
        for limits in searched:
            assert result.limits.covers(limits) or limits.uniform
            assert result.limits.pipeline is None or set(limits.pipeline) <= set(result.limits.pipeline)
        stages, allowed = len(result.best.plan.rank_groups), given.get("pipeline", (1, 2, 4))
        of_one_strategy = [limits.pipeline for limits in searched if limits.uniform]
        if complexity(found.plan, hardware.devices_per_node) > SIMPLEST:  # otherwise nothing more is looked for
            assert tuple(degree for degree in (stages, 2 * stages) if degree in allowed) in of_one_strategy
            compared += 1
    assert compared >= 2


@pytest.mark.parametrize("rounds", [1, 2])
def test_layers_recompute_where_a_simpler_plan_lacks_memory(rounds):
    """Compares with all numbers of last layers of each stage that may recompute."""
    model, hardware = random_model(3, layers=6 * rounds), random_hardware(3, world_size=4, memory_bytes=1 << 40)
    costs, ends = CostModels(hardware, model, workload(8)), VocabularyStrategy(sharding="zero2")
    bounds = [0, 2, 6, 8, 12][: 2 * rounds + 1]
    stages = [Stage(ranks=(0, 1) if low in (0, 6) else (2, 3), layers=(low, high)) for low, high in pairwise(bounds)]

    def plan_with(*counts: int) -> ParallelPlan:
        numbers = zip(stages, counts * rounds, strict=True)
        again = {stage.layers[1] - back for stage, count in numbers for back in range(1, count + 1)}
        return ParallelPlan(
            world_size=4, stacks={"decoder": bounds[-1]}, micro_batches=4, embedding=ends, head=ends,
            schedule="1f1b" if rounds == 1 else "interleaved", stages=tuple(stages),
            layers=tuple(LayerStrategy(sharding="zero2", recompute="full" if at in again else "none")
                         for at in range(bounds[-1])),
        )  # fmt: skip

    counts_of_all = list(product(range(3), range(5)))
    needed = {counts: Estimates(costs).of(plan_with(*counts)).memory_bytes for counts in counts_of_all}
    compared = 0
    for budget in map(max, needed.values()):
        least = [min(counts[rank] for counts in counts_of_all if needed[counts][rank] <= budget) for rank in (0, 1)]
        found = with_recompute(plan_with(0, 0), Prices(Estimates(costs)), budget)
        assert (found or plan_with(0, 0)) == plan_with(*least)
        compared += sum(least) > 0
    assert compared > 5
    assert with_recompute(plan_with(0, 0), Prices(Estimates(costs)), 1) == plan_with(2, 4)


def test_layers_that_have_to_recompute_do():
    """The Trainer asks for it by an argument, whatever is simpler."""
    model, hardware = random_model(1, layers=6), random_hardware(1, world_size=4, memory_bytes=1 << 40)
    result = search_plan(hardware, model, workload(8), limits=Limits(recompute=("full",)))
    for tolerance in (0.01, 0.5):
        assert {layer.recompute for layer in simplest(result, tolerance).plan.layers} == {"full"}


def plan_of(*layers: LayerStrategy, pipeline: int = 1, embedding=None) -> ParallelPlan:
    ranks, share = 16 // pipeline, len(layers) // pipeline
    stages = tuple(
        Stage(ranks=tuple(range(at * ranks, (at + 1) * ranks)), layers=(at * share, (at + 1) * share))
        for at in range(pipeline)
    )
    ends = VocabularyStrategy(sharding=layers[0].sharding)
    return ParallelPlan(
        world_size=16, stacks={"decoder": len(layers)}, micro_batches=4, stages=stages, layers=layers,
        embedding=embedding or ends, head=VocabularyStrategy(sharding=layers[-1].sharding),
    )  # fmt: skip


def test_what_is_simpler_is_an_order():
    plain, other = LayerStrategy(sharding="zero2"), LayerStrategy(sharding="zero3")
    part = LayerStrategy(sharding="zero2", shard_degree=4)
    plans = [
        plan_of(plain, plain, plain, plain),
        plan_of(part, part, part, part),
        plan_of(plain, plain, plain, plain, embedding=VocabularyStrategy(tensor=2)),
        plan_of(plain, plain, other, other),
        plan_of(plain, other, plain, other),
        plan_of(plain, other, part, part),
    ]
    ranks = [complexity(plan, 16) for plan in plans]
    # Shards over a part of the ranks have ends of their own here.
    assert ranks[0] == min(ranks) and ranks[3] < ranks[4] < ranks[5] and ranks[1] < ranks[3] and ranks[2] < ranks[3]
    across = plan_of(other, other, other, other, pipeline=2)
    assert complexity(across, 4) > complexity(plans[5], 4) and complexity(across, 16)[0] == 0
    assert complexity(plan_of(*(replace(other, shard_degree=4),) * 4, pipeline=2), 4)[0] == 0


def test_the_command_says_that_a_faster_plan_is_less_simple(tmp_path, capsys):
    LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4, vocab_size=256
    ).save_pretrained(tmp_path)
    flags = ["search", "--model", str(tmp_path), "--cluster", "cpu", "--devices-per-node", "4", "--seq-length", "128"]
    flags += ["--global-batch", "8", "--json"]
    found = {}
    for percent in ("0", "20"):
        assert main([*flags, "--simplicity", percent]) == 0
        found[percent] = json.loads(capsys.readouterr().out)
    assert found["0"]["step_ms"] == found["0"]["fastest_step_ms"] == found["20"]["fastest_step_ms"]
    assert found["20"]["step_ms"] <= 1.2 * found["0"]["step_ms"]
    assert found["0"]["memory_budget_bytes"] == int(0.92 * 8 * 2**30)
    assert main([*flags, "--memory-fraction", "0.5"]) == 0
    assert json.loads(capsys.readouterr().out)["memory_budget_bytes"] == 4 * 2**30
    for more, sentence in (
        (["--simplicity", "-1"], "--simplicity -1 is not a share of time"),
        (["--memory-fraction", "2"], "--memory-fraction 2 is not a share"),
        (["--memory-fraction", "0.5", "--memory-gib", "3"], "exclude each other"),
    ):
        assert main([*flags, *more]) == 1
        assert sentence in capsys.readouterr().err
