# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The memory that is predicted of a plan, and what its ranks allocate."""

import functools
import os
import statistics
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from peft import PeftModel, get_peft_model
from transformers import PreTrainedModel

from adapted_models import lora
from galvatron_hf import ParallelPlan
from galvatron_hf.parallel.comm import collectives
from galvatron_hf.plan import Precision, Stage
from galvatron_hf.planner.cost.workload import Workload
from galvatron_hf.planner.estimate import estimate_plan
from galvatron_hf.profiler.profiles.presets import hardware_preset
from galvatron_hf.profiler.trace.tracing import profile_from_config
from galvatron_hf.utils.compat import functional_collectives
from tiny_models import FAMILIES
from trainer_runs import on_ranks, trainer


RANKS, LAYERS, ROWS = 4, 4, 8
INTERLEAVED = tuple(Stage(ranks=(2 * (i % 2), 2 * (i % 2) + 1), layers=(i, i + 1)) for i in range(LAYERS))
# Words of the model's vocabulary, whether both ends are tied, and tokens of a row.
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
            "zero3, twice": dict(sharding="zero3", micro_batches=2),
            "zero3, recompute": dict(sharding="zero3", recompute="full", micro_batches=2),
            "tensor": dict(sharding="replicate", tensor=4, micro_batches=2),
            "ulysses": dict(sharding="zero2", ulysses=4),
            "megatron": dict(sharding="zero3", tensor=2, megatron_sp=True),
            "pipeline": dict(sharding="replicate", pipeline=2, micro_batches=4),
            "zero2 pipeline": dict(sharding="zero2", pipeline=2, micro_batches=4),
            "zero2 pipeline, all in flight": dict(sharding="zero2", pipeline=2, micro_batches=2),
            "zero3 pipeline": dict(sharding="zero3", pipeline=2, micro_batches=4),
            "zero3 of copies": dict(sharding="zero3", shard_degree=1, micro_batches=2),
            "zero3 of one piece": dict(sharding="zero3", tensor=4, micro_batches=2),
        },
    ),
    "fp32, large ends": (
        (8000, False, 256),
        {
            "replicated": dict(sharding="replicate"),
            "replicated, recompute": dict(sharding="replicate", recompute="full"),
            "zero2": dict(sharding="zero2"),
            "zero2, recompute": dict(sharding="zero2", recompute="full"),
            "zero3": dict(sharding="zero3"),
            "zero3 of one piece": dict(sharding="zero3", tensor=4),
            "zero2, twice": dict(sharding="zero2", micro_batches=2),
            "zero3, twice": dict(sharding="zero3", micro_batches=2),
            "zero2 pipeline": dict(sharding="zero2", pipeline=2, micro_batches=4),
            "zero3 pipeline": dict(sharding="zero3", pipeline=2, micro_batches=4),
            "zero3 pipeline of one rank each": dict(sharding="zero3", pipeline=4, micro_batches=4),
            "zero2 pipeline, once": dict(sharding="zero2", pipeline=2),
            "tensor": dict(sharding="replicate", tensor=2),
        },
    ),
    "fp32, few tokens": (  # the embedding's gradient is what the first stage of a pipeline needs most memory for
        (8000, False, 16),
        {
            "zero2": dict(sharding="zero2"),
            "zero3": dict(sharding="zero3"),
            "zero2, twice": dict(sharding="zero2", micro_batches=2),
            "zero3, twice": dict(sharding="zero3", micro_batches=2),
            "zero2 pipeline, once": dict(sharding="zero2", pipeline=2),
            "zero2 pipeline": dict(sharding="zero2", pipeline=2, micro_batches=4),
            "zero3 pipeline": dict(sharding="zero3", pipeline=2, micro_batches=4),
        },
    ),
    "fp32, huge ends": (
        (32000, False, 64),
        {
            "zero3": dict(sharding="zero3"),
            "zero3 of two pieces": dict(sharding="zero3", shard_degree=2),
            "zero3 of one piece": dict(sharding="zero3", tensor=4),
        },
    ),
    "bf16": (
        (4000, True, 1024),  # tokens of a row; the head has fewer on a rank than in a chunk
        {
            "replicated, recompute": dict(sharding="replicate", recompute="full"),
            "replicated, twice": dict(sharding="replicate", micro_batches=2),
            "zero2": dict(sharding="zero2"),
            "zero3, twice": dict(sharding="zero3", micro_batches=2),
            "zero3 of copies": dict(sharding="zero3", shard_degree=1, micro_batches=2),
            "zero3 of one piece": dict(sharding="zero3", tensor=4, micro_batches=2),
            "interleaved": dict(sharding="replicate", pipeline=2, micro_batches=4, stages=INTERLEAVED),
        },
    ),
    "fp32, layers that differ": (  # the first half has what `first` changes
        (1000, False, 512),
        {
            "recompute first": dict(sharding="zero3", first=dict(recompute="full")),
            "recompute first, twice": dict(sharding="zero2", micro_batches=2, first=dict(recompute="full")),
            "shards first": dict(sharding="replicate", first=dict(sharding="zero3", recompute="full")),
            "pipeline": dict(sharding="zero3", pipeline=2, micro_batches=4, first=dict(sharding="replicate")),
        },
    ),
    "fp32, shared": (  # every row is shared, because no rank has room for a whole one
        (1000, False, 2048),
        {
            "context 2": dict(context=2, micro_batches=4),
            "context 2, ulysses 2": dict(context=2, ulysses=2, micro_batches=8),
            "context 2, pipeline": dict(context=2, pipeline=2, micro_batches=8),
        },
    ),
    "fp32, adapters": (
        (1000, False, 64),
        {
            "replicated, twice": dict(sharding="replicate", micro_batches=2),
            "zero2, recompute": dict(sharding="zero2", recompute="full"),
            "zero3, twice": dict(sharding="zero3", micro_batches=2),
            "megatron": dict(sharding="zero3", tensor=2, megatron_sp=True),
            "tensor": dict(sharding="replicate", tensor=4, micro_batches=2),
            "zero2 pipeline": dict(sharding="zero2", pipeline=2, micro_batches=4),
            "zero3 pipeline": dict(sharding="zero3", pipeline=2, micro_batches=4),
        },
    ),
    "bf16, adapters": (
        (4000, False, 256),
        {
            "zero3, twice": dict(sharding="zero3", micro_batches=2),
            "tensor": dict(sharding="zero3", tensor=2),
        },
    ),
}


