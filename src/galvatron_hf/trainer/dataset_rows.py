# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Which rows of the dataset a step's global batch holds, without reading them."""

from __future__ import annotations

import copy

import torch
from accelerate.data_loader import SeedableRandomSampler
from torch.utils.data import DataLoader, SequentialSampler


def dataset_rows(loader: DataLoader, step: int, accumulation: int) -> list[int] | None:
    """Indices in the dataset of the rows of one optimizer step's global batch, in its order.

    Args:
        loader (`DataLoader`): of the global batches.
        step (`int`): optimizer steps before this one, of all epochs.
        accumulation (`int`): batches of the loader that make a step.

    Returns:
        `list[int]`: or None where the sampler's order cannot be known without drawing from it, and for streams.
    """
    batches = getattr(loader, "batch_sampler", None)
    sampler = getattr(batches, "sampler", None)
    if not isinstance(sampler, (SequentialSampler, SeedableRandomSampler)):
        return None
    rows = batches.batch_size * accumulation
    epoch, step = divmod(step, -(-len(loader) // accumulation))
    return epoch_order(sampler, epoch)[step * rows : (step + 1) * rows]


def epoch_order(sampler: SequentialSampler | SeedableRandomSampler, epoch: int) -> list[int]:
    """The indices that a sampler gives in an epoch; the sampler stays as it is."""
    if isinstance(sampler, SequentialSampler):
        return list(sampler)
    again = copy.copy(sampler)
    again.epoch, again.generator = epoch, torch.Generator()
    return list(again)
