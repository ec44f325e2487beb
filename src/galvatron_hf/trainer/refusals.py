# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""A refusal that all ranks raise is shown once, by rank 0, as its sentence: no traceback from each rank."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator

import torch.distributed as dist

from galvatron_hf.utils.compat import default_store


WAIT_SECONDS = 5.0  # of a rank, for rank 0 to show the same refusal
_KEY = "galvatron_hf/refusal"


@contextlib.contextmanager
def told_once() -> Iterator[None]:
    """If the body raises ValueError and nothing catches it, the process ends with the error's sentence in place of its
    traceback, and ranks whose refusal rank 0 shows too say nothing.
    """
    try:
        yield
    except ValueError as error:
        if dist.is_initialized() and dist.get_world_size() > 1:
            error.refused_by = dist.get_rank()
            if sys.excepthook is not _show:
                _show.otherwise = sys.excepthook
                sys.excepthook = _show
        raise


def _show(kind: type[BaseException], error: BaseException, traceback) -> None:
    rank = getattr(error, "refused_by", None)
    if rank is None:
        _show.otherwise(kind, error, traceback)
        return
    text = f"{kind.__name__}: {error}"
    if rank == 0:
        print(text, file=sys.stderr, flush=True)
        with contextlib.suppress(Exception):
            default_store().set(_KEY, text)
    elif not _is_shown(text):
        print(f"rank {rank}: {text}", file=sys.stderr, flush=True)


def _is_shown(text: str) -> bool:
    """Returns whether rank 0 shows the same refusal. If its process has ended with the store, it has."""
    ends = time.monotonic() + WAIT_SECONDS
    try:
        while not default_store().check([_KEY]):
            if time.monotonic() > ends:
                return False
            time.sleep(0.05)
        return default_store().get(_KEY).decode() == text
    except Exception:
        return True
