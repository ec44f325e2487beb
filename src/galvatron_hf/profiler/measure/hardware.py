# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Measures the machines of the ranks: links, matrix products, overlap and memory."""

from __future__ import annotations

import datetime
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from galvatron_hf.parallel.comm.objects import gather_objects, is_rank_0
from galvatron_hf.plan.validation import check_number
from galvatron_hf.profiler.measure.compute import measure_flops, measure_overlap
from galvatron_hf.profiler.measure.cpu_timing import window_ms
from galvatron_hf.profiler.measure.links import count_steps, count_trials, measure_links, measure_step
from galvatron_hf.profiler.measure.rounds import WANTED_ERROR, Accuracy, phase
from galvatron_hf.profiler.profiles.hardware import HardwareProfile
from galvatron_hf.utils.allocator import keep_freed_memory
from galvatron_hf.utils.machine import device_memory_bytes, identity
from galvatron_hf.utils.progress import progress_bar


SIZES = {
    "cpu": (4 << 10, 64 << 10, 1 << 20, 4 << 20, 16 << 20),
    "cuda": (64 << 10, 512 << 10, 4 << 20, 16 << 20, 64 << 20, 256 << 20),
}
METHOD = "6"  # of measuring machines, models and whole steps; a new number makes all kept profiles stale
SECONDS = 40.0  # upper bound of timing links
_ROUNDS = 3, 9  # of each measurement: fewest and most
_OVERLAP_MS = 20.0
_TRIAL_WINDOWS = 1.2  # windows that a trial takes in a round, on average: long messages fill several


def profile_hardware(
    *,
    local_world_size: int | None = None,
    device: torch.device | str | None = None,
    name: str | None = None,
    sizes: Sequence[int] | None = None,
    repetitions: int | None = None,
    accuracy: float = WANTED_ERROR,
    seconds: float = SECONDS,
    progress: bool = False,
) -> HardwareProfile:
    """
    Measures links, matrix products, overlap and memory; collective over the ranks of the default process group.

    Measurements are repeated until the standard errors of their medians are small enough. One process alone has no
    links.

    Args:
        local_world_size (`int`, *optional*): Ranks of a node (LOCAL_WORLD_SIZE of a launcher); by default all ranks.
        device (`torch.device` or `str`, *optional*): Device of this rank; by default the current GPU if there is one
            and the group can use it, else the CPU.
        name (`str`, *optional*): Name of the cluster.
        sizes (`Sequence[int]`, *optional*): Message sizes in bytes; by default `SIZES`.
        repetitions (`int`, *optional*): Measurements of each; by default 3 to 9, until `accuracy` is reached.
        accuracy (`float`, defaults to 0.05): Wanted relative standard error of the medians: of each matrix product
            and of overlap by itself, of links on average.
        seconds (`float`, defaults to 40): Approximate upper bound of the time for links.
        progress (`bool`, defaults to `False`): Whether rank 0 shows what is measured.

    Returns:
        [`HardwareProfile`]: The profile, the same on every rank.

    Raises:
        ValueError: If ranks do not fill nodes, if sizes or repetitions measure nothing or do not fit the memory, or if
            `accuracy` is not positive.
    """
    begun = time.perf_counter()
    device = torch.device(device) if device is not None else default_device()
    if device.type == "cpu":
        keep_freed_memory()  # as in training: otherwise long messages include the time of their new pages
    nodes, devices_per_node = nodes_of(local_world_size)
    memory_bytes = min(gather_objects(device_memory_bytes(device, devices_per_node)))
    check_number("accuracy", accuracy, positive=True)
    sweep = _sweep(device, memory_bytes, sizes, repetitions, accuracy, seconds)
    measured = _measured(device, sweep, nodes, devices_per_node, progress)
    slowdowns = measured.pop("slowdowns")
    made = machine(device) | accuracy_text(accuracy) | _measurement(begun, str(sweep), slowdowns)
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


@dataclass(frozen=True, kw_only=True)
class _Sweep:
    """Holds message sizes in bytes, a measurement's duration, the wanted accuracy, and a time limit for links."""

    sizes: tuple[int, ...]
    accuracy: Accuracy
    window_ms: float
    seconds: float

    def __str__(self) -> str:
        sizes, rounds = ", ".join(map(str, self.sizes)), f"{self.accuracy.least} to {self.accuracy.most}"
        return f"{rounds} x {sizes} bytes at most, up to {self.window_ms:g} ms each"


def _sweep(
    device: torch.device,
    memory_bytes: int,
    sizes: Sequence[int] | None,
    repetitions: int | None,
    accuracy: float,
    seconds: float,
) -> _Sweep:
    """Returns the sweep for a device with the caller's settings; collective."""
    sizes = tuple(sizes) if sizes is not None else SIZES[device.type]
    least, most = _ROUNDS if repetitions is None else (repetitions, repetitions)
    _check_sweep(sizes, least, memory_bytes)
    wanted = Accuracy(error=accuracy, least=least, most=most)
    return _Sweep(sizes=sizes, accuracy=wanted, window_ms=window_ms(device), seconds=seconds)


