# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Steps under another plan than the one whose shards the optimizer updates (Hydraulis, arXiv 2412.07894): before such
a step the weights move to the other plan's layout, and after it the gradients move back.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from galvatron_hf.parallel.comm.dtensor import local_region, local_tensor, placed_like
from galvatron_hf.parallel.comm.objects import gather_objects, on_every_rank
from galvatron_hf.parallel.executor import Batch
from galvatron_hf.parallel.model import ParallelModel
from galvatron_hf.parallel.parallelize import parallelize
from galvatron_hf.parallel.weights.deferred_init import Template
from galvatron_hf.parallel.weights.piece_move import HeldPiece, PieceMove
from galvatron_hf.parallel.weights.sources import WeightPiece
from galvatron_hf.plan import ParallelPlan


@dataclass(frozen=True, kw_only=True)
class MovedWeights:
    """Leaves weights as they are: they come from another plan before each step."""

    dtype: torch.dtype | None = None

    def fill(self, template: Template, pieces: list[WeightPiece]) -> None:
        pass


class OtherPlan:
    """Computes steps of a parallelised model under another plan. Its weights take memory while it computes alone. All
    methods are collective over the world.

    Args:
        owner ([`ParallelModel`]): the model whose weights an optimizer updates.
        model ([`PreTrainedModel`]): the [`empty_copy`] of the model from before its plan was applied.
        plan ([`ParallelPlan`]): the plan of the steps, on the same ranks.

    Attributes:
        parallel ([`ParallelModel`]): the model under the other plan.

    Raises:
        ValueError: if the plan cannot run, or the models have different weights.
    """

    def __init__(self, owner: ParallelModel, model: PreTrainedModel, plan: ParallelPlan):
        if owner.adapted is not None:
            raise ValueError(
                f"{owner.family.__name__} has adapters, which have the layout of one plan alone; leave out plans of "
                "steps."
            )
        self.owner = owner
        self.parallel = parallelize(model, plan, owner.world, weights=MovedWeights(), device=owner.device)
        self._own, self._other = _State(owner), _State(self.parallel)
        self._weights = self._move(self._own, self._other, lambda state: state.tensors)
        self._gradients = self._move(self._other, self._own, lambda state: state.parameters)
        self._buffers = self._move(self._other, self._own, lambda state: state.buffers)
        self._names = sorted({name for names in gather_objects(self._own.names()) for name in names})
        self._storages = {
            tensor.untyped_storage().data_ptr(): (tensor.untyped_storage(), tensor.untyped_storage().nbytes())
            for tensor in self._other.values().values()
        }
        self._has_memory = True
        self.release()

    def _move(self, source: _State, target: _State, chosen: Callable[[_State], dict[str, torch.Tensor]]) -> PieceMove:
        given, taken = (gather_objects(state.pieces(chosen(state))) for state in (source, target))
        return on_every_rank(lambda: PieceMove(given, taken, self.owner.device))

    @property
    def moved_elements(self) -> int:
        """Returns the numbers that this rank sends to others for a step."""
        return sum(move.sent_elements for move in (self._weights, self._gradients, self._buffers))

    @property
    def held_bytes(self) -> int:
        """Returns the bytes of this rank's weights and gradients in the other plan's layout."""
        gradients = sum(local_tensor(one.detach()).nbytes for one in self._other.parameters.values())
        return gradients + sum(size for _, size in self._storages.values())

    def load(self) -> None:
        """Brings the weights to the other plan's layout."""
        self.owner.units.reshard()
        self.parallel.units.reshard()
        if not self._has_memory:
            for storage, size in self._storages.values():
                storage.resize_(size)
            self._has_memory = True
        self._weights(self._own.values(), self._other.values())

    def release(self) -> None:
        """Gives back the memory of weights and gradients in the other plan's layout."""
        for parameter in self._other.parameters.values():
            parameter.grad = None
        self.parallel.units.reshard()
        for storage, _ in self._storages.values():
            storage.resize_(0)
        self._has_memory = False

    def forward_backward(self, batch: Batch, *args: Any, **options: Any) -> torch.Tensor:
        """Runs forward and backward of a global batch under the other plan, and adds its gradients to the owner's; see
        [`ParallelModel.forward_backward`]. Raises `ValueError` if other weights are trained than at the start.
        """
        self._check_trained()
        try:
            self.load()
            self.parallel.model.train(self.owner.model.training)
            streams, own = self.parallel.streams, self.owner.streams
            streams.seed, streams.step = own.seed, own.step
            loss = self.parallel.forward_backward(batch, *args, **options)
            self.hand_back()
        finally:
            self.release()
        return loss

    @torch.no_grad()
    def hand_back(self) -> None:
        """Moves the gradients to the owner's layout, and adds them to those that it has; buffers move too. A weight
        that had no part in the loss gets no gradient.
        """
        used, taken = self._used(), self._own.empty_gradients()
        self._gradients(self._other.gradients(), {key: local_tensor(gradient) for key, gradient in taken.items()})
        self._buffers(self._other.values(), self._own.values())
        for key, gradient in taken.items():
            parameter = self._own.parameters[key]
            if self._own.saved_name(key) not in used:
                continue
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                local_tensor(parameter.grad).add_(local_tensor(gradient))

    def _used(self) -> set[str]:
        """Returns the weights that have a gradient on any rank."""
        own = {self._other.saved_name(name) for name, one in self._other.parameters.items() if one.grad is not None}
        flags = torch.tensor([name in own for name in self._names], dtype=torch.uint8, device=self.owner.device)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        return {name for name, flag in zip(self._names, flags.tolist(), strict=True) if flag}

    def _check_trained(self) -> None:
        """Refuses a model in which weights have been frozen, or are trained, since the plans were applied."""
        changed = [
            name for name, one in self._own.tensors.items() if one.requires_grad != (name in self._own.parameters)
        ]
        flag = torch.tensor(len(changed), device=self.owner.device)
        dist.all_reduce(flag)
        if int(flag):
            raise ValueError(
                f"{int(flag)} weights of {self.owner.family.__name__} were frozen, or are trained, since training "
                "began, and steps under another plan do not know it; freeze weights before, or use one plan."
            )


