# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Galvatron's formulas as benchmarks/galvatron_formulas.py states them, against what Galvatron printed and by hand."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from galvatron_hf.interop.galvatron.plan import read_galvatron_plan
from galvatron_hf.plan import LayerStrategy, ParallelPlan, Stage, VocabularyStrategy
from plan_inputs import refusal


ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import galvatron_formulas  # noqa: E402
from galvatron_case import case_of  # noqa: E402
from galvatron_formulas import layer_ms, pipeline_ms, score, stage_memory, usable_mib, vocabulary_ms  # noqa: E402
from galvatron_profiles import EndMemory, GalvatronProfiles, Line, MessageTimes  # noqa: E402


PROFILES = ROOT / "tests" / "data" / "galvatron_profiles"
PLANS = ROOT / "tests" / "data" / "galvatron_plans"
# Samples per second that each engine printed for what it found.
PRINTED = {
    "main_1x8_38GB_bsz64_chunk8": "14.46",
    "main_1x8_38GB_bsz64_chunk-1": "15.31",
    "main_2x8_38GB_bsz128_chunk8": "30.50",
    "main_2x8_38GB_bsz128_chunk-1": "30.74",
    "main_8x8_38GB_bsz512_chunk8": "123.3",
    "main_8x8_38GB_bsz512_chunk-1": "123.9",
    "240_1x8_38GB_bsz64_chunk8": "14.69",
    "240_1x8_38GB_bsz64_chunk-1": "15.52",
    "240_2x8_38GB_bsz128_chunk8": "31.64",
    "240_2x8_38GB_bsz128_chunk-1": "31.64",
    "240_8x8_38GB_bsz512_chunk8": "124.7",
}


def published(name):
    engine, nodes = re.match(r"(main|240)_(\d)x8", name).groups()
    profiles = GalvatronProfiles.from_folder(PROFILES, int(nodes), 8)
    plan = read_galvatron_plan(PLANS / f"{name}.json", profiles.world_size)
    return profiles, plan, engine


def line_times(name, per_mib, constants):
    sizes = [2.0**power for power in range(8)]
    return MessageTimes(
        name=name,
        measured={ranks: {mib: per_mib * mib + constant for mib in sizes} for ranks, constant in constants.items()},
    )


def round_profiles(**changes):
    """Returns profiles of round numbers for 4 devices; a row's hidden states are 2 MiB."""
    fields = {
        "world_size": 4,
        "sequence_length": 1024,
        "hidden_size": 1024,
        "layer_forward": Line(slope=2.0, constant=1.0),
        "vocabulary_forward": Line(slope=1.0, constant=4.0),
        "parameter_mib": 96.0,
        "activation_mib": {1: 10.0, 2: 6.0, 4: 4.0, "checkpoint": 8.0},
        "ends": {
            "whole": EndMemory(states_mib={1: 400.0, 2: 200.0}, activation_mib={1: 20.0, 2: 12.0}),
            "first": EndMemory(states_mib={1: 160.0, 2: 80.0}, activation_mib={1: 8.0, 2: 4.0}),
            "last": EndMemory(states_mib={1: 240.0, 2: 120.0}, activation_mib={1: 16.0, 2: 10.0}),
        },
        "all_gather": line_times("all-gather", 0.5, {2: 1.0, 4: 2.0}),
        "all_to_all": line_times("all-to-all", 0.25, {2: 1.0, 4: 2.0}),
        "bandwidth": {(2, True): 4.0, (2, False): 2.0, (4, True): 8.0},
        "p2p_bandwidth": {2: 10.0},
        "overlap": 1.25,
    }
    return GalvatronProfiles(**{**fields, **changes})


DATA = LayerStrategy(sharding="zero2")
TENSOR = LayerStrategy(tensor=2, megatron_sp=True, sharding="zero3", recompute="full")
ULYSSES = LayerStrategy(ulysses=2, sharding="zero3")
WHOLE = LayerStrategy(tensor=4, megatron_sp=True, sharding="zero2")
ZERO2_END = VocabularyStrategy(sharding="zero2")


