# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""How the stages of a plan lie on its rank lists, and which numbers of micro-batches their schedule orders."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from galvatron_hf.plan import ParallelPlan


@dataclass(frozen=True, kw_only=True)
class PipelineShape:
    """How the stages of a plan lie on its rank lists.

    Attributes:
        schedule (`str`): the plan's schedule.
        places (`tuple[int, ...]`): for each stage the index of its rank list, in the order in which lists first occur.
    """

    schedule: str
    places: tuple[int, ...]

    @classmethod
    def of(cls, plan: ParallelPlan) -> PipelineShape:
        """That of a plan."""
        lists = plan.rank_groups
        return cls(schedule=plan.schedule, places=tuple(lists.index(stage.ranks) for stage in plan.stages))

    @property
    def lists(self) -> int:
        """Number of rank lists: the pipeline degree."""
        return max(self.places) + 1

    @property
    def virtual(self) -> int:
        """Number of stages on each rank list."""
        return len(self.places) // self.lists

    @property
    def returns(self) -> bool:
        """Whether the stages go through the lists there and back, so that two neighbours share ranks."""
        return self.lists > 1 and self.places == (*range(self.lists), *reversed(range(self.lists)))


def orders(shape: PipelineShape, micro_batches: int) -> bool:
    """Whether the schedule itself orders so many micro-batches; `schedule.actions` leaves some of more out if not."""
    if shape.lists == 1 or shape.schedule in ("gpipe", "1f1b") or shape.returns:
        return True
    if shape.schedule == "interleaved" and shape.virtual == 1:
        return True
    return micro_batches % _rounds(shape.lists, micro_batches) == 0  # equally many go in each


def in_a_round(lists: int, micro_batches: int) -> int:
    """Micro-batches that go through one of a rank list's interleaved stages before any goes through its next one."""
    return micro_batches // _rounds(lists, micro_batches)


def _rounds(lists: int, micro_batches: int) -> int:
    return max(1, micro_batches // lists)
