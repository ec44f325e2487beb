# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Trainer with PEFT models under a plan: logs, adapters, files and resumed runs of the same Trainer on one process."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM, PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Trainer

from adapted_models import adapted, injected, lora
from galvatron_hf.checkpoint.folder import STATE_FOLDER
from galvatron_hf.checkpoint.storage import StateReader
from galvatron_hf.plan import LayerStrategy, ParallelPlan, VocabularyStrategy
from oracle import Rows
from plans import light_plan, pipelined, uniform
from tiny_models import BATCHES, FAMILIES
from trainer_runs import RELATIVE, StopAt, on_ranks, trainer


PIPELINE = pipelined([(0,), (1,)], (LayerStrategy(), LayerStrategy(recompute="full")) * 2, micro_batches=2)
TENSOR = uniform(2, tensor=2, megatron_sp=True, embedding=VocabularyStrategy(tensor=2))
PLANS = {"light": light_plan(2), "pipeline": PIPELINE, "tensor": TENSOR}
MODELS = {
    "wrapped": lambda: adapted(modules_to_save=["lm_head"], bias="all"),
    "injected": lambda: injected(target_modules=["q_proj", "down_proj"]),
    "fused": lambda: adapted("phi3"),
}
OPTIONS = dict(save_strategy="steps", save_steps=3, eval_strategy="steps", eval_steps=3)
ADAPTER_FILES = {"adapter_config.json", "adapter_model.safetensors"}


def made(folder: Path, model: str, plan: ParallelPlan | str = "auto", **options: Any) -> Trainer:
    more = {"callbacks": options.pop("callbacks", [])}
    return trainer(folder, plan, model=MODELS[model](), options=options, eval_dataset=Rows(8, seed=3), **more)


def steps(of: Trainer, after: int = 0) -> list[tuple]:
    names = ("loss", "grad_norm", "learning_rate", "eval_loss")
    return [tuple(log.get(name, 0.0) for name in names) for log in of.state.log_history if log["step"] > after]


