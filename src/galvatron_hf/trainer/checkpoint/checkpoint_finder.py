# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The choice of a checkpoint to resume from: the newest complete one whose files are unchanged."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

from transformers.trainer import TRAINER_STATE_NAME
from transformers.utils import logging

from galvatron_hf.checkpoint.folder import (
    STATE_FOLDER,
    by_step,
    finish_renaming,
    left_behind,
    structural_problems,
)
from galvatron_hf.checkpoint.manifest import MANIFEST_NAME, Manifest
from galvatron_hf.parallel.comm.objects import gather_objects, on_every_rank


logger = logging.get_logger(__name__)


class CheckpointFinder:
    """Finds and checks checkpoints; all methods are collective. Rank 0 lists folders, and all ranks read files."""

    def __init__(self, rank: int, world_size: int):
        self.rank, self.world_size = rank, world_size

    def to_resume(self, asked: str | bool | None, output_dir: str) -> str | None:
        """Returns the complete checkpoint that a run resumes from. `asked` is a checkpoint, or a folder of
        checkpoints, or True for `output_dir`. If there is no complete one, or the given one is damaged, raises
        ValueError.
        """
        if not asked:
            return None
        folder = output_dir if asked is True else os.fspath(asked)
        if asked is not True and not self._rank_0_says(lambda: [str(path) for path in by_step(folder)]):
            self.require_complete(folder)
            return folder
        found = self.newest(folder)
        if found is None:
            raise ValueError(f"{folder} has no complete checkpoint to resume from; start without resuming.")
        return found

    def newest(self, folder: str) -> str | None:
        """Returns the newest complete checkpoint of a folder, and warns of each newer, damaged one."""
        found, skipped = self._newest_complete(folder)
        for reason in skipped:
            logger.warning(f"Skipped {reason}.")
        return found

    def require_complete(self, checkpoint: str) -> None:
        """Raises ValueError if a checkpoint is damaged."""
        wrong = self._problems(checkpoint)
        if wrong:
            folder = os.path.dirname(os.path.abspath(checkpoint))
            other, _ = self._newest_complete(folder)
            fix = f"resume from {other}" if other else f"no checkpoint in {folder} is complete, so start anew"
            raise ValueError(f"{checkpoint} is damaged ({'; '.join(wrong[:3])}); {fix}.")

    def _newest_complete(self, folder: str) -> tuple[str | None, list[str]]:
        """Returns the newest complete checkpoint of a folder, and the problems of newer ones."""
        skipped = self._rank_0_says(lambda: _never_completed(folder))
        for path in reversed(self._rank_0_says(lambda: [str(path) for path in by_step(folder)])):
            wrong = self._problems(path)
            if not wrong:
                return path, skipped
            skipped.append(f"{path}: {wrong[0]}")
        return None, skipped

    def _problems(self, checkpoint: str) -> list[str]:
        """Returns the problems of a checkpoint; each rank reads a part of its files."""
        wrong = self._rank_0_says(lambda: _unfit(checkpoint))
        if wrong or not self._rank_0_says(lambda: [path.name for path in Path(checkpoint).glob(MANIFEST_NAME)]):
            return wrong
        part, parts = self.rank, self.world_size
        changed = on_every_rank(lambda: list(Manifest.read(checkpoint).changed(checkpoint, part, parts)))
        return [problem for of_rank in self._gather(changed) for problem in of_rank]

    def _rank_0_says(self, work: Callable[[], list[str]]) -> list[str]:
        return self._gather(on_every_rank(lambda: work() if self.rank == 0 else []))[0]

    def _gather(self, texts: list[str]) -> list[list[str]]:
        return gather_objects(texts) if self.world_size > 1 else [texts]


def _never_completed(folder: str) -> list[str]:
    finish_renaming(folder)
    return [f"{path}: it was never completed" for path in left_behind(folder)]


def _unfit(checkpoint: str) -> list[str]:
    """Returns why a folder cannot be resumed from, as far as names and sizes tell. A checkpoint of plain Trainer has
    no manifest. Its state is written last, so a checkpoint with a state is taken for complete.
    """
    if os.path.isfile(os.path.join(checkpoint, MANIFEST_NAME)):
        return list(structural_problems(checkpoint))
    if not os.path.isdir(checkpoint):
        return ["there is no such folder"]
    if os.path.isdir(os.path.join(checkpoint, STATE_FOLDER)):
        return [f"it has no {MANIFEST_NAME}, which is written last"]
    try:
        # Not by read_object: Trainer writes NaN into the file, and a line for every log of a long run.
        json.loads((Path(checkpoint) / TRAINER_STATE_NAME).read_text())
    except (OSError, ValueError, RecursionError) as error:
        return [f"its {TRAINER_STATE_NAME} cannot be read ({error})"]
    logger.warning(f"{checkpoint} has no {MANIFEST_NAME}, so its files cannot be checked before they are loaded.")
    return []
