# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""benchmarks/gpu.py: its tables, what it calls failed, and its sections on CPU ranks."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest


BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import gpu  # noqa: E402
import gpu_models  # noqa: E402
import gpu_steps  # noqa: E402


def test_flops_are_those_of_the_matrices():
    config = gpu_models.llama("8B", 8192, layers=2)
    flops = gpu_models.StepFlops.of(config, tokens=10, length=8192)
    layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336
    assert flops.layers == 6 * 10 * 2 * layer and flops.head == 6 * 10 * 128256 * 4096
    # Scores and values of a token: 2 products of 8,192 x 4,096, with both gradients of each, 2 FLOPs an element.
    assert flops.attention == 10 * 2 * (2 * 3 * 2 * 8192 * 4096)
    assert flops.all == flops.layers + flops.head + flops.attention


def test_kernels_are_shared_out_by_their_names():
    def kernel(name: str, start: float, end: float) -> SimpleNamespace:
        return SimpleNamespace(
            name=name,
            device_type=gpu_steps.DeviceType.CUDA,
            is_user_annotation=False,
            device_time_total=end - start,
            time_range=SimpleNamespace(start=start, end=end),
        )

    kernels = [
        kernel("nvjet_sm90_tst_128x256", 0, 4000),
        kernel("ncclDevKernel_AllGather", 1000, 3000),  # at the same time
        kernel("cudnn_generated_fort_native_sdpa_sm90_flash_bprop", 5000, 6000),
        kernel("triton_poi_fused_silu", 6000, 7000),
    ]
    found, longest = gpu_steps.shares(SimpleNamespace(events=lambda: kernels), wall_ms=10.0)
    wanted = {"matrix products": 4.0, "communication": 2.0, "attention": 1.0, "compiled elementwise": 1.0, "idle": 4.0}
    assert found == pytest.approx(wanted)
    assert longest[0] == "4.0 ms nvjet_sm90_tst_128x256"


def test_tables_have_a_column_for_each_number():
    rows = [{"way": "a", "ms": 12.3456, "places": ["x", "y"]}, {"way": "b", "error": "no|end", "parts": {"p": 1.0}}]
    text = gpu.table(rows)
    assert text.splitlines()[:4] == ["| way | ms | error |", "|---|---|---|", "| a | 12.35 |  |", "| b |  | no/end |"]
    assert "a, places: x, y" in text and "b, parts: p 1.0" in text


def options(folder: Path) -> SimpleNamespace:
    return SimpleNamespace(output=folder, device="cpu", tiny=True, eager=True)


@pytest.mark.slow
def test_plans_are_compared_on_cpu_ranks(tmp_path):
    for part, ranks in (("reference", 1), ("equality-bf16", 2)):
        rows = gpu._ended(gpu._start(part, str(tmp_path), options(tmp_path), ranks), 300)
    assert {row["case"] for row in rows if row.get("equal")} == {row["case"] for row in rows}, rows
    assert {"1f1b, packed, bf16", "zero_bubble, bf16", "zero3, resumed, bf16"} <= {row["case"] for row in rows}


@pytest.mark.slow
def test_a_part_that_fails_is_a_row_with_its_error(tmp_path):
    """Without the files of the reference there is nothing to compare with."""
    rows = gpu._ended(gpu._start("equality-fp32", str(tmp_path), options(tmp_path), 1), 100)
    assert [row["case"] for row in rows] == ["equality-fp32"]
    assert "exit code 1, FileNotFoundError" in rows[0]["error"]
