# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Indices of the dataset rows in each step's global batch, without reading the rows."""

from __future__ import annotations

import copy

import torch
from accelerate.data_loader import SeedableRandomSampler
from torch.utils.data import DataLoader, SequentialSampler


class DatasetRows:
    """Finds the dataset rows of each step's global batch without drawing from the sampler. A step has `accumulation`
    batches of `loader`.

    Attributes:
        known (`bool`): False for streams, and if the sampler's order is known only by drawing from it.
        may_learn (`bool`): a custom sampler may choose rows by the training steps before them.
    """

    def __init__(self, loader: DataLoader, accumulation: int):
        self._batches = getattr(loader, "batch_sampler", None)
        self._sampler = getattr(self._batches, "sampler", None)
        self.known = isinstance(self._sampler, (SequentialSampler, SeedableRandomSampler))
        self._steps = -(-len(loader) // accumulation) if self.known else 0
        self._rows = self._batches.batch_size * accumulation if self.known else 0
        self._most = len(loader) * self._batches.batch_size if self.known else 0  # a last, smaller batch may be left
        modules = [type(one).__module__.split(".")[0] for one in (self._batches, self._sampler) if one is not None]
        self.may_learn = not set(modules) <= {"torch", "accelerate", "transformers"}
        self._epoch: tuple[int, list[int]] | None = None

    def of_step(self, step: int) -> list[int]:
        """Returns a step's row indices in the order of the global batch; `step` counts from 0 over all epochs."""
        epoch, step = divmod(step, self._steps)
        if self._epoch is None or self._epoch[0] != epoch:
            self._epoch = epoch, epoch_order(self._sampler, epoch)[: self._most]
        return self._epoch[1][step * self._rows : (step + 1) * self._rows]


def epoch_order(sampler: SequentialSampler | SeedableRandomSampler, epoch: int) -> list[int]:
    """Returns the indices that a sampler gives in an epoch; the sampler does not change."""
    if isinstance(sampler, SequentialSampler):
        return list(sampler)
    again = copy.copy(sampler)
    again.epoch, again.generator = epoch, torch.Generator()
    return list(again)
