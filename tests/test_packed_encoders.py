# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Packed documents of families whose ends run on whole rows and whose layers are cut, against one process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import DataCollatorForTokenClassification, PreTrainedModel
from transformers.data.data_collator import DataCollatorForLanguageModeling

import oracle
from equivalence import reference
from galvatron_hf.data.packing import NotPackable, limit_lengths, pack, unpad
from galvatron_hf.data.placement import Placement
from galvatron_hf.models.families import adapter_for
from galvatron_hf.models.losses import SAME_POSITION
from galvatron_hf.models.packing import Packing
from galvatron_hf.parallel import model_runner
from galvatron_hf.parallel.layers.parallel_layer import ParallelLayer
from galvatron_hf.trainer.data.packing_rules import is_padding_collator
from packing_runs import arrow, tokenizer
from test_cut_rows import PLANS
from test_heads import ANSWER, MASKED, SEQUENCE, TOKEN
from test_packed_rows import check_cases, long_tailed
from tiny_configurations import LABELS, tiny_model


def batch_of(model: PreTrainedModel, task: str, types: bool = False) -> dict[str, torch.Tensor]:
    """Returns rows padded on the right, of which some tokens have a target."""
    batch = long_tailed()
    batch["input_ids"][batch["attention_mask"] == 0] = model.config.pad_token_id
    batch["input_ids"][1, 0] = 2  # a special token
    if task == TOKEN:
        batch["labels"] = torch.where(batch["labels"] >= 0, batch["labels"] % LABELS, -100)
    if types:
        batch["token_type_ids"] = (batch["input_ids"] % 2) * batch["attention_mask"]
    return batch


def case_of(model_type: str, task: str, plan: str, types: bool = False, **changes: Any):
    model = tiny_model(model_type, task=task, **changes)
    adapter = adapter_for(model)
    packing = adapter.packing(model)
    assert adapter.stacks[0].cut and packing.obstacle is None, packing.obstacle
    return reference(model, batch_of(model, task, types)), PLANS[plan]


@pytest.mark.slow
def test_documents_of_encoders():
    cases = {
        "two types of tokens": case_of("bert", MASKED, "mixed", types=True),
        "positions from the padding token on": case_of("roberta", MASKED, "1f1b"),
        "windows": case_of("modernbert", TOKEN, "four"),
    }
    check_cases(4, cases)


@pytest.mark.slow
def test_documents_of_more_families():
    cases = {
        "distilbert": case_of("distilbert", TOKEN, "interleaved"),
        "norm inside a region": case_of("roberta-prelayernorm", MASKED, "zero_bubble"),
        "electra": case_of("electra", MASKED, "interleaved", types=True),
        "modernbert": case_of("modernbert", MASKED, "mixed"),
        "camembert": case_of("camembert", TOKEN, "four"),
        "llama": case_of("llama", TOKEN, "mixed"),
        "gpt2": case_of("gpt2", TOKEN, "1f1b"),
        "gemma2": case_of("gemma2", TOKEN, "four"),
        "nanochat": case_of("nanochat", "causal-lm", "mixed"),
        "eager": case_of("bert", TOKEN, "mixed", attn_implementation="eager"),
    }
    check_cases(4, cases)


PACKED = model_runner.ModelRunner._packed


def counting_on(runner: model_runner.ModelRunner, *args: Any, **given: Any):
    """Counts the positions of a packed row from its first."""
    stream = PACKED(runner, *args, **given)
    return replace(stream, position_ids=torch.arange(stream.length)[None])


def own_packs(block: ParallelLayer, batch, tensor: torch.Tensor) -> torch.Tensor:
    """Takes the positions of the rank's own packs for those of all packs."""
    missing = block.stream(batch).length - tensor.shape[1]
    return torch.cat([tensor, tensor[:, :1].expand(-1, missing, *tensor.shape[2:])], dim=1)


ERRORS = {
    "positions of other packs": (ParallelLayer, "_of_attended_rows", own_packs, ("modernbert", TOKEN, "mixed")),
    "positions that count on": (model_runner.ModelRunner, "_packed", counting_on, ("bert", MASKED, "four")),
}


@pytest.mark.parametrize("error", ERRORS)
def test_an_error_of_packing_is_seen(error):
    owner, name, wrong, case = ERRORS[error]
    found = case_of(*case)
    with patch.object(owner, name, wrong), pytest.raises(AssertionError, match="loss|gradient|grad_norm"):
        check_cases(4, {error: found})


