# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Profiles machine and model on the seats of ranks, and trains plans there in turns while the cores are quiet."""

import argparse
import contextlib
import dataclasses
import functools
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.fx.experimental.symbolic_shapes  # noqa: F401  the first backward imports it: once here, not in each rank
from cpu_interference import QUIET, CoreWatch
from cpu_quota import CpuQuota, cpu_quotas
from interleaved_worlds import Ending, Seat, Turn, World, on_ranks
from page_reporting import pages_kept
from random_plans import Shape
from sched_tick import sched_tick
from torch.utils.data import Dataset
from transformers import PrinterCallback

from galvatron_hf import GalvatronTrainer, GalvatronTrainingArguments, ParallelPlan
from galvatron_hf.planner.report.run_files import RUN_FILE, TrainingRun
from galvatron_hf.profiler.measure.hardware import profile_hardware
from galvatron_hf.profiler.measure.model import profile_model
from galvatron_hf.profiler.profiles.hardware import HardwareProfile
from galvatron_hf.profiler.profiles.model import ModelProfile
from galvatron_hf.trainer.planning.auto_planner import CALIBRATION_SECONDS
from galvatron_hf.trainer.planning.calibration import calibrated


# Of a turn: what stood still takes a sixth longer in its first step, and a thirtieth longer in its second.
COLD_STEPS = 2
MOST_ROUNDS = 3  # times as many as asked for, until half as many steps as asked for found quiet cores
PROFILES, DISTURBED = 2, 1.1  # most that are made until one found cores that were slowed down less, in the mean
# Of a core, what ticks and the kernel's own work leave. Quotas of all of it cannot be had by all ranks at once: one
# that computes while others wait would be a thirtieth faster than all of them together.
LEFT = 0.96
PERIOD_MS, LEAST_QUOTA_MS = 4.0, 1.0  # of a quota: at least, and what a kernel takes


@contextlib.contextmanager
def devices(name: str, options: argparse.Namespace) -> Iterator[list[CpuQuota]]:
    """Gives each rank a share of a core, scheduled as evenly as possible, while the body runs.

    Raises:
        QuotaError: if this user may not give shares.
    """
    share = LEFT * options.share
    period_ms = options.period_ms or max(PERIOD_MS, LEAST_QUOTA_MS / share)
    with pages_kept(), sched_tick() as ticking, cpu_quotas(name, options.ranks, share, period_ms) as quotas:
        if not ticking:
            print("The kernel checks quotas only at its own ticks, because this user may not have processes that")
            print("come before all others (CAP_SYS_NICE): exchanges wait longer than they would on devices.")
        yield quotas


def profiled(shape: Shape, seats: list[Seat], watch: CoreWatch) -> tuple[HardwareProfile, ModelProfile, float]:
    """Returns profiles of machine and model, and the slowdown of the cores meanwhile.

    If the slowdown is large they are made again, and the less disturbed ones are returned.
    """
    found = []
    while len(found) < PROFILES and not (found and found[-1][0] < DISTURBED):
        begun = time.perf_counter()
        made = on_ranks(seats, functools.partial(_profiles, shape, watch))
        found.append((watch.slowdown(begun, time.perf_counter()), made))
        print(f"\nprofiled with cores {found[-1][0]:.3f} times as slow as usual", flush=True)
    slowdown, (hardware, model) = min(found)
    return HardwareProfile.from_json(hardware), ModelProfile.from_json(model), slowdown


def _profiles(shape: Shape, watch: CoreWatch) -> tuple[str, str]:
    """Measures the profiles of machine and model, as JSON, on every rank."""
    local, cpu, whole = int(os.environ["LOCAL_WORLD_SIZE"]), torch.device("cpu"), shape.model()
    tokens, steps = shape.rows * shape.length, dict(rows=shape.rows, length=shape.length)
    watch.wait_for_quiet()
    dist.barrier()
    hardware = profile_hardware(local_world_size=local, device="cpu")
    watch.wait_for_quiet()
    dist.barrier()
    lengths = dict(length=shape.length, target_length=shape.target_length or None)
    model = profile_model(whole, device="cpu", tokens=tokens, packed=shape.packed, **lengths)
    watch.wait_for_quiet()
    dist.barrier()
    model = calibrated(model, whole, hardware, device=cpu, seconds=CALIBRATION_SECONDS, **steps)
    model = dataclasses.replace(model, expert_imbalance=shape.imbalance(Rows(shape, shape.rows).ids))
    return hardware.to_json(), model.to_json()


class Rows(Dataset):
    """Random rows of one length."""

    def __init__(self, shape: Shape, count: int):
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(shape.vocabulary, (count, shape.length), generator=generator)
        self.labels = self.ids
        if shape.target_length:
            self.labels = torch.randint(shape.vocabulary, (count, shape.target_length), generator=generator)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.labels[index]}


