# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Measures the machine that the ranks are on."""

from __future__ import annotations

import datetime
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from galvatron_hf.parallel.comm.objects import gather_objects, is_rank_0
from galvatron_hf.profiler.measure.compute import measure_flops, measure_overlap
from galvatron_hf.profiler.measure.links import count_steps, measure_links, measure_step
from galvatron_hf.profiler.profiles.hardware import HardwareProfile
from galvatron_hf.utils.allocator import keep_freed_memory
from galvatron_hf.utils.machine import cpu_quota, device_memory_bytes, identity
from galvatron_hf.utils.progress import progress_bar


SIZES = {
    "cpu": (4 << 10, 32 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20),
    "cuda": (64 << 10, 512 << 10, 4 << 20, 16 << 20, 64 << 20, 256 << 20),
}
METHOD = "3"  # of measuring machines, models and whole steps: the next number makes all kept profiles stale
_WINDOW_MS = {"cpu": 60.0, "cuda": 10.0}
_PERIODS, _FEWEST_PERIODS, _PERIODS_MS = 15, 2, 150.0  # of a quota: so many, within the time that there is
_OVERLAP_MS = 50.0
_NUMBER_FORMATS = 2


def profile_hardware(
    *,
    local_world_size: int | None = None,
    device: torch.device | str | None = None,
    name: str | None = None,
    sizes: Sequence[int] | None = None,
    repetitions: int | None = None,
    seconds: float = 40.0,
    progress: bool = False,
) -> HardwareProfile:
    """
    Measures links, matrix products, overlap and memory; collective over the ranks of the default process group.

    Without a process group it measures one process, which has no links.

    Args:
        local_world_size (`int`, *optional*): ranks of a node (LOCAL_WORLD_SIZE of a launcher); all of them if absent.
        device (`torch.device` or `str`, *optional*): this rank's; if absent the current GPU, if there is one and the
            group can use it, else the CPU.
        name (`str`, *optional*): of the cluster.
        sizes (`Sequence[int]`, *optional*): bytes of the messages to time; those of `SIZES` if absent.
        repetitions (`int`, *optional*): interleaved measurements, of which the median counts; if absent 5, and 3 where
            a CPU quota makes each of them long.
        seconds (`float`, defaults to 40): after which, about, timing links ends with fewer repetitions.
        progress (`bool`, defaults to `False`): whether rank 0 shows a bar.

    Returns:
        [`HardwareProfile`]: the same on every rank.

    Raises:
        ValueError: for ranks that do not fill nodes, and for sizes or repetitions that measure nothing or do not
            fit the memory.
    """
    begun = time.perf_counter()
    device = torch.device(device) if device is not None else default_device()
    if device.type == "cpu":
        keep_freed_memory()  # as training does: else long messages take what their new pages take
    nodes, devices_per_node = nodes_of(local_world_size)
    memory_bytes = min(gather_objects(device_memory_bytes(device, devices_per_node)))
    sweep = _Sweep.of(device, memory_bytes, sizes, repetitions, seconds)
    measured = _measured(device, sweep, nodes, devices_per_node, progress)
    slowdowns = measured.pop("slowdowns")
    made = machine(device) | _measurement(begun, str(sweep), slowdowns)
    overlaps = bool(slowdowns) and made["backend"] == "nccl"
    profile = HardwareProfile(
        name=name or f"{nodes} x {devices_per_node} {made['devices']}",
        nodes=nodes,
        devices_per_node=devices_per_node,
        memory_bytes=memory_bytes,
        overlap_slowdown=max(slowdowns["computing"], slowdowns["communicating"]) if overlaps else None,
        exposed_sync=slowdowns.get("exposed", 1.0),
        made=made,
        **measured,
    )
    return HardwareProfile.from_json(gather_objects(profile.to_json())[0])


@dataclass(frozen=True)
class _Sweep:
    """What is timed: messages of these sizes, so often, for up to so long each, in about so many seconds in all."""

    sizes: tuple[int, ...]
    repetitions: int
    window_ms: float
    seconds: float

    @classmethod
    def of(
        cls,
        device: torch.device,
        memory_bytes: int,
        sizes: Sequence[int] | None,
        repetitions: int | None,
        seconds: float,
    ) -> _Sweep:
        """As asked for, or as it suits the device; collective."""
        sizes = tuple(sizes) if sizes is not None else SIZES[device.type]
        window_ms = _window_ms(device)
        if repetitions is None:
            repetitions = 5 if window_ms == _WINDOW_MS[device.type] else 3
        _check_sweep(sizes, repetitions, memory_bytes)
        return cls(sizes, repetitions, window_ms, seconds)

    def __str__(self) -> str:
        sizes = ", ".join(map(str, self.sizes))
        return f"{self.repetitions} x {sizes} bytes at most, up to {self.window_ms:g} ms each"

    def steps(self, world_size: int, devices_per_node: int) -> int:
        """Of a progress bar."""
        overlaps = (world_size > 1) * self.repetitions
        return _NUMBER_FORMATS + overlaps + count_steps(world_size, devices_per_node, self.sizes, self.repetitions)


