# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The bias of attention scores that all layers of a stack share, or that each layer has; a rank computes it for its
own heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from galvatron_hf.models.adapter import RelativeBias
from galvatron_hf.parallel.activation.micro_batch import MicroBatch
from galvatron_hf.utils.compat import relative_position_buckets


if TYPE_CHECKING:
    from galvatron_hf.parallel.layers.parallel_layer import ParallelLayer


@dataclass(frozen=True, kw_only=True)
class SharedBias:
    """Makes the bias of one stack from its `table`, an embedding [buckets, heads] that every rank holds whole. Its
    gradient is a sum over all ranks, because each computes the bias for its own heads and rows.
    """

    kind: RelativeBias
    table: nn.Embedding

    def __post_init__(self):
        self.table.forward = self._lookup

    def of_heads(self, batch: MicroBatch, block: ParallelLayer) -> torch.Tensor:
        """Returns the bias [1, own heads, S, S] of the heads whose attention this rank computes in a layer. Layers
        with the same heads share it.
        """
        resolved, index, length = block.resolved, block.mesh.index, block.longest(batch)
        shards, ulysses = resolved.head_shards, resolved.strategy.ulysses
        # Tensor ranks cut the heads first, and Ulysses ranks cut what each of them has.
        place = index % resolved.strategy.tensor * ulysses + resolved.ulysses_index(index)
        key = resolved.stack, "bias", shards, place, length
        if key not in batch.shared:
            buckets = self.kind.buckets(block.layer.get_submodule(self.kind.attention), length, batch.device)
            heads = self.table.embedding_dim // shards
            batch.shared[key] = self.table(buckets, place * heads, heads).permute(2, 0, 1)[None]
        return batch.shared[key]

    def _lookup(self, buckets: torch.Tensor, first: int = 0, heads: int | None = None) -> torch.Tensor:
        """Returns the numbers [S, S, heads] of the heads from `first` on, by default of all."""
        heads = self.table.embedding_dim if heads is None else heads
        return F.embedding(buckets, self.table.weight[:, first : first + heads])


@dataclass(frozen=True, kw_only=True)
class OwnBias:
    """Makes the bias of one layer from the layer's own embedding [buckets, heads of the tensor rank]. Replaces what
    the attention module computes it by, which knows neither all positions nor the heads of Ulysses ranks.
    """

    block: ParallelLayer
    attention: nn.Module
    table: nn.Embedding

    def __call__(self, *lengths: int, device: torch.device, **options: int) -> torch.Tensor:
        """Returns the bias [1, own heads, S, S]."""
        if self.block.current.whole_rows:
            return type(self.attention).compute_bias(self.attention, *lengths, device=device, **options)
        resolved = self.block.resolved
        buckets = relative_position_buckets(self.attention, self.block.longest(self.block.current.value), device)
        heads = self.table.weight.shape[1] // resolved.strategy.ulysses
        first = resolved.ulysses_index(self.block.mesh.index) * heads
        return F.embedding(buckets, self.table.weight[:, first : first + heads]).permute(2, 0, 1)[None]


def attach_own_bias(block: ParallelLayer) -> None:
    """Makes the attention of a layer with a bias of its own compute it by [`OwnBias`]."""
    if block.stack.own_bias is not None:
        attention = block.layer.get_submodule(block.stack.own_bias.rpartition(".")[0])
        table = block.layer.get_submodule(block.stack.own_bias)
        attention.compute_bias = OwnBias(block=block, attention=attention, table=table)
