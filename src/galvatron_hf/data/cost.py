# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""What one document costs: attention is quadratic in its length, everything else linear."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import scipy.optimize


@dataclass(frozen=True, kw_only=True)
class SequenceCost:
    """
    Seconds that a sequence of `s` tokens adds to a packed micro-batch: `a * s + b * s**2 + c` (arXiv 2412.07894).

    Args:
        per_token (`float`): a, of projections, MLP, embedding and head.
        per_token_squared (`float`): b, of attention.
        per_sequence (`float`): c, of what is done once for a document.

    Raises:
        ValueError: for a coefficient that is negative or not finite.
    """

    per_token: float
    per_token_squared: float
    per_sequence: float

    def __post_init__(self):
        for field in fields(self):
            value = getattr(self, field.name)
            if not (np.isfinite(value) and value >= 0):
                raise ValueError(f"{field.name}={value}: a cost is finite and not negative; use {field.name}=0.")

    def of(self, lengths: Sequence[int] | np.ndarray) -> np.ndarray:
        """Seconds of each sequence, [n] for n lengths in tokens; a longer sequence never costs less."""
        lengths = np.asarray(lengths, dtype=np.float64)
        return self.per_token * lengths + self.per_token_squared * lengths**2 + self.per_sequence

    @classmethod
    def fit(cls, lengths: Sequence[int] | np.ndarray, seconds: Sequence[float] | np.ndarray) -> SequenceCost:
        """
        The coefficients, none negative, with the least squared relative error, so that short sequences count too.

        Args:
            lengths (`Sequence[int]`): [n], tokens of each measured sequence.
            seconds (`Sequence[float]`): [n], what each took.

        Raises:
            ValueError: without a measurement, for times that are not positive, or for unequally many of both.
        """
        lengths, seconds = np.asarray(lengths, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
        if lengths.ndim != 1 or lengths.shape != seconds.shape or not len(lengths):
            raise ValueError(
                f"shapes {lengths.shape} and {seconds.shape}: a fit needs lengths and seconds in pairs; pass two "
                "vectors of one size, 1 or more."
            )
        if not (np.isfinite(seconds).all() and (seconds > 0).all()):
            raise ValueError(f"seconds={seconds.min()}: times to fit are positive and finite; measure longer ones.")
        columns = np.stack([lengths, lengths**2, np.ones_like(lengths)], axis=1) / seconds[:, None]
        scale = columns.max(axis=0)
        scale[scale == 0] = 1  # lengths of 0 say nothing about the cost of a token
        solution, _ = scipy.optimize.nnls(columns / scale, np.ones_like(seconds))
        per_token, per_token_squared, per_sequence = (solution / scale).tolist()
        return cls(per_token=per_token, per_token_squared=per_token_squared, per_sequence=per_sequence)
