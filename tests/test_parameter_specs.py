# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The table of parameters, against the pieces that ranks hold after `parallelize`; layers counted over two stacks."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers import LlamaConfig

from equivalence import single_stage
from galvatron_hf.models.adapter import ModelAdapter, StackAdapter, Style
from galvatron_hf.models.families import adapter_for, count_layers
from galvatron_hf.models.fused_weights import FusedNames, split_fused_projections_of_layer
from galvatron_hf.models.parameter_specs import ParameterSpec, layer_specs, model_specs
from galvatron_hf.parallel.comm.dtensor import local_tensor
from galvatron_hf.parallel.parallelize import parallelize
from galvatron_hf.plan import LayerStrategy, VocabularyStrategy
from ranks import run_ranks
from tiny_models import FAMILIES, LAYERS


SPEC_FAMILIES = ("llama", "gpt2", "phi3", "gemma2", "llama_one_kv_head")


def named_specs(model) -> dict[str, ParameterSpec]:
    """Returns every spec of a model by the runtime's full name of the parameter."""
    adapter = adapter_for(model)
    specs, names = model_specs(model, adapter), {id(module): name for name, module in model.named_modules()}
    found = {}
    for layer, of_layer in zip(adapter.layers(model), specs.layers, strict=True):
        found |= {f"{names[id(layer)]}.{spec.name}": spec for spec in of_layer}
    tokens, *positions = adapter.embeddings(model)
    for module, spec in zip([tokens, *positions], specs.embedding, strict=True):
        found[f"{names[id(module)]}.{spec.name}"] = spec
    found |= {f"{names[id(adapter.final_norms(model)[0])]}.{spec.name}": spec for spec in specs.final_norm}
    if not adapter.ties_embeddings(model):
        found |= {f"{names[id(adapter.head(model))]}.{spec.name}": spec for spec in specs.head}
    return found


@pytest.mark.parametrize("family", SPEC_FAMILIES)
def test_a_configuration_tells_the_layers_of_its_model(family):
    model = FAMILIES[family].build(num_hidden_layers=3)
    assert count_layers(model.config) == sum(adapter_for(model).stack_sizes(model).values()) == 3


@pytest.mark.slow
def test_ranks_hold_what_the_table_says():
    models = {family: FAMILIES[family].build() for family in SPEC_FAMILIES}
    specs = {family: named_specs(model) for family, model in models.items()}

    def work() -> dict[tuple[str, str, str], tuple[int, ...]]:
        found = {}
        for family, model in models.items():
            for name, layer, end in (
                ("replicate", LayerStrategy(tensor=4, sharding="replicate"), 4),
                ("zero3", LayerStrategy(tensor=2, megatron_sp=True, sharding="zero3"), 2),
            ):
                ends = VocabularyStrategy(tensor=end, sharding=layer.sharding)
                plan = single_stage((layer,) * LAYERS, 4, embedding=ends, head=ends)
                parallel = parallelize(copy.deepcopy(model), plan)
                for key, parameter in parallel.model.named_parameters():
                    found[family, name, key] = tuple(local_tensor(parameter).shape)
        return found

    held = run_ranks(work, 4)
    for rank, found in enumerate(held):
        for family, of_family in specs.items():
            assert {key for fam, _, key in found if fam == family} == set(of_family)
            for key, spec in of_family.items():
                shape = spec.weight_shape
                assert found[family, "replicate", key] == shape.local_shape(4, rank), (family, key)
                pieces = [torch.Size(each[family, "zero3", key]).numel() for each in held[rank % 2 :: 2]]
                assert sum(pieces) == torch.Size(shape.local_shape(2, rank % 2)).numel(), (family, key)
                assert max(pieces) == shape.shard_elements(2, rank % 2, 2), (family, key)


def test_gpt2_axes_and_names_before_and_after_the_split():
    """A Conv1D has its output features last, and the parts of its fused projection have names of their own."""
    model = FAMILIES["gpt2"].build()
    stack, layer, config = adapter_for(model).stacks[0], model.transformer.h[0], model.config
    specs = {spec.name: spec for spec in layer_specs(layer, stack, config)}
    axes = {
        "attn.c_attn.query.weight": (None, "tensor"),
        "attn.c_attn.value.bias": ("tensor",),
        "attn.c_proj.weight": ("tensor", None),
        "attn.c_proj.bias": (None,),
        "mlp.c_fc.weight": (None, "tensor"),
        "mlp.c_proj.weight": ("tensor", None),
        "ln_1.weight": (None,),
    }
    assert {name: specs[name].axes for name in axes} == axes
    assert specs["attn.c_attn.key.weight"].family_name == "attn.c_attn.weight"
    names = FusedNames.from_model(model, adapter_for(model))
    for each in model.transformer.h:
        split_fused_projections_of_layer(each, stack, config)
    assert {spec.name: spec for spec in layer_specs(layer, stack, config)} == specs
    assert FusedNames.from_model(model, adapter_for(model)) == names


@pytest.mark.parametrize("tensor", [2, 4, 8])
def test_copied_key_value_heads(tensor):
    """With fewer heads than ranks each rank holds all heads, uses one, and sums its gradient over the ranks."""
    model = FAMILIES["llama"].build()  # 8 heads of 4 features, 2 key/value heads
    adapter = adapter_for(model)
    key = next(spec for spec in model_specs(model, adapter).layers[0] if spec.name == "self_attn.k_proj.weight")
    used = [key.used_features(tensor, rank) for rank in range(tensor)]
    if tensor == 2:
        assert used == [None, None] and key.weight_shape.local_shape(2) == (4, 32)
    else:
        assert used == [(0, 4)] * (tensor // 2) + [(4, 8)] * (tensor // 2)
        assert key.weight_shape.local_shape(tensor) == (8, 32)
    assert key.weight_shape.sums_gradient(tensor, megatron_sp=False) == (tensor > 2)


class TwoStacks(nn.Module):
    """Has an encoder of two layers and a decoder of three, as an encoder-decoder model has them."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Module(), nn.Module()
        self.encoder.block = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(8, 16)}) for _ in range(2))
        self.decoder.block = nn.ModuleList(nn.ModuleDict({"down": nn.Linear(16, 8)}) for _ in range(3))
        self.encoder.norm, self.decoder.norm = nn.LayerNorm(8), nn.LayerNorm(8)

    @property
    def base_model(self) -> nn.Module:
        return self


def test_layers_are_counted_over_the_stacks():
    encoder = StackAdapter(name="encoder", layers="encoder.block", styles={"up": Style.COLUMN}, regions=("up",))
    decoder = StackAdapter(name="decoder", layers="decoder.block", styles={"down": Style.ROW}, regions=("down",))
    model, adapter = TwoStacks(), ModelAdapter(stacks=(encoder, decoder))
    assert adapter.stack_sizes(model) == {"encoder": 2, "decoder": 3}
    places = adapter.places(model)
    assert [(place.index, place.stack.name, place.local_index) for place in places] == [
        (0, "encoder", 0),
        (1, "encoder", 1),
        (2, "decoder", 0),
        (3, "decoder", 1),
        (4, "decoder", 2),
    ]
    layers = adapter.layers(model)
    assert all(model.get_submodule(place.name) is layers[place.index] for place in places)
    config = LlamaConfig(num_attention_heads=4, hidden_size=8)
    axes = [[spec.axes for spec in layer_specs(layers[p.index], p.stack, config)] for p in places]
    assert axes == [[("tensor", None), ("tensor",)]] * 2 + [[(None, "tensor"), (None,)]] * 3
