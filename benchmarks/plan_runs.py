# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Profiles of machine and model where ranks sit, and plans that train there in turns.

A virtual machine's cores are faster at some times than at others, by a fifth within minutes where this was written:
`pace` is a fixed piece of work by which two moments can be compared.
"""

import argparse
import contextlib
import functools
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.fx.experimental.symbolic_shapes  # noqa: F401  the first backward imports it: once here, not in each rank
from cpu_quota import CpuQuota, cpu_quotas
from drawn_plans import Shape
from free_pages import pages_kept
from short_ticks import short_ticks
from torch.utils.data import Dataset
from transformers import PrinterCallback
from turns import Ending, Seat, Turn, World, on_ranks

from galvatron_hf import GalvatronTrainer, GalvatronTrainingArguments, ParallelPlan
from galvatron_hf.profiler.hardware import profile_hardware
from galvatron_hf.profiler.model import profile_model
from galvatron_hf.trainer.auto import CALIBRATION_SECONDS
from galvatron_hf.trainer.calibration import calibrated


# Of a turn: what stood still takes a sixth longer in its first step, and a thirtieth longer in its second.
COLD_STEPS = 2
PIECES = 9  # of work that tell the machine's pace
# Of a core, what ticks and the kernel's own work leave. Quotas of all of it cannot be had by all ranks at once: one
# that computes while others wait would be a thirtieth faster than all of them together.
LEFT = 0.96
PERIOD_MS, LEAST_QUOTA_MS = 4.0, 1.0  # of a quota: at least, and what a kernel takes


@contextlib.contextmanager
def devices(name: str, options: argparse.Namespace) -> Iterator[list[CpuQuota]]:
    """A share of a core for each rank, as even a flow of time as can be had; given back behind the body.

    Raises:
        QuotaError: if this user may not give shares.
    """
    share = LEFT * options.share
    period_ms = options.period_ms or max(PERIOD_MS, LEAST_QUOTA_MS / share)
    with pages_kept(), short_ticks() as ticking, cpu_quotas(name, options.ranks, share, period_ms) as quotas:
        if not ticking:
            print("The kernel looks at quotas at its own ticks only, because this user may not have processes that")
            print("come before all others (CAP_SYS_NICE): exchanges wait longer than they would on devices.")
        yield quotas


def pace() -> float:
    """Seconds of a fixed piece of work on all ranks at once, those of the slowest: the median of several pieces.

    Single pieces of twice the length were a thirtieth off, and a quarter at times. One more warms up.
    """
    matrix, vector = torch.full((384, 384), 1e-3), torch.zeros(1 << 20)
    found = []
    for _ in range(1 + PIECES):
        dist.barrier()
        began = time.perf_counter()
        for _ in range(75):
            torch.mm(matrix, matrix)
            vector.add_(1.0)
        seconds = torch.tensor(time.perf_counter() - began)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        found.append(float(seconds))
    return statistics.median(found[1:])


def profiles(shape: Shape) -> tuple[str, str, float]:
    """Of machine and model, as JSON, and the machine's pace meanwhile; on every rank."""
    paces = [pace()]
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    hardware = profile_hardware(local_world_size=local, device="cpu")
    paces.append(pace())
    tokens = shape.rows * shape.length
    whole = shape.model()
    model = profile_model(whole, device="cpu", tokens=tokens, length=shape.length, packed=False)
    paces.append(pace())
    cpu, steps = torch.device("cpu"), dict(rows=shape.rows, length=shape.length)
    model = calibrated(model, whole, hardware, device=cpu, seconds=CALIBRATION_SECONDS, **steps)
    paces.append(pace())
    return hardware.to_json(), model.to_json(), statistics.median(paces)


class Rows(Dataset):
    """Random rows of one length."""

    def __init__(self, shape: Shape, count: int):
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(shape.vocabulary, (count, shape.length), generator=generator)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def make_trainer(plan: ParallelPlan, shape: Shape, world: int, steps: int, folder: str):
    """A trainer under the plan, and an empty list: nobody counts its tokens."""
    if shape.rows % world:
        raise SystemExit(f"{shape.rows} rows are no multiple of {world} ranks; give a shape with more rows.")
    args = GalvatronTrainingArguments(
        output_dir=folder,
        use_cpu=True,
        per_device_train_batch_size=shape.rows // world,
        max_steps=steps,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        parallel_plan=plan,
        packing="none",
    )
    data = Rows(shape, shape.rows * steps)
    trainer = GalvatronTrainer(shape.model(), args, train_dataset=data)
    trainer.remove_callback(PrinterCallback)
    return trainer, []


def measure(
    plans: list[ParallelPlan], shape: Shape, seats: list[Seat], options: argparse.Namespace
) -> tuple[list[list[float]], list[Ending], float]:
    """
    Seconds of each step of each plan, what its ranks reported, and the machine's pace meanwhile.

    A rank of gloo crashes at times, in its loop of events; all plans are then measured again, once.
    """
    try:
        return _measure(plans, shape, seats, options)
    except RuntimeError as error:
        print(f"   once more, because {error}", flush=True)
        return _measure(plans, shape, seats, options)


def _measure(
    plans: list[ParallelPlan], shape: Shape, seats: list[Seat], options: argparse.Namespace
) -> tuple[list[list[float]], list[Ending], float]:
    last = options.warmup + options.rounds * options.steps
    worlds: list[World] = []
    with tempfile.TemporaryDirectory() as folder:
        make = functools.partial(make_trainer, shape=shape, world=len(seats), steps=last, folder=folder)
        try:
            for plan in plans:
                worlds.append(World(functools.partial(make, plan), seats, options.warmup, options.steps))
            turns: list[list[Turn]] = [[] for _ in worlds]
            paces = []
            for number in range(options.rounds):
                for place in range(len(worlds)):
                    if place % 2 == 0:
                        paces.append(on_ranks(seats, pace))
                    index = (place + number) % len(worlds)
                    turns[index].append(worlds[index].turn())
            endings = [world.finish() for world in worlds]
        except RuntimeError:
            for world in worlds:
                world.abandon()
            raise
    seconds = [[seconds for turn in of_one for seconds in turn.step_seconds[COLD_STEPS:]] for of_one in turns]
    return seconds, endings, statistics.median(paces)


def _steps_of_turn(text: str) -> int:
    steps = int(text)
    if steps <= COLD_STEPS:
        raise argparse.ArgumentTypeError(f"{steps} steps a turn leave none that counts; give {COLD_STEPS + 1} or more")
    return steps


def parser_of_runs(description: str, *, plans: int, shapes: tuple[str, ...]) -> argparse.ArgumentParser:
    """The options that say what is run where."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = [Shape.parse(shape) for shape in shapes]
    parser.add_argument("--shapes", nargs="+", default=default, type=Shape.parse)
    parser.add_argument("--plans", type=int, default=plans, help="that are drawn")
    parser.add_argument("--seed", type=int, default=0, help="of the drawing")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--share", type=float, default=0.5, help="of what is left of a core, for each rank")
    parser.add_argument(
        "--period_ms", type=float, help=f"in which each rank gets its share once ({PERIOD_MS:g}, or more for 1 ms)"
    )
    parser.add_argument("--mbit", type=float, default=400.0, help="a second, between two hosts")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--steps", type=_steps_of_turn, default=5, help=f"of a turn, of which the first {COLD_STEPS} do not count"
    )
    parser.add_argument("--warmup", type=int, default=3, help="steps before the first round")
    parser.add_argument("--together", type=int, default=7, help="plans that take turns")
    parser.add_argument("--output", type=Path, default=Path("output"), help="folder for predictions")
    return parser
