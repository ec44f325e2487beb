# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""A watchdog thread for each rank: after a lost rank, one report of what every rank was doing, and an end for all.

Each process publishes its status every second in the store through which the job's ranks met. A rank whose collective
fails raises an alarm there. All living ranks answer with their stacks, one rank reports, and ranks that do not end by
themselves are ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import timedelta

import torch.distributed as dist

from galvatron_hf.data.loader import read_once
from galvatron_hf.parallel.debug.blocked_collective import (
    format_stack,
    stack_of,
    stack_of_error,
    waiting_in,
    waiting_threads,
)
from galvatron_hf.parallel.model import ParallelModel
from galvatron_hf.utils.compat import calls_of_group, default_store


PERIOD_SECONDS = 1.0
ANSWER_SECONDS = 4 * PERIOD_SECONDS  # after an alarm; a rank without an answer by then is dead
SILENCE_SECONDS = 30.0  # of a rank until another raises an alarm, where a lost rank fails no collective
END_SECONDS = 10.0  # from an alarm until a process that still runs is ended
EXIT_STATUS = 70  # EX_SOFTWARE

_ALARM, _REPORTER, _REPORTED = "alarm", "reporter", "reported"
_LOST = re.compile(r"timed? ?out|connection|broken pipe|gloo|nccl|socket", re.IGNORECASE)


class RankLostError(RuntimeError):
    """A collective failed or waited too long; the message says what every rank was doing."""


@dataclass(frozen=True, kw_only=True)
class RankStatus:
    """Describes the activity of one process for the other ranks.

    Attributes:
        time (`float`): seconds since the epoch.
        doing (`str`): step, micro-batch, direction and layer.
        waits (`str`, *optional*): the collective that the process waits in.
        stack (`str`): innermost lines of its main thread.
        lost (`bool`): the error only says that another rank is gone.
        alarmed (`bool`): the status answers an alarm.
        calls (`dict`): collectives that the rank has called, by group.
    """

    rank: int
    host: str
    pid: int
    time: float
    doing: str
    waits: str | None = None
    stack: str = ""
    error: str | None = None
    lost: bool = False
    alarmed: bool = False
    calls: dict[str, int] = field(default_factory=dict)


