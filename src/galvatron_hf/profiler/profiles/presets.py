# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Builds hardware profiles from data sheets and published measurements; all figures are assumed.
Bandwidths are those of a ring as nccl-tests counts them (busbw). Latency is that of a tree: it grows by one step with
each doubling of the ranks in a node, and by another with each doubling of the nodes. Each device has its own network
adapter. A ring with p ranks in each node crosses nodes at min(p * adapter rate, rate inside a node).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from galvatron_hf.plan.validation import MAX_RANKS, check_choice, check_int
from galvatron_hf.profiler.profiles.hardware import HardwareProfile, Link, arrangements_by_kind


@dataclass(frozen=True, kw_only=True)
class _Device:
    """Holds the figures of a device, its link inside the node and its network adapter, each with its source."""

    memory: tuple[float, str]
    flops: tuple[dict[str, float], str]
    inside_bytes_per_s: tuple[float, str]
    across_bytes_per_s: tuple[float, str]
    inside_ms: tuple[float, str]
    across_ms: tuple[float, str]
    overlap: tuple[float | None, str]


_SHARE = 230 / 312
_SHARE_SOURCE = (
    "times 0.74, the share of 312 that large fp16 products reach on an A100 (mli/transformers-benchmarks), carried "
    "over to other formats and devices"
)
_NVLINK_MS = 0.010, "10 us a step: networks[0].latency of systems/a100_80g.json, calculon-ai/calculon"
_INFINIBAND_MS = 0.020, "20 us a step: networks[1].latency of systems/a100_80g.json, calculon-ai/calculon"
_OVERLAP = (
    1.126,
    "1.1256 on A100-class devices, carried over to others: hardware_configs/overlap_coefficient.json, "
    "PKU-DAIR/Hetu-Galvatron",
)
_NDR = 47e9, "NDR 400 Gb/s adapter per device: 46-48 GB/s, NVIDIA/nccl-tests#290"
_HOPPER_NVLINK = 370e9, "NVLink 4, 450 GB/s each way: busbw 370 GB/s without SHARP, NVIDIA/nccl-tests#212"
_HOPPER_FLOPS = (
    {"fp32": 67e12 * _SHARE, "bf16": 989e12 * _SHARE},
    f"NVIDIA data sheet, SXM: 67 (fp32) and 989 (bf16, dense) TFLOP/s {_SHARE_SOURCE}",
)

_GUESSED = "guessed, for one core and gloo over loopback: `galvatron profile-hardware` measures"

