# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The benchmarks' hold on a virtual machine's free pages."""

import sys
from pathlib import Path

import pytest


sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

from page_reporting import KEPT_MS, pages_kept  # noqa: E402


def test_the_kernel_has_its_own_setting_again_however_the_body_ends(tmp_path):
    setting = tmp_path / "min_free_ms"
    setting.write_text("250\n")
    with pytest.raises(KeyboardInterrupt), pages_kept(setting) as kept:
        assert kept and setting.read_text() == f"{KEPT_MS}\n"
        raise KeyboardInterrupt
    assert setting.read_text() == "250\n"


def test_a_kernel_without_the_setting_is_left_alone(tmp_path):
    with pages_kept(tmp_path / "min_free_ms") as kept:
        assert not kept
    assert not list(tmp_path.iterdir())
