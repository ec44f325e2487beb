# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism of one layer: weights are DTensors at rest and local tensors while the layer computes.

Megatron-LM's column and row cut (arXiv 1909.08053) and its sequence parallelism (arXiv 2205.05198).
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedConfig
from transformers.pytorch_utils import Conv1D

from galvatron_hf.models.adapter import DecoderAdapter, FusedProjection, Heads, Style
from galvatron_hf.parallel.comm.collectives import (
    copy_to_group,
    gather_positions,
    reduce_from_group,
    scatter_sum_positions,
    sum_gradient,
)
from galvatron_hf.parallel.comm.dtensor import local_tensor
from galvatron_hf.parallel.comm.mesh import WeightMesh
from galvatron_hf.plan import LayerStrategy
from galvatron_hf.utils.compat import set_parameter_tensor


@dataclass(frozen=True, kw_only=True)
class LocalParameter:
    """How one DTensor parameter is seen while its layer computes.

    Attributes:
        module (`nn.Module`): owner of the parameter.
        name (`str`): its name there.
        gradient_group (`ProcessGroup`, *optional*): ranks whose gradients are summed, where each sees only a part of
            what the parameter does.
        rows (`tuple[int, int]`, *optional*): the output features that this rank uses of a whole parameter.
    """

    module: nn.Module
    name: str
    gradient_group: dist.ProcessGroup | None = None
    rows: tuple[int, int] | None = None

    def local(self) -> torch.Tensor:
        """This rank's tensor, differentiable back to the DTensor."""
        tensor = sum_gradient(local_tensor(getattr(self.module, self.name)), self.gradient_group)
        if self.rows is None:
            return tensor
        dim = _output_dim(self.module, self.name)
        return tensor.narrow(dim, self.rows[0], self.rows[1] - self.rows[0])


@contextlib.contextmanager
def local_parameters(views: list[LocalParameter]) -> Iterator[None]:
    """Replaces DTensor parameters by their local tensors while the body runs."""
    whole = [getattr(view.module, view.name) for view in views]
    for view in views:
        set_parameter_tensor(view.module, view.name, view.local())
    try:
        yield
    finally:
        for view, parameter in zip(views, whole, strict=True):
            set_parameter_tensor(view.module, view.name, parameter)


def split_fused_projections(layer: nn.Module, adapter: DecoderAdapter, config: PreTrainedConfig) -> None:
    """Replaces each fused projection of a layer by its parts, so that every part can have plain shards."""
    for name, fused in adapter.fused.items():
        module = layer.get_submodule(name)
        parts, start = {}, 0
        for part, size in zip(fused.parts, fused.sizes(config), strict=True):
            parts[part] = _linear_part(module, start, size)
            start += size
        layer.set_submodule(name, FusedProjection(parts))


def cut_layer(
    layer: nn.Module,
    adapter: DecoderAdapter,
    strategy: LayerStrategy,
    mesh: WeightMesh,
    config: PreTrainedConfig,
) -> list[LocalParameter]:
    """Cuts the weights of one layer over its tensor ranks and puts the collectives at its regions' borders.

    Args:
        layer (`nn.Module`): the layer, with whole weights; changed in place.
        adapter ([`DecoderAdapter`]): styles of the layer's modules.
        strategy ([`LayerStrategy`]): its `tensor` and `megatron_sp`.
        mesh ([`WeightMesh`]): its axis `tensor` holds the ranks.
        config (`PreTrainedConfig`): for the head counts.

    Returns:
        `list[LocalParameter]`: how every parameter is seen while the layer computes.
    """
    if strategy.tensor == 1:
        return []
    group = mesh.tensor_group
    heads = Heads.of(config)
    views = []
    for name, module in layer.named_modules():
        style = adapter.part_style(name)
        inside = any(name == region or name.startswith(f"{region}.") for region in adapter.regions)
        copied = name in adapter.key_value and heads.key_value < strategy.tensor
        for parameter, whole in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            cut = None if copied else _cut_dim(module, parameter, style)
            setattr(module, parameter, mesh.cut(whole, cut))
            partial = cut is None and (
                inside and style in (Style.REPLICATED_PARTIAL_GRAD, Style.COLUMN) or strategy.megatron_sp
            )
            rows = _copied_rows(heads, strategy.tensor, mesh.tensor_index) if copied else None
            views.append(
                LocalParameter(module=module, name=parameter, gradient_group=group if partial else None, rows=rows)
            )
        if style is Style.ROW:
            _sum_row_outputs(module, group, strategy.megatron_sp)
        if style is Style.COLUMN and isinstance(module, Conv1D):
            module.nf //= strategy.tensor
    for region in adapter.regions:
        _gather_region_input(layer.get_submodule(region), group, strategy.megatron_sp)
    _set_local_attributes(layer, adapter, heads, strategy.tensor)
    return views


