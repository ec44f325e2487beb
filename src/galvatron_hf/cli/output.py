# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Output of commands: files, tables and JSON values."""

from __future__ import annotations

import argparse
import json
import math
import os
from typing import Any

from rich.console import Console

from galvatron_hf.plan import ParallelPlan
from galvatron_hf.planner.cost import rings
from galvatron_hf.planner.estimate import Estimate
from galvatron_hf.planner.report.alternatives import Alternative
from galvatron_hf.profiler.profiles.hardware import HardwareProfile
from galvatron_hf.profiler.profiles.model import ModelProfile


PIPE_WIDTH = 250  # of tables for a file or another command, which have no width; rich draws them as wide as they are


def console() -> Console:
    """Returns the console of the standard output."""
    made = Console()
    return made if made.is_terminal or "COLUMNS" in os.environ else Console(width=PIPE_WIDTH)


def output_file(path: str) -> str:
    """Checks before any work that a file can be written to the path of `--output`, and returns the path."""
    folder = os.path.dirname(path) or os.curdir
    if os.path.isdir(path):
        raise argparse.ArgumentTypeError(f"{path!r} is a folder: give a file in it")
    if not os.path.isdir(folder):
        raise argparse.ArgumentTypeError(f"{path!r} is in a folder that does not exist: make {folder!r} first")
    if not os.access(folder, os.W_OK):
        raise argparse.ArgumentTypeError(f"{path!r} is in a folder without write permission: give another one")
    return path


def json_text(values: Any) -> str:
    """Returns values as JSON, which has no NaN and no infinities: they become null."""
    return json.dumps(_finite(values), indent=2, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def priced(estimate: Estimate) -> dict[str, Any]:
    """Returns a plan with its predicted time and memory, for JSON."""
    return {
        "samples_per_second": estimate.samples_per_second,
        "step_ms": estimate.step_ms,
        "memory_bytes": list(estimate.memory_bytes),
        "plan": json.loads(estimate.plan.to_json()),
    }


def priced_all(others: list[Alternative]) -> dict[str, Any]:
    """Returns the best plan of each alternative as JSON values, or the memory it would need."""
    return {
        other.name: priced(other.best) if other.best else {"least_memory_bytes": other.least_memory_bytes}
        for other in others
    }


def assumptions(hardware: HardwareProfile, model: ModelProfile, plan: ParallelPlan) -> dict[str, str]:
    """Returns the source of each assumed figure in the prediction of a plan."""
    of_plan = rings.ASSUMED if any(layer.context > 1 for layer in plan.layers) else {}
    return {**hardware.assumed, **model.assumed, **of_plan}
