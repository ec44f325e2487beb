# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Attention of documents whose ranks exchange tokens for heads (arXiv 2309.14509)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from galvatron_hf.parallel.activation.documents import DocumentBounds, HeldDocuments
from galvatron_hf.parallel.comm.transfers import Transfers
from galvatron_hf.parallel.layers.varlen_attention import attention_by_document
from galvatron_hf.plan.chunks import size_of
from galvatron_hf.plan.deal import SharedDocument


def exchanged_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    held: HeldDocuments,
    transfers: Transfers,
    **options: Any,
) -> torch.Tensor:
    """Computes attention of documents for which ranks exchange tokens for heads; [1, heads, T, value D]."""
    share = held.share
    states = [_heads_for(query, key, value, one) for one in share.exchanged]
    ranks = transfers.group.size()
    sent: list[list[torch.Tensor]] = [[] for _ in range(ranks)]
    received = [0] * ranks
    for one, of_document in zip(share.exchanged, states, strict=True):
        place = slice(one.at - share.whole_tokens, one.at - share.whole_tokens + one.tokens)
        degree = len(one.holders)
        width = sum(x.shape[1] for x in of_document) // degree * query.shape[3]
        for number, holder in enumerate(one.holders):
            sent[holder] += [x[0, :, place].chunk(degree)[number].flatten() for x in of_document]
            received[holder] += size_of(one.runs[holder]) * width
    flat = _exchange(sent, received, query, transfers)
    arrived = flat.split(received)
    back: list[list[torch.Tensor]] = [[] for _ in range(ranks)]
    counts, places = [0] * ranks, [0] * ranks
    for one, of_document in zip(share.exchanged, states, strict=True):
        heads = [x.shape[1] // len(one.holders) for x in of_document]
        pieces = []
        for holder in one.holders:
            size = size_of(one.runs[holder])
            of_states = [n * size * query.shape[3] for n in heads]
            part = arrived[holder][places[holder] : places[holder] + sum(of_states)].split(of_states)
            pieces.append([x.view(n, size, -1) for x, n in zip(part, heads, strict=True)])
            places[holder] += sum(of_states)
        order = _document_order(one, query.device)
        whole = [torch.cat(each, dim=1)[None].index_select(2, order) for each in zip(*pieces, strict=True)]
        output = attention_by_document(*whole, DocumentBounds((0, one.length)), **options)[0].transpose(0, 1)
        output = output.index_select(1, torch.argsort(order))
        sizes = [size_of(one.runs[holder]) for holder in one.holders]
        for holder, part in zip(one.holders, output.split(sizes, dim=1), strict=True):
            back[holder].append(part.flatten())
            counts[holder] += one.tokens * heads[0] * value.shape[3]
    flat = _exchange(back, counts, flat, transfers)
    arrived = flat.split(counts)
    places, outputs, at = [0] * ranks, [], share.whole_tokens
    for one in share.exchanged:
        heads, parts = query.shape[1] // len(one.holders), []
        outputs.append(value.new_zeros(query.shape[1], one.at - at, value.shape[3]))
        at = one.at + one.tokens
        for holder in one.holders:
            size = one.tokens * heads * value.shape[3]
            parts.append(arrived[holder][places[holder] : places[holder] + size].view(heads, one.tokens, -1))
            places[holder] += size
        outputs.append(torch.cat(parts))
    outputs.append(value.new_zeros(query.shape[1], share.tokens - at, value.shape[3]))
    outputs.append(flat[:0].view(query.shape[1], 0, value.shape[3]))
    return torch.cat(outputs, dim=1)[None]


def _heads_for(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, one: SharedDocument) -> tuple:
    """Returns the states with as many key/value heads that the document's ranks can divide them."""
    degree, heads, shared = len(one.holders), query.shape[1], key.shape[1]
    if heads % degree:
        raise ValueError(
            f"{degree} ranks that share a document cannot exchange its tokens for {heads} heads; use the execution "
            "'ring' or 'gather'."
        )
    if shared % degree:
        copies = degree // shared if degree % shared == 0 else heads // shared
        key, value = (x.repeat_interleave(copies, dim=1) for x in (key, value))
    return query, key, value


def _exchange(
    pieces: Sequence[Sequence[torch.Tensor]], received: Sequence[int], before: torch.Tensor, transfers: Transfers
) -> torch.Tensor:
    """Sends flat pieces to each rank; returns what arrives, in rank order. It depends on `before` and the result must
    be used even if it is empty: the backward, in which all ranks take part, runs for what an output depends on.
    """
    flat = torch.cat([before.flatten()[:0], *(x for of_rank in pieces for x in of_rank)])
    return transfers.exchange(flat, received, [sum(x.numel() for x in of_rank) for of_rank in pieces])


def _document_order(one: SharedDocument, device: torch.device) -> torch.Tensor:
    """Returns the indices that put the tokens of all ranks, one rank after the other, into the document's order."""
    runs: list[tuple[int, int, int]] = []
    ranges = [run for holder in one.holders for run in one.runs[holder]]
    starts = accumulate((stop - start for start, stop in ranges), initial=0)
    for (start, stop), at in zip(ranges, starts):
        runs.append((start, at, at + stop - start))
    return torch.cat([torch.arange(first, last, device=device) for _, first, last in sorted(runs)])
