# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Puts a plan onto the layers of one stage: cuts their weights and replaces their forwards and attention."""

from __future__ import annotations

import functools

from torch import nn
from transformers import PreTrainedModel

from galvatron_hf.models.adapter import ModelAdapter, base_model
from galvatron_hf.models.parameter_specs import layer_specs
from galvatron_hf.parallel.activation.micro_batch import CurrentMicroBatch
from galvatron_hf.parallel.comm.mesh import StageMesh
from galvatron_hf.parallel.data_parallel.sharding import ShardedUnits
from galvatron_hf.parallel.layers.attention import attach_attention
from galvatron_hf.parallel.layers.experts import attach_experts
from galvatron_hf.parallel.layers.lora import key_adapter_dropout
from galvatron_hf.parallel.layers.parallel_layer import ParallelLayer, draw_inner_dropout
from galvatron_hf.parallel.layers.relative_bias import SharedBias, attach_own_bias
from galvatron_hf.parallel.layers.tensor_parallel import cut_layer
from galvatron_hf.parallel.layers.whole_row_layer import WholeRowLayer
from galvatron_hf.plan.resolved import ResolvedStage


def parallelize_layers(
    model: PreTrainedModel,
    adapter: ModelAdapter,
    stage: ResolvedStage,
    mesh: StageMesh,
    current: CurrentMicroBatch,
) -> list[ParallelLayer]:
    """Cuts the layers of one stage and puts a [`ParallelLayer`] around each."""
    layers, places, blocks, biases = adapter.layers(model), adapter.places(model), [], {}
    for resolved in stage.layers:
        layer, place = layers[resolved.index], places[resolved.index]
        stack, config = place.stack, place.stack.config(model)
        specs = layer_specs(layer, stack, config)
        views = cut_layer(layer, stack, resolved.strategy, mesh.weights(resolved.weights), config, current)
        if stack.bias is not None and stack.name not in biases:
            table = base_model(model).get_submodule(stack.bias.table)
            biases[stack.name] = SharedBias(kind=stack.bias, table=table)
        layer_class = ParallelLayer if stack.cut else WholeRowLayer
        block = layer_class(
            resolved=resolved,
            layer=layer,
            stack=stack,
            config=config,
            layer_type=place.type(model),
            mesh=mesh,
            views=views,
            current=current,
            original=layer.forward,
            bias=biases.get(stack.name),
            alone=stage.is_first and stage.is_last,
        )
        for name in stack.attention:
            attach_attention(
                layer.get_submodule(name),
                resolved,
                mesh,
                block.dropout_stream,
                block.document_bounds,
                block.kept_rings,
                stack.per_head,
                read_bounds=block.read_bounds if name in stack.cross else None,
                current=current,
            )
        attach_own_bias(block)
        if resolved.strategy.tensor > 1:
            draw_inner_dropout(block)
        key_adapter_dropout(block, stack)
        if resolved.experts is not None:
            block.experts = attach_experts(
                layer,
                stack.experts,
                specs,
                weights=mesh.weights(resolved.experts),
                tensor_group=mesh.group(resolved.token_copies),
                block=block,
            )
        layer.forward = functools.partial(layer_class.__call__, block)
        blocks.append(block)
    return blocks


def add_layer_units(units: ShardedUnits, blocks: list[ParallelLayer], stage: int) -> None:
    """Makes a unit of the experts of each layer, and one of the rest of it. The weights of a unit are gathered, and
    their gradients reduced, together.
    """
    for block in blocks:
        sharding = block.resolved.strategy.sharding
        if block.experts is not None:
            mesh = block.mesh.weights(block.resolved.experts)
            units.add(block.experts.module, mesh, sharding, stage=stage, of_experts=True)
        units.add(block.layer, block.mesh.weights(block.resolved.weights), sharding, stage=stage)


def units_of_layers(blocks: list[ParallelLayer]) -> list[list[nn.Module]]:
    """Returns the modules of the units of each layer: the layer, then its experts if it has them. Both passes begin a
    layer before its experts.
    """
    return [[block.layer] + ([] if block.experts is None else [block.experts.module]) for block in blocks]
