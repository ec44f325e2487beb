# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Which rows of the dataset a step's global batch holds, without reading them."""

from __future__ import annotations

import copy

import torch
from accelerate.data_loader import SeedableRandomSampler
from torch.utils.data import DataLoader, SequentialSampler


class DatasetRows:
    """Knows which rows of the dataset each step's global batch holds, without drawing from the sampler.

    Args:
        loader (`DataLoader`): of the global batches.
        accumulation (`int`): batches of the loader that make a step.

    Attributes:
        known (`bool`): False where the sampler's order cannot be known without drawing from it, and for streams.
        may_learn (`bool`): whether a sampler of the user's own may choose rows by what was trained before them.
    """

    def __init__(self, loader: DataLoader, accumulation: int):
        self._batches = getattr(loader, "batch_sampler", None)
        self._sampler = getattr(self._batches, "sampler", None)
        self.known = isinstance(self._sampler, (SequentialSampler, SeedableRandomSampler))
        self._steps = -(-len(loader) // accumulation) if self.known else 0
        self._rows = self._batches.batch_size * accumulation if self.known else 0
        self._most = len(loader) * self._batches.batch_size if self.known else 0  # a last, smaller batch may be left
        own = [type(one).__module__.split(".")[0] for one in (self._batches, self._sampler) if one is not None]
        self.may_learn = not set(own) <= {"torch", "accelerate", "transformers"}
        self._epoch: tuple[int, list[int]] | None = None

    def of_step(self, step: int) -> list[int]:
        """Indices in the dataset of a step's rows, in the global batch's order.

        Args:
            step (`int`): optimizer steps before this one, of all epochs.
        """
        epoch, step = divmod(step, self._steps)
        if self._epoch is None or self._epoch[0] != epoch:
            self._epoch = epoch, epoch_order(self._sampler, epoch)[: self._most]
        return self._epoch[1][step * self._rows : (step + 1) * self._rows]


def epoch_order(sampler: SequentialSampler | SeedableRandomSampler, epoch: int) -> list[int]:
    """The indices that a sampler gives in an epoch; the sampler stays as it is."""
    if isinstance(sampler, SequentialSampler):
        return list(sampler)
    again = copy.copy(sampler)
    again.epoch, again.generator = epoch, torch.Generator()
    return list(again)
