# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Emulates one or two hosts on one Linux machine: network namespaces, joined by a throttled veth pair.

A single host has a namespace too, for its TCP congestion control. BBR, the default of some machines, pauses a
connection for 0.2 s after ten busy seconds or after sleep, to measure its round trip. No interconnect of devices does
so. The namespace uses TCP Reno without a change to the machine.
"""

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cpu_quota import CpuQuota


CLONE_NEWNET = 0x40000000  # of <sched.h>
# Of a namespace's TCP: nothing that depends on how long a connection has stood still, and no connection that takes the
# port at which a rank will listen, which is one that was free outside.
TCP = {"tcp_congestion_control": "reno", "tcp_slow_start_after_idle": "0", "ip_local_port_range": "16384 32767"}


class HostError(RuntimeError):
    """No hosts can be made; the message is the reason."""


@dataclass(frozen=True, kw_only=True)
class HostSeat:
    """A rank's share of a core on one of the hosts.

    Attributes:
        quota ([`CpuQuota`]): share of a core.
        host (`int`): 0 or 1.
        namespace, interface, address (`str`): network of the host.
    """

    quota: CpuQuota
    host: int
    namespace: str
    interface: str
    address: str

    def enter(self) -> None:
        """Moves this process to the host; sockets that it opens later belong to the host."""
        self.quota.enter()
        descriptor = os.open(f"/run/netns/{self.namespace}", os.O_RDONLY)
        try:
            if ctypes.CDLL(None, use_errno=True).setns(descriptor, CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"setns {self.namespace}")
        finally:
            os.close(descriptor)
        os.environ["GLOO_SOCKET_IFNAME"] = self.interface


@contextlib.contextmanager
def one_host(quotas: Sequence[CpuQuota]) -> Iterator[list[HostSeat]]:
    """Makes the seats of ranks on one host, and removes them after the body.

    Args:
        quotas (`Sequence[CpuQuota]`): quotas of the ranks.

    Raises:
        HostError: if this user may not make namespaces, or the `ip` tool is missing.
    """
    with _namespaces(1, tools=("ip",)) as (name,):
        place = dict(host=0, namespace=name, interface="lo", address="127.0.0.1")
        yield [HostSeat(quota=quota, **place) for quota in quotas]


@contextlib.contextmanager
def two_hosts(quotas: Sequence[CpuQuota], mbit: float) -> Iterator[list[HostSeat]]:
    """Makes the seats of ranks on two hosts, half on each, and removes them after the body.

    Args:
        quotas (`Sequence[CpuQuota]`): quotas of the ranks.
        mbit (`float`): bandwidth of the link in each direction, in megabits/s.

    Raises:
        HostError: if this user may not make namespaces, or the tools `ip` and `tc` are missing.
    """
    own = os.getpid() % 100_000
    links = [f"gv{own}-{host}" for host in range(2)]
    network = f"10.{64 + own % 64}.{own // 64 % 250}"
    addresses = [f"{network}.{host + 1}" for host in range(2)]
    with _namespaces(2, tools=("ip", "tc")) as names:
        ends = [("netns", name) for name in names]
        _run("ip", "link", "add", links[0], *ends[0], "type", "veth", "peer", "name", links[1], *ends[1])
        for name, link, address in zip(names, links, addresses, strict=True):
            inside = ("ip", "-n", name)
            _run(*inside, "addr", "add", f"{address}/24", "dev", link)
            _run(*inside, "link", "set", link, "up")
            shape = ("rate", f"{mbit:g}mbit", "burst", "256kb", "latency", "50ms")
            _run("tc", "-n", name, "qdisc", "add", "dev", link, "root", "tbf", *shape)
        half = len(quotas) // 2
        yield [
            HostSeat(quota=quota, host=host, namespace=names[host], interface=links[host], address=addresses[host])
            for host, quota in ((rank // half, quota) for rank, quota in enumerate(quotas))
        ]


@contextlib.contextmanager
def _namespaces(count: int, tools: Sequence[str]) -> Iterator[list[str]]:
    """Makes network namespaces with a loopback and TCP Reno, and yields their names."""
    missing = [tool for tool in tools if shutil.which(tool) is None]
    if missing:
        raise HostError(
            f"Hosts need the tools {' and '.join(tools)}, and {missing[0]} is not installed; install iproute2."
        )
    names = [f"galvatron{os.getpid() % 100_000}-{host}" for host in range(count)]
    try:
        for name in names:
            _run("ip", "netns", "add", name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
            for setting, value in TCP.items():
                _run("ip", "netns", "exec", name, "sh", "-c", f"echo {value} > /proc/sys/net/ipv4/{setting}")
        yield names
    finally:
        for name in names:
            subprocess.run(("ip", "netns", "del", name), capture_output=True)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise HostError(
            f"Hosts cannot be made here: {' '.join(command)} says {done.stderr.strip()!r}; run as root on Linux with "
            "network namespaces."
        )
