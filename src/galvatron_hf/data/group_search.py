# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Fills bins around shared documents, and improves the result by local search.

A bin is one data rank in one micro-batch, numbered `micro-batch * ranks + rank`. Documents are numbered longest first.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from galvatron_hf.data.group_beam import Bench
from galvatron_hf.data.group_documents import Documents
from galvatron_hf.plan.chunks import largest_share


_PARTNERS = 8  # bins with the largest gaps, which local search tries first
_CLOSE = 3e-4  # local search skips a group whose slowest bin is this near to its mean

# The micro-batch and the column of degrees of each heavy document.
Choices = tuple[tuple[int, int], ...]
# Takes a document, the loads and the rooms of all bins. Returns bins that share the document, and the seconds and the
# tokens that it adds to each, or `None`.
Share = Callable[[int, list[float], list[int]], tuple[list[int], float, int] | None]


@dataclass
class Filled:
    """Holds an assignment of documents to bins.

    Args:
        load: [bins], seconds.
        room: [bins] int64, tokens that still fit.
        home: [n] int64, the bin of each document that one rank holds; -1 for shared documents.
        shared: bins of each shared document, in the order of their chunks.
    """

    load: np.ndarray
    room: np.ndarray
    home: np.ndarray
    shared: dict[int, tuple[int, ...]]


def arranged(documents: Documents, choices: Choices, bench: Bench) -> Filled | None:
    """Puts the heavy documents on the least loaded ranks of their micro-batches; `None` if one finds no room.

    Args:
        documents: the documents.
        choices: the micro-batch and the column of degrees of each heavy document.
        bench: the bins.
    """
    load = np.zeros((bench.micro_batches, bench.ranks))
    room = np.full(load.shape, bench.max_tokens, dtype=np.int64)
    home = np.full(len(documents.lengths), -1, dtype=np.int64)
    shared = {}
    for document, (micro_batch, column) in enumerate(choices):
        degree, share = int(documents.degrees[column]), int(documents.shares[document, column])
        key = np.where(room[micro_batch] >= share, load[micro_batch], np.inf)
        ranks = np.lexsort((room[micro_batch], key))[:degree]
        if key[ranks[-1]] == np.inf:
            return None
        load[micro_batch, ranks] += documents.seconds[document, column]
        room[micro_batch, ranks] -= share
        bins = (ranks + micro_batch * bench.ranks).tolist()
        if degree == 1:
            home[document] = bins[0]
        else:
            shared[document] = tuple(bins)
    return Filled(load=load.ravel(), room=room.ravel(), home=home, shared=shared)


def evenly(documents: Documents, bench: Bench) -> Choices | None:
    """Returns choices that give each heavy document the fewest ranks, where they are least loaded; `None` if one finds
    no room. If room is tight, little is gained by more ranks.
    """
    load = np.zeros((bench.micro_batches, bench.ranks))
    room = np.full(load.shape, bench.max_tokens, dtype=np.int64)
    choices = []
    for document in range(documents.heavy):
        column = int(np.isfinite(documents.seconds[document]).argmax())
        degree, share = int(documents.degrees[column]), int(documents.shares[document, column])
        key = np.where(room >= share, load, np.inf)
        ranks = np.lexsort((room, key), axis=1)[:, :degree]
        highest = np.take_along_axis(key, ranks[:, -1:], axis=1)[:, 0]
        micro_batch = int(highest.argmin())
        if highest[micro_batch] == np.inf:
            return None
        load[micro_batch, ranks[micro_batch]] += documents.seconds[document, column]
        room[micro_batch, ranks[micro_batch]] -= share
        choices.append((micro_batch, column))
    return tuple(choices)


