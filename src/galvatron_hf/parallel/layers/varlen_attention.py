# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Attention inside the documents of a packed row, from their bounds, without a [T, T] mask or matrix of scores."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

import torch
from torch.nn import functional as F
from torch.nn.attention.varlen import varlen_attn
from torch.utils.checkpoint import checkpoint
from transformers.utils import logging

from galvatron_hf.parallel.activation.documents import DocumentBounds


logger = logging.get_logger(__name__)

# Number of queries whose scores exist at once, if scores must be computed or masked.
BLOCK = 128

_stands_for_gpu = False  # whether tensors of the CPU take the kernels of a GPU


def attention_by_document(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds: Sequence[int] | DocumentBounds,
    *,
    causal: bool,
    scale: float | None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    bias: torch.Tensor | None = None,
    key_bounds: DocumentBounds | None = None,
) -> torch.Tensor:
    """Computes attention of one packed row whose documents attend only inside themselves; memory is linear in T. The
    CPU's fused kernel runs document by document, neighbours of equal length as one batch. Sliding windows, biases,
    soft-capping and dropout, which that kernel lacks, go over blocks of queries. On CUDA, bf16 and fp16 use
    `varlen_attn` if it supports the options, else the path of the CPU. Documents of one length are rows, for which
    `scaled_dot_product_attention` is up to twice as fast there.

    Args:
        query (`torch.Tensor`): [1, heads, T, D].
        key, value (`torch.Tensor`): [1, key/value heads, T or T', D or value D]; each head serves
            `heads / key/value heads` query heads.
        bounds (`Sequence[int]` or [`DocumentBounds`]): offsets at which documents begin, and T: 0 = b0 < b1 < ... <
            bn = T.
        causal (`bool`): whether a token sees the tokens up to itself only.
        scale (`float`, *optional*): factor of the scores; `D ** -0.5` by default.
        sliding_window (`int`, *optional*): a token sees tokens at a smaller distance. Modules of transformers pass
            this number to their attention function (bidirectional ones pass their config's number + 1).
        softcap (`float`, *optional*): scores become `softcap * tanh(scores / softcap)`, in float32.
        dropout (`float`): probability of dropping an attention weight; drawn from the default generator.
        bias (`torch.Tensor`, *optional*): [1, heads, S, S], added to the scores of a document's first S tokens; S is
            at least the length of the longest document.
        key_bounds ([`DocumentBounds`], *optional*): the documents of the keys, which end at T', if they are others
            than those of the queries. Each document of queries attends to the one with its number.

    Returns:
        `torch.Tensor`: [1, T, heads, value D].
    """
    bounds = bounds if isinstance(bounds, DocumentBounds) else DocumentBounds(bounds)
    for found, states in ((bounds, query), (key_bounds or bounds, key)):
        if found.tokens != states.shape[2]:
            raise ValueError(
                f"Document bounds {list(found.offsets)} do not end at the row's {states.shape[2]} tokens; pass the "
                "offset where each document begins, and the number of tokens."
            )
    if key_bounds is not None and len(key_bounds.lengths) != len(bounds.lengths):
        raise ValueError(
            f"{len(bounds.lengths)} documents of queries cannot attend to {len(key_bounds.lengths)} documents of "
            "keys; give each its own."
        )
    key_bounds = key_bounds or bounds
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    value_dim = value.shape[-1]
    query, key, value = same_head_dim(query, key, value)
    if sliding_window is not None and sliding_window >= bounds.longest:
        sliding_window = None
    fused = softcap is None and dropout == 0.0 and bias is None
    if fused and sliding_window is None and None not in (bounds.rows, key_bounds.rows):
        output = _rows(query, key, value, bounds.rows, causal, scale)
    elif fused and has_varlen_kernel(query):
        output = _varlen(query, key, value, bounds, key_bounds, causal, scale, sliding_window)
    else:
        options = dict(causal=causal, scale=scale, sliding_window=sliding_window, softcap=softcap, dropout=dropout)
        output = _document_by_document(query, key, value, bounds, key_bounds, bias, **options)
    return output[..., :value_dim]


