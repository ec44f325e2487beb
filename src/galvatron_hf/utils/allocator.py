# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Settings of the C library's allocator, and tensors without memory."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable

import torch
from torch.overrides import TorchFunctionMode


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


LARGE = 1 << 24  # elements: more than any buffer of a model has


class WithoutLargeMemory(TorchFunctionMode):
    """Lets `torch.empty` make large tensors on the meta device while the body runs, if it is given no other device. A
    module that moves its weights there as soon as they exist would ask for memory first: the experts of one layer may
    have more than the machine.
    """

    def __torch_function__(self, function: Callable, types: tuple, args: tuple = (), kwargs: dict | None = None):
        kwargs = kwargs or {}
        if function is torch.empty and kwargs.get("device") is None:
            size = args[0] if len(args) == 1 and isinstance(args[0], (tuple, list)) else args or kwargs.get("size", ())
            if all(isinstance(extent, int) for extent in size) and math.prod(size) >= LARGE:
                kwargs = {**kwargs, "device": "meta"}
        return function(*args, **kwargs)
