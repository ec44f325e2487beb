# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Families whose layers no adapter cuts: linear attention, state spaces, masks and caches of their own, no
tensor-parallel plan. If tensor, Ulysses and context degrees are 1, a rank has whole rows from the token ids to the
logits, and the family's own forward computes them; what it passes to its layers is its own affair. Data parallelism,
sharding, recompute and, as far as the layers pass on their hidden states alone, pipelines need no more than the list
of layers, which [`find_structure`] finds.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from galvatron_hf.models.adapter import ExpertsAdapter, ModelAdapter, StackAdapter, base_model
from galvatron_hf.models.heads import Heads
from galvatron_hf.models.losses import NEXT_TOKEN
from galvatron_hf.models.structure import find_structure
from galvatron_hf.utils.compat import is_experts_module, router_output


@dataclass(frozen=True, kw_only=True)
class WholeRowAdapter(ModelAdapter):
    """Describes a family that runs on whole rows: `structure` says how it runs its layers. `fused_head` says whether
    the loss is computed from the head's input by chunks; else it is that of the logits that the family returns.
    """

    fused_head: bool = True

    def join_lookups(self, model: PreTrainedModel) -> None:
        """Leaves the family's modules as they are."""

    def beside_lookups(self, model: PreTrainedModel, stacks: Collection[str] | None = None) -> list[nn.Module]:
        """Returns none: other modules before the layers belong to the stage's own unit."""
        return []

    def after_layers(self, model: PreTrainedModel, stack: StackAdapter) -> list[nn.Module]:
        """Returns a module with all weights that belong to no layer, embedding or head."""
        ends = {id(weight) for end in (*self.embeddings(model), self.head(model)) for weight in end.parameters()}
        rest = nn.Module()
        for name in (*self.structure.before, *self.structure.after, *self.structure.unused):
            for weight_name, weight in model.get_submodule(name).named_parameters(recurse=False):
                if id(weight) not in ends:
                    rest.register_parameter(f"{name}.{weight_name}".replace(".", "_"), weight)
        return [rest]

    def other_inputs(self, batch: Mapping[str, Any], rows: int) -> list[str]:
        return [
            name
            for name, value in batch.items()
            if isinstance(value, torch.Tensor) and name in self.structure.inputs and value.shape[:1] == (rows,)
        ]

    def head(self, model: PreTrainedModel) -> nn.Module:
        return model.get_submodule(self.structure.head)

    def state_features(self, model: PreTrainedModel) -> dict[str, int]:
        return {self.stacks[0].name: self.structure.features}


def whole_row_adapter(model: PreTrainedModel, reason: str, logit_transform) -> WholeRowAdapter:
    """Returns the adapter of a family that runs on whole rows, because no adapter cuts its layers for a `reason`.
    `logit_transform` is what the family is known to do after its head.

    Raises:
        ValueError: if it is not clear how the family runs its layers.
    """
    structure, name = find_structure(model), type(model).__name__
    base = next(name for name, module in model.named_modules() if module is base_model(model))
    if not structure.layers.startswith(f"{base}."):
        raise ValueError(
            f"{name} has its layers in {structure.layers}, outside its base model {base!r}; train it with "
            "transformers.Trainer."
        )
    _check_shared_weights(model, structure.layers)
    transform = logit_transform(model.config)
    return WholeRowAdapter(
        stacks=(
            StackAdapter(
                layers=structure.layers.removeprefix(f"{base}."),
                attention=(),
                regions=(),
                experts=_experts(model, structure.layers),
                key_value=(),
                heads=lambda config: Heads(query=1, key_value=1, dim=structure.features),
                unsupported=reason,
                causal=structure.loss is NEXT_TOKEN,
            ),
        ),
        logit_transform=logit_transform,
        loss=structure.loss,
        structure=structure,
        fused_head=structure.raw is not None and torch.allclose(transform(structure.raw), structure.logits, rtol=1e-5),
    )


def _check_shared_weights(model: PreTrainedModel, layers: str) -> None:
    """Refuses a weight that several layers share: each layer gathers its own."""
    owners: dict[int, str] = {}
    for index, layer in enumerate(model.get_submodule(layers)):
        for name, weight in layer.named_parameters():
            first = owners.setdefault(id(weight), f"{index}.{name}")
            if not first.startswith(f"{index}."):
                raise ValueError(
                    f"{type(model).__name__} has one weight in several layers ({layers}.{first} and "
                    f"{layers}.{index}.{name}), which cannot be sharded layer by layer yet; train it with "
                    "transformers.Trainer."
                )


def _experts(model: PreTrainedModel, layers: str) -> ExpertsAdapter | None:
    """Returns where a family's experts are if they can be spread over ranks; else they are weights like others."""
    kind, index = router_output(model)
    for layer in model.get_submodule(layers):
        for path, module in layer.named_modules():
            if is_experts_module(module):
                block = path.rpartition(".")[0]
                beside = layer.get_submodule(block).named_children()
                routers = [child for child, inner in beside if kind is not None and isinstance(inner, kind)]
                if len(routers) != 1:
                    return None
                return ExpertsAdapter(module=path, router=f"{block}.{routers[0]}", logits=index)
    return None
