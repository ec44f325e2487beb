# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Places the documents of a step in packed micro-batches, where several data ranks may share a long document.

A bin is one data rank in one micro-batch. The ranks that share a document are any set of ranks of one micro-batch, of
any size. They take other documents too, so two long documents may share some of their ranks.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from galvatron_hf.data.group_beam import Bench, beam, options
from galvatron_hf.data.group_bound import lower_bound
from galvatron_hf.data.group_documents import (
    Documents,
    SharedCost,
    allowed_degrees,
    largest_share,
    tables,
)
from galvatron_hf.data.group_search import (
    Choices,
    Filled,
    arranged,
    evenly,
    fill,
    local_search,
    neighbours,
    sharing,
)
from galvatron_hf.data.placement import checked_lengths, place, step_imbalance, step_seconds


__all__ = ["GroupPlacement", "SharedCost", "lower_bound", "place_groups"]

_CLOSE = 1e-3  # a result this near to its lower bound ends the search
_TRIES = 3  # numbers of micro-batches that are tried
_HEAVY = 0.5  # documents of more than this share of a mean peak may be shared from the start
_MOST_HEAVY = 320  # of those that fit on a rank, at most so many are
_NEAR = 0.02  # a start that is this much slower than the best one is improved too
_SMALL = 16  # up to so many documents, all are heavy, and the search is wider
_WIDER = 8
_STEPS = 26  # peaks that degrees are chosen for


@dataclass(frozen=True)
class GroupPlacement:
    """Holds a step's documents: `micro_batches[micro-batch]` are pairs of a document and the data ranks that share it,
    by ascending document. `ranks` is the number of data ranks. The i-th of d ranks that share a document of s tokens
    holds chunks i and 2d - 1 - i of its 2d chunks [j * s // 2d, (j + 1) * s // 2d).
    """

    micro_batches: tuple[tuple[tuple[int, tuple[int, ...]], ...], ...]
    ranks: int

    def loads(self, lengths: Sequence[int], cost: SharedCost) -> np.ndarray:
        """Returns the seconds of each bin, [micro-batch, data rank]."""
        lengths = np.asarray(lengths, dtype=np.int64)
        loads = np.zeros((len(self.micro_batches), self.ranks))
        for degree, rows, documents, columns in self._by_degree():
            seconds = cost.seconds(lengths[documents], degree)
            np.add.at(loads, (rows[:, None], columns), seconds[:, None])
        return loads

    def tokens(self, lengths: Sequence[int]) -> np.ndarray:
        """Returns the tokens of each bin, [micro-batch, data rank] int64."""
        lengths = np.asarray(lengths, dtype=np.int64)
        tokens = np.zeros((len(self.micro_batches), self.ranks), dtype=np.int64)
        for degree, rows, documents, columns in self._by_degree():
            cuts = np.arange(2 * degree + 1) * lengths[documents][:, None] // (2 * degree)
            chunks = np.diff(cuts, axis=1)
            np.add.at(tokens, (rows[:, None], columns), chunks[:, :degree] + chunks[:, : degree - 1 : -1])
        return tokens

    def seconds(self, lengths: Sequence[int], cost: SharedCost, *, overhead: float = 0.0, stages: int = 1) -> float:
        """Returns the time of the step, the objective of [`place_groups`]."""
        return step_seconds(self.loads(lengths, cost), overhead, stages)

    def imbalance(self, lengths: Sequence[int], cost: SharedCost, *, stages: int = 1) -> float:
        """Returns slowest / mean time, 1 if no rank waits. Without a pipeline it is taken over the ranks of each
        micro-batch, weighted by its mean, and with one over all bins.
        """
        return step_imbalance(self.loads(lengths, cost), stages)

    def _by_degree(self) -> Iterator[tuple[int, np.ndarray, np.ndarray, np.ndarray]]:
        """Yields for each degree: itself, micro-batches [m], documents [m] and ranks [m, degree]."""
        found: dict[int, list] = {}
        for row, pairs in enumerate(self.micro_batches):
            for document, ranks in pairs:
                found.setdefault(len(ranks), []).append((row, document, ranks))
        for degree in sorted(found):
            rows, documents, ranks = zip(*found[degree], strict=True)
            yield degree, np.array(rows), np.array(documents), np.array(ranks).reshape(len(rows), degree)


