# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""`galvatron checkpoint`: inspects, verifies or exports a checkpoint."""

from __future__ import annotations

import argparse
import math
import os
import re
from pathlib import Path

from rich.console import Console
from rich.table import Table

from galvatron_hf.checkpoint.folder import STATE_FOLDER, by_step, left_behind, problems, structural_problems
from galvatron_hf.checkpoint.manifest import Manifest


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `galvatron checkpoint`."""
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    verify = actions.add_parser("verify", help="check every file against the manifest's checksums")
    verify.add_argument("path", help="a checkpoint, or a folder of checkpoints")
    verify.set_defaults(run=run_verify)
    inspect = actions.add_parser("inspect", help="show the step, the plan, versions and sizes")
    inspect.add_argument("path", help="a checkpoint")
    inspect.set_defaults(run=run_inspect)
    export = actions.add_parser("export", help="write the weights as a folder for from_pretrained")
    export.add_argument("path", help="a checkpoint")
    export.add_argument("output", help="the folder to write; new or empty")
    export.add_argument("--max-shard-size", default="5GB", help="largest file (default: 5GB)")
    export.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    export.set_defaults(run=run_export)


def run_verify(given: argparse.Namespace) -> int:
    """Prints a line for each checkpoint and each problem; returns 1 after a problem, or if there is no checkpoint."""
    unfinished = {path: ["it was never completed"] for path in left_behind(given.path)}
    found = by_step(given.path)
    if not found and not unfinished:
        found = [Path(given.path)]
    wrong = {path: problems(path) for path in found} | unfinished
    for path, reasons in wrong.items():
        if not reasons:
            files = Manifest.read(path).files
            size = sum(entry.size for entry in files.values())
            print(f"{path}: complete, {len(files)} files, {size} bytes, all checksums right")
        for reason in reasons:
            print(f"{path}: {reason}")
    return int(any(wrong.values()))


def run_inspect(given: argparse.Namespace) -> int:
    """Prints the contents of the manifest and of the files' headers; reads no tensor."""
    wrong = list(structural_problems(given.path))
    if wrong:
        raise ValueError(f"{given.path} is not a complete checkpoint ({wrong[0]}): give another one")
    from galvatron_hf.parallel.weights.distributed_state import stored_tensors
    from galvatron_hf.plan import ParallelPlan
    from galvatron_hf.plan.table import plan_table

    manifest = Manifest.read(given.path)
    console = Console(soft_wrap=True)
    console.print(f"step {manifest.step}, written by " + ", ".join(f"{n} {v}" for n, v in manifest.versions.items()))
    table = Table("what", "tensors", "numbers", "bytes", "types")
    state = os.path.join(given.path, STATE_FOLDER)
    if os.path.isdir(state):
        kinds: dict[str, list] = {}
        for name, stored in stored_tensors(state).items():
            kinds.setdefault(_kind(name), []).append(stored)
        for kind, tensors in kinds.items():
            numbers = [math.prod(tensor.size) for tensor in tensors]
            types = [tensor.properties.dtype for tensor in tensors]
            size = sum(number * dtype.itemsize for number, dtype in zip(numbers, types, strict=True))
            shown = ", ".join(sorted({str(dtype).removeprefix("torch.") for dtype in types}))
            table.add_row(kind, str(len(tensors)), str(sum(numbers)), str(size), shown)
    others = sum(entry.size for name, entry in manifest.files.items() if not name.startswith(f"{STATE_FOLDER}/"))
    table.add_row("other files", "", "", str(others), "")
    console.print(table)
    if manifest.plan is not None:
        console.print(plan_table(ParallelPlan.from_json(manifest.plan)))
    return 0


def _kind(name: str) -> str:
    """Returns "weights", or the optimizer's name for an entry."""
    return "weights" if name.startswith("model.") else re.sub(r"^(optimizer\.[^.]*)\..*", r"\1", name)


def run_export(given: argparse.Namespace) -> int:
    """Writes a Hugging Face folder; the weights of one file are in memory at a time."""
    from galvatron_hf.parallel.weights.export import export

    export(given.path, given.output, max_shard_size=given.max_shard_size, dtype=given.dtype)
    print(f"{given.output}: written, open it with from_pretrained")
    return 0
