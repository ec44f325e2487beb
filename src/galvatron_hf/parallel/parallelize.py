# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The whole order in which a plan is put onto a model."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel
from transformers.distributed.pipeline_parallel import PipelineIdentityLayer

from galvatron_hf.models.adapter import LayerPlace, ModelAdapter
from galvatron_hf.models.families import adapter_for
from galvatron_hf.models.fused_weights import FusedNames, split_fused_projections
from galvatron_hf.models.heads import Heads
from galvatron_hf.parallel.comm.groups import neighbour_pairs, prepare_groups
from galvatron_hf.parallel.comm.mesh import StageMesh, WorldMesh
from galvatron_hf.parallel.data_parallel.sharding import DTYPES, ShardedUnits
from galvatron_hf.parallel.data_parallel.tied_weights import TiedWeights
from galvatron_hf.parallel.layers import attention
from galvatron_hf.parallel.layers.parallel_layer import CurrentMicroBatch, ParallelLayer
from galvatron_hf.parallel.layers.tensor_parallel import cut_layer, set_key_value_groups
from galvatron_hf.parallel.layers.vocab_parallel import Head, parallel_embedding, whole_module
from galvatron_hf.parallel.model import ParallelModel, broadcast_weights
from galvatron_hf.parallel.pipeline.forward import ModelRunner
from galvatron_hf.parallel.pipeline.runtime import Pipeline
from galvatron_hf.parallel.pipeline.stage import MissingModule, StageModule
from galvatron_hf.parallel.pipeline.trace import Timeline
from galvatron_hf.parallel.validate import check_model, check_plan
from galvatron_hf.parallel.weights.materialize import EmptyModel
from galvatron_hf.parallel.weights.sources import WeightSource
from galvatron_hf.plan import LayerStrategy, ParallelPlan, Precision
from galvatron_hf.plan.layout import AttentionHeads, Layout
from galvatron_hf.plan.schedule import PipelineShape, actions, most_in_flight
from galvatron_hf.utils.allocator import keep_freed_memory
from galvatron_hf.utils.compat import attention_implementation, set_attention_implementation


def parallelize(
    model: PreTrainedModel,
    plan: ParallelPlan,
    world: WorldMesh | None = None,
    *,
    weights: str | os.PathLike | WeightSource | None = None,
    device: torch.device | str | None = None,
) -> ParallelModel:
    """Rewrites a model in place so that it computes under a plan; collective over all ranks.

    The weights of rank 0 become everybody's. A model on the meta device gets its weights here, each rank only its own
    pieces. Afterwards parameters are DTensors and `model(...)` takes the same whole
    micro-batch on every rank, see [`ModelRunner`]. Under a pipeline each rank keeps the modules of its stages.

    Args:
        model ([`PreTrainedModel`]): a causal language model, whole on every rank, on the device it trains on; or built
            inside of `torch.device("meta")`.
        plan ([`ParallelPlan`]): made for as many ranks as the process group has.
        world ([`WorldMesh`], *optional*): that of an earlier call on the same ranks, whose groups are then used again.
        weights (`str`, `os.PathLike` or [`WeightSource`], *optional*): for a model on the meta device, a folder or an
            id on the Hub with safetensors. The default is the family's own initialisation, with rank 0's random
            numbers: the weights that `from_config` makes on one process after the same seed.
        device (`torch.device` or `str`, *optional*): for a model on the meta device, where it trains; the current
            accelerator, or the CPU if there is none.

    Returns:
        [`ParallelModel`]: what a training loop needs: forward and backward over the plan's micro-batches, the gradient
            norm, whole weights for saving.

    Raises:
        ValueError: if the plan cannot run, or not with this model; the model is untouched then. If the weights do not
            fit the model.

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
    empty = EmptyModel.from_model(model, weights, device)
    device = empty.device if empty is not None else next(model.parameters()).device
    world = world or WorldMesh(device.type)
    if device.type == "cpu":
        keep_freed_memory()
    prepare_groups(world, plan)
    broadcast_weights(model)
    layers, places = adapter.layers(model), adapter.places(model)
    for layer, place in zip(layers, places, strict=True):
        split_fused_projections(layer, place.stack, base.config)
    names, counts = FusedNames.from_model(model, adapter), _parameter_counts(model)
    own = [index for index, stage in enumerate(plan.stages) if dist.get_rank() in stage.ranks]
    mesh = world.stage(plan.stages[own[0]].ranks)
    tied = _untie(model, adapter, plan, world)
    _leave_out(model, adapter, plan, own)
    current = CurrentMicroBatch(base.config)
    units = ShardedUnits(plan.precision or Precision(), wait_at_end=len(plan.stages) > 1)
    ends = EmbeddingAndHead.of(model, adapter, plan, mesh)
    stages = {}
    for index in own:
        span = range(*plan.stages[index].layers)
        blocks = parallelize_layers(layers, places, span, plan, mesh, current, entered=index > 0)
        stages[index] = stage_module(index, blocks, model, plan, adapter, mesh, current)
        _add_units(units, stages[index], blocks, ends)
    if empty is not None:
        empty.fill(model, units, names)
    units.release_after_evaluation(model)
    model.forward = ModelRunner(model, plan, mesh, current, list(stages.values()))
    pipeline, timeline = None, Timeline(device)
    if len(plan.stages) > 1:
        model.num_parameters = counts
        pipeline = _pipeline(plan, model, adapter, stages, units, world, timeline)
    return ParallelModel(
        model=model,
        plan=plan,
        adapter=adapter,
        world=world,
        mesh=mesh,
        units=units,
        family=family,
        fused=names,
        timeline=timeline,
        pipeline=pipeline,
        tied=tied,
    )


def parallelize_layers(
    layers: list[nn.Module],
    places: list[LayerPlace],
    span: range,
    plan: ParallelPlan,
    mesh: StageMesh,
    current: CurrentMicroBatch,
    entered: bool,
) -> list[ParallelLayer]:
    """Cuts the layers of one stage and puts a [`ParallelLayer`] around each; `entered` by hidden states, not by
    tokens."""
    blocks: list[ParallelLayer] = []
    # What enters a later stage is moved to its first layer's layout on the way in.
    source = Layout.from_strategy(plan.layers[span.start], mesh.size) if entered else None
    for index in span:
        layer, place, strategy = layers[index], places[index], plan.layers[index]
        views = cut_layer(layer, place.stack, strategy, {"layer": mesh.weights(strategy)}, current.config)
        block = ParallelLayer(
            index=index,
            layer=layer,
            layer_type=place.type(current.config),
            inputs=place.stack.inputs,
            strategy=strategy,
            source=source,
            layout=Layout.from_strategy(strategy, mesh.size),
            mesh=mesh,
            views=views,
            current=current,
            original=layer.forward,
            alone=len(plan.stages) == 1,
        )
        for name in place.stack.attention:
            attach_attention(layer.get_submodule(name), place.stack.heads(current.config), strategy, mesh, block)
        layer.forward = functools.partial(ParallelLayer.__call__, block)
        source = block.layout
        blocks.append(block)
    return blocks


def stage_module(
    index: int,
    blocks: list[ParallelLayer],
    model: PreTrainedModel,
    plan: ParallelPlan,
    adapter: ModelAdapter,
    mesh: StageMesh,
    current: CurrentMicroBatch,
) -> StageModule:
    """The stage of these blocks: the model's own forward from what it receives to what the next stage needs."""
    return StageModule(
        model,
        adapter,
        mesh,
        current,
        index=index,
        layers=range(*plan.stages[index].layers),
        is_first=index == 0,
        is_last=index == len(plan.stages) - 1,
        layouts=(blocks[0].layout, blocks[-1].layout),
    )


