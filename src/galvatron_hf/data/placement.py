# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Places the sequences of a step in packed micro-batches of data ranks (arXiv 2412.07894, second stage).
A bin is one data rank in one micro-batch. Its tokens determine its memory, the cost of its sequences its time.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from galvatron_hf.data import partition, partition_exact
from galvatron_hf.data.cost import GroupCost, SequenceCost
from galvatron_hf.data.partition import Bins, Items


PLANNERS = ("longest_first", "karmarkar_karp", "exact")
_COMPARISONS = 600_000  # pairs of sequences that the local searches of one placement may compare
_SMALL = 1024  # up to so many sequences, every start is tried for every number of micro-batches
_CLOSE = 1e-3  # a result this near to its lower bound ends the search


class SharedSequence(NamedTuple):
    """Names a sequence that several data ranks share, these ranks, and how they compute its attention: an execution
    of [`~galvatron_hf.plan.deal.Deal`].
    """

    sequence: int
    ranks: tuple[int, ...]
    execution: str


@dataclass(frozen=True)
class Placement:
    """Holds a step's sequences: `micro_batches[micro-batch][data rank]` are the ascending indices of those that a rank
    has whole, if any, and `shared[micro-batch]` those that several ranks share. `recompute` says whether layers are
    recomputed in the step ("full" or "none"), if not as the plan says. `plan` numbers the plan under which the step is
    computed, 0 for the optimizer's. `others` place the sequences of the same micro-batches for layers of other context
    degrees.
    """

    micro_batches: tuple[tuple[tuple[int, ...], ...], ...]
    shared: tuple[tuple[SharedSequence, ...], ...] = ()
    recompute: str | None = None
    plan: int = 0
    others: Mapping[int, Placement] = field(default_factory=dict)

    def shared_in(self, micro_batch: int) -> tuple[SharedSequence, ...]:
        """Returns the sequences that ranks share in a micro-batch."""
        return self.shared[micro_batch] if self.shared else ()

    def loads(self, lengths: Sequence[int], cost: SequenceCost | GroupCost) -> np.ndarray:
        """Returns the seconds of each bin, [micro-batch, data rank]; shared sequences need a [`GroupCost`]."""
        costs = (cost.sequence if isinstance(cost, GroupCost) else cost).seconds(lengths)
        loads = np.array([[costs[list(rank)].sum() for rank in ranks] for ranks in self.micro_batches])
        for row, sequences in zip(loads, self.shared):
            for one in sequences:
                row[list(one.ranks)] += cost.seconds(np.array([lengths[one.sequence]]), len(one.ranks))
        return loads

    def seconds(
        self, lengths: Sequence[int], cost: SequenceCost | GroupCost, *, overhead: float = 0.0, stages: int = 1
    ) -> float:
        """Returns the time of the step, the objective of [`place`]."""
        return step_seconds(self.loads(lengths, cost), overhead, stages)

    def imbalance(self, lengths: Sequence[int], cost: SequenceCost | GroupCost, *, stages: int = 1) -> float:
        """Returns slowest / mean time, 1 if no rank waits. Without a pipeline it is taken over the ranks of each
        micro-batch, weighted by its mean, and with one over all bins.
        """
        return step_imbalance(self.loads(lengths, cost), stages)


def step_seconds(loads: np.ndarray, overhead: float, stages: int) -> float:
    """Returns the time of a step, the objective of [`place`], from the seconds of each bin, [micro-batch, rank]."""
    if stages == 1:
        return float((loads.max(axis=1) + overhead).sum())
    return float((loads.max() + overhead) * (stages - 1 + len(loads)))


