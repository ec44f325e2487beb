# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""`galvatron plot`: draws a plan, a step, its memory, a dataset's lengths, a deal, or predictions against
measurements.
"""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Any

from galvatron_hf.cli.case import read_case
from galvatron_hf.cli.case_arguments import add_case_arguments, add_plan_argument
from galvatron_hf.cli.data import add_dataset_arguments, batches_of, cost_of, kept_lengths
from galvatron_hf.cli.given_plan import read_plan, warn_of_precision
from galvatron_hf.cli.output import json_text, output_file
from galvatron_hf.cli.pictures import loaded
from galvatron_hf.plan import ParallelPlan
from galvatron_hf.plan.plan_words import check_is_plan
from galvatron_hf.planner.report.explain import Explanation, explain_plan


if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from galvatron_hf.plots.deal import StepDeal

Drawn = tuple["Figure", dict[str, Any]]

KINDS = {
    "plan": "the strategy of each layer, on the ranks that compute it",
    "timeline": "when ranks compute and wait in a step, predicted, measured or both",
    "memory": "the predicted memory of a rank by kind, against the budget",
    "lengths": "the lengths of a dataset, with the padding that padded batches would have",
    "deal": "the documents of one step over micro-batches and data ranks",
    "accuracy": "predicted against measured step times",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the kinds of pictures, with the arguments of each."""
    parser.description = (
        "Draw a picture as PNG or SVG. Each kind takes --output, and --json, which prints the numbers in the picture; "
        "galvatron plot KIND --help shows the others."
    )
    kinds = parser.add_subparsers(required=True, metavar="KIND")
    for name, text in KINDS.items():
        one = kinds.add_parser(name, help=text, description=f"Draw {text}.")
        one.add_argument(
            "--output", type=_picture_file, required=True, metavar="FILE", help="the picture: a .png or .svg file"
        )
        _ARGUMENTS[name](one)
        one.set_defaults(run=run, draw=_DRAW[name])


def run(given: argparse.Namespace) -> int:
    """Draws the picture and writes it."""
    style = loaded("style")
    figure, values = given.draw(given)
    style.save(figure, given.output)
    print(json_text(values) if given.json else f"The picture is in {given.output}.")
    return 0


def _picture_file(path: str) -> str:
    if os.path.splitext(path)[1].lower() not in (".png", ".svg"):
        raise argparse.ArgumentTypeError(f"{path!r} is no .png and no .svg file: give one")
    return output_file(path)


# ---- Plans and their predictions ----


def _add_plan(parser: argparse.ArgumentParser) -> None:
    add_case_arguments(parser, required=False)
    add_plan_argument(parser)


def _add_timeline(parser: argparse.ArgumentParser) -> None:
    add_case_arguments(parser, required=False)
    add_plan_argument(parser, required=False)
    parser.add_argument("--trace", metavar="FILE", help="the timeline.json of a run with trace_dir, or its folder")
    parser.add_argument("--step", type=int, metavar="N", help="a step of --trace, from 0 (default: its last)")


def _add_memory(parser: argparse.ArgumentParser) -> None:
    add_case_arguments(parser)
    add_plan_argument(parser)


def _explained(given: argparse.Namespace) -> tuple[Explanation, int]:
    """Returns the prediction of the plan, and the budget of a rank in bytes."""
    for name in ("plan", "global_batch", "seq_length"):
        if getattr(given, name) is None:
            raise ValueError(f"--{name.replace('_', '-')} is missing, without which nothing is predicted: give it.")
    check_is_plan(given.plan)
    hardware, model, workload, budget = read_case(given)
    plan = read_plan(given, hardware, model, workload, budget)
    warn_of_precision(plan, workload)
    return explain_plan(hardware, model, workload, plan), budget


def _draw_plan(given: argparse.Namespace) -> Drawn:
    module = loaded("plan_diagram")
    check_is_plan(given.plan)
    if os.path.isfile(given.plan) and given.global_batch is None:
        plan, estimate = ParallelPlan.from_json(given.plan), None
    else:
        estimate = _explained(given)[0].estimate
        plan = estimate.plan
    return module.plan_figure(plan, estimate), module.plan_values(plan, estimate)


