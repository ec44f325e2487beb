# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Measures the overhead of GalvatronTrainer over plain Trainer, and counts its collectives.

    OMP_NUM_THREADS=1 torchrun --nproc_per_node 1 benchmarks/overhead.py
    OMP_NUM_THREADS=1 torchrun --nproc_per_node 4 benchmarks/overhead.py
    ... --experts 8 --expert_degree 4

Both trainers run in the same processes in turns of a few steps, in alternating order. The script prints the median
ratio over the pairs, its 95% bootstrap interval, and the same for plain Trainer against itself (A/A), the spread of
any ratio. Then it compares one step's collectives, recorded below all code of this project (collective_recorder.py),
with the formula of docs/communication.md, for this plan and a mixed one.

Evidence tier: measured on real ranks (gloo, CPU).
"""

import argparse
import os
import tempfile
import time

import numpy as np
import torch
import torch.distributed as dist
from collective_recorder import CollectiveRecorder
from communication import comparison, mixed_plan, traffic_table
from step_traffic import step_traffic
from torch.utils.data import Dataset
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from galvatron_hf import GalvatronTrainer, GalvatronTrainingArguments, ParallelPlan
from galvatron_hf.models.shape import ModelShape


class RandomTokens(Dataset):
    """Rows of random tokens of one length."""

    def __init__(self, rows: int, length: int, vocab_size: int):
        self.tokens = torch.randint(0, vocab_size, (rows, length), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


class StepTimes(TrainerCallback):
    """Records the milliseconds of each step but the first of a run."""

    def __init__(self):
        self.milliseconds: list[float] = []

    def on_step_begin(self, args, state, control, **kwargs):
        self.begun = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step > 1:
            self.milliseconds.append(1e3 * (time.perf_counter() - self.begun))


class FirstStep(TrainerCallback):
    """Records the collectives of a run's first step, after the batch is read."""

    def __init__(self):
        self.recorder = CollectiveRecorder()

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 0:
            self.recorder.__enter__()

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 1:
            self.recorder.__exit__(None, None, None)


def build(options: argparse.Namespace) -> PreTrainedModel:
    torch.manual_seed(0)
    intermediate = options.hidden_size * 8 // 3 // 32 * 32
    sizes = dict(
        vocab_size=options.vocab_size,
        hidden_size=options.hidden_size,
        num_hidden_layers=options.layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=options.length,
    )
    if not options.experts:
        return LlamaForCausalLM(LlamaConfig(intermediate_size=intermediate, **sizes))
    experts = dict(num_experts=options.experts, num_experts_per_tok=2, moe_intermediate_size=intermediate // 2)
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(head_dim=options.hidden_size // 8, norm_topk_prob=True, **experts, **sizes)
    )


def arguments(options: argparse.Namespace, folder: str, steps: int) -> dict:
    return {
        "output_dir": folder,
        "use_cpu": True,
        "per_device_train_batch_size": options.rows,
        "max_steps": steps,
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    }


def make_trainer(kind: str, options: argparse.Namespace, folder: str) -> tuple[Trainer, StepTimes]:
    world_size = int(os.environ["WORLD_SIZE"])
    times = StepTimes()
    common = arguments(options, os.path.join(folder, kind), options.steps + 1)
    data = RandomTokens(4 * options.rows * world_size * (options.steps + 1), options.length, options.vocab_size)
    if kind == "galvatron":
        plan = ParallelPlan.uniform(world_size, options.layers, sharding="replicate", expert=options.expert_degree)
        args = GalvatronTrainingArguments(**common, parallel_plan=plan)
        return GalvatronTrainer(build(options), args, train_dataset=data, callbacks=[times]), times
    return Trainer(build(options), TrainingArguments(**common), train_dataset=data, callbacks=[times]), times


def count_collectives(options: argparse.Namespace, folder: str) -> None:
    """Prints the collectives of one step of GalvatronTrainer on rank 0 next to the formula."""
    world_size = dist.get_world_size()
    plans = {"replicate": ParallelPlan.uniform(world_size, options.layers, sharding="replicate")}
    if world_size % 2 == 0:
        plans["mixed"] = mixed_plan(world_size, options.layers)
    config = build(options).config
    shape = ModelShape.llama(
        vocab=config.vocab_size,
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
    )
    rows = options.rows * world_size
    for name, plan in plans.items():
        step = FirstStep()
        args = GalvatronTrainingArguments(**arguments(options, folder, steps=1), parallel_plan=plan)
        data = RandomTokens(rows, options.length, options.vocab_size)
        GalvatronTrainer(build(options), args, train_dataset=data, callbacks=[step]).train()
        if dist.get_rank() == 0:
            formula = step_traffic(plan, shape, rows=rows, length=options.length)
            print(f"\none step's collectives, plan {name}\n{comparison(step.recorder.calls, formula)}")
            if name == "mixed":
                print(f"\n{traffic_table(formula)}")


def step_ms(trainer: Trainer, times: StepTimes) -> float:
    """Returns the median step of one short run on the slowest rank."""
    times.milliseconds.clear()
    trainer.train()
    slowest = torch.tensor(np.median(times.milliseconds))
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.item()


def interval(ratios: list[float]) -> tuple[float, float, float]:
    """Returns the median and its 95% bootstrap interval."""
    draws = np.random.default_rng(0).choice(ratios, (2000, len(ratios)))
    low, high = np.quantile(np.median(draws, axis=1), [0.025, 0.975])
    return float(np.median(ratios)), float(low), float(high)


def compare_trainers(options: argparse.Namespace, folder: str) -> None:
    """Prints the ratios of interleaved pairs of turns."""
    ratios = {"galvatron / Trainer": [], "Trainer / Trainer (A/A)": []}
    trainers = {kind: make_trainer(kind, options, folder) for kind in ("galvatron", "plain", "again")}
    for trainer in trainers.values():
        step_ms(*trainer)  # warm-up
    for pair in range(options.pairs):
        order = ["galvatron", "plain", "again"]
        order = order[pair % 3 :] + order[: pair % 3]
        ms = {kind: step_ms(*trainers[kind]) for kind in order}
        ratios["galvatron / Trainer"].append(ms["galvatron"] / ms["plain"])
        ratios["Trainer / Trainer (A/A)"].append(ms["again"] / ms["plain"])
    if dist.get_rank() == 0:
        parameters = trainers["plain"][0].model.num_parameters() / 1e6
        against = "Trainer" if dist.get_world_size() == 1 else "Trainer + DDP"
        print(
            f"{dist.get_world_size()} rank(s), {parameters:.1f}M parameters, "
            f"{options.rows} x {options.length} tokens a rank, plan replicate against {against}, "
            f"{options.pairs} pairs of {options.steps} steps"
        )
        for name, values in ratios.items():
            median, low, high = interval(values)
            print(f"{name:28s} median {median:.4f}  95% [{low:.4f}, {high:.4f}]")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=30, help="0 counts the collectives only")
    parser.add_argument("--steps", type=int, default=3, help="timed steps of one turn")
    parser.add_argument("--rows", type=int, default=2, help="rows per rank")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden_size", type=int, default=320)
    parser.add_argument("--vocab_size", type=int, default=4096)
    parser.add_argument("--experts", type=int, default=0, help="of a Qwen3-MoE, 2 for a token; 0: a Llama")
    parser.add_argument("--expert_degree", type=int, default=1, help="ranks over which they are spread")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory() as folder:
        if options.pairs:
            compare_trainers(options, folder)
        if not options.experts:
            count_collectives(options, folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
