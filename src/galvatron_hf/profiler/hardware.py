# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Measures the machine that the ranks are on."""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from galvatron_hf.profiler.compute import measure_flops, measure_overlap
from galvatron_hf.profiler.hardware_profile import HardwareProfile
from galvatron_hf.profiler.links import Step, count_steps, measure_links
from galvatron_hf.profiler.machine import cpu_quota, device_memory_bytes, identity


logger = logging.getLogger(__name__)

SIZES = {
    "cpu": (4 << 10, 32 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20),
    "cuda": (64 << 10, 512 << 10, 4 << 20, 16 << 20, 64 << 20, 256 << 20),
}
FILE_NAME = "hardware.json"
_WINDOW_MS = 10.0
_NUMBER_FORMATS = 2


def profile_hardware(
    *,
    local_world_size: int | None = None,
    device: torch.device | str | None = None,
    name: str | None = None,
    sizes: Sequence[int] | None = None,
    repetitions: int = 5,
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
        repetitions (`int`, defaults to 5): interleaved measurements, of which the median counts.
        progress (`bool`, defaults to `False`): whether rank 0 shows a bar.

    Returns:
        [`HardwareProfile`]: the same on every rank.

    Raises:
        ValueError: for ranks that do not fill nodes, and for sizes or repetitions that measure nothing.
    """
    begun = time.perf_counter()
    device = torch.device(device) if device is not None else _default_device()
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    local_world_size = local_world_size or world_size
    sizes = tuple(sizes) if sizes is not None else SIZES[device.type]
    _check_arguments(world_size, local_world_size, sizes, repetitions)
    # A group that may use half a core uses a whole one until its period's share is spent, and then stands still: only
    # what lasts as long as a period shows the rate that it keeps up.
    quotas = [quota for quota in _gathered(cpu_quota()) if quota is not None]
    window_ms = max([_WINDOW_MS, *(1e3 * period for share, period in quotas)])
    steps = _NUMBER_FORMATS
    if world_size > 1:
        steps += repetitions + count_steps(world_size, sizes, repetitions)
    links, slowdowns = (), None
    with progress_bar(steps, progress) as step:
        flops = measure_flops(device, repetitions, window_ms, step)
        if world_size > 1:
            slowdowns = measure_overlap(device, repetitions, 5 * window_ms, step)
            links = measure_links(device, sizes, repetitions, window_ms, step)
    memory_bytes = min(_gathered(device_memory_bytes(device, local_world_size)))
    made = machine(device)
    overlaps = slowdowns is not None and made["backend"] == "nccl"
    made |= {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "seconds": f"{time.perf_counter() - begun:.1f}",
        "sweep": f"{repetitions} x {', '.join(map(str, sizes))} bytes, {window_ms:g} ms each",
    }
    if slowdowns is not None:
        made |= {"slowdown of computing": f"{slowdowns[0]:.3f}", "slowdown of communicating": f"{slowdowns[1]:.3f}"}
    profile = HardwareProfile(
        name=name or f"{world_size // local_world_size} x {local_world_size} {made['devices']}",
        nodes=world_size // local_world_size,
        devices_per_node=local_world_size,
        memory_bytes=memory_bytes,
        flops_per_s=flops,
        links=links,
        overlap_slowdown=max(slowdowns) if overlaps else None,
        made=made,
    )
    return HardwareProfile.from_json(_from_rank_0(profile.to_json()))


def load_or_profile_hardware(folder: str | os.PathLike, **arguments: Any) -> HardwareProfile:
    """
    Reads `hardware.json` of a folder, or measures and writes it; collective as [`profile_hardware`] is.

    What was measured is read again only by a world of as many nodes and devices, on the same hosts, with the same
    devices, CPU limits and threads, backend, PyTorch and release of this package. Otherwise, and if the file is broken,
    a sentence in the log says why the machine is measured anew.

    Args:
        folder (`str` or `os.PathLike`): of rank 0, made if it is not there.
        **arguments: of [`profile_hardware`].
    """
    device = arguments.get("device")
    device = torch.device(device) if device is not None else _default_device()
    expected = machine(device)
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    local_world_size = arguments.get("local_world_size") or world_size
    path = Path(folder) / FILE_NAME
    text = None
    if _is_rank_0():
        expected_shape = world_size // local_world_size, local_world_size
        text = _usable(path, expected, expected_shape)
    text = _from_rank_0(text)
    if text is not None:
        return HardwareProfile.from_json(text)
    profile = profile_hardware(**arguments)
    if _is_rank_0():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            profile.to_json(path)
        except OSError as error:
            logger.warning(
                f"The hardware profile could not be kept in {path} ({error}): it is measured again next time."
            )
    return profile


def machine(device: torch.device) -> dict[str, str]:
    """What tells this machine from others, as a profile's `made` has it; collective, and the same on every rank."""
    ranks = _gathered(identity(device))
    merged = {f"{name}s": ", ".join(sorted({rank.pop(name) for rank in ranks})) for name in ("host", "device")}
    for name in ranks[0]:
        merged[name] = ", ".join(sorted({rank[name] for rank in ranks}))
    return merged | {"backend": _backend(device)}


def _usable(path: Path, expected: dict[str, str], shape: tuple[int, int]) -> str | None:
    """The text of a profile of this machine; None, and a warning if there is a file, when there is none."""
    if not path.exists():
        return None
    try:
        profile = HardwareProfile.from_json(path)
        found = {name: profile.made.get(name, "unknown") for name in expected}
        found |= {"nodes x devices": f"{profile.nodes} x {profile.devices_per_node}"}
        wanted = expected | {"nodes x devices": f"{shape[0]} x {shape[1]}"}
        different = [f"{name} {found[name]} and not {wanted[name]}" for name in wanted if found[name] != wanted[name]]
        reason = f"is of another machine ({'; '.join(different)})" if different else None
    except ValueError as error:
        reason = f"cannot be used ({error})"
    if reason is None:
        return profile.to_json()
    logger.warning(f"The hardware profile {path} {reason}: this machine is measured anew.")
    return None


def _check_arguments(world_size: int, local_world_size: int, sizes: Sequence[int], repetitions: int) -> None:
    if local_world_size < 1 or world_size % local_world_size:
        raise ValueError(
            f"local_world_size={local_world_size} does not divide {world_size} ranks: profile nodes that have equally "
            "many."
        )
    if not sizes or any(type(size) is not int or size < 1 for size in sizes) or len(set(sizes)) < 2:
        raise ValueError(f"sizes={list(sizes)}: a fit needs two different numbers of bytes or more; give them.")
    if repetitions < 1:
        raise ValueError(f"repetitions={repetitions} measures nothing: give 1 or more.")


def _default_device() -> torch.device:
    usable = torch.cuda.is_available() and (not dist.is_initialized() or "nccl" in dist.get_backend_config())
    return torch.device("cuda", torch.cuda.current_device()) if usable else torch.device("cpu")


def _backend(device: torch.device) -> str:
    """What carries the messages of a device: "gloo", "nccl", or "none" without a process group."""
    if not dist.is_initialized():
        return "none"
    by_device = dict(entry.split(":") for entry in dist.get_backend_config().split(",") if ":" in entry)
    return by_device.get(device.type, dist.get_backend())


def _is_rank_0() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _gathered(value: Any) -> list[Any]:
    """What every rank passes, by rank; collective."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _from_rank_0(value: Any) -> Any:
    """What rank 0 passes; collective."""
    if not dist.is_initialized():
        return value
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


@contextlib.contextmanager
def progress_bar(steps: int, shown: bool) -> Iterator[Step]:
    """What each step is told to; rank 0 draws a bar of them if it is to be shown."""
    if not (shown and _is_rank_0()):
        yield lambda what: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("profiling", total=steps)
        yield lambda what: bar.update(task, advance=1, description=what)
