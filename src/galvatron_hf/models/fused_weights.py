# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Fused projections: one tensor in the family's files, and several with names of their own in this runtime."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from galvatron_hf.models.adapter import ModelAdapter, StackAdapter, base_model
from galvatron_hf.models.lora import Role, role
from galvatron_hf.models.parameter_specs import ParameterSpec, linear_kind, model_specs


@dataclass(frozen=True, kw_only=True)
class FusedWeight:
    """Names one weight or bias of a fused projection: the family's name for the whole
    ("transformer.h.0.attn.c_attn.weight") and this runtime's names for the parts, in order. `sizes` are the output
    features of the parts along dimension `dim`.
    """

    name: str
    parts: tuple[str, ...]
    sizes: tuple[int, ...]
    dim: int


@dataclass(frozen=True)
class FusedNames:
    """Holds all fused weights of a model; empty for families that fuse nothing."""

    weights: tuple[FusedWeight, ...] = ()

    @classmethod
    def from_model(cls, model: PreTrainedModel, adapter: ModelAdapter) -> FusedNames:
        """Reads the fused weights off a model, parallelised or not."""
        base = next(name for name, module in model.named_modules() if module is base_model(model))
        places, specs = adapter.places(model), model_specs(model, adapter).layers
        found = []
        for place, of_layer in zip(places, specs, strict=True):
            prefix = f"{base}.{place.name}".removeprefix(".")
            for whole, parts in _parts_by_whole(of_layer).items():
                found.append(
                    FusedWeight(
                        name=f"{prefix}.{whole}",
                        parts=tuple(f"{prefix}.{part.name}" for part in parts),
                        sizes=tuple(part.shape[part.output_dim] for part in parts),
                        dim=parts[0].output_dim,
                    )
                )
        return cls(tuple(found))

    @cached_property
    def _whole(self) -> dict[str, str]:
        return {part: weight.name for weight in self.weights for part in weight.parts}

    def family_name(self, name: str) -> str:
        """Returns the family's name of a weight, or of the fused weight that it is a part of."""
        return self._whole.get(name, name)

    def part_names(self, names: Iterable[str]) -> list[str]:
        """Returns this runtime's names of the weights with the given names of the family."""
        parts = {weight.name: weight.parts for weight in self.weights}
        return [part for name in names for part in parts.get(name, (name,))]

    def location(self, name: str) -> tuple[str, int, int]:
        """Locates a weight in the family's: the family's name, the dimension of the parts, the first index."""
        for weight in self.weights:
            if name in weight.parts:
                part = weight.parts.index(name)
                return weight.name, weight.dim, sum(weight.sizes[:part])
        return name, 0, 0

    def join(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Joins parts: from this runtime's names to the family's. A scalar (a step count) is the first part's."""
        joined = dict(tensors)
        for weight in self.weights:
            if weight.parts[0] in joined:
                parts = [joined.pop(part) for part in weight.parts]
                joined[weight.name] = torch.cat(parts, weight.dim) if parts[0].ndim else parts[0]
        return joined

    def split(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Splits fused weights: from the family's names to this runtime's. Each part gets a copy of a scalar."""
        split = dict(tensors)
        for weight in self.weights:
            whole = split.pop(weight.name, None)
            if whole is not None:
                if whole.ndim:
                    parts = whole.split(weight.sizes, weight.dim)
                else:
                    parts = [whole.clone() for _ in weight.parts]  # an optimizer counts each part's steps in place
                split.update(zip(weight.parts, parts, strict=True))
        return split


def _parts_by_whole(specs: Iterable[ParameterSpec]) -> dict[str, list[ParameterSpec]]:
    """Groups the parts of fused parameters by the family's name of the whole."""
    parts: dict[str, list[ParameterSpec]] = {}
    for spec in specs:
        if spec.family_name != spec.name:
            parts.setdefault(spec.family_name, []).append(spec)
    return parts


class FusedProjection(nn.Module):
    """Computes the parts of a fused projection in order and joins them; replaces the fused module in place."""

    def __init__(self, parts: dict[str, nn.Module]):
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Maps [B, S, H] to [B, S, sum of the parts' features]."""
        return torch.cat([part(hidden) for part in self.children()], dim=-1)


@torch.no_grad()
def split_fused_projections(model: PreTrainedModel, adapter: ModelAdapter) -> None:
    """Replaces each fused projection of each layer by its parts, so that every part can have plain shards."""
    for layer, place in zip(adapter.layers(model), adapter.places(model), strict=True):
        split_fused_projections_of_layer(layer, place.stack, place.stack.config(model))


def split_fused_projections_of_layer(layer: nn.Module, stack: StackAdapter, config: PreTrainedConfig) -> None:
    """Replaces each fused projection of one layer by its parts."""
    for name, fused in stack.fused.items():
        sizes = fused.sizes(config)
        for whole in _joined_modules(layer, name):
            module, starts = layer.get_submodule(whole), itertools.accumulate(sizes, initial=0)
            parts = {part: _linear_part(module, *at) for part, *at in zip(fused.parts, starts, sizes, strict=False)}
            layer.set_submodule(whole, FusedProjection(parts))


def _joined_modules(layer: nn.Module, name: str) -> list[str]:
    """Returns the names of the modules whose output features are those of all parts: a fused projection, its copies in
    `modules_to_save`, or its own weight and those of its adapters that compute the output features.
    """
    found = []
    for inner, _ in layer.get_submodule(name).named_modules(prefix=name):
        is_linear = linear_kind(layer.get_submodule(inner)) is not None
        if is_linear and role(inner) is not Role.DOWN:
            found.append(inner)
    return found


def _linear_part(module: nn.Module, start: int, size: int) -> nn.Module:
    """Makes a linear module of `size` output features of another one, from feature `start` on."""
    kind = linear_kind(module)
    part = kind.module_class.__new__(kind.module_class)
    nn.Module.__init__(part)
    setattr(part, kind.input_size, getattr(module, kind.input_size))
    setattr(part, kind.output_size, size)
    for name, dim in (("weight", kind.output_dim), ("bias", 0)):
        whole = getattr(module, name)
        made = None
        if whole is not None:
            made = nn.Parameter(whole.narrow(dim, start, size).clone(), requires_grad=whole.requires_grad)
        part.register_parameter(name, made)
    return part
