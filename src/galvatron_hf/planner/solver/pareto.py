# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Finds the Pareto front of a table: the rows that no other row dominates. Smaller is better."""

from bisect import bisect_right

import numpy as np


# Before many rows of three columns are compared one by one, those are left out that a few comparisons of arrays find.
MANY, THRESHOLDS = 500, 16


def nondominated(values: np.ndarray, block: int = 256) -> np.ndarray:
    """Returns indices of the rows to which no other row is at most equal in every column; of equal rows the first."""
    count = len(values)
    if count <= 1:
        return np.arange(count)
    order = np.lexsort((np.arange(count), *values.T[::-1]))
    rows = values[order]
    if values.shape[1] == 2:  # as the first column rises, the second has to fall
        lowest = np.minimum.accumulate(rows[:, 1])
        better = np.concatenate([[True], rows[1:, 1] < lowest[:-1]])
        return order[better]
    if values.shape[1] == 3:
        if count > MANY:
            perhaps = ~_clearly_dominated(rows[:, 1:], rows[:, 1:], np.arange(count), strictly=False)
            order, rows = order[perhaps], rows[perhaps]
        front = Front()
        return order[np.fromiter(map(front.add, *_columns(rows)), dtype=bool, count=len(rows))]
    kept = np.zeros((0, values.shape[1]), dtype=values.dtype)
    indices = []
    for begin in range(0, count, block):
        part, names = rows[begin : begin + block], order[begin : begin + block]
        if len(kept):
            free = ~_at_most(kept[:, 1:], part[:, 1:]).any(axis=0)
            part, names = part[free], names[free]
        # Rows are in order of the first column, so only an earlier row can dominate.
        free = ~np.triu(_at_most(part[:, 1:], part[:, 1:]), 1).any(axis=0)
        kept = np.concatenate([kept, part[free]])
        indices.append(names[free])
    return np.concatenate(indices)


def dominated(values: np.ndarray, by: np.ndarray, *, strictly: bool, block: int = 512) -> np.ndarray:
    """Returns (N,) booleans: some row of `by` is at most equal in every column and, if `strictly`, less in one."""
    found = np.zeros(len(values), dtype=bool)
    if values.shape[1] == 3:
        by = by[np.lexsort(by.T[::-1])]
        if len(values) > MANY and len(by):
            earlier = np.searchsorted(by[:, 0], values[:, 0], side="right")
            found = _clearly_dominated(by[:, 1:], values[:, 1:], earlier, strictly=True)
        front, candidates = Front(), zip(*_columns(by))
        row = next(candidates, None)
        rest = np.nonzero(~found)[0]
        order = rest[np.argsort(values[rest, 0], kind="stable")]
        for index, *value in zip(order.tolist(), *_columns(values[order])):
            while row is not None and row[0] <= value[0]:
                front.add(*row)
                row = next(candidates, None)
            found[index] = front.dominates(*value, strictly)
        return found
    for begin in range(0, len(by), block):
        rows = by[begin : begin + block]
        better = _at_most(rows, values)
        if strictly:
            better &= ~_at_most(values, rows).T
        found |= better.any(axis=0)
    return found


def _clearly_dominated(by: np.ndarray, values: np.ndarray, earlier: np.ndarray, *, strictly: bool) -> np.ndarray:
    """Returns (N,) booleans: among the first `earlier` (N,) rows of `by` (M, 2), one is at most equal to the row of
    `values` (N, 2) in both columns, or less in the second one if `strictly`. Only rows of `by` are tried whose first
    column is at most one of a few thresholds below that of the value, so that some dominated rows are not found.
    """
    found, within = np.zeros(len(values), dtype=bool), earlier > 0
    for threshold in np.unique(np.sort(by[:, 0])[np.arange(THRESHOLDS) * len(by) // THRESHOLDS]):
        least = np.minimum.accumulate(np.where(by[:, 0] <= threshold, by[:, 1], np.iinfo(np.int64).max))
        least = least[np.maximum(earlier, 1) - 1]
        better = least < values[:, 1] if strictly else least <= values[:, 1]
        found |= within & (threshold <= values[:, 0]) & better
    return found


def _columns(rows: np.ndarray) -> list[list[int]]:
    return [column.tolist() for column in rows.T]


class Front:
    """Keeps the rows that may dominate later ones, for rows of three columns that come in lexical order.
    No kept row has a larger first column than a later one, so the other two columns decide. Kept rows rise in the
    second column and fall in the third, so the row before a position has the smallest third column of all candidates.
    """

    def __init__(self):
        self._firsts: list[int] = []
        self._seconds: list[int] = []
        self._thirds: list[int] = []

    def add(self, first: int, second: int, third: int) -> bool:
        """Adds a row unless one is at most equal to it in every column, and returns whether it was added."""
        position = bisect_right(self._seconds, second)
        if position and self._thirds[position - 1] <= third:
            return False
        begin = end = position - 1 if position and self._seconds[position - 1] == second else position
        while end < len(self._thirds) and self._thirds[end] >= third:
            end += 1
        self._firsts[begin:end], self._seconds[begin:end], self._thirds[begin:end] = [first], [second], [third]
        return True

    def dominates(self, first: int, second: int, third: int, strictly: bool) -> bool:
        """Returns whether a row is at most equal in every column and, if `strictly`, less in one. An equal row is in
        the front only if no other row dominates it.
        """
        position = bisect_right(self._seconds, second) - 1
        if position < 0 or self._thirds[position] > third:
            return False
        found = self._firsts[position], self._seconds[position], self._thirds[position]
        return not strictly or found != (first, second, third)


def _at_most(rows: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Returns (M, N) booleans: row m is at most equal to other row n in every column."""
    found = np.ones((len(rows), len(others)), dtype=bool)
    for ours, theirs in zip(np.ascontiguousarray(rows.T), np.ascontiguousarray(others.T), strict=True):
        found &= ours[:, None] <= theirs
    return found
