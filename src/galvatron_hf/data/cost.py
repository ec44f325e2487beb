# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The cost of a sequence: quadratic in its length for attention, linear for everything else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

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
        for field in fields(self):
            value = getattr(self, field.name)
            if not (np.isfinite(value) and value >= 0):
                raise ValueError(f"{field.name}={value}: a cost is finite and not negative; use {field.name}=0.")

    def seconds(self, lengths: Sequence[int] | np.ndarray) -> np.ndarray:
        """Returns the seconds of each sequence, [n] for n lengths in tokens; a longer sequence never costs less."""
        lengths = np.asarray(lengths, dtype=np.float64)
        return self.per_token * lengths + self.per_token_squared * lengths**2 + self.per_sequence


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
