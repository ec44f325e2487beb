# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Puts a plan onto the layers of one stage: cuts their weights and replaces their forwards and attention."""

from __future__ import annotations

import functools

from transformers import PreTrainedModel

from galvatron_hf.models.adapter import ModelAdapter
from galvatron_hf.parallel.comm.mesh import StageMesh
from galvatron_hf.parallel.data_parallel.sharding import ShardedUnits
from galvatron_hf.parallel.layers.attention import attach_attention
from galvatron_hf.parallel.layers.parallel_layer import CurrentMicroBatch, ParallelLayer
from galvatron_hf.parallel.layers.tensor_parallel import cut_layer
from galvatron_hf.plan.resolved import ResolvedStage


def parallelize_layers(
    model: PreTrainedModel,
    adapter: ModelAdapter,
    stage: ResolvedStage,
    mesh: StageMesh,
    current: CurrentMicroBatch,
) -> list[ParallelLayer]:
    """Cuts the layers of one stage and puts a [`ParallelLayer`] around each."""
    layers, places, blocks = adapter.layers(model), adapter.places(model), []
    for resolved in stage.layers:
        layer, place = layers[resolved.index], places[resolved.index]
        views = cut_layer(
            layer, place.stack, resolved.strategy, {"layer": mesh.weights(resolved.weights)}, current.config
        )
        block = ParallelLayer(
            resolved=resolved,
            layer=layer,
            layer_type=place.type(current.config),
            inputs=place.stack.inputs,
            mesh=mesh,
            views=views,
            current=current,
            original=layer.forward,
            alone=stage.is_first and stage.is_last,
        )
        for name in place.stack.attention:
            attach_attention(layer.get_submodule(name), resolved, mesh, block.dropout_stream, block.document_bounds)
        layer.forward = functools.partial(ParallelLayer.__call__, block)
        blocks.append(block)
    return blocks


def add_layer_units(units: ShardedUnits, blocks: list[ParallelLayer], stage: int) -> None:
    """Makes a unit of each layer, whose weights are gathered and whose gradients are reduced together."""
    for block in blocks:
        mesh, sharding = block.mesh.weights(block.resolved.weights), block.resolved.strategy.sharding
        units.add(block.layer, mesh, sharding, stage=stage)
