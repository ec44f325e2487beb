# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Which sequences of a step stand in which packed micro-batch, on which data rank (arXiv 2412.07894, second stage).

Tokens bound a bin's memory, cost bounds its time, and equally many tokens are not equally much time.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from galvatron_hf.data import partition, partition_exact
from galvatron_hf.data.cost import SequenceCost
from galvatron_hf.data.partition import Bins, Items


PLANNERS = ("longest_first", "karmarkar_karp", "exact")
_COMPARISONS = 600_000  # pairs of sequences that the local searches of one placement compare
_SMALL = 1024  # up to so many sequences every number of micro-batches is tried with every start
_CLOSE = 1e-3  # a start this near to its bound is not tried with another number of micro-batches


@dataclass(frozen=True)
class Placement:
    """
    Where each sequence of a step is computed.

    Args:
        micro_batches (`tuple[tuple[tuple[int, ...], ...], ...]`): [micro-batch][data rank], the indices of the
            sequences there, ascending; some may be empty.
    """

    micro_batches: tuple[tuple[tuple[int, ...], ...], ...]

    def loads(self, lengths: Sequence[int], cost: SequenceCost) -> np.ndarray:
        """Seconds of each bin, [micro-batch, data rank]."""
        costs = cost.of(lengths)
        return np.array([[costs[list(rank)].sum() for rank in ranks] for ranks in self.micro_batches])

    def seconds(self, lengths: Sequence[int], cost: SequenceCost, *, overhead: float = 0.0, stages: int = 1) -> float:
        """What the step takes: the objective of [`place`]."""
        loads = self.loads(lengths, cost)
        if stages == 1:
            return float((loads.max(axis=1) + overhead).sum())
        return float((loads.max() + overhead) * (stages - 1 + len(loads)))

    def imbalance(self, lengths: Sequence[int], cost: SequenceCost, *, stages: int = 1) -> float:
        """
        Slowest / mean, 1 when nobody waits: over the ranks of each micro-batch, weighted by its mean, or with a
        pipeline over all bins.
        """
        loads = self.loads(lengths, cost)
        slowest, mean = loads.max(axis=1).sum(), loads.mean(axis=1).sum()
        if stages > 1:
            slowest = loads.max() * len(loads)
        return float(slowest / mean) if mean else 1.0


def place(
    lengths: Sequence[int],
    ranks: int,
    cost: SequenceCost,
    *,
    max_tokens: int | None,
    overhead: float = 0.0,
    stages: int = 1,
    least_micro_batches: int = 1,
    allowed: Callable[[int], bool] | None = None,
    planner: str = "longest_first",
    effort: int | None = None,
) -> Placement:
    """
    Places every sequence once so that the step is short.

    Without a pipeline the data ranks wait for each other in every micro-batch: the sum over micro-batches of (slowest
    rank + overhead) is minimised. With p stages and v micro-batches it is `(slowest bin + overhead) * (p - 1 + v)`.
    v is chosen too. The same arguments give the same placement everywhere.

    Args:
        lengths (`Sequence[int]`): [n], tokens of each sequence.
        ranks (`int`): Data ranks, N.
        max_tokens (`int` or `None`): Tokens that one rank holds of one micro-batch; `None` for any number.
        overhead (`float`): Seconds of a micro-batch whatever is in it.
        stages (`int`): Pipeline stages, p.
        least_micro_batches (`int`): The fewest that the schedule can run.
        allowed (`Callable`, *optional*): Whether it can run so many; there is always a larger number that it can.
        planner (`str`): "longest_first" (longest first and Karmarkar-Karp, then local search from there, so never
            worse than either), "karmarkar_karp", or "exact" (HiGHS; small cases only).
        effort (`int`, *optional*): How long "exact" may search before it gives up: nodes of a search times sequences
            times bins. Without a bound two dozen sequences may take minutes.

    Raises:
        ValueError: for a sequence longer than `max_tokens`, an unknown planner, or numbers out of range.
        partition_exact.TooLargeError: a ValueError, for a case too large for "exact".
    """
    lengths = _checked(lengths, ranks, max_tokens, least_micro_batches)
    if planner not in PLANNERS:
        raise ValueError(f"planner={planner!r}: no such planner; choose one of {', '.join(PLANNERS)}.")
    if stages < 1 or not (np.isfinite(overhead) and overhead >= 0):
        raise ValueError(f"stages={stages}, overhead={overhead}: out of range; use stages >= 1 and overhead >= 0.")
    order = np.argsort(-lengths, kind="stable")
    step = _Step(
        items=Items(costs=cost.of(lengths[order]), tokens=lengths[order]),
        ranks=ranks,
        max_tokens=sys.maxsize if max_tokens is None else max_tokens,
        overhead=overhead,
        stages=stages,
        least=least_micro_batches,
        allowed=allowed or (lambda count: True),
    )
    micro_batches, assignment = step.search(planner)
    if planner == "exact":
        micro_batches, assignment = step.solve(micro_batches, assignment, effort)
    return _placement(order, assignment, micro_batches, ranks, step.at_least)


