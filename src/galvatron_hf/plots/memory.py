# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Draws the predicted memory of ranks by kind, against the budget and the measured peak."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from galvatron_hf.plan.table import ranks_text
from galvatron_hf.planner.report.explain import KINDS, Explanation
from galvatron_hf.plots.style import DARK, VERMILLION, WIDTH, box, legend_below, look, new_figure, no_spines, settings
from galvatron_hf.utils.units import GIB


_MIB = 1 << 20
_BAR = 0.66


def memory_values(
    explanation: Explanation, budget: int | None = None, measured: Sequence[int | None] | None = None
) -> dict:
    """Returns what the picture shows, as JSON values in bytes, by pipeline rank."""
    groups = explanation.estimate.plan.rank_groups
    measured = measured or [None] * len(groups)
    return {
        "budget_bytes": budget,
        "pipeline_ranks": [
            {
                "ranks": list(group),
                "predicted_bytes": stage.memory_bytes,
                "predicted_bytes_by_kind": dict(stage.bytes_by_kind),
                "measured_bytes": peak,
            }
            for group, stage, peak in zip(groups, explanation.stages, measured, strict=True)
        ],
    }


def memory_figure(
    explanation: Explanation,
    budget: int | None = None,
    measured: Sequence[int | None] | None = None,
    *,
    width: float = WIDTH,
) -> Figure:
    """Draws the bytes of a rank of each pipeline rank: weights, gradients, optimizer states, activations and working
    memory.

    Args:
        explanation ([`Explanation`]): The prediction, from [`~planner.report.explain.explain_plan`].
        budget (`int`, *optional*): Bytes that a plan may use on a rank, drawn as a line.
        measured (`Sequence[int | None]`, *optional*): Measured peak of each pipeline rank.
        width (`float`, defaults to 7): Inches.
    """
    groups, stages = explanation.estimate.plan.rank_groups, explanation.stages
    measured = list(measured or [None] * len(groups))
    peaks = [peak for peak in measured if peak is not None]
    most = max([*(stage.memory_bytes for stage in stages), *peaks])
    unit, name = (GIB, "GiB") if most >= GIB / 4 else (_MIB, "MiB")
    shown_budget = budget is not None and budget <= 5 * most
    right = 1.16 * max([most, *([budget] if shown_budget else [])]) / unit
    with settings():
        figure, [axes] = new_figure(0.46 * len(groups) + (1.7 if width >= 6 else 2.1), width=width)
        for row, (stage, peak) in enumerate(zip(stages, measured, strict=True)):
            left = 0.0
            for number, kind in enumerate(KINDS):
                size = stage.bytes_by_kind[kind] / unit
                if size > 0:
                    wide = size / right > 0.065
                    box(axes, left, row - _BAR / 2, size, _BAR, look(number), f"{size:.3g}" if wide else "")
                left += size
            if peak is not None:
                axes.plot(peak / unit, row, marker="D", color=DARK, markerfacecolor="white", markersize=6, zorder=4)
            axes.text(left + 0.012 * right, row, f"{left:.3g}", va="center", ha="left", fontsize=8)
        if shown_budget:
            axes.axvline(budget / unit, color=VERMILLION, linestyle="--", linewidth=1.6)
        names = [f"ranks {ranks_text(group)}" if len(group) > 1 else f"rank {group[0]}" for group in groups]
        axes.set_yticks(range(len(names)), names)
        axes.tick_params(axis="y", length=0)
        axes.set_ylim(len(groups) - 0.4, -0.6)
        axes.set_xlim(0, right)
        axes.set_xlabel(f"{name} of a rank (predicted)")
        axes.grid(axis="x")
        no_spines(axes, "left")
        axes.set_title("Peak memory of a rank" + _budget_text(budget, shown_budget, unit, name))
        legend = [look(number).patch(kind) for number, kind in enumerate(KINDS)]
        if shown_budget:
            legend.append(Line2D([], [], color=VERMILLION, linestyle="--", linewidth=1.6, label="budget"))
        if peaks:
            style = dict(color=DARK, markerfacecolor="white", linestyle="none", markersize=6)
            legend.append(Line2D([], [], marker="D", label="measured peak", **style))
        legend_below(figure, legend, columns=4 if width >= 6 else 2)
    return figure


def _budget_text(budget: int | None, shown: bool, unit: int, name: str) -> str:
    if budget is None:
        return ""
    text = f"budget {budget / unit:,.4g} {name}"
    return f"; {text}" if shown else f"; {text}, beyond the axis"
