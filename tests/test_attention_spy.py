# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The arguments that families give their attention, and which families can use attention by document."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from galvatron_hf.parallel.layers.attention_probe import attention_obstacle
from tiny_models import EXPERT_FAMILIES, FAMILIES


@pytest.mark.parametrize("name", FAMILIES)
def test_tested_families_have_no_obstacle(name):
    model = FAMILIES[name].build()
    before = model.config.to_dict()
    assert attention_obstacle(type(model), model.config, causal=True) is None
    assert model.config.to_dict() == before


def _obstacle(kind: str, **options) -> str | None:
    config = AutoConfig.for_model(kind, **options)
    with torch.device("meta"):
        return attention_obstacle(type(AutoModelForCausalLM.from_config(config)), config, causal=True)


SMALL = dict(vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)


def test_attention_sinks_are_named():
    options = SMALL | dict(num_key_value_heads=1, intermediate_size=16, head_dim=8, num_local_experts=2)
    assert _obstacle("gpt_oss", **options) == "GptOssForCausalLM gives its attention 's_aux'"


@pytest.mark.parametrize("options", [dict(attn_temperature_tuning=True), dict(attention_chunk_size=8)])
def test_positions_counted_in_a_row_are_named(options):
    model = EXPERT_FAMILIES["llama4_text"].build(**options)
    found = attention_obstacle(type(model), model.config, causal=True)
    assert found == "the attention of Llama4ForCausalLM counts the positions of a row from its first"


def test_attention_that_bypasses_the_registered_function_is_named():
    found = _obstacle("bloom", vocab_size=32, hidden_size=16, n_layer=1, n_head=2)
    assert "BloomForCausalLM" in found
