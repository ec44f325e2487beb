# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Gives a model on the meta device its weights after the plan is applied: each rank allocates only its pieces."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from galvatron_hf.models.fused_weights import FusedNames
from galvatron_hf.parallel.comm.dtensor import local_region, local_tensor, placed_like
from galvatron_hf.parallel.comm.objects import on_every_rank
from galvatron_hf.parallel.data_parallel.sharding import ShardedUnits
from galvatron_hf.parallel.model import ParallelModel
from galvatron_hf.parallel.weights.deferred_init import Template
from galvatron_hf.parallel.weights.safetensors import WeightFiles
from galvatron_hf.parallel.weights.sources import FamilyWeights, WeightPiece, WeightSource


def on_meta(model: nn.Module) -> bool:
    """Returns True if all weights of a model are on the meta device; refuses a model of which only some are."""
    meta = {name: parameter.is_meta for name, parameter in model.named_parameters()}
    if len(set(meta.values())) > 1:
        real = next(name for name, is_meta in meta.items() if not is_meta)
        raise ValueError(
            f"{type(model).__name__} has some weights on the meta device and others, such as {real}, not; "
            "build the model wholly inside or outside of torch.device('meta')."
        )
    return any(meta.values())


@dataclass(frozen=True, kw_only=True)
class EmptyModel:
    """Holds the source of the weights of a model on the meta device, the family's own model and the device."""

    source: WeightSource
    template: Template
    device: torch.device

    @classmethod
    def from_model(
        cls,
        model: PreTrainedModel,
        weights: str | os.PathLike | WeightSource | None,
        device: torch.device | str | None,
    ) -> EmptyModel | None:
        """Returns None for a model that has its weights; the arguments are those of [`parallelize`]."""
        if not on_meta(model):
            if weights is not None:
                raise ValueError(
                    f"{type(model).__name__} has weights already, and weights={weights!r} would replace them; "
                    "build it inside of torch.device('meta'), or leave weights out."
                )
            return None
        source = FamilyWeights() if weights is None else weights
        if isinstance(source, (str, os.PathLike)):
            source = WeightFiles.find(source)
        dtype = source.dtype or next(model.parameters()).dtype
        device = torch.device(device or torch.accelerator.current_accelerator(check_available=True) or "cpu")
        return cls(source=source, template=Template.from_config(type(model), model.config, dtype), device=device)

    def fill(self, model: PreTrainedModel, units: ShardedUnits, fused: FusedNames) -> None:
        """Allocates and fills this rank's pieces, after the plan has been applied."""
        materialize(model, units, self.template, self.device)
        self.source.fill(self.template, weight_pieces(model, fused))


def materialize(model: PreTrainedModel, units: ShardedUnits, template: Template, device: torch.device) -> None:
    """Allocates this rank's pieces of the weights of a model on the meta device, and computes its buffers."""
    units.replace_weights(model, lambda parameter: _with_memory(parameter, device))
    for module_name, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            if buffer.is_meta:
                value = template.model.get_buffer(f"{module_name}.{name}".removeprefix("."))
                setattr(module, name, value.to(device=device, dtype=buffer.dtype))


def load_pretrained_weights(parallel: ParallelModel, folder: str | os.PathLike) -> None:
    """Loads the weights of a Hugging Face folder into a parallelised model; each rank reads its pieces; collective.
    Every rank raises ValueError if the folder has no safetensors or lacks a weight.
    """
    parallel.units.reshard()
    dtype = next(parallel.model.parameters()).dtype
    template = Template.from_config(parallel.family, parallel.model.config, dtype)
    WeightFiles.find(folder).fill(template, weight_pieces(parallel.model, parallel.fused))


@torch.no_grad()
def load_adapters(parallel: ParallelModel, folder: str | os.PathLike) -> None:
    """Loads PEFT's files of a folder into a parallelised model with adapters; each rank reads them, and keeps its
    pieces; collective. Every rank raises ValueError if the folder lacks a weight.
    """
    values = on_every_rank(lambda: parallel.adapted.read(folder))
    parallel.units.reshard()
    for piece in weight_pieces(parallel.model, parallel.fused):
        if piece.name in values:
            piece.tensor.copy_(values[piece.name][piece.region])


def weight_pieces(model: PreTrainedModel, fused: FusedNames) -> list[WeightPiece]:
    """Returns this rank's pieces of weights and persistent buffers, each tensor once."""
    pieces, seen = [], set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        whole, dim, first = fused.location(name)
        region = list(local_region(tensor))
        if first:
            region[dim] = slice(region[dim].start + first, region[dim].stop + first)
        pieces.append(WeightPiece(name=whole, region=tuple(region), tensor=local_tensor(tensor.detach())))
    return pieces


def _with_memory(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    local = torch.empty_like(local_tensor(parameter.detach()), device=device)
    return nn.Parameter(placed_like(parameter, local), requires_grad=parameter.requires_grad)
