# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""When a rank dies or stands still: one report of what every rank was doing, and an end for all of them.

Each process says every few seconds, in the store that the job's ranks met in, what it is doing. A rank whose
collective fails raises an alarm there; all that still live answer with their stacks, one rank reports, and what does
not end by itself is ended.
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
from dataclasses import asdict, dataclass
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
from galvatron_hf.utils.compat import default_store


PERIOD_SECONDS = 1.0
ANSWER_SECONDS = 4 * PERIOD_SECONDS  # after an alarm; who has not answered by then does not live
END_SECONDS = 10.0  # after an alarm, until a process that has not ended is ended
EXIT_STATUS = 70  # EX_SOFTWARE

_ALARM, _REPORTER, _REPORTED = "alarm", "reporter", "reported"
_LOST = re.compile(r"timed? ?out|connection|broken pipe|gloo|nccl|socket", re.IGNORECASE)


class RankLostError(RuntimeError):
    """A collective failed or waited too long; the message says what every rank was doing."""


@dataclass(frozen=True, kw_only=True)
class RankStatus:
    """What one process said of itself.

    Attributes:
        rank, host, pid: who it is.
        time (`float`): seconds since the epoch.
        doing (`str`): step, micro-batch, direction and layer.
        waits (`str`, *optional*): the collective that it waits in.
        stack (`str`): innermost lines of its main thread.
        error (`str`, *optional*): what it failed with.
        lost (`bool`): whether this error only says that another rank is not there.
        alarmed (`bool`): whether this is the answer to an alarm.
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


class Watchdog(threading.Thread):
    """Speaks for a rank, and listens for alarms.

    Args:
        doing (`Callable`): says what the rank is doing, and whether that is part of a step: what takes long elsewhere
            may be meant to. Called in this thread.
        timeout (`float`): seconds that a collective may wait.
        run (`str`): name of this training run, the same on every rank and no other run's: its alarms are its own.
    """

    def __init__(self, doing: Callable[[], tuple[str, bool]], timeout: float, run: str):
        super().__init__(name="galvatron-watchdog", daemon=True)
        self.doing, self.timeout = doing, timeout
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        # A connection of its own: the other one may be waiting for something.
        self.store = dist.PrefixStore(f"watchdog/{run}", default_store().clone())
        self.store.set_timeout(timedelta(seconds=PERIOD_SECONDS))
        self.main = threading.main_thread().ident
        self.over, self.failing, self.alone = threading.Event(), threading.Event(), False

    # ---- In the thread ----

    def run(self) -> None:
        """Until training is over."""
        last, since = None, time.monotonic()
        self._talk()
        while not self.over.wait(PERIOD_SECONDS):
            doing, in_step = self.doing()
            if doing != last or not in_step:
                last, since = doing, time.monotonic()
            if not self.alone:
                self._talk()
            if time.monotonic() - since > self.timeout + ANSWER_SECONDS:
                # A late rank, or one whose backend does not raise where a collective waits, as NCCL.
                self._end(self._report(f"Rank {self.rank} has stood still for {self.timeout:g} s, {doing}"))

    def _talk(self) -> None:
        try:
            self._publish(self._status())
            if self.store.check([_ALARM]):
                self._answer()
        except RuntimeError:  # the store's host has died
            self.alone = True

    def _answer(self) -> None:
        """Says where this process is, and ends it unless it ends by itself."""
        self._publish(self._status(alarmed=True))
        deadline = time.monotonic() + END_SECONDS
        while time.monotonic() < deadline:
            if self.over.wait(0.1) or self.failing.is_set():
                return
        self._end(f"Rank {self.rank} is ended, because another has failed and it still is at\n{self._status().stack}")

    def _end(self, message: str | None) -> None:
        if message is not None:
            print(message, file=sys.stderr, flush=True)
        os._exit(EXIT_STATUS)  # the main thread does not come back to raise anything

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
        )

    def _publish(self, word: RankStatus) -> None:
        if word.error is not None or not self.failing.is_set():  # an error is the last word
            self.store.set(f"rank {self.rank}", json.dumps(asdict(word)))

    # ---- In the main thread ----

    def failed(self, error: BaseException) -> str | None:
        """Tells the others of an error, and waits for their answers if it is a consequence of what happened to one.

        Returns:
            `str`: the report, on one of the ranks that need one.
        """
        own = self._status(error=error)
        self.failing.set()
        if not is_lost_connection(error):
            with contextlib.suppress(RuntimeError):
                self._publish(own)
                self.store.set(_ALARM, str(self.rank))
            return None
        late = re.search("timed? ?out", str(error), re.IGNORECASE)
        what = f"waited longer than ddp_timeout ({self.timeout:g} s)" if late else "lost a connection"
        return self._report(f"Rank {self.rank} {what} in {own.waits or 'a collective'}, {own.doing}", own)

    def _report(self, headline: str, own: RankStatus | None = None) -> str | None:
        """What all ranks were doing; None where another rank has reported it."""
        own = own or self._status(alarmed=True)
        try:
            self._publish(own)
            self.store.set(_ALARM, str(self.rank))
            if self.store.add(_REPORTER, 1) > 1:
                # The store may be in this process: it has to stay until the report is made.
                self._wait_until(lambda: self.store.check([_REPORTED]), 2 * ANSWER_SECONDS)
                return None
            self._wait_until(lambda: all(word and word.alarmed for word in self._statuses()), ANSWER_SECONDS)
            text = report(headline, self._statuses())
            self.store.set(_REPORTED, "")
            return text
        except RuntimeError as lost:
            return f"{headline}. Nothing is known of the others: the job's store does not answer ({lost})."

    def end(self) -> None:
        """Ends the thread, and waits for it as long as the job's store may let it wait.

        A thread that is in torch's C++ code when the interpreter ends is unwound through it, which aborts the process
        with "terminate called without an active exception".
        """
        self.over.set()
        self.join(ANSWER_SECONDS)

    def _wait_until(self, true: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not true():
            time.sleep(0.1)

    def _statuses(self) -> list[RankStatus | None]:
        words: list[RankStatus | None] = []
        for rank in range(self.ranks):
            key = f"rank {rank}"
            words.append(RankStatus(**json.loads(self.store.get(key))) if self.store.check([key]) else None)
        return words


def is_lost_connection(error: BaseException) -> bool:
    """Whether an error only says that another rank is not there."""
    of_torch = type(error) is RuntimeError or isinstance(error, dist.DistError)  # and not a SaveError, which tells why
    return of_torch and _LOST.search(str(error)) is not None


def report(headline: str, words: list[RankStatus | None]) -> str:
    """The ranks that are to blame first, then one line for each."""
    blamed, lines = [], []
    for rank, word in enumerate(words):
        if word is None:
            blamed.append(f"Rank {rank} has never said anything: it died or hung before its first step.")
            continue
        place = f"{word.doing} (process {word.pid} on {word.host})"
        if not word.alarmed:
            age = time.time() - word.time
            blamed.append(f"Rank {rank} does not answer: it died, or is stopped. {age:.0f} s ago it was in {place}.")
        elif word.error is not None and not word.lost:
            blamed.append(f"Rank {rank} failed first, in {place}: {word.error}\n{word.stack}")
        elif word.waits is None and not word.lost:
            blamed.append(f"Rank {rank} was late: it waits for nobody, in {place}, at\n{word.stack}")
        else:
            lines.append(f"Rank {rank} waited in {word.waits or 'a collective'}, {place}.")
    if not blamed:
        blamed = ["All ranks wait for each other: they do not make the same collectives in the same order."]
    return "\n".join([f"{headline}.", *blamed, *lines])


class WatchdogMixin:
    """The part of [`GalvatronMixin`] that ends a job in which a rank has died or stands still; see there."""

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """Watches over the body, which trains.

        Raises:
            RankLostError: on one rank, with the report, where a collective fails or waits longer than `ddp_timeout`.
        """
        if self.parallel is None or self.args.world_size == 1:
            yield
            return
        run = read_once(lambda: uuid.uuid4().hex)
        watchdog = Watchdog(self._doing, float(self.args.ddp_timeout), run)
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

    def _doing(self) -> tuple[str, bool]:
        """What this rank is doing, and whether that is part of a step."""
        step, action = f"step {self.state.global_step + 1}", self.parallel.timeline.action
        if action is None:
            return f"{step}, outside of forward and backward", False
        place = f"stage {action.stage}, " if self.parallel.pipeline is not None else ""
        place += self.parallel.forward.current.location
        return f"{step}, micro-batch {action.micro_batch}, {action.work.value}, {place}", True
