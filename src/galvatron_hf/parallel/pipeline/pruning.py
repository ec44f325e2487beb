# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Removes from a rank's model the modules that only stages of other ranks need."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
