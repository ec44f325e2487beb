# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The cost of a sequence: quadratic in its length for attention, linear for everything else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

import numpy as np
import scipy.optimize


@dataclass(frozen=True, kw_only=True)
class SequenceCost:
    """Gives the seconds that a sequence of s tokens adds to a packed micro-batch: `a * s + b * s**2 + c` (arXiv
    2412.07894). `per_token` (a) is the cost of projections, MLP, embedding and head, `per_token_squared` (b) that of
    attention. `per_sequence` (c) is that of a sequence of any length. A negative or infinite coefficient raises
    ValueError.
    """

    per_token: float
    per_token_squared: float
    per_sequence: float

    def __post_init__(self):
        for one in fields(self):
            value = getattr(self, one.name)
            if not (np.isfinite(value) and value >= 0):
                raise ValueError(f"{one.name}={value}: a cost is finite and not negative; use {one.name}=0.")

    def seconds(self, lengths: Sequence[int] | np.ndarray) -> np.ndarray:
        """Returns the seconds of each sequence, [n] for n lengths in tokens; a longer sequence never costs less."""
        lengths = np.asarray(lengths, dtype=np.float64)
        return self.per_token * lengths + self.per_token_squared * lengths**2 + self.per_sequence


@dataclass(frozen=True, kw_only=True)
class SharingCost:
    """Gives the seconds that sharing a document of s tokens by d ranks adds on each of them to an even split of its
    work: `(d - 1) * (per_hop + per_token * s / d)`. A hop is a block of keys and values that a rank gets from another.
    """

    per_hop: float
    per_token: float

    def __post_init__(self):
        for one in fields(self):
            value = getattr(self, one.name)
            if not (np.isfinite(value) and value >= 0):
                raise ValueError(f"{one.name}={value}: a cost is finite and not negative; use {one.name}=0.")

    def seconds(self, lengths: np.ndarray, degree: int) -> np.ndarray:
        return (degree - 1) * (self.per_hop + self.per_token * np.asarray(lengths, dtype=np.float64) / degree)


def assumed_sharing(sequence: SequenceCost) -> SharingCost:
    """Returns a cost of sharing for what was not measured: a hop takes a tenth of the time that the linear work of its
    tokens takes.
    """
    return SharingCost(per_hop=0.0, per_token=0.1 * sequence.per_token)


@dataclass(frozen=True, kw_only=True)
class GroupCost:
    """Gives the seconds of documents that data ranks share; see
    [`~galvatron_hf.data.group_documents.SharedCost`].

    Attributes:
        sequence ([`SequenceCost`]): the cost of a document that one rank has whole.
        sharing (`Mapping[str, SharingCost]`): the cost of sharing by execution.
        far (`Mapping[str, SharingCost]`): the same for groups over several nodes; empty if there is one node.
        node_ranks (`int`, *optional*): the data ranks of a node, if there are several nodes.
        exchangeable (`frozenset[int]`): the numbers of ranks that can exchange heads, as the execution "ulysses" does.
    """

    sequence: SequenceCost
    sharing: Mapping[str, SharingCost]
    far: Mapping[str, SharingCost] = field(default_factory=dict)
    node_ranks: int | None = None
    exchangeable: frozenset[int] = frozenset()

    def seconds(self, lengths: np.ndarray, degree: int) -> np.ndarray:
        """Returns the seconds that each document adds to each of the `degree` ranks that share it, [n]; infinite if so
        many ranks cannot share one.
        """
        lengths = np.asarray(lengths, dtype=np.float64)
        if degree == 1:
            return self.sequence.seconds(lengths)
        once, possible = self.sequence.per_sequence, self._possible(degree)
        if not possible:
            return np.full(lengths.shape, np.inf)
        split = (self.sequence.seconds(lengths) - once) / degree + once
        return split + np.min([cost.seconds(lengths, degree) for cost in possible.values()], axis=0)

    def degrees(self, most: int) -> list[int]:
        """Returns the numbers of ranks up to `most` that may share a document, 1 among them."""
        return [degree for degree in range(1, most + 1) if degree == 1 or self._possible(degree)]

    def execution(self, length: int, degree: int) -> str:
        """Returns the execution that takes the least time for a document that `degree` ranks share."""
        possible = self._possible(degree)
        return min(possible, key=lambda name: float(possible[name].seconds(np.array([length]), degree)[0]))

    def _possible(self, degree: int) -> dict[str, SharingCost]:
        far = self.node_ranks is not None and degree > self.node_ranks
        costs = self.far if far and self.far else self.sharing
        return {name: cost for name, cost in costs.items() if name != "ulysses" or degree in self.exchangeable}


def fit_sharing(shapes: Sequence[tuple[int, int]], seconds: Sequence[float]) -> SharingCost:
    """Fits the cost of sharing, with coefficients >= 0, to the seconds that sharing added.

    Args:
        shapes (`Sequence[tuple[int, int]]`): [n], the length of each document and the number of its ranks, above 1.
        seconds (`Sequence[float]`): [n], added seconds; negative ones, which are noise, count as 0.
    """
    length, degree = np.asarray(shapes, dtype=np.float64).T
    columns = np.stack([degree - 1, (degree - 1) * length / degree], axis=1)
    scale = columns.max(axis=0)
    found = scipy.optimize.nnls(columns / scale, np.maximum(np.asarray(seconds, dtype=np.float64), 0.0))[0] / scale
    return SharingCost(per_hop=float(found[0]), per_token=float(found[1]))


def fit_relative(columns: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Returns coefficients >= 0, [m], of `columns` [n, m] with the least squared relative error to `seconds` [n]."""
    relative = columns / seconds[:, None]
    scale = np.where(relative.any(axis=0), relative.max(axis=0), 1.0)
    return scipy.optimize.nnls(relative / scale, np.ones_like(seconds))[0] / scale


def fit_cost(shapes: Sequence[tuple[int, int]], seconds: Sequence[float]) -> tuple[SequenceCost, float]:
    """Fits a cost with coefficients >= 0 and the least squared relative error, so that short sequences count too.

    Args:
        shapes (`Sequence[tuple[int, int]]`): [n], for each timed micro-batch the length and number of its sequences.
        seconds (`Sequence[float]`): [n], the times of the micro-batches.

    Returns:
        `tuple`: the cost of a sequence, and the constant seconds of a micro-batch.

    Raises:
        ValueError: if there is no measurement, a time is not positive, or the arguments differ in length.
    """
    sizes, seconds = np.asarray(shapes, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    if sizes.shape != (len(seconds), 2) or not len(seconds):
        raise ValueError(
            f"shapes {sizes.shape} and {seconds.shape}: a fit needs one time for each (tokens, sequences); pass as "
            "many of both, 1 or more."
        )
    if not (np.isfinite(seconds).all() and (seconds > 0).all()):
        raise ValueError(f"seconds={seconds.min()}: times to fit are positive and finite; measure longer ones.")
    length, count = sizes.T
    columns = np.stack([count * length, count * length**2, count, np.ones_like(count)], axis=1)
    found = fit_relative(columns, seconds).tolist()
    if found[0] == found[1] == 0.0:
        found[0] = float(seconds[-1] / (count[-1] * length[-1]))  # the times are too noisy: assume time per token
    return SequenceCost(per_token=found[0], per_token_squared=found[1], per_sequence=found[2]), found[3]
