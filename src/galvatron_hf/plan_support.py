# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Which possible plans this release runs, and what to use instead of the others."""

from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from .plan import ParallelPlan


def unsupported(plan: "ParallelPlan") -> list[str]:
    """One sentence per feature of `plan` that does not run in this release, with the nearest plan that does."""
    return [
        sentence for check in (_stages, _context, _expert, _sequence_groups, _precision) for sentence in check(plan)
    ]


def require_runnable(plan: "ParallelPlan", world_size: int) -> None:
    """Raises `ValueError` when `plan` cannot run on `world_size` started processes."""
    if world_size != plan.world_size:
        raise ValueError(
            f"the plan has world_size={plan.world_size}, but {world_size} "
            f"{'process was' if world_size == 1 else 'processes were'} started: launch with `accelerate launch "
            f"--num_processes {plan.world_size}` or `torchrun --nproc_per_node {plan.world_size}`, or give a plan "
            f"with world_size={world_size}"
        )
    for sentence in unsupported(plan):
        raise ValueError(sentence)


def _stages(plan: "ParallelPlan") -> list[str]:
    if len(plan.stages) == 1:
        return []
    sizes = sorted({len(stage.ranks) for stage in plan.stages})
    found = [
        f"stages lists {len(plan.stages)} pipeline stages, which do not run yet: use one stage with all "
        f"{plan.world_size} ranks and layers [0, {plan.num_layers}]"
    ]
    if len(sizes) > 1:
        found.append(
            f"stages have {' and '.join(map(str, sizes))} ranks, and stages of unequal size do not run yet: use one "
            f"stage with all {plan.world_size} ranks"
        )
    return found


def _context(plan: "ParallelPlan") -> list[str]:
    for index, layer in enumerate(plan.layers):
        if layer.context > 1:
            fix = f"ulysses={layer.ulysses * layer.context} and context=1"
            return [f"layer {index} has context={layer.context}, and context parallelism does not run yet: use {fix}"]
    return []


def _expert(plan: "ParallelPlan") -> list[str]:
    for index, layer in enumerate(plan.layers):
        if layer.expert > 1:
            return [
                f"layer {index} has expert={layer.expert}, and expert parallelism does not run yet: use expert=1 with "
                "sharding 'zero3'"
            ]
    return []


def _sequence_groups(plan: "ParallelPlan") -> list[str]:
    if plan.sequence_groups is None:
        return []
    return ["sequence_groups is given, and groups chosen per micro-batch do not run yet: use sequence_groups=null"]


def _precision(plan: "ParallelPlan") -> list[str]:
    if plan.precision is None or "fp16" not in (plan.precision.compute, plan.precision.reduce):
        return []
    return ["precision names fp16, and the loss scaling that it needs does not run yet: use 'bf16'"]
