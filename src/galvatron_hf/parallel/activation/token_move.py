# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Moves the tokens of a packed row from one deal to another: layers of one plan may share documents among different
numbers of ranks. As in [`~galvatron_hf.parallel.activation.redistribute`], replicas carry the full gradient, and
values are moved, never added.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch.autograd.function import once_differentiable

from galvatron_hf.parallel.comm.collectives import all_to_all_pieces
from galvatron_hf.parallel.comm.mesh import StageMesh
from galvatron_hf.plan.deal import PADDING, Deal
from galvatron_hf.plan.layout import Layout
from galvatron_hf.utils.device import to_device


def positions_in(source: Deal, target: Deal) -> np.ndarray:
    """Returns for each position of the target's row that of the same token in the source's row, -1 for padding."""
    places = {name: np.empty(length, dtype=np.int64) for name, length in zip(source.names, source.lengths)}
    for piece in source.pieces:
        places[source.names[piece.document]][piece.start : piece.stop] = np.arange(piece.at, piece.end)
    found = [
        np.full(piece.length, -1)
        if target.names[piece.document] == PADDING
        else places[target.names[piece.document]][piece.start : piece.stop]
        for piece in target.pieces
    ]
    return np.concatenate(found)


@dataclass(frozen=True, kw_only=True)
class _Route:
    """Holds one rank's part of a move: the rows that it sends, in the order of their receivers, where what arrives
    belongs, and how many rows go to and come from each rank. `tokens` are those of the result.
    """

    sent: torch.Tensor
    taken: torch.Tensor
    sends: list[int]
    receives: list[int]
    tokens: int


def _route(source: Deal, target: Deal, src: Layout, dst: Layout, index: int, device: torch.device) -> _Route:
    key = "route", id(source), src, dst, index, device
    if key not in target.cache:  # every layer with this change needs it, and its recompute
        target.cache[key] = source, _made(source, target, src, dst, index, device)  # the source keeps its id
    return target.cache[key][1]


def _made(source: Deal, target: Deal, src: Layout, dst: Layout, index: int, device: torch.device) -> _Route:
    ranks, where = src.ranks, positions_in(source, target)
    held = [source.grid.rectangle(src, rank) for rank in range(ranks)]
    pieces: dict[tuple[int, int], list[int]] = {}  # ranges of the source's row, with the ranks that hold them
    for rank, part in enumerate(held):
        if part.position_start < part.position_stop:
            pieces.setdefault((part.position_start, part.position_stop), []).append(rank)
    starts = np.array(sorted(start for start, _ in pieces))
    holders = [pieces[bounds] for bounds in sorted(pieces)]
    sent, sends, taken, receives = [], [0] * ranks, [], [0] * ranks
    for receiver in range(ranks):
        part = target.grid.rectangle(dst, receiver)
        wanted = where[part.position_start : part.position_stop]
        # A rank takes what it holds itself from itself, the rest from the holder whose turn it is.
        giver_of = np.array([one[receiver % len(one)] if receiver not in one else receiver for one in holders])
        given = np.where(wanted < 0, -1, giver_of[np.searchsorted(starts, wanted, side="right") - 1])
        mine = np.flatnonzero(given == index)
        sent.append(wanted[mine] - held[index].position_start)
        sends[receiver] = len(mine)
        if receiver == index:
            for giver in range(ranks):
                of_giver = np.flatnonzero(given == giver)
                taken.append(of_giver)
                receives[giver] = len(of_giver)
            tokens = part.position_stop - part.position_start
    rows = [to_device(torch.from_numpy(np.concatenate(each)), device) for each in (sent, taken)]
    return _Route(sent=rows[0], taken=rows[1], sends=sends, receives=receives, tokens=tokens)


def _move(x: torch.Tensor, source: Deal, target: Deal, src: Layout, dst: Layout, mesh: StageMesh) -> torch.Tensor:
    route = _route(source, target, src, dst, mesh.index, x.device)
    flat = x[0].flatten(1)
    width = flat.shape[1]
    counts = [[count * width for count in each] for each in (route.receives, route.sends)]
    arrived = all_to_all_pieces(flat.index_select(0, route.sent).flatten(), *counts, mesh.block(mesh.size))
    moved = flat.new_zeros(route.tokens, width).index_copy_(0, route.taken, arrived.view(-1, width))
    return moved.view(1, route.tokens, *x.shape[2:])


class _MoveTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, source, target, src, dst, mesh):
        ctx.way_back = target, source, dst, src, mesh
        return _move(x, source, target, src, dst, mesh)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        return _move(gradient, *ctx.way_back), None, None, None, None, None


def move_tokens(
    x: torch.Tensor, source: Deal, target: Deal, *, src: Layout, dst: Layout, mesh: StageMesh
) -> torch.Tensor:
    """Moves an activation of a packed row from one deal and layout to another by one all-to-all; collective over the
    stage. It is differentiable. Both deals have the same documents.

    Args:
        x (`torch.Tensor`): [1, T, ...], this rank's part of the source's row under `src`.
        source, target ([`Deal`]): the deals of `x` and of the result.
        src, dst ([`Layout`]): their layouts.
        mesh ([`StageMesh`]): the stage's ranks.

    Returns:
        `torch.Tensor`: [1, T', ...], the rank's part of the target's row under `dst`; zeros for padding.
    """
    return _MoveTokens.apply(x, source, target, src, dst, mesh)
