# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The recipe for rows that one rank does not hold: ranks that share them have the losses of plain Trainer."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from datasets import Dataset
from transformers import LlamaConfig

from ranks import run_ranks


RECIPES = Path(__file__).parent.parent / "recipes"
sys.path.insert(0, str(RECIPES))

import long_context  # noqa: E402
import train_clm  # noqa: E402


CONFIG = '--config_overrides={"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, '
CONFIG += '"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}'
STEPS = 4


def test_ranks_share_documents_unless_told_otherwise(tmp_path):
    kinds = (*train_clm.ARGUMENTS[:-1], long_context.LongContextArguments)
    *_, args = train_clm.parse_arguments([f"--output_dir={tmp_path}"], kinds)
    assert args.packing == "dynamic"
    *_, args = train_clm.parse_arguments([str(RECIPES / "long_context.yaml"), "--packing=static"], kinds)
    assert (args.packing, args.max_tokens_per_rank) == ("static", 1024)


def test_lengths_are_compared_with_a_rank():
    rows = Dataset.from_dict({"input_ids": [[0] * 10, [0] * 20, [0] * 70]})
    assert long_context.describe_lengths(rows, None) == "3 rows of 20 tokens in the median and 70 at most."
    assert long_context.describe_lengths(rows, 64) == (
        "3 rows of 20 tokens in the median and 70 at most; 1 of them, with 70% of the tokens, exceed the 64 tokens of "
        "a rank."
    )


def test_rows_beyond_the_positions_of_a_model_are_refused(tmp_path):
    LlamaConfig(max_position_embeddings=64).save_pretrained(tmp_path)
    long_context.check_positions(str(tmp_path), 64, None)
    long_context.check_positions(str(tmp_path), 65, {"max_position_embeddings": 128})
    with pytest.raises(ValueError, match="max_length=65 is above the 64 positions of the model; shorten the rows"):
        long_context.check_positions(str(tmp_path), 65, None)


def losses(folder: Path, name: str) -> list[dict]:
    history = json.loads((folder / name / "trainer_state.json").read_text())["log_history"]
    return [entry for entry in history if "loss" in entry]


@pytest.mark.slow
def test_documents_longer_than_a_rank_have_the_losses_of_one_process(tmp_path, monkeypatch):
    """Two ranks hold 64 tokens each and train on documents of up to 100, in groups and under a context degree."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "hf-cache")
    documents = [f"x{index} = {index}\n" * (1 + 5 * (index % 4)) for index in range(40)]
    Dataset.from_dict({"text": documents}).to_json(tmp_path / "documents.jsonl")

    def train(name: str, ranks: int, *more: str) -> None:
        argv = ["recipe", str(RECIPES / "long_context.yaml"), "--dataset_name", str(tmp_path / "documents.jsonl")]
        argv += ["--vocab_size=300", "--max_length=100", CONFIG, f"--max_steps={STEPS}", "--logging_steps=1"]
        argv += ["--disable_tqdm=true", "--warmup_steps=0", f"--output_dir={tmp_path / name}", *more]
        monkeypatch.setattr(sys, "argv", argv)
        if ranks == 1:
            train_clm.main()
        else:
            run_ranks(long_context.main, ranks)

    train("plain", 1, "--parallel_plan=auto", "--packing=auto", "--per_device_train_batch_size=4")
    batch = "--per_device_train_batch_size=2"
    train("groups", 2, "--max_tokens_per_rank=64", batch)
    train("context", 2, "--max_tokens_per_rank=64", batch, "--parallel_plan=cp2+zero3")
    wanted = [entry["loss"] for entry in losses(tmp_path, "plain")]
    for name in ("groups", "context"):
        found = losses(tmp_path, name)
        assert [entry["loss"] for entry in found] == pytest.approx(wanted, rel=1e-5), name
        assert any(entry.get("shared_tokens_percent", 0) > 0 for entry in found), name
