# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Packing inside the Trainer, against plain Trainer on one process with the padded batch."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import datasets
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, Trainer, default_data_collator
from transformers.data.data_collator import (
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorWithFlattening,
)
from trl.trainer import sft_trainer

from galvatron_hf import GalvatronTrainer
from galvatron_hf.data.packing import pack
from galvatron_hf.data.placement import Placement
from galvatron_hf.data.plan_ahead import PlanAhead
from galvatron_hf.parallel.documents import Documents
from galvatron_hf.trainer import packing
from galvatron_hf.trainer.random_state import random_state
from oracle import PAD, Case, Rows, Stream, check_cases, collate
from plans import mixed_plans, pipeline_plans, pipeline_plans_on_eight, uniform, uniform_plans
from tiny_models import FAMILIES, VOCABULARY
from trainer_runs import Run, assert_equal_weights, assert_same_steps, on_ranks, run, trainer


LONG_TAIL = dict(shortest=1, longest=40)
STATIC = dict(packing="static")
REPLICATE, MIXED = uniform(4, sharding="replicate"), mixed_plans()["mixed_a"]
KEYS = ("useful_tokens_per_second", "padding_percent", "predicted_imbalance", "planner_ms", "planner_hidden")


def rows(count: int = 61, **options: Any) -> Rows:
    return Rows(count, **(LONG_TAIL | options))


def case(plan, packing: dict[str, Any] | None = None, **options: Any) -> Case:
    """Training on long-tailed rows with -100 labels, then an evaluation for the loss alone."""
    return Case(
        plan=plan,
        train=rows,
        own_options=STATIC | (packing or {}),
        options=dict(prediction_loss_only=True) | options,
        trainer=dict(eval_dataset=lambda: rows(13, seed=2)),
        after=lambda trainer: trainer.evaluate(),
    )


def test_the_oracle_of_one_process():
    plans = {"replicate": REPLICATE, "mixed_a": MIXED, "tensor": uniform_plans(4)["tensor"]}
    plans |= {name: pipeline_plans()[name] for name in ("1f1b_mixed", "interleaved_apart")}
    check_cases({name: case(plan) for name, plan in plans.items()})


@pytest.mark.slow
def test_every_plan_of_four_ranks():
    plans = uniform_plans(4) | mixed_plans() | pipeline_plans()
    check_cases({name: case(plan, max_steps=4) for name, plan in plans.items()}, timeout=900)


@pytest.mark.slow
def test_eight_ranks():
    plans = {"zero3": uniform(8), "ulysses": uniform(8, ulysses=2, tensor=2)} | pipeline_plans_on_eight()
    check_cases({name: case(plan, max_steps=4) for name, plan in plans.items()}, world_size=8, timeout=900)


def a_document_left_out():
    original = packing.pack

    def without_longest(sequences, placement, multiple, pad):
        longest = sequences.lengths.argmax()
        kept = [[[i for i in pack_ if i != longest] for pack_ in packs] for packs in placement.micro_batches]
        return original(sequences, Placement(tuple(tuple(map(tuple, packs)) for packs in kept)), multiple, pad)

    return mock.patch.object(packing, "pack", without_longest)


def documents_that_see_each_other():
    original = Documents.bounds_within

    def merged(self, part):
        bounds = original(self, part)
        return (bounds[0], bounds[-1])

    return mock.patch.object(Documents, "bounds_within", merged)


def positions_one_further():
    def moved(sequences, placement, multiple, pad):
        parts = pack(sequences, placement, multiple, pad)
        for part in parts:
            part["position_ids"] = (part["position_ids"] + 1).clamp(max=39)
        return parts

    return mock.patch.object(packing, "pack", moved)


def targets_across_documents():
    def shifted(sequences, placement, multiple, pad):
        parts = pack(sequences, placement, multiple, pad)
        for part in parts:
            last = [bound - 1 for bound in part["documents"].bounds[1:-1]]
            part["shift_labels"][0, last] = part["input_ids"][0, [bound + 1 for bound in last]]
        return parts

    return mock.patch.object(packing, "pack", shifted)


def test_faults_of_packing_are_seen():
    one = replace(case(REPLICATE, max_steps=1), after=None)
    # Rotary embeddings do not see where a document begins; learned ones do.
    faults = {
        "left out": replace(one, fault=a_document_left_out),
        "seen": replace(one, fault=documents_that_see_each_other),
        "moved": replace(one, family="gpt2", fault=positions_one_further),
        "across": replace(one, fault=targets_across_documents),
    }
    with pytest.raises(AssertionError) as error:
        check_cases(faults)
    for name in faults:
        assert f"{name}: rank 0: log[0].loss is" in str(error.value), str(error.value)[-3000:]


