# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""
Fine-tunes a causal language model in two stages, on questions that it has mastered partly and then on the others.

The method is after arXiv 2410.05802; docs/two-stage.md has the differences. classify_mastery.py writes mastery.jsonl.
The first stage trains the partly mastered questions, the second one the others with a share of the first stage's rows
again. Each stage is a run of its own, and the second one starts from the first one's output. Two CPU ranks:

    LAUNCH="accelerate launch --config_file recipes/accelerate/cpu4.yaml --num_processes 2"
    $LAUNCH recipes/knowledge/two_stage.py recipes/knowledge/two_stage.yaml --stage first --num_train_epochs 6 \\
        --mastery_file mastery.jsonl --model_name_or_path Qwen/Qwen3-0.6B --output_dir output/first
    $LAUNCH recipes/knowledge/two_stage.py recipes/knowledge/two_stage.yaml --stage second \\
        --mastery_file mastery.jsonl --model_name_or_path output/first --output_dir output/second

`--stage single` trains all rows at once, for comparison. With a replay share r, E epochs of the second stage and
(1 - r) E of the first one train as many rows as E epochs of a single stage. Arguments are those below and every field
of `TrainingArguments`.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from datasets import Dataset
from transformers import AutoTokenizer, DataCollatorForSeq2Seq, set_seed


sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import train_clm  # noqa: E402
from galvatron_hf import GalvatronTrainer, GalvatronTrainingArguments  # noqa: E402
from galvatron_hf.trainer.refusals import told_once  # noqa: E402
from knowledge.questions import PARTLY, PROMPT, read_lines, to_rows  # noqa: E402


@dataclass
class StageArguments:
    """The stage, its model and its rows."""

    stage: Literal["first", "second", "single"] = field(
        metadata={"help": "first: partly mastered questions. second: the others, and replayed ones. single: all."}
    )
    model_name_or_path: str = field(metadata={"help": "A saved model; for the second stage the first one's output."})
    mastery_file: str = field(metadata={"help": "JSON lines that classify_mastery.py has written."})
    other_file: str | None = field(
        default=None, metadata={"help": "JSON lines of more questions and answers, for the second or single stage."}
    )
    replay_share: float = field(default=0.25, metadata={"help": "Share of the first stage's rows in the second one."})
    prompt: str = field(default=PROMPT, metadata={"help": "The text before an answer, with {question} in it."})
    dtype: Literal["float32", "bfloat16"] = field(default="float32", metadata={"help": "Type of the weights."})

    def __post_init__(self):
        if not 0 <= self.replay_share <= 1:
            raise ValueError(f"replay_share={self.replay_share} is not a share: give 0 to 1.")


def choose(stage: str, first: Sequence[dict], others: Sequence[dict], replay_share: float, seed: int) -> list[dict]:
    """Returns the questions of a stage; `first` are those of the first one. Replayed ones are drawn with the seed."""
    if stage == "first":
        return list(first)
    if stage == "single":
        return [*first, *others]
    return [*others, *random.Random(seed).sample(list(first), round(replay_share * len(first)))]


def stage_lines(args: StageArguments, seed: int) -> list[dict]:
    """Returns the questions of a stage from its files. A stage without questions raises `ValueError`."""
    lines = read_lines(args.mastery_file, kinds=True)
    partly = [line for line in lines if line["kind"] == PARTLY]
    others = [line for line in lines if line["kind"] != PARTLY]
    if args.other_file is not None:
        others += read_lines(args.other_file)
    chosen = choose(args.stage, partly, others, args.replay_share, seed)
    if not chosen:
        raise ValueError(f"{args.mastery_file} has no question for stage={args.stage!r}: classify other questions.")
    return chosen


def stage_trainer(
    model: str, prompt: str, lines: Sequence[dict], training_args: GalvatronTrainingArguments
) -> GalvatronTrainer:
    """Returns the trainer of one stage, which begins with a saved model."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.unk_token or tokenizer.eos_token
    return GalvatronTrainer(
        model=model,
        args=training_args,
        train_dataset=Dataset.from_list(to_rows(tokenizer, prompt, lines)),
        processing_class=tokenizer,
        data_collator=DataCollatorForSeq2Seq(tokenizer, pad_to_multiple_of=8),
    )


def main() -> None:
    args, training_args = train_clm.parse_arguments(sys.argv[1:], (StageArguments, GalvatronTrainingArguments))
    set_seed(training_args.seed)
    training_args.model_init_kwargs = {"dtype": args.dtype} | (training_args.model_init_kwargs or {})
    with told_once(), training_args.main_process_first(desc="questions"):
        lines = stage_lines(args, training_args.data_seed or training_args.seed)
    train_clm.train_and_save(stage_trainer(args.model_name_or_path, args.prompt, lines, training_args), False)


if __name__ == "__main__":
    main()
