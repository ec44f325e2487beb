# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Times collectives on the ranks of the world: every arrangement of groups, its groups at the same time.

The calls are those of the runtime: PyTorch's functional collectives, waited for at once, and batched sends. FSDP2's
own end in the same methods of the process group. Before each call a rank computes for a while, as it does in training,
and what that takes by itself is subtracted: ranks that have computed do not come at the same moment, and the wait for
the last one is part of what communicating costs.
"""

from __future__ import annotations

import itertools
import resource
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from scipy.optimize import isotonic_regression

from galvatron_hf.profiler.profiles.hardware import Link, arrangements_by_kind
from galvatron_hf.utils.compat import functional_collectives
from galvatron_hf.utils.progress import Step


_ELEMENT = 4  # bytes of fp32
_WARM_UP = 3
_MOST_CALLS = 200
_FEW_PAGES = 8.0  # that a call uses for the first time, in a measurement that counts
_PRODUCT_SIDE = {"cpu": 256, "cuda": 2048}
_BETWEEN_MS = {"cpu": 2.0, "cuda": 0.5}  # of computing before each call, on a device of its own
_BASELINE_WINDOWS = 20  # that the computing by itself is timed for
_LEAST_MS = 1e-3  # of a call that is lost in the noise of the computing beside it


@dataclass(kw_only=True)
class Trial:
    """One collective with one size of message.

    Attributes:
        kind, ranks, stride: as in [`Link`].
        size (`int`): bytes of a rank's input.
        call (`Callable`): does it once and waits for it.
        transfers (`int`): messages one behind the other in a call.
        calls (`int`): made in a measurement, one behind the other.
        ms (`list[float]`): of one message, by measurement.
        pages (`list[float]`): of memory that a call used for the first time, by measurement.
    """

    kind: str
    ranks: int
    stride: int
    size: int
    call: Callable[[], None]
    transfers: int = 1
    calls: int = 1
    ms: list[float] = field(default_factory=list)
    pages: list[float] = field(default_factory=list)


class ComputeFiller:
    """What a rank computes between two messages.

    A CPU is faster at some times than at others, and a rank with a quota gets its share in pieces: what the computing
    beside messages takes is therefore the CPU's own time for it, times what such time takes by itself on the wall.

    Args:
        device (`torch.device`): where.

    Attributes:
        ms (`float`): that it takes by itself, on the slowest rank.
    """

    def __init__(self, device: torch.device):
        self.device, self.products, self.ms = device, 1, 0.0
        self._runs, self._cpu_seconds, self._stretch = 0, 0.0, 1.0
        side = _PRODUCT_SIDE[device.type]
        self._left, self._right = (torch.full((side, side), 0.5, device=device) for _ in range(2))
        self._result = torch.empty_like(self._left)
        self.run()
        began = time.process_time()
        for _ in range(_WARM_UP):
            self.run()
        finish(device)
        (once,) = slowest([1e3 * (time.process_time() - began) / _WARM_UP], device)
        self.products = max(1, round(_BETWEEN_MS[device.type] / once))

    def run(self) -> None:
        began = time.thread_time()
        for _ in range(self.products):
            torch.mm(self._left, self._right, out=self._result)
        self._cpu_seconds += time.thread_time() - began
        self._runs += 1

    def begin(self) -> None:
        """From here on `taken_ms` counts."""
        self._runs, self._cpu_seconds = 0, 0.0

    def taken_ms(self) -> float:
        """What all runs since `begin` take by themselves."""
        if self.device.type == "cpu":
            return 1e3 * self._stretch * self._cpu_seconds
        return self._runs * self.ms

    def measure(self, window_ms: float) -> None:
        """Times it on all ranks at once; collective."""
        synchronize(self.device)
        self.begin()
        began = time.perf_counter()
        while self._runs < 2 or 1e3 * (time.perf_counter() - began) < window_ms:
            self.run()
            finish(self.device)
        seconds = time.perf_counter() - began
        self._stretch = seconds / max(self._cpu_seconds, 1e-9)
        (self.ms,) = slowest([1e3 * seconds / self._runs], self.device)


def measure_links(
    device: torch.device,
    devices_per_node: int,
    sizes: Sequence[int],
    repetitions: int,
    window_ms: float,
    seconds: float,
    step: Step,
) -> tuple[Link, ...]:
    """
    Times and fits every kind of collective over every arrangement of the world; collective.

    Args:
        device (`torch.device`): where the messages are.
        devices_per_node (`int`): ranks of a node.
        sizes (`Sequence[int]`): bytes of the whole message, which is an all-gather's result and any other's input.
        repetitions (`int`): measurements of each; they are interleaved, and the median counts of those
            for which the kernel had no memory to give.
        window_ms (`float`): how long a measurement lasts, by repeating short calls; less if time is short.
        seconds (`float`): after which, about, it ends with fewer repetitions; one is always done.
        step (`Callable`): told what was done, once for each trial in each round of warming up and each repetition.

    Returns:
        `tuple[Link, ...]`: equal on every rank; a measurement is as long as on the rank that took longest.
    """
    begun = time.perf_counter()
    kinds = arrangements_by_kind(dist.get_world_size(), devices_per_node)
    groups = {shape: _own_group(*shape) for shape in kinds}
    # What a trial sends is the beginning of one buffer, whatever it holds.
    buffer = torch.ones(max(_rounded(max(sizes), ranks) for ranks, _ in groups) // _ELEMENT, device=device)
    trials = [trial for shape in kinds for trial in _trials(shape, kinds[shape], groups[shape], buffer, sizes)]
    window_ms = min(window_ms, 1e3 * seconds / (repetitions * len(trials)))
    between = ComputeFiller(device)
    between.measure(_BASELINE_WINDOWS * window_ms)
    _warm_up(trials, device, between, window_ms, step)
    (warm,) = slowest([time.perf_counter() - begun], device)
    for done in range(repetitions):
        (spent,) = slowest([time.perf_counter() - begun], device)
        if done and spent + (spent - warm) / done > seconds:
            break
        between.measure(_BASELINE_WINDOWS * window_ms)
        for trial in trials:
            step("timing links")
            before = _new_pages()
            trial.ms.append(_measured(trial, device, between))
            trial.pages.append((_new_pages() - before) / trial.calls)
    times = [_typical(slowest(trial.ms, device), slowest(trial.pages, device)) for trial in trials]
    for group in groups.values():
        if group is not None:
            dist.destroy_process_group(group)
    sweeps: dict[tuple[str, int, int], list[tuple[int, float]]] = {}
    for trial, ms in zip(trials, times, strict=True):
        sweeps.setdefault((trial.kind, trial.ranks, trial.stride), []).append((trial.size, ms))
    return tuple(Link.fitted(*arrangement, _rising(points)) for arrangement, points in sweeps.items())


def _rising(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Nearest to what was measured, relatively, of those times in which no longer message takes less."""
    sizes, times = np.array(sorted(points), dtype=float).T
    rising = isotonic_regression(times, weights=times**-2.0).x
    return list(zip(sizes.astype(int).tolist(), rising.tolist(), strict=True))


