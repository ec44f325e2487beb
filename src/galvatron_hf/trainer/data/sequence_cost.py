# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The time of a sequence under a plan on this machine, measured with the model at the start of training."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import PreTrainedConfig

from galvatron_hf.data.cost import GroupCost, SequenceCost, SharingCost, assumed_sharing, fit_cost, fit_sharing
from galvatron_hf.data.packing import Sequences, pack
from galvatron_hf.data.placement import Placement, SharedSequence
from galvatron_hf.parallel.model import ParallelModel
from galvatron_hf.plan import ParallelPlan
from galvatron_hf.plan.deal import EXECUTIONS
from galvatron_hf.plan.validation import check_choice, check_fields
from galvatron_hf.trainer.data.step_variants import StepVariant, bytes_per_token, other_recomputes


SHORTEST = 64  # tokens of the shortest documents that are timed
LONG_ENOUGH = 1.0  # seconds: after a measurement of this length, longer documents are not timed
REPETITIONS = 2  # the shorter time counts
PROFILED_TOKENS = 2048  # of a pack whose memory is measured


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """Holds the costs by which documents are placed.

    Attributes:
        sequence ([`SequenceCost`]): seconds that a document adds to a micro-batch of one pipeline stage.
        overhead (`float`): seconds of an empty micro-batch of one stage.
        measured (`bool`): the costs were measured, not estimated from the model's sizes.
        sharing (`dict[str, SharingCost]`): of documents that data ranks share, by execution; empty if none are.
        far (`dict[str, SharingCost]`): the same of documents that ranks of several nodes share.
        variants (`tuple[StepVariant, ...]`): other ways to compute a step, if steps may differ.
    """

    sequence: SequenceCost
    overhead: float
    measured: bool
    sharing: dict[str, SharingCost] = field(default_factory=dict)
    far: dict[str, SharingCost] = field(default_factory=dict)
    variants: tuple[StepVariant, ...] = ()

    def to_json(self) -> dict[str, Any]:
        fields = {**asdict(self.sequence), "overhead": self.overhead, "measured": self.measured}
        fields["variants"] = [variant.to_json() for variant in self.variants]
        return fields | {name: {k: asdict(v) for k, v in getattr(self, name).items()} for name in ("sharing", "far")}

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> StepCost:
        """Reads what [`StepCost.to_json`] returns; any other value raises ValueError."""
        names = ("per_token", "per_token_squared", "per_sequence", "overhead")
        check_fields(
            "the cost", raw, (*names, "measured", "sharing", "far", "variants"), required=(*names, "measured")
        )
        for name in names:
            value = raw[name]
            if type(value) not in (int, float) or not 0 <= value < float("inf"):
                raise ValueError(f"the cost's {name} is {value!r}, which is not a number of seconds; measure again.")
        if not isinstance(raw["measured"], bool):
            raise ValueError(f"the cost's measured is {raw['measured']!r}; use true or false.")
        sequence = SequenceCost(**{name: float(raw[name]) for name in names[:3]})
        sharing = {name: _sharing_from_json(raw.get(name, {})) for name in ("sharing", "far")}
        variants = tuple(StepVariant.from_json(variant) for variant in raw.get("variants", ()))
        overhead, measured = float(raw["overhead"]), raw["measured"]
        return cls(sequence=sequence, overhead=overhead, measured=measured, variants=variants, **sharing)

    def of_groups(self, parallel: ParallelModel) -> GroupCost:
        """Returns the cost of documents that data ranks share."""
        kinds, exchangeable = kinds_of(parallel.plan), exchangeable_degrees(parallel)
        sharing = {name: cost for name, cost in self.sharing.items() if name in kinds}
        sharing = sharing or {kinds[0]: assumed_sharing(self.sequence)}  # nothing was measured
        far = {name: cost for name, cost in self.far.items() if name in kinds}
        node = packs_of_node(parallel)
        return GroupCost(sequence=self.sequence, sharing=sharing, far=far, node_ranks=node, exchangeable=exchangeable)


def _sharing_from_json(raw: Any) -> dict[str, SharingCost]:
    found = {}
    for name, cost in raw.items():
        check_choice("the cost's execution", name, EXECUTIONS)
        check_fields(f"the cost of {name}", cost, ("per_hop", "per_token"), required=("per_hop", "per_token"))
        found[name] = SharingCost(**cost)
    return found


