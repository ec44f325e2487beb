# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""`galvatron profile-hardware`: measures links, matrix products and memory of the machines on which it is launched."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from galvatron_hf.cli.output import output_file


if TYPE_CHECKING:
    from galvatron_hf.profiler.profiles.hardware import HardwareProfile, Link

_UNITS = {"": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `galvatron profile-hardware`."""
    parser.description = (
        "Measure links, matrix products and memory. Launch it like training, for example with "
        "`torchrun --nproc_per_node 4 --no-python galvatron profile-hardware`; by itself it measures one process."
    )
    parser.add_argument("--output", type=output_file, metavar="FILE", help="write the profile to this file, as JSON")
    parser.add_argument("--json", action="store_true", help="print the profile as JSON instead of a table")
    parser.add_argument("--sizes", metavar="SIZE,...", help="message sizes to time, such as 64KiB,1MiB,16MiB")
    parser.add_argument(
        "--repetitions",
        type=int,
        metavar="N",
        help="number of measurements of each (default: 3 to 9, until --accuracy is reached)",
    )
    add_accuracy(parser)
    parser.add_argument(
        "--seconds", type=float, metavar="S", default=40.0, help="most seconds for timing links (default: 40)"
    )
    parser.add_argument("--name", help="of the cluster (default: its size and devices)")
    parser.add_argument("--cpu", action="store_true", help="measure the CPU and gloo where there are GPUs")
    parser.set_defaults(run=run)


def add_accuracy(parser: argparse.ArgumentParser) -> None:
    """Adds the argument for the accuracy at which measuring ends."""
    parser.add_argument(
        "--accuracy",
        type=float,
        metavar="E",
        help="wanted accuracy: repeat until the relative error is at most E, or to a limit (default: 0.05)",
    )


def run(given: argparse.Namespace) -> int:
    """Measures on every rank; rank 0 prints the profile and writes it to --output."""
    sizes = message_sizes(given.sizes) if given.sizes is not None else None
    from galvatron_hf.profiler.measure.hardware import profile_hardware

    with launched_ranks(cpu=given.cpu) as (rank, local_world_size):
        profile = profile_hardware(
            local_world_size=local_world_size,
            device="cpu" if given.cpu else None,
            name=given.name,
            sizes=sizes,
            repetitions=given.repetitions,
            seconds=given.seconds,
            progress=True,
            **given_options(given, "accuracy"),
        )
        if rank == 0:
            if given.output is not None:
                profile.to_json(given.output)
            if given.json:
                print(profile.to_json(), end="")
            else:
                show(profile)
    return 0


def given_options(given: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Returns those of the arguments that were given, so that the function's defaults apply to the others."""
    return {name: getattr(given, name) for name in names if getattr(given, name) is not None}


@contextlib.contextmanager
def launched_ranks(*, cpu: bool) -> Iterator[tuple[int, int]]:
    """Yields this rank and the ranks of its node, inside a process group if several processes were launched."""
    import torch
    import torch.distributed as dist

    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        yield 0, 1
        return
    if torch.cuda.is_available() and not cpu:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    try:
        yield dist.get_rank(), int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    finally:
        dist.destroy_process_group()


def message_sizes(text: str) -> list[int]:
    """Returns the bytes of each size in a text such as `64KiB,1MiB`."""
    sizes = []
    for word in text.split(","):
        found = re.fullmatch(r"\s*(\d+)\s*([KMG]iB)?\s*", word, re.IGNORECASE)
        if found is None:
            raise ValueError(f"sizes={text!r} has {word!r}, which is not a number of bytes: write it as 64KiB,1MiB")
        sizes.append(int(found[1]) * _UNITS[(found[2] or "").upper()])
    return sizes


def show(profile: HardwareProfile) -> None:
    """Prints a hardware profile as tables."""
    console = Console(soft_wrap=True, highlight=False)
    console.print(profile.name, markup=False)
    console.print(f"memory of a device: {profile.memory_bytes / 2**30:.1f} GiB")
    for name, rate in profile.flops_per_s.items():
        console.print(f"matrix products, {name}: {rate / 1e12:.3f} TFLOP/s")
    slowdowns = [
        f"{name[len('slowdown of ') :]} {profile.made[name]} times" for name in profile.made if "slowdown" in name
    ]
    if slowdowns:
        console.print("time while the other runs, relative to the time alone: " + ", ".join(slowdowns))
    if profile.links:
        console.print(_links_table(profile.links))
    for name, source in profile.assumed.items():
        console.print(f"assumed, {name}: {source}", markup=False)
    console.print(", ".join(f"{name} {value}" for name, value in profile.made.items()), markup=False)


def _links_table(links: tuple[Link, ...]) -> Table:
    table = Table("collective", "ranks", "stride", "latency ms", "GB/s", "error of fit")
    for column in table.columns[1:]:
        column.justify = "right"
    for column in table.columns:
        column.no_wrap = True
    for link in links:
        table.add_row(
            link.kind,
            str(link.ranks),
            str(link.stride),
            f"{link.latency_ms:.3f}",
            f"{link.bytes_per_s / 1e9:.2f}",
            f"{link.error:.1%}" if link.points else "",
        )
    return table
