# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Gives each process a share of a core by a Linux control group (v1 or v2), so that it acts as a device of its own.

Without quotas, ranks that outnumber the cores use the time in which others wait, and waiting costs nothing.
"""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


ROOT = Path("/sys/fs/cgroup")


class QuotaError(RuntimeError):
    """No group with a quota can be made; the message is the reason."""


@dataclass(frozen=True, kw_only=True)
class CpuQuota:
    """An existing control group.

    Attributes:
        folder (`Path`): folder of the group.
        share (`float`): share of one core.
    """

    folder: Path
    share: float

    @classmethod
    def make(cls, name: str, share: float, period_ms: float, root: Path = ROOT) -> "CpuQuota":
        """
        Makes a group of processes that get `share` of a core in every period, with priority over all others.

        Args:
            name (`str`): name of the group.
            share (`float`): of one core.
            period_ms (`float`): period of the quota; the kernel requires at least 1 ms of CPU time in each.
            root (`Path`, *optional*): mount point of control groups.

        Raises:
            QuotaError: if the kernel has no such groups, or this user may not make them.
        """
        period, quota = round(1e3 * period_ms), round(1e3 * period_ms * share)
        version, parent = _mounted(root)
        folder = parent / name
        try:
            if version == 2:
                _give_children_cpu(parent)
            folder.mkdir()
        except OSError as error:
            raise QuotaError(
                f"A control group cannot be made in {parent} ({error.strerror}); run as root on a machine, or in a "
                "container, whose control groups are writable."
            ) from None
        group = cls(folder=folder, share=share)
        try:
            if version == 2:
                (folder / "cpu.max").write_text(f"{quota} {period}")
                (folder / "cpu.weight").write_text("10000")
            else:
                (folder / "cpu.cfs_period_us").write_text(str(period))
                (folder / "cpu.cfs_quota_us").write_text(str(quota))
                (folder / "cpu.shares").write_text("262144")
        except OSError as error:
            group.remove()
            raise QuotaError(
                f"{folder} does not take {quota} of every {period} microseconds of CPU time ({error.strerror}); use a "
                "longer period, or a kernel with CPU bandwidth control."
            ) from None
        return group

    def enter(self) -> None:
        """Moves this process with all its threads into the group."""
        (self.folder / "cgroup.procs").write_text(str(os.getpid()))

    def remove(self) -> None:
        """Removes the group, and ends the processes in it."""
        for _ in range(100):
            try:
                self.folder.rmdir()
                return
            except FileNotFoundError:
                return
            except OSError:  # somebody is in it
                with contextlib.suppress(OSError):
                    for process in (self.folder / "cgroup.procs").read_text().split():
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(int(process), signal.SIGKILL)
                time.sleep(0.05)
        raise QuotaError(f"{self.folder} cannot be removed, because processes stay in it; end them and remove it.")


@contextlib.contextmanager
def cpu_quotas(name: str, count: int, share: float, period_ms: float, root: Path = ROOT) -> Iterator[list[CpuQuota]]:
    """Makes `count` groups by [`CpuQuota.make`], and removes them after the body."""
    groups: list[CpuQuota] = []
    try:
        for index in range(count):
            groups.append(CpuQuota.make(f"{name}-{os.getpid()}-{index}", share, period_ms, root))
        yield groups
    finally:
        for group in groups:
            group.remove()


def _mounted(root: Path) -> tuple[int, Path]:
    """Returns the version of the control groups that limit CPU time, and the folder of new ones."""
    for controller in ("cpu", "cpu,cpuacct"):
        if (root / controller / "cgroup.procs").exists():
            return 1, root / controller
    controllers = root / "cgroup.controllers"
    if controllers.exists() and "cpu" in controllers.read_text().split():
        return 2, root
    raise QuotaError(f"{root} has no CPU control groups of version 1 or 2; run on Linux with one of them mounted.")


def _give_children_cpu(parent: Path) -> None:
    handed_down = parent / "cgroup.subtree_control"
    if "cpu" not in handed_down.read_text().split():
        handed_down.write_text("+cpu")


@dataclass(frozen=True, kw_only=True)
class MachineTime:
    """CPU seconds of the whole machine since its start.

    Attributes:
        busy (`float`): CPU seconds in use, including those taken by a hypervisor for other machines.
        wall (`float`): wall-clock seconds.
    """

    busy: float
    wall: float

    @classmethod
    def now(cls) -> "MachineTime":
        user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
        ticks = user + nice + system + irq + softirq + steal
        return cls(busy=ticks / os.sysconf("SC_CLK_TCK"), wall=time.monotonic())
