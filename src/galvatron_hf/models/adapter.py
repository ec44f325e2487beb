# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""What the runtime needs to know of a model family, declared as data."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import nn
from transformers import PreTrainedConfig


class Style(Enum):
    """How a module of a layer is cut over the tensor ranks."""

    COLUMN = "column"  # output features cut: every rank computes its own heads or channels
    ROW = "row"  # input features cut: outputs are summed over the ranks
    REPLICATED_PARTIAL_GRAD = "inside"  # whole on every rank, applied to that rank's heads: its gradients are summed


@dataclass(frozen=True, kw_only=True)
class Fused:
    """A projection that computes several outputs at once; it is split so that each part has plain shards.

    Attributes:
        parts (`tuple[str, ...]`): names of the parts in the order of the fused output.
        sizes (`Callable[[PreTrainedConfig], tuple[int, ...]]`): output features of each part.
    """

    parts: tuple[str, ...]
    sizes: Callable[[PreTrainedConfig], tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class LogitTransform:
    """What the family does to the logits after the head: `softcap * tanh(scale * z / softcap)`, or `scale * z`."""

    scale: float = 1.0
    softcap: float | None = None

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        logits = logits * self.scale if self.scale != 1.0 else logits
        if self.softcap is None:
            return logits
        return torch.tanh(logits / self.softcap) * self.softcap


@dataclass(frozen=True, kw_only=True)
class DecoderAdapter:
    """One family of causal language models.

    Attributes:
        layers (`str`): name of the module list inside the base model.
        final_norm (`str`): name of the norm between the last layer and the head.
        attention (`str`): name of the attention module inside a layer.
        regions (`tuple[str, ...]`): modules of a layer whose input enters a tensor-parallel region.
        styles (`Mapping[str, Style]`): from module name inside a layer to its style; empty when tensor degrees over 1
            are not supported.
        unsupported (`str`, *optional*): why `styles` is empty.
        fused (`Mapping[str, Fused]`): from module name inside a layer to its parts.
        key_value (`tuple[str, ...]`): the modules that compute keys and values, cut by key/value heads.
        query (`tuple[str, ...]`): the modules that compute queries, cut by attention heads.
        positional (`tuple[str, ...]`): learned position embeddings inside the base model, looked up beside the tokens.
        local_attributes (`Mapping[str, str]`): attributes of modules of a layer that count heads or features and are
            divided with them: from "module.attribute" to "heads" or "key_value_heads".
        logit_transform (`Callable[[PreTrainedConfig], LogitTransform]`): what follows the head.
    """

    layers: str = "layers"
    final_norm: str = "norm"
    attention: str = "self_attn"
    regions: tuple[str, ...] = ("self_attn", "mlp")
    styles: Mapping[str, Style] = field(default_factory=dict)
    unsupported: str | None = None
    fused: Mapping[str, Fused] = field(default_factory=dict)
    key_value: tuple[str, ...] = ("self_attn.k_proj", "self_attn.v_proj")
    query: tuple[str, ...] = ("self_attn.q_proj",)
    positional: tuple[str, ...] = ()
    local_attributes: Mapping[str, str] = field(default_factory=dict)
    logit_transform: Callable[[PreTrainedConfig], LogitTransform] = lambda config: LogitTransform()

    def part_style(self, name: str) -> Style | None:
        """Style of a module of a layer; the parts of a fused projection have the style of the whole."""
        owner = name.rsplit(".", 1)[0]
        return self.styles.get(name) or (self.styles.get(owner) if owner in self.fused else None)


@dataclass(frozen=True, kw_only=True)
class Heads:
    """Head counts of a model.

    Attributes:
        query (`int`): attention heads.
        key_value (`int`): key/value heads.
        dim (`int`): features of a head.
    """

    query: int
    key_value: int
    dim: int

    @classmethod
    def of(cls, config: PreTrainedConfig) -> Heads:
        """Reads them from a configuration."""
        query = config.num_attention_heads
        key_value = getattr(config, "num_key_value_heads", None) or query
        dim = getattr(config, "head_dim", None) or config.hidden_size // query
        return cls(query=query, key_value=key_value, dim=dim)

    def local_key_value(self, tensor: int) -> int:
        """Key/value heads on each of `tensor` ranks; with fewer heads than ranks every rank keeps a copy of one."""
        return max(1, self.key_value // tensor)

    def supports_tensor(self, tensor: int) -> bool:
        """Whether `tensor` ranks can share the heads evenly."""
        even = self.key_value % tensor == 0 or tensor % self.key_value == 0
        return self.query % tensor == 0 and even

    def supports(self, tensor: int, ulysses: int) -> bool:
        """Whether the heads of a tensor rank can also be shared by `ulysses` ranks."""
        return self.supports_tensor(tensor) and (self.query // tensor) % ulysses == 0

    def largest(self, tensor: int, ulysses: int) -> tuple[int, int]:
        """The pair of degrees nearest below that the heads support."""
        tensor = max(t for t in range(1, tensor + 1) if self.supports_tensor(t))
        return tensor, math.gcd(self.query // tensor, ulysses)


class FusedProjection(nn.Module):
    """Parts of a fused projection, computed one by one and joined; replaces the fused module in place.

    Args:
        parts (`dict[str, nn.Module]`): linear modules, in the order of the fused output.
    """

    def __init__(self, parts: dict[str, nn.Module]):
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[B, S, H] to [B, S, sum of the parts' features]."""
        return torch.cat([part(hidden) for part in self.children()], dim=-1)
