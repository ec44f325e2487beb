# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Draws what a training run logged and measured: its losses, and its step times beside the predicted one."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from galvatron_hf.planner.report.run_files import is_number
from galvatron_hf.plots.style import INK, MEASURED, PREDICTED, WIDTH, legend_below, milliseconds, new_figure, settings


MOST_DRAWN = 1e300  # matplotlib adds margins


def series(log_history: Sequence[Mapping[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """Returns the steps at which a number was logged, and the numbers; those that are not finite, or too large to
    be drawn, are left out.
    """
    pairs = [
        (log["step"], float(log[name]))
        for log in log_history
        if is_number(log.get(name)) and abs(log[name]) <= MOST_DRAWN and type(log.get("step")) is int
    ]
    return [step for step, _ in pairs], [value for _, value in pairs]


def series_figure(
    log_history: Sequence[Mapping[str, Any]], names: Mapping[str, str], label: str, *, width: float = WIDTH
) -> Figure:
    """Draws logged numbers over the steps.

    Args:
        log_history (`Sequence[Mapping]`): Trainer's log.
        names (`Mapping[str, str]`): Keys of the log, with their names in the legend.
        label (`str`): What the numbers are, with the unit.
        width (`float`, defaults to 7): Inches.
    """
    looks = itertools.cycle([(MEASURED, "-", "o"), (INK, ":", "^")])
    with settings():
        figure, [axes] = new_figure(2.6, width=width)
        entries = []
        for name, text in names.items():
            predicted = name.startswith("predicted")
            colour, line, marker = (PREDICTED, "--", "s") if predicted else next(looks)
            steps, values = series(log_history, name)
            style = dict(color=colour, linestyle=line, marker=marker if len(steps) <= 40 else "", markersize=4)
            axes.plot(steps, values, **style)
            entries.append(Line2D([], [], label=text, **style))
        axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
        axes.set_xlabel("step")
        axes.set_ylabel(label)
        axes.grid()
        if len(entries) > 1:
            legend_below(figure, entries, columns=2)
    return figure


def step_times_figure(
    step_ms: Sequence[float], predicted_ms: float | None, *, first_step: int, width: float = WIDTH
) -> Figure:
    """Draws the measured time of each step, their median, and the predicted time.

    Args:
        step_ms (`Sequence[float]`): Measured milliseconds, at least one.
        predicted_ms (`float`, *optional*): The prediction.
        first_step (`int`): Number of the first measured step.
        width (`float`, defaults to 7): Inches.
    """
    median = statistics.median(step_ms)
    with settings():
        figure, [axes] = new_figure(2.9, width=width)
        steps = range(first_step, first_step + len(step_ms))
        points = dict(linestyle="none", marker="o", color=MEASURED, markersize=4 if len(step_ms) <= 200 else 2)
        axes.plot(steps, step_ms, **points)
        entries = [Line2D([], [], label="measured step", **points)]
        lines = [("median of these steps", median, dict(color=INK, linestyle="-", linewidth=1.2))]
        if predicted_ms is not None:
            lines.append(("predicted step", predicted_ms, dict(color=PREDICTED, linestyle="--", linewidth=1.6)))
        for label, value, style in lines:
            axes.axhline(value, **style)
            entries.append(Line2D([], [], label=f"{label}: {milliseconds(value)}", **style))
        # Without steps that an interruption made many times as long.
        shown = [value for value in step_ms if value <= 4 * median]
        top = 1.15 * max([*shown, predicted_ms or 0.0])
        axes.set_ylim(0, top)
        above = sum(value > top for value in step_ms)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
        axes.set_xlabel("step" + (f" ({above} of {len(step_ms)} steps are above the axis)" if above else ""))
        axes.set_ylabel("milliseconds")
        axes.grid()
        legend_below(figure, entries, columns=2 if width >= 6 else 1)
    return figure
