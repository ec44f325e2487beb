# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Chooses the micro-batch and the number of ranks of a step's heavy documents with a beam search.

Ranks of a micro-batch are alike, so a state of the beam holds classes of equal ranks: their load, their room and their
number. The documents that are still to be placed are treated as a fluid that fills the gaps below the slowest ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from galvatron_hf.data.group_documents import Documents


_TOP, _BOTTOM = 2.2, 0.35  # peaks that degrees are chosen for, relative to the mean seconds of a bin
_LEAST = 1e-30  # seconds, for documents that take no time
_ALIKE = 1e-7  # states whose estimates differ by less than this share are taken for the same


def options(documents: Documents, level: float, steps: int) -> np.ndarray:
    """Returns columns of degrees to try for each heavy document, [h, options], with -1 for none.

    They are the fewest and the most ranks that have room, and the fewest ranks that are as fast as each of a falling
    geometric series of seconds. All documents have one series, so that equal peaks come of it. It begins at the
    seconds of the slowest document on all ranks, if they are more than usual.

    Args:
        documents: the documents.
        level: the mean seconds of a bin.
        steps: length of the series; if there are not more degrees, all of them are tried.
    """
    seconds = documents.seconds
    room = np.isfinite(seconds)
    if len(documents.degrees) <= steps:
        return np.where(room, np.arange(len(documents.degrees)), -1)
    fastest = seconds.argmin(axis=1)
    columns = [room.argmax(axis=1), fastest]
    level = max(level, _LEAST)
    top = max(_TOP * level, float(seconds.min(axis=1).max(initial=0.0)))
    for limit in np.geomspace(top, _BOTTOM * level, steps):
        fits = seconds <= limit
        columns.append(np.where(fits.any(axis=1), fits.argmax(axis=1), fastest))
    table = np.sort(np.stack(columns, axis=1), axis=1)
    table[:, 1:][table[:, 1:] == table[:, :-1]] = -1
    return table


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Describes the bins: `micro_batches` times `ranks` with `max_tokens` each. In a `flat` one, for a pipeline, the
    slowest bin of all counts, and otherwise the sum over micro-batches of their slowest bins.
    """

    micro_batches: int
    ranks: int
    max_tokens: int
    flat: bool

    @property
    def count(self) -> int:
        return self.micro_batches * self.ranks

    def peaks(self, load: np.ndarray) -> np.ndarray:
        """Returns the seconds of the slowest bin of each group of bins that wait for each other."""
        return load.reshape(1 if self.flat else self.micro_batches, -1).max(axis=1)

    def value(self, load: np.ndarray) -> float:
        """Returns what is to be small: the sum of the peaks."""
        return float(self.peaks(load).sum())


@dataclass
class _States:
    """Holds the states of the beam, [states, micro-batches, classes] and [states, micro-batches]."""

    load: np.ndarray
    room: np.ndarray
    ranks: np.ndarray
    peaks: np.ndarray

    def select(self, chosen: np.ndarray) -> _States:
        return _States(self.load[chosen], self.room[chosen], self.ranks[chosen], self.peaks[chosen])

    def repeated(self) -> np.ndarray:
        """Returns which micro-batches are like an earlier one of the same state, [states, micro-batches]."""
        key = self.peaks * 1.0078125 + (self.load * self.ranks).sum(axis=2)
        equal = key[:, :, None] == key[:, None, :]
        return (equal & np.tri(key.shape[1], k=-1, dtype=bool)).any(axis=2)


@dataclass
class _Children:
    """Holds the successors of all states, [options, states, micro-batches] and, of classes, one axis more."""

    taken: np.ndarray  # ranks of each class that take a share
    peaks: np.ndarray  # of the micro-batch that gets the document
    estimate: np.ndarray
    raised: np.ndarray  # sum or maximum of all peaks


def beam(documents: Documents, columns: np.ndarray, bench: Bench, width: int) -> list[tuple[tuple[int, int], ...]]:
    """Returns up to `width` tuples of (micro-batch, column of degrees), one pair per heavy document, the best first.

    Documents are placed longest first, each on the least loaded ranks of a micro-batch that have room, of equally
    loaded ones on those with the least room. States are compared by an estimate: the sum of peaks when the rest has
    filled the gaps below them as a fluid.

    Args:
        documents: the documents.
        columns: [h, options], columns of degrees to try, -1 for none; see [`options`].
        bench: the bins.
        width: number of states that are kept.
    """
    cheapest = documents.cheapest()
    work = cheapest.sum() - np.cumsum(cheapest[: documents.heavy])
    tokens = documents.lengths.sum() - np.cumsum(documents.lengths[: documents.heavy])
    total = float(cheapest.sum())
    shape = (1, bench.micro_batches, 1)
    states = _States(
        load=np.zeros(shape),
        room=np.full(shape, float(bench.max_tokens)),
        ranks=np.full(shape, float(bench.ranks)),
        peaks=np.zeros(shape[:2]),
    )
    history = []
    for document in range(documents.heavy):
        tried = columns[document][columns[document] >= 0]
        degrees = documents.degrees[tried].astype(np.float64)
        seconds, shares = documents.seconds[document, tried], documents.shares[document, tried].astype(np.float64)
        rest = float(work[document]), float(tokens[document])
        children = _children(states, degrees, seconds, shares, rest, bench)
        children.estimate[:, states.repeated()] = np.inf
        chosen = _best(children, width, max(_ALIKE * total / bench.ranks, _LEAST))
        if not len(chosen):
            return []
        option, parent, micro_batch = np.unravel_index(chosen, children.estimate.shape)
        history.append((parent.tolist(), micro_batch.tolist(), tried[option].tolist()))
        taken, peaks = children.taken[option, parent, micro_batch], children.peaks[option, parent, micro_batch]
        states = _placed(states.select(parent), micro_batch, taken, peaks, seconds[option], shares[option])
    return [_choices(history, state) for state in range(len(states.peaks))] if history else [()]


def _children(
    states: _States,
    degrees: np.ndarray,
    seconds: np.ndarray,
    shares: np.ndarray,
    rest: tuple[float, float],
    bench: Bench,
) -> _Children:
    """Returns the successors of all states by one document; `rest` is the work and the tokens of all that follow."""
    degree, second, share = (array[:, None, None, None] for array in (degrees, seconds, shares))
    able = np.where(states.room >= share, states.ranks, 0.0)
    before = np.cumsum(able, axis=3)
    free = before[..., -1]
    taken = np.clip(degree - (before - able), 0.0, able)
    # Classes are sorted by load, so that the last class of which a rank is taken has the highest.
    highest = np.where(taken > 0, states.load, 0.0).max(axis=3)
    peaks = np.maximum(states.peaks, highest + seconds[:, None, None])
    density = rest[0] / max(rest[1], 1.0)
    if bench.flat:
        raised = np.maximum(peaks, states.peaks.max(axis=1)[:, None])
        placed = (states.load * states.ranks).sum(axis=(1, 2))[:, None] + (degrees * seconds)[:, None, None]
        mean = (placed + rest[0]) / bench.count
        # The work counts a little even if a peak hides it: less work fills more gaps.
        estimate = np.maximum(raised, mean) + 0.01 * mean
    else:
        fluid = density * states.room
        gaps = states.peaks[:, :, None] - states.load
        held = (states.ranks * np.minimum(gaps, fluid)).sum(axis=2)
        open_ = (states.ranks * (gaps < fluid)).sum(axis=2)
        lower = peaks[..., None] - states.load
        less, left = lower - second, fluid - density * share
        other = states.ranks - taken
        now_held = (taken * np.minimum(less, left) + other * np.minimum(lower, fluid)).sum(axis=3)
        now_open = (taken * (less < left) + other * (lower < fluid)).sum(axis=3)
        raised = states.peaks.sum(axis=1)[:, None] - states.peaks + peaks
        over = np.maximum(rest[0] - (held.sum(axis=1)[:, None] - held + now_held), 0.0)
        # What finds no gap raises the peak of the micro-batch with the most ranks that still have room.
        estimate = raised + over / np.maximum(np.maximum(now_open, _others_most(open_)), 0.5)
    return _Children(taken, peaks, np.where(free >= degrees[:, None, None], estimate, np.inf), raised)


def _others_most(values: np.ndarray) -> np.ndarray:
    """Returns for each entry of [states, micro-batches] the maximum of the others of its state, 0 if there is none."""
    if values.shape[1] == 1:
        return np.zeros_like(values)
    ordered = np.sort(values, axis=1)
    most, second = ordered[:, -1:], ordered[:, -2:-1]
    return np.where(values == most, second, most)


def _best(children: _Children, width: int, alike: float) -> np.ndarray:
    """Returns the flat indices of the `width` best successors, without those that look alike."""
    estimate, raised = children.estimate.ravel(), children.raised.ravel()
    order = np.argsort(estimate, kind="stable")[: 4 * width]
    chosen, seen = [], set()
    for index, first, second in zip(
        order.tolist(), estimate[order].tolist(), np.broadcast_to(raised, estimate.shape)[order].tolist(), strict=True
    ):
        if len(chosen) == width or first == np.inf:
            break
        key = round(first / alike), round(second / alike)
        if key not in seen:
            seen.add(key)
            chosen.append(index)
    return np.array(chosen, dtype=np.int64)


def _placed(
    states: _States,
    micro_batch: np.ndarray,
    taken: np.ndarray,
    peaks: np.ndarray,
    seconds: np.ndarray,
    shares: np.ndarray,
) -> _States:
    """Returns the states after each got one more document: `taken` ranks of each class of its micro-batch, [states,
    classes]. Changes `states`.
    """
    which = np.arange(len(micro_batch))
    load, room, ranks = (array[which, micro_batch] for array in (states.load, states.room, states.ranks))
    load = np.concatenate([load + seconds[:, None], load], axis=1)
    room = np.concatenate([room - shares[:, None], room], axis=1)
    ranks = np.concatenate([taken, ranks - taken], axis=1)
    order = np.lexsort((room, np.where(ranks > 0, load, np.inf)), axis=1)
    classes = states.load.shape[2]
    needed = max(classes, int((ranks > 0).sum(axis=1).max()))
    order = order[:, :needed]
    if needed > classes:
        states = _States(
            *(_widened(array, needed) for array in (states.load, states.room, states.ranks)), states.peaks
        )
    for array, values in ((states.load, load), (states.room, room), (states.ranks, ranks)):
        array[which, micro_batch] = np.take_along_axis(values, order, axis=1)
    states.peaks[which, micro_batch] = peaks
    return states


def _widened(array: np.ndarray, classes: int) -> np.ndarray:
    wide = np.zeros((*array.shape[:2], classes))
    wide[:, :, : array.shape[2]] = array
    return wide


def _choices(history: list[tuple[list[int], list[int], list[int]]], state: int) -> tuple[tuple[int, int], ...]:
    """Returns what led to a state of the last step."""
    choices = []
    for parents, micro_batches, columns in reversed(history):
        choices.append((micro_batches[state], columns[state]))
        state = parents[state]
    return tuple(reversed(choices))
