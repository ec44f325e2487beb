# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Finds out whether the rows of a family that runs on whole rows can be documents of one packed row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedConfig

from galvatron_hf.models.losses import LossKind
from galvatron_hf.models.packing import Packing, mask_of_packed_row
from galvatron_hf.models.trial_run import LENGTH, ROWS, Seen, Twin
from galvatron_hf.utils.compat import tree_leaves


TOKEN_TYPES = "token_type_ids"
_CACHE = ("cache_position",)  # without a cache they have no effect


def find_packing(twin: Twin, loss: LossKind, inputs: frozenset[str], causal: bool) -> Packing:
    """Runs a model with stand-ins for its layers on some rows, and on one row of the same tokens. What reaches the
    layers and what follows them must be the same.

    Args:
        inputs (`frozenset[str]`): the names of the arguments of the family's forward.
        causal (`bool`): whether its attention is causal.
    """
    if loss.of_rows:
        return Packing(loss=loss, obstacle="computes a loss of rows, not of tokens")
    if twin.images is not None:
        return Packing(loss=loss, obstacle="takes images")
    config = twin.config
    pad = getattr(config, "pad_token_id", None)
    ids = _tokens(twin, config, pad)
    others = {TOKEN_TYPES: ids % (getattr(config, "type_vocab_size", 0) or 1)} if TOKEN_TYPES in inputs else {}
    rows = twin.look(input_ids=ids, attention_mask=torch.ones_like(ids), **others)
    flat = {name: value.view(1, -1) for name, value in {"input_ids": ids, **others}.items()}
    flat["attention_mask"] = mask_of_packed_row(config, causal, ids.device)
    reason = "does not take position_ids as the positions of its tokens"
    for first, uncounted in ((0, None), (None if pad is None else pad + 1, pad)):
        if first is None:
            continue
        positions = first + torch.arange(ids.shape[1]).repeat(len(ids))[None]
        try:
            row = twin.look(position_ids=positions, **flat)
        except Exception as error:  # of a family's forward: any
            reason = f"does not run on a packed row ({type(error).__name__}: {' '.join(str(error).split())[:80]})"
            continue
        if _same(rows, row, len(ids)):
            found = dict(first_position=first, uncounted=uncounted)
            return Packing(loss=loss, others=tuple(others), causal=causal, **found)
    return Packing(loss=loss, obstacle=reason)


def _tokens(twin: Twin, config: PreTrainedConfig, pad: int | None) -> torch.Tensor:
    """Returns rows [B, S] of different tokens, among them those that the configuration names, without padding."""
    named = [value for name, value in vars(config).items() if name.endswith("_token_id") and type(value) is int]
    named = [token for token in dict.fromkeys(named) if 0 <= token < twin.vocabulary]
    known = [token for token in (*named, *range(twin.vocabulary)) if token != pad]
    known = list(dict.fromkeys(known)) or [0]
    return torch.tensor([known[index % len(known)] for index in range(ROWS * LENGTH)]).view(ROWS, LENGTH)


def _same(rows: Seen, row: Seen, count: int) -> bool:
    """Tells whether what was seen of `count` rows is the same as of one row with their tokens."""
    pairs = [*zip(rows.head_inputs, row.head_inputs, strict=True)]
    pairs += [(hidden, row.hidden.get(index)) for index, hidden in rows.hidden.items()]
    if not all(_equal(one, other) for one, other in pairs):
        return False
    return all(
        _same_positions(arguments, row.arguments.get(index, {}), count) for index, arguments in rows.arguments.items()
    )


def _same_positions(arguments: Mapping[str, Any], others: Mapping[str, Any], count: int) -> bool:
    """Tells whether tensors [1, S, ...] of rows are those of one row that repeats the positions `count` times."""
    for name, value in arguments.items():
        tensors = [x for x in tree_leaves(value) if isinstance(x, torch.Tensor) and x.shape[0] == 1 and x.ndim < 4]
        found = [x for x in tree_leaves(others.get(name)) if isinstance(x, torch.Tensor) and x.ndim < 4]
        if name in _CACHE or not tensors:
            continue
        if len(tensors) != len(found):
            return False
        for tensor, flat in zip(tensors, found, strict=True):
            if not _equal(tensor.repeat(1, count, *[1] * (tensor.ndim - 2)), flat):
                return False
    return True


def _equal(one: torch.Tensor, other: torch.Tensor | None) -> bool:
    if other is None or one.numel() != other.numel():
        return False
    return torch.allclose(one.float().flatten(), other.float().flatten(), rtol=1e-5, atol=1e-6)
