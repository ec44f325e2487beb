# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""
Trains a causal language model, new or pretrained, on any text under a layer-wise parallel plan.

A new 0.9M-parameter Llama on the standard library's source, 4 CPU ranks (what `make quickstart` runs):

    OMP_NUM_THREADS=1 accelerate launch --config_file recipes/accelerate/cpu4.yaml recipes/train_clm.py \\
        recipes/quickstart.yaml --output_dir output/quickstart

A model of the Hub on 8 GPUs:

    accelerate launch --multi_gpu --num_machines 1 --num_processes 8 --mixed_precision no --dynamo_backend no \\
        recipes/train_clm.py --model_name_or_path meta-llama/Llama-3.2-1B \\
        --dataset_name wikitext --dataset_config_name wikitext-103-raw-v1 --max_length 4096 \\
        --parallel_plan recipes/plans/llama-3.2-1b-8gpu.json --bf16 --learning_rate 2e-5 --output_dir output/llama

Arguments may come from a YAML file (the first argument), from the command line (which wins), or from both. Every
field of `TrainingArguments` is one; `--help` lists them.
"""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
import yaml
from datasets import DatasetDict, load_from_disk
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    HfArgumentParser,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProgressCallback,
    set_seed,
)

from data.text import cached, documents_to_rows, fingerprint, load_documents, train_tokenizer
from galvatron_hf import GalvatronTrainer, GalvatronTrainingArguments
from galvatron_hf.trainer.refusals import told_once
from progress import ThroughputCallback


@dataclass
class ModelArguments:
    """Model and tokenizer."""

    model_name_or_path: str | None = field(
        default=None, metadata={"help": "A pretrained model, local or on the Hub. Absent: a new one of `model_type`."}
    )
    model_type: str = field(default="llama", metadata={"help": "Architecture of a new model."})
    config_name: str | None = field(
        default=None,
        metadata={"help": "A configuration of a new model, local or on the Hub, instead of `model_type`."},
    )
    config_overrides: dict | str | None = field(
        default=None,
        metadata={"help": "Fields of the model's configuration as JSON, e.g. '{\"hidden_size\": 256}'."},
    )
    dtype: Literal["float32", "bfloat16", "float16"] = field(
        default="float32",
        metadata={"help": "Type of the master weights. bf16 compute is `--bf16`, and wants float32 here."},
    )
    tokenizer_name: str | None = field(
        default=None, metadata={"help": "A tokenizer. Absent: the pretrained model's, or a new one for a new model."}
    )
    vocab_size: int = field(default=4096, metadata={"help": "Number of tokens of a new tokenizer."})

    def __post_init__(self):
        if self.config_name is not None and self.model_name_or_path is not None:
            raise ValueError("config_name is for a new model, and model_name_or_path names one: give one of them.")
        if isinstance(given := self.config_overrides, str):
            try:
                self.config_overrides = json.loads(given)
            except json.JSONDecodeError as error:
                raise ValueError(f"config_overrides={given!r} is not JSON ({error}): correct it.") from None
        if not isinstance(self.config_overrides, dict | None):
            raise ValueError(f"config_overrides={self.config_overrides!r} has no names: write {{name: value}}.")


@dataclass
class DataArguments:
    """Text and its division into rows."""

    dataset_name: str = field(
        default="python-stdlib",
        metadata={
            "help": "python-stdlib, a folder of text files or of json, jsonl, csv or parquet files, such a file or a "
            "txt file (also .gz), a Hub dataset"
        },
    )
    dataset_config_name: str | None = field(default=None, metadata={"help": "Configuration of a Hub dataset."})
    text_column: str = field(default="text", metadata={"help": "The column that holds the text."})
    validation_split_percentage: float = field(
        default=2.0, metadata={"help": "Share of the documents set aside if the dataset has no validation split."}
    )
    max_documents: int | None = field(
        default=None, metadata={"help": "Largest number of documents, to train and to evaluate together."}
    )
    max_length: int = field(default=1024, metadata={"help": "Longest row, in tokens."})
    overflow: Literal["split", "truncate"] = field(
        default="split", metadata={"help": "Cut a document longer than max_length into rows, or keep its first row."}
    )
    max_train_rows: int | None = field(default=None, metadata={"help": "Largest number of rows to train."})
    max_eval_rows: int | None = field(default=None, metadata={"help": "Largest number of rows to evaluate."})


ARGUMENTS = (ModelArguments, DataArguments, GalvatronTrainingArguments)


def read_arguments(argv: list[str], kinds: tuple[type, ...]) -> tuple:
    """Reads the YAML file if the first argument is one, then the command line; returns arguments of each kind."""
    parser = HfArgumentParser(kinds)
    if argv and argv[0].endswith((".yaml", ".yml")):
        values = _read_yaml(argv[0])
        actions = {action.dest: action for action in parser._actions}
        if unknown := sorted(set(values) - set(actions), key=str):
            raise ValueError(f"{argv[0]} has the unknown arguments {unknown}: remove them or see --help.")
        for name, value in values.items():
            actions[name].required = False  # what the file gives need not be on the command line
            if (choices := actions[name].choices) is None:
                continue
            if value is False and "no" in choices:  # YAML reads a bare no as false
                values[name] = value = "no"
            if value is not None and value not in choices:
                raise ValueError(f"{name} of {argv[0]} is {value!r}: choose one of {list(choices)}.")
        parser.set_defaults(**values)
        argv = argv[1:]
    return parser.parse_args_into_dataclasses(argv, look_for_args_file=False)


def _read_yaml(path: str) -> dict:
    """Reads names and values of a YAML file, which may be empty."""
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", error)
        place = "" if mark is None else f"line {mark.line + 1}: "
        raise ValueError(f"{path} is not YAML ({place}{problem}): correct it.") from None
    if not isinstance(values, dict | None):
        raise ValueError(f"{path} has no arguments: write lines such as max_steps: 100.")
    return values or {}


def parse_arguments(argv: list[str], kinds: tuple[type, ...] = ARGUMENTS) -> tuple:
    """Reads arguments as [`read_arguments`] does. The last kind is that of the Trainer's."""
    *others, training_args = read_arguments(argv, kinds)
    if training_args.include_num_input_tokens_seen == "all":
        # The parser treats this field as a flag; throughput counts useful tokens.
        training_args.include_num_input_tokens_seen = "non_padding"
    return *others, training_args


