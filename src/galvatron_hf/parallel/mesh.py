# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The ranks of one pipeline stage: device meshes for weights, process groups for activations."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from galvatron_hf.parallel.layout import GroupCache
from galvatron_hf.plan import LayerStrategy, VocabularyStrategy


@dataclass(frozen=True, kw_only=True)
class WeightMesh:
    """The mesh that the weights of one layer live on.

    Attributes:
        mesh ([`DeviceMesh`]): axes `replicate`, `shard`, `tensor` over the ranks of the stage, tensor innermost.
        data ([`DeviceMesh`]): the axes `replicate` and `shard`, which FSDP2 works on.
        tensor ([`DeviceMesh`]): the axis `tensor`.
    """

    mesh: DeviceMesh
    data: DeviceMesh
    tensor: DeviceMesh

    @property
    def tensor_degree(self) -> int:
        return self.tensor.size()

    @property
    def tensor_index(self) -> int:
        return self.tensor.get_local_rank()


class StageMesh:
    """Meshes and groups of the stage that this rank belongs to.

    Everything collective happens in the constructor and in [`StageMesh.prepare`], in an order that depends on the
    plan alone, so that all ranks create the same groups in the same order.

    Args:
        ranks (`tuple[int, ...]`): global ranks of the stage, in the plan's order.
        device_type (`str`): `"cpu"` or `"cuda"`.
    """

    def __init__(self, ranks: tuple[int, ...], device_type: str):
        self.ranks = tuple(ranks)
        self.device_type = device_type
        self.index = self.ranks.index(dist.get_rank())
        self.groups = GroupCache(self.ranks)
        self._weights: dict[tuple[int, int, int], WeightMesh] = {}
        self._strided: dict[tuple[int, int], dist.ProcessGroup | None] = {}

    @property
    def size(self) -> int:
        return len(self.ranks)

    def weights(self, strategy: LayerStrategy | VocabularyStrategy) -> WeightMesh:
        """The mesh of a strategy's weights; collective the first time a shape is asked for."""
        shard_ranks = self.size // strategy.tensor
        shard = 1 if strategy.sharding == "replicate" else (strategy.shard_degree or shard_ranks)
        shape = (shard_ranks // shard, shard, strategy.tensor)
        if shape not in self._weights:
            grid = torch.tensor(self.ranks).view(shape)
            strides = shape[1] * shape[2], shape[2], 1
            groups = [self._group(stride, size) for stride, size in zip(strides, shape, strict=True)]
            names = ("replicate", "shard", "tensor")
            mesh = DeviceMesh.from_group(groups, self.device_type, mesh=grid, mesh_dim_names=names)
            data = mesh["replicate", "shard"] if shape[0] > 1 else mesh["shard"]
            self._weights[shape] = WeightMesh(mesh=mesh, data=data, tensor=mesh["tensor"])
        return self._weights[shape]

    def prepare_strided(self, stride: int, size: int) -> None:
        """Creates the groups of `size` ranks that are `stride` apart; collective."""
        if size > 1:
            self._group(stride, size)

    def _group(self, stride: int, size: int) -> dist.ProcessGroup:
        """This rank's group of `size` ranks that are `stride` apart; collective the first time it is asked for.

        A group's ranks are numbered in the stage's order. [`DeviceMesh`] would number them by global rank, and its
        pieces would then arrive in another order than the mesh's coordinates say.
        """
        if size == 1:
            stride = 1
        if stride == 1 and size > 1:
            self.groups.prepare([size])
            return self.groups.block(size)
        if (stride, size) not in self._strided:
            for start in range(0, self.size, stride * size):
                for offset in range(stride):
                    members = [self.ranks[start + offset + step * stride] for step in range(size)]
                    group = dist.new_group(members, sort_ranks=members == sorted(members))
                    if dist.get_rank() in members:
                        self._strided[stride, size] = group
        return self._strided[stride, size]

    def strided(self, stride: int, size: int) -> dist.ProcessGroup | None:
        """This rank's group of `size` ranks that are `stride` apart; None when it would hold one rank."""
        if size == 1:
            return None
        return self._group(stride, size)

    def position_in(self, stride: int, size: int) -> int:
        """Index of this rank inside its group of `size` ranks that are `stride` apart."""
        return (self.index // stride) % size
