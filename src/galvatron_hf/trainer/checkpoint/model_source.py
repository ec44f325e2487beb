# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Models that are given by name or without weights: no rank ever holds the whole model."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import nn
from transformers import AutoConfig, PreTrainedModel, TrainingArguments

from galvatron_hf.models.auto_classes import auto_model
from galvatron_hf.models.families import adapter_for
from galvatron_hf.models.lora import inner_model
from galvatron_hf.parallel.weights.materialize import on_meta
from galvatron_hf.parallel.weights.pretrained import pretrained_on_meta
from galvatron_hf.parallel.weights.safetensors import WeightFiles
from galvatron_hf.parallel.weights.sources import FamilyWeights, LaterWeights, WeightSource
from galvatron_hf.trainer.arguments import gives_plan


# Options of `from_pretrained` with which a configuration is found.
_CONFIG_OPTIONS = (
    "cache_dir",
    "force_download",
    "local_files_only",
    "revision",
    "subfolder",
    "token",
    "trust_remote_code",
)


class ModelSource:
    """Makes models from their names, and knows where the weights of models on the meta device come from."""

    def __init__(self):
        self._weights_come_later = False
        self._named: tuple[nn.Module, WeightFiles] | None = None
        self._given: nn.Module | None = None

    def stacks(self) -> dict[str, int]:
        """Returns the layers of each stack of the model that the constructor was given."""
        if self._given is None:
            raise ValueError(
                "a plan in words is made for the model's layers, and the model is not among the constructor's "
                "arguments: pass the model, or the file of a plan"
            )
        model = inner_model(self._given)
        return adapter_for(model).stack_sizes(model)

    def with_model(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Returns the arguments of Trainer's constructor, with a model in place of a model's name."""
        given = args[0] if args else kwargs.get("model")
        if not isinstance(given, (str, os.PathLike)):
            self._given = given
            return args, kwargs
        training_args = args[1] if len(args) > 1 else kwargs.get("args")
        if training_args is None:
            training_args = TrainingArguments("tmp_trainer")  # Trainer's default
            args, kwargs = args[:1], kwargs | {"args": training_args}
        model = self._given = self.model(given, training_args)
        return ((model, *args[1:]), kwargs) if args else (args, kwargs | {"model": model})

    def model(self, given: nn.Module | str | os.PathLike, args: TrainingArguments) -> nn.Module | PreTrainedModel:
        """Returns a given model, or the model of a given name: on the meta device if a plan is applied to it."""
        if not isinstance(given, (str, os.PathLike)):
            return given
        options = getattr(args, "model_init_kwargs", None) or {}
        if args.world_size == 1 and not gives_plan(args):
            where = {name: options[name] for name in _CONFIG_OPTIONS if name in options}
            return auto_model(AutoConfig.from_pretrained(given, **where)).from_pretrained(given, **options)
        model, files = pretrained_on_meta(given, **options)
        self._named = model, files
        return model

    @contextlib.contextmanager
    def resuming(self, resumes: bool) -> Iterator[None]:
        """Leaves weights out while the body runs, if it loads a checkpoint after the plan has been applied."""
        self._weights_come_later = resumes
        try:
            yield
        finally:
            self._weights_come_later = False

    def weights(self, model: nn.Module) -> WeightSource | None:
        """Returns where the weights of a model come from; None if it has them."""
        if not on_meta(model):
            return None
        dtype = next(model.parameters()).dtype
        if self._weights_come_later:
            return LaterWeights(dtype=dtype)
        if self._named is not None and self._named[0] is model:
            return replace(self._named[1], dtype=dtype)
        return FamilyWeights(dtype=dtype)


def moves_to_device(model: nn.Module, parallel: bool) -> bool:
    """Returns whether Trainer moves a model to its device: without weights, it waits for a plan. A model without
    weights that gets no plan raises ValueError.
    """
    if not on_meta(model):
        return True
    if not parallel and getattr(model, "hf_device_map", None) is None:
        raise ValueError(
            f"{type(model).__name__} is on the meta device, and without a plan nothing gives it weights; "
            "give parallel_plan, or build it outside of torch.device('meta')."
        )
    return not parallel