@torch.compiler.disable(reason="the lengths of documents decide what is computed")
def _document_by_document(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds: DocumentBounds,
    key_bounds: DocumentBounds,
    bias: torch.Tensor | None,
    *,
    causal: bool,
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
    dropout: float,
) -> torch.Tensor:
    """Computes [`attention_by_document`] by kernels that know no documents."""
    fused = softcap is None and dropout == 0.0 and bias is None
    outputs = []
    for documents in _runs_of_equal_length((query, key, value), bounds.lengths, key_bounds.lengths):
        length = documents[0].shape[2]
        windowed = sliding_window is not None and sliding_window < length
        if not fused:
            weigh = functools.partial(_recomputed_block, scale=scale, softcap=softcap, dropout=dropout)
            output = _attention_in_blocks(*documents, causal, sliding_window if windowed else None, weigh, bias)
        elif windowed:
            weigh = functools.partial(_fused_block, scale=scale)
            output = _attention_in_blocks(*documents, causal, sliding_window, weigh)
        else:
            output = _fused_attention(*documents, None, causal=causal, scale=scale)
        outputs.append(output.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs)[None]


def same_head_dim(*states: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Pads with zeros to the widest head, because the fused kernels have one width; scores and outputs stay."""
    widest = max(each.shape[-1] for each in states)
    return tuple(each if each.shape[-1] == widest else F.pad(each, (0, widest - each.shape[-1])) for each in states)


def _runs_of_equal_length(
    states: Sequence[torch.Tensor], lengths: Sequence[int], key_lengths: Sequence[int]
) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yields views [documents, heads, length, D] of queries, keys and values [1, heads, T, D]: neighbours of equal
    lengths together.
    """
    runs = [(*pair, len(list(run))) for pair, run in groupby(zip(lengths, key_lengths, strict=True))]
    tokens = [length * documents for length, _, documents in runs]
    key_tokens = [length * documents for _, length, documents in runs]
    # One split, not a slice each: its backward is one concatenation, that of a slice fills all T positions.
    splits = (each.split(sizes, dim=2) for each, sizes in zip(states, (tokens, key_tokens, key_tokens), strict=True))
    for (*_, documents), *pieces in zip(runs, *splits, strict=True):
        if documents > 1:
            pieces = [piece.squeeze(0).unflatten(1, (documents, -1)).transpose(0, 1) for piece in pieces]
        yield tuple(pieces)


def _fused_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    scale: float,
    causal: bool = False,
) -> torch.Tensor:
    half = query.dtype in (torch.bfloat16, torch.float16)
    if query.is_cuda and key.shape[1] != query.shape[1] and not (half and mask is None):
        # CUDA's kernels for float32 or a mask have no shared heads; the remaining kernel would compute all scores.
        copies = query.shape[1] // key.shape[1]
        key, value = (states.repeat_interleave(copies, dim=1) for states in (key, value))
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=key.shape[1] != query.shape[1]
    )


def _rows(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, count: int, causal: bool, scale: float
) -> torch.Tensor:
    """Computes attention of `count` documents of one length."""
    rows = (states.squeeze(0).unflatten(1, (count, -1)).transpose(0, 1) for states in (query, key, value))
    output = _fused_attention(*rows, None, causal=causal, scale=scale)
    return output.transpose(1, 2).flatten(0, 1)[None]


