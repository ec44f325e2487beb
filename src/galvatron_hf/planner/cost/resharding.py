# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""What a rank sends when the hidden states go from one layer's split of rows and positions to the next one's.

Rank i of a stage holds replica `i % replicas` of position piece `(i // replicas) % positions` of row piece
`i // (replicas * positions)`. Each rank takes what it lacks from a rank that has it, all inside the smallest aligned
block of ranks in which that is possible, by one all-to-all.
"""

from dataclasses import dataclass
from functools import lru_cache

from galvatron_hf.plan import LayerStrategy


Range = tuple[int, int]


@dataclass(frozen=True)
class Split:
    """How an activation lies over the ranks of a stage: pieces of rows, of positions, and copies of each piece."""

    data: int
    positions: int
    replicas: int

    @classmethod
    def of_layer(cls, strategy: LayerStrategy, ranks: int) -> "Split":
        """Between layers, for a layer on `ranks` ranks."""
        replicas = 1 if strategy.megatron_sp else strategy.tensor
        return cls(strategy.data_degree(ranks), strategy.sequence_degree, replicas)

    @classmethod
    def of_vocabulary(cls, tensor: int, ranks: int, rows: int) -> "Split":
        """Of the embedding's output or the head's input: by rows, and by positions where there are too few rows."""
        pieces = ranks // tensor
        data = max(degree for degree in range(1, pieces + 1) if pieces % degree == 0 and degree <= rows)
        return cls(data, pieces // data, tensor)

    @property
    def ranks(self) -> int:
        return self.data * self.positions * self.replicas

    def part(self, index: int, rows: int, length: int) -> tuple[Range, Range]:
        """Half-open ranges of rows and of positions on rank `index` of the stage."""
        row, position = divmod(index // self.replicas, self.positions)
        return _piece(row, self.data, rows), _piece(position, self.positions, length)

    def tokens(self, index: int, rows: int, length: int) -> int:
        """Rows times positions on rank `index` of the stage."""
        (top, bottom), (left, right) = self.part(index, rows, length)
        return (bottom - top) * (right - left)

    def most_tokens(self, rows: int, length: int) -> int:
        """Rows times positions on the rank that has most."""
        return -(-rows // self.data) * -(-length // self.positions)


def _piece(index: int, pieces: int, size: int) -> Range:
    return index * size // pieces, (index + 1) * size // pieces


def _common(a: tuple[Range, Range], b: tuple[Range, Range]) -> int:
    """Tokens that two parts share."""
    sides = [min(x[1], y[1]) - max(x[0], y[0]) for x, y in zip(a, b, strict=True)]
    return sides[0] * sides[1] if min(sides) > 0 else 0


@lru_cache(maxsize=1024)
def _givers(before: Split, after: Split) -> tuple[int, tuple[frozenset[int], ...]]:
    """The block's size, and for each rank the ranks from which it takes something (itself for what it keeps)."""
    ranks = before.ranks
    # On a grid of ranks x ranks every boundary of every split is a whole number.
    old = [before.part(index, ranks, ranks) for index in range(ranks)]
    new = [after.part(index, ranks, ranks) for index in range(ranks)]
    holders: dict[tuple[Range, Range], list[int]] = {}
    for index, part in enumerate(old):
        holders.setdefault(part, []).append(index)
    wanted = [[held for part, held in holders.items() if _common(part, mine)] for mine in new]
    sizes = [size for size in range(1, ranks + 1) if ranks % size == 0]

    def fits(size: int) -> bool:
        return all(
            any(holder // size == index // size for holder in held)
            for index, pieces in enumerate(wanted)
            for held in pieces
        )

    block = next(size for size in sizes if fits(size))
    given = [0] * ranks
    chosen = []
    for index, pieces in enumerate(wanted):
        givers = set()
        for held in pieces:
            if index in held:
                givers.add(index)
                continue
            # The nearest copy, then the rank that has given least so far.
            near = [holder for holder in held if holder // block == index // block]
            giver = min(near, key=lambda h: (next(s for s in sizes if h // s == index // s), given[h], h))
            given[giver] += _common(old[giver], new[index])
            givers.add(giver)
        chosen.append(frozenset(givers))
    return block, tuple(chosen)


def move(before: Split, after: Split, index: int, rows: int, length: int) -> tuple[int, int] | None:
    """
    What one rank sends when `rows` x `length` tokens go from one split to another.

    Args:
        before (`Split`): How they lie.
        after (`Split`): How they are wanted, over as many ranks.
        index (`int`): The rank's index in its stage.
        rows (`int`): Rows of the micro-batch, on all ranks together.
        length (`int`): Positions of a row.

    Returns:
        `tuple[int, int]`: The ranks of the all-to-all and the tokens that this rank sends (perhaps none); or None
        where each rank has what it needs already.
    """
    block, givers = _givers(before, after)
    if before == after or block == 1:
        return None
    start = index // block * block
    mine = before.part(index, rows, length)
    sent = sum(
        _common(mine, after.part(taker, rows, length))
        for taker in range(start, start + block)
        if taker != index and index in givers[taker]
    )
    return block, sent
