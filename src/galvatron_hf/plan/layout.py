# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Computes layouts: which tokens and heads each rank of a stage holds, and what a change of layout sends. A layout
gives each rank of a stage a rectangle of the micro-batch: a range of rows by a range of positions. A micro-batch is a
[`Grid`] of rows, or one [`PackedRow`]. The runtime moves tensors by this arithmetic and the planner prices the moves
by it. Importing this module needs no torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np


if TYPE_CHECKING:
    from galvatron_hf.plan import LayerStrategy


HEAD_CHUNK_TOKENS = 2048  # the head computes the logits of this many tokens at a time


@dataclass(frozen=True, kw_only=True)
class Rectangle:
    """Delimits a range of rows by a range of positions; each `stop` is the index after the last."""

    row_start: int
    row_stop: int
    position_start: int
    position_stop: int

    @property
    def shape(self) -> tuple[int, int]:
        """Returns the numbers of rows and positions."""
        return self.row_stop - self.row_start, self.position_stop - self.position_start

    @property
    def area(self) -> int:
        return math.prod(self.shape)

    def intersection(self, other: Rectangle) -> Rectangle | None:
        """Returns the common part, or `None` if it is empty."""
        common = Rectangle(
            row_start=max(self.row_start, other.row_start),
            row_stop=min(self.row_stop, other.row_stop),
            position_start=max(self.position_start, other.position_start),
            position_stop=min(self.position_stop, other.position_stop),
        )
        return common if min(common.shape) > 0 else None


