# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Families whose own forward runs on whole rows: it computes a rank's rows from the token ids to the first layer, and
from the last layer to the logits. What it does there is its own affair. Data parallelism, sharding, recompute and, as
far as the layers pass on their hidden states alone, pipelines need no more than the list of layers, which
[`find_structure`] finds. Layers with a table are cut as those of other families, and hidden states are moved to and
from their layouts. Others compute whole rows too (linear attention, state spaces, masks and caches of their own).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from galvatron_hf.models.adapter import ModelAdapter, StackAdapter, StackInputs, base_model
from galvatron_hf.models.family_checks import check_attention
from galvatron_hf.models.heads import Heads
from galvatron_hf.models.input_names import AUDIO, IMAGES
from galvatron_hf.models.layer_tables import find_experts, table_of_layers
from galvatron_hf.models.losses import NEXT_TOKEN
from galvatron_hf.models.packing import Packing
from galvatron_hf.models.structure import Structure, find_structure
from galvatron_hf.models.trial_run import image_config


@dataclass(frozen=True, kw_only=True)
class WholeRowAdapter(ModelAdapter):
    """Describes a family that runs on whole rows: `structure` says how it runs its layers. `fused_head` says whether
    the loss is computed from the head's input by chunks; else it is that of the logits that the family returns.
    """

    fused_head: bool = True

    def join_lookups(self, model: PreTrainedModel) -> None:
        """Leaves the family's modules as they are."""

    def lookups(self, model: PreTrainedModel, stacks: Collection[str] | None = None) -> list[nn.Module]:
        return super().lookups(model, stacks) if self.structure.takes_tokens else []

    def with_positions(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Makes `input_ids` for images, which stand for their patches, and one for each recording; they reach no
        module.
        """
        if self.structure.audio and AUDIO in batch and "input_ids" not in batch:
            return dict(batch) | {"input_ids": torch.zeros_like(batch[AUDIO][:, :1], dtype=torch.long)}
        images = batch.get(IMAGES)
        if self.structure.images is None or images is None or "input_ids" in batch:
            return dict(batch)
        if images.shape[1:] != self.structure.images:
            raise ValueError(
                f"The images have the shape {tuple(images.shape[1:])}, and under a plan all have that of the "
                f"configuration, {self.structure.images}; resize them."
            )
        ids = torch.zeros(len(images), self.structure.positions, dtype=torch.long, device=images.device)
        return dict(batch) | {"input_ids": ids}

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

    def packing(self, model: PreTrainedModel) -> Packing:
        if not self.stacks[0].cut:
            return Packing(loss=self.loss, obstacle="runs its layers by its own forward, which knows no documents")
        return self.structure.packing

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
    """Returns the adapter of a family that runs on whole rows, because no other describes it for a `reason`.
    `logit_transform` is what the family is known to do after its head.

    Raises:
        ValueError: if it is not clear how the family runs its layers.
    """
    structure, name = find_structure(model), type(model).__name__
    base = next(name for name, module in model.named_modules() if module is base_model(model))
    if base and not structure.layers.startswith(f"{base}."):
        raise ValueError(
            f"{name} has its layers in {structure.layers}, outside its base model {base!r}; train it with "
            "transformers.Trainer."
        )
    _check_shared_weights(model, structure.layers)
    transform = logit_transform(model.config)
    experts = find_experts(model, model.get_submodule(structure.layers))
    stack = StackAdapter(
        layers=structure.layers.removeprefix(f"{base}.") if base else structure.layers,
        attention=(),
        regions=(),
        experts=experts and replace(experts, shared=None),  # which may be called with more than hidden states
        key_value=(),
        heads=lambda config: Heads(query=1, key_value=1, dim=structure.features),
        unsupported=reason,
        causal=structure.loss is NEXT_TOKEN,
        outputs=structure.returns,
        config_name=image_config(model),
        tokens=StackInputs(mask=None, positions=None) if structure.audio else StackInputs(),
        cut=False,
    )
    adapter = WholeRowAdapter(
        stacks=(stack,),
        logit_transform=logit_transform,
        loss=structure.loss,
        structure=structure,
        fused_head=structure.raw is not None and torch.allclose(transform(structure.raw), structure.logits, rtol=1e-5),
    )
    try:
        cut = replace(adapter, stacks=(_cut_stack(model, replace(stack, experts=experts), structure),))
        check_attention(model, cut)
    except ValueError as obstacle:
        clause = str(obstacle).split("; ")[0].rstrip(".")
        return replace(adapter, stacks=(replace(stack, unsupported=clause),))
    return cut


def _cut_stack(model: PreTrainedModel, stack: StackAdapter, structure: Structure) -> StackAdapter:
    """Returns a stack whose layers are cut by a table; the ValueError says why there is none."""
    for obstacle in (structure.pipeline_obstacle, structure.arguments.obstacle):
        if obstacle is not None:
            raise ValueError(obstacle)
    table = table_of_layers(model, model.get_submodule(structure.layers), stack.experts)
    return replace(
        table,
        layers=stack.layers,
        after=(),
        positional=(),
        experts=stack.experts,
        causal=structure.arguments.causal,
        outputs=structure.returns,
        config_name=stack.config_name,
        inputs=replace(table.inputs, of_own_rows=True),
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
