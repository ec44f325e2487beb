# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Loads preferences: those of a dataset, or functions of the standard library with their own documentation and
another function's.
"""

from datasets import Dataset, DatasetDict

from data import python_stdlib
from data.pairs import load_pairs
from data.text import load_splits, with_validation


COLUMNS = ("prompt", "chosen", "rejected")


def load_preferences(name: str, config: str | None, validation_percentage: float, seed: int) -> DatasetDict:
    """
    Loads preferences, and splits off a validation set if there is none.

    Args:
        name (`str`):
            `python-stdlib`, or a dataset as for `load_documents` with the columns `chosen` and `rejected`, texts or
            lists of messages, and `prompt` if these do not begin with the prompt.

    Returns:
        [`~datasets.DatasetDict`] with the splits `train` and `validation` and those of the three columns that there
        are.

    Raises:
        `ValueError`: if a column is missing.
    """
    if name == python_stdlib.NAME:
        pairs = load_pairs(name, config, "source", "target", validation_percentage, seed)
        return DatasetDict({split: _beside_another(rows) for split, rows in pairs.items()})
    preferences = load_splits(name, config)
    columns = preferences["train"].column_names
    for column in COLUMNS[1:]:
        if column not in columns:
            raise ValueError(f"{column!r} is not a column of {name!r}, which has {columns}; rename one of them.")
    return with_validation(
        preferences.select_columns([column for column in COLUMNS if column in columns]), validation_percentage, seed
    )


def _beside_another(pairs: Dataset) -> Dataset:
    """Returns, for each function, its own line of documentation and that of the next function whose line differs."""
    lines = pairs["target"][:]
    count = len(lines)
    others = ((lines[(at + step) % count] for step in range(1, count)) for at in range(count))
    rejected = [next((other for other in few if other != line), "") for line, few in zip(lines, others)]
    return Dataset.from_dict(
        {
            "prompt": [_message("user", f"What does this function do?\n{source}") for source in pairs["source"]],
            "chosen": [_message("assistant", line) for line in lines],
            "rejected": [_message("assistant", line) for line in rejected],
        }
    )


def _message(role: str, content: str) -> list[dict[str, str]]:
    return [{"role": role, "content": content}]
