# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The time of a sequence under a plan on this machine, measured with the model at the start of training."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import PreTrainedConfig

from galvatron_hf.data.cost import SequenceCost, fit_cost
from galvatron_hf.data.packing import Sequences, pack
from galvatron_hf.data.placement import Placement
from galvatron_hf.parallel.model import ParallelModel
from galvatron_hf.plan.validation import check_fields


SHORTEST = 64  # tokens of the shortest documents that are timed
LONG_ENOUGH = 1.0  # seconds: after a measurement of this length, longer documents are not timed
REPETITIONS = 2  # the shorter time counts


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """Holds the costs by which documents are placed.

    Attributes:
        sequence ([`SequenceCost`]): seconds that a document adds to a micro-batch of one pipeline stage.
        overhead (`float`): seconds of an empty micro-batch of one stage.
        measured (`bool`): the costs were measured, not estimated from the model's sizes.
    """

    sequence: SequenceCost
    overhead: float
    measured: bool

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self.sequence), "overhead": self.overhead, "measured": self.measured}

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> StepCost:
        """Reads what [`StepCost.to_json`] returns; any other value raises ValueError."""
        names = ("per_token", "per_token_squared", "per_sequence", "overhead")
        check_fields("the cost", raw, (*names, "measured"), required=(*names, "measured"))
        for name in names:
            value = raw[name]
            if type(value) not in (int, float) or not 0 <= value < float("inf"):
                raise ValueError(f"the cost's {name} is {value!r}, which is not a number of seconds; measure again.")
        if not isinstance(raw["measured"], bool):
            raise ValueError(f"the cost's measured is {raw['measured']!r}; use true or false.")
        sequence = SequenceCost(**{name: float(raw[name]) for name in names[:3]})
        return cls(sequence=sequence, overhead=float(raw["overhead"]), measured=raw["measured"])


def estimated_cost(config: PreTrainedConfig, layers: int) -> StepCost:
    """Returns costs in multiplications of the forward of a decoder with so many layers: they compare lengths, and
    nothing is measured.
    """
    hidden = config.hidden_size
    inner = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None) or 4 * hidden
    per_token = layers * (4 * hidden**2 + 3 * hidden * inner) + hidden * config.vocab_size
    cost = SequenceCost(per_token=per_token, per_token_squared=layers * hidden, per_sequence=0.0)
    return StepCost(sequence=cost, overhead=0.0, measured=False)


def measure_cost(parallel: ParallelModel, longest: int, most: int | None = None) -> StepCost:
    """Times forward and backward of packed documents of several lengths; collective. The model is in training mode
    without gradients; afterwards it has none, and no random stream has moved. The costs are the same on every rank:
    the slowest rank's times, fitted by least squares of relative errors.

    Args:
        longest (`int`): tokens of the longest documents, at least 1; bounded by the model's positions too.
        most (`int`, *optional*): most tokens of a pack.
    """
    config = parallel.model.config
    positions = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    most = most or sys.maxsize
    longest = max(1, min(longest, positions or longest, most))
    shortest = min(SHORTEST, longest)
    shapes = [(shortest, 1), (shortest, min(8, most // shortest))]
    while shapes[-1][0] * 4 <= longest:
        shapes.append((shapes[-1][0] * 4, 1))
    if shapes[-1][0] < longest:
        shapes.append((longest, 1))
    traced, parallel.timeline.on = parallel.timeline.on, False
    _seconds(parallel, shortest, 1)  # the first one allocates buffers
    taken: list[float] = []
    for length, count in shapes:
        seconds = _seconds(parallel, length, count)
        if seconds < LONG_ENOUGH:
            seconds = min(seconds, *(_seconds(parallel, length, count) for _ in range(REPETITIONS - 1)))
        taken.append(seconds / len(parallel.plan.stages))
        if seconds >= LONG_ENOUGH:
            break
    parallel.timeline.on = traced
    sequence, overhead = fit_cost(shapes[: len(taken)], taken)
    return StepCost(sequence=sequence, overhead=overhead, measured=True)


def _seconds(parallel: ParallelModel, length: int, count: int) -> float:
    """Returns the seconds of one micro-batch with `count` documents on each data rank, on the slowest rank."""
    packs = parallel.resolved.packs
    documents = packs * count
    ids = torch.arange(documents * length) % parallel.model.config.vocab_size
    sequences = Sequences(
        input_ids=ids,
        targets=ids,
        position_ids=torch.arange(length).repeat(documents),
        bounds=np.arange(documents + 1) * length,
        rows=np.arange(documents),
    )
    placement = Placement((tuple(tuple(range(k * count, (k + 1) * count)) for k in range(packs)),))
    device = parallel.device
    parts = pack(sequences, placement, parallel.resolved.pack_multiple, pad_token_id=0)
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


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
