# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""
Trains an encoder-decoder, new or pretrained, on pairs of texts under a layer-wise parallel plan of both stacks.

A new T5 of 1.3M parameters that documents functions of the standard library, 4 CPU ranks, two stages:

    OMP_NUM_THREADS=1 accelerate launch --config_file recipes/accelerate/cpu4.yaml recipes/seq2seq.py \\
        recipes/seq2seq.yaml --parallel_plan recipes/plans/t5-4cpu.json --output_dir output/t5

A model of the Hub on 8 GPUs:

    accelerate launch --multi_gpu --num_machines 1 --num_processes 8 --mixed_precision no --dynamo_backend no \\
        recipes/seq2seq.py --model_name_or_path google/flan-t5-xl --dataset_name abisee/cnn_dailymail \\
        --dataset_config_name 3.0.0 --source_column article --target_column highlights --max_length 512 --bf16 \\
        --learning_rate 1e-4 --output_dir output/summaries

Arguments are those of train_clm.py, and those below. Without a plan the layers are sharded by ZeRO-3.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch
from datasets import Dataset, DatasetDict
from transformers import (
    AutoConfig,
    AutoModelForSeq2SeqLM,
    DataCollatorForSeq2Seq,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

import train_clm
from data.pairs import load_pairs
from galvatron_hf import GalvatronTrainer
from galvatron_hf.trainer.refusals import told_once


@dataclass
class PairArguments:
    """Where the pairs are."""

    source_column: str = field(default="source", metadata={"help": "The column with the texts to read."})
    target_column: str = field(default="target", metadata={"help": "The column with the texts to write."})
    max_target_length: int = field(default=64, metadata={"help": "Longest target, in tokens."})


def get_model(args: train_clm.ModelArguments, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel | str:
    """Returns the pretrained model's name, or a new model, equal on every rank because the seed is set."""
    if args.model_name_or_path is not None:
        return args.model_name_or_path  # each rank then reads only its own weights
    config = AutoConfig.for_model(
        args.model_type,
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        decoder_start_token_id=tokenizer.pad_token_id,
        **(args.config_overrides or {}),
    )
    return AutoModelForSeq2SeqLM.from_config(config, dtype=getattr(torch, args.dtype))


def tokenized(
    pairs: DatasetDict, tokenizer: PreTrainedTokenizerBase, longest: int, longest_target: int
) -> DatasetDict:
    """Returns rows of token ids of the sources, with those of the targets, an end token after each, as labels."""

    def encode(batch: dict[str, list[str]]) -> dict[str, list]:
        rows = tokenizer(batch["source"], truncation=True, max_length=longest)
        targets = tokenizer(batch["target"], truncation=True, max_length=longest_target - 1)["input_ids"]
        ended = [ids if ids[-1:] == [tokenizer.eos_token_id] else [*ids, tokenizer.eos_token_id] for ids in targets]
        return {"input_ids": rows["input_ids"], "attention_mask": rows["attention_mask"], "labels": ended}

    return pairs.map(encode, batched=True, remove_columns=["source", "target"], desc="Tokenizing")


def main() -> None:
    pair_args, model_args, data_args, training_args = train_clm.parse_arguments(
        sys.argv[1:], (PairArguments, *train_clm.ARGUMENTS)
    )
    train_clm.start(model_args, training_args)
    cache = Path(training_args.output_dir) / "cache"
    with told_once(), training_args.main_process_first(desc="tokenizer and rows"):
        pairs = load_pairs(
            data_args.dataset_name,
            data_args.dataset_config_name,
            pair_args.source_column,
            pair_args.target_column,
            data_args.validation_split_percentage,
            training_args.data_seed or training_args.seed,
        )
        both = [*pairs["train"]["source"][:], *pairs["train"]["target"][:]]
        documents = DatasetDict(train=Dataset.from_dict({"text": both}))
        tokenizer = train_clm.get_tokenizer(model_args, documents, "text", cache)
        rows = tokenized(pairs, tokenizer, data_args.max_length, pair_args.max_target_length)
    for split, limit in (("train", data_args.max_train_rows), ("validation", data_args.max_eval_rows)):
        if limit is not None:
            rows[split] = rows[split].select(range(min(limit, len(rows[split]))))
    trainer = GalvatronTrainer(
        model=get_model(model_args, tokenizer),
        args=training_args,
        train_dataset=rows["train"],
        eval_dataset=rows["validation"],
        processing_class=tokenizer,
        data_collator=DataCollatorForSeq2Seq(tokenizer, pad_to_multiple_of=8),
    )
    train_clm.train_and_save(trainer, evaluates=True)


if __name__ == "__main__":
    main()
