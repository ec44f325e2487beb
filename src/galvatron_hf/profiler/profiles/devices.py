# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Holds what data sheets and published measurements say of devices, each figure with its source. Imports no torch.

Rates of products are those of large ones, bandwidths of links those of a ring as nccl-tests counts them (busbw).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from galvatron_hf.profiler.profiles.attention_rates import SOURCE, AttentionRates
from galvatron_hf.profiler.profiles.hardware import PRESET, HardwareProfile


@dataclass(frozen=True, kw_only=True)
class Device:
    """Holds the figures of a device, its link inside the node and its network adapter, each with its source.

    Attributes:
        memory: bytes.
        flops: FLOP/s of large matrix products by number format.
        peak_flops: FLOP/s of the data sheet, of dense products, by number format; empty if there is none.
        memory_bytes_per_s: bandwidth of the memory.
        attention ([`AttentionRates`] or None): rates of fused attention; None for those of matrix products.
        launch_ms: time from one operation that Python issues to the next, during which the device may wait.
        inside_bytes_per_s, across_bytes_per_s: bandwidth of the link inside the node, and of the adapter.
        inside_ms, across_ms: latency of a step of a collective over either.
        overlap: time of compute and of communication that overlap over their times alone, in one node and in several.
    """

    memory: tuple[float, str]
    flops: tuple[dict[str, float], str]
    peak_flops: dict[str, float]
    memory_bytes_per_s: tuple[float, str]
    attention: tuple[AttentionRates | None, str]
    launch_ms: tuple[float, str]
    inside_bytes_per_s: tuple[float, str]
    across_bytes_per_s: tuple[float, str]
    inside_ms: tuple[float, str]
    across_ms: tuple[float, str]
    overlap: tuple[tuple[float, float] | None, str]


_EAGER = 0.005, "guessed: 5 us from one eager operation to the next"
# Steps of NCCL's rings with its protocol for large messages; those of its trees are taken to be as long.
_NCCL = "src/graph/tuning.cc of NVIDIA/nccl: hwLat, ring, simple protocol"
_NVLINK_MS = 0.0034, f"3.4 us a step ({_NCCL}, NVLink)"
_PCIE_MS = 0.0057, f"5.7 us a step ({_NCCL}, PCI)"
_NETWORK_MS = 0.014, f"14 us a step ({_NCCL}, network)"
_OVERLAP = (
    (1.126, 1.3),
    "1.1256 on A100-class devices, carried over to others: hardware_configs/overlap_coefficient.json, "
    "PKU-DAIR/Hetu-Galvatron; guessed for several nodes, 1.3: what crosses nodes is not hidden as well",
)
_NDR = 47e9, "NDR 400 Gb/s adapter per device: 46-48 GB/s, NVIDIA/nccl-tests#290"
_HDR = 24e9, "HDR 200 Gb/s adapter per device: 24 GB/s, NVIDIA/nccl#1048"
_AMPERE_NVLINK = 232e9, "NVLink 3, 300 GB/s each way: busbw 232.5 GB/s, NVIDIA/nccl-tests#175"
_HOPPER_NVLINK = 370e9, "NVLink 4, 450 GB/s each way: busbw 370 GB/s without SHARP, NVIDIA/nccl-tests#212"
_REACHED = "guessed that 0.9 of it is reached"
_AMPERE_FLOPS = (
    {"fp32": 19.5e12 * 0.85, "bf16": 265e12},
    "265 TFLOP/s (bf16): 312 of the NVIDIA A100 data sheet at 1,200 of 1,410 MHz, to which its power limit leads "
    "(performance/flash-attn/README.md, liangan1/GPU_travel); the same share of 19.5 (fp32)",
)
_HOPPER_FLOPS = (
    {"fp32": 67e12 * 0.73, "bf16": 720e12},
    "720 of 989 TFLOP/s (bf16): MI300X vs H100 vs H200 Benchmark, SemiAnalysis, December 2024; the same share of 67 "
    "(fp32), NVIDIA data sheet, SXM",
)
_AMPERE_PEAK = {"fp32": 19.5e12, "bf16": 312e12}
_HOPPER_PEAK = {"fp32": 67e12, "bf16": 989e12}
_HOPPER_ATTENTION = AttentionRates(forward=1.0, backward=1.0), SOURCE
_AMPERE_ATTENTION = (
    AttentionRates(forward=187 / 368, backward=187 / 368),
    f"{SOURCE}, times 0.51: 187 of 368 TFLOP/s without a mask at 4K tokens (performance/flash-attn/README.md, "
    "liangan1/GPU_travel)",
)
_GUESSED = "guessed, for one core and gloo over loopback: `galvatron profile-hardware` measures"


