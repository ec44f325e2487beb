# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Moves an activation from one layer's layout to the next one's, as `galvatron_hf.plan.layout` says.

Convention: a replicated activation carries the full gradient on every replica, so the backward of a move is the move
back. The backward slices and never sums; partial sums never leave a layer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from galvatron_hf.parallel.comm.collectives import all_to_all_pieces
from galvatron_hf.plan.layout import Grid, Layout, PackedRow, Rectangle, block_size, move_of_rank


class GroupCache:
    """
    The process groups of a stage's aligned blocks, each made once.

    A group costs memory and time, and all ranks of the world must make the same groups in the same order: one cache
    is made per parallelised model and filled while the model is set up.

    Args:
        stage_ranks (`Sequence[int]`): Global ranks of the stage, in the plan's order.
        timeout (`timedelta`, *optional*): How long a collective waits; by default as long as the backend's.
    """

    def __init__(self, stage_ranks: Sequence[int], timeout: timedelta | None = None) -> None:
        self.stage_ranks, self.timeout = tuple(stage_ranks), timeout
        self._groups: dict[tuple[int, ...], ProcessGroup] = {}

    def prepare(self, sizes: Iterable[int]) -> None:
        """
        Makes the blocks of the given sizes. A collective call: every rank of the world makes it, with the same sizes.

        Args:
            sizes (`Iterable[int]`): Block sizes, each dividing the stage's ranks; those that exist are skipped.

        Raises:
            ValueError: If a size does not divide the stage's ranks.
        """
        count = len(self.stage_ranks)
        for size in sorted(set(sizes)):
            if size < 1 or count % size:
                raise ValueError(
                    f"Blocks of {size} ranks cannot tile a stage of {count}; use a divisor of {count} as block size."
                )
            for start in range(0, count, size):
                block = self.stage_ranks[start : start + size]
                if size > 1 and block not in self._groups:
                    self._groups[block] = _new_group(block, self.timeout)

    def block(self, size: int) -> ProcessGroup | None:
        """
        The group of this rank's block of `size` ranks; `None` for a block of one.

        Its ranks are numbered in the stage's order, whatever their global ranks are.

        Args:
            size (`int`): A size given to [`GroupCache.prepare`] before.

        Raises:
            ValueError: If the block was not prepared.
        """
        if size == 1:
            return None
        start = self.stage_ranks.index(dist.get_rank()) // size * size
        block = self.stage_ranks[start : start + size]
        if block not in self._groups:
            raise ValueError(
                f"The block of ranks {list(block)} has no group, because the size {size} was not prepared;"
                f" give it to GroupCache.prepare on every rank first."
            )
        return self._groups[block]


def _new_group(ranks: tuple[int, ...], timeout: timedelta | None) -> ProcessGroup:
    if ranks == tuple(range(dist.get_world_size())):
        return dist.group.WORLD
    if ranks == tuple(sorted(ranks)):
        return dist.new_group(list(ranks), timeout=timeout)
    # By default a group's ranks are numbered by global rank: pieces would arrive in another order than the stage's.
    return dist.new_group(list(ranks), timeout=timeout, sort_ranks=False)


def view(x: Tensor, part: Rectangle, whole: Rectangle) -> Tensor:
    """Returns the view of the rectangle `part` in `x`, whose first two dimensions are the rectangle `whole`."""
    rows = slice(part.row_start - whole.row_start, part.row_stop - whole.row_start)
    positions = slice(part.position_start - whole.position_start, part.position_stop - whole.position_start)
    return x[rows, positions]


def _move(x: Tensor, src: Layout, dst: Layout, grid: Grid | PackedRow, index: int, groups: GroupCache) -> Tensor:
    size = block_size(src, dst, grid.packed)
    move = move_of_rank(src, dst, grid, index)
    tail = x.shape[2:]
    if size == 1:
        # a copy, not a view: it must not keep the whole alive, and schedules detach what a stage returns in place
        return view(x, move.after, move.before).clone(memory_format=torch.contiguous_format)

    width = math.prod(tail)
    sent = [0 if part is None else part.area * width for part in move.sends]
    received = [0 if part is None else part.area * width for part in move.receives]
    buffer = x.new_empty(sum(sent))
    for part, piece in zip(move.sends, buffer.split(sent), strict=True):
        if part is not None:
            piece.view(part.shape + tail).copy_(view(x, part, move.before))
    arrived = all_to_all_pieces(buffer, received, sent, groups.block(size))

    out = x.new_empty(move.after.shape + tail)
    if move.kept is not None:
        view(out, move.kept, move.after).copy_(view(x, move.kept, move.before))
    for part, piece in zip(move.receives, arrived.split(received), strict=True):
        if part is not None:
            view(out, part, move.after).copy_(piece.view(part.shape + tail))
    return out


class _Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, src, dst, *where):
        ctx.src, ctx.dst, ctx.where = src, dst, where
        return _move(x, src, dst, *where)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return _move(grad, ctx.dst, ctx.src, *ctx.where), *[None] * (2 + len(ctx.where))


def redistribute(
    x: Tensor, src: Layout, dst: Layout, *, grid: Grid | PackedRow, index: int, groups: GroupCache
) -> Tensor:
    """
    Moves an activation from one layout to another: one all-to-all, a local slice, or nothing. Differentiable.

    A collective call over the stage. Values are moved, never added, so the result is exact in every type.

    Args:
        x (`Tensor` of shape `[rows_local, positions_local, ...]`): What this rank holds under `src`.
        src (`Layout`): The layout of `x`.
        dst (`Layout`): The layout wanted.
        grid ([`Grid`] or [`PackedRow`]): The shape of the micro-batch, on all ranks together.
        index (`int`): This rank's index in its stage.
        groups (`GroupCache`): Prepared for the [`block_sizes`] of this move.

    Returns:
        `Tensor` of shape `[rows_local', positions_local', ...]`: What this rank holds under `dst`.

    Raises:
        ValueError: If `x` does not have the shape that `src` gives it, or the layouts are of another stage.
    """
    ranks = len(groups.stage_ranks)
    if src.ranks != ranks or dst.ranks != ranks:
        raise ValueError(
            f"Cannot move an activation from {src} to {dst} on {ranks} ranks, because they span {src.ranks} and"
            f" {dst.ranks}; use layouts of the same stage."
        )
    expected = grid.rectangle(src, index).shape
    if tuple(x.shape[:2]) != expected:
        raise ValueError(
            f"A tensor of shape {tuple(x.shape)} is not rank {index}'s part of {grid.rows} rows of {grid.length}"
            f" positions under {src}, which is {expected}; pass the layout in which the tensor lies."
        )
    if src == dst:
        return x
    return _Redistribute.apply(x, src, dst, grid, index, groups)
