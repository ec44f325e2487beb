# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Compares plans with plain Trainer on one process: losses, gradient norms and updates of a small Llama.

The reference and each comparison are processes of their own (`gpu.py` starts them). All train the same ragged rows
with SGD, whose updates are the gradients. In fp32 the bounds are those of CONTRIBUTING.md. In bf16 a plan may differ
from plain bf16 by twice as much as plain bf16 differs from plain fp32.
"""

import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpu_models import RandomRows, arguments, build, collator, llama
from safetensors.torch import load_file
from transformers import Trainer, TrainingArguments
from transformers.utils import is_liger_kernel_available

from galvatron_hf import GalvatronTrainer, GalvatronTrainingArguments, ParallelPlan


ROWS, SHORTEST, LENGTH, STEPS = 8, 16, 128, 6
SAVED = STEPS // 2  # the step from which the resumed run goes on
FP32_BOUNDS = {"loss": 1e-5, "gradient norm": 1e-5, "update": 1e-3}
SMALL = {"cuda": "small", "cpu": "tiny"}


def plans(ranks: int, layers: int) -> dict[str, ParallelPlan]:
    """Returns the plans that are compared on so many ranks."""
    made = {
        "zero3": {},
        "replicate": {"sharding": "replicate"},
        "zero3, recompute": {"recompute": "full"},
        "zero3, 2 micro-batches": {"micro_batches": 2},
    }
    if ranks > 1:
        made["zero2"] = {"sharding": "zero2"}
    if ranks % 2 == 0:
        pipeline = {"pipeline": 2, "micro_batches": 4}
        made |= {
            "tensor": {"tensor": 2},
            "megatron_sp": {"tensor": 2, "megatron_sp": True},
            "ulysses": {"ulysses": 2},
            "1f1b": pipeline,
            "1f1b, zero2, recompute": pipeline | {"sharding": "zero2", "recompute": "full"},
            "gpipe": pipeline | {"schedule": "gpipe"},
            "zero_bubble": pipeline | {"schedule": "zero_bubble", "sharding": "zero2"},
        }
    if ranks % 4 == 0:
        made["1f1b, megatron_sp"] = pipeline | {"tensor": 2, "megatron_sp": True}
        made["ulysses, zero3 of halves"] = {"ulysses": 2, "shard_degree": 2}
    return {name: ParallelPlan.uniform(ranks, layers, **fields) for name, fields in made.items()}


def _arguments(folder: str, device: str, bf16: bool, rows: int, **more: Any) -> dict[str, Any]:
    # torch_compile=True lets Trainer round products of fp32 to TF32, unless it is told not to.
    exact = {"tf32": False} if device == "cuda" else {}
    return arguments(folder, device, rows, STEPS, bf16) | {
        **exact,
        "learning_rate": 0.1,
        "optim": "sgd",
        "logging_strategy": "steps",
        "logging_steps": 1,
        "logging_first_step": True,
        **more,
    }


def _data(vocabulary: int) -> RandomRows:
    return RandomRows(ROWS * STEPS, LENGTH, vocabulary, SHORTEST)


def _numbers(trainer: Trainer) -> dict[str, list[float]]:
    """Returns losses and gradient norms of the steps that were logged last."""
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {"loss": [entry["loss"] for entry in logged], "gradient norm": [entry["grad_norm"] for entry in logged]}


def reference(folder: Path, device: str) -> list[dict[str, Any]]:
    """Trains plain Trainer in fp32 and bf16, and writes what it found; for a process without a launcher."""
    config = llama(SMALL[device], LENGTH)
    start = {name: tensor.clone() for name, tensor in build(config).state_dict().items()}
    for dtype in ("fp32", "bf16"):
        args = TrainingArguments(**_arguments(str(folder / dtype), device, dtype == "bf16", ROWS))
        made = Trainer(build(config), args, train_dataset=_data(config.vocab_size), data_collator=collator())
        made.train()
        made.save_model()
        (folder / dtype / "numbers.json").write_text(json.dumps(_numbers(made)))
    updates = {dtype: _updates(folder / dtype, start) for dtype in ("fp32", "bf16")}
    numbers = {dtype: json.loads((folder / dtype / "numbers.json").read_text()) for dtype in updates}
    scale = _differences(numbers["bf16"], numbers["fp32"], updates["bf16"], updates["fp32"])
    torch.save(start, folder / "start.pt")
    (folder / "scale.json").write_text(json.dumps(scale))
    return [{"case": "plain Trainer, bf16 against fp32", **scale}]


def _updates(folder: Path, start: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.float() - start[name] for name, tensor in load_file(folder / "model.safetensors").items()}


def _differences(
    found: dict[str, list[float]],
    expected: dict[str, list[float]],
    update: dict[str, torch.Tensor],
    wanted: dict[str, torch.Tensor],
) -> dict[str, float]:
    """Returns the largest relative differences; those of updates are by the norm of each weight's update."""
    worst = {
        name: max(abs(one - other) / abs(other) for one, other in zip(found[name], expected[name], strict=True))
        for name in ("loss", "gradient norm")
    }
    if update.keys() != wanted.keys():
        raise RuntimeError(f"Only one of both has {sorted(update.keys() ^ wanted.keys())}.")
    parts = [((update[name] - wanted[name]).norm() / wanted[name].norm()).item() for name in wanted]
    return worst | {"update": max(parts)}


