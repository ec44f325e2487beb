# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Compares lengths of a dataset's sequences with the sequences, and a look ahead with an iterator's next items."""

import re
import tracemalloc
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from datasets import Dataset, Features, LargeList, List, Value, concatenate_datasets, load_from_disk
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import ConcatDataset, Subset

from galvatron_hf.data.lengths import LookAhead, sequence_lengths


COUNTS = [3, 0, 7, 1, None, 12, 5, 5, 2]
KINDS = {
    "list": lambda: List(Value("int32")),
    "large list": lambda: LargeList(Value("int64")),
    "list of lists": lambda: List(List(Value("int32"))),
}


def _dataset(counts=COUNTS, kind="list") -> Dataset:
    """Returns rows of so many tokens each (None: no list at all), with a key to sort by."""
    token = [1, 2] if kind == "list of lists" else 1
    rows = [None if count is None else [token] * count for count in counts]
    keys = [(7 * number) % 5 for number in range(len(rows))]
    return Dataset.from_dict(
        {"input_ids": rows, "key": keys}, features=Features(input_ids=KINDS[kind](), key=Value("int64"))
    )


def _read(dataset) -> list[int]:
    """Returns the lengths of the rows as training would get them."""
    return [len(dataset[row]["input_ids"] or ()) for row in range(len(dataset))]


def _check(dataset):
    lengths = sequence_lengths(dataset)
    assert lengths.dtype == np.int64 and lengths.tolist() == _read(dataset)


@pytest.mark.parametrize("kind", KINDS)
def test_offsets_tell_the_lengths_of_lists(kind):
    _check(_dataset(kind=kind))
    _check(_dataset([], kind))


def test_lists_of_one_size_and_slices_of_chunks():
    fixed = pa.array([[1, 2, 3], None, [4, 5, 6]], pa.list_(pa.int32(), 3))
    _check(Dataset(pa.table({"input_ids": fixed})))
    chunks = pa.chunked_array([pa.array([[1], [1, 2], None, [1, 2, 3]]).slice(1, 3), pa.array([[9] * 4, []]).slice(1)])
    assert chunks.num_chunks == 2
    _check(Dataset(pa.table({"input_ids": chunks})))


def test_an_absent_list_that_lies_over_tokens_is_empty():
    """Arrow allows a null entry to have an extent; its row is None all the same."""
    hidden = pa.ListArray.from_arrays(pa.array([0, 2, 5]), pa.array(range(5)), mask=pa.array([False, True]))
    assert np.diff(hidden.offsets).tolist() == [2, 3]
    assert sequence_lengths(Dataset(pa.table({"input_ids": hidden}))).tolist() == [2, 0]


def _select(dataset, draw):
    return dataset.select(draw(st.lists(st.integers(0, len(dataset) - 1), max_size=12)))


def _part(dataset, draw):
    start = draw(st.integers(0, len(dataset) - 1))
    return dataset.select(range(start, draw(st.integers(start, len(dataset)))))


def _shard(dataset, draw):
    number = draw(st.integers(1, min(3, len(dataset))))
    return dataset.shard(number, draw(st.integers(0, number - 1)), contiguous=draw(st.booleans()))


def _split(dataset, draw):
    if len(dataset) < 2:
        return dataset
    halves = dataset.train_test_split(test_size=draw(st.integers(1, len(dataset) - 1)), seed=draw(st.integers(0, 9)))
    return halves[draw(st.sampled_from(["train", "test"]))]


