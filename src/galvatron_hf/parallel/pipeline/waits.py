# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Measures the time for which a rank of a pipeline waits for other stages."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator

import torch


_UNMEASURED = contextlib.nullcontext()


class Waits:
    """Adds up the waits of training steps: for tensors of other stages and for sends to them, transfers included, and
    for the stages that end a step later. On a GPU a wait is the time between two events of the current stream, which
    are read after the step: the host does not wait for them. Outside of `step` nothing is measured.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._in_step = False
        self._steps, self._seconds = 0, 0.0
        self._events: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Measures the waits of a step, from its first micro-batch to the sum of its losses over all ranks."""
        self._in_step = True
        try:
            yield
        finally:
            self._in_step = False
        self._steps += 1

    def wait(self) -> contextlib.AbstractContextManager[None]:
        """Measures the body, which waits for other stages."""
        if not self._in_step:
            return _UNMEASURED
        return self._of_stream() if self.device.type == "cuda" else self._of_host()

    @contextlib.contextmanager
    def _of_host(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._seconds += time.perf_counter() - began

    @contextlib.contextmanager
    def _of_stream(self) -> Iterator[None]:
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        yield
        ended.record()
        self._events.append((began, ended))

    def take(self) -> float | None:
        """Returns the seconds of the waits since the last call, or None if no step was measured since. On a GPU the
        waits that its stream has not come to are left for the next call.
        """
        while self._events and self._events[0][1].query():
            began, ended = self._events.popleft()
            self._seconds += began.elapsed_time(ended) / 1e3
        seconds = self._seconds if self._steps else None
        self._steps, self._seconds = 0, 0.0
        return seconds
