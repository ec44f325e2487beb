# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Global batches: read and collated once, on rank 0, and broadcast to every rank.
One reader works with any collator, random ones too: all ranks get the batch of a single process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from accelerate.data_loader import DataLoaderStateMixin
from accelerate.state import GradientState
from torch.utils.data import DataLoader

from galvatron_hf.models.input_names import AUDIO
from galvatron_hf.models.losses import IGNORED, NEXT_TOKEN
from galvatron_hf.parallel.comm.objects import broadcast_object
from galvatron_hf.utils.compat import register_dataloader, unregister_dataloader


def batch_rows(batch: dict[str, Any]) -> int:
    """Returns the number of rows of a batch: the first dimension of `input_ids`, or else of its first tensor."""
    if isinstance(batch.get("input_ids"), torch.Tensor):
        return batch["input_ids"].shape[0]
    return next(value.shape[0] for value in batch.values() if isinstance(value, torch.Tensor) and value.ndim > 0)


def equal_share(batch: dict[str, Any], rank: int, world_size: int) -> dict[str, Any]:
    """Returns a rank's share for gathering: all ranks have equally many rows; the last row is repeated as padding."""
    rows = batch_rows(batch)
    share = -(-rows // world_size)
    index = torch.arange(rank * share, (rank + 1) * share).clamp(max=rows - 1)
    return {
        name: value[index.to(value.device)]
        if isinstance(value, torch.Tensor) and value.ndim and value.shape[0] == rows
        else value
        for name, value in batch.items()
    }


def fill_rows(batch: dict[str, Any], rows: int) -> dict[str, Any]:
    """Appends copies of the last row, without targets, until there are `rows` rows. Then `added_rows` [rows] is true
    for them.
    """
    real = batch_rows(batch)
    if real >= rows:
        return batch
    index = torch.arange(rows).clamp(max=real - 1)
    filled = dict(batch)
    for name, value in batch.items():
        if isinstance(value, torch.Tensor) and value.ndim and value.shape[0] == real:
            filled[name] = value[index.to(value.device)]
            if name in NEXT_TOKEN.names:
                filled[name][real:] = IGNORED
    return filled | {"added_rows": torch.arange(rows, device=_device(batch)) >= real}


def _device(batch: dict[str, Any]) -> torch.device:
    return next(value.device for value in batch.values() if isinstance(value, torch.Tensor))


def join_batches(batches: list[dict[str, Any]], pad_token_id: int) -> dict[str, Any]:
    """Joins batches by rows; shorter rows are padded with positions that have no target. Tensors are [B_i, S_i], or
    [B_i, ...] with equal trailing shapes; other differences, and those of recordings, raise ValueError. `pad_token_id`
    pads `input_ids`.
    """
    if len(batches) == 1:
        return dict(batches[0])
    fill = {"input_ids": pad_token_id} | dict.fromkeys(NEXT_TOKEN.names, IGNORED)
    joined = {}
    for name, first in batches[0].items():
        values = [batch[name] for batch in batches]
        if not isinstance(first, torch.Tensor) or first.ndim == 0:
            joined[name] = first
            continue
        # Position ids may have one row for all rows of a batch.
        counts = [batch_rows(batch) for batch in batches]
        values = [
            value.expand(count, *value.shape[1:]) if value.shape[0] == 1 else value
            for value, count in zip(values, counts, strict=True)
        ]
        shapes = {value.shape[1:] for value in values}
        # Padding changes what the convolutions of recordings compute, which no mask hides.
        if len(shapes) > 1 and (name == AUDIO or any(value.ndim != 2 for value in values)):
            raise ValueError(
                f"{name!r} has the shapes {sorted(map(tuple, shapes))} in the batches of one step, which cannot be "
                "joined; let the collator pad it to one shape."
            )
        if len(shapes) > 1:
            length = max(value.shape[1] for value in values)
            values = [_lengthen(value, length, fill.get(name, 0)) for value in values]
        joined[name] = torch.cat(values)
    return joined


def _lengthen(tensor: torch.Tensor, length: int, value: int) -> torch.Tensor:
    return torch.nn.functional.pad(tensor, (0, length - tensor.shape[1]), value=value)


def read_once(read: Callable[[], Any]) -> Any:
    """Calls `read` on rank 0 and returns its result on every rank; collective. If `read` fails, rank 0 raises its
    error and every other rank a RuntimeError.
    """
    result, failure = None, None
    if dist.get_rank() == 0:
        try:
            result = read()
        except Exception as error:  # told to the other ranks before it is raised
            failure = error
    message = (result, None if failure is None else f"{type(failure).__name__}: {failure}")
    message = broadcast_object(message)
    if failure is not None:
        raise failure
    result, text = message
    if text is not None:
        raise RuntimeError(f"Rank 0 could not read the next batch ({text}); see its traceback.")
    return result


class GlobalBatchLoader(DataLoaderStateMixin):
    """Iterates over a loader's global batches on every rank. `loader` is prepared for one process; only rank 0 reads
    from it.
    """

    def __init__(self, loader: DataLoader):
        self.loader = loader
        self.dataset = loader.dataset
        self.batch_sampler = loader.batch_sampler
        self.gradient_state = GradientState()
        self.iteration = 0

    def __len__(self) -> int:
        return len(self.loader)

    @property
    def total_batch_size(self) -> int:
        return self.loader.batch_size or self.batch_sampler.batch_size

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self.loader, "set_epoch"):
            self.loader.set_epoch(epoch)

    def _rows_of_last(self, batch: dict[str, Any]) -> int:
        """Returns the dataset's rows in a smaller last batch, as accelerate counts them: 0 if there is none, those of
        the batch itself if the dataset has no length.
        """
        if getattr(self.loader, "_drop_last", False):
            return 0
        try:
            return len(self.dataset) % self.total_batch_size
        except TypeError:
            return batch_rows(batch)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.reset()
        self.set_epoch(self.iteration)  # as accelerate's loader does when it begins
        register_dataloader(self.gradient_state, self)
        try:
            # Not through accelerate's wrapper, which would register a second dataloader on rank 0 alone.
            iterator = iter(getattr(self.loader, "base_dataloader", self.loader)) if dist.get_rank() == 0 else None
            following = read_once(lambda: next(iterator, None))
            while following is not None:
                batch, following = following, read_once(lambda: next(iterator, None))
                self.end_of_dataloader = following is None
                self.remainder = self._rows_of_last(batch) if self.end_of_dataloader else -1
                yield batch
        finally:
            self.iteration += 1
            unregister_dataloader(self.gradient_state, self)
