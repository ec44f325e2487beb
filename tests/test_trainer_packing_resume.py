# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Packing in runs that resume, that read ahead, and that train and evaluate more than once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import Trainer

from galvatron_hf import GalvatronTrainer
from galvatron_hf.trainer.checkpoint.random_state import random_state
from galvatron_hf.trainer.data import step_packer
from galvatron_hf.trainer.data.sequence_cost import measure_cost
from galvatron_hf.trainer.data.step_packer import StepPacker
from oracle import Stream
from packing_runs import (
    LONG_TAIL,
    MIXED,
    REPLICATE,
    STATIC,
    arrow,
    plain_run,
    rows,
    runs_of,
)
from trainer_runs import Run, assert_equal_weights, assert_same_steps, on_ranks, run, trainer


def checkpointed(folder: Path, plan, resumed_plan, first: dict[str, Any], then: dict[str, Any]) -> Run:
    """Three steps of the four of an epoch, and three more after a checkpoint."""
    saving = dict(save_strategy="steps", save_steps=3)
    data = dict(train_dataset=lambda: rows(27))

    def work() -> Run:
        made = {name: make() for name, make in data.items()}
        run(folder / "whole", plan, options=saving | first | dict(max_steps=3), **made)
        return run(folder / "then", resumed_plan, options=then, resume=folder / "whole" / "checkpoint-3", **made)

    return on_ranks(work)[0]


@pytest.mark.parametrize(
    "first, then",
    [(STATIC, dict(packing="none")), pytest.param(dict(packing="none"), STATIC, marks=pytest.mark.slow)],
)
def test_resuming_under_the_other_packing_mode(tmp_path, first, then):
    constant = dict(lr_scheduler_type="constant")
    wanted = plain_run(tmp_path / "plain", train_dataset=lambda: rows(27), options=constant)
    seen = checkpointed(tmp_path, MIXED, REPLICATE, first | constant, then | constant)
    assert_same_steps(seen, wanted, after=3)


def test_a_resumed_run_packs_as_the_run_before(tmp_path):
    """With the costs that were measured then: its weights are the same bit for bit."""
    constant = dict(lr_scheduler_type="constant") | STATIC

    def work() -> tuple[Run, Run, dict]:
        saving = dict(save_strategy="steps", save_steps=3)
        whole = run(tmp_path / "whole", MIXED, options=saving | constant, train_dataset=rows(27))
        checkpoint = tmp_path / "whole" / "checkpoint-3"
        seen = run(tmp_path / "then", MIXED, options=constant, resume=checkpoint, train_dataset=rows(27))
        return whole, seen, json.loads((checkpoint / step_packer.COST_FILE).read_text())

    whole, seen, cost = on_ranks(work)[0]
    assert_equal_weights(seen.weights, whole.weights)
    assert cost["measured"] is True and cost["per_token"] + cost["per_token_squared"] > 0


def test_documents_are_timed_anew_under_another_plan_alone(tmp_path):
    def work() -> dict[str, int]:
        timed = {}
        options = dict(lr_scheduler_type="constant", save_strategy="steps", save_steps=3) | STATIC
        for name, plan in {"whole": MIXED, "then": MIXED, "other": REPLICATE}.items():
            resume = None if name == "whole" else tmp_path / "whole" / "checkpoint-3"
            with mock.patch.object(step_packer, "measure_cost", side_effect=measure_cost) as measured:
                run(tmp_path / name, plan, options=options, resume=resume, train_dataset=rows(27))
            timed[name] = measured.call_count
        return timed

    assert on_ranks(work)[0] == {"whole": 1, "then": 0, "other": 1}


