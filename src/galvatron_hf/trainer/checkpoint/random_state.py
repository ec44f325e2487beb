# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The random state of a process as JSON, so that a checkpoint needs no pickle.
Rank 0 reads the data, and layers have keyed streams, so rank 0's state is enough for any plan.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from galvatron_hf.plan.serialization import read_object


RANDOM_FILE = "rng_state_{}.json"


def random_state() -> dict[str, Any]:
    """Returns the states of Python's, NumPy's and PyTorch's generators of this process, as JSON values."""
    version, words, gauss = random.getstate()
    _, keys, position, has_gauss, cached_gauss = np.random.get_state()
    state = {
        "python": [version, list(words), gauss],
        "numpy": [keys.tolist(), int(position), int(has_gauss), float(cached_gauss)],
        "torch": _encoded(torch.get_rng_state()),
    }
    if torch.cuda.is_available():
        state["cuda"] = _encoded(torch.cuda.get_rng_state())
    return state


def restore_random_state(state: dict[str, Any]) -> None:
    """Restores a state that [`random_state`] returned; any other value raises ValueError and changes nothing."""
    before = random_state()
    try:
        _restore(state)
    except (ValueError, TypeError, KeyError, IndexError, OverflowError, RuntimeError, binascii.Error) as error:
        _restore(before)
        raise ValueError(
            f"the random state is damaged ({type(error).__name__}: {str(error)[:80]}); use another checkpoint."
        ) from None


def load_random_state(checkpoint: str, rank: int) -> bool:
    """Restores this rank's random state from a checkpoint, or else rank 0's; returns whether there is one."""
    for index in (rank, 0):
        path = Path(checkpoint) / RANDOM_FILE.format(index)
        if path.is_file():
            restore_random_state(read_object(path, "random state"))
            return True
    return False


@contextlib.contextmanager
def plain_random_files(checkpoint: str | None, rank: int, world_size: int) -> Iterator[str | None]:
    """Yields a folder in which plain Trainer finds a random state: this rank's, rank 0's, or one process's."""
    alone, several = "rng_state.pth", f"rng_state_{rank}.pth"
    wanted = several if world_size > 1 else alone
    names = (wanted, "rng_state_0.pth", alone) if checkpoint is not None else ()
    found = [name for name in names if os.path.isfile(os.path.join(checkpoint, name))]
    if not found or found[0] == wanted:
        yield checkpoint
        return
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(os.path.join(checkpoint, found[0]), os.path.join(folder, wanted))
        yield folder


def _restore(state: dict[str, Any]) -> None:
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    keys, position, has_gauss, cached_gauss = state["numpy"]
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, cached_gauss))
    torch.set_rng_state(_decoded(state["torch"]))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(_decoded(state["cuda"]))


def _encoded(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _decoded(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text, validate=True)), dtype=torch.uint8)
