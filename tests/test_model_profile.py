# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Model profiles: shapes and bytes are the real runtime's, FLOPs the closed form; what is not a profile is refused."""

from __future__ import annotations

import json
import logging
import math
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import GPT2Config, LlamaConfig, PreTrainedModel

from equivalence import single_stage
from galvatron_hf.cli.main import main
from galvatron_hf.model_shape import ModelShape
from galvatron_hf.parallel.apply import parallelize
from galvatron_hf.parallel.documents import Documents
from galvatron_hf.parallel.memory import LayerShape, saved_activation_bytes
from galvatron_hf.plan import LayerStrategy
from galvatron_hf.profiler.cache import load_or_profile_model
from galvatron_hf.profiler.counting import count
from galvatron_hf.profiler.hardware_profile import HardwareProfile
from galvatron_hf.profiler.model import profile_model
from galvatron_hf.profiler.model_profile import STRETCHES, ModelProfile
from galvatron_hf.profiler.parts import Part, empty_model, layer_kinds
from galvatron_hf.profiler.real_shapes import model_shape
from galvatron_hf.profiler.tracing import CountedModel
from ranks import run_ranks
from test_memory import measure_saved
from tiny_models import FAMILIES, LAYERS, VOCABULARY


GALVATRON = Path(__file__).parent / "data" / "galvatron_profiles"
TOKENS = 128
aten = torch.ops.aten
STRATEGIES = {
    "tensor": LayerStrategy(tensor=4),
    "megatron_sp_ulysses": LayerStrategy(tensor=2, megatron_sp=True, ulysses=2),
    "ulysses": LayerStrategy(ulysses=4),
}
CLUSTER = HardwareProfile.preset("h100", 1, 8)


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.mark.parametrize("family", FAMILIES)
def test_shapes_hold_every_parameter_of_the_model_once(family):
    model = FAMILIES[family].build()
    shape = model_shape(model)
    weights = [*shape.embedding, *shape.final_norm, *shape.head, *(w for layer in shape.layers for w in layer)]
    assert sum(math.prod(weight.shape) for weight in weights) == model.num_parameters()
    assert len(shape.layers) == LAYERS
    assert shape.tied == (model.get_output_embeddings().weight is model.get_input_embeddings().weight)
    # Families that normalise what their MLP leaves, by their own description.
    assert shape.saves_after_last_region == (family in ("gemma2", "gemma3", "olmo2"))


def test_layers_of_one_kind_are_found_by_shape_and_settings():
    assert layer_kinds(FAMILIES["llama"].build()) == (0, 0, 0, 0)
    assert layer_kinds(FAMILIES["smollm3"].build()) == (0, 1, 0, 1)  # every other layer has rotary embeddings
    assert layer_kinds(FAMILIES["gemma2"].build()) == (0, 1, 0, 1)  # sliding windows alternate
    model = FAMILIES["llama"].build()
    model.model.layers[2].mlp.gate_proj = torch.nn.Linear(32, 24, bias=False)
    assert layer_kinds(model) == (0, 0, 1, 0)


def test_shapes_of_a_model_without_memory_are_those_of_the_closed_form():
    heads = dict(num_attention_heads=8, num_key_value_heads=2, head_dim=4)
    config = LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=40, num_hidden_layers=3, tie_word_embeddings=True, **heads
    )
    expected = ModelShape.llama(
        vocab=97, hidden=32, intermediate=40, layers=3, heads=8, kv_heads=2, head_dim=4, tied=True
    )
    found = model_shape(empty_model(config))
    assert sorted(map(str, found.layers[2])) == sorted(map(str, expected.layers[2]))
    assert (found.embedding, found.head, found.final_norm) == (expected.embedding, expected.head, expected.final_norm)


