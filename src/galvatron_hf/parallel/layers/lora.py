# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters of a layer under its strategy. PEFT's own forward runs on local weights. A column-cut module needs
nothing more: each rank computes its output features of `W x + B A x`. In a row-cut module both products are shares of
one sum. Dropout before `A` has streams of its own, because tensor ranks share its input or have parts of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn

from galvatron_hf.models.adapter import StackAdapter, Style
from galvatron_hf.models.lora import lora_layers
from galvatron_hf.parallel.layers.rng import random_stream
from galvatron_hf.utils.compat import set_parameter_tensor


if TYPE_CHECKING:
    from galvatron_hf.parallel.layers.parallel_layer import ParallelLayer


LORA_DROPOUT = 2  # the key of these streams; attention dropout has 1


def sum_adapted_outputs(module: nn.Module, reduce: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Makes a row-cut module with adapters sum its outputs over the ranks once, and add its biases once, afterwards.

    Args:
        module (`nn.Module`): PEFT's linear module.
        reduce (`Callable`): sums the shares of the tensor ranks.
    """
    forward = module.forward

    def summed(hidden: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        with _without_biases(module):
            output = forward(hidden, *args, **kwargs)
        output = reduce(output)
        bias = _bias(module)
        return output if bias is None else output + bias

    module.forward = summed


def _bias(module: nn.Module) -> torch.Tensor | None:
    """Returns the sum of the biases of a module and of its active adapters; None if there are none."""
    found = [] if module.base_layer.bias is None else [module.base_layer.bias]
    for name in () if module.disable_adapters else module.active_adapters:
        if name in module.lora_B and module.lora_B[name].bias is not None:
            found.append(module.lora_B[name].bias * module.scaling[name])
    return sum(found[1:], start=found[0]) if found else None


@contextlib.contextmanager
def _without_biases(module: nn.Module) -> Iterator[None]:
    owners = [one for one in (module.base_layer, *module.lora_B.values()) if one.bias is not None]
    biases = [one.bias for one in owners]
    for owner, bias in zip(owners, biases, strict=True):
        # Conv1D cannot compute without a bias.
        set_parameter_tensor(owner, "bias", None if isinstance(owner, nn.Linear) else torch.zeros_like(bias))
    try:
        yield
    finally:
        for owner, bias in zip(owners, biases, strict=True):
            set_parameter_tensor(owner, "bias", bias)


def key_adapter_dropout(block: ParallelLayer, stack: StackAdapter) -> None:
    """Gives each dropout of the adapters of a layer a stream of its own. Tensor ranks drop the same features of an
    input that all of them have, also where Megatron-SP has cut the layer's positions, and others of their own part.
    """
    sites = 0
    for name, module in lora_layers(block.layer).items():
        inside = stack.in_region(name, block.layer)
        is_part = stack.style(name) is Style.ROW
        for dropout in module.lora_dropout.values():
            sites += 1
            if isinstance(dropout, nn.Dropout):
                dropout.forward = _keyed(dropout, block, sites, inside, is_part)


def _keyed(dropout: nn.Dropout, block: ParallelLayer, site: int, inside: bool, is_part: bool) -> Callable:
    original, tensor = dropout.forward, block.resolved.strategy.tensor
    share = block.mesh.index % tensor if is_part else 0

    @torch.compiler.disable(reason="a keyed random stream sets the state of a generator")
    def dropped(hidden: torch.Tensor) -> torch.Tensor:
        batch = block.current.value
        place = block.attention_rectangle(batch) if inside else block.rectangle(batch)
        key = (*batch.key, block.resolved.index, place.row_start, place.position_start, share, LORA_DROPOUT, site)
        with random_stream(hidden.device, *key):
            return original(hidden)

    return lambda hidden: dropped(hidden) if dropout.training else hidden
