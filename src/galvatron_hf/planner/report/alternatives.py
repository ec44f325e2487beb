# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Finds the best settings of well-known plans that people use without a search, for comparison."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from galvatron_hf.planner.cost.cost_model import CostModels
from galvatron_hf.planner.cost.workload import Workload
from galvatron_hf.planner.estimate import Estimate
from galvatron_hf.planner.search import search_plan
from galvatron_hf.planner.space import Limits
from galvatron_hf.profiler.profiles.hardware import HardwareProfile
from galvatron_hf.profiler.profiles.model import ModelProfile


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """Holds the best plan of one kind that fits, or else None and the smallest budget with which one does, unless the
    search was stopped.
    """

    name: str
    best: Estimate | None
    least_memory_bytes: int | None


class _Interrupted(Exception):
    """Ends a search at once, without a result."""


def alternatives(
    hardware: HardwareProfile,
    model: ModelProfile,
    workload: Workload,
    *,
    memory_bytes: int,
    virtual_stages: int = Limits.virtual_stages,
    progress: bool = False,
    stop: Callable[[], bool] | None = None,
    costs: CostModels | None = None,
    interrupted: Callable[[], bool] = lambda: False,
) -> list[Alternative]:
    """Searches DDP, ZeRO-3, Megatron's tensor and pipeline parallelism, ZeRO-3 with Ulysses, and the best uniform
    plan. Each has its best micro-batches and recompute within `memory_bytes` of a rank, and at most `virtual_stages`
    stages on each pipeline rank. A kind whose degrees the model and the ranks cannot have is left out. `stop` and
    `costs` are those of [`search_plan`]. As soon as `interrupted` returns True, the kind at hand and those after it
    are left out: a search that was only stopped would go on for a plan of a small part of the space.
    """

    def ends() -> bool:
        if interrupted():
            raise _Interrupted
        return stop is not None and stop()

    plain = Limits(tensor=1, sequence=(), hybrid_sharding=False, pipeline=(1,), context=(1,))
    megatron = Limits(
        sequence=("megatron",),
        sharding=("replicate",),
        hybrid_sharding=False,
        context=(1,),
        virtual_stages=virtual_stages,
    )
    kinds = {
        "DDP": replace(plain, sharding=("replicate",)),
        "ZeRO-3": replace(plain, sharding=("zero3",)),
        "Megatron TP + PP": megatron,
        "ZeRO-3 + Ulysses": replace(plain, sequence=("ulysses",), sharding=("zero3",)),
        "one for all layers": Limits(uniform=True, virtual_stages=virtual_stages),
    }
    costs, found = costs or CostModels(hardware, model, workload), []
    for name, limits in kinds.items():
        if interrupted():
            break
        try:
            result = search_plan(
                hardware,
                model,
                workload,
                memory_bytes=memory_bytes,
                limits=limits,
                progress=progress,
                stop=ends,
                costs=costs,
            )
        except ValueError:
            continue
        except _Interrupted:
            break
        found.append(Alternative(name=name, best=result.best, least_memory_bytes=result.least_memory_bytes))
    return found