def _draw_timeline(given: argparse.Namespace) -> Drawn:
    spans, timelines = loaded("spans"), []
    if given.trace is None and given.plan is None:
        raise ValueError("Neither a plan nor a trace is given: give --plan with its case, or --trace.")
    if given.plan is not None:
        timelines.append(spans.predicted_timeline(_explained(given)[0]))
    if given.trace is not None:
        timelines.append(spans.measured_timeline(given.trace, given.step))
    return loaded("timeline").timeline_figure(*timelines), {"timelines": [one.values() for one in timelines]}


def _draw_memory(given: argparse.Namespace) -> Drawn:
    module = loaded("memory")
    explanation, budget = _explained(given)
    return module.memory_figure(explanation, budget), module.memory_values(explanation, budget)


# ---- Data ----


def _add_lengths(parser: argparse.ArgumentParser) -> None:
    add_dataset_arguments(parser)
    _add_json(parser)


def _add_deal(parser: argparse.ArgumentParser) -> None:
    add_dataset_arguments(parser)
    parser.add_argument("--step", type=int, default=0, metavar="N", help="the global batch, from 0 (default: 0)")
    parser.add_argument(
        "--mode",
        choices=("packed", "dynamic"),
        default="packed",
        help="packed: each document on one rank (default); dynamic: ranks share long ones",
    )
    _add_json(parser)


def _draw_lengths(given: argparse.Namespace) -> Drawn:
    module = loaded("lengths")
    bins = module.length_bins(kept_lengths(given), batches_of(given))
    return module.lengths_figure(bins), bins.values()


def _draw_deal(given: argparse.Namespace) -> Drawn:
    module = loaded("deal")
    deal = _deal_of_run(given.dataset) or _forecast_deal(given)
    return module.deal_figure(deal), deal.values()


def _deal_of_run(folder: str) -> StepDeal | None:
    """Returns the deal of a training run's last packed step; None if the folder is not that of a run."""
    from galvatron_hf.planner.report.run_files import PLAN_FILE, RUN_FILE, TrainingRun

    path = os.path.join(folder, RUN_FILE)
    if not os.path.isfile(path):
        if os.path.isfile(os.path.join(folder, PLAN_FILE)):
            raise ValueError(f"{folder!r} is of a run that has not ended, without {RUN_FILE}: give a dataset instead.")
        return None
    values = TrainingRun.from_json(path).deal
    if values is None:
        raise ValueError(f"{folder!r} is of a run that packed no step: give a dataset instead.")
    return loaded("deal").run_deal(values)


def _forecast_deal(given: argparse.Namespace) -> StepDeal:
    # These import torch or scipy.
    from galvatron_hf.data.cost import GroupCost, assumed_sharing
    from galvatron_hf.data.forecast import drawn_batches
    from galvatron_hf.data.group_placement import place_groups
    from galvatron_hf.data.placement import place

    workload, cost, lengths = batches_of(given), cost_of(given), kept_lengths(given)
    batches = drawn_batches(lengths, workload)
    if not 0 <= given.step < len(batches):
        raise ValueError(f"--step {given.step} is not one of the {len(batches)} global batches: count from 0.")
    batch, limit = batches[given.step], workload.token_limit(int(lengths.max()))
    if given.mode == "packed":
        placement = place(batch, workload.ranks, cost, max_tokens=limit)
    else:
        cost = GroupCost(sequence=cost, sharing={"ring": assumed_sharing(cost)})
        placement = place_groups(batch, workload.ranks, cost, max_tokens=limit)
    return loaded("deal").step_deal(placement, batch, cost, limit=limit)


# ---- Predictions and measurements ----


def _add_accuracy(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files",
        nargs="+",
        metavar="FILE",
        help="training_run.json of a run, its folder, or cases-SHAPE.json of benchmarks/accuracy.py",
    )
    _add_json(parser)


def _draw_accuracy(given: argparse.Namespace) -> Drawn:
    module = loaded("accuracy")
    found = [one for path in given.files for one in module.read_comparisons(path)]
    return module.accuracy_figure(found), module.accuracy_values(found)


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the numbers in the picture as one JSON object")


_ARGUMENTS = {
    "plan": _add_plan,
    "timeline": _add_timeline,
    "memory": _add_memory,
    "lengths": _add_lengths,
    "deal": _add_deal,
    "accuracy": _add_accuracy,
}
_DRAW = {
    "plan": _draw_plan,
    "timeline": _draw_timeline,
    "memory": _draw_memory,
    "lengths": _draw_lengths,
    "deal": _draw_deal,
    "accuracy": _draw_accuracy,
}
