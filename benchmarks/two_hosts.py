# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Two hosts with a slow link between them on one Linux machine: network namespaces and a throttled veth pair."""

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cpu_quota import CpuQuota


CLONE_NEWNET = 0x40000000  # of <sched.h>


class HostError(RuntimeError):
    """Why no hosts can be made here, in one sentence."""


@dataclass(frozen=True, kw_only=True)
class HostSeat:
    """A rank's share of a core, on one of the hosts.

    Attributes:
        quota ([`CpuQuota`]): the share.
        host (`int`): 0 or 1.
        namespace, interface, address (`str`): of the host.
    """

    quota: CpuQuota
    host: int
    namespace: str
    interface: str
    address: str

    def enter(self) -> None:
        """Puts this process there; sockets that it opens from now on are the host's."""
        self.quota.enter()
        descriptor = os.open(f"/run/netns/{self.namespace}", os.O_RDONLY)
        try:
            if ctypes.CDLL(None, use_errno=True).setns(descriptor, CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"setns {self.namespace}")
        finally:
            os.close(descriptor)
        os.environ["GLOO_SOCKET_IFNAME"] = self.interface


@contextlib.contextmanager
def two_hosts(quotas: Sequence[CpuQuota], mbit: float) -> Iterator[list[HostSeat]]:
    """
    Seats for as many ranks, the first half on one host; removed behind the body however it ends.

    Args:
        quotas (`Sequence[CpuQuota]`): of the ranks.
        mbit (`float`): megabits a second that the link carries each way.

    Raises:
        HostError: if this user may not make namespaces, or the tools for it are not there.
    """
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise HostError(f"Two hosts need the tools ip and tc, and {missing[0]} is not installed; install iproute2.")
    own = os.getpid() % 100_000
    names = [f"galvatron{own}-{host}" for host in range(2)]
    links = [f"gv{own}-{host}" for host in range(2)]
    network = f"10.{64 + own % 64}.{own // 64 % 250}"
    addresses = [f"{network}.{host + 1}" for host in range(2)]
    try:
        for name in names:
            _run("ip", "netns", "add", name)
        _run(
            "ip",
            "link",
            "add",
            links[0],
            "netns",
            names[0],
            "type",
            "veth",
            "peer",
            "name",
            links[1],
            "netns",
            names[1],
        )
        for name, link, address in zip(names, links, addresses, strict=True):
            inside = ("ip", "-n", name)
            _run(*inside, "addr", "add", f"{address}/24", "dev", link)
            _run(*inside, "link", "set", link, "up")
            _run(*inside, "link", "set", "lo", "up")
            shape = ("rate", f"{mbit:g}mbit", "burst", "256kb", "latency", "50ms")
            _run("tc", "-n", name, "qdisc", "add", "dev", link, "root", "tbf", *shape)
        half = len(quotas) // 2
        yield [
            HostSeat(quota=quota, host=host, namespace=names[host], interface=links[host], address=addresses[host])
            for host, quota in ((rank // half, quota) for rank, quota in enumerate(quotas))
        ]
    finally:
        for name in names:
            subprocess.run(("ip", "netns", "del", name), capture_output=True)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise HostError(
            f"Two hosts cannot be made here: {' '.join(command)} says {done.stderr.strip()!r}; run as root on Linux "
            "with network namespaces."
        )
