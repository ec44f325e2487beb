# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Trains several worlds of ranks in turns: each is one training run, stopped while the others run.

Between turns processes are stopped (SIGSTOP) with all their threads, whose heartbeats and watchdogs would otherwise
take a tenth of the CPU share.
"""

import atexit
import ctypes
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from step_profile import StepProfile
from transformers import Trainer, TrainerCallback

from galvatron_hf.trainer.planning.step_meter import Outcome


TIMEOUT = timedelta(days=1)  # of a collective: ranks sleep between steps, not in one


T = TypeVar("T")


class Seat(Protocol):
    """The CPU share and host of a rank. A seat on an emulated host has `host`, and rank 0's has `address`."""

    def enter(self) -> None:
        """Moves this process to the seat."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """Steps of a world without a pause.

    Attributes:
        seconds (`float`): time from the start until the last rank was done.
        times (`list[float]`): `time.perf_counter` of rank 0 at the start and at the end of each step.
        tokens (`list[int]`): useful tokens of each step, over all ranks.
    """

    seconds: float
    times: list[float]
    tokens: list[int]

    @property
    def steps(self) -> list[tuple[float, float]]:
        """Begin and end of each step."""
        return list(zip(self.times[:-1], self.times[1:], strict=True))

    @property
    def step_seconds(self) -> list[float]:
        """Seconds of each step."""
        return [end - begin for begin, end in self.steps]

    @property
    def speed(self) -> float:
        """Useful tokens/s."""
        return sum(self.tokens) / self.seconds


@dataclass(frozen=True, kw_only=True)
class Ending:
    """The results of a run, from rank 0.

    Attributes:
        losses (`list[float]`): loss of each step.
        logged (`dict[str, float]`): log of the last step.
        profile (`str`): table of the profile, if requested.
        outcome ([`Outcome`], *optional*): predictions for the plan and measurements of all ranks.
    """

    losses: list[float]
    logged: dict[str, float]
    profile: str
    outcome: Outcome | None = None


class World:
    """The ranks of one training run, stopped before the first step that counts.

    Args:
        make_trainer (`Callable`): called on each rank; returns the trainer, and the list to which its collator appends
            the useful tokens of each batch of the rank.
        groups (`Sequence[Seat]`): seats of the ranks.
        warmup (`int`): steps before the first turn.
        steps (`int`): steps of a turn.
        profile ([`StepProfile`], *optional*): profile of rank 0 in its turns.
    """

    def __init__(
        self,
        make_trainer: Callable[[], tuple[Trainer, list[int]]],
        groups: Sequence[Seat],
        warmup: int,
        steps: int,
        profile: StepProfile | None = None,
    ):
        context = multiprocessing.get_context("fork")
        port = _free_port()
        self.connections: list[Connection] = []
        self.processes: list[multiprocessing.Process] = []
        for rank in range(len(groups)):
            ours, theirs = context.Pipe()
            arguments = (rank, groups, port, make_trainer, theirs, warmup, steps, profile if rank == 0 else None)
            process = context.Process(target=_run_rank, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self.connections.append(ours)
            self.processes.append(process)
        atexit.register(self._signal, signal.SIGCONT)  # a stopped process does not react to signals
        self._hear()
        self._signal(signal.SIGSTOP)

    def turn(self) -> Turn:
        """Runs the steps of one turn."""
        self._signal(signal.SIGCONT)
        begun = time.perf_counter()
        reports = self._say_and_hear()
        seconds = time.perf_counter() - begun
        self._signal(signal.SIGSTOP)
        tokens = [sum(counts) for counts in zip(*(local for _, local in reports), strict=True)]
        return Turn(seconds=seconds, times=reports[0][0], tokens=tokens)

    def finish(self) -> Ending:
        """Ends the run, and returns its results."""
        self._signal(signal.SIGCONT)
        ending = self._say_and_hear("end")[0]
        self._say("leave")  # rank 0 hosts the store: no rank leaves before all are done
        for process in self.processes:
            process.join()
        return ending

    def abandon(self) -> None:
        """Kills the run."""
        self._signal(signal.SIGKILL)
        for process in self.processes:
            process.join()

    def _signal(self, number: signal.Signals) -> None:
        for process in self.processes:
            if process.exitcode is None:
                os.kill(process.pid, number)

    def _say_and_hear(self, word: str = "go") -> list:
        self._say(word)
        return self._hear()

    def _say(self, word: str) -> None:
        for connection in self.connections:
            connection.send(word)

    def _hear(self) -> list:
        return [_received(connection, self.processes) for connection in self.connections]


class TakesTurns(TrainerCallback):
    """Waits after the warm-up and after every turn until the next one starts, and records the losses."""

    def __init__(
        self, connection: Connection, tokens: list[int], warmup: int, steps: int, profile: StepProfile | None
    ):
        self.connection, self.tokens, self.warmup, self.steps = connection, tokens, warmup, steps
        self.profile = profile
        self.ended: list[float] = []
        self.losses: list[float] = []
        self.logged: dict[str, float] = {}
        self.woken = 0.0

    def on_train_begin(self, args, state, control, **kwargs):
        if self.warmup == 0:
            self._sleep(0, state.max_steps)

    def on_step_end(self, args, state, control, **kwargs):
        self.ended.append(time.perf_counter())
        done = state.global_step - self.warmup
        if done >= 0 and done % self.steps == 0 and self._sleep(state.global_step, state.max_steps) == "end":
            control.should_training_stop = True

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            self.losses.append(logs["loss"])
            self.logged = logs

    def _sleep(self, step: int, last: int) -> str:
        """Waits for a message, and returns it."""
        if self.profile is not None:
            self.profile.stop()
        # The collator may be batches ahead of the steps; a rank that collates none trains on what others read.
        tokens = self.tokens + [0] * (step - len(self.tokens))
        times = [self.woken, *self.ended[-self.steps :]]
        ctypes.CDLL(None).malloc_trim(0)  # so that sleepers hold no more memory than their weights and moments
        self.connection.send((times, tokens[step - self.steps : step] if step > self.warmup else []))
        word = self.connection.recv()
        if self.profile is not None and step < last:
            self.profile.start()
        self.woken = time.perf_counter()
        return word

    def ending(self) -> Ending:
        profile = "" if self.profile is None else self.profile.table()
        return Ending(losses=self.losses, logged=self.logged, profile=profile)


def _run_rank(
    rank: int,
    groups: Sequence[Seat],
    port: int,
    make_trainer: Callable[[], tuple[Trainer, list[int]]],
    connection: Connection,
    warmup: int,
    steps: int,
    profile: StepProfile | None,
) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the parent's handler is the parent's
    join_world(rank, groups, port)
    trainer, tokens = make_trainer()
    turns = TakesTurns(connection, tokens, warmup, steps, profile)
    trainer.add_callback(turns)
    trainer.train()
    connection.send(replace(turns.ending(), outcome=getattr(trainer, "plan_outcome", None)))
    connection.recv()
    os._exit(0)  # gloo's threads and those of DistributedDataParallel wait for each other for ever at times


def join_world(rank: int, seats: Sequence[Seat], port: int) -> None:
    """Makes this process a rank on its seat, pinned to one core."""
    seats[rank].enter()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    host = getattr(seats[rank], "host", 0)
    host_ranks = [index for index, seat in enumerate(seats) if getattr(seat, "host", 0) == host]
    world = {
        "RANK": rank,
        "LOCAL_RANK": host_ranks.index(rank),
        "LOCAL_WORLD_SIZE": len(host_ranks),
        "WORLD_SIZE": len(seats),
        "MASTER_ADDR": getattr(seats[0], "address", "127.0.0.1"),
        "MASTER_PORT": port,
        "OMP_NUM_THREADS": 1,
    }
    os.environ.update({name: str(value) for name, value in world.items()})
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=TIMEOUT)


def on_ranks(seats: Sequence[Seat], work: Callable[[], T]) -> T:
    """Calls `work` on the ranks of a temporary world, and returns the result of rank 0."""
    context, port = multiprocessing.get_context("fork"), _free_port()

    def run(rank: int, connection: Connection) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        join_world(rank, seats, port)
        result = work()
        connection.send(result if rank == 0 else None)
        connection.recv()
        os._exit(0)

    connections, processes = [], []
    for rank in range(len(seats)):
        ours, theirs = context.Pipe()
        processes.append(context.Process(target=run, args=(rank, theirs), daemon=True))
        processes[-1].start()
        theirs.close()
        connections.append(ours)
    results = [_received(connection, processes) for connection in connections]
    for connection in connections:  # rank 0 hosts the store: no rank leaves before all are done
        connection.send("leave")
    for process in processes:
        process.join()
    return results[0]


def _received(connection: Connection, processes: Sequence[multiprocessing.Process]) -> Any:
    """Receives a message; kills all processes as soon as one has failed."""
    running = {process.sentinel: process for process in processes}
    while True:
        ready = wait([connection, *running])
        if connection in ready:
            try:
                return connection.recv()
            except (EOFError, ConnectionResetError):
                break
        ended = [running.pop(sentinel) for sentinel in ready]
        if any(process.exitcode for process in ended):
            break
    for process in processes:
        process.kill()
    raise RuntimeError("A rank has failed; its traceback stands above.")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]
