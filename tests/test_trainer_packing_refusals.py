# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Checks which data packing refuses, cuts or leaves padded, and its messages."""

from __future__ import annotations

from unittest import mock

import datasets
import pytest
import torch
from transformers import Trainer
from transformers.data.data_collator import DataCollatorForLanguageModeling, DataCollatorForSeq2Seq

from galvatron_hf import GalvatronTrainer
from galvatron_hf.parallel import packing_obstacle
from galvatron_hf.trainer.data import pack_planner, packing_rules, step_packer, step_prefetch
from oracle import collate
from packing_runs import (
    KEYS,
    MIXED,
    RANKS,
    REPLICATE,
    STATIC,
    arrow,
    plain_run,
    rows,
    runs_of,
    tokenizer,
    without_labels,
)
from plans import uniform
from trainer_runs import Run, assert_same_steps, on_ranks, run, trainer


def test_long_sequences_are_refused_truncated_or_split(tmp_path):
    """Trains as on a dataset of the same rows cut beforehand."""
    longest, whole = 16, rows(27)
    truncated = [{name: value[:longest] for name, value in row.items()} for row in whole]
    pieces = [
        {name: value[start : start + longest] for name, value in row.items()}
        for row in whole
        for start in range(0, len(row["input_ids"]), longest)
    ]
    cut = sum(len(row["input_ids"]) > longest for row in whole)
    # All rows in one step, so that pieces are in the step of their row.
    options = dict(max_steps=1, gradient_accumulation_steps=1, per_device_train_batch_size=14)
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
            data = dict(train_dataset=arrow(), data_collator=DataCollatorForSeq2Seq(tokenizer()))
            trainer(tmp_path, REPLICATE, options=STATIC | dict(max_tokens_per_rank=16), **data).train()
        except (ValueError, RuntimeError) as error:
            return str(error)
        return "no error"

    longest = max(range(61), key=lambda index: len(rows()[index]["input_ids"]))
    for message in on_ranks(work, RANKS):
        assert f"Row {longest} of the dataset has" in message and "above max_tokens_per_rank (16)" in message


def test_nothing_is_timed_before_a_refusal_nor_where_all_is_to_be_determined(tmp_path):
    """Trains on rows of unknown lengths that are too long; and under full determinism, where no clock decides."""

    def work() -> tuple[str, bool]:
        step_packer.measure_cost = mock.Mock(side_effect=AssertionError("it was timed"))
        short, data = STATIC | dict(max_tokens_per_rank=16), dict(train_dataset=rows())
        try:
            trainer(tmp_path / "long", REPLICATE, options=short, **data).train()
        except (ValueError, RuntimeError) as error:
            refusal = str(error)
        made = trainer(tmp_path / "same", REPLICATE, options=STATIC | dict(full_determinism=True, max_steps=1), **data)
        made.train()
        return refusal, made._components.packer.cost.measured

    for refusal, measured in on_ranks(work, RANKS):
        assert "tokens, above max_tokens_per_rank (16)" in refusal and not measured


def test_a_bound_that_packs_cannot_fill_is_refused(tmp_path):
    def work() -> str:
        options = STATIC | dict(max_tokens_per_rank=50, pack_to_multiple_of=16)
        try:
            trainer(tmp_path, REPLICATE, train_dataset=rows(), options=options).train()
        except (ValueError, RuntimeError) as error:
            return str(error)
        return "no error"

    for message in on_ranks(work, RANKS):
        assert "max_tokens_per_rank=50 is not a multiple of 16" in message and "use 48" in message


def test_a_planner_that_fails_leaves_the_samplers_order(tmp_path):
    data = dict(train_dataset=rows(), eval_dataset=rows(13, seed=2), then=lambda made: made.evaluate())
    options = dict(prediction_loss_only=True, max_steps=2)
    alone = options | dict(gradient_accumulation_steps=1)
    wanted = run(tmp_path / "plain", options=alone, trainer_class=Trainer, **data)

    def work() -> tuple[Run, list[str]]:
        def fails(*args, **options):
            raise KeyError("no plan")

        messages: list[str] = []
        step_prefetch.logger.warning = lambda message, *args: messages.append(message)
        step_packer.logger.warning_once = messages.append
        pack_planner.place = fails
        return run(tmp_path / "run", MIXED, options=STATIC | options, **data), messages

    results = on_ranks(work, RANKS)
    assert_same_steps(results[0][0], wanted)
    evaluated = wanted.result["eval_loss"]
    assert all(of_rank.result["eval_loss"] == pytest.approx(evaluated, rel=1e-5) for of_rank, _ in results)
    *steps, evaluation = results[0][1][:3]
    assert all(text.startswith("This step's") and "KeyError: 'no plan'" in text for text in steps)
    assert evaluation.startswith("Rows of an evaluation stay in order") and "KeyError: 'no plan'" in evaluation
    assert all(messages == [] for _, messages in results[1:])