@pytest.mark.slow
def test_options_of_training_and_packing():
    check_cases(
        {
            "smoothing": case(MIXED, label_smoothing_factor=0.1),
            "streams": replace(case(REPLICATE), train=lambda: Stream(61, **LONG_TAIL)),
            "small packs": case(MIXED, packing=dict(max_tokens_per_rank=48)),
            "multiples": case(MIXED, packing=dict(pack_to_multiple_of=16)),
            "accumulating": replace(case(REPLICATE), accumulates=True),
        }
    )


def tokenizer() -> PreTrainedTokenizerFast:
    words = {f"w{index}": index for index in range(VOCABULARY)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="w0")), pad_token=f"w{PAD}")


def arrow(count: int = 61, **options: Any) -> datasets.Dataset:
    """The same rows as a dataset whose lengths are known."""
    whole = rows(count, **options)
    return datasets.Dataset.from_list([{name: value.tolist() for name, value in row.items()} for row in whole])


def without_labels(dataset: datasets.Dataset) -> datasets.Dataset:
    return dataset.remove_columns("labels")


def same_length() -> datasets.Dataset:
    return arrow(shortest=12, longest=12)


COLLATORS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "language_modeling": (
        lambda: DataCollatorForLanguageModeling(tokenizer(), mlm=False, pad_to_multiple_of=8),
        lambda: without_labels(arrow()),
    ),
    "seq2seq": (lambda: DataCollatorForSeq2Seq(tokenizer()), arrow),
    "flattening": (lambda: DataCollatorWithFlattening(), arrow),
    "trl": (lambda: sft_trainer.DataCollatorForLanguageModeling(PAD), arrow),
    "trl_padding_free": (lambda: sft_trainer.DataCollatorForLanguageModeling(PAD, padding_free=True), arrow),
    "default": (lambda: default_data_collator, same_length),
}


def runs_of(plan, folder: Path, cases: dict[str, dict[str, Any]]) -> dict[str, Run]:
    """Runs on ranks, in one world, as rank 0 sees them."""

    def work() -> dict[str, Run]:
        return {
            name: run(folder / name, plan, **{k: v() if callable(v) else v for k, v in more.items()})
            for name, more in cases.items()
        }

    return on_ranks(work)[0]


def plain_run(folder: Path, **more: Any) -> Run:
    options = more.pop("options", {}) | dict(gradient_accumulation_steps=1)
    more = {name: value() if callable(value) else value for name, value in more.items()}
    return run(folder, options=options, trainer_class=Trainer, **more)


FAST_COLLATORS = ("language_modeling", "trl_padding_free")


@pytest.mark.parametrize(
    "names", [FAST_COLLATORS, pytest.param(tuple(COLLATORS), marks=pytest.mark.slow)], ids=["two", "all"]
)
def test_collators_that_only_pad_are_packed_by_themselves(tmp_path, names):
    """Without an argument that says so; and those that are not known are not."""
    chosen = {name: COLLATORS[name] for name in names}
    known = {name: dict(data_collator=make, train_dataset=data) for name, (make, data) in chosen.items()}
    wanted = {name: plain_run(tmp_path / "plain" / name, **case) for name, case in known.items()}
    unknown = {
        "unknown": dict(train_dataset=rows),
        "none": known["language_modeling"] | dict(options=dict(packing="none")),
    }
    seen = runs_of(MIXED, tmp_path, known | unknown)
    for name in known:
        assert_same_steps(seen[name], wanted[name])
        assert all(key in seen[name].logs[0] for key in KEYS), name
    assert all(not any(key in log for log in seen[name].logs for key in KEYS) for name in unknown)


@pytest.mark.parametrize("data", [arrow, lambda: Stream(61, **LONG_TAIL)], ids=["lengths", "stream"])
def test_what_is_logged(tmp_path, data):
    """Every step but the first was planned before, where there was time for it."""
    options = STATIC | dict(logging_steps=2)
    begin = PlanAhead.begin

    def begin_and_wait(self, lengths):
        begin(self, lengths)
        self._next.result()

    with mock.patch.object(PlanAhead, "begin", begin_and_wait):
        seen = runs_of(REPLICATE, tmp_path, {"a": dict(train_dataset=data, options=options)})["a"]
    logs = [log for log in seen.logs if "loss" in log]
    assert [log["planner_hidden"] for log in logs] == [0.5, 1.0, 1.0]
    for log in logs:
        assert log["padding_percent"] == 0.0  # nothing has to be a multiple of anything, and no pack is empty
        assert log["predicted_imbalance"] >= 1.0
        assert log["useful_tokens_per_second"] > 0 and log["planner_ms"] > 0
    assert "cut_sequences" not in logs[-1]


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
        return whole, seen, json.loads((checkpoint / packing.COST_FILE).read_text())

    whole, seen, cost = on_ranks(work)[0]
    assert_equal_weights(seen.weights, whole.weights)
    assert cost["measured"] is True and cost["per_token"] + cost["per_token_squared"] > 0


