# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Meetings of all ranks before collective calls that a user's script makes, so that a rank that does not come is named
instead of waited for.
"""

from __future__ import annotations

import itertools
import time

import torch.distributed as dist
from transformers.utils import logging

from galvatron_hf.utils.compat import default_store


logger = logging.get_logger(__name__)

WARNING_SECONDS = 10.0  # a rank that waits longer says so
_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.05


_numbers = itertools.count()  # of those that meet, in the same order on all ranks


class Meetings:
    """Has the ranks of the world meet before each collective call, in the store through which they met first.

    Args:
        timeout (`float`): seconds that a rank waits for the others.
    """

    def __init__(self, timeout: float):
        self.timeout, self._count = timeout, 0
        self._store: dist.Store | None = None

    def meet(self, call: str) -> None:
        """Waits until every rank calls it with the same name of a call. If a rank does not come in time, or comes with
        another call, RuntimeError names the ranks.
        """
        if dist.get_world_size() == 1:
            return
        if self._store is None:
            self._store = dist.PrefixStore(f"meetings of {next(_numbers)}", default_store())
        self._count += 1
        rank, ranks = dist.get_rank(), range(dist.get_world_size())
        self._store.set(f"{self._count}/{rank}", call)
        if self._store.add(f"{self._count}/arrived", 1) == len(ranks):  # the last one compares for all
            calls = {self._store.get(f"{self._count}/{other}") for other in ranks}
            self._store.set(f"{self._count}/complete", "alike" if len(calls) == 1 else "different")
        self._wait(call)
        alike = self._store.get(f"{self._count}/complete").decode()
        # All ranks are here, so all have left the meeting before.
        for key in (rank, "arrived", "complete") if rank == 0 else (rank,):
            self._store.delete_key(f"{self._count - 1}/{key}")
        if alike == "different":
            raise RuntimeError(self._other_calls(call))

    def _wait(self, call: str) -> None:
        began, pause, told = time.monotonic(), _FIRST_PAUSE, False
        while not self._store.check([f"{self._count}/complete"]):
            waited = time.monotonic() - began
            if waited > self.timeout:
                missing = self._missing()
                raise RuntimeError(
                    f"{call} was called on rank {dist.get_rank()}, and {_ranks(missing)} did not call it within "
                    f"{self.timeout:g} s (ddp_timeout); call it on every rank, not on rank 0 alone: files are written "
                    "by rank 0 only."
                )
            if waited > min(WARNING_SECONDS, self.timeout / 2) and not told:
                told = True
                logger.warning(f"{call}: rank {dist.get_rank()} waits for {_ranks(self._missing())} to call it too.")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _missing(self) -> list[int]:
        return [rank for rank in range(dist.get_world_size()) if not self._store.check([f"{self._count}/{rank}"])]

    def _other_calls(self, call: str) -> str:
        others = {rank: self._store.get(f"{self._count}/{rank}").decode() for rank in range(dist.get_world_size())}
        different = [f"rank {rank} called {other}" for rank, other in others.items() if other != call]
        return (
            f"Rank {dist.get_rank()} called {call}, and {', '.join(different)}; all ranks must make the same calls of "
            "the trainer in the same order."
        )


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
