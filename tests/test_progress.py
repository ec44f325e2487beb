# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Bars are drawn on the standard error of a terminal, and leave nothing anywhere else."""

import pytest

from galvatron_hf.utils.progress import at_work, progress_bar


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("shown", [True, False])
def test_a_bar_is_drawn_on_a_terminal_alone(capsys, monkeypatch, terminal, shown):
    monkeypatch.setenv("TTY_COMPATIBLE", "1" if terminal else "0")
    with progress_bar(2, shown) as step:
        step("weighing")
        step("weighing")
    with at_work("thinking") if shown else progress_bar(1, False):
        pass
    out, err = capsys.readouterr()
    assert out == ""
    assert ("weighing" in err and "100%" in err and "thinking" in err) if terminal and shown else err == ""
