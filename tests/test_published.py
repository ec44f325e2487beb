# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Holds the prices of presets against throughputs that others have measured on clusters."""

import sys
from pathlib import Path

import pytest


sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import published  # noqa: E402


DATA = Path(__file__).parent / "data" / "published"


def row(ratio: float) -> published.Row:
    return published.Row(file="rows.csv", given={}, published=100.0, predicted=100.0 * ratio)


def test_errors_are_those_of_the_ratios():
    found = published.errors([row(ratio) for ratio in (0.9, 1.02, 1.2, 1.0, 0.95)])
    assert found["rows"] == 5 and found["median_ratio"] == 1.0
    assert [round(found[name], 9) for name in ("median_error", "p90_error", "largest_error")] == [0.05, 0.2, 0.2]


@pytest.mark.slow
@pytest.mark.parametrize("name, step", [("mpt_fsdp", 6), ("others", 1), ("megatron", 4)])
def test_predictions_are_near_published_throughputs(tmp_path, name, step):
    """Predicts every `step`-th row of a file."""
    header, *lines = (DATA / f"{name}.csv").read_text().splitlines()
    (tmp_path / "some.csv").write_text("\n".join([header, *lines[::step]]))
    found = published.errors(published.read(tmp_path / "some.csv"))
    assert found["rows"] == len(lines[::step])
    assert found["median_error"] <= 0.10 and found["largest_error"] <= 0.35
