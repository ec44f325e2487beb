# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Observers that are told of every collective that this rank issues."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from torch import Tensor
from torch.distributed import ProcessGroup


Observer = Callable[[str, Tensor, ProcessGroup], None]

# A list and not a ContextVar: backward runs in autograd's own threads, which inherit no context.
_observers: list[Observer] = []


@contextlib.contextmanager
def observe_collectives(observer: Observer) -> Iterator[None]:
    """Calls `observer` for every collective of `collectives.py` and every message of `transfers.py` while the body
    runs. Its arguments are the kind ("all_reduce", "all_gather", "reduce_scatter", "all_to_all" or "send"), this
    rank's input and the process group.
    """
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


def record(kind: str, x: Tensor, group: ProcessGroup) -> None:
    """Tells every observer of a collective with this rank's input `x`."""
    for observer in _observers:
        observer(kind, x, group)
