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


def _exact_rectangle(layout: Layout, index: int) -> Rectangle:
    # On a grid of ranks x ranks every boundary is a whole number. Floor boundaries are monotone, so two rectangles
    # that are disjoint here are disjoint (or empty) for every number of rows and positions.
    return layout.rectangle(index, layout.ranks, layout.ranks)


def _may_meet(here: Rectangle, there: Rectangle, rows_only: bool) -> bool:
    """Returns whether two rectangles can have a token in common for some shape of the micro-batch."""
    if not rows_only:
        return here.intersection(there) is not None
    return here.row_start < there.row_stop and there.row_start < here.row_stop


@lru_cache(maxsize=4096)
def _needs(src: Layout, dst: Layout, packed: bool) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Returns for each rank the pieces of `src` that its `dst` rectangle touches, each as the ranks that hold it."""
    holders: dict[Rectangle, list[int]] = {}
    for index in range(src.ranks):
        holders.setdefault(_exact_rectangle(src, index), []).append(index)
    # Packs have any number of positions: it is not known where position pieces of several packs end.
    rows_only = packed and src.data != dst.data
    wanted = [_exact_rectangle(dst, index) for index in range(dst.ranks)]
    return tuple(
        tuple(tuple(ranks) for piece, ranks in holders.items() if _may_meet(piece, there, rows_only))
        for there in wanted
    )


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
    for size in (size for size in range(1, ranks) if ranks % size == 0):
        if all(
            any(holder // size == index // size for holder in holders)
            for index, pieces in enumerate(_needs(src, dst, packed))
            for holders in pieces
        ):
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
    ranks = src.ranks
    size = block_size(src, dst, packed)
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
    sent = [0] * src.ranks
    for taker, givers in enumerate(sources(src, dst, grid.packed)):
        wanted = grid.rectangle(dst, taker)
        for giver in givers:
            common = None if giver == taker else wanted.intersection(grid.rectangle(src, giver))
            sent[giver] += 0 if common is None else common.area
    return tuple(sent)


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
