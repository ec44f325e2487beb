# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The most tokens that a rank can hold when ranks share documents, from the memory model: predicted, not measured."""

from __future__ import annotations

import math
from dataclasses import replace

from galvatron_hf.plan import ParallelPlan
from galvatron_hf.planner.cost.workload import Workload
from galvatron_hf.planner.estimate import estimate_plan
from galvatron_hf.profiler.profiles.hardware import HardwareProfile
from galvatron_hf.profiler.profiles.model import ModelProfile


MULTIPLE = 64  # of tokens; GPUs get few shapes
LARGEST = 1 << 24
RING_SHARE = 1.1  # tokens that are counted for each, where the memory of rings has no formula


def most_tokens(
    hardware: HardwareProfile, model: ModelProfile, workload: Workload, plan: ParallelPlan, memory_bytes: int
) -> int:
    """Returns the most tokens of a pack with which all micro-batches of a step can be full: a multiple of `MULTIPLE`,
    or 0 if not even so many fit. Documents may be whole, or be shared by as many ranks as a layer has data ranks.

    Args:
        workload ([`Workload`]): gives the number formats.
        plan ([`ParallelPlan`]): without context degrees and sequence groups.
        memory_bytes (`int`): of a rank.
    """

    def fits(multiples: int) -> bool:
        return _memory(hardware, model, workload, plan, multiples * MULTIPLE) <= memory_bytes

    low, high = 0, 1
    while high < LARGEST // MULTIPLE and fits(high):
        low, high = high, 2 * high
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * MULTIPLE


def _memory(
    hardware: HardwareProfile, model: ModelProfile, workload: Workload, plan: ParallelPlan, tokens: int
) -> int:
    """Returns the bytes of the rank with most, if every pack has so many tokens."""
    ranks, count = len(plan.stages[0].ranks), plan.micro_batch_count
    degrees = {layer.data_degree(ranks) for layer in plan.layers}
    packs = math.lcm(*degrees)
    shared = len(degrees) == 1 and packs > 1
    alone = math.ceil(RING_SHARE * tokens) if packs > 1 and not shared else tokens
    plans = [(plan, packs, alone)]
    if shared:
        context = tuple(replace(layer, context=packs) for layer in plan.layers)
        plans.append((replace(plan, layers=context), 1, tokens * packs))
    found = 0
    for one, rows, length in plans:
        of_step = Workload(rows=count * rows, length=length, precision=workload.precision, packed=True)
        found = max(found, *estimate_plan(hardware, model, of_step, one).memory_bytes)
    return found
