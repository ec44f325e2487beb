# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The plans under which steps may be computed beside the one whose shards the optimizer updates, and what they cost:
measured at the start of training.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel, TrainingArguments
from transformers.utils import logging

from galvatron_hf.models.lora import has_adapters, inner_model
from galvatron_hf.parallel.executor import Batch
from galvatron_hf.parallel.model import ParallelModel
from galvatron_hf.parallel.other_plan import OtherPlan
from galvatron_hf.plan import ParallelPlan
from galvatron_hf.plan.schedule import PipelineShape, most_under_way
from galvatron_hf.trainer.data.sequence_cost import StepCost, growth_of_memory, measure_cost
from galvatron_hf.utils.units import GIB


logger = logging.get_logger(__name__)

MOVES = 2  # that are timed; the shorter one counts


@dataclass(frozen=True, kw_only=True)
class PlanCost:
    """Holds what steps under another plan cost.

    Attributes:
        cost ([`StepCost`]): of documents.
        move_seconds (`float`): for the weights to get there, and for the gradients to come back.
        capacity (`float`): tokens of a pack, over those of a pack under the optimizer's plan.
    """

    cost: StepCost
    move_seconds: float
    capacity: float


@dataclass(kw_only=True)
class StepPlans:
    """Computes steps under the plans of a run. Plan 0 is the optimizer's.

    Attributes:
        owner ([`ParallelModel`]): the model under the optimizer's plan.
        others (`list[OtherPlan]`): plans 1 and up.
        costs (`list[PlanCost | None]`, *optional*): of the other plans, None for one that has no memory left for a
            document; None before they are measured.
        active ([`ParallelModel`]): the model that computes now.
    """

    owner: ParallelModel
    others: list[OtherPlan] = field(default_factory=list)
    costs: list[PlanCost | None] | None = None

    def __post_init__(self):
        self.active = self.owner

    @classmethod
    def make(cls, owner: ParallelModel, plans: Sequence[ParallelPlan], models: Sequence[PreTrainedModel]) -> StepPlans:
        """Applies further plans to empty copies of the model, which have no memory until they compute; collective."""
        return cls(owner=owner, others=[OtherPlan(owner, *pair) for pair in zip(models, plans, strict=True)])

    def compile(self, **options: Any) -> None:
        """Compiles the layers of all models; see [`ParallelModel.compile`]."""
        for number in range(1 + len(self.others)):
            self.model(number).compile(**options)

    @property
    def is_measured(self) -> bool:
        return not self.others or self.costs is not None

    def model(self, number: int) -> ParallelModel:
        """Returns the model under a plan."""
        return self.owner if number == 0 else self.others[number - 1].parallel

    def held_bytes(self, number: int) -> int:
        """Returns the bytes that this rank needs for a plan's steps beside what it always has."""
        return 0 if number == 0 else self.others[number - 1].held_bytes

    def forward_backward(self, number: int, batch: Batch, *args: Any, **options: Any) -> torch.Tensor:
        """Runs forward and backward of a global batch under a plan; see [`ParallelModel.forward_backward`]."""
        self.active = self.model(number)
        try:
            computes = self.owner if number == 0 else self.others[number - 1]
            return computes.forward_backward(batch, *args, **options)
        finally:
            self.active = self.owner

    def measure(self, longest: int, most: int) -> None:
        """Measures the other plans; collective. `most` are the tokens of a pack under the optimizer's plan."""
        if self.is_measured:
            return
        whole = min(longest, most)
        own = growth_of_memory(self.owner, whole) * _under_way(self.owner.plan)
        self.costs = [self._cost(number, longest, most, own) for number in range(1, len(self.others) + 1)]

    def _left_out(self, number: int, held: float, most: int) -> None:
        if dist.get_rank() == 0:
            logger.warning(
                f"No step is computed under plan {number}: its weights and gradients take {held / GIB:.3g} GiB of a "
                f"rank, and {most} tokens under the optimizer's plan not much more; raise max_tokens_per_rank, or "
                "shard the weights more in the plan."
            )

    def _cost(self, number: int, longest: int, most: int, own: float) -> PlanCost | None:
        other, parallel = self.others[number - 1], self.model(number)
        held = _most(other.held_bytes, self.owner.device)
        if held >= own * most:
            return self._left_out(number, held, most)
        other.load()
        parallel.model.train()
        growth = growth_of_memory(parallel, min(longest, most)) * _under_way(parallel.plan)
        capacity = (own * most - held) / (growth * most)
        fits = int(capacity * most)
        if fits < parallel.resolved.pack_multiple:
            other.release()
            return self._left_out(number, held, most)
        cost = measure_cost(parallel, longest, fits)
        seconds = min(_most(_seconds_of_move(other), self.owner.device) for _ in range(MOVES))
        self.owner.model.zero_grad()
        other.release()
        return PlanCost(cost=cost, move_seconds=seconds, capacity=capacity)


def as_precise(plan: ParallelPlan, own: ParallelPlan, number: int) -> ParallelPlan:
    """Returns a plan with the precision of the optimizer's; refuses one that has another."""
    if plan.precision is not None and plan.precision.compute != own.precision.compute:
        raise ValueError(
            f'Plan {number} of the steps computes in "{plan.precision.compute}" and the optimizer\'s plan in '
            f'"{own.precision.compute}"; leave the precision out of plans of steps.'
        )
    return replace(plan, precision=own.precision)


def require_one_layout(args: TrainingArguments, model: nn.Module) -> None:
    """Refuses plans of steps for what has the layout of one plan alone."""
    if getattr(args, "expert_dispatch", "plain") != "plain":
        raise ValueError(
            f"expert_dispatch={args.expert_dispatch!r} is chosen for the experts of one plan, and there are plans of "
            "steps; use expert_dispatch='plain', or leave out per_step."
        )
    if has_adapters(model):
        raise ValueError(
            f"{type(inner_model(model)).__name__} has adapters, which have the layout of one plan alone; leave out "
            "step_plans."
        )


def _seconds_of_move(other: OtherPlan) -> float:
    dist.barrier()
    began = time.perf_counter()
    other.load()
    other.hand_back()
    if other.owner.device.type == "cuda":
        torch.cuda.synchronize(other.owner.device)
    return time.perf_counter() - began


def _most(value: float, device: torch.device) -> float:
    """Returns the largest value of all ranks."""
    found = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return float(found)


def _under_way(plan: ParallelPlan) -> int:
    """Returns how many micro-batches a rank holds at once, if there are enough to keep all stages at work."""
    shape = PipelineShape.from_plan(plan)
    return most_under_way(shape, max(shape.pipeline_ranks, plan.micro_batch_count))
