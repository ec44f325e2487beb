# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The whole order in which a plan is put onto a model."""

from __future__ import annotations

import copy
import functools

from torch import nn
from transformers import PreTrainedModel

from galvatron_hf.parallel import attention
from galvatron_hf.parallel.block import Block, CurrentMicroBatch
from galvatron_hf.parallel.causal_lm import CausalLMForward
from galvatron_hf.parallel.checks import check_model, check_plan
from galvatron_hf.parallel.layout import Layout, block_sizes
from galvatron_hf.parallel.mesh import StageMesh
from galvatron_hf.parallel.model import ParallelModel, broadcast_weights
from galvatron_hf.parallel.models import DecoderAdapter, Heads, adapter_for
from galvatron_hf.parallel.sharding import ShardedUnits, mixed_precision
from galvatron_hf.parallel.tensor import cut_layer, set_key_value_groups, split_fused_projections
from galvatron_hf.parallel.vocabulary import Head, parallel_embedding, vocabulary_layouts, whole_module
from galvatron_hf.plan import LayerStrategy, ParallelPlan, Precision


def parallelize(model: PreTrainedModel, plan: ParallelPlan, mesh: StageMesh | None = None) -> ParallelModel:
    """Rewrites a model in place so that it computes under a plan; collective over all ranks.

    The weights of rank 0 become everybody's. Afterwards parameters are DTensors and `model(...)` takes the same whole
    micro-batch on every rank, see [`CausalLMForward`].

    Args:
        model ([`PreTrainedModel`]): a causal language model, whole on every rank, on the device it trains on.
        plan ([`ParallelPlan`]): made for as many ranks as the process group has.
        mesh ([`StageMesh`], *optional*): that of an earlier call on the same ranks, whose groups are then used again.

    Returns:
        [`ParallelModel`]: what a training loop needs: forward and backward over the plan's micro-batches, the gradient
            norm, whole weights for saving.

    Raises:
        ValueError: if the plan cannot run, or not with this model; the model is untouched then.

    Example:

    ```python
    parallel = parallelize(model, ParallelPlan.from_json("plan.json"))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for batch in loader:  # the same global batch on every rank
        loss = parallel.forward_backward(batch)
        parallel.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    ```
    """
    adapter = adapter_for(model)
    check_plan(plan)
    check_model(model, adapter, plan)
    family, base = type(model), model.base_model
    layers = list(base.get_submodule(adapter.layers))
    mesh = mesh or StageMesh(plan.stages[0].ranks, next(model.parameters()).device.type)
    _prepare_groups(mesh, plan)
    broadcast_weights(model)
    for layer in layers:
        split_fused_projections(layer, adapter, base.config)
    current = CurrentMicroBatch(base.config)
    units = ShardedUnits(policy=mixed_precision(plan.precision or Precision()))
    source = None
    for index, (layer, strategy) in enumerate(zip(layers, plan.layers, strict=True)):
        views = cut_layer(layer, adapter, strategy, mesh.weights(strategy), base.config)
        block = Block(
            index=index,
            layer=layer,
            layer_type=_layer_type(base, index),
            strategy=strategy,
            source=source,
            layout=Layout.of(strategy, mesh.size),
            mesh=mesh,
            views=views,
            current=current,
            original=layer.forward,
        )
        attach_attention(layer.get_submodule(adapter.attention), strategy, mesh, block)
        layer.forward = functools.partial(Block.__call__, block)
        units.add(layer, mesh.weights(strategy), strategy.sharding)
        source = block.layout
    _parallelize_ends(model, adapter, plan, mesh, units)
    units.release_after_evaluation(model)
    model.forward = CausalLMForward(model, plan, adapter, mesh, current, source)
    return ParallelModel(model=model, plan=plan, adapter=adapter, mesh=mesh, units=units, family=family)


def attach_attention(module: nn.Module, strategy: LayerStrategy, mesh: StageMesh, block: Block) -> None:
    """Puts the registered attention function in front of a module's own kernel."""
    heads = Heads.of(block.current.config)
    query, key_value = heads.query // strategy.tensor, heads.local_key_value(strategy.tensor)
    copies = attention.key_value_copies(key_value, strategy.ulysses, query)
    set_key_value_groups(module, query, key_value * copies)
    module.parallel_attention = attention.ParallelAttention(
        kernel=attention.configured_kernel(module, module.config._attn_implementation),
        ulysses_group=mesh.strided(strategy.tensor, strategy.ulysses),
        ulysses_degree=strategy.ulysses,
        dropout_stream=block.dropout_stream,
    )
    module.config = copy.copy(module.config)
    module.config._attn_implementation = attention.IMPLEMENTATION


def _prepare_groups(mesh: StageMesh, plan: ParallelPlan) -> None:
    """Creates every group of the plan, in an order that all ranks share."""
    layouts = [Layout.of(strategy, mesh.size) for strategy in plan.layers]
    sizes = {*block_sizes(layouts, mesh.size)}
    for start in vocabulary_layouts(mesh.size, plan.embedding.tensor):
        sizes.update(block_sizes([start, layouts[0]], mesh.size))
    for stop in vocabulary_layouts(mesh.size, plan.head.tensor):
        sizes.update(block_sizes([layouts[-1], stop], mesh.size))
    mesh.groups.prepare(sorted(sizes | {mesh.size}))
    for strategy in plan.layers:
        mesh.prepare_strided(strategy.tensor, strategy.ulysses)
        mesh.weights(strategy)
    mesh.weights(plan.embedding)
    mesh.weights(plan.head)


def _parallelize_ends(
    model: PreTrainedModel, adapter: DecoderAdapter, plan: ParallelPlan, mesh: StageMesh, units: ShardedUnits
) -> None:
    """Embedding, final norm and head. Tied weights and the norm belong to the whole model's own unit."""
    base, embedding, head = model.base_model, model.get_input_embeddings(), model.get_output_embeddings()
    positional = [base.get_submodule(name) for name in adapter.positional]
    tied = head.weight is embedding.weight
    embedding_mesh, head_mesh = mesh.weights(plan.embedding), mesh.weights(plan.head)
    if plan.embedding.tensor > 1:
        parallel_embedding(embedding, embedding_mesh)
        for module in positional:
            whole_module(module, embedding_mesh)
        if tied:
            head.weight = embedding.weight
    if plan.head.tensor > 1:
        whole_module(base.get_submodule(adapter.final_norm), head_mesh)
    Head(head, head_mesh, adapter.logit_transform(model.config), tied)
    if not tied:
        units.add([embedding, *positional], embedding_mesh, plan.embedding.sharding, needed_in_backward=False)
        units.add(head, head_mesh, plan.head.sharding, stay_gathered=True)
    units.add(model, head_mesh, plan.head.sharding, stay_gathered=True)


def _layer_type(base: nn.Module, index: int) -> str | None:
    types = getattr(base.config, "layer_types", None)
    return None if types is None else types[index]
