# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The attention masks that families make of a padding mask, by transformers' own functions."""

from __future__ import annotations

import torch
from transformers import PreTrainedConfig
from transformers.masking_utils import (
    create_bidirectional_mask,
    create_bidirectional_sliding_window_mask,
    create_masks_for_generate,
)


_BIDIRECTIONAL = {
    "full_attention": create_bidirectional_mask,
    "sliding_attention": create_bidirectional_sliding_window_mask,
}


def make_masks(
    config: PreTrainedConfig,
    *,
    causal: bool,
    states: torch.Tensor,
    mask: torch.Tensor | None,
    position_ids: torch.Tensor | None = None,
) -> torch.Tensor | dict[str, torch.Tensor | None] | None:
    """Returns the masks of self-attention; the attention implementation decides their form. Families whose layers have
    types get a `dict` with one of each type.

    Args:
        config (`PreTrainedConfig`): the configuration of the stack.
        causal (`bool`): whether tokens attend to earlier ones alone.
        states (`torch.Tensor`): [B, S, ...], hidden states of which only shape, type and device matter.
        mask (`torch.Tensor`, *optional*): [B, S], 1 for real tokens.
        position_ids (`torch.Tensor`, *optional*): [B, S], for families that find packed documents by them.
    """
    given = dict(config=config, inputs_embeds=states, attention_mask=mask)
    if causal:
        return create_masks_for_generate(**given, past_key_values=None, position_ids=position_ids)
    types = getattr(config, "layer_types", None)
    if types is None:
        return create_bidirectional_mask(**given)
    return {kind: _BIDIRECTIONAL[kind](**given) for kind in dict.fromkeys(types) if kind in _BIDIRECTIONAL}


def prepared_mask(device: torch.device | str) -> torch.Tensor:
    """Returns a mask [1, 1, 1, 1] that hides nothing. A family that gets a prepared mask makes none of its own."""
    return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)


def masks_by_type(config: PreTrainedConfig, mask: torch.Tensor) -> torch.Tensor | dict[str, torch.Tensor]:
    """Returns a prepared attention mask in the form in which the family takes it: one, or one for each layer type."""
    types = getattr(config, "layer_types", None)
    return mask if types is None else dict.fromkeys(types, mask)
