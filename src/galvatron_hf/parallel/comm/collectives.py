# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Collectives on activations, their gradients and losses, each with its backward. The functions are named by their
effect on a layout. For no group and for a group of one rank they return the input unchanged. They call PyTorch's
functional collectives and wait at once, inside autograd functions of this module. PyTorch's own derivatives count a
gradient several times if the consumer of a gathered tensor is replicated.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from galvatron_hf.parallel.comm.collective_log import record
from galvatron_hf.parallel.comm.fake_process_group import FakeProcessGroup
from galvatron_hf.utils.compat import functional_collectives


def _operations(group: ProcessGroup | FakeProcessGroup) -> Any:
    return group if isinstance(group, FakeProcessGroup) else functional_collectives


def is_trivial(group: ProcessGroup | None) -> bool:
    """Returns True if a group is None or has one rank."""
    return group is None or group.size() == 1


def all_reduce_sum(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Returns the sum of `x` over the group, any shape, in a new tensor. Not differentiable."""
    if is_trivial(group):
        return x
    record("all_reduce", x, group)
    operations = _operations(group)
    return operations.wait_tensor(operations.all_reduce(x.contiguous(), "sum", group.group_name))


def all_gather_stacked(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Gathers `[...]` of each rank into `[n, ...]` on all, in the group's rank order. Not differentiable."""
    if is_trivial(group):
        return x.unsqueeze(0)
    record("all_gather", x, group)
    size = group.size()
    operations = _operations(group)
    gathered = operations.all_gather_into_tensor(x.contiguous().unsqueeze(0), size, group.group_name)
    return operations.wait_tensor(gathered)


def all_to_all_pieces(
    pieces: Tensor, received: Sequence[int], sent: Sequence[int], group: ProcessGroup | None
) -> Tensor:
    """Sends consecutive pieces of a flat buffer to the ranks of a group, and returns the received pieces, in rank
    order. `sent` and `received` count elements for and from each rank; they may be zero. Not differentiable.
    """
    if is_trivial(group):
        return pieces
    return _wait(_start_all_to_all(pieces, received, sent, group), group)


def _start_all_to_all(pieces: Tensor, received: Sequence[int], sent: Sequence[int], group: ProcessGroup) -> Tensor:
    """Starts what [`all_to_all_pieces`] does; nothing reads the result before [`_wait`]."""
    record("all_to_all", pieces, group)
    width = pieces.element_size()
    moved = _operations(group).all_to_all_single(
        pieces.contiguous().view(torch.uint8),  # bytes, because not every backend supports every type
        [count * width for count in received],
        [count * width for count in sent],
        group.group_name,
    )
    return moved.view(pieces.dtype)


def _wait(moved: Tensor, group: ProcessGroup) -> Tensor:
    """Waits for the result of a collective, on the device's stream if it has one."""
    _operations(group).wait_tensor(moved.detach())
    return moved


def _gather_along(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Gathers `[.., P, ..]` of each of n ranks into `[.., n*P, ..]` on all."""
    dim = dim % x.dim()
    return all_gather_stacked(x, group).movedim(0, dim).flatten(dim, dim + 1)


def _scatter_sum_along(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Sums partial `[.., n*P, ..]` of n ranks; rank k gets piece k of the sum, `[.., P, ..]`."""
    pieces = _split_stacked(x, dim, group).contiguous()
    record("reduce_scatter", pieces, group)
    operations = _operations(group)
    reduced = operations.reduce_scatter_tensor(pieces, "sum", group.size(), group.group_name)
    return operations.wait_tensor(reduced).squeeze(0)


def _split_stacked(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Splits `[.., n*P, ..]` into `[n, .., P, ..]`, a view."""
    dim = dim % x.dim()
    if x.shape[dim] % group.size():
        raise ValueError(
            f"Dimension {dim} of a tensor of shape {tuple(x.shape)} cannot be split evenly over {group.size()} ranks;"
            f" pad it to a multiple of {group.size()}."
        )
    return x.unflatten(dim, (group.size(), -1)).movedim(dim, 0)


def _exchange(tensors: Sequence[Tensor], split_dim: int, concat_dim: int, group: ProcessGroup) -> list[Tensor]:
    """Exchanges tensors of one type and number of dimensions by one all-to-all."""
    stacked = [_split_stacked(x, split_dim, group) for x in tensors]
    sizes = [pieces[0].numel() for pieces in stacked]
    sent = stacked[0].new_empty(group.size(), sum(sizes))
    for pieces, place in zip(stacked, sent.split(sizes, dim=1), strict=True):
        place.view(pieces.shape).copy_(pieces)
    counts = [sum(sizes)] * group.size()
    arrived = all_to_all_pieces(sent.flatten(), counts, counts, group).view_as(sent)
    joined, dim = [], concat_dim % tensors[0].dim()
    for pieces, place in zip(stacked, arrived.split(sizes, dim=1), strict=True):
        joined.append(place.view(pieces.shape).movedim(0, dim).flatten(dim, dim + 1))
    return joined


class _CopyToGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return all_reduce_sum(grad, ctx.group), None


class _ReduceFromGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        return all_reduce_sum(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return grad, None


class _GatherPositions(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, dim):
        ctx.group, ctx.dim = group, dim
        return _gather_along(x, dim, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return _scatter_sum_along(grad, ctx.dim, ctx.group), None, None


class _ScatterSumPositions(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, dim):
        ctx.group, ctx.dim = group, dim
        return _scatter_sum_along(x, dim, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return _gather_along(grad, ctx.dim, ctx.group), None, None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, split_dim, concat_dim, group, *tensors):
        ctx.split_dim, ctx.concat_dim, ctx.group = split_dim, concat_dim, group
        return tuple(_exchange(tensors, split_dim, concat_dim, group))

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        return None, None, None, *_exchange(grads, ctx.concat_dim, ctx.split_dim, ctx.group)


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, group):
        ctx.group = group
        return weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        # fp32, because a sum in bf16 rounds more often than on one rank
        wide = torch.promote_types(grad.dtype, torch.float32)
        return all_reduce_sum(grad.to(wide), ctx.group).to(grad.dtype), None


def _gather_parts(x: Tensor, parts: Sequence[slice], group: ProcessGroup) -> Tensor:
    """Gathers rows of which rank k has `parts[k]`."""
    counts = [part.stop - part.start for part in parts]
    padded = x.new_zeros(max(counts), *x.shape[1:])
    padded[: x.shape[0]] = x
    pieces = all_gather_stacked(padded, group)
    order = sorted(range(len(parts)), key=lambda rank: parts[rank].start)
    return torch.cat([pieces[rank, : counts[rank]] for rank in order])


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, parts, group):
        ctx.own = parts[group.rank()]
        return _gather_parts(x, parts, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return grad[ctx.own], None, None


class _TakeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, parts, group):
        ctx.parts, ctx.group = parts, group
        return x[parts[group.rank()]].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return _gather_parts(grad, ctx.parts, ctx.group), None, None


def _start_rows(x: Tensor, received: Sequence[int], sent: Sequence[int], group: ProcessGroup) -> Tensor:
    width = x.shape[1]
    counts = [[rows * width for rows in each] for each in (received, sent)]
    return _start_all_to_all(x.flatten(), *counts, group).view(-1, width)


class MovingRows:
    """Moves rows to other ranks while something else is computed: [`MovingRows.start`], then [`MovingRows.finish`]. In
    the backward the rows' gradients move in the same way, while that of what was computed in between runs.

    Args:
        received, sent (`Sequence[int]`): rows from and to each rank of `group`, in rank order; they may be zero.
    """

    def __init__(self, received: Sequence[int], sent: Sequence[int], group: ProcessGroup):
        self.received, self.sent, self.group = received, sent, group
        self.gradient: Tensor | None = None  # on its way

    def start(self, x: Tensor) -> Tensor:
        """Starts to send rows of `[rows, features]`: the first `sent[0]` to rank 0, and so on. Nothing may read the
        result before [`MovingRows.finish`].
        """
        return _StartRows.apply(x, self)

    def finish(self, moving: Tensor) -> Tensor:
        """Returns the rows that arrive, `received[k]` of them from rank k, in rank order."""
        return _FinishRows.apply(moving, self)


class _StartRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, moving):
        ctx.moving = moving
        return _start_rows(x, moving.received, moving.sent, moving.group)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        gradient, ctx.moving.gradient = ctx.moving.gradient, None
        return _wait(gradient, ctx.moving.group), None


class _FinishRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, moving):
        ctx.moving = moving
        return _wait(x, moving.group).view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        moving = ctx.moving
        moving.gradient = _start_rows(grad, moving.sent, moving.received, moving.group)
        return grad, None  # stands for the gradient that moves, which has as many rows as were sent


def copy_to_group(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Enters a tensor-parallel region with a replicated tensor of any shape. The forward is the identity; the backward
    sums the partial gradients over the group (operator f of Megatron-LM, arXiv:1909.08053).
    """
    return x if is_trivial(group) else _CopyToGroup.apply(x, group)


def reduce_from_group(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Leaves a tensor-parallel region: sums the ranks' partial results, of any shape (operator g of Megatron-LM,
    arXiv:1909.08053). The backward is the identity: every rank has the full gradient of a replicated tensor.
    """
    return x if is_trivial(group) else _ReduceFromGroup.apply(x, group)


def gather_positions(x: Tensor, group: ProcessGroup | None, dim: int = -2) -> Tensor:
    """Enters a tensor-parallel region whose input is split by position (Megatron-SP, arXiv:2205.05198). The forward
    gathers `[B, S/n, H]`, or `[S/n, H]`, along `dim` into `[B, S, H]`. The backward reduce-scatters, because the
    consumer's gradient is partial on each rank. If the consumer's gradient is full, use
    [`galvatron_hf.parallel.activation.redistribute.redistribute`] instead.
    """
    return x if is_trivial(group) else _GatherPositions.apply(x, group, dim)


def scatter_sum_positions(x: Tensor, group: ProcessGroup | None, dim: int = -2) -> Tensor:
    """Leaves a tensor-parallel region whose output is split by position (Megatron-SP, arXiv:2205.05198). The forward
    sums partial results `[B, S, H]`, or `[S, H]`; rank k gets piece k along `dim`, `[B, S/n, H]`. The backward
    gathers.
    """
    return x if is_trivial(group) else _ScatterSumPositions.apply(x, group, dim)


def exchange(
    tensors: Sequence[Tensor], split_dim: int, concat_dim: int, group: ProcessGroup | None
) -> Sequence[Tensor]:
    """Splits `split_dim` of each tensor over the group and gathers `concat_dim` in rank order (DeepSpeed-Ulysses,
    arXiv:2309.14509), for all tensors by one all-to-all. Rank k keeps piece k of `split_dim`; n must divide its size.
    The backward is the inverse exchange. Before attention a tensor is `[B, S/n, heads, D]`, with `split_dim=2` and
    `concat_dim=1`. Tensors have as many dimensions as each other; their sizes may differ. Those of several types are
    exchanged one by one.
    """
    if is_trivial(group):
        return tensors
    if len({x.dtype for x in tensors}) > 1:
        return [_Exchange.apply(split_dim, concat_dim, group, x)[0] for x in tensors]
    return _Exchange.apply(split_dim, concat_dim, group, *tensors)


def sum_gradient(weight: Tensor, group: ProcessGroup | None) -> Tensor:
    """Returns a weight that each rank of a group holds in full and uses in part; its gradient is summed in fp32.
    Examples are a norm's weight under Megatron-SP and key/value heads replicated over tensor ranks.
    """
    return weight if is_trivial(group) else _SumGradient.apply(weight, group)


def gather_rows(x: Tensor, parts: Sequence[slice], group: ProcessGroup | None) -> Tensor:
    """Gathers the rows of all ranks, `parts[k]` of the whole from rank k of the group, which may be none. The backward
    keeps the own rows of the gradient: every rank computes the same loss of the whole.
    """
    return x if is_trivial(group) else _GatherRows.apply(x, parts, group)


def take_rows(x: Tensor, parts: Sequence[slice], group: ProcessGroup | None) -> Tensor:
    """Returns this rank's rows, `parts[k]` for rank k, of a tensor that every rank of the group has. The backward
    gathers: the gradient of the whole is full on every rank, as that of a replicated tensor is.
    """
    return x if is_trivial(group) else _TakeRows.apply(x, parts, group)


def move_rows(x: Tensor, received: Sequence[int], sent: Sequence[int], group: ProcessGroup | None) -> Tensor:
    """Sends rows of `[rows, features]` to the ranks of a group: the first `sent[0]` to rank 0, and so on. Returns the
    rows that arrive, `received[k]` of them from rank k, in rank order. Counts may be zero. The backward is the way
    back.
    """
    if is_trivial(group):
        return x
    moving = MovingRows(received, sent, group)
    return moving.finish(moving.start(x))