def test_steps_that_are_too_large_for_the_exact_planner_are_placed_by_the_default(tmp_path):
    """Trains and evaluates with a planner that does not end; each size of a step is warned of."""

    def work() -> tuple[list[dict], list[str]]:
        messages: list[str] = []
        pack_planner.logger.warning_once = messages.append
        found = []
        for planner in ("longest_first", "exact"):
            options = dict(per_device_train_batch_size=32, per_device_eval_batch_size=16, max_steps=1)
            options |= STATIC | dict(full_determinism=True, placement_planner=planner, prediction_loss_only=True)
            options |= dict(gradient_accumulation_steps=1)
            more = dict(train_dataset=rows(64), eval_dataset=rows(32, seed=2), options=options)
            seen = run(tmp_path / planner, REPLICATE, then=lambda made: made.evaluate(), **more)
            log = seen.logs[0]
            found.append((log["loss"], log["predicted_imbalance"], seen.result["eval_loss"]))
        return found, messages

    found, messages = on_ranks(work, RANKS)[0]
    assert found[0] == found[1]
    assert all("is too large for placement_planner='exact': 'longest_first' places it" in text for text in messages)
    assert {text.split()[3] for text in messages} == {"64", "32"}


def test_a_dataset_that_knows_no_length_of_its_rows_is_planned_as_it_is_read(tmp_path):
    """Has a column of zeros, and rows that the collator reads by itself."""
    whole = rows()

    def collator(few: list[dict]) -> dict[str, torch.Tensor]:
        return collate([whole[row["index"]] for row in few])

    known = [{"index": index, "length": 0} for index in range(len(whole))]
    data = dict(train_dataset=datasets.Dataset.from_list(known), data_collator=lambda: collator)
    options = dict(remove_unused_columns=False, max_steps=2)
    seen = runs_of(REPLICATE, tmp_path, {"ours": data | dict(options=STATIC | options)})["ours"]
    assert_same_steps(seen, plain_run(tmp_path / "plain", options=options, **data))


def test_rows_that_a_collator_cuts_are_not_refused_by_their_length(tmp_path):
    def collator(few: list[dict]) -> dict[str, torch.Tensor]:
        return collate([{name: value[:16] for name, value in row.items()} for row in few])

    options = STATIC | dict(max_tokens_per_rank=16, max_steps=2)
    data = dict(train_dataset=rows, data_collator=lambda: collator)
    seen = runs_of(REPLICATE, tmp_path, {"ours": data | dict(options=options)})["ours"]
    assert_same_steps(seen, plain_run(tmp_path / "plain", options=dict(max_steps=2), **data))


REFUSED = {
    "left padding": (lambda batch: {name: value.flip(1) for name, value in batch.items()}, "left padding"),
    "holes": (lambda batch: with_holes(batch), "holes"),
    "others": (lambda batch: batch | {"extra": torch.zeros(len(batch["input_ids"]))}, "the batch has 'extra'"),
}


