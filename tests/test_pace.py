# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""What a run logs of its steps: FLOPs are those that PyTorch counts, trackers get measured and predicted values."""

import math
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.flop_counter import FlopCounterMode

from galvatron_hf import ParallelPlan
from galvatron_hf.planner.cost.workload import Workload
from galvatron_hf.planner.estimate import Estimate
from galvatron_hf.planner.report.throughput import model_flops
from galvatron_hf.profiler.profiles.presets import hardware_preset
from galvatron_hf.profiler.trace.tracing import profile_from_config
from galvatron_hf.profiler.trace.training_flops import TrainingFlops
from galvatron_hf.trainer.planning import pace
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
        own = Pace(**given, predicted=plan.meta["predicted"])
        for lengths in ([3, 5], [2]):
            own.on_step_begin(None, None, None)
            own.count(lambda lengths=lengths: np.array(lengths))
            own.on_step_end(None, None, None)
    logs = {"eval_loss": 1.0}
    own.add_logs(logs)
    assert logs == {"eval_loss": 1.0}
    logs = {"loss": 1.0}
    own.add_logs(logs)
    done = 10 * (3 + 5 + 2) + 9 + 25 + 4
    assert logs == {
        "loss": 1.0,
        "step_ms": 200.0,
        "mfu_percent": pytest.approx(100 * done / (0.4 * 2 * 1000), abs=0.01),
        "predicted_step_ms": 50.0,
        "predicted_memory_gib": 2.0,
        "predicted_bubble_percent": 10.0,
    }
    own.add_logs(logs := {"loss": 1.0})
    assert logs == {"loss": 1.0}  # no step since
    own = Pace(**given, predicted=plan.meta["predicted"] | {"bubble_ms": None})  # as a file may have it
    own.on_step_begin(None, None, None)
    own.on_step_end(None, None, None)
    own.add_logs(logs := {"loss": 1.0})
    assert logs["predicted_step_ms"] == 50.0 and "predicted_bubble_percent" not in logs


def test_tensorboard_has_the_pace_of_a_run(tmp_path):
    def work() -> None:
        predicted = {"step_ms": 40.0, "memory_bytes": [GIB // 2], "rows": GLOBAL_BATCH, "length": 8}
        plan = replace(ParallelPlan.uniform(2, 4), meta={"predicted": predicted})
        options = dict(max_steps=3, report_to=["tensorboard"], packing="static")
        run(tmp_path, plan, options=options, data_collator=None, train_dataset=Rows(24, shortest=8, longest=8))

    on_ranks(work, 2)
    (folder,) = {path.parent for path in Path(tmp_path).rglob("events.out.tfevents.*")}
    events = EventAccumulator(str(folder))
    events.Reload()
    measured = [event.value for event in events.Scalars("train/step_ms")]
    assert len(measured) == 3 and all(value > 0 for value in measured)
    assert [event.value for event in events.Scalars("train/predicted_step_ms")] == [40.0] * 3
    assert math.isclose(events.Scalars("train/predicted_memory_gib")[0].value, 0.5)
    assert events.Scalars("train/useful_tokens_per_second")[0].value > 0
