# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""`galvatron profile-model`: measures or counts the cost of a model's layers, embedding and head."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from galvatron_hf.cli.output import output_file
from galvatron_hf.cli.profile_hardware import add_accuracy, given_options, launched_ranks
from galvatron_hf.plan.validation import check_int


if TYPE_CHECKING:
    from galvatron_hf.profiler.profiles.layers import Times
    from galvatron_hf.profiler.profiles.model import ModelProfile


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `galvatron profile-model`."""
    parser.description = (
        "Measure the layers, the embedding and the head of a model. Weights are not read. Launch it like training, so "
        "that ranks measure at the same time; by itself it measures one process. With --cluster nothing is measured: "
        "work and memory are counted for the devices of the preset."
    )
    parser.add_argument(
        "--model",
        required=True,
        metavar="PATH",
        help="a folder with a config.json, such a file, or the id of a model on the Hub",
    )
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        help="the device to measure (default: the GPU if there is one)",
    )
    parser.add_argument("--cluster", metavar="NAME", help="count for this preset instead of measuring, such as h100")
    parser.add_argument(
        "--dtype", default="bf16", choices=("bf16", "fp32"), help="number format of compute (default: bf16)"
    )
    parser.add_argument("--tokens", type=int, metavar="N", help="tokens of the largest micro-batch (default: 2048)")
    parser.add_argument(
        "--seq-length", type=int, metavar="N", help="tokens of the longest document (default: that of --tokens)"
    )
    parser.add_argument(
        "--target-length",
        type=int,
        metavar="N",
        help="tokens of a row in the decoder of a model with an encoder too (default: those of --seq-length)",
    )
    parser.add_argument("--rows", action="store_true", help="measure rows without padding instead of packed documents")
    parser.add_argument(
        "--max-degree",
        type=int,
        metavar="N",
        help="largest tensor and Ulysses degree (default: all ranks, or 64 with --cluster)",
    )
    add_accuracy(parser)
    parser.add_argument("--seconds", type=float, metavar="S", help="most seconds of measuring (default: 30)")
    parser.add_argument("--output", type=output_file, metavar="FILE", help="write the profile to this file, as JSON")
    parser.add_argument("--json", action="store_true", help="print the profile as JSON instead of tables")
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    """Measures on every rank, or counts; rank 0 prints the profile and writes it to --output."""
    for name in ("tokens", "seq_length", "target_length", "max_degree"):
        if getattr(given, name) is not None:
            check_int(f"--{name.replace('_', '-')}", getattr(given, name), high=sys.maxsize)
    for name in ("device", "accuracy", "seconds") if given.cluster is not None else ():
        if getattr(given, name) is not None:
            raise ValueError(f"--{name} applies to measuring, and --cluster measures nothing: leave out one of them.")
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
            target_length=given.target_length,
            packed=not given.rows,
            **given_options(given, "max_degree"),
        )


def _measured(given: argparse.Namespace) -> ModelProfile:
    import torch

    from galvatron_hf.profiler.measure.model import profile_model
    from galvatron_hf.profiler.trace.small_models import empty_model
    from galvatron_hf.profiler.trace.tracing import read_config

    if given.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device is cuda, but PyTorch finds no GPU: use --device cpu, or --cluster to count.")
    return profile_model(
        empty_model(read_config(given.model)),
        dtype=given.dtype,
        device=given.device,
        tokens=given.tokens,
        length=given.seq_length,
        target_length=given.target_length,
        packed=not given.rows,
        progress=True,
        **given_options(given, "max_degree", "accuracy", "seconds"),
    )


def show(profile: ModelProfile) -> None:
    """Prints a model profile as a table."""
    console = Console(soft_wrap=True, highlight=False)
    console.print(
        f"{profile.name}, {profile.dtype}: {len(profile.layers)} layers of {len(profile.kinds)} kinds", markup=False
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
    console.print("times are for one document of 1,024 tokens; kept bytes of tensor ranks are under Megatron-SP")
    console.print(f"AdamW: {1e9 * profile.optimizer_ms_per_element:.3g} ms per 10^9 elements of a rank")
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
