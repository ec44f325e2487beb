# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Resumption of attempts that `torchrun --max_restarts` starts again."""

from __future__ import annotations

import os
from collections.abc import Callable

from transformers.utils import logging


logger = logging.get_logger(__name__)


def checkpoint_of_restart(output_dir: str, newest: Callable[[str], str | None]) -> str | None:
    """Returns the checkpoint that a restarted attempt resumes from; collective in such an attempt. `newest`
    (collective) finds it in `output_dir`, the same on every rank. It is None in a first attempt, or if nothing has
    been saved.
    """
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    if attempt == 0:
        _warn_of_shared_store()
        return None
    folder = newest(output_dir)
    found = f"resumes from {folder}" if folder else f"finds no checkpoint in {output_dir} and starts from step 0"
    logger.warning_once(f"Restart {attempt} of this job {found}.")
    return folder


def _warn_of_shared_store() -> None:
    """Warns of a store in which restarted ranks find the addresses of the first attempt, not each other's."""
    restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0))
    if restarts > 0 and os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") != "1":
        logger.warning_once(
            f"torchrun may restart this job {restarts} times, but all attempts share one store, in which a later one "
            "finds dead addresses; set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, and --standalone or --rdzv_backend c10d."
        )