def compare(folder: Path, device: str, dtype: str, compiled: bool) -> list[dict[str, Any]]:
    """Trains every plan on this rank and compares it with the reference; collective."""
    ranks, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    config = llama(SMALL[device], LENGTH)
    start, scale = torch.load(folder / "start.pt"), json.loads((folder / "scale.json").read_text())
    bounds = FP32_BOUNDS if dtype == "fp32" else {name: 2 * value for name, value in scale.items()}
    expected, wanted = json.loads((folder / dtype / "numbers.json").read_text()), _updates(folder / dtype, start)
    known = plans(ranks, config.num_hidden_layers)
    cases: dict[str, tuple[ParallelPlan, dict[str, Any]]] = {name: (plan, {}) for name, plan in known.items()}
    cases["zero3, packed"] = known["zero3"], {"packing": "static"}
    if "ulysses" in known:
        cases["ulysses, packed"] = known["ulysses"], {"packing": "static"}
        cases["1f1b, packed"] = known["1f1b"], {"packing": "static"}
    if compiled:
        cases["zero3, compiled, packed"] = known["zero3"], {"packing": "static", "torch_compile": True}
        if "megatron_sp" in known:
            cases["megatron_sp, compiled"] = known["megatron_sp"], {"torch_compile": True}
    cases["zero3, resumed"] = known["zero3"], {"resumed": True}
    if device == "cuda" and is_liger_kernel_available():  # last, because it replaces classes of transformers
        cases["zero3, Liger"] = known["zero3"], {"use_liger_kernel": True}
    found = []
    for name, (plan, more) in cases.items():
        found.append({"case": f"{name}, {dtype}"})
        try:
            numbers, update = _train(plan, folder, device, dtype, dict(more), ranks)
        except Exception as error:  # the other plans are compared all the same
            if ranks > 1:
                raise
            found[-1] |= {"error": " ".join(f"{type(error).__name__}: {error}".split())[:300], "equal": False}
            continue
        if rank == 0:
            logged = {key: values[-len(numbers[key]) :] for key, values in expected.items()}
            worst = _differences(numbers, logged, update(start), wanted)
            found[-1] |= worst | {"equal": all(worst[key] <= bounds[key] for key in bounds)}
    return found


def _train(plan: ParallelPlan, folder: Path, device: str, dtype: str, more: dict[str, Any], ranks: int) -> tuple:
    """Trains one plan; returns its numbers, and a function that reads its update from the saved model."""
    output = folder / "plan"
    resumed = more.pop("resumed", False)
    common = _arguments(str(output), device, dtype == "bf16", ROWS // ranks, packing=more.pop("packing", "none"))
    if resumed:
        common |= {"save_strategy": "steps", "save_steps": SAVED}
    config = llama(SMALL[device], LENGTH)

    def trainer() -> GalvatronTrainer:
        args = GalvatronTrainingArguments(**common, **more, parallel_plan=plan)
        data = _data(config.vocab_size)
        return GalvatronTrainer(build(config), args, train_dataset=data, data_collator=collator())

    made = trainer()
    made.train()
    if resumed:
        made = trainer()
        made.train(resume_from_checkpoint=str(output / f"checkpoint-{SAVED}"))
    made.save_model()
    if dist.is_initialized():
        dist.barrier()
    return _numbers(made), lambda start: _updates(output, start)
