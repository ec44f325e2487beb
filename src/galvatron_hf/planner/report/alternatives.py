# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""What people would have done without a search: well-known plans, each at its best, beside the one that was found."""

from __future__ import annotations

from dataclasses import dataclass, replace

from galvatron_hf.planner.cost.cost_model import Workload
from galvatron_hf.planner.search import Estimate, search_plan
from galvatron_hf.planner.space import Limits
from galvatron_hf.profiler.profiles.hardware import HardwareProfile
from galvatron_hf.profiler.profiles.model import ModelProfile


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """
    Attributes:
        name (`str`): as people call it.
        best ([`Estimate`], *optional*): the fastest plan of this kind that fits; None if none does.
        least_memory_bytes (`int`, *optional*): where none fits, what the one that needs least needs.
    """

    name: str
    best: Estimate | None
    least_memory_bytes: int | None


def alternatives(
    hardware: HardwareProfile,
    model: ModelProfile,
    workload: Workload,
    *,
    memory_bytes: int,
    rounds: int = Limits.rounds,
    progress: bool = False,
) -> list[Alternative]:
    """DDP, ZeRO-3 and Megatron's tensor and pipeline parallelism, each with the best micro-batches and recompute, and
    the best plan whose layers all have one strategy.

    A kind whose degrees this model and these ranks cannot have is left out. Pipelines have up to `rounds` interleaved
    stages on a rank list. With `progress` each search shows a bar.
    """
    plain = Limits(tensor=1, sequence=(), hybrid_sharding=False, pipeline=(1,))
    kinds = {
        "DDP": replace(plain, sharding=("replicate",)),
        "ZeRO-3": replace(plain, sharding=("zero3",)),
        "Megatron TP + PP": Limits(
            sequence=("megatron",), sharding=("replicate",), hybrid_sharding=False, rounds=rounds
        ),
        "ZeRO-3 + Ulysses": replace(plain, sequence=("ulysses",), sharding=("zero3",)),
        "one for all layers": Limits(alike=True, rounds=rounds),
    }
    found = []
    for name, limits in kinds.items():
        try:
            result = search_plan(
                hardware, model, workload, memory_bytes=memory_bytes, limits=limits, progress=progress
            )
        except ValueError:
            continue
        found.append(Alternative(name=name, best=result.best, least_memory_bytes=result.least_memory_bytes))
    return found
