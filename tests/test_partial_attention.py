# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Parts of the attention of one document, merged by their log-sum-exp: the attention of the whole document."""

from __future__ import annotations

import pytest
import torch

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
from galvatron_hf.parallel.layers.varlen_attention import attention_by_document
from galvatron_hf.plan.chunks import chunks_of, merged, size_of


def states_of(tokens: int, heads: int, key_value_heads: int, dtype: torch.dtype, dim: int = 16):
    draw = torch.Generator().manual_seed(0)
    shapes = [(heads, dim), (key_value_heads, dim), (key_value_heads, dim), (heads, dim)]
    return [torch.randn(1, n, tokens, d, generator=draw).to(dtype) for n, d in shapes]


def taken(x: torch.Tensor, runs) -> torch.Tensor:
    return torch.cat([x[:, :, start:stop] for start, stop in runs], dim=2)


def in_parts(query, key, value, gradient, holders, options, seen_only: bool = False):
    """Returns output [1, heads, T, D] and gradients of the whole document, from the parts of its holders."""
    output = torch.zeros_like(query, dtype=torch.float32)
    gradients = [torch.zeros_like(x, dtype=torch.float32) for x in (query, key, value)]
    for own in holders:
        others = [own, *(one for one in holders if one != own)]
        keys = [visible_runs(own, one, options) if seen_only and one != own else one for one in others]
        queries, merged_ = taken(query, own), MergedAttention(taken(query, own), value.shape[3])
        blocks = [(taken(key, runs), taken(value, runs)) if runs else None for runs in keys]
        parts = [Part(query_at=0, query=own, key_at=0, key=runs) for runs in keys]
        for part, block in zip(parts, blocks, strict=True):
            if block is not None:
                attend(queries, *block, [part], options, merged_)
        result = merged_.output.to(query.dtype)
        given = taken(gradient, own)
        of_query = torch.zeros_like(queries, dtype=torch.float32)
        for part, block, runs in zip(parts, blocks, keys, strict=True):
            if block is None:
                continue
            of_block = [torch.zeros_like(x, dtype=torch.float32) for x in block]
            of_output = GivenGradient(given, queries, result, merged_.log_sum_exp)
            attend_backward(of_output, *block, [part], options, (of_query, *of_block))
            for whole, part_ in zip(gradients[1:], of_block, strict=True):
                for (start, stop), piece in zip(runs, part_.split([b - a for a, b in runs], dim=2), strict=True):
                    whole[:, :, start:stop] += piece
        sizes = [stop - start for start, stop in own]
        for whole, x in ((output, result.float()), (gradients[0], of_query)):
            for (start, stop), piece in zip(own, x.split(sizes, dim=2), strict=True):
                whole[:, :, start:stop] = piece
    return output, gradients


CASES = [
    (tokens, degree, causal, window, softcap)
    for tokens, degree in ((37, 2), (300, 3), (64, 4), (7, 4))
    for causal in (True, False)
    for window, softcap in ((None, None), (9, None), (150, 5.0), (None, 3.0))
]


@pytest.mark.parametrize("seen_only", [False, True])
@pytest.mark.parametrize("dtype, heads", [(torch.float32, (4, 4)), (torch.float32, (8, 2)), (torch.bfloat16, (4, 1))])
def test_parts_are_the_whole(dtype, heads, seen_only):
    for tokens, degree, causal, window, softcap in CASES:
        query, key, value, gradient = states_of(tokens, *heads, dtype)
        options = ScoreOptions(causal=causal, scale=0.3, sliding_window=window, softcap=softcap)
        holders = [merged(runs) for runs in chunks_of(tokens, degree) if runs]
        output, gradients = in_parts(query, key, value, gradient, holders, options, seen_only)
        inputs = [x.float().requires_grad_() for x in (query, key, value)]
        wanted = attention_by_document(
            *inputs, (0, tokens), causal=causal, scale=0.3, sliding_window=window, softcap=softcap
        ).transpose(1, 2)
        wanted.backward(gradient.float())
        bound = 2e-6 if dtype == torch.float32 else 2e-2
        for seen, one in zip((output, *gradients), (wanted.detach(), *(x.grad for x in inputs)), strict=True):
            error = float((seen - one).norm() / one.norm())
            assert error < bound, (tokens, degree, causal, window, softcap, error)


def test_invisible_tokens_are_not_sent():
    causal = ScoreOptions(causal=True, scale=1.0)
    windowed = ScoreOptions(causal=True, scale=1.0, sliding_window=4)
    assert visible_runs(((0, 8), (56, 64)), ((8, 16), (48, 56)), causal) == ((8, 16), (48, 56))
    assert visible_runs(((0, 8),), ((8, 16),), causal) == ()
    assert visible_runs(((8, 16), (48, 56)), ((0, 8), (56, 64)), windowed) == ((5, 8),)
    assert visible_runs(((8, 16),), ((0, 8), (16, 24)), ScoreOptions(causal=False, scale=1.0, sliding_window=3)) == (
        (6, 8),
        (16, 18),
    )


@pytest.mark.parametrize("seed", range(20))
def test_places_of_a_part(seed):
    draw = torch.Generator().manual_seed(seed)
    cuts = sorted(set(torch.randint(0, 60, (8,), generator=draw).tolist()))
    whole = merged(zip(cuts[::2], cuts[1::2]))
    tokens = [token for run in whole for token in range(*run)]
    chosen = [token for token in tokens if torch.rand((), generator=draw) < 0.5]
    part = merged((token, token + 1) for token in chosen)
    assert [token for place in places_of(part, whole) for token in tokens[slice(*place)]] == chosen
    assert size_of(part) == len(chosen)