def _add_units(
    units: ShardedUnits,
    stage: StageModule,
    blocks: list[ParallelLayer],
    ends: EmbeddingAndHead,
) -> None:
    """Makes a unit of each layer of a stage, then of what it has beside them."""
    for block in blocks:
        units.add(block.layer, block.mesh.weights(block.strategy), block.strategy.sharding, stage=stage.index)
    ends.add_units(units, stage)
    if len(ends.plan.stages) > 1:
        embedding = ends.embedding[0] if stage.is_first else None
        units.prefetch_backward(stage, [block.layer for block in blocks], embedding)


def _untie(model: PreTrainedModel, adapter: ModelAdapter, plan: ParallelPlan, world: WorldMesh) -> TiedWeights | None:
    """Gives the head its own copy of a tied weight where stages lie between it and the embedding; collective."""
    if len(plan.stages) == 1 or not adapter.ties_embeddings(model):
        return None
    embedding, head = adapter.embeddings(model)[0], adapter.head(model)
    first, last = plan.stages[0].ranks, plan.stages[-1].ranks
    group = None
    if first != last:
        joined = world.join([first, last])
        group = joined[0] if joined else None
    head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=head.weight.requires_grad)
    names = {id(module): name for name, module in model.named_modules()}
    return TiedWeights(
        embedding=embedding if dist.get_rank() in first else None,
        head=head if dist.get_rank() in last else None,
        names=(f"{names[id(embedding)]}.weight", f"{names[id(head)]}.weight"),
        group=group,
        uniform=plan.embedding == plan.head,
    )


def _leave_out(model: PreTrainedModel, adapter: ModelAdapter, plan: ParallelPlan, own: list[int]) -> None:
    """Takes out what only stages of other ranks have; what stays keeps its name."""
    kept = {layer for index in own for layer in range(*plan.stages[index].layers)}
    for place in adapter.places(model):
        if place.index not in kept:
            model.base_model.set_submodule(place.name, PipelineIdentityLayer())
    names = {id(module): name for name, module in model.named_modules()}
    gone = []
    if 0 not in own:
        gone += adapter.embeddings(model)
    if len(plan.stages) - 1 not in own:
        gone += [adapter.final_norm(model), adapter.head(model)]
    for module in gone:
        model.set_submodule(names[id(module)], MissingModule())