def test_what_documents_take_with_them():
    """Types of tokens follow their tokens, and a document that is cut keeps the target at the cut."""
    packing = Packing(loss=SAME_POSITION, others=("token_type_ids",), first_position=4, uncounted=3)
    batch = {
        "input_ids": torch.tensor([[5, 6, 7, 8, 9], [5, 6, 3, 3, 3]]),
        "attention_mask": torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]]),
        "token_type_ids": torch.tensor([[0, 0, 1, 1, 1], [0, 1, 0, 0, 0]]),
        "labels": torch.tensor([[-100, 1, -100, 2, 3], [4, -100, -100, -100, -100]]),
    }
    sequences = limit_lengths(unpad(batch, packing), 4, "split", packing)
    (part,) = pack(sequences, Placement((((0, 1), (2,)),)), 4, 3, packing)
    assert part.pop("documents").lengths == [1, 4, 3, 2, 2]
    assert {name: value[0].tolist() for name, value in part.items()} == {
        "input_ids": [9, 5, 6, 7, 8, 3, 3, 3, 5, 6, 3, 3],
        "position_ids": [4, 4, 5, 6, 7, 0, 0, 0, 4, 5, 0, 0],
        "labels": [3, -100, 1, -100, 2, -100, -100, -100, 4, -100, -100, -100],
        "token_type_ids": [1, 0, 0, 1, 1, 0, 0, 0, 0, 1, 0, 0],
    }


def test_a_padding_token_inside_a_document_is_refused_if_positions_leave_it_out():
    packing = Packing(loss=SAME_POSITION, first_position=4, uncounted=3)
    batch = {"input_ids": torch.tensor([[5, 3, 7]]), "labels": torch.tensor([[1, 1, 1]])}
    with pytest.raises(NotPackable, match="a row has the token 3, which this family counts no position for"):
        unpad(batch, packing)
    assert unpad(batch, Packing(loss=SAME_POSITION)).lengths.tolist() == [3]


def test_positions_that_start_again_begin_a_document_in_causal_models_alone():
    batch = {
        "input_ids": torch.arange(5, 11)[None],
        "labels": torch.arange(6)[None],
        "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]]),
    }
    lengths = {}
    for name in ("bert", "llama"):
        model = tiny_model(name, task=TOKEN)
        lengths[name] = unpad(batch, adapter_for(model).packing(model)).lengths.tolist()
    assert lengths == {"bert": [6], "llama": [3, 3]}


OBSTACLES = {
    ("bert", SEQUENCE): "computes a loss of rows, not of tokens",
    ("bert", ANSWER): "computes a loss of rows, not of tokens",
    ("vit", "image-classification"): "computes a loss of rows, not of tokens",
    ("deberta-v2", TOKEN): "runs its layers by its own forward, which knows no documents",
}


@pytest.mark.parametrize("case", OBSTACLES, ids=str)
def test_what_cannot_be_packed_says_why(case):
    model_type, task = case
    model = tiny_model(model_type, task=task)
    assert adapter_for(model).packing(model).obstacle == OBSTACLES[case]


def test_collators_that_mask_tokens_only_pad():
    words = tokenizer()
    words.mask_token = "w1"
    assert is_padding_collator(DataCollatorForLanguageModeling(words, mlm=True))
    assert is_padding_collator(DataCollatorForTokenClassification(words))


def masking():
    words = tokenizer()
    words.mask_token = "w2"
    return DataCollatorForLanguageModeling(words, mlm=True, mlm_probability=0.4)


def tokens(count: int, **options: Any):
    """Returns rows of several lengths, whose labels the collator makes."""
    return arrow(count, **options).remove_columns("labels")


@pytest.mark.slow
def test_trainer_packs_masked_rows():
    """Losses, updates and evaluation of a masked language model are those of plain Trainer on padded rows."""
    rows = dict(shortest=1, longest=40)
    options = dict(eval_strategy="steps", eval_steps=2, gradient_accumulation_steps=1, per_device_train_batch_size=2)
    oracle.check_cases(
        {
            "masked": oracle.Case(
                plan=PLANS["mixed"],
                build=lambda: tiny_model("roberta", task=MASKED),
                train=lambda: tokens(27, **rows),
                trainer=dict(data_collator=masking, eval_dataset=lambda: tokens(10, seed=2, **rows)),
                options=options,
                own_options=dict(packing="static"),
            )
        }
    )
