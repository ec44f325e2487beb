# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The adapters of encoder-decoders: families built like T5, and families built like BART."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from transformers import PreTrainedConfig, PreTrainedModel

from galvatron_hf.models.adapter import (
    LayerInputs,
    LogitTransform,
    ModelAdapter,
    RelativeBias,
    StackAdapter,
    StackInputs,
    Style,
    base_model,
    embedding_names,
)
from galvatron_hf.models.heads import Heads
from galvatron_hf.models.losses import SAME_POSITION
from galvatron_hf.utils.compat import relative_position_buckets


ENCODER, DECODER = "encoder", "decoder"

_SOURCE = StackInputs(ids="input_ids", mask="attention_mask", positions=None)
_TARGET = StackInputs(ids="decoder_input_ids", mask="decoder_attention_mask", positions=None)
_READS = dict(read="encoder_hidden_states", read_mask="encoder_attention_mask")


# ---- T5 ----


def _t5_heads(config: PreTrainedConfig) -> Heads:
    return Heads(query=config.num_heads, key_value=config.num_heads, dim=config.d_kv)


def _t5_stack(name: str) -> StackAdapter:
    attention = ["layer.0.SelfAttention"] + (["layer.1.EncDecAttention"] if name == DECODER else [])
    mlp = f"layer.{len(attention)}.DenseReluDense"
    projections = {f"{module}.{part}": Style.COLUMN for module in attention for part in "qkv"}
    return StackAdapter(
        name=name,
        module=name,
        layers=f"{name}.block",
        after=(f"{name}.final_layer_norm", f"{name}.dropout"),
        embedding=f"{name}.embed_tokens",
        tokens=_TARGET if name == DECODER else _SOURCE,
        reads=ENCODER if name == DECODER else None,
        cross=tuple(attention[1:]),
        causal=name == DECODER,
        outputs=3,
        bias=RelativeBias(
            table=f"{name}.block.0.layer.0.SelfAttention.relative_attention_bias",
            attention="layer.0.SelfAttention",
            buckets=relative_position_buckets,
            marks=("has_relative_attention_bias",),
        ),
        attention=tuple(attention),
        attention_outputs=3,
        regions=(*attention, mlp),
        styles={
            **projections,
            **{f"{module}.o": Style.ROW for module in attention},
            **{f"{mlp}.{part}": Style.COLUMN for part in ("wi", "wi_0", "wi_1")},
            f"{mlp}.wo": Style.ROW,
        },
        key_value=tuple(f"{module}.{part}" for module in attention for part in "kv"),
        local_attributes={f"{module}.n_heads": "heads" for module in attention},
        inner_dropout={f"{mlp}.wo": f"{mlp}.dropout.p"},
        heads=_t5_heads,
        layer_count="num_decoder_layers" if name == DECODER else "num_layers",
        inputs=LayerInputs(
            bias="position_bias",
            no_bias="encoder_decoder_position_bias",
            **(_READS if name == DECODER else {}),
        ),
    )


def _t5_transform(config: PreTrainedConfig) -> LogitTransform:
    """Returns what T5 does to the decoder's output before the head, which is linear."""
    scaled = getattr(config, "scale_decoder_outputs", False)  # mT5 has no such entry
    return LogitTransform(scale=config.d_model**-0.5 if scaled else 1.0)


def _t5(model: PreTrainedModel) -> ModelAdapter:
    return ModelAdapter(
        stacks=(_t5_stack(ENCODER), _t5_stack(DECODER)), logit_transform=_t5_transform, loss=SAME_POSITION
    )


def _umt5_stack(name: str) -> StackAdapter:
    """Returns the stack of UMT5, whose layers have a bias of their own each."""
    return replace(
        _t5_stack(name),
        outputs=None,
        attention_outputs=2,
        bias=None,
        own_bias="layer.0.SelfAttention.relative_attention_bias",
        inputs=LayerInputs(**(_READS if name == DECODER else {})),
    )


def _umt5_transform(config: PreTrainedConfig) -> LogitTransform:
    return LogitTransform(scale=config.d_model**-0.5 if config.tie_word_embeddings else 1.0)


def _umt5(model: PreTrainedModel) -> ModelAdapter:
    return ModelAdapter(
        stacks=(_umt5_stack(ENCODER), _umt5_stack(DECODER)), logit_transform=_umt5_transform, loss=SAME_POSITION
    )


# ---- BART ----


