# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Progress bars on the standard error, if it is a terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator


Step = Callable[[str], None]


@contextlib.contextmanager
def progress_bar(steps: int, shown: bool) -> Iterator[Step]:
    """Yields a function that advances a bar by one step and shows its name; draws nothing unless `shown`."""
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
    """Shows a spinner with the text `what` while the body runs."""
    from rich.console import Console

    with Console(stderr=True).status(what):
        yield
