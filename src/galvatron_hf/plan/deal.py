# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Says which tokens of which documents each data rank holds. A packed row is written in the order of its owners, so
that the tokens of each rank are one range of it. A document may lie whole on one rank, or in chunks on several ranks,
which then share its attention. Importing this module needs no torch.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from galvatron_hf.plan.chunks import Runs, merged, merged_in_order, size_of
from galvatron_hf.plan.layout import PackedRow


PADDING = -1
EXECUTIONS = ("ring", "gather", "ulysses")


@dataclass(frozen=True)
class Piece:
    """Holds the tokens `[start, stop)` of a document, which stand in the row from position `at` on."""

    document: int
    start: int
    stop: int
    at: int

    @property
    def length(self) -> int:
        return self.stop - self.start

    @property
    def end(self) -> int:
        """Returns the position in the row after the last token."""
        return self.at + self.length


@dataclass(frozen=True, kw_only=True)
class SharedDocument:
    """Describes a document that several data ranks hold, as one of them (the owner) sees it.

    Attributes:
        document (`int`): its number in the deal.
        at, tokens (`int`): where the owner's tokens of it begin among the owner's tokens, which are put in the
            document's order, and their number.
        runs (`dict[int, Runs]`): the tokens that each data rank holds, by its index.
        execution (`str`): "ring", "gather" or "ulysses".
    """

    document: int
    at: int
    tokens: int
    runs: Mapping[int, Runs]
    execution: str

    @property
    def holders(self) -> tuple[int, ...]:
        return tuple(sorted(self.runs))

    @property
    def length(self) -> int:
        return sum(size_of(runs) for runs in self.runs.values())


@dataclass(frozen=True, kw_only=True)
class Ring:
    """Holds the documents that the same data ranks share in a ring. `holders` are the ranks in the ring's order."""

    holders: tuple[int, ...]
    documents: tuple[SharedDocument, ...]


@dataclass(frozen=True, kw_only=True)
class Share:
    """Holds what one data rank of a layer has of a packed row.

    Attributes:
        index (`int`): of the data rank.
        tokens (`int`): the positions of its part of the row.
        order (`Runs`, *optional*): ranges of the rank's part of the row. In their order they give its whole documents,
            one after the other, and then its tokens of shared documents. None if the part has that order already.
        offsets (`tuple[int, ...]`): where whole documents begin in that order, and the end of the last; only 0 if
            there are none.
        rings (`tuple[Ring, ...]`): in an order that all ranks of the layer agree on, whichever rings a rank is in.
        gathered, exchanged (`tuple[SharedDocument, ...]`): the rank's documents whose keys and values are gathered, or
            whose heads are exchanged.
        gathers, exchanges (`bool`): whether any data rank of the layer has such documents, so that all take part.
    """

    index: int
    tokens: int
    order: Runs | None
    offsets: tuple[int, ...]
    rings: tuple[Ring, ...] = ()
    gathered: tuple[SharedDocument, ...] = ()
    exchanged: tuple[SharedDocument, ...] = ()
    gathers: bool = False
    exchanges: bool = False

    @property
    def is_whole(self) -> bool:
        """Returns whether no document needs other ranks, and the part is in order."""
        return self.order is None and not (self.rings or self.gathers or self.exchanges)

    @property
    def whole_tokens(self) -> int:
        """Returns the tokens of whole documents."""
        return self.offsets[-1]


