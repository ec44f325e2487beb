# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Tiny models with PEFT's adapters, whose weights matter: PEFT's own start, `B = 0`, would hide errors of `A`."""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from transformers import PreTrainedModel

from tiny_models import ALL_FAMILIES


LLAMA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj")
TARGETS = {"gpt2": ("c_attn", "c_proj", "c_fc"), "phi3": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")}


def lora(family: str = "llama", **options: Any) -> LoraConfig:
    """Returns adapters of rank 4 on most linear modules of a family."""
    return LoraConfig(**(dict(r=4, target_modules=list(TARGETS.get(family, LLAMA_TARGETS))) | options))


def adapted(
    family: str = "llama", config: PeftConfig | None = None, *, build: Any = None, **options: Any
) -> PeftModel:
    """Returns a PeftModel; `options` are those of [`lora`], `build` those of the family."""
    torch.manual_seed(4)
    made = get_peft_model(ALL_FAMILIES[family].build(**(build or {})), config or lora(family, **options))
    randomise_adapters(made)
    return made.train()


def injected(family: str = "llama", **options: Any) -> PreTrainedModel:
    """Returns a model with adapters that no PeftModel wraps."""
    torch.manual_seed(4)
    made = ALL_FAMILIES[family].build()
    made.add_adapter(lora(family, **options))
    randomise_adapters(made)
    return made.train()


@torch.no_grad()
def randomise_adapters(model: torch.nn.Module, seed: int = 5) -> None:
    """Gives adapters, and copies of modules, values unlike those of their start."""
    draw = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=draw)
        if "lora_" in name:
            weight.copy_(0.2 * noise * weight.shape[-1] ** -0.5)
        elif "modules_to_save" in name:
            weight.add_(0.05 * noise)
