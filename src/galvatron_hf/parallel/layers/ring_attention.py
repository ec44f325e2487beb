# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Attention of documents whose keys and values go round the ranks that share them (arXiv 2310.01889)."""

from __future__ import annotations

import torch
from torch.autograd.function import once_differentiable

from galvatron_hf.parallel.activation.documents import HeldDocuments
from galvatron_hf.parallel.comm.transfers import Transfer, Transfers
from galvatron_hf.parallel.layers.partial_attention import (
    GivenGradient,
    MergedAttention,
    Part,
    attend,
    attend_backward,
)
from galvatron_hf.plan.chunks import size_of
from galvatron_hf.plan.deal import Ring


class _Hops:
    """Holds what the hops of one ring need on one rank: which block of keys it has at each hop, and its documents.
    The ranks of the ring are numbered in its order. At hop `t` rank `i` has the block of rank `i - t`, sends it to
    rank `i + 1`, and gets that of rank `i - t - 1` for the next hop.
    """

    def __init__(self, ring: Ring, index: int, first: int):
        self.ring, self.size = ring, len(ring.holders)
        self.own = ring.holders.index(index)
        self.to = ring.holders[(self.own + 1) % self.size]
        self.source = ring.holders[self.own - 1]
        self.made: dict[int, list[Part]] = {}
        self.places = [slice(one.at - first, one.at - first + one.tokens) for one in ring.documents]

    def holder(self, hop: int) -> int:
        """Returns the data rank whose keys this rank has at a hop."""
        return self.ring.holders[(self.own - hop) % self.size]

    def tokens(self, hop: int) -> int:
        return sum(size_of(one.runs[self.holder(hop)]) for one in self.ring.documents)

    def parts(self, hop: int, index: int) -> list[Part]:
        """Returns the parts of attention at a hop."""
        if hop not in self.made:
            self.made[hop] = self._parts(hop, index)
        return self.made[hop]

    def _parts(self, hop: int, index: int) -> list[Part]:
        found, at = [], 0
        for one, place in zip(self.ring.documents, self.places, strict=True):
            keys = one.runs[self.holder(hop)]
            found.append(Part(query_at=place.start, query=one.runs[index], key_at=at, key=keys))
            at += size_of(keys)
        return found

    def block(self, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Returns the rank's own keys and values as one block [2, key/value heads, tokens, D]."""
        return torch.stack([torch.cat([x[0, :, place] for place in self.places], dim=1) for x in (key, value)])

    def add_own(self, block: torch.Tensor, of_key: torch.Tensor, of_value: torch.Tensor) -> None:
        """Adds the gradient of the rank's own block to those of its keys and values."""
        sizes = [place.stop - place.start for place in self.places]
        for gradient, each in zip((of_key, of_value), block, strict=True):
            for place, part in zip(self.places, each.split(sizes, dim=1), strict=True):
                gradient[0, :, place] += part

    def start(self, transfers: Transfers, block: torch.Tensor, hop: int) -> Transfer:
        """Sends the block of a hop on, and gets that of the next one."""
        shape = (*block.shape[:2], self.tokens(hop + 1), block.shape[3])
        return transfers.start(block, shape, to=self.to, source=self.source)


def _hops_of(held: HeldDocuments, ring: Ring) -> _Hops:
    """Returns the hops of a ring, which are the same in every layer."""
    if ring.holders not in held.cache:
        held.cache[ring.holders] = _Hops(ring, held.share.index, held.share.whole_tokens)
    return held.cache[ring.holders]


class RingAttention(torch.autograd.Function):
    """Computes attention of documents in rings. Takes queries, keys and values [1, heads, T, D] of the rank's tokens
    of shared documents, and gives [1, heads, T, D]: zeros for documents of other executions.
    """

    @staticmethod
    def forward(ctx, query, key, value, held, transfers, options, kept):
        share = held.share
        ctx.args = held, transfers, options
        if kept:  # the second time
            output, log_sum_exp = kept.pop("ring")
            ctx.save_for_backward(query, key, value, output, log_sum_exp)
            return output.view_as(output)
        merged = MergedAttention(query, value.shape[-1])
        for ring in share.rings:
            hops = _hops_of(held, ring)
            block = hops.block(key, value)
            for hop in range(hops.size):
                last = hop + 1 == hops.size
                coming = None if last else hops.start(transfers, block, hop)
                attend(query, block[:1], block[1:], hops.parts(hop, share.index), options, merged)
                block = block if last else coming.wait()
        output = merged.output.to(query.dtype)
        if kept is not None:
            kept["ring"] = output.detach(), merged.log_sum_exp
        ctx.save_for_backward(query, key, value, output, merged.log_sum_exp)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        query, key, value, output, log_sum_exp = ctx.saved_tensors
        held, transfers, options = ctx.args
        share, given = held.share, GivenGradient(gradient, query, output, log_sum_exp)
        of_query, of_key, of_value = (torch.zeros_like(x, dtype=torch.float32) for x in (query, key, value))
        for ring in share.rings:
            hops = _hops_of(held, ring)
            block, arriving = hops.block(key, value), None
            for hop in range(hops.size):
                last = hop + 1 == hops.size
                coming = None if last else hops.start(transfers, block, hop)
                own = torch.zeros_like(block, dtype=torch.float32)
                parts, of_states = hops.parts(hop, share.index), (of_query, own[:1], own[1:])
                attend_backward(given, block[:1], block[1:], parts, options, of_states)
                if arriving is not None:
                    own += arriving.wait()  # what the ranks before have added to this block's gradient
                    arriving = None  # frees it before the next one is made
                block = block if last else coming.wait()
                arriving = hops.start(transfers, own, hop)
            hops.add_own(arriving.wait(), of_key, of_value)
        return of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype), None, None, None, None
