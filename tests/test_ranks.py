# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Checks the helper that runs ranks: it shows failures, it does not hang, and it leaves no process."""

import ctypes
import multiprocessing.connection
import os
import signal
import subprocess
import time

import pytest
import torch
import torch.distributed as dist

import ranks
from ranks import run_ranks


def _is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_results_come_back_by_rank():
    def work(offset):
        total = torch.tensor(float(dist.get_rank() + offset))
        dist.all_reduce(total)
        return dist.get_rank(), total.item(), os.environ["RANK"], torch.get_num_threads()

    assert run_ranks(work, 3, 10) == [(rank, 33.0, str(rank), 1) for rank in range(3)]


def test_ranks_start_after_the_parent_ran_backward():
    weight = torch.randn(64, 64, requires_grad=True)
    (weight @ weight).sum().backward()

    def work():
        leaf = torch.ones(8, 8, requires_grad=True)
        (leaf @ leaf).sum().backward()
        return leaf.grad.sum().item()

    assert run_ranks(work, 2) == [1024.0, 1024.0]


@pytest.mark.parametrize("turn", [1, 2])
def test_deterministic_algorithms_are_off_whatever_the_test_before_left(turn):
    """Ranks are forks: with deterministic algorithms, which `full_determinism` leaves on, they fill new memory."""
    assert not torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)


def test_the_failing_rank_is_shown_before_its_victims():
    def work():
        if dist.get_rank() == 2:
            time.sleep(0.3)
            raise KeyError("the real cause")
        dist.barrier()

    with pytest.raises(AssertionError) as failure:
        run_ranks(work, 4, grace=120.0)
    message = str(failure.value)
    assert message.startswith("Rank 2 failed:\nTraceback")
    assert message.index("KeyError: 'the real cause'") < message.index("Rank 0")
    assert "killed" not in message  # the others failed too, and no time had to pass


def test_a_hanging_rank_is_killed_and_located_with_all_it_started(tmp_path, monkeypatch):
    def here_it_hangs():
        (tmp_path / "hangs").touch()
        time.sleep(1000)

    def work():
        child = subprocess.Popen(["sleep", "1000"])
        (tmp_path / str(dist.get_rank())).write_text(f"{os.getpid()} {child.pid}")
        if dist.get_rank() == 1:
            here_it_hangs()
        return dist.get_rank()

    def wait(connections, timeout):
        """Ends the time as soon as one rank has answered and the other one hangs."""
        assert 0 < timeout <= 600
        while len(connections) == 1 and not (tmp_path / "hangs").exists():
            time.sleep(0.01)
        return [] if len(connections) == 1 else multiprocessing.connection.wait(connections, timeout)

    monkeypatch.setattr(ranks, "wait", wait)
    with pytest.raises(AssertionError, match=r"(?s)\ARank 1 did not finish within 600 s.*here_it_hangs"):
        run_ranks(work, 2)
    pids = [int(pid) for rank in range(2) for pid in (tmp_path / str(rank)).read_text().split()]
    deadline = time.monotonic() + 60  # the kernel may take a moment
    while (running := [pid for pid in pids if _is_running(pid)]) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert running == []


def test_a_rank_that_dies_without_a_traceback_is_named_first():
    def work():
        if dist.get_rank() == 1:
            os._exit(3)
        dist.barrier()

    with pytest.raises(AssertionError, match=r"\ARank 1 failed:\nThe process died with exit code 3"):
        run_ranks(work, 3)


def test_a_killed_rank_names_the_signal():
    with pytest.raises(AssertionError, match="SIGKILL"):
        run_ranks(lambda: os.kill(os.getpid(), signal.SIGKILL), 1)


def _free_twice():
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    # So many blocks empty malloc's bins of this size: what malloc says of a block freed twice depends on them.
    block, *_ = [libc.malloc(24) for _ in range(10_000)]
    libc.free(block)
    libc.free(block)


@pytest.mark.parametrize(
    "fault, shown",
    [(lambda: ctypes.string_at(0), "SIGSEGV"), (_free_twice, "SIGABRT.*double free")],
    ids=["segmentation", "freed_twice"],
)
def test_a_fault_of_memory_is_run_again_once_and_shows_where_it_was(fault, shown, tmp_path):
    def fault_here(times):
        with open(tmp_path / str(times), "a") as file:
            file.write("x")
        if (tmp_path / str(times)).stat().st_size <= times:
            fault()
        return "done"

    with pytest.warns(RuntimeWarning, match=rf"(?s)Run again.*{shown}.*fault_here"):
        assert run_ranks(fault_here, 1, 1) == ["done"]
    with pytest.warns(RuntimeWarning), pytest.raises(AssertionError, match=rf"(?s){shown}.*fault_here"):
        run_ranks(fault_here, 1, 2)
    assert (tmp_path / "2").stat().st_size == 2


def test_a_c_exception_that_nobody_caught_is_not_run_again(tmp_path):
    def terminate():
        with open(tmp_path / "times", "a") as file:
            file.write("x")
        os.write(2, b"terminate called after throwing an instance of 'gloo::EnforceNotMet'")
        os.abort()

    with pytest.raises(AssertionError, match=r"(?s)SIGABRT.*EnforceNotMet.*terminate"):
        run_ranks(terminate, 1)
    assert (tmp_path / "times").stat().st_size == 1


def test_a_result_that_cannot_be_pickled_is_an_error_of_its_rank():
    with pytest.raises(AssertionError, match=r"(?s)\ARank 0 failed.*pickle"):
        run_ranks(lambda: lambda: None, 1)
