# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Heuristics that assign items with a cost and a size to bins with a capacity, so that the slowest bins are fast.

Bins form groups. The objective is the sum over groups of the load of the most loaded bin. With one group this is the
problem of identical parallel machines (P||Cmax). Items are ordered longest first, so costs and tokens never grow. An
assignment is an int array [n]: the bin of each item, numbered `group * width + bin in the group`.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np


_PARTNERS = 8  # bins with the largest gaps, which local search tries first
_STEP = 4000  # fixed cost of one search, in comparisons
_CLOSE = 1e-4  # local search skips a group whose slowest bin is this near to its mean


@dataclass(frozen=True, kw_only=True)
class Items:
    """Holds the items to assign, longest first: costs in seconds and tokens, [n], never growing."""

    costs: np.ndarray
    tokens: np.ndarray

    def __len__(self) -> int:
        return len(self.costs)


@dataclass(frozen=True, kw_only=True)
class Bins:
    """Describes groups of `width` bins with a capacity of `max_tokens`; the bins of a group wait for each other."""

    groups: int
    width: int
    max_tokens: int

    @property
    def count(self) -> int:
        return self.groups * self.width

    def flat(self) -> Bins:
        return Bins(groups=1, width=self.count, max_tokens=self.max_tokens)

    def loads(self, items: Items, assignment: np.ndarray) -> np.ndarray:
        """Returns the seconds of each bin, [groups, width]."""
        return np.bincount(assignment, items.costs, self.count).reshape(self.groups, self.width)

    def peaks(self, items: Items, assignment: np.ndarray) -> float:
        """Returns the sum over groups of the seconds of the most loaded bin."""
        return float(self.loads(items, assignment).max(axis=1).sum())

    def regroup(self, items: Items, assignment: np.ndarray) -> np.ndarray:
        """Regroups the bins, most loaded first: the grouping with the smallest sum of peaks."""
        order = np.argsort(-self.loads(items, assignment).ravel(), kind="stable")
        bin_ = np.empty_like(order)
        bin_[order] = np.arange(self.count)
        return bin_[assignment]


def longest_first(items: Items, bins: Bins, held: np.ndarray | None = None) -> np.ndarray | None:
    """Assigns each item to the bin with room that is farthest below the slowest bin of its group. With one group this
    is the least loaded bin. With several groups, a group's peak is raised only if no gap is wide enough. The group
    with the most bins with room is then chosen. So long items gather in few groups, and short items fill the gaps.
    Returns `None` if an item has no room. `held` is an assignment to start from, in which -1 marks unassigned items.
    """
    assignment = np.full(len(items), -1) if held is None else held.copy()
    placed, width = assignment >= 0, bins.width
    load = np.bincount(assignment[placed], items.costs[placed], bins.count).tolist()
    used = np.bincount(assignment[placed], items.tokens[placed], bins.count).tolist()
    heaps = [[(load[b], b) for b in range(g * width, (g + 1) * width)] for g in range(bins.groups)]
    for heap in heaps:
        heapq.heapify(heap)
    peaks = [max(load[g * width : (g + 1) * width]) for g in range(bins.groups)]
    gaps = [peak - heap[0][0] for peak, heap in zip(peaks, heaps, strict=True)]
    full: list[tuple[float, int]] = []  # bins without room for the current item, the emptiest first
    costs, tokens, chosen = items.costs.tolist(), items.tokens.tolist(), assignment.tolist()
    for item in np.flatnonzero(~placed).tolist():
        limit = bins.max_tokens - tokens[item]
        while full and full[0][0] <= limit:
            bin_ = heapq.heappop(full)[1]
            group = bin_ // width
            heapq.heappush(heaps[group], (load[bin_], bin_))
            gaps[group] = peaks[group] - heaps[group][0][0]
        while True:
            group = gaps.index(max(gaps))
            if gaps[group] < costs[item] and bins.groups > 1:  # a peak must rise: choose the group with the most bins
                group = max(range(bins.groups), key=lambda g: (len(heaps[g]), gaps[g], -g))
            heap = heaps[group]
            if not heap:
                return None
            bin_ = heap[0][1]
            if used[bin_] <= limit:
                break
            heapq.heappop(heap)
            heapq.heappush(full, (used[bin_], bin_))
            gaps[group] = peaks[group] - heap[0][0] if heap else -1.0
        chosen[item] = bin_
        used[bin_] += tokens[item]
        load[bin_] += costs[item]
        heapq.heapreplace(heap, (load[bin_], bin_))
        peaks[group] = max(peaks[group], load[bin_])
        gaps[group] = peaks[group] - heap[0][0]
    return np.array(chosen, dtype=np.int64)


def best_fit(items: Items, bins: Bins) -> np.ndarray | None:
    """Assigns each item to the fullest bin with room (best-fit decreasing), whatever its cost; `None` if full."""
    rooms = [(bins.max_tokens, bin_) for bin_ in range(bins.count)]
    chosen = []
    for tokens in items.tokens.tolist():
        index = bisect_left(rooms, (tokens, -1))
        if index == len(rooms):
            return None
        room, bin_ = rooms.pop(index)
        insort(rooms, (room - tokens, bin_))
        chosen.append(bin_)
    return np.array(chosen, dtype=np.int64)


def karmarkar_karp(items: Items, bins: Bins) -> np.ndarray | None:
    """Partitions the items by largest differencing, ignoring the bins' groups; items above a bin's capacity are then
    assigned longest first. Returns `None` if an item has no room.
    """
    assignment = _largest_differencing(items.costs.tolist(), bins.count)
    used = [0] * bins.count
    held = assignment.tolist()
    for item, (bin_, tokens) in enumerate(zip(held, items.tokens.tolist(), strict=True)):
        if used[bin_] + tokens > bins.max_tokens:
            held[item] = -1
        else:
            used[bin_] += tokens
    return longest_first(items, bins.flat(), np.array(held, dtype=np.int64))


