# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""A tiny model of any type that the installed transformers knows, with the head of a task.

One rule shrinks every configuration: an attribute of a known name gets a small size, dropout becomes 0, and a list
with an entry for each layer gets as many entries as there are layers. Types that need more are in [`EXCEPTIONS`].
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_QUESTION_ANSWERING_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto import modeling_auto

from galvatron_hf.utils.compat import model_from_config
from tiny_models import LAYERS, VOCABULARY, randomise


# The mapping from configuration to class of each task, and the model types that it has.
MAPPINGS = {
    "causal-lm": MODEL_FOR_CAUSAL_LM_MAPPING,
    "seq2seq-lm": MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    "masked-lm": MODEL_FOR_MASKED_LM_MAPPING,
    "sequence-classification": MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    "token-classification": MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    "question-answering": MODEL_FOR_QUESTION_ANSWERING_MAPPING,
    "image-classification": MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
    "audio-classification": MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING,
}
CAUSAL_LM = "causal-lm"
TYPES_OF_TASK = {
    "causal-lm": sorted(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
    "seq2seq-lm": sorted(modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES),
    "masked-lm": sorted(modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES),
    "sequence-classification": sorted(modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES),
    "token-classification": sorted(modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES),
    "question-answering": sorted(modeling_auto.MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES),
    "image-classification": sorted(modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES),
    "audio-classification": sorted(modeling_auto.MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES),
}
MODEL_TYPES = TYPES_OF_TASK[CAUSAL_LM]
LABELS = 3  # classes of the heads that classify
LARGEST = 8_000_000  # parameters; a model with more has a size that no rule shrinks

SIZES: dict[str, Any] = dict(
    # Everywhere; a configuration's own name for an attribute is in its `attribute_map`.
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=40,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=64,
    pad_token_id=3,
    bos_token_id=1,
    eos_token_id=2,
    sliding_window=4,
    max_window_layers=2,
    query_pre_attn_scalar=8,
    rotary_dim=8,
    # Old decoders, and encoders beside them.
    d_model=32,
    d_inner=40,
    dff=40,
    dim_ff=40,
    dim_head=8,
    ffn_dim=40,
    ffn_hidden_size=40,
    encoder_layers=2,
    decoder_layers=LAYERS,
    encoder_ffn_dim=40,
    decoder_ffn_dim=40,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    num_encoder_layers=2,
    num_decoder_layers=LAYERS,
    num_encoder_attention_heads=4,
    num_decoder_attention_heads=4,
    word_embed_proj_dim=32,
    # Experts.
    num_experts=8,
    num_local_experts=8,
    n_routed_experts=8,
    moe_num_experts=8,
    num_experts_per_tok=2,
    num_experts_per_token=2,
    moe_k=2,
    moe_topk=2,
    moe_intermediate_size=24,
    expert_ffn_hidden_size=24,
    shared_expert_intermediate_size=24,
    shared_experts_intermediate_size=24,
    moe_shared_expert_intermediate_size=24,
    shared_intermediate_size=24,
    dense_intermediate_size=40,
    intermediate_size_mlp=40,
    first_k_dense_replace=1,
    n_group=2,
    num_expert_group=2,
    topk_group=1,
    zero_expert_num=2,
    # Attention with low-rank projections, and with an index of positions.
    q_lora_rank=16,
    kv_lora_rank=16,
    o_lora_rank=16,
    o_groups=2,
    qk_rope_head_dim=4,
    qk_nope_head_dim=4,
    qk_head_dim=8,
    v_head_dim=8,
    index_n_heads=2,
    index_head_dim=8,
    index_topk=4,
    # Attention of a second kind.
    swa_head_dim=8,
    swa_num_attention_heads=4,
    swa_num_key_value_heads=2,
    global_head_dim=8,
    # Linear attention and state spaces.
    linear_num_heads=4,
    linear_head_dim=8,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    mamba_n_heads=8,
    mamba_num_heads=8,
    mamba_d_head=8,
    mamba_head_dim=8,
    mamba_d_ssm=64,
    mamba_d_state=8,
    ssm_state_size=8,
    state_size=8,
    # Embeddings of a layer.
    hidden_size_per_layer_input=8,
    vocab_size_per_layer_input=VOCABULARY,
)
IMAGES = dict(image_size=16, patch_size=4)  # for models that classify images
AUDIO = dict(  # for models that classify recordings
    num_conv_pos_embeddings=4,
    num_conv_pos_embedding_groups=2,
    conv_pos_kernel_size=3,
    num_conv_pos_embedding_layers=2,
    classifier_proj_size=16,
    codevector_dim=16,
    proj_codevector_dim=16,
    num_codevector_groups=2,
)
# Layers and positions that are left out at random.
UNCHANGED = dict(layerdrop=0.0, encoder_layerdrop=0.0, mask_time_prob=0.0, mask_feature_prob=0.0)
DROPOUT = ("dropout", "drop_rate", "drop_path", "pdrop", "jitter")
# What a type needs besides: attributes that are None by default, or bound to others. By the type of the part that has
# them, too.
EXCEPTIONS: dict[str, dict[str, Any]] = {
    "blt": dict(encoder_hash_byte_group_vocab=50),
    "cohere_compass_text": dict(
        layer_types=["sliding_attention", "full_attention"] * 2,
        rope_parameters={
            kind: dict(rope_type="default", rope_theta=10000.0, mrope_section=[2, 1, 1])
            for kind in ("sliding_attention", "full_attention")
        },
    ),
    "dbrx": dict(attn_config=dict(kv_n_heads=2, rope_theta=10000.0), ffn_config=dict(ffn_hidden_size=40)),
    "deepseek_v2": dict(n_group=2, topk_group=1, num_experts_per_tok=2),
    "dots1": dict(n_routed_experts=8, n_shared_experts=1, num_experts_per_tok=2),
    "flex_olmo": dict(num_experts=8),
    "gemma3n_text": dict(num_kv_shared_layers=2, intermediate_size=[40] * LAYERS),
    "gemma4_assistant": dict(
        text_config=dict(num_kv_shared_layers=LAYERS, hidden_size_per_layer_input=0, vocab_size_per_layer_input=0)
    ),
    "gemma4_unified_assistant": dict(text_config=dict(num_kv_shared_layers=LAYERS)),
    "hunyuan_v1_dense": dict(head_dim=8),
    "hunyuan_v1_moe": dict(head_dim=8, num_experts=8, moe_topk=2),
    "laguna": dict(num_attention_heads_per_layer=[4] * LAYERS),
    "lfm2_moe": dict(layer_types=["conv", "full_attention"] * 2),
    "longcat_flash": dict(num_layers=LAYERS),
    "mamba2": dict(num_heads=8),
    "ministral": dict(head_dim=8),
    "nemotron": dict(num_key_value_heads=2, head_dim=8),
    "qwen4_exp_text": dict(
        indexer_n_heads=2, indexer_kv_heads=1, indexer_head_dim=8, indexer_budget=8, indexer_compress_ratio=2
    ),
    "reformer": dict(is_decoder=True, axial_pos_embds_dim=[8, 24]),
    "roc_bert": dict(pronunciation_vocab_size=VOCABULARY, shape_vocab_size=VOCABULARY),
    "zaya": dict(num_experts_per_tok=1),
}
# Configurations that cannot be made without arguments.
STARTS = {
    "gemma4_assistant": dict(
        text_config=dict(num_kv_shared_layers=30, hidden_size_per_layer_input=0, vocab_size_per_layer_input=0)
    )
}


def model_class(model_type: str, task: str = CAUSAL_LM) -> type[PreTrainedModel]:
    """Returns the class that the auto class of a task chooses for a model type."""
    found = MAPPINGS[task][CONFIG_MAPPING[model_type]]
    return found[0] if isinstance(found, tuple) else found


def tiny_configuration(model_type: str, task: str = CAUSAL_LM, **changes: Any) -> PreTrainedConfig:
    """Returns the configuration of a model type with a few thousand weights a layer. It is that of the language model
    if this alone is what the type's class takes.
    """
    config_class = CONFIG_MAPPING[model_type]
    default = config_class(**STARTS.get(model_type, {}))
    parts = [getattr(default, name, None) for name in default.sub_configs]
    for part in parts:
        if type(part) is model_class(model_type, task).config_class:
            default = part
    sizes = SIZES | {"image-classification": IMAGES, "audio-classification": AUDIO}.get(task, {})
    if task == "audio-classification":
        kept = UNCHANGED | {"conv_dim": [8] * len(getattr(default, "conv_dim", ()))}
        changes = {name: value for name, value in kept.items() if hasattr(default, name)} | changes
    return type(default)(**(_options(default, {}, sizes) | changes))


def tiny_model(model_type: str, seed: int = 0, task: str = CAUSAL_LM, **changes: Any) -> PreTrainedModel:
    """Returns a tiny model in training mode, with weights that all matter.

    Raises:
        ValueError: if no rule shrinks the model.
    """
    if "classification" in task:
        changes = {"num_labels": LABELS, "pad_token_id": SIZES["pad_token_id"]} | changes
    if task == "question-answering":
        changes = {"pad_token_id": SIZES["pad_token_id"]} | changes
    if task == "seq2seq-lm":
        changes = {"decoder_start_token_id": SIZES["pad_token_id"]} | changes
    config, family = tiny_configuration(model_type, task, **changes), model_class(model_type, task)
    if "classification" in task:
        config.classifier_dropout = 0.0  # where a configuration has no such entry, some heads drop a tenth
    torch.manual_seed(seed)
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in family(copy.deepcopy(config)).parameters())
    if count > LARGEST:
        raise ValueError(f"its tiny configuration has {count} parameters, over {LARGEST}")
    model = model_from_config(family, config, torch.float32)
    randomise(model, seed)
    return model.train()


