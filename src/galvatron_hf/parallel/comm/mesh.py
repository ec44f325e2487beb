# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The ranks of the pipeline stages: device meshes for weights, process groups for activations."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from galvatron_hf.parallel.comm.gloo_threads import linger_at_exit
from galvatron_hf.parallel.comm.groups import JOINING_STAGES, OF_ACTIVATIONS, OF_TOKENS, OF_WEIGHTS, ProcessGroups
from galvatron_hf.parallel.comm.meeting import Meetings
from galvatron_hf.parallel.comm.transfers import Transfers
from galvatron_hf.plan.resolved import GroupKey, MeshShape, RankGroup
from galvatron_hf.utils.compat import set_default_group_timeout


# NCCL ends the process of a collective that waits for its group's timeout: the report of the ranks must come before.
NCCL_GRACE = timedelta(seconds=60)


@dataclass(frozen=True, kw_only=True)
class WeightMesh:
    """Holds the mesh of one layer's weights: axes `replicate`, `shard` and `tensor` over the ranks of the stage,
    `tensor` innermost. FSDP2 works on `data`, the axes `replicate` and `shard`.
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
    def tensor_group(self) -> ProcessGroup:
        return self.tensor.get_group()

    def cut(self, parameter: nn.Parameter, dim: int | None) -> nn.Parameter:
        """Returns the DTensor of a weight that every tensor rank has whole: cut along `dim`, or whole on each."""
        placement = Replicate() if dim is None else Shard(dim)
        tensor = distribute_tensor(parameter.data, self.tensor, [placement], src_data_rank=None)
        return nn.Parameter(tensor, requires_grad=parameter.requires_grad)


class StageMesh:
    """Holds the meshes and groups of one stage; `ranks` are global, in the plan's order."""

    def __init__(self, ranks: tuple[int, ...], device_type: str, groups: ProcessGroups):
        self.ranks, self.device_type, self._groups = tuple(ranks), device_type, groups
        self._weights: dict[MeshShape, WeightMesh] = {}
        self._own: dict[tuple[GroupKey, str], ProcessGroup] = {}

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def index(self) -> int:
        """Returns this rank's index in the stage's order."""
        return self.ranks.index(dist.get_rank())

    def weights(self, shape: MeshShape) -> WeightMesh:
        if shape not in self._weights:
            grid = torch.tensor(self.ranks).view(shape.sizes)
            groups = [*(self._group(key, OF_WEIGHTS) for key in shape.data_keys), self._group(shape.tensor_key)]
            names = ("replicate", "shard", "tensor")
            mesh = DeviceMesh.from_group(groups, self.device_type, mesh=grid, mesh_dim_names=names)
            data = mesh["replicate", "shard"] if shape.replicate > 1 else mesh["shard"]
            self._weights[shape] = WeightMesh(mesh=mesh, data=data, tensor=mesh["tensor"])
        return self._weights[shape]

    def group(self, key: GroupKey) -> ProcessGroup | None:
        """Returns this rank's group, whose ranks are numbered in the stage's order; None for a group of one rank."""
        return None if key.size == 1 else self._group(key)

    def transfers(self, key: GroupKey) -> Transfers | None:
        """Returns the messages between this rank's group of ranks that may share documents; None for one rank."""
        return None if key.size == 1 else Transfers(group=self._group(key, OF_TOKENS))

    def block(self, size: int) -> ProcessGroup | None:
        """Returns the group of this rank's aligned block of `size` ranks; None for a block of one."""
        return self.group(GroupKey(stride=1, size=size))

    def _group(self, key: GroupKey, kind: str = OF_ACTIVATIONS) -> ProcessGroup:
        if (key, kind) not in self._own:
            own = next(ranks for ranks in key.groups(self.ranks) if dist.get_rank() in ranks)
            self._own[key, kind] = self._groups.get(own, kind)[0]
        return self._own[key, kind]


class WorldMesh:
    """Holds the meshes of all stages of plans on the same ranks, and the groups that join stages."""

    def __init__(self, device_type: str, timeout: timedelta | None = None):
        linger_at_exit()
        self.meetings = Meetings((timeout or default_pg_timeout).total_seconds())
        if device_type == "cuda" and timeout is not None:
            timeout += NCCL_GRACE
            set_default_group_timeout(timeout)
        self.device_type, self._groups = device_type, ProcessGroups(device_type, timeout)
        self._stages: dict[tuple[int, ...], StageMesh] = {}

    def prepare(self, groups: Iterable[RankGroup]) -> None:
        """Makes and connects the groups of a plan that do not exist yet; collective over all ranks of the world."""
        self._groups.prepare(groups)

    def free(self) -> None:
        """Destroys the groups of all plans; collective, when no model on them is used any more."""
        self._stages.clear()
        self._groups.free()

    def own_groups(self) -> dict[str, ProcessGroup]:
        """Returns the groups of several ranks that this rank is in, by a name that is the same on all of them."""
        return self._groups.own()

    def stage(self, ranks: tuple[int, ...]) -> StageMesh:
        if ranks not in self._stages:
            self._stages[ranks] = StageMesh(ranks, self.device_type, self._groups)
        return self._stages[ranks]

    def joined(self, stages: Iterable[tuple[int, ...]]) -> list[ProcessGroup]:
        """Returns the groups of the ranks with this rank's index in each of several stages; may be empty."""
        own = next((ranks for ranks in zip(*stages, strict=True) if dist.get_rank() in ranks), None)
        return [] if own is None else self._groups.get(own, JOINING_STAGES)
