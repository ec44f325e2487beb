# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""A model with PEFT's adapters as it was given: the names of its weights, and their form in PEFT's files."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from galvatron_hf.models.lora import has_adapters, inner_model, is_added, is_peft_model


_PREFIX = "base_model.model."  # of the names in a PeftModel, and in PEFT's files


@dataclass(frozen=True, kw_only=True)
class AdaptedModel:
    """Holds a copy of a model with adapters, with parameters on the meta device.

    Attributes:
        model (`nn.Module`): the copy: a PeftModel, or a model with adapters inside.
        names (`tuple[str, ...]`): the weights that a checkpoint has, named as in the model inside: those of adapters
            and copied modules, and others that are trained.
    """

    model: nn.Module
    names: tuple[str, ...]

    @classmethod
    def from_model(cls, model: nn.Module) -> AdaptedModel | None:
        """Returns None for a model without adapters."""
        if not has_adapters(model):
            return None
        empty = {
            id(weight): nn.Parameter(torch.empty_like(weight, device="meta"), requires_grad=weight.requires_grad)
            for weight in model.parameters()
        }
        made, weights = copy.deepcopy(model, dict(empty)), inner_model(model).named_parameters()
        vars(inner_model(made)).pop("forward", None)  # TRL's, whose closure would run the model that was copied
        return cls(model=made, names=tuple(name for name, one in weights if is_added(name) or one.requires_grad))

    def copy_with(self, weights: Mapping[str, torch.Tensor]) -> nn.Module:
        """Returns a copy of the model that has the given weights, named as in the model inside; others stay on the
        meta device.
        """
        made = copy.deepcopy(self.model)
        inner = inner_model(made)
        inner.load_state_dict(dict(weights), strict=False, assign=True)
        inner.tie_weights()
        return made

    def outer_names(self, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns weights by their names in the given model."""
        prefix = _PREFIX if is_peft_model(self.model) else ""
        return {f"{prefix}{name}": tensor for name, tensor in weights.items()}

    def read(self, folder: str | os.PathLike) -> dict[str, torch.Tensor]:
        """Reads PEFT's files of all adapters in a folder; returns their weights, named as in the model inside.

        Raises:
            ValueError: if the folder has no files of an adapter, or lacks a weight.
        """
        from peft import load_peft_weights, set_peft_model_state_dict
        from peft.utils import CONFIG_NAME

        weights = dict(inner_model(self.model).named_parameters())
        added = {name: torch.empty_like(weights[name], device="cpu") for name in self.names}
        made, missing = self.copy_with(added), set()
        for adapter in made.peft_config:
            path = Path(folder) / adapter
            path = path if (path / CONFIG_NAME).is_file() else Path(folder)
            if not (path / CONFIG_NAME).is_file():
                raise ValueError(f"{folder} has no {CONFIG_NAME}; load a folder that save_model has written.")
            found = load_peft_weights(str(path), device="cpu")
            if not is_peft_model(made):
                found = {name.removeprefix(_PREFIX): tensor for name, tensor in found.items()}
            own = [name for name in self.names if f".{adapter}." in name]
            try:
                lacks = set(set_peft_model_state_dict(made, found, adapter_name=adapter).missing_keys)
            except (KeyError, RuntimeError) as error:
                raise ValueError(
                    f"{path} has another adapter ({' '.join(str(error).split())[:200]}); load adapters of the same "
                    "configuration."
                ) from error
            missing |= self.outer_names(dict.fromkeys(own)).keys() & lacks
        if missing:
            raise ValueError(f"{folder} does not have {min(missing)}; load adapters of the same configuration.")
        return {name: inner_model(made).get_parameter(name).detach() for name in self.names if is_added(name)}
