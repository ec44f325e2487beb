# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Attention of some tokens of a document to some other tokens of it, with the log-sum-exp of the scores. Partial
results are merged in float32, and the backward of each part needs only the merged output and log-sum-exp
(arXiv 2310.01889).
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch

from galvatron_hf.parallel.layers.varlen_attention import BLOCK, has_varlen_kernel
from galvatron_hf.plan.chunks import Runs, merged, size_of
from galvatron_hf.utils import compat
from galvatron_hf.utils.device import to_device


@dataclass(frozen=True, kw_only=True)
class ScoreOptions:
    """Holds the options of attention between two parts of a document; see
    [`~galvatron_hf.parallel.layers.varlen_attention.attention_by_document`].
    """

    causal: bool
    scale: float
    sliding_window: int | None = None
    softcap: float | None = None

    def sees(self, runs: Runs) -> tuple[tuple[float, float], ...]:
        """Returns for each run of queries the range [low, high) of the positions that any of them sees."""
        window = float("inf") if self.sliding_window is None else self.sliding_window
        return tuple((start - window + 1, stop if self.causal else stop + window - 1) for start, stop in runs)


def visible_runs(query: Runs, key: Runs, options: ScoreOptions) -> Runs:
    """Returns the tokens of `key` that some query sees."""
    seen = []
    for low, high in options.sees(query):
        for start, stop in key:
            first, last = max(start, low), min(stop, high)
            if first < last:
                seen.append((int(first), int(last)))
    found: list[tuple[int, int]] = []
    for start, stop in sorted(seen):  # ranges of several queries overlap
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], stop)
        else:
            found.append((start, stop))
    return tuple(found)


def places_of(part: Runs, whole: Runs) -> list[tuple[int, int]]:
    """Returns the ranges at which the tokens of `part` stand among those of `whole`, which contains them."""
    starts = list(accumulate((stop - start for start, stop in whole), initial=0))
    places = []
    for start, stop in part:
        for (first, last), at in zip(whole, starts):
            low, high = max(start, first), min(stop, last)
            if low < high:
                places.append((at + low - first, at + high - first))
    return list(merged(places))


class Block(NamedTuple):
    """Names queries and keys, [start, stop) each among those given, of which every query sees every key; or, if
    `causal`, those that are not after its own place.
    """

    query: tuple[int, int]
    key: tuple[int, int]
    causal: bool


def visible_blocks(query: Runs, key: Runs, causal: bool) -> list[Block]:
    """Returns the blocks of queries and keys without a window that see each other. Runs of queries and of keys are
    the same, or have no token in common.
    """
    queries, keys = size_of(query), size_of(key)
    if not causal or query == key:
        return [Block((0, queries), (0, keys), causal)]
    blocks: list[Block] = []
    at = 0
    for start, stop in query:
        seen = size_of(run for run in key if run[1] <= start)
        if seen and blocks and blocks[-1].key == (0, seen):
            blocks[-1] = Block((blocks[-1].query[0], at + stop - start), (0, seen), False)
        elif seen:
            blocks.append(Block((at, at + stop - start), (0, seen), False))
        at += stop - start
    return blocks


@dataclass(frozen=True, kw_only=True)
class Part:
    """Names a part of a document's attention: where its queries and its keys stand among the given states, and which
    tokens of the document they are.
    """

    query_at: int
    query: Runs
    key_at: int
    key: Runs


