# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The chunks of a document that ranks share: which of its tokens each holds. Importing this module needs no torch."""

from __future__ import annotations

from collections.abc import Iterable


Runs = tuple[tuple[int, int], ...]  # ranges [start, stop) of one document's tokens, rising and apart


def chunks_of(length: int, degree: int) -> list[list[tuple[int, int]]]:
    """Returns the ranges of tokens of a document that each of `degree` ranks holds. The document is cut into
    `2 * degree` chunks, whose lengths differ by one at most. Rank `i` has chunk `i` and chunk `2 * degree - 1 - i`, so
    that all ranks have equal work in causal attention. Empty ranges are left out.
    """
    if degree == 1:
        return [[(0, length)]]
    ends = [index * length // (2 * degree) for index in range(2 * degree + 1)]
    pairs = [(index, 2 * degree - 1 - index) for index in range(degree)]
    return [[(ends[one], ends[one + 1]) for one in pair if ends[one] < ends[one + 1]] for pair in pairs]


def shared_tokens(length: int, degree: int) -> list[int]:
    """Returns the number of tokens that each of `degree` ranks holds of a document."""
    return [sum(stop - start for start, stop in runs) for runs in chunks_of(length, degree)]


def largest_share(length, degree):
    """Returns the most tokens that one of `degree` ranks holds of a document, see [`chunks_of`]; for numbers, or
    elementwise for arrays. It is ceil(s / d), or one more if that is odd and the chunks of d ranks are uneven.
    """
    most = -(-length // degree)
    rest = length - (most - 1) * degree
    uneven = (most % 2 == 1) & (rest > 2) & (rest < degree)
    return most + (uneven & (2 * degree % rest != 0))


def size_of(runs: Iterable[tuple[int, int]]) -> int:
    """Returns the number of tokens in ranges."""
    return sum(stop - start for start, stop in runs)


def merged(runs: Iterable[tuple[int, int]]) -> Runs:
    """Returns ranges in rising order, with those that touch joined."""
    return merged_in_order(sorted(runs))


def merged_in_order(runs: Iterable[tuple[int, int]]) -> Runs:
    """Returns ranges in their order, with neighbours that touch joined."""
    found: list[tuple[int, int]] = []
    for start, stop in runs:
        if found and found[-1][1] == start:
            found[-1] = found[-1][0], stop
        else:
            found.append((start, stop))
    return tuple(found)
