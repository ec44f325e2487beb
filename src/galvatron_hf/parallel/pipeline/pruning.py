# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Removes from a rank's model the modules that only stages of other ranks need."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.distributed.pipeline_parallel import PipelineIdentityLayer

from galvatron_hf.models.adapter import ModelAdapter, base_model
from galvatron_hf.plan.resolved import ResolvedStage


class MissingModule(nn.Module):
    """Replaces a module that another stage has; its output, on the device of its input, changes no sum."""

    def forward(self, *args, **kwargs) -> torch.Tensor:
        given = next((one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor)), None)
        return torch.zeros((), device=None if given is None else given.device)


def prune_other_stages(model: PreTrainedModel, adapter: ModelAdapter, own: Sequence[ResolvedStage]) -> None:
    """Keeps the modules of this rank's stages, under their names, and replaces all others."""
    kept = {index for stage in own for index in stage.span}
    for place in adapter.places(model):
        if place.index not in kept:
            base_model(model).set_submodule(place.name, PipelineIdentityLayer())
    names, gone = {id(module): name for name, module in model.named_modules()}, []
    if not any(stage.is_first for stage in own):
        gone += adapter.embeddings(model)
    if not any(stage.is_last for stage in own):
        gone += [adapter.final_norm(model), adapter.head(model)]
    for module in gone:
        model.set_submodule(names[id(module)], MissingModule())


def whole_parameter_counts(model: PreTrainedModel) -> Callable[..., int]:
    """Returns a `num_parameters` that goes on to count the whole model after the pruning."""
    counts = {
        (trainable, without): model.num_parameters(only_trainable=trainable, exclude_embeddings=without)
        for trainable in (False, True)
        for without in (False, True)
    }
    return lambda only_trainable=False, exclude_embeddings=False: counts[only_trainable, exclude_embeddings]
