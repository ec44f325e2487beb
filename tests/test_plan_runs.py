# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The devices that the benchmarks make of ranks."""

import contextlib
import sys
from argparse import Namespace
from pathlib import Path

import pytest


sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import plan_runs  # noqa: E402


@pytest.mark.parametrize(
    ("share", "period_ms", "expected"),
    [
        (0.5, None, 4.0),
        (0.1, None, 1 / 0.096),  # so long that the quota of a period is the millisecond that kernels want at least
        (0.5, 10.0, 10.0),
    ],
)
@pytest.mark.parametrize("ticking", [True, False])
def test_ranks_share_what_ticks_leave_of_a_core(monkeypatch, capsys, share, period_ms, expected, ticking):
    made = []

    @contextlib.contextmanager
    def cpu_quotas(*given):
        made.append(given)
        yield ["a quota"]

    monkeypatch.setattr(plan_runs, "cpu_quotas", cpu_quotas)
    monkeypatch.setattr(plan_runs, "sched_tick", lambda: contextlib.nullcontext(ticking))
    monkeypatch.setattr(plan_runs, "pages_kept", contextlib.nullcontext)
    with plan_runs.devices("name", Namespace(share=share, period_ms=period_ms, ranks=4)) as quotas:
        assert quotas == ["a quota"]
    assert made == [("name", 4, 0.96 * share, pytest.approx(expected))]
    assert ("CAP_SYS_NICE" in capsys.readouterr().out) != ticking
