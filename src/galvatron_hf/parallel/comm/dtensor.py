# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Pieces and wholes of DTensors, as this runtime cuts them."""

from __future__ import annotations

import logging

import torch
from torch.distributed.tensor import DTensor

from galvatron_hf.utils.compat import DTENSOR_LOGGER


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The shard of a DTensor on this rank; a plain tensor is its own."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def replicas(tensor: torch.Tensor) -> int:
    """How many ranks hold the same piece of a DTensor."""
    if not isinstance(tensor, DTensor):
        return 1
    count = 1
    for axis, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            count *= tensor.device_mesh.size(axis)
    return count


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """A DTensor's whole value on every rank, a plain tensor as it is; collective."""
    if not isinstance(tensor, DTensor):
        return tensor
    # One gather per mesh axis is what a weight cut twice needs; DTensor warns about it on every rank.
    warnings = logging.getLogger(DTENSOR_LOGGER)
    level = warnings.level
    warnings.setLevel(logging.ERROR)
    try:
        return tensor.full_tensor()
    finally:
        warnings.setLevel(level)


def local_region(tensor: torch.Tensor) -> tuple[slice, ...]:
    """Which part of the whole tensor the piece on this rank is; all of it for a plain tensor."""
    bounds = [(0, size) for size in tensor.shape]
    if isinstance(tensor, DTensor):
        # Mesh axes cut in the order in which FSDP2 and tensor parallelism did: tensor first, then shard.
        for axis, placement in reversed(list(enumerate(tensor.placements))):
            if not placement.is_replicate():
                start, stop = bounds[placement.dim]
                piece = -(-(stop - start) // tensor.device_mesh.size(axis))
                first = min(start + piece * tensor.device_mesh.get_local_rank(axis), stop)
                bounds[placement.dim] = first, min(first + piece, stop)
    return tuple(slice(start, stop) for start, stop in bounds)


def assign(tensor: torch.Tensor, whole: torch.Tensor) -> None:
    """Gives a DTensor this rank's pieces of a whole tensor that every rank has."""
    local_tensor(tensor).copy_(whole[local_region(tensor)])