def _measured(
    device: torch.device, sweep: _Sweep, nodes: int, devices_per_node: int, progress: bool
) -> dict[str, Any]:
    """Rates, links and the time of an empty step, by their names in a profile, and `slowdowns`; collective."""
    repetitions, window_ms, world_size = sweep.repetitions, sweep.window_ms, nodes * devices_per_node
    with progress_bar(sweep.steps(world_size, devices_per_node), progress and is_rank_0()) as step:
        found = {"flops_per_s": measure_flops(device, repetitions, window_ms, step), "links": (), "slowdowns": {}}
        if world_size > 1:
            found["slowdowns"] = measure_overlap(device, repetitions, max(window_ms, _OVERLAP_MS), step)
            found["step_ms"] = measure_step(device, repetitions)
            sizes, seconds = sweep.sizes, sweep.seconds
            found["links"] = measure_links(device, devices_per_node, sizes, repetitions, window_ms, seconds, step)
    return found


def machine(device: torch.device) -> dict[str, str]:
    """What tells this machine from others, and how it is measured, as a profile's `made` has it; collective, and the
    same on every rank."""
    ranks = gather_objects(identity(device))
    merged = {f"{name}s": ", ".join(sorted({rank.pop(name) for rank in ranks})) for name in ("host", "device")}
    for name in ranks[0]:
        merged[name] = ", ".join(sorted({rank[name] for rank in ranks}))
    return merged | {"backend": _backend(device), "method": METHOD}


def _window_ms(device: torch.device) -> float:
    """How long a measurement has to last; collective.

    A rank that may use half a core uses a whole one until its period's share is spent, and then stands still: only
    what lasts for many periods shows the rate that it keeps up, or for whole ones where they are long.
    """
    quotas = [quota for quota in gather_objects(cpu_quota()) if quota is not None]
    enough = []
    for period_ms in [1e3 * period for cores, period in quotas if cores < 1]:
        within = math.ceil(round(_PERIODS_MS / period_ms, 6))
        enough.append(period_ms * min(_PERIODS, max(_FEWEST_PERIODS, within)))
    return max([_WINDOW_MS[device.type], *enough])


def _measurement(begun: float, sweep: str, slowdowns: Mapping[str, float]) -> dict[str, str]:
    """When, how long and how the machine was measured, and how computing and communicating slow each other down."""
    return {
        **{f"slowdown of {what}": f"{much:.3f}" for what, much in slowdowns.items() if what != "exposed"},
        "sweep": sweep,
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "seconds": f"{time.perf_counter() - begun:.1f}",
    }


def nodes_of(local_world_size: int | None) -> tuple[int, int]:
    """Nodes, and ranks of each; all ranks are on one if nothing is said.

    Raises:
        ValueError: if ranks do not fill nodes.
    """
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    local_world_size = world_size if local_world_size is None else local_world_size
    if local_world_size < 1 or world_size % local_world_size:
        raise ValueError(
            f"local_world_size={local_world_size} does not divide {world_size} ranks: profile nodes that have equally "
            "many."
        )
    return world_size // local_world_size, local_world_size


def _check_sweep(sizes: Sequence[int], repetitions: int, memory_bytes: int) -> None:
    if not sizes or any(type(size) is not int or size < 1 for size in sizes) or len(set(sizes)) < 2:
        raise ValueError(f"sizes={list(sizes)}: a fit needs two different numbers of bytes or more; give them.")
    if max(sizes) > memory_bytes:
        raise ValueError(f"sizes={list(sizes)}: a device has {memory_bytes} bytes; give messages that fit.")
    if repetitions < 1:
        raise ValueError(f"repetitions={repetitions} measures nothing: give 1 or more.")


def default_device() -> torch.device:
    """This rank's: the current GPU if there is one and the group can use it, else the CPU."""
    usable = torch.cuda.is_available() and (not dist.is_initialized() or "nccl" in dist.get_backend_config())
    return torch.device("cuda", torch.cuda.current_device()) if usable else torch.device("cpu")


def _backend(device: torch.device) -> str:
    """What carries the messages of a device: "gloo", "nccl", or "none" without a process group."""
    if not dist.is_initialized():
        return "none"
    by_device = dict(entry.split(":") for entry in dist.get_backend_config().split(",") if ":" in entry)
    return by_device.get(device.type, dist.get_backend())
