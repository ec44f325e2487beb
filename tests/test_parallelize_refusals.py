# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Models and plans that cannot run are refused in one sentence, with reason and fix, before anything changes."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
import transformers

from encoder_decoder_models import ENCODER_DECODERS
from equivalence import single_stage
from galvatron_hf.parallel.parallelize import parallelize
from galvatron_hf.plan import LayerStrategy, ParallelPlan, Precision, Stage, VocabularyStrategy
from plans import uniform
from ranks import run_ranks
from tiny_configurations import tiny_model
from tiny_models import EXPERT_FAMILIES, FAMILIES, LAYERS, Family


def longt5() -> transformers.PreTrainedModel:
    return transformers.LongT5ForConditionalGeneration(
        transformers.LongT5Config(
            vocab_size=97, d_model=32, d_kv=4, d_ff=40, num_layers=2, num_decoder_layers=2, num_heads=8
        )
    )


def jetmoe():
    return transformers.JetMoeForCausalLM(
        transformers.JetMoeConfig(
            vocab_size=97,
            hidden_size=32,
            intermediate_size=40,
            num_hidden_layers=LAYERS,
            num_key_value_heads=2,
            kv_channels=8,
            num_local_experts=4,
        )
    )


def experts(family: str, **options):
    return lambda: EXPERT_FAMILIES[family].build(**options)


def without_head():
    return FAMILIES["llama"].build().model


def quantised():
    model = FAMILIES["llama"].build()
    model.is_quantized = True
    return model


def of_two_dtypes():
    model = FAMILIES["llama"].build()
    model.lm_head.bfloat16()
    return model


def llama(**changes):
    return lambda: FAMILIES["llama"].build(**changes)


def with_hidden_states():
    model = FAMILIES["llama"].build()
    model.config.output_hidden_states = True
    return model


def llama_like(prefix: str, **options):
    return Family(prefix=prefix, options=options).build


S, V = LayerStrategy, VocabularyStrategy


def with_a_weight_more():
    model = FAMILIES["llama"].build()
    model.model.extra = torch.nn.Linear(2, 2)
    return model


