# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Host memory of models that no rank ever has whole, as the kernel counts it, mapped files included."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from equivalence import single_stage
from galvatron_hf import ParallelPlan, parallelize
from galvatron_hf.parallel.comm.dtensor import local_tensor
from galvatron_hf.parallel.comm.mesh import WorldMesh
from galvatron_hf.plan import LayerStrategy, VocabularyStrategy
from plans import pipelined
from ranks import run_ranks


S, V = LayerStrategy, VocabularyStrategy
MIB = 2**20
CONSTANT_BYTES = 16 * MIB
LAYERS = (S(), S(tensor=4, sharding="zero2"), S(tensor=2, megatron_sp=True), S(ulysses=2))
STAGES = (S(), S(tensor=2), S(tensor=2, sharding="zero2"), S(ulysses=2))
PLANS = {
    "flat": single_stage(LAYERS, 4, embedding=V(tensor=2), head=V(tensor=2)),
    "pipeline": pipelined([(0, 2), (1, 3)], STAGES, ends=V(tensor=2)),
}
# 4 layers of 36 MiB, embedding and head of 35 MiB each.
CONFIG = LlamaConfig(
    vocab_size=12000,
    hidden_size=768,
    intermediate_size=3072,
    num_hidden_layers=4,
    num_attention_heads=12,
    num_key_value_heads=12,
    tie_word_embeddings=False,
)


def largest_bytes() -> int:
    return 4 * CONFIG.vocab_size * CONFIG.hidden_size


def resident(field: str) -> int:
    """Returns `VmRSS` or its peak `VmHWM` of this process, in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


def peak_bytes(work: Callable[[], torch.nn.Module]) -> tuple[int, int]:
    """Returns how far resident memory rises while a model is made, and the bytes of the weights it then holds."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = resident("VmRSS")
    model = work()
    peak = resident("VmHWM") - before
    own = {id(p): local_tensor(p.detach()) for p in model.parameters()}
    return peak, sum(tensor.numel() * tensor.itemsize for tensor in own.values())


def load(plan: ParallelPlan, world: WorldMesh, **options) -> torch.nn.Module:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG, dtype=torch.float32)
    return parallelize(model, plan, world, **options).model


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Returns the folder of a saved model of 214 MiB in several files."""
    folder = tmp_path_factory.mktemp("large")
    AutoModelForCausalLM.from_config(CONFIG, dtype=torch.float32).save_pretrained(folder, max_shard_size="90MB")
    gc.collect()
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pipeline", pytest.param("flat", marks=pytest.mark.slow)])
def test_peak_is_the_shard_and_the_largest_tensor(folder, name, capsys):
    def work() -> dict[str, tuple[int, int]]:
        world = WorldMesh("cpu")
        load(PLANS[name], world, weights=folder)  # what is set up once is not counted
        ways = dict(
            read=lambda: load(PLANS[name], world, weights=folder),
            initialised=lambda: load(PLANS[name], world),
            naive=lambda: parallelize(AutoModelForCausalLM.from_pretrained(folder), PLANS[name], world).model,
        )
        # The least of two: what the process touches for the first time, such as pages of libraries, can only add.
        return {way: min(peak_bytes(made) for _ in range(2)) for way, made in ways.items()}

    for rank, seen in enumerate(run_ranks(work, 4)):
        bounds = {way: shard + largest_bytes() + CONSTANT_BYTES for way, (_, shard) in seen.items()}
        with capsys.disabled():
            peaks = ", ".join(
                f"{way} {peak / MIB:.0f} of {bounds[way] / MIB:.0f} MiB" for way, (peak, _) in seen.items()
            )
            print(f"\nrank {rank}, {name}: {peaks}")
        assert seen["read"][0] <= bounds["read"]
        assert seen["initialised"][0] <= bounds["initialised"]
        assert seen["naive"][0] > bounds["naive"]
