# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The adapter of each family of models; most are read off the family's own tensor-parallel plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from galvatron_hf.models.adapter import LogitTransform, ModelAdapter, base_model
from galvatron_hf.models.encoder_decoders import count_layers_of_both, encoder_decoder_adapter, has_both_stacks
from galvatron_hf.models.family_checks import (
    check_attention,
    check_end_of_encoder_decoder,
    check_head,
    check_kind,
    check_structure,
)
from galvatron_hf.models.layer_tables import causal_stack, layer_count
from galvatron_hf.models.lora import check_adapters, inner_model
from galvatron_hf.models.losses import RouterLossKind
from galvatron_hf.models.trial_run import has_language_head
from galvatron_hf.models.whole_rows import whole_row_adapter


# Families that could be cut by their tables but for something else.
_WHOLE_ROWS = {"nanochat": "applies the norm before its head to embeddings too"}

_LOGIT_TRANSFORMS = {
    **dict.fromkeys(
        ("gemma2", "gemma3_text", "nanochat", "vaultgemma"),
        lambda config: LogitTransform(softcap=config.final_logit_softcapping),
    ),
    **dict.fromkeys(
        ("granite", "granitemoe", "granitemoeshared"),
        lambda config: LogitTransform(scale=1.0 / config.logits_scaling),
    ),
    **dict.fromkeys(("cohere", "cohere2", "cohere2_moe"), lambda config: LogitTransform(scale=config.logit_scale)),
}


def adapter_for(model: PreTrainedModel) -> ModelAdapter:
    """Returns the adapter of a model's family: the one whose layers tensor and sequence ranks can cut, or else the one
    that runs the family's own forward on whole rows. For a PeftModel it is that of the model inside.

    Raises:
        ValueError: if the model is no language model of layers, or it is not clear how it runs them.
    """
    check_adapters(model)
    model = inner_model(model)
    check_kind(model)
    if has_both_stacks(model):
        adapter = encoder_decoder_adapter(model)
        check_structure(model, adapter)
        check_end_of_encoder_decoder(model, adapter)
        return adapter
    try:
        return _cut_adapter(model)
    except ValueError as refusal:
        adapter = whole_row_adapter(model, str(refusal).split("; ")[0].rstrip("."), _logit_transform(model))
    if any(adapter.expert_counts(model)) and has_language_head(model):
        return _with_checked_router_loss(model, replace(adapter, router_loss=_router_loss))
    if getattr(model.config, "output_router_logits", False):
        raise ValueError(
            f"{type(model).__name__} adds a loss of its routers that no adapter covers; set "
            "model.config.output_router_logits to False."
        )
    return adapter


def _cut_adapter(model: PreTrainedModel) -> ModelAdapter:
    """Returns the adapter of a family whose layers can be cut."""
    if model.config.model_type in _WHOLE_ROWS:
        raise ValueError(f"{type(model).__name__} {_WHOLE_ROWS[model.config.model_type]}.")
    adapter = ModelAdapter(
        stacks=(causal_stack(model),),
        logit_transform=_logit_transform(model),
        router_loss=_router_loss,
    )
    check_structure(model, adapter)
    check_attention(model, adapter)
    check_head(model, adapter)
    return _with_checked_router_loss(model, adapter)


def _logit_transform(model: PreTrainedModel) -> Callable[[PreTrainedConfig], LogitTransform]:
    return _LOGIT_TRANSFORMS.get(model.config.model_type, lambda config: LogitTransform())


def count_layers(config: PreTrainedConfig) -> int:
    """Returns the number of layers of all stacks that a configuration asks for, without a model."""
    if config.is_encoder_decoder:
        return count_layers_of_both(config)
    return layer_count(config)


def _router_loss(model: PreTrainedModel) -> RouterLossKind | None:
    """Returns what a family adds to its loss for its routers when it is asked to; None if it adds nothing."""
    names = ("router_aux_loss_coef", "num_experts", "num_experts_per_tok")
    if not all(hasattr(model, name) for name in names):
        return None
    return RouterLossKind(
        coefficient=model.router_aux_loss_coef, experts=model.num_experts, top_k=model.num_experts_per_tok
    )


def _with_checked_router_loss(model: PreTrainedModel, adapter: ModelAdapter) -> ModelAdapter:
    """Returns the adapter without a loss of routers if the family computes another one than transformers' own; refuses
    a configuration that asks for it.
    """
    if not any(adapter.expert_counts(model)) or _adds_router_loss(model, adapter.router_loss(model)):
        return adapter
    if getattr(model.config, "output_router_logits", False):
        raise ValueError(
            f"{type(model).__name__} adds another loss of its routers than load_balancing_loss_func of transformers "
            "computes; set model.config.output_router_logits to False."
        )
    return replace(adapter, router_loss=lambda model: None)


@torch.no_grad()
def _adds_router_loss(model: PreTrainedModel, kind: RouterLossKind | None) -> bool:
    """Runs the family's own forward on given logits of two routers, and compares what it adds to the loss."""
    base, head, count = base_model(model), model.get_output_embeddings(), 4 if kind is None else kind.experts
    logits = torch.linspace(-2.0, 3.0, 2 * 3 * count).sin().view(2, 3, count)
    mask, ids = torch.tensor([[1, 1, 0]]), torch.zeros(1, 3, dtype=torch.long)
    output = MoeModelOutputWithPast(last_hidden_state=torch.zeros(1, 3, 1), router_logits=tuple(logits))
    base.forward = lambda *args, **kwargs: output
    head.forward = lambda states: torch.zeros(1, 3, model.config.vocab_size)
    try:
        without, found = (
            model(input_ids=ids, attention_mask=mask, labels=ids, output_router_logits=asked).loss
            for asked in (False, True)
        )
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return False
    finally:
        del base.forward, head.forward
    expected = torch.zeros(())
    if kind is not None:
        statistics = torch.stack([kind.statistics(of_layer, mask.flatten()) for of_layer in logits]).sum(0)
        expected = kind.coefficient * kind.value(statistics)
    return torch.allclose(found - without, expected.to(found), rtol=1e-4, atol=1e-6)
