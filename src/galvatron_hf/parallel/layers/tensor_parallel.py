# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism of one layer: weights are DTensors at rest and local tensors while the layer computes. The cuts
are Megatron-LM's column and row cut (arXiv 1909.08053) and its sequence parallelism (arXiv 2205.05198).
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedConfig

from galvatron_hf.models.adapter import StackAdapter, Style
from galvatron_hf.models.heads import Heads
from galvatron_hf.models.lora import lora_layers
from galvatron_hf.models.parameter_specs import LinearKind, ParameterSpec, layer_specs, linear_kind
from galvatron_hf.parallel.activation.micro_batch import CurrentMicroBatch
from galvatron_hf.parallel.comm.collectives import (
    copy_to_group,
    gather_positions,
    reduce_from_group,
    scatter_sum_positions,
    sum_gradient,
)
from galvatron_hf.parallel.comm.dtensor import local_tensor
from galvatron_hf.parallel.comm.mesh import WeightMesh
from galvatron_hf.parallel.layers.lora import sum_adapted_outputs
from galvatron_hf.plan import LayerStrategy
from galvatron_hf.plan.layout import AttentionHeads
from galvatron_hf.utils.compat import set_parameter_tensor


_READ = ("key_value_states", "encoder_hidden_states")  # what the families call the states that cross-attention reads


@dataclass(frozen=True, kw_only=True)
class LocalParameter:
    """Gives the local view of a DTensor parameter while its module computes.

    Attributes:
        gradient_group (`ProcessGroup`, *optional*): ranks whose gradients are summed, because each rank uses only a
            part of the parameter, or uses it for a part of the positions.
        features (`tuple[int, int]`, *optional*): the range of `dim` that this rank uses of a whole parameter.
        dim (`int`): the dimension of the output features.
    """

    module: nn.Module
    name: str
    gradient_group: dist.ProcessGroup | None = None
    features: tuple[int, int] | None = None
    dim: int = 0

    def local(self) -> torch.Tensor:
        """Returns this rank's tensor, differentiable back to the DTensor."""
        tensor = sum_gradient(local_tensor(getattr(self.module, self.name)), self.gradient_group)
        if self.features is None:
            return tensor
        return tensor.narrow(self.dim, self.features[0], self.features[1] - self.features[0])


@contextlib.contextmanager
def local_parameters(views: Sequence[LocalParameter]) -> Iterator[None]:
    """Replaces DTensor parameters by their local tensors while the body runs."""
    whole = [getattr(view.module, view.name) for view in views]
    for view in views:
        set_parameter_tensor(view.module, view.name, view.local())
    try:
        yield
    finally:
        for view, parameter in zip(views, whole, strict=True):
            set_parameter_tensor(view.module, view.name, parameter)


def cut_layer(
    layer: nn.Module,
    stack: StackAdapter,
    strategy: LayerStrategy,
    mesh: WeightMesh,
    config: PreTrainedConfig,
    current: CurrentMicroBatch,
) -> list[LocalParameter]:
    """Cuts the weights of one layer over its tensor ranks, in place, and puts the collectives at its regions' borders.
    The layer has whole weights and split projections. Returns the views of all its parameters but those of experts.
    While `current.whole_rows` is true, no rank has pieces of positions.
    """
    if strategy.tensor == 1:
        return []
    specs = [spec for spec in layer_specs(layer, stack, config) if spec.mesh == "layer"]
    views = [cut_parameter(layer, spec, mesh, strategy.megatron_sp) for spec in specs]
    group, adapted = mesh.tensor_group, lora_layers(layer)

    def cuts_positions() -> bool:
        return strategy.megatron_sp and not current.whole_rows

    for name, module in layer.named_modules():
        kind, style = linear_kind(module), stack.style(name)
        if stack.is_expert(name, layer):
            continue
        if style is Style.ROW and name in adapted:
            sum_adapted_outputs(module, _row_reduction(group, cuts_positions))
            continue
        if style is Style.ROW and (kind is None or any(name.startswith(f"{whole}.") for whole in adapted)):
            continue  # PEFT's modules around a linear one, and those inside
        if style is Style.ALL_FEATURES:
            _apply_to_all_features(module, group)
        elif style is Style.ROW:
            _sum_row_outputs(module, kind, group, cuts_positions)
        elif style is Style.COLUMN and kind is not None:
            setattr(module, kind.output_size, local_tensor(module.weight).shape[kind.output_dim])
    for region in stack.regions_of(layer):
        _gather_region_input(layer.get_submodule(region), group, cuts_positions)
    _set_local_attributes(layer, stack, stack.heads(config), strategy.tensor)
    return views