def test_long_sequences_are_refused_truncated_or_split(tmp_path):
    """As a dataset of the same rows cut beforehand."""
    longest, whole = 16, rows(27)
    truncated = [{name: value[:longest] for name, value in row.items()} for row in whole]
    pieces = [
        {name: value[start : start + longest] for name, value in row.items()}
        for row in whole
        for start in range(0, len(row["input_ids"]), longest)
    ]
    cut = sum(len(row["input_ids"]) > longest for row in whole)
    # All rows in one step, so that pieces are in the step of their row.
    options = dict(max_steps=1, gradient_accumulation_steps=1, per_device_train_batch_size=7)
    bound = STATIC | dict(max_tokens_per_rank=longest)
    data = dict(train_dataset=lambda: rows(27))
    seen = runs_of(
        REPLICATE,
        tmp_path,
        {
            policy: data | dict(options=options | bound | dict(long_sequences=policy))
            for policy in ("truncate", "split")
        },
    )
    for policy, wanted in (("truncate", truncated), ("split", pieces)):
        alone = options | dict(per_device_train_batch_size=len(wanted))
        assert_same_steps(seen[policy], plain_run(tmp_path / policy, train_dataset=lambda w=wanted: w, options=alone))
        assert seen[policy].logs[0]["cut_sequences"] == cut
    with pytest.raises(
        AssertionError, match=r"Row \d+ of the global batch has \d+ tokens, above max_tokens_per_rank \(16\)"
    ):
        runs_of(REPLICATE, tmp_path, {"error": data | dict(options=options | bound)})


def test_long_rows_are_refused_before_a_step_where_lengths_are_known(tmp_path):
    def work() -> str:
        try:
            trainer(tmp_path, REPLICATE, train_dataset=arrow(), options=STATIC | dict(max_tokens_per_rank=16)).train()
        except (ValueError, RuntimeError) as error:
            return str(error)
        return "no error"

    longest = max(range(61), key=lambda index: len(rows()[index]["input_ids"]))
    for message in on_ranks(work):
        assert f"Row {longest} of the dataset has" in message and "above max_tokens_per_rank (16)" in message


def test_a_bound_that_packs_cannot_fill_is_refused(tmp_path):
    def work() -> str:
        options = STATIC | dict(max_tokens_per_rank=50, pack_to_multiple_of=16)
        try:
            trainer(tmp_path, REPLICATE, train_dataset=rows(), options=options).train()
        except (ValueError, RuntimeError) as error:
            return str(error)
        return "no error"

    for message in on_ranks(work):
        assert "max_tokens_per_rank=50 is no multiple of 16" in message and "give 48" in message


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


@pytest.mark.parametrize("stream, moved", [(Stream, False), (Noisy, True)])
def test_reading_ahead_leaves_the_saved_random_state_alone(tmp_path, stream, moved):
    """What is drawn for the next step is not in the checkpoint of this one."""

    def work() -> tuple[bool, list]:
        seen: list = []
        original = packing.PackingMixin._plan_next

        def noted(self, batches, count):
            before = random_state()
            original(self, batches, count)
            seen.append((before, self._state_before_look))

        packing.PackingMixin._plan_next = noted
        made = trainer(tmp_path, REPLICATE, train_dataset=stream(61, **LONG_TAIL), options=STATIC | dict(max_steps=3))
        made.train()
        packing.PackingMixin._plan_next = original
        kept = [state for _, state in seen[:2]]
        right = all(state == (before if moved else None) for before, state in seen[:2])
        return right, [made._looking, made._ahead, made._state_before_look, len(kept)]

    right, left = on_ranks(work)[0]
    assert right and left == [None, None, None, 2]


def test_a_planner_that_fails_leaves_the_samplers_order(tmp_path):
    wanted = plain_run(tmp_path / "plain", train_dataset=rows)

    def work() -> tuple[Run, list[str]]:
        def fails(*args, **options):
            raise KeyError("no plan")

        messages: list[str] = []
        packing.logger.warning = lambda message, *args: messages.append(message)
        packing.place = fails
        return run(tmp_path / "run", MIXED, train_dataset=rows(), options=STATIC), messages

    results = on_ranks(work)
    assert_same_steps(results[0][0], wanted)
    assert len(results[0][1]) == 6 and "KeyError: 'no plan'" in results[0][1][0]
    assert all(messages == [] for _, messages in results[1:])


