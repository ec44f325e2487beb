# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Records what is read from safetensors files."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from galvatron_hf.parallel.weights import joined_tensors


@contextlib.contextmanager
def recorded_reads() -> Iterator[list[tuple[str, int]]]:
    """Yields a list that grows by the key and the number of elements of each read while the body runs."""
    reads: list[tuple[str, int]] = []
    opened = joined_tensors.safe_open

    class Slice:
        def __init__(self, key, inner):
            self.key, self.inner = key, inner

        def __getitem__(self, region):
            piece = self.inner[region]
            reads.append((self.key, piece.numel()))
            return piece

    class File:
        def __init__(self, *args, **kwargs):
            self.inner = opened(*args, **kwargs)

        def __enter__(self):
            self.file = self.inner.__enter__()
            return self

        def __exit__(self, *error):
            return self.inner.__exit__(*error)

        def get_slice(self, key):
            return Slice(key, self.file.get_slice(key))

    joined_tensors.safe_open = File
    try:
        yield reads
    finally:
        joined_tensors.safe_open = opened