class Rows(torch.utils.data.Dataset):
    """Rows of one length."""

    def __init__(self, count: int, length: int):
        self.ids = torch.arange(count * length).reshape(count, length) % 1000

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def llama(case: str) -> PreTrainedModel | PeftModel:
    """Returns the model of a case; one with adapters was loaded in the format in which it is computed."""
    vocabulary, tied, length = CASES[case][0]
    sizes = dict(hidden_size=128, intermediate_size=352, num_key_value_heads=4, num_hidden_layers=LAYERS)
    model = FAMILIES["llama"].build(
        vocab_size=vocabulary, tie_word_embeddings=tied, max_position_embeddings=length, use_cache=False, **sizes
    )
    if "adapters" not in case:
        return model
    return get_peft_model(model.to(torch.bfloat16 if "bf16" in case else torch.float32), lora(r=8))


def wait_for_other_threads() -> None:
    """Waits until no other thread of this process is running or ready to run.

    A thread of gloo lets go of a collective's tensors a little after it has told of the end. If Python lets go of them
    before, the thread frees them. The meter does not see that, and counts them for too short or too long a time. How
    often it happens depends on the machine's load.
    """
    own, idle, pause = threading.get_native_id(), 0, 5e-5
    while idle < 2:  # twice, because a thread may have waited for the interpreter's lock
        time.sleep(pause)
        pause = min(2 * pause, 2e-3)
        states = [_state(int(name)) for name in os.listdir("/proc/self/task") if int(name) != own]
        idle = 0 if "R" in states else idle + 1


def _state(thread: int) -> str:
    try:
        with open(f"/proc/self/task/{thread}/stat", "rb", buffering=0) as file:
            return file.read(256).rpartition(b")")[2].decode().split()[0]
    except (FileNotFoundError, ProcessLookupError):  # it has ended
        return "X"


class _Operations:
    """Offers the functional collectives; after their `wait_tensor` no thread of gloo holds a tensor of them."""

    def __getattr__(self, name: str) -> Any:
        return getattr(functional_collectives, name)

    def wait_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        result = functional_collectives.wait_tensor(tensor)
        wait_for_other_threads()
        return result


