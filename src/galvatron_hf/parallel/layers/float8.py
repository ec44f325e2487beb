# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Matrix products of layers in float8 (arXiv 2209.05433), by torchao: inputs, weights and gradients are scaled and
rounded for each product, which adds them up in bf16. All else is as in bf16; so are the embedding and the head. A CPU
computes the same products on rounded bf16 numbers.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import torch
from torch import nn
from transformers import PreTrainedModel

from galvatron_hf.models.adapter import ModelAdapter
from galvatron_hf.models.lora import has_adapters
from galvatron_hf.plan import ParallelPlan


MULTIPLE = 16  # of which the sizes of a product are multiples
LEAST_CAPABILITY = (8, 9)


def uses_float8(plan: ParallelPlan) -> bool:
    """Returns whether a plan says itself that products of layers are in float8; training arguments cannot."""
    return plan.precision is not None and plan.precision.float8


def check_float8(model: PreTrainedModel, adapter: ModelAdapter, plan: ParallelPlan, device: torch.device) -> None:
    """Refuses a plan in float8 without torchao, without a GPU's products, or for a layer that has none that fit. The
    ValueError is one sentence with the reason and the fix.
    """
    if not uses_float8(plan):
        return
    if has_adapters(model):
        raise ValueError(
            f'precision.compute "fp8" multiplies whole linear modules, and {type(model).__name__} has adapters; use '
            '"bf16".'
        )
    if importlib.util.find_spec("torchao") is None:
        raise ValueError(
            'precision.compute "fp8" needs the package torchao, which is not installed; pip install torchao, or use '
            '"bf16".'
        )
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    if capability is not None and capability < LEAST_CAPABILITY:
        raise ValueError(
            f'precision.compute "fp8" needs a GPU of compute capability {_version(LEAST_CAPABILITY)}, and {device} '
            f'has {_version(capability)}; use "bf16".'
        )
    for index, (layer, strategy) in enumerate(zip(adapter.layers(model), plan.layers, strict=True)):
        if next(_fitting(layer, strategy.tensor), None) is None:
            raise ValueError(
                f'precision.compute "fp8" finds no linear module in layer {index} whose sizes are multiples of '
                f'{MULTIPLE} on each of {strategy.tensor} tensor ranks; use "bf16".'
            )


def _version(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def _fitting(layer: nn.Module, tensor: int) -> Iterator[str]:
    """Yields the names of linear modules whose products fit float8, whichever dimension tensor ranks cut."""
    for name, module in layer.named_modules():
        if isinstance(module, nn.Linear):
            if module.in_features % (MULTIPLE * tensor) == 0 and module.out_features % (MULTIPLE * tensor) == 0:
                yield name


def make_float8(layer: nn.Module, tensor: int, device: torch.device) -> None:
    """Replaces the linear modules of a layer by torchao's, which have the same weights; before they are cut."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    fitting = set(_fitting(layer, tensor))
    convert_to_float8_training(
        layer,
        # The gradient of a weight is a sum over tokens, of which there may be any number.
        config=Float8LinearConfig(emulate=device.type != "cuda", pad_inner_dim=True),
        module_filter_fn=lambda module, name: name in fitting,
    )
