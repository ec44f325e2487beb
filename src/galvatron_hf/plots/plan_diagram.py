# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Draws a plan: pipeline stages below each other, layers from left to right, a look for each strategy."""

from __future__ import annotations

import string
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from galvatron_hf.plan import ParallelPlan
from galvatron_hf.plan.plan_words import end_words, layer_words
from galvatron_hf.plan.serialization import fold
from galvatron_hf.plan.table import plan_title, ranks_text
from galvatron_hf.planner.estimate import Estimate
from galvatron_hf.plots.style import (
    GREY,
    INK,
    QUIET,
    WIDTH,
    Look,
    box,
    legend_below,
    look,
    milliseconds,
    new_figure,
    no_spines,
    note,
    plain,
    settings,
)
from galvatron_hf.utils.units import GIB


_END = Look(fill=GREY)
_BAR = 0.72  # height of a bar; rows are 1 apart


@dataclass(frozen=True, kw_only=True)
class Run:
    """Holds neighbouring layers of one stage and stack with one strategy.

    Attributes:
        row (`int`): the pipeline rank.
        stage (`int`): the stage.
        start, end (`int`): half-open range of layers.
        strategy (`int`): number of the strategy, in order of appearance.
    """

    row: int
    stage: int
    start: int
    end: int
    strategy: int


def plan_runs(plan: ParallelPlan) -> tuple[list[Run], list[str]]:
    """Returns the runs of equal layers, and the strategies in words by their numbers."""
    strategies = list(dict.fromkeys(plan.layers))
    runs = []
    for stage, one in enumerate(plan.stages):
        first, last = one.layers
        row = plan.rank_groups.index(one.ranks)
        for stack_start, stack_end in stack_ranges(plan).values():
            start, end = max(first, stack_start), min(last, stack_end)
            for (begin, stop), strategy in fold(plan.layers[start:end]):
                number = strategies.index(strategy)
                runs.append(Run(row=row, stage=stage, start=start + begin, end=start + stop, strategy=number))
    return runs, [layer_words(one) for one in strategies]


def stack_ranges(plan: ParallelPlan) -> dict[str, tuple[int, int]]:
    """Returns the half-open range of layers of each stack."""
    found, start = {}, 0
    for name, count in plan.stacks.items():
        found[name] = (start, start + count)
        start += count
    return found


def plan_values(plan: ParallelPlan, estimate: Estimate | None = None) -> dict:
    """Returns what the picture shows, as JSON values."""
    runs, words = plan_runs(plan)
    return {
        "title": plan_title(plan),
        "runs": [
            {
                "stage": run.stage,
                "ranks": list(plan.stages[run.stage].ranks),
                "layers": [run.start, run.end],
                "strategy": words[run.strategy],
            }
            for run in runs
        ],
        "embedding": end_words(plan.embedding),
        "head": end_words(plan.head),
        "predicted_step_ms": None if estimate is None else estimate.step_ms,
        "predicted_memory_bytes": None if estimate is None else list(estimate.memory_bytes),
    }


def plan_figure(plan: ParallelPlan, estimate: Estimate | None = None, *, width: float = WIDTH) -> Figure:
    """Draws the strategy of each layer, of the embedding and of the head, on the ranks that compute them.

    Args:
        plan ([`ParallelPlan`]): The plan.
        estimate ([`Estimate`], *optional*): Its prediction, which is written beside it.
        width (`float`, defaults to 7): Inches.
    """
    runs, words = plan_runs(plan)
    rows, layers = len(plan.rank_groups), plan.num_layers
    entries = len(words) + 1 + (plan.embedding != plan.head)
    with settings():
        figure, [axes] = new_figure(0.42 * rows + 0.21 * entries + 1.15, width=width)
        share = max(1.0, layers / 12)  # width of an end, in layers
        letters = _letters(len(words))
        for run in runs:
            _draw_run(axes, run, letters[run.strategy])
        middle = _BAR / 2
        first, last = (plan.rank_groups.index(plan.stages[index].ranks) for index in (0, -1))
        box(axes, -share - 0.15 * share, first - middle, share, _BAR, _END, "E")
        box(axes, layers + 0.15 * share, last - middle, share, _BAR, _END, "H")
        _label_axes(axes, plan, estimate)
        axes.set_xlim(-1.3 * share, layers + 1.3 * share)
        axes.set_ylim(rows - 0.45, -0.55 - 0.35 * (len(plan.stacks) > 1))
        _draw_stacks(axes, plan)
        axes.set_title(_wrapped(plan_title(plan), width))
        legend = [look(number).patch(f"{letters[number]}: {text}") for number, text in enumerate(words)]
        ends = {"E, H: embedding and head": plan.embedding}
        if plan.embedding != plan.head:
            ends = {"E: embedding": plan.embedding, "H: head": plan.head}
        legend += [_END.patch(f"{name} {end_words(end)}") for name, end in ends.items()]
        legend_below(figure, legend, columns=2 if width >= 6 and len(legend) > 3 else 1)
    return figure


def _draw_run(axes: Axes, run: Run, letter: str) -> None:
    style = look(run.strategy)
    box(axes, run.start, run.row - _BAR / 2, run.end - run.start, _BAR, style)
    for layer in range(run.start + 1, run.end):
        axes.plot([layer, layer], [run.row - _BAR / 2, run.row + _BAR / 2], color=style.ink, alpha=0.35, linewidth=0.5)
    note(axes, (run.start + run.end) / 2, run.row, letter, style)


def _label_axes(axes: Axes, plan: ParallelPlan, estimate: Estimate | None) -> None:
    names = []
    for index, group in enumerate(plan.rank_groups):
        name = f"ranks {ranks_text(group)}" if len(group) > 1 else f"rank {group[0]}"
        if estimate is not None:
            name += f"\n{estimate.memory_bytes[index] / GIB:.3g} GiB"
        names.append(name)
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(axis="y", length=0)
    every = next(one for one in (1, 2, 4, 5, 10, 20, 50, 100, 1000) if plan.num_layers <= 12 * one)
    layers = range(0, plan.num_layers, every)
    axes.set_xticks([layer + 0.5 for layer in layers], list(map(str, layers)))
    label = "layer, counted from 0"
    if estimate is not None:
        label += f"; predicted: {milliseconds(estimate.step_ms)} a step, memory of a rank"
    axes.set_xlabel(label)
    no_spines(axes, "left")


def _draw_stacks(axes: Axes, plan: ParallelPlan) -> None:
    """Names the stacks above the layers, and draws a line between two."""
    if len(plan.stacks) == 1:
        return
    for name, (start, end) in stack_ranges(plan).items():
        axes.text((start + end) / 2, -0.62, plain(name), ha="center", va="bottom", color=INK, fontsize=8)
        if start:
            axes.axvline(start, color=QUIET, linestyle="--", linewidth=1, zorder=0)


def _letters(count: int) -> list[str]:
    """Returns a name for each strategy: A to Z, then numbers."""
    return [string.ascii_uppercase[index] if index < 26 else str(index) for index in range(count)]


def _wrapped(text: str, width: float) -> str:
    """Returns text with new lines at commas, for a picture of so many inches."""
    lines, limit = [""], int(13 * width)
    for part in text.split(", "):
        if lines[-1] and len(lines[-1]) + len(part) > limit:
            lines.append("")
        lines[-1] += (", " if lines[-1] else "") + part
    return ",\n".join(lines)
