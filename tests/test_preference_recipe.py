# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The recipe for preferences: TRL's DPOTrainer under a plan has the logs of one process."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from datasets import Dataset, DatasetDict

from ranks import run_ranks
from test_recipes import RECIPES, tiny_chat_model  # puts the recipes on the path


pytest.importorskip("trl", reason="trl is not installed")

import dpo  # noqa: E402
import sft  # noqa: E402
import train_clm  # noqa: E402
from data import preferences  # noqa: E402


NAMES = ("loss", "grad_norm", "rewards/margins", "logps/chosen")


def test_a_function_has_its_own_line_and_another_ones(monkeypatch):
    pairs = Dataset.from_dict({"source": ["f", "g", "h"], "target": ["Adds.", "Adds.", "Sorts."]})
    monkeypatch.setattr(preferences, "load_pairs", lambda *given: DatasetDict(train=pairs, validation=pairs))
    rows = preferences.load_preferences("python-stdlib", None, 2.0, 0)["train"]
    said = [tuple(row[name][0]["content"] for name in ("chosen", "rejected")) for row in rows]
    assert said == [("Adds.", "Sorts."), ("Adds.", "Sorts."), ("Sorts.", "Adds.")]
    assert rows["prompt"][1] == [{"role": "user", "content": "What does this function do?\ng"}]


def test_a_dataset_without_a_worse_answer_is_refused(tmp_path):
    Dataset.from_dict({"prompt": ["a"], "chosen": ["b"]}).to_json(tmp_path / "rows.jsonl")
    with pytest.raises(ValueError, match=r"'rejected' is not a column of .*, which has \['prompt', 'chosen'\]"):
        preferences.load_preferences(str(tmp_path / "rows.jsonl"), None, 2.0, 0)


def test_a_file_may_name_the_model(tmp_path):
    (tmp_path / "run.yaml").write_text("model_name_or_path: some/model\nbeta: 0.3\nlora_rank: 4\n")
    argv = [str(tmp_path / "run.yaml"), f"--output_dir={tmp_path}", "--lora_rank=2", "--use_cpu=true", "--bf16=false"]
    args, training_args = train_clm.parse_arguments(argv, (sft.AdaptedModelArguments, dpo.DPOArguments))
    assert (args.model_name_or_path, args.lora_rank, training_args.beta) == ("some/model", 2, 0.3)


def train(folder: Path, name: str, ranks: int, monkeypatch, *more: str) -> list[dict]:
    """Trains four steps of eight rows on so many ranks; returns the logs."""
    argv = ["dpo.py", str(RECIPES / "dpo.yaml"), f"--model_name_or_path={folder / 'base'}", "--warmup_steps=0"]
    argv += ["--dataset_name", str(folder / "rows.jsonl"), "--max_length=64", "--max_steps=4", "--logging_steps=1"]
    argv += [f"--per_device_train_batch_size={8 // ranks}", f"--per_device_eval_batch_size={8 // ranks}"]
    argv += ["--learning_rate=1e-2", "--disable_tqdm=true", f"--output_dir={folder / name}", *more]
    monkeypatch.setattr(sys, "argv", argv)
    if ranks == 1:
        dpo.main()
    else:
        run_ranks(dpo.main, ranks)
    history = json.loads((folder / name / "trainer_state.json").read_text())["log_history"]
    return [entry for entry in history if "loss" in entry]


@pytest.mark.slow
@pytest.mark.parametrize("rank", [8, 0], ids=["adapters", "whole"])
def test_preferences_are_learned_under_zero_as_on_one_process(tmp_path, monkeypatch, rank):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "hf-cache")
    tiny_chat_model(tmp_path / "base")
    rows = [dict(prompt=f"What is {i} ?", chosen=" It is so .", rejected=" What is it ?") for i in range(64)]
    Dataset.from_list(rows).to_json(tmp_path / "rows.jsonl")
    more = (f"--lora_rank={rank}",)
    wanted = train(tmp_path, "plain", 1, monkeypatch, *more)
    found = train(tmp_path, "ranks", 2, monkeypatch, "--parallel_plan=zero3", *more)
    for own, other in zip(found, wanted, strict=True):
        assert [own[name] for name in NAMES] == pytest.approx([other[name] for name in NAMES], rel=2e-5, abs=1e-6)
    for own, other in zip(found[1:], wanted[1:]):  # in the first step both rewards are 0, and rounding decides
        assert own["rewards/accuracies"] == other["rewards/accuracies"]
    assert found[0]["loss"] == pytest.approx(0.6931, abs=1e-3)  # no preference yet: ln 2
    assert found[-1]["loss"] < 0.6 and found[-1]["rewards/accuracies"] == 1.0
    files = {path.name for path in (tmp_path / "ranks").iterdir()}
    assert ("adapter_model.safetensors" if rank else "model.safetensors") in files
