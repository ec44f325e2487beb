# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Step time of a trained model with experts whose rows travel one by one, and as means of rows that are alike
(LSH-MoE), on two hosts with a slow link.

    PYTHONPATH=benchmarks:recipes OMP_NUM_THREADS=1 python benchmarks/expert_dispatch.py --mbit 100     as root

The model of lsh_rate.py is trained on one process first, because what can be saved depends on what the rows are: its
folder is kept (`--folder`) for another run. Then four ranks, two on each host (hosts.py), each with a share of a core
(cpu_quota.py), share its eight experts. They run turns of a few steps on new text, with weights that stay: plain, each
of the `--ways`, plain again. The script prints for each way the median of its time over that of the first plain turn
of its round, with a 95% bootstrap interval, and the same for the second plain turn (A/A).

Evidence tier: measured on hosts emulated by network namespaces, and devices emulated by CPU quotas (gloo).
"""

import argparse
import functools
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist
from cpu_quota import QuotaError
from hosts import HostError, one_host, two_hosts
from interleaved_worlds import on_ranks
from lsh_rate import add_model_arguments, batch_of, build, corpus_of_bytes, options_of
from overhead import interval
from plan_runs import devices
from transformers import AutoModelForCausalLM

from galvatron_hf import LayerStrategy, ParallelPlan, parallelize
from galvatron_hf.parallel.model import ParallelModel


def train(options: argparse.Namespace) -> None:
    """Trains the model on one process and saves it, if the folder does not exist."""
    if Path(options.folder, "config.json").exists():
        return
    model, _ = build(options, seed=0)
    corpus, draws = corpus_of_bytes(), torch.Generator().manual_seed(0)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=options.learning_rate), []
    for _ in range(options.train_steps):
        ids = batch_of(corpus, options, draws)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    print(f"trained {options.train_steps} steps, loss {statistics.mean(losses[-100:]):.3f}", flush=True)
    model.save_pretrained(options.folder)


def set_way(parallel: ParallelModel, way: str) -> None:
    for block in parallel.blocks:
        block.experts.compression = options_of(way)


def turn(parallel: ParallelModel, optimizer, batches: list[torch.Tensor]) -> float:
    """Returns the median milliseconds of steps, on the slowest rank; the first step does not count."""
    found = []
    for ids in batches:
        dist.barrier()
        begun = time.perf_counter()
        parallel.forward_backward({"input_ids": ids, "labels": ids})
        optimizer.step()
        optimizer.zero_grad()
        found.append(1e3 * (time.perf_counter() - begun))
    slowest = torch.tensor(statistics.median(found[1:]))
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.item()


def compare(options: argparse.Namespace, corpus: torch.Tensor) -> list[str]:
    """Runs the turns on every rank; returns lines of a table."""
    model = AutoModelForCausalLM.from_pretrained(options.folder).train()
    world, layers = dist.get_world_size(), model.config.num_hidden_layers
    strategy = LayerStrategy(expert=world, sharding="replicate")
    plan = ParallelPlan(world_size=world, stacks={"decoder": layers}, layers=(strategy,) * layers)
    parallel = parallelize(model, plan)
    optimizer = torch.optim.AdamW(parallel.model.parameters(), lr=0.0, weight_decay=0.0, fused=True)
    draws = torch.Generator().manual_seed(1)
    ratios = {way: [] for way in (*options.ways, "plain")}
    plain_ms, sent = [], {}
    for number in range(1 + options.pairs):
        batches = [batch_of(corpus, options, draws) for _ in range(1 + options.turn_steps)]
        order = list(ratios)[number % len(ratios) :] + list(ratios)[: number % len(ratios)]
        set_way(parallel, "plain")
        first = turn(parallel, optimizer, batches)
        for way in order:
            set_way(parallel, way)
            ms = turn(parallel, optimizer, batches)
            taken = [block.experts.take_statistics() for block in parallel.blocks]
            if number:  # the first round warms up
                ratios[way].append(ms / first)
                if taken[0].pairs:
                    sent[way] = sum(one.centroids for one in taken) / sum(one.pairs for one in taken)
        plain_ms += [first] if number else []
    lines = [f"plain: {statistics.median(plain_ms):.1f} ms a step"]
    for way, found in ratios.items():
        median, low, high = interval(found)
        name = "plain again (A/A)" if way == "plain" else way
        lines.append(f"| {name} | {sent.get(way, 1.0):.2f} | {median:.3f} | {low:.3f} to {high:.3f} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--share", type=float, default=0.5, help="of what is left of a core, for each rank")
    parser.add_argument("--period_ms", type=float, help="in which each rank gets its share once")
    parser.add_argument("--mbit", type=float, default=100.0, help="a second, between the hosts; 0: one host")
    parser.add_argument("--ways", nargs="+", default=["12x32", "12x32:0.2", "6x16"], help="see lsh_rate.py")
    parser.add_argument("--folder", default="output/expert_dispatch", help="of the trained model")
    parser.add_argument("--train_steps", type=int, default=1600)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--turn_steps", type=int, default=3)
    add_model_arguments(parser)
    options = parser.parse_args()
    train(options)
    corpus = corpus_of_bytes()
    try:
        with devices("dispatch", options) as quotas:
            hosts = two_hosts(quotas, options.mbit) if options.mbit else one_host(quotas)
            with hosts as seats:
                lines = on_ranks(seats, functools.partial(compare, options, corpus))
    except (QuotaError, HostError) as error:
        raise SystemExit(str(error)) from None
    where = f"two hosts, {options.mbit:g} Mbit/s" if options.mbit else "one host"
    print(
        f"{options.ranks} ranks, {where}, {options.rows} x {options.length} tokens, {options.pairs} rounds; {lines[0]}"
    )
    print("| way | rows sent | time / plain | 95% |\n|---|--:|--:|--:|\n" + "\n".join(lines[1:]))
    print("tier: measured on emulated hosts and devices")


if __name__ == "__main__":
    main()