def packs_of_node(parallel: ParallelModel) -> int | None:
    """Returns the packs of a stage whose ranks are on one node; None if all are."""
    packs, size = parallel.resolved.packs, parallel.resolved.stage_size
    local = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    found = max(1, local * packs // size)
    return found if found < packs else None


def exchangeable_degrees(parallel: ParallelModel) -> frozenset[int]:
    """Returns the numbers of packs that may share a document by exchanging its tokens for heads."""
    resolved = parallel.resolved
    return frozenset(packs for packs in range(2, resolved.packs + 1) if resolved.exchanges_heads(packs))


def estimated_cost(config: PreTrainedConfig, layers: int) -> StepCost:
    """Returns costs in multiplications of the forward of a decoder with so many layers: they compare lengths, and
    nothing is measured.
    """
    hidden = config.hidden_size
    inner = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None) or 4 * hidden
    per_token = layers * (4 * hidden**2 + 3 * hidden * inner) + hidden * config.vocab_size
    cost = SequenceCost(per_token=per_token, per_token_squared=layers * hidden, per_sequence=0.0)
    return StepCost(sequence=cost, overhead=0.0, measured=False)


def measure_cost(
    parallel: ParallelModel, longest: int, most: int | None = None, *, per_step: bool = False
) -> StepCost:
    """Times forward and backward of packed documents of several lengths; collective. The model is in training mode
    without gradients; afterwards it has none, and no random stream has moved. The costs are the same on every rank:
    the slowest rank's times, fitted by least squares of relative errors.

    Args:
        longest (`int`): tokens of the longest documents, at least 1; bounded by the model's positions too.
        most (`int`, *optional*): most tokens of a pack.
        per_step (`bool`): whether other ways to compute a step are timed too.
    """
    config = parallel.model.config
    positions = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    most = most or sys.maxsize
    positions = positions and positions - parallel.packing.first_position
    positions = positions and positions * (1 if parallel.packing.pairs is None else 2)
    longest = max(1, min(longest, positions or longest))
    whole = max(1, min(longest, most))
    shortest = min(SHORTEST, whole)
    shapes = [(shortest, 1), (shortest, min(8, most // shortest))]
    while shapes[-1][0] * 4 <= whole:
        shapes.append((shapes[-1][0] * 4, 1))
    if shapes[-1][0] < whole:
        shapes.append((whole, 1))
    traced, parallel.timeline.on = parallel.timeline.on, False
    _seconds(parallel, shortest, 1)  # the first one allocates buffers
    sequence, overhead = _measured_sequence(parallel, shapes)
    cost = StepCost(sequence=sequence, overhead=overhead, measured=True)
    if parallel.plan.shares_documents and parallel.resolved.packs > 1:
        node, degree = packs_of_node(parallel), degree_of(parallel)
        near = min(degree, node or degree)
        cost = replace(cost, sharing=_measured_sharing(parallel, cost, longest, most, {min(2, near), near} - {1}))
        if near < degree:
            cost = replace(cost, far=_measured_sharing(parallel, cost, longest, most, {min(2 * near, degree), degree}))
    if per_step:
        cost = replace(cost, variants=_measured_variants(parallel, shapes))
    parallel.timeline.on = traced
    return cost


def _measured_sequence(parallel: ParallelModel, shapes: list[tuple[int, int]]) -> tuple[SequenceCost, float]:
    """Times documents of several lengths and numbers; returns their cost and the constant of a micro-batch."""
    taken: list[float] = []
    for length, count in shapes:
        seconds = _shortest(parallel, length, count)
        taken.append(seconds / len(parallel.plan.stages))
        if seconds >= LONG_ENOUGH:
            break
    return fit_cost(shapes[: len(taken)], taken)


def _measured_variants(parallel: ParallelModel, shapes: list[tuple[int, int]]) -> tuple[StepVariant, ...]:
    """Times other ways to compute a step, and compares their memory with that of the plan's."""
    longest = shapes[-1][0]
    own, found = growth_of_memory(parallel, longest), []
    for kind in other_recomputes(parallel):
        parallel.recompute_layers(kind)
        try:
            sequence, _ = _measured_sequence(parallel, shapes)
            found.append(
                StepVariant(recompute=kind, sequence=sequence, capacity=own / growth_of_memory(parallel, longest))
            )
        finally:
            parallel.recompute_layers(None)
    return tuple(found)


def growth_of_memory(parallel: ParallelModel, longest: int) -> float:
    """Returns by how many bytes the memory of a rank grows with each token of a pack, in one micro-batch; collective.
    `longest` are the tokens of the longest document.
    """
    shortest = min(SHORTEST, longest)
    tokens = shortest, max(2 * shortest, min(longest, PROFILED_TOKENS))
    return bytes_per_token(parallel, lambda count: _seconds(parallel, shortest, count // shortest), tokens)


def _measured_sharing(
    parallel: ParallelModel, cost: StepCost, longest: int, most: int, degrees: Iterable[int]
) -> dict[str, SharingCost]:
    """Times documents that ranks share, by each execution and in groups of each of some numbers of ranks."""
    exchangeable, found = exchangeable_degrees(parallel), {}
    for execution in kinds_of(parallel.plan):
        shapes, added = [], []
        for degree in sorted(degrees):
            if execution == "ulysses" and degree not in exchangeable:
                continue
            fits = max(2 * degree, min(longest, degree * (most - 1)))
            for length in sorted({min(fits, degree * SHORTEST), fits}):
                seconds = _shortest(parallel, length, 1, degree, execution) / len(parallel.plan.stages)
                once = cost.sequence.per_sequence
                split = (float(cost.sequence.seconds([length])[0]) - once) / degree + once
                shapes.append((length, degree))
                added.append(seconds - cost.overhead - split)
                if seconds >= LONG_ENOUGH:
                    break
        if shapes:
            found[execution] = fit_sharing(shapes, added)
    return found


def kinds_of(plan: ParallelPlan) -> tuple[str, ...]:
    """Returns the executions that a plan allows."""
    return EXECUTIONS if plan.sequence_groups is None else plan.sequence_groups.kinds


def degree_of(parallel: ParallelModel) -> int:
    """Returns the most packs that may share a document: with context parallelism, those of a data rank of rows."""
    plan, packs = parallel.plan, parallel.resolved.packs
    if plan.sequence_groups is not None:
        most = plan.sequence_groups.max_degree
        only_heads = kinds_of(plan) == ("ulysses",)
        return max((one for one in exchangeable_degrees(parallel) if one <= most), default=1) if only_heads else most
    if not plan.shares_documents:
        return 1
    return packs // min(layer.data_degree(parallel.resolved.stage_size) for layer in plan.layers)


def _shortest(parallel: ParallelModel, length: int, count: int, degree: int = 1, execution: str = "") -> float:
    """Returns the shortest of some times of [`_seconds`]; a long one is taken once."""
    seconds = _seconds(parallel, length, count, degree, execution)
    if seconds < LONG_ENOUGH:
        others = (_seconds(parallel, length, count, degree, execution) for _ in range(REPETITIONS - 1))
        seconds = min(seconds, *others)
    return seconds


def _seconds(parallel: ParallelModel, length: int, count: int, degree: int = 1, execution: str = "") -> float:
    """Returns the seconds of one micro-batch with `count` documents on each data rank, on the slowest rank; or with
    one document for each `degree` ranks, which share it.
    """
    packs, packing = parallel.resolved.packs, parallel.packing
    documents = packs * count if degree == 1 else packs // degree
    if packing.pairs is None:
        sequences = _documents(documents, length, parallel)
    else:  # half of the tokens are those of the target
        source, target = max(1, length - length // 2), max(1, length // 2)
        sequences = replace(_documents(documents, source, parallel), target=_documents(documents, target, parallel))
    if degree == 1:
        placement = Placement((tuple(tuple(range(k * count, (k + 1) * count)) for k in range(packs)),))
    else:
        groups = [tuple(range(k * degree, (k + 1) * degree)) for k in range(documents)]
        shared = tuple(SharedSequence(index, ranks, execution) for index, ranks in enumerate(groups))
        placement = Placement((((),) * packs,), (shared,))
    device = parallel.device
    parts = pack(sequences, placement, parallel.resolved.pack_multiple, pad_token_id=0, packing=packing)
    parts = [
        {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in part.items()}
        for part in parts
    ]
    dist.all_reduce(torch.zeros(1, device=device))  # all begin together
    began = _now(device)
    parallel.forward_backward(parts)
    seconds = torch.tensor(_now(device) - began, dtype=torch.float64, device=device)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    parallel.model.zero_grad()
    parallel.timeline.action = None
    return float(seconds)


def _documents(count: int, length: int, parallel: ParallelModel) -> Sequences:
    ids = torch.arange(count * length) % parallel.model.config.vocab_size
    return Sequences(
        input_ids=ids,
        targets=torch.zeros_like(ids),
        position_ids=parallel.packing.first_position + torch.arange(length).repeat(count),
        bounds=np.arange(count + 1) * length,
        rows=np.arange(count),
        columns=np.zeros(count, dtype=np.int64),
    )


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
