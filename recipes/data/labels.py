# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Loads texts with a label each, and pieces of the standard library with the package that each is from."""

from collections import Counter
from pathlib import PurePosixPath

from datasets import ClassLabel, Dataset, DatasetDict

from data import python_stdlib
from data.text import load_splits, with_validation


PIECE_LINES = 25  # of a file in one text


def load_labelled(
    name: str,
    config: str | None,
    text_column: str,
    label_column: str,
    validation_percentage: float,
    seed: int,
    classes: int,
) -> DatasetDict:
    """
    Loads texts with labels, and splits off a validation set if there is none.

    Args:
        name (`str`):
            `python-stdlib`, or a dataset as for `load_documents` with a column of labels.
        classes (`int`):
            For `python-stdlib`, the number of packages, those with most texts.

    Returns:
        [`~datasets.DatasetDict`] with the splits `train` and `validation` and the columns `text` and `label`, which is
        a [`~datasets.ClassLabel`].

    Raises:
        `ValueError`: if a column is missing.
    """
    if name == python_stdlib.NAME:
        texts = DatasetDict(train=_packages(python_stdlib.load_python_stdlib(), classes))
    else:
        texts = load_splits(name, config)
        for column in (text_column, label_column):
            if column not in texts["train"].column_names:
                raise ValueError(
                    f"{column!r} is not a column of {name!r}: choose one of {texts['train'].column_names}."
                )
        texts = texts.select_columns([text_column, label_column])
        texts = texts.rename_columns({text_column: "text", label_column: "label"})
        if not isinstance(texts["train"].features["label"], ClassLabel):
            texts = texts.class_encode_column("label")
    return with_validation(texts, validation_percentage, seed)


def _packages(documents: Dataset, classes: int) -> Dataset:
    """Returns as many pieces of each of the largest packages, with the package as their label."""
    pieces: dict[str, list[str]] = {}
    for path, text in zip(documents["path"], documents["text"], strict=True):
        package = PurePosixPath(path).parts[0]
        lines = text.splitlines()
        for start in range(0, len(lines), PIECE_LINES):
            piece = "\n".join(lines[start : start + PIECE_LINES]).strip()
            if package != path and piece:  # not a module without a package
                pieces.setdefault(package, []).append(piece)
    largest = [package for package, _ in Counter({name: len(of) for name, of in pieces.items()}).most_common(classes)]
    count = min(len(pieces[package]) for package in largest)
    rows = [(piece, package) for package in largest for piece in pieces[package][:count]]
    made = Dataset.from_dict({"text": [piece for piece, _ in rows], "label": [package for _, package in rows]})
    return made.cast_column("label", ClassLabel(names=largest))
