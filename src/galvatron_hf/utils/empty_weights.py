# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Models that are built without memory for their weights."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator

import torch
from torch.overrides import TorchFunctionMode

from accelerate import init_empty_weights


LARGE = 1 << 24  # elements: more than any buffer of a model has


@contextlib.contextmanager
def without_weights() -> Iterator[None]:
    """Builds the modules of the body with their parameters on the meta device; buffers have memory."""
    with init_empty_weights(include_buffers=False), _WithoutLargeMemory():
        yield


class _WithoutLargeMemory(TorchFunctionMode):
    """Lets `torch.empty` make large tensors on the meta device while the body runs, if it is given no other device.
    accelerate moves a weight there once it exists: the experts of one layer may have more than the machine's memory.
    """

    def __torch_function__(self, function: Callable, types: tuple, args: tuple = (), kwargs: dict | None = None):
        kwargs = kwargs or {}
        if function is torch.empty and kwargs.get("device") is None:
            size = args[0] if len(args) == 1 and isinstance(args[0], (tuple, list)) else args or kwargs.get("size", ())
            if all(isinstance(extent, int) for extent in size) and math.prod(size) >= LARGE:
                kwargs = {**kwargs, "device": "meta"}
        return function(*args, **kwargs)