def _largest_differencing(costs: list[float], ways: int) -> np.ndarray:
    """Joins the two partial partitions with the largest spreads until one is left (Karmarkar and Karp, 1982). The
    largest part of one is joined to the smallest part of the other. A partition is the ascending list of its non-empty
    parts, each a (load, first item). In ties the joined partition comes first, so that it grows by single items until
    no part is empty. Nearly all joins are of this cheap kind.
    """
    if not costs:
        return np.empty(0, dtype=np.int64)
    joined_to = list(range(len(costs)))  # the item whose part this item's part was joined to
    singles, waiting = 0, []  # the items from `singles` on, longest first, and a heap of (-spread, first item, parts)
    partition = None
    while partition is None or waiting or singles < len(costs):
        if waiting and (singles == len(costs) or waiting[0] < (-costs[singles], singles)):
            other = heapq.heappop(waiting)
        else:
            other = (-costs[singles], singles, [(costs[singles], singles)])
            singles += 1
        if partition is None:
            partition = other
            continue
        parts = _joined(partition[2], other[2], ways, joined_to)
        spread = parts[-1][0] - (parts[0][0] if len(parts) == ways else 0.0)
        partition = heapq.heappushpop(waiting, (-spread, partition[1], parts))
        if singles < len(costs) and (-costs[singles], singles) < partition:
            heapq.heappush(waiting, partition)
            partition = None
    place_of = {item: bin_ for bin_, (_, item) in enumerate(partition[2])}
    result = np.empty(len(costs), dtype=np.int64)
    for item in range(len(costs)):
        root = item
        while joined_to[root] != root:
            joined_to[root] = root = joined_to[joined_to[root]]
        result[item] = place_of[root]
    return result


def _joined(parts: list, others: list, ways: int, joined_to: list[int]) -> list:
    """Joins two partial partitions; changes `parts`."""
    joins = max(0, len(parts) + len(others) - ways)  # number of pairs without an empty part
    united = others[joins:]
    for (load, item), (more, other) in zip(parts, others[:joins][::-1], strict=False):
        joined_to[other] = item
        united.append((load + more, item))
    del parts[:joins]
    if len(united) == 1:
        insort(parts, united[0])
        return parts
    return sorted(parts + united)


def local_search(items: Items, bins: Bins, assignment: np.ndarray, comparisons: int) -> tuple[np.ndarray, int]:
    """Moves an item out of a group's slowest bin, or swaps it for a cheaper one, while this lowers the bin's load. A
    step raises no group's peak, and lowers a peak or the number of bins at a peak, so the search ends. At most
    `comparisons` pairs of items are compared; a count, unlike a time, gives the same result everywhere. Returns the
    assignment and the comparisons that are left.
    """
    assignment = assignment.copy()
    load = bins.loads(items, assignment).ravel()
    room = bins.max_tokens - np.bincount(assignment, items.tokens, bins.count)
    group_of = np.arange(bins.count) // bins.width
    while comparisons > 0:
        table = load.reshape(bins.groups, bins.width)
        peaks, means = table.max(axis=1), table.mean(axis=1)
        gaps = peaks[group_of] - load
        order = np.argsort(-gaps, kind="stable")
        for group in np.argsort(means - peaks, kind="stable").tolist():
            if peaks[group] <= means[group] * (1 + _CLOSE):
                continue
            slow = group * bins.width + int(table[group].argmax())
            for partners in (order[:_PARTNERS], order[_PARTNERS:]):
                exchange, compared = _best_exchange(items, assignment, slow, partners, gaps, room)
                comparisons -= compared + _STEP
                if exchange is not None:
                    break
            if exchange is not None:
                break
        else:
            break
        out, back, other = exchange
        for item, source, target in ((out, slow, other), (back, other, slow)):
            if item is not None:
                assignment[item] = target
                load[source] -= items.costs[item]
                load[target] += items.costs[item]
                room[source] += items.tokens[item]
                room[target] -= items.tokens[item]
    return assignment, comparisons


def _best_exchange(
    items: Items, assignment: np.ndarray, slow: int, partners: np.ndarray, gaps: np.ndarray, room: np.ndarray
) -> tuple[tuple[int, int | None, int] | None, int]:
    """Returns (item that leaves `slow`, item that comes back or `None`, other bin), and the pairs compared."""
    partners = partners[gaps[partners] > 0]
    wanted = np.zeros(len(gaps), dtype=bool)
    wanted[partners] = True
    mine, theirs = np.flatnonzero(assignment == slow), np.flatnonzero(wanted[assignment])
    # Each partner once more, for a move without an item that comes back.
    homes = np.concatenate([assignment[theirs], partners])
    costs = np.concatenate([items.costs[theirs], np.zeros(len(partners))])
    tokens = np.concatenate([items.tokens[theirs], np.zeros(len(partners), dtype=items.tokens.dtype)])
    compared = len(mine) * len(homes)
    if not compared:
        return None, 0
    moved = items.costs[mine][:, None] - costs
    # Load of the worse of both bins above the old peak of its group.
    score = np.maximum(-moved, moved - gaps[homes])
    score[items.tokens[mine][:, None] > tokens + room[homes]] = np.inf
    best = int(score.argmin())
    row, column = divmod(best, len(homes))
    # A gain below the rounding of sums might repeat for ever.
    if not score[row, column] < -1e-12 * items.costs.sum():
        return None, compared
    back = int(theirs[column]) if column < len(theirs) else None
    return (int(mine[row]), back, int(homes[column])), compared