STEPS = {
    "select": _select,
    "part": _part,
    "shard": _shard,
    "split": _split,
    "shuffle": lambda dataset, draw: dataset.shuffle(seed=draw(st.integers(0, 9)), keep_in_memory=True),
    "sort": lambda dataset, draw: dataset.sort("key", reverse=draw(st.booleans())),
    "concatenate": lambda dataset, draw: concatenate_datasets([dataset, _dataset(draw(counts)), dataset]),
}
counts = st.lists(st.one_of(st.none(), st.integers(0, 9)), min_size=1, max_size=8)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_chain_of_changes_keeps_lengths_with_rows(data):
    dataset = _dataset(data.draw(counts))
    for name in data.draw(st.lists(st.sampled_from(sorted(STEPS)), max_size=5)):
        if len(dataset) > 0:
            dataset = STEPS[name](dataset, data.draw)
    _check(dataset)


def test_files_of_several_shards_then_shuffled(tmp_path):
    _dataset().shuffle(seed=3).save_to_disk(tmp_path, num_shards=3)
    dataset = load_from_disk(tmp_path)
    assert dataset.cache_files
    for changed in (dataset, dataset.shuffle(seed=1), concatenate_datasets([dataset.select([5, 1]), _dataset()])):
        _check(changed)


def test_a_column_of_lengths_is_taken_at_its_word():
    """Uses such a column only if there is no better one: people count characters in such columns too."""
    dataset = _dataset().add_column("length", list(range(9)))
    assert sequence_lengths(dataset).tolist() == _read(dataset)
    without = dataset.remove_columns("input_ids")
    assert sequence_lengths(without).tolist() == list(range(9))
    assert sequence_lengths(without.select([4, 2])).tolist() == [4, 2]
    assert sequence_lengths(without, length_column="tokens") is None


@pytest.mark.parametrize("column", [["long"] * 9, [0.5] * 9, [1, None] + [2] * 7, [-1] * 9])
def test_a_column_that_holds_no_lengths_is_passed_over(column):
    dataset = _dataset().add_column("length", column)
    assert sequence_lengths(dataset).tolist() == _read(dataset)
    assert sequence_lengths(dataset.remove_columns("input_ids")) is None


def _twice(batch):
    return {"input_ids": [2 * (row or []) for row in batch["input_ids"]]}


@pytest.mark.parametrize("kind", ["torch", "numpy", "arrow", "pandas"])
def test_formats_leave_lengths_as_they_are(kind):
    dataset = _dataset([3, 1, 4])
    assert sequence_lengths(dataset.with_format(kind)).tolist() == [3, 1, 4]
    assert sequence_lengths(dataset.with_format(kind, columns=["key"])) is None
    assert sequence_lengths(dataset.with_format(kind, columns=["key"], output_all_columns=True)).tolist() == [3, 1, 4]


def test_lengths_that_a_transform_may_change_are_unknown():
    transformed = _dataset().with_transform(_twice)
    assert _read(transformed) != _read(_dataset())
    assert sequence_lengths(transformed) is None
    assert sequence_lengths(transformed.shuffle(seed=0)) is None
    assert sequence_lengths(transformed.add_column("length", COUNTS[:4] + [0] + COUNTS[5:])) is None
    assert sequence_lengths(transformed.with_format(None)).tolist() == _read(_dataset())
    changed = _dataset()
    changed.set_transform(_twice, columns=["input_ids"])
    assert sequence_lengths(changed) is None


class _Longer(Dataset):
    def __getitem__(self, key):
        return _twice(super().__getitem__(key))


class _Reversed(Subset):
    def __getitem__(self, index):
        return super().__getitem__(len(self) - 1 - index)

    def __getitems__(self, indices):
        return [self[index] for index in indices]


@pytest.mark.parametrize(
    "dataset",
    [
        _dataset().to_iterable_dataset(),
        [{"input_ids": [1, 2]}],
        _dataset().remove_columns("input_ids"),
        _dataset().rename_columns({"input_ids": "other", "key": "input_ids"}),
        _Longer(_dataset().data),
        _Reversed(_dataset(), [0, 1, 2]),
        Subset([{"input_ids": [1, 2]}], [0]),
        ConcatDataset([_dataset(), [{"input_ids": [1, 2]}]]),
    ],
    ids=["stream", "list", "no column", "no lists", "own rows", "own order", "part of unknown", "joined to unknown"],
)
def test_lengths_that_only_reading_would_tell_are_unknown(dataset):
    assert sequence_lengths(dataset) is None


