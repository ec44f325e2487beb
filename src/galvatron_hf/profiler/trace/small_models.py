# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Makes models without values: whole ones, and small ones with the ends and a few layers of each kind."""

from __future__ import annotations

import copy

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from galvatron_hf.models.adapter import ModelAdapter, RelativeBias, base_model
from galvatron_hf.models.auto_classes import auto_model
from galvatron_hf.models.families import adapter_for
from galvatron_hf.models.lora import has_adapters
from galvatron_hf.models.trial_run import takes_images
from galvatron_hf.parallel.weights.adapted_model import AdaptedModel
from galvatron_hf.utils.compat import model_from_config
from galvatron_hf.utils.empty_weights import without_weights


def empty_model(config: PreTrainedConfig, family: type[PreTrainedModel] | None = None) -> PreTrainedModel:
    """Returns the model of a configuration with parameters on the meta device and buffers on the CPU. Raises
    `ValueError` if transformers has no language model for it, or one with an empty weight.
    """
    config = copy.deepcopy(config)
    with torch.random.fork_rng(devices=[]), without_weights(), no_init_weights():
        if family is not None:
            model = model_from_config(family, config, torch.float32)
        else:
            try:
                model = auto_model(config).from_config(config, dtype=torch.float32)
            except Exception as error:  # families raise various errors for odd sizes
                problem = f"{type(error).__name__}: {error}" if not isinstance(error, ValueError) else str(error)
                raise ValueError(
                    f"transformers has no language model for a {type(config).__name__} "
                    f"({' '.join(problem.split())[:80]}); give the configuration of one."
                ) from None
    for name, weight in model.named_parameters():
        if weight.numel() == 0:
            raise ValueError(
                f"The weight {name} has no elements, but the shape {tuple(weight.shape)}; give a configuration whose "
                "sizes are 1 or more."
            )
    model.tie_weights()  # accelerate separates tied parameters
    return model.train()


def without_values(model: PreTrainedModel) -> PreTrainedModel:
    """Returns a copy of a model as [`empty_model`] makes it, with its adapters, and frozen where the model is."""
    if not has_adapters(model):
        made = empty_model(model.config, type(model))
        for name, weight in model.named_parameters():
            made.get_parameter(name).requires_grad_(weight.requires_grad)
        return made
    made = AdaptedModel.from_model(model).model
    for weight in made.parameters():
        weight.data = weight.data.float()
    for module in made.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.cpu())
    return made.train()


def layer_kinds(model: PreTrainedModel) -> tuple[int, ...]:
    """Returns the kind of each layer, numbered from 0. Layers of one kind have equal shapes and settings."""
    adapter = adapter_for(model)
    seen: dict[tuple, int] = {}
    kinds = []
    for place, layer in zip(adapter.places(model), adapter.layers(model), strict=True):
        key = (place.stack.name, place.type(model), *_settings(layer, place.stack.bias))
        kinds.append(seen.setdefault(key, len(seen)))
    if not kinds:
        raise ValueError("The model has no layers, and there is nothing to plan; give it some.")
    return tuple(kinds)


def _settings(layer: nn.Module, bias: RelativeBias | None) -> tuple:
    """Returns classes, shapes and plain attributes of a layer's modules, without the layer's index and without the
    table of a bias that all layers share, which one of them has.
    """
    plain = (bool, int, float, str, type(None))
    table = None if bias is None else f"{bias.attention}.{bias.table.rpartition('.')[2]}"
    ignored = ("layer_idx", "layer_id", *(() if bias is None else bias.marks))
    return tuple(
        (
            name,
            type(module),
            tuple(
                (key, tuple(weight.shape), weight.requires_grad)
                for key, weight in module.named_parameters(recurse=False)
            ),
            tuple(
                (key, value)
                for key, value in sorted(vars(module).items())
                if isinstance(value, plain) and key not in ignored and not key.startswith("_")
            ),
        )
        for name, module in layer.named_modules()
        if name != table
    )


def positions(model: PreTrainedModel) -> int | None:
    """Returns the number of positions of the model, as many as an image has; None if it is unlimited."""
    if (of_image := image_positions(model)) is not None:
        return of_image
    config = base_model(model).config
    return getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)


def image_positions(model: PreTrainedModel) -> int | None:
    """Returns the positions of each row of a model that takes images; None for other models."""
    if not takes_images(model):
        return None
    structure = adapter_for(model).structure
    return None if structure is None else structure.positions


def search_obstacle(model: PreTrainedModel) -> str | None:
    """Says why no search plans a model; None if it does."""
    return None if adapter_for(model).structure is None else _small_or_reason(model, 1)[1]


def one_of_each(model: PreTrainedModel, copies: int = 1) -> PreTrainedModel:
    """Returns a model on the meta device with the ends of `model` and the first `copies` layers of each kind. `model`
    is not changed and must have so many consecutive layers of each kind. Raises `ValueError` for a model that no
    search covers.
    """
    small, reason = _small_or_reason(model, copies)
    if small is None:
        raise ValueError(f"{type(model).__name__} {reason}; write a plan, or train with ZeRO-3.")
    return small


def keep_rotary_frequencies(model: PreTrainedModel) -> None:
    """Has dynamic rotary embeddings keep their frequencies. They compare the longest position with those that the
    model was made for, and tensors without values have none. Up to these positions nothing changes, at the same cost.
    """
    for module in model.modules():
        kind = vars(module).get("rope_type")
        if isinstance(kind, dict):  # of each type of layer
            module.rope_type = {name: _fixed(one) for name, one in kind.items()}
        elif kind is not None:
            module.rope_type = _fixed(kind)


def _fixed(kind: str) -> str:
    return "default" if "dynamic" in kind else kind


def most_copies(model: PreTrainedModel, most: int) -> int:
    """Returns the largest number of copies, up to `most`, with which [`one_of_each`] makes a model. In some families
    the place of a layer decides what it is.
    """
    if adapter_for(model).structure is None:
        return most
    return next(copies for copies in range(most, 0, -1) if copies == 1 or _small_or_reason(model, copies)[1] is None)


def _small_or_reason(model: PreTrainedModel, copies: int) -> tuple[PreTrainedModel | None, str | None]:
    """Returns the model of [`one_of_each`], or why there is none."""
    adapter = adapter_for(model)
    if adapter.structure is None:
        return _small_model(model, adapter, copies), None
    if adapter.structure.pipeline_obstacle is not None:
        return None, f"has layers that cannot be run alone, because {adapter.structure.pipeline_obstacle}"
    try:
        return _small_model(model, adapter, copies), None
    except Exception as error:  # of a family's forward: any
        problem = " ".join(str(error).split())[:120]
        return None, f"does not run with other numbers of layers ({type(error).__name__}: {problem})"


def _small_model(model: PreTrainedModel, adapter: ModelAdapter, copies: int) -> PreTrainedModel:
    kinds = layer_kinds(model)
    of_kind = [[index for index, one in enumerate(kinds) if one == kind] for kind in range(max(kinds) + 1)]
    first = [index for indices in of_kind for index in indices[:copies]]
    small = without_values(model)
    places = adapter.places(small)
    for stack in adapter.stacks:
        adapter.keep_layers(
            small, stack, [places[index].local_index for index in first if places[index].stack is stack]
        )
    if adapter.structure is not None and layer_kinds(small) != tuple(kinds[index] for index in first):
        raise ValueError("its layers are of other kinds then")
    return small
