# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""
Trains a causal language model on preferences (DPO), by LoRA adapters or whole, with TRL's DPOTrainer under a plan.

The model of `make quickstart` learns which line documents a function of the standard library, 4 CPU ranks:

    OMP_NUM_THREADS=1 accelerate launch --config_file recipes/accelerate/cpu4.yaml recipes/dpo.py recipes/dpo.yaml \\
        --model_name_or_path output/quickstart --output_dir output/dpo

A model of the Hub on 8 GPUs:

    accelerate launch --config_file recipes/accelerate/1x8.yaml recipes/dpo.py \\
        --model_name_or_path Qwen/Qwen3-8B --dataset_name trl-lib/ultrafeedback_binarized --parallel_plan zero3 \\
        --bf16 --max_length 2048 --learning_rate 5e-6 --output_dir output/preferred

Rows have a better and a worse answer, {"prompt": ..., "chosen": ..., "rejected": ...}, as texts or lists of messages.
Arguments are those of sft.py but for its column, and every field of TRL's DPOConfig. With adapters the reference is
the model without them, under the plan. `--lora_rank 0` trains all weights: every rank then has a whole copy of the
model as the reference, and computes the reference of the whole batch with it. Needs
`pip install peft trl -c constraints.txt`.
"""

import sys
from dataclasses import dataclass

from transformers import set_seed
from trl import DPOConfig, DPOTrainer

import sft
import train_clm
from data.preferences import load_preferences
from galvatron_hf import GalvatronMixin, GalvatronTrainingArguments
from galvatron_hf.trainer.refusals import told_once


@dataclass
class DPOArguments(DPOConfig, GalvatronTrainingArguments):
    """The arguments of TRL's trainer, and those of a plan."""


class GalvatronDPOTrainer(GalvatronMixin, DPOTrainer):
    """TRL's trainer under a plan."""


def main() -> None:
    args, training_args = train_clm.parse_arguments(sys.argv[1:], (sft.AdaptedModelArguments, DPOArguments))
    set_seed(training_args.seed)
    with told_once(), training_args.main_process_first(desc="preferences"):
        preferences = load_preferences(
            args.dataset_name,
            args.dataset_config_name,
            args.validation_split_percentage,
            training_args.data_seed or training_args.seed,
        )
    rows = sft.limited(preferences, args)
    trainer = GalvatronDPOTrainer(
        model=sft.get_model(args, training_args),
        args=training_args,
        train_dataset=rows["train"],
        eval_dataset=rows["validation"],
        processing_class=sft.get_tokenizer(args.model_name_or_path),
        peft_config=sft.adapters(args),
    )
    train_clm.train_and_save(trainer, evaluates=True)


if __name__ == "__main__":
    main()
