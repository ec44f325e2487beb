# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Progress on the standard error: bars on a terminal, lines anywhere else."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator


Step = Callable[[str], None]

logger = logging.getLogger(__name__)

FIRST_SECONDS, LINE_SECONDS = 1.0, 10.0  # before the first line of something that takes long, and between lines


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
    """Yields a function that advances a bar by one step and shows its name. Where there is no terminal it prints lines
    instead, the first one after a second. Nothing is shown unless `shown`, nor in a notebook, which would keep it.
    """
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    if not shown or console.is_jupyter:
        yield lambda what: None
    elif not console.is_terminal:
        yield _Lines(steps)
    else:
        with Progress(console=console, transient=True) as bar:
            task = bar.add_task("beginning", total=steps)
            yield lambda what: bar.update(task, advance=1, description=what)


class _Lines:
    """Prints how many of the steps are done, after `FIRST_SECONDS` and then every `LINE_SECONDS`."""

    def __init__(self, steps: int):
        self.steps, self.done, self.next = steps, 0, time.monotonic() + FIRST_SECONDS

    def __call__(self, what: str) -> None:
        self.done += 1
        if time.monotonic() >= self.next:
            self.next = time.monotonic() + LINE_SECONDS
            more = self.done - self.steps  # what differed too much is measured again
            text = f"{self.done} of {self.steps}" if more <= 0 else f"{self.steps}, and {more} again"
            print(f"{what}: {text}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def at_work(what: str) -> Iterator[None]:
    """Shows a spinner with the text `what` while the body runs. Where there is no terminal it prints the text, if the
    body runs for a second.
    """
    from rich.console import Console

    console = Console(stderr=True)
    if console.is_terminal or console.is_jupyter:
        with console.status(what):
            yield
        return
    late = threading.Timer(FIRST_SECONDS, lambda: print(what, file=sys.stderr, flush=True))
    late.daemon = True
    late.start()
    try:
        yield
    finally:
        late.cancel()
