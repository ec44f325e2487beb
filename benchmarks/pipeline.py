# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Measures the idle share of the ranks of a pipeline, next to the theoretical bubble of its schedule.

    OMP_NUM_THREADS=1 python benchmarks/pipeline.py        as root, on at least two cores

A control group gives each rank half a core (cpu_quota.py), so that four ranks on two cores act as four devices: an
idle rank gives nothing to the others. Ranks are pinned to their cores and have priority over all other processes.

Each rank has one stage, or two half as large under `interleaved`. Stages have equally many Llama layers. With a
vocabulary of 64 tokens, embedding and loss take little time ("slowest stage" is busiest rank / mean). Weights are
replicated over one rank, so only activations and their gradients are sent.

The idle share of a step is 1 - busy / step. busy is the sum of a rank's forward and backward spans in the measured
timeline; step is the time from the begin of the first span to the end of the last one on any rank. The table has its
mean over the ranks, median over the steps. With p ranks, m micro-batches and v stages a rank, the theoretical bubble
is (p - 1) / (v m + p - 1) (arXiv 2104.04473). "core" is the CPU time of the ranks per second of computing. "others" is
the number of cores that everything else took, including other guests of a hypervisor; it shows disturbances.

Evidence tier: measured on devices emulated by CPU quotas (gloo, fp32).
"""

import argparse
import os
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from cpu_quota import CpuQuota, MachineTime, QuotaError, cpu_quotas
from transformers import LlamaConfig, LlamaForCausalLM

from galvatron_hf import ParallelPlan, parallelize
from galvatron_hf.parallel.model import ParallelModel
from galvatron_hf.parallel.pipeline.trace import Span
from galvatron_hf.plan import LayerStrategy, Stage, VocabularyStrategy
from galvatron_hf.plan.schedule import Work


WIDTH = 100  # of a picture
HEAD = (
    "ranks  schedule     micro-batches   idle %  [lowest, highest]  on paper %  points   step ms  "
    "slowest stage  core  others"
)


@dataclass(frozen=True, kw_only=True)
class RankStep:
    """One step of one rank, in seconds.

    Attributes:
        compute (`list[Span]`): spans of its forwards and backwards.
        cpu (`float`): CPU time of the process while the step ran.
        machine (`float`): CPU time of the whole machine while the step ran.
        wall (`float`): wall time of the call.
    """

    compute: list[Span]
    cpu: float
    machine: float
    wall: float

    @property
    def busy(self) -> float:
        return sum(span.end - span.begin for span in self.compute)


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step of all ranks.

    Attributes:
        idle (`float`): idle share of the step, mean over the ranks.
        seconds (`float`): time from the first span to the last.
        slowest (`float`): busy time of the busiest rank / mean.
        core (`float`): CPU time / busy time, mean over the ranks: their share of a core.
        others (`float`): cores that everything else took.
        picture (`str`): see [`draw`].
    """

    idle: float
    seconds: float
    slowest: float
    core: float
    others: float
    picture: str

    @classmethod
    def from_ranks(cls, ranks: list[RankStep]) -> "Step":
        begin, end = ranks[0].compute[0].begin, max(rank.compute[-1].end for rank in ranks)
        seconds = end - begin
        busy = statistics.mean(rank.busy for rank in ranks)
        cpu = sum(rank.cpu for rank in ranks)
        return cls(
            idle=1 - busy / seconds,
            seconds=seconds,
            slowest=max(rank.busy for rank in ranks) / busy,
            core=cpu / len(ranks) / busy,
            others=max(0.0, ranks[0].machine - cpu) / ranks[0].wall,
            picture=draw([rank.compute for rank in ranks], begin, end),
        )


def draw(by_rank: list[list[Span]], begin: float, end: float) -> str:
    """Draws a step as text, a line for each rank and a character for each hundredth of its time.

    A forward is the digit of its micro-batch, a backward its letter (a for 0, a capital on a rank's second stage),
    idle a dot.
    """
    lines = []
    for rank, spans in enumerate(by_rank):
        line = ["."] * WIDTH
        for span in spans:
            action = span.action
            letter = chr(ord("a") + action.micro_batch)
            letter = letter.upper() if action.stage >= len(by_rank) else letter
            mark = str(action.micro_batch % 10) if action.work is Work.FORWARD else letter
            for column in range(WIDTH):
                if span.begin <= begin + (column + 0.5) / WIDTH * (end - begin) < span.end:
                    line[column] = mark
        lines.append(f"rank {rank}  {''.join(line)}")
    return "\n".join(lines)


def make_plan(schedule: str, ranks: int, layers: int, micro_batches: int) -> ParallelPlan:
    """Returns a plan of one stage a rank, or two under `interleaved`, with equally many layers."""
    count = ranks * virtual_stages(schedule)
    share = layers // count
    stages = tuple(
        Stage(ranks=(index % ranks,), layers=(index * share, (index + 1) * share)) for index in range(count)
    )
    alone = VocabularyStrategy(sharding="replicate")
    return ParallelPlan(
        world_size=ranks,
        stacks={"decoder": layers},
        micro_batches=micro_batches,
        schedule=schedule,
        stages=stages,
        layers=(LayerStrategy(sharding="replicate"),) * layers,
        embedding=alone,
        head=alone,
    )