def set_key_value_groups(attention: nn.Module, query_heads: int, key_value_heads: int) -> None:
    """Tells an attention module how many local query heads share one local key/value head."""
    if "num_key_value_groups" in vars(attention):
        attention.num_key_value_groups = query_heads // key_value_heads


def _output_dim(module: nn.Module, parameter: str) -> int:
    return 1 if isinstance(module, Conv1D) and parameter == "weight" else 0


def _cut_dim(module: nn.Module, parameter: str, style: Style | None) -> int | None:
    if style is Style.COLUMN:
        return _output_dim(module, parameter)
    if style is Style.ROW and parameter == "weight":
        return 1 - _output_dim(module, parameter)
    return None


def _copied_rows(heads: Heads, tensor: int, index: int) -> tuple[int, int]:
    head = index * heads.key_value // tensor
    return head * heads.dim, (head + 1) * heads.dim


def _linear_part(module: nn.Module, start: int, size: int) -> nn.Module:
    weight, bias = module.weight, module.bias
    if isinstance(module, Conv1D):
        part = Conv1D.__new__(Conv1D)
        nn.Module.__init__(part)
        part.nf, part.nx = size, module.nx
        rows = weight.data[:, start : start + size]
    else:
        part = nn.Linear.__new__(nn.Linear)
        nn.Module.__init__(part)
        part.in_features, part.out_features = module.in_features, size
        rows = weight.data[start : start + size]
    part.weight = nn.Parameter(rows.clone(), requires_grad=weight.requires_grad)
    part.bias = None if bias is None else nn.Parameter(bias.data[start : start + size].clone(), bias.requires_grad)
    return part


def _sum_row_outputs(module: nn.Module, group: dist.ProcessGroup, megatron_sp: bool) -> None:
    """A row-cut module sums its outputs over the ranks and adds its bias once, afterwards."""
    reduce = scatter_sum_positions if megatron_sp else reduce_from_group

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        weight = module.weight.t() if isinstance(module, Conv1D) else module.weight
        output = reduce(F.linear(hidden, weight), group)
        return output if module.bias is None else output + module.bias

    module.forward = forward


def _gather_region_input(region: nn.Module, group: dist.ProcessGroup, megatron_sp: bool) -> None:
    """The input of a region becomes whole on every rank, and its gradient is summed over them."""

    def enter(hidden: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        # Pieces of one position come out of the gather as a strided view, which Conv1D cannot flatten.
        return gather_positions(hidden, group).contiguous() if megatron_sp else copy_to_group(hidden, group)

    def pre_hook(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        if args:
            return (enter(args[0], group), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": enter(kwargs["hidden_states"], group)}

    region.register_forward_pre_hook(pre_hook, with_kwargs=True)


def _set_local_attributes(layer: nn.Module, adapter: DecoderAdapter, heads: Heads, tensor: int) -> None:
    local = {
        "heads": lambda value: value // tensor,
        "key_value_heads": lambda value: heads.local_key_value(tensor),
    }
    for path, kind in adapter.local_attributes.items():
        owner_path, attribute = path.rsplit(".", 1)
        owner = layer
        for part in owner_path.split("."):
            if isinstance(getattr(owner, part), PreTrainedConfig):
                setattr(owner, part, copy.copy(getattr(owner, part)))
            owner = getattr(owner, part)
        setattr(owner, attribute, local[kind](getattr(owner, attribute)))