def _pipeline(
    plan: ParallelPlan,
    model: PreTrainedModel,
    adapter: ModelAdapter,
    stages: dict[int, StageModule],
    units: ShardedUnits,
    world: WorldMesh,
    timeline: Timeline,
) -> Pipeline:
    lists = plan.rank_groups
    shape = PipelineShape.from_plan(plan)
    precision = plan.precision or Precision()
    return Pipeline(
        shape,
        pipeline_rank=shape.rank_group_of_stage[next(iter(stages))],
        stages=stages,
        units=units,
        forward=model.forward,
        group=world.join(lists)[0],
        pairs=neighbour_pairs(world, shape, lists),
        state_features=adapter.state_features(model.base_model.config),
        dtype=DTYPES[precision.compute],
        timeline=timeline,
    )


def _parameter_counts(model: PreTrainedModel) -> Callable[..., int]:
    """`num_parameters` of the whole model, for one of which a rank will have a part."""
    counts = {
        (trainable, without): model.num_parameters(only_trainable=trainable, exclude_embeddings=without)
        for trainable in (False, True)
        for without in (False, True)
    }
    return lambda only_trainable=False, exclude_embeddings=False: counts[only_trainable, exclude_embeddings]


def attach_attention(
    module: nn.Module, heads: Heads, strategy: LayerStrategy, mesh: StageMesh, block: ParallelLayer
) -> None:
    """Puts the registered attention function in front of a module's own kernel."""
    local = AttentionHeads.from_degrees(
        query=heads.query, key_value=heads.key_value, tensor=strategy.tensor, ulysses=strategy.ulysses
    )
    set_key_value_groups(module, local.query, local.sent_key_value)
    module.parallel_attention = attention.ParallelAttention(
        kernel=attention.configured_kernel(module, attention_implementation(module.config)),
        ulysses_group=mesh.strided(strategy.tensor, strategy.ulysses),
        ulysses_degree=strategy.ulysses,
        key_value_copies=local.copies,
        dropout_stream=block.dropout_stream,
        document_bounds=block.document_bounds,
    )
    module.config = copy.copy(module.config)
    set_attention_implementation(module.config, attention.IMPLEMENTATION)


@dataclass(frozen=True, kw_only=True)
class EmbeddingAndHead:
    """Embedding, final norm and head, as far as this rank has them. Tied weights belong to the stage's own unit."""

    embedding: list[nn.Module]
    head: nn.Module | None
    plan: ParallelPlan
    mesh: StageMesh
    tied: bool

    @classmethod
    def of(
        cls, model: PreTrainedModel, adapter: ModelAdapter, plan: ParallelPlan, mesh: StageMesh
    ) -> EmbeddingAndHead:
        """Cuts them over the vocabulary, before anything else takes the place of their forwards."""
        (embedding, *positional), head = adapter.embeddings(model), adapter.head(model)
        first, last = not isinstance(embedding, MissingModule), not isinstance(head, MissingModule)
        tied = first and last and head.weight is embedding.weight
        if first and plan.embedding.tensor > 1:
            embedding_mesh = mesh.weights(plan.embedding)
            parallel_embedding(embedding, embedding_mesh)
            for module in positional:
                whole_module(module, embedding_mesh, "embedding")
            if tied:
                head.weight = embedding.weight
        if last:
            head_mesh = mesh.weights(plan.head)
            if plan.head.tensor > 1:
                whole_module(adapter.final_norm(model), head_mesh, "head")
            Head(
                head,
                head_mesh,
                adapter.logit_transform(model.config),
                tied,
                recompute_logits_in_backward=_several_in_flight(plan),
            )
        return cls(
            embedding=[embedding, *positional] if first else [],
            head=head if last else None,
            plan=plan,
            mesh=mesh,
            tied=tied,
        )

    def add_units(self, units: ShardedUnits, stage: StageModule) -> None:
        """Makes the units that a stage has beside its layers."""
        plan, mesh = self.plan, self.mesh
        alone = stage.is_first and stage.is_last
        # One stage begins its backward right after its forward; in a pipeline other micro-batches may come between.
        if stage.is_first and not self.tied:
            embedding_mesh = mesh.weights(plan.embedding)
            sharding = plan.embedding.sharding
            units.add(self.embedding, embedding_mesh, sharding, stage=stage.index, needed_in_backward=False)
        if stage.is_last and not self.tied:
            head_mesh = mesh.weights(plan.head)
            units.add(self.head, head_mesh, plan.head.sharding, stage=stage.index, stay_gathered=alone)
        # Elsewhere nothing is left for the root but to order the others.
        root = plan.head if stage.is_last else plan.layers[plan.stages[stage.index].layers[0]]
        units.add_root(stage, mesh.weights(root), root.sharding, stage=stage.index, stay_gathered=alone)


def _several_in_flight(plan: ParallelPlan) -> bool:
    """Whether the last stage holds several micro-batches between forward and backward.

    Zero-bubble schedules do too, but go through the head's backward twice: for them its gradients are computed once,
    in the forward.
    """
    if len(plan.stages) == 1 or plan.schedule == "zero_bubble":
        return False
    shape = PipelineShape.from_plan(plan)
    return most_in_flight(actions(shape, plan.micro_batches)[shape.rank_group_of_stage[-1]], len(plan.stages) - 1) > 1