def place_groups(
    lengths: Sequence[int],
    ranks: int,
    cost: SharedCost,
    *,
    max_tokens: int | None,
    overhead: float = 0.0,
    stages: int = 1,
    least_micro_batches: int = 1,
    allowed: Callable[[int], bool] | None = None,
    max_degree: int | None = None,
    candidates: Sequence[int] | None = None,
    effort: int = 8,
) -> GroupPlacement:
    """Places every document once, on one rank or shared by several, so that the step is short.

    Without a pipeline, data ranks wait for each other in every micro-batch, and the step takes the sum over v
    micro-batches of (slowest rank + overhead). With p stages it takes `(slowest bin + overhead) * (p - 1 + v)`. The
    same arguments give the same placement everywhere. If all documents fit on one rank, the result is never slower
    than that of [`galvatron_hf.data.placement.place`].

    A beam search places the heavy documents. The others follow longest first, in the gaps below the slowest ranks; if
    none has room, several ranks share them. A local search improves the result.

    Args:
        lengths (`Sequence[int]`): [n], tokens of each document.
        ranks (`int`): number of data ranks.
        cost (`SharedCost`): seconds of documents.
        max_tokens (`int` or `None`): tokens of one rank in one micro-batch; `None` for no limit. A shared document
            takes as many on each of its ranks as its largest share.
        overhead (`float`): constant seconds of a micro-batch.
        stages (`int`): number of pipeline stages, p.
        least_micro_batches (`int`): smallest v that the schedule can run.
        allowed (`Callable`, *optional*): tells if the schedule can run v micro-batches; some v above any number is
            allowed.
        max_degree (`int`, *optional*): the most ranks that may share a document; all of them by default.
        candidates (`Sequence[int]`, *optional*): the numbers of ranks that may share a document, besides one rank; any
            number by default.
        effort (`int`): states that the beam keeps. Time grows with it.

    Raises:
        ValueError: if a document does not fit however many ranks share it, or a number is out of range.
    """
    lengths = checked_lengths(lengths, ranks, max_tokens, least_micro_batches)
    degrees = allowed_degrees(ranks, max_degree, candidates)
    if stages < 1 or effort < 1 or not (np.isfinite(overhead) and overhead >= 0):
        raise ValueError(
            f"stages={stages}, effort={effort}, overhead={overhead}: out of range; use stages >= 1, effort >= 1 and "
            "overhead >= 0."
        )
    limit = sys.maxsize // 4 if max_tokens is None else max_tokens
    longer = np.unique(lengths[lengths > limit])
    fits = (largest_share(longer[:, None], degrees) <= limit).any(axis=1)
    if not fits.all():
        raise ValueError(
            f"a document of {longer[~fits].max()} tokens: {degrees[-1]} ranks with max_tokens={max_tokens} cannot "
            "hold it; raise max_tokens, let more ranks share a document, or truncate or split what is longer."
        )
    order = np.argsort(-lengths, kind="stable")
    problem = _Problem(
        lengths=lengths[order],
        whole=np.where(lengths[order] <= limit, cost.seconds(lengths[order], 1), np.inf),
        cost=cost,
        degrees=degrees,
        ranks=ranks,
        max_tokens=limit,
        overhead=overhead,
        stages=stages,
        least=least_micro_batches,
        allowed=allowed or (lambda count: True),
        effort=effort,
    )
    found = problem.search()
    ours = None if found is None else GroupPlacement(problem.micro_batches(order, found), ranks)
    if (lengths <= limit).all():
        whole = place(
            lengths,
            ranks,
            _Whole(cost),
            max_tokens=max_tokens,
            overhead=overhead,
            stages=stages,
            least_micro_batches=least_micro_batches,
            allowed=allowed,
        )
        alone = _of_whole(whole.micro_batches, ranks)
        objective = dict(overhead=overhead, stages=stages)
        if ours is None or alone.seconds(lengths, cost, **objective) <= ours.seconds(lengths, cost, **objective):
            return alone
    return ours


@dataclass(frozen=True)
class _Whole:
    """Gives the cost of documents on one rank each, for [`place`]."""

    cost: SharedCost

    def seconds(self, lengths: Sequence[int]) -> np.ndarray:
        return self.cost.seconds(np.asarray(lengths), 1)


