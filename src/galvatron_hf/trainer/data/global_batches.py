# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The batches of one process with the global batch size: read on rank 0, given to every rank."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from accelerate.data_loader import prepare_data_loader
from torch.utils.data import DataLoader, Sampler
from transformers import TrainingArguments
from transformers.trainer_pt_utils import LengthGroupedSampler

from galvatron_hf.data.loader import GlobalBatchLoader, join_batches, local_share, take_rows
from galvatron_hf.data.packing import BOUNDS
from galvatron_hf.utils.compat import keep_dataloader


class GlobalBatchMixin:
    """The part of [`GalvatronMixin`] that makes loaders and reads steps; see there."""

    def _get_dataloader(self, dataset, description: str, batch_size: int, *args, **kwargs) -> DataLoader:
        if not self._runs_parallel():
            return super()._get_dataloader(dataset, description, batch_size, *args, **kwargs)
        self.accelerator.prepare = self._prepare_loader
        try:
            loader = super()._get_dataloader(dataset, description, batch_size * self.args.world_size, *args, **kwargs)
        finally:
            del self.accelerator.prepare
        if kwargs.get("is_training", False):
            return loader
        shared, kept = GlobalBatchLoader(loader), getattr(self, "_eval_dataloaders", {})
        kept.update({key: shared for key, value in kept.items() if value is loader})
        return shared

    def _prepare_loader(self, loader: DataLoader) -> DataLoader:
        """Prepares a loader as accelerate does for a job of one process."""
        config = self.accelerator.dataloader_config
        prepared = prepare_data_loader(
            loader,
            device=self.args.device,
            num_processes=1,
            process_index=0,
            split_batches=False,
            put_on_device=False,
            rng_types=None,
            dispatch_batches=False,
            even_batches=config.even_batches,
            use_seedable_sampler=config.use_seedable_sampler,
            data_seed=config.data_seed,
            non_blocking=config.non_blocking,
            use_stateful_dataloader=config.use_stateful_dataloader,
        )
        keep_dataloader(self.accelerator, prepared)
        return prepared

    def _get_train_sampler(self, *args, **kwargs):
        return self._of_global_batches(super()._get_train_sampler(*args, **kwargs))

    def _get_eval_sampler(self, *args, **kwargs):
        return self._of_global_batches(super()._get_eval_sampler(*args, **kwargs))

    def _of_global_batches(self, sampler: Sampler | None) -> Sampler | None:
        if self._runs_parallel() and isinstance(sampler, LengthGroupedSampler):
            sampler.batch_size *= self.args.world_size
        return sampler

    def get_batch_samples(self, epoch_iterator: Iterator, num_batches: int, device: torch.device):
        """Reads the batches of one optimizer step on rank 0 and gives them to all ranks."""
        if self.parallel is None:
            return super().get_batch_samples(epoch_iterator, num_batches, device)
        batches = self._read_step(epoch_iterator, num_batches)
        if batches and len(batches) < num_batches:
            # The data ended inside a step: empty batches let Trainer's loop reach the step's end.
            batches += [take_rows(batches[-1], 0, 0)] * (num_batches - len(batches))
        samples = [local_share(batch, self.args.process_index, self.args.world_size) for batch in batches]
        return samples, self._get_num_items_in_batch(samples, device)

    def _joined(self, batches: list[dict[str, Any]]) -> dict[str, Any]:
        """One batch of all, without what collators say twice where they have packed already."""
        if all("position_ids" in batch for batch in batches):
            batches = [{name: x for name, x in batch.items() if name not in BOUNDS} for batch in batches]
        return join_batches(batches, self._pad_token_id)

    @property
    def _pad_token_id(self) -> int:
        pad = self.model.config.pad_token_id
        return pad if pad is not None and pad >= 0 else 0

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device):
        if self.parallel is None:
            return super()._get_num_items_in_batch(batch_samples, device)
        whole = [getattr(batch, "whole", batch) for batch in batch_samples]
        with as_one_process(self.args):
            return super()._get_num_items_in_batch(whole, device)


@contextlib.contextmanager
def as_one_process(args: TrainingArguments) -> Iterator[None]:
    """Keeps Trainer from gathering or scaling numbers that are global already."""
    average = args.average_tokens_across_devices
    args.average_tokens_across_devices = False
    try:
        yield
    finally:
        args.average_tokens_across_devices = average
