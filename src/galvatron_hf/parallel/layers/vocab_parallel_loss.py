# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Vocabulary-parallel embedding, cross-entropy without full logits, and full logits of a rank's own rows. Tensors are
local: each rank of a tensor group holds a range of the vocabulary's rows ([`vocabulary_range`]), the last ranks
possibly none. B rows, S positions, T tokens, H hidden, V vocabulary, n tensor ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.utils.flop_counter import register_flop_formula

from galvatron_hf.parallel.comm.collectives import (
    all_gather_stacked,
    all_reduce_sum,
    all_to_all_pieces,
    is_trivial,
    reduce_from_group,
)
from galvatron_hf.utils.compat import assert_without_waiting


def vocabulary_range(vocab_size: int, degree: int, index: int) -> tuple[int, int]:
    """Returns (first row, row after the last) of a vocabulary matrix that DTensor's `Shard(0)` gives to rank `index`
    of `degree`. Every rank has ceil(V / degree) rows until they run out, so the last ranks may have fewer, or none.
    """
    chunk = -(-vocab_size // degree)
    return min(index * chunk, vocab_size), min((index + 1) * chunk, vocab_size)


def vocabulary_parallel_embedding(
    lookup: Callable[[Tensor], Tensor], ids: Tensor, start: int, stop: int, group: ProcessGroup | None
) -> Tensor:
    """Embeds tokens with a matrix whose rows are spread over a group (Megatron-LM, arXiv:1909.08053). The output
    `[*ids.shape, H]` is replicated, so its gradient is full on every rank and is not summed.

    Args:
        lookup (`Callable`): computes embeddings `[*ids.shape, H]` from local ids in `[0, stop - start)`, as the
            model's own embedding module does, with its scale. It handles its `padding_idx`, counted from `start`.
        ids (`Tensor` of integers, any shape): equal on every rank of the group.
        start, stop (`int`): this rank's first vocabulary row, and the row after its last; equal if the rank has none.
    """
    if is_trivial(group):
        return lookup(ids)
    if start == stop:
        # No rows: zeros that depend on the weight, so that it gets a gradient (of no rows) as on the other ranks.
        embedded = lookup(ids.new_empty(0)).sum(0).expand(*ids.shape, -1)
    else:
        local = (ids >= start) & (ids < stop)
        embedded = lookup(torch.where(local, ids - start, 0))
        embedded = torch.where(local.unsqueeze(-1), embedded, 0)
    return reduce_from_group(embedded, group)


@dataclass(frozen=True, kw_only=True)
class _Head:
    """Holds the options of a head and its loss; see [`linear_cross_entropy`]."""

    start: int
    group: ProcessGroup | None
    vocab_size: int
    chunk_tokens: int
    logit_scale: float
    softcap: float | None
    ignore_index: int
    label_smoothing: float


# [`loss_of_chunk`], or what a compiler made of it.
ChunkLoss = Callable[..., tuple[Tensor, Tensor | None, Tensor | None]]


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    start: int,
    group: ProcessGroup | None,
    vocab_size: int,
    chunk_tokens: int,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    recompute_logits_in_backward: bool = False,
    chunk_loss: ChunkLoss | None = None,
) -> Tensor:
    """Returns the sum of the tokens' cross-entropies under a head whose vocabulary is spread over a group. The sum is
    an fp32 scalar (fp64 for fp64 input), equal on every rank of the group.

    The logits exist for `chunk_tokens` tokens at a time. The forward computes gradients by chunk, and the backward
    scales them, so that nothing of the size of the logits is saved; see `recompute_logits_in_backward`. Statistics are
    fp32, and so is the sum of the weight's gradient over chunks. There is one small collective for each chunk, and one
    for the gradient of `hidden`.

    The logits are `cap(logit_scale * (hidden @ weight.T + bias))` with `cap(z) = softcap * tanh(z / softcap)`. With
    `label_smoothing` e a token's loss is `(1 - e) * nll + e * mean over V of -log p`, as in
    `transformers.trainer_pt_utils.LabelSmoother`.

    Args:
        hidden (`Tensor` of shape `[T, H]`): equal on every rank of the group; so is its gradient.
        weight (`Tensor` of shape `[V/n, H]`): this rank's vocabulary rows, possibly none.
        bias (`Tensor` of shape `[V/n]` or `None`): this rank's part.
        targets (`Tensor` of shape `[T]`, int64): token ids, or `ignore_index`; equal on every rank of the group.
        start (`int`): first vocabulary row of this rank.
        recompute_logits_in_backward (`bool`): whether the backward computes logits again, and then the gradients.
            Without it each micro-batch in flight holds a gradient of the size of the weight.
        chunk_loss (`Callable`, *optional*): [`loss_of_chunk`], compiled.

    Raises:
        RuntimeError: if a target is neither a token nor `ignore_index` (on CUDA: a device-side assertion).
    """
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens is {chunk_tokens}, but a chunk has at least one token; use 1 or more.")
    if hidden.dim() != 2 or targets.shape != hidden.shape[:1]:
        raise ValueError(
            f"Hidden states of shape {tuple(hidden.shape)} and targets of shape {tuple(targets.shape)} are not [T, H]"
            " and [T]; flatten rows and positions first."
        )
    head = _Head(
        start=start,
        group=group,
        vocab_size=vocab_size,
        chunk_tokens=chunk_tokens,
        logit_scale=logit_scale,
        softcap=softcap,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
    )
    options = torch.is_grad_enabled(), recompute_logits_in_backward, chunk_loss or loss_of_chunk
    return _LinearCrossEntropy.apply(hidden, weight, bias, targets, head, *options)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, head, grad_enabled, recompute, chunk_loss):
        # needs_input_grad depends on the inputs alone, also under no_grad
        needs = [grad_enabled and needed for needed in ctx.needs_input_grad[:3]]
        ctx.recompute, ctx.head, ctx.needs, ctx.chunk_loss = recompute, head, needs, chunk_loss
        ctx.dtypes = [None if x is None else x.dtype for x in (hidden, weight, bias)]
        if recompute:
            ctx.save_for_backward(hidden, weight, bias, targets)
            return _loss_and_gradients(hidden, weight, bias, targets, head, [False] * 3, chunk_loss)[0]
        loss, gradients = _loss_and_gradients(hidden, weight, bias, targets, head, needs, chunk_loss)
        ctx.save_for_backward(*gradients.finished(head.group))
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        gradients = ctx.saved_tensors
        if ctx.recompute:
            _, again = _loss_and_gradients(*gradients, ctx.head, ctx.needs, ctx.chunk_loss)
            gradients = again.finished(ctx.head.group)
        pairs = zip(gradients, ctx.dtypes, strict=True)
        scaled = [None if x is None else _scaled(x, grad, dtype) for x, dtype in pairs]
        return *scaled, None, None, None, None, None


