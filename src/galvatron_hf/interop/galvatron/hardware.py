# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Reads the hardware profiles of Galvatron.

The list states the meaning of each figure in Galvatron (PKU-DAIR/Hetu-Galvatron, its profiler, `utils/config_utils.py`
and `cost_model`) and its use here. W is the number of all devices. Galvatron divides MiB by GB/s and takes the
quotient as milliseconds, so its GB/s is 1000 MiB/s: `GALVATRON_GB`.

- `allreduce_size_n_consec_c`, GB/s: the bandwidth of a ring over n consecutive devices (c = 1) or n that are W / n
  apart (c = 0). Gradients of P bytes over n data ranks take 2 (n - 1) / n P / bandwidth, a gather of ZeRO-3 half of
  that. [`Link.ms`] gives the same for an all-reduce with an input of P bytes and an all-gather with an input of P / n
  bytes, without latency. These links have no points.
- `pp_size_k`, GB/s: the bandwidth from one of k pipeline stages to the next, whose devices are W / k apart. A `send`
  takes bytes / bandwidth.
- `allreduce_size_n_sMB_time`, ms, over n consecutive devices, for an input of s MiB. Galvatron takes half of it as the
  time of an all-gather with a *result* of s MiB and of a reduce-scatter with an input of s MiB under Megatron-SP. Here
  these are the `points` of an all-gather of s / n MiB and of a reduce-scatter of s MiB. They also apply to ZeRO over
  consecutive devices, for which Galvatron uses the bandwidth. An all-reduce uses the bandwidth.
- `all2all_size_n_sMB_time`, ms, for an input of s MiB on each rank (nccl-tests' alltoall_perf): `points` of an
  all-to-all. Galvatron's formula looks it up with the bytes of all n ranks, so Ulysses costs up to n times as much
  there.
- `overlap_coe`: the factor by which overlap slows computation and communication.

An all-to-all without a figure (strided, or over more ranks than the table has) gets the bandwidth of an all-reduce.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from galvatron_hf.plan.serialization import read_object
from galvatron_hf.plan.validation import check_int, check_number, show
from galvatron_hf.profiler.profiles.hardware import HardwareProfile, Link


MIB = 1 << 20
GALVATRON_GB = 1000 * MIB
_SOURCE = "Galvatron's profile"


def read_galvatron_hardware(
    folder: str | os.PathLike, nodes: int, devices_per_node: int, memory_bytes: int
) -> HardwareProfile:
    """Reads the profile of one cluster.

    Args:
        folder (`str` or `os.PathLike`): has `allreduce_bandwidth_*.json`, `p2p_bandwidth_*.json`, `sp_time_*.json` and
            `overlap_coefficient.json`; only the first is required.
        nodes, devices_per_node (`int`): size of the cluster, which is part of the files' names.
        memory_bytes (`int`): memory of one device, which the files do not contain.

    Raises:
        ValueError: in one sentence, if a file is missing or is not one of Galvatron's.
    """
    world_size = nodes * devices_per_node
    size = f"{nodes}nodes_{devices_per_node}gpus_per_node.json"
    folder = Path(folder)
    if world_size > 1:
        _check_there(folder, f"allreduce_bandwidth_{size}")
    bandwidth = _read(folder / f"allreduce_bandwidth_{size}", r"allreduce_size_(\d+)_consec_([01])")
    stages = _read(folder / f"p2p_bandwidth_{size}", r"pp_size_(\d+)")
    times = _read(folder / f"sp_time_{size}", r"(allreduce|all2all)_size_(\d+)_(\d+)MB_time")
    overlap = _read(folder / "overlap_coefficient.json", r"(overlap_coe)")
    links = {}
    for link in (*_rings(bandwidth, world_size), *_sends(stages, world_size), *_tables(times)):
        links[link.kind, link.ranks, link.stride] = link
    return HardwareProfile(
        name=f"{nodes} x {devices_per_node}, profiled by Galvatron",
        nodes=nodes,
        devices_per_node=devices_per_node,
        memory_bytes=memory_bytes,
        flops_per_s={},
        links=tuple(links.values()),
        overlap_slowdown=next(iter(overlap.values()), None),
        hides_gathers=False,
        assumed={
            "memory_bytes": "given, not measured",
            "links": f"{_SOURCE}; an all-to-all without a table has the bandwidth of an all-reduce",
            "overlap_slowdown": _SOURCE if overlap else "no overlap_coefficient.json: nothing overlaps",
            "hides_gathers": "no (Galvatron's rule: gathers of ZeRO-3 do not overlap)",
        },
    )


def _check_there(folder: Path, name: str) -> None:
    if not (folder / name).is_file():
        names = " ".join(os.listdir(folder)) if folder.is_dir() else ""
        found = sorted(re.findall(r"allreduce_bandwidth_(\d+)nodes_(\d+)gpus", names))
        there = ", ".join(f"{nodes} x {devices}" for nodes, devices in found) or "none"
        raise ValueError(f"{str(folder)!r} has no {name}: use the nodes and devices per node of its files ({there})")


def _read(path: Path, pattern: str) -> dict[tuple[str, ...], float]:
    """Returns the figures of a file by the groups of `pattern` in their names; empty if the file does not exist."""
    if not path.exists():
        return {}
    what = f"Galvatron profile {path.name}"
    figures = {}
    for name, value in read_object(path, what).items():
        found = re.fullmatch(pattern, name)
        if found is None:
            raise ValueError(f"the {what} has the unknown field {show(name)}: give a file that Galvatron wrote")
        check_number(name, value, positive=True)
        figures[found.groups()] = value
    return figures


def _rings(figures: Mapping[tuple[str, ...], float], world_size: int) -> list[Link]:
    links = []
    for (count, consecutive), gigabytes in figures.items():
        ranks = int(count)
        if ranks < 2 or world_size % ranks:
            raise ValueError(f"allreduce_size_{count} does not divide {world_size} devices: give Galvatron's own file")
        stride = 1 if consecutive == "1" else world_size // ranks
        kinds = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
        links += [_line(kind, ranks, stride, gigabytes) for kind in kinds]
    return links


def _sends(figures: Mapping[tuple[str, ...], float], world_size: int) -> list[Link]:
    strides: dict[int, Any] = {}
    for (count,), gigabytes in figures.items():
        check_int("the stages of pp_size", int(count), low=2, high=world_size)
        strides[world_size // int(count)] = gigabytes
    return [_line("send", 2, stride, gigabytes) for stride, gigabytes in strides.items()]


def _line(kind: str, ranks: int, stride: int, gigabytes: float) -> Link:
    return Link(kind=kind, ranks=ranks, stride=stride, latency_ms=0.0, bytes_per_s=gigabytes * GALVATRON_GB)


def _tables(figures: Mapping[tuple[str, ...], float]) -> list[Link]:
    points: dict[tuple[str, int], list[tuple[int, float]]] = {}
    for (operation, count, size), ms in figures.items():
        ranks, bytes_ = int(count), int(size) * MIB
        if operation == "all2all":
            points.setdefault(("all_to_all", ranks), []).append((bytes_, ms))
        else:
            points.setdefault(("all_gather", ranks), []).append((bytes_ // ranks, ms / 2))
            points.setdefault(("reduce_scatter", ranks), []).append((bytes_, ms / 2))
    return [Link.fitted(kind, ranks, 1, sorted(table)) for (kind, ranks), table in points.items() if ranks > 1]
