# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Random streams that are equal on replicas, different on shards, and repeated by recompute and resume."""

from __future__ import annotations

import contextlib
import hashlib
import struct
from collections.abc import Iterator

import numpy as np
import torch


def stream_key(*parts: int) -> int:
    """Returns a 63-bit seed that depends on every part and on their order, the same on every machine."""
    digest = hashlib.blake2b(struct.pack(f"<{len(parts)}q", *parts), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@contextlib.contextmanager
def random_stream(device: torch.device, *parts: int) -> Iterator[None]:
    """Runs its body on the random stream keyed by `parts`, then restores the state of the device's default generator.
    Parts are for example (seed, step, micro-batch, layer, first row, first position).
    """
    generator = torch.default_generator
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        generator = torch.cuda.default_generators[index]
    state = generator.get_state()
    generator.manual_seed(stream_key(*parts))
    try:
        yield
    finally:
        generator.set_state(state)


@contextlib.contextmanager
def numpy_stream(*parts: int) -> Iterator[None]:
    """Runs its body on the stream of NumPy's generator keyed by `parts`, then restores the generator's state."""
    state = np.random.get_state()
    np.random.seed(stream_key(*parts) % 2**32)
    try:
        yield
    finally:
        np.random.set_state(state)
