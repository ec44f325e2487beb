# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Keeps the host of a virtual machine from taking memory back while steps are timed.

A guest with free page reporting gives its host the pages that are free. One that is used again has to come back first,
which took 6 to 14 microseconds instead of 2 where this was written: 16 MiB of them, a gathered layer, as long as three
gathers. So messages and steps took twice as long whenever memory that had been free for a moment was touched. Some
kernels let root say how long a page has to be free before it is given away; others have no such thing to say.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path


MIN_FREE_MS = Path("/sys/module/page_reporting/parameters/min_free_ms")
KEPT_MS = 60_000  # the most that is taken


@contextlib.contextmanager
def pages_kept(setting: Path = MIN_FREE_MS) -> Iterator[bool]:
    """Free pages stay for a minute, where they can be kept; as before behind the body however it ends.

    Args:
        setting (`Path`): of the kernel.

    Yields:
        `bool`: Whether they are.
    """
    try:
        before = setting.read_text()
        setting.write_text(f"{KEPT_MS}\n")
    except OSError:  # no such setting, or not for this user
        yield False
        return
    try:
        yield True
    finally:
        setting.write_text(before)