def _attention_in_blocks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    causal: bool,
    window: int | None,
    weigh: Callable[..., torch.Tensor],
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes attention of documents [N, heads, S, D], one block of queries after the other. `weigh` takes queries,
    the blocks of keys and of values that they reach, and the mask to add to the scores (or None); it returns the
    output [N, heads, block, D]. `bias` [1, heads, S or more, S or more] is added to the scores too.
    """
    length = key.shape[2]
    reach = length - 1 if window is None else window - 1
    block = min(BLOCK, query.shape[2])
    queries, keys, values = (states.split(min(BLOCK, states.shape[2]), dim=2) for states in (query, key, value))
    reaches_all = not causal and window is None
    blocks_back = min(-(-reach // block), len(queries) - 1)
    mask = None
    if causal or window is not None:
        mask = _block_mask(query, block, blocks_back, causal, window)
    outputs = []
    for index, rows in enumerate(queries):
        first = 0 if reaches_all else max(0, index - blocks_back)
        last = len(keys) - 1 if reaches_all else index if causal else min(len(keys) - 1, index + blocks_back)
        seen = None
        if mask is not None:
            begin = (blocks_back - index + first) * block
            columns = min((last + 1) * block, length) - first * block
            seen = mask[: rows.shape[2], begin : begin + columns]
        if bias is not None:
            own = slice(index * block, index * block + rows.shape[2])
            added = bias[0, :, own, first * block : min((last + 1) * block, length)]
            seen = added if seen is None else added + seen
        outputs.append(weigh(rows, keys[first : last + 1], values[first : last + 1], seen))
    return torch.cat(outputs, dim=2)


def _block_mask(query: torch.Tensor, block: int, blocks_back: int, causal: bool, window: int | None) -> torch.Tensor:
    """Returns the mask to add to the scores of a block of queries: [block, keys from `blocks_back` blocks before on].
    All blocks slice this mask, because a mask depends on distance alone.
    """
    blocks_on = 0 if causal else blocks_back
    rows = torch.arange(block, device=query.device)[:, None]
    distance = rows - torch.arange(-blocks_back * block, (blocks_on + 1) * block, device=query.device)
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if causal:
        hidden |= distance < 0
    if window is not None:
        hidden |= distance.abs() >= window
    return torch.zeros(hidden.shape, dtype=query.dtype, device=query.device).masked_fill_(hidden, -torch.inf)


def _fused_block(
    query: torch.Tensor,
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    mask: torch.Tensor,
    *,
    scale: float,
) -> torch.Tensor:
    return _fused_attention(query, torch.cat(keys, dim=2), torch.cat(values, dim=2), mask, scale=scale)


def _recomputed_block(
    query: torch.Tensor,
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    mask: torch.Tensor | None,
    *,
    scale: float,
    softcap: float | None,
    dropout: float,
) -> torch.Tensor:
    """Computes attention of one block; the backward computes its scores again, from the same random numbers."""

    def attend(query: torch.Tensor, mask: torch.Tensor | None, *blocks: torch.Tensor) -> torch.Tensor:
        # Joined here, so that each block of keys is saved once and not with every block of queries.
        key, value = (torch.cat(each, dim=2) for each in (blocks[: len(keys)], blocks[len(keys) :]))
        return _attention_from_scores(query, key, value, mask, scale, softcap, dropout)

    return checkpoint(attend, query, mask, *keys, *values, use_reentrant=False, preserve_rng_state=dropout > 0.0)


def _attention_from_scores(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float | None,
    dropout: float,
) -> torch.Tensor:
    heads, key_value_heads = query.shape[1], key.shape[1]
    query = query.unflatten(1, (key_value_heads, heads // key_value_heads))
    # The query heads that share a key are rows of one product, so that no key is copied.
    scores = (query.flatten(2, 3) @ key.mT).unflatten(2, query.shape[2:4]).float()
    scores = scores * scale if softcap is None else torch.tanh(scores * (scale / softcap)) * softcap
    if mask is not None:
        scores.add_(mask if mask.ndim == 2 else mask.unflatten(0, (key_value_heads, -1)))
    weights = torch.softmax(scores, dim=-1).to(value.dtype)
    if dropout > 0.0:
        weights = F.dropout(weights, dropout)
    return (weights.flatten(2, 3) @ value).unflatten(2, query.shape[2:4]).flatten(1, 2)


def has_varlen_kernel(query: torch.Tensor) -> bool:
    """Returns whether CUDA's kernel for documents of different lengths takes queries [..., D]."""
    head_dim = query.shape[-1]
    fits = query.dtype in (torch.bfloat16, torch.float16) and head_dim % 8 == 0 and head_dim <= 256
    return fits and (_stands_for_gpu or (query.is_cuda and _has_flash_attention(query.device)))


@contextlib.contextmanager
def kernels_of_gpus() -> Iterator[None]:
    """Lets fake tensors of the CPU stand for those of a GPU with flash attention while the body runs."""
    global _stands_for_gpu
    _stands_for_gpu = True
    try:
        yield
    finally:
        _stands_for_gpu = False


@torch.compiler.assume_constant_result
@functools.cache
def _has_flash_attention(device: torch.device) -> bool:
    """Returns whether a GPU runs flash attention, which needs compute capability 8.0; warns once if it does not."""
    found = torch.cuda.get_device_capability(device)
    if found < (8, 0):
        logger.warning(
            f"Packed attention takes the path without flash attention, because {device} has compute capability "
            f"{found[0]}.{found[1]}, and flash attention needs 8.0."
        )
    return found >= (8, 0)


def _varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds: DocumentBounds,
    key_bounds: DocumentBounds,
    causal: bool,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Computes attention of all documents by one kernel of CUDA."""
    offsets = bounds.on(query.device)
    key_offsets = offsets if key_bounds is bounds else key_bounds.on(query.device)
    reach = -1 if window is None else window - 1  # on each side, without the token itself; -1 for all
    query, key, value = (states.squeeze(0).transpose(0, 1) for states in (query, key, value))
    output = varlen_attn(
        query,
        key,
        value,
        offsets,
        key_offsets,
        bounds.longest,
        key_bounds.longest,
        scale=scale,
        window_size=(reach, 0 if causal else reach),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output[None]
