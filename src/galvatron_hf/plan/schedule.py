# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Lists the actions of a schedule for each pipeline rank; needs no process group. Interleaved and zero-bubble orders
are those of `torch.distributed.pipelining`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

from torch.distributed.pipelining import schedules as torch_schedules

from galvatron_hf.plan.pipeline_shape import PipelineShape, can_order
from galvatron_hf.utils.compat import pipeline_action, pipeline_orders, with_transfers


__all__ = [
    "Action",
    "PipelineShape",
    "Work",
    "actions",
    "can_order",
    "most_in_flight",
    "most_under_way",
    "runs_forwards_first",
]


class Work(str, Enum):
    """Names the kinds of actions of a pipeline schedule."""

    FORWARD = "forward"
    BACKWARD = "backward"
    BACKWARD_INPUT = "backward of the input"
    BACKWARD_WEIGHT = "backward of the weights"
    SEND_FORWARD = "send activations"
    RECEIVE_FORWARD = "receive activations"
    SEND_BACKWARD = "send gradients"
    RECEIVE_BACKWARD = "receive gradients"

    @property
    def is_compute(self) -> bool:
        """Returns whether the action computes instead of moving tensors."""
        return self.direction is None

    @property
    def is_receive(self) -> bool:
        """Returns whether the action waits for another rank."""
        return self in (Work.RECEIVE_FORWARD, Work.RECEIVE_BACKWARD)

    @property
    def direction(self) -> str | None:
        """Returns "forward" for a transfer of activations, "backward" for one of gradients, and None for a compute."""
        if self in (Work.SEND_FORWARD, Work.RECEIVE_FORWARD):
            return "forward"
        return "backward" if self in (Work.SEND_BACKWARD, Work.RECEIVE_BACKWARD) else None


@dataclass(frozen=True)
class Action:
    """Names one action of a pipeline rank, with the index of the stage in the plan and the micro-batch in the step."""

    work: Work
    stage: int
    micro_batch: int


@lru_cache(maxsize=256)
def actions(shape: PipelineShape, micro_batches: int) -> tuple[tuple[Action, ...], ...]:
    """Returns the ordered actions of each pipeline rank in a step of at least one micro-batch.
    A send follows the compute of its tensor. A receive is posted when the sender has computed it, not earlier: a GPU
    that waits for a message may run no other one, so ranks could wait for each other in a circle. Two stages on the
    same ranks send nothing. A smaller last batch may have a number of micro-batches that the schedule does not
    order. They then take the order of the next number that it orders, so no more of them are in flight.
    """
    if shape.virtual_stages == 1 and shape.schedule != "zero_bubble":
        order = _gpipe if shape.schedule == "gpipe" else _one_forward_one_backward
        compute = {rank: order(rank, shape.pipeline_ranks, micro_batches) for rank in range(shape.pipeline_ranks)}
    else:
        ordered = next(count for count in itertools.count(micro_batches) if can_order(shape, count))
        compute = {
            rank: [action for action in row if action.microbatch_index < micro_batches]
            for rank, row in _torch_order(shape, ordered).items()
        }
    lowered = with_transfers(compute, shape.pipeline_rank_of_stage.__getitem__, shape.stages)
    ranks = range(shape.pipeline_ranks)
    return tuple(tuple(_own(action) for action in lowered[rank]) for rank in ranks)


def _gpipe(rank: int, pipeline_ranks: int, micro_batches: int) -> list:
    """Orders all forwards, then all backwards (arXiv 1811.06965)."""
    works = torch_schedules.FORWARD, torch_schedules.FULL_BACKWARD
    return [pipeline_action(rank, work, part) for work in works for part in range(micro_batches)]


def _one_forward_one_backward(rank: int, pipeline_ranks: int, micro_batches: int) -> list:
    """Orders a warm-up forward for each later stage, then forwards and backwards in turn (arXiv 2104.04473)."""
    forwards = [pipeline_action(rank, torch_schedules.FORWARD, part) for part in range(micro_batches)]
    backwards = [pipeline_action(rank, torch_schedules.FULL_BACKWARD, part) for part in range(micro_batches)]
    ahead = min(pipeline_ranks - 1 - rank, micro_batches)
    pairs = zip(forwards[ahead:], backwards, strict=False)
    return forwards[:ahead] + [action for pair in pairs for action in pair] + backwards[micro_batches - ahead :]


def _torch_order(shape: PipelineShape, micro_batches: int) -> dict[int, list]:
    classes = {
        "interleaved": torch_schedules.ScheduleInterleaved1F1B,
        "zero_bubble": torch_schedules.ScheduleInterleavedZeroBubble,
    }
    schedule_class = torch_schedules.ScheduleZBVZeroBubble if shape.is_v_shaped else classes[shape.schedule]
    first = [stage for stage, group in enumerate(shape.pipeline_rank_of_stage) if group == 0]
    return pipeline_orders(schedule_class, first, shape.stages, shape.pipeline_ranks, micro_batches)


_KINDS = {
    torch_schedules.FORWARD: Work.FORWARD,
    torch_schedules.FULL_BACKWARD: Work.BACKWARD,
    torch_schedules.BACKWARD_INPUT: Work.BACKWARD_INPUT,
    torch_schedules.BACKWARD_WEIGHT: Work.BACKWARD_WEIGHT,
    torch_schedules.SEND_F: Work.SEND_FORWARD,
    torch_schedules.RECV_F: Work.RECEIVE_FORWARD,
    torch_schedules.SEND_B: Work.SEND_BACKWARD,
    torch_schedules.RECV_B: Work.RECEIVE_BACKWARD,
}


def _own(action) -> Action:
    return Action(_KINDS[action.computation_type], action.stage_index, action.microbatch_index)


FORWARD_WORKS = (Work.FORWARD, Work.SEND_FORWARD, Work.RECEIVE_FORWARD)


@lru_cache(maxsize=256)
def runs_forwards_first(shape: PipelineShape, micro_batches: int) -> bool:
    """Returns whether every pipeline rank runs all its forwards before its first backward."""
    orders = [[action.work in FORWARD_WORKS for action in order] for order in actions(shape, micro_batches)]
    return all(order == sorted(order, reverse=True) for order in orders)


def most_in_flight(order: Sequence[Action], stage: int) -> int:
    """Returns the peak number of micro-batches whose activations `stage` holds under an order of actions."""
    ends = {Work.BACKWARD, Work.BACKWARD_WEIGHT}
    now = most = 0
    for action in order:
        if action.stage == stage:
            now += action.work is Work.FORWARD
            most = max(most, now)
            now -= action.work in ends
    return most


def most_under_way(shape: PipelineShape, micro_batches: int) -> int:
    """Returns the most micro-batches whose activations one of the stages holds at once, in a step of so many."""
    if shape.stages == 1:
        return 1  # computed in turn, whatever the schedule
    orders = actions(shape, micro_batches)
    return max(most_in_flight(orders[rank], stage) for stage, rank in enumerate(shape.pipeline_rank_of_stage))
