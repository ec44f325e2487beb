# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Runs on long-tailed rows, for the tests of packing inside the Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, Trainer

from equivalence import single_stage
from galvatron_hf.plan import LayerStrategy, ParallelPlan, VocabularyStrategy
from oracle import PAD, Rows
from plans import uniform
from tiny_models import VOCABULARY
from trainer_runs import Run, on_ranks, run


LONG_TAIL = dict(shortest=1, longest=40)
STATIC = dict(packing="static")
RANKS = 2  # enough for documents on several ranks, and for layers in which ranks share a document
REPLICATE = uniform(RANKS, sharding="replicate")
MIXED = single_stage(
    (
        LayerStrategy(),
        LayerStrategy(tensor=2),
        LayerStrategy(tensor=2, megatron_sp=True, recompute="full"),
        LayerStrategy(ulysses=2, sharding="zero2"),
    ),
    RANKS,
    embedding=VocabularyStrategy(tensor=2),
    head=VocabularyStrategy(tensor=2),
    micro_batches=3,
)
KEYS = ("useful_tokens_per_second", "padding_percent", "predicted_imbalance", "planner_ms", "planner_hidden")


def rows(count: int = 61, **options: Any) -> Rows:
    return Rows(count, **(LONG_TAIL | options))


def tokenizer() -> PreTrainedTokenizerFast:
    words = {f"w{index}": index for index in range(VOCABULARY)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="w0")), pad_token=f"w{PAD}")


def arrow(count: int = 61, **options: Any) -> datasets.Dataset:
    """Returns the same rows as a dataset whose lengths are known."""
    whole = rows(count, **options)
    return datasets.Dataset.from_list([{name: value.tolist() for name, value in row.items()} for row in whole])


def without_labels(dataset: datasets.Dataset) -> datasets.Dataset:
    return dataset.remove_columns("labels")


def runs_of(plan: ParallelPlan, folder: Path, cases: dict[str, dict[str, Any]]) -> dict[str, Run]:
    """Trains all cases on the ranks of one world and returns rank 0's results."""

    def work() -> dict[str, Run]:
        return {
            name: run(folder / name, plan, **{k: v() if callable(v) else v for k, v in more.items()})
            for name, more in cases.items()
        }

    return on_ranks(work, plan.world_size)[0]


def plain_run(folder: Path, **more: Any) -> Run:
    """Trains with plain Trainer on this process; functions among the arguments are called."""
    options = more.pop("options", {}) | dict(gradient_accumulation_steps=1)
    more = {name: value() if callable(value) else value for name, value in more.items()}
    return run(folder, options=options, trainer_class=Trainer, **more)
