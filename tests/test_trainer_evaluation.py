# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""evaluate() and predict() under a plan give plain Trainer's metrics and arrays on the global batch; see oracle.py."""

from __future__ import annotations

import numpy as np
import torch
from transformers import Trainer

from galvatron_hf.plan import LayerStrategy, VocabularyStrategy
from oracle import Case, Rows, Stream, check_cases
from plans import mixed_plans, uniform


S, V = LayerStrategy, VocabularyStrategy
MIXED = mixed_plans()
REPLICATE = uniform(4, sharding="replicate", embedding=V(sharding="replicate"))


class Keep:
    """A metric that keeps what it was given, so that whole arrays can be compared."""

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


def most_likely(logits, labels):
    return logits.argmax(-1)


def three_sets():
    # Divided evenly, with a rest, and with fewer rows than there are ranks.
    return {"even": Rows(8, seed=2), "rest": Rows(7, seed=3), "few": Rows(2, seed=4)}


def test_evaluation_while_training():
    options = dict(eval_strategy="steps", eval_steps=1, eval_on_start=True, max_steps=2, logging_steps=1)
    check_cases(
        {
            "sets": Case(
                plan=MIXED["mixed_a"],
                trainer=keep(eval_dataset=three_sets),
                options=options | dict(max_steps=1),
                before=evaluate,
                after=predict(lambda: Rows(5, seed=6)),
            ),
            "loss_only": Case(
                plan=REPLICATE,
                trainer=dict(eval_dataset=three_sets),
                options=options | dict(per_device_eval_batch_size=2),
                before=evaluate,
            ),
        }
    )


def untrained(plan=REPLICATE, rows=lambda: Rows(10, seed=2), **changes) -> Case:
    trainer = keep(eval_dataset=rows) | changes.pop("trainer", {})
    return Case(plan=plan, train=None, trainer=trainer, **({"after": evaluate} | changes))


def test_arrays_given_to_metrics():
    check_cases(
        {
            "per_rank_two": untrained(options=dict(per_device_eval_batch_size=2)),
            "one_row": untrained(rows=lambda: Rows(1)),
            "stream": untrained(rows=lambda: Stream(9, seed=2)),
            "stream_even": untrained(rows=lambda: Stream(8, seed=2)),
            "stream_two": untrained(rows=lambda: Stream(12, seed=2), options=dict(per_device_eval_batch_size=2)),
            "no_labels": untrained(rows=lambda: Rows(5, labels=False)),
            "loss_only": untrained(options=dict(prediction_loss_only=True)),
            "no_labels_loss_only": untrained(
                rows=lambda: Rows(5, labels=False), options=dict(prediction_loss_only=True)
            ),
            "preprocessed": untrained(trainer=dict(preprocess_logits_for_metrics=lambda: most_likely)),
            "by_batch": untrained(options=dict(batch_eval_metrics=True)),
            "included": untrained(options=dict(include_for_metrics=["inputs", "loss"])),
            "accumulated": untrained(options=dict(eval_accumulation_steps=2)),
            "lists": untrained(options=dict(eval_do_concat_batches=False)),
            "smoothing": untrained(options=dict(label_smoothing_factor=0.1)),
            # Positions of padding have logits too, which packed documents would not give.
            "packing": untrained(
                rows=lambda: Rows(10, seed=2, shortest=1, longest=20), own_options=dict(packing="static")
            ),
            "drop_last": untrained(options=dict(dataloader_drop_last=True)),
            "by_length": untrained(
                rows=lambda: Rows(23, seed=2, shortest=1, longest=20),
                options=dict(train_sampling_strategy="group_by_length"),
            ),
        }
    )


def test_plans_give_the_arrays_in_the_data_sets_order():
    check_cases({name: untrained(plan, after=predict(lambda: Rows(7, seed=3))) for name, plan in MIXED.items()})


def twice(trainer: Trainer):
    return [evaluate(trainer), evaluate(trainer)]


def test_prediction_and_repeated_evaluation():
    check_cases(
        {
            "labels": untrained(after=predict(lambda: Rows(6, seed=7))),
            "no_labels": untrained(after=predict(lambda: Rows(6, seed=7, labels=False))),
            "few": untrained(after=predict(lambda: Rows(3, seed=7))),
            "stream": untrained(after=predict(lambda: Stream(5, seed=7))),
            "persistent_workers": untrained(
                after=twice, options=dict(dataloader_num_workers=1, dataloader_persistent_workers=True)
            ),
        }
    )
