# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The documents of a packed row, and the packs into which data ranks cut it."""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from galvatron_hf.plan.layout import PackedRow, Rectangle
from galvatron_hf.utils.device import to_device


PADDING = -1
# Lengths for which rows of documents are one batch of attention. cuDNN's kernel prepares a plan for each new shape, so
# only lengths that come again may get there.
ROW_MULTIPLE = 256


class DocumentBounds:
    """Holds the documents of a row as attention takes them.

    Attributes:
        offsets (`tuple[int, ...]`): where documents begin, and the end of the last: `0 = b_0 < ... < b_n`.
        lengths (`tuple[int, ...]`): of the documents.
        tokens, longest (`int`): the end of the last document, and the length of the longest.
        rows (`int`, *optional*): number of documents, if they are as long as each other and fit `ROW_MULTIPLE`.
    """

    def __init__(self, offsets: Iterable[int]):
        self.offsets = tuple(offsets)
        self.lengths = tuple(end - begin for begin, end in pairwise(self.offsets))
        if not self.lengths or self.offsets[0] != 0 or min(self.lengths) < 1:
            raise ValueError(
                f"Document bounds {list(self.offsets)} do not rise from 0; pass the offset where each document "
                "begins, and the number of tokens."
            )
        self.tokens, self.longest = self.offsets[-1], max(self.lengths)
        equal = self.longest == min(self.lengths) and self.longest % ROW_MULTIPLE == 0
        self.rows = len(self.lengths) if equal else None
        self._copy: torch.Tensor | None = None

    def on(self, device: torch.device) -> torch.Tensor:
        """Returns the offsets as int32 on a device; the copy is made once, and the host does not wait for it."""
        if self._copy is None or self._copy.device != device:
            self._copy = to_device(torch.tensor(self.offsets, dtype=torch.int32, device="cpu"), device)
        return self._copy


@dataclass(frozen=True, kw_only=True)
class Documents:
    """Holds whole documents, one after the other in one row. The documents between two cuts are a pack.

    Args:
        bounds (`tuple[int, ...]`): offsets at which documents begin, and the end of the last: `0 = b_0 < ... < b_n`.
        cuts (`tuple[int, ...]`): the bounds at which packs begin, and the end of the last.
        rows (`tuple[int, ...]`, *optional*): the row of the global batch of each document, -1 for padding that no loss
            counts; by default the document's index.
    """

    bounds: tuple[int, ...]
    cuts: tuple[int, ...]
    rows: tuple[int, ...] = field(default=())
    _within: dict[Rectangle, DocumentBounds] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self):
        if not self.rows:
            object.__setattr__(self, "rows", tuple(range(len(self.bounds) - 1)))
        rising = all(start < stop for start, stop in pairwise(self.bounds))
        if len(self.bounds) < 2 or self.bounds[0] != 0 or not rising or len(self.rows) != len(self.bounds) - 1:
            raise ValueError(
                f"bounds of {len(self.bounds)} offsets and {len(self.rows)} rows are not consecutive "
                "documents; give 0, the end of each document in rising order, and one row for each."
            )
        ends = (self.cuts[0], self.cuts[-1]) if len(self.cuts) > 1 else None
        if (
            ends != (0, self.bounds[-1])
            or not set(self.cuts) <= set(self.bounds)
            or list(self.cuts) != sorted(self.cuts)
        ):
            raise ValueError(
                f"cuts {list(self.cuts)[:8]} do not cut the row of {self.bounds[-1]} positions where documents end; "
                "give 0, some of the bounds in rising order, and the last of them."
            )

    @property
    def grid(self) -> PackedRow:
        return PackedRow(self.cuts)

    def bounds_within(self, part: Rectangle) -> DocumentBounds:
        """Returns the bounds of the whole documents in `part`, counted from its start."""
        if part not in self._within:  # every layer needs them, and its recompute
            first = bisect.bisect_left(self.bounds, part.position_start)
            last = bisect.bisect_right(self.bounds, part.position_stop)
            self._within[part] = DocumentBounds(bound - part.position_start for bound in self.bounds[first:last])
        return self._within[part]

    def real_tokens(self) -> torch.Tensor:
        """Returns 1.0 for each position of a document, 0.0 for padding: [positions] on the host."""
        real = torch.ones(self.bounds[-1], device="cpu")
        for row, (start, stop) in zip(self.rows, pairwise(self.bounds), strict=True):
            if row == PADDING:
                real[start:stop] = 0.0
        return real

    def rows_at(self, positions: Iterable[int]) -> list[int]:
        """Returns the sorted rows of the global batch to which positions of the packed row belong, without padding."""
        found = {self.rows[bisect.bisect_right(self.bounds, position) - 1] for position in positions}
        return sorted(found - {PADDING})
