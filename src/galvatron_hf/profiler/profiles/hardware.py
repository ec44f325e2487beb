# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Stores links, speed and memory of a cluster as a value and as JSON. Imports no torch."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import numpy as np

from galvatron_hf.plan.serialization import VERSION, check_version, read_object, write_file
from galvatron_hf.plan.validation import (
    MAX_RANKS,
    check_bool,
    check_choice,
    check_fields,
    check_int,
    check_number,
    show,
)


KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")
PRESET = "cluster"  # names a preset in `made`
MADE_OF = (PRESET, "devices")  # the second names measured machines
_MAX_BYTES = 1 << 60


def wire_share(kind: str, ranks: int) -> float:
    """Returns the bytes that each rank of a ring sends, divided by the bytes of its input. The input of an all-to-all
    includes the part that a rank keeps, see docs/communication.md.
    """
    return {
        "all_reduce": 2 * (ranks - 1) / ranks,
        "all_gather": ranks - 1,
        "reduce_scatter": (ranks - 1) / ranks,
        "all_to_all": (ranks - 1) / ranks,
        "send": 1.0,
    }[kind]


def arrangements(world_size: int) -> Iterator[tuple[int, int]]:
    """Yields (ranks, stride) of the aligned groups that tile a world. Strides are the powers of two that divide the
    world size. For each stride, the numbers of ranks are the powers of two that tile the world, and the largest one
    possible.
    """
    stride = 1
    while world_size % stride == 0 and stride < world_size:
        sizes = {world_size // stride}
        ranks = 2
        while world_size % (ranks * stride) == 0:
            sizes.add(ranks)
            ranks *= 2
        yield from ((size, stride) for size in sorted(sizes))
        stride *= 2


def arrangements_by_kind(world_size: int, devices_per_node: int) -> dict[tuple[int, int], tuple[str, ...]]:
    """Returns the kinds of collective of each (ranks, stride): all over [`arrangements`], and sends between pairs.
    Pairs of a pipeline need not tile the world: their strides are the powers of two below the world size, and the
    number of devices of a node.
    """
    found = dict.fromkeys(arrangements(world_size), KINDS[:-1])
    strides = {1 << exponent for exponent in range((world_size - 1).bit_length())} | {devices_per_node}
    for stride in sorted(stride for stride in strides if stride < world_size):
        found[2, stride] = (*found.get((2, stride), ()), "send")
    return found


@dataclass(frozen=True, kw_only=True)
class Link:
    """Describes one kind of collective between ranks of one arrangement; raises `ValueError` for a value out of range.

    Attributes:
        kind (`str`): One of `KINDS`.
        ranks (`int`): Ranks of the group; 2 for `send`.
        stride (`int`): Distance from one rank of the group to the next; 1 for consecutive ranks.
        latency_ms (`float`): Time of an empty message.
        bytes_per_s (`float`): Bandwidth of each rank's wire.
        error (`float`): Median of |fitted / measured - 1| over the points; 0 if nothing was measured.
        points (`tuple[tuple[int, float], ...]`): Measured (bytes of a rank's input, ms) in rising order.
    """

    kind: str
    ranks: int
    stride: int
    latency_ms: float
    bytes_per_s: float
    error: float = 0.0
    points: tuple[tuple[int, float], ...] = ()

    def __post_init__(self):
        check_choice("kind", self.kind, KINDS)
        check_int("ranks", self.ranks, low=2, high=2 if self.kind == "send" else MAX_RANKS)
        check_int("stride", self.stride, high=MAX_RANKS)
        check_number("latency_ms", self.latency_ms)
        check_number("bytes_per_s", self.bytes_per_s, positive=True)
        check_number("error", self.error)
        object.__setattr__(self, "points", _checked_points(self.points))

    @classmethod
    def fitted(cls, kind: str, ranks: int, stride: int, points: Sequence[tuple[int, float]]) -> Link:
        """Fits latency and bandwidth, 0 or more, to `points` with the least squared relative error."""
        import scipy.optimize

        sizes, times = np.array(_checked_points(points), dtype=float).T
        wire = 1e3 * wire_share(kind, ranks) * sizes
        columns = np.stack([np.ones_like(wire), wire], axis=1) / times[:, None]
        scale = columns.max(axis=0)
        latency_ms, per_byte = (scipy.optimize.nnls(columns / scale, np.ones_like(times))[0] / scale).tolist()
        if per_byte == 0:  # noise hid the bandwidth: use that of the longest message
            per_byte = float(times[-1] / wire[-1])
        errors = np.abs((latency_ms + per_byte * wire) / times - 1)
        return cls(
            kind=kind,
            ranks=ranks,
            stride=stride,
            latency_ms=latency_ms,
            bytes_per_s=1 / per_byte,
            error=float(np.median(errors)),
            points=tuple((int(size), float(ms)) for size, ms in zip(sizes, times, strict=True)),
        )

    def ms(self, size: np.ndarray | float) -> np.ndarray | float:
        """Returns the milliseconds for `size` bytes of input. The time is interpolated between the points. Beyond them
        it continues with the slope of the fitted line, which is used alone if there are no points.
        """
        per_byte = self._ms_per_byte
        if len(self.points) < 2:
            return self.latency_ms + per_byte * size
        size = np.asarray(size, dtype=float)
        sizes, times = self._sweep
        beyond = size - np.clip(size, sizes[0], sizes[-1])
        return np.maximum(np.interp(size, sizes, times) + per_byte * beyond, 0.0)

    @cached_property
    def _ms_per_byte(self) -> float:
        return 1e3 * wire_share(self.kind, self.ranks) / self.bytes_per_s

    @cached_property
    def _sweep(self) -> np.ndarray:
        return np.array(self.points, dtype=float).T


@dataclass(frozen=True, kw_only=True)
class HardwareProfile:
    """
    Describes the capabilities of a cluster of equal nodes.

    Attributes:
        name (`str`): Name of the cluster.
        nodes, devices_per_node (`int`): Size of the cluster. Ranks are numbered node by node.
        memory_bytes (`int`): Memory of one device.
        flops_per_s (`Mapping[str, float]`): Rate of matrix products by number format ("fp32", "bf16").
        links (`tuple[Link, ...]`): Links, each kind, ranks and stride once.
        overlap_slowdown (`float`, *optional*): Time of computation and of communication of weights and gradients when
            they overlap, over their times alone; None if they do not overlap (gloo).
        exposed_sync (`float`): If `overlap_slowdown` is None, the share of a gradient all-reduce, begun during the
            backward, for which training still waits.
        step_ms (`float`): Time of a step's small messages: the batch from rank 0, and a few sums over all ranks.
        hides_gathers (`bool`): Whether gathers of sharded weights overlap computation as gradients do.
        assumed (`Mapping[str, str]`): Source of each figure that was not measured, by name.
        made (`Mapping[str, str]`): Versions, host and time of the measurement.

    Raises:
        ValueError: If a value is out of range.
    """

    name: str
    nodes: int
    devices_per_node: int
    memory_bytes: int
    flops_per_s: Mapping[str, float] = field(hash=False)
    links: tuple[Link, ...]
    overlap_slowdown: float | None
    hides_gathers: bool = True
    exposed_sync: float = 1.0
    step_ms: float = 0.0
    assumed: Mapping[str, str] = field(default_factory=dict, hash=False)
    made: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self):
        if type(self.name) is not str or not self.name:
            raise ValueError(f"name is {show(self.name)}, which is not a word: write 'my cluster'")
        check_int("nodes", self.nodes, high=MAX_RANKS)
        check_int("devices_per_node", self.devices_per_node, high=MAX_RANKS)
        check_int("memory_bytes", self.memory_bytes, high=_MAX_BYTES)
        if self.overlap_slowdown is not None:
            check_number("overlap_slowdown", self.overlap_slowdown, low=1.0)
        check_bool("hides_gathers", self.hides_gathers)
        check_number("exposed_sync", self.exposed_sync)
        check_number("step_ms", self.step_ms)
        for name in ("flops_per_s", "assumed", "made"):
            object.__setattr__(self, name, _checked_mapping(name, getattr(self, name), text=name != "flops_per_s"))
        object.__setattr__(self, "links", _checked_links(self.links, self.world_size))

    @property
    def world_size(self) -> int:
        return self.nodes * self.devices_per_node

    @classmethod
    def from_json(cls, source: str | os.PathLike | Mapping[str, Any]) -> HardwareProfile:
        """Reads a profile from a file's path, JSON text, or the parsed object; raises `ValueError` for other input."""
        what = "hardware profile"
        given = dict(read_object(source, what))
        names, link_names = ([entry.name for entry in fields(kind)] for kind in (cls, Link))
        check_fields(f"the {what}", given, ("version", *names), required=("version", *names[:7]))
        check_version(given.pop("version"))
        if not isinstance(given["links"], list):
            raise ValueError(f"links is {show(given['links'])}, which is not a list: write [...]")
        links = []
        for index, entry in enumerate(given["links"]):
            check_fields(f"links[{index}]", entry, link_names, required=link_names[:5])
            try:
                links.append(Link(**entry))
            except ValueError as error:
                raise ValueError(f"links[{index}]: {error}") from None
        return cls(**given | {"links": tuple(links)})

    def to_json(self, path: str | os.PathLike | None = None) -> str:
        """Returns the profile as JSON text with a line for each field and link, and writes it to `path` if given."""
        values = {"version": VERSION} | {entry.name: getattr(self, entry.name) for entry in fields(self)}
        lines = {name: json.dumps(value) for name, value in values.items() if name != "links"}
        links = [json.dumps({entry.name: getattr(link, entry.name) for entry in fields(Link)}) for link in self.links]
        lines["links"] = "[\n  " + ",\n  ".join(links) + "]" if links else "[]"
        text = "{" + ",\n ".join(f"{json.dumps(name)}: {line}" for name, line in lines.items()) + "}\n"
        if path is not None:
            write_file(path, text)
        return text

    def ms(self, kind: str, ranks: int, stride: int, size: np.ndarray | float) -> np.ndarray | float:
        """Returns the milliseconds of one collective; 0 for a group of one rank.

        Args:
            kind (`str`): One of `KINDS`.
            ranks, stride (`int`): Group as in [`Link`].
            size (`float` or `np.ndarray`): Bytes of this rank's input, as in docs/communication.md.

        Raises:
            ValueError: If the profile has no link of this kind.
        """
        if ranks == 1:
            return np.zeros_like(size, dtype=float)
        return self.link(kind, ranks, stride).ms(size)

    def link(self, kind: str, ranks: int, stride: int) -> Link:
        """Returns the profiled link, or the most similar one that also crosses nodes or also stays in one."""
        arrangement = kind, ranks, stride
        found = self._by_arrangement.get(arrangement)
        if found is None:
            found = self._by_arrangement[arrangement] = self._nearest(*arrangement)
        return found

    def crosses_nodes(self, ranks: int, stride: int) -> bool:
        """Returns whether an aligned group of `ranks`, `stride` apart, spans several nodes."""
        return ranks * stride > self.devices_per_node

    @cached_property
    def _by_arrangement(self) -> dict[tuple[str, int, int], Link]:
        return {(link.kind, link.ranks, link.stride): link for link in self.links}

    def _nearest(self, kind: str, ranks: int, stride: int) -> Link:
        crosses = self.crosses_nodes(ranks, stride)
        alike = [link for link in self.links if link.kind == kind]
        same_side = [link for link in alike if self.crosses_nodes(link.ranks, link.stride) == crosses]
        if not alike:
            raise ValueError(f"The hardware profile {self.name!r} has no {kind} between ranks; profile the machine.")
        nearest = min(
            same_side or alike,
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


def _checked_points(points: Any) -> tuple[tuple[int, float], ...]:
    if not isinstance(points, (list, tuple)):
        raise ValueError(f"points is {show(points)}, which is not a list: write [[bytes, ms], ...]")
    before = 0
    for point in points:
        if not isinstance(point, (list, tuple)) or len(point) != 2:
            raise ValueError(f"points has {show(point)}, which is not a pair: write [bytes, ms]")
        check_int("the bytes of a point", point[0], low=before + 1, high=_MAX_BYTES)
        check_number("the ms of a point", point[1], positive=True)
        before = point[0]
    return tuple((size, ms) for size, ms in points)


def _checked_mapping(name: str, value: Any, *, text: bool) -> dict[str, Any]:
    if not isinstance(value, Mapping) or any(type(key) is not str for key in value):
        raise ValueError(f"{name} is {show(value)}, which is not an object: write {{...}}")
    for key, entry in value.items():
        if not text:
            check_number(f"{name}[{show(key)}]", entry, positive=True)
        elif type(entry) is not str:
            raise ValueError(f"{name}[{show(key)}] is {show(entry)}, which is not text: write it in quotes")
    return dict(value)


def _checked_links(links: Any, world_size: int) -> tuple[Link, ...]:
    if not isinstance(links, (list, tuple)) or any(not isinstance(link, Link) for link in links):
        raise ValueError(f"links is {show(links)}, which is not a tuple of Link: give one of these")
    seen = set()
    for index, link in enumerate(links):
        arrangement = link.kind, link.ranks, link.stride
        which = f"links[{index}], {link.kind} over {link.ranks} ranks with stride {link.stride},"
        if arrangement in seen:
            raise ValueError(f"{which} is there twice: keep one of them")
        if (link.ranks - 1) * link.stride >= world_size:
            raise ValueError(f"{which} reaches beyond the {world_size} ranks: remove it or raise nodes")
        seen.add(arrangement)
    return tuple(links)
