# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The batch of a step: its rows, its micro-batches, and how a run with it resumes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import DataCollatorForSeq2Seq, Trainer

from galvatron_hf.parallel.model_runner import ModelRunner
from galvatron_hf.plan import ParallelPlan
from galvatron_hf.trainer import arguments as trainer_arguments
from galvatron_hf.trainer import start
from galvatron_hf.trainer.argument_refusals import check_arguments
from galvatron_hf.trainer.data import global_batches
from packing_runs import tokenizer
from plans import light_plan
from ranks import run_ranks
from trainer_runs import Run, arguments, assert_same_steps, on_ranks, run, trainer


PAIR = light_plan(2)


def batch_run(folder: Path, plan: ParallelPlan | str, **more: Any) -> Run:
    """Trains with SGD; `more` are arguments of training, and of the Trainer's."""
    options = dict(optim="sgd", learning_rate=0.2, max_steps=4, per_device_train_batch_size=1) | more.pop("options")
    then = lambda made: (made.state.epoch, made.state.max_steps)  # noqa: E731
    return run(folder, plan, options=options, then=then, **more)


BATCHES: dict[str, tuple[int, dict[str, Any]]] = {
    "one row": (1, dict(gradient_accumulation_steps=1)),
    "three rows": (3, dict(gradient_accumulation_steps=1)),
    "accumulated": (6, dict(gradient_accumulation_steps=2)),
    "epochs": (5, dict(gradient_accumulation_steps=1, max_steps=-1, num_train_epochs=1)),
    "packed": (5, dict(gradient_accumulation_steps=1, packing="static")),
}


def test_the_global_batch_is_that_of_one_process(tmp_path):
    def own(name: str, rows: int, options: dict[str, Any]) -> Run:
        packs = dict(data_collator=DataCollatorForSeq2Seq(tokenizer())) if name == "packed" else {}
        return batch_run(tmp_path / name, PAIR, options=options | dict(global_batch_size=rows), **packs)

    found = on_ranks(lambda: {name: own(name, *case) for name, case in BATCHES.items()}, 2)
    for name, (rows, options) in BATCHES.items():
        steps = options["gradient_accumulation_steps"]
        plain = {key: value for key, value in options.items() if key != "packing"}
        plain |= dict(per_device_train_batch_size=rows // steps)
        wanted = batch_run(tmp_path / "plain" / name, options=plain, plan="auto", trainer_class=Trainer)
        for seen in found:
            assert_same_steps(seen[name], wanted)
            assert seen[name].result == wanted.result
            for key, weight in wanted.weights.items():
                torch.testing.assert_close(seen[name].weights[key], weight, rtol=1e-4, atol=1e-6)


def test_a_run_with_a_global_batch_resumes(tmp_path):
    options = dict(gradient_accumulation_steps=1, global_batch_size=3, save_strategy="steps", save_steps=2)

    def work() -> tuple[Run, Run]:
        whole = batch_run(tmp_path, PAIR, options=options)
        return whole, batch_run(tmp_path, PAIR, options=options, resume=tmp_path / "checkpoint-2")

    for whole, resumed in on_ranks(work, 2):
        assert resumed.steps(after=2) == whole.steps(after=2)
        assert all(torch.equal(resumed.weights[name], weight) for name, weight in whole.weights.items())


@pytest.mark.parametrize(
    "rows, steps, reason", [(0, 1, "positive integer"), (5, 2, "not a multiple"), (2.5, 1, "number")]
)
def test_a_global_batch_that_is_none_is_refused(rows, steps, reason, tmp_path):
    args = arguments(
        tmp_path, gradient_accumulation_steps=steps, global_batch_size=rows, per_device_train_batch_size=1
    )
    with pytest.raises(ValueError, match=f"global_batch_size {rows}.*{reason}"):
        check_arguments(args, None)


@pytest.mark.parametrize("given, wanted", [(None, [4, 4]), (1, [8]), (4, [2, 2, 2, 2])])
def test_a_plan_without_micro_batches_takes_them_from_the_accumulation(given, wanted, tmp_path):
    """Counts the rows of each forward of a step."""

    def work() -> list[int]:
        seen, original = [], ModelRunner.micro_batch

        def micro_batch(self, input_ids, **inputs):
            seen.append(input_ids.shape[0])
            return original(self, input_ids, **inputs)

        with mock.patch.object(ModelRunner, "micro_batch", micro_batch):
            made = trainer(tmp_path, replace(PAIR, micro_batches=given), options=dict(max_steps=1, packing="none"))
            made.train()
        return seen

    assert run_ranks(work, 2) == [wanted, wanted]


def test_micro_batches_that_a_loss_of_whole_batches_leaves_unused_are_told(tmp_path):
    def work() -> list[list[str]]:
        told = []
        for micro_batches, own in ((4, True), (2, True), (4, False)):
            loss = own_loss if own else None
            with mock.patch.object(start.logger, "warning") as warning:
                trainer(tmp_path, replace(PAIR, micro_batches=micro_batches), compute_loss_func=loss)
            told.append([str(call.args[0]) for call in warning.mock_calls])
        return told

    first, second = run_ranks(work, 2)
    assert [len(one) for one in first] == [1, 0, 0] and second == [[], [], []]
    assert "micro_batches=4 of the plan is not used" in first[0][0]


def own_loss(outputs, labels, num_items_in_batch=None):
    return outputs.logits.float().logsumexp(-1).mean()


@pytest.mark.slow
def test_another_number_of_rows_is_seen(tmp_path, monkeypatch):
    monkeypatch.setattr(global_batches, "batch_rows_of", lambda args: 2 * args.train_batch_size)
    with pytest.raises(AssertionError):
        test_the_global_batch_is_that_of_one_process(tmp_path)


def test_micro_batches_that_are_not_taken_are_seen(tmp_path, monkeypatch):
    monkeypatch.setattr(trainer_arguments, "with_micro_batches", lambda plan, args: plan)
    with pytest.raises(AssertionError):
        test_a_plan_without_micro_batches_takes_them_from_the_accumulation(None, [4, 4], tmp_path)
