# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Compares the plan of `parallel_plan="auto"` with the fastest of many measured plans.

    PYTHONPATH=benchmarks OMP_NUM_THREADS=1 python benchmarks/regret.py --output regret      as root
    ... --places local --plans 30 --seed 3
    ... --places hosts --mbit 200

Ranks have a share of a core each; the options are those of accuracy.py. "local" has all ranks on one host, "hosts" two
on each of two hosts with a slow link. At each place the script profiles machine and model and searches a plan. It
trains this plan, the best of DDP, ZeRO-3, Megatron and ZeRO-3 with Ulysses, and random plans in turns. Every lot of
runs includes the searched plan; a plan's speed is relative to it in the same rounds.

Regret is 1 - speed of the searched plan / speed of the fastest plan. The fastest of many noisy figures is biased, so
the best three are timed again with twice the rounds. The searched plan of each place is also timed at the other place.

Evidence tier: measured on devices emulated by CPU quotas (gloo), the link by a token bucket.
"""

import argparse
import contextlib
import signal
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from cpu_interference import CoreWatch, cpu_interference
from cpu_quota import QuotaError
from hosts import HostError, one_host, two_hosts
from interleaved_worlds import Seat
from plan_runs import devices, measure, parser_of_runs, profiled
from random_plans import Shape, brief, draw_plans

from galvatron_hf import ParallelPlan
from galvatron_hf.planner.estimate import estimate_plan
from galvatron_hf.planner.report.alternatives import alternatives
from galvatron_hf.planner.search import search_plan


SHAPE = "256x8x8x4x704x2048x128x8"
BEST = 3  # that are timed again


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """
    Attributes:
        name (`str`): origin of the plan.
        plan ([`ParallelPlan`]): the plan with its prediction.
        speed (`float`, *optional*): speed / speed of the searched plan.
    """

    name: str
    plan: ParallelPlan
    speed: float = 1.0


def candidates(shape: Shape, seats: list[Seat], options: argparse.Namespace, watch: CoreWatch) -> list[Candidate]:
    """Returns the searched plan, then well-known plans, then random ones."""
    hardware, model, _ = profiled(shape, seats, watch)
    workload = shape.workload()
    result = search_plan(hardware, model, workload)
    found = [("auto", result.best.plan)]
    others = alternatives(hardware, model, workload, memory_bytes=hardware.memory_bytes)
    found += [(other.name, other.best.plan) for other in others if other.best is not None]
    found += [(f"runner-up {rank}", other.plan) for rank, other in enumerate(result.runners_up[:4], start=1)]
    drawn = draw_plans(len(seats), model, shape, options.plans, options.seed)
    found += [(f"drawn {index}", plan) for index, plan in enumerate(drawn)]
    unique: dict[str, Candidate] = {}
    for name, plan in found:
        noted = estimate_plan(hardware, model, workload, plan).plan_with_prediction(workload)
        unique.setdefault(replace(plan, meta={}).to_json(), Candidate(name=name, plan=noted))
    return list(unique.values())


def time_all(
    ones: list[Candidate],
    picked: Candidate,
    shape: Shape,
    seats: list[Seat],
    options: argparse.Namespace,
    watch: CoreWatch,
) -> list[Candidate]:
    """Returns each candidate with its speed relative to the searched plan."""
    timed = []
    for start in range(0, len(ones), options.together - 1):
        lot = ones[start : start + options.together - 1]
        base, *runs = measure([picked.plan, *(one.plan for one in lot)], shape, seats, options, watch)
        for one, run in zip(lot, runs, strict=True):
            ms, speed = 1e3 * run.seconds, base.seconds / run.seconds
            timed.append(replace(one, speed=speed))
            predicted = one.plan.meta["predicted"]["step_ms"]
            print(
                f"  {speed:6.3f}  {ms:8.1f} ms (predicted {predicted:.1f})  {one.name}: {brief(one.plan)}", flush=True
            )
    return timed


def compare(
    place: str, shape: Shape, seats: list[Seat], options: argparse.Namespace, watch: CoreWatch
) -> tuple[Candidate, float]:
    """Measures one place, and returns the searched plan and its speed / speed of the fastest plan."""
    picked, *others = candidates(shape, seats, options, watch)
    print(f"\n{place}, {shape}: auto picks {brief(picked.plan)}; speeds relative to it", flush=True)
    timed = sorted(time_all(others, picked, shape, seats, options, watch), key=lambda one: -one.speed)
    again = argparse.Namespace(**vars(options) | {"rounds": 2 * options.rounds})
    print(f" the best {BEST} once more, and the picked plan against itself (A/A)")
    best = time_all([*timed[:BEST], replace(picked, name="auto again")], picked, shape, seats, again, watch)
    ratio = 1 / max(1.0, *(one.speed for one in best[:-1]))
    print(
        f"{place}: auto reaches {ratio:.3f} of the best of {len(timed) + 1} plans, {1 / timed[-1].speed:.2f} times "
        f"the slowest; A/A {best[-1].speed:.3f}",
        flush=True,
    )
    return picked, ratio


def main() -> None:
    parser = parser_of_runs(__doc__, plans=18, shapes=(SHAPE,))
    parser.add_argument("--places", nargs="+", default=["local", "hosts"], choices=["local", "hosts"])
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *unused: sys.exit("ended by SIGTERM"))
    torch.set_num_threads(1)
    options.output = Path(options.output)
    options.output.mkdir(parents=True, exist_ok=True)
    ratios = {}
    for shape in options.shapes:
        picked = {}
        for place in options.places:
            with contextlib.ExitStack() as stack:
                shares = stack.enter_context(devices("galvatron-regret", options))
                hosts = one_host(shares) if place == "local" else two_hosts(shares, options.mbit)
                seats, watch = stack.enter_context(hosts), stack.enter_context(cpu_interference())
                picked[place], ratios[place, str(shape)] = compare(place, shape, seats, options, watch)
                for other, one in picked.items():
                    if other != place and replace(one.plan, meta={}) != replace(picked[place].plan, meta={}):
                        print(f" what auto picks at {other!r}, here:")
                        time_all([replace(one, name=other)], picked[place], shape, seats, options, watch)
    print("\n" + "\n".join(f"{place} {shape}: {ratio:.3f}" for (place, shape), ratio in ratios.items()))
    print("tier: measured on devices emulated by CPU quotas, the link by a token bucket")


if __name__ == "__main__":
    try:
        main()
    except (QuotaError, HostError) as error:
        sys.exit(str(error))
