# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Where documents go under a plan and its arguments: how many tokens a pack has, how many micro-batches there are."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
from transformers import TrainingArguments
from transformers.utils import logging

from galvatron_hf.data.partition_exact import TooLargeError
from galvatron_hf.data.placement import PLANNERS, Placement, in_order, place
from galvatron_hf.parallel.model import ParallelModel
from galvatron_hf.plan import ParallelPlan
from galvatron_hf.plan.schedule import PipelineShape, orders
from galvatron_hf.trainer.data.sequence_cost import StepCost


logger = logging.get_logger(__name__)
EXACT_EFFORT = 50_000  # seconds at most: a step waits for a placement that the one before it did not hide


@dataclass(frozen=True, kw_only=True)
class Placer:
    """Places the documents of a step; what depends on the plan and the arguments alone.

    Attributes:
        plan ([`ParallelPlan`]): under which they are computed.
        packs (`int`): of a micro-batch.
        multiple (`int`): what the tokens of a pack are a multiple of.
        bound (`int`, *optional*): tokens of a pack at most, where the arguments say so; a multiple of `multiple`.
        rows_of_pack (`int`): rows that a data rank has of the plan's padded micro-batches.
        longest_row (`int`): tokens of the training set's longest row; 0 where that is not known.
        cost ([`StepCost`]): of documents and micro-batches.
        planner (`str`): of [`~data.placement.place`].
    """

    plan: ParallelPlan
    packs: int
    multiple: int
    bound: int | None
    rows_of_pack: int
    longest_row: int
    cost: StepCost
    planner: str

    @classmethod
    def of(cls, parallel: ParallelModel, args: TrainingArguments, cost: StepCost, known: np.ndarray) -> Placer:
        """For a model under its plan.

        Args:
            parallel ([`ParallelModel`]): the model.
            args ([`~transformers.TrainingArguments`]): of the Trainer.
            cost ([`StepCost`]): of documents.
            known (`np.ndarray`): tokens of the training set's rows; empty where they are not known.

        Raises:
            ValueError: for a `max_tokens_per_rank` that packs cannot have.
        """
        rows = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        shares = parallel.plan.micro_batches * parallel.resolved.packs
        return cls(
            plan=parallel.plan,
            packs=parallel.resolved.packs,
            multiple=pack_multiple(parallel, args),
            bound=_pack_bound(parallel, args),
            rows_of_pack=-(-rows // shares),
            longest_row=int(known.max(initial=0)),
            cost=cost,
            planner=getattr(args, "placement_planner", PLANNERS[0]),
        )

    def capacity(self, lengths: np.ndarray) -> int:
        """Tokens of a pack at most: by default what the plan's padded micro-batches of the longest rows would have."""
        if self.bound is not None:
            return self.bound
        longest = max(int(lengths.max(initial=0)), self.longest_row)
        return -(-self.rows_of_pack * longest // self.multiple) * self.multiple

    def place(self, lengths: np.ndarray, max_tokens: int | None = None) -> Placement:
        """By cost, into as many micro-batches as the plan's schedule can run."""
        shape = PipelineShape.from_plan(self.plan)
        find = functools.partial(
            place,
            lengths,
            self.packs,
            self.cost.sequence,
            max_tokens=max_tokens or self.capacity(lengths),
            overhead=self.cost.overhead,
            stages=len(self.plan.rank_groups),
            allowed=lambda count: orders(shape, count),
        )
        try:
            return find(planner=self.planner, effort=EXACT_EFFORT)
        except TooLargeError:
            logger.warning_once(
                f"A step of {len(lengths)} documents is too large for placement_planner='exact': 'longest_first' "
                "places it, and others like it."
            )
            return find()

    def in_order(self, lengths: np.ndarray, max_tokens: int | None = None) -> Placement:
        """In the sampler's order."""
        return in_order(lengths, self.packs, max_tokens=max_tokens or self.capacity(lengths))

    def imbalance(self, placement: Placement, lengths: np.ndarray) -> float:
        """Slowest rank over the mean, as the cost model has it."""
        return placement.imbalance(lengths, self.cost.sequence, stages=len(self.plan.rank_groups))


def pack_multiple(parallel: ParallelModel, args: TrainingArguments) -> int:
    """What the tokens of a pack are a multiple of: what sequence ranks split evenly, in few shapes on a GPU."""
    wanted = getattr(args, "pack_to_multiple_of", None)
    if wanted is None:
        wanted = 64 if args.device.type == "cuda" else 1
    return int(np.lcm(parallel.resolved.pack_multiple, wanted))


def _pack_bound(parallel: ParallelModel, args: TrainingArguments) -> int | None:
    """Tokens that a pack may have by the arguments, if they say so.

    Raises:
        ValueError: if packs have a multiple of something else.
    """
    given = getattr(args, "max_tokens_per_rank", None)
    if given is None:
        return None
    multiple = pack_multiple(parallel, args)
    if given % multiple:
        raise ValueError(
            f"max_tokens_per_rank={given} is no multiple of {multiple}, which the tokens of a pack are under this "
            f"plan and pack_to_multiple_of; give {max(given // multiple, 1) * multiple}."
        )
    return given
