# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Replicated data parallelism: whole weights without a second copy, gradients summed during the backward. The method
is that of PyTorch's DistributedDataParallel (arXiv 2006.15704), one bucket per unit, for weights that are DTensors at
rest. FSDP2 with one shard would hold two copies of the weights, and on gloo wait for each sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from galvatron_hf.parallel.comm.mesh import WeightMesh
from galvatron_hf.utils.compat import in_layout_of, set_parameter_tensor


class ReplicatedWeight:
    """Holds one weight: a DTensor at rest, a leaf of the autograd graph while it is in use. `parameter` is plain or a
    DTensor over the tensor ranks; `owners` are the modules that hold it, with its name in each.
    """

    def __init__(self, parameter: nn.Parameter, owners: list[tuple[nn.Module, str]], mesh: WeightMesh):
        self.owners, self.mesh = owners, mesh
        self.tensor_placements = parameter.placements if isinstance(parameter, DTensor) else None
        self.shape, self.stride = parameter.shape, parameter.stride()
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        placements = (Replicate(), Replicate(), *(self.tensor_placements or (Replicate(),)))
        sizes = dict(shape=self.shape, stride=self.stride)
        whole = DTensor.from_local(local.detach(), mesh.mesh, placements, run_check=False, **sizes)
        self.sharded_param = nn.Parameter(whole, parameter.requires_grad)
        self.in_use: nn.Parameter | None = None
        self.summed: torch.Tensor | None = None  # gradients of earlier micro-batches, in the reduction's format

    def _put(self, parameter: nn.Parameter) -> None:
        for module, name in self.owners:
            set_parameter_tensor(module, name, parameter)

    def unshard(self, dtype: torch.dtype) -> nn.Parameter:
        """Puts a leaf into the modules: the weight itself, or its copy in the compute format."""
        local = self.sharded_param.to_local().detach().to(dtype)
        if self.tensor_placements is not None:
            local = DTensor.from_local(
                local,
                self.mesh.tensor,
                self.tensor_placements,
                run_check=False,
                shape=self.shape,
                stride=self.stride,
            )
        self.in_use = nn.Parameter(local, self.sharded_param.requires_grad)
        self._put(self.in_use)
        return self.in_use

    def reshard(self) -> None:
        """Puts the DTensor back. A leaf that was frozen while it was in use gets gradients as the DTensor does: its
        backward may be to come, after a forward pass for which PEFT has disabled, and so frozen, the adapters.
        """
        self._put(self.sharded_param)
        if self.in_use is not None:
            self.in_use.requires_grad_(self.sharded_param.requires_grad)
        self.in_use = None

    def collect(self, leaf: nn.Parameter | None, dtype: torch.dtype) -> None:
        """Adds the gradient that a leaf got in one backward pass to the sum of the earlier ones."""
        gradient = None if leaf is None else leaf.grad
        if gradient is None:
            return
        leaf.grad = None
        gradient = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        gradient = gradient.to(dtype)
        self.summed = gradient if self.summed is None else self.summed.add_(gradient)

    def give_gradient(self) -> None:
        """Makes the sum the gradient of the DTensor, or adds it to the gradient that the DTensor has."""
        if self.summed is None:
            return
        gradient, self.summed = self.summed.to(self.sharded_param.dtype), None
        if self.sharded_param.grad is None:
            self.sharded_param.grad = in_layout_of(gradient, self.sharded_param)
        else:
            self.sharded_param.grad.to_local().add_(gradient)