def plan_of(layers, *, sizes=None, micro_batches=2, end=ZERO2_END, head=None, schedule="1f1b"):
    sizes = sizes or [len(layers)]
    ranks, starts = 4 // len(sizes), [sum(sizes[:index]) for index in range(len(sizes) + 1)]
    return ParallelPlan(
        world_size=4,
        stacks={"decoder": len(layers)},
        micro_batches=micro_batches,
        schedule=schedule,
        stages=tuple(
            Stage(ranks=tuple(range(index * ranks, (index + 1) * ranks)), layers=tuple(starts[index : index + 2]))
            for index in range(len(sizes))
        ),
        layers=tuple(layers),
        embedding=end,
        head=head or end,
    )


@pytest.mark.parametrize("name", PRINTED)
def test_published_plans_have_the_throughput_that_the_engines_printed(name):
    profiles, plan, engine = published(name)
    found = score(profiles, plan, engine=engine)
    decimals = len(PRINTED[name].split(".")[1])
    assert f"{found.samples_per_second:.{decimals}f}" == PRINTED[name]
    assert found.extensions == ()


@pytest.mark.parametrize("name", PRINTED)
def test_published_plans_fit_the_budget_that_they_were_searched_for(name):
    profiles, plan, engine = published(name)
    found = score(profiles, plan, engine=engine)
    assert found.fits(38) and not found.fits(26)


def test_a_published_plan_takes_the_last_mib_of_its_budget():
    profiles, plan, engine = published("main_1x8_38GB_bsz64_chunk8")
    first, last = score(profiles, plan, engine=engine).memory
    assert first.counted == usable_mib(38) == 38912 - 7782
    assert usable_mib(38) - 40 < last.counted <= usable_mib(38)
    assert usable_mib(20) == 20480


def test_a_plan_written_in_our_own_form_scores_as_galvatrons_file():
    profiles, plan, engine = published("main_1x8_38GB_bsz64_chunk8")
    again = ParallelPlan.from_json(plan.to_json())
    assert score(profiles, again, engine=engine) == score(profiles, plan, engine=engine)
    bare = replace(plan, meta={})
    assert score(profiles, bare, global_batch=64, engine=engine).samples_per_second == pytest.approx(14.46, abs=0.01)


def test_times_of_measured_sizes_are_looked_up_and_others_read_off_the_line():
    measured = {2.0**power: 3.0 * 2**power + 1 for power in range(8)}
    measured[4.0] += 1.0
    times = MessageTimes(name="all-gather", measured={2: measured})
    assert times.ms(2, 4.0) == 14.0 and times.ms(1, 4.0) == 0.0
    # The outlier lifts the mean by 1/8 and tilts the line: x has the mean 255/8 and the sum of squares 21845.
    tilt = (4 - 255 / 8) / (21845 - 255**2 / 8)
    assert times.ms(2, 6.0) == pytest.approx(19 + 1 / 8 + tilt * (6 - 255 / 8))


@pytest.mark.parametrize(
    "layer, engine, synced, computed",
    [
        (DATA, "main", 5 + 10 + 0.25 * 9, 15),
        (DATA, "240", 5 + 10 + 0.25 * 9, 15),
        (TENSOR, "main", 5 + 15 + 0.25 * 12 + 6 * 1.5 * 5 + 6, 5 + 15 + 45 + 6),
        (TENSOR, "240", 5 + 7.5 + (12 + 0.25 * 7.5) + 4 * 1.5 * 5 + 6, 5 + 15 + 30 + 6),
        (ULYSSES, "main", 5 + 10 + 0.25 * 9 + 4 * 3 + 4.5, 5 + 10 + 12 + 4.5),
        (ULYSSES, "240", 5 + 5 + (6 + 0.25 * 5) + 4 * 3 + 3, 5 + 10 + 12 + 3),
        (WHOLE, "main", 5 + 10 + 6 * 10, 75),
        (WHOLE, "240", 5 + 10 + 4 * 10, 55),
    ],
)
def test_time_of_a_layer_by_hand(layer, engine, synced, computed):
    # 8 rows a micro-batch: f = 2 * 2 + 1 at every degree. Gradients: 96 / 2 MiB in 2 bytes x 3/4 of 4 ranks, twice at
    # 8 MiB/ms; the tensor layer's 24 MiB x 1/2 of 2 strided ranks, twice at 2 MiB/ms. 4 rows are 8 MiB, 8 rows 16 MiB.
    case = case_of(round_profiles(), plan_of([layer] * 4), 16, engine)
    part = case.stages[0][0]
    assert layer_ms(case, part, True) == pytest.approx(synced)
    assert layer_ms(case, part, False) == pytest.approx(computed)