def _warm_up(
    trials: Sequence[Trial], device: torch.device, between: ComputeFiller, window_ms: float, step: Step
) -> None:
    """Connects the ranks, and chooses how many calls fill a window."""
    taken = []
    for _, trial in itertools.product(range(_WARM_UP), trials):
        step("warming up")
        taken.append(_measured(trial, device, between) * trial.transfers)
    estimates = [min(taken[index :: len(trials)]) for index in range(len(trials))]
    for trial, estimate in zip(trials, slowest(estimates, device), strict=True):
        trial.calls = max(1, min(_MOST_CALLS, round(window_ms / (estimate + between.ms))))


def _typical(ms: Sequence[float], pages: Sequence[float]) -> float:
    """The median of measurements that had the memory they needed; where none had, of what had most of it.

    What a call uses can be new to the process long after the first one: gloo's threads take turns, and have memory of
    their own. On a virtual machine a page that is used for the first time costs up to 60 microseconds, all those of a
    message ten times what the message does, and a step of training has been through that after a few.
    """
    most = max(_FEW_PAGES, min(pages))
    return statistics.median(one for one, new in zip(ms, pages, strict=True) if new <= most)


def _new_pages() -> int:
    """Pages of memory that this process has used, each counted when it was used for the first time."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def measure_step(device: torch.device, repetitions: int) -> float:
    """Milliseconds of what a step of training sends beside its work: a small batch, a count, a norm and a loss."""
    batch = {name: torch.zeros(8, 128, dtype=torch.long) for name in ("input_ids", "labels")}
    times = []
    for _ in range(1 + repetitions):
        synchronize(device)
        start = time.perf_counter()
        dist.broadcast_object_list([batch if dist.get_rank() == 0 else None], src=0)
        for _ in range(2):
            dist.all_reduce(torch.zeros(2, device=device))
        finish(device)
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(slowest(times[1:], device))


def count_steps(world_size: int, devices_per_node: int, sizes: Sequence[int], repetitions: int) -> int:
    """How often [`measure_links`] calls `step`."""
    sweeps = sum(map(len, arrangements_by_kind(world_size, devices_per_node).values()))
    return sweeps * len(set(sizes)) * (_WARM_UP + repetitions)


def synchronize(device: torch.device) -> None:
    """Waits until every rank has come here and its device has done its work."""
    dist.all_reduce(torch.zeros(1, device=device))
    finish(device)


def finish(device: torch.device) -> None:
    """Waits until the device has done its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def slowest(values: Sequence[float], device: torch.device) -> list[float]:
    """The largest of each value over all ranks; collective."""
    table = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(table, op=dist.ReduceOp.MAX)
    return table.tolist()


