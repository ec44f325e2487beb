# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Moves activations between layouts, as `galvatron_hf.plan.layout` plans the moves. Convention: a replicated
activation carries the full gradient on every replica, so the backward of a move is the move back. The backward slices
and never sums; partial sums never leave a layer.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from galvatron_hf.parallel.comm.collectives import all_to_all_pieces
from galvatron_hf.parallel.comm.mesh import StageMesh
from galvatron_hf.plan.layout import Grid, Layout, PackedRow, Rectangle, block_size, move_of_rank


def view(x: Tensor, part: Rectangle, whole: Rectangle) -> Tensor:
    """Returns the view of the rectangle `part` in `x`, whose first two dimensions are the rectangle `whole`."""
    rows = slice(part.row_start - whole.row_start, part.row_stop - whole.row_start)
    positions = slice(part.position_start - whole.position_start, part.position_stop - whole.position_start)
    return x[rows, positions]


def _move(x: Tensor, src: Layout, dst: Layout, grid: Grid | PackedRow, mesh: StageMesh) -> Tensor:
    size = block_size(src, dst, grid.packed)
    move = move_of_rank(src, dst, grid, mesh.index)
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
    arrived = all_to_all_pieces(buffer, received, sent, mesh.block(size))

    out = x.new_empty(move.after.shape + tail)
    if move.kept is not None:
        view(out, move.kept, move.after).copy_(view(x, move.kept, move.before))
    for part, piece in zip(move.receives, arrived.split(received), strict=True):
        if part is not None:
            view(out, part, move.after).copy_(piece.view(part.shape + tail))
    return out


class _Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, src, dst, grid, mesh):
        ctx.way_back = dst, src, grid, mesh
        return _move(x, src, dst, grid, mesh)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return _move(grad, *ctx.way_back), None, None, None, None


def redistribute(x: Tensor, src: Layout, dst: Layout, *, grid: Grid | PackedRow, mesh: StageMesh) -> Tensor:
    """Moves an activation from one layout to another by one all-to-all, a local slice, or nothing; collective over the
    stage. It is differentiable. Values are moved, never added, so the result is exact in every type.

    Args:
        x (`Tensor` of shape `[rows_local, positions_local, ...]`): this rank's part under `src`.
        src, dst (`Layout`): the layout of `x` and of the result.
        grid ([`Grid`] or [`PackedRow`]): the shape of the whole micro-batch.
        mesh ([`StageMesh`]): the stage's ranks, with the group of the move's [`block_size`] prepared.
    """
    if src.ranks != mesh.size or dst.ranks != mesh.size:
        raise ValueError(
            f"Cannot move an activation from {src} to {dst} on {mesh.size} ranks, because they span {src.ranks} and"
            f" {dst.ranks}; use layouts of the same stage."
        )
    expected = grid.rectangle(src, mesh.index).shape
    if tuple(x.shape[:2]) != expected:
        raise ValueError(
            f"A tensor of shape {tuple(x.shape)} is not rank {mesh.index}'s part of {grid.rows} rows of {grid.length}"
            f" positions under {src}, which is {expected}; pass the layout in which the tensor lies."
        )
    if src == dst:
        return x
    return _Redistribute.apply(x, src, dst, grid, mesh)
