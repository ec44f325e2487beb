# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Copies between the host's memory and a device."""

from __future__ import annotations

import torch

from galvatron_hf.utils.compat import FakeTensor


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Returns the tensor on a device. A GPU copies it from pinned memory, so that the host does not wait."""
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    pinned = tensor if isinstance(tensor, FakeTensor) else tensor.pin_memory()  # a tensor without memory has no pages
    return pinned.to(device, non_blocking=True)


class HostCopy:
    """Copies a tensor to the host's memory. A GPU may be given more work before the values are read: the host then
    waits for the copy alone.
    """

    def __init__(self, tensor: torch.Tensor):
        self._copied: torch.cuda.Event | None = None
        self._values = tensor
        if tensor.is_cuda:
            self._values = tensor.to("cpu", non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def tolist(self) -> list:
        """Returns the values as Python numbers, when they have arrived."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._values.tolist()
