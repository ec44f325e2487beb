# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Logits, metrics and losses of rows that no rank holds whole: those of plain Trainer at all tokens of documents."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from equivalence import single_stage
from galvatron_hf.plan import LayerStrategy, ParallelPlan, VocabularyStrategy
from galvatron_hf.plan.deal import PADDING, Deal, Piece
from galvatron_hf.plan.dealing import deal_in_rows
from galvatron_hf.trainer.data.step_packer import StepPacker
from oracle import VOCABULARY, Case, Rows, check_cases
from plans import pipelined, uniform
from test_heads import TOKEN
from tiny_configurations import tiny_model
from tiny_models import EXPERT_FAMILIES


S, V = LayerStrategy, VocabularyStrategy
DYNAMIC = dict(packing="dynamic", max_tokens_per_rank=24)
LONG = dict(shortest=3, longest=60)


class PackedRows(Dataset):
    """Holds rows of several documents, which position ids separate."""

    def __init__(self, rows: int, seed: int):
        draw = torch.Generator().manual_seed(seed)
        self.rows = []
        for _ in range(rows):
            lengths = [40, *torch.randint(2, 9, (3,), generator=draw).tolist()]
            lengths.append(70 - sum(lengths))
            ids = torch.randint(4, VOCABULARY, (70,), generator=draw)
            positions = torch.cat([torch.arange(length) for length in lengths])
            self.rows.append(dict(input_ids=ids, labels=ids.masked_fill(positions == 0, -100), position_ids=positions))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.rows[index]