@pytest.mark.parametrize("engine", ["main", "240"])
def test_sending_between_stages_is_divided_by_the_number_of_layers(engine):
    case = case_of(round_profiles(), plan_of([DATA] * 4, sizes=[2, 2], micro_batches=4), 16, engine)
    # 2 rows are 4 MiB; 2 stages x 2 directions x 4 MiB at 10 MiB/ms, over 4 layers.
    assert layer_ms(case, case.stages[0][0], False) == pytest.approx(5 + 10 + 1.6 / 4)


@pytest.mark.parametrize(
    "engine, strided, expected",
    [
        ("main", 2.0, (3.125 + 4.375 / 1.25) + (3.125 + 11.875 / 1.25) + 2 * 5),
        ("main", 0.5, 12.5 + (12.5 + 2.5 / 1.25) + 2 * 5),
        ("240", 2.0, (6.25 + 1.25 / 1.25) + (6.25 + 8.75 / 1.25) + 2 * 3),
    ],
)
def test_time_of_embedding_and_head_by_hand(engine, strided, expected):
    # f = 2 + 4, g = 12, slowed 7.5 and 15; half of 200 / 4 MiB (main: in 2 bytes) x 1/2 at `strided` MiB/ms.
    profiles = round_profiles(bandwidth={(2, False): strided, (4, True): 8.0})
    end = VocabularyStrategy(tensor=2, sharding="zero3")
    assert vocabulary_ms(case_of(profiles, plan_of([DATA] * 4, end=end), 16, engine)) == [pytest.approx(expected)]


def test_each_end_of_a_pipeline_has_half_of_the_vocabulary_time():
    plan = plan_of([DATA] * 4, sizes=[2, 2], micro_batches=4, end=ZERO2_END)
    assert vocabulary_ms(case_of(round_profiles(), plan, 16, "main")) == [3 + 6, 3 + 6]


@pytest.mark.parametrize(
    "synced, computed, micro_batches, expected",
    [
        ([30, 20], [24, 18], 3, 42 + 2 * 18 + 6),
        ([35, 12], [30, 10], 4, 30 + 3 * 30 + 5),
        ([10, 50, 10], [10, 50, 10], 4, 70 + 3 * 10),  # the middle stage's 4 x 50 are not seen
        ([20.0], [18.0], 1, 20),
    ],
)
def test_pipeline_formula_by_hand(synced, computed, micro_batches, expected):
    assert pipeline_ms(synced, computed, micro_batches) == pytest.approx(expected)


@pytest.mark.parametrize("engine, buffer", [("main", 0), ("240", 4)])
def test_memory_of_uneven_stages_by_hand(engine, buffer):
    plan = plan_of([DATA] * 4, sizes=[3, 1], micro_batches=4)
    case = case_of(round_profiles(), plan, 16, engine)
    share = 0.75 * 0.503 + 0.25
    first, last = stage_memory(case, 0), stage_memory(case, 1)
    assert first.states == pytest.approx(3 * 384 * share) and first.activations == 3 * 2 * 2 * 10
    assert last.states == pytest.approx(384 * share) and last.activations == 2 * 10
    assert first.vocabulary == pytest.approx(160 * share + 2 * 2 * 8)
    assert last.vocabulary == pytest.approx(240 * share + 2 * 16)
    # 280.9, 260.9, 1156.4 and 1206.5, each rounded up.
    assert (first.counted, last.counted) == (3 * 281 + 1157 + buffer, 261 + 1207 + buffer)
    assert any("cuts evenly" in sentence for sentence in score(round_profiles(), plan, global_batch=16).extensions)