def adapters(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter_model.safetensors")


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> dict[str, tuple[Path, list[tuple]]]:
    """Trains each model on one process; returns the folder and the logs."""
    found = {}
    for model in MODELS:
        folder = tmp_path_factory.mktemp(model)
        run = made(folder, model, **OPTIONS)
        run.train()
        run.save_model(str(folder / "final"))
        found[model] = folder, steps(run)
    return found


CASES = [("wrapped", "tensor"), ("injected", "light"), ("fused", "pipeline")]
SLOW = [("wrapped", "light"), ("wrapped", "pipeline"), ("injected", "tensor"), ("fused", "light")]


@pytest.fixture(scope="module")
def runs(plain, tmp_path_factory) -> dict[str, Any]:
    return trained(plain, tmp_path_factory.mktemp("ranks"), CASES)


def trained(plain: dict, folder: Path, cases: list[tuple[str, str]]) -> dict[str, Any]:
    """Trains, resumes and saves on two ranks; returns rank 0's logs, and the folder."""
    other = {"light": "tensor", "tensor": "pipeline", "pipeline": "light"}

    def work() -> dict[tuple, list[tuple]]:
        found = {}
        for model, plan in cases:
            run = made(folder / model / plan, model, PLANS[plan], **OPTIONS)
            run.train()
            run.save_model(str(folder / model / plan / "final"))
            found[model, plan] = steps(run)
            checkpoints = {
                "resumed": folder / model / plan / "checkpoint-3",
                "plain": plain[model][0] / "checkpoint-3",
            }
            for what, checkpoint in checkpoints.items():
                run = made(folder / model / what, model, PLANS[other[plan]], eval_strategy="steps", eval_steps=3)
                run.train(resume_from_checkpoint=str(checkpoint))
                found[model, plan, what] = steps(run, after=3)
        return found

    first, second = on_ranks(work, 2)
    assert first.keys() == second.keys()
    return {"logs": first, "folder": folder}


@pytest.mark.slow
def test_losses_norms_and_evaluations_are_those_of_one_process(plain, runs):
    check_logs(plain, runs)


@pytest.mark.slow
def test_other_plans_train_as_one_process(plain, tmp_path):
    runs = trained(plain, tmp_path, SLOW)
    check_logs(plain, runs)
    check_adapters(plain, runs)


def check_logs(plain: dict, runs: dict[str, Any]) -> None:
    for (model, *_), found in runs["logs"].items():
        wanted = plain[model][1][-len(found) :]
        assert len(found) >= 4
        for own, other in zip(found, wanted, strict=True):
            assert own == pytest.approx(other, rel=RELATIVE, abs=1e-9), model


@pytest.mark.slow
def test_adapters_alone_are_saved_in_pefts_format(plain, runs):
    check_adapters(plain, runs)


def sorted_config(path: Path) -> dict[str, Any]:
    """Returns a configuration of adapters; PEFT writes its sets of names in any order."""
    return {k: sorted(v) if isinstance(v, list) else v for k, v in json.loads(path.read_text()).items()}


def check_adapters(plain: dict, runs: dict[str, Any]) -> None:
    for model in ("wrapped", "injected", "fused"):
        wanted = plain[model][0]
        for plan in (runs["folder"] / model).iterdir():
            if not (plan / "final").is_dir():
                continue
            for part in ("final", "checkpoint-3"):
                own, other = adapters(plan / part), adapters(wanted / part)
                assert own.keys() == other.keys() and "base_layer" not in " ".join(own)
                for name, weight in own.items():
                    torch.testing.assert_close(weight, other[name], rtol=0, atol=2e-5 * float(other[name].abs().max()))
                ours, theirs = (sorted_config(at / part / "adapter_config.json") for at in (plan, wanted))
                assert ours == theirs
                assert not list((plan / part).glob("model*"))
            files = set(os.listdir(wanted / "final")) | {"parallel_plan.json"}
            assert set(os.listdir(plan / "final")) == files and files >= ADAPTER_FILES


@pytest.mark.slow
def test_checkpoints_have_no_weights_of_the_model_that_is_adapted(runs):
    stored = StateReader(runs["folder"] / "wrapped" / "tensor" / "checkpoint-3" / STATE_FOLDER)
    names = {name for name in stored.read_metadata().state_dict_metadata if name.startswith("model.")}
    assert names and all("lora_" in name or "modules_to_save" in name or "bias" in name for name in names)


@pytest.mark.slow
def test_merged_adapters_give_the_logits_of_the_trained_model(plain, runs):
    batch = {name: value for name, value in BATCHES["plain"]().items() if name != "labels"}
    for model, family, plan in (("wrapped", "llama", "tensor"), ("fused", "phi3", "pipeline")):
        wanted = PeftModel.from_pretrained(FAMILIES[family].build(), plain[model][0] / "final").eval()(**batch).logits
        saved = PeftModel.from_pretrained(FAMILIES[family].build(), runs["folder"] / model / plan / "final")
        logits = saved.merge_and_unload().eval()(**batch).logits
        torch.testing.assert_close(logits, wanted, rtol=0, atol=2e-5 * float(wanted.abs().max()))


@pytest.mark.slow
def test_a_checkpoint_of_a_plan_resumes_without_a_plan(plain, runs, tmp_path):
    for model, plan in (("wrapped", "tensor"), ("fused", "pipeline")):
        run = made(tmp_path / model, model, eval_strategy="steps", eval_steps=3)
        run.train(resume_from_checkpoint=str(runs["folder"] / model / plan / "checkpoint-3"))
        found = steps(run, after=3)
        assert len(found) >= 4
        for own, other in zip(found, plain[model][1][-len(found) :], strict=True):
            assert own == pytest.approx(other, rel=RELATIVE, abs=1e-9)


@pytest.mark.slow
def test_the_best_adapters_are_loaded_and_generate_and_auto_classes_open_the_folder(tmp_path):
    """The base has a folder of its own, whose name the adapters' configuration has."""
    FAMILIES["llama"].build().save_pretrained(tmp_path / "base")

    def build() -> PeftModel:
        torch.manual_seed(4)
        return adapted_base(tmp_path / "base")

    prompt = BATCHES["plain"]()["input_ids"][:2, :4]

    def run(folder: Path, plan: ParallelPlan | str) -> tuple[list, float]:
        # The highest loss is that of the first checkpoint.
        best = dict(load_best_model_at_end=True, metric_for_best_model="eval_loss", greater_is_better=True)
        options = OPTIONS | best | dict(save_steps=2, eval_steps=2)
        one = trainer(folder, plan, model=build(), options=options, eval_dataset=Rows(8, seed=3))
        one.train()
        loss = one.evaluate()["eval_loss"]
        one.model.eval()
        ids = one.model.generate(input_ids=prompt, max_new_tokens=4, do_sample=False)
        one.save_model(str(folder / "final"))
        return ids.tolist(), loss

    ids, loss = run(tmp_path / "plain", "auto")
    for own, own_loss in on_ranks(lambda: run(tmp_path / "ranks", PIPELINE), 2):
        assert own == ids and own_loss == pytest.approx(loss, rel=RELATIVE)
    opened = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "ranks" / "final").eval()
    assert opened.generate(input_ids=prompt, max_new_tokens=4, do_sample=False).tolist() == ids


