# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""
Trains a causal language model on rows that one rank does not hold: several ranks share the tokens of a long document.

A new Llama of 0.9M parameters on whole files of the standard library, 4 CPU ranks that hold 1,024 tokens each:

    OMP_NUM_THREADS=1 accelerate launch --config_file recipes/accelerate/cpu4.yaml recipes/long_context.py \\
        recipes/long_context.yaml --output_dir output/long

The same four ranks for every document, instead of groups for each micro-batch (`packing: dynamic` of the file):

    ... recipes/long_context.py recipes/long_context.yaml --parallel_plan cp4+zero3 --output_dir output/long

A model of the Hub on 8 GPUs under the fastest plan that a search finds:

    accelerate launch --config_file recipes/accelerate/1x8.yaml recipes/long_context.py \\
        --model_name_or_path meta-llama/Llama-3.1-8B --dataset_name books.jsonl --max_length 131072 --bf16 \\
        --learning_rate 1e-5 --output_dir output/long

Arguments are those of train_clm.py; `packing` is "dynamic" if it is not given. A rank holds `max_tokens_per_rank`
tokens; with a searched plan it need not be given.
"""

import sys
from dataclasses import dataclass, field

import numpy as np
from datasets import Dataset
from transformers import AutoConfig, PreTrainedModel

import train_clm
from galvatron_hf import GalvatronTrainingArguments
from galvatron_hf.data.lengths import sequence_lengths
from galvatron_hf.trainer.arguments import PACKING_MODES


@dataclass
class LongContextArguments(GalvatronTrainingArguments):
    """Arguments of the Trainer, under which ranks share documents unless `packing` says otherwise."""

    packing: str = field(
        default="dynamic",
        metadata={
            "help": 'As in GalvatronTrainingArguments, and "dynamic" by default: ranks share long documents, in '
            "groups chosen for each micro-batch. In a plan with context, such as cp4+zero3, the same ranks always do.",
            "choices": list(PACKING_MODES),
        },
    )


def check_positions(model: PreTrainedModel | str, max_length: int, overrides: dict | None) -> None:
    """Raises ValueError if rows are longer than the model's positions."""
    config = (
        AutoConfig.from_pretrained(model, **(overrides or {})) if isinstance(model, str) else model.config
    ).get_text_config()
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and max_length > positions:
        raise ValueError(
            f"max_length={max_length} is above the {positions} positions of the model; shorten the rows, or set "
            "max_position_embeddings, and the scaling of rotary embeddings, in config_overrides."
        )


def describe_lengths(rows: Dataset, limit: int | None) -> str:
    """Returns a sentence about the lengths of rows, and how many are above the `limit` of tokens of a rank."""
    lengths = sequence_lengths(rows)
    text = f"{len(lengths):,} rows of {np.median(lengths):,.0f} tokens in the median and {lengths.max():,} at most"
    if limit is None:
        return f"{text}."
    longer = lengths[lengths > limit]
    share = longer.sum() / lengths.sum()
    return f"{text}; {len(longer):,} of them, with {share:.0%} of the tokens, exceed the {limit:,} tokens of a rank."


def main() -> None:
    model_args, data_args, training_args = train_clm.parse_arguments(
        sys.argv[1:], (*train_clm.ARGUMENTS[:-1], LongContextArguments)
    )
    train_clm.start(model_args, training_args)
    tokenizer, rows = train_clm.prepare(model_args, data_args, training_args)
    model = train_clm.get_model(model_args, tokenizer)
    check_positions(model, data_args.max_length, model_args.config_overrides)
    if training_args.process_index == 0:
        print(describe_lengths(rows["train"], training_args.max_tokens_per_rank), flush=True)
    train_clm.train(model, tokenizer, rows, training_args)


if __name__ == "__main__":
    main()
