# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Orders a plan's stages on its pipeline ranks, and finds the numbers of micro-batches that a schedule orders. A
pipeline rank is one group of ranks that runs stages together: all stages with the same ranks are its stages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from galvatron_hf.plan import ParallelPlan


@dataclass(frozen=True, kw_only=True)
class PipelineShape:
    """Maps each stage to the pipeline rank that runs it. Pipeline ranks are numbered by their first stages."""

    schedule: str
    pipeline_rank_of_stage: tuple[int, ...]

    @classmethod
    def from_plan(cls, plan: ParallelPlan) -> PipelineShape:
        groups = plan.rank_groups
        return cls(
            schedule=plan.schedule, pipeline_rank_of_stage=tuple(groups.index(stage.ranks) for stage in plan.stages)
        )

    @property
    def stages(self) -> int:
        return len(self.pipeline_rank_of_stage)

    @property
    def pipeline_ranks(self) -> int:
        """Returns the number of pipeline ranks: the pipeline degree."""
        return max(self.pipeline_rank_of_stage) + 1

    @property
    def virtual_stages(self) -> int:
        """Returns the number of stages on each pipeline rank."""
        return self.stages // self.pipeline_ranks

    @property
    def is_v_shaped(self) -> bool:
        """Returns whether the stages run from the first pipeline rank to the last and back (0..p-1, p-1..0)."""
        there = range(self.pipeline_ranks)
        return self.pipeline_ranks > 1 and self.pipeline_rank_of_stage == (*there, *reversed(there))


def can_order(shape: PipelineShape, micro_batches: int) -> bool:
    """Returns whether the schedule has an order for `micro_batches`. If not, `schedule.actions` takes the order of the
    next larger number that has one, and drops the surplus micro-batches.
    """
    if shape.pipeline_ranks == 1 or shape.schedule in ("gpipe", "1f1b") or shape.is_v_shaped:
        return True
    if shape.schedule == "interleaved" and shape.virtual_stages == 1:
        return True
    return micro_batches % _rounds(shape.pipeline_ranks, micro_batches) == 0  # equally many go in each


def in_a_round(pipeline_ranks: int, micro_batches: int) -> int:
    """Returns how many micro-batches go through one virtual stage of a rank before any goes through its next one."""
    return micro_batches // _rounds(pipeline_ranks, micro_batches)


def _rounds(pipeline_ranks: int, micro_batches: int) -> int:
    return max(1, micro_batches // pipeline_ranks)