def _share_of_h100(flops: float) -> tuple[AttentionRates, str]:
    """Returns the attention of a device that reaches in it the share of an H100's rate that it reaches in products."""
    share = flops / _HOPPER_FLOPS[0]["bf16"]
    return AttentionRates(forward=share, backward=share), f"{SOURCE}, times the ratio of bf16 products, {share:.2f}"


_A100 = Device(
    memory=(80e9, "NVIDIA A100 data sheet: 80 GB"),
    flops=_AMPERE_FLOPS,
    peak_flops=_AMPERE_PEAK,
    memory_bytes_per_s=(0.9 * 2.039e12, f"NVIDIA A100 data sheet, 80 GB SXM: 2,039 GB/s, {_REACHED}"),
    attention=_AMPERE_ATTENTION,
    launch_ms=_EAGER,
    inside_bytes_per_s=_AMPERE_NVLINK,
    across_bytes_per_s=_HDR,
    inside_ms=_NVLINK_MS,
    across_ms=_NETWORK_MS,
    overlap=_OVERLAP,
)
_H100 = Device(
    memory=(80e9, "NVIDIA H100 SXM data sheet: 80 GB"),
    flops=_HOPPER_FLOPS,
    peak_flops=_HOPPER_PEAK,
    memory_bytes_per_s=(0.9 * 3.35e12, f"NVIDIA H100 SXM data sheet: 3.35 TB/s, {_REACHED}"),
    attention=_HOPPER_ATTENTION,
    launch_ms=_EAGER,
    inside_bytes_per_s=_HOPPER_NVLINK,
    across_bytes_per_s=_NDR,
    inside_ms=_NVLINK_MS,
    across_ms=_NETWORK_MS,
    overlap=_OVERLAP,
)
DEVICES = {
    "a100-40g": replace(
        _A100,
        memory=(40e9, "NVIDIA A100 data sheet: 40 GB"),
        memory_bytes_per_s=(0.9 * 1.555e12, f"NVIDIA A100 data sheet, 40 GB SXM: 1,555 GB/s, {_REACHED}"),
    ),
    "a100-80g": _A100,
    "h100": _H100,
    "h200": replace(
        _H100,
        memory=(141e9, "NVIDIA H200 SXM data sheet: 141 GB"),
        memory_bytes_per_s=(0.9 * 4.8e12, f"NVIDIA H200 SXM data sheet: 4.8 TB/s, {_REACHED}"),
    ),
    "b200": Device(
        memory=(180e9, "NVIDIA DGX B200 data sheet: 1,440 GB for 8 devices"),
        flops=(
            {"fp32": 75e12 * 0.73, "bf16": 1429e12},
            "1,429 of 2,250 TFLOP/s (bf16) that products sustain (stas00/ml-engineering); fp32 guessed",
        ),
        peak_flops={"fp32": 75e12, "bf16": 2250e12},
        memory_bytes_per_s=(0.9 * 8e12, f"NVIDIA DGX B200 data sheet: 64 TB/s for 8 devices, {_REACHED}"),
        attention=_share_of_h100(1429e12),
        launch_ms=_EAGER,
        inside_bytes_per_s=(2 * 370e9, "NVLink 5, twice NVLink 4: the same share of it"),
        across_bytes_per_s=_NDR,
        inside_ms=_NVLINK_MS,
        across_ms=_NETWORK_MS,
        overlap=_OVERLAP,
    ),
    "mi300x": Device(
        memory=(192e9, "AMD Instinct MI300X data sheet: 192 GB"),
        flops=(
            {"fp32": 163.4e12 * 0.47, "bf16": 620e12},
            "620 of 1,307 TFLOP/s (bf16): MI300X vs H100 vs H200 Benchmark, SemiAnalysis, December 2024; the same "
            "share of 163 (fp32), AMD data sheet",
        ),
        peak_flops={"fp32": 163.4e12, "bf16": 1307e12},
        memory_bytes_per_s=(
            0.8 * 5.3e12,
            "AMD Instinct MI300X data sheet: 5.3 TB/s, guessed that 0.8 of it is reached",
        ),
        attention=_share_of_h100(620e12),
        launch_ms=_EAGER,
        inside_bytes_per_s=(300e9, "Infinity Fabric, 7 links of 64 GB/s each way: guessed to reach 300 GB/s"),
        across_bytes_per_s=_NDR,
        inside_ms=_NVLINK_MS,
        across_ms=_NETWORK_MS,
        overlap=_OVERLAP,
    ),
    "l40s": Device(
        memory=(48e9, "NVIDIA L40S data sheet: 48 GB"),
        flops=(
            {"fp32": 91.6e12 * 0.73, "bf16": 362e12 * 0.73},
            "NVIDIA L40S data sheet: 91.6 (fp32) and 362 (bf16, dense) TFLOP/s, times the share that an H100 reaches",
        ),
        peak_flops={"fp32": 91.6e12, "bf16": 362e12},
        memory_bytes_per_s=(0.9 * 0.864e12, f"NVIDIA L40S data sheet: 864 GB/s, {_REACHED}"),
        attention=_share_of_h100(362e12 * 0.73),
        launch_ms=_EAGER,
        inside_bytes_per_s=(20e9, "PCIe 4, 32 GB/s each way: guessed to reach 20 GB/s"),
        across_bytes_per_s=_HDR,
        inside_ms=_PCIE_MS,
        across_ms=_NETWORK_MS,
        overlap=_OVERLAP,
    ),
    "rtx4090": Device(
        memory=(24e9, "NVIDIA RTX 4090 data sheet: 24 GB"),
        flops=(
            {"fp32": 82.6e12 * 0.85, "bf16": 165.2e12},
            "NVIDIA Ada white paper: 82.6 (fp32) and 165.2 (bf16 with fp32 sums) TFLOP/s, which attention reaches too "
            "(tl_doc/flash_perf.md, apache/tvm)",
        ),
        peak_flops={"fp32": 82.6e12, "bf16": 165.2e12},
        memory_bytes_per_s=(0.9 * 1.008e12, f"NVIDIA Ada white paper: 1,008 GB/s, {_REACHED}"),
        attention=(
            AttentionRates(forward=169 / 362, backward=125 / 291),
            f"{SOURCE}, times 0.47 and 0.43: 169 and 125 TFLOP/s without a mask at 2K tokens (tl_doc/flash_perf.md, "
            "apache/tvm)",
        ),
        launch_ms=_EAGER,
        inside_bytes_per_s=(
            10e9,
            "PCIe without P2P, every pair as slow as between sockets: 10 GB/s, NCCL's log in NVIDIA/nccl-tests#307",
        ),
        across_bytes_per_s=(1.25e9, "guessed: 10 Gb/s Ethernet per device"),
        inside_ms=_PCIE_MS,
        across_ms=(0.050, "guessed: 50 us a step over TCP"),
        overlap=_OVERLAP,
    ),
    "cpu": Device(
        memory=(8 * 2**30, "guessed: 8 GiB per rank"),
        flops=({"fp32": 1.0e11, "bf16": 2.0e11}, _GUESSED),
        peak_flops={},
        memory_bytes_per_s=(1.0e10, _GUESSED),
        attention=(None, "attention at the rate of products"),
        launch_ms=(0.0, "operations are part of the time"),
        inside_bytes_per_s=(1.0e9, _GUESSED),
        across_bytes_per_s=(0.125e9, "guessed: 1 Gb/s Ethernet per rank"),
        inside_ms=(0.2, _GUESSED),
        across_ms=(0.2, "guessed: gloo over Ethernet"),
        overlap=(None, "gloo: no overlap"),
    ),
}


def known_device(hardware: HardwareProfile) -> Device | None:
    """Returns the device of a preset, or that of the same name as measured ones, such as "NVIDIA H100 80GB HBM3"."""
    preset = hardware.made.get(PRESET)
    if preset is not None:
        return DEVICES.get(preset)
    return device_of_name(hardware.name)


def device_of_name(name: str) -> Device | None:
    """Returns the device that its driver calls so, such as "NVIDIA H100 80GB HBM3"; None if it is not known."""
    words = name.lower().replace("-", " ").split()
    gpus = [one for one in DEVICES if one != "cpu" and one.split("-")[0].removeprefix("rtx") in words]
    return next((DEVICES[one] for one in gpus if one.partition("-")[2].rstrip("g") in name), None)
