# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The ranks of one pipeline stage: device meshes for weights, process groups for activations."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from galvatron_hf.parallel.activation.redistribute import GroupCache
from galvatron_hf.parallel.comm.gloo_threads import linger_at_exit
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

    @property
    def tensor_group(self) -> dist.ProcessGroup:
        return self.tensor.get_group()

    def cut(self, parameter: nn.Parameter, dim: int | None) -> nn.Parameter:
        """A DTensor of the tensor ranks in place of a weight that each has whole: cut along `dim`, or whole."""
        placement = Replicate() if dim is None else Shard(dim)
        tensor = distribute_tensor(parameter.data, self.tensor, [placement], src_data_rank=None)
        return nn.Parameter(tensor, requires_grad=parameter.requires_grad)


class StageMesh:
    """Meshes and groups of one rank list of a plan.

    All ranks of the world make the same groups in the same order, those of lists that they are not in too: everything
    collective happens in [`StageMesh.prepare`] and [`GroupCache.prepare`], whose arguments come from the plan alone.

    Args:
        ranks (`tuple[int, ...]`): global ranks of the stage, in the plan's order.
        device_type (`str`): `"cpu"` or `"cuda"`.
        timeout (`timedelta`, *optional*): how long a collective waits; None for the backend's default.
    """

    def __init__(self, ranks: tuple[int, ...], device_type: str, timeout: timedelta | None = None):
        self.ranks = tuple(ranks)
        self.device_type, self.timeout = device_type, timeout
        self.groups = GroupCache(self.ranks, timeout)
        self._weights: dict[tuple[int, int, int], WeightMesh] = {}
        self._strided: dict[tuple[int, int], dist.ProcessGroup | None] = {}

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def index(self) -> int:
        """This rank's index in the stage's order."""
        return self.ranks.index(dist.get_rank())

    def prepare(self, strategy: LayerStrategy | VocabularyStrategy) -> None:
        """Creates the groups of a strategy; collective."""
        shape = self._shape(strategy)
        for stride, size in zip((shape[1] * shape[2], shape[2], 1), shape, strict=True):
            self._make_groups(stride, size)
        if isinstance(strategy, LayerStrategy):
            self._make_groups(strategy.tensor, strategy.ulysses)

    def weights(self, strategy: LayerStrategy | VocabularyStrategy) -> WeightMesh:
        """The mesh of a strategy's weights, whose groups were prepared."""
        shape = self._shape(strategy)
        if shape not in self._weights:
            grid = torch.tensor(self.ranks).view(shape)
            strides = shape[1] * shape[2], shape[2], 1
            groups = [self._group(stride, size) for stride, size in zip(strides, shape, strict=True)]
            names = ("replicate", "shard", "tensor")
            mesh = DeviceMesh.from_group(groups, self.device_type, mesh=grid, mesh_dim_names=names)
            data = mesh["replicate", "shard"] if shape[0] > 1 else mesh["shard"]
            self._weights[shape] = WeightMesh(mesh=mesh, data=data, tensor=mesh["tensor"])
        return self._weights[shape]

    def strided(self, stride: int, size: int) -> dist.ProcessGroup | None:
        """This rank's group of `size` ranks that are `stride` apart; None when it would hold one rank."""
        return None if size == 1 else self._group(stride, size)

    def _shape(self, strategy: LayerStrategy | VocabularyStrategy) -> tuple[int, int, int]:
        shard = strategy.resolved_shard_degree(self.size)
        return self.size // (shard * strategy.tensor), shard, strategy.tensor

    def _make_groups(self, stride: int, size: int) -> None:
        """Creates the groups of `size` ranks that are `stride` apart, unless they exist; collective.

        A group's ranks are numbered in the stage's order. [`DeviceMesh`] would number them by global rank, and its
        pieces would then arrive in another order than the mesh's coordinates say.
        """
        if stride == 1 and size > 1:
            self.groups.prepare([size])
            return
        stride = 1 if size == 1 else stride
        if (stride, size) in self._strided:
            return
        self._strided[stride, size] = None
        for start in range(0, self.size, stride * size):
            for offset in range(stride):
                members = [self.ranks[start + offset + step * stride] for step in range(size)]
                in_order = members == sorted(members)
                group = dist.new_group(members, timeout=self.timeout, sort_ranks=in_order)
                if dist.get_rank() in members:
                    self._strided[stride, size] = group

    def _group(self, stride: int, size: int) -> dist.ProcessGroup:
        if stride == 1 and size > 1:
            return self.groups.block(size)
        return self._strided[1 if size == 1 else stride, size]


class WorldMesh:
    """Meshes of all rank lists of plans on the same ranks, and the groups that join stages; each made once.

    Args:
        device_type (`str`): `"cpu"` or `"cuda"`.
        timeout (`timedelta`, *optional*): how long a collective waits; None for the backend's default. Groups do not
            take over that of the default group.
    """

    def __init__(self, device_type: str, timeout: timedelta | None = None):
        linger_at_exit()
        self.device_type, self.timeout = device_type, timeout
        self._stages: dict[tuple[int, ...], StageMesh] = {}
        self._joined: dict[tuple[int, ...], list[dist.ProcessGroup]] = {}

    def stage(self, ranks: tuple[int, ...]) -> StageMesh:
        """The mesh of a rank list."""
        if ranks not in self._stages:
            self._stages[ranks] = StageMesh(ranks, self.device_type, self.timeout)
        return self._stages[ranks]

    def join(self, lists: list[tuple[int, ...]], copies: int = 1) -> list[dist.ProcessGroup]:
        """Groups of the ranks that have the same index in each of `lists`; collective.

        Args:
            lists (`list[tuple[int, ...]]`): rank lists of equal length.
            copies (`int`): how many groups of the same ranks are wanted, so that they do not wait for each other.

        Returns:
            `list[ProcessGroup]`: this rank's, numbered in the order of `lists`; empty if it is in none.
        """
        own: list[dist.ProcessGroup] = []
        for members in zip(*lists, strict=True):
            made = self._joined.setdefault(members, [])
            while len(made) < copies:
                made.append(dist.new_group(list(members), timeout=self.timeout, sort_ranks=False))
            if dist.get_rank() in members:
                own = made[:copies]
        return own