REFUSED = {
    "left padding": (lambda batch: {name: value.flip(1) for name, value in batch.items()}, "left padding"),
    "holes": (lambda batch: with_holes(batch), "holes"),
    "others": (lambda batch: batch | {"extra": torch.zeros(len(batch["input_ids"]))}, "the batch has 'extra'"),
}


def with_holes(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The third token of every row is hidden."""
    mask = torch.ones_like(batch["attention_mask"])
    mask[:, 2] = 0
    return batch | {"attention_mask": mask, "labels": torch.full_like(mask, -100)}


@pytest.mark.parametrize("name", REFUSED)
def test_batches_that_cannot_be_packed(tmp_path, name):
    """Refused by name where packing is asked for; a message and padding where it is not."""
    change, reason = REFUSED[name]
    with pytest.raises(AssertionError, match=f"packing='static' is not possible, because .*{reason}"):
        options = STATIC | dict(remove_unused_columns=False)
        collator = dict(data_collator=lambda: lambda features: change(collate(features)))
        runs_of(REPLICATE, tmp_path, {"run": collator | dict(train_dataset=rows, options=options)})


def test_what_packing_cannot_keep_is_refused(tmp_path):
    cases = {
        "a loss of one's own": (dict(compute_loss_func=lambda *args, **more: None), {}),
        "NEFTune": ({}, dict(neftune_noise_alpha=5.0)),
    }

    def work() -> list[str]:
        found = []
        for more, options in cases.values():
            try:
                trainer(tmp_path, REPLICATE, options=STATIC | options, train_dataset=rows(), **more).train()
                found.append("nothing")
            except ValueError as error:
                found.append(str(error))
        return found

    for found in on_ranks(work):
        for reason, message in zip(cases, found, strict=True):
            assert message.startswith(f"packing='static' is not possible, because {reason}"), message


def test_a_bad_number_is_traced_to_the_document_that_has_it(tmp_path):
    """A token with a bad embedding, in one row of the dataset alone."""
    marked, bad = 17, VOCABULARY - 1
    dataset = [{name: value.clone() for name, value in row.items()} for row in rows(27)]
    for index, row in enumerate(dataset):
        row["input_ids"][row["input_ids"] == bad] = bad - 1
        if index == marked:
            row["input_ids"][0] = bad

    def work() -> str:
        model = FAMILIES["llama"].build()
        with torch.no_grad():
            model.get_input_embeddings().weight[bad] = float("nan")
        try:
            trainer(tmp_path, MIXED, model=model, train_dataset=dataset, options=STATIC).train()
        except FloatingPointError as error:
            return str(error)
        return "no error"

    for message in on_ranks(work):
        assert f"(dataset {marked})" in message and "of the embedding" in message, message


def test_a_family_with_more_than_windows_is_padded_or_refused(tmp_path):
    def work() -> tuple[list, str]:
        obstacle = mock.patch.object(packing, "attention_obstacle", lambda *_: "Sinks gives its attention 's_aux'")
        messages: list[str] = []
        packing.logger.warning_once = messages.append
        collator = DataCollatorForLanguageModeling(tokenizer(), mlm=False)
        data = dict(train_dataset=without_labels(arrow()), data_collator=collator)
        with obstacle:
            seen = run(tmp_path / "auto", MIXED, **data)
            try:
                trainer(tmp_path / "static", MIXED, options=STATIC, **data).train()
            except ValueError as error:
                return [any(key in log for log in seen.logs for key in KEYS), *messages[:1]], str(error)

    for (packed, message), refusal in on_ranks(work):
        assert not packed and message.endswith("because Sinks gives its attention 's_aux'.")
        assert refusal.startswith("packing='static' is not possible, because Sinks gives")


def test_static_packing_without_a_plan_is_refused(tmp_path):
    with pytest.raises(ValueError, match="packing='static' needs a plan"):
        trainer(tmp_path, options=STATIC)


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(packing="dynamic"), "packing 'dynamic' is none of auto, static, none; use one of these."),
        (dict(long_sequences="drop"), "long_sequences 'drop' is none of error, truncate, split; use one of these."),
        (
            dict(max_tokens_per_rank=0),
            "max_tokens_per_rank 0 is no number of tokens; use a positive integer, or leave",
        ),
        (dict(pack_to_multiple_of=-8), "pack_to_multiple_of -8 is no number of tokens"),
    ],
)
def test_arguments_are_checked(tmp_path, options, message):
    with pytest.raises(ValueError) as refusal:
        trainer(tmp_path, uniform(1), options=options)
    assert str(refusal.value).startswith(message)