@dataclass(frozen=True, kw_only=True)
class Deal:
    """Holds pieces of documents, one after the other in one row. The pieces between two cuts are a pack.

    Args:
        pieces (`tuple[Piece, ...]`): in the order of the row, which they fill; those of a document cover it once.
        cuts (`tuple[int, ...]`): the positions of the row at which packs begin, and its end.
        rows (`tuple[int, ...]`, *optional*): the row of the global batch of each document, -1 for padding that no loss
            counts; by default the document's index.
        executions (`Mapping[int, str]`): how ranks that share a document compute its attention, by document; "ring" by
            default.
        names (`tuple[int, ...]`, *optional*): a number of each document that other deals of it have too, -1 for
            padding; by default the document's index.
        others (`Mapping[int, Deal]`): deals of the same documents for layers of other context degrees.
        cache (`dict`): what a runtime has made of the shares of data ranks.
    """

    pieces: tuple[Piece, ...]
    cuts: tuple[int, ...]
    rows: tuple[int, ...] = ()
    executions: Mapping[int, str] = field(default_factory=dict)
    names: tuple[int, ...] = ()
    others: Mapping[int, Deal] = field(default_factory=dict, compare=False, repr=False)
    cache: dict = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self):
        if not self.rows:
            object.__setattr__(self, "rows", tuple(range(1 + max(piece.document for piece in self.pieces))))
        if not self.names:
            object.__setattr__(self, "names", tuple(range(len(self.rows))))
        self._check_documents()
        ends = (self.cuts[0], self.cuts[-1]) if len(self.cuts) > 1 else None
        bounds = {piece.at for piece in self.pieces} | {self.tokens}
        if ends != (0, self.tokens) or not set(self.cuts) <= bounds or list(self.cuts) != sorted(self.cuts):
            raise ValueError(
                f"cuts {list(self.cuts)[:8]} do not cut the row of {self.tokens} positions where documents, or pieces "
                "of them, end; give 0, some of these ends in rising order, and the last of them."
            )

    def _check_documents(self) -> None:
        at, found = 0, {}
        for piece in self.pieces:
            if piece.at != at or piece.length < 1:
                raise ValueError(
                    f"A piece of {piece.length} tokens at position {piece.at} does not follow the {at} positions "
                    "before it; give pieces of 1 token or more, one after the other."
                )
            found.setdefault(piece.document, []).append((piece.start, piece.stop))
            at = piece.end
        if set(found) != set(range(len(self.rows))):
            raise ValueError(
                f"{len(found)} documents and {len(self.rows)} rows do not match; number the documents from 0, and "
                "give one row for each."
            )
        for document, runs in found.items():
            if merged(runs)[0][0] != 0 or size_of(runs) != merged(runs)[0][1]:
                raise ValueError(
                    f"The pieces {sorted(runs)[:4]} of document {document} do not cover it once; deal each of its "
                    "tokens to one rank."
                )

    @classmethod
    def of_documents(cls, *, bounds: Sequence[int], cuts: Sequence[int], rows: Sequence[int] = ()) -> Deal:
        """Returns the deal of whole documents.

        Args:
            bounds (`Sequence[int]`): offsets at which documents begin, and the end of the last:
                `0 = b_0 < ... < b_n`.
            cuts (`Sequence[int]`): the bounds at which packs begin, and the end of the last.
            rows (`Sequence[int]`, *optional*): as above.
        """
        rising = all(start < stop for start, stop in pairwise(bounds))
        if len(bounds) < 2 or bounds[0] != 0 or not rising or len(rows) not in (0, len(bounds) - 1):
            raise ValueError(
                f"bounds of {len(bounds)} offsets and {len(rows)} rows are not consecutive documents; give 0, the end "
                "of each document in rising order, and one row for each."
            )
        pieces = tuple(Piece(index, 0, stop - start, start) for index, (start, stop) in enumerate(pairwise(bounds)))
        return cls(pieces=pieces, cuts=tuple(cuts), rows=tuple(rows))

    @property
    def tokens(self) -> int:
        """Returns the positions of the row."""
        return self.pieces[-1].end

    @property
    def grid(self) -> PackedRow:
        return PackedRow(self.cuts)

    @property
    def lengths(self) -> list[int]:
        """Returns the tokens of each document."""
        lengths = [0] * len(self.rows)
        for piece in self.pieces:
            lengths[piece.document] += piece.length
        return lengths

    @property
    def longest(self) -> int:
        """Returns the number of tokens of the longest document."""
        return max(self.lengths)

    @property
    def is_shared(self) -> bool:
        """Returns whether a document has several pieces."""
        return len(self.pieces) > len(self.rows)

    def pieces_of_packs(self) -> list[int]:
        """Returns the number of pieces of each pack; of whole documents, that of documents."""
        starts = [piece.at for piece in self.pieces]
        ends = [bisect.bisect_left(starts, cut) for cut in self.cuts]
        return [stop - start for start, stop in pairwise(ends)]

    def rows_at(self, positions: Iterable[int]) -> list[int]:
        """Returns the sorted rows of the global batch to which positions of the packed row belong, without padding."""
        starts = [piece.at for piece in self.pieces]
        found = (self.pieces[bisect.bisect_right(starts, position) - 1].document for position in positions)
        return sorted({self.rows[document] for document in found} - {PADDING})

    # ---- Ranks ----

    def share(self, data: int, index: int) -> Share:
        """Returns what data rank `index` of `data` has. It follows from the deal and the degree alone, so that ranks
        agree on rings without a message. Raises `ValueError` if the packs cannot be split over `data` ranks.
        """
        packs = len(self.cuts) - 1
        if packs % data:
            raise ValueError(
                f"A row of {packs} packs cannot be split over {data} data ranks; make a multiple of packs."
            )
        starts = [self.cuts[k * packs // data] for k in range(data + 1)]
        held: dict[int, dict[int, list[Piece]]] = {}  # by document and data rank
        own: list[int] = []  # documents of this rank, in the order of the row
        for piece in self.pieces:
            holder = bisect.bisect_right(starts, piece.at) - 1
            held.setdefault(piece.document, {}).setdefault(holder, []).append(piece)
            if holder == index and len(held[piece.document][holder]) == 1:
                own.append(piece.document)
        whole = [document for document in own if len(held[document]) == 1]
        order: list[tuple[int, int]] = []
        offsets = [0]
        for document in whole:
            tokens = self._take(held[document][index], starts[index], order)
            offsets.append(offsets[-1] + tokens)
        at, shared = offsets[-1], []
        for document in sorted(set(own) - set(whole)):
            tokens = self._take(held[document][index], starts[index], order)
            runs = {
                rank: merged((piece.start, piece.stop) for piece in held[document][rank]) for rank in held[document]
            }
            execution = self.executions.get(document, EXECUTIONS[0])
            shared.append(SharedDocument(document=document, at=at, tokens=tokens, runs=runs, execution=execution))
            at += tokens
        joined = merged_in_order(order)
        used = {self.executions.get(document, EXECUTIONS[0]) for document, ranks in held.items() if len(ranks) > 1}
        rings: dict[tuple[int, ...], list[SharedDocument]] = {}
        for one in shared:
            if one.execution == "ring":
                rings.setdefault(one.holders, []).append(one)
        return Share(
            index=index,
            tokens=starts[index + 1] - starts[index],
            order=None if len(joined) < 2 else joined,
            offsets=tuple(offsets),
            # Sorted by holders, which no rank has to know of the rings of others: a subsequence of one order.
            rings=tuple(Ring(holders=holders, documents=tuple(rings[holders])) for holders in sorted(rings)),
            gathered=tuple(one for one in shared if one.execution == "gather"),
            exchanged=tuple(one for one in shared if one.execution == "ulysses"),
            gathers="gather" in used,
            exchanges="ulysses" in used,
        )

    @staticmethod
    def _take(pieces: Sequence[Piece], start: int, order: list[tuple[int, int]]) -> int:
        """Adds the places of pieces of one document to an order, first tokens first; returns their tokens."""
        pieces = sorted(pieces, key=lambda piece: piece.start)
        order += [(piece.at - start, piece.end - start) for piece in pieces]
        return sum(piece.length for piece in pieces)
