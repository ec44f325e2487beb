# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""What a machine can do, as far as planning needs it: its links, its rate of matrix products, its memory.

Importing this module needs neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np


KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")


def wire_share(kind: str, ranks: int) -> float:
    """Bytes that a ring over `ranks` puts on each rank's wire, over the bytes of the rank's input.

    That of an all-to-all counts what a rank keeps for itself, see docs/communication.md.
    """
    return {
        "all_reduce": 2 * (ranks - 1) / ranks,
        "all_gather": ranks - 1,
        "reduce_scatter": (ranks - 1) / ranks,
        "all_to_all": (ranks - 1) / ranks,
        "send": 1.0,
    }[kind]


@dataclass(frozen=True, kw_only=True)
class Link:
    """One kind of collective between ranks of one arrangement.

    Attributes:
        kind (`str`): one of `KINDS`.
        ranks (`int`): of the group; 2 for `send`.
        stride (`int`): from one rank of the group to the next; 1 for consecutive ranks.
        latency_ms (`float`): of a message without bytes.
        bytes_per_s (`float`): that each rank's wire carries.
        error (`float`): median of |fitted / measured - 1| over the sweep; 0 where nothing was measured.
        points (`tuple[tuple[int, float], ...]`): (bytes of a rank's input, ms) that were measured, in rising order.
    """

    kind: str
    ranks: int
    stride: int
    latency_ms: float
    bytes_per_s: float
    error: float = 0.0
    points: tuple[tuple[int, float], ...] = ()

    def ms(self, size: np.ndarray | float) -> np.ndarray | float:
        """Milliseconds for `size` bytes of input: between measured points on the line that joins them, else fitted."""
        fitted = self.latency_ms + 1e3 * wire_share(self.kind, self.ranks) * np.asarray(size) / self.bytes_per_s
        if len(self.points) < 2:
            return fitted
        sizes, times = np.array(self.points, dtype=float).T
        inside = (sizes[0] <= size) & (np.asarray(size) <= sizes[-1])
        return np.where(inside, np.interp(size, sizes, times), fitted)


@dataclass(frozen=True, kw_only=True)
class HardwareProfile:
    """A cluster of equal nodes.

    Attributes:
        name (`str`): of the cluster.
        nodes, devices_per_node (`int`): ranks are numbered node by node.
        memory_bytes (`int`): of one device.
        flops_per_s (`Mapping[str, float]`): of matrix products, by number format ("fp32", "bf16").
        links (`tuple[Link, ...]`): no two of one kind, ranks and stride.
        overlap_slowdown (`float`, *optional*): how much longer computing takes while weights and gradients are
            communicated, and these while it computes; None where they do not run beside each other (gloo).
        assumed (`Mapping[str, str]`): source of each figure that was not measured, by its name.
        made (`Mapping[str, str]`): versions, host and time of the measurement.
    """

    name: str
    nodes: int
    devices_per_node: int
    memory_bytes: int
    flops_per_s: Mapping[str, float]
    links: tuple[Link, ...]
    overlap_slowdown: float | None
    assumed: Mapping[str, str] = field(default_factory=dict)
    made: Mapping[str, str] = field(default_factory=dict)

    @property
    def world_size(self) -> int:
        """Ranks of all nodes."""
        return self.nodes * self.devices_per_node

    @cached_property
    def _by_arrangement(self) -> dict[tuple[str, int, int], Link]:
        return {(link.kind, link.ranks, link.stride): link for link in self.links}

    def ms(self, kind: str, ranks: int, stride: int, size: np.ndarray | float) -> np.ndarray | float:
        """
        Milliseconds of one collective; 0 for a group of one.

        Args:
            kind (`str`): One of `KINDS`.
            ranks, stride (`int`): Of the group, as in [`Link`].
            size (`float` or `np.ndarray`): Bytes of this rank's input, as in docs/communication.md.

        Raises:
            ValueError: if no link was profiled that tells.
        """
        if ranks == 1:
            return np.zeros_like(size, dtype=float)
        return self.link(kind, ranks, stride).ms(size)

    def link(self, kind: str, ranks: int, stride: int) -> Link:
        """The profiled link, or the nearest that crosses nodes if this one does and stays inside if it does."""
        found = self._by_arrangement.get((kind, ranks, stride))
        if found is not None:
            return found
        crosses = self.crosses_nodes(ranks, stride)
        alike = [link for link in self.links if link.kind == kind]
        beside = [link for link in alike if self.crosses_nodes(link.ranks, link.stride) == crosses]
        if not alike:
            raise ValueError(f"The hardware profile {self.name!r} has no {kind} between ranks; profile the machine.")
        nearest = min(
            beside or alike,
            key=lambda link: (
                abs(np.log2(link.ranks / ranks)) + abs(np.log2(link.stride / stride)),
                link.ranks,
                link.stride,
            ),
        )
        return Link(
            kind=kind,
            ranks=ranks,
            stride=stride,
            latency_ms=nearest.latency_ms,
            bytes_per_s=nearest.bytes_per_s,
        )

    def crosses_nodes(self, ranks: int, stride: int) -> bool:
        """Whether an aligned group of `ranks`, `stride` apart, has ranks of two nodes."""
        return ranks * stride > self.devices_per_node
