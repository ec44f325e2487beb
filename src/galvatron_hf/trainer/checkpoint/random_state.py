# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The random generators of a process as JSON, so that a checkpoint needs no pickle."""

from __future__ import annotations

import base64
import binascii
import random
from typing import Any

import numpy as np
import torch


def random_state() -> dict[str, Any]:
    """What Python's, NumPy's and PyTorch's generators of this process will draw next, as JSON values."""
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
    """Puts the generators where [`random_state`] found them.

    Raises:
        ValueError: if it is no such state; no generator is changed then.
    """
    before = random_state()
    try:
        _restore(state)
    except (ValueError, TypeError, KeyError, IndexError, OverflowError, RuntimeError, binascii.Error) as error:
        _restore(before)
        raise ValueError(
            f"the random state is damaged ({type(error).__name__}: {str(error)[:80]}); use another checkpoint."
        ) from None


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
