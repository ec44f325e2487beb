# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Draws the lengths of a dataset's sequences, with the padding that padded batches of them would have."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure

from galvatron_hf.data.forecast import DataWorkload, drawn_batches, padded_lengths
from galvatron_hf.plots.style import GREY, SKY, WIDTH, Look, box, legend_below, new_figure, settings


_TOKENS, _PADDING = Look(fill=SKY), Look(fill=GREY, hatch="//")


@dataclass(frozen=True, kw_only=True)
class LengthBins:
    """Holds sequences of global batches in bins [from, to) of powers of two.

    Attributes:
        bounds (`np.ndarray`): [bins + 1], tokens.
        sequences, tokens, padding (`np.ndarray`): [bins], sequences, their tokens, and the positions that padded
            batches add to them.
        batches, batch_size, ranks, rows (`int`): number and rows of the global batches, data ranks, and rows of a rank
            that are padded together.
    """

    bounds: np.ndarray
    sequences: np.ndarray
    tokens: np.ndarray
    padding: np.ndarray
    batches: int
    batch_size: int
    ranks: int
    rows: int

    @property
    def padding_share(self) -> float:
        """Returns the share of the computed positions that are padding."""
        return float(self.padding.sum() / (self.padding.sum() + self.tokens.sum()))

    def values(self) -> dict:
        """Returns the bins as JSON values."""
        return {
            "padding_share": self.padding_share,
            "batches": self.batches,
            "batch_size": self.batch_size,
            "ranks": self.ranks,
            "rows_padded_together": self.rows,
            "bins": [
                {
                    "from": int(low),
                    "to": int(high),
                    "sequences": int(count),
                    "tokens": int(tokens),
                    "padding": int(padding),
                }
                for low, high, count, tokens, padding in zip(
                    self.bounds[:-1], self.bounds[1:], self.sequences, self.tokens, self.padding, strict=True
                )
            ],
        }


def length_bins(lengths: np.ndarray, workload: DataWorkload) -> LengthBins:
    """Counts the sequences of the forecast's global batches, padded as plain Trainer pads them.

    Args:
        lengths (`np.ndarray`): [rows], tokens of each sequence, at least 1.
        workload ([`DataWorkload`]): The batches. If a rank cannot hold the longest sequence, it raises ValueError.
    """
    longest = int(lengths.max())
    if workload.token_limit(longest) < longest:
        raise ValueError(
            f"max_tokens={workload.max_tokens} is less than the longest sequence, {longest} tokens, which padded "
            f"batches cannot have: give {longest} or more, or cut sequences with max_length={workload.max_tokens}."
        )
    batches, rows = drawn_batches(lengths, workload), workload.padded_rows(longest)
    real = np.concatenate(batches)
    padded = np.concatenate([padded_lengths(batch, workload.ranks, rows) for batch in batches])
    exponents = np.frexp(real.astype(np.float64))[1] - 1  # exact, unlike a logarithm
    low, high = int(exponents.min()), int(exponents.max())

    def summed(weights: np.ndarray | None = None) -> np.ndarray:
        return np.bincount(exponents - low, weights=weights, minlength=high - low + 1).astype(np.int64)

    return LengthBins(
        bounds=2 ** np.arange(low, high + 2),
        sequences=summed(),
        tokens=summed(real),
        padding=summed(padded - real),
        batches=len(batches),
        batch_size=workload.batch_size,
        ranks=workload.ranks,
        rows=rows,
    )


def lengths_figure(bins: LengthBins, *, width: float = WIDTH) -> Figure:
    """Draws the number of sequences in each bin, and below it their tokens with the padding of padded batches.

    Args:
        bins ([`LengthBins`]): Of [`length_bins`].
        width (`float`, defaults to 7): Inches.
    """
    places = range(len(bins.sequences))
    with settings():
        figure, [above, below] = new_figure(3.9, width=width, rows=2, ratios=[1, 1.5], sharex=True)
        for axes in (above, below):
            axes.set_xlim(-0.6, len(places) - 0.4)
            axes.grid(axis="y")
        total = bins.tokens + bins.padding
        above.set_ylim(0, 1.18 * bins.sequences.max())
        below.set_ylim(0, 1.12 * total.max())
        for place in places:
            count = int(bins.sequences[place])
            box(above, place - 0.42, 0, 0.84, count, _TOKENS)
            above.text(place, count, f"{count:,}", ha="center", va="bottom", fontsize=7)
            box(below, place - 0.42, 0, 0.84, int(bins.tokens[place]), _TOKENS)
            if bins.padding[place]:
                box(below, place - 0.42, int(bins.tokens[place]), 0.84, int(bins.padding[place]), _PADDING)
        above.set_ylabel("sequences")
        below.set_ylabel("positions")
        below.yaxis.set_major_formatter(lambda value, place: _short(value))
        names = [f"{low}-" if low < 1 << 14 else f"{low >> 10}Ki-" for low in bins.bounds[:-1].tolist()]
        below.set_xticks(places, names, rotation=45 if len(places) > 9 else 0)
        below.set_xlabel("tokens of a sequence (from, up to the next bin)")
        above.set_title(
            f"{bins.batches * bins.batch_size:,} sequences in {bins.batches:,} global batches of {bins.batch_size:,}"
        )
        below.set_title(
            f"padded, {bins.rows} row{'s' * (bins.rows > 1)} of a rank together: {bins.padding_share:.1%} padding"
        )
        legend_below(figure, [_TOKENS.patch("tokens"), _PADDING.patch("padding of padded batches")], columns=2)
    return figure


def _short(value: float) -> str:
    for size, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{name}"
    return f"{value:.4g}"