def in_order(lengths: Sequence[int], ranks: int, *, max_tokens: int | None, least_micro_batches: int = 1) -> Placement:
    """
    The sequences in their own order, cut into contiguous pieces of about equally many tokens.

    Needs no cost and finds a placement whenever every sequence fits; the arguments are those of [`place`].

    Raises:
        ValueError: for a sequence longer than `max_tokens`, or numbers out of range.
    """
    lengths = _checked(lengths, ranks, max_tokens, least_micro_batches)
    ends = np.concatenate([[0], np.cumsum(lengths)])
    largest = int(ends[-1]) if max_tokens is None else max_tokens
    micro_batches = max(least_micro_batches, -(-(len(_cuts(ends, largest)) - 1) // ranks))
    enough, too_few = largest, int(lengths.max(initial=0)) - 1
    while enough - too_few > 1:
        tokens = (enough + too_few) // 2
        if len(_cuts(ends, tokens)) - 1 <= micro_batches * ranks:
            enough = tokens
        else:
            too_few = tokens
    cuts = np.array(_cuts(ends, enough))
    assignment = np.searchsorted(cuts, np.arange(len(lengths)), side="right") - 1
    return _placement(np.arange(len(lengths)), assignment, micro_batches, ranks, lambda filled: micro_batches)


@dataclass(frozen=True, kw_only=True)
class _Step:
    """What [`place`] was asked for."""

    items: Items
    ranks: int
    max_tokens: int
    overhead: float
    stages: int
    least: int
    allowed: Callable[[int], bool]

    def at_least(self, count: int) -> int:
        """The next number of micro-batches that the schedule can run."""
        return next(number for number in itertools.count(max(count, self.least)) if self.allowed(number))

    def bins(self, micro_batches: int) -> Bins:
        """A pipeline waits for the slowest of all bins, hence they are one group."""
        bins = Bins(groups=micro_batches, width=self.ranks, max_tokens=self.max_tokens)
        return bins.flat() if self.stages > 1 else bins

    def seconds(self, micro_batches: int, peaks: float) -> float:
        if self.stages == 1:
            return peaks + self.overhead * micro_batches
        return (peaks + self.overhead) * (self.stages - 1 + micro_batches)

    def bound(self, micro_batches: int) -> float:
        """No placement takes fewer seconds."""
        mean = self.items.costs.sum() / (self.ranks * (micro_batches if self.stages > 1 else 1))
        return self.seconds(micro_batches, max(mean, self.items.costs.max(initial=0)))

    def counts(self) -> Iterator[int]:
        """Numbers of micro-batches, the most promising first; there is always one that all sequences fit into."""
        fewest = max(self.least, -(-int(self.items.tokens.sum()) // (self.ranks * self.max_tokens)))
        most = self.at_least(max(fewest, -(-len(self.items) // self.ranks)))
        found = filter(self.allowed, range(fewest, most + 1))
        return iter(sorted(found, key=lambda count: (self.bound(count), count)))

    def _fewest_by_tokens(self) -> int:
        """Micro-batches that surely suffice; where heuristics found no place for all in some, fewer rarely do."""
        each = partition.best_fit(self.items, Bins(groups=len(self.items), width=1, max_tokens=self.max_tokens))
        return -(-(int(each.max(initial=0)) + 1) // self.ranks)

    def search(self, planner: str) -> tuple[int, np.ndarray]:
        """The number of micro-batches and the assignment that a heuristic finds."""
        left = tries = 3 if len(self.items) <= _SMALL else 2
        best, limit, fewest = None, np.inf, 0
        for count in self.counts():
            # What is tried depends on no planner, so that the default, which takes the best, is the best of all.
            if left == 0 or self.bound(count) >= limit:
                break
            if count < fewest:
                continue
            bins = self.bins(count)
            starts = _starts(self.items, bins, thorough=best is None or len(self.items) <= _SMALL)
            if not starts:
                fewest = fewest or self._fewest_by_tokens()
                continue
            left -= 1
            reached = min(bins.peaks(self.items, start) for start in starts.values())
            limit = min(limit, self.seconds(count, reached))
            if planner == "karmarkar_karp":
                if best is not None and "karmarkar_karp" not in starts:
                    continue
                found = starts.get("karmarkar_karp", next(iter(starts.values())))
            else:
                found = _improve(self.items, bins, list(starts.values()), _COMPARISONS // tries)
            seconds = self.seconds(count, bins.peaks(self.items, found))
            if best is None or seconds < best[0]:
                best = seconds, count, found
            if self.seconds(count, reached) <= self.bound(count) * (1 + _CLOSE):
                break
        return best[1:]

    def solve(self, micro_batches: int, assignment: np.ndarray, effort: int | None) -> tuple[int, np.ndarray]:
        """The best there is, where `assignment` is what a heuristic found."""
        best = self.seconds(micro_batches, self.bins(micro_batches).peaks(self.items, assignment))
        if self.stages == 1:
            # Two micro-batches whose non-empty bins fit side by side are better as one, so that in the best placement
            # any two of them have more than `ranks` such bins.
            most = max(self.least, 2 * (len(self.items) // (self.ranks + 1)) + 1)
            counts = [self.least if self.max_tokens >= self.items.tokens.sum() else most]
        else:
            counts = list(self.counts())
        for count in counts:
            bins = self.bins(count)
            if self.bound(self.least if self.stages == 1 else count) >= best:
                continue
            limits = dict(least_groups=self.least, effort=effort)
            found = partition_exact.solve(self.items, bins, overhead=self.overhead, **limits)
            if found is None:
                continue
            used = count if self.stages > 1 else max(self.least, int(found.max(initial=0)) // self.ranks + 1)
            seconds = self.seconds(used, bins.peaks(self.items, found))
            if seconds < best:
                best, micro_batches, assignment = seconds, used, found
        return micro_batches, assignment


def _starts(items: Items, bins: Bins, thorough: bool) -> dict[str, np.ndarray]:
    """Assignments by planner, without those that do not fit; by tokens alone if none does."""
    starts = {"longest_first": partition.longest_first(items, bins)}
    if thorough:
        if bins.groups > 1:
            starts["flat"] = partition.longest_first(items, bins.flat())
        starts["karmarkar_karp"] = partition.karmarkar_karp(items, bins)
    if all(start is None for start in starts.values()):
        starts["best_fit"] = partition.best_fit(items, bins)
    return {name: bins.regroup(items, start) for name, start in starts.items() if start is not None}


def _improve(items: Items, bins: Bins, starts: list[np.ndarray], comparisons: int) -> np.ndarray:
    """The best of local searches from the starts, the better ones first, until so many pairs were compared."""
    ordered = sorted(starts, key=lambda start: bins.peaks(items, start))
    best = ordered[0]
    for start in ordered:
        found, comparisons = partition.local_search(items, bins, start, comparisons)
        found = bins.regroup(items, found)
        if bins.peaks(items, found) < bins.peaks(items, best):
            best = found
    return best


def _checked(lengths: Sequence[int], ranks: int, max_tokens: int | None, least_micro_batches: int) -> np.ndarray:
    lengths = np.asarray(lengths, dtype=np.int64)
    if ranks < 1 or least_micro_batches < 1 or (max_tokens is not None and max_tokens < 1):
        raise ValueError(
            f"ranks={ranks}, least_micro_batches={least_micro_batches}, max_tokens={max_tokens}: each is at least 1; "
            "raise it."
        )
    if lengths.ndim != 1:
        raise ValueError(f"lengths of shape {lengths.shape}: each sequence has one length; pass a vector.")
    if lengths.min(initial=1) < 1:
        raise ValueError(f"a sequence of {lengths.min()} tokens: there is nothing to compute; leave it out.")
    if max_tokens is not None and len(lengths) and lengths.max() > max_tokens:
        raise ValueError(
            f"a sequence of {lengths.max()} tokens: it does not fit into max_tokens={max_tokens}; raise max_tokens or "
            "truncate or split what is longer."
        )
    return lengths


def _cuts(ends: np.ndarray, tokens: int) -> list[int]:
    """Where pieces of at most so many tokens begin when each is as long as possible, and behind the last one, n."""
    cuts = [0]
    while cuts[-1] < len(ends) - 1:
        cuts.append(int(np.searchsorted(ends, ends[cuts[-1]] + tokens, side="right")) - 1)
    return cuts


def _placement(
    order: np.ndarray, assignment: np.ndarray, micro_batches: int, ranks: int, at_least: Callable[[int], int]
) -> Placement:
    """From the bin of the i-th longest sequence; of empty micro-batches there are as few as there may be."""
    table: list[list[list[int]]] = [[[] for _ in range(ranks)] for _ in range(micro_batches)]
    for index, place in sorted(zip(order.tolist(), assignment.tolist(), strict=True)):
        table[place // ranks][place % ranks].append(index)
    filled = [row for row in table if any(row)]
    filled += [[[] for _ in range(ranks)]] * (at_least(len(filled)) - len(filled))
    return Placement(micro_batches=tuple(tuple(tuple(bin_) for bin_ in row) for row in filled))
