# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Builds hardware profiles from data sheets and published measurements; all figures are assumed.

Each device has its own network adapter. A ring with p ranks in each node crosses nodes at min(p * adapter rate, rate
inside a node). Latencies are those of NCCL's algorithms: a ring takes a step for each of its ranks, so that it grows
with the cluster; an all-reduce takes a tree between the nodes where this is quicker.
"""

from __future__ import annotations

import math

from galvatron_hf.plan.validation import MAX_RANKS, check_choice, check_int
from galvatron_hf.profiler.profiles.devices import DEVICES, Device
from galvatron_hf.profiler.profiles.hardware import PRESET, HardwareProfile, Link, arrangements_by_kind


PRESETS = tuple(DEVICES)
MOST_DEVICES = 1 << 12


def hardware_preset(name: str, nodes: int, devices_per_node: int) -> HardwareProfile:
    """Returns the profile of a cluster of equal devices, with every link of [`arrangements_by_kind`]. `name` is one of
    `PRESETS`; for another name, `ValueError` proposes the nearest one.
    """
    check_choice("the cluster", name, PRESETS)
    check_int("nodes", nodes, high=MAX_RANKS)
    check_int("devices_per_node", devices_per_node, high=MAX_RANKS)
    if nodes * devices_per_node > MOST_DEVICES:
        raise ValueError(
            f"{nodes} nodes of {devices_per_node} devices are more than {MOST_DEVICES}, and no plan for so many is "
            "searched: use fewer."
        )
    device = DEVICES[name]
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
        overlap_slowdown=None if device.overlap[0] is None else device.overlap[0][nodes > 1],
        assumed={
            "memory_bytes": device.memory[1],
            "flops_per_s": device.flops[1],
            "memory bandwidth": device.memory_bytes_per_s[1],
            "attention": device.attention[1],
            "launches": device.launch_ms[1],
            "links inside a node": f"{device.inside_bytes_per_s[1]}; {device.inside_ms[1]}",
            "links between nodes": f"{device.across_bytes_per_s[1]}; {device.across_ms[1]}",
            "overlap_slowdown": device.overlap[1],
        },
        made={PRESET: name},
    )


def _link(device: Device, kind: str, ranks: int, stride: int, devices_per_node: int) -> Link:
    inside, across = device.inside_bytes_per_s[0], device.across_bytes_per_s[0]
    together = ranks  # ranks of the group in one node
    if ranks * stride > devices_per_node:
        together = max(1, devices_per_node // stride)
    rate = inside
    if together < ranks:
        # Traffic leaves the node through the rank's own adapter, or through those of all the ring's ranks there.
        leaving = {"send": across, "all_to_all": across * (ranks - 1) / (ranks - together)}
        rate = min(inside, leaving.get(kind, together * across))
    return Link(
        kind=kind,
        ranks=ranks,
        stride=stride,
        latency_ms=_latency_ms(device, kind, ranks, -(-ranks // together)),
        bytes_per_s=rate,
    )


def _latency_ms(device: Device, kind: str, ranks: int, nodes: int) -> float:
    """Returns the time of an empty message over a group on so many nodes."""
    inside, across, in_node = device.inside_ms[0], device.across_ms[0], -(-ranks // nodes)
    ring = (ranks - nodes) * inside + (nodes - 1) * across
    tree = 2 * ((in_node - 1) * inside + math.ceil(math.log2(nodes)) * across)
    steps = math.ceil(math.log2(in_node)) * inside + math.ceil(math.log2(nodes)) * across
    return {"all_gather": ring, "reduce_scatter": ring, "all_reduce": min(2 * ring, tree)}.get(kind, steps)