def with_holes(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Hides the third token of every row."""
    mask = torch.ones_like(batch["attention_mask"])
    mask[:, 2] = 0
    return batch | {"attention_mask": mask, "labels": torch.full_like(mask, -100)}


@pytest.mark.parametrize("name", REFUSED)
def test_batches_that_cannot_be_packed(tmp_path, name):
    """Refuses such a batch with its reason if the arguments ask for packing."""
    change, reason = REFUSED[name]
    with pytest.raises(AssertionError, match=f"packing='static' is not possible, because .*{reason}"):
        options = STATIC | dict(remove_unused_columns=False)
        collator = dict(data_collator=lambda: lambda features: change(collate(features)))
        runs_of(REPLICATE, tmp_path, {"run": collator | dict(train_dataset=rows, options=options)})


def test_what_packing_cannot_keep_is_refused(tmp_path):
    cases = {
        "a custom loss": (dict(compute_loss_func=lambda *args, **more: None), {}),
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

    for found in on_ranks(work, RANKS):
        for reason, message in zip(cases, found, strict=True):
            assert message.startswith(f"packing='static' is not possible, because {reason}"), message


def test_a_family_with_more_than_windows_is_padded_or_refused(tmp_path):
    def work() -> tuple[bool, list[str], str]:
        obstacle = mock.patch.object(
            packing_obstacle, "attention_obstacle", lambda *_: "Sinks gives its attention 's_aux'"
        )
        messages: list[str] = []
        packing_rules.logger.warning_once = messages.append
        collator = DataCollatorForLanguageModeling(tokenizer(), mlm=False)
        data = dict(train_dataset=without_labels(arrow()), data_collator=collator)
        with obstacle:
            seen = run(tmp_path / "auto", MIXED, options=dict(max_steps=1), **data)
            try:
                trainer(tmp_path / "static", MIXED, options=STATIC, **data).train()
            except ValueError as error:
                return any(key in log for log in seen.logs for key in KEYS), messages[:1], str(error)

    for rank, (packed, messages, refusal) in enumerate(on_ranks(work, RANKS)):
        assert not packed and len(messages) == (rank == 0)  # one rank speaks for all
        assert all(message.endswith("because Sinks gives its attention 's_aux'.") for message in messages)
        assert refusal.startswith("packing='static' is not possible, because Sinks gives")


def test_static_packing_without_a_plan_is_refused(tmp_path):
    with pytest.raises(ValueError, match="packing='static' needs a plan"):
        trainer(tmp_path, options=STATIC)


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(packing="mixed"), "packing 'mixed' is not one of auto, static, dynamic, none; use one of these."),
        (dict(long_sequences="drop"), "long_sequences 'drop' is not one of error, truncate, split; use one of these."),
        (
            dict(max_tokens_per_rank=0),
            "max_tokens_per_rank 0 is not a number of tokens; use a positive integer, or leave",
        ),
        (dict(pack_to_multiple_of=-8), "pack_to_multiple_of -8 is not a number of tokens"),
        (
            dict(placement_planner="best"),
            "placement_planner 'best' is not one of longest_first, karmarkar_karp, exact; use one of these.",
        ),
    ],
)
def test_arguments_are_checked(tmp_path, options, message):
    with pytest.raises(ValueError) as refusal:
        trainer(tmp_path, uniform(1), options=options)
    assert str(refusal.value).startswith(message)


def test_inputs_that_are_prepared_in_ones_own_way_stay_rows(tmp_path):
    """Changes a column of every batch: batches stay rows, as in plain Trainer, and `static` is refused."""

    def of(base: type) -> type:
        class Prepares(base):
            def _prepare_inputs(self, inputs):
                inputs = dict(super()._prepare_inputs(inputs))
                inputs["labels"] = inputs["labels"].clone()
                inputs["labels"][:, 0:2] = -100
                return inputs

        return Prepares

    collator = dict(data_collator=lambda: DataCollatorForSeq2Seq(tokenizer()), train_dataset=arrow)
    case = {name: make() for name, make in collator.items()}
    options = dict(max_steps=2)
    alone = options | dict(gradient_accumulation_steps=1)
    wanted = run(tmp_path / "plain", trainer_class=of(Trainer), options=alone, **case)

    def work() -> tuple[Run, list[str], str]:
        ours = of(GalvatronTrainer)
        with mock.patch.object(packing_rules.logger, "warning_once") as warned:
            seen = run(tmp_path / "ours", REPLICATE, trainer_class=ours, options=options, **case)
        with pytest.raises(ValueError) as refusal:
            run(tmp_path / "no", REPLICATE, trainer_class=ours, options=STATIC, **case)
        return seen, [call.args[0] for call in warned.call_args_list], str(refusal.value)

    results = on_ranks(work, RANKS)
    assert_same_steps(results[0][0], wanted)
    reason = "the Trainer's own preparation of inputs sees rows"
    assert all(reason in refusal for _, _, refusal in results)
    first, *others = (warnings for _, warnings, _ in results)
    assert first and all(reason in one for one in first) and not any(others)  # one rank speaks for all
