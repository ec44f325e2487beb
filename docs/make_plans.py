# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""
Searches plans of public models on clusters of five kinds, and writes them into `docs/plans.md`; `make plans` runs it,
in about forty minutes on one core.

    python docs/make_plans.py [--only llama-3.1-8b ...]

With `--only` the rows are printed, and the page stays. Sizes of models are those of their published configurations;
dropout is off.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from galvatron_hf.plan import Precision
from galvatron_hf.plan.plan_words import words_of
from galvatron_hf.planner.cost.workload import Workload
from galvatron_hf.planner.report.throughput import throughput_of
from galvatron_hf.planner.search import search_plan
from galvatron_hf.planner.simplify import simplest
from galvatron_hf.profiler.profiles.presets import hardware_preset
from galvatron_hf.profiler.trace.tracing import profile_from_config
from galvatron_hf.utils.units import GIB, gib_rounded_up


PAGE = Path(__file__).parent / "plans.md"
BEGIN, END = "<!-- made by docs/make_plans.py -->", "<!-- end of what docs/make_plans.py has made -->"
MEMORY = 0.92  # of a device, as in training


@dataclass(frozen=True)
class Cluster:
    """Names a cluster, and the tokens of a step on it."""

    device: str
    nodes: int
    tokens: int


CLUSTERS = (
    Cluster("rtx4090", 1, 1 << 18),
    Cluster("a100-80g", 1, 1 << 19),
    Cluster("h100", 8, 1 << 22),
    Cluster("rtx4090", 8, 1 << 20),
    Cluster("h100", 64, 1 << 23),
)


@dataclass(frozen=True)
class Model:
    """Gives a model's type and configuration, and the tokens of a row (in the encoder and in the decoder, if two)."""

    name: str
    type: str
    length: int
    sizes: dict[str, Any]
    target: int | None = None

    def config(self) -> PreTrainedConfig:
        return AutoConfig.for_model(self.type, **self.sizes)


def sizes(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocabulary: int, **more: Any) -> dict:
    """Returns the sizes of a decoder of Llama's kind."""
    return dict(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocabulary,
        max_position_embeddings=131072,
        **more,
    )


def experts(count: int, chosen: int, size: int) -> dict[str, int]:
    return dict(num_experts=count, num_experts_per_tok=chosen, moe_intermediate_size=size, norm_topk_prob=True)


NO_DROPOUT = dict(attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0)  # fused attention has none

MODELS = (
    Model("GPT-2 XL", "gpt2", 1024, dict(n_embd=1600, n_layer=48, n_head=25, **NO_DROPOUT)),
    Model("Llama-3.2-1B", "llama", 8192, sizes(2048, 8192, 16, 32, 8, 128256, head_dim=64, tie_word_embeddings=True)),
    Model("Llama-3.1-8B", "llama", 8192, sizes(4096, 14336, 32, 32, 8, 128256)),
    Model("Llama-3.1-8B, 128K tokens", "llama", 131072, sizes(4096, 14336, 32, 32, 8, 128256)),
    Model("Llama-3.1-70B", "llama", 8192, sizes(8192, 28672, 80, 64, 8, 128256)),
    Model("Llama-3.1-405B", "llama", 8192, sizes(16384, 53248, 126, 128, 8, 128256)),
    Model("Mistral-7B-v0.3", "mistral", 8192, sizes(4096, 14336, 32, 32, 8, 32768, sliding_window=None)),
    Model("Qwen2.5-1.5B", "qwen2", 4096, sizes(1536, 8960, 28, 12, 2, 151936, tie_word_embeddings=True)),
    Model("Qwen2.5-14B", "qwen2", 4096, sizes(5120, 13824, 48, 40, 8, 152064)),
    Model("Qwen2.5-32B", "qwen2", 4096, sizes(5120, 27648, 64, 40, 8, 152064)),
    Model("Qwen3-0.6B", "qwen3", 4096, sizes(1024, 3072, 28, 16, 8, 151936, head_dim=128, tie_word_embeddings=True)),
    Model("Phi-3-medium", "phi3", 4096, sizes(5120, 17920, 40, 40, 10, 32064, pad_token_id=None)),
    Model("Gemma-2-9B", "gemma2", 4096, sizes(3584, 14336, 42, 16, 8, 256000, head_dim=256)),
    Model("Gemma-3-1B", "gemma3_text", 4096, sizes(1152, 6912, 26, 4, 1, 262144, head_dim=256)),
    Model("OLMo-2-7B", "olmo2", 4096, sizes(4096, 11008, 32, 32, 32, 100352)),
    Model(
        "Mixtral-8x7B",
        "mixtral",
        8192,
        sizes(4096, 14336, 32, 32, 8, 32000, num_local_experts=8, num_experts_per_tok=2),
    ),
    Model(
        "Qwen3-30B-A3B",
        "qwen3_moe",
        4096,
        sizes(2048, 6144, 48, 32, 4, 151936, head_dim=128, **experts(128, 8, 768)),
    ),
    Model("DeepSeek-V3", "deepseek_v3", 4096, {}),
    Model(
        "T5-3B",
        "t5",
        512,
        dict(d_model=1024, d_kv=128, d_ff=16384, num_layers=24, num_heads=32, dropout_rate=0.0),
        target=128,
    ),
    Model(
        "Flan-T5-XXL",
        "t5",
        512,
        dict(
            d_model=4096,
            d_kv=64,
            d_ff=10240,
            num_layers=24,
            num_heads=64,
            dropout_rate=0.0,
            feed_forward_proj="gated-gelu",
            tie_word_embeddings=False,
        ),
        target=128,
    ),
)


