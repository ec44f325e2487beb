# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""`galvatron profile-model`: measures, or counts, what the layers and the ends of a model cost."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from galvatron_hf.cli.files import output_file
from galvatron_hf.cli.profile_hardware import launched_ranks
from galvatron_hf.plan.validation import check_int


if TYPE_CHECKING:
    from galvatron_hf.profiler.profiles.layers import Times
    from galvatron_hf.profiler.profiles.model import ModelProfile


def add_to(commands: argparse._SubParsersAction) -> None:
    """Adds the command to a parser."""
    parser = commands.add_parser(
        "profile-model",
        help="measure forward, backward and memory of a model's layers on this machine",
        description="Measure the layers and the ends of a model. Weights are not read. Launch it like training, so "
        "that ranks measure at the same time; by itself it measures one process. With --cluster nothing is measured: "
        "work and memory are counted, for devices that need not be there.",
    )
    parser.add_argument("--model", required=True, metavar="PATH", help="a folder with a config.json, or such a file")
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        help='what is measured, "cpu" or "cuda" (default: the GPU if there is one)',
    )
    parser.add_argument("--cluster", metavar="NAME", help="count for this device instead, such as h100")
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "fp32"), help="of computing (default: bf16)")
    parser.add_argument("--tokens", type=int, metavar="N", help="of the largest micro-batch (default: 2048)")
    parser.add_argument("--seq-length", type=int, metavar="N", help="of the longest document (default: as --tokens)")
    parser.add_argument("--rows", action="store_true", help="rows without padding instead of packed documents")
    parser.add_argument(
        "--max-degree",
        type=int,
        metavar="N",
        help="most tensor and Ulysses ranks (default: the world, or 64 with --cluster)",
    )
    parser.add_argument("--seconds", type=float, metavar="S", help="to measure for (default: 30)")
    parser.add_argument("--output", type=output_file, metavar="FILE", help="write the profile here, as JSON")
    parser.add_argument("--json", action="store_true", help="print the profile as JSON and not as tables")
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    """Measures on every rank, or counts; rank 0 prints, and writes if asked to."""
    for name in ("tokens", "seq_length", "max_degree"):
        if getattr(given, name) is not None:
            check_int(f"--{name.replace('_', '-')}", getattr(given, name), high=sys.maxsize)
    for name in ("device", "seconds") if given.cluster is not None else ():
        if getattr(given, name) is not None:
            raise ValueError(f"--{name} says how to measure, with --cluster nothing is measured: give one of them.")
    with launched_ranks(cpu=given.device == "cpu") as (rank, _):
        profile = _counted(given) if given.cluster is not None else _measured(given)
        if rank == 0:
            if given.output is not None:
                profile.to_json(given.output)
            if given.json:
                print(profile.to_json(), end="")
            else:
                show(profile)
    return 0


def _counted(given: argparse.Namespace) -> ModelProfile:
    from galvatron_hf.profiler.profiles.presets import hardware_preset
    from galvatron_hf.profiler.trace.tracing import profile_from_config
    from galvatron_hf.utils.progress import at_work

    with at_work("tracing the model"):
        return profile_from_config(
            given.model,
            hardware_preset(given.cluster, 1, 1),
            given.dtype,
            length=given.seq_length or given.tokens,
            packed=not given.rows,
            **_given(given, "max_degree"),
        )


def _measured(given: argparse.Namespace) -> ModelProfile:
    import torch

    from galvatron_hf.profiler.measure.model import profile_model
    from galvatron_hf.profiler.trace.isolated_layers import empty_model
    from galvatron_hf.profiler.trace.tracing import read_config

    if given.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda, but PyTorch finds no GPU here: give --device cpu, or --cluster to count.")
    return profile_model(
        empty_model(read_config(given.model)),
        dtype=given.dtype,
        device=given.device,
        tokens=given.tokens,
        length=given.seq_length,
        packed=not given.rows,
        progress=True,
        **_given(given, "max_degree", "seconds"),
    )


def _given(given: argparse.Namespace, *names: str) -> dict[str, Any]:
    """What was said of these, so that a function's own defaults stand for the rest."""
    return {name: getattr(given, name) for name in names if getattr(given, name) is not None}


def show(profile: ModelProfile) -> None:
    """Prints a profile for people."""
    console = Console(soft_wrap=True, highlight=False)
    console.print(
        f"{profile.name}, {profile.dtype}: {len(profile.layers)} layers, of {len(profile.kinds)} kinds", markup=False
    )
    table = Table("part", "tensor", "forward ms", "backward ms", "fit errors", "kept KiB/token")
    for column in table.columns:
        column.no_wrap = True
        column.justify = "left" if column is table.columns[0] else "right"
    for index, kind in enumerate(profile.kinds):
        saved = {tensor: kind.saved_bytes.get((tensor, tensor > 1, 1)) for tensor in kind.times}
        _rows(table, f"layer {index}", kind.times, saved)
    _rows(table, "embedding", profile.embedding.times, profile.embedding.saved_bytes)
    _rows(table, "head, loss", profile.head.times, profile.head.saved_bytes)
    console.print(table)
    console.print("times of one document of 1,024 tokens; what tensor ranks keep is that under Megatron-SP")
    console.print(f"AdamW: {1e9 * profile.optimizer_ms_per_element:.3g} ms for 10^9 elements of a rank")
    for name, source in profile.assumed.items():
        console.print(f"assumed, {name}: {source}", markup=False)
    console.print(", ".join(f"{name} {value}" for name, value in profile.made.items()), markup=False)


def _rows(table: Table, part: str, times: dict[int, Times], saved: dict[int, float | None]) -> None:
    for tensor, each in times.items():
        fits = each.forward, each.backward
        kept = saved.get(tensor)
        table.add_row(
            part,
            str(tensor),
            *(f"{fit.ms(1024, 1024**2):.3g}" for fit in fits),
            ", ".join(f"{fit.error:.1%}" for fit in fits),
            "" if kept is None else f"{kept / 1024:.2f}",
        )
