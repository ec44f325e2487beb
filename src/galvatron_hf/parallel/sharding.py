# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Sharded data parallelism: everything that touches FSDP2.

ZeRO (arXiv 1910.02054) by `torch.distributed.fsdp.fully_shard`, one unit per layer with a mesh of its own. Gradients are
sum-reduced everywhere: the loss is already divided by the global number of targets.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from galvatron_hf.parallel.mesh import WeightMesh
from galvatron_hf.plan import Precision

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def mixed_precision(precision: Precision) -> MixedPrecisionPolicy:
    """The FSDP2 policy of a plan's precision: weights are cast on use, gradients reduced in `precision.reduce`."""
    compute, reduce = DTYPES[precision.compute], DTYPES[precision.reduce]
    if compute is DTYPES[precision.master] and reduce is compute:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce)


@dataclass(kw_only=True)
class ShardedUnits:
    """The FSDP2 units of one model and when each communicates over the micro-batches of a step.

    - `zero3`: weights are gathered for each use, gradients reduced after each micro-batch.
    - `zero2`: weights stay gathered from the step's first use to its last, gradients are reduced after each micro-batch.
    - `replicate`: weights are whole on every rank, gradients are reduced once, after the last micro-batch.
    """

    policy: MixedPrecisionPolicy
    units: list[tuple[FSDPModule, str]] = field(default_factory=list)

    def add(self, module: nn.Module | list[nn.Module], mesh: WeightMesh, sharding: str, root: bool = False) -> None:
        """Makes one unit of the parameters of `module` that are in no unit yet.

        Args:
            module (`nn.Module` or `list[nn.Module]`): modules whose parameters are gathered and reduced together.
            mesh ([`WeightMesh`]): where their shards live.
            sharding (`str`): "replicate", "zero2" or "zero3".
            root (`bool`): whether this is the whole model, whose own weights stay gathered until the backward ends.
        """
        shard_degree = mesh.data.size(-1)
        fully_shard(
            module,
            mesh=mesh.data,
            reshard_after_forward=sharding == "zero3" and not root,
            mp_policy=self.policy,
            shard_placement_fn=lambda parameter: shard_placement(parameter, shard_degree),
        )
        unit = module[0] if isinstance(module, list) else module
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
        self.units.append((unit, sharding))

    def begin_micro_batch(self, last: bool) -> None:
        """Tells every unit whether the coming backward is the last of the step."""
        for unit, sharding in self.units:
            unit.set_is_last_backward(last)
            unit.set_requires_gradient_sync(last or sharding != "replicate", recurse=False)
            unit.set_reshard_after_backward(last or sharding == "zero3", recurse=False)


def shard_placement(parameter: nn.Parameter, shard_degree: int) -> Shard:
    """The dimension on which FSDP2 shards a parameter that tensor parallelism may have cut already.

    A cut on dimension 0 is shared with FSDP2 only where the pieces are even; uneven pieces of one dimension under two
    mesh axes have no placement that DTensor can put together again.

    Raises:
        ValueError: if neither dimension divides.
    """
    if not isinstance(parameter, DTensor) or not parameter.placements[0].is_shard(0):
        return Shard(0)
    tensor_degree = parameter.device_mesh.size()
    if parameter.shape[0] % (tensor_degree * shard_degree) == 0:
        return Shard(0)
    if parameter.ndim > 1 and parameter.shape[1] % shard_degree == 0:
        return Shard(1)
    fitting = max(d for d in range(1, shard_degree + 1) if parameter.shape[-1] % (tensor_degree * d) == 0 or d == 1)
    raise ValueError(
        f"shard_degree {shard_degree} does not divide a weight of shape {tuple(parameter.shape)} that tensor "
        f"{tensor_degree} has cut; use shard_degree {fitting}."
    )


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
