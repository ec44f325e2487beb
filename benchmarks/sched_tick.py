# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Makes the kernel check CPU quotas every millisecond, so that half a core acts like a core of half the speed.

The kernel checks quotas and time slices at a timer tick, every 4 ms with 250 ticks a second. Four processes with half
a core each on two cores then run for 4 ms and stop for 4 or 8, however short the period of the quota is, and a message
waits for a stopped process. The kernel also checks whenever a process of higher priority wakes up. With a process on
each core that only wakes up every millisecond, the others run for 1 ms and stop for 1 ms.
"""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator


TICK_MS = 1.0


@contextlib.contextmanager
def sched_tick(tick_ms: float = TICK_MS) -> Iterator[bool]:
    """Makes the kernel check quotas every `tick_ms` milliseconds on each core of this process while the body runs.

    Yields:
        `bool`: False if this user may not run real-time processes.
    """
    tickers: list[subprocess.Popen] = []
    try:
        for core in sorted(os.sched_getaffinity(0)):
            command = [sys.executable, __file__, str(core), str(tick_ms)]
            tickers.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        yield all([ticker.stdout.readline() for ticker in tickers])
    finally:
        for ticker in tickers:
            ticker.kill()
            ticker.communicate()


def tick(core: int, tick_ms: float) -> None:
    """Wakes up every `tick_ms` milliseconds until the parent process ends."""
    starter = os.getppid()
    os.sched_setaffinity(0, {core})
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    print("ticking", flush=True)
    while os.getppid() == starter:
        time.sleep(tick_ms / 1e3)


if __name__ == "__main__":
    with contextlib.suppress(PermissionError):
        tick(int(sys.argv[1]), float(sys.argv[2]))
