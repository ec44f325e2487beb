# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Opens a dataset by its name (folder, file or id on the Hub) and returns the lengths of its sequences."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from datasets import Dataset, DatasetDict, load_dataset, load_from_disk
from datasets.exceptions import DatasetsError

from galvatron_hf.data.lengths import sequence_lengths


_DIGITS = 9  # digits of a length, so that a sum of billions of lengths has 64 bits
_BUILDERS = {".parquet": "parquet", ".json": "json", ".jsonl": "json"}


def named_lengths(
    name: str, *, split: str | None = None, column: str = "input_ids", config: str | None = None
) -> np.ndarray:
    """Returns the number of tokens of every row of a dataset, int64 [rows].

    Args:
        name (`str`): a folder written by `save_to_disk`, an id on the Hub, or a file. A `.parquet`, `.json`, `.jsonl`
            or `.arrow` file has rows; any other file has one length in each line.
        split (`str`, *optional*): a split as in `load_dataset`; `train` if absent.
        column (`str`, *optional*): name of the column of token ids.
        config (`str`, *optional*): configuration of a dataset on the Hub.

    Raises:
        ValueError: if the dataset cannot be opened, or has no lists of token ids.
    """
    path = Path(name)
    if path.is_file() and path.suffix not in (*_BUILDERS, ".arrow"):
        for what, given in (("split", split), ("config", config)):
            if given is not None:
                raise ValueError(
                    f"{what}={given!r}, but {name!r} is a file of lengths, which has no {what}: leave it out."
                )
        return _written_lengths(path)
    try:
        dataset = _open(path, name, split, config)
    except (DatasetsError, OSError, ValueError) as error:
        reason = str(error.__cause__ or error).strip().partition("\n")[0].rstrip(".")
        raise ValueError(
            f"{name!r} cannot be opened as a dataset ({reason}): give a folder saved with save_to_disk, a file of "
            "token ids, a file with one length per line, or an id on the Hub."
        ) from error
    lengths = sequence_lengths(dataset, column)
    if lengths is None:
        raise ValueError(
            f"{name!r} has no lists of token ids in the column {column!r}: tokenise it, or name another of "
            f"its columns {dataset.column_names}."
        )
    return lengths


def _open(path: Path, name: str, split: str | None, config: str | None) -> Dataset:
    if path.is_dir():
        return _one_split(load_from_disk(name), split)
    if path.is_file():
        if path.suffix == ".arrow":
            return Dataset.from_file(name)
        return load_dataset(_BUILDERS[path.suffix], data_files=name, split=split or "train")
    return load_dataset(name, config, split=split or "train")


def _one_split(dataset: Dataset | DatasetDict, split: str | None) -> Dataset:
    if isinstance(dataset, Dataset):
        return dataset
    if (split or "train") not in dataset:
        raise ValueError(f"its splits are {list(dataset)}, not {split or 'train'!r}")
    return dataset[split or "train"]


def _written_lengths(path: Path) -> np.ndarray:
    lengths = []
    with open(path, encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            if not line.strip().isdecimal():
                raise ValueError(
                    f"Line {number} of {str(path)!r} is {line.strip()[:40]!r}, which is not a length: write one "
                    "number of tokens in each line."
                )
            if len(line.strip()) > _DIGITS:
                raise ValueError(
                    f"Line {number} of {str(path)!r} is {line.strip()[:40]!r}, which is longer than any sequence: "
                    "write one number of tokens in each line."
                )
            lengths.append(int(line))
    return np.array(lengths, dtype=np.int64)
