# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Counts the bytes that ranks send which share documents in a ring. Importing this module needs no torch."""

from __future__ import annotations

from dataclasses import dataclass


RING_GRADIENT_BYTES = 4  # of an element of the gradients that go round a ring, which are summed in float32


@dataclass(frozen=True, kw_only=True)
class RingTraffic:
    """Counts what a rank sends in a ring of `degree` ranks, for one layer and one micro-batch. Keys and values are one
    block, of all documents that the ranks share. In a pass each rank sends on all blocks but the last that it gets.
    The gradient of a block, in float32, goes round with it in the backward, and then home.

    Args:
        degree (`int`): ranks of the ring.
        tokens (`int`): tokens of a block.
        key_value_heads, head_dim (`int`): key/value heads of a rank in attention, and features of each.
        element_bytes (`int`): bytes of an element of keys and values.
    """

    degree: int
    tokens: int
    key_value_heads: int
    head_dim: int
    element_bytes: int

    @property
    def block_bytes(self) -> int:
        """Returns the bytes of a block of keys and values."""
        return self._elements * self.element_bytes

    @property
    def gradient_bytes(self) -> int:
        """Returns the bytes of the gradient of a block."""
        return self._elements * RING_GRADIENT_BYTES

    @property
    def block_sends(self) -> int:
        """Returns how many blocks a rank sends in a forward, a recompute or a backward."""
        return self.degree - 1

    @property
    def gradient_sends(self) -> int:
        """Returns how many gradients of blocks a rank sends in a backward."""
        return self.degree if self.degree > 1 else 0

    def sent_bytes(self, *, recompute: bool = False) -> int:
        """Returns the bytes that a rank sends in forward and backward, and in a recompute of the forward."""
        blocks = (2 + recompute) * self.block_sends
        return blocks * self.block_bytes + self.gradient_sends * self.gradient_bytes

    @property
    def _elements(self) -> int:
        return 2 * self.tokens * self.key_value_heads * self.head_dim
