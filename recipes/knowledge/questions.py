# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Reads questions with answers from JSON-lines files, makes rows of token ids of them, and judges answers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase


MASTERED, PARTLY, UNKNOWN = KINDS = ("mastered", "partly mastered", "unknown")
PROMPT = "Question: {question}\nAnswer:"
IGNORED = -100  # a label that the loss leaves out


def read_lines(path: str | Path, kinds: bool = False) -> list[dict]:
    """
    Reads a JSON-lines file of questions.

    Args:
        path (`str` or `Path`):
            File with one object a line, {"question": ..., "answer": ...}; empty lines are skipped.
        kinds (`bool`):
            Whether each line must have the class of its question too, as `classify_mastery.py` writes it.

    Returns:
        `list` of the lines' objects.

    Raises:
        `ValueError`: if a line is not such an object, or there is none.
    """
    wanted = ("question", "answer", *(["kind"] if kinds else []))
    lines = []
    for number, text in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), start=1):
        if not text.strip():
            continue
        try:
            line = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}: {error.msg} at column {error.colno}: correct it.") from error
        if not isinstance(line, dict):
            raise ValueError(f"{path}, line {number}: {text[:40]!r} is not an object: write one with {wanted}.")
        for name in wanted:
            if not isinstance(line.get(name), str) or not line[name].strip():
                raise ValueError(f"{path}, line {number}: {name!r} is {line.get(name)!r}: give it as a text.")
        if kinds and line["kind"] not in KINDS:
            raise ValueError(f"{path}, line {number}: kind {line['kind']!r} is not a class: use one of {KINDS}.")
        lines.append(line)
    if not lines:
        raise ValueError(f"{path} has no question: write one object with {wanted} a line.")
    return lines


def fill(prompt: str, question: str) -> str:
    """Returns the text before the answer. A prompt without a place for the question raises `ValueError`."""
    if "{question}" not in prompt:
        raise ValueError(f"prompt={prompt!r} has no place for the question: write {{question}} in it.")
    return prompt.replace("{question}", question)


def is_right(said: str, answer: str) -> bool:
    """Returns whether the first line of a generated text begins with the answer, as whole words in any case."""
    first = (said.strip().splitlines() or [""])[0].casefold()
    wanted = answer.strip().casefold()
    return first.startswith(wanted) and not first[len(wanted) : len(wanted) + 1].isalnum()


def to_rows(tokenizer: PreTrainedTokenizerBase, prompt: str, lines: Sequence[dict]) -> list[dict[str, list[int]]]:
    """Returns one row a question: prompt, answer and end token; the answer and the end token alone have labels."""
    rows = []
    for line in lines:
        before = tokenizer(fill(prompt, line["question"]))["input_ids"]
        if before and before[-1] == tokenizer.eos_token_id:
            before = before[:-1]
        answer = tokenizer(f" {line['answer'].strip()}", add_special_tokens=False)["input_ids"]
        answer = [*answer, tokenizer.eos_token_id]
        rows.append({"input_ids": before + answer, "labels": [IGNORED] * len(before) + answer})
    return rows
