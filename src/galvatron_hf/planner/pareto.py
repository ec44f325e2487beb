# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Which rows of a table no other row beats in every column, smaller being better."""

import numpy as np


def nondominated(values: np.ndarray, block: int = 256) -> np.ndarray:
    """Indices of the rows that no other row is at most equal to in every column; of equal rows the first."""
    count = len(values)
    if count <= 1:
        return np.arange(count)
    order = np.lexsort((np.arange(count), *values.T[::-1]))
    rows = values[order]
    if values.shape[1] == 2:  # by the first column upwards, the second has to fall
        lowest = np.minimum.accumulate(rows[:, 1])
        better = np.concatenate([[True], rows[1:, 1] < lowest[:-1]])
        return order[better]
    kept = np.zeros((0, values.shape[1]), dtype=values.dtype)
    indices = []
    for begin in range(0, count, block):
        part, names = rows[begin : begin + block], order[begin : begin + block]
        if len(kept):
            free = ~_at_most(kept[:, 1:], part[:, 1:]).any(axis=0)
            part, names = part[free], names[free]
        # In order of the first column, a row can only be dominated by an earlier one.
        free = ~np.triu(_at_most(part[:, 1:], part[:, 1:]), 1).any(axis=0)
        kept = np.concatenate([kept, part[free]])
        indices.append(names[free])
    return np.concatenate(indices)


def dominated(values: np.ndarray, by: np.ndarray, *, strictly: bool, block: int = 512) -> np.ndarray:
    """(N,) whether some row of `by` is at most equal in every column, and `strictly` less in one."""
    found = np.zeros(len(values), dtype=bool)
    for begin in range(0, len(by), block):
        rows = by[begin : begin + block]
        better = _at_most(rows, values)
        if strictly:
            better &= ~_at_most(values, rows).T
        found |= better.any(axis=0)
    return found


def _at_most(rows: np.ndarray, others: np.ndarray) -> np.ndarray:
    """(M, N) whether each of M rows is at most equal to each of N others in every column."""
    found = np.ones((len(rows), len(others)), dtype=bool)
    for ours, theirs in zip(np.ascontiguousarray(rows.T), np.ascontiguousarray(others.T), strict=True):
        found &= ours[:, None] <= theirs
    return found