@pytest.mark.parametrize(
    "layer, micro_batches, share, activations",
    [
        (DATA, 1, 7 / 8 * 0.253 + 1 / 8, 4 * 10),
        (replace(DATA, sharding="zero3"), 1, 0.253, 4 * 10),
        (replace(DATA, sharding="zero3"), 2, 7 / 8 * 0.253 + 1 / 8, 2 * 10),
        (replace(DATA, sharding="replicate"), 2, 1, 2 * 10),
        (replace(DATA, shard_degree=2), 2, 6 / 8 * 0.503 + 2 / 8, 2 * 10),
        (TENSOR, 2, (7 / 8 * 0.503 + 1 / 8) / 2, 4 * 8 / 2),
        (ULYSSES, 2, 7 / 8 * 0.253 + 1 / 8, 4 * 6),
        (WHOLE, 2, 1 / 4, 8 * 4),
    ],
)
def test_memory_of_a_layer_by_hand(layer, micro_batches, share, activations):
    case = case_of(round_profiles(), plan_of([layer] * 4, micro_batches=micro_batches), 16, "main")
    found = stage_memory(case, 0)
    assert found.states == pytest.approx(4 * 384 * share) and found.activations == pytest.approx(4 * activations)


def test_gpipe_holds_all_micro_batches_under_main_and_one_under_240():
    plan = plan_of([DATA] * 4, sizes=[2, 2], micro_batches=4, schedule="gpipe")
    held = {engine: stage_memory(case_of(round_profiles(), plan, 16, engine), 1) for engine in ("main", "240")}
    assert held["main"].activations == 2 * 4 * 2 * 10 and held["240"].activations == 2 * 2 * 10


@pytest.mark.parametrize(
    "layers, engine, buffer",
    [
        ([DATA, TENSOR], "main", 8),
        ([DATA, ULYSSES], "main", 0),
        ([WHOLE, ULYSSES], "main", 16),
        ([DATA, DATA], "240", 4),
        ([DATA, ULYSSES], "240", 8 + 8192),
    ],
)
def test_buffer_is_for_the_largest_degree(layers, engine, buffer):
    assert stage_memory(case_of(round_profiles(), plan_of(layers), 16, engine), 0).buffer == buffer


def test_a_whole_vocabulary_splits_positions_as_far_as_rows_ask_for():
    case = case_of(round_profiles(), plan_of([TENSOR] * 4, micro_batches=8), 16, "main")
    assert [(end.degree, end.ulysses, end.data) for end in case.ends] == [(2, True, 2)] * 2
    # 2 rows on 2 groups: f = 0.5 + 4, no all-gather.
    assert vocabulary_ms(case) == [4.5 + 9]
    assert stage_memory(case, 0).vocabulary == pytest.approx(400 * (6 / 8 * 0.253 + 2 / 8) + 12 * 1)


def test_fewer_sharding_ranks_gather_less_and_hold_more():
    profiles = round_profiles()
    full = LayerStrategy(sharding="zero3")
    case = case_of(profiles, plan_of([full, replace(full, shard_degree=2)]), 16, "main")
    times = [layer_ms(case, part, True) for part in case.stages[0]]
    # Reduced over all four ranks either way; 48 MiB x 3/4 at 8 MiB/ms against 48 x 1/2 at 4.
    assert times == [pytest.approx(17.25 + 4.5), pytest.approx(17.25 + 6)]
    plan = plan_of([full, replace(full, shard_degree=2)])
    assert any("fewer ranks" in sentence for sentence in score(profiles, plan, global_batch=16).extensions)


def test_mixed_shardings_and_different_ends_are_scored_and_said():
    layers = [DATA, replace(DATA, sharding="replicate"), DATA, DATA]
    head = VocabularyStrategy(tensor=2, sharding="zero2")
    plan = plan_of(layers, sizes=[2, 2], micro_batches=4, head=head)
    found = score(round_profiles(), plan, global_batch=16)
    assert len(found.extensions) == 2
    # The head on 2 ranks: 4 rows of 2 MiB gathered in 5 ms.
    assert found.stage_ms == (pytest.approx(2 * 15.4 + 9), pytest.approx(2 * 15.4 + 9 + 5))