class ReplicatedUnit:
    """Holds weights whose gradients are summed over the data ranks together, once in a step.

    Args:
        modules (`list[nn.Module]`): modules whose weights, as far as they are in no unit yet, are the unit's.
        taken (`set[int]`): `id`s of weights in units; the unit adds its own.
        compute, reduce (`torch.dtype`): the formats of the weights in use, and of gradients while they are summed.
        last_backward_runs (`Callable`): called whenever a gradient arrives in a step's last backward.
    """

    def __init__(
        self,
        modules: list[nn.Module],
        taken: set[int],
        mesh: WeightMesh,
        compute: torch.dtype,
        reduce: torch.dtype,
        last_backward_runs: Callable[[], None],
    ):
        self.compute, self.reduce, self.last_backward_runs = compute, reduce, last_backward_runs
        group = mesh.mesh.get_group("replicate")
        self.group = group if group.size() > 1 else None
        self.weights = [ReplicatedWeight(*found, mesh) for found in _weights_below(modules, taken)]
        taken.update(id(weight.sharded_param) for weight in self.weights)
        self.last = False
        self._begun = False
        self._waiting: set[int] = set()
        self._running: dist.Work | None = None
        self.reshard()

    @torch.no_grad()
    def unshard(self) -> None:
        """Makes the weights ready for a forward pass; without [`ReplicatedUnit.begin`] its backward ends a step."""
        if not self._begun:
            self.begin(last=True)
        if any(weight.in_use is None for weight in self.weights):
            for weight in self.weights:
                parameter = weight.unshard(self.compute)
                if parameter.requires_grad:
                    # The leaf of this forward: another backward may end, and put another leaf in use, before its own.
                    parameter.register_post_accumulate_grad_hook(
                        lambda leaf, weight=weight: self._arrived(weight, leaf)
                    )

    def reshard(self) -> None:
        """Puts the DTensors back into the modules, for the optimizer and checkpoints."""
        for weight in self.weights:
            weight.reshard()

    def begin(self, last: bool) -> None:
        """Prepares for a micro-batch; `last` says whether its backward ends the step."""
        self.collect()
        self.last, self._begun = last, True
        self._waiting = {id(weight) for weight in self.weights if weight.sharded_param.requires_grad}

    def collect(self) -> None:
        """Adds the gradients of the last backward to those of earlier ones."""
        for weight in self.weights:
            weight.collect(weight.in_use, self.reduce)

    def _arrived(self, weight: ReplicatedWeight, leaf: nn.Parameter) -> None:
        weight.collect(leaf, self.reduce)
        self._waiting.discard(id(weight))
        if self.last:
            self.last_backward_runs()
            if not self._waiting:
                self._start()

    def _start(self) -> None:
        owners = [weight for weight in self.weights if weight.summed is not None]
        if self.group is None or not owners or self._running is not None:
            return
        flat = [weight.summed.flatten() for weight in owners]
        sums = torch.cat(flat) if len(flat) > 1 else flat[0]  # an embedding needs no second copy of its gradient
        pieces = sums.split([weight.summed.numel() for weight in owners])
        for weight, piece in zip(owners, pieces, strict=True):
            weight.summed = piece.view(weight.summed.shape)
        self._running = dist.all_reduce(sums, group=self.group, async_op=True)

    def start(self) -> None:
        """Starts the sum, if it has not started because some weights got no gradient."""
        self.collect()
        self._start()

    def finish(self) -> None:
        """Waits for the sums after a step's last backward, and makes them the DTensors' gradients."""
        self.start()
        if self._running is not None:
            self._running.wait()
            self._running = None
        for weight in self.weights:
            weight.give_gradient()
        self.reshard()
        self.last = self._begun = False


def _weights_below(
    modules: list[nn.Module], taken: set[int]
) -> Iterator[tuple[nn.Parameter, list[tuple[nn.Module, str]]]]:
    """Yields each weight that is in no unit, with all modules that hold it."""
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    weights: dict[int, nn.Parameter] = {}
    for module in {inner: None for outer in modules for inner in outer.modules()}:
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if id(parameter) not in taken:
                weights[id(parameter)] = parameter
                owners.setdefault(id(parameter), []).append((module, name))
    for key, parameter in weights.items():
        yield parameter, owners[key]
