# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Items with a cost and a size into bins with a capacity, so that the slowest bins are fast.

Bins stand in groups, and what is minimised is the sum over groups of their most loaded bin. One group is the classic
problem of identical parallel machines (P||Cmax). Items come longest first: neither cost nor tokens grow along them.
An assignment is an int array [n]: the bin of each item, `group * width + place`.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np


_PARTNERS = 8  # bins with the largest gaps, among which local search looks first
_CLOSE = 1e-4  # a slowest bin this near to its group's mean is left alone


@dataclass(frozen=True, kw_only=True)
class Items:
    """
    What is to be placed, longest first.

    Args:
        costs (`np.ndarray`): [n], seconds, never growing.
        tokens (`np.ndarray`): [n], never growing.
    """

    costs: np.ndarray
    tokens: np.ndarray

    def __len__(self) -> int:
        return len(self.costs)


@dataclass(frozen=True, kw_only=True)
class Bins:
    """
    Where items go.

    Args:
        groups (`int`): Groups of bins that wait for each other.
        width (`int`): Bins of a group.
        max_tokens (`int`): That one bin holds.
    """

    groups: int
    width: int
    max_tokens: int

    @property
    def count(self) -> int:
        return self.groups * self.width

    def flat(self) -> Bins:
        """The same bins in one group."""
        return Bins(groups=1, width=self.count, max_tokens=self.max_tokens)

    def loads(self, items: Items, assignment: np.ndarray) -> np.ndarray:
        """Seconds of each bin, [groups, width]."""
        return np.bincount(assignment, items.costs, self.count).reshape(self.groups, self.width)

    def peaks(self, items: Items, assignment: np.ndarray) -> float:
        """The sum over groups of their most loaded bin."""
        return float(self.loads(items, assignment).max(axis=1).sum())

    def regroup(self, items: Items, assignment: np.ndarray) -> np.ndarray:
        """The same bins, the most loaded ones in the first group: of all groupings the one with the smallest sum."""
        order = np.argsort(-self.loads(items, assignment).ravel(), kind="stable")
        place = np.empty_like(order)
        place[order] = np.arange(self.count)
        return place[assignment]


