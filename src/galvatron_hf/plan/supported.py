# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Finds the parts of a plan that this release does not run, with their replacements."""

from typing import TYPE_CHECKING

from galvatron_hf.plan.pipeline_shape import PipelineShape, can_order
from galvatron_hf.plan.validation import nearest


if TYPE_CHECKING:
    from galvatron_hf.plan import ParallelPlan


def unsupported(plan: "ParallelPlan") -> list[str]:
    """Returns one sentence for each part of `plan` that does not run in this release, with the nearest that does."""
    return [sentence for check in (_stages, _shared_documents, _precision) for sentence in check(plan)]


def require_runnable(plan: "ParallelPlan", world_size: int) -> None:
    """Raises `ValueError` if `plan` cannot run on `world_size` started processes."""
    if world_size != plan.world_size:
        raise ValueError(
            f"the plan has world_size={plan.world_size}, but {world_size} "
            f"{'process was' if world_size == 1 else 'processes were'} started: launch with `accelerate launch "
            f"--num_processes {plan.world_size}` or `torchrun --nproc_per_node {plan.world_size}`, or give a plan "
            f"with world_size={world_size}"
        )
    for sentence in unsupported(plan):
        raise ValueError(sentence)


def require_compilable(plan: "ParallelPlan | None", backend: str, mode: str | None) -> None:
    """Raises `ValueError` if `torch.compile` with `backend` and `mode` cannot compile the layers under `plan`."""
    if backend == "cudagraphs" or mode in ("reduce-overhead", "max-autotune"):
        raise ValueError(
            f"torch.compile with {mode if backend == 'inductor' else backend!r} records CUDA graphs, which need "
            "weights at fixed addresses, and gathered weights have none: use mode 'default' or "
            "'max-autotune-no-cudagraphs'"
        )
    if plan is not None and plan.schedule == "zero_bubble" and len(plan.stages) > 1:
        raise ValueError(
            "schedule 'zero_bubble' computes the gradients of inputs and of weights at different times, and a "
            "compiled layer computes them together: use schedule '1f1b', or do not compile"
        )


def _stages(plan: "ParallelPlan") -> list[str]:
    if len(plan.stages) == 1:
        return []
    found = []
    sizes = sorted({len(stage.ranks) for stage in plan.stages})
    if len(sizes) > 1:
        found.append(
            f"stages have {' and '.join(map(str, sizes))} ranks, and stages of unequal size do not run yet: give each "
            f"{plan.world_size // len(plan.rank_groups) or 1}"
        )
    shape = PipelineShape.from_plan(plan)
    count = plan.micro_batch_count
    if not can_order(shape, count):
        fitting = nearest(count, [other for other in range(1, 2 * count) if can_order(shape, other)])
        found.append(
            f"micro_batches is {count}, which {plan.schedule!r} cannot order in equal rounds on "
            f"{shape.pipeline_ranks} pipeline ranks: use micro_batches={fitting}"
        )
    return found + _zero_bubble(plan)


def _zero_bubble(plan: "ParallelPlan") -> list[str]:
    """Finds zero3, which frees the weights before the separate backward of the weights needs them."""
    if plan.schedule != "zero_bubble":
        return []
    named = [(f"layer {index}", layer) for index, layer in enumerate(plan.layers)]
    for where, strategy in [*named, ("embedding", plan.embedding), ("head", plan.head)]:
        if strategy.sharding == "zero3":
            return [
                f"{where} has sharding 'zero3', which schedule 'zero_bubble' cannot run because it needs the weights "
                "after zero3 has freed them: use 'zero2', or schedule '1f1b'"
            ]
    return []


def _shared_documents(plan: "ParallelPlan") -> list[str]:
    """Finds layers of one context degree that need documents in blocks of different sizes: the deal of a degree is one
    for all its layers.
    """
    ranks = len(plan.stages[0].ranks)
    for context in sorted({layer.context for layer in plan.layers}):
        tokens = sorted({layer.token_degree(ranks) for layer in plan.layers if layer.context == context})
        if plan.shares_documents and len({layer.context for layer in plan.layers}) > 1 and len(tokens) > 1:
            return [
                f"layers have several context degrees, and those of context {context} have {tokens} groups of ranks "
                f"with different tokens: use one tensor and one Ulysses degree in the layers of context {context}, or "
                "one context degree"
            ]
    return []


def _precision(plan: "ParallelPlan") -> list[str]:
    if plan.precision is not None and plan.precision.float8 and plan.schedule == "zero_bubble":
        return [
            "precision.compute is 'fp8', whose products schedule 'zero_bubble' cannot split into gradients of inputs "
            "and of weights: use 'bf16', or schedule '1f1b'"
        ]
    if plan.precision is None or "fp16" not in (plan.precision.compute, plan.precision.reduce):
        return []
    return ["precision names fp16, and the loss scaling that it needs does not run yet: use 'bf16'"]
