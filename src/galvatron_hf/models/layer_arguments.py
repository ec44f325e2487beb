# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Finds out whether layers could compute other rows and positions than those that their stack passes them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig

from galvatron_hf.models.adapter import LayerInputs
from galvatron_hf.models.attention_masks import make_masks
from galvatron_hf.models.trial_run import Seen, Twin
from galvatron_hf.utils.compat import tree_leaves


_OWN_MASK = "its layers get a mask of their own kind"


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Says what layers are called with: whether their attention is causal, and why they cannot be called with pieces
    of rows; None if they can.
    """

    causal: bool
    obstacle: str | None = None


def find_arguments(twin: Twin, seen: Seen) -> Arguments:
    """Looks at the arguments that the layers of a model got in a run of [`Twin.run`]. The mask has to be the one that
    the runtime would make, every other tensor has to have positions, and one row for all if no positions are given.
    """
    inputs = LayerInputs()
    if twin.audio is not None:
        return Arguments(causal=False, obstacle="its positions are those of recordings of any length")
    for index, arguments in seen.arguments.items():
        for name, value in arguments.items():
            if name != inputs.mask and not _has_positions(name, value, inputs, twin.length):
                return Arguments(causal=False, obstacle=f"its layer {index} gets {name!r}, which has no layout")
    if twin.images is not None:  # no patch is padding
        masks = [arguments.get(inputs.mask) for arguments in seen.arguments.values()]
        return Arguments(causal=False, obstacle=None if all(mask is None for mask in masks) else _OWN_MASK)
    for causal in (True, False):
        if all(_masks_agree(twin, run, causal, inputs) for run in _runs(twin, seen)):
            return Arguments(causal=causal)
    return Arguments(causal=False, obstacle=_OWN_MASK)


def _has_positions(name: str, value: Any, inputs: LayerInputs, length: int) -> bool:
    tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    if not tensors:
        return True
    if name in inputs.whole_positions:
        return isinstance(value, torch.Tensor) and value.shape in ((length,), (1, length))
    plain = isinstance(value, torch.Tensor) or (isinstance(value, tuple) and len(tensors) == len(value))
    return name in inputs.split_with_positions and plain and all(tensor.shape[:2] == (1, length) for tensor in tensors)


def _runs(twin: Twin, seen: Seen) -> Iterator[Seen]:
    """Yields what was seen, and what is seen with a window shorter than the row."""
    yield seen
    with _changed(twin.config, "sliding_window", 1) as changed:
        if changed:
            yield twin.run()[0]


@contextlib.contextmanager
def _changed(config: PreTrainedConfig, name: str, value: Any) -> Iterator[bool]:
    """Changes an attribute of a configuration while the body runs, if it has one and can be changed."""
    before = getattr(config, name, None)
    if before is not None:
        with contextlib.suppress(AttributeError):
            setattr(config, name, value)
    try:
        yield before is not None and getattr(config, name) == value
    finally:
        if before is not None:
            with contextlib.suppress(AttributeError):
                setattr(config, name, before)


def _masks_agree(twin: Twin, seen: Seen, causal: bool, inputs: LayerInputs) -> bool:
    config = twin.config
    try:
        made = make_masks(config, causal=causal, states=seen.hidden[0], mask=twin.mask)
    except Exception:  # of a configuration that these functions do not know: any
        return False
    for index, arguments in seen.arguments.items():
        mask = made.get(config.layer_types[index]) if isinstance(made, dict) else made
        given = arguments.get(inputs.mask)
        if not isinstance(given, torch.Tensor) or not isinstance(mask, torch.Tensor) or given.dtype != mask.dtype:
            return False
        if given.shape != mask.shape or not torch.equal(given, mask):
            return False
    return True