_DEVICES = {
    "a100-80g": _Device(
        memory=(80e9, "NVIDIA A100 data sheet: 80 GB"),
        flops=(
            {"fp32": 19.5e12 * _SHARE, "bf16": 312e12 * _SHARE},
            f"NVIDIA A100 data sheet: 19.5 (fp32) and 312 (bf16, dense) TFLOP/s {_SHARE_SOURCE}",
        ),
        inside_bytes_per_s=(232e9, "NVLink 3, 300 GB/s each way: busbw 232.5 GB/s, NVIDIA/nccl-tests#175"),
        across_bytes_per_s=(24e9, "HDR 200 Gb/s adapter per device: 24 GB/s, NVIDIA/nccl#1048"),
        inside_ms=_NVLINK_MS,
        across_ms=_INFINIBAND_MS,
        overlap=_OVERLAP,
    ),
    "h100": _Device(
        memory=(80e9, "NVIDIA H100 SXM data sheet: 80 GB"),
        flops=_HOPPER_FLOPS,
        inside_bytes_per_s=_HOPPER_NVLINK,
        across_bytes_per_s=_NDR,
        inside_ms=_NVLINK_MS,
        across_ms=_INFINIBAND_MS,
        overlap=_OVERLAP,
    ),
    "h200": _Device(
        memory=(141e9, "NVIDIA H200 SXM data sheet: 141 GB"),
        flops=_HOPPER_FLOPS,
        inside_bytes_per_s=_HOPPER_NVLINK,
        across_bytes_per_s=_NDR,
        inside_ms=_NVLINK_MS,
        across_ms=_INFINIBAND_MS,
        overlap=_OVERLAP,
    ),
    "rtx4090": _Device(
        memory=(24e9, "NVIDIA RTX 4090 data sheet: 24 GB"),
        flops=(
            {"fp32": 82.6e12 * _SHARE, "bf16": 165.2e12 * _SHARE},
            f"NVIDIA Ada white paper: 82.6 (fp32) and 165.2 (bf16 with fp32 sums) TFLOP/s {_SHARE_SOURCE}",
        ),
        inside_bytes_per_s=(
            10e9,
            "PCIe without P2P, every pair as slow as between sockets: 10 GB/s, NCCL's log in NVIDIA/nccl-tests#307",
        ),
        across_bytes_per_s=(1.25e9, "guessed: 10 Gb/s Ethernet per device"),
        inside_ms=(0.014, "42 us for 8 bytes over 8 devices: NVIDIA/nccl#1530"),
        across_ms=(0.050, "guessed: 50 us a step over TCP"),
        overlap=_OVERLAP,
    ),
    "cpu": _Device(
        memory=(8 * 2**30, "guessed: 8 GiB per rank"),
        flops=(
            {"fp32": 1.0e11, "bf16": 2.0e11},
            _GUESSED,
        ),
        inside_bytes_per_s=(1.0e9, _GUESSED),
        across_bytes_per_s=(0.125e9, "guessed: 1 Gb/s Ethernet per rank"),
        inside_ms=(0.2, _GUESSED),
        across_ms=(0.2, "guessed: gloo over Ethernet"),
        overlap=(None, "gloo: no overlap"),
    ),
}

PRESETS = tuple(_DEVICES)


def hardware_preset(name: str, nodes: int, devices_per_node: int) -> HardwareProfile:
    """Returns the profile of a cluster of equal devices, with every link of [`arrangements_by_kind`]. `name` is one of
    `PRESETS`; for another name, `ValueError` proposes the nearest one.
    """
    check_choice("the cluster", name, PRESETS)
    check_int("nodes", nodes, high=MAX_RANKS)
    check_int("devices_per_node", devices_per_node, high=MAX_RANKS)
    device = _DEVICES[name]
    links = [
        _link(device, kind, ranks, stride, devices_per_node)
        for (ranks, stride), kinds in arrangements_by_kind(nodes * devices_per_node, devices_per_node).items()
        for kind in kinds
    ]
    return HardwareProfile(
        name=f"{nodes} x {devices_per_node} {name}",
        nodes=nodes,
        devices_per_node=devices_per_node,
        memory_bytes=int(device.memory[0]),
        flops_per_s=device.flops[0],
        links=tuple(links),
        overlap_slowdown=device.overlap[0],
        assumed={
            "memory_bytes": device.memory[1],
            "flops_per_s": device.flops[1],
            "links inside a node": f"{device.inside_bytes_per_s[1]}; {device.inside_ms[1]}",
            "links between nodes": f"{device.across_bytes_per_s[1]}; {device.across_ms[1]}",
            "overlap_slowdown": device.overlap[1],
        },
        made={"cluster": name},
    )


def _link(device: _Device, kind: str, ranks: int, stride: int, devices_per_node: int) -> Link:
    inside, across = device.inside_bytes_per_s[0], device.across_bytes_per_s[0]
    together = ranks  # ranks of the group in one node
    if ranks * stride > devices_per_node:
        together = max(1, devices_per_node // stride)
    rate = inside
    if together < ranks:
        # Traffic leaves the node through the rank's own adapter, or through those of all the ring's ranks there.
        leaving = {"send": across, "all_to_all": across * (ranks - 1) / (ranks - together)}
        rate = min(inside, leaving.get(kind, together * across))
    steps_inside, steps_across = math.log2(together), math.log2(max(1, -(-ranks // together)))
    return Link(
        kind=kind,
        ranks=ranks,
        stride=stride,
        latency_ms=steps_inside * device.inside_ms[0] + steps_across * device.across_ms[0],
        bytes_per_s=rate,
    )