def let_gloo_free_nothing() -> None:
    """Makes this rank wait after every collective until gloo has let go of its tensors, so that Python frees them."""
    if sys.platform != "linux":  # other systems do not tell the states of threads in /proc
        return
    wait = dist.Work.wait

    def wait_and_let_go(self, *given, **named):
        result = wait(self, *given, **named)
        wait_for_other_threads()
        return result

    dist.Work.wait = wait_and_let_go
    collectives.functional_collectives = _Operations()


def train(plan: ParallelPlan, case: str, folder: Path) -> np.ndarray:
    """Returns the ratio of predicted to measured bytes of each stage; all ranks return the same."""
    let_gloo_free_nothing()
    options = dict(max_steps=2, per_device_train_batch_size=ROWS // RANKS, gradient_accumulation_steps=1)
    length, context = CASES[case][0][-1], plan.layers[0].context
    options |= dict(packing="none" if context == 1 else "static")
    options |= dict(bf16=plan.precision.compute == "bf16")
    rows = Rows(2 * ROWS, length)
    made = trainer(folder, plan, model=llama(case), train_dataset=rows, data_collator=None, options=options)
    made.train()
    return np.array(made.plan_outcome.predicted_bytes) / made.plan_outcome.measured_bytes


# Few, with ranks and stages; all others are slow.
FAST = [("fp32", ("zero2 pipeline",))]


@pytest.mark.parametrize("case, names", FAST, ids=str)
def test_ranks_allocate_what_is_predicted(case, names, tmp_path):
    check_memory(case, names, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_ranks_allocate_what_is_predicted_of_every_plan(case, tmp_path):
    fast = [name for other, names in FAST if other == case for name in names]
    check_memory(case, tuple(name for name in CASES[case][1] if name not in fast), tmp_path)


# A thread of gloo that is late all the same changes what a rank allocates by up to 4%: such a plan is trained again.
ATTEMPTS = 3


def check_memory(case: str, names: tuple[str, ...], folder: Path) -> None:
    """Compares every stage: within a tenth; seven of eight within a twentieth; the median within a fiftieth. Of models
    with adapters, and of rows that ranks share, only the first is claimed.
    """
    given, options = CASES[case][0], {name: CASES[case][1][name] for name in names}
    compute, length = case.split(",")[0], given[-1]
    hardware = hardware_preset("cpu", 1, RANKS)
    traced = dict(length=length, packed="shared" in case, max_degree=RANKS)
    model = profile_from_config(llama(case), hardware, compute, **traced)
    work, plans = Workload(rows=ROWS, length=length, precision=Precision(compute=compute)), []
    for kind in options.values():
        more = {"stages": kind["stages"], "schedule": "interleaved"} if "stages" in kind else {}
        uniform = {name: value for name, value in kind.items() if name not in ("stages", "first")}
        plan = replace(ParallelPlan.uniform(RANKS, LAYERS, precision=work.precision, **uniform), **more)
        first = tuple(replace(layer, **kind.get("first", {})) for layer in plan.layers[: LAYERS // 2])
        plan = replace(plan, layers=first + plan.layers[LAYERS // 2 :])
        plans.append(estimate_plan(hardware, model, work, plan).plan_with_prediction(work))
    errors, again = {}, dict(zip(options, plans, strict=True))
    loose = "adapters" in case or "shared" in case
    for _ in range(ATTEMPTS):
        for name, plan in again.items():
            ratios = on_ranks(functools.partial(train, plan, case, folder / name), RANKS)[0]
            errors[name] = [ratio - 1 for ratio in ratios]
        print(case, {name: [f"{100 * error:+.2f}%" for error in found] for name, found in errors.items()})
        apart = sorted(abs(error) for found in errors.values() for error in found)
        most, usual = apart[-1], apart[len(apart) * 7 // 8]
        if most < 0.1 and (usual < 0.05 or loose):
            break
        again = {name: plan for name, plan in again.items() if max(map(abs, errors[name])) >= 0.05}
    assert most < 0.1, errors
    if loose:
        return
    assert usual < 0.05, errors
    assert statistics.median(apart) < 0.02, errors
