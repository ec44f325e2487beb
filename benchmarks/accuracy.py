# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Compares predicted step times and memory with those of training.

    PYTHONPATH=benchmarks OMP_NUM_THREADS=1 python benchmarks/accuracy.py --output accuracy      as root
    ... --shapes 384x6x6x2x1024x3000x192x8 --share 0.4 --plans 30 --seed 7
    ... --hosts 2 --mbit 400

Four ranks have a share of a core each (cpu_quota.py), scheduled every millisecond (sched_tick.py), and a network
namespace (hosts.py). The script creates and removes all of these. With `--hosts 2` two ranks each are on a host, with
a slow link between the hosts. The script profiles the machine and the model like `parallel_plan="auto"`, draws plans
from the search space (half of them pipelines), and writes the predictions to OUTPUT/predictions-SHAPE.json before it
trains, and predictions with measurements to OUTPUT/cases-SHAPE.json after it, for `galvatron plot accuracy`.

Plans are trained in turns: `--together` runs take `--steps` steps each, `--rounds` times. The first two steps of a
turn do not count, because their caches are cold. The first run of each lot is there twice: the difference of the two
is the spread of any figure (A/A). Memory is the peak of the allocator in a step after the first, on the rank of a
pipeline rank that has most.

Other work on the host can slow a virtual machine's cores for seconds. So each core is watched (cpu_interference.py): a
turn waits for quiet cores, and steps on a core that was slower than usual do not count. Turns are repeated, up to
three times as many, until half of the steps count. The drift is the slowdown of the cores in the counted steps
relative to the profile; the errors are also printed with predictions multiplied by it.

A shape is HIDDENxLAYERSxHEADSxKV_HEADSxINTERMEDIATExVOCABULARYxLENGTHxROWS; rows are those of a step. With
xEXPERTSxTOP_K it is a Qwen3-MoE; predictions then know how uneven the choices of its routers are for the first rows.
With :TARGET it is a T5 with so many LAYERS in each stack, whose rows have LENGTH tokens in the encoder, and TARGET in
the decoder. With /packed rows are documents of packed rows, and half of the plans have ranks share them. The Trainer
chooses the number of micro-batches of packed rows, and predictions are for that number.

