# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Holds the cost model against published throughputs of GPU clusters:

    python benchmarks/published.py FILE.csv [FILE.csv ...] [--json]

Each row of a file names a model by its sizes, a cluster, a plan, and the tokens/s that each GPU was measured to train:
see tests/data/published. Columns that a file lacks have the values of `DEFAULTS`.
Prints predicted over published tokens/s for each row, and the errors of each file.
"""

from __future__ import annotations

import argparse
import csv
import functools
import json
import statistics
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table
from transformers import GPT2Config, GptOssConfig, LlamaConfig, PreTrainedConfig, Qwen3MoeConfig

from galvatron_hf.plan import ParallelPlan, Precision
from galvatron_hf.planner.cost.workload import Workload
from galvatron_hf.planner.estimate import estimate_plan
from galvatron_hf.profiler.profiles.hardware import HardwareProfile
from galvatron_hf.profiler.profiles.model import ModelProfile
from galvatron_hf.profiler.profiles.presets import hardware_preset
from galvatron_hf.profiler.trace.tracing import profile_from_config, speed_of


DEFAULTS = {
    "tensor": "1", "pipeline": "1", "context": "1", "expert": "1", "micro_batch_rows": "1", "compiled": "no",
    "sharding": "zero3", "recompute": "none", "source": "",
}  # fmt: skip
CLUSTERS = {"h100_80gb": "h100", "a100_80gb": "a100-80g", "a100_40gb": "a100-40g"}
SHARDINGS = {"ddp": "replicate", "none": "replicate", "zero1": "zero2"}  # other names, and the nearest of ours
DEVICES_PER_NODE = 8
LLAMA = dict(vocab_size=128_256, num_key_value_heads=8, tie_word_embeddings=False)
# Sizes of published models, from their config.json.
MODELS = {
    "llama-3.1-8b": lambda: LlamaConfig(
        hidden_size=4096, intermediate_size=14_336, num_hidden_layers=32, num_attention_heads=32, **LLAMA
    ),
    "llama-3-70b": lambda: LlamaConfig(
        hidden_size=8192, intermediate_size=28_672, num_hidden_layers=80, num_attention_heads=64, **LLAMA
    ),
    "qwen3-moe-30b-a3b": lambda: Qwen3MoeConfig(
        hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_hidden_layers=48,
        num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8,
        vocab_size=151_936,
    ),
    "gpt-oss-20b": lambda: GptOssConfig(num_hidden_layers=24, num_local_experts=32),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Row:
    """Holds one published throughput and the predicted one, in tokens/s of each GPU."""

    file: str
    given: dict[str, str]
    published: float
    predicted: float

    @property
    def ratio(self) -> float:
        return self.predicted / self.published

    def values(self) -> dict[str, object]:
        """Returns the row as JSON."""
        return {"file": self.file, **self.given, "predicted": self.predicted, "ratio": self.ratio}


# MosaicML's tables: `--attn_impl` is triton (scripts/train/benchmarking in mosaicml/llm-foundry). FlashAttention-2 is
# 1.3 to 2.5 times as fast as FlashAttention in Triton (arXiv 2307.08691, section 4.1): the middle of these.
TRITON = 1 / 1.9
# torchtitan's H100 have 500 of 700 W, and HBM2e of 2 TB/s as an H100 PCIe has (NVIDIA's data sheets). Power grows at
# least with the square of the clock.
AT_500_W = (500 / 700) ** 0.5
HBM2E = 2.0 / 3.35
# NeMo AutoModel is taken to measure with routers that choose all experts equally often: it has a gate that does
# (`FakeBalancedGate`), and does not say. TransformerEngine's fused operations count as compiled.
BALANCED = {2: 1.0, 4: 1.0, 8: 1.0}


def configuration(row: dict[str, str]) -> PreTrainedConfig:
    """Returns the configuration of a row's model: a known one, or a decoder like GPT of the row's sizes."""
    if row["model"] in MODELS:
        return MODELS[row["model"]]()
    hidden, length = int(row["hidden"]), int(row["seq_length"])
    return GPT2Config(
        n_embd=hidden,
        n_layer=int(row["layers"]),
        n_head=int(row["heads"]),
        n_positions=length,
        vocab_size=int(row["vocab"]),
        activation_function="gelu",
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )


@functools.lru_cache(maxsize=None)
def hardware_of(gpu: str, gpus: int) -> HardwareProfile:
    devices = min(gpus, DEVICES_PER_NODE)
    return hardware_preset(CLUSTERS.get(gpu, gpu), -(-gpus // devices), devices)


@functools.lru_cache(maxsize=None)
def profile_of(
    model: str, sizes: tuple[tuple[str, str], ...], gpu: str, source: str, compiled: bool, length: int, degree: int
) -> ModelProfile:
    """Returns the profile of a row's model on a GPU, with what the source says of its kernels and its power."""
    config, hardware = configuration(dict(sizes)), hardware_of(gpu, 1)
    speed = speed_of(hardware, "bf16")
    if model.startswith("mpt"):
        speed = replace(speed, attention=speed.attention.times(TRITON))
    if "megatron" in f"{model} {source}".lower():  # of 2021, before fused attention
        config._attn_implementation = "eager"
    if "500 W" in source:
        speed = replace(
            speed,
            flops_per_ms=speed.flops_per_ms * AT_500_W,
            attention=speed.attention.times(AT_500_W),
            bytes_per_ms=speed.bytes_per_ms * HBM2E,
        )
    found = profile_from_config(
        config,
        hardware,
        "bf16",
        length=length,
        packed=False,
        max_degree=degree,
        speed=speed,
        compiled=compiled or "TE" in source,
    )
    return replace(found, expert_imbalance=BALANCED) if "DeepEP" in source else found


