# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""evaluate() and predict() under a plan give plain Trainer's metrics and arrays on the global batch; see oracle.py."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Trainer

from galvatron_hf.plan import ParallelPlan, VocabularyStrategy
from oracle import Case, Rows, Stream, check_cases
from plans import mixed_plans, uniform


MIXED = mixed_plans()


def replicated(world_size: int) -> ParallelPlan:
    return uniform(world_size, sharding="replicate", embedding=VocabularyStrategy(sharding="replicate"))


# What only the data and the arguments decide is the same on two ranks as on more.
REPLICATE = replicated(2)


class Keep:
    """Keeps the arrays that a metric is given, so that whole arrays can be compared."""

    def __init__(self):
        self.seen: list[dict[str, np.ndarray]] = []

    def __call__(self, prediction, compute_result: bool | None = None) -> dict[str, float]:
        names = ("predictions", "label_ids", "inputs", "losses")
        seen = {name: getattr(prediction, name, None) for name in names}
        self.seen.append({k: v.numpy() if isinstance(v, torch.Tensor) else v for k, v in seen.items()})
        if compute_result is False:
            return {}
        labels = prediction.label_ids
        return {"rows": len(labels), "targets": int(sum((part != -100).sum() for part in labels))}


def keep(**options):
    return dict(compute_metrics=Keep, **options)


def evaluate(trainer: Trainer, **options):
    metrics = trainer.evaluate(**options)
    return {"metrics": metrics, "seen": trainer.compute_metrics.seen if trainer.compute_metrics else None}


def predict(rows):
    def after(trainer: Trainer):
        return trainer.predict(rows())._asdict()

    return after


def three_sets():
    # Divided evenly by four ranks, with a rest, and with fewer rows than there are ranks.
    return {"even": Rows(4, seed=2), "rest": Rows(7, seed=3), "few": Rows(2, seed=4)}


EVALUATING = dict(eval_strategy="steps", eval_steps=1, eval_on_start=True, logging_steps=1)


@pytest.mark.slow
def test_evaluation_before_while_and_after_training():
    case = Case(
        plan=MIXED["mixed_a"],
        trainer=keep(eval_dataset=three_sets),
        options=EVALUATING | dict(max_steps=1),
        before=evaluate,
        after=predict(lambda: Rows(5, seed=6)),
    )
    check_cases({"mixed_a": case})


def check_plans(*names: str) -> None:
    """Compares predictions of 7 rows in the order of the data set."""
    check_cases({n: Case(plan=MIXED[n], train=None, after=predict(lambda: Rows(7, seed=3))) for n in names})


def test_plans_give_the_arrays_in_the_data_sets_order():
    check_plans("mixed_c", "shuffled")


@pytest.mark.slow
def test_more_plans_give_the_arrays_in_the_data_sets_order():
    check_plans("mixed_a", "mixed_b", "permuted")


# ---- Data sets and arguments, on two ranks ----


def untrained(data=lambda: Rows(5, seed=2), after=evaluate, own_options=None, **options: Any) -> Case:
    return Case(
        plan=REPLICATE,
        train=None,
        trainer=keep(eval_dataset=data),
        after=after,
        options=options,
        own_options=own_options or {},
    )


def unlabelled():
    return Rows(5, labels=False)


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_arrays_given_to_metrics(world_size):
    size, lengths = world_size // 2, dict(seed=2, shortest=1, longest=20)

    def rest():
        return Rows(5 * size, seed=2)

    def no_labels():
        return Rows(5 * size, labels=False)

    most_likely = untrained(lambda: Stream(6 * size, seed=2), per_device_eval_batch_size=2)
    cases = {
        "sets": untrained(lambda: {"one": Rows(1), "no_labels": no_labels(), "rest": Rows(7 * size, seed=2)}),
        "streams": untrained(lambda: {"rest": Stream(4 * size + 1, seed=2), "even": Stream(4 * size, seed=2)}),
        "two_a_rank_preprocessed": replace(
            most_likely,
            trainer=most_likely.trainer
            | dict(preprocess_logits_for_metrics=lambda: lambda logits, labels: logits.argmax(-1)),
        ),
        "loss_only": untrained(lambda: {"no_labels": no_labels(), "rest": Rows(5 * size)}, prediction_loss_only=True),
        "smoothing_by_batch": untrained(rest, label_smoothing_factor=0.1, batch_eval_metrics=True),
        "included_accumulated": untrained(rest, include_for_metrics=["inputs", "loss"], eval_accumulation_steps=2),
        "lists_drop_last": untrained(rest, eval_do_concat_batches=False, dataloader_drop_last=True),
        # Positions of padding have logits too, which packed documents would not give.
        "packing": untrained(lambda: Rows(5 * size, **lengths), own_options=dict(packing="static")),
        "two_a_rank_by_length": untrained(
            lambda: Rows(12 * size - 1, **lengths),
            train_sampling_strategy="group_by_length",
            per_device_eval_batch_size=2,
        ),
    }
    plan = replicated(world_size)
    check_cases({name: replace(case, plan=plan) for name, case in cases.items()}, world_size)


def predict_all(trainer: Trainer):
    data = (lambda: Rows(5, seed=7), unlabelled, lambda: Rows(1, seed=7), lambda: Stream(3, seed=7))
    return [predict(rows)(trainer) for rows in data]


def twice(trainer: Trainer):
    return [evaluate(trainer), evaluate(trainer)]


@pytest.mark.slow
def test_prediction_and_repeated_evaluation():
    check_cases(
        {
            "prediction": untrained(after=predict_all),
            "without_logits": untrained(after=partial(evaluate, ignore_keys=["logits"])),
            "several_labels": untrained(after=predict_all, label_names=["labels", "attention_mask"]),
            "another_label": untrained(label_names=["attention_mask"]),
            "persistent_workers": untrained(after=twice, dataloader_num_workers=1, dataloader_persistent_workers=True),
            "training_without_metrics": Case(
                plan=REPLICATE,
                trainer=dict(eval_dataset=three_sets),
                options=EVALUATING | dict(max_steps=2, per_device_eval_batch_size=2),
                before=evaluate,
            ),
        },
        world_size=2,
    )
