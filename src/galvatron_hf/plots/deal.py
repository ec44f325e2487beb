# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Draws a deal: the documents of one step over micro-batches and data ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from galvatron_hf.data.cost import GroupCost, SequenceCost
from galvatron_hf.data.group_placement import GroupPlacement
from galvatron_hf.data.placement import Placement, SharedSequence, step_imbalance
from galvatron_hf.plots.style import (
    ORANGE,
    QUIET,
    SKY,
    VERMILLION,
    WIDTH,
    YELLOW,
    Look,
    box,
    legend_below,
    new_figure,
    no_spines,
    settings,
)


# Neighbouring documents alternate.
_WHOLE = (Look(fill=SKY), Look(fill=YELLOW))
_SHARED = Look(fill=ORANGE, hatch="//")
_MOST_BARS = 64


@dataclass(frozen=True, kw_only=True)
class Held:
    """Holds a document's tokens on a rank; `ranks` share it, one if it is whole."""

    document: int
    tokens: float
    ranks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class StepDeal:
    """Holds the documents of a step.

    Attributes:
        bins (`tuple[tuple[tuple[Held, ...], ...], ...]`): the documents of each [micro-batch][data rank].
        imbalance (`float`, *optional*): predicted time of the slowest rank over the mean.
        limit (`int`, *optional*): most tokens of a rank in a micro-batch.
    """

    bins: tuple[tuple[tuple[Held, ...], ...], ...]
    imbalance: float | None = None
    limit: int | None = None

    @property
    def tokens(self) -> np.ndarray:
        """Returns the tokens of each bin, [micro-batch, data rank]."""
        return np.array([[sum(held.tokens for held in one) for one in ranks] for ranks in self.bins])

    def values(self) -> dict:
        """Returns the deal as JSON values."""
        return {
            "imbalance": self.imbalance,
            "max_tokens": self.limit,
            "micro_batches": [
                [[{**vars(held), "ranks": list(held.ranks)} for held in one] for one in ranks] for ranks in self.bins
            ],
        }


def step_deal(
    placement: Placement | GroupPlacement,
    lengths: Sequence[int],
    cost: SequenceCost | GroupCost | None = None,
    *,
    limit: int | None = None,
    stages: int = 1,
) -> StepDeal:
    """Returns the documents of a step on micro-batches and ranks.

    Args:
        placement ([`Placement`] or [`GroupPlacement`]): Of [`~data.placement.place`] or
            [`~data.group_placement.place_groups`].
        lengths (`Sequence[int]`): [n], tokens of each document.
        cost ([`SequenceCost`] or [`GroupCost`], *optional*): Predicts the imbalance.
        limit (`int`, *optional*): Most tokens of a rank in a micro-batch.
        stages (`int`, defaults to 1): Pipeline stages.

    A document that d ranks share is drawn with an equal part of its tokens on each of them.
    """
    bins: list[list[list[Held]]] = []
    if isinstance(placement, GroupPlacement):
        for pairs in placement.micro_batches:
            bins.append([[] for _ in range(placement.ranks)])
            for document, ranks in pairs:
                _share(bins[-1], document, ranks, lengths)
    else:
        for number, ranks in enumerate(placement.micro_batches):
            bins.append([[] for _ in ranks])
            for rank, documents in enumerate(ranks):
                for document in documents:
                    _share(bins[-1], document, (rank,), lengths)
            for shared in placement.shared_in(number):
                _share(bins[-1], shared.sequence, shared.ranks, lengths)
    imbalance = None if cost is None else step_imbalance(placement.loads(lengths, cost), stages)
    return StepDeal(bins=tuple(tuple(map(tuple, ranks)) for ranks in bins), imbalance=imbalance, limit=limit)


def run_deal(values: Mapping[str, Any]) -> StepDeal:
    """Returns the deal that a training run has kept of its last packed step, `deal` of its `training_run.json`. Raises
    ValueError for values that are no deal.
    """
    try:
        placement = Placement(
            tuple(tuple(map(tuple, ranks)) for ranks in values["micro_batches"]),
            tuple(
                tuple(SharedSequence(index, tuple(ranks), execution) for index, ranks, execution in shared)
                for shared in values["shared"]
            ),
        )
        return replace(step_deal(placement, values["lengths"]), imbalance=float(values["predicted_imbalance"]))
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise ValueError(f"the deal of the run cannot be read ({error!r}): train again.") from None


