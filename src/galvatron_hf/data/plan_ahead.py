# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Places the sequences of the next step while the current step is computed."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from galvatron_hf.data.placement import Placement


@dataclass(frozen=True, kw_only=True)
class Planned:
    """Holds a placement, the seconds that the planner took, and `hidden`: the placement was ready when it was needed.
    After an error of the planner, `failure` is its text, and the sequences are in the sampler's order.
    """

    placement: Placement
    seconds: float
    hidden: bool
    failure: str | None = None


class PlanAhead:
    """Plans steps, in the background if their lengths are known in advance. `plan` returns the placement of lengths
    [n] and depends on nothing else; `in_order` does the same and is used if `plan` fails.
    """

    def __init__(self, plan: Callable[[np.ndarray], Placement], in_order: Callable[[np.ndarray], Placement]):
        self._plan, self._in_order = plan, in_order
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="galvatron-planner")
        self._next: Future[tuple[np.ndarray, Planned] | None] | None = None

    def begin(self, lengths: Callable[[], np.ndarray | None]) -> None:
        """Starts to plan the next step in the background, where `lengths` is called; it returns None if unknown."""
        self._next = self._thread.submit(self._plan_next, lengths)

    def take(self, lengths: np.ndarray) -> Planned:
        """Returns the placement of a step with these lengths, and plans it now unless it was planned already."""
        ahead, self._next = self._next, None
        if ahead is not None:
            hidden = ahead.done()
            found = ahead.result()
            if found is not None and np.array_equal(found[0], lengths):
                return replace(found[1], hidden=hidden)
        return self._planned(lengths)

    def end(self) -> None:
        """Ends the thread after its current placement."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _plan_next(self, lengths: Callable[[], np.ndarray | None]) -> tuple[np.ndarray, Planned] | None:
        try:
            expected = lengths()
            return None if expected is None else (expected, self._planned(expected))
        except Exception:  # any error of a dataset: the lengths are known when its rows are read
            return None

    def _planned(self, lengths: np.ndarray) -> Planned:
        began, failure = time.perf_counter(), None
        try:
            placement = self._plan(lengths)
        except Exception as error:  # training goes on without it
            failure = f"{type(error).__name__}: {error}"
            placement = self._in_order(lengths)
        return Planned(placement=placement, seconds=time.perf_counter() - began, hidden=False, failure=failure)