def step_imbalance(loads: np.ndarray, stages: int) -> float:
    """Returns slowest / mean time of a step from the seconds of each bin; see [`Placement.imbalance`]."""
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
    """Places every sequence once, and chooses the number of micro-batches v, so that the step is short.

    Without a pipeline, data ranks wait for each other in every micro-batch, and the step takes the sum over
    micro-batches of (slowest rank + overhead). With p stages it takes `(slowest bin + overhead) * (p - 1 + v)`. The
    same arguments give the same placement everywhere.

    Args:
        lengths (`Sequence[int]`): [n], tokens of each sequence.
        ranks (`int`): number of data ranks.
        max_tokens (`int` or `None`): tokens of one rank in one micro-batch; `None` for no limit.
        overhead (`float`): constant seconds of a micro-batch.
        stages (`int`): number of pipeline stages, p.
        least_micro_batches (`int`): smallest v that the schedule can run.
        allowed (`Callable`, *optional*): tells if the schedule can run v micro-batches; some v above any number is
            allowed.
        planner (`str`): "longest_first" (longest first and Karmarkar-Karp, both improved by local search),
            "karmarkar_karp", or "exact" (HiGHS; small cases only).
        effort (`int`, *optional*): limit of nodes * sequences * bins for "exact". Without it two dozen sequences may
            take minutes.

    Raises:
        ValueError: if a sequence is longer than `max_tokens`, the planner is unknown, or a number is out of range.
        partition_exact.TooLargeError: a ValueError, if the case is too large for "exact".
    """
    lengths = _checked(lengths, ranks, max_tokens, least_micro_batches)
    if planner not in PLANNERS:
        raise ValueError(f"planner={planner!r}: no such planner; choose one of {', '.join(PLANNERS)}.")
    if stages < 1 or not (np.isfinite(overhead) and overhead >= 0):
        raise ValueError(f"stages={stages}, overhead={overhead}: out of range; use stages >= 1 and overhead >= 0.")
    order = np.argsort(-lengths, kind="stable")
    problem = _Problem(
        items=Items(costs=cost.seconds(lengths[order]), tokens=lengths[order]),
        ranks=ranks,
        max_tokens=sys.maxsize if max_tokens is None else max_tokens,
        overhead=overhead,
        stages=stages,
        least=least_micro_batches,
        allowed=allowed or (lambda count: True),
    )
    micro_batches, assignment = problem.search(planner)
    if planner == "exact":
        micro_batches, assignment = problem.solve(micro_batches, assignment, effort)
    return _placement(order, assignment, micro_batches, ranks, problem.at_least)