def virtual_stages(schedule: str) -> int:
    return 2 if schedule == "interleaved" else 1


def bubble(schedule: str, ranks: int, micro_batches: int) -> float:
    """Returns the theoretical idle share of a step."""
    return (ranks - 1) / (virtual_stages(schedule) * micro_batches + ranks - 1)


def build(options: argparse.Namespace) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=options.hidden_size,
        intermediate_size=options.hidden_size * 8 // 3 // 32 * 32,
        num_hidden_layers=options.layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=options.length,
    )
    return LlamaForCausalLM(config).train()


def run_step(parallel: ParallelModel, batch: dict[str, torch.Tensor]) -> RankStep:
    timeline = parallel.timeline
    timeline.clear()
    dist.barrier()
    cpu, machine = time.process_time(), MachineTime.now()
    parallel.forward_backward(batch)
    after = MachineTime.now()
    compute = [span for span in timeline.spans if span.action.work.is_compute]
    parallel.model.zero_grad()
    return RankStep(
        compute=compute,
        cpu=time.process_time() - cpu,
        machine=after.busy - machine.busy,
        wall=after.wall - machine.wall,
    )


def measure(plan: ParallelPlan, options: argparse.Namespace) -> list[Step]:
    """Measures steps of a plan; the result is the same on every rank."""
    parallel = parallelize(build(options), plan)
    ids = torch.randint(0, 64, (plan.micro_batch_count, options.length), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids}
    parallel.timeline.on = True
    run_step(parallel, batch)  # warm-up
    steps = []
    for _ in range(options.steps):
        ranks: list[RankStep | None] = [None] * plan.world_size
        dist.all_gather_object(ranks, run_step(parallel, batch))
        steps.append(Step.from_ranks(ranks))
    return steps


def run_rank(rank: int, ranks: int, groups: list[CpuQuota], folder: str, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    groups[rank].enter()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    for schedule in options.schedules:
        for micro_batches in options.micro_batches:
            plan = make_plan(schedule, ranks, options.layers, micro_batches)
            steps = measure(plan, options)
            if rank == 0:
                print(row(plan, steps, bubble(schedule, ranks, micro_batches)), flush=True)
                if options.pictures:
                    print(sorted(steps, key=lambda step: step.idle)[len(steps) // 2].picture, flush=True)
    dist.destroy_process_group()


def row(plan: ParallelPlan, steps: list[Step], on_paper: float) -> str:
    name = f"{plan.world_size:5d}  {plan.schedule:11s}  {plan.micro_batch_count:13d}"
    idle = [100 * step.idle for step in steps]
    median = statistics.median(idle)

    def mean(name: str) -> float:
        return statistics.mean(getattr(step, name) for step in steps)

    return (
        f"{name}   {median:6.1f}  [{min(idle):6.1f}, {max(idle):7.1f}]  {100 * on_paper:10.1f}  "
        f"{median - 100 * on_paper:+6.1f}  {1e3 * mean('seconds'):8.0f}  {100 * (mean('slowest') - 1):+12.1f}%  "
        f"{mean('core'):4.2f}  {mean('others'):6.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--schedules", nargs="+", default=["gpipe", "1f1b", "interleaved"])
    parser.add_argument("--micro_batches", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--steps", type=int, default=5, help="of each row")
    parser.add_argument("--layers", type=int, default=8, help="a multiple of twice the ranks")
    parser.add_argument("--hidden_size", type=int, default=512)
    parser.add_argument("--length", type=int, default=512, help="tokens of a micro-batch")
    parser.add_argument("--share", type=float, default=0.5, help="of a core, for each rank")
    parser.add_argument("--period_ms", type=float, default=10.0, help="in which each rank gets its share once")
    parser.add_argument("--pictures", action="store_true", help="draw the median step of each row")
    options = parser.parse_args()
    print(
        f"{os.cpu_count()} cores, {options.share:g} of one for each rank in every {options.period_ms:g} ms; "
        f"load average {os.getloadavg()[0]:.1f}; {options.layers} layers of {options.hidden_size} features, "
        f"{options.length} tokens a micro-batch, {options.steps} steps\n{HEAD}",
        flush=True,
    )
    # A signal becomes an exception, after which the groups are removed.
    signal.signal(signal.SIGTERM, lambda *unused: sys.exit("ended by SIGTERM"))
    for ranks in options.ranks:
        with (
            tempfile.TemporaryDirectory() as folder,
            cpu_quotas("galvatron-pipeline", ranks, options.share, options.period_ms) as groups,
        ):
            arguments = (ranks, groups, folder, options)
            multiprocessing.start_processes(run_rank, arguments, nprocs=ranks, start_method="fork")
    print("tier: measured on devices emulated by CPU quotas")


if __name__ == "__main__":
    try:
        main()
    except QuotaError as error:
        sys.exit(str(error))
