# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""
Fine-tunes a causal language model on conversations, by LoRA adapters or whole, with TRL's SFTTrainer under a plan.

The model of `make quickstart` learns to document functions of the standard library, 4 CPU ranks:

    OMP_NUM_THREADS=1 accelerate launch --config_file recipes/accelerate/cpu4.yaml recipes/sft.py recipes/sft.yaml \\
        --model_name_or_path output/quickstart --output_dir output/sft

A model of the Hub on 8 GPUs, with conversations in a JSON-lines file, {"messages": [{"role": ..., "content": ...}]}:

    accelerate launch --multi_gpu --num_machines 1 --num_processes 8 --mixed_precision no --dynamo_backend no \\
        recipes/sft.py --model_name_or_path Qwen/Qwen3-8B --dataset_name chats.jsonl --parallel_plan auto --bf16 \\
        --max_length 4096 --assistant_only_loss --learning_rate 1e-4 --output_dir output/chat

Arguments are those below and every field of TRL's SFTConfig. `--lora_rank 0` trains all weights. Adapters are saved in
PEFT's format. Needs `pip install peft trl -c constraints.txt`.
"""

import sys
from dataclasses import dataclass, field
from typing import Literal

from datasets import DatasetDict
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, set_seed
from trl import SFTConfig, SFTTrainer

import train_clm
from data.chats import load_chats
from galvatron_hf import GalvatronMixin, GalvatronTrainingArguments
from galvatron_hf.trainer.refusals import told_once


# For tokenizers without one. TRL asks the marks of a generation which tokens the assistant has written.
CHAT_TEMPLATE = """\
{%- for message in messages %}
    {{- '### ' + message['role'] + '\\n' }}
    {%- if message['role'] == 'assistant' %}
        {%- generation %}{{- message['content'] + eos_token }}{%- endgeneration %}
    {%- else %}
        {{- message['content'] + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '### assistant\\n' }}{%- endif %}"""


@dataclass
class AdaptedModelArguments:
    """The model, its adapters, and the size of the dataset."""

    model_name_or_path: str = field(metadata={"help": "A pretrained model, local or on the Hub."})
    dtype: Literal["float32", "bfloat16"] = field(default="float32", metadata={"help": "Type of the weights."})
    dataset_name: str = field(
        default="python-stdlib",
        metadata={"help": "python-stdlib, a json, jsonl or parquet file, or a dataset on the Hub."},
    )
    dataset_config_name: str | None = field(default=None, metadata={"help": "Configuration of a Hub dataset."})
    validation_split_percentage: float = field(
        default=2.0, metadata={"help": "Share set aside if the dataset has no validation split."}
    )
    max_train_rows: int | None = field(default=None, metadata={"help": "Largest number of rows to train."})
    max_eval_rows: int | None = field(default=None, metadata={"help": "Largest number of rows to evaluate."})
    lora_rank: int = field(default=16, metadata={"help": "Rank of the adapters; 0 trains all weights."})
    lora_alpha: int = field(default=32, metadata={"help": "Scale of the adapters, times their rank."})
    lora_dropout: float = field(default=0.0, metadata={"help": "Dropout of the adapters' inputs."})
    lora_target_modules: str = field(
        default="all-linear", metadata={"help": "Names of modules, with commas between them, or all-linear."}
    )


@dataclass
class ChatArguments(AdaptedModelArguments):
    """These, and where the conversations are."""

    messages_column: str = field(default="messages", metadata={"help": "The column with the conversations."})


@dataclass
class SFTArguments(SFTConfig, GalvatronTrainingArguments):
    """The arguments of TRL's trainer, and those of a plan. `packing` is TRL's."""


class GalvatronSFTTrainer(GalvatronMixin, SFTTrainer):
    """TRL's trainer under a plan."""


def get_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Returns a model's tokenizer, with a template for conversations and a token to pad with."""
    tokenizer = AutoTokenizer.from_pretrained(name)
    if tokenizer.chat_template is None:
        tokenizer.chat_template = CHAT_TEMPLATE
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.unk_token or tokenizer.eos_token
    return tokenizer


def get_model(args: AdaptedModelArguments, training_args: SFTConfig) -> PreTrainedModel | str:
    """Returns the model, or without adapters its name: each rank then reads only its own weights."""
    options = {"dtype": args.dtype} | (training_args.model_init_kwargs or {})
    if args.lora_rank == 0:
        training_args.model_init_kwargs = options
        return args.model_name_or_path
    training_args.model_init_kwargs = None
    return AutoModelForCausalLM.from_pretrained(args.model_name_or_path, **options)


def adapters(args: AdaptedModelArguments) -> LoraConfig | None:
    """Returns the configuration of the adapters; None if all weights are trained."""
    if args.lora_rank == 0:
        return None
    names = args.lora_target_modules.split(",")
    return LoraConfig(
        r=args.lora_rank,
        lora_alpha=args.lora_alpha,
        lora_dropout=args.lora_dropout,
        target_modules=names[0] if names == ["all-linear"] else names,
        task_type="CAUSAL_LM",
    )


def limited(rows: DatasetDict, args: AdaptedModelArguments) -> DatasetDict:
    """Returns the first rows to train and to evaluate, as many as the arguments allow."""
    for split, limit in (("train", args.max_train_rows), ("validation", args.max_eval_rows)):
        if limit is not None:
            rows[split] = rows[split].select(range(min(limit, len(rows[split]))))
    return rows


def get_chats(args: ChatArguments, seed: int) -> DatasetDict:
    """Returns the conversations to train and to evaluate."""
    chats = load_chats(
        args.dataset_name, args.dataset_config_name, args.messages_column, args.validation_split_percentage, seed
    )
    return limited(chats, args)


def main() -> None:
    chat_args, training_args = train_clm.parse_arguments(sys.argv[1:], (ChatArguments, SFTArguments))
    set_seed(training_args.seed)
    with told_once(), training_args.main_process_first(desc="conversations"):
        chats = get_chats(chat_args, training_args.data_seed or training_args.seed)
    trainer = GalvatronSFTTrainer(
        model=get_model(chat_args, training_args),
        args=training_args,
        train_dataset=chats["train"],
        eval_dataset=chats["validation"],
        processing_class=get_tokenizer(chat_args.model_name_or_path),
        peft_config=adapters(chat_args),
    )
    train_clm.train_and_save(trainer, evaluates=True)


if __name__ == "__main__":
    main()
