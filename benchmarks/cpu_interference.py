# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Watches the speed of each core, so that steps slowed by other work do not count.

The cores of a virtual machine are often threads of cores that other machines use too. On one such machine a fixed
product took 44 ms of CPU time for minutes, and then 60 to 116 ms for some seconds, on one core or on all. A process on
each core therefore does the same millisecond of work five times a second, and measures its CPU time.
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
PIECE_S = 0.001  # approximate CPU time of a piece of work
QUIET = 1.15  # limit of the slowdown of a quiet core, whose pieces differ by up to a tenth
USUAL = 0.1  # quantile of the pieces that is the usual time of a core, if it is quiet for a tenth of the time


@dataclass(frozen=True, kw_only=True)
class CoreWatch:
    """The recorded speed of each core; usable in any process that can read the files.

    Attributes:
        files (`Sequence[Path]`): one file for each core, with a line for each piece of work: its end in seconds of
            `time.perf_counter`, and its CPU seconds.
    """

    files: Sequence[Path]

    def slowdown(self, begin: float, end: float) -> float:
        """Returns time / usual time of the work from `begin` to `end` (`time.perf_counter`), on the slowest core."""
        found = 1.0
        for file in self.files:
            pieces = self._pieces(file)
            usual = sorted(seconds for _, seconds in pieces)[int(USUAL * len(pieces))]
            within = [seconds for at, seconds in pieces if begin <= at <= end + INTERVAL_S]
            if within:
                found = max(found, sum(within) / len(within) / usual)
        return found

    def wait_for_quiet(self, seconds: float = 1.0, most: float = 20.0) -> None:
        """Waits until all cores have been quiet for `seconds`, but at most `most` seconds."""
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
    """Watches `cores`, by default those of this process, while the body runs."""
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
                    raise RuntimeError("A process that watches a core has failed; its traceback is above.")
                time.sleep(0.05)
            yield CoreWatch(files=files)
        finally:
            for watcher in watchers:
                watcher.kill()
                watcher.wait()


def watch(core: int, file: Path) -> None:
    """Repeats a piece of work until the parent process ends."""
    import numpy as np

    starter = os.getppid()
    os.sched_setaffinity(0, {core})
    with contextlib.suppress(PermissionError):  # an interrupted piece would find its caches replaced
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
            multiply(max(1, products // 4))  # warms up the caches and the clock of an idle core
            seconds = multiply(products)
            out.write(f"{time.perf_counter():.3f} {seconds:.6f}\n")
            out.flush()
            time.sleep(INTERVAL_S)


if __name__ == "__main__":
    watch(int(sys.argv[1]), Path(sys.argv[2]))