class MergedAttention:
    """Sums up partial results for queries [1, heads, T, D]: `output` [1, heads, T, value D] and `log_sum_exp`
    [1, heads, T] in float32. The first result of a query must cover at least one key.
    """

    def __init__(self, query: torch.Tensor, value_dim: int):
        shape = query.shape[:3]
        self.output = query.new_zeros(*shape, value_dim, dtype=torch.float32)
        self.log_sum_exp = query.new_full(shape, -torch.inf, dtype=torch.float32)

    def add(self, start: int, output: torch.Tensor, log_sum_exp: torch.Tensor) -> None:
        """Adds the result of the queries from `start` on."""
        rows = slice(start, start + log_sum_exp.shape[2])
        before = self.log_sum_exp[:, :, rows]
        after = torch.logaddexp(before, log_sum_exp)
        old, new = (torch.exp(each - after).unsqueeze(-1) for each in (before, log_sum_exp))
        self.output[:, :, rows] = self.output[:, :, rows] * old + output.float() * new
        self.log_sum_exp[:, :, rows] = after


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    parts: Sequence[Part],
    options: ScoreOptions,
    merged: MergedAttention,
) -> None:
    """Computes parts of the attention of queries [1, heads, T, D] to keys and values [1, key/value heads, T', D], and
    adds them to a result. Parts without a visible key cost nothing.
    """
    if not _is_fused(query, options):
        for part in parts:
            for rows, columns, hidden in _masked_blocks(part, options, query.device):
                scores = _scores(query[:, :, rows], key[:, :, columns], options).masked_fill_(hidden, -torch.inf)
                log_sum_exp = scores.logsumexp(-1)
                weights = torch.exp(scores - log_sum_exp.unsqueeze(-1)).nan_to_num_(0.0)  # rows that see nothing
                merged.add(rows.start, _weighted(weights, value[:, :, columns].float()), log_sum_exp)
        return
    for causal, blocks in _by_kind(parts, options.causal).items():
        if query.is_cuda:
            queries, keys, values = _packed(blocks, query, key, value)
            found, log_sum_exp = compat.varlen_forward(
                queries, keys, values, *_offsets(blocks, query.device), causal=causal, scale=options.scale
            )
            split = [stop - start for (start, stop), *_ in blocks]
            outputs = found.transpose(0, 1)[None].split(split, dim=2), log_sum_exp[None].split(split, dim=2)
            for block, output, one in zip(blocks, *outputs, strict=True):
                merged.add(block.query[0], output, one)
            continue
        for block in blocks:
            rows, columns = slice(*block.query), slice(*block.key)
            states = query[:, :, rows], key[:, :, columns], value[:, :, columns]
            merged.add(rows.start, *compat.flash_forward_on_cpu(*states, causal=causal, scale=options.scale))


class GivenGradient:
    """Holds the gradient of the output of queries [1, heads, T, D] with all that its way back needs.

    Attributes:
        gradient, query (`torch.Tensor`): [1, heads, T, D], in the type of the queries.
        output, log_sum_exp (`torch.Tensor`): those of all parts of the queries together; see [`MergedAttention`].
        delta (`torch.Tensor`): [1, heads, T], the sum of gradient * output over D in float32.
    """

    def __init__(self, gradient: torch.Tensor, query: torch.Tensor, output: torch.Tensor, log_sum_exp: torch.Tensor):
        self.gradient, self.query = gradient.to(query.dtype), query
        self.output, self.log_sum_exp = output, log_sum_exp
        self.delta = (self.gradient.float() * output.float()).sum(-1)


