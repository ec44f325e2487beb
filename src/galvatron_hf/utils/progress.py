# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Bars of what takes over a second, on the standard error, and nothing where that is no terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator


Step = Callable[[str], None]


@contextlib.contextmanager
def progress_bar(steps: int, shown: bool) -> Iterator[Step]:
    """What each of so many steps is told to; it draws a bar of them if that is to be shown, on one rank of several."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    if not (shown and console.is_terminal):
        yield lambda what: None
        return
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("beginning", total=steps)
        yield lambda what: bar.update(task, advance=1, description=what)


@contextlib.contextmanager
def at_work(what: str) -> Iterator[None]:
    """Shows that something is done of which nobody knows how far it is."""
    from rich.console import Console

    with Console(stderr=True).status(what):
        yield
