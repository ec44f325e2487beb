# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Reads the hardware profiles that Galvatron writes.

What the figures mean there (PKU-DAIR/Hetu-Galvatron, its profiler, `utils/config_utils.py` and `cost_model`), and what
becomes of them here. W is the number of all devices. Galvatron divides MiB by GB/s and takes the result for
milliseconds, so that its GB/s is 1000 MiB/s: `GALVATRON_GB`.

- `allreduce_size_n_consec_c`, GB/s: the bandwidth of a ring over n consecutive devices (c = 1) or n that are W / n
  apart (c = 0). Gradients of P bytes over n data ranks take 2 (n - 1) / n P / bandwidth, a gather of ZeRO-3 half of
  it. That is [`Link.ms`] of an all-reduce whose input has P bytes and of an all-gather whose input has P / n, with no
  latency. These links have no points.
- `pp_size_k`, GB/s: from one of k pipeline stages to the next, whose devices are W / k apart. Time is bytes /
  bandwidth: that of `send`.
- `allreduce_size_n_sMB_time`, ms, over n consecutive devices, for an input of s MiB. It prices Megatron-SP: half of it
  is the time of an all-gather whose *result* has s MiB and of a reduce-scatter whose input has. Here these are the
  `points` of an all-gather of s / n MiB and of a reduce-scatter of s MiB. They price ZeRO over consecutive devices
  too, which Galvatron prices by bandwidth; an all-reduce stays priced by bandwidth.
- `all2all_size_n_sMB_time`, ms, for an input of s MiB on each rank (nccl-tests' alltoall_perf): `points` of an
  all-to-all. Galvatron's own formula looks it up with the bytes of all n ranks, and so charges Ulysses up to n times
  as much.
- `overlap_coe`: how much longer computing and communicating take beside each other.

Where there is no figure of an all-to-all (strided, or over more ranks than the table has), its wire carries what that
of an all-reduce does.
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
    """
    Reads the figures of one cluster.

    Args:
        folder (`str` or `os.PathLike`): with `allreduce_bandwidth_*.json`, `p2p_bandwidth_*.json`, `sp_time_*.json`
            and `overlap_coefficient.json`; of these, the first must be there.
        nodes, devices_per_node (`int`): of the cluster; they are in the names of the files.
        memory_bytes (`int`): of one device, which Galvatron does not write down.

    Raises:
        ValueError: in one sentence, if a file is missing or is none of Galvatron's.
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
            "links": f"{_SOURCE}; without a table of its own an all-to-all has the bandwidth of an all-reduce",
            "overlap_slowdown": _SOURCE if overlap else "no overlap_coefficient.json: nothing overlaps",
            "hides_gathers": "no (Galvatron's rule: what ZeRO-3 gathers is waited for)",
        },
    )


def _check_there(folder: Path, name: str) -> None:
    if not (folder / name).is_file():
        found = (
            sorted(re.findall(r"allreduce_bandwidth_(\d+)nodes_(\d+)gpus", " ".join(os.listdir(folder))))
            if (folder.is_dir())
            else []
        )
        there = ", ".join(f"{nodes} x {devices}" for nodes, devices in found) or "none"
        raise ValueError(f"{str(folder)!r} has no {name}: give nodes and devices per node that it has ({there})")


def _read(path: Path, pattern: str) -> dict[tuple[str, ...], float]:
    """The figures of a file, by what `pattern` finds in their names; none if there is no such file."""
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
