# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Profiles, prices and plans of families that run on whole rows: encoders, classifiers, state spaces, hybrids."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import (
    AutoConfig,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    PreTrainedModel,
    Trainer,
)

from galvatron_hf import ParallelPlan
from galvatron_hf.cli.main import main
from galvatron_hf.models.auto_classes import auto_model
from galvatron_hf.models.families import adapter_for
from galvatron_hf.parallel.validate import check_model
from galvatron_hf.plan import LayerStrategy, Precision
from galvatron_hf.planner.cost.workload import Workload
from galvatron_hf.planner.estimate import estimate_plan
from galvatron_hf.planner.search import search_plan
from galvatron_hf.planner.space import Limits
from galvatron_hf.profiler.measure.model import profile_model
from galvatron_hf.profiler.profiles.presets import hardware_preset
from galvatron_hf.profiler.trace.counted_model import CountedModel, Speed
from galvatron_hf.profiler.trace.small_models import most_copies, one_of_each, search_obstacle
from galvatron_hf.profiler.trace.tracing import profile_from_config
from plans import single_stage
from test_heads import SEQUENCE, Labelled, collate_labelled
from test_predicted_memory import let_gloo_free_nothing
from tiny_configurations import tiny_model
from trainer_runs import on_ranks, run, trainer


HIDDEN, INNER, VOCABULARY, LENGTH = 64, 160, 200, 128
CONFIG = BertConfig(
    hidden_size=HIDDEN,
    intermediate_size=INNER,
    num_attention_heads=4,
    num_hidden_layers=3,
    vocab_size=VOCABULARY,
    max_position_embeddings=LENGTH,
)
WORK = Workload(rows=8, length=32, precision=Precision(compute="fp32"))
HARDWARE = replace(hardware_preset("cpu", 1, 4), flops_per_s={"fp32": 1e9})


def test_matrix_products_are_those_of_the_closed_form():
    """Counts multiply-adds of a token, and of its pairs with the others: no position is masked."""
    counts = CountedModel(BertForMaskedLM(CONFIG), torch.float32, LENGTH, packed=False)
    times = counts.times(4, Speed(flops_per_ms=1.0, bytes_per_ms=float("inf")))
    layer = times.layers[0][1]
    assert [layer.forward.per_token, layer.forward.per_square] == pytest.approx(
        [2 * (4 * HIDDEN**2 + 2 * HIDDEN * INNER), 2 * 2 * HIDDEN]
    )
    assert layer.backward.per_token == pytest.approx(2 * layer.forward.per_token)
    head = times.head[1].forward.per_token + times.head[1].backward.per_token  # the loss has its gradient with it
    assert head == pytest.approx(3 * 2 * (HIDDEN**2 + HIDDEN * VOCABULARY))
    assert times.embedding[1].forward.per_token == 0.0
    assert set(times.layers[0]) == {1, 2, 4} and set(times.head) == set(times.embedding) == {1}
    for tensor, cut in times.layers[0].items():
        assert cut.forward.per_token == pytest.approx(layer.forward.per_token / tensor)


def test_a_classifier_of_rows_has_no_head_to_speak_of():
    config = BertConfig(**CONFIG.to_diff_dict() | dict(num_labels=3))
    times = CountedModel(BertForSequenceClassification(config), torch.float32, LENGTH, packed=False).times(
        1, Speed(flops_per_ms=1.0, bytes_per_ms=float("inf"))
    )
    of_rows = 2 * (HIDDEN**2 + 3 * HIDDEN)  # pooler and classifier
    assert times.head[1].forward.per_token == pytest.approx(of_rows / LENGTH)


SLOW_HYBRIDS = ("jamba", "qwen3_next", "recurrent_gemma")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["mamba", "lfm2_moe", *(pytest.param(one, marks=pytest.mark.slow) for one in SLOW_HYBRIDS)]
)
def test_hybrids_have_their_kinds_of_layer_and_plans_that_run(name):
    model = tiny_model(name)
    profile = profile_from_config(model, HARDWARE, "fp32", length=32, max_degree=4)
    assert len(profile.layers) == len(adapter_for(model).layers(model))
    assert all(kind.times[1].forward.per_token > 0 for kind in profile.kinds)
    plans = set()
    for limits in (Limits(), Limits(pipeline=(2,)), Limits(uniform=True)):
        best = search_plan(HARDWARE, profile, WORK, limits=limits).best
        check_model(model, adapter_for(model), best.plan)
        plans.add(best.plan.to_json())
    assert len(plans) >= 2


@pytest.mark.slow
def test_no_plan_on_whole_rows_is_faster_than_the_one_found():
    model = BertForMaskedLM(CONFIG)
    profile = profile_from_config(model, HARDWARE, "fp32", length=32, max_degree=4)
    limits = Limits(pipeline=(1,), micro_batches=(1,), hybrid_sharding=False, recompute=("none",))
    kinds = [LayerStrategy(sharding=one) for one in ("replicate", "zero2", "zero3")]
    kinds += [LayerStrategy(ulysses=2), LayerStrategy(tensor=4, megatron_sp=True, sharding="replicate")]
    every = []
    for first in kinds:
        for second in kinds:
            for third in kinds:
                plan = single_stage((first, second, third), 4, embedding=None, head=None)
                every.append((first, second, third, plan))
    found = search_plan(HARDWARE, profile, WORK, limits=limits).best
    assert estimate_plan(HARDWARE, profile, WORK, found.plan).step_ms == found.step_ms
    ends = dict(embedding=found.plan.embedding, head=found.plan.head, precision=found.plan.precision)
    times = [
        estimate_plan(HARDWARE, profile, WORK, replace(plan, micro_batches=1, **ends)).step_ms for *_, plan in every
    ]
    assert min(times) == pytest.approx(found.step_ms)


