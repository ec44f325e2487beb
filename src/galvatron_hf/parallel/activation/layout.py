# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Where an activation lies between layers.

A layout gives each rank of a stage a rectangle of the micro-batch: a range of rows by a range of positions. A
micro-batch is a [`Grid`] of rows, or one [`PackedRow`]. `redistribute.py` moves activations from one to another.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor


if TYPE_CHECKING:
    from galvatron_hf.plan import LayerStrategy


@dataclass(frozen=True, kw_only=True)
class Rectangle:
    """A range of rows by a range of positions; each `stop` is the one after the last."""

    row_start: int
    row_stop: int
    position_start: int
    position_stop: int

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of rows and positions."""
        return self.row_stop - self.row_start, self.position_stop - self.position_start

    @property
    def area(self) -> int:
        """Rows times positions."""
        return math.prod(self.shape)

    def intersection(self, other: Rectangle) -> Rectangle | None:
        """The part that both contain, or `None` if there is none."""
        common = Rectangle(
            row_start=max(self.row_start, other.row_start),
            row_stop=min(self.row_stop, other.row_stop),
            position_start=max(self.position_start, other.position_start),
            position_stop=min(self.position_stop, other.position_stop),
        )
        return common if min(common.shape) > 0 else None

    def within(self, x: Tensor, whole: Rectangle) -> Tensor:
        """The view of this rectangle in `x`, which holds the rectangle `whole` in its first two dimensions."""
        rows = slice(self.row_start - whole.row_start, self.row_stop - whole.row_start)
        positions = slice(self.position_start - whole.position_start, self.position_stop - whole.position_start)
        return x[rows, positions]


@dataclass(frozen=True)
class Layout:
    """
    The resting layout of an activation `[rows, positions, ...]` over the ranks of a stage.

    Rank `i` of the stage holds replica `i % replicas` of position piece `(i // replicas) % positions` of row piece
    `i // (replicas * positions)`. Piece `k` of `n` of `length` things is `[k*length//n, (k+1)*length//n)`.

    Args:
        data (`int`): Into how many pieces the rows are split.
        positions (`int`): Into how many pieces the positions are split.
        replicas (`int`): How many ranks hold each piece.

    Raises:
        ValueError: If a degree is not positive.
    """

    data: int
    positions: int = 1
    replicas: int = 1

    def __post_init__(self) -> None:
        if min(self.data, self.positions, self.replicas) < 1:
            raise ValueError(f"{self} is no layout, because every degree counts ranks; use degrees of at least 1.")

    @classmethod
    def of(cls, strategy: LayerStrategy, ranks: int) -> Layout:
        """
        The layout in which a layer takes and leaves its hidden states.

        Args:
            strategy (`LayerStrategy`): How the layer is parallelised.
            ranks (`int`): Number of ranks of its stage.

        Raises:
            ValueError: If the strategy's degrees do not divide the ranks.
        """
        model_ranks = strategy.tensor * strategy.ulysses * strategy.context
        if ranks % model_ranks:
            raise ValueError(
                f"A layer with tensor * ulysses * context = {model_ranks} cannot run on a stage of {ranks} ranks,"
                f" because {model_ranks} does not divide {ranks}; use degrees whose product does."
            )
        replicas = 1 if strategy.megatron_sp else strategy.tensor
        return cls(data=ranks // model_ranks, positions=strategy.sequence_degree, replicas=replicas)

    @property
    def ranks(self) -> int:
        """Number of ranks of the stage."""
        return self.data * self.positions * self.replicas

    def rectangle(self, index: int, rows: int, length: int) -> Rectangle:
        """
        What one rank holds. It may be empty, where there are fewer rows (or positions) than pieces.

        Args:
            index (`int`): The rank's index in its stage.
            rows (`int`): Rows of the micro-batch.
            length (`int`): Positions of a row.
        """
        piece = index // self.replicas
        row, position = divmod(piece, self.positions)
        return Rectangle(
            row_start=row * rows // self.data,
            row_stop=(row + 1) * rows // self.data,
            position_start=position * length // self.positions,
            position_stop=(position + 1) * length // self.positions,
        )


@dataclass(frozen=True)
class Grid:
    """
    The shape of a micro-batch whose rows have one length.

    Args:
        rows (`int`): Number of rows.
        length (`int`): Positions of each.
    """

    rows: int
    length: int

    packed = False

    def rectangle(self, layout: Layout, index: int) -> Rectangle:
        """What the rank with this index in its stage holds under a layout."""
        return layout.rectangle(index, self.rows, self.length)


@dataclass(frozen=True)
class PackedRow:
    """
    The shape of a micro-batch of one row that holds whole documents one behind the other.

    It is cut into packs where documents end. Data rank `k` of `n` holds the packs `[k*D//n, (k+1)*D//n)` of `D`, which
    may have any number of positions; position piece `j` of `p` is an even part of that.

    Args:
        cuts (`tuple[int, ...]`): Where the packs begin, and where the last one ends: `0 = c_0 <= ... <= c_D`. `D` is a
            multiple of every layer's data degree.
    """

    cuts: tuple[int, ...]

    packed, rows = True, 1

    @property
    def length(self) -> int:
        """Positions of the row."""
        return self.cuts[-1]

    def rectangle(self, layout: Layout, index: int) -> Rectangle:
        """What the rank with this index in its stage holds under a layout."""
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
