# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The corpus and the trainers of long_tail.py: one model, one optimizer, five ways to batch."""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset, DatasetDict, load_from_disk
from transformers import (
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
    PrinterCallback,
    Trainer,
    TrainingArguments,
)

from data.python_stdlib import NAME, load_python_stdlib
from data.text import cached, documents_to_rows, fingerprint, train_tokenizer
from galvatron_hf import GalvatronTrainer, GalvatronTrainingArguments, ParallelPlan
from galvatron_hf.data import context_placement


MODES = ("padded", "again", "grouped", "rebalance", "trl", "ours")
# Plans under which ranks share documents, or under which one rank holds the longest by recompute.
SHARING = ("dynamic", "dynamic_again", "context2", "context4", "split4", "ulysses2", "ulysses4", "recompute")
SAMPLING = {"grouped": "group_by_length", "rebalance": "batch_rebalance"}
VOCABULARY = 4000  # the length of no row, so that a profile tells the head's operators by it


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Documents cut at a number of tokens.

    Attributes:
        cap (`int`): maximum number of tokens.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): tokenizer of the documents.
        documents (`Dataset`): the columns `input_ids` and `length`.
    """

    cap: int
    tokenizer: PreTrainedTokenizerBase
    documents: Dataset


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Settings of all modes.

    Attributes:
        corpus ([`Corpus`]): the documents.
        bf16 (`bool`): whether to compute in bf16.
        ranks, rows (`int`): processes, and documents on each in a step.
        recompute (`bool`): whether every layer is computed again in the backward, but for the modes of `SHARING`.
    tokens (`int`): that a rank holds in a micro-batch in the modes of `SHARING` without recompute.
        layers, hidden (`int`): sizes of the model, whose heads have 32 dimensions.
        folder (`str`): output folder of the trainers.
    """

    corpus: Corpus
    bf16: bool
    ranks: int
    rows: int
    recompute: bool
    layers: int
    hidden: int
    folder: str
    tokens: int = 0


def load_corpora(caps: list[int], cache: str) -> list[Corpus]:
    """Returns the standard library's modules cut at each of `caps`; tokens are cached in `cache`."""

    def make() -> tuple[PreTrainedTokenizerBase, DatasetDict]:
        texts = load_python_stdlib().select_columns("text")
        tokenizer = train_tokenizer(texts["text"], VOCABULARY)
        return tokenizer, documents_to_rows(DatasetDict(train=texts), tokenizer, "text", sys.maxsize, "truncate")

    def save(made: tuple[PreTrainedTokenizerBase, DatasetDict], folder: str) -> None:
        made[0].save_pretrained(os.path.join(folder, "tokenizer"))
        made[1]["train"].save_to_disk(os.path.join(folder, "rows"))

    def load(folder: str) -> tuple[PreTrainedTokenizerBase, Dataset]:
        return AutoTokenizer.from_pretrained(os.path.join(folder, "tokenizer")), load_from_disk(f"{folder}/rows")

    tokenizer, whole = cached(Path(cache) / fingerprint(NAME, sys.version, VOCABULARY), make, save, load)

    def cut(cap: int) -> Dataset:
        return Dataset.from_list(
            [{"input_ids": ids[:cap], "length": min(len(ids), cap)} for ids in whole["input_ids"]]
        )

    return [Corpus(cap=cap, tokenizer=tokenizer, documents=cut(cap)) for cap in caps]


def make_trainer(mode: str, setting: Setting, steps: int) -> tuple[Trainer, list[int]]:
    """Returns a trainer, and the list to which its collator appends the useful tokens of this rank's batches."""
    model, documents = build(setting), setting.corpus.documents
    collator = DataCollatorForLanguageModeling(setting.corpus.tokenizer, mlm=False)
    arguments = common_arguments(setting, steps)
    if mode == "ours":
        recompute = "full" if setting.recompute else "none"
        plan = ParallelPlan.uniform(setting.ranks, setting.layers, sharding="replicate", recompute=recompute)
        args = GalvatronTrainingArguments(**arguments, parallel_plan=plan, packing="static")
        trainer = GalvatronTrainer(model, args, train_dataset=documents, data_collator=collator)
    elif mode in SHARING:
        trainer = sharing_trainer(mode, setting, model, arguments, collator)
    elif mode == "trl":
        documents, collator = pack_as_trl(setting.corpus)
        require_separate_documents(model, collator)
        arguments |= {"per_device_train_batch_size": 1, "remove_unused_columns": False}
        trainer = Trainer(model, TrainingArguments(**arguments), train_dataset=documents, data_collator=collator)
    else:
        if mode in SAMPLING:
            # Trainer removes unused columns before it makes the sampler, which then would count the tokens itself.
            arguments |= {"train_sampling_strategy": SAMPLING[mode], "remove_unused_columns": False}
        trainer = Trainer(model, TrainingArguments(**arguments), train_dataset=documents, data_collator=collator)
    trainer.remove_callback(PrinterCallback)
    return trainer, count_tokens(collator)


