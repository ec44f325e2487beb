# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Compares packing inside the Trainer with plain Trainer on one process with the padded batch."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import datasets
import numpy as np
import pytest
import torch
from transformers import TrainerCallback, default_data_collator
from transformers.data.data_collator import (
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorWithFlattening,
)
from trl.trainer import sft_trainer

from galvatron_hf import GalvatronTrainer
from galvatron_hf.data.packing import pack
from galvatron_hf.data.placement import PLANNERS, Placement
from galvatron_hf.data.plan_ahead import PlanAhead
from galvatron_hf.parallel.activation.documents import DocumentBounds
from galvatron_hf.parallel.layers import parallel_layer
from galvatron_hf.trainer.data import step_packer
from galvatron_hf.trainer.data.sequence_cost import estimated_cost
from oracle import PAD, Case, Stream, check_cases
from packing_runs import (
    KEYS,
    LONG_TAIL,
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
from plans import mixed_plans, pipeline_plans, pipeline_plans_on_eight, pipelined, shared_out, uniform, uniform_plans
from tiny_models import FAMILIES, LAYERS, VOCABULARY
from trainer_runs import Logs, Run, assert_same_steps, on_ranks, run, trainer


def case(plan, packing: dict[str, Any] | None = None, **options: Any) -> Case:
    """Trains on long-tailed rows with -100 labels, then evaluates for the loss alone."""
    return Case(
        plan=plan,
        train=rows,
        own_options=STATIC | (packing or {}),
        options=dict(prediction_loss_only=True) | options,
        trainer=dict(eval_dataset=lambda: rows(13, seed=2)),
        after=lambda trainer: trainer.evaluate(),
    )


def test_the_oracle_of_one_process():
    plans = mixed_plans() | pipeline_plans()
    check_cases({name: case(plans[name], max_steps=2) for name in ("mixed_a", "1f1b_mixed")})


@pytest.mark.slow
def test_plans_of_two_ranks():
    """Trains with a document on each rank, with documents that all ranks share, and with several stages on a rank."""
    plans = {
        "replicate": REPLICATE,
        "tensor": uniform_plans(RANKS)["tensor"],
        "interleaved": pipelined([(0,), (1,)] * 2, MIXED.layers[:1] * 4, "interleaved", micro_batches=4),
    }
    rows_of_a_rank = dict(per_device_train_batch_size=2, per_device_eval_batch_size=2)
    check_cases({name: case(plan, max_steps=2, **rows_of_a_rank) for name, plan in plans.items()}, RANKS)


@pytest.mark.slow
def test_mixed_plans_and_pipelines_of_four_ranks():
    """Trains under every other pipeline; test_packed_rows.py computes the gradients of all."""
    pipelines = {"1f1b_mixed": pipeline_plans()["1f1b_mixed"]} | shared_out(pipeline_plans(), 0, 2)
    plans = mixed_plans() | pipelines | {name: uniform_plans(4)[name] for name in ("replicate", "tensor")}
    longer = ("mixed_a", "1f1b_mixed")
    check_cases({name: case(plan, max_steps=4 if name in longer else 2) for name, plan in plans.items()})


@pytest.mark.slow
def test_eight_ranks():
    plans = {"ulysses": uniform(8, ulysses=2, tensor=2)} | shared_out(pipeline_plans_on_eight(), 0, 2)
    check_cases({name: case(plan, max_steps=2) for name, plan in plans.items()}, world_size=8)


def a_document_left_out():
    original = step_packer.pack

    def without_longest(sequences, placement, *others):
        longest = sequences.lengths.argmax()
        kept = [[[i for i in pack_ if i != longest] for pack_ in packs] for packs in placement.micro_batches]
        return original(sequences, Placement(tuple(tuple(map(tuple, packs)) for packs in kept)), *others)

    return mock.patch.object(step_packer, "pack", without_longest)


def documents_that_see_each_other():
    original = parallel_layer.held_documents

    def merged(*part):
        return DocumentBounds((0, original(*part).tokens))

    return mock.patch.object(parallel_layer, "held_documents", merged)


def positions_one_further():
    def moved(sequences, placement, *others):
        parts = pack(sequences, placement, *others)
        for part in parts:
            part["position_ids"] = (part["position_ids"] + 1).clamp(max=39)
        return parts

    return mock.patch.object(step_packer, "pack", moved)


def targets_across_documents():
    def shifted(sequences, placement, *others):
        parts = pack(sequences, placement, *others)
        for part in parts:
            last = [piece.end - 1 for piece in part["documents"].pieces[:-1]]
            part["shift_labels"][0, last] = part["input_ids"][0, [bound + 1 for bound in last]]
        return parts

    return mock.patch.object(step_packer, "pack", shifted)


@pytest.mark.slow
def test_faults_of_packing_are_seen():
    one = replace(case(REPLICATE, max_steps=1, per_device_train_batch_size=2), after=None)
    # Rotary embeddings do not see where a document begins; learned ones do.
    faults = {
        "left out": replace(one, fault=a_document_left_out),
        "seen": replace(one, fault=documents_that_see_each_other),
        "moved": replace(one, family="gpt2", fault=positions_one_further),
        "across": replace(one, fault=targets_across_documents),
    }
    with pytest.raises(AssertionError) as error:
        check_cases(faults, RANKS)
    for name in faults:
        assert f"{name}: rank 0: log[0].loss is" in str(error.value), str(error.value)[-3000:]


@pytest.mark.slow
def test_options_of_training_and_packing():
    mixed, replicate = mixed_plans()["mixed_a"], uniform(4, sharding="replicate")
    check_cases(
        {
            "smoothing": case(mixed, label_smoothing_factor=0.1),
            "streams": replace(case(replicate), train=lambda: Stream(61, **LONG_TAIL)),
            # Batches of 4 rows: the data ends before the second one of a step.
            "short stream": replace(case(mixed, max_steps=4), accumulates=True, train=lambda: Stream(19, **LONG_TAIL)),
            "small packs": case(mixed, packing=dict(max_tokens_per_rank=48)),
            "multiples": case(mixed, packing=dict(pack_to_multiple_of=16)),
            "accumulating": replace(case(replicate), accumulates=True),
        }
    )


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
FAST_COLLATORS = ("language_modeling", "trl_padding_free")
SLOW_COLLATORS = tuple(name for name in COLLATORS if name not in FAST_COLLATORS)


@pytest.mark.slow
@pytest.mark.parametrize(
    "names", [FAST_COLLATORS, pytest.param(SLOW_COLLATORS, marks=pytest.mark.slow)], ids=["two", "others"]
)
def test_collators_that_only_pad_are_packed_by_themselves(tmp_path, names):
    """Sets no argument of packing. An unknown collator leaves its batches padded."""
    made = {name: dict(zip(("data_collator", "train_dataset"), makers)) for name, makers in COLLATORS.items()}
    known = {name: made[name] | dict(options=dict(max_steps=3)) for name in names}
    wanted = {name: plain_run(tmp_path / "plain" / name, **case) for name, case in known.items()}
    unknown = {
        "unknown": dict(train_dataset=rows, options=dict(max_steps=1)),
        "none": made["language_modeling"] | dict(options=dict(packing="none", max_steps=1)),
    }
    seen = runs_of(MIXED, tmp_path, known | unknown)
    for name in known:
        assert_same_steps(seen[name], wanted[name])
        assert all(key in seen[name].logs[0] for key in KEYS), name
    assert all(not any(key in log for log in seen[name].logs for key in KEYS) for name in unknown)


class ChoosesRows(GalvatronTrainer):
    """Chooses rows in an order of its own, which could depend on what was trained before."""

    class Order(torch.utils.data.Sampler):
        def __iter__(self):
            yield from reversed(range(61))

        def __len__(self) -> int:
            return 61

    def _get_train_sampler(self, *unused, **ignored):
        return self.Order()


class UsersCallback(TrainerCallback):
    """Could change the dataset."""


# From how rows are known to the share of steps in each log that were planned while another step was computed.
HIDDEN = {
    "lengths": (arrow, dict(), [0.5, 1.0]),
    "stream": (lambda: Stream(61, **LONG_TAIL), dict(), [0.0, 1.0]),
    "own_sampler": (arrow, dict(trainer_class=lambda: ChoosesRows), [0.0, 0.0]),
    "own_callback": (lambda: Stream(61, **LONG_TAIL), dict(callbacks=(UsersCallback(),)), [0.0, 0.0]),
}


@pytest.mark.slow
def test_what_is_logged(tmp_path, monkeypatch):
    """Plans all steps ahead but the first. A stream's second step is not planned ahead either, because its first read
    tells whether reading draws random numbers; nor is any step of a user's sampler, which may choose rows later, or
    a stream's beside a user's callback, which may change it."""
    monkeypatch.setattr(Logs, "__module__", "transformers.of_a_test")  # what keeps the logs stands for no user's
    options = STATIC | dict(logging_steps=2, max_steps=4)
    begin = PlanAhead.begin

    def begin_and_wait(self, lengths):
        begin(self, lengths)
        self._next.result()

    with mock.patch.object(PlanAhead, "begin", begin_and_wait):
        cases = {name: dict(train_dataset=data, options=options, **more) for name, (data, more, _) in HIDDEN.items()}
        seen = runs_of(REPLICATE, tmp_path, cases)
    for name, (_, _, hidden) in HIDDEN.items():
        logs = [log for log in seen[name].logs if "loss" in log]
        assert [log["planner_hidden"] for log in logs] == hidden, name
        for log in logs:
            assert log["padding_percent"] == 0.0  # nothing has to be a multiple of anything, and no pack is empty
            assert log["predicted_imbalance"] >= 1.0
            assert log["useful_tokens_per_second"] > 0 and log["planner_ms"] > 0
        assert "cut_sequences" not in logs[-1]


@pytest.mark.slow
def test_the_planner_is_the_one_that_was_asked_for(tmp_path):
    """Places six documents by differencing at 80 to 72 tokens, where 77 to 75 is possible; the losses are the same."""
    lengths, options = (40, 35, 30, 25, 20, 2), dict(max_steps=1, per_device_train_batch_size=3)
    options |= STATIC | dict(gradient_accumulation_steps=1, full_determinism=True)
    whole = rows(1, shortest=40)[0]
    dataset = [{name: value[:length] for name, value in whole.items()} for length in lengths]

    def work() -> list[Run]:
        return [
            run(
                tmp_path / planner,
                uniform(RANKS),
                train_dataset=dataset,
                options=options | dict(placement_planner=planner),
                then=lambda made: estimated_cost(made.model.config, LAYERS).sequence.seconds(lengths),
            )
            for planner in PLANNERS
        ]

    found = on_ranks(work, RANKS)[0]
    imbalance = {
        planner: of_one.logs[0]["predicted_imbalance"] for planner, of_one in zip(PLANNERS, found, strict=True)
    }
    costs = found[0].result
    loads = [sum(costs[np.array(on_first, bool)]) for on_first in itertools.product((0, 1), repeat=len(lengths))]
    best = 2 * min(max(load, sum(costs) - load) for load in loads) / sum(costs)
    assert imbalance["exact"] == pytest.approx(best, abs=1e-4)  # as it is logged
    assert imbalance["exact"] <= imbalance["longest_first"] < 1.02
    assert imbalance["karmarkar_karp"] > 1.04
    for other in found[1:]:
        assert_same_steps(other, found[0])


def test_a_bad_number_is_traced_to_the_document_that_has_it(tmp_path):
    """Gives one token a bad embedding; one row of the dataset has this token."""
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

    for message in on_ranks(work, RANKS):
        assert f"(dataset {marked})" in message and "of the embedding" in message, message