def attend_backward(
    given: GivenGradient,
    key: torch.Tensor,
    value: torch.Tensor,
    parts: Sequence[Part],
    options: ScoreOptions,
    gradients: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    """Adds the gradients of parts to those of the queries, keys and values, `gradients`, in float32."""
    gradient, query, output, log_sum_exp = given.gradient, given.query, given.output, given.log_sum_exp
    of_query, of_key, of_value = gradients
    if not _is_fused(query, options):
        for part in parts:
            for rows, columns, hidden in _masked_blocks(part, options, query.device):
                queries, keys, values = query[:, :, rows], key[:, :, columns].float(), value[:, :, columns].float()
                scores = _scores(queries, keys, options)
                weights = torch.exp(scores - log_sum_exp[:, :, rows].unsqueeze(-1)).masked_fill_(hidden, 0.0)
                own = gradient[:, :, rows].float()
                of_value[:, :, columns] += _summed(weights, own, keys.shape[1])
                of_scores = weights * (_products(own, values) - given.delta[:, :, rows].unsqueeze(-1))
                if options.softcap is not None:
                    of_scores *= 1 - (scores / options.softcap) ** 2
                of_scores *= options.scale
                of_query[:, :, rows] += _weighted(of_scores, keys)
                of_key[:, :, columns] += _summed(of_scores, queries.float(), keys.shape[1])
        return
    for causal, blocks in _by_kind(parts, options.causal).items():
        if query.is_cuda:
            states = _packed(blocks, query, key, value)
            (own, _, _), (out, _, _) = (_packed(blocks, x, key, value) for x in (gradient, output))
            rows = torch.cat([log_sum_exp[0, :, slice(*block.query)] for block in blocks], dim=1)
            found = compat.varlen_backward(
                own, *states, out, rows, *_offsets(blocks, query.device), causal=causal, scale=options.scale
            )
            sizes = [[stop - start for start, stop in ranges] for ranges in list(zip(*blocks))[:2]]
            split = (x.transpose(0, 1)[None].split(size, 2) for x, size in zip(found, (*sizes, sizes[1])))
            results = list(zip(*split, strict=True))
        else:
            results = []
            for block in blocks:
                rows, columns = slice(*block.query), slice(*block.key)
                states = query[:, :, rows], key[:, :, columns], value[:, :, columns]
                of_rows = gradient[:, :, rows], output[:, :, rows], log_sum_exp[:, :, rows]
                results.append(compat.flash_backward_on_cpu(*of_rows, *states, causal=causal, scale=options.scale))
        for block, (one, two, three) in zip(blocks, results, strict=True):
            of_query[:, :, slice(*block.query)] += one
            of_key[:, :, slice(*block.key)] += two
            of_value[:, :, slice(*block.key)] += three


def _is_fused(query: torch.Tensor, options: ScoreOptions) -> bool:
    if options.sliding_window is not None or options.softcap is not None:
        return False
    return not query.is_cuda or has_varlen_kernel(query)


def _by_kind(parts: Sequence[Part], causal: bool) -> dict[bool, list[Block]]:
    """Returns the visible blocks of all parts, causal ones apart from others, with places among the given states."""
    found: dict[bool, list[Block]] = {}
    for part in parts:
        for block in visible_blocks(part.query, part.key, causal):
            query, key = (tuple(at + x for x in one) for at, one in zip((part.query_at, part.key_at), block[:2]))
            found.setdefault(block.causal, []).append(Block(query, key, block.causal))
    return found


# ---- Kernels for many documents ----


def _packed(blocks: Sequence[Block], query: torch.Tensor, key: torch.Tensor, value: torch.Tensor):
    """Returns the states of blocks one after the other, [tokens, heads, D]."""
    ranges = [block.query for block in blocks], *[[block.key for block in blocks]] * 2
    return tuple(
        torch.cat([x[0, :, slice(*one)] for one in of_x], dim=1).transpose(0, 1).contiguous()
        for x, of_x in zip((query, key, value), ranges, strict=True)
    )


def _offsets(blocks: Sequence[Block], device: torch.device):
    """Returns where the queries and the keys of blocks begin, as tensors on the device, and their largest numbers."""
    sizes = [[stop - start for start, stop in ranges] for ranges in list(zip(*blocks))[:2]]
    offsets = (torch.tensor([0, *accumulate(one)], dtype=torch.int32, device="cpu") for one in sizes)
    return (*(to_device(one, device) for one in offsets), *map(max, sizes))


# ---- Scores that no kernel has ----


def _masked_blocks(
    part: Part, options: ScoreOptions, device: torch.device
) -> Iterator[tuple[slice, slice, torch.Tensor]]:
    """Yields blocks of queries with the range of keys that they see, as places among the given states, and the mask
    [queries, keys] of what is hidden.
    """
    keys = _positions(part.key, device)
    at = part.query_at
    for start, stop in part.query:
        for first in range(start, stop, BLOCK):
            last = min(first + BLOCK, stop)
            ((low, high),) = options.sees(((first, last),))
            columns = _columns(part.key, low, high)
            if columns.start < columns.stop:
                distance = torch.arange(first, last, device=device)[:, None] - keys[columns]
                hidden = distance < 0 if options.causal else torch.zeros_like(distance, dtype=torch.bool)
                if options.sliding_window is not None:
                    hidden = hidden | (distance.abs() >= options.sliding_window)
                place = slice(at + first - start, at + last - start)
                yield place, slice(part.key_at + columns.start, part.key_at + columns.stop), hidden
        at += stop - start


def _positions(runs: Runs, device: torch.device) -> torch.Tensor:
    return torch.cat([torch.arange(*run, device=device) for run in runs])


def _columns(runs: Runs, low: float, high: float) -> slice:
    """Returns the places of the tokens in [low, high) among those of runs."""
    starts = list(accumulate((stop - start for start, stop in runs), initial=0))

    def place(position: float) -> int:
        index = bisect.bisect_right(runs, position, key=lambda run: run[0]) - 1
        if index < 0:
            return 0
        start, stop = runs[index]
        return starts[index] + int(min(position, stop)) - start

    return slice(place(low), place(high))


def _products(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Returns the products [1, heads, T, T'] of queries with the keys of their heads, in float32."""
    shared = query.float().unflatten(1, (key.shape[1], -1))
    return (shared.flatten(2, 3) @ key.float().mT).unflatten(2, shared.shape[2:4]).flatten(1, 2)


def _scores(query: torch.Tensor, key: torch.Tensor, options: ScoreOptions) -> torch.Tensor:
    scores = _products(query, key) * options.scale
    return scores if options.softcap is None else torch.tanh(scores / options.softcap) * options.softcap


def _weighted(weights: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Returns weights [1, heads, T, T'] times values [1, key/value heads, T', D]."""
    shared = weights.unflatten(1, (value.shape[1], -1))
    return (shared.flatten(2, 3) @ value).unflatten(2, shared.shape[2:4]).flatten(1, 2)


def _summed(weights: torch.Tensor, states: torch.Tensor, heads: int) -> torch.Tensor:
    """Returns the sum over queries of weights [1, heads, T, T'] times states [1, heads, T, D], for key/value heads."""
    weights, states = (x.unflatten(1, (heads, -1)).flatten(2, 3) for x in (weights, states))
    return weights.mT @ states