def longest_first(items: Items, bins: Bins, held: np.ndarray | None = None) -> np.ndarray | None:
    """
    Each item in turn into the bin, among those with room, that is farthest below the slowest of its group.

    With one group that bin is the least loaded one. With more, a group's slowest bin is raised only when no other bin
    has a larger gap, so that what is long gathers in few groups and what is short fills them up.

    Args:
        held (`np.ndarray`, *optional*): an assignment to go on from; -1 is not placed yet.

    Returns:
        The assignment, or `None` when an item found no room.
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
    full: list[tuple[float, int]] = []  # bins without room for an item as long as this one, the emptiest first
    costs, tokens, chosen = items.costs.tolist(), items.tokens.tolist(), assignment.tolist()
    for item in np.flatnonzero(~placed).tolist():
        limit = bins.max_tokens - tokens[item]
        while full and full[0][0] <= limit:
            place = heapq.heappop(full)[1]
            group = place // width
            heapq.heappush(heaps[group], (load[place], place))
            gaps[group] = peaks[group] - heaps[group][0][0]
        while True:
            group = gaps.index(max(gaps))
            heap = heaps[group]
            if not heap:
                return None
            place = heap[0][1]
            if used[place] <= limit:
                break
            heapq.heappop(heap)
            heapq.heappush(full, (used[place], place))
            gaps[group] = peaks[group] - heap[0][0] if heap else -1.0
        chosen[item] = place
        used[place] += tokens[item]
        load[place] += costs[item]
        heapq.heapreplace(heap, (load[place], place))
        peaks[group] = max(peaks[group], load[place])
        gaps[group] = peaks[group] - heap[0][0]
    return np.array(chosen, dtype=np.int64)


def best_fit(items: Items, bins: Bins) -> np.ndarray | None:
    """Each item in turn into the fullest bin that has room (best-fit decreasing), or `None`; costs play no part."""
    rooms = [(bins.max_tokens, place) for place in range(bins.count)]
    chosen = []
    for tokens in items.tokens.tolist():
        index = bisect_left(rooms, (tokens, -1))
        if index == len(rooms):
            return None
        room, place = rooms.pop(index)
        insort(rooms, (room - tokens, place))
        chosen.append(place)
    return np.array(chosen, dtype=np.int64)


def karmarkar_karp(items: Items, bins: Bins) -> np.ndarray | None:
    """
    Largest differencing for as many ways as there are bins; what exceeds a bin's tokens is placed longest first.

    Args:
        bins (`Bins`): their groups play no part.

    Returns:
        The assignment, or `None` when an item found no room.
    """
    assignment = _largest_differencing(items.costs.tolist(), bins.count)
    used = [0] * bins.count
    held = assignment.tolist()
    for item, (place, tokens) in enumerate(zip(held, items.tokens.tolist(), strict=True)):
        if used[place] + tokens > bins.max_tokens:
            held[item] = -1
        else:
            used[place] += tokens
    return longest_first(items, bins.flat(), np.array(held, dtype=np.int64))


def _largest_differencing(costs: list[float], ways: int) -> np.ndarray:
    """
    The two partial partitions with the largest spreads become one, the largest part of each joined to the smallest of
    the other, until one is left (Karmarkar and Karp, 1982).

    A partition is the ascending list of its parts that are not empty, each a (load, first item). The united one takes
    the place of the larger in ties, hence grows by single items until no part is empty: these cheap unions are nearly
    all there are.
    """
    joined_to = list(range(len(costs)))  # the item whose part this item's part was joined to
    partitions = [[(cost, item)] for item, cost in enumerate(costs)]
    heap = [(-cost, item) for item, cost in enumerate(costs)]
    heapq.heapify(heap)
    while len(heap) > 1:
        first = heapq.heappop(heap)[1]
        second = heapq.heappop(heap)[1]
        parts, others = partitions[first], partitions[second]
        joins = max(0, len(parts) + len(others) - ways)  # pairs of which neither part is empty
        united = others[joins:]
        for (load, item), (more, other) in zip(parts[:joins], reversed(others[:joins]), strict=True):
            joined_to[other] = item
            united.append((load + more, item))
        del parts[:joins]
        for part in united:
            insort(parts, part)
        spread = parts[-1][0] - (parts[0][0] if len(parts) == ways else 0.0)
        heapq.heappush(heap, (-spread, first))
    if not costs:
        return np.empty(0, dtype=np.int64)
    place_of = {item: place for place, (_, item) in enumerate(partitions[heap[0][1]])}
    result = np.empty(len(costs), dtype=np.int64)
    for item in range(len(costs)):
        root = item
        while joined_to[root] != root:
            joined_to[root] = root = joined_to[joined_to[root]]
        result[item] = place_of[root]
    return result


def local_search(items: Items, bins: Bins, assignment: np.ndarray, comparisons: int) -> tuple[np.ndarray, int]:
    """
    Moves an item out of a group's slowest bin, or swaps it for a cheaper one, as long as both bins end below where that
    bin was, each measured from the peak of its own group.

    No group's slowest bin becomes slower, and each step lowers one of them or leaves fewer bins that slow, so it ends.

    Args:
        comparisons (`int`): Pairs of items after which it ends in any case, so that all callers see the same result.

    Returns:
        The assignment and how many comparisons are left.
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
                comparisons -= compared
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
    """The item to leave `slow`, the one to come for it (or `None`) and from which bin; and the pairs compared."""
    partners = partners[gaps[partners] > 0]
    wanted = np.zeros(len(gaps), dtype=bool)
    wanted[partners] = True
    mine, theirs = np.flatnonzero(assignment == slow), np.flatnonzero(wanted[assignment])
    homes = np.concatenate(
        [assignment[theirs], partners]
    )  # each partner once more, for a move that takes nothing back
    costs = np.concatenate([items.costs[theirs], np.zeros(len(partners))])
    tokens = np.concatenate([items.tokens[theirs], np.zeros(len(partners), dtype=items.tokens.dtype)])
    compared = len(mine) * len(homes)
    if not compared:
        return None, 0
    moved = items.costs[mine][:, None] - costs
    # How far the worse of both bins is above the old peak of its group.
    score = np.maximum(-moved, moved - gaps[homes])
    score[items.tokens[mine][:, None] > tokens + room[homes]] = np.inf
    best = int(score.argmin())
    row, column = divmod(best, len(homes))
    # Below the rounding of sums, "lower" would mean nothing and might go on for ever.
    if not score[row, column] < -1e-12 * items.costs.sum():
        return None, compared
    back = int(theirs[column]) if column < len(theirs) else None
    return (int(mine[row]), back, int(homes[column])), compared
