# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Makes the kernel look at CPU quotas every millisecond, so that half a core is a core of half the speed.

A kernel looks whether a process has used up its quota, or its turn, when a timer ticks: every 4 ms with 250 ticks a
second. Four processes with half a core each on two cores then run for 4 ms and stand still for 4 or 8, however short
the quota's period is, and an exchange between them waits for whoever stands still. The kernel looks as well whenever
something more urgent wakes up: with a process on each core that does nothing but wake up they run for 1 ms and stand
still for 1 ms.
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
    """
    The kernel looks at quotas every `tick_ms` milliseconds on each core of this process; not any more behind the body.

    Yields:
        `bool`: Whether it does; not if this user may not have processes that come before all others.
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
    """Wakes up again and again, until whoever started it is gone."""
    starter = os.getppid()
    os.sched_setaffinity(0, {core})
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    print("ticking", flush=True)
    while os.getppid() == starter:
        time.sleep(tick_ms / 1e3)


if __name__ == "__main__":
    with contextlib.suppress(PermissionError):
        tick(int(sys.argv[1]), float(sys.argv[2]))
