# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Runs what a family computes after its stacks on given numbers, and compares it with what its adapter declares."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

from galvatron_hf.models.adapter import ModelAdapter, base_model
from galvatron_hf.models.losses import IGNORED


@torch.no_grad()
def check_end_of_encoder_decoder(model: PreTrainedModel, adapter: ModelAdapter) -> None:
    """Compares the input of the head, the logits and the loss. The ValueError says what no adapter declares."""
    name, head, bias = type(model).__name__, model.get_output_embeddings(), None
    vocabulary = head.weight.shape[0]
    hidden, raw = torch.tensor([[[3.0], [5.0]]]), torch.linspace(-40.0, 60.0, 2 * vocabulary).view(1, 2, vocabulary)
    output, seen = BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=hidden), []
    stubbed = [base_model(model).get_submodule(stack.module) for stack in adapter.stacks]
    for stack in stubbed:
        stack.forward = lambda *args, **kwargs: output
    head.forward = lambda states: seen.append(states) or raw.clone()
    if adapter.logit_bias is not None:
        bias = getattr(model, adapter.logit_bias)
        setattr(model, adapter.logit_bias, torch.linspace(0.0, 1.0, vocabulary)[None])
    ids = torch.zeros(1, 2, dtype=torch.long)
    labels = torch.tensor([[1, IGNORED]])
    try:
        made = model(input_ids=ids, decoder_input_ids=ids, labels=labels)
    except (AttributeError, TypeError) as error:
        raise ValueError(
            f"{name} needs more than hidden states after its decoder ({error}), which no adapter covers; train it "
            "with transformers.Trainer."
        ) from error
    finally:
        for module in (*stubbed, head):
            del module.forward
        expected = raw if bias is None else raw + getattr(model, adapter.logit_bias)
        if bias is not None:
            setattr(model, adapter.logit_bias, bias)
    transform = adapter.logit_transform(model.config)
    if len(seen) != 1 or not torch.equal(seen[0], hidden * transform.scale):
        raise ValueError(
            f"{name} does something to its hidden states between the decoder and the head, which no adapter covers; "
            "train it with transformers.Trainer."
        )
    if not torch.allclose(made.logits, expected, rtol=1e-5):
        raise ValueError(
            f"{name} transforms its logits in a way that no adapter declares; declare it in "
            "galvatron_hf/models/encoder_decoders.py."
        )
    if not torch.allclose(made.loss, F.cross_entropy(expected[0], labels[0])):
        raise ValueError(
            f"{name} computes another loss than the cross-entropy of its labels; train it with transformers.Trainer."
        )
