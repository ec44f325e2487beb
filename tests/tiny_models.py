# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Causal language models of every tested family, small enough for eight ranks on two cores, and batches for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedModel, PreTrainedTokenizerFast


VOCABULARY = 97  # a prime: no degree divides it
LAYERS = 4

_LLAMA_LIKE = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=40,
    num_hidden_layers=LAYERS,
    num_attention_heads=8,
    num_key_value_heads=2,
    max_position_embeddings=64,
    pad_token_id=3,
    bos_token_id=1,
    eos_token_id=2,
    tie_word_embeddings=False,
    attn_implementation="sdpa",
)
_GPT2_LIKE = dict(
    vocab_size=VOCABULARY,
    n_embd=32,
    n_inner=40,
    n_layer=LAYERS,
    n_head=8,
    n_positions=64,
    resid_pdrop=0.0,
    embd_pdrop=0.0,
    attn_pdrop=0.0,
    pad_token_id=3,
    bos_token_id=1,
    eos_token_id=2,
    attn_implementation="sdpa",
)


@dataclass(frozen=True, kw_only=True)
class Family:
    """Holds a model class with the configuration that makes it tiny.

    Attributes:
        prefix (`str`): of the configuration's and the model's class names in transformers.
        options (`dict`): what differs from the small Llama (or GPT-2) configuration.
        base (`dict`): that configuration.
    """

    prefix: str
    options: dict[str, Any] = field(default_factory=dict)
    base: dict[str, Any] = field(default_factory=lambda: _LLAMA_LIKE)

    def build(self, seed: int = 0, **changes: Any) -> PreTrainedModel:
        """Returns the model in training mode, with weights that make every part of it matter."""
        names = f"{self.prefix}TextConfig", f"{self.prefix}Config"  # Gemma3 has one for text and one for both
        config_class = next(getattr(transformers, name) for name in names if hasattr(transformers, name))
        config = config_class(**(self.base | self.options | changes))
        torch.manual_seed(seed)
        model_class = getattr(transformers, f"{self.prefix}ForCausalLM", None)
        model = (model_class or transformers.GPT2LMHeadModel)(config)
        randomise(model, seed)
        return model.train()


@torch.no_grad()
def randomise(model: PreTrainedModel, seed: int) -> None:
    """Gives weights random values: zero biases, unit norms and nearly uniform attention would hide errors."""
    generator = torch.Generator().manual_seed(seed + 1)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim == 1:
            parameter.add_(0.1 * noise)
        else:
            parameter.copy_(noise * parameter.shape[-1] ** -0.5)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):  # moves choices of experts
            buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))


FAMILIES: dict[str, Family] = {
    "llama": Family(prefix="Llama"),
    "llama_tied": Family(prefix="Llama", options=dict(tie_word_embeddings=True)),
    "llama_eager": Family(prefix="Llama", options=dict(attn_implementation="eager")),
    "llama_biases": Family(
        prefix="Llama", options=dict(attention_bias=True, mlp_bias=True, num_key_value_heads=4, head_dim=6)
    ),
    "llama_one_kv_head": Family(prefix="Llama", options=dict(num_key_value_heads=1, attention_bias=True)),
    "mistral": Family(prefix="Mistral", options=dict(sliding_window=4)),
    "qwen2": Family(prefix="Qwen2", options=dict(tie_word_embeddings=True)),
    "qwen3": Family(prefix="Qwen3", options=dict(head_dim=8)),
    "gemma2": Family(
        prefix="Gemma2",
        options=dict(
            head_dim=8,
            sliding_window=4,
            query_pre_attn_scalar=8,
            attn_logit_softcapping=2.0,
            final_logit_softcapping=3.0,
            attn_implementation="eager",
            tie_word_embeddings=True,
        ),
    ),
    "phi3": Family(prefix="Phi3"),
    "granite": Family(
        prefix="Granite",
        options=dict(logits_scaling=4.0, embedding_multiplier=3.0, residual_multiplier=0.5, attention_multiplier=0.3),
    ),
    "cohere": Family(prefix="Cohere", options=dict(logit_scale=0.25, tie_word_embeddings=True)),
    "smollm3": Family(prefix="SmolLM3", options=dict(no_rope_layer_interval=2)),
    "starcoder2": Family(prefix="Starcoder2", options=dict(use_bias=True, sliding_window=5, residual_dropout=0.0)),
    "olmo2": Family(prefix="Olmo2", options=dict(num_key_value_heads=8)),  # norms over all heads: one for each rank
    "gemma3": Family(prefix="Gemma3", options=dict(head_dim=8, sliding_window=4, query_pre_attn_scalar=8)),
    "gpt2": Family(prefix="GPT2", base=_GPT2_LIKE),
    "gpt2_untied": Family(prefix="GPT2", base=_GPT2_LIKE, options=dict(tie_word_embeddings=False)),
    "gpt2_eager": Family(prefix="GPT2", base=_GPT2_LIKE, options=dict(attn_implementation="eager")),
}


_DEEPSEEK = dict(
    n_routed_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=24,
    first_k_dense_replace=1,
    num_key_value_heads=8,
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_rope_head_dim=4,
    qk_nope_head_dim=4,
    v_head_dim=8,
    n_group=2,
    topk_group=1,
)
# A large coefficient: with a small one, a wrong loss of the routers would hardly be seen.
_ROUTER_LOSS = dict(output_router_logits=True, router_aux_loss_coef=0.5)
_EXPERTS = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=24)