def _measured(
    device: torch.device, sweep: _Sweep, nodes: int, devices_per_node: int, progress: bool
) -> dict[str, Any]:
    """Returns rates, links and the time of a step's small messages by their names in a profile, and `slowdowns`."""
    accuracy, window, world_size = sweep.accuracy, sweep.window_ms, nodes * devices_per_node
    trials = count_trials(world_size, devices_per_node, sweep.sizes)
    # Seconds of a round: of links, and of two kinds of products and overlap, which `seconds` does not limit.
    links_once = 1e-3 * trials * _TRIAL_WINDOWS * window
    others_once = 1e-3 * (4 * window + (world_size > 1) * 10 * max(window, _OVERLAP_MS))
    at_least = (1 + accuracy.least) * (links_once + others_once)
    at_most = min((1 + accuracy.most) * links_once, sweep.seconds) + (1 + accuracy.most) * others_once
    steps = 2 + accuracy.least + count_steps(world_size, devices_per_node, sweep.sizes, accuracy.least)
    with (
        phase("links, matrix products and memory", at_least, at_most, progress),
        progress_bar(steps, progress and is_rank_0()) as step,
    ):
        found = {"flops_per_s": measure_flops(device, accuracy, window, step), "links": (), "slowdowns": {}}
        if world_size > 1:
            found["slowdowns"] = measure_overlap(device, accuracy, max(window, _OVERLAP_MS), step)
            found["step_ms"] = measure_step(device, accuracy.least)
            sizes, seconds = sweep.sizes, sweep.seconds
            found["links"] = measure_links(device, devices_per_node, sizes, accuracy, window, seconds, step)
    return found


def accuracy_text(accuracy: float) -> dict[str, str]:
    """Returns the wanted accuracy for a profile's `made`."""
    return {"accuracy": f"{100 * accuracy:g}%"}


def percent(text: str) -> float:
    """Returns the number in a text of [`accuracy_text`]; raises `ValueError` for any other text."""
    return float(text.removesuffix("%"))


def machine(device: torch.device) -> dict[str, str]:
    """Returns the identity of the machine and the way of measuring, for a profile's `made`; collective."""
    ranks = gather_objects(identity(device))
    merged = {f"{name}s": ", ".join(sorted({rank.pop(name) for rank in ranks})) for name in ("host", "device")}
    for name in ranks[0]:
        merged[name] = ", ".join(sorted({rank[name] for rank in ranks}))
    return merged | {"backend": _backend(device), "method": METHOD}


def _measurement(begun: float, sweep: str, slowdowns: Mapping[str, float]) -> dict[str, str]:
    """Returns when, how long and how the machine was measured, and the slow-downs, as texts."""
    return {
        **{f"slowdown of {what}": f"{much:.3f}" for what, much in slowdowns.items() if what != "exposed"},
        "sweep": sweep,
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "seconds": f"{time.perf_counter() - begun:.1f}",
    }


def nodes_of(local_world_size: int | None) -> tuple[int, int]:
    """Returns the numbers of nodes and of ranks on each; raises `ValueError` if the ranks do not fill nodes."""
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    local_world_size = world_size if local_world_size is None else local_world_size
    if local_world_size < 1 or world_size % local_world_size:
        raise ValueError(
            f"local_world_size={local_world_size} does not divide {world_size} ranks; use nodes with equal numbers of "
            "ranks."
        )
    return world_size // local_world_size, local_world_size


def _check_sweep(sizes: Sequence[int], repetitions: int, memory_bytes: int) -> None:
    if not sizes or any(type(size) is not int or size < 1 for size in sizes) or len(set(sizes)) < 2:
        raise ValueError(f"sizes={list(sizes)}: a fit needs two different numbers of bytes; give them.")
    if max(sizes) > memory_bytes:
        raise ValueError(f"sizes={list(sizes)}: a device has {memory_bytes} bytes; give messages that fit.")
    if repetitions < 1:
        raise ValueError(f"repetitions={repetitions} measures nothing: give 1 or more.")


def default_device() -> torch.device:
    """Returns the current GPU if there is one and the process group can use it, else the CPU."""
    usable = torch.cuda.is_available() and (not dist.is_initialized() or "nccl" in dist.get_backend_config())
    return torch.device("cuda", torch.cuda.current_device()) if usable else torch.device("cpu")


def _backend(device: torch.device) -> str:
    """Returns the backend of a device: "gloo", "nccl", or "none" without a process group."""
    if not dist.is_initialized():
        return "none"
    by_device = dict(entry.split(":") for entry in dist.get_backend_config().split(",") if ":" in entry)
    return by_device.get(device.type, dist.get_backend())
