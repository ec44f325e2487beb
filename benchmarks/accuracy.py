# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""How near predicted step times and memory come to what training measures.

    PYTHONPATH=benchmarks OMP_NUM_THREADS=1 python benchmarks/accuracy.py --output accuracy      as root
    ... --shapes 384x6x6x2x1024x3000x192x8 --share 0.4 --plans 30 --seed 7
    ... --hosts 2 --mbit 400

Four ranks have a share of a core each (see cpu_quota.py), which this script gives and takes away; with `--hosts 2`
they sit two by two in network namespaces behind a slow link (see two_hosts.py). It profiles the machine and the model
there, as training with `parallel_plan="auto"` does, draws different plans from the search's space (pipelines are half
of them), writes what it predicts of each to OUTPUT/predictions-SHAPE.json, and only then trains under each, in turns:
`--together` runs at a time take `--steps` steps each, `--rounds` times around, and the first step of a turn, which
finds cold caches and no memory of its own, does not count. The first run of each lot is there twice: how far the two
are apart is the spread of any figure (A/A). Memory is the peak of the allocator on the rank
of a stage that has most, in a step after the first.

A virtual machine's cores are faster at some times than at others, by a fifth within minutes where this was written. So
all ranks do a fixed piece of work (matrix products, and sums of vectors) before and after profiling and before every
round; what it takes beside the rounds, over what it took beside the profile, is printed as the machine's drift, and
the errors once more with the predictions stretched by it.

A shape is HIDDENxLAYERSxHEADSxKV_HEADSxINTERMEDIATExVOCABULARYxLENGTHxROWS; rows are those of a step.

Evidence tier: measured on devices emulated by CPU quotas (gloo).
"""

import argparse
import contextlib
import functools
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.fx.experimental.symbolic_shapes  # noqa: F401  the first backward imports it: once here, not in each rank
from cpu_quota import QuotaError, cpu_quotas
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback
from turns import Ending, Seat, Turn, World, on_ranks
from two_hosts import HostError, two_hosts

from galvatron_hf import GalvatronTrainer, GalvatronTrainingArguments, ParallelPlan
from galvatron_hf.plan import Precision, Stage
from galvatron_hf.planner.cost import Workload
from galvatron_hf.planner.search import estimate_plan
from galvatron_hf.planner.space import Limits, layer_strategies, schedules, vocabulary_strategies
from galvatron_hf.profiler.hardware import profile_hardware
from galvatron_hf.profiler.hardware_profile import HardwareProfile
from galvatron_hf.profiler.model import profile_model
from galvatron_hf.profiler.model_profile import ModelProfile
from galvatron_hf.trainer.auto import PROFILE_SECONDS
from galvatron_hf.trainer.calibration import calibrated


SHAPES = ("256x8x8x4x704x2048x128x8", "512x4x8x2x1408x4096x128x8")


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A Llama and the rows of a step."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int
    length: int
    rows: int

    @classmethod
    def parse(cls, text: str) -> "Shape":
        return cls(**dict(zip(cls.__annotations__, map(int, text.split("x")), strict=True)))

    def __str__(self) -> str:
        return "x".join(str(value) for value in asdict(self).values())

    def model(self) -> LlamaForCausalLM:
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            max_position_embeddings=self.length,
            use_cache=False,
        )
        return LlamaForCausalLM(config)

    def workload(self) -> Workload:
        return Workload(rows=self.rows, length=self.length, precision=Precision(compute="fp32"))


class Rows(Dataset):
    """Random rows of one length."""

    def __init__(self, shape: Shape, count: int):
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(shape.vocabulary, (count, shape.length), generator=generator)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


# ---- The machine's own drift ----


def pace() -> float:
    """Seconds of a fixed piece of work on all ranks at once, those of the slowest; a short run before it warms up."""
    matrix, vector = torch.full((384, 384), 1e-3), torch.zeros(1 << 20)
    for repetitions in (15, 150):
        dist.barrier()
        began = time.perf_counter()
        for _ in range(repetitions):
            torch.mm(matrix, matrix)
            vector.add_(1.0)
    seconds = torch.tensor(time.perf_counter() - began)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds)


# ---- Predictions ----


def profiles(shape: Shape) -> tuple[str, str, float]:
    """Of machine and model, as JSON, and the machine's pace; on every rank."""
    before = pace()
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    hardware = profile_hardware(local_world_size=local, device="cpu")
    tokens = shape.rows * shape.length
    whole = shape.model()
    model = profile_model(whole, device="cpu", tokens=tokens, length=shape.length, packed=False)
    cpu, steps = torch.device("cpu"), dict(rows=shape.rows, length=shape.length)
    model = calibrated(model, whole, hardware, device=cpu, seconds=0.6 * PROFILE_SECONDS, **steps)
    return hardware.to_json(), model.to_json(), (before + pace()) / 2