def predicted(row: dict[str, str]) -> float:
    """Returns the tokens/s of each GPU that the cost model predicts for a row."""
    gpus, length = int(row["gpus"]), int(row["seq_length"])
    tensor, pipeline, context = (int(row[name]) for name in ("tensor", "pipeline", "context"))
    sizes = tuple(
        (name, row[name]) for name in ("model", "hidden", "layers", "heads", "vocab", "seq_length") if name in row
    )
    kernels = row["source"], row["compiled"] == "yes"
    model = profile_of(row["model"], sizes, row["gpu"], *kernels, length, max(tensor, int(row["expert"])))
    rows = int(row["global_rows"])
    data = gpus // (tensor * pipeline * context)
    # Selective recompute repeats every second product (torchtitan's policy), so about half of the forward.
    kinds = {"selective": ("none", "full")}.get(row["recompute"], (row["recompute"],))
    precision = Precision(compute="bf16")
    workload = Workload(rows=rows, length=length, precision=precision, packed=context > 1)
    times = []
    for recompute in kinds:
        plan = ParallelPlan.uniform(
            gpus,
            len(model.layers),
            pipeline=pipeline,
            micro_batches=max(1, rows // (data * int(row["micro_batch_rows"]))),
            precision=precision,
            tensor=tensor,
            megatron_sp=tensor > 1,
            context=context,
            expert=int(row["expert"]),
            sharding=SHARDINGS.get(row["sharding"], row["sharding"]),
            recompute="none" if recompute == "unstated" else recompute,
        )
        times.append(estimate_plan(hardware_of(row["gpu"], gpus), model, workload, plan).step_ms)
    return 1e3 * rows * length / statistics.mean(times) / gpus


def read(path: Path) -> list[Row]:
    """Returns the rows of a file with their predictions."""
    with path.open(newline="") as file:
        rows = [DEFAULTS | row for row in csv.DictReader(file)]
    return [
        Row(file=path.name, given=row, published=float(row["tokens_per_s_per_gpu"]), predicted=predicted(row))
        for row in rows
    ]


def errors(rows: list[Row]) -> dict[str, float]:
    """Returns the median and the largest errors |predicted / published - 1|, and the median ratio."""
    sizes = sorted(abs(row.ratio - 1) for row in rows)
    return {
        "rows": len(rows),
        "median_ratio": statistics.median(row.ratio for row in rows),
        "median_error": statistics.median(sizes),
        "p90_error": sizes[min(len(sizes) - 1, round(0.9 * (len(sizes) - 1)))],
        "largest_error": sizes[-1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    rows = [row for path in given.files for row in read(path)]
    groups = {"all": rows} | {
        gpu: [row for row in rows if row.given["gpu"] == gpu]
        for gpu in dict.fromkeys(row.given["gpu"] for row in rows)
    }
    found = {name: errors(group) for name, group in groups.items()}
    if given.json:
        json.dump({"rows": [row.values() for row in rows], "errors": found}, sys.stdout, indent=1)
        return
    table = Table("model", "GPUs", "tokens", "plan", "published", "predicted", "ratio")
    for row in rows:
        one = row.given
        degrees = [f"{name}={one[name]}" for name in ("tensor", "pipeline", "context", "expert") if one[name] != "1"]
        plan = " ".join([one["sharding"], *degrees, *(["recompute"] if one["recompute"] == "full" else [])])
        table.add_row(
            one["model"], f"{one['gpus']} x {one['gpu']}", one["seq_length"], plan,
            f"{row.published:,.0f}", f"{row.predicted:,.0f}", f"{row.ratio:.2f}",
        )  # fmt: skip
    console = Console(width=120)
    console.print(table)
    for name, one in found.items():
        console.print(
            f"{name}: {one['rows']} rows, median ratio {one['median_ratio']:.2f}, |error| median "
            f"{one['median_error']:.1%}, 90th percentile {one['p90_error']:.1%}, largest {one['largest_error']:.1%}"
        )


if __name__ == "__main__":
    main()
