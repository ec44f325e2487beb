# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""`galvatron rent`: says which of several offers of devices trains a number of tokens in time at the lowest price."""

from __future__ import annotations

import argparse
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from galvatron_hf.cli.case import read_case
from galvatron_hf.cli.case_arguments import add_model_arguments, add_workload_arguments
from galvatron_hf.cli.output import console, json_text, output_file, priced
from galvatron_hf.plan.validation import MAX_RANKS, check_fields, check_int, check_number, show
from galvatron_hf.planner.cost.workload import Workload
from galvatron_hf.planner.estimate import Estimate
from galvatron_hf.planner.report.throughput import Throughput, amount, throughput_of
from galvatron_hf.planner.search import search_plan


_DAYS = {"h": 1 / 24, "d": 1.0, "w": 7.0}
_FIELDS = ("name", "cluster", "nodes", "devices_per_node", "price_per_hour")


@dataclass(frozen=True, kw_only=True)
class Offer:
    """Describes devices for rent; `price_per_hour` is that of one device, in any currency."""

    name: str
    cluster: str
    nodes: int
    devices_per_node: int
    price_per_hour: float


@dataclass(frozen=True, kw_only=True)
class Quote:
    """Holds the best plan on an offer, or None and the memory that a device lacks."""

    offer: Offer
    best: Estimate | None
    workload: Workload
    pace: Throughput | None
    message: str = ""

    def days(self, tokens: float) -> float:
        return math.inf if self.pace is None else self.pace.days(tokens)

    def price(self, tokens: float) -> float:
        return math.inf if self.pace is None else self.pace.device_hours(tokens) * self.offer.price_per_hour

    def values(self, tokens: float) -> dict[str, Any]:
        """Returns the quote as JSON values."""
        named = {"offer": self.offer.name, "price_per_hour": self.offer.price_per_hour}
        if self.pace is None:
            return named | {"no_plan": self.message}
        return named | self.pace.values(tokens, self.offer.price_per_hour) | priced(self.best)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `galvatron rent`."""
    parser.description = (
        "Find the fastest plan on each of several offers, what a run of --tokens takes and costs there, and the "
        "cheapest offer within --deadline. Everything is predicted from presets."
    )
    parser.add_argument(
        "--offers",
        required=True,
        metavar="FILE",
        help="JSON: a list of objects with name, cluster (a preset), nodes, devices_per_node and price_per_hour (of a "
        "device)",
    )
    parser.add_argument("--deadline", metavar="TIME", help="longest run, such as 36h, 30d or 6w (default: none)")
    parser.add_argument("--output", type=output_file, metavar="FILE", help="write the cheapest offer's plan here")
    add_model_arguments(parser)
    add_workload_arguments(parser)
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    """Prints a quote for each offer, and the cheapest one in time."""
    if given.tokens is None:
        raise ValueError("galvatron rent prices a run: give its length, such as --tokens 1e12.")
    deadline = math.inf if given.deadline is None else days_of(given.deadline)
    quotes = [quote(given, offer) for offer in read_offers(given.offers)]
    in_time = [one for one in quotes if one.days(given.tokens) <= deadline]
    cheapest = min(in_time, key=lambda one: one.price(given.tokens), default=None)
    cheapest = None if cheapest is None or cheapest.best is None else cheapest
    if cheapest is not None and given.output is not None:
        cheapest.best.plan_with_prediction(cheapest.workload).to_json(given.output)
    if given.json:
        values = {
            "cheapest": None if cheapest is None else cheapest.offer.name,
            "offers": [one.values(given.tokens) for one in quotes],
        }
        print(json_text(values))
        return 0
    _show(quotes, cheapest, given.tokens, deadline)
    return 0


def quote(given: argparse.Namespace, offer: Offer) -> Quote:
    """Returns the quote of an offer."""
    devices = dict(cluster=offer.cluster, nodes=offer.nodes, devices_per_node=offer.devices_per_node)
    devices |= dict(hardware_profile=None, galvatron_profiles=None, gpus=None, price_per_hour=offer.price_per_hour)
    hardware, model, workload, budget = read_case(argparse.Namespace(**{**vars(given), **devices}))
    result = search_plan(hardware, model, workload, memory_bytes=budget, progress=True)
    if result.best is None:
        return Quote(offer=offer, best=None, workload=workload, pace=None, message=result.no_plan_message)
    pace = throughput_of(hardware, model, workload, result.best.step_ms)
    return Quote(offer=offer, best=result.best, workload=workload, pace=pace)


def read_offers(path: str) -> list[Offer]:
    """Reads a list of offers; raises `ValueError` for what is none."""
    try:
        entries = json.loads(Path(path).read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"--offers {path} is not JSON ({error}): give a list of objects.") from None
    if not isinstance(entries, list) or not entries:
        raise ValueError(
            f"--offers {path} has {show(entries)}, which is not a list with something in it: write [...]."
        )
    offers = []
    for index, entry in enumerate(entries):
        where = f"offers[{index}]"
        check_fields(where, entry, _FIELDS, required=("name", "cluster", "price_per_hour"))
        for name in ("name", "cluster"):
            if type(entry[name]) is not str or not entry[name]:
                raise ValueError(f"{where}.{name} is {show(entry[name])}, which is not a word: write such as 'h100'.")
        entry = {"nodes": 1, "devices_per_node": 8} | entry
        for name in ("nodes", "devices_per_node"):
            check_int(f"{where}.{name}", entry[name], high=MAX_RANKS)
        check_number(f"{where}.price_per_hour", entry["price_per_hour"], positive=True)
        offers.append(Offer(**entry))
    return offers


def days_of(text: str) -> float:
    """Returns the days of a time such as "36h", "30d" or "6w"."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([hdw])", text.strip().lower())
    if found is None or float(found[1]) == 0:
        raise ValueError(f"--deadline {text} is not a time: give hours, days or weeks, such as 36h, 30d or 6w.")
    return float(found[1]) * _DAYS[found[2]]


def _show(quotes: list[Quote], cheapest: Quote | None, tokens: float, deadline: float) -> None:
    out = console()
    table = Table(title=f"{tokens:.3g} tokens (predicted, without interruptions)", title_justify="left")
    table.add_column("offer")
    for name in ("devices", "tokens/s", "MFU", "days", "price"):
        table.add_column(name, justify="right", overflow="fold")
    for one in sorted(quotes, key=lambda one: one.price(tokens)):
        name, offer = escape(one.offer.name), f"{one.offer.nodes} x {one.offer.devices_per_node} {one.offer.cluster}"
        if one.pace is None:
            table.add_row(name, offer, "-", "-", "-", "no plan fits")
            continue
        mfu = "-" if one.pace.mfu is None else f"{one.pace.mfu:.0%}"
        late = "" if one.days(tokens) <= deadline else " (late)"
        days, price = amount(one.days(tokens), 1) + late, amount(one.price(tokens), 0)
        table.add_row(name, offer, f"{one.pace.tokens_per_second:,.0f}", mfu, days, price)
    out.print(table)
    if cheapest is None:
        out.print("No offer trains so many tokens in time.")
    else:
        out.print(
            f"{cheapest.offer.name} is the cheapest in time: {amount(cheapest.price(tokens), 0)} for "
            f"{amount(cheapest.days(tokens), 1)} days.",
            markup=False,
        )
