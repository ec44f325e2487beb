# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The adapter of each family of models; most are read off the family's own tensor-parallel plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from galvatron_hf.models.adapter import (
    ExpertsAdapter,
    Fused,
    LogitTransform,
    ModelAdapter,
    StackAdapter,
    Style,
    base_model,
)
from galvatron_hf.models.encoder_decoders import count_layers_of_both, encoder_decoder_adapter
from galvatron_hf.models.family_checks import (
    check_attention,
    check_end_of_encoder_decoder,
    check_head,
    check_kind,
    check_structure,
)
from galvatron_hf.models.heads import Heads
from galvatron_hf.models.llama4 import choose_experts
from galvatron_hf.models.lora import check_adapters, inner_model
from galvatron_hf.models.losses import RouterLossKind
from galvatron_hf.models.tensor_styles import EXPERTS, read_styles
from galvatron_hf.models.trial_run import has_language_head
from galvatron_hf.models.whole_rows import whole_row_adapter
from galvatron_hf.utils.compat import is_experts_module, router_output


_SHARED = ("shared_experts", "shared_expert")  # names of an MLP beside the experts


def _qkv_sizes(config: PreTrainedConfig) -> tuple[int, ...]:
    heads = Heads.from_config(config)
    return heads.query * heads.dim, heads.key_value * heads.dim, heads.key_value * heads.dim


GPT2 = StackAdapter(
    layers="h",
    after=("ln_f",),
    attention=("attn",),
    regions=("attn", "mlp"),
    styles={
        "attn.c_attn": Style.COLUMN,
        "attn.c_proj": Style.ROW,
        "mlp.c_fc": Style.COLUMN,
        "mlp.c_proj": Style.ROW,
    },
    fused={"attn.c_attn": Fused(parts=("query", "key", "value"), sizes=_qkv_sizes)},
    key_value=("attn.c_attn.key", "attn.c_attn.value"),
    positional=("wpe",),
    local_attributes={"attn.split_size": "heads", "attn.num_heads": "heads", "attn.embed_dim": "heads"},
)

PHI3 = StackAdapter(
    styles={
        "self_attn.qkv_proj": Style.COLUMN,
        "self_attn.o_proj": Style.ROW,
        "mlp.gate_up_proj": Style.COLUMN,
        "mlp.down_proj": Style.ROW,
    },
    fused={
        "self_attn.qkv_proj": Fused(parts=("query", "key", "value"), sizes=_qkv_sizes),
        "mlp.gate_up_proj": Fused(parts=("gate", "up"), sizes=lambda config: (config.intermediate_size,) * 2),
    },
    key_value=("self_attn.qkv_proj.key", "self_attn.qkv_proj.value"),
    local_attributes={
        "self_attn.config.num_attention_heads": "heads",
        "self_attn.num_key_value_heads": "key_value_heads",
    },
)

GPT_OSS = StackAdapter(
    experts=ExpertsAdapter(module="mlp.experts", router="mlp.router"),
    styles={
        **dict.fromkeys(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), Style.COLUMN),
        "self_attn.o_proj": Style.ROW,
    },
)

GPT_NEOX = StackAdapter(
    after=("final_layer_norm",),
    attention=("attention",),
    regions=("attention", "mlp"),
    styles={
        "attention.query_key_value": Style.COLUMN,  # head by head
        "attention.dense": Style.ROW,
        "mlp.dense_h_to_4h": Style.COLUMN,
        "mlp.dense_4h_to_h": Style.ROW,
    },
    key_value=(),
)

LLAMA4 = StackAdapter(
    regions=("self_attn", "feed_forward", "feed_forward.shared_expert"),
    experts=ExpertsAdapter(module="feed_forward.experts", router="feed_forward.router", logits=1),
    styles={
        **dict.fromkeys(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), Style.COLUMN),
        "self_attn.o_proj": Style.ROW,
        **{
            f"{mlp}.{name}": style
            for mlp in ("feed_forward", "feed_forward.shared_expert")
            for name, style in (("gate_proj", Style.COLUMN), ("up_proj", Style.COLUMN), ("down_proj", Style.ROW))
        },
    },
    prepare=choose_experts,
)

_STACKS = {
    "gpt2": GPT2,
    "phi3": PHI3,
    "phi4_multimodal": PHI3,
    "gpt_oss": GPT_OSS,
    "gpt_neox": GPT_NEOX,
    "llama4_text": LLAMA4,
}
# Families that could be cut by their tables but for something else.
_WHOLE_ROWS = {"nanochat": "applies the norm before its head to embeddings too"}
_FINAL_NORMS = ("norm", "final_layernorm")

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
    if model.config.is_encoder_decoder:
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
        stacks=(_STACKS.get(model.config.model_type) or _stack_from_tensor_plan(model),),
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
    stacks = (_STACKS.get(config.model_type) or StackAdapter(),)
    return sum(getattr(config, stack.layer_count) for stack in stacks)


def _stack_from_tensor_plan(model: PreTrainedModel) -> StackAdapter:
    """Reads the styles of a layer's modules off `base_model_tp_plan`, which the family ships."""
    name = type(model).__name__
    plan = model.config.base_model_tp_plan
    if not plan:
        raise ValueError(
            f"{name} ships no base_model_tp_plan and has no adapter of its own; "
            "train it with transformers.Trainer, or add an adapter in galvatron_hf/models/families.py."
        )
    if base_model(model) is model and model.get_output_embeddings() is not None:
        raise ValueError(
            f"{name} has no module {model.base_model_prefix!r} that holds its decoder, so its layers no plan covers "
            "yet; train it with transformers.Trainer."
        )
    children = dict(base_model(model).named_children())
    found = read_styles(plan, children.get(StackAdapter().layers, ()), StackAdapter().per_head)
    experts = _find_experts(model) if any(EXPERTS in pattern.split(".") for pattern in plan) else None
    regions = StackAdapter().regions
    if experts is not None:  # besides them, a layer may have MLPs that every token goes through
        owners = [module.rpartition(".")[0] for module in found.styles if not module.startswith("self_attn.")]
        regions = tuple(dict.fromkeys((*regions, *owners)))
    return StackAdapter(
        after=(next((name for name in _FINAL_NORMS if name in children), _FINAL_NORMS[0]),),
        regions=regions,
        experts=experts,
        styles=found.styles,
        fused=found.fused,
        unsupported=found.unsupported,
    )


def _find_experts(model: PreTrainedModel) -> ExpertsAdapter:
    """Reads off the first layer that has experts where they are, and which module chooses them."""
    name = type(model).__name__
    for layer in base_model(model).layers:
        modules = dict(layer.named_modules())
        for path, module in modules.items():
            if is_experts_module(module):
                block = path.rpartition(".")[0]
                kind, index = router_output(model)
                beside = dict(modules[block].named_children())
                routers = [child for child, inner in beside.items() if kind is not None and isinstance(inner, kind)]
                if len(routers) != 1:
                    break
                shared = [f"{block}.{child}" for child in beside if child in _SHARED]
                return ExpertsAdapter(
                    module=path, router=f"{block}.{routers[0]}", logits=index, shared=next(iter(shared), None)
                )
    raise ValueError(
        f"{name} has experts that are no module with the weights of all, called with the choices of a router beside "
        "it; train it with transformers.Trainer."
    )


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
