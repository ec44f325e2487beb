# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Values of each target instead of logits, for TRL's Trainers, which call a model with `fused_lm_head=True`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers.utils import ModelOutput

from galvatron_hf.models.losses import IGNORED


@dataclass
class PerTokenOutput(ModelOutput):
    """Holds values [B, S - 1] of the next-token targets, zero without a target; [B, S] for shifted labels.

    Attributes:
        loss (`torch.Tensor`): minus the sum of `log_probs`, divided by the items of the batch, and what the family
            adds for its routers.
        aux_loss (`torch.Tensor`, *optional*): the routers' loss without its coefficient.
        log_probs (`torch.Tensor`): log-probability of each target.
        entropy (`torch.Tensor`): entropy of the distribution over the vocabulary, without gradient.
        log_sum_sq_probs (`torch.Tensor`): logarithm of the sum of squared probabilities, without gradient.
        mean_logits (`torch.Tensor`): mean of the logits over the vocabulary, without gradient.
        is_top1 (`torch.Tensor`): the target is the most likely token.
        label_mask (`torch.Tensor`): there is a target.
    """

    loss: torch.Tensor | None = None
    aux_loss: torch.Tensor | None = None
    log_probs: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    log_sum_sq_probs: torch.Tensor | None = None
    mean_logits: torch.Tensor | None = None
    is_top1: torch.Tensor | None = None
    label_mask: torch.Tensor | None = None


def per_token_output(
    logits: torch.Tensor,
    labels: torch.Tensor | None,
    shift_labels: torch.Tensor | None,
    num_items_in_batch: torch.Tensor | int | None,
    whole_rows: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
) -> PerTokenOutput:
    """Computes the values of the targets from logits [B, S, V] and labels [B, S], one of the two kinds. The loss is
    divided by `num_items_in_batch`, by default the number of targets. If logits and labels are those of this rank's
    rows, `whole_rows` gathers the rows [B, S, N] of all ranks.
    """
    if shift_labels is None and labels is None:
        raise ValueError("fused_lm_head=True asks for values of the labels, and the batch has none; add labels.")
    if shift_labels is None:
        logits, shift_labels = logits[:, :-1], labels[:, 1:]
    mask = shift_labels != IGNORED
    targets = shift_labels.masked_fill(~mask, 0)
    logits = logits.float()
    log_probs = torch.log_softmax(logits, dim=-1)
    chosen = log_probs.gather(-1, targets[..., None]).squeeze(-1)
    with torch.no_grad():
        seen = torch.stack(
            [
                -(log_probs.exp() * log_probs).sum(-1),
                torch.logsumexp(2 * log_probs, dim=-1),
                logits.mean(-1),
                (log_probs.argmax(-1) == targets).float(),
                mask.float(),
            ],
            dim=-1,
        )
    chosen, seen = whole_rows(chosen[..., None])[..., 0], whole_rows(seen)
    mask = seen[..., -1] > 0
    entropy, log_sum_sq_probs, mean_logits, is_top1 = seen[..., :-1].masked_fill(~mask[..., None], 0.0).unbind(-1)
    chosen = chosen.masked_fill(~mask, 0.0)
    items = mask.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
    return PerTokenOutput(
        loss=-chosen.sum() / items,
        log_probs=chosen,
        entropy=entropy,
        log_sum_sq_probs=log_sum_sq_probs,
        mean_logits=mean_logits,
        is_top1=is_top1 > 0,
        label_mask=mask,
    )