def _options(default: PreTrainedConfig, exceptions: dict[str, Any], sizes: dict[str, Any]) -> dict[str, Any]:
    """Returns what makes a configuration tiny, and its parts."""
    values, names = default.to_dict(), default.attribute_map
    exceptions = EXCEPTIONS.get(default.model_type, {}) | exceptions
    known = {names.get(name, name): size for name, size in sizes.items()}
    if values.get("kv_lora_rank"):  # such attention has as many key and value heads as heads
        known["num_key_value_heads"] = known["num_attention_heads"]
    if values.get("head_dim") and values["head_dim"] == values.get("qk_rope_head_dim"):
        known["head_dim"] = known["qk_rope_head_dim"]
    options = {name: _smaller(values[name], size) for name, size in known.items() if values.get(name)}
    options |= {
        name: 0.0
        for name, value in values.items()
        if isinstance(value, float) and any(part in name for part in DROPOUT)
    }
    options |= _of_layers(values, getattr(default, "num_hidden_layers", None), known)
    for name in default.sub_configs:
        part = getattr(default, name, None)
        if isinstance(part, PreTrainedConfig):
            options[name] = _options(part, exceptions.get(name, {}), sizes)
    return options | {name: value for name, value in exceptions.items() if name not in default.sub_configs}


def _smaller(value: Any, size: Any) -> Any:
    return min(value, size) if isinstance(value, int) else size


def _of_layers(values: dict[str, Any], layers: int | None, known: dict[str, Any]) -> dict[str, Any]:
    """Returns the lists with an entry for each layer, in which the kinds of entries take turns."""
    options = {}
    for name, value in values.items():
        if isinstance(value, list | tuple) and len(value) == layers:
            kinds = list(dict.fromkeys(value))
            options[name] = [kinds[index % len(kinds)] for index in range(LAYERS)]
    if values.get("per_layer_config") and "layer_types" in options:  # what layers of a type have instead
        changes = {values["layer_types"][int(index)]: of for index, of in values["per_layer_config"].items()}
        options["per_layer_config"] = {
            index: {name: known.get(name, value) for name, value in changes[kind].items()}
            for index, kind in enumerate(options["layer_types"])
            if kind in changes
        }
    return options
