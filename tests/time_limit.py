# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Ends a run of tests in time: `pytest --seconds N --order NAME`.

Tests whose turn comes after N seconds are skipped, each by its name. NAME shuffles the files: runs with other names
leave out other tests.
"""

import random
import time
from collections.abc import Iterable
from pathlib import Path

import pytest


class TimeLimit:
    """A pytest plugin that skips every test whose turn comes more than `seconds` after this was made."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.end = time.monotonic() + seconds

    @pytest.hookimpl(tryfirst=True)  # before the fixtures, which take longest
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if time.monotonic() >= self.end:
            reason = f"its turn came after the {self.seconds:g} s of this run"
            # The summary of skips names a test by the place where it is defined, not by this one.
            raise pytest.skip.Exception(reason, _use_item_location=True)


def shuffled(files: Iterable[Path], name: str) -> dict[Path, int]:
    """Returns the place of each file in the order that belongs to `name`."""
    order = sorted(set(files))
    random.Random(name).shuffle(order)
    return {path: place for place, path in enumerate(order)}
