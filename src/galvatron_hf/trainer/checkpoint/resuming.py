# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Which checkpoint a run goes on from: the newest complete one, all of whose files are what they were."""

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


class ResumeMixin:
    """The part of [`GalvatronMixin`] that chooses a checkpoint; see there."""

    def _checkpoint_to_resume(self, asked: str | bool | None) -> str | None:
        """The complete checkpoint that a run resumes from; collective.

        Args:
            asked (`str` or `bool`, *optional*): a checkpoint, or a folder of them, or True for the output folder.

        Raises:
            ValueError: if there is none, or the one that is asked for is damaged.
        """
        if not asked:
            return None
        folder = self.args.output_dir if asked is True else os.fspath(asked)
        if asked is not True and not self._rank_0_says(lambda: [str(path) for path in by_step(folder)]):
            self._require_complete(folder)
            return folder
        found = self._newest_checkpoint(folder)
        if found is None:
            raise ValueError(f"{folder} has no complete checkpoint to resume from; start without resuming.")
        return found

    def _newest_checkpoint(self, folder: str) -> str | None:
        """The newest complete checkpoint of a folder, and a warning for each that is newer; collective."""
        found, skipped = self._newest_complete(folder)
        for reason in skipped:
            logger.warning(f"Skipped {reason}.")
        return found

    def _newest_complete(self, folder: str) -> tuple[str | None, list[str]]:
        """The newest complete checkpoint of a folder, and what is wrong with newer ones; collective."""
        skipped = self._rank_0_says(lambda: _never_completed(folder))
        for path in reversed(self._rank_0_says(lambda: [str(path) for path in by_step(folder)])):
            wrong = self._problems(path)
            if not wrong:
                return path, skipped
            skipped.append(f"{path}: {wrong[0]}")
        return None, skipped

    def _require_complete(self, checkpoint: str) -> None:
        wrong = self._problems(checkpoint)
        if wrong:
            beside, _ = self._newest_complete(os.path.dirname(os.path.abspath(checkpoint)))
            fix = f"resume from {beside}" if beside else "there is no complete one beside it, so start anew"
            raise ValueError(f"{checkpoint} is damaged ({'; '.join(wrong[:3])}); {fix}.")

    def _problems(self, checkpoint: str) -> list[str]:
        """What is wrong with a checkpoint, the ranks sharing the reading; collective."""
        wrong = self._rank_0_says(lambda: _unfit(checkpoint))
        if wrong or not self._rank_0_says(lambda: [path.name for path in Path(checkpoint).glob(MANIFEST_NAME)]):
            return wrong
        part, parts = self.args.process_index, self.args.world_size
        own = on_every_rank(lambda: list(Manifest.read(checkpoint).changed(checkpoint, part, parts)))
        return [problem for of_rank in self._of_all_ranks(own) for problem in of_rank]

    def _rank_0_says(self, work: Callable[[], list[str]]) -> list[str]:
        return self._of_all_ranks(on_every_rank(lambda: work() if self.args.process_index == 0 else []))[0]

    def _of_all_ranks(self, own: list[str]) -> list[list[str]]:
        return gather_objects(own) if self.args.world_size > 1 else [own]


def _never_completed(folder: str) -> list[str]:
    finish_renaming(folder)
    return [f"{path}: it was never completed" for path in left_behind(folder)]


def _unfit(checkpoint: str) -> list[str]:
    """Why a folder cannot be resumed from, as far as names and sizes tell.

    One of plain Trainer has no manifest; its state is written last, so that one with a state is taken for whole.
    """
    if os.path.isfile(os.path.join(checkpoint, MANIFEST_NAME)):
        return list(structural_problems(checkpoint))
    if not os.path.isdir(checkpoint):
        return ["there is no such folder"]
    if os.path.isdir(os.path.join(checkpoint, STATE_FOLDER)):
        return [f"it has no {MANIFEST_NAME}, which is written last"]
    try:
        # Not by read_object: Trainer writes NaN into it, and a line for every log of a long run.
        json.loads((Path(checkpoint) / TRAINER_STATE_NAME).read_text())
    except (OSError, ValueError, RecursionError) as error:
        return [f"its {TRAINER_STATE_NAME} cannot be read ({error})"]
    logger.warning(f"{checkpoint} has no {MANIFEST_NAME}, so its files cannot be checked before they are loaded.")
    return []