DATA = uniform(4)
TENSOR = uniform(4, tensor=4)
TWO_STAGES = dataclasses.replace(
    DATA,
    micro_batches=2,
    stages=(Stage(ranks=(0, 1), layers=(0, 2)), Stage(ranks=(2, 3), layers=(2, 4))),
)
UNEQUAL_STAGES = (Stage(ranks=(0, 1, 2), layers=(0, 2)), Stage(ranks=(3,), layers=(2, 4)))
VIRTUAL = tuple(Stage(ranks=(2 * (i % 2), 2 * (i % 2) + 1), layers=(i, i + 1)) for i in range(4))
# Model, plan, and what the sentence must say.
REFUSED: dict[str, tuple] = {
    "encoder-decoder": (longt5, DATA, ["LongT5", "encoder-decoder", "without an adapter", "bart"]),
    "experts without a table": (jetmoe, TENSOR, ["Layer 0", "JetMoe", "no table names the modules", "use tensor 1"]),
    "experts of a dense layer": (experts("deepseek_v3"), uniform(4, expert=2), ["Layer 0", "no experts", "expert 1"]),
    "experts of a dense model": (llama(), uniform(4, expert=2), ["Layer 0", "Llama", "no experts", "expert 1"]),
    "more ranks than experts": (
        experts("mixtral", num_local_experts=2),
        uniform(4, expert=4),
        ["expert 4", "2 experts", "use expert 2"],
    ),
    "positions counted in a row": (
        experts("llama4_text", attn_temperature_tuning=True),
        uniform(4, ulysses=2),
        ["Layer 3", "ulysses 2", "positions", "use ulysses 1"],
    ),
    "linear attention": (
        experts("minimax"),
        uniform(4, ulysses=2),
        ["MiniMax", "kinds", "attention", "use ulysses 1"],
    ),
    "a mask of another kind": (
        lambda: tiny_model("deberta-v2", task="masked-lm"),
        TENSOR,
        ["DebertaV2ForMaskedLM", "a mask of their own kind", "use tensor 1"],
    ),
    "an embedding cut beside whole rows": (
        lambda: tiny_model("opt"),
        dataclasses.replace(DATA, embedding=V(tensor=2), head=V(tensor=2)),
        ["The embedding has tensor 2", "OPT", "use tensor 1"],
    ),
    "states that pass from layer to layer": (
        lambda: tiny_model("rwkv"),
        TWO_STAGES,
        ["2 stages", "Rwkv", "layer 1", "'state'", "use one stage"],
    ),
    "hidden states of four dimensions": (
        lambda: tiny_model("xlnet"),
        TWO_STAGES,
        ["XLNet", "dimensions", "one stage"],
    ),
    "a weight of several layers": (
        lambda: tiny_model("zamba"),
        DATA,
        ["Zamba", "one weight in several layers", "model.layers.3.shared_transf"],
    ),
    "layers left out at random": (lambda: tiny_model("opt", layerdrop=0.1), DATA, ["OPT", "layerdrop of 0.1", "0.0"]),
    "layers that are skipped": (lambda: tiny_model("mllama"), DATA, ["Mllama", "layers [0, 1, 2] of 4"]),
    "no head": (without_head, DATA, ["LlamaModel", "AutoModelForCausalLM"]),
    "tied and unequal": (
        llama(tie_word_embeddings=True),
        dataclasses.replace(DATA, embedding=V(tensor=2)),
        ["ties", "give head the fields of embedding"],
    ),
    "heads": (llama(hidden_size=48, num_attention_heads=6, num_key_value_heads=2), TENSOR, ["6", "use tensor 2"]),
    "key/value heads": (llama(hidden_size=48, num_attention_heads=12, num_key_value_heads=3), TENSOR, ["3 key/value"]),
    "heads under ulysses": (
        llama(hidden_size=48, num_attention_heads=6, num_key_value_heads=6),
        uniform(4, ulysses=4),
        ["ulysses 4", "ulysses 2"],
    ),
    "features": (llama(intermediate_size=42), TENSOR, ["42", "use 2"]),
    "layers": (llama(num_hidden_layers=3), DATA, ["4 layers", "make a plan for 3"]),
    "world size": (llama(), uniform(2), ["world_size=2", "4 processes", "--num_processes 2"]),
    "unequal stages": (llama(), dataclasses.replace(DATA, stages=UNEQUAL_STAGES), ["1 and 3 ranks", "give each 2"]),
    "rounds": (
        llama(),
        dataclasses.replace(DATA, stages=VIRTUAL, schedule="interleaved", micro_batches=5),
        ["micro_batches is 5", "use micro_batches=6"],
    ),
    "zero bubble": (
        llama(),
        dataclasses.replace(TWO_STAGES, schedule="zero_bubble"),
        ["layer 0", "'zero3'", "use 'zero2'"],
    ),
    "layers without attention": (
        llama_like(
            "Qwen3_5",
            head_dim=8,
            linear_key_head_dim=4,
            linear_value_head_dim=4,
            linear_num_key_heads=4,
            linear_num_value_heads=8,
        ),
        TENSOR,
        ["'position_embeddings', which has no layout", "use tensor 1"],
    ),
    "positions masked by an index": (
        lambda: tiny_model("deepseek_v32"),
        uniform(4, ulysses=2),
        ["DeepseekV32ForCausalLM", "index", "use ulysses 1"],
    ),
    "heads of a layer type": (
        lambda: tiny_model("mimo_v2_flash"),
        TENSOR,
        ["layer 1", "1 query heads", "4 to 2", "use tensor 1"],
    ),
    "queries scaled by position": (
        llama_like("Ministral3", head_dim=8),
        uniform(4, ulysses=2),
        ["position_ids of the whole sequence", "use ulysses 1"],
    ),
    "weights of no stage": (with_a_weight_more, TWO_STAGES, ["model.extra.weight", "use one stage"]),
    "tied stages": (
        llama(tie_word_embeddings=True),
        dataclasses.replace(TWO_STAGES, embedding=V(tensor=2)),
        ["ties", "use tensor=2 for head"],
    ),
    "context of layers that differ": (
        llama(),
        single_stage((S(), S(tensor=2), S(context=2), S()), 4),
        ["several context degrees", "one tensor and one Ulysses degree in the layers of context 1"],
    ),
    "context with dropout": (llama(attention_dropout=0.1), uniform(4, context=2), ["dropout 0.1", "context=1"]),
    "context of pairs": (
        ENCODER_DECODERS["t5"].build,
        ParallelPlan.uniform(4, {"encoder": 3, "decoder": 2}, context=2),
        ["pairs", "context=1"],
    ),
    "fp16": (llama(), dataclasses.replace(DATA, precision=Precision(compute="fp16")), ["fp16", "bf16"]),
    "bf16 master weights": (
        llama(),
        dataclasses.replace(DATA, precision=Precision(compute="bf16", master="bf16")),
        ["master", "fp32"],
    ),
    "quantised": (quantised, DATA, ["quantised", "bf16 or fp32"]),
    "hidden states": (with_hidden_states, DATA, ["output_hidden_states=True", "to False"]),
    "several dtypes": (of_two_dtypes, DATA, ["bfloat16", "float32", "float()"]),
    "norms over all heads": (llama_like("Olmo2"), TENSOR, ["Olmo2ForCausalLM", "2 key/value", "use tensor 2"]),
    "uneven pieces of pieces": (
        llama(intermediate_size=44, mlp_bias=True),
        uniform(8, tensor=2),
        ["layer 0", "mlp.gate_proj.bias of shape (44,)", "shard_degree 2"],
    ),
}


