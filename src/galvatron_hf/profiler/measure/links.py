# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Times collectives on the ranks of the world: every arrangement of groups, all groups of one at the same time.
The calls are those of the runtime: PyTorch's functional collectives, each waited for at once, and batched sends. A
rank computes before each call, as in training, and the time of the computation is subtracted. The ranks therefore
arrive at different moments, and waiting for the last one is part of the cost of communication.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from scipy.optimize import isotonic_regression

from galvatron_hf.parallel.comm.objects import broadcast_object
from galvatron_hf.profiler.measure.cpu_timing import (
    ComputeFiller,
    new_pages,
    queued_ms,
    typical_ms,
    without_new_pages,
)
from galvatron_hf.profiler.measure.rounds import Accuracy, finish, median_error, slowest, synchronize
from galvatron_hf.profiler.profiles.hardware import Link, arrangements_by_kind
from galvatron_hf.utils.compat import functional_collectives
from galvatron_hf.utils.progress import Step


_ELEMENT = 4  # bytes of fp32
_WARM_UP = 3  # calls of each trial before it is timed
_MOST_CALLS = 200
_BASELINE_WINDOWS = 20  # windows in which the computation between calls is timed alone
_LEAST_MS = 1e-3  # time of a call that is too short to be seen next to the computation


@dataclass(kw_only=True)
class Trial:
    """Describes one collective with one message size; kind, ranks and stride are those of [`Link`].

    Attributes:
        size (`int`): Bytes of a rank's input.
        call (`Callable`): Communicates once and waits.
        transfers (`int`): Messages of a call, one after the other.
        calls (`int`): Calls of a measurement.
        ms (`list[float]`): Time of one message on the slowest rank, by measurement.
        pages (`list[float]`): Memory pages that a call used for the first time, by measurement.
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


def measure_links(
    device: torch.device,
    devices_per_node: int,
    sizes: Sequence[int],
    accuracy: Accuracy,
    window_ms: float,
    seconds: float,
    step: Step,
) -> tuple[Link, ...]:
    """Times and fits every kind of collective over every arrangement of the world; collective.
    The first rounds measure every trial once, later rounds only those that are not accurate enough, until the trials
    are on average. The links are equal on every rank: the time of the slowest rank counts.

    Args:
        devices_per_node (`int`): Ranks of a node.
        sizes (`Sequence[int]`): Bytes of the whole message: the result of an all-gather, the input of the others.
        window_ms (`float`): Duration of a measurement, which repeats short calls; less if `seconds` asks for it.
        seconds (`float`): Approximate time after which no further round begins. One round is always done.
        step (`Callable`): Called for each trial in each round, warm-up included.
    """
    begun = time.perf_counter()
    kinds = arrangements_by_kind(dist.get_world_size(), devices_per_node)
    groups = {shape: _own_group(*shape) for shape in kinds}
    # All trials send the beginning of one buffer; its values do not matter.
    buffer = torch.ones(max(_rounded(max(sizes), ranks) for ranks, _ in groups) // _ELEMENT, device=device)
    trials = [trial for shape in kinds for trial in _trials(shape, kinds[shape], groups[shape], buffer, sizes)]
    window_ms = min(window_ms, 1e3 * seconds / (accuracy.least * len(trials)))
    filler = ComputeFiller(device)
    filler.measure(_BASELINE_WINDOWS * window_ms)
    _warm_up(trials, device, filler, window_ms, step)
    (warm,) = slowest([time.perf_counter() - begun], device)
    pending, done = trials, 0
    while pending:
        (spent,) = slowest([time.perf_counter() - begun], device)
        if done and spent + (spent - warm) / done > seconds:
            break
        filler.measure(_BASELINE_WINDOWS * window_ms)
        _measure_round(pending, device, filler, step)
        done += 1
        errors = {id(trial): _error(trial, accuracy.least) for trial in trials}
        if done >= accuracy.least:
            if done >= accuracy.most or np.mean(list(errors.values())) <= accuracy.error:
                break
            pending = [trial for trial in pending if errors[id(trial)] > accuracy.error]
    for group in groups.values():
        if group is not None:
            dist.destroy_process_group(group)
    sweeps: dict[tuple[str, int, int], list[tuple[int, float]]] = {}
    for trial in trials:
        point = trial.size, max(typical_ms(trial.ms, trial.pages), _LEAST_MS)
        sweeps.setdefault((trial.kind, trial.ranks, trial.stride), []).append(point)
    return tuple(Link.fitted(*arrangement, _rising(points)) for arrangement, points in sweeps.items())


def _error(trial: Trial, least: int) -> float:
    """Returns the standard error of the median, relative to the median, and at most 1. The error is 1 if fewer than
    `least` measurements count, because of new pages: one alone would agree with itself. A call that is hidden by the
    computation before it has a median near zero, and an error of 1 too.
    """
    counted = without_new_pages(trial.ms, trial.pages)
    return 1.0 if len(counted) < least else min(1.0, median_error(counted))


def _measure_round(trials: Sequence[Trial], device: torch.device, filler: ComputeFiller, step: Step) -> None:
    """Measures each trial once; the slowest rank's time and the largest number of new pages are kept."""
    found = []
    for trial in trials:
        step("timing links")
        before = new_pages()
        found.append((_measured(trial, device, filler), (new_pages() - before) / trial.calls))
    ms, pages = (slowest(values, device) for values in zip(*found, strict=True))
    for trial, taken, new in zip(trials, ms, pages, strict=True):
        trial.ms.append(taken)
        trial.pages.append(new)


