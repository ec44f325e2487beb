# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""CPU and memory limits of a rank, and the identity of its machine."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Iterator
from pathlib import Path

import torch

from galvatron_hf.utils.versions import versions_of


_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")
_CPU_NAMES = Path("/proc/cpuinfo")


def device_memory_bytes(device: torch.device, ranks_of_node: int) -> int:
    """Returns the memory of a GPU, or a rank's equal share of the machine memory that this process may use."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([total, *memory_limits()]) // ranks_of_node


def device_name(device: torch.device) -> str:
    """Returns the name of the GPU or CPU model."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = _CPU_NAMES.read_text().splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def usable_cores() -> int:
    """Returns the number of cores that this process may run on."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        return os.cpu_count() or 1


def cpu_quota() -> tuple[float, float] | None:
    """Returns (CPU seconds per second, seconds of a period) of the control groups' limit; None without a limit."""
    limits = []
    for folder in _folders("cpu"):
        try:
            if (folder / "cpu.max").is_file():  # version 2: "50000 100000" or "max 100000"
                quota, period = (folder / "cpu.max").read_text().split()
            else:
                quota, period = ((folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
            if quota not in ("max", "-1"):
                limits.append((float(quota) / float(period), float(period) / 1e6))
        except (OSError, ValueError):  # the root group has no limit, or the kernel has another format
            continue
    return min(limits, default=None)


def memory_limits() -> list[int]:
    """Returns the memory limits of this process's control groups in bytes."""
    limits = []
    for folder in _folders("memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            try:
                limits.append(int((folder / name).read_text()))
            except (OSError, ValueError):  # no such file, or "max"
                continue
    return [limit for limit in limits if limit > 0]


def identity(device: torch.device) -> dict[str, str]:
    """Returns the facts on which measurements of this rank depend; a changed one means another machine."""
    quota = cpu_quota()
    return {
        "host": socket.gethostname(),
        "device": device_name(device),
        "cores": str(usable_cores()) + ("" if quota is None else f", of which {quota[0]:g}"),
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        "galvatron_hf": versions_of(["galvatron-hf"])["galvatron-hf"],
    }


def _folders(controller: str) -> Iterator[Path]:
    """Yields the visible control groups of this process, from its own upwards, of version 1 or 2."""
    try:
        lines = _OWN_CGROUPS.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            roots = [_CGROUPS, _CGROUPS / "unified"]
        elif controller in controllers.split(","):
            roots = [_CGROUPS / controllers, _CGROUPS / controller]
        else:
            continue
        for root in roots:
            folder = root / path.lstrip("/")
            yield from (above for above in (folder, *folder.parents) if above.is_relative_to(root) and above.is_dir())
