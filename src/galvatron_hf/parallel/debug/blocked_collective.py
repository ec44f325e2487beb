# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Finds the collective in which a thread waits, from its Python stack, which also holds the collective's arguments.
Nothing is recorded in advance.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterable, Sequence
from types import FrameType, TracebackType

import torch.distributed as dist

from galvatron_hf.utils.compat import WAITING_FUNCTIONS


# The host of a GPU waits for it at the end of a step, and the GPU for other ranks.
DEVICE = "its device"

# Functions that wait for other ranks, in the form of `WAITING_FUNCTIONS`.
_WAITING = {
    "galvatron_hf/parallel/comm/collectives.py": {
        "all_reduce_sum": ("all_reduce", "group"),
        "all_gather_stacked": ("all_gather", "group"),
        "_scatter_sum_along": ("reduce_scatter", "group"),
        "all_to_all_pieces": ("all_to_all", "group"),
    },
    "galvatron_hf/parallel/data_parallel/replicated.py": {"finish": ("all_reduce of gradients", "self.group")},
    "galvatron_hf/parallel/pipeline/runtime.py": {"wait": ("a transfer between stages", "")},
    "galvatron_hf/utils/device.py": {"tolist": (DEVICE, "")},
    **WAITING_FUNCTIONS,
}


def stack_of(frame: FrameType) -> list[tuple[FrameType, int]]:
    """Returns the frames of a stack with their lines, from the outermost to `frame`."""
    return list(traceback.walk_stack(frame))[::-1]


def stack_of_error(trace: TracebackType | None) -> list[tuple[FrameType, int]]:
    """Returns the frames of an error with their lines, from the one that caught it to the one that raised it."""
    return list(traceback.walk_tb(trace))


def waiting_in(stack: Sequence[tuple[FrameType, int]]) -> str | None:
    """Returns the innermost collective of a stack, "all_reduce over ranks [0, 1]" for example; None without one."""
    for frame, _ in reversed(stack):
        path = frame.f_code.co_filename.replace("\\", "/")
        for file, functions in _WAITING.items():
            if path.endswith(file) and frame.f_code.co_name in functions:
                kind, group = functions[frame.f_code.co_name]
                return kind + _ranks(frame, group)
    return None


def waiting_threads() -> Iterable[str]:
    """Yields the collectives in which threads of this process wait; on a GPU another thread runs the backward."""
    for frame in sys._current_frames().values():
        waits = waiting_in(stack_of(frame))
        if waits is not None:
            yield waits


def format_stack(stack: Sequence[tuple[FrameType, int]], innermost: int = 12) -> str:
    """Formats the innermost lines of a stack like Python."""
    summary = traceback.StackSummary.extract(iter(stack))
    return "".join(traceback.format_list(summary[-innermost:])).rstrip()


def _ranks(frame: FrameType, group: str) -> str:
    """Describes the ranks of the group in a frame's variable, such as "group" or "self.group"."""
    if not group:
        return ""
    name, _, attribute = group.partition(".")
    value = frame.f_locals.get(name)
    value = getattr(value, attribute, None) if attribute else value
    value = dist.group.WORLD if value is None else value
    return f" over ranks {dist.get_process_group_ranks(value)}" if isinstance(value, dist.ProcessGroup) else ""
