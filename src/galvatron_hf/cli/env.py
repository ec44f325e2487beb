# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""`galvatron env`: shows the versions, devices and launcher settings that a bug report needs."""

from __future__ import annotations

import argparse
import os
import platform
from typing import Any

from galvatron_hf.utils.versions import versions_of


PACKAGES = ("galvatron-hf", "torch", "transformers", "accelerate")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `galvatron env`."""
    parser.add_argument("--json", action="store_true", help="print them as JSON")
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    """Prints versions, devices and limits."""
    facts = environment()
    if given.json:
        from galvatron_hf.cli.output import json_text  # it imports the planner

        print(json_text(facts))
    else:
        for name, value in facts.items():
            print(f"- {name}: {', '.join(map(str, value)) if isinstance(value, list) else value}")
    return 0


def environment() -> dict[str, Any]:
    """Returns versions, devices, memory, backends and the launcher's ranks, or why torch is not imported."""
    facts = versions_of(PACKAGES)
    facts |= {"python": platform.python_version(), "platform": platform.platform()}
    try:
        import torch  # noqa: F401
    except Exception as error:  # a library is missing or of another version, as its text says
        return facts | {"torch cannot be imported": " ".join(f"{type(error).__name__}: {error}".split())}
    return facts | _devices()


def _devices() -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    from galvatron_hf.utils.machine import cpu_quota, device_memory_bytes, device_name, usable_cores

    cpu = torch.device("cpu")
    gpus = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    quota = cpu_quota()
    world, local = _setting("WORLD_SIZE"), _setting("LOCAL_WORLD_SIZE")
    return {
        "cpu": device_name(cpu),
        "cores": usable_cores(),
        "cpu quota": None if quota is None else quota[0],
        "threads": torch.get_num_threads(),
        "memory GiB": round(device_memory_bytes(cpu, 1) / 2**30, 1),
        "cuda": torch.version.cuda,
        "gpus": [f"{device_name(gpu)}, {device_memory_bytes(gpu, 1) / 2**30:.1f} GiB" for gpu in gpus],
        "gloo": dist.is_available() and dist.is_gloo_available(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if gpus and dist.is_nccl_available() else None,
        "world size": world,
        "ranks of this node": local,
        "nodes": world // local if isinstance(world, int) and isinstance(local, int) and local > 0 else None,
    }


def _setting(name: str) -> int | str:
    """Returns a number of the launcher, 1 without one; what is no number is shown as it is."""
    text = os.environ.get(name, "1")
    return int(text) if text.isdecimal() else text
