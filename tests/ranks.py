# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The one way in which tests run code on several ranks.

Ranks are forks of the test process: what is imported there need not be imported again, so that a world of ranks starts
in a fraction of a second. They talk gloo, die with the test, and a failure shows the traceback of the rank that failed
first, and then the others' broken connections.
"""

import ctypes
import datetime
import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
import torch.fx.experimental.symbolic_shapes  # noqa: F401  the first backward imports it: once here, not in each rank


# How long the other ranks may still report after the first failure: their errors are mostly consequences.
_GRACE_SECONDS = 1.0
# A guard against ranks that hang: no test comes near it, however busy the machine is.
_TIMEOUT_SECONDS = 600.0
_PR_SET_PDEATHSIG = 1


class MemoryFault(AssertionError):
    """Says that a rank died of an access to memory that is not there, or of what malloc's own checks found."""


class _Rank:
    """Holds a forked rank as its parent sees it; `report` is the rank's answer, or `None` while there is none."""

    def __init__(self, index: int, process: multiprocessing.Process, connection: Connection, native_stderr) -> None:
        self.index, self.process, self.connection, self.native_stderr = index, process, connection, native_stderr
        self.report: tuple[str, float, Any] | None = None
        self.faulted = False

    def receive(self) -> None:
        """Takes the rank's answer; a rank that closed its pipe without one has died.

        Nothing but malloc aborts a process without a C++ exception, which says "terminate called".
        """
        try:
            self.report = self.connection.recv()
        except (EOFError, ConnectionResetError):
            self.process.join()
            code = self.process.exitcode
            cause = f"signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"exit code {code}"
            stacks = self._written() or "It left no traceback."
            aborted = code == -signal.SIGABRT and "terminate called" not in stacks
            self.faulted = aborted or code in (-signal.SIGSEGV, -signal.SIGBUS)
            # time 0: whatever the others say is a consequence of this
            self.report = ("error", 0.0, f"The process died with {cause}.\n{stacks}")

    def where(self) -> str:
        """Returns the Python stacks of a rank that does not answer."""
        before = written = len(self._written())
        os.kill(self.process.pid, signal.SIGUSR2)
        for _ in range(100):  # until the rank has written, and then no more
            time.sleep(0.1)
            length = len(self._written())
            if length > before and length == written:
                break
            written = length
        return self._written()

    def _written(self) -> str:
        """Returns what C libraries wrote to stderr, and the stacks that faulthandler wrote on SIGUSR2 or a fault."""
        self.native_stderr.seek(0)
        return self.native_stderr.read().decode(errors="replace")

    def kill(self) -> None:
        """Ends the rank and everything it started, and passes on what it wrote to stderr."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:  # nothing is left of its process group, or it died before it had one
            self.process.kill()
        self.process.join()
        self.connection.close()
        sys.stderr.write(self._written())
        self.native_stderr.close()


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = _TIMEOUT_SECONDS,
    grace: float = _GRACE_SECONDS,
) -> list[Any]:
    """
    Runs `fn(*args)` on ranks 0 to `world_size - 1` of a fresh gloo world and returns what each rank returned.

    Args:
        fn (`Callable`): Called on every rank with the default process group ready; any function, nested ones too.
        world_size (`int`): Number of ranks.
        args: Passed on as they are (the ranks are forks, so nothing is pickled on the way in).
        timeout (`float`, *optional*, defaults to 600): Seconds after which ranks that have not finished are killed.
        grace (`float`, *optional*, defaults to 1): Seconds that the others get to finish once a rank has failed.

    Returns:
        `list`: The results, by rank; they must be picklable.

    Raises:
        AssertionError: If a rank raises, dies or does not finish; with the first failing rank's traceback first.

    A world in which a rank died of a fault of memory is run once more, with a warning in pytest's summary. All code of
    this project is Python. What has been seen, three times in some millions of collectives, is a worker thread of
    torch 2.13's gloo that finds malloc's list of 24-byte blocks freed twice (in ProcessGroupGloo::runLoop, in operator
    new of gloo::transport::tcp::UnboundBuffer); memcheck finds nothing in the same collectives.
    """
    try:
        return _run_once(fn, world_size, args, timeout, grace)
    except MemoryFault as fault:
        warnings.warn(f"Run again after a fault of gloo: {fault}", RuntimeWarning, stacklevel=2)
        return _run_once(fn, world_size, args, timeout, grace)


def _run_once(fn: Callable[..., Any], world_size: int, args: tuple, timeout: float, grace: float) -> list[Any]:
    deadline = time.monotonic() + timeout
    ranks: list[_Rank] = []
    # The socket is bound here and inherited by rank 0, whose store listens on it: no other process can take the port.
    with socket.create_server(("127.0.0.1", 0), backlog=world_size) as listener:
        try:
            for index in range(world_size):
                ranks.append(_fork(index, world_size, listener, timeout, fn, args))
            _collect(ranks, deadline, grace)
            _raise_failures(ranks, timeout)
            for rank in ranks:  # rank 0 hosts the store: none leaves before all are done
                rank.connection.send("leave")
            for rank in ranks:
                rank.process.join(max(0.1, deadline - time.monotonic()))
        finally:
            for rank in ranks:
                rank.kill()
    return [pickle.loads(rank.report[2]) for rank in ranks]


def _fork(index: int, world_size: int, listener: socket.socket, timeout: float, fn, args) -> _Rank:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    native_stderr = tempfile.TemporaryFile()
    target_args = (index, world_size, listener, timeout, fn, args, theirs, native_stderr, os.getpid())
    process = context.Process(target=_rank_main, args=target_args, name=f"rank{index}")
    process.start()
    theirs.close()
    return _Rank(index, process, ours, native_stderr)


def _collect(ranks: Sequence[_Rank], deadline: float, grace: float) -> None:
    """Waits until every rank has answered, the time is over, or the grace after a first failure is."""
    silent = {rank.connection: rank for rank in ranks}
    while silent:
        ready = wait(list(silent), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            return
        for connection in ready:
            rank = silent.pop(connection)
            rank.receive()
            if rank.report[0] == "error":
                deadline = min(deadline, time.monotonic() + grace)


def _raise_failures(ranks: Sequence[_Rank], timeout: float) -> None:
    failed = sorted((r for r in ranks if r.report and r.report[0] == "error"), key=lambda rank: rank.report[1])
    hung = [rank for rank in ranks if rank.report is None]
    messages = [f"Rank {rank.index} failed:\n{rank.report[2]}" for rank in failed]
    if hung and not failed:
        messages += [f"Rank {r.index} did not finish within {timeout:g} s. It was here:\n{r.where()}" for r in hung]
    elif hung:
        messages.append(f"Still waiting for them, and killed: ranks {[rank.index for rank in hung]}.")
    if messages:
        kind = MemoryFault if any(rank.faulted for rank in ranks) else AssertionError
        raise kind("\n".join(messages))


def _rank_main(index, world_size, listener, timeout, fn, args, connection, native_stderr, parent) -> None:
    os.setpgid(0, 0)
    gc.freeze()  # collections leave alone what the parent made: they would copy its pages
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the call above
            os._exit(1)
    os.dup2(native_stderr.fileno(), 2)  # pytest gives Python's own stderr another place
    faulthandler.enable(file=native_stderr, all_threads=True)
    faulthandler.register(signal.SIGUSR2, file=native_stderr, all_threads=True)
    try:
        _join_world(index, world_size, listener, timeout)
        answer = ("ok", time.monotonic(), pickle.dumps(fn(*args)))
    except BaseException:
        answer = ("error", time.monotonic(), traceback.format_exc())
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        connection.send(answer)
        if answer[0] == "ok":  # a failed rank leaves at once, so that ranks that wait for it fail too
            connection.recv()
    finally:
        # Without the interpreter's exit: gloo's threads and the parent's own exit handlers have no business here.
        os._exit(0)


def _join_world(index: int, world_size: int, listener: socket.socket, timeout: float) -> None:
    torch.set_num_threads(1)
    port = listener.getsockname()[1]
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        RANK=str(index),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(index),
        LOCAL_WORLD_SIZE=str(world_size),
    )
    limit = datetime.timedelta(seconds=timeout)
    listening = {"is_master": True, "master_listen_fd": listener.detach()} if index == 0 else {"is_master": False}
    store = dist.TCPStore("127.0.0.1", port, world_size, timeout=limit, wait_for_workers=False, **listening)
    if index:
        listener.close()
    dist.init_process_group("gloo", store=store, rank=index, world_size=world_size, timeout=limit)
