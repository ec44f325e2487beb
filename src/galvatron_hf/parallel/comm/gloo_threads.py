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
    """Makes this process sleep for `LINGER_SECONDS` before its interpreter ends. A thread of `ProcessGroupGloo` takes
    the interpreter's lock to free the tensors of a collective that has returned. Python 3.11 ends a thread that asks
    for the lock at exit. In a C++ destructor this aborts the process with "terminate called without an active
    exception" (torch 2.13). Destroyed groups do not help: their threads live as long as anything refers to them.
    """
    atexit.register(time.sleep, LINGER_SECONDS)
