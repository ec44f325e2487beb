# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Other ways to compute a step with the same shards of the weights (Hydraulis, arXiv 2412.07894): all layers
recomputed, or none. A step of long documents may be faster with recompute, in fewer and larger micro-batches or in
smaller groups; one of short documents without.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from galvatron_hf.data.cost import GroupCost, SequenceCost
from galvatron_hf.parallel.model import ParallelModel
from galvatron_hf.plan.strategies import RECOMPUTES
from galvatron_hf.plan.validation import check_choice, check_fields, check_number
from galvatron_hf.trainer.planning.cpu_peak_memory import allocation_peak, allocations_profiler


# A thread of a process group may free a block late: if the first two peaks differ, the median of so many counts.
PEAKS, AGREEMENT = 5, 0.001  # relative
_COSTS = ("per_token", "per_token_squared", "per_sequence")


@dataclass(frozen=True, kw_only=True)
class StepVariant:
    """Describes a step whose layers all have another recompute than the plan says.

    Attributes:
        recompute (`str`): "none" or "full", of all layers.
        sequence ([`SequenceCost`]): seconds of a document.
        capacity (`float`): tokens that a rank holds, over those that it holds under the plan.
    """

    recompute: str
    sequence: SequenceCost
    capacity: float

    def to_json(self) -> dict[str, Any]:
        costs = {name: getattr(self.sequence, name) for name in _COSTS}
        return {"recompute": self.recompute, "capacity": self.capacity, **costs}

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> StepVariant:
        """Reads what [`StepVariant.to_json`] returns; any other value raises ValueError."""
        names = ("recompute", "capacity", *_COSTS)
        check_fields("the variant of a step", raw, names, required=names)
        check_choice("its recompute", raw["recompute"], RECOMPUTES)
        for name in names[1:]:
            check_number(f"its {name}", raw[name], positive=name == "capacity")
        sequence = SequenceCost(**{name: float(raw[name]) for name in _COSTS})
        return cls(recompute=raw["recompute"], capacity=float(raw["capacity"]), sequence=sequence)

    def of_groups(self, groups: GroupCost) -> GroupCost:
        """Returns the cost of documents that ranks share; what is sent takes the time that it takes under the plan."""
        return replace(groups, sequence=self.sequence)


def other_recomputes(parallel: ParallelModel) -> list[str]:
    """Returns the ways to recompute all layers that differ from the plan's."""
    own = {layer.recompute for layer in parallel.plan.layers}
    return [kind for kind in RECOMPUTES if own != {kind}]


def bytes_per_token(parallel: ParallelModel, compute: Callable[[int], Any], tokens: tuple[int, int]) -> float:
    """Returns by how many bytes the peak memory of a rank grows with a token of its packs; collective. It is the
    largest growth of all ranks.

    Args:
        compute (`Callable[[int], Any]`): runs forward and backward with so many tokens in each pack.
        tokens (`tuple[int, int]`): the numbers of tokens to compare, the smaller one first.
    """
    peaks = [_usual_peak(parallel.device, lambda count=count: compute(count)) for count in tokens]
    growth = torch.tensor((peaks[1] - peaks[0]) / (tokens[1] - tokens[0]), dtype=torch.float64, device=parallel.device)
    dist.all_reduce(growth, op=dist.ReduceOp.MAX)
    return max(float(growth), 1.0)


def _usual_peak(device: torch.device, work: Callable[[], Any]) -> float:
    """Returns the peak of `work`: of two runs that agree on every rank, or the median of more; collective."""
    peaks = [_peak(device, work) for _ in range(2)]
    differs = torch.tensor(float(max(peaks) > (1 + AGREEMENT) * min(peaks)), device=device)
    dist.all_reduce(differs, op=dist.ReduceOp.MAX)
    if differs:
        peaks += [_peak(device, work) for _ in range(PEAKS - 2)]
    return statistics.median(peaks)


def _peak(device: torch.device, work: Callable[[], Any]) -> int:
    """Returns the most bytes that are allocated while `work` runs, above those before."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        work()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with allocations_profiler() as profiler:
        work()
    return allocation_peak(profiler)
