# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Trainer on models given by name or without weights, against plain Trainer on the loaded model."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel, Trainer

from galvatron_hf import GalvatronTrainer
from galvatron_hf.parallel.weights.safetensors import StoredTensor
from oracle import Rows
from plans import mixed_plans, pipeline_plans
from tiny_models import FAMILIES
from trainer_runs import Run, assert_equal_weights, assert_same_steps, on_ranks, run, trainer


pytestmark = pytest.mark.slow

MIXED = replace(mixed_plans()["mixed_b"], micro_batches=1)
STAGES = pipeline_plans()["1f1b_mixed"]
STEPS = dict(max_steps=3)
ALONE = STEPS | dict(gradient_accumulation_steps=1)
SAVING = STEPS | dict(save_strategy="steps", save_steps=2)
PROMPT = torch.tensor([[1, 5, 7]])


def fresh(config) -> PreTrainedModel:
    return AutoModelForCausalLM.from_config(copy.deepcopy(config))


def fresh_on_meta(config) -> PreTrainedModel:
    with torch.device("meta"):
        return fresh(config)


def evaluation_and_generation(made: Trainer) -> tuple[float, list[int]]:
    generate = made.generate if isinstance(made, GalvatronTrainer) else made.model.generate
    loss = made.evaluate()["eval_loss"]
    return loss, generate(input_ids=PROMPT, max_new_tokens=4, do_sample=False)[0].tolist()


