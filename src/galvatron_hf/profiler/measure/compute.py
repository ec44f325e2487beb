# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""How fast a rank multiplies matrices, alone and while it communicates."""

from __future__ import annotations

import statistics
import time

import torch
import torch.distributed as dist

from galvatron_hf.profiler.measure.links import finish, slowest, synchronize
from galvatron_hf.utils.progress import Step


_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_MESSAGE_BYTES = {"cpu": 4 << 20, "cuda": 64 << 20}
_PRODUCT_SIZE = {"cpu": 512, "cuda": 4096}
# How much more of the one is done beside the other, so that the other has company from its beginning to its end.
_MORE = 3


def measure_flops(device: torch.device, repetitions: int, window_ms: float, step: Step) -> dict[str, float]:
    """FLOP/s of square matrix products by number format, on all ranks at the same time; of the slowest rank."""
    found = {}
    for name, dtype in _DTYPES.items():
        step("timing matrix products")
        side = _PRODUCT_SIZE[device.type]
        product = _Products(side, dtype, device)
        product.run(2)
        estimate = product.run(2)
        calls = max(1, round(2 * window_ms / estimate))
        times = []
        for _ in range(repetitions):
            if dist.is_initialized():
                synchronize(device)
            times.append(product.run(calls) / calls)
        if dist.is_initialized():
            times = slowest(times, device)
        found[name] = 2 * side**3 / (statistics.median(times) / 1e3)
    return found


def measure_overlap(device: torch.device, repetitions: int, window_ms: float, step: Step) -> dict[str, float]:
    """
    How much longer matrix products take beside all-reduces over the world, and the other way round; collective.

    Args:
        device (`torch.device`): what computes, and where the messages are.
        repetitions (`int`): interleaved ones; the median counts, of the slowest rank.
        window_ms (`float`): how long each of both takes alone, about.

    Returns:
        `dict[str, float]`: times as long, at least 1, of "computing" and of "communicating"; "exposed", the share of a
            message's time by itself that is left when computing takes as long as three messages.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    product = _Products(_PRODUCT_SIZE[device.type], dtype, device)
    messages = [torch.zeros(_MESSAGE_BYTES[device.type] // 4, device=device) for _ in range(4)]
    _beside(product, messages, 1, 1, device)
    products, reduces = slowest([product.run(2) / 2, _beside(product, messages, 0, 2, device)[1] / 2], device)
    products, reduces = max(1, round(window_ms / products)), max(1, round(window_ms / reduces))
    rows = []
    for _ in range(repetitions):
        step("timing overlap")
        alone, _, cpu_ms = _beside(product, messages, products, 0, device)
        slowed, _, _ = _beside(product, messages, products, _MORE * reduces, device)
        _, message, _ = _beside(product, messages, 0, reduces, device)
        computed, communicated, more_cpu_ms = _beside(product, messages, _MORE * products, reduces, device)
        # A CPU is not equally fast all the time: how long its computing had taken alone, its own time says.
        by_itself = alone * (more_cpu_ms / cpu_ms if device.type == "cpu" else _MORE)
        rows.append([alone, slowed, message, communicated, max(computed, communicated) - by_itself])
    table = [slowest(row, device) for row in rows]
    computing = statistics.median(row[1] / row[0] for row in table)
    communicating = statistics.median(row[3] / row[2] for row in table)
    exposed = statistics.median(row[4] / row[2] for row in table)
    return {
        "computing": max(1.0, computing),
        "communicating": max(1.0, communicating),
        "exposed": min(1.0, max(0.0, exposed)),
    }


class _Products:
    """Products of two square matrices of one format."""

    def __init__(self, side: int, dtype: torch.dtype, device: torch.device):
        self.device = device
        self.left, self.right = (torch.full((side, side), 0.5, dtype=dtype, device=device) for _ in range(2))
        self.result = torch.empty_like(self.left)

    def one(self) -> None:
        torch.mm(self.left, self.right, out=self.result)

    def run(self, calls: int) -> float:
        """Milliseconds of `calls` products."""
        finish(self.device)
        start = time.perf_counter()
        for _ in range(calls):
            self.one()
        finish(self.device)
        return 1e3 * (time.perf_counter() - start)


def _beside(
    product: _Products, messages: list[torch.Tensor], products: int, reduces: int, device: torch.device
) -> tuple[float, float, float]:
    """Milliseconds until so many products and so many all-reduces, begun at the same time, are done, and those of the
    CPU that computed."""
    synchronize(device)
    start, cpu_start = time.perf_counter(), time.thread_time()
    works = [dist.all_reduce(messages[index % len(messages)], async_op=True) for index in range(reduces)]
    communicated = 0.0
    for _ in range(products):
        product.one()
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        if works and not communicated and works[-1].is_completed():
            communicated = time.perf_counter()
    computed, cpu_computed = time.perf_counter(), time.thread_time()
    for work in works:
        work.wait()
    finish(device)
    communicated = communicated or time.perf_counter()
    return 1e3 * (computed - start), 1e3 * (communicated - start), 1e3 * (cpu_computed - cpu_start)
