# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Converters of transformers, which make one weight of several tensors of a file, carried out on places in files: what
is read later is a piece of the result.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from transformers.core_model_loading import Concatenate, MergeModulelist, Transpose, WeightConverter

from galvatron_hf.parallel.weights.joined_tensors import JoinedTensor, StoredTensor


# Operations that move no number inside a tensor of a file. Subclasses may do more.
_OPERATIONS = (MergeModulelist, Concatenate, Transpose)
# A key with the number of an expert: the last number between two dots.
_NUMBERED = re.compile(r"(.*\.)(\d+)(\..*)")


def unsupported(converter: WeightConverter) -> str | None:
    """Returns what a converter does that is not possible for a piece of a weight, such as "Chunk(dim=0)"."""
    if len(converter.target_patterns) > 1:
        return repr(converter.operations[0])
    return next((repr(one) for one in converter.operations if type(one) not in _OPERATIONS), None)


def join(
    converter: WeightConverter, found: Mapping[str, Sequence[StoredTensor]], shape: tuple[int, ...]
) -> JoinedTensor:
    """Returns the weight of shape `shape` that a supported converter makes.

    Args:
        converter ([`WeightConverter`]): one of which [`unsupported`] returns None.
        found (`Mapping`): by pattern of the converter, the stored tensors in the order of their numbers.
        shape (`tuple[int, ...]`): the family's, to which `Transpose` may look.

    Raises:
        ValueError: if tensors do not fit each other.
    """
    values = {pattern: [JoinedTensor.of(stored) for stored in tensors] for pattern, tensors in found.items()}
    for operation in converter.operations:
        if isinstance(operation, MergeModulelist):
            values = {pattern: [JoinedTensor.stack(list_, operation.dim)] for pattern, list_ in values.items()}
        elif isinstance(operation, Concatenate):
            ordered = [one for pattern in converter.source_patterns for one in values.get(pattern, ())]
            values = {"": [JoinedTensor.concatenate(ordered, operation.dim)]}
        else:
            one = _only(values)
            if not operation.check_dims or one.shape != shape:
                values = {"": [one.transpose(operation.dim0, operation.dim1)]}
    return _only(values)


def missing_keys(
    converter: WeightConverter, found: Mapping[str, Sequence[StoredTensor]], at_least: int = 0
) -> list[str]:
    """Returns the keys that a converter needs besides those that were found: lists of `*` have the same length for all
    patterns, and `at_least` this length.
    """
    keys = {pattern: [stored.key for stored in tensors] for pattern, tensors in found.items()}
    numbers = {pattern: _numbers(own) for pattern, own in keys.items() if "*" in pattern}
    length = max(at_least, *(max(own) + 1 for own in numbers.values())) if numbers else at_least
    given, (example, *_) = next(iter(keys.items()))
    missing = []
    for pattern in converter.source_patterns:
        if "*" not in pattern:
            missing += [] if pattern in keys else [example.replace(given, pattern)]
            continue
        match = _NUMBERED.fullmatch(keys[pattern][0] if pattern in keys else example)
        stem, tail = match[1] if match else "", match[3] if match and pattern in keys else pattern.rpartition("*")[2]
        missing += [f"{stem}{number}{tail}" for number in range(length) if number not in numbers.get(pattern, ())]
    return missing


def _numbers(keys: Sequence[str]) -> list[int]:
    """Returns the numbers in the keys of a list, or their positions if the keys have no number each."""
    matches = [_NUMBERED.fullmatch(key) for key in keys]
    numbers = [int(match[2]) for match in matches if match]
    return numbers if len(set(numbers)) == len(keys) else list(range(len(keys)))


def _only(values: Mapping[str, Sequence[JoinedTensor]]) -> JoinedTensor:
    every = [one for tensors in values.values() for one in tensors]
    if len(every) > 1:
        raise ValueError(f"{every[0].key} and {every[1].key} make one weight")
    return every[0]