def best_trial(folder: Path, plan, options: dict[str, Any], **more: Any):
    made = trainer(
        folder,
        plan,
        options=options | dict(max_steps=2, eval_strategy="steps", eval_steps=2),
        eval_dataset=Rows(4),
        **more,
    )
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return made.hyperparameter_search(
        hp_space=lambda trial: {"learning_rate": trial.suggest_float("learning_rate", 1e-3, 1.0)},
        n_trials=2,
        sampler=optuna.samplers.GridSampler({"learning_rate": [0.001, 0.1]}, seed=1),
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """Returns the folders of saved models; GPT-2 is in bf16."""
    folders = {family: tmp_path_factory.mktemp(family) for family in ("llama_tied", "gpt2")}
    FAMILIES["llama_tied"].build().save_pretrained(folders["llama_tied"])
    FAMILIES["gpt2"].build().bfloat16().save_pretrained(folders["gpt2"])
    return folders


@pytest.fixture(scope="module")
def plain(tmp_path_factory, folders) -> dict[str, Any]:
    """Returns runs of plain Trainer in one process."""
    folder, config = tmp_path_factory.mktemp("plain"), FAMILIES["llama_tied"].build().config
    common = dict(options=ALONE, trainer_class=Trainer)

    def loaded(family: str) -> PreTrainedModel:
        return AutoModelForCausalLM.from_pretrained(folders[family], dtype="float32")

    return dict(
        llama_tied=run(folder, model=loaded("llama_tied"), **common),
        fresh=run(folder, model_init=lambda: fresh(config), family="llama_tied", **common),
        untrained=evaluation_and_generation(
            trainer(folder, model=loaded("llama_tied"), eval_dataset=Rows(4, seed=2), **common)
        ),
    )


@pytest.fixture(scope="module")
def ranks(tmp_path_factory, folders) -> tuple[Path, list[dict[str, Any]]]:
    """Returns the folder and runs of four ranks by name, from one world."""
    folder, config = tmp_path_factory.mktemp("ranks"), FAMILIES["llama_tied"].build().config
    llama = dict(model=folders["llama_tied"], family="llama_tied")

    def resumed_reading() -> Run:
        reads, read = [], StoredTensor.read_into
        StoredTensor.read_into = lambda stored, *args: reads.append(stored.key) or read(stored, *args)
        resumed = run(folder / "mixed", STAGES, options=STEPS, resume=folder / "mixed" / "checkpoint-2", **llama)
        StoredTensor.read_into = read
        return replace(resumed, result=reads)

    def work() -> dict[str, Any]:
        return dict(
            mixed=run(folder / "mixed", MIXED, options=SAVING, **llama),
            resumed=resumed_reading(),
            fresh=run(
                folder / "fresh",
                STAGES,
                options=STEPS,
                model_init=lambda: fresh_on_meta(config),
                family="llama_tied",
            ),
            untrained=evaluation_and_generation(
                trainer(folder / "untrained", STAGES, eval_dataset=Rows(4, seed=2), **llama)
            ),
        )

    return folder, on_ranks(work)


MORE_STEPS = dict(max_steps=6)


@pytest.fixture(scope="module")
def more_plain(tmp_path_factory, folders) -> dict[str, Run]:
    """Returns longer runs of plain Trainer, for the slow tests."""
    folder, config = tmp_path_factory.mktemp("more_plain"), FAMILIES["llama_tied"].build().config
    common = dict(options=MORE_STEPS | dict(gradient_accumulation_steps=1), trainer_class=Trainer)

    def loaded(family: str) -> PreTrainedModel:
        return AutoModelForCausalLM.from_pretrained(folders[family], dtype="float32")

    return dict(
        llama_tied=run(folder, model=loaded("llama_tied"), **common),
        gpt2=run(folder, model=loaded("gpt2"), **common),
        fresh=run(folder, model_init=lambda: fresh(config), family="llama_tied", **common),
    )


@pytest.fixture(scope="module")
def more_ranks(tmp_path_factory, folders) -> list[dict[str, Any]]:
    """Returns longer runs of four ranks, for the slow tests."""
    folder, config = tmp_path_factory.mktemp("more_ranks"), FAMILIES["llama_tied"].build().config
    gpt2 = dict(model=str(folders["gpt2"]), family="gpt2", options=MORE_STEPS)
    llama = dict(family="llama_tied", options=MORE_STEPS)
    fp32 = MORE_STEPS | dict(model_init_kwargs=dict(dtype="float32"))

    def loaded() -> PreTrainedModel:
        return AutoModelForCausalLM.from_pretrained(folders["gpt2"])

    def work() -> dict[str, Any]:
        return dict(
            stages=run(folder / "stages", STAGES, model=folders["llama_tied"], **llama),
            fresh=run(folder / "fresh", MIXED, model_init=lambda: fresh_on_meta(config), **llama),
            gpt2=run(folder / "gpt2", STAGES, **gpt2 | dict(options=fp32)),
            bf16=run(folder / "bf16", STAGES, **gpt2),
            bf16_loaded=run(folder / "bf16", STAGES, model_init=loaded, family="gpt2", options=MORE_STEPS),
            search=best_trial(folder / "search", MIXED, {}, model_init=lambda: folders["llama_tied"]),
        )

    return on_ranks(work)


def test_model_given_by_name_trains_as_plain_trainer_trains_the_loaded_one(plain, ranks):
    for runs in ranks[1]:
        assert_same_steps(runs["mixed"], plain["llama_tied"])


def test_model_init_without_weights_trains_as_plain_trainer_trains_the_new_model(plain, ranks):
    for runs in ranks[1]:
        assert_same_steps(runs["fresh"], plain["fresh"])


def test_resumed_run_reads_the_checkpoint_alone(plain, ranks):
    for runs in ranks[1]:
        assert_same_steps(runs["resumed"], plain["llama_tied"], after=2)
        assert runs["resumed"].result == []


def test_saved_model_has_the_trained_weights(ranks):
    folder, runs = ranks
    assert_equal_weights(runs[0]["mixed"].weights, load_file(folder / "mixed" / "checkpoint-3" / "model.safetensors"))


def test_evaluation_and_generation_before_any_training(plain, ranks):
    loss, tokens = plain["untrained"]
    for runs in ranks[1]:
        assert runs["untrained"] == (pytest.approx(loss, rel=1e-5), tokens)


@pytest.mark.parametrize(("name", "wanted"), [("stages", "llama_tied"), ("fresh", "fresh"), ("gpt2", "gpt2")])
def test_more_models_without_weights_train_as_plain_trainer_trains_them(more_plain, more_ranks, name, wanted):
    for runs in more_ranks:
        assert_same_steps(runs[name], more_plain[wanted])


def test_bf16_files_become_the_masters_that_a_bf16_model_gets(more_ranks):
    for runs in more_ranks:
        assert runs["bf16"].steps() == runs["bf16_loaded"].steps()
        assert_equal_weights(runs["bf16"].weights, runs["bf16_loaded"].weights)
        assert {tensor.dtype for tensor in runs["bf16"].weights.values()} == {torch.float32}


def test_hyperparameter_search_over_a_named_model(tmp_path, folders, more_ranks):
    def loaded() -> PreTrainedModel:
        return AutoModelForCausalLM.from_pretrained(folders["llama_tied"], dtype="float32")

    wanted = best_trial(tmp_path, "auto", ALONE, trainer_class=Trainer, model_init=loaded)
    for runs in more_ranks:
        assert runs["search"].hyperparameters == wanted.hyperparameters
        assert runs["search"].objective == pytest.approx(wanted.objective, rel=1e-5)


def test_one_process_without_a_plan_is_plain_trainer(plain, folders, tmp_path):
    seen = run(tmp_path, model=folders["llama_tied"], family="llama_tied", options=ALONE)
    assert_same_steps(seen, plain["llama_tied"])


def test_one_process_without_a_plan_refuses_a_model_without_weights():
    config = FAMILIES["llama"].build().config
    with pytest.raises(ValueError, match="on the meta device, and without a plan"):
        GalvatronTrainer(fresh_on_meta(config))
