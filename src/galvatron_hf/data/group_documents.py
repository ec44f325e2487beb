# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The documents of a step that several data ranks may share: their costs, and the tokens of their shares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from galvatron_hf.plan.chunks import largest_share


class SharedCost(Protocol):
    """Gives the seconds of documents that several ranks share."""

    def seconds(self, lengths: np.ndarray, degree: int) -> np.ndarray:
        """Returns the seconds that each document adds to each of the `degree` ranks that share it, [n] for n lengths
        in tokens. Degree 1 stands for a document that one rank holds.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Documents:
    """Holds the documents of a step, longest first.

    Args:
        lengths: [n] int64, tokens.
        whole: [n], seconds on one rank; infinite if one rank cannot hold the document.
        degrees: [d] ascending, numbers of ranks that may share a document, from 1.
        seconds: [h, d], seconds of each of the first h documents on each of its ranks; infinite if there is no room.
        shares: [h, d] int64, the most tokens of these documents on a rank.
    """

    lengths: np.ndarray
    whole: np.ndarray
    degrees: np.ndarray
    seconds: np.ndarray
    shares: np.ndarray

    @property
    def heavy(self) -> int:
        """Number of documents, the longest ones, that several ranks may share from the start."""
        return len(self.seconds)

    def cheapest(self) -> np.ndarray:
        """Returns the least seconds of all its ranks together that each document takes, [n]."""
        cheapest = self.whole.copy()
        if self.heavy:
            cheapest[: self.heavy] = (self.seconds * self.degrees).min(axis=1)
        return cheapest

    def fitting(self, document: int, seconds: float) -> int:
        """Returns the column of the fewest ranks that take at most `seconds` each, or else of the fastest ones."""
        row = self.seconds[document]
        fits = row <= seconds
        return int(fits.argmax() if fits.any() else row.argmin())


def tables(
    lengths: np.ndarray, cost: SharedCost, degrees: np.ndarray, max_tokens: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the seconds on each rank, infinite where there is no room, and the largest shares in tokens, both
    [n, degrees], for n lengths in tokens and ranks that hold `max_tokens`.
    """
    shares = largest_share(lengths[:, None], degrees)
    seconds = np.empty(shares.shape)
    for column, degree in enumerate(degrees.tolist()):
        seconds[:, column] = cost.seconds(lengths, degree)
    return np.where(shares <= max_tokens, seconds, np.inf), shares


def allowed_degrees(ranks: int, max_degree: int | None, candidates: Sequence[int] | None) -> np.ndarray:
    """Returns the ascending numbers of ranks that may share a document, 1 among them; all without `candidates`.

    Raises:
        ValueError: if `max_degree` or a candidate is not from 1 to `ranks`.
    """
    most = ranks if max_degree is None else max_degree
    if not 1 <= most <= ranks:
        raise ValueError(f"max_degree={most}: a document has 1 to {ranks} ranks; choose one of these numbers.")
    if candidates is None:
        return np.arange(1, most + 1)
    chosen = sorted({1, *(int(degree) for degree in candidates)})
    if chosen[0] < 1 or chosen[-1] > ranks:
        raise ValueError(f"candidates={list(candidates)}: a document has 1 to {ranks} ranks; leave out the others.")
    return np.array([degree for degree in chosen if degree <= most])