def sharing_trainer(
    mode: str, setting: Setting, model: LlamaForCausalLM, arguments: dict[str, Any], collator: Callable
) -> Trainer:
    """Returns a trainer of a mode of `SHARING`. With recompute a rank holds the longest document."""
    strategy: dict[str, Any] = {"sharding": "replicate"}
    tokens, packing = setting.tokens, "dynamic" if mode.startswith("dynamic") else "static"
    if mode == "recompute":
        strategy["recompute"], tokens = "full", setting.corpus.cap
    elif mode.startswith(("context", "split")):
        strategy["context"] = int(mode[-1])
        if mode.startswith("split"):
            context_placement._share_out = shared_by_all
    elif mode.startswith("ulysses"):
        strategy["ulysses"] = int(mode[-1])
        tokens *= strategy["ulysses"]  # of a pack, which its ranks split
    plan = ParallelPlan.uniform(setting.ranks, setting.layers, **strategy)
    arguments |= {"activation_checkpointing": False}
    args = GalvatronTrainingArguments(**arguments, parallel_plan=plan, packing=packing, max_tokens_per_rank=tokens)
    return GalvatronTrainer(model, args, train_dataset=setting.corpus.documents, data_collator=collator)


def shared_by_all(
    members: np.ndarray, lengths: np.ndarray, shares: np.ndarray, context: int, *others: Any
) -> tuple[list[tuple[int, ...]], list[int]]:
    """Has all ranks of a block share each document, short ones too, as context parallelism elsewhere does."""
    return [()] * context, sorted(members.tolist())


def build(setting: Setting) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=setting.hidden,
        intermediate_size=3 * setting.hidden,
        num_hidden_layers=setting.layers,
        num_attention_heads=setting.hidden // 32,
        num_key_value_heads=max(1, setting.hidden // 128),
        max_position_embeddings=setting.corpus.cap,
        pad_token_id=setting.corpus.tokenizer.pad_token_id,
        use_cache=False,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config)


def common_arguments(setting: Setting, steps: int) -> dict[str, Any]:
    return {
        "output_dir": setting.folder,
        "use_cpu": True,
        "bf16": setting.bf16,
        "per_device_train_batch_size": setting.rows,
        "activation_checkpointing": setting.recompute,
        "ddp_find_unused_parameters": False,  # as with recomputation; it costs plain Trainer a little otherwise
        "max_steps": steps,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",  # runs of different lengths take the same steps
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "log_level": "error",
        "ddp_timeout": 86400,
    }


def pack_as_trl(corpus: Corpus) -> tuple[Dataset, Callable]:
    """Returns TRL's best-fit decreasing packing into rows of the cap, and its collator."""
    from trl import pack_dataset
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling as PackedCollator

    rows = pack_dataset(corpus.documents.select_columns("input_ids"), corpus.cap, "bfd")
    return rows, PackedCollator(pad_token_id=corpus.tokenizer.pad_token_id, padding_free=True)


def require_separate_documents(model: LlamaForCausalLM, collator: Callable) -> None:
    """
    Raises:
        RuntimeError: if a document of a packed row changes the outputs of the next one.
    """

    def second_document(first: list[int]) -> torch.Tensor:
        row = {"input_ids": [*first, 20, 21, 22], "seq_lengths": [len(first), 3]}
        with torch.no_grad():
            return model(**collator([row])).logits[0, len(first) :]

    if not torch.equal(second_document([10, 11, 12, 13]), second_document([14, 15, 16, 17])):
        raise RuntimeError("Packed documents see each other, so that TRL's speed would be that of another model.")


def count_tokens(collator: Any) -> list[int]:
    """Makes a collator append the number of tokens of each batch to the returned list."""
    counts: list[int] = []
    collate = collator.torch_call

    def counting(examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        counts.append(sum(len(example["input_ids"]) for example in examples))
        return collate([{name: value for name, value in row.items() if name != "length"} for row in examples])

    collator.torch_call = counting  # of this one, which stays of the class that trainers know
    return counts
