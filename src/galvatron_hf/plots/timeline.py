# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Draws when ranks compute, wait and update in a step: as predicted, as measured, or one above the other."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from galvatron_hf.plots.spans import BACKWARD, FORWARD, SUMS, UPDATE, WAIT, StepTimeline
from galvatron_hf.plots.style import (
    GREEN,
    GREY,
    ORANGE,
    PREDICTED,
    PURPLE,
    SKY,
    WIDTH,
    Look,
    box,
    legend_below,
    milliseconds,
    new_figure,
    no_spines,
    settings,
)


LOOKS = {
    FORWARD: Look(fill=SKY),
    BACKWARD: Look(fill=ORANGE, hatch="//"),
    WAIT: Look(fill=GREY, hatch=".."),
    SUMS: Look(fill=PURPLE, hatch="xx"),
    UPDATE: Look(fill=GREEN, hatch="\\\\"),
}
_BAR = 0.78
_MOST_ROWS = 32


def timeline_figure(*timelines: StepTimeline, width: float = WIDTH) -> Figure:
    """Draws one step of each timeline, one below the other, in milliseconds on one scale.

    Args:
        *timelines ([`StepTimeline`]): Of [`~plots.spans.predicted_timeline`] or [`~plots.spans.measured_timeline`].
        width (`float`, defaults to 7): Inches.

    Raises:
        ValueError: if no timeline is given.
    """
    if not timelines:
        raise ValueError("there is no timeline to draw: give a predicted or a measured one.")
    counts = [min(len(one.rows), _MOST_ROWS) for one in timelines]
    height = 0.34 * sum(counts) + 0.75 * len(timelines) + (0.55 if width >= 6 else 0.85)
    with settings():
        figure, parts = new_figure(
            height, width=width, rows=len(timelines), ratios=[count + 0.4 for count in counts], sharex=True
        )
        end = max(max(one.end_ms, one.step_ms or 0.0) for one in timelines)
        for axes, one in zip(parts, timelines, strict=True):
            axes.set_xlim(0, 1.02 * end)
            _draw(axes, one, width)
        parts[-1].set_xlabel("milliseconds from the begin of the step")
        kinds = {span.kind for one in timelines for spans in one.rows.values() for span in spans}
        legend = [LOOKS[kind].patch(kind) for kind in LOOKS if kind in kinds]
        if any(one.step_ms is not None for one in timelines):
            legend.append(Line2D([], [], color=PREDICTED, linestyle="--", linewidth=1.6, label="predicted step"))
        legend_below(figure, legend, columns=5 if width >= 6 else 2)
    return figure


def _draw(axes: Axes, timeline: StepTimeline, width: float) -> None:
    rows = list(timeline.rows.items())[:_MOST_ROWS]
    scale = (width - 1.2) * 72 / axes.get_xlim()[1]  # points of a millisecond
    for row, (_, spans) in enumerate(rows):
        for span in spans:
            length = span.end_ms - span.begin_ms
            label = "" if span.micro_batch is None or span.kind == WAIT else _label(span, timeline.stages, len(rows))
            label = label if length * scale > 5.2 * len(label) + 3 else ""
            height = _BAR if span.kind != WAIT else 0.5 * _BAR
            box(
                axes,
                span.begin_ms,
                row - height / 2,
                length,
                height,
                LOOKS[span.kind],
                label,
                fontsize=7,
            )
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(rows) - 0.45, -0.55)
    no_spines(axes, "left")
    axes.set_title(_title(timeline, len(rows)))
    if timeline.step_ms is not None:
        axes.axvline(timeline.step_ms, color=PREDICTED, linestyle="--", linewidth=1.6)


def _label(span, stages: int, rows: int) -> str:
    """Returns the number of the micro-batch, and of the stage if a row has several."""
    return str(span.micro_batch) if stages <= rows else f"{span.micro_batch}.{span.stage}"


def _title(timeline: StepTimeline, drawn: int) -> str:
    if timeline.measured:
        text = f"measured, step {timeline.step}: {milliseconds(timeline.end_ms)}, idle {timeline.idle_share:.0%}"
    else:
        text = f"predicted: a step of {milliseconds(timeline.step_ms)}"
        if abs(timeline.end_ms / timeline.step_ms - 1) > 0.005:
            text += f"; played, it ends after {milliseconds(timeline.end_ms)}"
        text += f", idle {timeline.idle_share:.0%}"
    if len(timeline.rows) > drawn:
        text += f" (first {drawn} of {len(timeline.rows)} rows)"
    return text
