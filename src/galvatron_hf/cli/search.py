# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""`galvatron search`: finds the fastest plan for a model on a cluster."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace

from rich.console import Console

from galvatron_hf.cli.case import (
    add_case_arguments,
    add_rounds_argument,
    assumptions,
    priced,
    priced_all,
    read_case,
    virtual_stages_of,
)
from galvatron_hf.cli.files import output_file
from galvatron_hf.planner.cost.workload import Workload
from galvatron_hf.planner.report.alternatives import alternatives
from galvatron_hf.planner.report.report import explain
from galvatron_hf.planner.report.throughput import throughput_of
from galvatron_hf.planner.search import SearchResult, search_plan
from galvatron_hf.planner.simplify import TOLERANCE, simplest
from galvatron_hf.planner.space import Limits
from galvatron_hf.profiler.profiles.hardware import HardwareProfile
from galvatron_hf.profiler.profiles.model import ModelProfile


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `galvatron search`."""
    parser.description = (
        "Find the fastest plan for a model on a cluster, under the cost model. Nothing is measured or run: give a "
        "preset (--cluster) or measured profiles."
    )
    add_case_arguments(parser)
    parser.add_argument("--output", type=output_file, metavar="FILE", help="write the plan to this file, as JSON")
    parser.add_argument("--max-tensor", type=int, metavar="N", help="largest tensor degree (default: any)")
    parser.add_argument("--max-expert", type=int, metavar="N", help="largest expert degree (default: any)")
    parser.add_argument(
        "--pipeline", type=int, nargs="+", metavar="N", help="pipeline degrees to search (default: all)"
    )
    parser.add_argument(
        "--micro-batches", type=int, nargs="+", metavar="N", help="micro-batch counts to search (default: all)"
    )
    parser.add_argument("--context", type=int, nargs="+", metavar="N", help="context degrees to search (default: all)")
    add_rounds_argument(parser)
    parser.add_argument("--no-recompute", action="store_true", help="search plans without recompute only")
    parser.add_argument(
        "--simplicity",
        type=float,
        default=100 * TOLERANCE,
        metavar="PERCENT",
        help="return the simplest plan that takes at most so much longer than the fastest one (default: 1)",
    )
    parser.add_argument("--compare", action="store_true", help="also find the best DDP, ZeRO-3 and Megatron plans")
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    """Prints the plan that was found, and writes it to --output."""
    if not 0 <= given.simplicity <= 100:
        raise ValueError(f"--simplicity {given.simplicity:g} is not a share of time in percent: give 0 to 100.")
    hardware, model, workload, budget = read_case(given)
    limits = Limits(
        tensor=given.max_tensor,
        expert=given.max_expert,
        recompute=("none",) if given.no_recompute else ("none", "full"),
        pipeline=None if given.pipeline is None else tuple(given.pipeline),
        micro_batches=None if given.micro_batches is None else tuple(given.micro_batches),
        context=None if given.context is None else tuple(given.context),
        virtual_stages=virtual_stages_of(given),
    )
    result = search_plan(hardware, model, workload, memory_bytes=budget, limits=limits, progress=True)
    fastest, chosen = result.best, simplest(result, given.simplicity / 100)
    result = replace(result, best=chosen)
    if given.output is not None:
        result.best.plan_with_prediction(workload).to_json(given.output)
    if given.json:
        others = []
        if given.compare:
            most = limits.virtual_stages
            others = alternatives(hardware, model, workload, memory_bytes=budget, virtual_stages=most, progress=True)
        found = priced(replace(result.best, plan=result.best.plan_with_prediction(workload))) | {
            **throughput_of(hardware, model, workload, result.best.step_ms).values(given.tokens, given.price_per_hour),
            "fastest_step_ms": fastest.step_ms,
            "search_seconds": result.seconds,
            "memory_budget_bytes": budget,
            "memory_quantum_bytes": 1,
            "branches": result.cuts,
            "branches_solved": result.solved,
            "states": result.states,
            "runners_up": [priced(estimate) for estimate in result.runners_up],
            "alternatives": priced_all(others),
            "assumed": assumptions(hardware, model, result.best.plan),
        }
        print(json.dumps(found, indent=2))
        return 0
    _show(result, given, (hardware, model, workload))
    more = 100 * (chosen.step_ms / fastest.step_ms - 1)
    if chosen.plan != fastest.plan:
        print(f"The fastest plan takes {more:.2g}% less time and is less simple; --simplicity 0 shows it.")
    return 0


def _show(
    result: SearchResult, given: argparse.Namespace, case: tuple[HardwareProfile, ModelProfile, Workload]
) -> None:
    console = Console()
    report = explain(result, compare=given.compare, progress=True)
    pace = throughput_of(*case, result.best.step_ms)
    console.print(replace(report, pace=pace.lines(given.tokens, given.price_per_hour)))
    console.print(
        f"{result.cuts} ways to cut the step, {result.problems} problems of the best, {result.solved} of them "
        f"searched to the end with {result.states} partial plans, memory counted in bytes, {result.seconds:.1f} s"
    )
    assumed = sorted(assumptions(*case[:2], result.best.plan))
    console.print(f"Predicted, not measured{'; assumed: ' + ', '.join(assumed) if assumed else ''}.")
