# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Times work on CPUs that are shared, limited by a quota, or short of free memory pages.
- Under a quota a rank runs at full speed until its share of a period is spent, and then stands still. A measurement
  therefore lasts for whole periods ([`window_ms`]), or takes CPU time and scales it to wall time ([`DeviceClock`]).
- The speed of a CPU changes over time. Computation before a message is subtracted from the message's time by its CPU
  time, not by its usual duration ([`ComputeFiller`]).
- The first use of a memory page costs up to 60 microseconds on a virtual machine. Measurements that used new pages are
  left out ([`typical_ms`]).
"""

from __future__ import annotations

import math
import resource
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from galvatron_hf.parallel.comm.objects import gather_objects
from galvatron_hf.profiler.measure.rounds import slowest, synchronize
from galvatron_hf.utils.machine import cpu_quota


WINDOW_MS = {"cpu": 30.0, "cuda": 10.0}  # duration of a measurement without a quota
_PERIODS, _FEWEST_PERIODS, _PERIODS_MS = 15, 2, 150.0  # quota periods in a measurement: most, fewest, wanted duration
_FEW_PAGES = 8.0  # new pages per call that a measurement may use
_PRODUCT_SIDE = {"cpu": 256, "cuda": 2048}
_FILLER_MS = {"cpu": 2.0, "cuda": 0.5}  # computation before each call, on a device of its own
_WARM_UP = 3
_OCCUPIED_SIDE, _OCCUPIED_MS = 4096, 1.0  # an fp32 product that takes a GPU 1 ms or more


def window_ms(device: torch.device) -> float:
    """Returns how long a measurement lasts; collective. A quota below one core makes it longer."""
    quotas = [quota for quota in gather_objects(cpu_quota()) if quota is not None]
    enough = []
    for period_ms in [1e3 * period for cores, period in quotas if cores < 1]:
        within = math.ceil(round(_PERIODS_MS / period_ms, 6))
        enough.append(period_ms * min(_PERIODS, max(_FEWEST_PERIODS, within)))
    return max([WINDOW_MS[device.type], *enough])


def new_pages() -> int:
    """Returns how many memory pages this process has used so far, each counted at its first use."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def without_new_pages(ms: Sequence[float], pages: Sequence[float]) -> list[float]:
    """Returns the measurements with at most 8 new pages a call, or those with the fewest if all had more. Calls use
    new pages long after the first one: gloo's threads take turns and have memory of their own. A training step no
    longer does after a few steps.
    """
    most = max(_FEW_PAGES, min(pages))
    return [each for each, new in zip(ms, pages, strict=True) if new <= most]


def typical_ms(ms: Sequence[float], pages: Sequence[float]) -> float:
    """Returns the median of the measurements of [`without_new_pages`]."""
    return statistics.median(without_new_pages(ms, pages))


def random_matrix(side: int, device: torch.device, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Returns a matrix of normal numbers, always the same. A GPU multiplies constant ones up to 21% faster."""
    draw = torch.Generator(device).manual_seed(0)
    return torch.randn(side, side, dtype=dtype, device=device, generator=draw)


def queued_ms(device: torch.device, work: Callable[[], None]) -> float:
    """Returns the milliseconds of `work`. Those of a GPU lie between two events on its stream: what the host takes to
    queue the work does not count while the GPU is busy.
    """
    if device.type != "cuda":
        start = time.perf_counter()
        work()
        return 1e3 * (time.perf_counter() - start)
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    work()
    ended.record()
    ended.synchronize()
    return began.elapsed_time(ended)


class ComputeFiller:
    """Computes on a rank between two messages; `ms` is the time of one run alone, on the slowest rank. On a CPU, this
    time is CPU time multiplied by the ratio of wall time to CPU time that [`ComputeFiller.measure`] found.
    """

    def __init__(self, device: torch.device):
        self.device, self.products, self.ms = device, 1, 0.0
        self._runs, self._cpu_seconds, self._wall_per_cpu = 0, 0.0, 1.0
        side = _PRODUCT_SIDE[device.type]
        self._left, self._right = (random_matrix(side, device) for _ in range(2))
        self._result = torch.empty_like(self._left)
        self.run()
        began = time.process_time()
        taken = queued_ms(device, lambda: self._run_times(_WARM_UP))
        if device.type == "cpu":
            taken = 1e3 * (time.process_time() - began)
        (once,) = slowest([taken / _WARM_UP], device)
        self.products = max(1, round(_FILLER_MS[device.type] / once))

    def run(self) -> None:
        began = time.thread_time()
        for _ in range(self.products):
            torch.mm(self._left, self._right, out=self._result)
        self._cpu_seconds += time.thread_time() - began
        self._runs += 1

    def _run_times(self, count: int) -> None:
        for _ in range(count):
            self.run()

    def begin(self) -> None:
        """Starts counting for [`ComputeFiller.taken_ms`]."""
        self._runs, self._cpu_seconds = 0, 0.0

    def taken_ms(self) -> float:
        """Returns the time that all runs since [`ComputeFiller.begin`] take alone."""
        if self.device.type == "cpu":
            return 1e3 * self._wall_per_cpu * self._cpu_seconds
        return self._runs * self.ms

    def measure(self, window_ms: float) -> None:
        """Times the computation on all ranks at once; collective. A GPU runs it as between messages: queued."""
        synchronize(self.device)
        self.begin()
        if self.device.type == "cuda":
            runs = max(2, math.ceil(window_ms / _FILLER_MS["cuda"]))
            taken = queued_ms(self.device, lambda: self._run_times(runs))
        else:
            began = time.perf_counter()
            while self._runs < 2 or 1e3 * (time.perf_counter() - began) < window_ms:
                self.run()
            taken = 1e3 * (time.perf_counter() - began)
        self._wall_per_cpu = 1e-3 * taken / max(self._cpu_seconds, 1e-9)
        (self.ms,) = slowest([taken / self._runs], self.device)


class DeviceClock:
    """Reads a device's time in milliseconds. A rank with one thread on a CPU gets CPU time, because the wall time of
    short work means nothing under a quota or next to other ranks. `wall_per_cpu`, measured while the clock is entered,
    converts CPU time to wall time.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.shared = device.type == "cpu" and torch.get_num_threads() == 1
        self._wall = self._cpu = 0.0
        self._matrix: torch.Tensor | None = None

    def occupy(self, milliseconds: float) -> None:
        """Keeps a GPU busy for at least so long, while the host queues the work that is timed next. A training step
        queues its update so, while its backward runs.
        """
        if self.device.type != "cuda":
            return
        if self._matrix is None:
            self._matrix = random_matrix(_OCCUPIED_SIDE, self.device)
        for _ in range(math.ceil(milliseconds / _OCCUPIED_MS)):
            self._matrix @ self._matrix

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return 1e3 * (time.process_time() if self.shared else time.perf_counter())

    def mark(self) -> torch.cuda.Event | float:
        """Returns this moment of the device without waiting for a GPU."""
        if self.device.type != "cuda":
            return self.now()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, mark: torch.cuda.Event | float, later: torch.cuda.Event | float) -> float:
        """Returns the milliseconds between two marks that the device has passed."""
        return later - mark if self.device.type != "cuda" else mark.elapsed_time(later)

    def __enter__(self) -> DeviceClock:
        self._began = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *unused) -> None:
        self._wall += time.perf_counter() - self._began[0]
        self._cpu += time.process_time() - self._began[1]

    @property
    def wall_per_cpu(self) -> float:
        """Returns the factor from this clock's milliseconds to those of the wall."""
        return max(1.0, self._wall / self._cpu) if self.shared and self._cpu else 1.0
