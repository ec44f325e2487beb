# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The batches of a step, and while it is computed the placement of the next; on rank 0."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers.utils import logging

from galvatron_hf.data.lengths import LookAhead
from galvatron_hf.data.packing import Sequences, limit_lengths, pieces
from galvatron_hf.data.placement import Placement
from galvatron_hf.data.plan_ahead import PlanAhead
from galvatron_hf.trainer.checkpoint.random_state import random_state
from galvatron_hf.trainer.data.pack_planner import Placer


logger = logging.get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class StepPlacement:
    """How one step is packed, the same on every rank.

    Attributes:
        placement ([`Placement`]): of its documents.
        longest (`int`): tokens that a document may have.
        imbalance (`float`): slowest rank over the mean, as the cost model has it.
        seconds (`float`): that the planner took.
        hidden (`bool`): whether it had planned before it was asked.
    """

    placement: Placement
    longest: int
    imbalance: float
    seconds: float
    hidden: bool


class StepsAhead:
    """Reads the batches of a training run step by step and has each step placed before it is read.

    Args:
        placer (`Callable`): gives the [`Placer`] with the costs of now; called in the background too.
        long_sequences (`str`): what becomes of documents that are too long.

    Attributes:
        state_before_look (`dict`, *optional*): the random generators before the next step was read, where reading it
            drew from them: what is drawn for it comes after a checkpoint of this one.
    """

    def __init__(self, placer: Callable[[], Placer], long_sequences: str):
        self._placer, self._long_sequences = placer, long_sequences
        self._plans = PlanAhead(lambda lengths: placer().place(lengths), lambda lengths: placer().in_order(lengths))
        self._looking: tuple[Iterator, LookAhead] | None = None
        self._read: Iterator | None = None
        self._draws: bool | None = None
        self.state_before_look: dict[str, Any] | None = None

    def peek(self, batches: Iterator, count: int) -> list[dict[str, Any]]:
        """The next batches, which stay to be taken."""
        if self._looking is None or self._looking[0] is not batches:
            self._looking = (batches, LookAhead(batches))
        return self._looking[1].peek(count)

    def take(self, batches: Iterator, count: int) -> list[dict[str, Any]]:
        """The next batches, read now or before; fewer where they end."""
        self.state_before_look = None
        ahead = self._looking is not None and self._looking[0] is batches
        before = random_state() if self._draws is None else None
        found = take(self._looking[1] if ahead else batches, count)
        if self._read is batches and self._draws is None:  # the first read makes a sampler's order
            self._draws = random_state() != before
        self._read = batches
        return found

    def place(self, sequences: Sequences) -> StepPlacement:
        """Places the documents of the step that was read: where they were expected to go, or anew.

        Raises:
            ValueError: for documents that are too long, if they are to be refused.
        """
        placer = self._placer()
        longest = placer.capacity(sequences.lengths)
        lengths = limit_lengths(sequences, longest, self._long_sequences).lengths
        planned = self._plans.take(lengths)
        if planned.failure is not None:
            logger.warning(
                f"This step's sequences stay in the sampler's order: the planner failed ({planned.failure})."
            )
        return StepPlacement(
            placement=planned.placement,
            longest=longest,
            imbalance=placer.imbalance(planned.placement, lengths),
            seconds=planned.seconds,
            hidden=planned.hidden,
        )

    def plan(self, lengths: Callable[[], np.ndarray]) -> None:
        """Has the next step placed in the background.

        Args:
            lengths (`Callable`): gives the tokens of its rows, some of which may have none; called in the background.
        """
        self._plans.begin(lambda: self._limited(lengths()))

    def read_and_plan(self, batches: Iterator, count: int) -> None:
        """Reads the next step now, and has it placed in the background.

        Where reading draws random numbers, evaluation or a callback between two steps may draw some before it: such
        rows are not read ahead. Whether it does, the second step says, which is never read ahead.
        """
        if self._draws is not False:
            return
        before = random_state()
        following = self.peek(batches, count)
        if random_state() != before:
            self.state_before_look, self._draws = before, True
        if following:
            self.plan(lambda: Sequences.from_batches(following).lengths)

    def end(self) -> None:
        """Ends the background."""
        self._plans.end()

    def _limited(self, lengths: np.ndarray) -> np.ndarray:
        """Of the documents that rows become."""
        lengths, bound = lengths[lengths > 0], self._placer().bound
        return lengths if bound is None else pieces(lengths, bound, self._long_sequences).lengths


def take(iterator: Iterator, count: int) -> list:
    """The next `count` items, or those left if fewer."""
    return [item for _, item in zip(range(count), iterator, strict=False)]
