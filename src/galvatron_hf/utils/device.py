# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Copies from the host's memory to a device."""

from __future__ import annotations

import torch

from galvatron_hf.utils.compat import FakeTensor


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Returns the tensor on a device. A GPU copies it from pinned memory, so that the host does not wait."""
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    pinned = tensor if isinstance(tensor, FakeTensor) else tensor.pin_memory()  # a tensor without memory has no pages
    return pinned.to(device, non_blocking=True)