# Families with experts; those with a loss for their routers compute it.
EXPERT_FAMILIES: dict[str, Family] = {
    "mixtral": Family(prefix="Mixtral", options=dict(num_local_experts=8, **_ROUTER_LOSS)),
    "qwen2_moe": Family(
        prefix="Qwen2Moe",
        options=dict(shared_expert_intermediate_size=24, mlp_only_layers=[1], **_EXPERTS, **_ROUTER_LOSS),
    ),
    "qwen3_moe": Family(prefix="Qwen3Moe", options=dict(head_dim=8, **_EXPERTS, **_ROUTER_LOSS)),
    "olmoe": Family(prefix="Olmoe", options=_EXPERTS | _ROUTER_LOSS | dict(num_key_value_heads=8)),
    "phimoe": Family(
        prefix="Phimoe",
        options=dict(num_local_experts=8, router_jitter_noise=0.0, input_jitter_noise=0.0, **_ROUTER_LOSS),
    ),
    "granitemoe": Family(
        prefix="GraniteMoe",
        options=dict(num_local_experts=8, logits_scaling=4.0, attention_multiplier=0.3, **_ROUTER_LOSS),
    ),
    "granitemoeshared": Family(
        prefix="GraniteMoeShared", options=dict(num_local_experts=8, shared_intermediate_size=24, **_ROUTER_LOSS)
    ),
    "deepseek_v2": Family(prefix="DeepseekV2", options=_DEEPSEEK | dict(topk_method="group_limited_greedy")),
    "deepseek_v3": Family(prefix="DeepseekV3", options=_DEEPSEEK),
    "glm4_moe": Family(
        prefix="Glm4Moe", options=dict(head_dim=8, n_routed_experts=8, moe_intermediate_size=24, num_experts_per_tok=2)
    ),
    "ernie4_5_moe": Family(
        prefix="Ernie4_5_Moe",
        options=dict(moe_num_experts=8, moe_k=2, moe_intermediate_size=24, moe_num_shared_experts=1, **_ROUTER_LOSS),
    ),
    "dots1": Family(
        prefix="Dots1",
        options=dict(
            n_routed_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            n_shared_experts=1,
            head_dim=8,
            first_k_dense_replace=1,
        ),
    ),
    "minimax_m2": Family(
        prefix="MiniMaxM2",
        options=dict(num_local_experts=8, num_experts_per_tok=2, head_dim=8, num_key_value_heads=8, **_ROUTER_LOSS),
    ),
    "gpt_oss": Family(
        prefix="GptOss",
        options=dict(
            num_local_experts=8,
            num_experts_per_tok=2,
            head_dim=8,
            sliding_window=4,
            attn_implementation="eager",
            **_ROUTER_LOSS,
        ),
    ),
    "hunyuan_v1_moe": Family(prefix="HunYuanMoEV1", options=dict(num_experts=8, moe_topk=2, head_dim=8)),
    "llama4_text": Family(
        prefix="Llama4",
        options=dict(
            num_local_experts=8,
            num_experts_per_tok=1,
            head_dim=8,
            intermediate_size_mlp=40,
            moe_layers=[1, 3],
            attn_temperature_tuning=False,
        ),
    ),
    "minimax": Family(prefix="MiniMax", options=dict(num_local_experts=8)),
}


ALL_FAMILIES = FAMILIES | EXPERT_FAMILIES


def word_tokenizer() -> PreTrainedTokenizerFast:
    """Returns a tokenizer of the words w0, w1, ..., of which each model has a token."""
    model = WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0")
    backend = Tokenizer(model)
    backend.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="w0", pad_token="w3", eos_token="w2")


def _ids(rows: int, length: int, seed: int) -> torch.Tensor:
    # The padding token occurs too, as a token like any other: its embedding must get no gradient anywhere.
    return torch.randint(0, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


def _padded(rows: int, length: int, left: bool) -> dict[str, torch.Tensor]:
    """Returns rows of different lengths, one of them full; some labels inside a row are ignored too."""
    ids = _ids(rows, length, 11)
    lengths = torch.tensor([length - (5 * row) % (length - 2) for row in range(rows)])[:, None]
    places = torch.arange(length)[None]
    mask = (places >= length - lengths if left else places < lengths).long()
    ids[mask == 0] = 3
    labels = ids.masked_fill(mask == 0, -100)
    labels[0, 2:4] = -100
    return dict(input_ids=ids, attention_mask=mask, labels=labels)


def _packed(rows: int, length: int) -> dict[str, torch.Tensor]:
    """Returns rows of documents, told apart by position ids alone."""
    ids, bounds = _ids(rows, length, 12), [(0, 3, 8), (0, 5), (0, 1, 6, 9)]
    positions, labels = torch.empty_like(ids), ids.clone()
    for row in range(rows):
        starts = bounds[row % len(bounds)]
        for start, stop in zip(starts, (*starts[1:], length), strict=True):
            positions[row, start:stop] = torch.arange(stop - start)
            labels[row, start] = -100
    return dict(input_ids=ids, position_ids=positions, labels=labels)


def _plain(rows: int, length: int) -> dict[str, torch.Tensor]:
    ids = _ids(rows, length, 13)
    return dict(input_ids=ids, labels=ids.clone())


def _shifted(rows: int, length: int) -> dict[str, torch.Tensor]:
    batch = _padded(rows, length, left=False)
    labels = batch.pop("labels")
    shifted = torch.full_like(labels, -100)
    shifted[:, :-1] = labels[:, 1:]
    return batch | dict(shift_labels=shifted)


BATCHES: dict[str, Callable[[], dict[str, torch.Tensor]]] = {
    "right": lambda: _padded(6, 11, left=False),
    "left": lambda: _padded(6, 11, left=True),
    "plain": lambda: _plain(8, 8),
    "odd": lambda: _padded(5, 7, left=False),
    "one_row": lambda: _plain(1, 9),
    "one_short_row": lambda: _plain(1, 3),
    "packed": lambda: _packed(3, 13),
    "shifted": lambda: _shifted(6, 11),
}
