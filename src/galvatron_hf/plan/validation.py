# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Checks values. Every failure is a `ValueError` of one sentence with the value, the reason and the fix."""

import difflib
import math
from collections.abc import Iterable, Sequence
from typing import Any


MAX_RANKS = 1 << 20
MAX_LAYERS = 1 << 16
MAX_MICRO_BATCHES = 1 << 20
MAX_TOKENS = 1 << 40


def show(value: Any) -> str:
    """Returns a value as text for an error message: one line of about 60 characters at most."""
    try:
        text = ascii(value)
    except (RecursionError, ValueError):
        text = f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:40]}...{text[-12:]}"


def check_int(name: str, value: Any, *, low: int = 1, high: int) -> None:
    """Raises `ValueError` unless `value` is an `int` (and no `bool`) in `[low, high]`."""
    if type(value) is not int:
        raise ValueError(f"{name} is {show(value)}, which is not an integer: write a whole number such as {low}")
    if not low <= value <= high:
        nearest = low if value < low else high
        raise ValueError(f"{name} is {show(value)}, which is outside {low} to {high}: use {nearest}")


def check_number(name: str, value: Any, *, low: float = 0.0, positive: bool = False) -> None:
    """Raises `ValueError` unless `value` is a finite `int` or `float` of at least `low`, above 0 if `positive`."""
    try:
        finite = type(value) in (int, float) and math.isfinite(value)
    except OverflowError:  # an integer above every float
        finite = False
    if not finite:
        raise ValueError(f"{name} is {show(value)}, which is not a finite number: write one such as 1.5")
    if value < low or (positive and value == 0):
        least = "above 0" if positive else f"of {low:g} or more"
        raise ValueError(f"{name} is {show(value)}, which is too small: write a number {least}")


def check_bool(name: str, value: Any) -> None:
    """Raises `ValueError` unless `value` is a `bool`."""
    if type(value) is not bool:
        raise ValueError(f"{name} is {show(value)}, which is neither true nor false: write true or false")


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """Raises `ValueError` with the nearest choice unless `value` is one of `choices`."""
    if type(value) is str and value in choices:
        return
    listed = ", ".join(choices)
    nearest = closest_word(value, choices) or choices[0]
    raise ValueError(f"{name} is {show(value)}, which is not one of {listed}: use {nearest!r}")


def check_fields(where: str, given: Any, known: Sequence[str], required: Sequence[str] = ()) -> None:
    """Raises `ValueError` unless `given` is an object with fields of `known` and all of `required`."""
    if not isinstance(given, dict):
        raise ValueError(f"{where} is {show(given)}, which is not an object: write {{...}} with {', '.join(known)}")
    for name in given:
        if name not in known:
            guess = closest_word(name, known)
            fix = f"did you mean {guess!r}" if guess else f"remove it or use one of {', '.join(known)}"
            raise ValueError(f"{where} has the unknown field {show(name)}: {fix}")
    for name in required:
        if name not in given:
            raise ValueError(f"{where} has no field {name!r}, which is required: add it")


def closest_word(value: Any, choices: Sequence[str]) -> str | None:
    """Returns the choice that begins with `value`, or has the nearest spelling; None if none is near."""
    # difflib is quadratic in the length, and a word of a broken file may be megabytes long.
    word = value[:64].lower() if isinstance(value, str) else ""
    begun = [choice for choice in choices if word and choice.startswith(f"{word}-")]  # a100-80g, before h100, for a100
    found = begun or difflib.get_close_matches(word, choices, n=1)
    return found[0] if found else None


def divisors(number: int) -> list[int]:
    """Returns the divisors of a number, the smallest first."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]


def nearest(value: int, candidates: Iterable[int]) -> int:
    """Returns the candidate nearest to `value`; of two equally near ones, the larger."""
    return min(candidates, key=lambda candidate: (abs(candidate - value), -candidate))
