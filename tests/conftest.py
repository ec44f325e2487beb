# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Lets tests import their helpers (`from ranks import run_ranks`) by name, whatever the import mode."""

import sys
from pathlib import Path

import pytest


sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True, scope="session")
def quick_profiles(tmp_path_factory):
    """`parallel_plan="auto"` measures for less than a second, and keeps nothing in the user's cache."""
    from galvatron_hf.trainer import auto

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GALVATRON_CACHE", str(tmp_path_factory.mktemp("profiles")))
        for name in ("HARDWARE_SECONDS", "MODEL_SECONDS", "CALIBRATION_SECONDS"):
            patch.setattr(auto, name, 0.1)
        yield
