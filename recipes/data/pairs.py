# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Loads pairs of a source and a target text: those of a dataset, or functions of the standard library and the first
line of their documentation.
"""

import ast
from collections.abc import Iterator

from datasets import Dataset, DatasetDict

from data import python_stdlib
from data.text import load_splits, with_validation


def load_pairs(
    name: str, config: str | None, source_column: str, target_column: str, validation_percentage: float, seed: int
) -> DatasetDict:
    """
    Loads pairs of texts, and splits off a validation set if there is none.

    Args:
        name (`str`):
            `python-stdlib`, or a dataset as for `load_documents` with both columns.

    Returns:
        [`~datasets.DatasetDict`] with the splits `train` and `validation` and the columns `source` and `target`.

    Raises:
        `ValueError`: if a column is missing.
    """
    if name == python_stdlib.NAME:
        pairs = [pair for text in python_stdlib.load_python_stdlib()["text"] for pair in _documented(text)]
        texts = DatasetDict(
            train=Dataset.from_dict({"source": [code for code, _ in pairs], "target": [line for _, line in pairs]})
        )
    else:
        texts = load_splits(name, config)
        for column in (source_column, target_column):
            if column not in texts["train"].column_names:
                raise ValueError(
                    f"{column!r} is not a column of {name!r}: choose one of {texts['train'].column_names}."
                )
        texts = texts.select_columns([source_column, target_column])
        texts = texts.rename_columns({source_column: "source", target_column: "target"})
    return with_validation(texts, validation_percentage, seed)


def _documented(text: str) -> Iterator[tuple[str, str]]:
    """Yields the code of each documented function of a module, without its documentation, and the first line of it."""
    try:
        module = ast.parse(text)
    except SyntaxError:  # some tests of the parser
        return
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef) and len(node.body) > 1:
            documentation = ast.get_docstring(node)
            if documentation:
                node.body = node.body[1:]
                yield ast.unparse(node), documentation.splitlines()[0]
