# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Reads the shapes of a model's weights off the table by which the runtime cuts them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from galvatron_hf.models.families import adapter_for
from galvatron_hf.models.lora import has_adapters
from galvatron_hf.models.parameter_specs import ParameterSpec, model_specs
from galvatron_hf.models.shape import ModelShape, WeightShape
from galvatron_hf.plan import LayerStrategy
from galvatron_hf.profiler.trace.isolated_rows import isolated_layers
from galvatron_hf.profiler.trace.small_models import image_positions, layer_kinds, one_of_each
from galvatron_hf.utils.compat import FakeTensorMode, experts_on_shapes


def model_shape_from_model(model: PreTrainedModel, small: PreTrainedModel | None = None) -> ModelShape:
    """Reads shapes off a model, which may be on the meta device; layers of one kind share one tuple of weights.
    `small` is its [`one_of_each`], if there is one already. Raises `ValueError` for a family unknown to the runtime.
    """
    adapter = adapter_for(model)
    specs, kinds, stack = model_specs(model, adapter), layer_kinds(model), adapter.stacks[-1]
    heads, tied = stack.heads(stack.config(model)), adapter.ties_embeddings(model)
    keeps_formats = has_adapters(model)  # of frozen weights; all other weights are in fp32 at rest
    of_kinds = [specs.layers[kinds.index(kind)] for kind in range(max(kinds) + 1)]
    # The table of a bias that all layers of a stack share lies in one of them, and belongs to none.
    weights = [_shapes((spec for spec in of_kind if spec.mesh != "whole"), keeps_formats) for of_kind in of_kinds]
    return ModelShape(
        hidden=adapter.state_features(model)[stack.name],
        heads=heads.query,
        kv_heads=heads.key_value,
        head_dim=heads.dim,
        layers=tuple(weights[kind] for kind in kinds),
        embedding=_shapes(specs.embedding, keeps_formats),
        final_norm=_shapes(specs.final_norm, keeps_formats),
        head=() if tied else _shapes(specs.head, keeps_formats),
        tied=tied,
        regions=max(regions_of_kinds(model)),
        saves_after_last_region=saves_after_last_region(small or one_of_each(model)),
    )


def regions_of_kinds(model: PreTrainedModel) -> list[int]:
    """Returns the number of tensor-parallel regions of each kind of layer."""
    adapter, kinds = adapter_for(model), layer_kinds(model)
    layers, places = adapter.layers(model), adapter.places(model)
    first = [kinds.index(kind) for kind in range(max(kinds) + 1)]
    return [len(places[index].stack.regions_of(layers[index])) for index in first]


def _shapes(specs: Iterable[ParameterSpec], keeps_formats: bool) -> tuple[WeightShape, ...]:
    shapes = (spec.weight_shape for spec in specs)
    return tuple(one if keeps_formats and not one.trained else replace(one, stored_bytes=4) for one in shapes)


def _inside(name: str, regions: Iterable[str]) -> bool:
    return any(name.startswith(f"{region}.") for region in regions)


def saves_after_last_region(small: PreTrainedModel) -> bool:
    """Returns whether a module with weights, such as a norm, takes the output of the last region of a layer."""
    parts = isolated_layers(small, LayerStrategy(), packed=False)  # which every family allows
    seen: list[str] = []
    tokens = image_positions(small) or 8
    layer, place = parts.rank.blocks[0].layer, parts.rank.stage.adapter.places(small)[0]
    regions = place.stack.regions_of(layer)
    hooks = [
        module.register_forward_hook(lambda *unused, name=name: seen.append(name))
        for name, module in layer.named_modules()
        if name in regions or (next(module.parameters(recurse=False), None) is not None and not _inside(name, regions))
    ]
    if parts.rank.blocks[0].experts is not None:
        parts.rank.model.set_experts_implementation("grouped_mm")  # others ask for values, which fakes have not
    with FakeTensorMode(allow_non_fake_inputs=True), experts_on_shapes(), torch.no_grad():
        parts.give_memory(torch.device("cpu"), torch.float32)
        parts.layers(parts.micro_batch(tokens, tokens))[0].run()
    for hook in hooks:
        hook.remove()
    return seen[-1] not in regions