def make_trainer(plan: ParallelPlan, shape: Shape, world: int, steps: int, folder: str):
    """Returns a trainer under the plan, and an empty list instead of token counts."""
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
        packing="static" if shape.packed else "none",
    )
    data = Rows(shape, shape.rows * steps)
    trainer = GalvatronTrainer(shape.model(), args, train_dataset=data)
    trainer.remove_callback(PrinterCallback)
    return trainer, []


@dataclass(frozen=True, kw_only=True)
class Run:
    """The measurements of one plan.

    Attributes:
        steps (`list[Step]`): the steps that count, in order.
        left_out (`int`): number of steps on cores that were slower than usual.
        ending ([`Ending`]): results of its ranks.
        micro_batches (`int`, *optional*): those into which the Trainer placed the documents of the last step; None if
            rows are not packed.
    """

    steps: list["Step"]
    left_out: int
    ending: Ending
    micro_batches: int | None = None

    @property
    def seconds(self) -> float:
        """Returns the median seconds of a step."""
        return statistics.median(step.seconds for step in self.steps)

    @property
    def slowdown(self) -> float:
        """Returns the median slowdown of the cores in these steps."""
        return statistics.median(step.slowdown for step in self.steps)


@dataclass(frozen=True, kw_only=True)
class Step:
    """Seconds of a step, and the slowdown of the cores."""

    seconds: float
    slowdown: float


def measure(
    plans: list[ParallelPlan], shape: Shape, seats: list[Seat], options: argparse.Namespace, watch: CoreWatch
) -> list[Run]:
    """
    Trains under all plans in turns.

    A rank of gloo crashes at times, in its loop of events; all plans are then measured again, once.
    """
    try:
        return _measure(plans, shape, seats, options, watch)
    except RuntimeError as error:
        print(f"   once more, because {error}", flush=True)
        return _measure(plans, shape, seats, options, watch)


def _measure(
    plans: list[ParallelPlan], shape: Shape, seats: list[Seat], options: argparse.Namespace, watch: CoreWatch
) -> list[Run]:
    last = options.warmup + MOST_ROUNDS * options.rounds * options.steps
    enough = -(-options.rounds * (options.steps - COLD_STEPS) // 2)
    worlds: list[World] = []
    with tempfile.TemporaryDirectory() as folder:
        make = functools.partial(make_trainer, shape=shape, world=len(seats), steps=last)
        folders = [Path(folder) / str(number) for number in range(len(plans))]
        try:
            for plan, own in zip(plans, folders, strict=True):
                begin = functools.partial(make, plan, folder=str(own))
                worlds.append(World(begin, seats, options.warmup, options.steps))
            steps: list[list[Step]] = [[] for _ in worlds]
            for number in range(MOST_ROUNDS * options.rounds):
                order = [(place + number) % len(worlds) for place in range(len(worlds))]
                for index in order:
                    if number < options.rounds or len(quiet(steps[index])) < enough:
                        watch.wait_for_quiet()
                        steps[index] += _steps(worlds[index].turn(), watch)
            endings = [world.finish() for world in worlds]
            placed = [TrainingRun.from_json(own / RUN_FILE).deal if shape.packed else None for own in folders]
        except RuntimeError:
            for world in worlds:
                world.abandon()
            raise
    runs = []
    for of_one, ending, deal in zip(steps, endings, placed, strict=True):
        # Where there was no quiet, those that were slowed down least.
        counted = quiet(of_one)
        if len(counted) < enough:
            counted = sorted(of_one, key=lambda step: step.slowdown)[:enough]
        count = None if deal is None else len(deal["micro_batches"])
        runs.append(Run(steps=counted, left_out=len(of_one) - len(counted), ending=ending, micro_batches=count))
    return runs


def _steps(turn: Turn, watch: CoreWatch) -> list[Step]:
    return [Step(seconds=end - begin, slowdown=watch.slowdown(begin, end)) for begin, end in turn.steps[COLD_STEPS:]]


def quiet(steps: list[Step]) -> list[Step]:
    """Returns the steps during which no core was slower than usual."""
    return [step for step in steps if step.slowdown < QUIET]


def _steps_of_turn(text: str) -> int:
    steps = int(text)
    if steps <= COLD_STEPS:
        raise argparse.ArgumentTypeError(f"{steps} steps a turn leave none that counts; give {COLD_STEPS + 1} or more")
    return steps


def parser_of_runs(description: str, *, plans: int, shapes: tuple[str, ...]) -> argparse.ArgumentParser:
    """Returns the parser of the options of all benchmarks of plans."""
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
    parser.add_argument(
        "--rounds", type=int, default=5, help=f"turns of each plan (up to {MOST_ROUNDS} times as many)"
    )
    parser.add_argument(
        "--steps", type=_steps_of_turn, default=5, help=f"of a turn, of which the first {COLD_STEPS} do not count"
    )
    parser.add_argument("--warmup", type=int, default=3, help="steps before the first round")
    parser.add_argument("--together", type=int, default=7, help="plans that take turns")
    parser.add_argument("--output", type=Path, default=Path("output"), help="folder for predictions")
    return parser
