# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Loaders and samplers of global batches, as one process would read them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from accelerate.data_loader import prepare_data_loader
from torch.utils.data import DataLoader, Sampler
from transformers import PreTrainedModel, TrainingArguments
from transformers.trainer_pt_utils import LengthGroupedSampler

from accelerate import Accelerator
from galvatron_hf.data.loader import RankBatch, join_batches, local_share, take_rows
from galvatron_hf.data.packing import BOUNDS
from galvatron_hf.utils.compat import keep_dataloader


class GlobalBatches:
    """Makes loaders read batches of all ranks together, and gives each rank its rows of them."""

    def __init__(self, args: TrainingArguments):
        self.rank, self.world_size, self.device = args.process_index, args.world_size, args.device

    def sampler(self, sampler: Sampler | None) -> Sampler | None:
        """Returns a sampler that groups rows by length over the global batch, if it groups at all."""
        if isinstance(sampler, LengthGroupedSampler):
            sampler.batch_size *= self.world_size
        return sampler

    @contextlib.contextmanager
    def preparing(self, accelerator: Accelerator) -> Iterator[None]:
        """Has accelerate prepare loaders as in a job of one process."""
        accelerator.prepare = lambda loader: self._prepare(accelerator, loader)
        try:
            yield
        finally:
            del accelerator.prepare

    def _prepare(self, accelerator: Accelerator, loader: DataLoader) -> DataLoader:
        config = accelerator.dataloader_config
        prepared = prepare_data_loader(
            loader,
            device=self.device,
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
        keep_dataloader(accelerator, prepared)
        return prepared

    def shares(self, batches: list[dict[str, Any]], count: int) -> list[RankBatch]:
        """Returns this rank's rows of a step's batches. If the data has ended inside a step, empty batches are added
        up to `count`: Trainer's loop then reaches the end of the step.
        """
        if batches and len(batches) < count:
            batches = batches + [take_rows(batches[-1], 0, 0)] * (count - len(batches))
        return [local_share(batch, self.rank, self.world_size) for batch in batches]


def join(batches: list[dict[str, Any]], pad_token_id: int) -> dict[str, Any]:
    """Joins the batches of a step by rows, without the bounds that packing collators give besides position ids."""
    if all("position_ids" in batch for batch in batches):
        batches = [{name: x for name, x in batch.items() if name not in BOUNDS} for batch in batches]
    return join_batches(batches, pad_token_id)


def pad_token_id(model: PreTrainedModel) -> int:
    """Returns the model's padding token, 0 if it has none."""
    pad = model.config.pad_token_id
    return pad if pad is not None and pad >= 0 else 0


@contextlib.contextmanager
def as_one_process(args: TrainingArguments) -> Iterator[None]:
    """Keeps Trainer from gathering or scaling numbers that are global already."""
    average = args.average_tokens_across_devices
    args.average_tokens_across_devices = False
    try:
        yield
    finally:
        args.average_tokens_across_devices = average
