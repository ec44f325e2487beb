# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Moves the pieces of weights, or of gradients, from the ranks of one plan to those of another by all-to-alls. Values
are moved, never added: pieces that several ranks hold are equal, and one of them gives.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from galvatron_hf.parallel.comm.collectives import all_to_all_pieces


Bounds = tuple[tuple[int, int], ...]  # of a piece in its weight: the first index and the one after the last
ROUND_BYTES = 2**28  # of the weights of which one all-to-all moves pieces


@dataclass(frozen=True, kw_only=True)
class HeldPiece:
    """Names a piece of a weight that a rank holds, under any of the names that tied weights have.

    Attributes:
        key (`str`): the name under which the rank's tensor is found.
        weight (`str`): the weight's name, the same for all that are tied to it.
        bounds (`tuple`): of the piece in the weight.
        dtype (`torch.dtype`): of the tensor.
        gives (`bool`): whether others may get it from here; not of a second copy.
    """

    key: str
    weight: str
    bounds: Bounds
    dtype: torch.dtype
    gives: bool = True


@dataclass(frozen=True, kw_only=True)
class _Part:
    """Names a part of a held piece, by the bounds inside of it."""

    key: str
    inside: tuple[slice, ...]
    shape: tuple[int, ...]
    numel: int


class PieceMove:
    """Moves pieces from a plan's ranks to another's. Every rank has the lists of all ranks, and finds out alone what
    it gives and takes.

    Args:
        given, taken (`Sequence[Sequence[HeldPiece]]`): what each rank of the world holds under the two plans.

    Raises:
        ValueError: if a piece is not held by any rank of the first plan.
    """

    def __init__(
        self, given: Sequence[Sequence[HeldPiece]], taken: Sequence[Sequence[HeldPiece]], device: torch.device
    ):
        self.rank, self.ranks, self.device = dist.get_rank(), len(given), device
        self._holders: dict[str, dict[Bounds, list[int]]] = {}
        for rank, pieces in enumerate(given):
            for piece in pieces:
                if piece.gives and _numel(piece.bounds):
                    ranks = self._holders.setdefault(piece.weight, {}).setdefault(piece.bounds, [])
                    if rank not in ranks:
                        ranks.append(rank)
        own = {(piece.weight, piece.bounds): piece.key for piece in reversed(given[self.rank]) if piece.gives}
        self._rounds: list[tuple[torch.dtype, list[list[_Part]], list[list[_Part]]]] = []
        for dtype, weights in _rounds(piece for pieces in given for piece in pieces):
            sent = [list(self._sent(taken[taker], taker, own, weights)) for taker in range(self.ranks)]
            received: list[list[_Part]] = [[] for _ in range(self.ranks)]
            for giver, part in self._received(taken[self.rank], weights):
                received[giver].append(part)
            self._rounds.append((dtype, sent, received))

    @property
    def sent_elements(self) -> int:
        """Returns the elements that this rank sends to others in a move."""
        return sum(
            part.numel
            for _, sent, _ in self._rounds
            for taker, parts in enumerate(sent)
            if taker != self.rank
            for part in parts
        )

    @torch.no_grad()
    def __call__(self, given: Mapping[str, torch.Tensor], taken: Mapping[str, torch.Tensor]) -> None:
        """Copies pieces of `given` into `taken`, local tensors by key; collective over the world."""
        for dtype, sent, received in self._rounds:
            parts = [given[part.key][part.inside].flatten() for parts in sent for part in parts]
            counts = [[sum(part.numel for part in parts) for parts in side] for side in (received, sent)]
            nothing = torch.empty(0, dtype=dtype, device=self.device)
            moved = all_to_all_pieces(torch.cat([nothing, *parts]), *counts, dist.group.WORLD)
            at = 0
            for part in (part for parts in received for part in parts):
                taken[part.key][part.inside].copy_(moved[at : at + part.numel].view(part.shape))
                at += part.numel

    def _received(self, pieces: Sequence[HeldPiece], weights: set[str]) -> Iterator[tuple[int, _Part]]:
        """Yields what this rank takes, and from which rank."""
        for piece in pieces:
            if piece.weight not in weights:
                continue
            missing = _numel(piece.bounds)
            for bounds, holders in sorted(self._holders.get(piece.weight, {}).items()):
                common = _common(piece.bounds, bounds)
                if common is not None:
                    missing -= _numel(common)
                    yield _giver(holders, self.rank), _part(piece.key, common, piece.bounds)
            if missing:
                raise ValueError(
                    f"{piece.weight} has other sizes in the two models that a plan each was applied to; make both of "
                    "one model."
                )

    def _sent(
        self, pieces: Sequence[HeldPiece], taker: int, own: Mapping[tuple[str, Bounds], str], weights: set[str]
    ) -> Iterator[_Part]:
        """Yields what this rank gives to another, in the order in which that one takes it."""
        for piece in pieces:
            if piece.weight not in weights:
                continue
            for bounds, holders in sorted(self._holders.get(piece.weight, {}).items()):
                if (piece.weight, bounds) in own and _giver(holders, taker) == self.rank:
                    common = _common(piece.bounds, bounds)
                    if common is not None:
                        yield _part(own[piece.weight, bounds], common, bounds)


def _giver(holders: list[int], taker: int) -> int:
    """Returns who gives a piece: the taker itself if it has it, else one of its holders, not always the same."""
    return taker if taker in holders else holders[taker % len(holders)]


def _rounds(pieces: Iterable[HeldPiece]) -> Iterator[tuple[torch.dtype, set[str]]]:
    """Yields the weights of one number format that are moved together."""
    elements: dict[tuple[str, str], int] = {}
    dtypes: dict[str, torch.dtype] = {}
    for piece in pieces:
        key, last = (str(piece.dtype), piece.weight), [stop for _, stop in piece.bounds]
        elements[key] = max(elements.get(key, 0), math.prod(last))
        dtypes[key[0]] = piece.dtype
    for dtype, group in itertools.groupby(sorted(elements), key=lambda key: key[0]):
        found: set[str] = set()
        total = 0
        for key in group:
            size = elements[key] * dtypes[dtype].itemsize
            if found and total + size > ROUND_BYTES:
                yield dtypes[dtype], found
                found, total = set(), 0
            found.add(key[1])
            total += size
        yield dtypes[dtype], found


def _common(one: Bounds, other: Bounds) -> Bounds | None:
    found = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return found if all(stop > start for start, stop in found) else None


def _numel(bounds: Bounds) -> int:
    return math.prod(max(0, stop - start) for start, stop in bounds)


def _part(key: str, common: Bounds, piece: Bounds) -> _Part:
    inside = tuple(slice(start - first, stop - first) for (start, stop), (first, _) in zip(common, piece, strict=True))
    shape = tuple(stop - start for start, stop in common)
    return _Part(key=key, inside=inside, shape=shape, numel=_numel(common))