class Watchdog(threading.Thread):
    """Publishes the status of a rank, and answers alarms.

    Args:
        doing (`Callable`): returns the rank's activity, and whether it is part of a step, whose time is limited.
            Called in this thread.
        timeout (`float`): seconds that a collective may wait.
        run (`str`): name of this training run, the same on every rank and different for each run.
        groups (`dict[str, ProcessGroup]`): the groups of several ranks that this rank is in.
        hears (`bool`): whether this rank raises an alarm when the next one is silent. NCCL waits for a lost rank.
    """

    def __init__(
        self,
        doing: Callable[[], tuple[str, bool]],
        timeout: float,
        run: str,
        groups: dict[str, dist.ProcessGroup],
        hears: bool = False,
    ):
        super().__init__(name="galvatron-watchdog", daemon=True)
        self.doing, self.timeout, self.groups, self.hears = doing, timeout, groups, hears
        self._heard: tuple[bytes | None, float] = (None, time.monotonic())  # from the next rank, and when
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        # A separate connection: the main thread may be waiting on the other one.
        self.store = dist.PrefixStore(f"watchdog/{run}", default_store().clone())
        self.store.set_timeout(timedelta(seconds=PERIOD_SECONDS))
        self.main = threading.main_thread().ident
        self.over, self.failing, self.alone = threading.Event(), threading.Event(), False

    # ---- In the thread ----

    def run(self) -> None:
        last, since = None, time.monotonic()
        self._exchange()
        while not self.over.wait(PERIOD_SECONDS):
            doing, in_step = self.doing()
            if doing != last or not in_step:
                last, since = doing, time.monotonic()
            if not self.alone:
                self._exchange()
            if self.hears and not self.alone and self._next_is_silent():
                self._end(self._report(f"Rank {self._next} has not been heard of for {SILENCE_SECONDS:g} s"))
            if time.monotonic() - since > self.timeout + ANSWER_SECONDS:
                # A late rank, or one whose backend does not raise when a collective waits, such as NCCL.
                self._end(self._report(f"Rank {self.rank} has stood still for {self.timeout:g} s, {doing}"))

    def _exchange(self) -> None:
        try:
            self._publish(self._status())
            if self.store.check([_ALARM]):
                self._answer()
        except RuntimeError:  # the store's host has died
            self.alone = True

    @property
    def _next(self) -> int:
        return (self.rank + 1) % self.ranks

    def _next_is_silent(self) -> bool:
        """Returns whether the next rank's status has not changed for too long, by this rank's clock."""
        key, now = f"rank {self._next}", time.monotonic()
        try:
            if self.store.check([f"over {self._next}"]):
                return False
            status = self.store.get(key) if self.store.check([key]) else None
        except RuntimeError:
            return False
        if status != self._heard[0]:
            self._heard = status, now
        return now - self._heard[1] > SILENCE_SECONDS

    def _answer(self) -> None:
        """Publishes the status of this process, and ends the process unless it ends by itself."""
        self._publish(self._status(alarmed=True))
        deadline = time.monotonic() + END_SECONDS
        while time.monotonic() < deadline:
            if self.over.wait(0.1) or self.failing.is_set():
                return
        self._end(f"Rank {self.rank} is ended, because another has failed and it still is at\n{self._status().stack}")

    def _end(self, message: str | None) -> None:
        if message is not None:
            print(message, file=sys.stderr, flush=True)
        os._exit(EXIT_STATUS)  # the main thread cannot raise an error

    def _status(self, alarmed: bool = False, error: BaseException | None = None) -> RankStatus:
        if error is None:
            frame = sys._current_frames().get(self.main)
            stack = stack_of(frame) if frame is not None else []
            waits = next(iter(waiting_threads()), None)
        else:
            stack = stack_of_error(error.__traceback__)
            waits = waiting_in(stack)
        return RankStatus(
            rank=self.rank,
            host=socket.gethostname(),
            pid=os.getpid(),
            time=time.time(),
            doing=self.doing()[0],
            waits=waits,
            stack=format_stack(stack),
            error=None if error is None else f"{type(error).__name__}: {error}",
            lost=error is not None and is_lost_connection(error),
            alarmed=alarmed or error is not None,
            calls={name: calls_of_group(group) for name, group in self.groups.items()},
        )

    def _publish(self, status: RankStatus) -> None:
        if status.error is not None or not self.failing.is_set():  # nothing follows an error
            self.store.set(f"rank {self.rank}", json.dumps(asdict(status)))

    # ---- In the main thread ----

    def failed(self, error: BaseException) -> str | None:
        """Publishes an error. If the error only says that a rank is gone, waits for the other ranks' answers. The
        report is then returned on one of the ranks that need one.
        """
        status = self._status(error=error)
        self.failing.set()
        if not is_lost_connection(error):
            with contextlib.suppress(RuntimeError):
                self._publish(status)
                self.store.set(_ALARM, str(self.rank))
            return None
        late = re.search("timed? ?out", str(error), re.IGNORECASE)
        what = f"waited longer than ddp_timeout ({self.timeout:g} s)" if late else "lost a connection"
        return self._report(f"Rank {self.rank} {what} in {status.waits or 'a collective'}, {status.doing}", status)

    def _report(self, headline: str, status: RankStatus | None = None) -> str | None:
        """Returns the report of all ranks; None if another rank makes it."""
        try:
            self._publish(status or self._status(alarmed=True))
            self.store.set(_ALARM, str(self.rank))
            if self.store.add(_REPORTER, 1) > 1:
                # The store may be in this process: it has to stay until the report is made.
                self._wait_until(lambda: self.store.check([_REPORTED]), 2 * ANSWER_SECONDS)
                return None
            self._wait_until(lambda: all(one and one.alarmed for one in self._statuses()), ANSWER_SECONDS)
            text = report(headline, self._statuses())
            self.store.set(_REPORTED, "")
            return text
        except RuntimeError as lost:
            return f"{headline}. Nothing is known of the others: the job's store does not answer ({lost})."

    def end(self) -> None:
        """Ends the thread, and waits for it as long as the job's store may block it. If the interpreter ended while
        the thread is in torch's C++ code, the process would abort with "terminate called without an active exception".
        """
        self.over.set()
        self.join(ANSWER_SECONDS)
        with contextlib.suppress(RuntimeError):
            self.store.set(f"over {self.rank}", "")

    def _wait_until(self, true: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not true():
            time.sleep(0.1)

    def _statuses(self) -> list[RankStatus | None]:
        statuses: list[RankStatus | None] = []
        for rank in range(self.ranks):
            key = f"rank {rank}"
            statuses.append(RankStatus(**json.loads(self.store.get(key))) if self.store.check([key]) else None)
        return statuses


def is_lost_connection(error: BaseException) -> bool:
    """Returns whether an error only says that another rank is gone."""
    # Not a subclass such as SaveError, which gives a reason.
    of_torch = type(error) is RuntimeError or isinstance(error, dist.DistError)
    return of_torch and _LOST.search(str(error)) is not None


def report(headline: str, statuses: list[RankStatus | None]) -> str:
    """Returns the text of a report: first the ranks that caused the failure, then one line for each other rank."""
    causes, lines = [], []
    for rank, status in enumerate(statuses):
        if status is None:
            causes.append(f"Rank {rank} has never published a status: it died or hung before its first step.")
            continue
        place = f"{status.doing} (process {status.pid} on {status.host})"
        if not status.alarmed:
            age = time.time() - status.time
            causes.append(f"Rank {rank} does not answer: it died, or is stopped. {age:.0f} s ago it was in {place}.")
        elif status.error is not None and not status.lost:
            causes.append(f"Rank {rank} failed first, in {place}: {status.error}\n{status.stack}")
        elif status.waits is None and not status.lost:
            causes.append(f"Rank {rank} was late: it waits for nobody, in {place}, at\n{status.stack}")
        else:
            lines.append(f"Rank {rank} waited in {status.waits or 'a collective'}, {place}.")
    if not causes:
        causes = missing_calls(statuses) or [
            "All ranks wait for each other: they do not make the same collectives in the same order."
        ]
    return "\n".join([f"{headline}.", *causes, *lines])


def missing_calls(statuses: list[RankStatus | None]) -> list[str]:
    """Returns a line for each group in which ranks have called fewer collectives than others."""
    lines = []
    for name in dict.fromkeys(name for status in statuses if status is not None for name in status.calls):
        calls = {status.rank: status.calls[name] for status in statuses if status and name in status.calls}
        behind = [rank for rank, count in calls.items() if count < max(calls.values())]
        if behind:
            counts = ", ".join(f"rank {rank} {count}" for rank, count in calls.items())
            lines.append(f"Rank {behind[0]} was late: {name} have called these numbers of collectives: {counts}.")
    return lines


@contextlib.contextmanager
def watched(
    doing: Callable[[], tuple[str, bool]], timeout: float, groups: dict[str, dist.ProcessGroup]
) -> Iterator[None]:
    """Runs a watchdog while the body trains; collective. On one rank there is nothing to watch. If a collective fails
    or waits longer than `timeout`, one rank raises RankLostError with the report. `doing`, `timeout` and `groups` are
    those of [`Watchdog`].
    """
    if dist.get_world_size() == 1:
        yield
        return
    name, hears = read_once(lambda: uuid.uuid4().hex), "nccl" in dist.get_backend_config()
    watchdog = Watchdog(doing, timeout, name, groups, hears)
    watchdog.start()
    try:
        yield
    except Exception as error:
        text = watchdog.failed(error)
        if text is None:
            raise
        raise RankLostError(text) from error
    finally:
        watchdog.end()


def position_in_step(parallel: ParallelModel, step: int) -> tuple[str, bool]:
    """Describes what a rank is doing in an optimizer step, and returns whether that is forward or backward."""
    action = parallel.timeline.action
    if action is None:
        return f"step {step}, outside of forward and backward", False
    place = f"stage {action.stage}, " if parallel.pipeline is not None else ""
    place += parallel.runner.current.location
    return f"step {step}, micro-batch {action.micro_batch}, {action.work.value}, {place}", True
