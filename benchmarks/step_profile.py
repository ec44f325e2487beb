# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Profiles a rank's steps with torch.profiler: attention, linear layers, head and loss, waiting."""

import re
import time
from collections import defaultdict

import torch.distributed as dist
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile, record_function


WAIT = "wait for a collective"
_NAMES = {
    "waiting for ranks and sums": re.compile(WAIT),
    "optimizer": re.compile(r"Optimizer\.step|_foreach_norm|clip_grad"),
    "attention": re.compile(r"attention|sdpa", re.IGNORECASE),
    "collectives, this side": re.compile(r"c10d::|gloo:"),
    "head and loss": re.compile(r"cross_entropy|log_softmax|nll_loss"),
    "embedding": re.compile(r"embedding", re.IGNORECASE),
}
_LINEAR = re.compile(r"aten::(mm|addmm|bmm|linear|matmul)$")


class StepProfile:
    """Profiles the code between `start` and `stop`; each pair adds to the table.

    Args:
        vocabulary (`int`): size of the vocabulary; no other dimension may have it, because it identifies the head's
        operators.
    """

    def __init__(self, vocabulary: int):
        self.vocabulary = vocabulary
        self.seconds: dict[str, float] = defaultdict(float)
        self.wall = 0.0
        self._running: profile | None = None

    def start(self) -> None:
        self._wait, wait = dist.Work.wait, dist.Work.wait

        def named_wait(work: dist.Work, *args):
            with record_function(WAIT):
                return wait(work, *args)

        dist.Work.wait = named_wait
        self._running = profile(activities=[ProfilerActivity.CPU], record_shapes=True)
        self._running.start()
        self._begun = time.perf_counter()

    def stop(self) -> None:
        if self._running is None:
            return
        self.wall += time.perf_counter() - self._begun
        self._running.stop()
        dist.Work.wait = self._wait
        events = self._running.events()
        self._running = None
        # The thread that trains is the one that computes most; others carry gloo and what runs ahead.
        by_thread: dict[int, float] = defaultdict(float)
        for event in events:
            by_thread[event.thread] += event.self_cpu_time_total
        main = max(by_thread, key=by_thread.get)
        for event in events:
            if event.thread == main:
                self.seconds[_kind(event, self.vocabulary)] += event.self_cpu_time_total / 1e6

    def table(self) -> str:
        """Returns the shares of the wall time, largest first; time outside of operators is Python."""
        rows = sorted(self.seconds.items(), key=lambda row: -row[1])
        rows.append(("Python, between operators", self.wall - sum(self.seconds.values())))
        return "\n".join(f"  {name:28s} {value:8.2f} s  {100 * value / self.wall:5.1f}%" for name, value in rows)


def _kind(event: FunctionEvent, vocabulary: int) -> str:
    """Returns the kind of an event's own time, from the name of the event or of its callers."""
    callers = [event]
    while callers[-1].cpu_parent is not None:
        callers.append(callers[-1].cpu_parent)
    for kind, pattern in _NAMES.items():
        if any(pattern.search(caller.name) for caller in callers):
            return kind
    if any(vocabulary in _sizes(caller) for caller in callers):
        return "head and loss"
    if any(_LINEAR.search(caller.name) for caller in callers):
        return "linear layers"
    return "other operators"


def _sizes(event: FunctionEvent) -> set[int]:
    """Returns the sizes of all dimensions of an event's arguments."""
    return {size for shape in event.input_shapes or [] if isinstance(shape, list) for size in _flat(shape)}


def _flat(shape: list) -> list[int]:
    return [size for part in shape for size in (_flat(part) if isinstance(part, list) else [part])]
