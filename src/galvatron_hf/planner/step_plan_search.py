# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Plans for steps whose rows are shorter or longer than others (Hydraulis, arXiv 2412.07894): a step of short rows may
be faster under another plan than the one that fits the longest.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from galvatron_hf.plan import ParallelPlan
from galvatron_hf.planner.cost.workload import Workload
from galvatron_hf.planner.estimate import Estimate, estimate_plan
from galvatron_hf.planner.search import SearchResult, search_plan


SAMPLED_STEPS = 64
HEAVY_SHARE = 0.25  # of the sampled steps, those whose rows need most computation
LEAST_GAIN = 1.02  # step time under the optimizer's plan / under the other one, its moves included
COPIES = 4  # of a weight as long: the weight, its gradient and Adam's two moments


@dataclass(frozen=True, kw_only=True)
class StepPlanEstimate:
    """Holds a plan for some of the steps; nothing in it was measured.

    Attributes:
        estimate ([`Estimate`]): of these steps under the plan.
        own_ms (`float`): the time of one of them under the optimizer's plan.
        move_ms (`float`): for the weights to move to the plan's layout, and for the gradients to move back.
        longest (`int`): the most tokens that a row of these steps may have.
        share (`float`): of the steps that are such.
    """

    estimate: Estimate
    own_ms: float
    move_ms: float
    longest: int
    share: float

    @property
    def gain(self) -> float:
        """Returns the time of a step under the optimizer's plan over that under this one."""
        return self.own_ms / (self.estimate.step_ms + self.move_ms)


def search_step_plans(result: SearchResult, lengths: np.ndarray, seed: int = 0) -> list[StepPlanEstimate]:
    """Searches plans for the light and for the heavy steps of a dataset, beside the plan of a search for all of them,
    whose shards the optimizer keeps.

    Args:
        result ([`SearchResult`]): of the search for all steps; it has found a plan.
        lengths (`np.ndarray`): tokens of the dataset's rows.
        seed (`int`): of the steps that are drawn.

    Returns:
        `list[StepPlanEstimate]`: those that are predicted to pay, perhaps none.
    """
    workload, own = result.workload, result.best.plan
    draw = np.random.default_rng(seed)
    steps = sorted(
        (draw.choice(lengths, workload.rows) for _ in range(SAMPLED_STEPS)), key=lambda step: (step**2).sum()
    )
    cut = round(len(steps) * (1 - HEAVY_SHARE))
    found: list[StepPlanEstimate] = []
    for part in (steps[:cut], steps[cut:]):
        tokens = np.concatenate(part)
        mean = max(1, round(float(tokens.mean())))
        of_part = replace(
            workload,
            length=max(mean, min(int(tokens.max()), workload.length)),  # ranks may share longer ones
            mean_length=mean,
            mean_square=float(np.square(tokens, dtype=float).mean()),
        )
        one = _step_plan(result, of_part, len(part) / len(steps))
        known = [_layout(plan) for plan in (own, *(other.estimate.plan for other in found))]
        if one is not None and one.gain >= LEAST_GAIN and _layout(one.estimate.plan) not in known:
            found.append(one)
    return found


def _layout(plan: ParallelPlan) -> ParallelPlan:
    """Returns what a plan computes, without what is said of it."""
    return replace(plan, meta={}, precision=None)


def _step_plan(result: SearchResult, workload: Workload, share: float) -> StepPlanEstimate | None:
    """Returns the fastest plan for some of the steps; None if none fits beside the optimizer's shards."""
    own = result.best.plan
    budget = result.memory_bytes - held_bytes(result, own)
    if budget <= 0:
        return None
    searched = search_plan(
        result.hardware, result.model, workload, memory_bytes=budget, limits=result.limits, progress=False
    )
    if searched.best is None:
        return None
    return StepPlanEstimate(
        estimate=searched.best,
        own_ms=estimate_plan(result.hardware, result.model, workload, own).step_ms,
        move_ms=move_ms(result, searched.best.plan),
        longest=workload.length,
        share=share,
    )


def held_bytes(result: SearchResult, plan: ParallelPlan) -> int:
    """Returns the bytes of weights, gradients and optimizer's state of the rank with most, and of what a layer
    gathers: the memory of a step with rows of one token.
    """
    tiny = replace(result.workload, length=1, mean_length=1, mean_square=1.0)
    return max(estimate_plan(result.hardware, result.model, tiny, plan).memory_bytes)


def move_ms(result: SearchResult, plan: ParallelPlan) -> float:
    """Returns the time of both moves if no rank has a number of another plan's layout already."""
    world = result.hardware.world_size
    sizes = (held_bytes(result, one) / COPIES for one in (plan, result.best.plan))
    return float(sum(result.hardware.ms("all_to_all", world, 1, size) for size in sizes))
