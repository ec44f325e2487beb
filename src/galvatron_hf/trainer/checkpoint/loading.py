# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Models given by name or without weights: no rank ever has the whole."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, TrainingArguments

from galvatron_hf.models.families import AUTO_MODEL
from galvatron_hf.parallel.weights.materialize import on_meta
from galvatron_hf.parallel.weights.pretrained import pretrained_on_meta
from galvatron_hf.parallel.weights.safetensors import WeightFiles
from galvatron_hf.parallel.weights.sources import FamilyWeights, LaterWeights, WeightSource
from galvatron_hf.trainer.arguments import requested_plan


class LoadingMixin:
    """The part of [`GalvatronMixin`] that takes models without weights; see there."""

    _named: tuple[nn.Module, WeightFiles] | None = None
    _weights_come_later = False

    def _with_model(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """The Trainer's own arguments, with a model in the place of a model's name."""
        given = args[0] if args else kwargs.get("model")
        if not isinstance(given, (str, os.PathLike)):
            return args, kwargs
        training_args = args[1] if len(args) > 1 else kwargs.get("args")
        if training_args is None:
            training_args = TrainingArguments("tmp_trainer")  # as Trainer would make
            args, kwargs = args[:1], kwargs | {"args": training_args}
        model = self._model_of_name(given, training_args)
        return ((model, *args[1:]), kwargs) if args else (args, kwargs | {"model": model})

    def _model_of_name(self, name: str | os.PathLike, args: TrainingArguments) -> PreTrainedModel:
        options = getattr(args, "model_init_kwargs", None) or {}
        if args.world_size == 1 and requested_plan(args) is None:
            return AUTO_MODEL.from_pretrained(name, **options)
        model, files = pretrained_on_meta(name, **options)
        self._named = model, files
        return model

    def call_model_init(self, trial=None) -> nn.Module:
        """As Trainer's; `model_init` may return a model's name, or a model on the meta device."""
        model = super().call_model_init(trial)
        return self._model_of_name(model, self.args) if isinstance(model, (str, os.PathLike)) else model

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        if self._runs_parallel() and on_meta(model):
            return  # its weights come to the device with the plan
        offloaded = getattr(model, "hf_device_map", None) is not None
        if not self._runs_parallel() and not offloaded and on_meta(model):
            raise ValueError(
                f"{type(model).__name__} is on the meta device, and without a plan nothing gives it weights; "
                "give parallel_plan, or build it outside of torch.device('meta')."
            )
        super()._move_model_to_device(model, device)

    def _weight_source(self) -> WeightSource | None:
        """Where the weights of `self.model` come from; None if it has them."""
        if not on_meta(self.model):
            return None
        dtype = next(self.model.parameters()).dtype
        if self._weights_come_later:
            return LaterWeights(dtype=dtype)
        if self._named is not None and self._named[0] is self.model:
            return replace(self._named[1], dtype=dtype)
        return FamilyWeights(dtype=dtype)
