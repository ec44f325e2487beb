# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The shapes of a real model, as the runtime's own table of its family says that ranks hold them."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from galvatron_hf.models.adapter import DecoderAdapter, Heads, Style
from galvatron_hf.models.families import adapter_for
from galvatron_hf.models.shape import ModelShape, WeightShape
from galvatron_hf.plan import LayerStrategy
from galvatron_hf.profiler.trace.isolated_layers import IsolatedLayers, layer_kinds, one_of_each
from galvatron_hf.utils.compat import FakeTensorMode


def model_shape(model: PreTrainedModel, small: PreTrainedModel | None = None) -> ModelShape:
    """
    Shapes read off a model; nothing is computed, and the model may be on the meta device.

    Args:
        model ([`PreTrainedModel`]): A causal language model of a family that the runtime knows.
        small ([`PreTrainedModel`], *optional*): What [`one_of_each`] made of it, if it has been called.

    Returns:
        [`ModelShape`]: Layers of one kind share one tuple of weights.

    Raises:
        ValueError: if the runtime does not know the family.
    """
    adapter, heads, base = adapter_for(model), Heads.of(model.config), model.base_model
    layers, kinds = base.get_submodule(adapter.layers), layer_kinds(model)
    weights = [layer_weights(layers[kinds.index(kind)], adapter, model) for kind in range(max(kinds) + 1)]
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    tied = head.weight is embedding
    positions = [base.get_submodule(name).weight for name in adapter.positional]
    return ModelShape(
        hidden=model.config.hidden_size,
        heads=heads.query,
        kv_heads=heads.key_value,
        head_dim=heads.dim,
        layers=tuple(weights[kind] for kind in kinds),
        embedding=(
            WeightShape(shape=tuple(embedding.shape), cut=0),
            *(WeightShape(shape=tuple(weight.shape)) for weight in positions),
        ),
        final_norm=tuple(
            WeightShape(shape=tuple(weight.shape)) for weight in base.get_submodule(adapter.final_norm).parameters()
        ),
        head=() if tied else tuple(WeightShape(shape=tuple(weight.shape), cut=0) for weight in head.parameters()),
        tied=tied,
        regions=len(adapter.regions),
        saves_after_last_region=saves_after_last_region(small or one_of_each(model), adapter),
    )


def layer_weights(layer: nn.Module, adapter: DecoderAdapter, model: PreTrainedModel) -> tuple[WeightShape, ...]:
    """The weights of one layer, those of fused projections part by part."""
    weights, heads = [], Heads.of(model.config)
    for name, weight in layer.named_parameters():
        owner, parameter = name.rsplit(".", 1)
        out = int(isinstance(layer.get_submodule(owner), Conv1D) and parameter == "weight")
        style, fused = adapter.part_style(owner), adapter.fused.get(owner)
        cut = {Style.COLUMN: out, Style.ROW: 1 - out if parameter == "weight" else None}.get(style)
        parts = fused.parts if fused else (None,)
        sizes = fused.sizes(model.config) if fused else (weight.shape[out],)
        for part, size in zip(parts, sizes, strict=True):
            path = owner if part is None else f"{owner}.{part}"
            weights.append(
                WeightShape(
                    shape=tuple(size if dim == out else extent for dim, extent in enumerate(weight.shape)),
                    cut=cut,
                    used_in_part=style is Style.REPLICATED_PARTIAL_GRAD,
                    heads=heads.key_value if path in adapter.key_value else None,
                )
            )
    return tuple(weights)


def saves_after_last_region(small: PreTrainedModel, adapter: DecoderAdapter) -> bool:
    """Whether a module with weights, such as a norm, takes what the last region of a layer leaves."""
    parts = IsolatedLayers.of(small, LayerStrategy())
    seen: list[str] = []
    layer = parts.rank.blocks[0].layer
    hooks = [
        module.register_forward_hook(lambda *unused, name=name: seen.append(name))
        for name, module in layer.named_children()
        if name in adapter.regions or list(module.parameters())
    ]
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        parts.give_memory(torch.device("cpu"), torch.float32)
        parts.layers(parts.micro_batch(8, 8))[0].run()
    for hook in hooks:
        hook.remove()
    return seen[-1] not in adapter.regions
