# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Llama 4's experts in the form of the other families. Its own forward gives every token to every expert, of which all
but the chosen ones get zeros; the same function with the chosen experts alone needs a fraction of the work.
"""

from __future__ import annotations

import functools

import torch
from torch import nn

from galvatron_hf.utils.compat import make_experts_module


def choose_experts(layer: nn.Module) -> None:
    """Lets a layer's experts take each token's choices, as the experts of other families do; a dense layer stays."""
    block = layer.feed_forward
    if hasattr(block, "experts"):
        make_experts_module(block.experts, is_transposed=True)
        block.forward = functools.partial(_forward, block)


def _forward(block: nn.Module, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes what `Llama4TextMoe` computes: the score of a choice is applied to the input of its expert."""
    hidden = hidden_states.reshape(-1, block.hidden_dim)
    scores, logits = block.router(hidden)
    scores, choices = torch.topk(scores, block.top_k, dim=-1)
    rows = (hidden[:, None] * scores[..., None]).flatten(0, 1)
    choices = choices.reshape(-1, 1)
    routed = block.experts(rows, choices, torch.ones_like(choices, dtype=rows.dtype))
    return block.shared_expert(hidden) + routed.unflatten(0, scores.shape).sum(1), logits


def counts_positions(attention: nn.Module) -> bool:
    """Tells whether an attention module scales queries by their position, counted from the first that it gets."""
    return getattr(attention, "attn_temperature_tuning", False) and not getattr(attention, "use_rope", True)


def cuts_chunks(attention: nn.Module) -> bool:
    """Tells whether an attention module attends within chunks of a row, which its mask says."""
    types = getattr(attention.config, "layer_types", None) or ()
    index = getattr(attention, "layer_idx", None)
    return index is not None and index < len(types) and types[index] == "chunked_attention"
