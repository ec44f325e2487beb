# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The plan that is found is the cheapest of all plans, and costs what an estimate says of it."""

import itertools
import re
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from transformers import LlamaConfig

from galvatron_hf.plan import LayerStrategy, ParallelPlan, Precision, Stage, VocabularyStrategy
from galvatron_hf.plan.layout import Grid, Layout, block_size, sent_tokens
from galvatron_hf.planner.cost.resharding import most_sent_tokens
from galvatron_hf.planner.estimate import estimate_plan
from galvatron_hf.planner.report.alternatives import alternatives
from galvatron_hf.planner.report.explain import explain_plan
from galvatron_hf.planner.report.report import explain
from galvatron_hf.planner.search import search_plan
from galvatron_hf.planner.solver.cut_bounds import least_memory
from galvatron_hf.planner.solver.dp import solve
from galvatron_hf.planner.space import Limits, layer_strategies, micro_batch_sizes
from galvatron_hf.profiler.profiles.hardware import HardwareProfile, Link
from galvatron_hf.profiler.profiles.presets import hardware_preset
from galvatron_hf.profiler.trace.tracing import profile_from_config
from planner_cases import every_estimate, every_plan, random_hardware, random_model, workload
from search_problems import fast_and_slow, random_problem


FEW = Limits(sequence=("megatron",), sharding=("replicate", "zero3"), hybrid_sharding=False)
CASES = [
    # world size, layers, rows, kinds of layers, tied, limits
    (2, 2, 3, 1, False, FEW),
    (2, 2, 3, 2, True, FEW),
    (2, 3, 2, 2, False, Limits(sequence=("ulysses",), sharding=("zero2",), recompute=("none",))),
    (4, 2, 2, 1, True, Limits(sequence=(), sharding=("zero3", "replicate"), recompute=("none", "full"))),
    (4, 2, 5, 2, False, Limits(sequence=("none",), sharding=("zero2", "replicate"), recompute=("none",))),
    # two virtual stages per rank, of equal layers and of others
    (2, 4, 5, 1, False, Limits(sequence=(), sharding=("replicate",), pipeline=(2,))),
    (2, 4, 2, 2, True, Limits(sequence=(), sharding=("replicate",), pipeline=(2,))),
    (4, 4, 2, 1, False, replace(FEW, sharding=("zero3",), recompute=("none",), pipeline=(2,))),
    (4, 4, 3, 1, False, Limits(sequence=("megatron",), sharding=("zero3",), recompute=("none",), pipeline=(2,))),
    # three virtual stages per rank; numbers of ranks that are no powers of two, with fewer rows than ranks
    (2, 6, 4, 1, False, Limits(sequence=(), sharding=("replicate",), pipeline=(2,))),
    (3, 3, 2, 1, False, Limits(sequence=(), sharding=("replicate", "zero3"))),
    (6, 2, 4, 1, False, Limits(sequence=("none",), sharding=("zero2",), recompute=("none",))),
]


# Plans of which one is also priced alone. It is prime, so that all strategies, cuts and counts have their turn.
SAMPLED = 47
LARGEST = 8  # the case with most plans
SLOW = (4, 7, LARGEST, 10)  # others of the same kinds have fewer plans


def cases() -> Iterator:
    for index, case in enumerate(CASES):
        yield pytest.param(*case, id=f"{index}", marks=[pytest.mark.slow] * (index in SLOW))