def test_parts_and_joins_of_torch_are_followed():
    first, second = _dataset().shuffle(seed=2), _dataset([4, 8])
    part = Subset(first, [5, 5, -1, 0])
    _check(part)
    _check(Subset(part, range(1, 3)))
    _check(Subset(first, []))
    _check(ConcatDataset([part, second, first]))
    _check(Subset(ConcatDataset([part, second]), [5, 0]))


def _resident_bytes(file: Path) -> int:
    """Returns the bytes of the pages that map this file, which other memory of the process does not change."""
    mappings = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)
    mine = [mapping for mapping in mappings if mapping.partition("\n")[0].endswith(f" {file}")]
    assert mine
    return sum(int(size) * 1024 for mapping in mine for size in re.findall(r"^Rss: +(\d+) kB", mapping, re.MULTILINE))


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="resident memory is read from /proc")
def test_a_million_rows_are_measured_without_their_tokens(tmp_path):
    """Maps a file with 256 MB of tokens: each page that is touched counts as resident."""
    rows, tokens, file = 1_000_000, 64, tmp_path / "tokens"
    with open(file, "wb") as empty:
        empty.truncate(rows * tokens * 4)
    mapped = pa.memory_map(str(file)).read_buffer()
    values = pa.Array.from_buffers(pa.int32(), rows * tokens, [None, mapped])
    offsets = pa.array(np.arange(0, rows * tokens + 1, tokens, dtype=np.int32))
    table = pa.table({"input_ids": pa.ListArray.from_arrays(offsets, values)})
    dataset = Dataset(table, fingerprint="tokens")  # which would be made of all tokens otherwise
    dataset = dataset.select(range(5, rows)).shuffle(seed=0, keep_in_memory=True)
    sequence_lengths(_dataset())
    allocated = pa.total_allocated_bytes()
    tracemalloc.start()
    lengths = sequence_lengths(dataset)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert lengths.shape == (rows - 5,) and (lengths == tokens).all()
    assert peak < 40e6 and pa.total_allocated_bytes() - allocated < 40e6
    assert _resident_bytes(file) < 1e6
    assert np.asarray(values).sum() == 0 and _resident_bytes(file) == 256e6  # reading them would have shown


def test_looking_ahead_takes_nothing_away():
    read = []

    def source():
        for number in range(6):
            read.append(number)
            yield number

    ahead = LookAhead(source())
    assert read == []
    assert ahead.peek(2) == [0, 1] == read
    assert next(ahead) == 0 and ahead.peek(1) == [1] and read == [0, 1]
    assert ahead.peek(0) == [] and ahead.peek(3) == [1, 2, 3]
    assert list(ahead) == [1, 2, 3, 4, 5]
    assert ahead.peek(4) == []
    with pytest.raises(StopIteration):
        next(ahead)


@given(st.lists(st.integers(0, 4), max_size=20), st.integers(0, 8))
def test_looked_at_items_are_those_taken_next(looks, total):
    ahead, left = LookAhead(range(total)), list(range(total))
    for count in looks:
        assert ahead.peek(count) == left[:count]
        if count % 2 and left:
            assert next(ahead) == left.pop(0)
    assert list(ahead) == left


def test_an_error_of_the_source_comes_in_its_place():
    class Source:
        def __init__(self):
            self.items = iter([1, OSError("a bad file"), 2])

        def __iter__(self):
            return self

        def __next__(self):
            item = next(self.items)
            if isinstance(item, Exception):
                raise item
            return item

    ahead = LookAhead(Source())
    assert ahead.peek(3) == [1]
    assert next(ahead) == 1
    with pytest.raises(OSError, match="a bad file"):
        next(ahead)
    assert list(ahead) == [2]
