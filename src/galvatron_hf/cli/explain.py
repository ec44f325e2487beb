# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""`galvatron explain`: shows where a plan's time and memory go, compared with the fastest and well-known plans."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace

from rich.console import Console

from galvatron_hf.cli.case import (
    add_case_arguments,
    add_plan_argument,
    add_rounds_argument,
    assumptions,
    priced,
    priced_all,
    read_case,
    read_plan,
    virtual_stages_of,
    warn_of_precision,
)
from galvatron_hf.planner.report.alternatives import Alternative, alternatives
from galvatron_hf.planner.report.explain import explain_plan
from galvatron_hf.planner.report.report import Report
from galvatron_hf.planner.report.throughput import throughput_of
from galvatron_hf.planner.search import search_plan
from galvatron_hf.planner.space import Limits


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `galvatron explain`."""
    parser.description = (
        "Show where a plan's predicted time and memory go, and compare it with the fastest and well-known plans."
    )
    add_case_arguments(parser)
    add_plan_argument(parser)
    add_rounds_argument(parser)
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    """Prints the parts of a plan's time and memory, and other plans to compare."""
    hardware, model, workload, budget = read_case(given)
    plan = read_plan(given.plan, hardware.world_size)
    warn_of_precision(plan, workload)
    found = explain_plan(hardware, model, workload, plan)
    most = virtual_stages_of(given)
    limits = Limits(virtual_stages=most)
    result = search_plan(hardware, model, workload, memory_bytes=budget, limits=limits, progress=True)
    others = [
        Alternative(name="the fastest", best=result.best, least_memory_bytes=result.least_memory_bytes),
        *alternatives(hardware, model, workload, memory_bytes=budget, virtual_stages=most, progress=True),
    ]
    pace = throughput_of(hardware, model, workload, found.estimate.step_ms)
    if given.json:
        more = {
            "memory_budget_bytes": budget,
            **pace.values(given.tokens, given.price_per_hour),
            "step_ms_by_kind": found.step_ms(),
            "stages": [asdict(stage) for stage in found.stages],
            "alternatives": priced_all(others),
            "assumed": assumptions(hardware, model, plan),
        }
        print(json.dumps(priced(replace(found.estimate, plan=plan)) | more, indent=2))
        return 0
    Console().print(
        Report(explanation=found, others=others, budget=budget, pace=pace.lines(given.tokens, given.price_per_hour))
    )
    return 0
