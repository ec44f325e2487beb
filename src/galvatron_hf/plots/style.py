# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Defines the colours, hatches and sizes of all pictures. Every colour comes with a hatch or a label, so that pictures
can be read without colour.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle


WIDTH = 7.0  # inches of a picture
FORMATS = ("png", "svg")
INK = "#1a1b1c"  # of text and lines on the background; a report replaces it with the colour of its text
QUIET = "#7f868c"  # of lines that matter less; visible on white and on black
DARK, LIGHT = "#111111", "#ffffff"  # of text, hatches and edges on a fill, whatever the ground is

_SETTINGS = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "axes.titlecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": QUIET,
    "grid.alpha": 0.4,
    "hatch.linewidth": 0.6,
    "legend.frameon": False,
    "legend.handlelength": 1.8,
    "legend.handleheight": 1.1,
    "svg.fonttype": "none",
}


@dataclass(frozen=True, kw_only=True)
class Look:
    """Describes how one kind of thing is drawn: a fill and a hatch."""

    fill: str
    hatch: str = ""

    @property
    def ink(self) -> str:
        """Returns the colour of text on the fill, by the WCAG contrast of dark and light text."""
        return DARK if contrast(DARK, self.fill) >= contrast(LIGHT, self.fill) else LIGHT

    def patch(self, label: str) -> Patch:
        """Returns an entry of a legend."""
        return Patch(facecolor=self.fill, hatch=self.hatch, edgecolor=DARK, linewidth=0.6, label=label)


# Okabe and Ito's palette for all kinds of colour vision, without black: https://jfly.uni-koeln.de/color/
SKY, ORANGE, GREEN, YELLOW, PURPLE, VERMILLION, BLUE = (
    "#56b4e9",
    "#e69f00",
    "#009e73",
    "#f0e442",
    "#cc79a7",
    "#d55e00",
    "#0072b2",
)
# Of lines that are measured and predicted; a report replaces them with its own colours of both.
MEASURED, PREDICTED = "#0072b3", "#d55e01"
GREY = "#c4c8cc"
_FILLS = (SKY, ORANGE, GREEN, YELLOW, PURPLE, VERMILLION, BLUE)
_HATCHES = ("", "//", "..", "xx", "\\\\", "++", "oo")


def look(number: int) -> Look:
    """Returns the look of the thing with a number; 49 numbers have different looks."""
    rounds, index = divmod(number, len(_FILLS))
    return Look(fill=_FILLS[index], hatch=_HATCHES[(index + rounds) % len(_HATCHES)])


def contrast(first: str, second: str) -> float:
    """Returns the contrast ratio of two colours, from 1 to 21 (WCAG 2.2, relative luminance)."""
    brighter, darker = sorted((_luminance(first), _luminance(second)), reverse=True)
    return (brighter + 0.05) / (darker + 0.05)


def _luminance(colour: str) -> float:
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in to_rgb(colour)]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def new_figure(
    height: float, *, width: float = WIDTH, rows: int = 1, ratios: Sequence[float] | None = None, **options
) -> tuple[Figure, list[Axes]]:
    """Returns a figure of `width` x `height` inches with axes below each other. No window and no global state are
    used; `options` are those of `Figure.subplots`.
    """
    with matplotlib.rc_context(_SETTINGS):
        figure = Figure(figsize=(width, height), layout="constrained")
        axes = figure.subplots(rows, 1, squeeze=False, height_ratios=ratios, **options)[:, 0]
    return figure, list(axes)


def legend_below(figure: Figure, entries: Sequence[Patch], *, columns: int) -> None:
    """Adds a legend below all axes."""
    with matplotlib.rc_context(_SETTINGS):
        figure.legend(handles=list(entries), loc="outside lower left", ncols=max(1, columns), columnspacing=1.2)


def box(axes: Axes, x: float, y: float, width: float, height: float, style: Look, label: str = "", **options) -> None:
    """Draws a rectangle, with a label in its middle."""
    axes.add_patch(
        Rectangle((x, y), width, height, facecolor=style.fill, hatch=style.hatch, edgecolor=DARK, linewidth=0.6)
    )
    if label:
        note(axes, x + width / 2, y + height / 2, label, style, **options)


def note(axes: Axes, x: float, y: float, label: str, style: Look, **options) -> None:
    """Writes text on a fill; behind it the hatch is covered, so that it can be read."""
    covered = dict(boxstyle="round,pad=0.12", facecolor=style.fill, edgecolor="none") if style.hatch else None
    axes.text(x, y, label, ha="center", va="center", color=style.ink, bbox=covered, **({"fontsize": 8} | options))


def no_spines(axes: Axes, *names: str) -> None:
    """Hides lines of the frame."""
    for name in names:
        axes.spines[name].set_visible(False)


def save(figure: Figure, path: str | os.PathLike) -> None:
    """Writes a picture as PNG or SVG, as the end of the name says, on a white ground; raises ValueError for others."""
    check_format(path)
    with matplotlib.rc_context(_SETTINGS):
        figure.savefig(path, dpi=200, facecolor="white", metadata=_metadata(path))


def check_format(path: str | os.PathLike) -> None:
    """Raises ValueError if a picture cannot be written under a name."""
    end = os.path.splitext(os.fspath(path))[1].lstrip(".").lower()
    if end not in FORMATS:
        raise ValueError(f"{os.fspath(path)!r} ends with {end!r}, which is no format of pictures: use .png or .svg.")


def _metadata(path: str | os.PathLike) -> dict[str, None]:
    """Leaves out the date, so that equal pictures are equal files."""
    return {"Date": None} if os.fspath(path).lower().endswith("svg") else {}


def settings() -> matplotlib.rc_context:
    """Returns a context with the settings of all pictures."""
    return matplotlib.rc_context(_SETTINGS)


def plain(text: str) -> str:
    """Returns a name that a user gave, so that matplotlib shows it as it is: it reads what is between two dollars as a
    formula.
    """
    return text.replace("$", r"\$")


def milliseconds(value: float) -> str:
    """Returns milliseconds as text, with four digits or all before the point."""
    return f"{value:,.0f} ms" if value >= 1e3 else f"{value:.4g} ms"
