# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""How an activation moves from one layer's layout to the next one's.

A move sends the intersections of the old rectangles with the new ones in one all-to-all, inside the smallest aligned
block of ranks that holds everything each of its ranks needs.

Convention: a replicated activation carries the full gradient on every replica, so the backward of a move is the move
back. It slices, it never sums; partial sums never leave a layer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from galvatron_hf.parallel.activation.layout import Grid, Layout, PackedRow, Rectangle
from galvatron_hf.parallel.comm.collectives import all_to_all_pieces


def _exact_rectangle(layout: Layout, index: int) -> Rectangle:
    # On a grid of ranks x ranks every boundary is a whole number. Floor boundaries are monotone, so two rectangles
    # that are disjoint here are disjoint (or empty) for every number of rows and positions.
    return layout.rectangle(index, layout.ranks, layout.ranks)


def _check_same_ranks(src: Layout, dst: Layout, ranks: int) -> None:
    if src.ranks != ranks or dst.ranks != ranks:
        raise ValueError(
            f"Cannot move an activation from {src} to {dst} on {ranks} ranks, because they span {src.ranks} and"
            f" {dst.ranks}; use layouts of the same stage."
        )


def _may_meet(src: Layout, piece: int, dst: Layout, index: int, packed: bool) -> bool:
    """Whether what rank `piece` holds under `src` can be what rank `index` needs under `dst`, for some shape."""
    here, there = _exact_rectangle(src, piece), _exact_rectangle(dst, index)
    if not packed or src.data == dst.data:
        return here.intersection(there) is not None
    # Packs have any number of positions: nothing is known of where position pieces of several packs end.
    return here.row_start < there.row_stop and there.row_start < here.row_stop


@lru_cache(maxsize=4096)
def _needs(src: Layout, dst: Layout, packed: bool) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """For each rank, the pieces of `src` that its `dst` rectangle touches, each as the ranks that hold the piece."""
    holders: dict[Rectangle, list[int]] = {}
    for index in range(src.ranks):
        holders.setdefault(_exact_rectangle(src, index), []).append(index)
    return tuple(
        tuple(tuple(ranks) for ranks in holders.values() if _may_meet(src, ranks[0], dst, index, packed))
        for index in range(dst.ranks)
    )


@lru_cache(maxsize=4096)
def block_size(src: Layout, dst: Layout, ranks: int, packed: bool = False) -> int:
    """
    Ranks of the smallest aligned block (indices `[k*g, (k+1)*g)`) inside which a move from `src` to `dst` happens.

    It holds for every number of rows and positions, or for every packed row. 1 means that each rank already has what
    it needs. The way back may need another block: see [`block_sizes`]. Raises `ValueError` if a layout is not one of
    `ranks` ranks.
    """
    _check_same_ranks(src, dst, ranks)
    for size in (size for size in range(1, ranks) if ranks % size == 0):
        if all(
            any(holder // size == index // size for holder in holders)
            for index, pieces in enumerate(_needs(src, dst, packed))
            for holders in pieces
        ):
            return size
    return ranks


def block_sizes(layouts: Sequence[Layout], ranks: int) -> tuple[int, ...]:
    """
    The block sizes of all moves along a chain of layouts, forward and backward, for [`GroupCache.prepare`].

    Args:
        layouts (`Sequence[Layout]`): The layouts that an activation passes through, in order.
        ranks (`int`): Number of ranks of the stage.
    """
    moves = list(zip(layouts[:-1], layouts[1:], strict=True))
    both_ways = [pair for src, dst in moves for pair in ((src, dst), (dst, src))]
    return tuple(sorted({block_size(*pair, ranks, packed) for pair in both_ways for packed in (False, True)}))


@lru_cache(maxsize=4096)
def _sources(src: Layout, dst: Layout, packed: bool) -> tuple[tuple[int, ...], ...]:
    """For each rank, the rank from which it takes each piece of [`_needs`]; itself where it can."""
    ranks = src.ranks
    size = block_size(src, dst, ranks, packed)
    divisors = [divisor for divisor in range(1, ranks + 1) if ranks % divisor == 0]
    given = [0] * ranks

    def choose(index: int, holders: tuple[int, ...]) -> int:
        if index in holders:
            return index
        near = [holder for holder in holders if holder // size == index // size]
        # nearest first (the smallest block with both), then the one that has given least
        source = min(near, key=lambda h: (next(d for d in divisors if h // d == index // d), given[h], h))
        common = _exact_rectangle(src, source).intersection(_exact_rectangle(dst, index))
        given[source] += common.area if common is not None else 0
        return source

    needs = _needs(src, dst, packed)
    return tuple(tuple(choose(index, holders) for holders in pieces) for index, pieces in enumerate(needs))


@dataclass(frozen=True, kw_only=True)
class _Move:
    """One rank's share of a move: `sends` and `receives` go by the block's order, `None` where nothing goes."""

    before: Rectangle
    after: Rectangle
    kept: Rectangle | None
    sends: tuple[Rectangle | None, ...]
    receives: tuple[Rectangle | None, ...]


@lru_cache(maxsize=4096)
def _move_of_rank(src: Layout, dst: Layout, grid: Grid | PackedRow, index: int) -> _Move:
    sources = _sources(src, dst, grid.packed)
    size = block_size(src, dst, src.ranks, grid.packed)
    block = range(index // size * size, index // size * size + size)

    def sent(giver: int, taker: int) -> Rectangle | None:
        if giver not in sources[taker]:
            return None
        return grid.rectangle(src, giver).intersection(grid.rectangle(dst, taker))

    return _Move(
        before=grid.rectangle(src, index),
        after=grid.rectangle(dst, index),
        kept=sent(index, index),
        sends=tuple(sent(index, other) if other != index else None for other in block),
        receives=tuple(sent(other, index) if other != index else None for other in block),
    )


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


def _move(x: Tensor, src: Layout, dst: Layout, grid: Grid | PackedRow, index: int, groups: GroupCache) -> Tensor:
    size = block_size(src, dst, len(groups.stage_ranks), grid.packed)
    move = _move_of_rank(src, dst, grid, index)
    tail = x.shape[2:]
    if size == 1:
        # a copy, not a view: it must not keep the whole alive, and schedules detach what a stage returns in place
        return move.after.within(x, move.before).clone(memory_format=torch.contiguous_format)

    width = math.prod(tail)
    sent = [0 if part is None else part.area * width for part in move.sends]
    received = [0 if part is None else part.area * width for part in move.receives]
    buffer = x.new_empty(sum(sent))
    for part, piece in zip(move.sends, buffer.split(sent), strict=True):
        if part is not None:
            piece.view(part.shape + tail).copy_(part.within(x, move.before))
    arrived = all_to_all_pieces(buffer, received, sent, groups.block(size))

    out = x.new_empty(move.after.shape + tail)
    if move.kept is not None:
        move.kept.within(out, move.after).copy_(move.kept.within(x, move.before))
    for part, piece in zip(move.receives, arrived.split(received), strict=True):
        if part is not None:
            part.within(out, move.after).copy_(piece.view(part.shape + tail))
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
    _check_same_ranks(src, dst, len(groups.stage_ranks))
    expected = grid.rectangle(src, index).shape
    if tuple(x.shape[:2]) != expected:
        raise ValueError(
            f"A tensor of shape {tuple(x.shape)} is not rank {index}'s part of {grid.rows} rows of {grid.length}"
            f" positions under {src}, which is {expected}; pass the layout in which the tensor lies."
        )
    if src == dst:
        return x
    return _Redistribute.apply(x, src, dst, grid, index, groups)
