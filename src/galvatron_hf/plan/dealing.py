# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Makes deals: of documents whose packs were chosen, and of the padded rows that they came from. Importing this module
needs no torch.
"""

from __future__ import annotations

from collections.abc import Sequence

from galvatron_hf.plan.chunks import chunks_of
from galvatron_hf.plan.deal import PADDING, Deal, Piece


def deal_out(
    lengths: Sequence[int],
    packs: Sequence[Sequence[int]],
    shared: Sequence[tuple[int, Sequence[int], str]],
    padding: Sequence[int],
    rows: Sequence[int],
) -> Deal:
    """Deals the documents of a micro-batch.

    Args:
        lengths (`Sequence[int]`): [n], tokens of each document.
        packs (`Sequence[Sequence[int]]`): the whole documents of each pack, in the order in which they shall stand.
        shared (`Sequence[tuple[int, Sequence[int], str]]`): documents that several packs share, each with these packs
            and its execution. The i-th of them gets the i-th part of [`chunks_of`].
        padding (`Sequence[int]`): the positions that fill up each pack; see [`missing_tokens`].
        rows (`Sequence[int]`): [n], the row of the global batch of each document.

    Returns:
        [`Deal`]: whose documents are numbered in the order in which they are first met; `rows` are -1 for padding.
    """
    parts = parts_of_packs(lengths, packs, shared)
    kinds = {index: execution for index, _, execution in shared}
    for index, owners, execution in shared:
        if execution == "ulysses" and not all(chunks_of(int(lengths[index]), len(owners))):
            kinds[index] = "gather"  # an owner has no token, and the others may not divide the heads
    numbers: dict[int, int] = {}
    pieces, cuts, found_rows, names, executions, at = [], [0], [], [], {}, 0
    for part, missing in zip(parts, padding, strict=True):
        for index, start, stop in part:
            if index not in numbers:
                numbers[index] = len(found_rows)
                found_rows.append(rows[index])
                names.append(index)
                if index in kinds:
                    executions[numbers[index]] = kinds[index]
            pieces.append(Piece(numbers[index], start, stop, at))
            at += stop - start
        if missing:
            pieces.append(Piece(len(found_rows), 0, missing, at))
            found_rows.append(PADDING)
            names.append(PADDING)
            at += missing
        cuts.append(at)
    return Deal(
        pieces=tuple(pieces), cuts=tuple(cuts), rows=tuple(found_rows), executions=executions, names=tuple(names)
    )


def deal_in_rows(deal: Deal, columns: Sequence[int], rows: int, length: int) -> Deal:
    """Returns the deal of the padded rows that the documents of `deal` come from, with padding where a row has none of
    them. Each row is a pack.

    Args:
        columns (`Sequence[int]`): the position in its row at which each document begins, by the document's name.
        rows, length (`int`): of the padded batch.
    """
    of_row: dict[int, list[tuple[int, int, int]]] = {}
    for name, row, tokens in zip(deal.names, deal.rows, deal.lengths, strict=True):
        if name != PADDING:
            of_row.setdefault(row, []).append((int(columns[name]), name, tokens))
    pieces, names, found_rows = [], [], []

    def add(name: int, row: int, tokens: int) -> None:
        if tokens:
            pieces.append(Piece(len(names), 0, tokens, pieces[-1].end if pieces else 0))
            names.append(name)
            found_rows.append(row)

    for row in range(rows):
        at = 0
        for column, name, tokens in sorted(of_row.get(row, ())):
            add(PADDING, PADDING, column - at)
            add(name, row, tokens)
            at = column + tokens
        add(PADDING, PADDING, length - at)
    cuts = tuple(range(0, (rows + 1) * length, length))
    return Deal(pieces=tuple(pieces), cuts=cuts, rows=tuple(found_rows), names=tuple(names))


def parts_of_packs(
    lengths: Sequence[int], packs: Sequence[Sequence[int]], shared: Sequence[tuple[int, Sequence[int], str]]
) -> list[list[tuple[int, int, int]]]:
    """Returns the (document, start, stop) of each pack, whole documents first; arguments as in [`deal_out`]."""
    parts = [[(index, 0, int(lengths[index])) for index in pack] for pack in packs]
    for index, owners, _ in shared:
        for owner, runs in zip(owners, chunks_of(int(lengths[index]), len(owners)), strict=True):
            parts[owner] += [(index, start, stop) for start, stop in runs]
    return parts


def missing_tokens(tokens: int, multiple: int) -> int:
    """Returns the padding of a pack with so many tokens: an empty pack gets some."""
    return -tokens % multiple if tokens else multiple
