# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Attention of documents whose keys and values each rank gets at once from the ranks that share them."""

from __future__ import annotations

import torch
from torch.autograd.function import once_differentiable

from galvatron_hf.parallel.activation.documents import HeldDocuments
from galvatron_hf.parallel.layers.partial_attention import (
    GivenGradient,
    MergedAttention,
    Part,
    ScoreOptions,
    attend,
    attend_backward,
    places_of,
    visible_runs,
)
from galvatron_hf.plan.chunks import size_of


class _Gathering:
    """Holds which keys and values a rank sends to each data rank, and where those that arrive belong."""

    def __init__(self, held: HeldDocuments, options: ScoreOptions, ranks: int):
        share = held.share
        first, index = share.whole_tokens, share.index
        self.sent: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]  # ranges of the rank's tokens
        self.received = [0] * ranks
        self.parts: list[tuple[int, Part]] = []  # with the rank from which the keys come
        for one in share.gathered:
            own, at = one.runs[index], one.at - first
            self.parts.append((index, Part(query_at=at, query=own, key_at=at, key=own)))
        for one in share.gathered:
            own, at = one.runs[index], one.at - first
            for holder in one.holders:
                if holder == index:
                    continue
                seen = visible_runs(one.runs[holder], own, options)
                self.sent[holder] += [(at + start, at + stop) for start, stop in places_of(seen, own)]
                seen = visible_runs(own, one.runs[holder], options)
                if seen:
                    part = Part(query_at=at, query=own, key_at=self.received[holder], key=seen)
                    self.parts.append((holder, part))
                    self.received[holder] += size_of(seen)

    def by_rank(self) -> dict[int, list[Part]]:
        found: dict[int, list[Part]] = {}
        for rank, part in self.parts:
            found.setdefault(rank, []).append(part)
        return found

    def counts(self, width: int) -> tuple[list[int], list[int]]:
        """Returns the numbers that arrive from and go to each rank, for `width` of a token."""
        return [count * width for count in self.received], [size_of(ranges) * width for ranges in self.sent]

    def blocks(self, flat: torch.Tensor, like: torch.Tensor) -> list[torch.Tensor]:
        """Returns views [2, key/value heads, tokens, D] of what arrives from each rank."""
        heads, dim = like.shape[1], like.shape[3]
        counts, _ = self.counts(2 * heads * dim)
        return [part.view(2, heads, -1, dim) for part in flat.split(counts)]


class GatheredAttention(torch.autograd.Function):
    """Computes attention of documents whose keys and values are gathered; takes and gives what
    [`~galvatron_hf.parallel.layers.ring_attention.RingAttention`] does.
    """

    @staticmethod
    def forward(ctx, query, key, value, held, transfers, options):
        index = held.share.index
        if options not in held.cache:
            held.cache[options] = _Gathering(held, options, transfers.group.size())
        gathering = held.cache[options]
        own = torch.cat([key, value])  # [2, key/value heads, T, D]
        sent = [torch.cat([own[:, :, a:b] for a, b in ranges], dim=2) for ranges in gathering.sent if ranges]
        flat = torch.cat([block.flatten() for block in sent]) if sent else own.new_empty(0)
        width = 2 * own.shape[1] * own.shape[3]
        gathered = transfers.exchange(flat, *gathering.counts(width))
        blocks = gathering.blocks(gathered, own)
        merged = MergedAttention(query, value.shape[-1])
        for rank, parts in gathering.by_rank().items():
            block = own if rank == index else blocks[rank]
            attend(query, block[:1], block[1:], parts, options, merged)
        output = merged.output.to(query.dtype)
        ctx.save_for_backward(query, own, gathered, output, merged.log_sum_exp)
        ctx.args = held, transfers, options, gathering
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        query, own, gathered, output, log_sum_exp = ctx.saved_tensors
        held, transfers, options, gathering = ctx.args
        index, given = held.share.index, GivenGradient(gradient, query, output, log_sum_exp)
        of_query, of_own = (torch.zeros_like(x, dtype=torch.float32) for x in (query, own))
        of_gathered = torch.zeros_like(gathered, dtype=torch.float32)
        blocks, of_blocks = gathering.blocks(gathered, own), gathering.blocks(of_gathered, own)
        for rank, parts in gathering.by_rank().items():
            block, of_block = (own, of_own) if rank == index else (blocks[rank], of_blocks[rank])
            of_states = of_query, of_block[:1], of_block[1:]
            attend_backward(given, block[:1], block[1:], parts, options, of_states)
        heads, dim = own.shape[1], own.shape[3]
        received, sent = gathering.counts(2 * heads * dim)
        back = transfers.exchange(of_gathered, sent, received)
        for ranges, part in zip(gathering.sent, back.split(sent), strict=True):
            part, at = part.view(2, heads, -1, dim), 0
            for start, stop in ranges:
                of_own[:, :, start:stop] += part[:, :, at : at + stop - start]
                at += stop - start
        of_key, of_value = of_own.to(own.dtype).split(1)
        return of_query.to(query.dtype), of_key, of_value, None, None, None
