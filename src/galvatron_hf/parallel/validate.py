# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Refuses plans that cannot run, or that do not fit the model, before anything is changed."""

from __future__ import annotations

import inspect

import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from galvatron_hf.models.adapter import ModelAdapter, StackAdapter, Style
from galvatron_hf.models.heads import Heads
from galvatron_hf.models.llama4 import counts_positions
from galvatron_hf.models.lora import computes_in_bf16
from galvatron_hf.models.packing import rope_of_the_batch
from galvatron_hf.models.parameter_specs import ModelSpecs, ParameterSpec, model_specs
from galvatron_hf.parallel.layers.attention_probe import attention_obstacle
from galvatron_hf.plan import LayerStrategy, ParallelPlan
from galvatron_hf.plan.resolved import ResolvedPlan
from galvatron_hf.plan.supported import require_runnable
from galvatron_hf.utils.compat import attention_implementation


def check_plan(plan: ParallelPlan) -> None:
    """Refuses a plan that the runtime does not run yet, or not on the started processes. The ValueError is one
    sentence with the field and the nearest plan that runs.
    """
    if not dist.is_initialized():
        raise ValueError(
            f"A plan for {plan.world_size} ranks needs a process group; start with accelerate launch or torchrun, "
            "or call torch.distributed.init_process_group."
        )
    require_runnable(plan, dist.get_world_size())
    if plan.precision is not None and (plan.precision.compute == "fp16" or plan.precision.master != "fp32"):
        raise ValueError(
            f"precision {plan.precision.compute!r} with {plan.precision.master!r} master weights is not supported "
            'yet, because it needs loss scaling or loses small updates; use compute "bf16" and master "fp32".'
        )


def check_model(model: PreTrainedModel, adapter: ModelAdapter, plan: ParallelPlan) -> ResolvedPlan:
    """Refuses a plan that does not fit the model, and returns the plan resolved for it; the model stays as it is. The
    ValueError is one sentence with the layer, the reason and the nearest strategy that fits.
    """
    layers, places, specs = adapter.layers(model), adapter.places(model), model_specs(model, adapter)
    if len(layers) != plan.num_layers:
        raise ValueError(
            f"The plan has {plan.num_layers} layers and {type(model).__name__} has {len(layers)}; "
            f"make a plan for {len(layers)} layers."
        )
    stacks = adapter.stack_sizes(model)
    if dict(plan.stacks) != stacks:
        raise ValueError(
            f"The plan has the stacks {dict(plan.stacks)} and {type(model).__name__} has {stacks}; give the plan the "
            "model's stacks."
        )
    experts = adapter.expert_counts(model)
    _check_weights(model, plan)
    _check_kernel(model)
    _check_outputs(model)
    if adapter.structure is not None:
        _check_whole_rows(model, adapter, plan)
    for index, strategy in enumerate(plan.layers):
        _check_attention(index, strategy, layers[index], model, places[index].stack)
        _check_strategy(index, strategy, model, places[index].stack, specs.layers[index])
        _check_regions(layers[index], strategy, places[index].stack, specs.layers[index])
        _check_experts(index, strategy, experts[index], model)
    _check_vocabulary(model, adapter, plan)
    if plan.shares_documents:
        _check_shared_documents(model, adapter)
    resolved = adapter.resolve(model, plan)
    if plan.sequence_groups is not None:
        _check_executions(plan, resolved)
    _check_shards(specs, resolved)
    if len(plan.stages) > 1 and adapter.structure is None:
        _check_owners(model, adapter)
        _check_split_backward(model, adapter, plan)
    return resolved