def fill(documents: Documents, filled: Filled, bench: Bench, share: Share, *, flat: bool) -> bool:
    """Places all documents but the heavy ones, longest first, each on one rank.

    A document goes to the bin with room that is farthest below the slowest bin of its group. If no gap is wide enough,
    it raises the group with the most bins that have room. If no bin has room, `share` says what to do.

    Args:
        documents: the documents.
        filled: the assignment of the heavy documents; changed.
        bench: the bins.
        share: says what to do with a document that no bin has room for.
        flat: if all bins are one group, in which the least loaded bin with room is chosen.

    Returns:
        `bool`: if every document found room.
    """
    groups = 1 if flat else bench.micro_batches
    width = bench.count // groups
    load, room = filled.load.tolist(), filled.room.tolist()
    heaps = [[(load[b], b) for b in range(g * width, (g + 1) * width)] for g in range(groups)]
    for heap in heaps:
        heapq.heapify(heap)
    peaks = [max(load[g * width : (g + 1) * width]) for g in range(groups)]
    gaps = [peak - heap[0][0] for peak, heap in zip(peaks, heaps, strict=True)]
    full: list[tuple[int, int]] = []  # bins without room for the current document, (-room, bin)
    chosen = []
    first = documents.heavy
    for cost, tokens in zip(documents.whole[first:].tolist(), documents.lengths[first:].tolist(), strict=True):
        while full and full[0][0] <= -tokens:
            bin_ = heapq.heappop(full)[1]
            group = bin_ // width
            heapq.heappush(heaps[group], (load[bin_], bin_))
            gaps[group] = peaks[group] - heaps[group][0][0]
        while True:
            group = gaps.index(max(gaps))
            if gaps[group] < cost and groups > 1:
                group = max(range(groups), key=lambda g: (len(heaps[g]), gaps[g], -g))
            heap = heaps[group]
            if not heap:
                bin_ = -1
                break
            bin_ = heap[0][1]
            if room[bin_] >= tokens:
                break
            heapq.heappop(heap)
            heapq.heappush(full, (-room[bin_], bin_))
            gaps[group] = peaks[group] - heap[0][0] if heap else -1.0
        chosen.append(bin_)
        if bin_ >= 0:
            room[bin_] -= tokens
            load[bin_] += cost
            heapq.heapreplace(heap, (load[bin_], bin_))
            peaks[group] = max(peaks[group], load[bin_])
            gaps[group] = peaks[group] - heap[0][0]
            continue
        found = share(first + len(chosen) - 1, load, room)
        if found is None:
            return False
        bins, seconds, most = found
        filled.shared[first + len(chosen) - 1] = tuple(bins)
        for bin_ in bins:
            load[bin_] += seconds
            room[bin_] -= most
        # All heaps are empty here.
        full = [(-left, bin_) for bin_, left in enumerate(room)]
        heapq.heapify(full)
        group = bins[0] // width
        peaks[group] = max(peaks[group], max(load[bin_] for bin_ in bins))
    filled.load, filled.room = np.array(load), np.array(room, dtype=np.int64)
    filled.home[first:] = chosen
    return True


def sharing(documents: Documents, bench: Bench, seconds: Callable[[int, int], float]) -> Share:
    """Returns what [`fill`] does with a document that no bin has room for: the fewest ranks share it that have room.

    Args:
        documents: the documents.
        bench: the bins.
        seconds: takes a document and a degree, and returns the seconds that it adds to each rank.
    """

    def share(document: int, load: list[float], room: list[int]) -> tuple[list[int], float, int] | None:
        loads = np.array(load).reshape(-1, bench.ranks)
        rooms = np.array(room).reshape(-1, bench.ranks)
        ordered = -np.sort(-rooms, axis=1)
        shares = largest_share(documents.lengths[document], documents.degrees)
        for degree, most in zip(documents.degrees.tolist(), shares.tolist(), strict=True):
            able = np.flatnonzero(ordered[:, degree - 1] >= most)
            if not len(able):
                continue
            cost = seconds(document, degree)
            key = np.where(rooms[able] >= most, loads[able], np.inf)
            ranks = np.argsort(key, axis=1, kind="stable")[:, :degree]
            raised = np.take_along_axis(key, ranks[:, -1:], axis=1)[:, 0] + cost - loads[able].max(axis=1)
            row = int(raised.argmin())
            return (ranks[row] + able[row] * bench.ranks).tolist(), cost, most
        return None

    return share


