# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Profiles, prices and plans of models that take images."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import CLIPConfig, DeiTConfig, Trainer, ViTConfig, ViTForImageClassification, default_data_collator

from galvatron_hf import ParallelPlan
from galvatron_hf.cli.main import main
from galvatron_hf.models.auto_classes import auto_model
from galvatron_hf.models.families import adapter_for
from galvatron_hf.parallel.validate import check_model
from galvatron_hf.plan import Precision
from galvatron_hf.planner.cost.workload import Workload
from galvatron_hf.planner.estimate import estimate_plan
from galvatron_hf.planner.search import search_plan
from galvatron_hf.planner.space import Limits
from galvatron_hf.profiler.measure.model import profile_model
from galvatron_hf.profiler.trace.counted_model import CountedModel, Speed
from galvatron_hf.profiler.trace.tracing import profile_from_config
from test_images import IMAGE, Images
from test_predicted_memory import let_gloo_free_nothing
from test_whole_row_search import HARDWARE, MEMORY
from tiny_configurations import tiny_model
from trainer_runs import on_ranks, run, trainer


HIDDEN, INNER, PATCH, LAYERS, CLASSES = 64, 160, 8, 4, 5
POSITIONS = (16 // PATCH) ** 2 + 1  # with the class token
CONFIG = ViTConfig(
    hidden_size=HIDDEN,
    intermediate_size=INNER,
    num_attention_heads=4,
    num_hidden_layers=LAYERS,
    image_size=16,
    patch_size=PATCH,
    num_labels=CLASSES,
    architectures=["ViTForImageClassification"],
)
WORK = Workload(rows=8, length=POSITIONS, precision=Precision(compute="fp32"))


def test_matrix_products_are_those_of_the_closed_form():
    """All images have the same positions: what grows with pairs of them is a part of each position's time."""
    counts = CountedModel(ViTForImageClassification(CONFIG), torch.float32, 4096, packed=False)
    assert counts.length == counts.of_image == POSITIONS
    times = counts.times(4, Speed(flops_per_ms=1.0, bytes_per_ms=float("inf")))
    layer = times.layers[0][1]
    pairs = 2 * 2 * HIDDEN * POSITIONS
    assert layer.forward.per_token == pytest.approx(2 * (4 * HIDDEN**2 + 2 * HIDDEN * INNER) + pairs)
    assert layer.forward.per_square == 0.0
    patches = 2 * 3 * PATCH**2 * HIDDEN * (POSITIONS - 1)
    assert times.embedding[1].forward.per_token == pytest.approx(patches / POSITIONS)
    assert times.head[1].forward.per_token == pytest.approx(2 * HIDDEN * CLASSES / POSITIONS)
    for tensor, cut in times.layers[0].items():
        assert cut.forward.per_token == pytest.approx(layer.forward.per_token / tensor)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vit", "clip"])
def test_plans_that_are_found_run(name):
    """Sequence degrees divide no image: the runtime adds positions, which are counted."""
    model = tiny_model(name, task=IMAGE)
    profile = profile_from_config(model, HARDWARE, "fp32", max_degree=4)
    assert profile.images and profile.max_length == adapter_for(model).structure.positions
    saved = profile.kinds[0].saved_bytes
    assert {(1, False, 1), (2, True, 2), (1, False, 4)} <= set(saved)
    assert saved[1, False, 1] > saved[1, False, 4] > saved[1, False, 1] / 4
    work = Workload(rows=8, length=profile.max_length, precision=Precision(compute="fp32"))
    for limits in (Limits(), Limits(pipeline=(2,)), Limits(uniform=True)):
        check_model(model, adapter_for(model), search_plan(HARDWARE, profile, work, limits=limits).best.plan)


def test_a_configuration_of_images_gives_a_classifier():
    deit = DeiTConfig(architectures=["DeiTForImageClassification"])
    assert auto_model(deit).__name__ == "AutoModelForImageClassification"
    assert auto_model(CONFIG).__name__ == "AutoModelForImageClassification"
    assert auto_model(CLIPConfig()).__name__ == "AutoModelForImageClassification"


@pytest.mark.slow
def test_the_search_command_plans_images(tmp_path, capsys):
    CONFIG.save_pretrained(tmp_path)
    case = ["search", "--model", str(tmp_path), "--cluster", "h100", "--devices-per-node", "2", "--global-batch", "4"]
    assert main([*case, "--seq-length", str(POSITIONS), "--json"]) == 0
    plan = ParallelPlan.from_json(json.dumps(json.loads(capsys.readouterr().out)["plan"]))
    assert plan.num_layers == LAYERS
    assert main([*case, "--seq-length", str(POSITIONS - 1)]) != 0
    assert f"is not the {POSITIONS} positions of an image" in capsys.readouterr().err


@pytest.mark.slow
def test_times_are_measured():
    profile = profile_model(ViTForImageClassification(CONFIG), tokens=64, max_degree=2, seconds=2, device="cpu")
    for times in (profile.kinds[0].times[1], profile.kinds[0].times[2], profile.embedding.times[1]):
        assert times.forward.ms(POSITIONS, POSITIONS**2) > 0 and times.backward.ms(POSITIONS, POSITIONS**2) > 0
        assert times.forward.per_square == 0.0


@pytest.mark.slow
def test_auto_trains_a_model_of_images_as_one_process(tmp_path):
    once = dict(options=dict(gradient_accumulation_steps=1), train_dataset=Images(27))
    once |= dict(data_collator=default_data_collator)
    new = lambda: tiny_model("vit", task=IMAGE)  # noqa: E731
    wanted = run(tmp_path / "plain", "auto", model=new(), trainer_class=Trainer, **once).steps()

    def work():
        predicted = lambda made: made.parallel.plan.meta["predicted"]  # noqa: E731
        found = run(tmp_path / "ranks", "auto", model=new(), then=predicted, **once)
        return found.steps(), found.result

    for steps, predicted in on_ranks(work, 2):
        assert predicted["step_ms"] > 0 and predicted["length"] == 17
        assert steps == [pytest.approx(step, rel=1e-5) for step in wanted]


@pytest.mark.slow
def test_ranks_allocate_what_is_predicted_of_images(tmp_path):
    config = ViTConfig(**CONFIG.to_diff_dict() | dict(hidden_size=128, intermediate_size=352, patch_size=2))
    profile = profile_from_config(ViTForImageClassification(config), HARDWARE, "fp32", max_degree=4)
    work = replace(WORK, length=profile.max_length)

    def train(plan: ParallelPlan) -> np.ndarray:
        let_gloo_free_nothing()
        options = dict(max_steps=2, per_device_train_batch_size=2, gradient_accumulation_steps=1)
        made = trainer(
            tmp_path,
            plan,
            model=ViTForImageClassification(config),
            train_dataset=Images(64),
            data_collator=default_data_collator,
            options=options,
        )
        made.train()
        return np.array(made.plan_outcome.predicted_bytes) / made.plan_outcome.measured_bytes

    for name, kind in MEMORY.items():
        plan = ParallelPlan.uniform(4, LAYERS, precision=work.precision, **kind)
        plan = estimate_plan(HARDWARE, profile, work, plan).plan_with_prediction(work)
        ratios = on_ranks(lambda plan=plan: train(plan), 4)[0]
        print(name, ratios)
        assert all(abs(ratio - 1) < 0.1 for ratio in ratios), name
