# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Compares the measured time and memory of a run with closed forms, and its report with the prediction."""

import functools
import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from galvatron_hf import ParallelPlan
from galvatron_hf.plan import Precision, Stage
from galvatron_hf.planner.cost.workload import Workload
from galvatron_hf.planner.estimate import Estimate
from galvatron_hf.trainer.data.step_variants import bytes_per_token
from galvatron_hf.trainer.planning.cpu_peak_memory import _peak, allocation_peak, allocations_profiler
from galvatron_hf.trainer.planning.step_meter import Outcome, StepMeter, held_bytes, outcome, prediction
from trainer_runs import on_ranks


BLOCK, LONGER = 1 << 20, 3 << 20  # bytes


# ---- Memory ----


def test_the_peak_of_allocations_is_counted_to_the_byte():
    profiler = allocations_profiler()
    with profiler:
        first = torch.empty(1000, dtype=torch.uint8)
        second = torch.empty(5000, dtype=torch.uint8)
        del first
        third = torch.empty(500, dtype=torch.uint8)
        del second, third
    assert allocation_peak(profiler) == 6000


@pytest.mark.parametrize("sent", [True, False])
def test_what_nobody_frees_counts_until_its_last_operator_where_a_collective_had_it(sent):
    (peak,) = on_ranks(functools.partial(peak_of_two_blocks, sent), 1)
    expected = LONGER if sent else BLOCK + LONGER
    assert expected <= peak < expected + 1000


def peak_of_two_blocks(sent: bool) -> int:
    """Returns the peak of two blocks. The first one stays until the second comes, as a block that gloo frees late."""
    profiler = allocations_profiler()
    with profiler:
        block = torch.ones(BLOCK, dtype=torch.uint8)
        if sent:
            dist.all_reduce(block)
        block.add_(1)
        torch.empty(LONGER, dtype=torch.uint8)
    del block
    return allocation_peak(profiler)


@pytest.mark.parametrize(
    ("late", "runs"),
    [
        ({}, 2 + 2),
        ({0: {0, 2}}, 5 + 2),  # runs of rank 0 whose peak is larger: two of the five with fewer tokens
        ({0: {1, 4}, 1: {5}}, 5 + 5),  # one rank's peak is enough for all to go on
    ],
)
def test_two_peaks_of_five_that_differ_do_not_change_the_growth_of_memory(late, runs):
    assert on_ranks(functools.partial(growth_of_noisy_peaks, late), 2) == [(1000, runs)] * 2


def growth_of_noisy_peaks(late: dict[int, set[int]]) -> tuple[float, int]:
    """Returns the measured bytes per token of work that allocates 1000, and how often it ran. In some runs of a rank a
    peak is 9000 bytes larger.
    """
    runs = itertools.count()

    def compute(tokens: int) -> None:
        torch.empty(1000 * tokens + 9000 * (next(runs) in late.get(dist.get_rank(), ())), dtype=torch.uint8)

    parallel = SimpleNamespace(device=torch.device("cpu"))
    return bytes_per_token(parallel, compute, (24, 48)), next(runs)


def test_blocks_that_another_one_lies_on_are_gone():
    def used(time: int, start: int, end: int, of_collective: bool = False) -> tuple:
        return time, 0, start, end, of_collective

    def made(time: int, start: int, size: int, of_collective: bool = False) -> tuple:
        return time, size, start, time, of_collective

    freed = (4, -10, 100, 4, False)
    assert _peak([made(1, 100, 10), made(2, 105, 10)]) == 10  # the second lies in the first
    assert _peak([made(1, 100, 10), made(2, 110, 10)]) == 20
    assert _peak([made(1, 100, 10), freed, made(5, 200, 10)]) == 10
    assert _peak([made(1, 100, 10), freed, used(5, 100, 9), made(8, 200, 10)]) == 10  # no block is there at 5
    sent = [made(1, 100, 10), used(2, 100, 3, True)]
    assert _peak([*sent, made(4, 200, 10)]) == 10
    assert _peak([*sent, used(4, 100, 6), made(5, 200, 10)]) == 20
    assert _peak([*sent, made(4, 100, 4), made(5, 200, 10)]) == 14  # another one of the same start
    assert _peak([made(1, 100, 10, True), made(2, 200, 10)]) == 10  # a collective's own


def test_what_a_rank_holds_counts_storages_once():
    model = torch.nn.Linear(4, 2)
    tied = torch.nn.Linear(4, 2)
    tied.weight = model.weight
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    both = torch.nn.ModuleList([model, tied])
    weights = (8 + 2 + 2) * 4
    gradients, moments, steps = 10 * 4, 2 * 10 * 4, 2 * 4
    assert held_bytes(both, optimizer) == weights + gradients + moments + steps


# ---- The prediction ----


@pytest.mark.parametrize(
    "meta",
    [
        {},
        {"predicted": 3},
        {"predicted": {"step_ms": 1.0, "memory_bytes": [1, 2]}},
        {"predicted": {"step_ms": "x", "memory_bytes": [1]}},
        {"predicted": {"step_ms": 0, "memory_bytes": [1]}},
    ],
)
def test_only_whole_predictions_are_held_against_a_run(meta):
    assert prediction(replace(ParallelPlan.uniform(1, 1), meta=meta)) is None


def test_a_run_that_is_too_short_says_so():
    plan = Estimate(
        plan=ParallelPlan.uniform(1, 1), step_ms=2.0, samples_per_second=1.0, memory_bytes=(1 << 20,)
    ).plan_with_prediction(Workload(rows=1, length=1, precision=Precision(compute="fp32")))
    (text,) = on_ranks(functools.partial(short_run, plan), 1)
    assert text == (
        "Predicted 2.0 ms a step; the run was too short to measure it.\n"
        "Predicted 1.0 MiB on a rank at most, not measured."
    )


def test_stages_on_the_same_ranks_are_one_line():
    said = Outcome(
        predicted_ms=1.0,
        measured_ms=None,
        steps=0,
        predicted_bytes=(1 << 20, 2 << 20),
        measured_bytes=(None, 1 << 20),
    )
    assert "1.0 MiB on a rank of pipeline rank 0 at most, not measured" in str(said)
    assert "2.0 MiB on a rank of pipeline rank 1 at most, measured 1.0 MiB (-50.0%)" in str(said)
    stages = tuple(Stage(ranks=(index % 2,), layers=(index, index + 1)) for index in range(4))
    plan = replace(ParallelPlan.uniform(2, 4, pipeline=2), schedule="interleaved", stages=stages)
    noted = {"step_ms": 1.0, "memory_bytes": [1, 2]}
    assert prediction(replace(plan, meta={"predicted": noted})) == noted
    assert prediction(replace(plan, meta={"predicted": noted | {"memory_bytes": [1] * 4}})) is None


def short_run(plan: ParallelPlan) -> str:
    meter = StepMeter(torch.device("cpu"), lambda: 0)
    meter.finish()
    return str(outcome(meter, plan))
