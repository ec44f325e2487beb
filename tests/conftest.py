# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Lets tests import their helpers (`from ranks import run_ranks`) by name, and ends a run that has no more time."""

import sys
import time
from pathlib import Path

import pytest


sys.path.insert(0, str(Path(__file__).parent))
BEGUN = time.monotonic()


def pytest_addoption(parser):
    parser.addoption(
        "--minutes", type=float, help="after which no further test begins: those that are left are skipped"
    )


@pytest.hookimpl(tryfirst=True)  # before the test's fixtures are made
def pytest_runtest_setup(item):
    minutes = item.config.getoption("minutes")
    if minutes is not None and time.monotonic() - BEGUN > 60 * minutes:
        pytest.skip(f"the {minutes:g} minutes that this run has are over")


@pytest.fixture(autouse=True, scope="session")
def quick_profiles(tmp_path_factory):
    """`parallel_plan="auto"` measures for less than a second, and keeps nothing in the user's cache."""
    from galvatron_hf.trainer.planning import auto

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GALVATRON_CACHE", str(tmp_path_factory.mktemp("profiles")))
        for name in ("HARDWARE_SECONDS", "MODEL_SECONDS", "CALIBRATION_SECONDS"):
            patch.setattr(auto, name, 0.1)
        yield