def in_order(lengths: Sequence[int], ranks: int, *, max_tokens: int | None, least_micro_batches: int = 1) -> Placement:
    """Places the sequences in their own order, in contiguous pieces with about equally many tokens. Needs no cost, and
    finds a placement whenever every sequence fits. Its arguments and errors are those of [`place`].
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
class _Problem:
    """Holds the arguments of [`place`], longest sequence first."""

    items: Items
    ranks: int
    max_tokens: int
    overhead: float
    stages: int
    least: int
    allowed: Callable[[int], bool]

    def at_least(self, count: int) -> int:
        """Returns the smallest number of micro-batches from `count` on that the schedule can run."""
        return next(number for number in itertools.count(max(count, self.least)) if self.allowed(number))

    def bins(self, micro_batches: int) -> Bins:
        """Returns the bins; those of a pipeline are one group, because it waits for the slowest of all."""
        bins = Bins(groups=micro_batches, width=self.ranks, max_tokens=self.max_tokens)
        return bins.flat() if self.stages > 1 else bins

    def seconds(self, micro_batches: int, peaks: float) -> float:
        if self.stages == 1:
            return peaks + self.overhead * micro_batches
        return (peaks + self.overhead) * (self.stages - 1 + micro_batches)

    def bound(self, micro_batches: int) -> float:
        """Returns a lower bound of the seconds of any placement."""
        mean = self.items.costs.sum() / (self.ranks * (micro_batches if self.stages > 1 else 1))
        return self.seconds(micro_batches, max(mean, self.items.costs.max(initial=0)))

    def counts(self) -> Iterator[int]:
        """Yields numbers of micro-batches, the lowest bound first; all sequences fit into one of them."""
        fewest = max(self.least, -(-int(self.items.tokens.sum()) // (self.ranks * self.max_tokens)))
        most = self.at_least(max(fewest, -(-len(self.items) // self.ranks)))
        found = filter(self.allowed, range(fewest, most + 1))
        return iter(sorted(found, key=lambda count: (self.bound(count), count)))

    def _fewest_by_tokens(self) -> int:
        """Returns a number of micro-batches that best fit fills; fewer rarely suffice if other heuristics failed."""
        each = partition.best_fit(self.items, Bins(groups=len(self.items), width=1, max_tokens=self.max_tokens))
        return -(-(int(each.max(initial=0)) + 1) // self.ranks)

    def search(self, planner: str) -> tuple[int, np.ndarray]:
        left = tries = 3 if len(self.items) <= _SMALL else 2
        best, limit, fewest = None, np.inf, 0
        for count in self.counts():
            # All planners try the same numbers, so that the default, which takes the best start, is never worse.
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
        """Returns the best solution; if none is better, the given one of a heuristic."""
        best = self.seconds(micro_batches, self.bins(micro_batches).peaks(self.items, assignment))
        if self.stages == 1:
            # Two micro-batches with at most `ranks` non-empty bins together are better as one. So any two have more in
            # the best placement.
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
    """Returns assignments by planner, without those that do not fit; by best fit if none does."""
    starts = {"longest_first": partition.longest_first(items, bins)}
    if thorough:
        if bins.groups > 1:
            starts["flat"] = partition.longest_first(items, bins.flat())
        starts["karmarkar_karp"] = partition.karmarkar_karp(items, bins)
    if all(start is None for start in starts.values()):
        starts["best_fit"] = partition.best_fit(items, bins)
    return {name: bins.regroup(items, start) for name, start in starts.items() if start is not None}


def _improve(items: Items, bins: Bins, starts: list[np.ndarray], comparisons: int) -> np.ndarray:
    """Returns the best result of local searches from the starts, best start first, within `comparisons` pairs."""
    ordered = sorted(starts, key=lambda start: bins.peaks(items, start))
    best = ordered[0]
    for start in ordered:
        found, comparisons = partition.local_search(items, bins, start, comparisons)
        found = bins.regroup(items, found)
        if bins.peaks(items, found) < bins.peaks(items, best):
            best = found
    return best


def _checked(lengths: Sequence[int], ranks: int, max_tokens: int | None, least_micro_batches: int) -> np.ndarray:
    lengths = checked_lengths(lengths, ranks, max_tokens, least_micro_batches)
    if max_tokens is not None and len(lengths) and lengths.max() > max_tokens:
        raise ValueError(
            f"a sequence of {lengths.max()} tokens: it does not fit into max_tokens={max_tokens}; raise max_tokens or "
            "truncate or split what is longer."
        )
    return lengths


def checked_lengths(
    lengths: Sequence[int], ranks: int, max_tokens: int | None, least_micro_batches: int
) -> np.ndarray:
    """Returns the tokens of sequences as an int64 vector, [n].

    Raises:
        ValueError: if the lengths are no vector, or one of them or of the numbers is below 1.
    """
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
    return lengths


def _cuts(ends: np.ndarray, tokens: int) -> list[int]:
    """Returns the starts of the longest possible pieces of at most `tokens` tokens, and n."""
    cuts = [0]
    while cuts[-1] < len(ends) - 1:
        cuts.append(int(np.searchsorted(ends, ends[cuts[-1]] + tokens, side="right")) - 1)
    return cuts


def _placement(
    order: np.ndarray, assignment: np.ndarray, micro_batches: int, ranks: int, at_least: Callable[[int], int]
) -> Placement:
    """Builds the placement from the bin of the i-th longest sequence, with as few empty micro-batches as allowed."""
    table: list[list[list[int]]] = [[[] for _ in range(ranks)] for _ in range(micro_batches)]
    for index, bin_ in sorted(zip(order.tolist(), assignment.tolist(), strict=True)):
        table[bin_ // ranks][bin_ % ranks].append(index)
    filled = [row for row in table if any(row)]
    filled += [[[] for _ in range(ranks)]] * (at_least(len(filled)) - len(filled))
    return Placement(micro_batches=tuple(tuple(tuple(bin_) for bin_ in row) for row in filled))
