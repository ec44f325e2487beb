# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Repeats measurements until their medians are accurate enough, and keeps the ranks together meanwhile."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from galvatron_hf.parallel.comm.objects import is_rank_0
from galvatron_hf.utils.progress import tell


WANTED_ERROR = 0.05  # by default, of medians


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """Limits the standard `error` of the median, relative to the median, and the number of samples. A measurement that
    is accurate need not be repeated.
    """

    error: float = WANTED_ERROR
    least: int = 3
    most: int = 15

    def reached(self, samples: Sequence[float]) -> bool:
        count = len(samples)
        return count >= self.most or (count >= self.least and median_error(samples) <= self.error)


def median_error(samples: Sequence[float]) -> float:
    """Returns the standard error of the median of n samples, relative to the median m. The error is
    0.93 * (1 + 1.5 / n) * IQR / (sqrt(n) * m) with the interquartile range IQR. For normal noise of standard deviation
    s the standard error is 1.253 * s / sqrt(n), and IQR = 1.349 * s. The factor with n corrects the interpolated
    quartiles of few samples, which lie too close.
    """
    low, median, high = np.percentile(samples, [25, 50, 75])
    factor = 0.93 * (1 + 1.5 / len(samples))
    return float(factor * (high - low) / (math.sqrt(len(samples)) * max(median, 1e-12)))


@contextlib.contextmanager
def phase(what: str, at_least: float, at_most: float, shown: bool) -> Iterator[None]:
    """Tells on rank 0 what is measured and for how long, and afterwards how long it took. The text is printed if
    `shown`, and logged otherwise. Times are in seconds: `at_least` if the fewest samples are accurate enough, and
    `at_most` if no number of samples is.
    """
    began = time.perf_counter()
    if is_rank_0():
        tell(f"Measuring {what}: {min(at_least, at_most):.0f} to {at_most:.0f} s.", shown)
    yield
    if is_rank_0():
        tell(f"Measured {what} in {time.perf_counter() - began:.0f} s.", shown)


def synchronize(device: torch.device) -> None:
    """Waits until every rank has arrived and its device is idle."""
    dist.all_reduce(torch.zeros(1, device=device))
    finish(device)


def finish(device: torch.device) -> None:
    """Waits until the device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def slowest(values: Sequence[float], device: torch.device) -> list[float]:
    """Returns the maximum of each value over all ranks; collective, and the identity without a process group."""
    if not dist.is_initialized():
        return list(values)
    table = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(table, op=dist.ReduceOp.MAX)
    return table.tolist()