@pytest.mark.parametrize("world, layers, rows, kinds, tied, limits", cases())
def test_no_plan_of_the_space_is_faster_than_the_one_found(world, layers, rows, kinds, tied, limits):
    for seed in range(4):
        model = random_model(seed, layers=layers, kinds=kinds, tied=tied)
        hardware = random_hardware(seed, world_size=world, memory_bytes=1 << 40)
        work = workload(rows)
        every = list(every_estimate(hardware, model, work, limits))
        for estimate in every[seed::SAMPLED]:
            priced = estimate_plan(hardware, model, work, estimate.plan)
            assert estimate == replace(priced, peak_bytes=())
            assert all(peak <= most for peak, most in zip(priced.peak_bytes, priced.memory_bytes, strict=True))
        needed = sorted(max(estimate.memory_bytes) for estimate in every)
        for budget in (needed[0], needed[len(needed) // 20], needed[len(needed) // 3], needed[-1]):
            found = search_plan(hardware, model, work, memory_bytes=budget, limits=limits)
            fitting = [estimate for estimate in every if max(estimate.memory_bytes) <= budget]
            assert found.best.step_ms == min(estimate.step_ms for estimate in fitting)
            again = estimate_plan(hardware, model, work, found.best.plan)
            assert (again.step_ms, again.memory_bytes) == (found.best.step_ms, found.best.memory_bytes)
        too_little = search_plan(hardware, model, work, memory_bytes=needed[0] - 1, limits=limits)
        assert too_little.best is None and too_little.least_memory_bytes == needed[0]


@pytest.mark.slow
@pytest.mark.parametrize("world, layers, rows, kinds, tied, limits", CASES[:LARGEST] + CASES[LARGEST + 1 :])
def test_a_plan_costs_the_same_alone_and_among_all_plans(world, layers, rows, kinds, tied, limits):
    """Prices each plan alone for two of four seeds."""
    for seed in range(4):
        model = random_model(seed, layers=layers, kinds=kinds, tied=tied)
        hardware = random_hardware(seed, world_size=world, memory_bytes=1 << 40)
        estimates = every_estimate(hardware, model, workload(rows), limits)
        for estimate in itertools.islice(estimates, seed % 2, None, 2):
            priced = estimate_plan(hardware, model, workload(rows), estimate.plan)
            assert estimate == replace(priced, peak_bytes=())


def with_quick_exchanges(hardware: HardwareProfile, ranks: int) -> HardwareProfile:
    """Returns the profile with all-to-alls that take no time over `ranks` ranks, and long over others."""
    places = [(n, s) for n in range(2, 13) for s in range(1, 13) if (n - 1) * s < hardware.world_size]
    links = [
        Link(kind="all_to_all", ranks=n, stride=s, latency_ms=0.01 if n == ranks else 60.0, bytes_per_s=1e9)
        for n, s in places
    ]
    return replace(hardware, links=(*(link for link in hardware.links if link.kind != "all_to_all"), *links))


@pytest.mark.parametrize("world, rows, ranks", [(12, 5, 4), (12, 3, 4), (12, 5, 3), (8, 3, 2), (8, 5, 4)])
def test_rows_are_added_for_nobody_but_a_layer_that_has_as_many_data_ranks(world, rows, ranks):
    """With them hidden states can lie in another way, with which a plan that does not have them seemed quicker."""
    model, work = random_model(0, layers=3, degree=4), workload(rows)
    hardware = with_quick_exchanges(random_hardware(0, world_size=world, memory_bytes=1 << 40), ranks)
    of_layers = dict(tensor=1, sequence=("ulysses",), sharding=("replicate",), recompute=("none",))
    limits = Limits(**of_layers, pipeline=(1,), micro_batches=(1,))
    plan = ParallelPlan.uniform(world, 3, sharding="replicate", precision=work.precision)
    strategies = [one for one, _ in layer_strategies(world, model, limits)]
    plans = [replace(plan, layers=layers) for layers in itertools.product(strategies, repeat=3)]
    every = [estimate_plan(hardware, model, work, one) for one in plans]
    needed = sorted(max(estimate.memory_bytes) for estimate in every)
    for budget in (needed[0], needed[len(needed) // 3], needed[-1]):
        found = search_plan(hardware, model, work, memory_bytes=budget, limits=limits).best
        fitting = [estimate.step_ms for estimate in every if max(estimate.memory_bytes) <= budget]
        again = estimate_plan(hardware, model, work, found.plan)
        assert found.step_ms == min(fitting) and (again.step_ms, again.memory_bytes) == (
            min(fitting),
            found.memory_bytes,
        )
    too_little = search_plan(hardware, model, work, memory_bytes=needed[0] - 1, limits=limits)
    assert too_little.best is None and too_little.least_memory_bytes == needed[0]


@pytest.mark.parametrize("world, layers, rows", [(2, 3, 3), (4, 4, 2)])
def test_the_best_plan_of_one_strategy_is_the_best_of_those(world, layers, rows):
    limits = replace(FEW, sharding=("zero3",), recompute=("none",), uniform=True)
    for seed in range(3):
        model = random_model(seed, layers=layers)
        hardware = random_hardware(seed, world_size=world, memory_bytes=1 << 40)
        plans = [one for one in every_plan(hardware, model, rows, limits) if len(set(one.layers)) == 1]
        best = min(estimate_plan(hardware, model, workload(rows), one).step_ms for one in plans)
        assert search_plan(hardware, model, workload(rows), limits=limits).best.step_ms == best


def test_the_rank_that_has_most_tokens_has_as_many_as_its_split_says():
    for data, positions, replicas in itertools.product((1, 2, 3, 4, 8), (1, 2, 3), (1, 2)):
        layout = Layout(data, positions, replicas)
        for rows, length in itertools.product(range(1, 14), (1, 5, 8, 9)):
            tokens = [layout.rectangle(index, rows, length).area for index in range(layout.ranks)]
            assert layout.most_tokens(rows, length) == max(tokens)


def test_a_search_finds_the_same_plan_again():
    model, hardware = random_model(1, layers=6), random_hardware(1, world_size=4, memory_bytes=1 << 40)
    one, other = (search_plan(hardware, model, workload(8), memory_bytes=20000) for _ in range(2))
    assert one.best == other.best and one.states == other.states


@pytest.mark.parametrize("seeds", fast_and_slow(24, 60))
def test_options_that_are_left_out_are_not_missed(seeds):
    for seed in seeds:
        problem = random_problem(seed, layers=6, stages=1 + seed % 3, options=8, layouts=4, tightness=0.3)
        assert solve(problem.restricted(np.nonzero(problem.useful_options())[0])).cost == solve(problem).cost


def test_the_least_memory_is_that_of_the_first_budget_that_has_a_solution():
    for seed in range(30):
        problem = random_problem(seed, layers=5, stages=1 + seed % 3, options=4, kinds=1 + seed % 2)
        least = least_memory(problem)
        if least < np.inf:
            assert solve(replace(problem, budget=int(least))).cost is not None
            assert solve(replace(problem, budget=int(least) - 1)).cost is None


def test_micro_batches_are_all_sizes_and_all_numbers_of_each():
    for rows in range(1, 40):
        found = {size: list(counts) for size, counts in micro_batch_sizes(rows)}
        assert sorted(found) == sorted({-(-rows // count) for count in range(1, rows + 1)})
        assert all(found[size] == [n for n in range(1, rows + 1) if -(-rows // n) == size] for size in found)


@pytest.mark.parametrize("seeds", fast_and_slow(1, 2))
@pytest.mark.parametrize(
    "world, rows, share", [(4, 18, 1.0), (4, 14, 0.85), (4, 13, 1.0), pytest.param(8, 34, 1.0, marks=pytest.mark.slow)]
)
def test_no_number_of_micro_batches_that_is_left_out_is_missed(world, rows, share, seeds):
    """Tries every count of micro-batches: a larger one may be the first to be interleaved, or keep less (p > 2)."""
    for seed in seeds:
        model = random_model(seed, layers=16, degree=1)
        hardware = random_hardware(seed, world_size=world, memory_bytes=1 << 40)
        quick = tuple(replace(link, bytes_per_s=1e9 if link.kind == "send" else 1e4) for link in hardware.links)
        hardware, work = replace(hardware, links=quick, step_ms=0.0), workload(rows)
        free = search_plan(hardware, model, work).best
        budget = int(share * max(free.memory_bytes))
        best = search_plan(hardware, model, work, memory_bytes=budget).best
        for count in range(1, rows + 1):
            limits = Limits(micro_batches=(count,))
            try:
                other = search_plan(hardware, model, work, memory_bytes=budget, limits=limits).best
            except ValueError:  # no strategy has so few rows
                continue
            assert other is None or other.step_ms >= best.step_ms, count


def test_the_largest_move_is_the_largest_of_all_ranks():
    layouts = [Layout(4, 2, 2), Layout(16, 1, 1), Layout(8, 1, 2), Layout(2, 4, 2), Layout(4, 1, 4), Layout(8, 2, 1)]
    for before, after in itertools.product(layouts, repeat=2):
        sent = sent_tokens(before, after, Grid(16, 64))
        assert most_sent_tokens(before, after, 16, 64) == (block_size(before, after), max(sent))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("pipeline, kinds", [(1, 2), (2, 2), (2, 1)])
def test_the_parts_of_a_price_add_up(pipeline, kinds, tied):
    virtual = set()
    for seed in range(6):
        model = random_model(seed, layers=4, kinds=kinds, tied=tied)
        hardware = random_hardware(seed, world_size=4, memory_bytes=1 << 40)
        limits = Limits(pipeline=(pipeline,))
        best = search_plan(hardware, model, workload(12), memory_bytes=1 << 40, limits=limits).best
        found = explain_plan(hardware, model, workload(12), best.plan)
        assert sum(found.step_ms().values()) == pytest.approx(best.step_ms, rel=1e-9)
        assert tuple(stage.memory_bytes for stage in found.stages) == best.memory_bytes
        virtual.add(len(best.plan.stages) // pipeline)
    assert pipeline == 1 or kinds > 1 or 2 in virtual


# Three seeds have every kind of overlap, with calibration factors and without.
@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 6))])
@pytest.mark.parametrize("world, tied", [(1, False), (2, True), (4, False), (4, True)])
def test_nothing_that_a_plan_may_say_is_faster_than_the_one_found(world, tied, seed):
    """Draws plans whose strategies are all that their types allow, shards of one piece too, under scarce memory."""
    model = random_model(seed, layers=3, tied=tied)
    hardware = random_hardware(seed, world_size=world, memory_bytes=1 << 40)
    draw, work = np.random.default_rng(seed), replace(workload(8), precision=Precision(compute="bf16"))
    least = search_plan(hardware, model, work, memory_bytes=1).least_memory_bytes
    most = search_plan(hardware, model, work).best.memory_bytes
    best = {
        budget: search_plan(hardware, model, work, memory_bytes=budget).best.step_ms
        for budget in np.linspace(least, max(max(most), least), 4).astype(int).tolist()
    }
    priced = 0
    for _ in range(400):
        plan = _any_plan(draw, world, tied)
        try:
            found = estimate_plan(hardware, model, work, plan)
        except ValueError:  # this model's weights cannot be cut so
            continue
        priced += 1
        assert max(found.memory_bytes) >= least, plan
        for budget, step_ms in best.items():
            assert max(found.memory_bytes) > budget or found.step_ms >= step_ms, plan
    assert priced > 100


@pytest.mark.parametrize("world", [2, 4, 8])
def test_whole_copies_that_keep_no_cast_copy_are_found_where_others_do_not_fit(world):
    """Finds zero3 of one piece: but for copies as fast as replicated weights, in memory that has no room for these."""
    hardware, work = hardware_preset("h100", 1, world), workload(world, 64)
    work = replace(work, precision=Precision(compute="bf16"))
    sizes = dict(hidden_size=64, intermediate_size=192, num_hidden_layers=6, num_attention_heads=8, vocab_size=512)
    model = profile_from_config(LlamaConfig(**sizes), hardware, length=work.length, packed=False, max_degree=2)
    whole, bare = (
        estimate_plan(hardware, model, work, ParallelPlan.uniform(world, 6, recompute="full", **sharding))
        for sharding in (dict(sharding="replicate"), dict(sharding="zero3", shard_degree=1))
    )
    assert whole.step_ms < bare.step_ms < 1.001 * whole.step_ms
    assert max(bare.memory_bytes) < max(whole.memory_bytes)
    limits = Limits(tensor=1, sequence=(), pipeline=(1,), micro_batches=(1,))
    best = search_plan(hardware, model, work, memory_bytes=max(bare.memory_bytes), limits=limits).best
    assert best.step_ms <= bare.step_ms


def _any_plan(draw: np.random.Generator, world: int, tied: bool) -> ParallelPlan:
    """Draws any plan for 3 layers and 8 rows, of a model whose ends are `tied` or not."""
    pipeline, count = (int(draw.choice(choices)) for choices in ([1, 1, min(2, world)], [1, 2, 4, 8]))
    ranks, recompute = world // pipeline, str(draw.choice(["none", "full"]))

    def strategy(kind: type, tensor: int | None = None, **fields) -> LayerStrategy | VocabularyStrategy:
        tensor = tensor or int(draw.choice([1, min(2, ranks)]))
        sharding, whole = str(draw.choice(["replicate", "zero2", "zero3"])), ranks // tensor
        degrees = [None] if sharding == "replicate" else [None, *(each for each in (1, 2, 4) if whole % each == 0)]
        return kind(tensor=tensor, sharding=sharding, shard_degree=degrees[draw.integers(len(degrees))], **fields)

    kinds = [strategy(LayerStrategy, recompute=recompute) for _ in range(2)]
    cut, turn = (int(draw.integers(1, 3)) for _ in range(2))
    cuts = [0, 3] if pipeline == 1 else [0, cut, 3]
    embedding = strategy(VocabularyStrategy)
    head = embedding if tied and pipeline == 1 else strategy(VocabularyStrategy, embedding.tensor if tied else None)
    return replace(
        ParallelPlan.uniform(world, 3, pipeline=pipeline, micro_batches=count, precision=Precision(compute="bf16")),
        stages=tuple(
            Stage(ranks=tuple(range(place * ranks, (place + 1) * ranks)), layers=(cuts[place], cuts[place + 1]))
            for place in range(pipeline)
        ),
        layers=tuple(kinds[index >= turn] for index in range(3)),
        embedding=embedding,
        head=head,
    )


@pytest.mark.parametrize("layers, ranks, rows", [(8, 6, 2), (8, 12, 5), (4, 9, 8), (7, 7, 3)])
def test_devices_that_are_no_power_of_two_have_plans(layers, ranks, rows):
    model, hardware = random_model(1, layers=layers), random_hardware(1, world_size=ranks, memory_bytes=1 << 40)
    best = search_plan(hardware, model, workload(rows)).best
    for pipeline in (degree for degree in range(1, layers + 1) if ranks % degree == 0):
        for sharding in ("replicate", "zero2", "zero3"):
            plan = ParallelPlan.uniform(ranks, layers, pipeline=pipeline, micro_batches=rows, sharding=sharding)
            assert best.step_ms <= estimate_plan(hardware, model, workload(rows), plan).step_ms


@pytest.mark.parametrize("nodes, devices", [(1, 3), (3, 1), (1, 5), (7, 1), (3, 3), (3, 4), (5, 2)])
def test_every_preset_has_what_pipelines_of_any_degree_send(nodes, devices):
    hardware, ranks = hardware_preset("h100", nodes, devices), nodes * devices
    for stride in range(1, ranks):
        link = hardware.link("send", 2, stride)
        alike = [
            one
            for one in hardware.links
            if one.kind == "send" and (2 * one.stride > devices) == (2 * stride > devices)
        ]
        assert (link.latency_ms, link.bytes_per_s) in {(one.latency_ms, one.bytes_per_s) for one in alike}
    model, work = random_model(0, layers=ranks), workload(2 * ranks)
    deep = ParallelPlan.uniform(ranks, ranks, pipeline=ranks, micro_batches=2 * ranks, sharding="replicate")
    best = search_plan(hardware, model, work, limits=Limits(sequence=(), sharding=("replicate",))).best
    assert best.step_ms <= estimate_plan(hardware, model, work, deep).step_ms


def test_memory_that_is_advised_is_enough():
    hardware = random_hardware(0, world_size=4, memory_bytes=1 << 40)
    for least in (14014696704, 14495514624, 51539607552, 123456789, 4321):
        result = replace(
            search_plan(hardware, random_model(0, layers=2), workload(4), memory_bytes=1), least_memory_bytes=least
        )
        advised = re.search(r"the least is ([0-9.]+) GiB", result.no_plan_message).group(1)
        assert least <= float(advised) * 2**30 < 1.01 * least + 8


def test_a_report_explains_a_result():
    hardware, model = random_hardware(1, world_size=4, memory_bytes=1 << 40), random_model(1, layers=4)
    result = search_plan(hardware, model, workload(8))
    text = str(explain(result))
    assert "Stages: ms of a micro-batch" in text and "Milliseconds of a step" in text
    assert f"{result.best.step_ms:.1f} ms a step" in text
    for other in alternatives(hardware, model, workload(8), memory_bytes=hardware.memory_bytes):
        assert f"{other.best.step_ms / result.best.step_ms:.2f}x as long" in text
    none = search_plan(hardware, model, workload(8), memory_bytes=1)
    with pytest.raises(ValueError, match="No plan fits 0.000.* GiB a device: the least is"):
        explain(none)
    tight = search_plan(hardware, model, workload(8), memory_bytes=max(result.best.memory_bytes))
    tight = explain(tight, compare=False)
    assert "The plan does not fit" not in str(tight)
    assert "The plan does not fit" in str(replace(tight, budget=1))