def row(model: Model, cluster: Cluster) -> tuple[str, ...]:
    """Returns the cells of a model on a cluster."""
    begun = time.process_time()
    hardware = hardware_preset(cluster.device, cluster.nodes, 8)
    most = min(hardware.world_size, 64 if hardware.world_size <= 64 else 16)
    lengths = dict(length=model.length, target_length=model.target)
    profile = profile_from_config(model.config(), hardware, max_degree=most, **lengths)
    workload = Workload(
        rows=max(1, cluster.tokens // model.length),
        length=model.length,
        precision=Precision(compute="bf16", reduce="fp32"),
        packed=True,
    )
    result = search_plan(hardware, profile, workload, memory_bytes=int(MEMORY * hardware.memory_bytes))
    if result.best is None:
        needed = f"{gib_rounded_up(result.least_memory_bytes)} GiB a device are needed"
        found = ("-", "-", "-", needed)
    else:
        best = simplest(result)
        pace = throughput_of(hardware, profile, workload, best.step_ms)
        found = (
            f"{pace.tokens_per_second_and_device:,.0f}",
            f"{pace.mfu:.0%}",
            f"{max(best.memory_bytes) / GIB:.0f}",
            words_of(best.plan),
        )
    print(f"{model.name}, {hardware.name}: {', '.join(found)} ({time.process_time() - begun:.1f} s)", file=sys.stderr)
    return model.name, f"{hardware.world_size} {cluster.device}", *found


def page(rows: list[tuple[str, ...]]) -> str:
    """Returns the tables, one for each cluster."""
    lines = []
    for cluster in CLUSTERS:
        name = f"{8 * cluster.nodes} {cluster.device}"
        lines += [f"### {name}, {cluster.tokens:,} tokens a step", ""]
        lines += ["| model | tokens/s a device | MFU | GiB | plan |", "|---|---|---|---|---|"]
        lines += [f"| {one[0]} | {' | '.join(one[2:])} |" for one in rows if one[1] == name]
        lines += [""]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="MODEL", help="models of these names")
    given = parser.parse_args()
    chosen = [one for one in MODELS if not given.only or one.name.lower() in {name.lower() for name in given.only}]
    rows = [row(model, cluster) for model in chosen for cluster in CLUSTERS]
    if given.only:
        print(page(rows))
        return
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n{page(rows)}\n{END}{rest.partition(END)[2]}", encoding="utf-8")


if __name__ == "__main__":
    main()
