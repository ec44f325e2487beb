# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Lower bounds of the time of any placement in which several ranks may share a document, without a pipeline.

R is the sum over micro-batches of the seconds of their slowest ranks, their peaks. N ranks do at most N * R of work.
"""

from __future__ import annotations

import heapq
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from galvatron_hf.data.group_documents import SharedCost, allowed_degrees, tables
from galvatron_hf.data.placement import checked_lengths


_INTERVALS, _SPLITS = 12, 48  # of the highest peak: ranges at first, and how many of them are halved
_PRICES = np.concatenate([[0.0], np.geomspace(0.01, 4.0, 16)])  # of a token without use, relative to the cheapest one
_NARROW = 1e-3  # ranges of less than this share of R are not halved


def lower_bound(
    lengths: Sequence[int], ranks: int, cost: SharedCost, *, max_tokens: int | None, overhead: float = 0.0
) -> float:
    """Returns seconds that no placement undercuts in which a shared document takes as many tokens on each of its ranks
    as its largest share. It is the best of [`lower_bounds`], which has the same arguments and errors.
    """
    return max(lower_bounds(lengths, ranks, cost, max_tokens=max_tokens, overhead=overhead))


def lower_bounds(
    lengths: Sequence[int], ranks: int, cost: SharedCost, *, max_tokens: int | None, overhead: float = 0.0
) -> tuple[float, float, float]:
    """Returns three bounds in seconds. Each pays the overhead of the fewest micro-batches by tokens.

    - Work: all documents take their cheapest number of ranks.
    - Degrees: the micro-batches beside any one hold at least the tokens that do not fit into one. If they take r at
      least, no rank takes longer than R - r for a document, which needs enough ranks for that.
    - Room: a micro-batch with the highest peak P holds some documents, each on enough ranks for P, and the others the
      rest, on enough ranks for R - P. A rank that holds a share with much time for its tokens has no time left for as
      many other tokens as fit. These tokens are left to the other micro-batches, and make them slower. The bound is
      the least over P, by ranges of P. In a range, each document chooses what is cheapest if tokens without use have
      a price.

    Args:
        lengths (`Sequence[int]`): [n], tokens of each document.
        ranks (`int`): number of data ranks, N.
        cost (`SharedCost`): seconds of documents.
        max_tokens (`int` or `None`): tokens of one rank in one micro-batch; `None` for no limit.
        overhead (`float`): constant seconds of a micro-batch.

    Raises:
        ValueError: if a document does not fit even if all ranks share it, or a number is out of range.
    """
    lengths = checked_lengths(lengths, ranks, max_tokens, 1)
    if not len(lengths):
        return overhead, overhead, overhead
    limit = sys.maxsize // 4 if max_tokens is None else max_tokens
    different, counts = np.unique(lengths, return_counts=True)
    degrees = allowed_degrees(ranks, None, None)
    seconds, _ = tables(different, cost, degrees, limit)
    if np.isinf(seconds).all(axis=1).any():
        raise ValueError(
            f"a document of {different[-1]} tokens: {ranks} ranks with max_tokens={max_tokens} cannot hold it; raise "
            "one of them."
        )
    case = _Case(
        lengths=different, counts=counts, seconds=seconds, work=seconds * degrees, ranks=ranks, room=ranks * limit
    )
    least = case.least_work / ranks
    by_degrees = case.degrees_bound(least)
    fewest = max(1, -(-case.tokens // case.room)) * overhead
    return fewest + least, fewest + by_degrees, fewest + case.room_bound(by_degrees)


@dataclass(frozen=True)
class _Case:
    """Holds different lengths [n] and how often they stand, the seconds and the work by degree [n, degrees], and the
    tokens that fit into a micro-batch.
    """

    lengths: np.ndarray
    counts: np.ndarray
    seconds: np.ndarray
    work: np.ndarray
    ranks: int
    room: int

    @cached_property
    def cheapest(self) -> np.ndarray:
        return self.work.min(axis=1)

    @property
    def least_work(self) -> float:
        return float((self.cheapest * self.counts).sum())

    @property
    def tokens(self) -> int:
        return int((self.lengths * self.counts).sum())

    @cached_property
    def by_price(self) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and work of the first 0 ... n lengths, the cheapest tokens first."""
        order = np.argsort(self.cheapest / self.lengths, kind="stable")
        tokens, work = (self.lengths * self.counts)[order], (self.cheapest * self.counts)[order]
        return np.concatenate([[0], np.cumsum(tokens)]), np.concatenate([[0.0], np.cumsum(work)])

    def degrees_bound(self, least: float) -> float:
        """Returns the bound of R from the degrees that long documents need, at least `least`."""
        others = float(np.interp(max(0, self.tokens - self.room), *self.by_price)) / self.ranks

        def possible(peaks: float) -> bool:
            work = np.where(self.seconds <= peaks - others, self.work, np.inf).min(axis=1)
            return float((work * self.counts).sum()) <= self.ranks * peaks

        low = max(float(self.seconds.min(axis=1).max()) + others, least)
        return _smallest(possible, low, None)

    def room_bound(self, least: float) -> float:
        """Returns the bound of R from tokens without use, at least `least`."""
        tokens, work = self.by_price
        price = float((self.cheapest / self.lengths).min())  # of the cheapest token
        fewest = max(1, -(-self.tokens // self.room))
        # Short documents are left out: they have their cheapest work, and waste nothing.
        long = self.work[:, 0] > 0.25 * least / fewest
        long |= np.isinf(self.work[:, 0])
        if price <= 0 or not long.any():
            return least
        shape = self.seconds[long], self.work[long], self.counts[long]
        lengths, degrees = self.lengths[long][:, None], np.arange(1, self.seconds.shape[1] + 1)
        short = self.least_work - float((self.cheapest[long] * self.counts[long]).sum())
        prices = _PRICES * price
        highest = 2 * least

        def least_peaks(low: float, high: float) -> float:
            """Returns a bound of R if the highest peak is between `low` and `high`."""
            fits = shape[0] <= high
            spare = high - price * self.room / self.ranks  # seconds that are left if cheapest tokens fill a rank
            unused = np.maximum(shape[1] - price * lengths - spare * degrees, 0.0) / price if spare > 0 else 0.0
            unused = np.where(fits, unused, 0.0)
            own = np.where(fits, shape[1], np.inf)
            first = np.stack([(own + each * unused).min(axis=1) for each in prices])

            def possible(peaks: float) -> bool:
                other = np.where(shape[0] <= min(high, peaks - low), shape[1], np.inf).min(axis=1)
                held = float(np.interp(self.ranks * (peaks - low), work, tokens))
                free = held - (self.tokens - self.room)
                if free < 0:
                    return False
                needed = (np.minimum(first, other) * shape[2]).sum(axis=1) + short - prices * free
                return float(needed.max()) <= self.ranks * peaks

            return _smallest(possible, max(least, low), highest)

        lowest = float(self.seconds.min(axis=1).max())
        if lowest >= highest:
            return least
        ends = np.geomspace(lowest, highest, _INTERVALS + 1).tolist()
        ranges = [(least_peaks(low, high), low, high) for low, high in zip(ends[:-1], ends[1:], strict=True)]
        heapq.heapify(ranges)
        for _ in range(_SPLITS):
            reached, low, high = ranges[0]
            if high - low < _NARROW * least or reached >= highest:
                break
            heapq.heappop(ranges)
            middle = (low + high) / 2
            for half in ((low, middle), (middle, high)):
                heapq.heappush(ranges, (max(reached, least_peaks(*half)), *half))
        return min(ranges[0][0], highest)


def _smallest(possible: Callable[[float], bool], low: float, high: float | None) -> float:
    """Returns a number below which nothing is possible, from `low` to `high`; without a `high` there is one."""
    if possible(low):
        return low
    if high is None:
        high = 2 * low
        while not possible(high):
            low, high = high, 2 * high
    elif not possible(high):
        return high
    while high - low > 1e-5 * high:
        middle = (low + high) / 2
        if possible(middle):
            high = middle
        else:
            low = middle
    return low
