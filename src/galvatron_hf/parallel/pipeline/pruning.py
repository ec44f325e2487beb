# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Removes from a rank's model the modules that only stages of other ranks need."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn
from transformers import PreTrainedModel
from transformers.distributed.pipeline_parallel import PipelineIdentityLayer

from galvatron_hf.models.adapter import ModelAdapter, base_model
from galvatron_hf.models.slots import MissingModule
from galvatron_hf.parallel.whole_row_stage import prune_whole_rows
from galvatron_hf.plan.resolved import ResolvedStage


def prune_other_stages(model: PreTrainedModel, adapter: ModelAdapter, own: Sequence[ResolvedStage]) -> None:
    """Keeps the modules of this rank's stages, under their names, and replaces all others."""
    if adapter.structure is not None:
        prune_whole_rows(model, adapter.structure, own)
        return
    kept = {index for stage in own for index in stage.span}
    stacks = {part.stack for stage in own for part in stage.parts}
    biases = {
        stack.bias.table: base_model(model).get_submodule(stack.bias.table)
        if stack.name in stacks
        else MissingModule()
        for stack in adapter.stacks
        if stack.bias is not None
    }
    for place in adapter.places(model):
        if place.index not in kept:
            base_model(model).set_submodule(place.name, PipelineIdentityLayer())
    for table, module in biases.items():
        _keep_under_name(base_model(model), table, module)
    gone: list[nn.Module] = []
    begun = [part.stack for stage in own for part in stage.parts if part.is_first]
    ended = [part.stack for stage in own for part in stage.parts if part.is_last]
    here = {id(module) for module in adapter.embeddings(model, begun)}
    gone += [module for module in adapter.embeddings(model) if id(module) not in here]
    for stack in adapter.stacks:
        if stack.name not in ended:  # a dropout may have another place too
            gone += [module for module in adapter.after_layers(model, stack) if list(module.parameters())]
    if not any(stage.is_last for stage in own):
        gone.append(adapter.head(model))
    missing = {id(module): MissingModule() for module in gone}
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if id(module) in missing:
            model.set_submodule(name, missing[id(module)])


def _keep_under_name(owner: nn.Module, name: str, module: nn.Module) -> None:
    """Gives `module` a name inside of `owner`, some of whose modules on the way may be gone."""
    *path, last = name.split(".")
    for part in path:
        children = dict(owner.named_children())
        if part not in children:
            owner.add_module(part, nn.Module())
        owner = owner.get_submodule(part)
    owner.add_module(last, module)


def whole_parameter_counts(model: PreTrainedModel) -> Callable[..., int]:
    """Returns a `num_parameters` that goes on to count the whole model after the pruning."""
    counts = {
        (trainable, without): model.num_parameters(only_trainable=trainable, exclude_embeddings=without)
        for trainable in (False, True)
        for without in (False, True)
    }
    return lambda only_trainable=False, exclude_embeddings=False: counts[only_trainable, exclude_embeddings]
