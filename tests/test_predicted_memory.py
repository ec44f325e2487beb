# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The memory that is predicted of a plan, and what its ranks allocate."""

import functools
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from galvatron_hf import ParallelPlan
from galvatron_hf.plan import Precision, Stage
from galvatron_hf.planner.cost import Workload
from galvatron_hf.planner.search import estimate_plan
from galvatron_hf.profiler.hardware_profile import HardwareProfile
from galvatron_hf.profiler.model_profile import ModelProfile
from galvatron_hf.trainer.allocations import _peak, allocation_peak, allocations_profiler
from galvatron_hf.trainer.meter import Outcome
from trainer_runs import on_ranks, trainer


RANKS, LAYERS, ROWS = 4, 4, 8
INTERLEAVED = tuple(Stage(ranks=(2 * (i % 2), 2 * (i % 2) + 1), layers=(i, i + 1)) for i in range(LAYERS))
# By the format that the model computes in: words of its vocabulary, whether both ends are tied, and tokens of a row.
CASES = {
    "fp32": (
        (1000, False, 64),
        {
            "replicated": dict(sharding="replicate"),
            "replicated, twice": dict(sharding="replicate", micro_batches=2),
            "zero2": dict(sharding="zero2"),
            "zero2, twice": dict(sharding="zero2", micro_batches=2),
            "zero2, recompute": dict(sharding="zero2", recompute="full"),
            "zero3": dict(sharding="zero3"),
            "zero3, recompute": dict(sharding="zero3", recompute="full", micro_batches=2),
            "tensor": dict(sharding="replicate", tensor=4, micro_batches=2),
            "ulysses": dict(sharding="zero2", ulysses=4),
            "megatron": dict(sharding="zero3", tensor=2, megatron_sp=True),
            "pipeline": dict(sharding="replicate", pipeline=2, micro_batches=4),
            "zero2 pipeline": dict(sharding="zero2", pipeline=2, micro_batches=4),
            "zero3 pipeline": dict(sharding="zero3", pipeline=2, micro_batches=4),
        },
    ),
    "bf16": (
        (4000, True, 1024),  # the head's working memory is counted for 1,024 tokens of a rank
        {
            "replicated, recompute": dict(sharding="replicate", recompute="full"),
            "zero2": dict(sharding="zero2"),
            "interleaved": dict(sharding="replicate", pipeline=2, micro_batches=4, stages=INTERLEAVED),
        },
    ),
}
BLOCK, LONGER = 1 << 20, 3 << 20  # bytes


class Rows(torch.utils.data.Dataset):
    """Of one length."""

    def __init__(self, count: int, length: int):
        self.ids = torch.arange(count * length).reshape(count, length) % 1000

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def llama(vocabulary: int, tied: bool) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=4,
        tie_word_embeddings=tied,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def train(plans: list[ParallelPlan], model: tuple[int, bool], length: int, folder: Path) -> list[Outcome]:
    outcomes = []
    options = dict(max_steps=2, per_device_train_batch_size=ROWS // RANKS, gradient_accumulation_steps=1)
    options |= dict(packing="none", bf16=plans[0].precision.compute == "bf16")
    for index, plan in enumerate(plans):
        made = trainer(
            folder / str(index),
            plan,
            model=llama(*model),
            train_dataset=Rows(2 * ROWS, length),
            data_collator=None,
            options=options,
        )
        made.train()
        outcomes.append(made.plan_outcome)
        dist.barrier()
    return outcomes


@pytest.mark.parametrize("compute", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_ranks_allocate_what_is_predicted(compute, tmp_path):
    """On every stage: within a tenth, a fiftieth in the median."""
    (*given, length), options = CASES[compute]
    hardware, profile = HardwareProfile.preset("cpu", 1, RANKS), llama(*given).config
    model = ModelProfile.from_config(profile, hardware, compute, length=length, packed=False, max_degree=RANKS)
    work, plans = Workload(rows=ROWS, length=length, precision=Precision(compute=compute)), []
    for kind in options.values():
        more = {"stages": kind["stages"], "schedule": "interleaved"} if "stages" in kind else {}
        uniform = {name: value for name, value in kind.items() if name != "stages"}
        plan = replace(ParallelPlan.uniform(RANKS, LAYERS, precision=work.precision, **uniform), **more)
        plans.append(estimate_plan(hardware, model, work, plan).noted(work))
    errors = {}
    for name, outcome in zip(
        options, on_ranks(functools.partial(train, plans, given, length, tmp_path))[0], strict=True
    ):
        pairs = zip(outcome.predicted_bytes, outcome.measured_bytes, strict=True)
        errors |= {f"{name}, {stage}": said / measured - 1 for stage, (said, measured) in enumerate(pairs)}
    assert max(map(abs, errors.values())) < 0.1, errors
    assert statistics.median(map(abs, errors.values())) < 0.02, errors


# ---- What is counted ----


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
    """The first is still there when the second one comes, as one that gloo lets go of late may be."""
    profiler = allocations_profiler()
    with profiler:
        block = torch.ones(BLOCK, dtype=torch.uint8)
        if sent:
            dist.all_reduce(block)
        block.add_(1)
        torch.empty(LONGER, dtype=torch.uint8)
    del block
    return allocation_peak(profiler)


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