Evidence tier: measured on devices emulated by CPU quotas (gloo).
"""

import argparse
import contextlib
import json
import signal
import statistics
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
from galvatron_hf.plan.plan_words import words_of
from galvatron_hf.planner.estimate import estimate_plan


SHAPES = ("256x8x8x4x704x2048x128x8", "512x4x8x2x1408x4096x128x8")


@dataclass(frozen=True, kw_only=True)
class Case:
    """The predictions and measurements of one plan."""

    plan: ParallelPlan
    predicted_ms: float
    measured_ms: float
    predicted_bytes: int
    measured_bytes: int
    drift: float

    @property
    def time_error(self) -> float:
        return self.predicted_ms / self.measured_ms - 1

    @property
    def stretched_error(self) -> float:
        return self.predicted_ms * self.drift / self.measured_ms - 1

    @property
    def memory_error(self) -> float:
        return self.predicted_bytes / self.measured_bytes - 1


def compare(shape: Shape, seats: list[Seat], options: argparse.Namespace, watch: CoreWatch) -> list[Case]:
    """Predicts and measures all plans, and prints the comparison."""
    hardware, model, slowdown = profiled(shape, seats, watch)
    hardware.to_json(options.output / "hardware.json")
    model.to_json(options.output / f"model-{shape}.json")
    plans = draw_plans(len(seats), model, shape, options.plans, options.seed)
    workload = shape.workload()
    noted = [estimate_plan(hardware, model, workload, plan).plan_with_prediction(workload) for plan in plans]
    predictions = options.output / f"predictions-{shape}.json"
    predictions.write_text(json.dumps([json.loads(plan.to_json()) for plan in noted], indent=1))
    print(f"\n{shape}: predictions are in {predictions}", flush=True)
    cases: list[Case] = []
    for start in range(0, len(noted), options.together):
        lot = noted[start : start + options.together]
        runs = measure([*lot, lot[0]], shape, seats, options, watch)
        for plan, run in zip(lot, runs, strict=False):
            if run.micro_batches not in (None, plan.micro_batch_count):
                print(f"   the Trainer placed the documents of {brief(plan)} into {run.micro_batches} micro-batches")
                plan = replace(plan, micro_batches=run.micro_batches)
            estimate = estimate_plan(hardware, model, workload, plan)
            # The stage that needs most decides whether a plan fits.
            pairs = zip(estimate.peak_bytes, run.ending.outcome.measured_bytes, strict=True)
            predicted, measured = max(pairs, key=lambda pair: pair[1])
            case = Case(
                plan=plan,
                predicted_ms=estimate.step_ms,
                measured_ms=1e3 * run.seconds,
                predicted_bytes=predicted,
                measured_bytes=measured,
                drift=run.slowdown / slowdown,
            )
            cases.append(case)
            print(
                f"{case.predicted_ms:8.1f} {case.measured_ms:8.1f} ms {100 * case.time_error:+6.1f}% "
                f"({100 * case.stretched_error:+6.1f}%)  "
                f"{predicted / 2**20:7.1f} {measured / 2**20:7.1f} MiB {100 * case.memory_error:+5.1f}%  "
                f"{brief(plan)}",
                flush=True,
            )
        drift = statistics.median(run.slowdown for run in runs) / slowdown
        counted, left_out = sum(len(run.steps) for run in runs), sum(run.left_out for run in runs)
        print(
            f"   A/A {runs[-1].seconds / runs[0].seconds:.3f}, drift {drift:.3f}, {left_out} of {counted + left_out} "
            "steps do not count",
            flush=True,
        )
    write_cases(options.output / f"cases-{shape}.json", str(shape), cases)
    return cases


def write_cases(path: Path, name: str, cases: list[Case]) -> None:
    """Writes predictions and measurements, which `galvatron plot accuracy` draws."""
    measured = ("predicted_ms", "measured_ms", "predicted_bytes", "measured_bytes", "drift")
    values = [{"plan": words_of(case.plan)} | {name: getattr(case, name) for name in measured} for case in cases]
    path.write_text(json.dumps({"name": name, "cases": values}, indent=1))


def summary(cases: list[Case]) -> str:
    """Returns the summary of the errors."""
    lines = []
    for name, errors in (
        ("step time", [abs(case.time_error) for case in cases]),
        ("step time at the profile's pace", [abs(case.stretched_error) for case in cases]),
        ("memory", [abs(case.memory_error) for case in cases]),
    ):
        errors.sort()
        ninth = errors[min(len(errors) - 1, int(0.9 * len(errors)))]
        lines.append(
            f"{name}: median {100 * statistics.median(errors):.1f}%, 90th percentile {100 * ninth:.1f}%, worst "
            f"{100 * errors[-1]:.1f}% of {len(errors)} plans"
        )
    return "\n".join(lines)


def main() -> None:
    parser = parser_of_runs(__doc__, plans=28, shapes=SHAPES)
    parser.add_argument("--hosts", type=int, default=1, choices=(1, 2))
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *unused: sys.exit("ended by SIGTERM"))
    torch.set_num_threads(1)
    options.output.mkdir(parents=True, exist_ok=True)
    cases: list[Case] = []
    with contextlib.ExitStack() as stack:
        shares = stack.enter_context(devices("galvatron-accuracy", options))
        hosts = one_host(shares) if options.hosts == 1 else two_hosts(shares, options.mbit)
        seats, watch = stack.enter_context(hosts), stack.enter_context(cpu_interference())
        for shape in options.shapes:
            found = compare(shape, seats, options, watch)
            print(summary(found))
            cases += found
    if len(options.shapes) > 1:
        print(f"\nAll:\n{summary(cases)}")
    print("tier: measured on devices emulated by CPU quotas")


if __name__ == "__main__":
    try:
        main()
    except (QuotaError, HostError) as error:
        sys.exit(str(error))
