# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Writing of one checkpoint by all ranks: it is complete under its name, or it does not exist."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from transformers.utils import logging

from galvatron_hf.checkpoint.folder import STATE_FOLDER, commit, prune, start, unfinished
from galvatron_hf.checkpoint.manifest import FileEntry, Manifest
from galvatron_hf.parallel.comm.objects import on_every_rank
from galvatron_hf.parallel.model import ParallelModel
from galvatron_hf.parallel.weights.distributed_state import save_state
from galvatron_hf.utils.versions import versions_of


logger = logging.get_logger(__name__)


class SaveError(RuntimeError):
    """A checkpoint could not be written. Every rank raises it, and earlier checkpoints are as they were."""


def save_on_every_rank(work: Callable[[], None], what: str) -> None:
    """Runs every rank's part of saving, which must not be collective; every rank raises SaveError if one fails."""
    try:
        on_every_rank(work)
    except ValueError as error:
        raise SaveError(f"{what} failed ({error})") from error


@dataclass(kw_only=True)
class CheckpointWriter:
    """Writes one checkpoint after the other; all methods are collective.

    Args:
        in_background (`bool`): the tensors are copied, and written while training goes on.
        limit (`int`, *optional*): most complete checkpoints that stay.
        timeout (`timedelta`, *optional*): longest time that ranks wait for each other's writing in the background.
    """

    parallel: ParallelModel
    in_background: bool = False
    limit: int | None = None
    timeout: timedelta | None = None
    _group: dist.ProcessGroup | None = None
    _pending: Future | None = None
    _checkpoint: Path | None = None

    def start(self, checkpoint: Path) -> Path:
        """Starts a checkpoint; returns the folder for its files before [`CheckpointWriter.complete`]."""
        self._checkpoint = checkpoint
        save_on_every_rank(lambda: self._is_first and start(checkpoint), f"Starting {checkpoint}")
        return unfinished(checkpoint)

    def complete(self, step: int, optimizer: torch.optim.Optimizer | None, keep: Iterable[str | None]) -> None:
        """Writes the state of model and optimizer next to the files in the folder, and renames the folder. Without an
        optimizer no state is written. `step` counts the steps so far; pruning must not delete the checkpoints `keep`.
        """
        checkpoint, limit, keep = self._checkpoint, self.limit, list(keep)
        manifest = Manifest(step=step, files={}, plan=json.loads(self.parallel.plan.to_json()), versions=versions())

        def finish(files: dict[str, FileEntry]) -> None:
            commit(checkpoint, manifest, {f"{STATE_FOLDER}/{name}": entry for name, entry in files.items()})
            try:
                prune(checkpoint.parent, limit, [*keep, checkpoint])
            except OSError as error:
                logger.warning(f"{checkpoint} is complete, but older ones could not be deleted ({error}).")

        if optimizer is None:
            save_on_every_rank(lambda: finish({}) if self._is_first else None, f"Completing {checkpoint}")
            return
        if self.in_background and self._group is None:
            self._group = dist.new_group(backend="gloo", timeout=self.timeout)
        background = self._group if self.in_background else None
        folder = unfinished(checkpoint) / STATE_FOLDER
        try:
            self._pending = save_state(self.parallel, optimizer, folder, complete=finish, background=background)
        except dist.checkpoint.api.CheckpointException as error:
            raise SaveError(f"Writing {checkpoint} failed ({_reasons(error)})") from error

    def wait(self) -> float:
        """Waits for the checkpoint in the background; returns the seconds, or raises SaveError if writing failed."""
        if self._pending is None:
            return 0.0
        began, pending, self._pending = time.monotonic(), self._pending, None
        try:
            pending.result()
        except dist.checkpoint.api.CheckpointException as error:
            raise SaveError(f"Writing {self._checkpoint} failed ({_reasons(error)})") from error
        return time.monotonic() - began

    def abandon(self) -> Path | None:
        """Deletes the files of a failed save, if that is possible; returns the name of the lost checkpoint."""
        if self._is_first and self._checkpoint is not None:
            shutil.rmtree(unfinished(self._checkpoint), ignore_errors=True)
        return self._checkpoint

    @property
    def _is_first(self) -> bool:
        return dist.get_rank() == 0


def _reasons(error: dist.checkpoint.api.CheckpointException) -> str:
    found = {rank: failure[0] for rank, failure in error.failures.items()}
    return "; ".join(f"rank {rank}: {type(why).__name__}: {why}" for rank, why in sorted(found.items()))


def versions() -> dict[str, str]:
    """Returns the versions of the libraries that decide what a checkpoint holds."""
    return versions_of(("galvatron-hf", "torch", "transformers", "accelerate", "safetensors"))