def snapshot(model) -> dict:
    return {
        "classes": [type(module) for module in model.modules()],
        "forwards": [vars(module).get("forward") for module in model.modules()],
        "parameters": [(name, id(p), p.data_ptr(), type(p)) for name, p in model.named_parameters()],
        "hooks": [(len(module._forward_hooks), len(module._forward_pre_hooks)) for module in model.modules()],
        "config": copy.deepcopy(model.config.to_dict()),
    }


def refusal(build, plan: ParallelPlan) -> str:
    torch.manual_seed(0)
    model = build()
    before = snapshot(model)
    with pytest.raises(ValueError) as refused:
        parallelize(model, plan)
    assert snapshot(model) == before
    return str(refused.value)


@pytest.mark.parametrize("world_size", [4, 8])
def test_refusals_name_the_reason_and_the_way_out_and_touch_nothing(world_size):
    chosen = {n: c for n, c in REFUSED.items() if (c[1].world_size == 8) == (world_size == 8)}

    def work():
        return {name: refusal(build, plan) for name, (build, plan, _) in chosen.items()}

    for sentences in run_ranks(work, world_size):
        for name, sentence in sentences.items():
            assert "\n" not in sentence
            missing = [part for part in chosen[name][2] if part not in sentence]
            assert not missing, f"{name}: {missing} not in {sentence!r}"


def test_without_a_process_group():
    with pytest.raises(ValueError, match="accelerate launch"):
        parallelize(FAMILIES["llama"].build(), DATA)


@pytest.mark.parametrize(
    "inputs, named",
    [
        ({"attention_mask": torch.ones(4, 1, 8, 8)}, "attention_mask of 4 dimensions"),
        ({"inputs_embeds": torch.ones(4, 8, 32)}, "inputs_embeds"),
        ({"output_attentions": True}, "output_attentions"),
        ({"output_hidden_states": True}, "output_hidden_states"),
    ],
)
def test_inputs_without_a_layout_are_refused(inputs, named):
    def work():
        parallel = parallelize(FAMILIES["llama"].build(), single_stage((S(),) * LAYERS, 2))
        with pytest.raises(ValueError, match=named):
            parallel.model(input_ids=torch.ones(4, 8, dtype=torch.long), **inputs)

    run_ranks(work, 2)
