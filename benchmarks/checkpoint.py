# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Compares time and size of checkpoints with those of accelerate's FSDP2, which plain Trainer uses.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc_per_node 4 benchmarks/checkpoint.py

One model with AdamW's state is sharded over all ranks, by zero3 and by `fully_shard`, and saved and loaded in turns.
The table has medians, and the median of the ratios of neighbouring turns with its 95% bootstrap interval; A/A is FSDP2
against itself. Ours also writes checksums, a manifest and, if stated, whole weights. Accelerate enables FSDP2 only
with an accelerator, so `save_fsdp_model`, `save_fsdp_optimizer` and their counterparts are called directly.

Evidence tier: measured on real ranks (gloo, CPU), on the disk of --folder.
"""

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
from accelerate.utils.fsdp_utils import load_fsdp_model, load_fsdp_optimizer, save_fsdp_model, save_fsdp_optimizer
from overhead import build, interval
from torch.distributed.fsdp import fully_shard

from accelerate import FullyShardedDataParallelPlugin, PartialState
from galvatron_hf import ParallelPlan, parallelize
from galvatron_hf.checkpoint.folder import STATE_FOLDER
from galvatron_hf.checkpoint.hugging_face import meta_model, write_pretrained
from galvatron_hf.parallel.weights.distributed_state import WholeWeights, load_state
from galvatron_hf.trainer.checkpoint.checkpoint_writer import CheckpointWriter


def one_step(model: torch.nn.Module, forward_backward: Callable[[torch.Tensor], None]) -> torch.optim.Optimizer:
    """Returns an optimizer after one step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    forward_backward(torch.arange(32 * dist.get_world_size()).view(dist.get_world_size(), 32) % 64)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


class Ours:
    """Saves and loads like GalvatronTrainer."""

    def __init__(self, options: argparse.Namespace, *, full: bool = False, background: bool = False):
        plan = ParallelPlan.uniform(dist.get_world_size(), options.layers, sharding="zero3")
        self.parallel = parallelize(build(options), plan)
        self.optimizer = one_step(
            self.parallel.model, lambda ids: self.parallel.forward_backward({"input_ids": ids, "labels": ids})
        )
        self.parallel.units.reshard()
        self.writer = CheckpointWriter(parallel=self.parallel, in_background=background)
        self.full = full

    def save(self, folder: Path) -> None:
        made = self.writer.start(folder)
        if self.full:
            model = meta_model(self.parallel.family, self.parallel.model.config, torch.float32)
            gather, writes = WholeWeights(self.parallel).gather, dist.get_rank() == 0
            write_pretrained(model, made, gather, max_shard_size="5GB", writes=writes)
        self.writer.complete(1, self.optimizer, keep=[])

    def finish(self) -> None:
        self.writer.wait()

    def load(self, folder: Path) -> None:
        load_state(self.parallel, self.optimizer, folder / STATE_FOLDER)


class Fsdp2:
    """Saves and loads like plain Trainer with accelerate."""

    def __init__(self, options: argparse.Namespace, kind: str):
        self.model = build(options)
        for layer in self.model.model.layers:
            fully_shard(layer)
        fully_shard(self.model)
        self.optimizer = one_step(self.model, lambda ids: self.model(input_ids=ids, labels=ids).loss.backward())
        for module in (*self.model.model.layers, self.model):
            module.reshard()
        self.plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type=kind)
        self.accelerator = SimpleNamespace(
            process_index=dist.get_rank(),
            num_processes=dist.get_world_size(),
            is_fsdp2=True,
            is_main_process=dist.get_rank() == 0,
            wait_for_everyone=dist.barrier,
        )

    def save(self, folder: Path) -> None:
        if dist.get_rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        save_fsdp_model(self.plugin, self.accelerator, self.model, str(folder))
        save_fsdp_optimizer(self.plugin, self.accelerator, self.optimizer, self.model, str(folder))

    def finish(self) -> None:
        pass

    def load(self, folder: Path) -> None:
        load_fsdp_model(self.plugin, self.accelerator, self.model, str(folder))
        load_fsdp_optimizer(self.plugin, self.accelerator, self.optimizer, self.model, str(folder))


def seconds(work: Callable[[], None]) -> float:
    """Returns the seconds of the slowest rank."""
    dist.barrier()
    began = time.perf_counter()
    work()
    taken = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    return taken.item()


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def turn(saver: Ours | Fsdp2, folder: Path) -> dict[str, float]:
    """Runs one save, and one load if the save is not in the background."""
    found = {"save": seconds(lambda: saver.save(folder))}
    found["written"] = found["save"] + seconds(saver.finish)
    found["bytes"] = size(folder)
    found["load"] = seconds(lambda: saver.load(folder))
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
    dist.barrier()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden_size", type=int, default=512)
    parser.add_argument("--vocab_size", type=int, default=8192)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--folder", default=None, help="where checkpoints are written; a temporary folder if absent")
    options = parser.parse_args()
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    dist.init_process_group("gloo")
    PartialState(cpu=True)  # accelerate logs through it
    makers = {
        "FSDP2 sharded": lambda: Fsdp2(options, "SHARDED_STATE_DICT"),
        "FSDP2 sharded (A/A)": lambda: Fsdp2(options, "SHARDED_STATE_DICT"),
        "ours": lambda: Ours(options),
        "ours, in background": lambda: Ours(options, background=True),
        "FSDP2 full": lambda: Fsdp2(options, "FULL_STATE_DICT"),
        "ours, with whole weights": lambda: Ours(options, full=True),
    }
    savers = {name: make() for name, make in makers.items()}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in savers}
    with tempfile.TemporaryDirectory(dir=options.folder) as own:
        root: list[str] = [own]
        dist.broadcast_object_list(root, src=0)
        for number in range(options.turns + 1):
            names = list(savers)
            for name in names[number % len(names) :] + names[: number % len(names)]:
                seen = turn(savers[name], Path(root[0]) / f"checkpoint-{number}")
                if number:  # the first is a warm-up
                    found[name].append(seen)
    if dist.get_rank() == 0:
        report(found, next(iter(savers.values())), options)
    dist.destroy_process_group()


def report(found: dict[str, list[dict[str, float]]], saver: Fsdp2, options: argparse.Namespace) -> None:
    numbers = sum(parameter.numel() for parameter in saver.model.parameters()) / 1e6
    print(f"{dist.get_world_size()} ranks, {numbers:.1f}M parameters with AdamW's state, {options.turns} turns")
    against = {"ours, with whole weights": "FSDP2 full"}
    for name, turns in found.items():
        medians = {key: float(np.median([seen[key] for seen in turns])) for key in turns[0]}
        print(
            f"{name:25s} stall {medians['save']:.3f} s, written after {medians['written']:.3f} s, "
            f"loaded in {medians['load']:.3f} s, {medians['bytes'] / 2**20:.1f} MiB"
        )
        other = against.get(name, "FSDP2 sharded")
        for key in ("save", "load") if name != other else ():
            ratios = [own[key] / base[key] for own, base in zip(turns, found[other], strict=True)]
            median, low, high = interval(ratios)
            print(f"    {key:5s} / {other:14s} {median:.3f}  95% [{low:.3f}, {high:.3f}]")


if __name__ == "__main__":
    main()
