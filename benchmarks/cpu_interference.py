# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Watches how fast each core is, so that steps count only while nobody else slows them down.

The cores of a virtual machine are often threads of cores that it shares with other machines. Where this was written a
fixed product took 44 ms of CPU time for minutes, and then, some seconds at a time, 60 to 116 on one core or on both:
steps of one plan, predicted at 1.79 s, took 1.65 to 1.88 s in quiet moments and 2.2 to 3.2 s in others. What a moment
was like is told by a process on each core that does a millisecond of the same work five times a second, and measures
the CPU time that it takes.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path


INTERVAL_S = 0.2
PIECE_S = 0.001  # of CPU time, that a piece of work takes about
QUIET = 1.15  # of the CPU time that a piece takes as a rule when nothing disturbs; pieces are up to a tenth apart then
USUAL = 0.1  # quantile of all pieces of a core: its own speed, if it is quiet for a tenth of the time


@dataclass(frozen=True, kw_only=True)
class CoreWatch:
    """What is known of each core's speed, since a while ago; may be asked in any process that can read the files.

    Attributes:
        files (`Sequence[Path]`): one for each core, with a line for each piece of work: when it ended, in seconds of
            `time.perf_counter`, and the CPU seconds that it took.
    """

    files: Sequence[Path]

    def slowdown(self, begin: float, end: float) -> float:
        """
        How much longer work takes than usual from `begin` to `end`, on the core where it takes longest.

        Args:
            begin, end (`float`): Seconds of `time.perf_counter`.
        """
        found = 1.0
        for file in self.files:
            pieces = self._pieces(file)
            usual = sorted(seconds for _, seconds in pieces)[int(USUAL * len(pieces))]
            within = [seconds for at, seconds in pieces if begin <= at <= end + INTERVAL_S]
            if within:
                found = max(found, sum(within) / len(within) / usual)
        return found

    def wait_for_quiet(self, seconds: float = 1.0, most: float = 20.0) -> None:
        """Returns when all cores were quiet for some seconds, or after `most` of them."""
        begun = time.perf_counter()
        while (now := time.perf_counter()) < begun + most:
            if now >= begun + seconds and self.slowdown(now - seconds, now) < QUIET:
                return
            time.sleep(INTERVAL_S)

    def _pieces(self, file: Path) -> list[tuple[float, float]]:
        lines = file.read_text().splitlines(keepends=True)
        return [tuple(map(float, line.split())) for line in lines if line.endswith("\n")]


@contextlib.contextmanager
def cpu_interference(cores: Sequence[int] | None = None) -> Iterator[CoreWatch]:
    """
    Watches cores; not any more behind the body.

    Args:
        cores (`Sequence[int]`, *optional*): By default those of this process.
    """
    cores = sorted(os.sched_getaffinity(0)) if cores is None else cores
    watchers: list[subprocess.Popen] = []
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / str(core) for core in cores]
        environment = dict(os.environ, OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1")
        try:
            for core, file in zip(cores, files, strict=True):
                command = [sys.executable, __file__, str(core), str(file)]
                watchers.append(subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL))
            while not all(file.exists() and file.read_text().endswith("\n") for file in files):
                if any(watcher.poll() is not None for watcher in watchers):
                    raise RuntimeError("A process that watches a core has failed; its traceback stands above.")
                time.sleep(0.05)
            yield CoreWatch(files=files)
        finally:
            for watcher in watchers:
                watcher.kill()
                watcher.wait()


def watch(core: int, file: Path) -> None:
    """Does a piece of work again and again, until whoever started it is gone."""
    import numpy as np

    starter = os.getppid()
    os.sched_setaffinity(0, {core})
    with contextlib.suppress(PermissionError):  # a piece that is interrupted finds other things in the caches
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    matrix = np.full((128, 128), 1e-3, dtype=np.float32)

    def multiply(times: int) -> float:
        begun = time.process_time()
        for _ in range(times):
            matrix @ matrix
        return time.process_time() - begun

    products = max(1, round(PIECE_S / min(multiply(1) for _ in range(100))))
    with file.open("w") as out:
        while os.getppid() == starter:
            multiply(max(1, products // 4))  # an idle core's caches are cold, and its clock is slow
            seconds = multiply(products)
            out.write(f"{time.perf_counter():.3f} {seconds:.6f}\n")
            out.flush()
            time.sleep(INTERVAL_S)


if __name__ == "__main__":
    watch(int(sys.argv[1]), Path(sys.argv[2]))
