# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The benchmarks' ticks, at which the kernel looks at CPU quotas."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest


sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import sched_tick as ticks  # noqa: E402


def tickers() -> dict[int, int]:
    """Process number and scheduling class of what this process has started."""
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(os.getpid())], capture_output=True, text=True).stdout
    children = [int(pid) for pid in found.split() if Path(f"/proc/{pid}").exists()]
    return {pid: os.sched_getscheduler(pid) for pid in children}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has processes that come before others")
def test_a_process_on_each_core_comes_before_others_and_goes_however_the_body_ends():
    before = tickers()
    with pytest.raises(KeyboardInterrupt), ticks.sched_tick() as ticking:
        assert ticking
        started = {pid: kind for pid, kind in tickers().items() if pid not in before}
        assert set(started.values()) == {os.SCHED_FIFO}
        cores = sorted(core for pid in started for core in os.sched_getaffinity(pid))
        assert cores == sorted(os.sched_getaffinity(0))
        raise KeyboardInterrupt
    assert tickers() == before


def test_a_user_who_may_not_have_such_processes_has_the_kernels_own_ticks(monkeypatch, capfd):
    def refused(*unused):
        raise PermissionError

    with monkeypatch.context() as patch:
        patch.setattr(os, "sched_setaffinity", lambda *unused: None)
        patch.setattr(os, "sched_setscheduler", refused)
        with pytest.raises(PermissionError):
            ticks.tick(min(os.sched_getaffinity(0)), ticks.TICK_MS)
    assert not capfd.readouterr().out  # nothing says that it ticks

    before = tickers()
    monkeypatch.setattr(sys, "executable", shutil.which("true"))
    with ticks.sched_tick() as ticking:
        assert not ticking
    assert tickers() == before
