# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Opens a dataset by its name (folder, file or id on the Hub) and returns the lengths of its sequences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from datasets import Dataset, DatasetDict, load_dataset, load_from_disk
from datasets.exceptions import DatasetsError

from galvatron_hf.data.lengths import sequence_lengths


_DIGITS = 9  # digits of a length, so that a sum of billions of lengths has 64 bits
_BUILDERS = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".csv": "csv"}
_TEXT = (".txt", ".text", ".md")  # raw text, if there is a tokenizer
_COMPRESSED = (".gz", ".zst", ".xz", ".bz2")
_SAVED = ("dataset_dict.json", "state.json", "dataset_info.json")  # what save_to_disk writes
TOKENS = "input_ids"


def named_lengths(
    name: str,
    *,
    split: str | None = None,
    column: str | None = None,
    config: str | None = None,
    tokenizer: str | None = None,
) -> np.ndarray:
    """Returns the number of tokens of every row of a dataset, int64 [rows].

    Args:
        name (`str`): a folder written by `save_to_disk`, a folder of files, a file, or an id on the Hub. Files of rows
            are `.parquet`, `.json`, `.jsonl` and `.csv` with a header, also compressed as `.gz`, and `.arrow`; with a
            tokenizer `.txt` too, each of whose lines is a row. Any other file has one length in each line.
        split (`str`, *optional*): a split as in `load_dataset`; `train` if absent.
        column (`str`, *optional*): name of the column of token ids (default: `input_ids`), or of text if there is a
            tokenizer (default: `text`).
        config (`str`, *optional*): configuration of a dataset on the Hub.
        tokenizer (`str`, *optional*): a tokenizer, local or on the Hub, that makes tokens of text.

    Raises:
        ValueError: if the dataset cannot be opened, or has no lists of token ids and no text.
    """
    path, kinds = Path(name), (*_suffixes(tokenizer), ".arrow")
    if not name.strip():
        raise ValueError("The name of the dataset is empty: give a folder, a file, or an id on the Hub.")
    if not path.exists() and (path.is_absolute() or _kind(path) in kinds or name.count("/") > 1):
        raise ValueError(f"{name!r} does not exist: give a folder, a file, or an id on the Hub.")
    if path.is_file() and path.stat().st_size == 0:
        raise ValueError(f"{name!r} is empty: give a file with rows.")
    if path.is_file() and path.suffix in _COMPRESSED and _kind(path) not in _suffixes(tokenizer):
        raise ValueError(f"{name!r} is compressed, which is read of files of rows alone: decompress it.")
    if path.is_file() and _kind(path) not in kinds:
        for what, given in (("split", split), ("config", config), ("tokenizer", tokenizer)):
            if given is not None:
                raise ValueError(
                    f"{what}={given!r}, but {name!r} is a file of lengths, which has no {what}: leave it out."
                )
        return _written_lengths(path)
    try:
        dataset = _open(path, name, split, config, _suffixes(tokenizer))
    except (DatasetsError, OSError, ValueError, TypeError, IndexError) as error:
        reason = str(error.__cause__ or error).strip().partition("\n")[0].rstrip(".")
        raise ValueError(
            f"{name!r} cannot be opened as a dataset ({reason}): give a folder saved with save_to_disk, a file of "
            "token ids, a file with one length per line, or an id on the Hub."
        ) from error
    if tokenizer is not None:
        return _tokenized_lengths(dataset, name, column or "text", tokenizer)
    column = column or TOKENS
    lengths = sequence_lengths(dataset, column)
    if lengths is None:
        raise ValueError(
            f"{name!r} has no lists of token ids in the column {column!r}: name another of its columns "
            f"{dataset.column_names}, or give a tokenizer for one of text."
        )
    return lengths


def _suffixes(tokenizer: str | None) -> tuple[str, ...]:
    """Returns the suffixes of files that have rows."""
    return tuple(_BUILDERS) if tokenizer is None else (*_BUILDERS, *_TEXT)


def _kind(path: Path) -> str:
    """Returns the suffix of a file, without that of its compression."""
    suffixes = [one for one in path.suffixes if one not in _COMPRESSED]
    return suffixes[-1] if suffixes else ""


def _open(path: Path, name: str, split: str | None, config: str | None, suffixes: Sequence[str]) -> Dataset:
    if path.is_dir() and any((path / one).exists() for one in _SAVED):
        return _one_split(load_from_disk(name), split)
    if path.is_dir():
        return _of_files(sorted(one for one in path.rglob("*") if one.is_file() and _kind(one) in suffixes), split)
    if path.is_file():
        return Dataset.from_file(name) if path.suffix == ".arrow" else _of_files([path], split)
    return load_dataset(name, config, split=split or "train")


def _of_files(files: Sequence[Path], split: str | None) -> Dataset:
    """Opens the files of the kind of which there are most."""
    kinds = [_BUILDERS.get(_kind(one), "text") for one in files]
    if not kinds:
        raise ValueError("no file in it has rows")
    kind = Counter(kinds).most_common(1)[0][0]
    chosen = [str(one) for one, own in zip(files, kinds, strict=True) if own == kind]
    return load_dataset(kind, data_files=chosen, split=split or "train")


def _tokenized_lengths(dataset: Dataset, name: str, column: str, tokenizer: str) -> np.ndarray:
    """Returns the tokens of each row of text."""
    from transformers import AutoTokenizer

    kind = getattr(dataset.features.get(column), "dtype", None)
    if kind not in ("string", "large_string"):
        raise ValueError(
            f"{name!r} has no text in the column {column!r}: name another of its columns {dataset.column_names}."
        )
    if not len(dataset):
        return np.zeros(0, dtype=np.int64)
    try:
        made = AutoTokenizer.from_pretrained(tokenizer)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:120]
        raise ValueError(f"tokenizer={tokenizer!r} cannot be loaded ({reason}): give a folder or an id.") from error

    def lengths(rows: dict) -> dict:
        texts = [text or "" for text in rows[column]]
        return {"length": [len(ids) for ids in made(texts, verbose=False)["input_ids"]]}

    found = dataset.map(lengths, batched=True, remove_columns=dataset.column_names)
    return np.array(found["length"], dtype=np.int64)


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
