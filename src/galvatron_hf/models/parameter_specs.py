# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""One table from each parameter of a model to the ranks that hold it. The runtime's cut, the sharding, the byte counts
of the planner, the names in checkpoints and the profiler read it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from galvatron_hf.models.adapter import ModelAdapter, StackAdapter, Style
from galvatron_hf.models.lora import Role, family_name, role
from galvatron_hf.models.shape import WeightShape


TENSOR = "tensor"  # the mesh axis of tensor ranks
EXPERT = "expert"  # the mesh axis of the ranks over which whole experts are spread


# Styles of weights that a rank holds whole, and uses for its own heads or channels.
USED_IN_PART = (Style.REPLICATED_PARTIAL_GRAD, Style.ALL_FEATURES)


@dataclass(frozen=True, kw_only=True)
class LinearKind:
    """Describes a class of linear modules. `output_dim` is the dimension of `weight` that holds the output features;
    the other holds the inputs. `input_size` and `output_size` are attributes with the numbers of features.
    """

    module_class: type[nn.Module]
    output_dim: int
    input_size: str
    output_size: str


LINEAR_KINDS = (
    LinearKind(module_class=Conv1D, output_dim=1, input_size="nx", output_size="nf"),
    LinearKind(module_class=nn.Linear, output_dim=0, input_size="in_features", output_size="out_features"),
)


def linear_kind(module: nn.Module) -> LinearKind | None:
    """Returns the kind of a linear module; None for other modules."""
    return next((kind for kind in LINEAR_KINDS if isinstance(module, kind.module_class)), None)


@dataclass(frozen=True, kw_only=True)
class ParameterSpec:
    """Describes one parameter of a layer, of the embedding, of the final norm or of the head.

    Attributes:
        name (`str`): its name inside its owner, for example "attn.c_attn.query.weight" inside a layer.
        family_name (`str`): the family's name, "attn.c_attn.weight"; differs from `name` for parts of fused
            parameters.
        shape (`tuple[int, ...]`): the shape of the whole parameter.
        axes (`tuple[str | None, ...]`): for each dimension the mesh axis whose ranks cut it.
        output_dim (`int`): the dimension of the output features, along which parts of a fused parameter lie.
        heads (`int`, *optional*): key/value heads along the cut dimension. More tensor ranks than heads have copies.
        used_in_part (`bool`): whether each tensor rank uses the whole parameter for its own heads alone.
        mesh (`str`): the mesh that holds it: "layer", "experts", "embedding", "head", or "whole" for a weight that
            every rank of a stage holds whole.
        trained (`bool`): whether it requires gradients.
        stored_bytes (`int`): bytes of an element.
    """

    name: str
    family_name: str
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    output_dim: int = 0
    heads: int | None = None
    used_in_part: bool = False
    mesh: str = "layer"
    trained: bool = True
    stored_bytes: int = 4

    @property
    def owner(self) -> str:
        """Returns the name of the module that has the parameter."""
        return self.name.rpartition(".")[0]

    @property
    def weight_shape(self) -> WeightShape:
        """Returns the shape with the cut of the tensor ranks, from which bytes are counted."""
        cut = next((dim for dim, axis in enumerate(self.axes) if axis is not None), None)
        return WeightShape(
            shape=self.shape,
            cut=cut,
            used_in_part=self.used_in_part,
            heads=self.heads,
            of_experts=self.mesh == "experts",
            trained=self.trained,
            stored_bytes=self.stored_bytes,
        )

    def used_features(self, tensor: int, index: int) -> tuple[int, int] | None:
        """Returns the range of output features that rank `index` uses of a copy; None if it uses what it holds."""
        if not self.weight_shape.is_copied(tensor):
            return None
        features = self.shape[self.output_dim] // self.heads
        head = index * self.heads // tensor
        return head * features, (head + 1) * features


@dataclass(frozen=True, kw_only=True)
class ModelSpecs:
    """Holds the parameters of each layer by global index, of the token embedding and then learned positions, of the
    final norm and of the head.
    """

    layers: tuple[tuple[ParameterSpec, ...], ...]
    embedding: tuple[ParameterSpec, ...]
    final_norm: tuple[ParameterSpec, ...]
    head: tuple[ParameterSpec, ...]


def model_specs(model: PreTrainedModel, adapter: ModelAdapter) -> ModelSpecs:
    """Returns the table of a model, whose fused projections may be split already, and whose weights may be cut."""
    return ModelSpecs(
        layers=tuple(
            layer_specs(layer, place.stack, place.stack.config(model))
            for layer, place in zip(adapter.layers(model), adapter.places(model), strict=True)
        ),
        embedding=(
            *(spec for lookup in adapter.lookups(model)[:1] for spec in vocabulary_specs(lookup, "embedding")),
            *(spec for module in adapter.beside_lookups(model) for spec in whole_specs(module, "embedding")),
        ),
        final_norm=tuple(spec for module in adapter.final_norms(model) for spec in whole_specs(module, "head")),
        head=vocabulary_specs(adapter.head(model), "head"),
    )


