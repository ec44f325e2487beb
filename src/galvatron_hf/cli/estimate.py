# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""`galvatron estimate`: predicts time and memory of a plan."""

from __future__ import annotations

import argparse
from dataclasses import replace

from galvatron_hf.cli.case import read_case
from galvatron_hf.cli.case_arguments import add_case_arguments, add_plan_argument
from galvatron_hf.cli.given_plan import read_plan, warn_of_precision
from galvatron_hf.cli.output import assumptions, console, json_text, priced
from galvatron_hf.plan.plan_words import check_is_plan
from galvatron_hf.planner.report.explain import explain_plan
from galvatron_hf.planner.report.report import Report
from galvatron_hf.planner.report.throughput import throughput_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `galvatron estimate`."""
    parser.description = "Predict time and memory of a plan under the cost model of `galvatron search`."
    add_case_arguments(parser)
    add_plan_argument(parser)
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    """Prints the predicted time and memory of a plan."""
    check_is_plan(given.plan)
    hardware, model, workload, budget = read_case(given)
    plan = read_plan(given, hardware, model, workload, budget)
    warn_of_precision(plan, workload)
    found = explain_plan(hardware, model, workload, plan)
    pace = throughput_of(hardware, model, workload, found.estimate.step_ms)
    if given.json:
        more = {
            "search_seconds": 0.0,
            "memory_budget_bytes": budget,
            **pace.values(given.tokens, given.price_per_hour),
            "step_ms_by_kind": found.step_ms(),
            "hidden_communication_ms": found.hidden_ms,
            "assumed": assumptions(hardware, model, plan),
        }
        print(json_text(priced(replace(found.estimate, plan=plan)) | more))
        return 0
    console().print(
        Report(explanation=found, others=[], budget=budget, pace=pace.lines(given.tokens, given.price_per_hour))
    )
    return 0