def stack(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def predict(rows: Callable[[], Dataset]):
    """Returns a function that predicts rows, and gives zeros at positions of padding."""

    def after(trainer) -> dict[str, Any]:
        data = rows()
        found = trainer.predict(data)._asdict()
        predictions = found["predictions"].copy()
        for row, values in zip((data[index]["input_ids"] for index in range(len(data))), predictions, strict=True):
            values[len(row) :] = 0.0
        return found | dict(predictions=predictions)

    return after


def at_targets(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Returns the most likely token at each position with a label."""
    return torch.where(labels == -100, 0, logits.argmax(-1))


def accuracy(prediction) -> dict[str, float]:
    targets, found = prediction.label_ids[:, 1:], prediction.predictions[:, :-1]
    real = targets != -100
    return {"accuracy": float((found == targets)[real].mean()), "sum": float(np.sum(found[real]))}


@contextlib.contextmanager
def in_parts(most: int | None = None) -> Iterator[None]:
    """Raises an error for batches whose rows are computed whole, and for packs of more than `most` tokens."""
    pack = StepPacker.pack_for_logits

    def checked(packer: StepPacker, batch: dict[str, Any]):
        found = pack(packer, batch)
        if found is None:
            raise RuntimeError("Rows are computed whole.")
        packs = np.concatenate([np.diff(part["documents"].cuts) for part in found.micro_batches])
        if most is not None and packs.max() > most:
            raise RuntimeError(f"A pack has {packs.max()} tokens.")
        return found

    with mock.patch.object(StepPacker, "pack_for_logits", checked):
        yield


def case(plan: ParallelPlan, rows: Callable[[], Dataset] = lambda: Rows(11, seed=3, **LONG), **more: Any) -> Case:
    own = more.pop("own_options", DYNAMIC)
    most = own.get("max_tokens_per_rank")
    defaults = dict(train=None, after=predict(rows), fault=lambda: in_parts(most))
    return Case(plan=plan, own_options=own, **(defaults | more))


MIXED = (S(), S(tensor=2, sharding="zero2"), S(tensor=2, megatron_sp=True), S(shard_degree=2))
METRICS = dict(
    compute_metrics=lambda: accuracy,
    preprocess_logits_for_metrics=lambda: at_targets,
    eval_dataset=lambda: Rows(13, seed=5, **LONG),
)
CASES = {
    "zero3": case(uniform(4)),
    "head over the vocabulary": case(single_stage(MIXED, 4, embedding=V(tensor=2), head=V(tensor=4))),
    "context 4, 2, 1": case(
        single_stage((S(context=4), S(context=2), S(tensor=2), S(context=4)), 4),
        own_options=dict(max_tokens_per_rank=32),
    ),
    "pipeline": case(pipelined([(0, 1), (2, 3)], (S(), S(context=2)) * 2), own_options=dict(max_tokens_per_rank=64)),
    "groups in a pipeline": case(
        pipelined([(0, 1), (2, 3)], (S(),) * 4), own_options=DYNAMIC | dict(max_tokens_per_rank=48)
    ),
    "metrics": case(uniform(4), trainer=METRICS, train=lambda: Rows(16), after=lambda one: one.evaluate()),
    "without labels": case(uniform(4), after=predict(lambda: Rows(7, seed=4, labels=False, **LONG))),
    "several documents in a row": case(
        uniform(4), after=predict(lambda: PackedRows(6, seed=2)), trainer=dict(data_collator=lambda: stack)
    ),
    "loss of routers": case(
        uniform(4, expert=2),
        build=lambda: EXPERT_FAMILIES["mixtral"].build(output_router_logits=True, router_aux_loss_coef=5.0),
        after=lambda one: one.predict(Rows(9, seed=3, **LONG), ignore_keys=["aux_loss", "router_logits", "logits"]),
    ),
    "soft-caps and a scale": case(uniform(4), family="gemma2"),
}
FAST = ("head over the vocabulary", "context 4, 2, 1", "groups in a pipeline", "metrics", "several documents in a row")


class LeftPadded(Rows):
    """Holds rows that are padded on the left, with a target at each token; padding predicts the first."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = self.rows[index]
        missing = 60 - len(ids)
        mask = (torch.arange(60) >= missing).long()
        labels = torch.nn.functional.pad(ids, (missing, 0), value=-100)
        return {
            "input_ids": torch.nn.functional.pad(ids, (missing, 0), value=3),
            "labels": labels,
            "attention_mask": mask,
        }


def loss_and_accuracy(trainer) -> dict[str, Any]:
    return {name: value for name, value in trainer.evaluate().items() if name in ("eval_loss", "eval_rows")}


WHOLE = {
    # The loss counts a target at a position that is no token of a document.
    "left padding": Case(
        plan=uniform(2),
        train=None,
        own_options=DYNAMIC,
        trainer=dict(
            data_collator=lambda: stack,
            eval_dataset=lambda: LeftPadded(5, seed=2, **LONG),
            compute_metrics=lambda: lambda prediction: {"rows": len(prediction.predictions)},
        ),
        options=dict(prediction_loss_only=False),
        after=loss_and_accuracy,
    ),
    "a head of its own": Case(
        plan=uniform(2, context=2),
        build=lambda: tiny_model("bert", task=TOKEN),
        train=None,
        own_options=dict(packing="static"),
        after=lambda one: one.predict(small_rows()).predictions,
    ),
}


def small_rows() -> list[dict[str, torch.Tensor]]:
    return [{"input_ids": (torch.arange(20) * (3 + row)) % 50 + 5} for row in range(6)]


def test_rows_that_are_computed_whole():
    """Rows of whose targets some are at no token of a document are computed whole, and so are those of other heads."""
    check_cases(WHOLE, 2)


@pytest.mark.slow
@pytest.mark.parametrize("fast", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_logits_are_those_of_one_process(fast):
    check_cases({name: one for name, one in CASES.items() if (name in FAST) is fast})


def test_rows_of_a_deal():
    """Documents of one micro-batch lie in the batch's rows, and padding elsewhere."""
    pieces = (Piece(0, 0, 2, 0), Piece(1, 0, 3, 2), Piece(0, 2, 5, 5), Piece(2, 0, 1, 8))
    deal = Deal(pieces=pieces, cuts=(0, 5, 9), rows=(2, 0, PADDING), names=(3, 0, PADDING))
    rows = deal_in_rows(deal, columns=[1, 0, 0, 2], rows=4, length=7)
    places = np.full(4 * 7, PADDING)
    for piece in rows.pieces:
        name = rows.names[piece.document]
        places[piece.at : piece.end] = PADDING if name == PADDING else 10 * name + np.arange(piece.start, piece.stop)
    assert places.reshape(4, 7).tolist() == [
        [-1, 0, 1, 2, -1, -1, -1],
        [-1] * 7,
        [-1, -1, 30, 31, 32, 33, 34],
        [-1] * 7,
    ]
    assert rows.cuts == (0, 7, 14, 21, 28)
