# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Draws predicted against measured step times, from the files of training runs and of benchmarks/accuracy.py."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from galvatron_hf.planner.report.run_files import RUN_FILE, read_values
from galvatron_hf.plots.style import BLUE, INK, ORANGE, QUIET, WIDTH, legend_below, new_figure, plain, settings


_MARKS = (("o", BLUE), ("s", ORANGE), ("^", "#009e73"), ("D", "#cc79a7"), ("v", "#d55e00"))
_WITHIN = 0.1  # errors between the dotted lines


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Holds a predicted and a measured time of a step; `source` names the runs that belong together."""

    source: str
    predicted_ms: float
    measured_ms: float

    @property
    def error(self) -> float:
        """Returns predicted / measured - 1."""
        return self.predicted_ms / self.measured_ms - 1


def read_comparisons(path: str | os.PathLike) -> list[Comparison]:
    """Reads the comparisons of a file: `training_run.json` of a run, its folder, or `cases-SHAPE.json` of
    benchmarks/accuracy.py. A file without a measured step raises ValueError.
    """
    path = Path(path)
    path = path / RUN_FILE if path.is_dir() else path
    given = read_values(path)
    cases = given.get("cases") if "cases" in given else [given.get("outcome")]
    found = [_comparison(path, case, given.get("name")) for case in cases or () if isinstance(case, Mapping)]
    found = [one for one in found if one is not None]
    if not found:
        raise ValueError(
            f"{os.fspath(path)!r} has no step with a predicted and a measured time: give the file of a run under a "
            "searched plan that took more than two steps."
        )
    return found


def _comparison(path: Path, case: Mapping[str, Any], name: Any) -> Comparison | None:
    times = case.get("predicted_ms"), case.get("measured_ms")
    if not all(type(one) in (int, float) and one > 0 for one in times):
        return None
    if not isinstance(name, str) or not name:
        name = (path.parent.name if path.name == RUN_FILE else path.stem) or path.name
    return Comparison(source=name, predicted_ms=float(times[0]), measured_ms=float(times[1]))


def accuracy_values(comparisons: Sequence[Comparison]) -> dict:
    """Returns what the picture shows, as JSON values."""
    errors = [abs(one.error) for one in comparisons]
    return {
        "median_error": float(np.median(errors)),
        "largest_error": max(errors),
        "steps": [vars(one) | {"error": one.error} for one in comparisons],
    }


def accuracy_figure(comparisons: Sequence[Comparison], *, width: float = WIDTH) -> Figure:
    """Draws a point for each run, the line of equality, and lines of 10% more and less.

    Args:
        comparisons (`Sequence[Comparison]`): Of [`read_comparisons`], at least one.
        width (`float`, defaults to 7): Inches.

    Raises:
        ValueError: if there is no comparison.
    """
    if not comparisons:
        raise ValueError("there is no comparison to draw: give at least one.")
    measured = np.array([one.measured_ms for one in comparisons])
    predicted = np.array([one.predicted_ms for one in comparisons])
    values = np.concatenate([measured, predicted])
    low, high = values.min() / 1.25, values.max() * 1.25
    sources = list(dict.fromkeys(one.source for one in comparisons))
    size = min(width, 5.2)
    with settings():
        figure, [axes] = new_figure(size + 0.75, width=size)
        axes.set(xlim=(low, high), ylim=(low, high))
        if high / low > 8:
            axes.set(xscale="log", yscale="log")
        line = np.linspace(low, high, 50)
        axes.plot(line, line, color=INK, linewidth=1)
        for factor in (1 - _WITHIN, 1 + _WITHIN):
            axes.plot(line, factor * line, color=QUIET, linewidth=0.9, linestyle=":")
        entries = [
            Line2D([], [], color=INK, linewidth=1, label="equal"),
            Line2D([], [], color=QUIET, linewidth=0.9, linestyle=":", label="10% more or less"),
        ]
        for number, source in enumerate(sources):
            marker, colour = _MARKS[number % len(_MARKS)]
            points = [index for index, one in enumerate(comparisons) if one.source == source]
            style = dict(linestyle="none", marker=marker, color=colour, markersize=6, markeredgecolor=INK)
            axes.plot(measured[points], predicted[points], markeredgewidth=0.5, **style)
            entries.append(Line2D([], [], label=plain(source), **style))
        axes.set_aspect("equal")
        axes.grid()
        axes.set_xlabel("measured milliseconds of a step")
        axes.set_ylabel("predicted milliseconds of a step")
        found = accuracy_values(comparisons)
        axes.set_title(
            f"{len(comparisons)} plan{'s' * (len(comparisons) > 1)}: error {found['median_error']:.1%} in the median, "
            f"{found['largest_error']:.1%} at most",
            fontsize=9,
        )
        legend_below(figure, entries, columns=2)
    return figure
