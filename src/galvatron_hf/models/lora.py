# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Models with PEFT's LoRA adapters (arXiv 2106.09685): the model inside, the names of adapters' weights, and what no
plan covers. PEFT is imported by whoever made an adapter, and never here.
"""

from __future__ import annotations

import re
import sys
from enum import Enum
from types import ModuleType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from galvatron_hf.utils.compat import has_peft_adapters


class Role(Enum):
    """Says what a module is to the family's module that an adapter changes."""

    OWN = "own"  # the family's own module, or PEFT's copy of it that is trained in its place
    DOWN = "lora_A"  # from the input features to the rank of the adapter
    UP = "lora_B"  # from the rank of the adapter to the output features


_DOWN, _UP = r"lora_A\.[^.]+", r"lora_B\.[^.]+"
_COPIES = r"original_module|modules_to_save\.[^.]+"
_ADDED = re.compile(rf"\.(?:base_layer|{_DOWN}|{_UP}|{_COPIES})(?=\.|$)")

# Options of LoraConfig that no plan covers: what they do, and what to set in their place.
_OPTIONS = {
    "target_parameters": ("adapts parameters that are no linear module, such as experts", "target_modules"),
    "trainable_token_indices": ("trains some rows of the embedding", "modules_to_save=['embed_tokens']"),
    "layer_replication": ("makes several layers of one weight", "a model that has the layers"),
    "megatron_config": ("makes the layers of Megatron-LM", "None, as the plan cuts the layers"),
    "use_qalora": ("needs quantised weights", "False"),
    "ensure_weight_tying": ("ties copies of the embedding and the head", "False"),
}


def family_name(name: str) -> str:
    """Returns the name that the family gives to a module, from its name, or that of a part of it, in a model with
    adapters: "self_attn.q_proj" for "self_attn.q_proj.base_layer" and "self_attn.q_proj.lora_A.default".
    """
    return _ADDED.sub("", name)


def role(name: str) -> Role:
    """Returns the role of a module of this name."""
    for pattern, found in ((_DOWN, Role.DOWN), (_UP, Role.UP)):
        if re.search(rf"\.{pattern}(?=\.|$)", name):
            return found
    return Role.OWN


def is_added(name: str) -> bool:
    """Tells whether a parameter of this name is an adapter's, or that of PEFT's copy of a module."""
    return re.search(rf"\.(?:{_DOWN}|{_UP}|modules_to_save\.[^.]+)\.", name) is not None


def inner_model(model: nn.Module) -> nn.Module:
    """Returns the model inside a PeftModel; any other model as it is."""
    return model.get_base_model() if is_peft_model(model) else model


def is_peft_model(model: nn.Module) -> bool:
    """Tells whether a model is a PeftModel, which wraps the model that has its adapters inside."""
    return "peft" in sys.modules and isinstance(model, sys.modules["peft"].PeftModel)


def has_adapters(model: nn.Module) -> bool:
    """Tells whether a model, or the one inside a PeftModel, has adapters."""
    return "peft" in sys.modules and any(_is_changed(module) for module in model.modules())


def lora_layers(module: nn.Module) -> dict[str, nn.Module]:
    """Returns the linear modules with LoRA adapters below a module, by name."""
    if "peft" not in sys.modules:
        return {}
    return {name: inner for name, inner in module.named_modules() if isinstance(inner, _peft().tuners.lora.Linear)}


def computes_in_bf16(model: nn.Module) -> bool:
    """Tells whether a model was loaded in bf16: all of it, or all but adapters, which PEFT makes in fp32 then."""
    added = has_adapters(model)
    formats = {
        parameter.dtype
        for name, parameter in model.named_parameters()
        if not (added and is_added(name) and parameter.dtype is torch.float32)
    }
    return formats == {torch.bfloat16}


def convert_trained_weights(model: nn.Module) -> None:
    """Gives the trained weights of a model that computes in bf16 fp32, and leaves frozen ones in bf16."""
    for parameter in model.parameters():
        parameter.data = parameter.data.float() if parameter.requires_grad else parameter.data.bfloat16()


def module_copies(module: nn.Module) -> list[nn.Module]:
    """Returns the modules of the family's class of which one computes: a module itself, or the original and PEFT's
    trained copies of a module in `modules_to_save`, the active one last.
    """
    if "peft" not in sys.modules or not isinstance(module, _peft().utils.other.ModulesToSaveWrapper):
        return [module]
    active = module.active_adapters[:1]
    made = [one for name, one in module.modules_to_save.items() if name not in active]
    return [module.original_module, *made, *(module.modules_to_save[name] for name in active)]