def batch_of(packed: bool) -> dict:
    """One document of `TOKENS` tokens, packed or as a row."""
    ids = torch.randint(0, VOCABULARY, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    if not packed:
        return {"input_ids": ids, "labels": ids}
    documents = Documents(bounds=(0, TOKENS), cuts=(0, TOKENS))
    return {
        "input_ids": ids,
        "shift_labels": ids,
        "position_ids": torch.arange(TOKENS)[None],
        "documents": documents,
    }


@pytest.mark.parametrize("packed", [True, False])
def test_saved_bytes_are_those_of_the_runtime_on_real_ranks(packed):
    families = ("llama", "llama_one_kv_head", "qwen3", "phi3")
    models = {family: FAMILIES[family].build(max_position_embeddings=TOKENS) for family in families}

    def work() -> dict[tuple[str, str], int]:
        found = {}
        for family, model in models.items():
            for name, strategy in STRATEGIES.items():
                torch.manual_seed(0)
                built = FAMILIES[family].build(max_position_embeddings=TOKENS)
                parallel = parallelize(built, single_stage((strategy,) * LAYERS, 4))
                found[family, name] = measure_saved(parallel, 1, batch_of(packed))
        return found

    counted = {}
    for family, model in models.items():
        counts = CountedModel(model, torch.float32, TOKENS, packed)
        for name, strategy in STRATEGIES.items():
            counted[family, name] = counts.layers(strategy, TOKENS, TOKENS)[0].saved_bytes
    for found in run_ranks(work, 4, timeout=180.0):
        assert found == counted


def test_saved_bytes_are_the_closed_form_of_llama():
    counts = CountedModel(FAMILIES["llama"].build(num_key_value_heads=8), torch.float32, TOKENS, packed=False)
    shape = LayerShape(hidden=32, intermediate=40, heads=8, key_value_heads=8, head_dim=4)
    strategies = list(counts.strategies(8))
    assert len(strategies) == 16
    for strategy in strategies:
        found = counts.layers(strategy, TOKENS, TOKENS)[0].saved_bytes
        assert found == saved_activation_bytes(shape, strategy, TOKENS), strategy


@pytest.mark.parametrize("tensor", [1, 2, 8])
def test_flops_are_the_closed_form_of_llama(tensor):
    hidden, intermediate, heads, dim = 64, 96, 8, 16
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=dim,
    )
    counts = CountedModel(empty_model(config), torch.bfloat16, TOKENS, packed=True)
    products = 2 * TOKENS * (4 * hidden * heads * dim + 3 * hidden * intermediate) // tensor
    scores = TOKENS**2 * heads * dim // tensor  # one of both products, without what the causal mask leaves out
    [layer] = counts.layers(LayerStrategy(tensor=tensor), TOKENS, TOKENS)
    assert layer.forward.flops == products + 2 * scores
    assert layer.backward.flops == 2 * products + 5 * scores  # the kernel makes the scores once more
    assert layer.last_forward.flops == 2 * TOKENS * hidden * intermediate // tensor  # saves nothing behind its input
    head = counts.ends(tensor, 1024)["head"]
    # The gradients are made on the way forward, so that its logits need not be kept.
    assert (head.forward.flops, head.backward.flops) == (3 * 2 * 1024 * hidden * 256 // tensor, 0)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_recomputing_leaves_out_what_comes_behind_the_last_saved_tensor(family):
    """What PyTorch's checkpoints do of matrix products, and what the counts say of a layer."""

    def build() -> PreTrainedModel:
        return FAMILIES[family].build(max_position_embeddings=TOKENS, use_cache=False)

    def products() -> list[int]:
        found = []
        for recompute in ("none", "full"):
            plan = single_stage((LayerStrategy(recompute=recompute),) * LAYERS, 1)
            with FlopCounterMode(display=False) as counter:
                parallelize(build(), plan).forward_backward(batch_of(packed=False))
            flops = counter.get_flop_counts()["Global"]
            found.append(sum(flops.get(operation, 0) for operation in (aten.mm, aten.addmm)))
        return found

    [(without, recomputed)] = run_ranks(products, 1)
    model, path = build(), {"llama": "layers.0.mlp.down_proj", "gpt2": "h.0.mlp.c_proj", "gemma2": None}[family]
    left_out = (
        0 if path is None else model.base_model.get_submodule(path).weight.numel()
    )  # Gemma2 normalises its output
    layer = sum(weight.numel() for name, weight in model.named_parameters() if ".0." in name and weight.ndim == 2)
    assert recomputed - without == 2 * TOKENS * LAYERS * (layer - left_out)
    counts = CountedModel(model, torch.float32, TOKENS, packed=False).layers(LayerStrategy(), TOKENS, TOKENS)
    assert {layer.last_forward.flops for layer in counts} == {2 * TOKENS * left_out}


def test_most_bytes_alive_are_counted_step_by_step():
    given = torch.zeros(1000, requires_grad=True)
    counts = count(Part(run=lambda: given.exp().sin(), input=given, modules=()))
    assert counts.saved_bytes == 4000  # what exp left: its own result, and sin's input
    # The input, both results, the gradient that comes, the cosine, and their product.
    assert counts.backward_peak_bytes == 6 * 4000
    assert counts.forward_peak_bytes == 3 * 4000
    assert counts.forward.moved_bytes == 2 * 2 * 4000


def test_the_head_keeps_its_weight_gradient_and_works_on_a_chunk():
    counts = CountedModel(FAMILIES["llama"].build(), torch.float32, TOKENS, packed=True)
    ends = counts.end_bytes([1])["head"]
    hidden, token = 32, 4
    # The norm keeps its input, what it normalised and the root; the loss keeps the gradient of its input.
    assert ends["saved_bytes"][1] == token * (3 * hidden + 1)
    assert ends["saved_fixed_bytes"][1] == token * hidden * VOCABULARY
    logits = token * 1024 * VOCABULARY
    assert logits < ends["working_fixed_bytes"][1] < 4 * logits
    assert token * hidden < ends["working_bytes"][1] < 8 * token * hidden


def test_a_large_model_is_profiled_from_its_configuration_within_half_a_minute():
    config = LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=8192,
    )
    began = time.process_time()
    profile = ModelProfile.from_config(config, CLUSTER, "bf16")
    assert time.process_time() - began < 30
    weights = [*profile.embedding.weights, *profile.head.weights]
    weights += [weight for kind in profile.layers for weight in profile.kinds[kind].weights]
    assert sum(math.prod(weight.shape) for weight in weights) == 70_553_706_496  # as published for Llama 3 70B
    assert set(profile.kinds[0].times) == {1, 2, 4, 8, 16, 32, 64}
    assert len(profile.kinds) == 1 and len(profile.layers) == 80
    # 2 FLOPs a weight and token at most of the rate, and not less than half of that with what is no product.
    layer = profile.kinds[0].times[1].forward
    least = 2e3 * 855_638_016 / CLUSTER.flops_per_s["bf16"]
    assert least < layer.per_token < 2 * least
    assert profile.assumed["times"].startswith("counted FLOPs")
    assert ModelProfile.from_json(profile.to_json()) == profile


