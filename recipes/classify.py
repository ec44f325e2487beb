# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""
Trains a classifier of texts, new or pretrained, under a layer-wise parallel plan.

A new BERT of 0.7M parameters that tells packages of the standard library by their source, 4 CPU ranks:

    OMP_NUM_THREADS=1 accelerate launch --config_file recipes/accelerate/cpu4.yaml recipes/classify.py \\
        recipes/classify.yaml --output_dir output/classify

A model of the Hub on 8 GPUs:

    accelerate launch --multi_gpu --num_machines 1 --num_processes 8 --mixed_precision no --dynamo_backend no \\
        recipes/classify.py --model_name_or_path answerdotai/ModernBERT-large --dataset_name stanfordnlp/imdb \\
        --max_length 512 --bf16 --learning_rate 2e-5 --output_dir output/imdb

Arguments are those of train_clm.py, and those below.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from datasets import DatasetDict
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    DataCollatorWithPadding,
    EvalPrediction,
    PreTrainedModel,
)

import train_clm
from data.labels import load_labelled
from galvatron_hf import GalvatronTrainer
from galvatron_hf.trainer.refusals import told_once


@dataclass
class LabelArguments:
    """Where the labels are."""

    label_column: str = field(default="label", metadata={"help": "The column that holds the label."})
    classes: int = field(default=4, metadata={"help": "Packages of the standard library to tell apart."})


def get_model(args: train_clm.ModelArguments, tokenizer, names: list[str]) -> PreTrainedModel:
    """Returns a pretrained model or a new one, equal on every rank because the seed is set."""
    labels = dict(num_labels=len(names), id2label=dict(enumerate(names)), label2id={n: i for i, n in enumerate(names)})
    if args.model_name_or_path is not None:
        return AutoModelForSequenceClassification.from_pretrained(
            args.model_name_or_path, dtype=args.dtype, **labels, **(args.config_overrides or {})
        )
    config = AutoConfig.for_model(
        args.model_type,
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        **labels,
        **(args.config_overrides or {}),
    )
    return AutoModelForSequenceClassification.from_config(config, dtype=getattr(torch, args.dtype))


def tokenized(texts: DatasetDict, tokenizer, max_length: int) -> DatasetDict:
    """Returns rows of at most `max_length` token ids with their labels."""

    def encode(batch: dict[str, list]) -> dict[str, list]:
        return tokenizer(batch["text"], truncation=True, max_length=max_length)

    return texts.map(encode, batched=True, remove_columns=["text"], desc="Tokenizing")


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """Returns the share of rows whose most likely class is the label."""
    return {"accuracy": float(np.mean(prediction.predictions.argmax(-1) == prediction.label_ids))}


def main() -> None:
    label_args, model_args, data_args, training_args = train_clm.parse_arguments(
        sys.argv[1:], (LabelArguments, *train_clm.ARGUMENTS)
    )
    train_clm.set_seed(training_args.seed)
    cache = Path(training_args.output_dir) / "cache"
    with told_once(), training_args.main_process_first(desc="tokenizer and rows"):
        texts = load_labelled(
            data_args.dataset_name,
            data_args.dataset_config_name,
            data_args.text_column,
            label_args.label_column,
            data_args.validation_split_percentage,
            training_args.data_seed or training_args.seed,
            label_args.classes,
        )
        tokenizer = train_clm.get_tokenizer(model_args, texts, "text", cache)
        rows = tokenized(texts, tokenizer, data_args.max_length)
    trainer = GalvatronTrainer(
        model=get_model(model_args, tokenizer, texts["train"].features["label"].names),
        args=training_args,
        train_dataset=rows["train"],
        eval_dataset=rows["validation"],
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer, pad_to_multiple_of=8),
        compute_metrics=accuracy,
    )
    train_clm.train_and_save(trainer, evaluates=True)


if __name__ == "__main__":
    main()
