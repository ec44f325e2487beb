# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The planner of packs: places the documents of a step into micro-batches and packs, within a number of tokens."""

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
from galvatron_hf.plan.schedule import PipelineShape, can_order
from galvatron_hf.trainer.data.sequence_cost import StepCost


logger = logging.get_logger(__name__)
EXACT_EFFORT = 50_000  # takes seconds at most: a step waits for a placement that is not ready


@dataclass(frozen=True, kw_only=True)
class PackPlanner:
    """Places the documents of a step. Its values depend on the plan and the arguments alone.

    Attributes:
        packs (`int`): packs of a micro-batch.
        multiple (`int`): the number of tokens of a pack is a multiple of it.
        bound (`int`, *optional*): most tokens of a pack, if the arguments give it; a multiple of `multiple`.
        rows_of_pack (`int`): rows of a data-parallel rank in one of the plan's padded micro-batches.
        longest_row (`int`): tokens of the training set's longest row; 0 if that is not known.
        planner (`str`): an algorithm of [`~data.placement.place`].
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
    def from_model(
        cls, parallel: ParallelModel, args: TrainingArguments, cost: StepCost, known: np.ndarray
    ) -> PackPlanner:
        """Makes the planner for a model under its plan. `known` are the tokens of the training set's rows, empty if
        they are not known. A `max_tokens_per_rank` that packs cannot have raises ValueError.
        """
        rows = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        shares = parallel.plan.micro_batch_count * parallel.resolved.packs
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
        """Returns the most tokens of a pack; by default those of padded micro-batches of the longest rows."""
        if self.bound is not None:
            return self.bound
        longest = max(int(lengths.max(initial=0)), self.longest_row)
        return -(-self.rows_of_pack * longest // self.multiple) * self.multiple

    def place(self, lengths: np.ndarray, max_tokens: int | None = None) -> Placement:
        """Places documents by cost, into a number of micro-batches that the plan's schedule can run."""
        shape = PipelineShape.from_plan(self.plan)
        find = functools.partial(
            place,
            lengths,
            self.packs,
            self.cost.sequence,
            max_tokens=max_tokens or self.capacity(lengths),
            overhead=self.cost.overhead,
            stages=len(self.plan.rank_groups),
            allowed=lambda count: can_order(shape, count),
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
        return in_order(lengths, self.packs, max_tokens=max_tokens or self.capacity(lengths))

    def imbalance(self, placement: Placement, lengths: np.ndarray) -> float:
        """Returns the predicted time of the slowest rank over the mean of all ranks."""
        return placement.imbalance(lengths, self.cost.sequence, stages=len(self.plan.rank_groups))


def pack_multiple(parallel: ParallelModel, args: TrainingArguments) -> int:
    """Returns the factor of a pack's tokens: sequence ranks split packs evenly, and a GPU gets fewer shapes."""
    wanted = getattr(args, "pack_to_multiple_of", None)
    if wanted is None:
        wanted = 64 if args.device.type == "cuda" else 1
    return int(np.lcm(parallel.resolved.pack_multiple, wanted))


def _pack_bound(parallel: ParallelModel, args: TrainingArguments) -> int | None:
    """Returns the most tokens of a pack that the arguments give, a multiple of [`pack_multiple`], or None."""
    given = getattr(args, "max_tokens_per_rank", None)
    if given is None:
        return None
    multiple = pack_multiple(parallel, args)
    if given % multiple:
        raise ValueError(
            f"max_tokens_per_rank={given} is not a multiple of {multiple}, as the tokens of a pack are under this "
            f"plan and pack_to_multiple_of; use {max(given // multiple, 1) * multiple}."
        )
    return given
