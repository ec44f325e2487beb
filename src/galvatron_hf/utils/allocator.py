# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Settings of the C library's allocator."""

from __future__ import annotations

import ctypes


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of <malloc.h>
_MOST = (1 << 31) - 1


def keep_freed_memory() -> None:
    """Keeps freed memory in this process if the C library is glibc. By default glibc returns large freed blocks to the
    kernel. The next step gets them again, and the kernel fills them with zeros page by page.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(_M_MMAP_THRESHOLD, 1 << 30)
        library.mallopt(_M_TRIM_THRESHOLD, _MOST)
