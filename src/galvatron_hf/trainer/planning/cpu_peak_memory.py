# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The peak of a CPU's allocated bytes, from the events of PyTorch's profiler."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from galvatron_hf.utils.compat import ProfilerEventType


_COLLECTIVES = ("c10d::", "_c10d_functional::")


def allocations_profiler() -> torch.autograd.profiler.profile:
    """Returns a profiler that records allocations, and the storages that operators are given."""
    return torch.autograd.profiler.profile(profile_memory=True, record_shapes=True)


@dataclass(kw_only=True)
class _Block:
    """Describes a block of memory. Times are in nanoseconds; `end` is None until the block is known to be free."""

    size: int
    begin: int
    last_use: int
    of_collective: bool
    end: int | None = None


def allocation_peak(profiler: torch.autograd.profiler.profile) -> int:
    """Returns the peak of the bytes that were allocated while the profiler ran. The profiler does not see blocks that
    threads of a process group free. If a block was given to a collective, or allocated by one, its end may be unseen.
    It then counts until the end of the last operator that was given it, even if a reference remains. Any other block
    counts until another block lies at its address.
    """
    return _peak(_seen(profiler))


# Time (ns), bytes, address, end (ns), and whether a collective did it. Bytes are negative for a freed block, and 0 for
# a block that an operator was given.
_Seen = tuple[int, int, int, int, bool]


def _peak(seen: Iterable[_Seen]) -> int:
    blocks, alive, starts = [], {}, []  # all; by start; the starts, rising

    def gone(start: int, time: int) -> None:
        alive.pop(start).end = time
        del starts[bisect.bisect_left(starts, start)]

    for time, size, start, end, of_collective in sorted(seen, key=lambda one: one[:2]):
        block = alive.get(start)
        if size > 0:
            first = bisect.bisect_left(starts, start)
            if first and starts[first - 1] + alive[starts[first - 1]].size > start:
                first -= 1
            for other in starts[first : bisect.bisect_left(starts, start + size)]:
                gone(other, time)
            alive[start] = _Block(size=size, begin=time, last_use=end, of_collective=of_collective)
            blocks.append(alive[start])
            bisect.insort(starts, start)
        elif block is not None and size < 0:
            block.of_collective = False  # whoever had it: its end was seen
            gone(start, time)
        elif block is not None:
            block.last_use = max(block.last_use, end)
            block.of_collective |= of_collective
    changes = [(block.begin, block.size) for block in blocks]
    for block in blocks:
        end = block.last_use if block.of_collective else block.end
        if end is not None:
            changes.append((end, -block.size))
    now = peak = 0
    for _, size in sorted(changes):
        now += size
        peak = max(peak, now)
    return peak


def _seen(profiler: torch.autograd.profiler.profile) -> list[_Seen]:
    seen, given = [], []
    trees = [(tree, False) for tree in profiler.kineto_results.experimental_event_tree()]
    while trees:
        event, inside = trees.pop()
        kind, fields = event.typed
        inside |= event.name.startswith(_COLLECTIVES)
        trees += [(child, inside) for child in event.children]
        if kind == ProfilerEventType.Allocation:
            seen.append((event.start_time_ns, fields.alloc_size, fields.ptr, event.start_time_ns, inside))
        elif kind == ProfilerEventType.TorchOp:
            given += [(event.start_time_ns, 0, start, event.end_time_ns, inside) for start in _storages(fields.inputs)]
    allocated = {start for _, _, start, _, _ in seen}
    return seen + [one for one in given if one[2] in allocated]


def _storages(given: Any) -> Iterator[int]:
    """Yields the addresses of the storages of an operator's tensors."""
    if isinstance(given, (list, tuple)):
        for one in given:
            yield from _storages(one)
    elif getattr(given, "storage_data_ptr", None):
        yield given.storage_data_ptr
