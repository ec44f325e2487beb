# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The table of a family's layers: which of their modules are attention, and how tensor ranks cut each module. It is
that of the family, that of the tensor-parallel plan that the family ships, or that of all layers with these modules.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from galvatron_hf.models.adapter import ExpertsAdapter, Fused, StackAdapter, Style, base_model
from galvatron_hf.models.heads import Heads
from galvatron_hf.models.llama4 import choose_experts
from galvatron_hf.models.parameter_specs import linear_kind
from galvatron_hf.models.tensor_styles import EXPERTS, read_styles
from galvatron_hf.utils.compat import calls_registered_attention, is_experts_module, router_output


_SHARED = ("shared_experts", "shared_expert")  # names of an MLP beside the experts
_FINAL_NORMS = ("norm", "final_layernorm")


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

_ATTENTION = {f"self_attn.{name}": Style.COLUMN for name in ("q_proj", "k_proj", "v_proj")}

# Tables of families that ship no tensor-parallel plan, by the modules of their layers.
BERT = StackAdapter(
    attention=("attention.self",),
    regions=("attention.self", "intermediate"),
    styles={
        **{f"attention.self.{name}": Style.COLUMN for name in ("query", "key", "value")},
        "attention.output.dense": Style.ROW,
        "intermediate.LayerNorm": Style.REPLICATED_PARTIAL_GRAD,  # in families that norm before the projection
        "intermediate.dense": Style.COLUMN,
        "output.dense": Style.ROW,
    },
    key_value=("attention.self.key", "attention.self.value"),
)

DISTILBERT = StackAdapter(
    attention=("attention",),
    regions=("attention", "ffn"),
    styles={
        **{f"attention.{name}_lin": Style.COLUMN for name in "qkv"},
        "attention.out_lin": Style.ROW,
        "ffn.lin1": Style.COLUMN,
        "ffn.lin2": Style.ROW,
    },
    key_value=("attention.k_lin", "attention.v_lin"),
)

MODERNBERT = StackAdapter(
    attention=("attn",),
    regions=("attn", "mlp"),
    styles={"attn.Wqkv": Style.COLUMN, "attn.Wo": Style.ROW, "mlp.Wi": Style.COLUMN, "mlp.Wo": Style.ROW},
    fused={
        "attn.Wqkv": Fused(parts=("query", "key", "value"), sizes=_qkv_sizes),
        "mlp.Wi": Fused(parts=("input", "gate"), sizes=lambda config: (config.intermediate_size,) * 2),
    },
    key_value=("attn.Wqkv.key", "attn.Wqkv.value"),
    inner_dropout={"mlp.Wo": "mlp.drop.p"},
)

GATED = StackAdapter(
    styles={
        **_ATTENTION,
        "self_attn.o_proj": Style.ROW,
        **dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), Style.COLUMN),
        "mlp.down_proj": Style.ROW,
    },
    local_attributes={"self_attn.num_heads": "heads", "self_attn.num_key_value_heads": "key_value_heads"},
)

VIT = StackAdapter(
    attention=("attention",),
    regions=("attention", "mlp"),
    styles={
        **{f"attention.{name}_proj": Style.COLUMN for name in "qkv"},
        "attention.o_proj": Style.ROW,
        "mlp.fc1": Style.COLUMN,
        "mlp.fc2": Style.ROW,
    },
    key_value=("attention.k_proj", "attention.v_proj"),
)

PLAIN = StackAdapter(
    styles={
        **_ATTENTION,
        **dict.fromkeys(("self_attn.o_proj", "self_attn.out_proj"), Style.ROW),
        "mlp.fc1": Style.COLUMN,
        "mlp.fc2": Style.ROW,
    },
    regions=("self_attn", "mlp"),
)

_STACKS = {
    "gpt2": GPT2,
    "phi3": PHI3,
    "phi4_multimodal": PHI3,
    "gpt_oss": GPT_OSS,
    "gpt_neox": GPT_NEOX,
    "llama4_text": LLAMA4,
}
_FORMS = (BERT, DISTILBERT, MODERNBERT, VIT, GATED, PLAIN)


