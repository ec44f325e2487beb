# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Attention of documents that several data ranks hold in parts, beside documents that a rank has whole.

A shared document has one of three executions:

- "ring" (arXiv 2310.01889): keys and values go round the ranks that share it, a block at a time, while the queries
  attend to the block before. It needs memory for two blocks.
- "gather": each rank gets at once the keys and values that its queries see. It sends fewer bytes if there are windows,
  or if ranks hold several chunks; the backward needs what was gathered.
- "ulysses" (arXiv 2309.14509): ranks exchange their tokens for heads and attend to the whole document, so that every
  kernel, and dropout, works as usual. The number of ranks divides that of heads.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from galvatron_hf.parallel.activation.documents import HeldDocuments
from galvatron_hf.parallel.comm.transfers import Transfers
from galvatron_hf.parallel.layers.exchanged_attention import exchanged_attention
from galvatron_hf.parallel.layers.gathered_attention import GatheredAttention
from galvatron_hf.parallel.layers.partial_attention import ScoreOptions
from galvatron_hf.parallel.layers.ring_attention import RingAttention
from galvatron_hf.parallel.layers.varlen_attention import attention_by_document, same_head_dim


@torch.compiler.disable(reason="the documents of a rank decide what is computed and sent")
def attention_of_held(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    held: HeldDocuments,
    transfers: Transfers | None,
    *,
    causal: bool,
    scale: float | None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    bias: torch.Tensor | None = None,
    kept: dict | None = None,
) -> torch.Tensor:
    """Computes attention of a data rank's part of a packed row; collective over the ranks that share its documents.

    Args:
        query, key, value (`torch.Tensor`): [1, heads, T, D] and [1, key/value heads, T, D or value D] of the T tokens
            of the rank's part.
        held ([`HeldDocuments`]): the documents of the rank.
        transfers ([`Transfers`], *optional*): between the data ranks of the layer, if there are several.
        kept (`dict`, *optional*): where the output of rings is kept in the first forward of a layer that is computed
            again, and taken from the second time.
        causal, scale, sliding_window, softcap, dropout, bias: as in
            [`~galvatron_hf.parallel.layers.varlen_attention.attention_by_document`].

    Returns:
        `torch.Tensor`: [1, T, heads, value D].

    Raises:
        ValueError: for dropout in a ring or a gathered document, for a bias of scores, and for heads that the ranks
            of an exchange do not divide.
    """
    share = held.share
    options = dict(causal=causal, scale=scale, sliding_window=sliding_window, softcap=softcap)
    if bias is not None:
        raise ValueError(
            "A document that several ranks share cannot have a bias of scores; train with packing='static', without "
            "context parallelism."
        )
    if dropout > 0.0 and (share.rings or share.gathers):
        raise ValueError(
            f"attention dropout of {dropout} cannot be drawn in a document that ranks share by a ring or by "
            "gathering; set it to 0 or use the execution 'ulysses'."
        )
    if share.order is not None:
        order, inverse = held.order(query.device)
        query, key, value = (_Reorder.apply(states, order, inverse) for states in (query, key, value))
    whole = share.whole_tokens
    parts = [states.split([whole, states.shape[2] - whole], dim=2) for states in (query, key, value)]
    outputs = []
    if whole:
        outputs.append(attention_by_document(*(part[0] for part in parts), held.whole, dropout=dropout, **options))
    if whole < share.tokens or share.gathers or share.exchanges:
        shared = [part[1] for part in parts]
        outputs.append(_of_shared(*shared, held, transfers, kept, dropout=dropout, **options))
    output = torch.cat(outputs, dim=1)
    return _Reorder.apply(output, inverse, order, 1) if share.order is not None else output


def _of_shared(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    held: HeldDocuments,
    transfers: Transfers,
    kept: dict | None,
    *,
    dropout: float,
    **options: Any,
) -> torch.Tensor:
    """Computes attention of the tokens of shared documents; returns [1, T, heads, value D]."""
    share, value_dim = held.share, value.shape[-1]
    scale = query.shape[-1] ** -0.5 if options["scale"] is None else options["scale"]
    states = same_head_dim(query, key, value)
    found = []  # of each execution the results for its own documents, and zeros for others
    if share.rings or share.gathers:
        window = options["sliding_window"]
        score = ScoreOptions(
            causal=options["causal"],
            scale=scale,
            sliding_window=None if window is not None and window >= held.longest else window,
            softcap=options["softcap"],
        )
        if share.rings:
            found.append(RingAttention.apply(*states, held, transfers, score, kept))
        if share.gathers:
            found.append(GatheredAttention.apply(*states, held, transfers, score))
    if share.exchanges:
        found.append(exchanged_attention(*states, held, transfers, dropout=dropout, **options | {"scale": scale}))
    return functools.reduce(torch.add, found).transpose(1, 2)[..., :value_dim]


class _Reorder(torch.autograd.Function):
    """Puts tokens into another order; the gradient takes the way back, and nothing is added up."""

    @staticmethod
    def forward(ctx, x, order, inverse, dim=2):
        ctx.inverse, ctx.dim = inverse, dim
        return x.index_select(dim, order)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        return gradient.index_select(ctx.dim, ctx.inverse), None, None, None
