# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Bars are drawn on the standard error of a terminal; what takes long prints lines anywhere else."""

import time

import pytest

from galvatron_hf.utils import progress
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


@pytest.mark.parametrize("shown", [True, False])
def test_what_takes_long_prints_lines_where_there_is_no_terminal(capsys, monkeypatch, shown):
    monkeypatch.setenv("TTY_COMPATIBLE", "0")
    monkeypatch.setattr(progress, "FIRST_SECONDS", 0.05)
    with progress_bar(1_000, shown) as step:
        step("weighing")
        time.sleep(0.06)
        step("weighing")
        step("weighing")
    with at_work("thinking") if shown else progress_bar(1, False):
        time.sleep(0.2)
    assert capsys.readouterr() == ("", "weighing: 2 of 1000\nthinking\n" if shown else "")


def test_a_line_tells_what_is_done_again(capsys, monkeypatch):
    monkeypatch.setenv("TTY_COMPATIBLE", "0")
    monkeypatch.setattr(progress, "FIRST_SECONDS", 0.0)
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    with progress_bar(1, True) as step:
        step("weighing")
        step("weighing")
    assert capsys.readouterr().err == "weighing: 1 of 1\nweighing: 1, and 1 again\n"