def _check_whole_rows(model: PreTrainedModel, adapter: ModelAdapter, plan: ParallelPlan) -> None:
    """Refuses degrees with which a rank would not have whole rows where it needs them, and stages that the layers do
    not allow.
    """
    (stack,), name = adapter.stacks, type(model).__name__
    for index, strategy in enumerate(plan.layers if not stack.cut else ()):
        for degree in ("tensor", "ulysses"):
            if getattr(strategy, degree) > 1:
                raise ValueError(
                    f"Layer {index} has {degree} {getattr(strategy, degree)}, but {name} runs on whole rows, because "
                    f"{stack.unsupported}; use {degree} 1."
                )
    for owner, strategy in (("embedding", plan.embedding), ("head", plan.head)):
        if strategy.tensor > 1:
            raise ValueError(
                f"The {owner} has tensor {strategy.tensor}, but what {name} computes before and after its layers runs "
                "on whole rows; use tensor 1."
            )
    obstacle = adapter.structure.pipeline_obstacle
    if len(plan.stages) > 1 and obstacle is not None:
        raise ValueError(
            f"The plan has {len(plan.stages)} stages, but {name} cannot be cut into stages, because {obstacle}; use "
            "one stage."
        )


def _check_executions(plan: ParallelPlan, resolved: ResolvedPlan) -> None:
    """Refuses groups that may only exchange heads, if no number of ranks divides those of every layer."""
    groups = plan.sequence_groups
    if groups.kinds == ("ulysses",) and groups.max_degree > 1:
        if not any(resolved.exchanges_heads(degree) for degree in range(2, groups.max_degree + 1)):
            heads = sorted({layer.heads.query // layer.strategy.ulysses for layer in resolved.layers})
            raise ValueError(
                f"sequence_groups has kinds ['ulysses'], but no number of ranks up to {groups.max_degree} divides the "
                f"{heads} attention heads of a rank in every layer; add 'ring' to kinds."
            )


def sharing_obstacle(model: PreTrainedModel, adapter: ModelAdapter) -> str | None:
    """Returns why ranks cannot share the documents of a model: its rows cannot be packed, or its attention needs more
    than documents. None if they can.
    """
    packing, name, rope = adapter.packing(model), type(model).__name__, rope_of_the_batch(model.config)
    if packing.obstacle is not None:
        return f"{name} {packing.obstacle}"
    if rope is not None:
        return f"{rope!r} rotary embeddings depend on the longest row of the batch"
    if packing.pairs is not None:
        return f"{name} has pairs of documents"
    (stack,) = adapter.stacks
    return attention_obstacle(type(model), model.config, stack.causal, shared=True)


def _check_shared_documents(model: PreTrainedModel, adapter: ModelAdapter) -> None:
    obstacle = sharing_obstacle(model, adapter)
    if obstacle is not None:
        raise ValueError(
            f"Ranks cannot share documents, as context and sequence_groups have them do, because {obstacle}; use "
            "context=1 without sequence_groups, and packing='auto'."
        )


def _check_weights(model: PreTrainedModel, plan: ParallelPlan) -> None:
    """Refuses weights that cannot be sharded together. A model with adapters may be in bf16 but for these, if it is
    computed in bf16.
    """
    if getattr(model, "is_quantized", False):
        raise ValueError(
            f"{type(model).__name__} is quantised, and quantised weights cannot be sharded; load it in bf16 or fp32."
        )
    half = plan.precision is not None and plan.precision.activations == "bf16"
    dtypes = {parameter.dtype for parameter in model.parameters()}
    if len(dtypes) > 1 and not (half and computes_in_bf16(model)):
        names = ", ".join(sorted(str(dtype) for dtype in dtypes))
        raise ValueError(
            f"The weights have several dtypes ({names}), which cannot be gathered together; call model.float() first."
        )


def _check_kernel(model: PreTrainedModel) -> None:
    """Refuses a configuration under which the family does not call its attention function."""
    if getattr(model.config, "reorder_and_upcast_attn", False) and attention_implementation(model.config) == "eager":
        raise ValueError(
            "reorder_and_upcast_attn=True with eager attention bypasses the registered attention function; "
            "set it to False or use attn_implementation='sdpa'."
        )


def _check_outputs(model: PreTrainedModel) -> None:
    """Refuses a configuration that asks for outputs beside loss and logits."""
    for name in ("output_hidden_states", "output_attentions"):
        if getattr(model.config, name, False):
            raise ValueError(
                f"The model's config has {name}=True, and under a parallel plan a model returns its loss and logits "
                f"alone; set model.config.{name} to False."
            )


def _check_attention(
    index: int, strategy: LayerStrategy, layer: nn.Module, model: PreTrainedModel, stack: StackAdapter
) -> None:
    """Refuses Ulysses for attention modules that mix heads."""
    for attention in stack.attention if strategy.ulysses > 1 else ():
        reason = _whole_sequence_need(layer.get_submodule(attention), stack)
        if reason is not None:
            raise ValueError(
                f"Layer {index} has ulysses {strategy.ulysses}, but the attention of {type(model).__name__} {reason}, "
                "which pieces of a sequence do not support yet; use ulysses 1."
            )


def _whole_sequence_need(attention: nn.Module, stack: StackAdapter) -> str | None:
    """Says why an attention module cannot compute some of its heads alone; None if it can."""
    own = [name for name, _ in attention.named_parameters(recurse=False) if name not in stack.per_head]
    if own:
        return f"has a weight {own[0]} for all heads"
    if "position_ids" in inspect.signature(attention.forward).parameters:
        return "looks at the position_ids of the whole sequence"
    if counts_positions(attention):
        return "counts the positions of a row from its first"
    return None


def _check_strategy(
    index: int,
    strategy: LayerStrategy,
    model: PreTrainedModel,
    stack: StackAdapter,
    specs: tuple[ParameterSpec, ...],
) -> None:
    """Refuses degrees that the stack's heads and features cannot share."""
    name, heads = type(model).__name__, stack.heads(stack.config(model))
    if strategy.tensor > 1 and not stack.styles:
        raise ValueError(
            f"Layer {index} has tensor {strategy.tensor}, but {name} cannot be cut by tensor: {stack.unsupported}; "
            f"use tensor 1 with ulysses {strategy.tensor}."
        )
    if not heads.supports(strategy.tensor, strategy.ulysses):
        tensor, ulysses = heads.largest(strategy.tensor, strategy.ulysses)
        raise ValueError(
            f"Layer {index} has tensor {strategy.tensor} and ulysses {strategy.ulysses}, but {name} has {heads.query} "
            f"attention heads and {heads.key_value} key/value heads, which they do not share evenly; "
            f"use tensor {tensor} and ulysses {ulysses}."
        )
    if Style.ALL_FEATURES in stack.styles.values() and strategy.tensor > heads.key_value:
        raise ValueError(
            f"Layer {index} has tensor {strategy.tensor}, but {name} has norms over all of its {heads.key_value} "
            f"key/value heads, which more tensor ranks cannot share; use tensor {heads.key_value}."
        )
    for spec in (one for one in specs if one.mesh == "layer"):
        _check_features(index, strategy.tensor, name, heads, spec)


def _check_features(index: int, tensor: int, name: str, heads: Heads, spec: ParameterSpec) -> None:
    cut = spec.weight_shape.cut_dim(tensor)
    if cut is None or spec.shape[cut] % tensor == 0:
        return
    features = spec.shape[cut]
    fitting = max(t for t in range(1, tensor) if features % t == 0 and heads.supports_tensor(t))
    raise ValueError(
        f"Layer {index} has tensor {tensor}, which does not divide the {features} features of {spec.family_name} that "
        f"tensor ranks cut in {name}; use {fitting}."
    )


def _check_regions(
    layer: nn.Module, strategy: LayerStrategy, stack: StackAdapter, specs: tuple[ParameterSpec, ...]
) -> None:
    """Refuses tensor ranks for a layer with a weight whose cut the family does not declare."""
    for spec in specs:
        covered = stack.style(spec.owner) is not None or stack.is_per_head(spec.name) or spec.mesh == "whole"
        covered = covered or spec.owner == stack.own_bias
        if strategy.tensor > 1 and stack.in_region(spec.owner, layer) and not covered:
            raise ValueError(
                f"{type(layer).__name__} has a weight {spec.name} that its family's tensor-parallel plan does not "
                "cover; use tensor 1 (ulysses and sharding need no such plan)."
            )


def _check_experts(index: int, strategy: LayerStrategy, count: int, model: PreTrainedModel) -> None:
    """Refuses an expert degree for a dense layer, and one that does not share the experts evenly."""
    if strategy.expert > 1 and not count:
        raise ValueError(
            f"Layer {index} has expert {strategy.expert}, but this layer of {type(model).__name__} has no experts; "
            "use expert 1."
        )
    if count % strategy.expert:
        degrees = range(1, strategy.expert)
        fitting = max(d for d in degrees if count % d == 0 and (d == 1 or d % strategy.tensor == 0))
        raise ValueError(
            f"Layer {index} has expert {strategy.expert}, which does not divide the {count} experts of "
            f"{type(model).__name__}; use expert {fitting}."
        )


def _check_vocabulary(model: PreTrainedModel, adapter: ModelAdapter, plan: ParallelPlan) -> None:
    if adapter.ties_embeddings(model):
        try:
            plan.check_tied()
        except ValueError as error:
            raise ValueError(f"{type(model).__name__} ties its embeddings: {error}.") from None


def _check_shards(specs: ModelSpecs, plan: ResolvedPlan) -> None:
    """Refuses a shard degree that does not divide the pieces of the tensor ranks evenly."""
    owners = [("embedding", plan.embedding, specs.embedding), ("head", plan.head, specs.head)]
    owners += [(f"layer {one.index}", one, specs.layers[one.index]) for one in plan.layers]
    for owner, resolved, of_owner in owners:
        for spec in of_owner:
            weight, mesh = spec.weight_shape, resolved.experts if spec.mesh == "experts" else resolved.weights
            if not weight.can_be_sharded(mesh.tensor, mesh.shard):
                degrees = range(1, resolved.weights.shard)
                fits = [d for d in degrees if mesh.shard % d == 0 and weight.can_be_sharded(mesh.tensor, d)]
                degree = "expert" if spec.mesh == "experts" else "tensor"
                raise ValueError(
                    f"The {owner} has {degree} {mesh.tensor} and {mesh.shard} sharding ranks, which cannot cut its "
                    f"{spec.name} of shape {weight.shape} into even pieces; use shard_degree {max(fits, default=1)}."
                )


def _check_split_backward(model: PreTrainedModel, adapter: ModelAdapter, plan: ParallelPlan) -> None:
    """Refuses zero-bubble schedules for layers that share a bias, whose graph a split backward would run twice."""
    if plan.schedule == "zero_bubble" and any(stack.bias is not None for stack in adapter.stacks):
        raise ValueError(
            f"schedule 'zero_bubble' splits the backward of a layer, and the layers of {type(model).__name__} share a "
            "bias of scores; use schedule '1f1b'."
        )


def _check_owners(model: PreTrainedModel, adapter: ModelAdapter) -> None:
    """Refuses a pipeline for a model with a weight that belongs to no layer and no end."""
    owners = [*adapter.embeddings(model), *adapter.layers(model), *adapter.final_norms(model), adapter.head(model)]
    owners += adapter.whole_modules(model).values()
    owned = {id(parameter) for owner in owners for parameter in owner.parameters()}
    for name, parameter in model.named_parameters():
        if id(parameter) not in owned:
            raise ValueError(
                f"{type(model).__name__} has the weight {name} outside embedding, layers, final norm and head, and no "
                "adapter says which pipeline stage computes with it; use one stage."
            )
