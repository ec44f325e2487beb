# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Compares the predicted memory of a rank with its allocator's peak.

    PYTHONPATH=benchmarks OMP_NUM_THREADS=1 python benchmarks/memory.py
    ... --shape 384x6x6x2x1024x3000x192x16 --plans 30 --seed 7

Bytes are counted, not timed, so neither quotas nor an idle machine are needed. Four ranks train two steps under simple
plans: each sharding with and without recompute, tensor and Ulysses ranks, and pipelines of two stages with two to
eight micro-batches; a model with experts also under full recompute with tensor, Ulysses and expert ranks. They also
train under plans drawn from the search space, about half of them pipelines. The table has the prediction of each stage
and the peak of its ranks. The model profile is counted too (`profile_from_config`). A shape is as in accuracy.py.

Evidence tier: measured (CPU allocator; every allocation of a step, from PyTorch's profiler).
"""

import argparse
import functools
import statistics
import tempfile

import torch
import torch.distributed as dist
from interleaved_worlds import on_ranks
from plan_runs import make_trainer
from random_plans import Shape, brief, draw_plans

from galvatron_hf import ParallelPlan
from galvatron_hf.plan import Precision
from galvatron_hf.planner.estimate import estimate_plan
from galvatron_hf.profiler.profiles.model import ModelProfile
from galvatron_hf.profiler.profiles.presets import hardware_preset
from galvatron_hf.profiler.trace.tracing import profile_from_config
from galvatron_hf.trainer.planning.step_meter import Outcome


RANKS, STEPS = 4, 3
MIB = 1 << 20


class AnySeat:
    """A seat that leaves the process where it is."""

    def enter(self) -> None:
        pass


def simple_plans(shape: Shape, profile: ModelProfile) -> list[ParallelPlan]:
    """Returns uniform plans."""
    make = functools.partial(ParallelPlan.uniform, RANKS, profile.stack_sizes, precision=Precision(compute="fp32"))
    shardings = ("replicate", "zero2", "zero3")
    plans = []
    for micro_batches in (1, 2):
        for sharding in shardings:
            for recompute in ("none", "full"):
                plans.append(make(sharding=sharding, recompute=recompute, micro_batches=micro_batches))
        plans.append(make(tensor=4, sharding="replicate", micro_batches=micro_batches))
        plans.append(make(tensor=2, megatron_sp=True, sharding="zero3", micro_batches=micro_batches))
        plans.append(make(ulysses=4, sharding="zero2", micro_batches=micro_batches))
    if shape.experts:
        plans += [make(expert=4, sharding="zero3", recompute=recompute) for recompute in ("none", "full")]
        plans += [make(tensor=4, sharding=sharding, recompute="full") for sharding in ("replicate", "zero3")]
        plans.append(make(tensor=4, megatron_sp=True, sharding="zero3", recompute="full"))
        plans.append(make(ulysses=4, sharding="zero3", recompute="full"))
        plans.append(make(tensor=4, expert=4, sharding="zero3", recompute="full"))
    return plans + [make(pipeline=2, sharding=s, micro_batches=m) for m in (2, 4, 8) for s in shardings]


def train(plans: list[ParallelPlan], shape: Shape) -> list[Outcome]:
    """Trains under each plan, and returns the peak bytes of its ranks on every rank."""
    outcomes = []
    for plan in plans:
        with tempfile.TemporaryDirectory() as folder:
            trainer, _ = make_trainer(plan, shape, RANKS, STEPS, folder)
            trainer.train()
            outcomes.append(trainer.plan_outcome)
            dist.barrier()
    return outcomes


def compare(name: str, plans: list[ParallelPlan], shape: Shape, profile: ModelProfile) -> None:
    """Predicts, trains and prints the comparison."""
    hardware, workload = hardware_preset("cpu", 1, RANKS), shape.workload()
    noted = [estimate_plan(hardware, profile, workload, plan).plan_with_prediction(workload) for plan in plans]
    outcomes = on_ranks([AnySeat()] * RANKS, functools.partial(train, noted, shape))
    errors = []
    print(f"\n{name}: predicted and measured MiB of a rank, by stage")
    for plan, outcome in zip(noted, outcomes, strict=True):
        pairs = list(zip(outcome.predicted_bytes, outcome.measured_bytes, strict=True))
        own = [predicted / measured - 1 for predicted, measured in pairs]
        errors += map(abs, own)
        figures = "  ".join(
            f"{predicted / MIB:6.1f} {measured / MIB:6.1f} {100 * error:+5.1f}%"
            for (predicted, measured), error in zip(pairs, own, strict=True)
        )
        print(f"{figures}   {brief(plan)}")
    errors.sort()
    print(
        f"{name}: median error {100 * statistics.median(errors):.1f}%, 90th percentile "
        f"{100 * errors[int(0.9 * (len(errors) - 1))]:.1f}%, worst {100 * errors[-1]:.1f}%, of {len(errors)} stages "
        f"of {len(plans)} plans",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=Shape.parse, default="128x6x8x4x352x1000x64x8")
    parser.add_argument("--plans", type=int, default=16, help="that are drawn")
    parser.add_argument("--seed", type=int, default=0, help="of the drawing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    hardware, shape = hardware_preset("cpu", 1, RANKS), options.shape
    profile = profile_from_config(
        shape.model().config,
        hardware,
        "fp32",
        length=shape.length,
        packed=shape.packed,
        max_degree=RANKS,
        target_length=shape.target_length or None,
    )
    compare("simple plans", simple_plans(shape, profile), shape, profile)
    compare("drawn plans", draw_plans(RANKS, profile, shape, options.plans, options.seed), shape, profile)


if __name__ == "__main__":
    main()