def test_different_ends_of_one_stage_are_those_of_a_pipeline():
    """Prices the same ends with and without a pipeline: one stage has the sum of what two stages have."""
    head = VocabularyStrategy(tensor=2, sharding="zero2")
    apart = score(round_profiles(), plan_of([DATA] * 2, micro_batches=4, head=head), global_batch=16)
    alike = score(round_profiles(), plan_of([DATA] * 2, micro_batches=4), global_batch=16)
    assert any("by its own" in sentence for sentence in apart.extensions) and not alike.extensions
    # One row a rank: halves of embedding and head together, and the head's 2 rows of 2 MiB gathered.
    profiles = round_profiles()
    gathered = profiles.all_gather.ms(2, profiles.hidden_mib(2))
    assert apart.stage_ms[0] == pytest.approx(alike.stage_ms[0] + gathered)


@pytest.mark.parametrize(
    "plan, words",
    [
        (plan_of([LayerStrategy(tensor=2, sharding="zero2")] * 2), "layer 0 has tensor=2 without megatron_sp"),
        (plan_of([LayerStrategy(context=2)] * 2), "layer 0 has context=2"),
        (plan_of([LayerStrategy(expert=2)] * 2), "layer 0 has expert=2"),
        (plan_of([LayerStrategy(tensor=2, megatron_sp=True, ulysses=2)] * 2), "tensor=2 and ulysses=2"),
        (plan_of([DATA] * 2, schedule="zero_bubble"), "schedule is 'zero_bubble'"),
        (plan_of([DATA] * 4, sizes=[2, 2], micro_batches=1), "use micro_batches=2"),
        (plan_of([DATA] * 2, micro_batches=16), "divisible by 64"),
        (plan_of([DATA] * 2, end=VocabularyStrategy(tensor=4, sharding="zero2")), "no embedding and head on 4 ranks"),
        (ParallelPlan.uniform(8, 2, tensor=2, megatron_sp=True), "with world_size=4"),
        (replace(plan_of([DATA] * 2), stages=(Stage(ranks=(1, 0, 2, 3), layers=(0, 2)),)), "consecutive ranks"),
    ],
)
def test_what_the_formulas_say_nothing_of_is_refused_in_a_sentence(plan, words):
    assert words in refusal(plan, lambda plan: score(round_profiles(), plan, global_batch=16))


def test_a_global_batch_is_asked_for():
    plan = plan_of([DATA] * 2)
    assert "pass global_batch" in refusal(plan, lambda plan: score(round_profiles(), plan))
    assert "use 'main' or '240'" in refusal(plan, lambda plan: score(round_profiles(), plan, engine="250"))


def test_missing_profiles_are_named(tmp_path):
    read = GalvatronProfiles.from_folder
    assert "found none" in refusal(tmp_path, lambda folder: read(folder, 1, 8))
    assert "sp_time_3nodes" in refusal(PROFILES, lambda folder: read(folder, 3, 8))
    assert "has 2048" in refusal(PROFILES, lambda folder: read(folder, 1, 8, sequence_length=4096))
    plan = ParallelPlan.uniform(8, 2, sharding="zero2", pipeline=2, micro_batches=2)
    profiles = replace(read(PROFILES, 1, 8), p2p_bandwidth={})
    assert "no p2p bandwidth for 2 stages" in refusal(plan, lambda plan: score(profiles, plan, global_batch=16))


def test_command_line_prints_time_throughput_and_memory(monkeypatch, capsys, tmp_path):
    arguments = ["--profiles", str(PROFILES), "--nodes", "1", "--devices_per_node", "8", "--memory_gib", "38"]
    plan = PLANS / "240_1x8_38GB_bsz64_chunk-1.json"
    monkeypatch.setattr(sys, "argv", ["formulas", *arguments, "--plan", str(plan), "--engine", "240"])
    galvatron_formulas.main()
    text = capsys.readouterr().out
    assert "step 4123.68 ms, 15.52 samples/s (engine 240)" in text and "fits into the 31130 MiB" in text
    assert [line.split()[0] for line in text.splitlines()[2:4]] == ["0", "1"]
    raw = json.loads(plan.read_text())
    ours = tmp_path / "plan.json"
    read_galvatron_plan(raw, 8).to_json(ours)
    monkeypatch.setattr(sys, "argv", ["formulas", *arguments, "--plan", str(ours), "--global_batch", "63"])
    with pytest.raises(SystemExit, match="2"):
        galvatron_formulas.main()
    assert "use a global batch divisible by" in capsys.readouterr().err
