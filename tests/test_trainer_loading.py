# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Trainer on models given by name or without weights, against plain Trainer on the loaded model."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Trainer

from galvatron_hf import GalvatronTrainer
from galvatron_hf.parallel.loading import StoredTensor
from oracle import Rows
from plans import mixed_plans, pipeline_plans
from tiny_models import FAMILIES
from trainer_runs import Run, assert_same_steps, on_ranks, run, trainer


MIXED = replace(mixed_plans()["mixed_b"], micro_batches=1)
STAGES = pipeline_plans()["1f1b_mixed"]
ALONE = dict(gradient_accumulation_steps=1)
SAVING = dict(save_strategy="steps", save_steps=3, max_steps=5)


def fresh(config) -> PreTrainedModel:
    return AutoModelForCausalLM.from_config(copy.deepcopy(config))


def fresh_on_meta(config) -> PreTrainedModel:
    with torch.device("meta"):
        return fresh(config)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """Saved models; that of gpt2 in bf16."""
    folders = {family: tmp_path_factory.mktemp(family) for family in ("llama_tied", "gpt2")}
    FAMILIES["llama_tied"].build().save_pretrained(folders["llama_tied"])
    FAMILIES["gpt2"].build().bfloat16().save_pretrained(folders["gpt2"])
    return folders


@pytest.fixture(scope="module")
def plain(tmp_path_factory, folders) -> dict[str, Run]:
    """Plain Trainer in one process."""
    folder, config = tmp_path_factory.mktemp("plain"), FAMILIES["llama_tied"].build().config

    def alone(name: str, **more: Any) -> Run:
        return run(folder / name, options=ALONE, trainer_class=Trainer, **more)

    return dict(
        llama_tied=alone("llama_tied", model=AutoModelForCausalLM.from_pretrained(folders["llama_tied"])),
        gpt2=alone("gpt2", model=AutoModelForCausalLM.from_pretrained(folders["gpt2"], dtype="float32")),
        fresh=alone("fresh", model_init=lambda: fresh(config), family="llama_tied"),
    )


@pytest.fixture(scope="module")
def ranks(tmp_path_factory, folders) -> tuple[Path, list[dict[str, Run]]]:
    """Runs of four ranks, in one world, by name."""
    folder, config = tmp_path_factory.mktemp("ranks"), FAMILIES["llama_tied"].build().config
    llama = dict(model=folders["llama_tied"], family="llama_tied")

    def before(made: Trainer) -> tuple[float, list[int]]:
        prompt = torch.tensor([[1, 5, 7]])
        return made.evaluate()["eval_loss"], made.generate(input_ids=prompt, max_new_tokens=4, do_sample=False)[0].tolist()

    def work() -> dict[str, Run]:
        runs = dict(
            mixed=run(folder / "mixed", MIXED, options=SAVING | dict(max_steps=6), **llama),
            stages=run(folder / "stages", STAGES, **llama),
            initialised=run(folder / "initialised", STAGES, model_init=lambda: folders["llama_tied"], family="llama_tied"),
            fresh=run(folder / "fresh", MIXED, model_init=lambda: fresh_on_meta(config), family="llama_tied"),
            fresh_stages=run(folder / "fresh", STAGES, model_init=lambda: fresh_on_meta(config), family="llama_tied"),
            gpt2=run(
                folder / "gpt2",
                STAGES,
                model=str(folders["gpt2"]),
                family="gpt2",
                options=dict(model_init_kwargs=dict(dtype="float32")),
            ),
        )
        reads, read = [], StoredTensor.read_into
        StoredTensor.read_into = lambda *args: reads.append(args[0].key) or read(*args)
        try:
            resumed = run(folder / "mixed", STAGES, resume=folder / "mixed" / "checkpoint-3", **llama)
        finally:
            StoredTensor.read_into = read
        runs["resumed"] = replace(resumed, result=reads)
        made = trainer(folder / "untrained", STAGES, model=folders["llama_tied"], eval_dataset=Rows(4, seed=2))
        runs["untrained"] = before(made)
        return runs

    return folder, on_ranks(work)


@pytest.mark.parametrize("name", ["mixed", "stages", "initialised"])
def test_model_given_by_name_trains_as_plain_trainer_trains_the_loaded_one(plain, ranks, name):
    for runs in ranks[1]:
        assert_same_steps(runs[name], plain["llama_tied"])


@pytest.mark.parametrize("name", ["fresh", "fresh_stages"])
def test_model_init_without_weights_trains_as_plain_trainer_trains_the_new_model(plain, ranks, name):
    for runs in ranks[1]:
        assert_same_steps(runs[name], plain["fresh"])


def test_dtype_is_a_keyword_argument_of_the_loading(plain, ranks):
    for runs in ranks[1]:
        assert_same_steps(runs["gpt2"], plain["gpt2"])


def test_resumed_run_reads_the_checkpoint_alone(plain, ranks):
    for runs in ranks[1]:
        assert_same_steps(runs["resumed"], plain["llama_tied"], after=3)
        assert runs["resumed"].result == []


def test_evaluation_and_generation_before_any_training(folders, tmp_path, ranks):
    model = AutoModelForCausalLM.from_pretrained(folders["llama_tied"])
    made = trainer(tmp_path, model=model, trainer_class=Trainer, eval_dataset=Rows(4, seed=2), options=ALONE)
    loss = made.evaluate()["eval_loss"]
    tokens = model.generate(torch.tensor([[1, 5, 7]]), max_new_tokens=4, do_sample=False)[0].tolist()
    for runs in ranks[1]:
        assert runs["untrained"][0] == pytest.approx(loss, rel=1e-5)
        assert runs["untrained"][1] == tokens


def test_saved_model_opens_with_the_trained_weights(ranks):
    pass


def test_one_process_without_a_plan_is_plain_trainer(plain, folders, tmp_path):
    seen = run(tmp_path, model=folders["llama_tied"], family="llama_tied", options=ALONE)
    assert_same_steps(seen, plain["llama_tied"])


def test_one_process_without_a_plan_refuses_a_model_without_weights(tmp_path):
    config = FAMILIES["llama"].build().config
    with pytest.raises(ValueError, match="on the meta device, and without a plan"):
        GalvatronTrainer(fresh_on_meta(config))