def _bart_heads(name: str) -> Callable[[PreTrainedConfig], Heads]:
    def heads(config: PreTrainedConfig) -> Heads:
        count = getattr(config, f"{name}_attention_heads")
        return Heads(query=count, key_value=count, dim=config.d_model // count)

    return heads


def _bart_stack(model: PreTrainedModel, name: str) -> StackAdapter:
    """Reads off a stack which of the modules that families built like BART may have it has."""
    children = dict(base_model(model).get_submodule(name).named_children())
    attention = ["self_attn"] + (["encoder_attn"] if name == DECODER else [])
    return StackAdapter(
        name=name,
        module=name,
        layers=f"{name}.layers",
        after=(f"{name}.layer_norm",) if "layer_norm" in children else (),
        embedding=f"{name}.embed_tokens",
        positional=(f"{name}.embed_positions",),
        before=(f"{name}.layernorm_embedding",) if "layernorm_embedding" in children else (),
        tokens=_TARGET if name == DECODER else _SOURCE,
        reads=ENCODER if name == DECODER else None,
        cross=tuple(attention[1:]),
        causal=name == DECODER,
        attention=tuple(attention),
        regions=(*attention, "fc1"),
        styles={
            **{f"{module}.{part}_proj": Style.COLUMN for module in attention for part in "qkv"},
            **{f"{module}.out_proj": Style.ROW for module in attention},
            "fc1": Style.COLUMN,
            "fc2": Style.ROW,
        },
        key_value=tuple(f"{module}.{part}_proj" for module in attention for part in "kv"),
        local_attributes={f"{module}.num_heads": "heads" for module in attention},
        inner_dropout={"fc2": "activation_dropout"},
        heads=_bart_heads(name),
        layer_count=f"{name}_layers",
        inputs=LayerInputs(**(_READS if name == DECODER else {})),
    )


def _bart(model: PreTrainedModel) -> ModelAdapter:
    _refuse_dropped_layers(model)
    bias = "final_logits_bias" if "final_logits_bias" in dict(model.named_buffers()) else None
    stacks = (_bart_stack(model, ENCODER), _bart_stack(model, DECODER))
    return ModelAdapter(stacks=stacks, loss=SAME_POSITION, logit_bias=bias)


def _refuse_dropped_layers(model: PreTrainedModel) -> None:
    for name in ("encoder_layerdrop", "decoder_layerdrop"):
        if getattr(model.config, name, 0.0):
            raise ValueError(
                f"{name} is {getattr(model.config, name)}, and ranks that drop different layers would wait for each "
                f"other; set model.config.{name} to 0."
            )


_FAMILIES: dict[str, Callable[[PreTrainedModel], ModelAdapter]] = {
    **dict.fromkeys(("t5", "mt5"), _t5),
    "umt5": _umt5,
    **dict.fromkeys(
        ("bart", "mbart", "pegasus", "marian", "blenderbot", "blenderbot-small", "plbart", "m2m_100"), _bart
    ),
}


def count_layers_of_both(config: PreTrainedConfig) -> int:
    """Returns the number of layers of both stacks that a configuration asks for, without a model."""
    if config.model_type in ("t5", "mt5", "umt5"):
        return config.num_layers + config.num_decoder_layers
    return config.encoder_layers + config.decoder_layers


def has_both_stacks(model: PreTrainedModel) -> bool:
    """Tells whether a model is an encoder-decoder; a family may have heads on its encoder alone."""
    if not model.config.is_encoder_decoder:
        return False
    return model.config.model_type not in _FAMILIES or hasattr(base_model(model), DECODER)


def encoder_decoder_adapter(model: PreTrainedModel) -> ModelAdapter:
    """Returns the adapter of an encoder-decoder; ValueError if its family has none."""
    name, make = type(model).__name__, _FAMILIES.get(model.config.model_type)
    if make is None:
        raise ValueError(
            f"{name} is an encoder-decoder of a family without an adapter; use one of {', '.join(sorted(_FAMILIES))}, "
            "or train it with transformers.Trainer."
        )
    adapter, shared = make(model), embedding_names(model)
    for stack in adapter.stacks:
        if base_model(model).get_submodule(stack.embedding) not in [model.get_submodule(one) for one in shared]:
            raise ValueError(
                f"{name} has embeddings of its own for the {stack.name}, which no adapter covers; use a model whose "
                "stacks share their embeddings."
            )
    return adapter