@dataclass(frozen=True)
class Layout:
    """Splits the rows and positions of an activation `[rows, positions, ...]` over the ranks of a stage.
    Rows have `data` pieces, positions `positions` pieces, and `replicas` ranks hold each piece. Rank `i` of the stage
    holds replica `i % replicas` of position piece `(i // replicas) % positions` of row piece
    `i // (replicas * positions)`. Piece `k` of `n` of `length` items is `[k*length//n, (k+1)*length//n)`. Raises
    `ValueError` for a degree below 1.
    """

    data: int
    positions: int = 1
    replicas: int = 1

    def __post_init__(self) -> None:
        if min(self.data, self.positions, self.replicas) < 1:
            raise ValueError(f"{self} has a degree below 1, and every degree counts ranks; use degrees of at least 1.")

    @classmethod
    @lru_cache(maxsize=65536)  # a search asks again and again for the same few
    def from_strategy(cls, strategy: LayerStrategy, ranks: int) -> Layout:
        """Returns the layout of a layer's hidden states on a stage of `ranks` ranks."""
        replicas = 1 if strategy.megatron_sp else strategy.tensor
        return cls(data=strategy.token_degree(ranks), positions=strategy.sequence_degree, replicas=replicas)

    @classmethod
    @lru_cache(maxsize=4096)
    def from_vocabulary(cls, tensor: int, ranks: int, rows: int) -> Layout:
        """Returns the layout of the embedding's output or the head's input; `tensor` 1 gives the layout between two
        stages. `tensor` ranks of the stage's `ranks` split the vocabulary. Rows are split over as many ranks as divide
        `ranks / tensor` and have a row each; positions are split over the rest.
        """
        pieces = ranks // tensor
        data = max(degree for degree in range(1, pieces + 1) if pieces % degree == 0 and degree <= max(rows, 1))
        return cls(data=data, positions=pieces // data, replicas=tensor)

    @property
    def ranks(self) -> int:
        return self.data * self.positions * self.replicas

    def rectangle(self, index: int, rows: int, length: int) -> Rectangle:
        """Returns the rectangle of rank `index` of the stage; it is empty if there are too few rows or positions."""
        row, position = divmod(index // self.replicas, self.positions)
        return Rectangle(
            row_start=row * rows // self.data,
            row_stop=(row + 1) * rows // self.data,
            position_start=position * length // self.positions,
            position_stop=(position + 1) * length // self.positions,
        )

    def most_tokens(self, rows: int, length: int) -> int:
        """Returns rows times positions of the rank with the most tokens."""
        return -(-rows // self.data) * -(-length // self.positions)


def vocabulary_layouts(tensor: int, ranks: int) -> list[Layout]:
    """Returns all layouts that [`Layout.from_vocabulary`] gives for some number of rows."""
    pieces = ranks // tensor
    return [Layout.from_vocabulary(tensor, ranks, rows) for rows in range(1, pieces + 1) if pieces % rows == 0]


@dataclass(frozen=True)
class Grid:
    """Gives the shape of a micro-batch of `rows` rows with `length` positions each."""

    rows: int
    length: int

    packed = False

    def rectangle(self, layout: Layout, index: int) -> Rectangle:
        """Returns the rectangle that rank `index` of the stage holds under a layout."""
        return layout.rectangle(index, self.rows, self.length)


@dataclass(frozen=True)
class PackedRow:
    """Gives the shape of a micro-batch of one row that holds whole documents one after the other.
    The row is cut into D packs where documents end. Pack `k` is `[cuts[k], cuts[k+1])`, with
    `0 = cuts[0] <= ... <= cuts[D]`, and may be of any length. D is a multiple of every layer's data degree. Data rank
    `k` of `n` holds the packs `[k*D//n, (k+1)*D//n)`; position piece `j` of `p` is an even part of their positions.
    """

    cuts: tuple[int, ...]

    packed, rows = True, 1

    @property
    def length(self) -> int:
        return self.cuts[-1]

    def rectangle(self, layout: Layout, index: int) -> Rectangle:
        data, position = divmod(index // layout.replicas, layout.positions)
        packs = len(self.cuts) - 1
        if packs % layout.data:
            raise ValueError(
                f"A row of {packs} packs cannot be split over {layout.data} data ranks; make a multiple of packs."
            )
        start, stop = (self.cuts[k * packs // layout.data] for k in (data, data + 1))
        return Rectangle(
            row_start=0,
            row_stop=1,
            position_start=start + position * (stop - start) // layout.positions,
            position_stop=start + (position + 1) * (stop - start) // layout.positions,
        )


# ---- Changes of layout ----
# Each rank takes what it lacks from a rank that has it, by one all-to-all inside the smallest aligned block of ranks
# (indices `[k*g, (k+1)*g)`) in which that is possible.


@lru_cache(maxsize=4096)
def _rectangles(layout: Layout, grid: Grid | PackedRow) -> np.ndarray:
    """Returns (ranks, 4) first row, row stop, first position and position stop of each rank of the stage."""
    if grid.packed:
        every = [grid.rectangle(layout, index) for index in range(layout.ranks)]
        return np.array([(one.row_start, one.row_stop, one.position_start, one.position_stop) for one in every])
    rows, positions = np.divmod(np.arange(layout.ranks) // layout.replicas, layout.positions)
    edges = [(rows + k) * grid.rows // layout.data for k in (0, 1)]
    edges += [(positions + k) * grid.length // layout.positions for k in (0, 1)]
    return np.stack(edges, axis=1)


def _exact_rectangles(layout: Layout) -> np.ndarray:
    # On a grid of ranks x ranks every boundary is a whole number. Floor boundaries are monotone, so two rectangles
    # that are disjoint here are disjoint (or empty) for every number of rows and positions.
    return _rectangles(layout, Grid(layout.ranks, layout.ranks))


def _areas(here: np.ndarray, there: np.ndarray) -> np.ndarray:
    """Returns the tokens that rectangles (..., 4) have in common."""
    rows = np.minimum(here[..., 1], there[..., 1]) - np.maximum(here[..., 0], there[..., 0])
    positions = np.minimum(here[..., 3], there[..., 3]) - np.maximum(here[..., 2], there[..., 2])
    return np.maximum(rows, 0) * np.maximum(positions, 0)


@lru_cache(maxsize=4096)
def _needs(src: Layout, dst: Layout, packed: bool) -> tuple[np.ndarray, np.ndarray]:
    """Returns every pair of a rank and a piece of `src` that its `dst` rectangle touches, in order of the ranks.
    With r replicas, ranks k r to (k + 1) r - 1 hold piece k.
    """
    pieces, wanted = _exact_rectangles(src)[None, :: src.replicas].copy(), _exact_rectangles(dst)[:, None].copy()
    if packed and src.data != dst.data:  # packs have any number of positions: it is not known where their parts end
        for rectangles in (pieces, wanted):
            rectangles[..., 2:] = 0, src.ranks
    return np.nonzero(_areas(pieces, wanted))


@lru_cache(maxsize=4096)
def block_size(src: Layout, dst: Layout, packed: bool = False) -> int:
    """Returns the ranks of the smallest aligned block inside which a move from `src` to `dst` happens.
    The result holds for every number of rows and positions, or for every packed row. 1 means that each rank already
    has what it needs. The way back may need another block: see [`block_sizes`]. Raises `ValueError` if the layouts
    span different numbers of ranks.
    """
    ranks = src.ranks
    if dst.ranks != ranks:
        raise ValueError(
            f"Cannot move an activation from {src} to {dst}, because they span {ranks} and {dst.ranks} ranks;"
            " use layouts of the same stage."
        )
    takers, pieces = _needs(src, dst, packed)
    first, last = pieces * src.replicas, (pieces + 1) * src.replicas - 1
    for size in (size for size in range(1, ranks) if ranks % size == 0):
        block = takers // size
        if ((first // size <= block) & (block <= last // size)).all():
            return size
    return ranks


def block_sizes(layouts: Sequence[Layout]) -> tuple[int, ...]:
    """Returns the block sizes of all moves along a chain of layouts, forward and backward, of packed rows too."""
    moves = list(zip(layouts[:-1], layouts[1:], strict=True))
    both_ways = [pair for src, dst in moves for pair in ((src, dst), (dst, src))]
    return tuple(sorted({block_size(*pair, packed) for pair in both_ways for packed in (False, True)}))


@lru_cache(maxsize=4096)
def sources(src: Layout, dst: Layout, packed: bool = False) -> tuple[tuple[int, ...], ...]:
    """Returns for each rank the ranks from which it takes the pieces it needs; itself for pieces that it holds."""
    found: list[list[int]] = [[] for _ in range(src.ranks)]
    for taker, giver in zip(*(one.tolist() for one in _transfers(src, dst, packed)), strict=True):
        found[taker].append(giver)
    return tuple(map(tuple, found))


@lru_cache(maxsize=4096)
def _transfers(src: Layout, dst: Layout, packed: bool) -> tuple[np.ndarray, np.ndarray]:
    """Returns the pairs of a rank and a rank from which it takes a piece, in order of the takers."""
    ranks, replicas, size = src.ranks, src.replicas, block_size(src, dst, packed)
    takers, pieces = _needs(src, dst, packed)
    givers = np.where(takers // replicas == pieces, takers, pieces * replicas)  # a rank that holds a piece keeps it
    if replicas == 1:
        return takers, givers
    divisors = [divisor for divisor in range(1, ranks + 1) if ranks % divisor == 0]
    areas = _areas(_exact_rectangles(src)[::replicas][pieces], _exact_rectangles(dst)[takers]).tolist()
    given = [0] * ranks
    for place, (taker, piece) in enumerate(zip(takers.tolist(), pieces.tolist(), strict=True)):
        if givers[place] == taker:
            continue
        first, block = piece * replicas, taker // size * size
        low, high = max(first, block), min(first + replicas, block + size)
        # the nearest ones (in the smallest block with both), of these the first that has given least
        begins = ((taker // each * each, each) for each in divisors)
        near = (range(max(low, begin), min(high, begin + each)) for begin, each in begins)
        giver = min(next(one for one in near if one), key=given.__getitem__)
        given[giver] += areas[place]
        givers[place] = giver
    return takers, givers


@dataclass(frozen=True, kw_only=True)
class Move:
    """Describes one rank's part of a change of layout, from `before` to `after`; `kept` stays on the rank. `sends` and
    `receives` have one rectangle, or None, for each rank of the block, in the block's order.
    """

    before: Rectangle
    after: Rectangle
    kept: Rectangle | None
    sends: tuple[Rectangle | None, ...]
    receives: tuple[Rectangle | None, ...]


@lru_cache(maxsize=4096)
def move_of_rank(src: Layout, dst: Layout, grid: Grid | PackedRow, index: int) -> Move:
    """Returns the part of rank `index` of the stage in a change of layout."""
    givers = sources(src, dst, grid.packed)
    size = block_size(src, dst, grid.packed)
    block = range(index // size * size, index // size * size + size)
    before, after = grid.rectangle(src, index), grid.rectangle(dst, index)
    return Move(
        before=before,
        after=after,
        kept=before.intersection(after) if index in givers[index] else None,
        sends=tuple(
            before.intersection(grid.rectangle(dst, other)) if other != index and index in givers[other] else None
            for other in block
        ),
        receives=tuple(
            after.intersection(grid.rectangle(src, other)) if other != index and other in givers[index] else None
            for other in block
        ),
    )


@lru_cache(maxsize=4096)
def sent_tokens(src: Layout, dst: Layout, grid: Grid | PackedRow) -> tuple[int, ...]:
    """Returns for each rank how many tokens (rows times positions) leave it in a change of layout."""
    takers, givers = _transfers(src, dst, grid.packed)
    areas = _areas(_rectangles(src, grid)[givers], _rectangles(dst, grid)[takers]) * (takers != givers)
    sent = np.zeros(src.ranks, dtype=np.int64)
    np.add.at(sent, givers, areas)
    return tuple(sent.tolist())


def even_parts(count: int, parts: int) -> list[tuple[int, int]]:
    """Returns the bounds of `parts` consecutive parts of `count` items, whose sizes differ by one at most."""
    return [(index * count // parts, (index + 1) * count // parts) for index in range(parts)]


# ---- Attention heads and weights ----


@dataclass(frozen=True, kw_only=True)
class AttentionHeads:
    """Counts the attention and key/value heads that one tensor rank computes before the Ulysses exchange. With fewer
    key/value heads than tensor ranks, `key_value` is 1 and several ranks hold the same head. Each key/value head is
    repeated `copies` times before the exchange, so that every Ulysses rank gets those of its queries.
    """

    query: int
    key_value: int
    copies: int = 1

    @classmethod
    def from_degrees(cls, *, query: int, key_value: int, tensor: int, ulysses: int) -> AttentionHeads:
        """Divides a model's attention heads (`query`) and key/value heads over tensor and Ulysses ranks."""
        query, key_value = query // tensor, max(1, key_value // tensor)
        if key_value % ulysses == 0:
            copies = 1
        else:
            copies = ulysses // key_value if ulysses % key_value == 0 else query // key_value
        return cls(query=query, key_value=key_value, copies=copies)

    @property
    def sent_key_value(self) -> int:
        """Returns the key heads, and as many value heads, that a rank sends into the exchange."""
        return self.key_value * self.copies


def second_cut(shape: Sequence[int], tensor: int, shards: int) -> int | None:
    """Returns the first dimension that `shards` ranks can cut into even pieces of a weight whose dimension 0 `tensor`
    ranks have cut. `shape` is that of the whole weight. Returns None if there is no such dimension: uneven pieces of
    dimension 0 under two mesh axes have no placement that DTensor can put together again, and FSDP2 cuts other
    dimensions into even pieces alone.
    """
    if shape[0] % (tensor * shards) == 0:
        return 0
    return next((dim for dim in range(1, len(shape)) if shape[dim] % shards == 0), None)
