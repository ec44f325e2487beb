# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Makes the helpers of the fault tests importable by name, and runs without a fault available to them."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest


sys.path.insert(0, str(Path(__file__).parent))

from job import Job  # noqa: E402


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory) -> Callable[[str], dict[int, float]]:
    """Returns the losses by step of a run without a fault, by name of its plan; each plan runs once."""
    curves: dict[str, dict[int, float]] = {}

    def curve(plan: str) -> dict[int, float]:
        if plan not in curves:
            job = Job(folder=tmp_path_factory.mktemp(plan), plan=plan, options=dict(save_strategy="no"))
            job.fork()
            curves[plan] = job.logs()
            assert sorted(curves[plan]) == [1, 2, 3, 4, 5, 6]
        return curves[plan]

    return curve