def local_search(documents: Documents, filled: Filled, bench: Bench, steps: int) -> None:
    """Moves a whole document out of a group's slowest bin, or swaps it for a cheaper one, while this lowers the bin's
    load and raises no group's peak. Tries at most `steps` exchanges. Changes `filled`; shared documents stay.
    """
    groups = 1 if bench.flat else bench.micro_batches
    load, room, home = filled.load, filled.room, filled.home
    table = load.reshape(groups, -1)
    width = table.shape[1]
    group_of = np.arange(bench.count) // width
    rounding = 1e-12 * float(documents.whole[home >= 0].sum())
    while steps > 0:
        peaks, means = table.max(axis=1), table.mean(axis=1)
        gaps = peaks[group_of] - load
        order = np.argsort(-gaps, kind="stable")
        exchange = None
        for group in np.argsort(means - peaks, kind="stable").tolist():
            if peaks[group] <= means[group] * (1 + _CLOSE):
                continue
            slow = group * width + int(table[group].argmax())
            mine = np.flatnonzero(home == slow)
            steps -= 1
            if not len(mine):
                continue
            for partners in (order[:_PARTNERS], order[_PARTNERS:]):
                exchange = _exchange(documents, filled, mine, partners, gaps, rounding)
                if exchange is not None:
                    break
                steps -= 1
            if exchange is not None:
                break
        else:
            return
        out, back, other = exchange
        for document, source, target in ((out, slow, other), (back, other, slow)):
            if document is not None:
                home[document] = target
                load[source] -= documents.whole[document]
                load[target] += documents.whole[document]
                room[source] += documents.lengths[document]
                room[target] -= documents.lengths[document]


def _exchange(
    documents: Documents, filled: Filled, mine: np.ndarray, partners: np.ndarray, gaps: np.ndarray, rounding: float
) -> tuple[int, int | None, int] | None:
    """Returns (document that leaves its bin, document that comes back or `None`, other bin)."""
    partners = partners[gaps[partners] > 0]
    wanted = np.zeros(len(gaps) + 1, dtype=bool)  # the last one stands for no bin
    wanted[partners] = True
    theirs = np.flatnonzero(wanted[filled.home])
    homes = np.concatenate([filled.home[theirs], partners])
    if not len(homes):
        return None
    costs = np.concatenate([documents.whole[theirs], np.zeros(len(partners))])
    tokens = np.concatenate([documents.lengths[theirs], np.zeros(len(partners), dtype=np.int64)])
    moved = documents.whole[mine][:, None] - costs
    # Load of the worse of both bins above the old peak of its group.
    score = np.maximum(-moved, moved - gaps[homes])
    score[documents.lengths[mine][:, None] > tokens + filled.room[homes]] = np.inf
    row, column = divmod(int(score.argmin()), len(homes))
    if not score[row, column] < -rounding:
        return None
    back = int(theirs[column]) if column < len(theirs) else None
    return int(mine[row]), back, int(homes[column])


def neighbours(documents: Documents, choices: Choices, filled: Filled, bench: Bench) -> Iterator[Choices]:
    """Yields changed choices for heavy documents that might lower a peak, the most promising ones first.

    Documents of a group's slowest bins get more ranks, so that they come down to the mean of the group or half the
    way, or go to another micro-batch.
    """
    table = filled.load.reshape(1 if bench.flat else bench.micro_batches, -1)
    peaks, means = table.max(axis=1), table.mean(axis=1)
    fixed = np.zeros(bench.count)
    places = []
    for document, (_, column) in enumerate(choices):
        places.append(list(filled.shared.get(document, ())) or [int(filled.home[document])])
        fixed[places[-1]] += documents.seconds[document, column]
    heights = np.array([fixed[bins].max() for bins in places])
    groups = np.array([0 if bench.flat else micro_batch for micro_batch, _ in choices])
    for group in np.argsort(means - peaks, kind="stable").tolist():
        excess = peaks[group] - means[group]
        inside = np.flatnonzero(groups == group)
        highest = inside[np.argsort(-heights[inside], kind="stable")]
        slow = highest[heights[highest] >= peaks[group] - excess / 2].tolist()
        for part in (1.0, 0.5):
            for several in (slow, slow[:1]):
                changed = list(choices)
                for document in several:
                    micro_batch, column = choices[document]
                    limit = documents.seconds[document, column] - part * excess
                    changed[document] = micro_batch, documents.fitting(document, limit)
                yield tuple(changed)
        for document in highest[:2].tolist():
            for target in range(bench.micro_batches):
                if target != choices[document][0]:
                    changed = list(choices)
                    changed[document] = target, documents.fitting(document, means[0 if bench.flat else target])
                    yield tuple(changed)
