# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Turns pictures into SVG elements of a page: one colour follows the page's text, and no two pictures share a name."""

from __future__ import annotations

import io
import re
from html import escape

import matplotlib
from matplotlib.figure import Figure

from galvatron_hf.plots.style import INK, MEASURED, PREDICTED, settings


_NAMED = re.compile(r'\bid="([^"]+)"')
_COLOURS = {INK: "currentColor", MEASURED: "var(--measured)", PREDICTED: "var(--predicted)"}
_USED = re.compile(r'(url\(#|href="#)([^")]+)')


def inline_svg(figure: Figure, name: str, text: str) -> str:
    """Returns a picture as an `svg` element without a ground of its own.

    Args:
        figure (`Figure`): The picture.
        name (`str`): Begins all names in it; another one for each picture of a page.
        text (`str`): Says what the picture shows, for readers who do not see it.
    """
    buffer = io.StringIO()
    with settings(), matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    whole = buffer.getvalue()
    svg = whole[whole.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<defs>\s*<style[^>]*>.*?</style>\s*</defs>", "", svg, flags=re.DOTALL)  # would hold for the page
    svg = _NAMED.sub(lambda match: f'id="{name}-{match[1]}"', svg)
    svg = _USED.sub(lambda match: f"{match[1]}{name}-{match[2]}", svg)
    for colour, of_page in _COLOURS.items():
        svg = svg.replace(colour, of_page)
    head, body = svg.split(">", 1)
    box = re.search(r'viewBox="([^"]+)"', head)[1]
    names = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    return f'<svg {names} viewBox="{box}" role="img" aria-label="{escape(text)}">{body.strip()}'
