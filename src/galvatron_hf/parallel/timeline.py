# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""When each rank did what: spans of a pipeline's actions, written as a trace that Chrome and Perfetto open."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from galvatron_hf.schedule import Action


@dataclass(frozen=True)
class Span:
    """An action with the seconds (since the epoch) of its beginning and end, and the step it belongs to."""

    action: Action
    begin: float
    end: float
    step: int


class Timeline:
    """Measures a rank's actions while it is on; off, it costs nothing.

    On a GPU each span waits for the device, so that what is written was measured; training is slower meanwhile.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.on = False
        self.step = 0
        self.spans: list[Span] = []

    @contextlib.contextmanager
    def span(self, action: Action) -> Iterator[None]:
        """Measures the body."""
        if not self.on:
            yield
            return
        begin = self._now()
        yield
        self.spans.append(Span(action, begin, self._now(), self.step))

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.time()

    def write(self, folder: str | os.PathLike) -> None:
        """Writes the spans of all ranks into `folder/timeline.json`; collective.

        Each rank is a process of the trace, each of its stages a thread; times are those of the ranks' own clocks.
        """
        gathered: list[list[Span]] | None = [[]] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(self.spans, gathered)
        if gathered is None:
            return
        events = [
            {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}}
            for rank in range(len(gathered))
        ]
        first = min((span.begin for spans in gathered for span in spans), default=0.0)
        for rank, spans in enumerate(gathered):
            for span in spans:
                action = span.action
                waits = action.work.is_receive
                events.append(
                    {
                        "name": f"wait: {action.work.value}" if waits else f"{action.work.value} {action.micro_batch}",
                        "cat": "wait" if waits else "compute",
                        "ph": "X",
                        "ts": 1e6 * (span.begin - first),
                        "dur": 1e6 * (span.end - span.begin),
                        "pid": rank,
                        "tid": action.stage,
                        "args": {"micro_batch": action.micro_batch, "stage": action.stage, "step": span.step},
                    }
                )
        os.makedirs(folder, exist_ok=True)
        with open(os.path.join(folder, "timeline.json"), "w") as file:
            json.dump({"traceEvents": events, "displayTimeUnit": "ms"}, file)