def test_models_that_cannot_be_looked_at_layer_by_layer_are_named():
    assert search_obstacle(tiny_model("bert", task=SEQUENCE)) is None
    model = tiny_model("mpnet", task=SEQUENCE)
    assert "cannot be run alone, because its layer 1 gets 'position_bias'" in search_obstacle(model)
    with pytest.raises(ValueError, match="MPNetForSequenceClassification has layers that cannot be run alone.*ZeRO-3"):
        one_of_each(model)


def test_a_configuration_gives_the_model_that_it_was_saved_with(tmp_path):
    tiny_model("bert", task=SEQUENCE).save_pretrained(tmp_path)
    saved = AutoConfig.from_pretrained(tmp_path)
    assert auto_model(saved).__name__ == "AutoModelForSequenceClassification"
    assert auto_model(BertConfig()).__name__ == "AutoModelForMaskedLM"
    assert auto_model(tiny_model("llama").config).__name__ == "AutoModelForCausalLM"


def test_the_search_command_plans_an_encoder(tmp_path, capsys):
    CONFIG.save_pretrained(tmp_path)
    case = ["--cluster", "h100", "--devices-per-node", "2", "--global-batch", "4", "--seq-length", "64", "--json"]
    assert main(["search", "--model", str(tmp_path), *case]) == 0
    plan = ParallelPlan.from_json(json.dumps(json.loads(capsys.readouterr().out)["plan"]))
    assert plan.num_layers == 3 and {one.tensor for one in plan.layers} == {1}


def jamba() -> PreTrainedModel:
    """Returns a model in which a layer's place decides what it is, so that only one of each can stand alone."""
    return tiny_model("jamba", num_hidden_layers=8, attn_layer_period=4, attn_layer_offset=2)


def test_so_many_layers_of_each_kind_are_run_as_their_places_allow():
    assert [most_copies(jamba(), most) for most in (1, 4)] == [1, 1]
    assert [most_copies(tiny_model("bert", task=SEQUENCE), most) for most in (1, 4)] == [1, 4]
    assert most_copies(tiny_model("llama"), 3) == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "model", [lambda: tiny_model("bert"), lambda: tiny_model("mamba"), jamba], ids=["bert", "mamba", "jamba"]
)
def test_times_are_measured(model):
    profile = profile_model(model(), tokens=256, length=32, max_degree=2, seconds=2, device="cpu")
    for kind in profile.kinds:
        times = kind.times[1]
        assert times.forward.ms(32, 32**2) > 0 and times.backward.ms(32, 32**2) > 0
    assert profile.head.times[1].forward.ms(32, 0) > 0


@pytest.mark.slow
def test_auto_trains_a_classifier_as_one_process_under_the_plan_that_it_finds(tmp_path):
    once = dict(options=dict(gradient_accumulation_steps=1), train_dataset=Labelled(27))
    once |= dict(data_collator=collate_labelled)
    new = lambda: tiny_model("bert", task=SEQUENCE)  # noqa: E731
    wanted = run(tmp_path / "plain", "auto", model=new(), trainer_class=Trainer, **once)

    def work():
        found = run(
            tmp_path / "ranks",
            "auto",
            model=new(),
            then=lambda made: made.parallel.plan.meta["predicted"]["step_ms"],
            **once,
        )
        return found.steps(), found.result

    for steps, predicted_ms in on_ranks(work, 2):
        assert predicted_ms > 0
        assert steps == [pytest.approx(step, rel=1e-5) for step in wanted.steps()]


class Masked(torch.utils.data.Dataset):
    """Rows of one length; every fourth position has a label."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.arange(LENGTH).add(index).remainder(VOCABULARY)
        return {"input_ids": ids, "labels": torch.where(ids % 4 == 0, ids, -100)}


MEMORY = {
    "replicated": dict(sharding="replicate"),
    "zero2, recompute": dict(sharding="zero2", recompute="full"),
    "zero3, twice": dict(sharding="zero3", micro_batches=2),
    "zero2 pipeline": dict(sharding="zero2", pipeline=2, micro_batches=4),
}


@pytest.mark.slow
def test_ranks_allocate_what_is_predicted_of_an_encoder(tmp_path):
    config = BertConfig(**CONFIG.to_diff_dict() | dict(hidden_size=128, intermediate_size=352, num_hidden_layers=4))
    work = Workload(rows=8, length=LENGTH, precision=Precision(compute="fp32"))
    profile = profile_from_config(BertForMaskedLM(config), HARDWARE, "fp32", length=LENGTH, max_degree=4)

    def train(plan: ParallelPlan) -> np.ndarray:
        let_gloo_free_nothing()
        options = dict(max_steps=2, per_device_train_batch_size=2, gradient_accumulation_steps=1, packing="none")
        made = trainer(
            tmp_path,
            plan,
            model=BertForMaskedLM(config),
            train_dataset=Masked(),
            data_collator=None,
            options=options,
        )
        made.train()
        return np.array(made.plan_outcome.predicted_bytes) / made.plan_outcome.measured_bytes

    for name, kind in MEMORY.items():
        plan = ParallelPlan.uniform(4, 4, precision=work.precision, **kind)
        plan = estimate_plan(HARDWARE, profile, work, plan).plan_with_prediction(work)
        ratios = on_ranks(lambda plan=plan: train(plan), 4)[0]
        print(name, ratios)
        assert all(abs(ratio - 1) < 0.1 for ratio in ratios), name
