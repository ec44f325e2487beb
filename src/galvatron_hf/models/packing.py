# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Says how the rows of a family become documents of one packed row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig

from galvatron_hf.models.attention_masks import masks_by_type, prepared_mask
from galvatron_hf.models.losses import NEXT_TOKEN, LossKind


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """Names what a family with two stacks needs for packed rows of pairs of documents: a source and its target.

    Attributes:
        source, target (`str`): the names of the stacks.
        ids, mask (`str`): the tokens [B, S] of the target in a batch, and their mask.
        counts_columns (`bool`): whether positions count from the first column of a padded row.
        complete (`Callable`): returns a batch with these tokens, made of its labels if it has none.
    """

    source: str
    target: str
    ids: str
    mask: str
    counts_columns: bool
    complete: Callable[[Mapping[str, Any]], dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Packing:
    """Says how a family's rows become documents of one packed row.

    Attributes:
        loss ([`LossKind`]): the family's loss.
        others (`tuple[str, ...]`): further tensors [B, S] of a batch with a number for each token.
        causal (`bool`): whether attention is causal. Position ids that start again begin a new document then, as in
            the Hugging Face models; others attend to the whole row.
        first_position (`int`): the position id of the first token of a row.
        uncounted (`int`, *optional*): a token that does not count as a position in families that make position ids of
            tokens.
        pairs ([`Pairs`], *optional*): given if a row is a source and its target.
        obstacle (`str`, *optional*): why rows cannot be packed; None if they can.
    """

    loss: LossKind = NEXT_TOKEN
    others: tuple[str, ...] = ()
    causal: bool = True
    first_position: int = 0
    uncounted: int | None = None
    pairs: Pairs | None = None
    obstacle: str | None = None


CAUSAL = Packing()  # of causal language models
# Rotary embeddings that depend on the longest row of the whole batch.
_ROPE_OF_THE_BATCH = ("dynamic", "longrope")


def mask_of_packed_row(config: PreTrainedConfig, causal: bool, device: torch.device) -> Any:
    """Returns the attention mask with which a family's forward gets a packed row, whose layers make their own. A
    causal family gets one that is prepared, of which it makes none.
    """
    return masks_by_type(config, prepared_mask(device)) if causal else None


def rope_of_the_batch(config: PreTrainedConfig) -> str | None:
    """Returns the kind of rotary embeddings that depend on the longest row of a batch, or None."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kinds = {rope.get("rope_type")} | {part.get("rope_type") for part in rope.values() if isinstance(part, dict)}
    return next((kind for kind in _ROPE_OF_THE_BATCH if kind in kinds), None)
