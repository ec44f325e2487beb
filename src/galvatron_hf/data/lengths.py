# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Lengths of the sequences of a dataset, without reading their tokens."""

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
    """Returns the number of tokens of every row (int64, [rows]) without reading the tokens. For a `datasets.Dataset`
    the lengths come from Arrow's list offsets, after any select, shuffle, sort or concatenation. A row without a list
    has length 0. If the tokens are not lists, the integers of `length_column` are used. `Subset` and `ConcatDataset`
    of such datasets work too. Returns None if the rows would have to be read: streams, lists, other dataset classes,
    and datasets with a transform.
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
    """Returns True if a dataset has the `__getitem__` of `kind`; a subclass may return other rows."""
    return isinstance(dataset, kind) and all(
        getattr(type(dataset), name, None) is getattr(kind, name, None) for name in ("__getitem__", "__getitems__")
    )


def _arrow_lengths(dataset: datasets.Dataset, column: str, length_column: str) -> np.ndarray | None:
    """Returns the lengths of a dataset without transform, in the order of its rows."""
    lengths = None
    if column in dataset.column_names and _is_shown(dataset, column):
        lengths = _list_lengths(dataset.data.column(column))
    if lengths is None and length_column in dataset.column_names:
        lengths = _integer_lengths(dataset.data.column(length_column))
    indices = row_indices(dataset)
    return lengths if lengths is None or indices is None else lengths[indices]


def _is_shown(dataset: datasets.Dataset, column: str) -> bool:
    """Returns True if the rows have the column, which a format may leave out."""
    return dataset.format["output_all_columns"] or column in dataset.format["columns"]


def _integer_lengths(column: pa.ChunkedArray) -> np.ndarray | None:
    """Returns the integers of a column of lengths; None if it has other values or nulls."""
    if not pa.types.is_integer(column.type) or column.null_count or (len(column) and pc.min(column).as_py() < 0):
        return None
    return column.to_numpy().astype(np.int64)


def _list_lengths(column: pa.ChunkedArray) -> np.ndarray | None:
    """Returns the lengths of the lists of a column; None if it has no lists."""
    kind = column.type
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)):
        return None
    return pc.fill_null(pc.list_value_length(column), 0).to_numpy().astype(np.int64)


class LookAhead(Iterator):
    """Adds `peek` to an iterator, which reads the next items before they are taken, and no further. An error of the
    source is raised when the item in its place is taken.
    """

    def __init__(self, source: Iterable):
        self._source = iter(source)
        self._ahead: deque = deque()
        self._end: Exception | None = None

    def peek(self, count: int) -> list:
        """Returns the next `count` items, fewer at the end, without taking them."""
        while len(self._ahead) < count and self._end is None:
            try:
                self._ahead.append(next(self._source))
            except Exception as error:  # raised when this item is taken; StopIteration too
                self._end = error
        return list(self._ahead)[:count]

    def __next__(self) -> Any:
        if self.peek(1):
            return self._ahead.popleft()
        end, self._end = self._end, None
        raise end