def _loss_and_gradients(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    head: _Head,
    needs: list[bool],
    chunk_loss: ChunkLoss,
) -> tuple[Tensor, _Gradients]:
    """Returns the sum of the losses and, not yet summed over the ranks, the gradients that `needs` marks."""
    statistics_dtype = torch.promote_types(hidden.dtype, torch.float32)
    gradients = _Gradients(hidden, weight, bias, needs, statistics_dtype)
    loss = hidden.new_zeros((), dtype=statistics_dtype)
    for first in range(0, hidden.shape[0], head.chunk_tokens):
        tokens = slice(first, first + head.chunk_tokens)
        options = dict(dtype=statistics_dtype, gradient=any(needs), of_bias=needs[2])
        of_chunk, *found = chunk_loss(hidden[tokens], weight, bias, targets[tokens], head, **options)
        loss += of_chunk
        if any(needs):
            gradients.add(tokens, *found)
        del found  # before the logits of the next chunk exist
    return loss, gradients


def loss_of_chunk(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    head: _Head,
    *,
    dtype: torch.dtype,
    gradient: bool,
    of_bias: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Returns the loss of one chunk of C tokens and, on request, its gradients by the linear layer's output
    (`[C, V/n]`, in the type of `hidden`) and by its bias. `dtype` is that of the statistics.
    """
    logits, slope = _local_logits(hidden, weight, bias, head, dtype, slope=gradient)
    loss, of_output = _chunk_loss(logits, targets, head, gradient=gradient)
    if not gradient:
        return loss, None, None
    if slope is not None:
        of_output.mul_(slope)
    return loss, of_output.to(hidden.dtype), of_output.sum(0) if of_bias else None


def _scaled(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns `x * factor` in `dtype`, computed in the wider of the two types, on CUDA without a copy of `x` in it."""
    # CUDA rounds a factor without dimensions to the type of x first: 1 / tokens in bf16 is off by up to 0.4%.
    factor = factor.reshape([1] * x.dim())
    return torch.mul(x, factor, out=torch.empty_like(x, dtype=dtype))


@torch.library.custom_op("galvatron_hf::add_product", mutates_args={"total"}, device_types="cuda")
def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds the product of two half-precision matrices `[N, C]` and `[C, M]` to an fp32 `total` `[N, M]` on CUDA,
    without a temporary of its size. An operator of its own, because PyTorch 2.13 cannot trace this `addmm`.
    """
    torch.addmm(total, left, right, out_dtype=total.dtype, out=total)


@add_product.register_fake
def _(total: Tensor, left: Tensor, right: Tensor) -> None: ...


@register_flop_formula(torch.ops.galvatron_hf.add_product)
def _add_product_flop(total: torch.Size, left: torch.Size, right: torch.Size, **unused) -> int:
    return 2 * left[0] * left[1] * right[1]


class _Gradients:
    """Sums the needed gradients of `hidden`, `weight` and `bias` over the chunks."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, needs: list[bool], dtype: torch.dtype):
        self._inputs = hidden, weight
        self.hidden = torch.empty_like(hidden) if needs[0] else None
        self.weight = torch.zeros_like(weight, dtype=dtype) if needs[1] else None
        self.bias = torch.zeros_like(bias, dtype=dtype) if needs[2] else None

    def add(self, tokens: slice, narrow: Tensor, of_bias: Tensor | None) -> None:
        """Adds a chunk, given the gradients that [`loss_of_chunk`] returns."""
        hidden, weight = self._inputs
        if self.hidden is not None:
            torch.mm(narrow, weight, out=self.hidden[tokens])
        if self.weight is not None:
            if narrow.dtype == self.weight.dtype:
                self.weight.addmm_(narrow.t(), hidden[tokens])
            elif narrow.is_cuda:  # the only device with products of half-precision matrices in fp32
                add_product(self.weight, narrow.t(), hidden[tokens])
            else:
                # The sum would cast too, but a trace on fake tensors would not count it.
                self.weight += (narrow.t() @ hidden[tokens]).to(self.weight.dtype)
        if self.bias is not None:
            self.bias += of_bias

    def finished(self, group: ProcessGroup | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Returns the gradients, that of `hidden` summed over the parts of the vocabulary."""
        return None if self.hidden is None else all_reduce_sum(self.hidden, group), self.weight, self.bias


def _local_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, head: _Head, dtype: torch.dtype, *, slope: bool
) -> tuple[Tensor, Tensor | float | None]:
    """Returns logits `[C, V/n]` of this rank's vocabulary and, on request, their derivative by the linear output."""
    logits = torch.nn.functional.linear(hidden, weight, bias).to(dtype)
    derivative: Tensor | float | None = None
    if head.logit_scale != 1.0:
        logits.mul_(head.logit_scale)
        derivative = head.logit_scale
    if head.softcap is not None:
        bounded = logits.div_(head.softcap).tanh_()
        if slope:
            derivative = (1 - bounded * bounded).mul_(head.logit_scale)
        logits = bounded.mul_(head.softcap)
    return logits, derivative


def _chunk_loss(logits: Tensor, targets: Tensor, head: _Head, *, gradient: bool) -> tuple[Tensor, Tensor | None]:
    """Returns the loss of one chunk and its gradient by `logits`, which are overwritten; never waits for a device."""
    vocab_here = logits.shape[1]
    counts = targets != head.ignore_index
    known = (targets >= 0) & (targets < head.vocab_size)
    assert_without_waiting((known | ~counts).all(), "A target is neither a token of the vocabulary nor ignore_index.")
    here = counts & (targets >= head.start) & (targets < head.start + vocab_here)
    column = torch.where(here, targets - head.start, 0).unsqueeze(1)

    part = _statistics(logits, here, column, head)
    whole = _merge(part, head.group)
    log_sum = whole.top + whole.total.log()
    smoothing = head.label_smoothing
    loss = log_sum - (1 - smoothing) * whole.target - smoothing * whole.mean
    loss = torch.where(counts, loss, 0).sum()
    if not gradient:
        return loss, None

    # `logits` now holds exp(logits - maximum of this part)
    grad = logits.mul_((part.top - log_sum).exp_().unsqueeze(1))
    if smoothing:
        grad.sub_(smoothing / head.vocab_size)
    if vocab_here:
        grad.scatter_add_(1, column, (here.to(grad.dtype) * (smoothing - 1)).unsqueeze(1))
    # filled, not multiplied by zero: an ignored token may have logits that are not finite
    return loss, grad.masked_fill_(~counts.unsqueeze(1), 0)


@dataclass(frozen=True, kw_only=True)
class _Statistics:
    """Holds statistics of each token over a part of the vocabulary, all `[C]`.

    Attributes:
        top: the largest logit.
        total: the sum of exp(logit - top).
        target: the target's logit; 0 if this part does not have it.
        mean: the sum of logits divided by V; 0 without label smoothing.
    """

    top: Tensor
    total: Tensor
    target: Tensor
    mean: Tensor


def _statistics(logits: Tensor, here: Tensor, column: Tensor, head: _Head) -> _Statistics:
    """Returns the statistics of this rank's part, and overwrites `logits` by exp(logits - top)."""
    smallest = torch.finfo(logits.dtype).min
    if logits.shape[1] == 0:
        zero = torch.zeros_like(here, dtype=logits.dtype)
        return _Statistics(top=zero + smallest, total=zero, target=zero, mean=zero)
    # finite: if a whole part is masked with -inf, -inf - top must not be NaN
    top = logits.amax(1).clamp_min(smallest)
    target = torch.where(here, logits.gather(1, column).squeeze(1), 0)
    mean = logits.sum(1) / head.vocab_size if head.label_smoothing else torch.zeros_like(top)
    total = logits.sub_(top.unsqueeze(1)).exp_().sum(1)
    return _Statistics(top=top, total=total, target=target, mean=mean)


def _merge(part: _Statistics, group: ProcessGroup | None) -> _Statistics:
    """Returns the statistics of the whole vocabulary, bitwise equal on every rank of the group."""
    if is_trivial(group):
        return part
    # One small gather and the same arithmetic on every rank cost less than a maximum and a sum over the group.
    parts = all_gather_stacked(torch.stack([part.top, part.total, part.target, part.mean]), group)
    tops, totals, targets, means = parts.unbind(1)
    top = tops.amax(0)
    return _Statistics(top=top, total=(totals * (tops - top).exp()).sum(0), target=targets.sum(0), mean=means.sum(0))


class _GatherLocalLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, group, vocab_size):
        ctx.group, ctx.rows, ctx.vocab_size = group, logits.shape[0], vocab_size
        rows, columns = _local_rows(ctx.rows, group), _local_columns(vocab_size, group)
        return _swap(logits, 0, rows, 2, columns, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        rows, columns = _local_rows(ctx.rows, ctx.group), _local_columns(ctx.vocab_size, ctx.group)
        return _swap(grad, 2, columns, 0, rows, ctx.group), None, None


def gather_local_logits(logits: Tensor, group: ProcessGroup | None, *, vocab_size: int) -> Tensor:
    """Exchanges logits `[B, S, V/n]` of all rows, under this rank's vocabulary range, for those of the rank's own
    rows. The result is `[B', S, V]`, with rows `[k*B//n, (k+1)*B//n)` on the group's rank k. It is differentiable. The
    gradient of `logits` is whole, because one rank alone uses each logit.
    """
    if is_trivial(group):
        return logits
    expected = _local_columns(vocab_size, group)[group.rank()]
    if logits.shape[2] != expected:
        raise ValueError(
            f"Logits of shape {tuple(logits.shape)} are not rank {group.rank()}'s part of a vocabulary of {vocab_size}"
            f" over {group.size()} ranks; their last dimension should be {expected}."
        )
    return _GatherLocalLogits.apply(logits, group, vocab_size)


def _local_rows(rows: int, group: ProcessGroup) -> list[int]:
    size = group.size()
    return [(k + 1) * rows // size - k * rows // size for k in range(size)]


def _local_columns(vocab_size: int, group: ProcessGroup) -> list[int]:
    ranges = (vocabulary_range(vocab_size, group.size(), k) for k in range(group.size()))
    return [stop - start for start, stop in ranges]


def _swap(
    x: Tensor, split_dim: int, split: list[int], concat_dim: int, concat: list[int], group: ProcessGroup
) -> Tensor:
    """Sends piece k of `split_dim`, `split[k]` long, to rank k, and joins pieces of `concat[j]` from each rank j."""
    sent = [piece.reshape(-1) for piece in x.split(split, split_dim)]
    shapes = [list(x.shape) for _ in concat]
    for shape, length in zip(shapes, concat, strict=True):
        shape[split_dim], shape[concat_dim] = split[group.rank()], length
    received = [torch.Size(shape).numel() for shape in shapes]
    arrived = all_to_all_pieces(torch.cat(sent), received, [piece.numel() for piece in sent], group)
    pieces = [piece.view(shape) for piece, shape in zip(arrived.split(received), shapes, strict=True)]
    return torch.cat(pieces, concat_dim)
