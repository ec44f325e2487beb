# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Delays the end of a process until the threads of its gloo groups have freed their tensors."""

from __future__ import annotations

import atexit
import functools
import time


LINGER_SECONDS = 0.5


@functools.cache
def linger_at_exit() -> None:
    """Makes this process sleep for `LINGER_SECONDS` before its interpreter ends. After a collective has returned, a
    thread of `ProcessGroupGloo` takes the interpreter's lock to free its tensors. Python 3.11 ends a thread that asks
    for the lock while the interpreter ends. In a C++ destructor this aborts the process with "terminate called without
    an active exception" (torch 2.13). Destroying the groups does not help, because their threads live as long as
    anything refers to them.
    """
    atexit.register(time.sleep, LINGER_SECONDS)
