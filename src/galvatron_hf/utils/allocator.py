# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The C library's allocator, told that what a step frees the next one wants again."""

from __future__ import annotations

import ctypes


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of <malloc.h>
_MOST = (1 << 31) - 1


def keep_freed_memory() -> None:
    """Has freed memory stay with this process, where the C library is glibc.

    By itself glibc gives large blocks back to the kernel when they are freed and gets them again, filled with zeros
    page by page, a moment later.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(_M_MMAP_THRESHOLD, 1 << 30)
        library.mallopt(_M_TRIM_THRESHOLD, _MOST)