def _rising(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Returns the times nearest to the measured ones, relatively, that do not fall as the message grows."""
    sizes, times = np.array(sorted(points), dtype=float).T
    rising = isotonic_regression(times, weights=times**-2.0).x
    return list(zip(sizes.astype(int).tolist(), rising.tolist(), strict=True))


def _warm_up(
    trials: Sequence[Trial], device: torch.device, filler: ComputeFiller, window_ms: float, step: Step
) -> None:
    """Connects the ranks, and chooses how many calls of each trial fill a window."""
    taken = []
    for _, trial in itertools.product(range(_WARM_UP), trials):
        step("warming up")
        taken.append(max(_measured(trial, device, filler), _LEAST_MS) * trial.transfers)
    estimates = [min(taken[index :: len(trials)]) for index in range(len(trials))]
    for trial, estimate in zip(trials, slowest(estimates, device), strict=True):
        trial.calls = max(1, min(_MOST_CALLS, round(window_ms / (estimate + filler.ms))))


def measure_step(device: torch.device, repetitions: int) -> float:
    """Returns the milliseconds of a training step's small messages: a batch, a token count, a norm and a loss."""
    batch = {name: torch.zeros(8, 128, dtype=torch.long) for name in ("input_ids", "labels")}
    times = []
    for _ in range(1 + repetitions):
        synchronize(device)
        start = time.perf_counter()
        broadcast_object(batch)
        for _ in range(2):
            dist.all_reduce(torch.zeros(2, device=device))
        finish(device)
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(slowest(times[1:], device))


def count_trials(world_size: int, devices_per_node: int, sizes: Sequence[int]) -> int:
    """Returns the number of measurements of a round: one for each arrangement of ranks and message size."""
    sweeps = sum(map(len, arrangements_by_kind(world_size, devices_per_node).values()))
    return sweeps * len(set(sizes))


def count_steps(world_size: int, devices_per_node: int, sizes: Sequence[int], rounds: int) -> int:
    """Returns how often [`measure_links`] calls `step` in `rounds` full rounds."""
    return count_trials(world_size, devices_per_node, sizes) * (_WARM_UP + rounds)


def _measured(trial: Trial, device: torch.device, filler: ComputeFiller) -> float:
    """Returns the milliseconds of a message without the computation before it; below zero by noise alone."""

    def calls() -> None:
        for _ in range(trial.calls):
            filler.run()
            trial.call()

    synchronize(device)
    filler.begin()
    taken = queued_ms(device, calls) - filler.taken_ms()
    return taken / trial.calls / trial.transfers


def _own_group(ranks: int, stride: int) -> dist.ProcessGroup | None:
    """Returns this rank's group of an arrangement; None for a rank that is left over. All ranks create all groups: the
    name of a group that only its members create depends on its ranks alone, and the next group of the same name finds
    stale entries in the store.
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
    """Sends a message there and back, so that both directions are on this rank's clock."""
    first = dist.get_rank(group) == 0
    for operation in (dist.isend, dist.irecv) if first else (dist.irecv, dist.isend):
        transfer = dist.P2POp(operation, message, group=group, group_peer=int(first))
        for work in dist.batch_isend_irecv([transfer]):
            work.wait()
