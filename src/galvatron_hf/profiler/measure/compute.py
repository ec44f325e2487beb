# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Times matrix products, alone and during all-reduces."""

from __future__ import annotations

import statistics
import time

import torch
import torch.distributed as dist

from galvatron_hf.profiler.measure.cpu_timing import queued_ms, random_matrix
from galvatron_hf.profiler.measure.rounds import Accuracy, finish, slowest, synchronize
from galvatron_hf.utils.progress import Step


_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_MESSAGE_BYTES = {"cpu": 4 << 20, "cuda": 64 << 20}
_PRODUCT_SIDE = {"cpu": 512, "cuda": 4096}
# To slow one kind of work from its beginning to its end, the other kind is done this many times as long.
_LONGER = 3


def measure_flops(device: torch.device, accuracy: Accuracy, window_ms: float, step: Step) -> dict[str, float]:
    """Returns the FLOP/s of square matrix products by number format: of the slowest rank while all ranks compute."""
    found = {}
    for name, dtype in _DTYPES.items():
        step("timing matrix products")
        side = _PRODUCT_SIDE[device.type]
        product = _Products(side, dtype, device)
        product.run(2)
        (estimate,) = slowest([product.run(2)], device)
        calls = max(1, round(2 * window_ms / estimate))
        times: list[float] = []
        while not accuracy.reached(times):
            if dist.is_initialized():
                synchronize(device)
            times += slowest([product.run(calls) / calls], device)
        found[name] = 2 * side**3 / (statistics.median(times) / 1e3)
    return found


def measure_overlap(device: torch.device, accuracy: Accuracy, window_ms: float, step: Step) -> dict[str, float]:
    """Measures how matrix products and all-reduces over the world slow each other down; collective.
    Each kind of work takes about `window_ms` alone. Returns medians over the rounds, each of the slowest rank.
    "computing" and "communicating" are time during the other over time alone, at least 1. "exposed" is the share of a
    message's time that remains if computation takes as long as three messages.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    product = _Products(_PRODUCT_SIDE[device.type], dtype, device)
    messages = [torch.zeros(_MESSAGE_BYTES[device.type] // 4, device=device) for _ in range(4)]
    _together(product, messages, 1, 1, device)
    products, reduces = slowest([product.run(2) / 2, _together(product, messages, 0, 2, device)[1] / 2], device)
    products, reduces = max(1, round(window_ms / products)), max(1, round(window_ms / reduces))
    computing, communicating, exposed = [], [], []
    # An error of `exposed` is relative to the message's time, of which it may be a small share.
    while not all(map(accuracy.reached, (computing, communicating, [1 + share for share in exposed]))):
        step("timing overlap")
        alone, _, cpu_ms = _together(product, messages, products, 0, device)
        slowed, _, _ = _together(product, messages, products, _LONGER * reduces, device)
        _, message, _ = _together(product, messages, 0, reduces, device)
        computed, communicated, more_cpu_ms = _together(product, messages, _LONGER * products, reduces, device)
        # The speed of a CPU changes: its CPU time tells how long the computation would have taken alone.
        by_itself = alone * (more_cpu_ms / cpu_ms if device.type == "cpu" else _LONGER)
        row = [alone, slowed, message, communicated, max(computed, communicated) - by_itself]
        alone, slowed, message, communicated, added = slowest(row, device)
        computing.append(slowed / alone)
        communicating.append(communicated / message)
        exposed.append(added / message)
    return {
        "computing": max(1.0, statistics.median(computing)),
        "communicating": max(1.0, statistics.median(communicating)),
        "exposed": min(1.0, max(0.0, statistics.median(exposed))),
    }


class _Products:
    def __init__(self, side: int, dtype: torch.dtype, device: torch.device):
        self.device = device
        self.left, self.right = (random_matrix(side, device, dtype) for _ in range(2))
        self.result = torch.empty_like(self.left)

    def one(self) -> None:
        torch.mm(self.left, self.right, out=self.result)

    def run(self, calls: int) -> float:
        """Returns the milliseconds of `calls` products."""
        finish(self.device)
        return queued_ms(self.device, lambda: [self.one() for _ in range(calls)])


def _together(
    product: _Products, messages: list[torch.Tensor], products: int, reduces: int, device: torch.device
) -> tuple[float, float, float]:
    """Returns milliseconds until all products and until all all-reduces that began with them are done. The third value
    is the CPU time of the products in milliseconds.
    """
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