def cut_parameter(
    owner: nn.Module, spec: ParameterSpec, mesh: WeightMesh, megatron_sp: bool = False
) -> LocalParameter:
    """Makes a parameter of `owner` a DTensor over the tensor ranks, cut as its spec says, and returns its view."""
    module, name, weight = owner.get_submodule(spec.owner), spec.name.rpartition(".")[2], spec.weight_shape
    degree = mesh.tensor_degree
    setattr(module, name, mesh.cut(getattr(module, name), weight.cut_dim(degree)))
    return LocalParameter(
        module=module,
        name=name,
        gradient_group=mesh.tensor_group if weight.sums_gradient(degree, megatron_sp) else None,
        features=spec.used_features(degree, mesh.tensor_index),
        dim=spec.output_dim,
    )


def set_key_value_groups(attention: nn.Module, query_heads: int, key_value_heads: int) -> None:
    """Tells an attention module how many local query heads share one local key/value head."""
    if "num_key_value_groups" in vars(attention):
        attention.num_key_value_groups = query_heads // key_value_heads


def _row_reduction(
    group: dist.ProcessGroup, cuts_positions: Callable[[], bool]
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns the sum over the ranks of a row-cut module's outputs, of all positions or of a rank's own."""

    def reduce(output: torch.Tensor) -> torch.Tensor:
        return scatter_sum_positions(output, group) if cuts_positions() else reduce_from_group(output, group)

    return reduce


def _sum_row_outputs(
    module: nn.Module, kind: LinearKind | None, group: dist.ProcessGroup, cuts_positions: Callable[[], bool]
) -> None:
    """Makes a row-cut module sum its outputs over the ranks and add its bias once, afterwards."""
    reduce = _row_reduction(group, cuts_positions)
    inputs_first = kind is not None and kind.output_dim == 1
    own = module.forward if isinstance(module, nn.Linear) and type(module) is not nn.Linear else None  # in float8

    def product(hidden: torch.Tensor) -> torch.Tensor:
        if own is None:
            return F.linear(hidden, module.weight.t() if inputs_first else module.weight)
        bias = module.bias
        set_parameter_tensor(module, "bias", None)
        try:
            return own(hidden)
        finally:
            set_parameter_tensor(module, "bias", bias)

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        output = reduce(product(hidden))
        return output if module.bias is None else output + module.bias

    module.forward = forward


def _apply_to_all_features(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Makes a module, such as a norm over all heads, get the features [B, S, features] of all ranks, and return those
    of this rank.
    """
    own = module.forward

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        size = hidden.shape[-1]
        return own(gather_positions(hidden, group, dim=-1)).narrow(-1, group.rank() * size, size)

    module.forward = forward


def _gather_region_input(region: nn.Module, group: dist.ProcessGroup, cuts_positions: Callable[[], bool]) -> None:
    """Makes the input of a region whole on every rank, and sums its gradient over the ranks."""

    def enter(hidden: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        # Pieces of one position come out of the gather as a strided view, which some linear modules cannot flatten.
        return gather_positions(hidden, group).contiguous() if cuts_positions() else copy_to_group(hidden, group)

    def pre_hook(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        if getattr(vars(module).get("forward"), "is_computed", False):
            return args, kwargs  # its result exists already
        for name in _READ:
            if kwargs.get(name) is not None:
                kwargs = {**kwargs, name: enter(kwargs[name], group)}
        if args:
            return (enter(args[0], group), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": enter(kwargs["hidden_states"], group)}

    region.register_forward_pre_hook(pre_hook, with_kwargs=True)


def _set_local_attributes(layer: nn.Module, stack: StackAdapter, heads: Heads, tensor: int) -> None:
    """Divides the attributes that count heads or features; a configuration is copied first."""
    local = AttentionHeads.from_degrees(query=heads.query, key_value=heads.key_value, tensor=tensor, ulysses=1)
    for path, kind in stack.local_attributes.items():
        owner_path, attribute = path.rsplit(".", 1)
        owner = layer
        for part in owner_path.split("."):
            if isinstance(getattr(owner, part), PreTrainedConfig):
                setattr(owner, part, copy.copy(getattr(owner, part)))
            owner = getattr(owner, part)
        if hasattr(owner, attribute):  # a table is for several families
            value = local.key_value if kind == "key_value_heads" else getattr(owner, attribute) // tensor
            setattr(owner, attribute, value)
