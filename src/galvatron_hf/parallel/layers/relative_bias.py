# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The bias of attention scores that all layers of a stack share: each rank computes it for its own heads."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from galvatron_hf.models.adapter import RelativeBias
from galvatron_hf.parallel.activation.micro_batch import MicroBatch
from galvatron_hf.plan.resolved import ResolvedLayer


@dataclass(frozen=True, kw_only=True)
class SharedBias:
    """Makes the bias of one stack from its `table`, an embedding [buckets, heads] that every rank holds whole. Its
    gradient is a sum over all ranks, because each computes the bias for its own heads and rows.
    """

    kind: RelativeBias
    table: nn.Embedding

    def __post_init__(self):
        self.table.forward = self._lookup

    def of_heads(self, batch: MicroBatch, layer: nn.Module, resolved: ResolvedLayer, index: int) -> torch.Tensor:
        """Returns the bias [1, own heads, S, S] of the heads whose attention rank `index` of the stage computes in a
        layer. Layers with the same heads share it.
        """
        shards, tensor = resolved.head_shards, resolved.strategy.tensor
        # Tensor ranks cut the heads first, and Ulysses ranks cut what each of them has.
        place = index % tensor * (shards // tensor) + index // tensor % (shards // tensor)
        key = resolved.stack, "bias", shards, place
        if key not in batch.shared:
            length = batch.streams[resolved.stack].length
            buckets = self.kind.buckets(layer.get_submodule(self.kind.attention), length, batch.device)
            heads = self.table.embedding_dim // shards
            batch.shared[key] = self.table(buckets, place * heads, heads).permute(2, 0, 1)[None]
        return batch.shared[key]

    def _lookup(self, buckets: torch.Tensor, first: int, heads: int) -> torch.Tensor:
        """Returns the numbers [S, S, heads] of the heads from `first` on."""
        return F.embedding(buckets, self.table.weight[:, first : first + heads])