def _share(bins: list[list[Held]], document: int, ranks: tuple[int, ...], lengths: Sequence[int]) -> None:
    for rank in ranks:
        tokens = int(lengths[document]) / len(ranks)
        bins[rank].append(Held(document=document, tokens=tokens, ranks=tuple(ranks)))


def deal_figure(deal: StepDeal, *, width: float = WIDTH) -> Figure:
    """Draws a bar of documents for each data rank in each micro-batch; shared documents are hatched.

    Args:
        deal ([`StepDeal`]): Of [`step_deal`].
        width (`float`, defaults to 7): Inches.
    """
    tokens = deal.tokens
    counts = [len(ranks) for ranks in deal.bins]
    drawn = 0
    while drawn < len(counts) and (not drawn or sum(counts[: drawn + 1]) <= _MOST_BARS):
        drawn += 1
    bars = sum(counts[:drawn])
    limit = deal.limit if deal.limit is not None and deal.limit <= 1.5 * tokens.max() else None  # else it is far away
    most = float(max(tokens.max(), limit or 0))
    with settings():
        figure, [axes] = new_figure(0.2 * bars + 0.14 * drawn + 1.5, width=width)
        axes.set_xlim(0, 1.14 * most)
        row, labels, places = 0.0, [], []
        for number in range(drawn):
            for rank, documents in enumerate(deal.bins[number]):
                left = 0.0
                for index, held in enumerate(documents):
                    style = _SHARED if len(held.ranks) > 1 else _WHOLE[index % 2]
                    label = str(held.document) if held.tokens / most > 0.05 else ""
                    box(axes, left, row - 0.42, held.tokens, 0.84, style, label, fontsize=6.5)
                    left += held.tokens
                axes.text(left + 0.008 * most, row, f"{left:,.0f}", va="center", ha="left", fontsize=7)
                labels.append(f"mb {number}, rank {rank}" if rank == 0 else f"rank {rank}")
                places.append(row)
                row += 1
            if number + 1 < drawn:
                axes.axhline(row - 0.5 + 0.35, color=QUIET, linewidth=0.8)
            row += 0.7
        if limit is not None:
            axes.axvline(limit, color=VERMILLION, linestyle="--", linewidth=1.4)
        axes.set_yticks(places, labels, fontsize=7)
        axes.tick_params(axis="y", length=0)
        axes.set_ylim(row - 0.7 - 0.4, -0.6)
        axes.set_xlabel("tokens; numbers in the bars are documents of the step")
        no_spines(axes, "left")
        axes.set_title(_title(deal, drawn, limit is not None))
        legend = [_pair(), _SHARED.patch("shared by several ranks")] if _shares(deal) else [_pair()]
        legend_below(figure, legend, columns=2)
    return figure


def _pair() -> Patch:
    return _WHOLE[0].patch("documents, each whole on one rank (colours alternate)")


def _shares(deal: StepDeal) -> bool:
    return any(len(held.ranks) > 1 for ranks in deal.bins for one in ranks for held in one)


def _title(deal: StepDeal, drawn: int, dashed: bool) -> str:
    documents = len({held.document for ranks in deal.bins for one in ranks for held in one})
    text = f"{documents} documents, {_counted(len(deal.bins), 'micro-batch', 'es')} (mb), "
    text += _counted(len(deal.bins[0]), "data rank", "s")
    if drawn < len(deal.bins):
        text += f"; the first {drawn} micro-batches"
    if deal.imbalance is not None:
        text += f"\nslowest rank / mean: {deal.imbalance:.3f} (predicted)"
    if deal.limit is not None:
        text += f"; at most {deal.limit:,} tokens" + " (dashed)" * dashed
    return text


def _counted(count: int, name: str, plural: str) -> str:
    return f"{count} {name}{plural if count != 1 else ''}"
