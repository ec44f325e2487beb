# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Loads conversations: those of a dataset, or functions of the standard library and what documents them."""

from datasets import DatasetDict

from data import python_stdlib
from data.pairs import load_pairs
from data.text import load_splits, with_validation


def load_chats(
    name: str, config: str | None, messages_column: str, validation_percentage: float, seed: int
) -> DatasetDict:
    """
    Loads conversations, and splits off a validation set if there is none.

    Args:
        name (`str`):
            `python-stdlib`, or a dataset as for `load_documents` with a column of lists of messages, each with `role`
            and `content`.

    Returns:
        [`~datasets.DatasetDict`] with the splits `train` and `validation` and the column `messages`.

    Raises:
        `ValueError`: if the column is missing.
    """
    if name == python_stdlib.NAME:
        pairs = load_pairs(name, config, "source", "target", validation_percentage, seed)
        return pairs.map(_as_messages, remove_columns=["source", "target"], desc="Conversations")
    chats = load_splits(name, config)
    columns = chats["train"].column_names
    if messages_column not in columns:
        raise ValueError(f"{messages_column!r} is not a column of {name!r}: choose one of {columns}.")
    chats = chats.select_columns([messages_column])
    if messages_column != "messages":
        chats = chats.rename_column(messages_column, "messages")
    return with_validation(chats, validation_percentage, seed)


def _as_messages(pair: dict[str, str]) -> dict[str, list]:
    question = {"role": "user", "content": f"What does this function do?\n{pair['source']}"}
    return {"messages": [question, {"role": "assistant", "content": pair["target"]}]}