def layer_specs(layer: nn.Module, stack: StackAdapter, config: PreTrainedConfig) -> tuple[ParameterSpec, ...]:
    """Returns the parameters of one layer; those of fused projections part by part, whether split already or not."""
    return tuple(
        spec
        for name, parameter in layer.named_parameters(remove_duplicate=False)
        for spec in _specs(name, parameter, layer, stack, config)
    )


def _specs(
    name: str, weight: nn.Parameter, layer: nn.Module, stack: StackAdapter, config: PreTrainedConfig
) -> Iterator[ParameterSpec]:
    (owner, _, parameter), shape, kept = name.rpartition("."), tuple(weight.shape), _kept(weight)
    if stack.is_expert(owner, layer):
        axes = (EXPERT, *(None for _ in shape[1:]))
        yield ParameterSpec(name=name, family_name=name, shape=shape, axes=axes, mesh="experts", **kept)
        return
    if stack.bias is not None and owner == stack.bias.inside_layer(stack.layers):
        axes = (None,) * len(shape)
        yield ParameterSpec(name=name, family_name=name, shape=shape, axes=axes, mesh="whole", **kept)
        return
    kind, style, target = linear_kind(layer.get_submodule(owner)), stack.style(owner), family_name(owner)
    output_dim = kind.output_dim if kind is not None and parameter == "weight" else 0
    cut, used_in_part = _cut(style, role(owner), output_dim, parameter)
    cut = 0 if stack.is_per_head(name) else 1 if owner == stack.own_bias else cut
    whole = owner.rpartition(".")[0]  # the fused projection, if this is a part of one
    joined_name = f"{whole}.{parameter}" if target.rpartition(".")[0] in stack.fused else name
    parts, sizes = (owner,), (shape[output_dim],)
    if target in stack.fused and role(owner) is not Role.DOWN:
        fused = stack.fused[target]
        parts, sizes = tuple(f"{owner}.{part}" for part in fused.parts), fused.sizes(config)
    for part, size in zip(parts, sizes, strict=True):
        of_heads = family_name(part) in stack.key_value and role(owner) is not Role.DOWN
        yield ParameterSpec(
            name=f"{part}.{parameter}" if part else parameter,
            family_name=joined_name,
            shape=tuple(size if dim == output_dim else extent for dim, extent in enumerate(shape)),
            axes=tuple(TENSOR if dim == cut else None for dim in range(len(shape))),
            output_dim=output_dim,
            heads=stack.heads(config).key_value if of_heads else None,
            used_in_part=used_in_part and stack.in_region(owner, layer),
            **kept,
        )


def _kept(weight: nn.Parameter) -> dict[str, Any]:
    return {"trained": weight.requires_grad, "stored_bytes": weight.itemsize}


def _cut(style: Style | None, of: Role, output_dim: int, parameter: str) -> tuple[int | None, bool]:
    """Returns the dimension that tensor ranks cut, and whether each rank uses a whole parameter for its part alone. An
    adapter's product has the cut of the module that it adapts: the rank of the adapter is never cut.
    """
    is_weight = parameter == "weight"
    if style is Style.COLUMN:
        return (None, True) if of is Role.DOWN else (output_dim, False)
    if style is Style.ROW and of is Role.UP:
        return None, is_weight  # its bias is added once, after the sum over the ranks
    if style is Style.ROW:
        return (1 - output_dim if is_weight else None), False
    return None, style in USED_IN_PART


def vocabulary_specs(module: nn.Module, mesh: str) -> tuple[ParameterSpec, ...]:
    """Returns the parameters of an embedding or a head, whose first dimension is the vocabulary."""
    return _end_specs(module, mesh, TENSOR)


def whole_specs(module: nn.Module, mesh: str) -> tuple[ParameterSpec, ...]:
    """Returns the parameters of a module that every tensor rank holds whole."""
    return _end_specs(module, mesh, None)


def _end_specs(module: nn.Module, mesh: str, first_axis: str | None) -> tuple[ParameterSpec, ...]:
    return tuple(
        ParameterSpec(
            name=name,
            family_name=name,
            shape=tuple(parameter.shape),
            axes=(first_axis, *(None for _ in parameter.shape[1:])),
            mesh=mesh,
            **_kept(parameter),
        )
        for name, parameter in module.named_parameters()
    )
