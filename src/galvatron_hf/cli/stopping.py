# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Ends a search after some time, or at Ctrl-C."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator


class Stop:
    """Tells a search to end: `seconds` after `begin`, or as soon as the user has asked for it."""

    def __init__(self, seconds: float | None = None):
        self.seconds, self.asked = seconds, False
        self.begin()

    def begin(self) -> None:
        """Begins to count the seconds."""
        self._end = None if self.seconds is None else time.monotonic() + self.seconds

    def __call__(self) -> bool:
        return self.asked or (self._end is not None and time.monotonic() > self._end)


@contextlib.contextmanager
def stop_at_interrupt(seconds: float | None = None) -> Iterator[Stop]:
    """Yields what ends a search. The first Ctrl-C ends the search while the body runs, a second one the process. A
    job in the background, whose shell has it ignore Ctrl-C, goes on ignoring it.
    """
    stop = Stop(seconds)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        yield stop
        return

    def ask(number: int, frame: object) -> None:
        if stop.asked:
            raise KeyboardInterrupt
        stop.asked = True

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)