def _measured(trial: Trial, device: torch.device, between: ComputeFiller) -> float:
    """Milliseconds of a message, less what the rank computes before it."""
    synchronize(device)
    between.begin()
    start = time.perf_counter()
    for _ in range(trial.calls):
        between.run()
        trial.call()
    finish(device)
    taken = 1e3 * (time.perf_counter() - start) - between.taken_ms()
    return max(taken / trial.calls / trial.transfers, _LEAST_MS)


def _own_group(ranks: int, stride: int) -> dist.ProcessGroup | None:
    """This rank's group of an arrangement; None for a rank that is left over.

    All ranks make all of its groups: those that only their members make have names that say their ranks and nothing
    else, and the next group of that name finds in the store what the first has left there.
    """
    own = None
    for start in range(0, dist.get_world_size(), ranks * stride):
        for first in range(start, start + stride):
            members = list(range(first, first + ranks * stride, stride))
            if members[-1] >= dist.get_world_size():
                continue
            group = dist.new_group(members)
            own = group if dist.get_rank() in members else own
    return own


def _trials(
    shape: tuple[int, int],
    kinds: Sequence[str],
    group: dist.ProcessGroup | None,
    buffer: torch.Tensor,
    sizes: Sequence[int],
) -> Iterator[Trial]:
    ranks, stride = shape
    for whole in sorted({_rounded(size, ranks) for size in sizes}):
        for kind in kinds:
            size = whole // ranks if kind == "all_gather" else whole
            yield Trial(
                kind=kind,
                ranks=ranks,
                stride=stride,
                size=size,
                call=_call(kind, buffer[: size // _ELEMENT], group),
                transfers=2 if kind == "send" else 1,
            )


def _rounded(size: int, ranks: int) -> int:
    """The size, up to whole elements for every rank."""
    unit = _ELEMENT * ranks
    return -(-size // unit) * unit


def _call(kind: str, message: torch.Tensor, group: dist.ProcessGroup | None) -> Callable[[], None]:
    if group is None:
        return lambda: None
    name, ranks = group.group_name, group.size()
    if kind == "send":
        return lambda: _ping_pong(message, group)
    pieces = [message.numel() // ranks] * ranks if kind == "all_to_all" else []
    start = {
        "all_reduce": lambda: functional_collectives.all_reduce(message, "sum", name),
        "all_gather": lambda: functional_collectives.all_gather_into_tensor(message, ranks, name),
        "reduce_scatter": lambda: functional_collectives.reduce_scatter_tensor(message, "sum", ranks, name),
        "all_to_all": lambda: functional_collectives.all_to_all_single(message, pieces, pieces, name),
    }[kind]
    return lambda: functional_collectives.wait_tensor(start())


def _ping_pong(message: torch.Tensor, group: dist.ProcessGroup) -> None:
    """There and back, so that a rank's clock sees the way that takes its time at the other rank too."""
    first = dist.get_rank(group) == 0
    for operation in (dist.isend, dist.irecv) if first else (dist.irecv, dist.isend):
        transfer = dist.P2POp(operation, message, group=group, group_peer=int(first))
        for work in dist.batch_isend_irecv([transfer]):
            work.wait()