@dataclass(frozen=True, kw_only=True)
class _Problem:
    """Holds the arguments of [`place_groups`], longest document first."""

    lengths: np.ndarray
    whole: np.ndarray
    cost: SharedCost
    degrees: np.ndarray
    ranks: int
    max_tokens: int
    overhead: float
    stages: int
    least: int
    allowed: Callable[[int], bool]
    effort: int

    def at_least(self, count: int) -> int:
        """Returns the smallest number of micro-batches from `count` on that the schedule can run."""
        return next(number for number in itertools.count(max(count, self.least)) if self.allowed(number))

    def seconds(self, micro_batches: int, peaks: float) -> float:
        if self.stages == 1:
            return peaks + self.overhead * micro_batches
        return (peaks + self.overhead) * (self.stages - 1 + micro_batches)

    def documents(self, level: float) -> Documents:
        """Returns the documents. Heavy are those that do not fit on a rank, and longest ones of more than `level`
        seconds.
        """
        forced, slow = np.isinf(self.whole).sum(), np.count_nonzero(self.whole > level)
        heavy = max(int(forced), min(int(slow), _MOST_HEAVY)) if len(self.lengths) > _SMALL else len(self.lengths)
        seconds, shares = tables(self.lengths[:heavy], self.cost, self.degrees, self.max_tokens)
        return Documents(lengths=self.lengths, whole=self.whole, degrees=self.degrees, seconds=seconds, shares=shares)

    def search(self) -> tuple[Bench, Filled] | None:
        """Returns the best bins and assignment found."""
        if not len(self.lengths):
            return None
        forced = self.documents(sys.float_info.max)
        work = float(forced.cheapest().sum())
        longest = float(forced.seconds.min(axis=1).max(initial=0.0))

        def bound(count: int) -> float:
            return self.seconds(count, max(work / self.ranks / (count if self.stages > 1 else 1), longest))

        fewest = max(self.least, -(-int(self.lengths.sum()) // (self.ranks * self.max_tokens)))
        most = self.at_least(max(fewest, len(self.lengths)))
        counts = sorted(filter(self.allowed, range(fewest, most + 1)), key=lambda count: (bound(count), count))
        best, least, tries = None, np.inf, 0
        for count in counts:
            if tries == _TRIES or bound(count) >= least:
                break
            bench = Bench(micro_batches=count, ranks=self.ranks, max_tokens=self.max_tokens, flat=self.stages > 1)
            found = self.filled(bench, self.documents(_HEAVY * work / self.ranks / count))
            if found is None:
                continue
            tries += 1
            seconds = self.seconds(count, bench.value(found.load))
            if seconds < least:
                best, least = (bench, found), seconds
            if least <= bound(count) * (1 + _CLOSE):
                break
        return best

    def filled(self, bench: Bench, documents: Documents) -> Filled | None:
        """Returns the best assignment to the bins that was found, or `None` if there is none."""
        share = sharing(documents, bench, self._seconds_of)

        def tried(choices: Choices | None, flat: bool) -> Filled | None:
            found = None if choices is None else arranged(documents, choices, bench)
            return found if found is not None and fill(documents, found, bench, share, flat=flat) else None

        starts = [
            self._climbed(bench, documents, partial(tried, flat=bench.flat)),
            tried(evenly(documents, bench), flat=True),
        ]
        starts = [start for start in starts if start is not None]
        near = min((bench.value(start.load) for start in starts), default=0.0) * (1 + _NEAR)
        for start in starts:
            if bench.value(start.load) <= near:
                local_search(documents, start, bench, self.effort * (16 + bench.count // 4))
        return min(starts, key=lambda start: bench.value(start.load), default=None)

    def _climbed(self, bench: Bench, documents: Documents, tried: Callable[[Choices], Filled | None]) -> Filled | None:
        """Returns the best assignment of those that the beam leads to, and of neighbours of the best one."""
        level = float(documents.cheapest().sum()) / bench.count
        best, chosen, least = None, (), np.inf
        seen = set()
        width = self.effort * (_WIDER if len(self.lengths) <= _SMALL else 1)
        for choices in beam(documents, options(documents, level, _STEPS), bench, width):
            seen.add(choices)
            found = tried(choices)
            if found is not None and bench.value(found.load) < least:
                best, chosen, least = found, choices, bench.value(found.load)
        if best is None:
            return None
        left = width
        changes = neighbours(documents, chosen, best, bench)
        while left > 0 and (choices := next(changes, None)) is not None:
            if choices in seen:
                continue
            seen.add(choices)
            left -= 1
            found = tried(choices)
            if found is not None and bench.value(found.load) < least:
                best, least = found, bench.value(found.load)
                changes = neighbours(documents, choices, best, bench)
        return best

    def _seconds_of(self, document: int, degree: int) -> float:
        return float(self.cost.seconds(self.lengths[document : document + 1], degree)[0])

    def micro_batches(self, order: np.ndarray, found: tuple[Bench, Filled]) -> tuple:
        """Returns the pairs of each micro-batch, with as few empty micro-batches as allowed."""
        bench, filled = found
        table: list[list] = [[] for _ in range(bench.micro_batches)]
        for document, bin_ in enumerate(filled.home.tolist()):
            bins = (bin_,) if bin_ >= 0 else filled.shared[document]
            ranks = tuple(bin_ % bench.ranks for bin_ in bins)
            table[bins[0] // bench.ranks].append((int(order[document]), ranks))
        rows = [tuple(sorted(row)) for row in table if row]
        return tuple(rows + [()] * (self.at_least(len(rows)) - len(rows)))


def _of_whole(micro_batches: tuple[tuple[tuple[int, ...], ...], ...], ranks: int) -> GroupPlacement:
    pairs = (
        ((document, (rank,)) for rank, documents in enumerate(row) for document in documents) for row in micro_batches
    )
    return GroupPlacement(tuple(tuple(sorted(row)) for row in pairs), ranks)