def draw_plans(world: int, model: ModelProfile, shape: Shape, count: int, seed: int) -> list[ParallelPlan]:
    """Different plans of the search's space, about half of them pipelines, and some of these interleaved."""
    drawn, plans = random.Random(seed), {}
    pipelines = [degree for degree in (1, 2, 4, 8) if world % degree == 0 and degree <= min(world, shape.layers)]
    while len(plans) < count:
        pipeline = 1 if drawn.random() < 0.5 else drawn.choice(pipelines[1:])
        ranks = world // pipeline
        most = {1: (1, 1, 2, 4), 2: (2, 4, 8), 4: (4, 8)}.get(pipeline, (pipeline,))
        micro_batches = min(drawn.choice(most), shape.rows)
        rows = -(-shape.rows // micro_batches)
        allowed = [one for one, data in layer_strategies(ranks, model, Limits()) if data <= rows]
        ends = vocabulary_strategies(ranks, model, Limits())
        schedule, rounds, _ = drawn.choice(list(schedules(pipeline, [micro_batches], model.layers, Limits())))
        share = shape.layers // rounds
        cuts = sorted(drawn.sample(range(1, share), pipeline - 1))
        stages = tuple(
            Stage(
                ranks=tuple(range(index * ranks, (index + 1) * ranks)),
                layers=tuple(number * share + layer for layer in layers),
            )
            for number in range(rounds)
            for index, layers in enumerate(zip((0, *cuts), (*cuts, share), strict=True))
        )
        kinds = [drawn.choice(allowed) for _ in range(drawn.choice((1, 1, 2, 3)))]
        plan = ParallelPlan(
            world_size=world,
            stacks={"decoder": shape.layers},
            micro_batches=micro_batches,
            schedule=schedule,
            precision=Precision(compute="fp32"),
            stages=stages,
            layers=tuple(kinds[layer * len(kinds) // share] for layer in range(share)) * rounds,
            embedding=drawn.choice(ends),
            head=drawn.choice(ends),
        )
        plans[plan.to_json()] = plan
    return list(plans.values())


# ---- Measurements ----


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
                paces.append(on_ranks(seats, pace))
                for index in range(len(worlds)):
                    index = (index + number) % len(worlds)
                    turns[index].append(worlds[index].turn())
            endings = [world.finish() for world in worlds]
        except RuntimeError:
            for world in worlds:
                world.abandon()
            raise
    seconds = [[seconds for turn in of_one for seconds in turn.step_seconds[1:]] for of_one in turns]
    return seconds, endings, statistics.median(paces)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One plan: what was predicted and measured of it."""

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


def compare(shape: Shape, seats: list[Seat], options: argparse.Namespace) -> list[Case]:
    """Predicts, measures, prints."""
    hardware_json, model_json, base = on_ranks(seats, functools.partial(profiles, shape))
    hardware, model = HardwareProfile.from_json(hardware_json), ModelProfile.from_json(model_json)
    hardware.to_json(options.output / "hardware.json")
    model.to_json(options.output / f"model-{shape}.json")
    plans = draw_plans(len(seats), model, shape, options.plans, options.seed)
    workload = shape.workload()
    noted = [estimate_plan(hardware, model, workload, plan).noted(workload) for plan in plans]
    predictions = options.output / f"predictions-{shape}.json"
    predictions.write_text(json.dumps([json.loads(plan.to_json()) for plan in noted], indent=1))
    print(f"\n{shape}: predictions are in {predictions}", flush=True)
    cases: list[Case] = []
    for start in range(0, len(noted), options.together):
        lot = noted[start : start + options.together]
        seconds, endings, beside = measure([*lot, lot[0]], shape, seats, options)
        medians = [1e3 * statistics.median(of_one) for of_one in seconds]
        for plan, ms, ending in zip(lot, medians, endings, strict=False):
            outcome = ending.outcome
            # The stage that needs most decides whether a plan fits.
            pairs = zip(outcome.predicted_bytes, outcome.measured_bytes, strict=True)
            predicted, measured = max(pairs, key=lambda pair: pair[1])
            case = Case(
                plan=plan,
                predicted_ms=outcome.predicted_ms,
                measured_ms=ms,
                predicted_bytes=predicted,
                measured_bytes=measured,
                drift=beside / base,
            )
            cases.append(case)
            print(
                f"{case.predicted_ms:8.1f} {ms:8.1f} ms {100 * case.time_error:+6.1f}% "
                f"({100 * case.stretched_error:+6.1f}%)  "
                f"{predicted / 2**20:7.1f} {measured / 2**20:7.1f} MiB {100 * case.memory_error:+5.1f}%  "
                f"{brief(plan)}",
                flush=True,
            )
        print(f"   A/A {medians[-1] / medians[0]:.3f}, drift {beside / base:.3f}", flush=True)
    return cases


def brief(plan: ParallelPlan) -> str:
    """A plan in a line."""
    layers = []
    for start, strategy in enumerate(plan.layers):
        if start == 0 or strategy != plan.layers[start - 1]:
            layers.append(f"{start}:{describe(strategy)}{'r' if strategy.recompute == 'full' else ''}")
    lists = len(plan.rank_lists)
    cuts = "/".join(str(stage.layers[1] - stage.layers[0]) for stage in plan.stages[:lists])
    if len(plan.stages) > lists:
        cuts += f" x{len(plan.stages) // lists}"
    ends = f"e:{describe(plan.embedding)} h:{describe(plan.head)}"
    return f"pp {cuts} m{plan.micro_batches} {' '.join(layers)} {ends}"


def describe(strategy) -> str:
    megatron, ulysses = getattr(strategy, "megatron_sp", False), getattr(strategy, "ulysses", 1)
    sharding = {"replicate": "dp", "zero2": "z2", "zero3": "z3"}[strategy.sharding] + str(strategy.shard_degree or "")
    return f"t{strategy.tensor}{'s' if megatron else ''}{f'u{ulysses}' if ulysses > 1 else ''}{sharding}"


def summary(cases: list[Case]) -> str:
    """The figures that count."""
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


def parser_of_runs(description: str, *, plans: int, shapes: tuple[str, ...]) -> argparse.ArgumentParser:
    """The options that say what is run where."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = [Shape.parse(shape) for shape in shapes]
    parser.add_argument("--shapes", nargs="+", default=default, type=Shape.parse)
    parser.add_argument("--plans", type=int, default=plans, help="that are drawn")
    parser.add_argument("--seed", type=int, default=0, help="of the drawing")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--share", type=float, default=0.5, help="of a core, for each rank")
    parser.add_argument("--period_ms", type=float, default=10.0, help="in which each rank gets its share once")
    parser.add_argument("--mbit", type=float, default=400.0, help="a second, between two hosts")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="of a turn, the first of which does not count")
    parser.add_argument("--warmup", type=int, default=3, help="steps before the first round")
    parser.add_argument("--together", type=int, default=7, help="plans that take turns")
    parser.add_argument("--output", type=Path, default=Path("output"), help="folder for predictions")
    return parser


def main() -> None:
    parser = parser_of_runs(__doc__, plans=28, shapes=SHAPES)
    parser.add_argument("--hosts", type=int, default=1, choices=(1, 2))
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *unused: sys.exit("ended by SIGTERM"))
    torch.set_num_threads(1)
    options.output.mkdir(parents=True, exist_ok=True)
    cases: list[Case] = []
    with contextlib.ExitStack() as stack:
        seats = stack.enter_context(cpu_quotas("galvatron-accuracy", options.ranks, options.share, options.period_ms))
        if options.hosts == 2:
            seats = stack.enter_context(two_hosts(seats, options.mbit))
        for shape in options.shapes:
            found = compare(shape, seats, options)
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
