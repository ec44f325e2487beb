# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Counts the collectives that this rank issues through `galvatron_hf.parallel.comm.collectives`."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor
from torch.distributed import ProcessGroup

from galvatron_hf.parallel.comm.collective_log import observe_collectives


@dataclass(frozen=True, kw_only=True)
class CollectiveCall:
    """
    One collective as one rank saw it.

    Args:
        kind (`str`): "all_reduce", "all_gather", "reduce_scatter" or "all_to_all".
        group_size (`int`): Number of ranks in the group.
        bytes (`int`): Size of this rank's input to the collective.
    """

    kind: str
    group_size: int
    bytes: int


@dataclass(kw_only=True)
class CollectiveLog:
    """Calls recorded by [`count_collectives`], in the order in which this rank issued them."""

    calls: list[CollectiveCall] = field(default_factory=list)

    def add(self, kind: str, x: Tensor, group: ProcessGroup) -> None:
        """Notes one call."""
        size = x.numel() * x.element_size()
        self.calls.append(CollectiveCall(kind=kind, group_size=group.size(), bytes=size))

    def count(self, kind: str | None = None) -> int:
        """Number of calls, of one kind or of all."""
        return sum(kind is None or call.kind == kind for call in self.calls)

    def bytes(self, kind: str | None = None) -> int:
        """Bytes that this rank put into its calls, of one kind or of all."""
        return sum(call.bytes for call in self.calls if kind is None or call.kind == kind)


@contextlib.contextmanager
def count_collectives() -> Iterator[CollectiveLog]:
    """
    Records every collective of `collectives.py` on this rank while the context is open, forward and backward.

    Yields:
        `CollectiveLog`: Filled as the calls happen. Contexts may be nested; each sees the calls inside it.
    """
    log = CollectiveLog()
    with observe_collectives(lambda *call: log.add(*call)):  # equal methods could not be told apart
        yield log
