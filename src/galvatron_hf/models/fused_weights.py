# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Two names for one weight: a fused projection is one tensor in the family's files and several in this runtime."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from galvatron_hf.models.adapter import DecoderAdapter, FusedProjection


@dataclass(frozen=True, kw_only=True)
class FusedWeight:
    """One weight or bias of a fused projection.

    Attributes:
        name (`str`): the family's name for the whole, for example "transformer.h.0.attn.c_attn.weight".
        parts (`tuple[str, ...]`): this runtime's names for the parts, in order.
        sizes (`tuple[int, ...]`): output features of the parts.
        dim (`int`): the dimension of the output features.
    """

    name: str
    parts: tuple[str, ...]
    sizes: tuple[int, ...]
    dim: int


@dataclass(frozen=True)
class FusedNames:
    """All fused weights of a model; empty for families that fuse nothing.

    Args:
        weights (`tuple[FusedWeight, ...]`): one for each weight and bias.
    """

    weights: tuple[FusedWeight, ...] = ()

    @classmethod
    def of(cls, model: PreTrainedModel, adapter: DecoderAdapter) -> FusedNames:
        """Reads them off a model, parallelised or not."""
        base = next(name for name, module in model.named_modules() if module is model.base_model)
        found = []
        for index, layer in enumerate(model.base_model.get_submodule(adapter.layers)):
            for module_name, fused in adapter.fused.items():
                module = layer.get_submodule(module_name)
                linear = next(module.children()) if isinstance(module, FusedProjection) else module
                prefix = f"{base}.{adapter.layers}.{index}.{module_name}".removeprefix(".")
                for parameter in ("weight", "bias"):
                    if getattr(linear, parameter) is not None:
                        found.append(
                            FusedWeight(
                                name=f"{prefix}.{parameter}",
                                parts=tuple(f"{prefix}.{part}.{parameter}" for part in fused.parts),
                                sizes=tuple(fused.sizes(model.base_model.config)),
                                dim=_output_dim(linear, parameter),
                            )
                        )
        return cls(tuple(found))

    @cached_property
    def _whole(self) -> dict[str, str]:
        return {part: weight.name for weight in self.weights for part in weight.parts}

    def family_name(self, name: str) -> str:
        """The family's name of the weight that `name` is, or is a part of."""
        return self._whole.get(name, name)

    def part_names(self, names: Iterable[str]) -> list[str]:
        """This runtime's names of the weights that the family names."""
        parts = {weight.name: weight.parts for weight in self.weights}
        return [part for name in names for part in parts.get(name, (name,))]

    def place(self, name: str) -> tuple[str, int, int]:
        """Where a weight lies in the family's: that one's name, the dimension of the cut, the first index there."""
        for weight in self.weights:
            if name in weight.parts:
                part = weight.parts.index(name)
                return weight.name, weight.dim, sum(weight.sizes[:part])
        return name, 0, 0

    def join(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Puts parts together: from this runtime's names to the family's. Scalars (step counts) are a part's."""
        joined = dict(tensors)
        for weight in self.weights:
            if weight.parts[0] in joined:
                parts = [joined.pop(part) for part in weight.parts]
                joined[weight.name] = torch.cat(parts, weight.dim) if parts[0].ndim else parts[0]
        return joined

    def split(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Takes wholes apart: from the family's names to this runtime's. Scalars are given to every part."""
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


def _output_dim(linear: nn.Module, parameter: str) -> int:
    return 1 if parameter == "weight" and isinstance(linear, Conv1D) else 0
