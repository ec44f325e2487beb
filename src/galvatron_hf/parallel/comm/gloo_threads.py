# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""What a process owes the threads of its gloo groups when it ends."""

from __future__ import annotations

import atexit
import functools
import time


LINGER_SECONDS = 0.5


@functools.cache
def linger_at_exit() -> None:
    """Has this process wait a moment before its interpreter ends, in which gloo's threads let go of their tensors.

    A thread of `ProcessGroupGloo` frees the tensors of a collective after those that waited for it have gone on, and
    takes the interpreter's lock to do so. Python 3.11 ends a thread that wants this lock from an interpreter that has
    begun to end; within a C++ destructor that aborts the process: "terminate called without an active exception",
    with torch 2.13. Destroying the groups does not help, as their threads live as long as anything refers to them.
    """
    atexit.register(time.sleep, LINGER_SECONDS)