def small_config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )


def test_what_training_has_measured_is_kept_in_json():
    profile = ModelProfile.from_config(small_config(), CLUSTER, "fp32")
    stretch = {name: 1.0 + 0.25 * index for index, name in enumerate(STRETCHES)}
    update = dict(optimizer_ms_per_weight=0.125, optimizer_ms_per_element=2.0**-20, adding_ms_per_element=2.0**-22)
    measured = replace(profile, stretch=stretch, waiting_ms=0.75, **update)
    again = ModelProfile.from_json(measured.to_json())
    assert again == measured != profile
    assert (again.stretch, again.waiting_ms, again.optimizer_ms_per_weight) == (stretch, 0.75, 0.125)


def quick(dtype: str = "fp32", **options) -> ModelProfile:
    return profile_model(empty_model(small_config()), dtype=dtype, device="cpu", tokens=128, seconds=0.5, **options)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("packed", [True, False])
def test_every_part_is_measured_for_every_degree(dtype, packed):
    profile = quick(dtype, packed=packed, max_degree=4)
    assert set(profile.kinds[0].times) == set(profile.embedding.times) == set(profile.head.times) == {1, 2, 4}
    for part in (*profile.kinds, profile.embedding, profile.head):
        for times in part.times.values():
            assert times.forward.ms(128, 128**2) > 0 and times.backward.ms(128, 128**2) > 0
            assert 0 <= times.outside_forward <= times.forward.per_token
    for times in profile.kinds[0].times.values():
        assert 0 <= times.last_forward <= times.forward.per_token
    assert set(profile.kinds[0].saved_bytes) == set(profile.kinds[0].working_bytes)
    assert {(4, True, 1), (2, True, 2), (2, False, 1), (1, False, 4)} <= set(profile.kinds[0].saved_bytes)
    assert profile.optimizer_ms_per_element > 0 < profile.adding_ms_per_element and not profile.assumed
    assert ModelProfile.from_json(profile.to_json()) == profile


