# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Reading of a step's batches, and placement of the next step while a step is computed; on rank 0."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers.utils import logging

from galvatron_hf.data.lengths import LookAhead
from galvatron_hf.data.packing import PER_RANK, Sequences, limit_lengths, pieces
from galvatron_hf.data.placement import Placement
from galvatron_hf.data.plan_ahead import PlanAhead
from galvatron_hf.models.packing import CAUSAL, Packing
from galvatron_hf.trainer.checkpoint.random_state import random_state
from galvatron_hf.trainer.data.pack_planner import PackPlanner


logger = logging.get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class StepPlacement:
    """Describes the packing of one step, the same on every rank.

    Attributes:
        placement ([`Placement`]): the micro-batch and pack of each document.
        longest (`int`): most tokens of a document; `limit` names what says so.
        imbalance (`float`): predicted time of the slowest rank / mean time of all ranks.
        seconds (`float`): time that the planner took.
        hidden (`bool`): the placement was ready when the step was read.
        shared_tokens (`int`): tokens of documents that several ranks share.
        groups (`tuple[int, ...]`): the number of ranks of each of these documents.
        keeps_rings (`bool`): whether recomputed layers keep the output of attention in rings.
    """

    placement: Placement
    longest: int
    imbalance: float
    seconds: float
    hidden: bool
    limit: str = PER_RANK
    shared_tokens: int = 0
    groups: tuple[int, ...] = ()
    keeps_rings: bool = False


class StepPrefetch:
    """Reads the batches of a training run step by step, and places each step before it is read.

    Args:
        planner (`Callable`): returns the [`PackPlanner`] with the present costs; also called in the background.
        long_sequences (`str`): treatment of documents that are too long.
        packing ([`Packing`], *optional*): how rows become documents; by default those of a causal language model.

    Attributes:
        state_before_look (`dict`, *optional*): the random state before the next step was read, if that drew random
            numbers. A checkpoint of this step must not contain them.
    """

    def __init__(self, planner: Callable[[], PackPlanner], long_sequences: str, packing: Packing = CAUSAL):
        self._planner, self._long_sequences, self._packing = planner, long_sequences, packing
        self._plans = PlanAhead(lambda lengths: planner().place(lengths), lambda lengths: planner().in_order(lengths))
        self._looking: tuple[Iterator, LookAhead] | None = None
        self._read: Iterator | None = None
        self._draws: bool | None = None
        self.state_before_look: dict[str, Any] | None = None

    def peek(self, batches: Iterator, count: int) -> list[dict[str, Any]]:
        """Returns the next batches; [`StepPrefetch.take`] returns them again."""
        if self._looking is None or self._looking[0] is not batches:
            self._looking = (batches, LookAhead(batches))
        return self._looking[1].peek(count)

    def take(self, batches: Iterator, count: int) -> list[dict[str, Any]]:
        """Returns the next batches, read now or before; fewer if the data ends."""
        self.state_before_look = None
        ahead = self._looking is not None and self._looking[0] is batches
        before = random_state() if self._draws is None else None
        found = take(self._looking[1] if ahead else batches, count)
        if self._read is batches and self._draws is None:  # the first read draws a sampler's order
            self._draws = random_state() != before
        self._read = batches
        return found

    def place(self, sequences: Sequences) -> StepPlacement:
        """Places the documents of the step that was read, or returns the placement that was found ahead. Documents
        that are too long raise ValueError, if the arguments refuse them.
        """
        planner = self._planner()
        longest = planner.longest_document(sequences.lengths)
        limit = planner.limit
        lengths = limit_lengths(sequences, longest, self._long_sequences, self._packing, limit).lengths
        planned = self._plans.take(lengths)
        if planned.failure is not None:
            logger.warning(
                f"This step's sequences stay in the sampler's order: the planner failed ({planned.failure})."
            )
        shared = [one for sequences in planned.placement.shared for one in sequences]
        return StepPlacement(
            shared_tokens=int(sum(lengths[one.sequence] for one in shared)),
            groups=tuple(len(one.ranks) for one in shared),
            placement=planned.placement,
            longest=longest,
            limit=limit,
            imbalance=planner.imbalance(planned.placement, lengths),
            seconds=planned.seconds,
            hidden=planned.hidden,
        )

    def plan(self, lengths: Callable[[], np.ndarray]) -> None:
        """Has the next step placed in the background; `lengths`, called there, returns its rows' tokens, perhaps 0."""
        self._plans.begin(lambda: self._limited(lengths()))

    def read_and_plan(self, batches: Iterator, count: int) -> None:
        """Reads the next step now, and has it placed in the background. Rows are not read ahead if reading draws
        random numbers, because evaluation or a callback between two steps may draw some first. The second step, which
        is never read ahead, shows whether reading draws.
        """
        if self._draws is not False:
            return
        before = random_state()
        following = self.peek(batches, count)
        if random_state() != before:
            self.state_before_look, self._draws = before, True
        if following:
            self.plan(lambda: Sequences.from_batches(following, self._packing).lengths)

    def end(self) -> None:
        self._plans.end()

    def _limited(self, lengths: np.ndarray) -> np.ndarray:
        """Returns the lengths of the documents that rows are cut into."""
        lengths, bound = lengths[lengths > 0], self._planner().bound_of_documents
        return lengths if bound is None else pieces(lengths, bound, self._long_sequences).lengths


def take(iterator: Iterator, count: int) -> list:
    """Returns the next `count` items, or fewer if the iterator ends."""
    return [item for _, item in zip(range(count), iterator, strict=False)]
