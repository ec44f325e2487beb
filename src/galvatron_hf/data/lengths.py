# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""How long the sequences of a dataset are, before any token of them is read."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from torch.utils.data import ConcatDataset, Subset

from galvatron_hf.utils.compat import row_indices


def sequence_lengths(dataset: Any, column: str = "input_ids", length_column: str = "length") -> np.ndarray | None:
    """Number of tokens of every row, from what stands beside the tokens.

    Of a `datasets.Dataset` Arrow's offsets tell, one for each row, whatever was selected, shuffled, sorted or
    concatenated since. A row without a list has length 0. Where the tokens are no lists yet, a `length_column` of
    integers is taken at its word. `Subset` and `ConcatDataset` of such datasets are followed.

    Args:
        dataset (`Any`): as given to a Trainer.
        column (`str`, *optional*): holds the tokens.
        length_column (`str`, *optional*): holds their number, if it is there.

    Returns:
        `np.ndarray`: int64 [rows], or None where only reading the rows would tell: streams, lists, datasets of own
        classes, and those whose rows are made by a transform when they are read.
    """
    if _is_plain(dataset, Subset):
        lengths = sequence_lengths(dataset.dataset, column, length_column)
        return None if lengths is None else lengths[np.asarray(dataset.indices, dtype=np.int64)]
    if _is_plain(dataset, ConcatDataset):
        parts = [sequence_lengths(part, column, length_column) for part in dataset.datasets]
        return None if any(part is None for part in parts) else np.concatenate(parts)
    if _is_plain(dataset, datasets.Dataset) and dataset.format["type"] != "custom":
        return _arrow_lengths(dataset, column, length_column)
    return None


def _is_plain(dataset: Any, kind: type) -> bool:
    """Whether a dataset gives its rows as `kind` does: a subclass may make others of them."""
    return isinstance(dataset, kind) and all(
        getattr(type(dataset), name, None) is getattr(kind, name, None) for name in ("__getitem__", "__getitems__")
    )


def _arrow_lengths(dataset: datasets.Dataset, column: str, length_column: str) -> np.ndarray | None:
    """Of the rows of a dataset without transform, through its mapping of indices."""
    lengths = None
    if column in dataset.column_names and _is_shown(dataset, column):
        lengths = _list_lengths(dataset.data.column(column))
    if lengths is None and length_column in dataset.column_names:
        lengths = _own_word(dataset.data.column(length_column))
    indices = row_indices(dataset)
    return lengths if lengths is None or indices is None else lengths[indices]


def _is_shown(dataset: datasets.Dataset, column: str) -> bool:
    """Whether the rows have the column: a format may leave it out."""
    return dataset.format["output_all_columns"] or column in dataset.format["columns"]


def _own_word(column: pa.ChunkedArray) -> np.ndarray | None:
    """The integers of a column of lengths; None if it holds anything else, or nothing in places."""
    if not pa.types.is_integer(column.type) or column.null_count or (len(column) and pc.min(column).as_py() < 0):
        return None
    return column.to_numpy().astype(np.int64)


def _list_lengths(column: pa.ChunkedArray) -> np.ndarray | None:
    """Of lists, as their offsets tell; None if the column holds no lists."""
    kind = column.type
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)):
        return None
    return pc.fill_null(pc.list_value_length(column), 0).to_numpy().astype(np.int64)


class LookAhead(Iterator):
    """An iterator whose next items can be looked at before they are taken.

    Nothing is read that was neither looked at nor taken. What the source draws from a random stream as it reads is
    drawn in the same order, but earlier. An error of the source comes when the item in its place is taken.

    Args:
        source (`Iterable`): such as a loader of collated batches.
    """

    def __init__(self, source: Iterable):
        self._source = iter(source)
        self._ahead: deque = deque()
        self._end: Exception | None = None

    def peek(self, count: int) -> list:
        """The next `count` items, or those left if fewer; they stay to be taken."""
        while len(self._ahead) < count and self._end is None:
            try:
                self._ahead.append(next(self._source))
            except Exception as error:  # kept for the one who takes this item; the end of the source is one too
                self._end = error
        return list(self._ahead)[:count]

    def __next__(self) -> Any:
        if self.peek(1):
            return self._ahead.popleft()
        end, self._end = self._end, None
        raise end
