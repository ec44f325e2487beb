# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Local pieces and whole values of DTensors."""

from __future__ import annotations

import logging

import torch
from torch.distributed.tensor import DTensor

from galvatron_hf.utils.compat import DTENSOR_LOGGER


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the local shard of a DTensor, or a plain tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def placed_like(tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Returns the DTensor whose local piece is `local` and which lies on the ranks as `tensor` does; `local` itself if
    that is a plain tensor.
    """
    if not isinstance(tensor, DTensor):
        return local
    return DTensor.from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def replicas(tensor: torch.Tensor) -> int:
    """Returns the number of ranks that hold the same piece of a DTensor; 1 for a plain tensor."""
    if not isinstance(tensor, DTensor):
        return 1
    count = 1
    for axis, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            count *= tensor.device_mesh.size(axis)
    return count


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the whole value of a DTensor on every rank, or a plain tensor unchanged; collective."""
    if not isinstance(tensor, DTensor):
        return tensor
    # A weight cut over two mesh axes needs one gather per axis; DTensor warns of that on every rank.
    warnings = logging.getLogger(DTENSOR_LOGGER)
    level = warnings.level
    warnings.setLevel(logging.ERROR)
    try:
        return tensor.full_tensor()
    finally:
        warnings.setLevel(level)


def local_region(tensor: torch.Tensor) -> tuple[slice, ...]:
    """Returns the position of the local piece in the whole tensor; everything for a plain tensor."""
    bounds = [(0, size) for size in tensor.shape]
    if isinstance(tensor, DTensor):
        # Tensor parallelism has cut first and FSDP2 second; the mesh axes are in the opposite order.
        for axis, placement in reversed(list(enumerate(tensor.placements))):
            if not placement.is_replicate():
                start, stop = bounds[placement.dim]
                piece = -(-(stop - start) // tensor.device_mesh.size(axis))
                first = min(start + piece * tensor.device_mesh.get_local_rank(axis), stop)
                bounds[placement.dim] = first, min(first + piece, stop)
    return tuple(slice(start, stop) for start, stop in bounds)


def assign(tensor: torch.Tensor, whole: torch.Tensor) -> None:
    """Copies the local piece of a whole tensor, which every rank has, into a DTensor."""
    local_tensor(tensor).copy_(whole[local_region(tensor)])
