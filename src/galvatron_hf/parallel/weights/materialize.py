# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Weights for a model that was put under a plan without any: each rank has memory for its own pieces alone."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from galvatron_hf.models.fused_weights import FusedNames
from galvatron_hf.parallel.comm.dtensor import local_region, local_tensor
from galvatron_hf.parallel.data_parallel.sharding import ShardedUnits
from galvatron_hf.parallel.model import ParallelModel
from galvatron_hf.parallel.weights.deferred_init import Template
from galvatron_hf.parallel.weights.safetensors import WeightFiles
from galvatron_hf.parallel.weights.sources import FamilyWeights, Place, WeightSource


def on_meta(model: nn.Module) -> bool:
    """Whether a model has no weights.

    Raises:
        ValueError: if it has some of them.
    """
    meta = {name: parameter.is_meta for name, parameter in model.named_parameters()}
    if len(set(meta.values())) > 1:
        real = next(name for name, is_meta in meta.items() if not is_meta)
        raise ValueError(
            f"{type(model).__name__} has some weights on the meta device and others, such as {real}, not; "
            "build it wholly inside or outside of torch.device('meta')."
        )
    return any(meta.values())


@dataclass(frozen=True, kw_only=True)
class EmptyModel:
    """A model on the meta device, and what its weights will be.

    Attributes:
        source ([`WeightSource`]): where they come from.
        template ([`Template`]): the family's own model.
        device (`torch.device`): where they go.
    """

    source: WeightSource
    template: Template
    device: torch.device

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        weights: str | os.PathLike | WeightSource | None,
        device: torch.device | str | None,
    ) -> EmptyModel | None:
        """See [`parallelize`]; None for a model that has its weights."""
        if not on_meta(model):
            if weights is not None:
                raise ValueError(
                    f"{type(model).__name__} has weights already, and weights={weights!r} would replace them; "
                    "build it inside of torch.device('meta'), or leave weights out."
                )
            return None
        source = FamilyWeights() if weights is None else weights
        if isinstance(source, (str, os.PathLike)):
            source = WeightFiles.of(source)
        dtype = source.dtype or next(model.parameters()).dtype
        device = torch.device(device or torch.accelerator.current_accelerator() or "cpu")
        return cls(source=source, template=Template.of(type(model), model.config, dtype), device=device)

    def fill(self, model: PreTrainedModel, units: ShardedUnits, fused: FusedNames) -> None:
        """Once the plan is on the model: makes room for this rank's pieces alone, and fills it."""
        materialize(model, units, self.template, self.device)
        self.source.fill(self.template, weight_places(model, fused))


def materialize(model: PreTrainedModel, units: ShardedUnits, template: Template, device: torch.device) -> None:
    """Gives a model on the meta device memory for this rank's pieces of its weights, and its buffers their values."""
    units.replace_weights(model, lambda parameter: _with_memory(parameter, device))
    for module_name, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            if buffer.is_meta:
                value = template.model.get_buffer(f"{module_name}.{name}".removeprefix("."))
                setattr(module, name, value.to(device=device, dtype=buffer.dtype))


def load_pretrained_weights(parallel: ParallelModel, folder: str | os.PathLike) -> None:
    """Gives a parallelised model the weights of a Hugging Face folder, each rank reading its own pieces; collective.

    Raises:
        ValueError: on every rank, if the folder has no safetensors, or not these weights.
    """
    parallel.units.reshard()
    dtype = next(parallel.model.parameters()).dtype
    template = Template.of(parallel.family, parallel.model.config, dtype)
    WeightFiles.of(folder).fill(template, weight_places(parallel.model, parallel.fused))


def weight_places(model: PreTrainedModel, fused: FusedNames) -> list[Place]:
    """This rank's pieces of weights and persistent buffers, each tensor once."""
    places, seen = [], set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        whole, dim, first = fused.location(name)
        region = list(local_region(tensor))
        if first:
            region[dim] = slice(region[dim].start + first, region[dim].stop + first)
        places.append(Place(name=whole, region=tuple(region), tensor=local_tensor(tensor.detach())))
    return places


def _with_memory(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    local = torch.empty_like(local_tensor(parameter.detach()), device=device)
    if isinstance(parameter, DTensor):
        local = DTensor.from_local(
            local,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
    return nn.Parameter(local, requires_grad=parameter.requires_grad)
