# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""What a run logs of its steps: FLOPs are those that PyTorch counts, trackers get measured and predicted values."""

import contextlib
import itertools
import math
import time
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.flop_counter import FlopCounterMode

from galvatron_hf import ParallelPlan
from galvatron_hf.parallel.model_runner import ModelRunner
from galvatron_hf.parallel.pipeline.runtime import Pipeline
from galvatron_hf.parallel.pipeline.waits import Waits
from galvatron_hf.plan import Stage
from galvatron_hf.planner.cost.workload import Workload
from galvatron_hf.planner.estimate import Estimate
from galvatron_hf.planner.report.throughput import model_flops
from galvatron_hf.profiler.profiles.presets import hardware_preset
from galvatron_hf.profiler.trace.tracing import profile_from_config
from galvatron_hf.profiler.trace.training_flops import TrainingFlops
from galvatron_hf.trainer.planning import pace, step_meter
from galvatron_hf.trainer.planning.pace import Pace
from galvatron_hf.utils.units import GIB
from oracle import Rows
from tiny_models import EXPERT_FAMILIES, FAMILIES, VOCABULARY
from trainer_runs import GLOBAL_BATCH, on_ranks, run


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3_moe"])
def test_flops_are_those_of_products_and_attention_that_pytorch_counts(family):
    """Eager attention computes all pairs, as the definition counts them."""
    model = (FAMILIES | EXPERT_FAMILIES)[family].build().train()
    model.set_attn_implementation("eager")
    if family in EXPERT_FAMILIES:
        model.set_experts_implementation("eager")
    ids = torch.randint(0, VOCABULARY, (2, 16))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids).loss.backward()
    found = TrainingFlops.of(model).of_documents(np.array([16, 16]))
    # Rotary embeddings are a product without weights, which the definition leaves out.
    assert found == pytest.approx(counter.get_total_flops(), rel=2e-3)


def test_flops_are_those_of_the_predicted_throughput():
    model = FAMILIES["llama"].build()
    profile = profile_from_config(model, hardware_preset("h100", 1, 1), length=64, max_degree=1)
    workload = Workload(rows=3, length=64, precision=None)
    found = TrainingFlops.of(model).of_documents(np.array([64, 64, 64]))
    assert found == pytest.approx(model_flops(profile, workload), rel=1e-12)


class SomeWaits:
    """Gives these waits one by one: before each step, and after it."""

    def __init__(self, seconds: list[float | None]):
        self.take = iter(seconds).__next__


def test_the_pace_of_steps_is_logged_beside_its_prediction():
    plan = Estimate(
        plan=ParallelPlan.uniform(2, 2),
        step_ms=50.0,
        samples_per_second=1.0,
        memory_bytes=(GIB, 2 * GIB),
        bubble_ms=5.0,
    ).plan_with_prediction(Workload(rows=1, length=1, precision=None))
    flops = TrainingFlops(per_token=10.0, per_pair=1.0)
    given = dict(device=torch.device("cpu"), devices=2, dtype="bf16", flops=lambda: flops)
    with (
        mock.patch.object(pace, "_peak_flops", lambda device, dtype: 1000.0),
        mock.patch.object(pace.time, "perf_counter", iter([0.0, 0.1, 5.0, 5.3]).__next__),
    ):
        own = Pace(**given, predicted=plan.meta["predicted"], waits=SomeWaits([9.0, 0.02, 9.0, 0.08]))
        for lengths in ([3, 5], [2]):
            own.on_step_begin(None, None, None)
            own.count(lambda lengths=lengths: np.array(lengths))
            own.on_step_end(None, None, None)
    logs = {"eval_loss": 1.0}
    own.add_logs(logs)
    assert logs == {"eval_loss": 1.0}
    assert own.waited_share == pytest.approx((0.02 + 0.08) / 0.4)
    own.note_bubble([0.25, 0.35, 0.1, 0.2], [(0, 1), (2, 3)])
    logs = {"loss": 1.0}
    own.add_logs(logs)
    done = 10 * (3 + 5 + 2) + 9 + 25 + 4
    assert logs == {
        "loss": 1.0,
        "step_ms": 200.0,
        "mfu_percent": pytest.approx(100 * done / (0.4 * 2 * 1000), abs=0.01),
        "bubble_percent": 15.0,  # of the pipeline rank that waits least
        "predicted_step_ms": 50.0,
        "predicted_memory_gib": 2.0,
        "predicted_bubble_percent": 10.0,
    }
    own.add_logs(logs := {"loss": 1.0})
    assert logs == {"loss": 1.0}  # no step since
    unmeasured = SomeWaits([None, None])  # as where Trainer's own methods compute the step
    odd = plan.meta["predicted"] | {"bubble_ms": None}  # as a file may have it
    own = Pace(**given, predicted=odd, waits=unmeasured)
    own.on_step_begin(None, None, None)
    own.on_step_end(None, None, None)
    own.note_bubble([own.waited_share, 0.5], [(0,), (1,)])
    own.add_logs(logs := {"loss": 1.0})
    assert "bubble_percent" not in logs
    assert logs["predicted_step_ms"] == 50.0 and "predicted_bubble_percent" not in logs