def test_measuring_leaves_the_model_and_the_random_numbers_alone():
    model = FAMILIES["gpt2"].build()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    profile_model(model, device="cpu", tokens=32, max_degree=2, seconds=0.2)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_all_ranks_get_the_same_profile():
    texts = run_ranks(lambda: quick().to_json(), 2, timeout=120.0)
    assert texts[0] == texts[1]
    assert set(ModelProfile.from_json(texts[0]).kinds[0].times) == {1, 2}


def test_a_kept_profile_is_used_again_and_a_stale_or_broken_one_is_not(tmp_path, caplog):
    model, options = empty_model(small_config()), dict(device="cpu", tokens=64, max_degree=1, seconds=0.1)
    first = load_or_profile_model(tmp_path, model, **options)
    assert load_or_profile_model(tmp_path, model, **options) == first
    assert not caplog.records
    [path] = tmp_path.iterdir()

    def reason(expected: str, **changes) -> None:
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert load_or_profile_model(tmp_path, model, **options | changes) != first
        assert re.search(expected, caplog.text), caplog.text
        first.to_json(path)

    reason("format fp32 and not bf16", dtype="bf16")
    reason("tokens 64.*and not tokens 32", tokens=32)
    path.write_text(first.to_json().replace(f'"torch": "{torch.__version__}"', '"torch": "1.0"'))
    reason("torch 1.0 and not")
    path.write_text(first.to_json()[:200])
    reason("is not JSON")
    other = small_config()
    other.intermediate_size = 128
    load_or_profile_model(tmp_path, empty_model(other), **options)
    assert len(list(tmp_path.iterdir())) == 2


def change(path: str, value) -> Callable[[dict], None]:
    *owners, last = (int(part) if part.isdigit() else part for part in path.split("."))

    def apply(profile: dict) -> None:
        for owner in owners:
            profile = profile[owner]
        profile[last] = value

    return apply


@pytest.mark.parametrize(
    "path, value, sentence",
    [
        ("version", 2, "use version 1"),
        ("hidden", 0, "outside 1 to"),
        ("dtype", "fp64", "use 'fp32'|use 'bf16'"),
        ("kinds", [], "write [...]"),
        ("layers.0", 7, "give each layer the number of its kind"),
        ("kinds.0.times.0.forward.per_token", -1.0, "write a number of 0 or more"),
        ("kinds.0.times.0.forward.per_token", "1", "write one such as 1.5"),
        ("kinds.0.bytes.0.saved_bytes", None, "write one such as 1.5"),
        ("kinds.0.weights.2.cut", 5, "use 1"),
        ("head.surprise", 1, "remove it or use one of"),
        ("made", {"host": 1}, "write {}"),
    ],
)
def test_what_is_no_profile_is_refused_in_one_sentence(path, value, sentence):
    raw = json.loads(ModelProfile.from_galvatron(GALVATRON).to_json())
    change(path, value)(raw)
    with pytest.raises(ValueError) as refusal:
        ModelProfile.from_json(raw)
    assert any(part in str(refusal.value) for part in sentence.split("|")), refusal.value
    assert "\n" not in str(refusal.value)


