# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Modules that take the places of others inside a family's own forward, where a rank does not have them."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

import torch
from torch import nn
from transformers.distributed.pipeline_parallel import PipelineIdentityLayer


class MissingModule(nn.Module):
    """Replaces a module that another stage has; its output, on the device of its input, changes no sum."""

    def forward(self, *args, **kwargs) -> torch.Tensor:
        given = next((one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor)), None)
        return torch.zeros((), device=None if given is None else given.device)


class AbsentModule(MissingModule):
    """Replaces a module before the first layer in stages that begin later, whose forward begins with token ids too.
    What it returns has the right shape, and reaches no layer of the stage. A family may read the types of weights.
    """

    def __init__(self, module: nn.Module):
        super().__init__()
        for name, child in module.named_children():
            self.add_module(name, AbsentModule(child))
        for name, weight in module.named_parameters(recurse=False):
            setattr(self, name, torch.empty(0, dtype=weight.dtype))
        sizes = (getattr(module, name, None) for name in ("embedding_dim", "out_features", "features"))
        self.features = next((size for size in sizes if isinstance(size, int)), None)

        self.patches = None
        if isinstance(module, nn.Conv2d):
            self.patches = module.out_channels, module.kernel_size, module.stride

    def forward(self, *args, **kwargs) -> torch.Tensor:
        given = next((one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor)), None)
        if self.patches is not None:
            channels, kernel, stride = self.patches
            sizes = [(size - k) // s + 1 for size, k, s in zip(given.shape[2:], kernel, stride, strict=True)]
            return torch.zeros(given.shape[0], channels, *sizes, device=given.device)
        if given is None or (self.features is None and not given.is_floating_point()):
            return super().forward(*args, **kwargs)
        if self.features is None:
            return given.clone()
        shape = given.shape[:-1] if given.is_floating_point() else given.shape
        return torch.zeros(*shape, self.features, device=given.device)


def absent(module: nn.Module) -> AbsentModule:
    """Returns what replaces a module before the first layer; the module itself if it is one."""
    return module if isinstance(module, AbsentModule) else AbsentModule(module)


class LayerSlot(PipelineIdentityLayer):
    """Takes the place of a layer that another stage has, with its plain attributes, such as its type, which a family
    may read off it between layers. Returns the hidden states that it gets, the argument `first`, in a tuple of
    `returns` entries if the layers return tuples.
    """

    def __init__(self, layer: nn.Module, first: str, returns: int | None):
        super().__init__()
        self.first, self.returns = first, returns
        for name, value in vars(layer).items():
            if isinstance(value, (bool, int, float, str, type(None), Enum)) and name not in vars(self):
                setattr(self, name, value)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._returned(self._hidden(args, kwargs))

    def _hidden(self, args: tuple, kwargs: dict) -> torch.Tensor:
        return args[0] if args else kwargs[self.first]

    def _returned(self, hidden: torch.Tensor) -> Any:
        return hidden if self.returns is None else (hidden, *(None,) * (self.returns - 1))


class StageInput(LayerSlot):
    """Takes the place of the layer before the first one of a stage; returns the hidden states that `enter` returns."""

    def __init__(self, layer: nn.Module, first: str, returns: int | None, enter: Callable[[], torch.Tensor]):
        super().__init__(layer, first, returns)
        self.enter = enter

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._returned(self.enter())


class StageEnd(Exception):
    """Ends a family's forward where a stage ends, with the hidden states."""

    def __init__(self, hidden: torch.Tensor):
        super().__init__()
        self.hidden = hidden


class StageOutput(LayerSlot):
    """Takes the place of the layer before which a forward shall end; ends the forward with the hidden states."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise StageEnd(self._hidden(args, kwargs))


class HeadSlot(nn.Module):
    """Takes the place of the head; ends the forward with the hidden states that the head would get."""

    def __init__(self, head: nn.Module):
        super().__init__()
        self._head = (head,)  # in a tuple, so that it is no submodule

    @property
    def weight(self) -> torch.Tensor:
        """Returns the weight of the head, whose format some families read."""
        return self._head[0].weight

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        raise StageEnd(hidden)