READING_SECONDS = 2.0  # of what was recorded of memory
STEP_SECONDS, MICRO_BATCHES = 0.1, 4  # of the forward, and of the backward, of a micro-batch in a stage


def slow_stages() -> contextlib.ExitStack:
    """Has the forward and the backward of each stage take the same time, whatever the machine does."""
    stack = contextlib.ExitStack()
    for owner, name in ((ModelRunner, "run"), (Pipeline, "_full_backward")):
        work = getattr(owner, name)

        def slow(*args, work=work, **kwargs):
            found = work(*args, **kwargs)
            time.sleep(STEP_SECONDS)
            return found

        stack.enter_context(mock.patch.object(owner, name, slow))
    return stack


@pytest.mark.parametrize("schedule, stages", [("1f1b", 2), ("interleaved", 4)])
def test_the_bubble_is_that_of_the_schedule(tmp_path, schedule, stages):
    """Two pipeline ranks with v stages each have a bubble of 1 / (1 + v m) of a step of m micro-batches (arXiv
    2104.04473, section 2.2).
    """

    def work() -> list[float]:
        ranks = [
            Stage(ranks=(index % 2,), layers=(4 // stages * index, 4 // stages * (index + 1)))
            for index in range(stages)
        ]
        plan = replace(
            ParallelPlan.uniform(2, 4, pipeline=2, micro_batches=MICRO_BATCHES), schedule=schedule, stages=tuple(ranks)
        )
        with slow_stages():
            found = run(tmp_path, plan, options=dict(max_steps=3, packing="none"))
        return [log["bubble_percent"] for log in found.logs if "loss" in log]

    each, other = on_ranks(work, 2)
    share = 1 / (1 + stages // 2 * MICRO_BATCHES)
    assert each == other and len(each) == 3
    assert sorted(each)[1] == pytest.approx(100 * share, rel=0.3)  # the rest of the step takes time, too


def test_waits_of_a_gpu_are_read_when_its_stream_has_come_to_them():
    passed: set[int] = set()
    made = itertools.count()

    class Event:
        def __init__(self, enable_timing: bool):
            assert enable_timing
            self.number = next(made)

        def record(self) -> None: ...

        def query(self) -> bool:
            return self.number in passed

        def elapsed_time(self, other) -> float:
            assert other.query()  # PyTorch raises an error otherwise, and `synchronize` would be a wait
            return 1e3 * (other.number - self.number)

    waits = Waits(torch.device("cuda"))
    with mock.patch.object(torch.cuda, "Event", Event):
        with waits.wait():  # as in an evaluation
            pass
        assert waits.take() is None and next(made) == 0
        with waits.step():
            for _ in range(2):
                with waits.wait():
                    pass
        passed |= {1, 2}
        assert waits.take() == 1.0
        passed |= {3, 4}
        with waits.step():
            pass
        assert waits.take() == 1.0


def test_tensorboard_has_the_pace_of_a_run(tmp_path):
    def work() -> None:
        def slow_reading(profiler) -> int:
            time.sleep(READING_SECONDS)
            return 1

        predicted = {"step_ms": 40.0, "memory_bytes": [GIB // 2], "rows": GLOBAL_BATCH, "length": 8}
        plan = replace(ParallelPlan.uniform(2, 4), meta={"predicted": predicted})
        options = dict(max_steps=3, report_to=["tensorboard"], packing="static")
        with mock.patch.object(step_meter, "allocation_peak", slow_reading):
            run(tmp_path, plan, options=options, data_collator=None, train_dataset=Rows(24, shortest=8, longest=8))

    on_ranks(work, 2)
    (folder,) = {path.parent for path in Path(tmp_path).rglob("events.out.tfevents.*")}
    events = EventAccumulator(str(folder))
    events.Reload()
    measured = [event.value for event in events.Scalars("train/step_ms")]
    assert len(measured) == 3 and all(value > 0 for value in measured)
    assert [event.value for event in events.Scalars("train/predicted_step_ms")] == [40.0] * 3
    assert math.isclose(events.Scalars("train/predicted_memory_gib")[0].value, 0.5)
    speeds = [event.value for event in events.Scalars("train/useful_tokens_per_second")]
    assert all(GLOBAL_BATCH * 8 / speed < READING_SECONDS for speed in speeds)  # without reading recorded memory
    assert "train/bubble_percent" not in events.Tags()["scalars"]  # without a pipeline
