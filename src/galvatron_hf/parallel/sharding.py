# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Sharded data parallelism: everything that touches FSDP2.

ZeRO (arXiv 1910.02054) by `torch.distributed.fsdp.fully_shard`, one unit per layer with a mesh of its own. Gradients
are sum-reduced everywhere: the loss is already divided by the global number of targets.
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
    - `zero2`: weights stay gathered from a step's first use to its last, gradients are reduced after each micro-batch.
    - `replicate`: weights are whole on every rank, gradients are reduced once, after the last micro-batch.

    Where there are several copies of the weights, their gradients are summed once, after the last micro-batch.
    """

    policy: MixedPrecisionPolicy
    units: list[tuple[FSDPModule, str]] = field(default_factory=list)

    def add(
        self,
        module: nn.Module | list[nn.Module],
        mesh: WeightMesh,
        sharding: str,
        stay_gathered: bool = False,
        needed_in_backward: bool = True,
    ) -> None:
        """Makes one unit of the parameters of `module` that are in no unit yet.

        Args:
            module (`nn.Module` or `list[nn.Module]`): modules whose parameters are gathered and reduced together.
            mesh ([`WeightMesh`]): where their shards live.
            sharding (`str`): "replicate", "zero2" or "zero3".
            stay_gathered (`bool`): whether weights under `zero3` are kept from the forward to the backward, which
                follows at once.
            needed_in_backward (`bool`): whether the backward looks at the weights; a lookup's does not.
        """
        shard_degree = mesh.data.size(-1)
        fully_shard(
            module,
            mesh=mesh.data,
            reshard_after_forward=sharding == "zero3" and not stay_gathered,
            mp_policy=self.policy,
            shard_placement_fn=lambda parameter: shard_placement(parameter, shard_degree),
        )
        unit = module[0] if isinstance(module, list) else module
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
        unit.set_unshard_in_backward(needed_in_backward)
        self.units.append((unit, sharding))

    def reshard(self) -> None:
        """Frees gathered weights, so that the model's parameters are the shards again."""
        for unit, _ in self.units:
            unit.reshard()

    def begin_micro_batch(self, last: bool) -> None:
        """Tells every unit whether the coming backward is the last of the step."""
        for unit, sharding in self.units:
            unit.set_is_last_backward(last)
            unit.set_requires_gradient_sync(last or sharding != "replicate", recurse=False)
            unit.set_requires_all_reduce(last, recurse=False)
            unit.set_reshard_after_backward(last or sharding == "zero3", recurse=False)

    def release_after_evaluation(self, model: nn.Module) -> None:
        """Lets go of gathered weights after every forward pass that no backward follows.

        FSDP2 keeps the gathered weights of `zero2`, `replicate`, the head and the root until a backward pass; without
        one, weights that are loaded next would not be seen by the forward pass after.
        """

        def release(*unused) -> None:
            if not torch.is_grad_enabled():
                for unit, _ in self.units:
                    unit.reshard()

        model.register_forward_hook(release)


def shard_placement(parameter: nn.Parameter, shard_degree: int) -> Shard:
    """The dimension on which FSDP2 shards a parameter that tensor parallelism may have cut already."""
    if not isinstance(parameter, DTensor) or not parameter.placements[0].is_shard(0):
        return Shard(0)
    dim = second_cut(tuple(parameter.shape), parameter.device_mesh.size(), shard_degree)
    assert dim is not None, "check_model lets no such plan through"
    return Shard(dim)


def second_cut(shape: tuple[int, ...], tensor_degree: int, shard_degree: int) -> int | None:
    """The dimension to shard of a weight whose dimension 0 the tensor ranks have cut; None if none can be.

    Dimension 0 is shared only where the pieces are even; uneven pieces of one dimension under two mesh axes have no
    placement that DTensor can put together again.
    """
    if shape[0] % (tensor_degree * shard_degree) == 0:
        return 0
    # Only rows are cut twice: a dimension that is cut once may have uneven pieces.
    return 1 if len(shape) > 1 else None


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
