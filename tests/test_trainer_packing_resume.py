# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Checks packing in runs that resume, that read ahead, and that train and evaluate more than once."""

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
    RANKS,
    REPLICATE,
    STATIC,
    arrow,
    plain_run,
    rows,
    runs_of,
)
from trainer_runs import Run, assert_equal_weights, assert_same_steps, on_ranks, run, trainer


DYNAMIC = dict(packing="dynamic", max_tokens_per_rank=24)  # some rows have more


def checkpointed(folder: Path, plan, resumed_plan, first: dict[str, Any], then: dict[str, Any]) -> Run:
    """Trains three of the four steps of an epoch and saves, then resumes until the second epoch's first step."""
    saving = dict(save_strategy="steps", save_steps=3)
    data = dict(train_dataset=lambda: rows(27))

    def work() -> Run:
        made = {name: make() for name, make in data.items()}
        run(folder / "whole", plan, options=saving | first | dict(max_steps=3), **made)
        return run(folder / "then", resumed_plan, options=then, resume=folder / "whole" / "checkpoint-3", **made)

    return on_ranks(work, RANKS)[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "first, then",
    [
        (STATIC, dict(packing="none")),
        (dict(packing="none"), STATIC),
        (DYNAMIC, STATIC),
        (STATIC, DYNAMIC),
        (DYNAMIC, dict(packing="none")),
    ],
)
def test_resuming_under_the_other_packing_mode(tmp_path, first, then):
    constant = dict(lr_scheduler_type="constant", max_steps=5)
    wanted = plain_run(tmp_path / "plain", train_dataset=lambda: rows(27), options=constant)
    seen = checkpointed(tmp_path, MIXED, REPLICATE, first | constant, then | constant)
    assert_same_steps(seen, wanted, after=3)


@pytest.fixture(scope="module")
def resumed(tmp_path_factory) -> tuple[dict[str, Run], dict[str, int], dict[str, Any]]:
    """Trains, and resumes under the same plan and under another one.

    Returns:
        The runs, how often each timed documents, and the costs in the checkpoint.
    """
    folder = tmp_path_factory.mktemp("resumed")
    checkpoint = folder / "whole" / "checkpoint-3"

    def work() -> tuple[dict[str, Run], dict[str, int], dict[str, Any]]:
        runs, timed = {}, {}
        options = STATIC | dict(lr_scheduler_type="constant", save_strategy="steps", save_steps=3)
        for name, plan, last in (("whole", MIXED, 5), ("then", MIXED, 5), ("other", REPLICATE, 4)):
            more = dict(options=options | dict(max_steps=last), resume=None if name == "whole" else checkpoint)
            with mock.patch.object(step_packer, "measure_cost", side_effect=measure_cost) as measured:
                runs[name] = run(folder / name, plan, train_dataset=rows(27), **more)
            timed[name] = measured.call_count
        return runs, timed, json.loads((checkpoint / step_packer.COST_FILE).read_text())

    return on_ranks(work, RANKS)[0]


def test_a_resumed_run_packs_as_the_run_before(resumed):
    """Resumes with the costs that were measured before: weights are the same bit for bit."""
    runs, _, cost = resumed
    assert_equal_weights(runs["then"].weights, runs["whole"].weights)
    assert cost["measured"] is True and cost["per_token"] + cost["per_token_squared"] > 0


def test_documents_are_timed_anew_under_another_plan_alone(resumed):
    _, timed, _ = resumed
    assert timed == {"whole": 1, "then": 0, "other": 1}


@pytest.mark.slow
def test_another_dataset_and_evaluations_before_and_after(tmp_path):
    """Trains and evaluates on other rows. Rank 0 alone knows their lengths: all ranks compute its placement."""

    def work(trainer_class=GalvatronTrainer) -> list[float]:
        short, long = rows(16, longest=6), rows(16, shortest=20, seed=3)
        once = dict(max_steps=2, gradient_accumulation_steps=1, prediction_loss_only=True)
        once |= STATIC if trainer_class is GalvatronTrainer else {}
        options = dict(train_dataset=arrow(16, longest=6), eval_dataset=long, trainer_class=trainer_class)
        made = trainer(tmp_path, MIXED, options=once, **options)
        losses = [made.evaluate()["eval_loss"]]
        made.train()
        made.train_dataset = short
        losses.append(made.evaluate()["eval_loss"])
        made.train_dataset = arrow(16, shortest=20, seed=3)
        made.train()
        return [*losses, made.evaluate()["eval_loss"]]

    wanted = work(Trainer)
    for seen in on_ranks(work, RANKS):
        assert seen == pytest.approx(wanted, rel=1e-5)


class Noisy(Stream):
    """Draws random numbers from the global stream as rows are read."""

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


@pytest.mark.slow
def test_reading_ahead_leaves_the_saved_random_state_alone(tmp_path):
    """Keeps draws for the next step out of the checkpoint of this one; planning ahead ends if reading draws."""
    moves = {Stream: None, Noisy: None, NoisyLater: 2}  # the step whose reading ahead moves the random state

    def trained(stream: type[Stream], moved: int | None) -> tuple[bool, list]:
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

    found = on_ranks(lambda: {stream.__name__: trained(stream, moved) for stream, moved in moves.items()}, RANKS)[0]
    assert found == {stream.__name__: (True, [None, 5]) for stream in moves}


class Augmented(torch.utils.data.Dataset):
    """Draws one token of a row anew whenever the row is read."""

    def __init__(self):
        self.rows = rows()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = {name: value.clone() for name, value in self.rows[index].items()}
        row["input_ids"][int(torch.randint(len(row["input_ids"]), ()))] = int(torch.randint(4, 90, ()))
        return row


def test_rows_that_draw_are_read_after_the_evaluation_before_them(tmp_path):
    """Evaluates, which draws too, between steps: rows read before it would not be plain Trainer's."""
    # accelerate reads a batch of the loader ahead: both have one in a step.
    options = dict(eval_strategy="steps", eval_steps=1, prediction_loss_only=True, gradient_accumulation_steps=1)
    options |= dict(max_steps=3)
    data = dict(train_dataset=Augmented, eval_dataset=lambda: rows(9, seed=2))
    wanted = plain_run(tmp_path / "plain", options=options, **data)
    assert_same_steps(runs_of(REPLICATE, tmp_path, {"ours": data | dict(options=options | STATIC)})["ours"], wanted)


@pytest.mark.slow
def test_cut_sequences_are_counted_on_after_a_checkpoint(tmp_path):
    options = STATIC | dict(max_tokens_per_rank=16, long_sequences="truncate", lr_scheduler_type="constant")
    options |= dict(max_steps=3)

    def work() -> list[list[int]]:
        saving = options | dict(save_strategy="steps", save_steps=2)
        whole = run(tmp_path / "whole", REPLICATE, options=saving, train_dataset=rows())
        again = dict(options=options, resume=tmp_path / "whole" / "checkpoint-2", train_dataset=rows())
        seen = run(tmp_path / "then", REPLICATE, **again)
        return [[log["cut_sequences"] for log in one.logs if "loss" in log] for one in (whole, seen)]

    whole, then = on_ranks(work, RANKS)[0]
    assert then[-1:] == whole[2:] and whole[1] > 0