class _State:
    """Gives the pieces of weights and persistent buffers that a rank holds of a parallelised model.

    Attributes:
        tensors, parameters, buffers (`dict[str, torch.Tensor]`): all, those that are trained, and the buffers.
    """

    def __init__(self, parallel: ParallelModel):
        self.parallel = parallel
        parallel.units.reshard()
        self.tensors: dict[str, torch.Tensor] = {}
        seen = set()
        for name, tensor in parallel.model.state_dict(keep_vars=True).items():
            if id(tensor) not in seen:
                seen.add(id(tensor))
                self.tensors[name] = tensor
        self.parameters = {name: tensor for name, tensor in self.tensors.items() if tensor.requires_grad}
        self.buffers = {name: one for name, one in self.tensors.items() if not isinstance(one, nn.Parameter)}

    def saved_name(self, name: str) -> str:
        """Returns the name of a weight, the same for all copies that are tied to each other."""
        tied = self.parallel.tied
        return (None if tied is None else tied.name_of(self.tensors[name])) or name

    def names(self) -> set[str]:
        return {self.saved_name(name) for name in self.tensors}

    def pieces(self, tensors: Mapping[str, torch.Tensor]) -> list[HeldPiece]:
        """Returns what the rank holds of some of the tensors."""
        found = []
        for name, tensor in tensors.items():
            weight, bounds = self.saved_name(name), tuple((part.start, part.stop) for part in local_region(tensor))
            first = self.parallel.tied is None or not self.parallel.tied.is_copy(tensor)
            found.append(HeldPiece(key=name, weight=weight, bounds=bounds, dtype=tensor.dtype, gives=first))
        return found

    def values(self) -> dict[str, torch.Tensor]:
        return {name: local_tensor(tensor.detach()) for name, tensor in self.tensors.items()}

    def gradients(self) -> dict[str, torch.Tensor]:
        """Returns the local gradients, zeros where a parameter has none."""
        return {
            name: torch.zeros_like(local_tensor(tensor.detach())) if tensor.grad is None else local_tensor(tensor.grad)
            for name, tensor in self.parameters.items()
        }

    def empty_gradients(self) -> dict[str, torch.Tensor]:
        return {
            name: placed_like(tensor, torch.empty_like(local_tensor(tensor.detach())))
            for name, tensor in self.parameters.items()
        }


def empty_copy(model: PreTrainedModel) -> PreTrainedModel:
    """Returns a copy of a model, with what was changed since it was built, and without memory for weights."""
    weights = {
        id(one): nn.Parameter(torch.empty_like(one, device="meta"), requires_grad=one.requires_grad)
        for one in model.parameters()
    }
    return copy.deepcopy(model, weights)
