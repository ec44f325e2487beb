# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Head counts of an attention, and the degrees that can share them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True, kw_only=True)
class Heads:
    """Holds the head counts of an attention, and the features of a head (`dim`)."""

    query: int
    key_value: int
    dim: int

    @classmethod
    def from_config(cls, config: PreTrainedConfig) -> Heads:
        query = config.num_attention_heads
        key_value = getattr(config, "num_key_value_heads", None) or query
        dim = getattr(config, "head_dim", None) or config.hidden_size // query
        return cls(query=query, key_value=key_value, dim=dim)

    def supports_tensor(self, tensor: int) -> bool:
        """Tells whether `tensor` ranks can share the heads evenly."""
        even = self.key_value % tensor == 0 or tensor % self.key_value == 0
        return self.query % tensor == 0 and even

    def supports(self, tensor: int, ulysses: int) -> bool:
        """Tells whether `ulysses` ranks can share the heads of a tensor rank."""
        return self.supports_tensor(tensor) and (self.query // tensor) % ulysses == 0

    def largest(self, tensor: int, ulysses: int) -> tuple[int, int]:
        """Returns the largest degrees, not over the given ones, that the heads support."""
        tensor = max(t for t in range(1, tensor + 1) if self.supports_tensor(t))
        return tensor, math.gcd(self.query // tensor, ulysses)
