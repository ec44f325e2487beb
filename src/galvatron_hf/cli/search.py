# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""`galvatron search`: finds the fastest plan for a model on a cluster."""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from typing import Any

from galvatron_hf.cli.case import read_case, virtual_stages_of
from galvatron_hf.cli.case_arguments import add_case_arguments, add_rounds_argument
from galvatron_hf.cli.output import assumptions, console, json_text, output_file, priced, priced_all
from galvatron_hf.cli.stopping import Stop, stop_at_interrupt
from galvatron_hf.planner.cost.workload import Workload
from galvatron_hf.planner.estimate import Estimate
from galvatron_hf.planner.report.alternatives import alternatives
from galvatron_hf.planner.report.report import explain
from galvatron_hf.planner.report.throughput import throughput_of
from galvatron_hf.planner.search import SearchResult, search_plan
from galvatron_hf.planner.simplify import TOLERANCE, simplest
from galvatron_hf.planner.space import FEATURES, Limits
from galvatron_hf.profiler.profiles.hardware import HardwareProfile
from galvatron_hf.profiler.profiles.model import ModelProfile


# Flags that choose from what a word after --forbid leaves out.
_FLAGS = {
    "pipeline": "pipeline",
    "interleaved": "rounds",
    "tensor": "max_tensor",
    "context": "context",
    "expert": "max_expert",
}


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
    parser.add_argument(
        "--forbid",
        nargs="+",
        default=[],
        metavar="WHAT",
        help=f"leave this out of the search: {', '.join(FEATURES)}",
    )
    parser.add_argument(
        "--time-limit",
        type=float,
        metavar="SECONDS",
        help="end each search after so long, as Ctrl-C does, when the problem at hand is solved, with the best plan "
        "so far and how far it may be from the fastest one (default: no limit)",
    )
    parser.add_argument("--compare", action="store_true", help="also find the best DDP, ZeRO-3 and Megatron plans")
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    """Prints the plan that was found, and writes it to --output."""
    if not 0 <= given.simplicity <= 100:
        raise ValueError(f"--simplicity {given.simplicity:g} is not a share of time in percent: give 0 to 100.")
    if given.time_limit is not None and not 0 < given.time_limit < math.inf:
        raise ValueError(f"--time-limit {given.time_limit:g} is no time: give seconds, such as 10.")
    limits = _limits(given)
    hardware, model, workload, budget = read_case(given)
    with stop_at_interrupt(given.time_limit) as stop:
        _search(given, (hardware, model, workload), budget, limits, stop)
    return 0


def _limits(given: argparse.Namespace) -> Limits:
    limits = Limits(
        tensor=given.max_tensor,
        expert=given.max_expert,
        recompute=("none",) if given.no_recompute else ("none", "full"),
        pipeline=None if given.pipeline is None else tuple(given.pipeline),
        micro_batches=None if given.micro_batches is None else tuple(given.micro_batches),
        context=None if given.context is None else tuple(given.context),
        virtual_stages=virtual_stages_of(given),
    )
    for feature in given.forbid:
        flag = _FLAGS.get(feature)
        if flag is not None and getattr(given, flag) is not None:
            raise ValueError(
                f"--forbid {feature} and --{flag.replace('_', '-')} exclude each other: give one of them."
            )
        limits = limits.without(feature)
    return limits


def _search(
    given: argparse.Namespace,
    case: tuple[HardwareProfile, ModelProfile, Workload],
    budget: int,
    limits: Limits,
    stop: Stop,
) -> None:
    result = search_plan(*case, memory_bytes=budget, limits=limits, progress=True, stop=stop)
    fastest, chosen = result.best, simplest(result, given.simplicity / 100, stop)
    result = replace(result, best=chosen)
    if given.output is not None:
        result.best.plan_with_prediction(result.workload).to_json(given.output)
    stop.begin()  # each search of the comparison has the time limit
    if given.json:
        print(json_text(_values(given, result, fastest, stop)))
        return
    _show(given, result, stop)
    more = 100 * (chosen.step_ms / fastest.step_ms - 1)
    if chosen.plan != fastest.plan:
        print(f"The fastest plan takes {more:.2g}% less time and is less simple; --simplicity 0 shows it.")
    if given.output is not None:
        rows = result.workload.rows
        print(f"Train under it with parallel_plan={given.output!r} and global_batch_size={rows}.")


def _values(given: argparse.Namespace, result: SearchResult, fastest: Estimate, stop: Stop) -> dict[str, Any]:
    case, budget, others = (result.hardware, result.model, result.workload), result.memory_bytes, []
    if given.compare:
        options = dict(virtual_stages=result.limits.virtual_stages, progress=True, stop=stop, costs=result.costs)
        options |= dict(interrupted=lambda: stop.asked)
        others = alternatives(*case, memory_bytes=budget, **options)
    plan = result.best.plan_with_prediction(result.workload)
    return priced(replace(result.best, plan=plan)) | {
        **throughput_of(*case, result.best.step_ms).values(given.tokens, given.price_per_hour),
        "fastest_step_ms": fastest.step_ms,
        "bound_step_ms": fastest.step_ms if result.bound_ms is None else result.bound_ms,
        "search_seconds": result.seconds,
        "memory_budget_bytes": budget,
        "memory_quantum_bytes": 1,
        "branches": result.cuts,
        "branches_solved": result.solved,
        "states": result.states,
        "runners_up": [priced(estimate) for estimate in result.runners_up],
        "alternatives": priced_all(others),
        "assumed": assumptions(*case[:2], result.best.plan),
    }


def _show(given: argparse.Namespace, result: SearchResult, stop: Stop) -> None:
    out, case = console(), (result.hardware, result.model, result.workload)
    report = explain(result, compare=given.compare, progress=True, stop=stop, interrupted=lambda: stop.asked)
    pace = throughput_of(*case, result.best.step_ms)
    out.print(replace(report, pace=pace.lines(given.tokens, given.price_per_hour)))
    if given.compare and stop.asked:
        out.print("The comparison was stopped: plans of other kinds that were not found before are left out.")
    if result.bound_ms is not None:
        more = result.best.step_ms / result.bound_ms - 1
        out.print(
            f"The search was stopped after {result.seconds:.1f} s: no plan takes less than {result.bound_ms:.1f} ms, "
            f"so this one takes at most {more:.1%} longer than the fastest one."
        )
    out.print(
        f"{result.cuts} ways to cut the step, {result.problems} problems of the best, {result.solved} of them "
        f"searched to the end with {result.states} partial plans, memory counted in bytes, {result.seconds:.1f} s"
    )
    assumed = sorted(assumptions(*case[:2], result.best.plan))
    out.print(f"Predicted, not measured{'; assumed: ' + ', '.join(assumed) if assumed else ''}.")
