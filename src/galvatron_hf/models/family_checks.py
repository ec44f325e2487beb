# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Compares a model with what the adapter of its family declares: its modules, its attention, and what it computes
after its stacks, on given numbers.
"""

from __future__ import annotations

import inspect

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions, MoeModelOutputWithPast

from galvatron_hf.models.adapter import ModelAdapter, base_model
from galvatron_hf.models.heads import Heads
from galvatron_hf.models.losses import IGNORED
from galvatron_hf.utils.compat import masks_by_implementation


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


def check_kind(model: PreTrainedModel) -> None:
    """Refuses what is no model of transformers."""
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"{name} is no PreTrainedModel, so its layers no plan covers yet; use an AutoModelForCausalLM class, or "
            "train it with transformers.Trainer."
        )


def check_structure(model: PreTrainedModel, adapter: ModelAdapter) -> None:
    """Refuses a model without the head, the modules or the loss that its adapter names."""
    name, base = type(model).__name__, base_model(model)
    runs_itself = any(not stack.module for stack in adapter.stacks)
    if (base is model and runs_itself) or model.get_output_embeddings() is None:
        raise ValueError(
            f"{name} has no language-model head, so its loss cannot be placed; use an AutoModelForCausalLM class."
        )
    modules = {name for name, _ in base.named_modules(remove_duplicate=False)}
    for attribute in (name for stack in adapter.stacks for name in stack.module_names):
        if attribute not in modules:
            raise ValueError(
                f"{type(base).__name__} has no module {attribute!r}, which its adapter names; "
                "use a family whose decoder is built like Llama's, or add an adapter."
            )
    if adapter.loss.function is not None and model.loss_function is not adapter.loss.function:
        raise ValueError(
            f"{name} computes {getattr(model.loss_function, '__name__', model.loss_function)!r}, not the causal LM "
            "loss; use an AutoModelForCausalLM class, or pass compute_loss_func."
        )


def check_attention(model: PreTrainedModel, adapter: ModelAdapter) -> None:
    """Refuses layers without the attention modules of their stack, or whose attention would compute something else."""
    name = type(model).__name__
    for place, layer in zip(adapter.places(model), adapter.layers(model), strict=True):
        modules, index = dict(layer.named_modules()), place.index
        for attention in place.stack.attention:
            if attention not in modules:
                raise ValueError(
                    f"Layer {index} of {name} is a {type(layer).__name__} without {attention!r}, and layers of other "
                    "kinds than attention are not cut; train it with transformers.Trainer."
                )
            if not hasattr(modules[attention], "config"):
                raise ValueError(
                    f"Layer {index} of {name} has a {type(modules[attention]).__name__}, and layers of other kinds "
                    "than attention are not cut; train it with transformers.Trainer."
                )
            reason = _unknown_attention(modules[attention], place.stack.heads(place.stack.config(model)))
            if reason is not None:
                raise ValueError(
                    f"The attention of layer {index} of {name} {reason}; train it with transformers.Trainer."
                )
        if "input_ids" in inspect.signature(layer.forward).parameters:
            raise ValueError(f"Layer {index} of {name} takes the token ids too; train it with transformers.Trainer.")


def _unknown_attention(attention: nn.Module, heads: Heads) -> str | None:
    """Says why an attention module would compute something else if it were cut; None if it would not."""
    if masks_by_implementation(attention):
        return (
            "masks positions by an index of its own only for attention functions that it knows by name, and a plan's "
            "function is not among them"
        )
    groups = getattr(attention, "num_key_value_groups", None)
    if groups is not None and heads.query % heads.key_value == 0 and groups * heads.key_value != heads.query:
        return (
            f"has {groups} query heads to a key/value head where its configuration has {heads.query} to "
            f"{heads.key_value}, and heads that differ from layer to layer are not cut"
        )
    return None


@torch.no_grad()
def check_head(model: PreTrainedModel, adapter: ModelAdapter) -> None:
    """Runs the family's own forward on given hidden states and logits, and compares what follows the head."""
    base, head = base_model(model), model.get_output_embeddings()
    device = head.weight.device if head.weight.device.type != "meta" else torch.device("cpu")
    hidden = torch.tensor([[[3.0], [5.0]]], device=device)
    raw = torch.linspace(-40.0, 60.0, 2 * 5, device=device).view(1, 2, 5)
    seen = []
    has_experts = any(stack.experts is not None for stack in adapter.stacks)
    output_class = MoeModelOutputWithPast if has_experts else BaseModelOutputWithPastAndCrossAttentions
    options = {"output_router_logits": False} if has_experts else {}
    base.forward = lambda *args, **kwargs: output_class(last_hidden_state=hidden)
    head.forward = lambda states: seen.append(states) or raw.clone()
    try:
        logits = model(input_ids=torch.zeros(1, 2, dtype=torch.long, device=device), **options).logits
    except (AttributeError, TypeError) as error:
        raise ValueError(
            f"{type(model).__name__} needs more than hidden states after its decoder ({error}), "
            "which no adapter covers; train it with transformers.Trainer."
        ) from error
    finally:
        del base.forward, head.forward
    if len(seen) != 1 or not torch.equal(seen[0], hidden):
        raise ValueError(
            f"{type(model).__name__} does something to its hidden states between the decoder and the head, "
            "which no adapter covers; train it with transformers.Trainer."
        )
    expected = adapter.logit_transform(model.config)(raw)
    if not torch.allclose(logits, expected, rtol=1e-5):
        raise ValueError(
            f"{type(model).__name__} transforms its logits in a way that no adapter declares; "
            "declare it in galvatron_hf/models/families.py."
        )
