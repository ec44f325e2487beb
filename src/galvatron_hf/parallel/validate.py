# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""What is refused before anything is changed: plans that cannot run, and plans that do not fit the model."""

from __future__ import annotations

import inspect
from dataclasses import replace

import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from galvatron_hf.models.adapter import DecoderAdapter, Heads, Style
from galvatron_hf.plan import LayerStrategy, ParallelPlan
from galvatron_hf.plan.layout import second_cut
from galvatron_hf.plan.supported import require_runnable
from galvatron_hf.utils.compat import attention_implementation


def check_plan(plan: ParallelPlan) -> None:
    """Refuses what the runtime does not run yet.

    Raises:
        ValueError: one sentence with the field and the nearest plan that runs.
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


def check_model(model: PreTrainedModel, adapter: DecoderAdapter, plan: ParallelPlan) -> None:
    """Refuses a plan that does not fit the model, before the model is touched.

    Raises:
        ValueError: one sentence with the layer, the reason and the nearest strategy that fits.
    """
    layers = list(model.base_model.get_submodule(adapter.layers))
    if len(layers) != plan.num_layers:
        raise ValueError(
            f"The plan has {plan.num_layers} layers and {type(model).__name__} has {len(layers)}; "
            f"make a plan for {len(layers)} layers."
        )
    if getattr(model, "is_quantized", False):
        raise ValueError(
            f"{type(model).__name__} is quantised, and quantised weights cannot be sharded; load it in bf16 or fp32."
        )
    dtypes = {parameter.dtype for parameter in model.parameters()}
    if len(dtypes) > 1:
        names = ", ".join(sorted(str(dtype) for dtype in dtypes))
        raise ValueError(f"The weights have several dtypes ({names}), which no unit holds; call model.float() first.")
    for index, strategy in enumerate(plan.layers):
        _check_attention(index, strategy, layers[index], model, adapter)
        _check_strategy(index, strategy, model, adapter)
    _check_regions(layers[0], adapter, plan)
    _check_vocabulary(model, plan)
    _check_shards(model, adapter, plan)
    if len(plan.stages) > 1:
        _check_owners(model, adapter)
    if getattr(model.config, "reorder_and_upcast_attn", False) and attention_implementation(model.config) == "eager":
        raise ValueError(
            "reorder_and_upcast_attn=True with eager attention bypasses the registered attention function; "
            "set it to False or use attn_implementation='sdpa'."
        )


def _check_attention(
    index: int, strategy: LayerStrategy, layer: nn.Module, model: PreTrainedModel, adapter: DecoderAdapter
) -> None:
    """Every layer needs an attention module to stand in for, and Ulysses one that looks at its heads alone."""
    name = type(model).__name__
    modules = dict(layer.named_modules())
    if adapter.attention not in modules:
        raise ValueError(
            f"Layer {index} of {name} is a {type(layer).__name__} without {adapter.attention!r}, and layers of other "
            "kinds than attention are not supported yet; train it with transformers.Trainer."
        )
    attention = modules[adapter.attention]
    if strategy.ulysses == 1:
        return
    own = [parameter for parameter, _ in attention.named_parameters(recurse=False)]
    reason = None
    if own:
        reason = f"has a weight {own[0]} for all heads"
    elif "position_ids" in inspect.signature(attention.forward).parameters:
        reason = "looks at the position_ids of the whole sequence"
    if reason is not None:
        raise ValueError(
            f"Layer {index} has ulysses {strategy.ulysses}, but the attention of {name} {reason}, which pieces of a "
            "sequence do not support yet; use ulysses 1."
        )


def _check_strategy(index: int, strategy: LayerStrategy, model: PreTrainedModel, adapter: DecoderAdapter) -> None:
    name, config = type(model).__name__, model.base_model.config
    if strategy.tensor > 1 and not adapter.styles:
        raise ValueError(
            f"Layer {index} has tensor {strategy.tensor}, but {name} cannot be cut by tensor: {adapter.unsupported}; "
            f"use tensor 1 with ulysses {strategy.tensor}."
        )
    heads = Heads.of(config)
    if not heads.supports(strategy.tensor, strategy.ulysses):
        tensor, ulysses = heads.largest(strategy.tensor, strategy.ulysses)
        raise ValueError(
            f"Layer {index} has tensor {strategy.tensor} and ulysses {strategy.ulysses}, but {name} has {heads.query} "
            f"attention heads and {heads.key_value} key/value heads, which they do not share evenly; "
            f"use tensor {tensor} and ulysses {ulysses}."
        )
    if strategy.tensor > 1:
        _check_features(index, strategy, model, adapter)


def _check_features(index: int, strategy: LayerStrategy, model: PreTrainedModel, adapter: DecoderAdapter) -> None:
    config = model.base_model.config
    features = getattr(config, "n_inner", None) or getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    if features % strategy.tensor:
        fitting = max(
            t for t in range(1, strategy.tensor) if features % t == 0 and Heads.of(config).supports_tensor(t)
        )
        raise ValueError(
            f"Layer {index} has tensor {strategy.tensor}, which does not divide the {features} features between the "
            f"two MLP projections of {type(model).__name__}; use {replace(strategy, tensor=fitting).tensor}."
        )


def _check_regions(layer: nn.Module, adapter: DecoderAdapter, plan: ParallelPlan) -> None:
    """Every weight inside a tensor-parallel region must have a declared style."""
    if all(strategy.tensor == 1 for strategy in plan.layers):
        return
    for name, _ in layer.named_parameters():
        module = name.rsplit(".", 1)[0]
        inside = any(module == region or module.startswith(f"{region}.") for region in adapter.regions)
        if inside and adapter.part_style(module) is None:
            raise ValueError(
                f"{type(layer).__name__} has a weight {name} that its family's tensor-parallel plan does not cover; "
                "use tensor 1 (ulysses and sharding need no such plan)."
            )


def _check_vocabulary(model: PreTrainedModel, plan: ParallelPlan) -> None:
    if model.get_output_embeddings().weight is model.get_input_embeddings().weight:
        try:
            plan.check_tied()
        except ValueError as error:
            raise ValueError(f"{type(model).__name__} ties its embeddings: {error}.") from None


def _check_shards(model: PreTrainedModel, adapter: DecoderAdapter, plan: ParallelPlan) -> None:
    """Vectors that tensor ranks have cut must be cut evenly once more by the sharding ranks."""
    ranks, layers = len(plan.stages[0].ranks), model.base_model.get_submodule(adapter.layers)
    places = [("embedding", plan.embedding, _vectors_of(model.get_input_embeddings()))]
    places.append(("head", plan.head, _vectors_of(model.get_output_embeddings())))
    for index, strategy in enumerate(plan.layers):
        vectors = _cut_vectors(layers[index], adapter, model.base_model.config, strategy.tensor)
        places.append((f"layer {index}", strategy, vectors))
    for where, strategy, vectors in places:
        degree = strategy.resolved_shard_degree(ranks)
        if strategy.tensor == 1 or degree == 1:
            continue
        for size in vectors:
            if second_cut((size,), strategy.tensor, degree) is None:
                fits = [d for d in range(1, degree) if degree % d == 0 and size % (strategy.tensor * d) == 0]
                fitting = max(fits, default=1)
                raise ValueError(
                    f"The {where} has tensor {strategy.tensor} and {degree} sharding ranks, which cannot cut its bias "
                    f"of {size} elements into even pieces; use shard_degree {fitting}."
                )


def _check_owners(model: PreTrainedModel, adapter: DecoderAdapter) -> None:
    """Every weight must be on a stage: that of its layer, the embedding's or the head's."""
    base = model.base_model
    owners = [model.get_input_embeddings(), model.get_output_embeddings(), base.get_submodule(adapter.layers)]
    owners += [base.get_submodule(name) for name in (adapter.final_norm, *adapter.positional)]
    owned = {id(parameter) for owner in owners for parameter in owner.parameters()}
    for name, parameter in model.named_parameters():
        if id(parameter) not in owned:
            raise ValueError(
                f"{type(model).__name__} has the weight {name} beside embedding, layers, final norm and head, and no "
                "adapter says which pipeline stage computes with it; use one stage."
            )


def _vectors_of(module: nn.Module) -> list[int]:
    return [parameter.shape[0] for parameter in module.parameters() if parameter.ndim == 1]


def _cut_vectors(layer: nn.Module, adapter: DecoderAdapter, config, tensor: int) -> list[int]:
    """Sizes of a layer's biases that tensor ranks cut, those of fused projections by part."""
    sizes = []
    for name, module in layer.named_modules():
        if adapter.styles.get(name) is not Style.COLUMN or getattr(module, "bias", None) is None:
            continue
        copied = name in adapter.key_value and Heads.of(config).key_value < tensor
        parts = adapter.fused[name].sizes(config) if name in adapter.fused else (module.bias.shape[0],)
        sizes += [] if copied else parts
    return sizes
