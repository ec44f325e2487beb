# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Loaders and samplers of global batches: every rank sees what one process sees."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

from accelerate.data_loader import prepare_data_loader
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler
from transformers import PreTrainedModel, TrainingArguments
from transformers.trainer_pt_utils import LengthGroupedSampler

from accelerate import Accelerator
from galvatron_hf.data.loader import join_batches, read_once
from galvatron_hf.data.packing import BOUNDS
from galvatron_hf.trainer.arguments import batch_rows_of
from galvatron_hf.trainer.fault.stop_signal import keep_workers
from galvatron_hf.utils.compat import keep_dataloader


# Of a loader, beside its dataset and batches.
_LOADER_OPTIONS = (
    *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context"),
    *("generator", "prefetch_factor", "persistent_workers", "pin_memory_device", "in_order"),
)


class JoinedBatches:
    """Joins consecutive batches of indices, as the ranks of a step would take them; else like `batches`."""

    def __init__(self, batches: Any, times: int):
        self.batches, self.times = batches, times

    def __iter__(self) -> Iterator[list[int]]:
        batches = iter(self.batches)
        while joined := [index for batch in itertools.islice(batches, self.times) for index in batch]:
            yield joined

    def __len__(self) -> int:
        return -(-len(self.batches) // self.times)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.batches, name)
        return value * self.times if name == "batch_size" else value


class GlobalBatches:
    """Makes loaders read the batches of all ranks together: every rank sees what one process sees."""

    def __init__(self, args: TrainingArguments):
        self.args, self._trains = args, False

    @property
    def times(self) -> Fraction:
        """Returns the batches of a loader that make a global batch: one for each rank, unless `global_batch_size` or
        accelerate's `split_batches` says how many rows a batch of training has on all ranks together.
        """
        if self._trains:
            return Fraction(batch_rows_of(self.args), self.args.train_batch_size)
        return Fraction(1 if self.args.accelerator_config.split_batches else self.args.world_size)

    @contextlib.contextmanager
    def of_training(self) -> Iterator[None]:
        """Has loaders that are prepared in the body read batches of training."""
        before, self._trains = self._trains, True
        try:
            yield
        finally:
            self._trains = before

    def sampler(self, sampler: Sampler | None) -> Sampler | None:
        """Returns a sampler that groups rows by length over the global batch, if it groups at all."""
        if isinstance(sampler, LengthGroupedSampler):
            sampler.batch_size = self._rows(sampler.batch_size)
        return sampler

    def _rows(self, rows: int) -> int:
        whole = rows * self.times
        if whole.denominator != 1:
            raise ValueError(
                f"A loader has batches of {rows} rows, of which {self.times} make the batch of all ranks; give it "
                f"batches of per_device_train_batch_size={self.args.per_device_train_batch_size} rows."
            )
        return whole.numerator

    def set_up(self, accelerator: Accelerator) -> None:
        """Has accelerate prepare every loader as in a job of one process, and gather nothing: all ranks have all."""
        for name in ("gather", "gather_for_metrics", "pad_across_processes", "reduce"):
            setattr(accelerator, name, lambda tensors, *args, **kwargs: tensors)
        accelerator.prepare_data_loader = lambda loader, *args, **kwargs: self.prepare(accelerator, loader)

    def prepare(self, accelerator: Accelerator, loader: DataLoader) -> DataLoader:
        if getattr(loader, "_is_accelerate_prepared", False):
            return loader
        config, joined = accelerator.dataloader_config, self.joined(loader)
        keep_workers(joined)
        prepared = prepare_data_loader(
            joined,
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
        keep_dataloader(accelerator, prepared)
        return prepared

    def joined(self, loader: DataLoader) -> DataLoader:
        """Returns a loader of global batches, collated at once. A loader that makes no batches raises ValueError."""
        if self.times == 1:
            return loader
        if loader.batch_size is None and loader.batch_sampler is None:
            raise ValueError(
                "The loader has no batch_size, so its items cannot be joined to the batch of all ranks; give it a "
                "batch_size or a batch_sampler."
            )
        kept = {name: getattr(loader, name) for name in _LOADER_OPTIONS}
        if type(loader.batch_sampler) in (BatchSampler, type(None)):
            kept |= {"batch_size": self._rows(loader.batch_size), "drop_last": loader.drop_last}
            if not isinstance(loader.dataset, IterableDataset):
                kept["sampler"] = loader.sampler
        else:
            kept["batch_sampler"] = JoinedBatches(loader.batch_sampler, self._rows(1))
        return DataLoader(loader.dataset, **kept)


class SharedIterator:
    """Iterates on every rank over what rank 0 reads."""

    def __init__(self, iterator: Iterator):
        self.iterator = iterator

    def __iter__(self) -> SharedIterator:
        return self

    def __next__(self) -> dict[str, Any]:
        found = read_once(lambda: next(self.iterator, None))
        if found is None:
            raise StopIteration
        return found


def join(batches: list[dict[str, Any]], pad_token_id: int) -> dict[str, Any]:
    """Joins the batches of a step by rows, without the bounds that packing collators give besides position ids."""
    if all("position_ids" in batch for batch in batches):
        batches = [{name: x for name, x in batch.items() if name not in BOUNDS} for batch in batches]
    return join_batches(batches, pad_token_id)


def pad_token_id(model: PreTrainedModel) -> int:
    """Returns the model's padding token, 0 if it has none."""
    pad = getattr(model.config, "pad_token_id", None)  # those of images have none
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