def test_another_dataset_and_evaluations_before_and_after(tmp_path):
    """Rank 0 alone knows how long rows are: all ranks compute its placement."""

    def work(trainer_class=GalvatronTrainer) -> list[float]:
        short, long = rows(24, longest=6), rows(24, shortest=20, seed=3)
        once = dict(max_steps=2, gradient_accumulation_steps=1, prediction_loss_only=True)
        once |= STATIC if trainer_class is GalvatronTrainer else {}
        options = dict(train_dataset=arrow(24, longest=6), eval_dataset=long, trainer_class=trainer_class)
        made = trainer(tmp_path, MIXED, options=once, **options)
        losses = [made.evaluate()["eval_loss"]]
        made.train()
        made.train_dataset = short
        losses.append(made.evaluate()["eval_loss"])
        made.train_dataset = arrow(24, shortest=20, seed=3)
        made.train()
        return [*losses, made.evaluate()["eval_loss"]]

    wanted = work(Trainer)
    for seen in on_ranks(work):
        assert seen == pytest.approx(wanted, rel=1e-5)


class Noisy(Stream):
    """Rows that draw from the global stream as they are read."""

    def __iter__(self):
        for row in super().__iter__():
            torch.rand(3)
            yield row


class NoisyLater(Stream):
    """Draws for its rows from the fourth step on."""

    def __iter__(self):
        for index, row in enumerate(super().__iter__()):
            if index >= 30:
                torch.rand(3)
            yield row


@pytest.mark.parametrize("stream, moved", [(Stream, None), (Noisy, None), (NoisyLater, 2)])
def test_reading_ahead_leaves_the_saved_random_state_alone(tmp_path, stream, moved):
    """Keeps draws for the next step out of the checkpoint of this one; planning ahead ends if reading draws."""

    def work() -> tuple[bool, list]:
        seen: list = []
        original = StepPacker.plan_ahead

        def noted(self, batches, count, step):
            before = random_state()
            original(self, batches, count, step)
            seen.append((before, self.prefetch.state_before_look))

        StepPacker.plan_ahead = noted
        made = trainer(tmp_path, REPLICATE, train_dataset=stream(61, **LONG_TAIL), options=STATIC | dict(max_steps=5))
        made.train()
        StepPacker.plan_ahead = original
        right = all(state == (before if step == moved else None) for step, (before, state) in enumerate(seen))
        return right, [made._components.packer.prefetch, len(seen)]

    right, left = on_ranks(work)[0]
    assert right and left == [None, 5]


class Augmented(torch.utils.data.Dataset):
    """Rows of which one token is drawn anew whenever they are read."""

    def __init__(self):
        self.rows = rows()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = {name: value.clone() for name, value in self.rows[index].items()}
        row["input_ids"][int(torch.randint(len(row["input_ids"]), ()))] = int(torch.randint(4, 90, ()))
        return row


def test_rows_that_draw_are_read_behind_the_evaluation_before_them(tmp_path):
    """An evaluation draws too: whatever is read ahead of it would be other rows than plain Trainer's."""
    # accelerate reads a batch of the loader ahead: both have one in a step.
    options = dict(eval_strategy="steps", eval_steps=1, prediction_loss_only=True, gradient_accumulation_steps=1)
    data = dict(train_dataset=Augmented, eval_dataset=lambda: rows(9, seed=2))
    wanted = plain_run(tmp_path / "plain", options=options, **data)
    assert_same_steps(runs_of(REPLICATE, tmp_path, {"ours": data | dict(options=options | STATIC)})["ours"], wanted)


def test_cut_sequences_are_counted_on_after_a_checkpoint(tmp_path):
    options = STATIC | dict(max_tokens_per_rank=16, long_sequences="truncate", lr_scheduler_type="constant")

    def work() -> list[list[int]]:
        saving = options | dict(save_strategy="steps", save_steps=3)
        whole = run(tmp_path / "whole", REPLICATE, options=saving, train_dataset=rows())
        again = dict(options=options, resume=tmp_path / "whole" / "checkpoint-3", train_dataset=rows())
        seen = run(tmp_path / "then", REPLICATE, **again)
        return [[log["cut_sequences"] for log in one.logs if "loss" in log] for one in (whole, seen)]

    whole, then = on_ranks(work)[0]
    assert then[-3:] == whole[3:] and whole[2] > 0