def causal_stack(model: PreTrainedModel) -> StackAdapter:
    """Returns the stack of a causal language model: that of its family, or one with the styles of the tensor-parallel
    plan that its family ships.

    Raises:
        ValueError: if there is none, or the model is built otherwise.
    """
    name, config = type(model).__name__, model.config
    known = _STACKS.get(config.model_type)
    if known is not None:
        return known
    if not config.base_model_tp_plan:
        raise ValueError(
            f"{name} ships no base_model_tp_plan and has no adapter of its own; "
            "train it with transformers.Trainer, or add an adapter in galvatron_hf/models/layer_tables.py."
        )
    if base_model(model) is model and model.get_output_embeddings() is not None:
        raise ValueError(
            f"{name} has no module {model.base_model_prefix!r} that holds its decoder, so its layers no plan covers "
            "yet; train it with transformers.Trainer."
        )
    children = dict(base_model(model).named_children())
    layers, experts = children.get(StackAdapter().layers, ()), None
    if any(EXPERTS in pattern.split(".") for pattern in config.base_model_tp_plan):
        experts = find_experts(model, layers)
        if experts is None:
            raise ValueError(
                f"{name} has experts that are no module with the weights of all, called with the choices of a router "
                "beside it; train it with transformers.Trainer."
            )
    return replace(
        _table_of_plan(config, layers, experts),
        after=(next((norm for norm in _FINAL_NORMS if norm in children), _FINAL_NORMS[0]),),
    )


def table_of_layers(model: PreTrainedModel, layers: Iterable[nn.Module], experts: ExpertsAdapter | None):
    """Returns a stack with the table of some layers: that of the family, that of the tensor-parallel plan that it
    ships, or the one that names their modules. Its other attributes mean nothing.

    Raises:
        ValueError: if there is none; the message is a clause.
    """
    config, layers = model.config.get_text_config(), list(layers)
    if config.model_type in _STACKS:
        return _STACKS[config.model_type]
    if config.base_model_tp_plan:
        table = _table_of_plan(config, layers, experts)
        if table.unsupported is not None:
            raise ValueError(table.unsupported)
        return table
    for table in _FORMS:
        if all(_names_all(table, layer, experts) for layer in layers):
            return replace(table, experts=experts)
    raise ValueError("no table names the modules of its layers")


def find_experts(model: PreTrainedModel, layers: Iterable[nn.Module]) -> ExpertsAdapter | None:
    """Reads off the first layer that has experts where they are, and which module chooses them; None if no module has
    the weights of all of them, with one router beside it.
    """
    kind, index = router_output(model)
    for layer in layers:
        modules = dict(layer.named_modules())
        for path, module in modules.items():
            if is_experts_module(module):
                block = path.rpartition(".")[0]
                beside = dict(modules[block].named_children())
                routers = [child for child, inner in beside.items() if kind is not None and isinstance(inner, kind)]
                if len(routers) != 1:
                    return None
                shared = [f"{block}.{child}" for child in beside if child in _SHARED]
                return ExpertsAdapter(
                    module=path, router=f"{block}.{routers[0]}", logits=index, shared=next(iter(shared), None)
                )
    return None


def layer_count(config: PreTrainedConfig) -> int:
    """Returns the number of layers that the configuration of a model with one stack asks for, without a model."""
    return getattr(config, (_STACKS.get(config.model_type) or StackAdapter()).layer_count)


def _table_of_plan(
    config: PreTrainedConfig, layers: Iterable[nn.Module], experts: ExpertsAdapter | None
) -> StackAdapter:
    """Reads the styles of the modules of layers off `base_model_tp_plan`, which their family ships."""
    found, regions = read_styles(config.base_model_tp_plan, layers, StackAdapter().per_head), StackAdapter().regions
    if experts is not None:  # besides them, a layer may have MLPs that every token goes through
        owners = [module.rpartition(".")[0] for module in found.styles if not module.startswith("self_attn.")]
        regions = tuple(dict.fromkeys((*regions, *owners)))
    return StackAdapter(
        regions=regions, experts=experts, styles=found.styles, fused=found.fused, unsupported=found.unsupported
    )


def _names_all(table: StackAdapter, layer: nn.Module, experts: ExpertsAdapter | None) -> bool:
    """Tells whether a layer has the attention of a table, and no linear module without a style but experts."""
    modules = dict(layer.named_modules())
    if not all(name in modules and calls_registered_attention(modules[name]) for name in table.attention):
        return False
    of_experts = () if experts is None else (experts.module, experts.router)
    linear = (name for name, module in modules.items() if linear_kind(module) is not None)
    return all(table.style(name) or any(f"{name}.".startswith(f"{one}.") for one in of_experts) for name in linear)
