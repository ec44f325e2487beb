# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Losses as users write them, as subclasses of a Trainer class or as functions, for the trainer's tests."""

from __future__ import annotations

import torch

from oracle import Rows


def sum_of_losses(outputs, labels, num_items_in_batch=None):
    logits = outputs.logits[:, :-1].flatten(0, 1).float()
    return torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / num_items_in_batch


def mean_of_losses(logits, labels):
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def calls_super(trainer_class):
    class Scaled(trainer_class):
        def compute_loss(self, model, inputs, return_outputs=False, **options):
            loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **options)
            return (2 * loss, outputs) if return_outputs else 2 * loss

    return Scaled


def ignores_the_count(trainer_class):
    class ModelsOwn(trainer_class):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            outputs = model(**inputs)
            return (outputs.loss, outputs) if return_outputs else outputs.loss

    return ModelsOwn


def mean_of_logits(trainer_class):
    class FromLogits(trainer_class):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            loss = mean_of_losses(outputs.logits, labels)
            return (loss, outputs) if return_outputs else loss

    return FromLogits


def weighted_rows(trainer_class):
    class Weighted(trainer_class):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            weight, labels = inputs.pop("weight"), inputs.pop("labels")
            outputs = model(**inputs)
            losses = torch.nn.functional.cross_entropy(
                outputs.logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none"
            )
            loss = (losses.sum(1) * weight).sum() / num_items_in_batch
            return (loss, outputs) if return_outputs else loss

    return Weighted


class WeightedRows(Rows):
    def __getitem__(self, index):
        return super().__getitem__(index) | {"weight": 1.0 / (1 + index)}


def spoiled_by_a_row(trainer_class):
    """Makes the loss NaN if one row is in the batch; the gradient is right, so that training continues."""

    class Spoiled(trainer_class):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            spoils = bool((inputs["input_ids"][:, 1] == Rows(27).rows[5][1]).any())
            loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
            loss = loss + (float("nan") if spoils else 0.0)
            return (loss, outputs) if return_outputs else loss

    return Spoiled
