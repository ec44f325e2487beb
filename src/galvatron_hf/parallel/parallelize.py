# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The whole order in which a plan is put onto a model."""

from __future__ import annotations

import inspect
import os

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from galvatron_hf.models.families import adapter_for
from galvatron_hf.models.fused_weights import FusedNames, split_fused_projections
from galvatron_hf.models.lora import check_has_values, computes_in_bf16, convert_trained_weights, inner_model
from galvatron_hf.parallel.activation.micro_batch import CurrentMicroBatch
from galvatron_hf.parallel.comm.mesh import WorldMesh
from galvatron_hf.parallel.data_parallel.sharding import ShardedUnits
from galvatron_hf.parallel.data_parallel.tied_weights import TiedWeights
from galvatron_hf.parallel.layers.embedding_and_head import EmbeddingAndHead
from galvatron_hf.parallel.layers.float8 import check_float8, make_float8, uses_float8
from galvatron_hf.parallel.layers.stage_layers import add_layer_units, parallelize_layers, units_of_layers
from galvatron_hf.parallel.model import ParallelModel, broadcast_weights
from galvatron_hf.parallel.model_runner import ModelRunner
from galvatron_hf.parallel.pipeline.pruning import prune_other_stages, whole_parameter_counts
from galvatron_hf.parallel.pipeline.runtime import Pipeline
from galvatron_hf.parallel.pipeline.trace import Timeline
from galvatron_hf.parallel.stage_module import StageModule
from galvatron_hf.parallel.validate import check_model, check_plan
from galvatron_hf.parallel.weights.adapted_model import AdaptedModel
from galvatron_hf.parallel.weights.materialize import EmptyModel
from galvatron_hf.parallel.weights.sources import WeightSource
from galvatron_hf.parallel.whole_batch import WholeBatchForward
from galvatron_hf.parallel.whole_row_stage import WholeRowStage
from galvatron_hf.plan import ParallelPlan
from galvatron_hf.utils.allocator import keep_freed_memory
from galvatron_hf.utils.compat import keep_class_name, refuse_numbers_of_parts


def parallelize(
    model: PreTrainedModel,
    plan: ParallelPlan,
    world: WorldMesh | None = None,
    *,
    weights: str | os.PathLike | WeightSource | None = None,
    device: torch.device | str | None = None,
) -> ParallelModel:
    """Rewrites a model in place so that it computes under a plan; collective over all ranks.

    All ranks get the weights of rank 0. A model on the meta device gets its weights here, each rank its own pieces
    alone. Afterwards parameters are DTensors, and `model(...)` takes the same whole batch on every rank, see
    [`WholeBatchForward`]. Under a pipeline each rank keeps the modules of its stages.

    Args:
        model ([`PreTrainedModel`]): a model with a head and a loss, whole on every rank, on its device; or built
            inside `torch.device("meta")`. A PeftModel is rewritten inside, and calls the rewritten model.
        plan ([`ParallelPlan`]): the plan, for as many ranks as the process group has.
        world ([`WorldMesh`], *optional*): the mesh of an earlier call on the same ranks, to use its groups again.
        weights (`str`, `os.PathLike` or [`WeightSource`], *optional*): for a model on the meta device, a folder or an
            id on the Hub with safetensors. The default is the family's own initialisation: the weights that
            `from_config` makes on one process after rank 0's seed.
        device (`torch.device` or `str`, *optional*): for a model on the meta device, the device on which it trains; by
            default the current accelerator, or the CPU if there is none.

    Returns:
        [`ParallelModel`]: runs forward and backward, computes the gradient norm, gathers weights for saving.

    Raises:
        ValueError: if the plan cannot run, or not with this model; the model is untouched then. If the weights do not
            fit the model.

    Example:

    ```python
    parallel = parallelize(model, ParallelPlan.from_json("plan.json"))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for batch in loader:  # the same global batch on every rank
        loss = parallel.forward_backward(batch)
        parallel.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    ```
    """
    check_has_values(model)
    adapter, adapted, model = adapter_for(model), AdaptedModel.from_model(model), inner_model(model)
    check_plan(plan)
    resolved = check_model(model, adapter, plan)
    if adapted is not None and resolved.precision.activations == "bf16" and computes_in_bf16(model):
        convert_trained_weights(model)

    family, empty = type(model), EmptyModel.from_model(model, weights, device)
    device = empty.device if empty is not None else next(model.parameters()).device
    check_float8(model, adapter, plan, device)
    if device.type == "cpu":
        keep_freed_memory()
    world = world or WorldMesh(device.type)
    world.prepare(resolved.groups)
    stages = resolved.stages_of_rank(dist.get_rank())
    mesh = world.stage(stages[0].ranks)

    broadcast_weights(model)
    adapter.prepare_layers(model)
    adapter.join_lookups(model)
    split_fused_projections(model, adapter)
    names, count_parameters = FusedNames.from_model(model, adapter), whole_parameter_counts(model)
    tied = TiedWeights.separate(model, adapter, resolved, world)
    prune_other_stages(model, adapter, stages)

    current = CurrentMicroBatch()
    units = ShardedUnits(resolved.precision, wait_at_end=resolved.is_pipeline)
    ends = EmbeddingAndHead.cut(model, adapter, resolved, mesh)
    if ends.whole:
        first, *later = (stage.index for stage in stages)
        units.add(ends.whole, mesh.weights(resolved.whole_weights), "replicate", stage=first, later_stages=later)
    modules, all_blocks = {}, []
    stage_class = StageModule if adapter.structure is None else WholeRowStage
    for stage in stages:
        if uses_float8(plan):
            for resolved_layer in stage.layers:
                make_float8(adapter.layers(model)[resolved_layer.index], resolved_layer.strategy.tensor, device)
        blocks = parallelize_layers(model, adapter, stage, mesh, current)
        all_blocks += blocks
        module = modules[stage.index] = stage_class(model, adapter, mesh, current, stage)
        add_layer_units(units, blocks, stage.index)
        ends.add_units(units, stage, module)
        units.prefetch_forward(units_of_layers(blocks))
        if resolved.is_pipeline:
            first = next(iter(ends.embedding_of(stage)), None)
            units.prefetch_backward(module, units_of_layers(blocks), first)
    if empty is not None:
        empty.fill(model, units, names)
    units.release_after_evaluation(model)

    runner, pipeline, timeline = (
        ModelRunner(model, resolved, mesh, current, list(modules.values())),
        None,
        Timeline(device),
    )
    if resolved.is_pipeline:
        model.num_parameters = count_parameters
        features = adapter.state_features(model)
        pipeline = Pipeline.from_plan(resolved, world, modules, units, runner, features, timeline)
    model.forward = WholeBatchForward(
        runner,
        plan,
        units,
        timeline,
        inspect.signature(family.forward),
        world.meetings,
        pipeline=pipeline,
        tied=tied,
    )
    keep_class_name(model, family)
    refuse_numbers_of_parts()
    return ParallelModel(
        model=model,
        runner=runner,
        plan=plan,
        resolved=resolved,
        adapter=adapter,
        world=world,
        mesh=mesh,
        units=units,
        family=family,
        fused=names,
        blocks=all_blocks,
        timeline=timeline,
        pipeline=pipeline,
        tied=tied,
        adapted=adapted,
    )
