# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Progress bars on the standard error, if it is a terminal."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator


Step = Callable[[str], None]

logger = logging.getLogger(__name__)


def tell(text: str, shown: bool, *, result: bool = False) -> None:
    """Prints a text if progress is `shown`, and logs it otherwise: nothing long is silent. A result goes to the
    standard output, and progress to the standard error.
    """
    if shown:
        print(text, file=sys.stdout if result else sys.stderr, flush=True)
    else:
        logger.warning(text)


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