def adapted_base(folder: Path) -> PeftModel:
    from peft import get_peft_model

    made = get_peft_model(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), lora())
    return made.train()


def test_several_adapters_are_saved_and_loaded_and_the_active_one_is_trained(tmp_path):
    def build() -> PeftModel:
        model = adapted()
        torch.manual_seed(6)
        model.add_adapter("other", lora(target_modules=["q_proj"], lora_dropout=0.0))
        model.set_adapter("other")
        return model

    def run(folder: Path, plan: ParallelPlan | str, resume: Path | None = None) -> list[tuple]:
        one = trainer(folder, plan, model=build(), options=dict(save_strategy="steps", save_steps=3))
        one.train(resume_from_checkpoint=None if resume is None else str(resume))
        return steps(one, after=3 if resume else 0)

    wanted = run(tmp_path / "plain", "auto")

    def work() -> list[list[tuple]]:
        first = run(tmp_path / "ranks", TENSOR)
        return [first, run(tmp_path / "again", PIPELINE, tmp_path / "ranks" / "checkpoint-3")]

    for first, again in on_ranks(work, 2):
        for found in (first, again):
            for own, other in zip(found, wanted[-len(found) :], strict=True):
                assert own == pytest.approx(other, rel=RELATIVE, abs=1e-9)
    for folder in ("checkpoint-6", "checkpoint-6/other"):
        own, other = adapters(tmp_path / "ranks" / folder), adapters(tmp_path / "plain" / folder)
        assert own.keys() == other.keys()
        for name, weight in own.items():
            torch.testing.assert_close(weight, other[name], rtol=0, atol=2e-5 * float(other[name].abs().max()))
        if folder == "checkpoint-6":  # of the adapter that is not trained
            assert all(torch.equal(own[name], other[name]) for name in own)


def test_an_interrupted_run_and_only_the_adapters(tmp_path):
    """Stops after a step, and resumes from adapters without a state of the optimizer."""

    def work() -> list[str]:
        one = made(
            tmp_path,
            "wrapped",
            TENSOR,
            save_strategy="steps",
            save_steps=2,
            save_only_model=True,
            callbacks=[StopAt(2)],
        )
        one.train()
        again = made(tmp_path / "again", "wrapped", PIPELINE)
        again.ensure_parallel()
        again._load_from_checkpoint(str(tmp_path / "checkpoint-2"))
        again.save_model(str(tmp_path / "again"))
        return sorted(os.listdir(tmp_path / "checkpoint-2"))

    found = on_ranks(work, 2)[0]
    assert STATE_FOLDER not in found and ADAPTER_FILES <= set(found)
    first, second = adapters(tmp_path / "checkpoint-2"), adapters(tmp_path / "again")
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_adapters_of_another_configuration_are_refused(tmp_path):
    adapted(target_modules=["q_proj"]).save_pretrained(tmp_path / "fewer")
    adapted(r=2).save_pretrained(tmp_path / "smaller")

    def work() -> list[str]:
        one, found = made(tmp_path / "run", "wrapped", TENSOR), []
        one.ensure_parallel()
        for folder in ("fewer", "smaller", "missing"):
            with pytest.raises(ValueError) as refused:
                one._load_from_checkpoint(str(tmp_path / folder))
            found.append(str(refused.value))
        return found

    for fewer, smaller, missing in on_ranks(work, 2):
        assert "load adapters of the same configuration" in fewer
        assert "load adapters of the same configuration" in smaller
        assert "has no adapter_config.json" in missing