def test_galvatrons_figures_come_out_as_they_were_recorded():
    profile = ModelProfile.from_galvatron(GALVATRON)
    recorded = json.loads((GALVATRON / "model" / "computation_profiling_bf16_llama2-7b_all.json").read_text())
    batch = np.arange(1, 13)
    for kind, parts in (("0", profile.kinds), ("other", (profile.embedding, profile.head))):
        total = batch * [recorded[f"layertype_{kind}_bsz{size}_seq2048"] for size in batch]
        line = np.polyval(np.polyfit(batch, total, 1), batch)
        fitted = [sum(part.times[1].forward.ms(size * 2048, 0) for part in parts) for size in batch]
        assert fitted == pytest.approx(line.tolist(), rel=1e-6)
    assert (profile.hidden, profile.heads, profile.head_dim, len(profile.layers)) == (4096, 32, 128, 32)
    layer = profile.kinds[0]
    assert layer.saved_bytes[4, True, 1] * 2048 / 2**20 == pytest.approx(136.885498046875)
    assert layer.saved_bytes[1, False, 4] == layer.saved_bytes[4, True, 1]
    assert layer.recompute_bytes[2, True, 1] * 2048 / 2**20 == pytest.approx(16.0)
    assert profile.head.saved_bytes[8] * 2048 / 2**20 == pytest.approx(85.55889892578125)
    eight = layer.times[8].forward
    assert eight.per_token == layer.times[1].forward.per_token / 8 and eight.fixed == layer.times[1].forward.fixed
    assert ModelProfile.from_json(profile.to_json()) == profile


def test_galvatrons_figures_of_another_model_are_refused(tmp_path):
    with pytest.raises(ValueError, match="has 0 files"):
        ModelProfile.from_galvatron(tmp_path)
    with pytest.raises(ValueError, match="pass the shape= of the model"):
        ModelProfile.from_galvatron(
            GALVATRON, shape=ModelShape.llama(vocab=97, hidden=32, intermediate=40, layers=1, heads=4)
        )
    for path in (GALVATRON / "model").iterdir():
        (tmp_path / path.name.replace("llama2-7b", "unheard-of")).write_bytes(path.read_bytes())
    with pytest.raises(ValueError, match="only those of llama2-7b"):
        ModelProfile.from_galvatron(tmp_path)


def test_models_that_the_runtime_does_not_know_are_refused():
    with pytest.raises(ValueError, match="no rate for 'int8'"):
        ModelProfile.from_config(small_config(), CLUSTER, "int8")
    with pytest.raises(ValueError, match="no folder and no file"):
        ModelProfile.from_config("/nowhere/at/all", CLUSTER)
    with pytest.raises(ValueError, match="use 'bf16'|use 'fp32'"):
        quick("fp16")


def test_the_command_counts_for_a_cluster_and_measures_here(tmp_path, capsys):
    GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=64, vocab_size=96).save_pretrained(tmp_path)
    output = tmp_path / "profile.json"
    arguments = ["profile-model", "--model", str(tmp_path), "--max-degree", "2"]
    assert main([*arguments, "--cluster", "a100-80g", "--output", str(output), "--json"]) == 0
    assert ModelProfile.from_json(capsys.readouterr().out) == ModelProfile.from_json(output)
    measured = ["--device", "cpu", "--dtype", "fp32", "--seconds", "0.2", "--tokens", "32"]
    assert main([*arguments, *measured]) == 0
    text = capsys.readouterr().out
    assert "head, loss" in text and "AdamW" in text
    assert main(["profile-model", "--model", str(tmp_path / "nothing")]) == 1
    assert "no folder and no file" in capsys.readouterr().err


@pytest.mark.parametrize("packed", [True, False])
def test_micro_batches_with_more_tokens_than_positions_are_documents(packed):
    model = FAMILIES["gpt2"].build()  # has an embedding of positions, which ends
    profile = profile_model(model, tokens=256, seconds=0.2, max_degree=1, packed=packed)
    assert profile.max_length < 256
    assert profile.made["longest document"] == f"{profile.max_length} tokens"
