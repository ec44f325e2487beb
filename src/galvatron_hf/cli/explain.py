# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""`galvatron explain`: shows where a plan's time and memory go, compared with the fastest and well-known plans."""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace

from rich.console import Console

from galvatron_hf.cli.case import read_case, virtual_stages_of
from galvatron_hf.cli.case_arguments import add_case_arguments, add_plan_argument, add_rounds_argument
from galvatron_hf.cli.given_plan import read_plan, warn_of_precision
from galvatron_hf.cli.output import assumptions, console, json_text, output_file, priced, priced_all
from galvatron_hf.plan.plan_words import check_is_plan
from galvatron_hf.plan.table import plan_table
from galvatron_hf.planner.report.alternatives import Alternative, alternatives
from galvatron_hf.planner.report.explain import Explanation, explain_plan
from galvatron_hf.planner.report.report import Report
from galvatron_hf.planner.report.throughput import throughput_of
from galvatron_hf.planner.search import search_plan
from galvatron_hf.planner.simplify import simplest
from galvatron_hf.planner.space import Limits


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `galvatron explain`."""
    parser.description = (
        "Show where a plan's predicted time and memory go, and compare it with the fastest and well-known plans."
    )
    add_case_arguments(parser)
    add_plan_argument(parser)
    add_rounds_argument(parser)
    parser.add_argument("--output", type=output_file, metavar="FILE", help="write the fastest plan to this file")
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    """Prints the parts of a plan's time and memory, and other plans to compare."""
    check_is_plan(given.plan)
    hardware, model, workload, budget = read_case(given)
    plan = read_plan(given, hardware, model, workload, budget)
    warn_of_precision(plan, workload)
    found = explain_plan(hardware, model, workload, plan)
    most = virtual_stages_of(given)
    limits = Limits(virtual_stages=most)
    result = search_plan(hardware, model, workload, memory_bytes=budget, limits=limits, progress=True)
    fastest = None if result.best is None else simplest(result)
    if given.output is not None:
        if fastest is None:
            raise ValueError(result.no_plan_message)
        fastest.plan_with_prediction(workload).to_json(given.output)
    others = [
        Alternative(name="the fastest", best=result.best, least_memory_bytes=result.least_memory_bytes),
        *alternatives(
            hardware, model, workload, memory_bytes=budget, virtual_stages=most, progress=True, costs=result.costs
        ),
    ]
    pace = throughput_of(hardware, model, workload, found.estimate.step_ms)
    if given.json:
        more = {
            "memory_budget_bytes": budget,
            **pace.values(given.tokens, given.price_per_hour),
            "step_ms_by_kind": found.step_ms(),
            "hidden_communication_ms": found.hidden_ms,
            "stages": [asdict(stage) for stage in found.stages],
            "alternatives": priced_all(others),
            "assumed": assumptions(hardware, model, plan),
        }
        print(json_text(priced(replace(found.estimate, plan=plan)) | more))
        return 0
    out, lines = console(), pace.lines(given.tokens, given.price_per_hour)
    out.print(Report(explanation=found, others=others, budget=budget, pace=lines))
    if fastest is not None and fastest.step_ms < found.estimate.step_ms:
        _show_faster(out, found, explain_plan(hardware, model, workload, fastest.plan))
    return 0


def _show_faster(out: Console, given: Explanation, faster: Explanation) -> None:
    """Prints a faster plan, and what it saves."""
    out.print(plan_table(faster.estimate.plan))
    before, after = given.step_ms(), faster.step_ms()
    saved = {name: before.get(name, 0.0) - after.get(name, 0.0) for name in before | after}
    ordered = sorted((item for item in saved.items() if abs(item[1]) >= 0.05), key=lambda item: -item[1])
    changes = ", ".join(f"{name} {-ms:+.1f} ms" for name, ms in ordered)
    ratio = given.estimate.step_ms / faster.estimate.step_ms
    out.print(f"This plan is {ratio:.2f} times as fast (predicted): {changes}.")
