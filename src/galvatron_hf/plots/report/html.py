# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Writes the elements of a page: headings, values, tables and pictures. A number stands in a `data` element, whose
value is the number as the run's JSON has it, and whose text is rounded.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from matplotlib.figure import Figure

from galvatron_hf.plots.report.svg import inline_svg


STYLE = """
:root { color-scheme: light dark; --ground: #ffffff; --text: #1a1b1c; --quiet: #55606a; --line: #d5dae0;
  --panel: #f4f6f8; --predicted: #8a3b00; --measured: #00527f; }
@media (prefers-color-scheme: dark) { :root { --ground: #15181b; --text: #e8eaed; --quiet: #a9b3bd; --line: #3a4148;
  --panel: #1e2327; --predicted: #ffb26b; --measured: #7cc7f2; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 72rem; padding: 1rem; background: var(--ground); color: var(--text);
  font: 1rem/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0.5rem 0; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 2rem 0 0.5rem; border-bottom: 1px solid var(--line); padding-bottom: 0.2rem; }
h3 { font-size: 1rem; margin: 1.2rem 0 0.4rem; }
p, li { max-width: 46rem; overflow-wrap: anywhere; }
.quiet { color: var(--quiet); }
.predicted { color: var(--predicted); font-weight: 600; }
.measured { color: var(--measured); font-weight: 600; }
.facts { display: grid; grid-template-columns: repeat(auto-fill, minmax(9.5rem, 1fr)); gap: 0.6rem; margin: 1rem 0;
  padding: 0; }
.facts div { background: var(--panel); border: 1px solid var(--line); border-radius: 0.4rem; padding: 0.5rem 0.7rem; }
.facts dt { color: var(--quiet); font-size: 0.85rem; }
.facts dd { margin: 0; font-size: 1.05rem; font-weight: 600; overflow-wrap: anywhere; }
.facts small { display: block; font-size: 0.8rem; font-weight: 400; }
.pictures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 27rem), 1fr)); gap: 1rem; }
figure { margin: 0.6rem 0; min-width: 0; }
figure svg { display: block; width: 100%; max-width: 38rem; height: auto; }
figure svg * { stroke-linejoin: round; stroke-linecap: butt; }
figure svg text { font-family: system-ui, -apple-system, "Segoe UI", Roboto, Arial, sans-serif; }
figcaption { color: var(--quiet); font-size: 0.9rem; }
.scroll { overflow-x: auto; margin: 0.2rem 0 1rem; }
.scroll:focus-visible { outline: 2px solid var(--measured); }
.tall { max-height: 24rem; overflow-y: auto; }
table { border-collapse: collapse; font-size: 0.9rem; font-variant-numeric: tabular-nums; }
.caption { color: var(--quiet); font-size: 0.9rem; margin: 1.2rem 0 0; }
th, td { padding: 0.25rem 0.7rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
thead th { background: var(--ground); position: sticky; top: 0; }
code { font-family: ui-monospace, "Cascadia Mono", Menlo, Consolas, monospace; font-size: 0.9em; }
"""
PREDICTED = '<small class="predicted">predicted</small>'
MEASURED = '<small class="measured">measured</small>'


def number(value: float | int | None, text: str | None = None) -> str:
    """Returns a number with the text that shows it, by default four digits; a dash for None."""
    if value is None:
        return "-"
    shown = shortened(value) if text is None else text
    return f'<data value="{escape(json.dumps(value))}">{escape(shown)}</data>'


def shortened(value: float | int) -> str:
    """Returns a number with four digits, and whole numbers in full."""
    if isinstance(value, int):
        return f"{value:,}"
    if value != value or value in (float("inf"), float("-inf")):
        return str(value)
    size = abs(value)
    if size == 0 or 1e-3 <= size < 1e4:
        return f"{value:.4g}"
    return f"{value:,.0f}" if 1e4 <= size < 1e9 else f"{value:.3e}"


def fact(name: str, value: str, mark: str = "") -> str:
    """Returns an entry of a list of facts; `value` and `mark` are HTML."""
    return f"<div><dt>{escape(name)}</dt><dd>{value}{mark}</dd></div>"


def facts(entries: Iterable[str]) -> str:
    """Returns a list of facts."""
    return f'<dl class="facts">{"".join(entries)}</dl>'


def table(caption: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, tall: bool = False) -> str:
    """Returns a table that scrolls by itself, also by keys; cells are HTML, and columns are texts."""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in columns)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    frame = f'class="scroll{" tall" * tall}" role="region" tabindex="0" aria-label="{escape(caption)}"'
    name = escape(caption)
    return (
        f'<p class="caption">{name}</p><div {frame}><table aria-label="{name}"><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def picture(figure: Figure, name: str, text: str, caption: str) -> str:
    """Returns a picture with its caption; `text` tells readers who do not see it what it shows; `caption` is HTML."""
    return f"<figure>{inline_svg(figure, name, text)}<figcaption>{caption}</figcaption></figure>"


def section(title: str, *parts: str) -> str:
    """Returns a section with its heading; empty if it has no part."""
    kept = [part for part in parts if part]
    return f"<section><h2>{escape(title)}</h2>{''.join(kept)}</section>" if kept else ""


def paragraph(html: str, kind: str = "") -> str:
    """Returns a paragraph of HTML."""
    return f'<p class="{kind}">{html}</p>' if kind else f"<p>{html}</p>"


def page(title: str, *parts: str) -> str:
    """Returns the whole page, which loads nothing."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
        'img-src data:">\n'
        f'<title>{escape(title)}</title>\n<link rel="icon" href="data:,">\n<style>{STYLE}</style>\n</head>\n'
        f"<body>\n<main>\n{chr(10).join(part for part in parts if part)}\n</main>\n</body>\n</html>\n"
    )


def listed(items: Iterable[Any]) -> str:
    """Returns a list of texts."""
    return f"<ul>{''.join(f'<li>{escape(str(item))}</li>' for item in items)}</ul>"