def get_tokenizer(
    args: ModelArguments, documents: DatasetDict, text_column: str, cache: Path
) -> PreTrainedTokenizerBase:
    """Loads the tokenizer, or trains one on the training documents for a new model."""
    name = args.tokenizer_name or args.model_name_or_path
    if name is None:
        return cached(
            cache / f"tokenizer-{fingerprint(documents, args.vocab_size)}",
            make=lambda: train_tokenizer(documents["train"][text_column], args.vocab_size),
            save=lambda tokenizer, folder: tokenizer.save_pretrained(folder),
            load=AutoTokenizer.from_pretrained,
        )
    tokenizer = AutoTokenizer.from_pretrained(name)
    if tokenizer.pad_token is None:
        # Padding is never a target, but the end of a document is: they need different tokens if possible.
        tokenizer.pad_token = tokenizer.unk_token or tokenizer.eos_token
    return tokenizer


def get_rows(
    args: DataArguments, documents: DatasetDict, tokenizer: PreTrainedTokenizerBase, cache: Path
) -> DatasetDict:
    """Tokenizes and cuts the documents, once for all ranks and later runs."""
    recipe = (args.text_column, args.max_length, args.overflow)
    rows = cached(
        cache / f"rows-{fingerprint(documents, tokenizer, recipe)}",
        make=lambda: documents_to_rows(documents, tokenizer, *recipe),
        save=lambda rows, folder: rows.save_to_disk(folder),
        load=load_from_disk,
    )
    for split, limit in (("train", args.max_train_rows), ("validation", args.max_eval_rows)):
        if limit is not None:
            rows[split] = rows[split].select(range(min(limit, len(rows[split]))))
    return rows


def get_model(args: ModelArguments, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel | str:
    """Returns the pretrained model's name, or a new model, equal on every rank because the seed is set."""
    if args.model_name_or_path is not None:
        return args.model_name_or_path  # each rank then reads only its own weights
    tokens = dict(
        vocab_size=len(tokenizer),
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    values = tokens | dict(args.config_overrides or {})
    if args.config_name is not None:
        config = AutoConfig.from_pretrained(args.config_name, **values)
    else:
        config = AutoConfig.for_model(args.model_type, **values)
    return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, args.dtype))


def empty_model(name: str) -> PreTrainedModel:
    """Returns a model without memory for its weights, from which a plan may be read."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(name))


def prepare(
    model_args: ModelArguments, data_args: DataArguments, training_args: GalvatronTrainingArguments
) -> tuple[PreTrainedTokenizerBase, DatasetDict]:
    """Returns the tokenizer and the rows; rank 0 makes them for all."""
    cache = Path(training_args.output_dir) / "cache"
    with told_once(), training_args.main_process_first(desc="tokenizer and rows"):
        documents = load_documents(
            data_args.dataset_name,
            data_args.dataset_config_name,
            data_args.text_column,
            data_args.validation_split_percentage,
            training_args.data_seed or training_args.seed,
            data_args.max_documents,
        )
        tokenizer = get_tokenizer(model_args, documents, data_args.text_column, cache)
        return tokenizer, get_rows(data_args, documents, tokenizer, cache)


def start(model_args: ModelArguments, training_args: GalvatronTrainingArguments) -> None:
    """Sets the seed, and how the Trainer loads a pretrained model."""
    set_seed(training_args.seed)
    if model_args.model_name_or_path is not None:
        options = {"dtype": model_args.dtype, **(model_args.config_overrides or {})}
        training_args.model_init_kwargs = options | (training_args.model_init_kwargs or {})


def train(
    model: PreTrainedModel | str,
    tokenizer: PreTrainedTokenizerBase,
    rows: DatasetDict,
    training_args: GalvatronTrainingArguments,
) -> None:
    """Trains, saves the model and the metrics, and evaluates if asked to."""
    trainer = GalvatronTrainer(
        model=model,
        args=training_args,
        train_dataset=rows["train"],
        eval_dataset=rows["validation"],
        processing_class=tokenizer,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False, pad_to_multiple_of=8),
    )
    if not training_args.disable_tqdm:
        trainer.remove_callback(ProgressCallback)
        trainer.add_callback(ThroughputCallback)
    train_and_save(trainer, evaluates=training_args.do_eval)


def train_and_save(trainer: GalvatronTrainer, evaluates: bool) -> None:
    """Trains, saves the model, the trainer's state and the metrics, and evaluates last if `evaluates`."""
    result = trainer.train(resume_from_checkpoint=trainer.args.resume_from_checkpoint)
    trainer.save_model()
    trainer.log_metrics("train", result.metrics)
    trainer.save_metrics("train", result.metrics)
    trainer.save_state()
    if evaluates:
        metrics = trainer.evaluate()
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)


def main() -> None:
    model_args, data_args, training_args = parse_arguments(sys.argv[1:])
    start(model_args, training_args)
    tokenizer, rows = prepare(model_args, data_args, training_args)
    train(get_model(model_args, tokenizer), tokenizer, rows, training_args)


if __name__ == "__main__":
    main()
