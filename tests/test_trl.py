# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""TRL's trainers under a plan: the logs of the same trainer on one process, or a refusal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from peft import PeftConfig
from transformers import LlamaForSequenceClassification, PreTrainedModel

from adapted_models import lora, randomise_adapters
from galvatron_hf import GalvatronMixin
from galvatron_hf.plan import ParallelPlan
from oracle import OF_PACE, Rows
from plans import light_plan, pipeline_plans, uniform
from test_trainer_features import word_tokenizer
from tiny_models import FAMILIES
from trainer_runs import Logs, on_ranks


trl = pytest.importorskip("trl", reason="trl is not installed")

ROWS = 8  # of a batch of all ranks
_TIMES = ("time", "per_second", "flos", *OF_PACE)
NAMES = ("DPO", "KTO", "SFT")


def words(tokens: list[int]) -> str:
    return " ".join(f"w{token}" for token in tokens)


def dataset(name: str) -> datasets.Dataset:
    rows = []
    for index, tokens in enumerate(Rows(24).rows):
        prompt, completion = tokens[:2].tolist(), tokens[2:].tolist()
        worse = [(7 * token + 11) % 93 + 4 for token in completion]
        rows.append(
            {
                "DPO": dict(prompt=words(prompt), chosen=words(completion), rejected=words(worse)),
                "KTO": dict(
                    prompt=words(prompt), completion=words(completion if index % 2 else worse), label=bool(index % 2)
                ),
                "SFT": dict(prompt=words(prompt), completion=words(completion)),
                "Reward": dict(chosen=words(prompt + completion), rejected=words(prompt + worse)),
            }[name]
        )
    return datasets.Dataset.from_list(rows)


def reference() -> PreTrainedModel:
    """Returns the model that preference losses compare with: other weights than the trained one's."""
    model = FAMILIES["llama"].build()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(0.9)
    return model


def logs_of(
    name: str, folder: Path, plan: ParallelPlan | None = None, peft_config: PeftConfig | None = None, **options: Any
) -> list[dict[str, Any]]:
    """Trains three steps with an evaluation; returns the logs without times."""
    defaults = dict(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        max_steps=3,
        logging_steps=1,
        learning_rate=1e-2,
        adam_epsilon=1e-3,
        max_grad_norm=0.8,
        gradient_checkpointing=False,
        eval_strategy="steps",
        eval_steps=2,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        seed=5,
        per_device_train_batch_size=ROWS,  # KTO makes pairs of so many rows
        per_device_eval_batch_size=ROWS,
    )
    args, kind = getattr(trl, f"{name}Config")(**(defaults | options)), getattr(trl, f"{name}Trainer")
    if plan is not None:
        args.parallel_plan = plan
        args.global_batch_size = ROWS * args.gradient_accumulation_steps
        args.per_device_eval_batch_size = ROWS // plan.world_size
        kind = type(f"Galvatron{name}Trainer", (GalvatronMixin, kind), {})
    model, more = FAMILIES["llama"].build(), {}
    if peft_config is not None:
        more["peft_config"] = peft_config
    elif name in ("DPO", "KTO"):
        more["ref_model"] = reference()
    if name == "Reward":
        model.config.num_labels = 1
        model = LlamaForSequenceClassification(model.config)
    logs, rows = Logs(), dataset(name)
    made = kind(
        model=model,
        args=args,
        train_dataset=rows,
        eval_dataset=rows.select(range(6)),
        processing_class=word_tokenizer(),
        callbacks=[logs],
        **more,
    )
    if peft_config is not None:
        randomise_adapters(made.model)
    made.train()
    return [{key: value for key, value in log.items() if not any(word in key for word in _TIMES)} for log in logs.all]


def check(folder: Path, plan: ParallelPlan, **options: Any) -> None:
    wanted = {name: logs_of(name, folder / "plain" / name, **options) for name in NAMES}

    def work() -> dict[str, list[dict[str, Any]]]:
        return {name: logs_of(name, folder / "ranks" / name, plan, **options) for name in NAMES}

    for found in on_ranks(work, plan.world_size):
        for name in NAMES:
            assert len(found[name]) == len(wanted[name]) > 3
            for own, other in zip(found[name], wanted[name], strict=True):
                assert own == pytest.approx(other, rel=2e-5, abs=1e-6), name


def test_preferences_and_completions_are_trained_as_on_one_process(tmp_path):
    check(tmp_path, light_plan(2))


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan, names",
    [
        (uniform(2, tensor=2, megatron_sp=True), ("SFT", "DPO")),
        pytest.param(pipeline_plans()["1f1b_mixed"], NAMES, marks=pytest.mark.slow),
    ],
    ids=["tensor", "1f1b_mixed"],
)
def test_adapters_are_trained_as_on_one_process(plan, names, tmp_path):
    """The reference of preferences is the model with its adapters disabled."""
    options = dict(peft_config=lora(), gradient_accumulation_steps=2 if len(plan.stages) > 1 else 1)
    wanted = {name: logs_of(name, tmp_path / "plain" / name, **options) for name in names}

    def work() -> dict[str, list[dict[str, Any]]]:
        return {name: logs_of(name, tmp_path / "ranks" / name, plan, **options) for name in names}

    for found in on_ranks(work, plan.world_size):
        for name in names:
            assert len(found[name]) == len(wanted[name]) > 3
            for own, other in zip(found[name], wanted[name], strict=True):
                assert own == pytest.approx(other, rel=2e-5, abs=1e-6), name


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["zero_bubble", "1f1b_mixed"])
def test_preferences_and_completions_are_trained_under_pipelines(schedule, tmp_path):
    check(tmp_path, pipeline_plans()[schedule], gradient_accumulation_steps=2)


@pytest.mark.slow
def test_precomputed_references_are_those_of_one_process(tmp_path):
    options = dict(precompute_ref_log_probs=True)
    wanted = logs_of("DPO", tmp_path / "plain", **options)
    for found in on_ranks(lambda: logs_of("DPO", tmp_path / "ranks", light_plan(2), **options), 2):
        for own, other in zip(found, wanted, strict=True):
            assert own == pytest.approx(other, rel=2e-5, abs=1e-6)


def test_a_reward_model_is_trained_under_tensor(tmp_path):
    wanted = logs_of("Reward", tmp_path / "plain")
    for found in on_ranks(lambda: logs_of("Reward", tmp_path / "ranks", light_plan(2)), 2):
        assert len(found) == len(wanted) > 3
        for own, other in zip(found, wanted, strict=True):
            assert own == pytest.approx(other, rel=2e-5, abs=1e-6)
