# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Times of the actions of all ranks, written as a trace that Chrome and Perfetto open."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from galvatron_hf.parallel.comm.objects import host_group
from galvatron_hf.parallel.pipeline.waits import Waits
from galvatron_hf.plan.schedule import Action


SPANS_KEPT = 20_000  # each rank keeps its latest: some MB of memory, and about as much of the file
_UNMEASURED = contextlib.nullcontext()
_MARKS_OF_AN_ORIGIN = 1_000


@dataclass(frozen=True, slots=True)
class Span:
    """Holds an action of a step with its begin and end in seconds since the epoch. A receive's span is the time that
    the rank waited for it, a send's the time to start it. Transfers run during the computation.
    """

    action: Action
    begin: float
    end: float
    step: int


class HostClock:
    """Reads the host's clock, for devices that compute while the host calls them."""

    def mark(self) -> float:
        return time.time()

    def seconds(self, mark: float) -> float:
        """Returns the seconds since the epoch at which the device passed a mark."""
        return mark


class EventClock:
    """Marks places in the current stream of a GPU by events, whose times are read later: the host does not wait in a
    step. A message that another rank has not sent yet would keep it waiting for ever.
    """

    def __init__(self):
        torch.cuda.synchronize()
        self._origin = _Origin(self._event(), seconds=time.time())
        self._marks = 0

    def mark(self) -> tuple[_Origin, torch.cuda.Event]:
        event = self._event()
        self._marks += 1
        if self._marks % _MARKS_OF_AN_ORIGIN == 0:
            self._origin.resolve()  # recorded long ago
            self._origin = _Origin(event, before=self._origin)
        return self._origin, event

    def seconds(self, mark: tuple[_Origin, torch.cuda.Event]) -> float:
        """Returns the seconds since the epoch at which the device passed a mark; waits until it has."""
        origin, event = mark
        return origin.resolve() + origin.seconds_until(event)

    @staticmethod
    def _event() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


@dataclass
class _Origin:
    """Holds the event from which later ones are counted: the time between two events is a float of 32 bits."""

    event: torch.cuda.Event
    seconds: float | None = None
    before: _Origin | None = None

    def resolve(self) -> float:
        if self.seconds is None:
            self.seconds = self.before.resolve() + self.before.seconds_until(self.event)
            self.before = None
        return self.seconds

    def seconds_until(self, event: torch.cuda.Event) -> float:
        event.synchronize()
        return self.event.elapsed_time(event) / 1e3


class Timeline:
    """Measures a rank's actions if it is on; otherwise it records the current action alone, at almost no cost. On a
    GPU a span is the time between two events of the current stream. The latest `spans_kept` spans are kept. `waits`
    adds up how long the rank waits for other stages, whether it is on or not.
    """

    def __init__(self, device: torch.device, spans_kept: int = SPANS_KEPT):
        self.device = device
        self.on = False
        self.waits = Waits(device)
        self.step = 0
        self.action: Action | None = None  # the training loop resets it
        self._clock: HostClock | EventClock | None = None
        self._marks: deque[tuple[Action, Any, Any, int]] = deque(maxlen=spans_kept)

    @property
    def spans(self) -> list[Span]:
        """Returns the spans that are kept; on a GPU it waits for the last of them."""
        seconds = self._clock.seconds if self._marks else None
        return [Span(action, seconds(begin), seconds(end), step) for action, begin, end, step in self._marks]

    def clear(self) -> None:
        self._marks.clear()

    def span(self, action: Action) -> contextlib.AbstractContextManager[None]:
        self.action = action
        return self._measured(action) if self.on else _UNMEASURED

    @contextlib.contextmanager
    def _measured(self, action: Action) -> Iterator[None]:
        if self._clock is None:
            self._clock = EventClock() if self.device.type == "cuda" else HostClock()
        begin = self._clock.mark()
        yield
        self._marks.append((action, begin, self._clock.mark(), self.step))

    def write(self, folder: str | os.PathLike) -> None:
        """Writes the spans of all ranks into `folder/timeline.json`; collective. Each rank is a process of the trace,
        and each of its stages a thread. Times come from the hosts' clocks and count from the first span. The file has
        the steps of which every rank keeps all spans.
        """
        gathered: list[tuple[int, list[Span]]] | None = [(0, [])] * dist.get_world_size()
        gathered = gathered if dist.get_rank() == 0 else None
        dist.gather_object((self._first_whole_step(), self.spans), gathered, group=host_group())
        if gathered is None:
            return
        first = max(step for step, _ in gathered)
        by_rank = [[span for span in spans if span.step >= first] for _, spans in gathered]
        os.makedirs(folder, exist_ok=True)
        path = os.path.join(folder, "timeline.json")
        with open(f"{path}.part", "w") as file:
            json.dump({"traceEvents": trace_events(by_rank), "displayTimeUnit": "ms"}, file)
        os.replace(f"{path}.part", path)

    def _first_whole_step(self) -> int:
        """Returns the first step of which no span has been dropped."""
        if len(self._marks) < self._marks.maxlen:
            return 0
        return self._marks[0][-1] + 1


def trace_events(by_rank: Sequence[Iterable[Span]]) -> list[dict]:
    """Returns the spans of each rank as events of Chrome's trace format, in microseconds. Process and thread numbers
    begin at 1 and are distinct: Perfetto takes 0 for the idle task, and a process's own number for its main thread.
    """
    spans = [(rank, span) for rank, own in enumerate(by_rank) for span in own]
    first = min((span.begin for _, span in spans), default=0.0)
    threads = sorted({(rank, span.action.stage) for rank, span in spans})
    thread_numbers = {thread: len(by_rank) + 1 + index for index, thread in enumerate(threads)}
    events = []
    for rank in range(len(by_rank)):
        events.append(_named("process_name", f"rank {rank}", rank + 1))
        events.append({"name": "process_sort_index", "ph": "M", "pid": rank + 1, "args": {"sort_index": rank}})
    for (rank, stage), number in thread_numbers.items():
        events.append(_named("thread_name", f"stage {stage}", rank + 1, number))
    for rank, span in spans:
        action = span.action
        kind = "compute" if action.work.is_compute else "wait" if action.work.is_receive else "send"
        name = f"{action.work.value} {action.micro_batch}"
        events.append(
            {
                "name": f"wait: {name}" if kind == "wait" else name,
                "cat": kind,
                "ph": "X",
                "ts": 1e6 * (span.begin - first),
                "dur": 1e6 * (span.end - span.begin),
                "pid": rank + 1,
                "tid": thread_numbers[rank, action.stage],
                "args": {"micro_batch": action.micro_batch, "stage": action.stage, "step": span.step},
            }
        )
    return events


def _named(kind: str, name: str, process: int, thread: int | None = None) -> dict:
    event = {"name": kind, "ph": "M", "pid": process, "args": {"name": name}}
    return event if thread is None else event | {"tid": thread}