def check_adapters(model: nn.Module) -> None:
    """Refuses adapters that no plan covers; the ValueError is one sentence with the reason and the fix."""
    if "peft" not in sys.modules:
        return
    name, kinds = type(model).__name__, sys.modules["peft"].PeftType
    if isinstance(model, sys.modules["peft"].PeftMixedModel):
        raise ValueError(f"{name} mixes adapters of several types, which no plan covers; use get_peft_model.")
    inner = inner_model(model)
    configured = is_peft_model(model) or (isinstance(inner, PreTrainedModel) and has_peft_adapters(inner))
    for adapter, config in model.peft_config.items() if configured else ():
        if config.peft_type is not kinds.LORA:
            raise ValueError(
                f"{name} has an adapter {adapter!r} of the type {getattr(config.peft_type, 'value', config.peft_type)}"
                ", and plans cover LoRA alone; use LoraConfig, or train it with transformers.Trainer."
            )
        _check_options(name, adapter, config)
    if has_adapters(inner):
        _check_modules(inner)


def check_has_values(model: nn.Module) -> None:
    """Refuses a model with adapters whose weights a plan would have to make or read."""
    if has_adapters(model) and any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError(
            f"{type(model).__name__} is on the meta device, where its adapters have no values; build it outside of "
            "torch.device('meta')."
        )


def _check_options(name: str, adapter: str, config: Any) -> None:
    for option, (reason, fix) in _OPTIONS.items():
        if getattr(config, option):
            raise ValueError(
                f"{option} of the adapter {adapter!r} of {name} {reason}, which no plan covers; use {fix}."
            )


def _check_modules(model: nn.Module) -> None:
    kind = type(model).__name__
    if getattr(model, "is_quantized", False):
        raise ValueError(
            f"{kind} is quantised (QLoRA), and quantised weights cannot be sharded; load it in bf16 or fp32."
        )
    first, last = (module_copies(end) for end in (model.get_input_embeddings(), model.get_output_embeddings()))
    for name, module in model.named_modules():
        if isinstance(module, _peft().tuners.tuners_utils.BaseTunerLayer):
            _check_layer(name, module, any(module is end for end in (*first, *last)))
        elif isinstance(module, _peft().utils.other.AuxiliaryTrainingWrapper):
            _check_copied(name, module)
    if len(first) + len(last) > 2 and None not in (*first, *last) and first[0].weight is last[0].weight:
        raise ValueError(
            f"{kind} ties its embeddings, and modules_to_save copies one of them, which no plan covers; build the "
            "model with tie_word_embeddings=False."
        )


def _check_layer(name: str, module: nn.Module, is_end: bool) -> None:
    lora, end = _peft().tuners.lora, name.rpartition(".")[2]
    if is_end or isinstance(module, lora.Embedding):
        raise ValueError(
            f"{end} has a LoRA adapter, and no plan adapts the embedding or the head; leave it out of "
            f"target_modules, or train it whole with modules_to_save=[{end!r}]."
        )
    base = getattr(module, "base_layer", None)
    if type(module) is not lora.Linear or type(base) not in (nn.Linear, Conv1D):
        raise ValueError(
            f"{name} has an adapter of the class {type(module).__name__} on a {type(base).__name__}, and plans cover "
            "LoRA of linear modules without quantisation; leave it out of target_modules."
        )
    for adapter, variant in module.lora_variant.items():
        raise ValueError(
            f"The adapter {adapter!r} of {name} is a {type(variant).__name__}, which computes with whole weights or "
            "sequences, and no plan covers it; use plain LoRA (use_rslora=True is supported)."
        )
    if module.merged:
        raise ValueError(f"The adapters of {name} are merged into its weight; call unmerge_adapter() first.")


def _check_copied(name: str, module: nn.Module) -> None:
    if not isinstance(module, _peft().utils.other.ModulesToSaveWrapper):
        raise ValueError(
            f"{name} is a {type(module).__name__}, which no plan covers; use LoRA with modules_to_save alone."
        )
    inner = next((child for child, _ in module.original_module.named_children()), None)
    if inner is not None:
        raise ValueError(
            f"modules_to_save has {name}, which has modules such as {inner} of its own; name these in its place."
        )


def _is_changed(module: nn.Module) -> bool:
    peft = _peft()
    return isinstance(module, (peft.tuners.tuners_utils.BaseTunerLayer, peft.utils.other.AuxiliaryTrainingWrapper))


def _peft() -> ModuleType:
    return sys.modules["peft"]
