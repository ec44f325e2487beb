# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Model profiles: counted, measured, read from Galvatron's and kept; what is not a profile is refused."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config, LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaMLP

from galvatron_hf.cli.main import main
from galvatron_hf.interop.galvatron.model import read_galvatron_model
from galvatron_hf.models.shape import ModelShape
from galvatron_hf.parallel.layers import parallel_layer as block
from galvatron_hf.profiler import cache
from galvatron_hf.profiler.cache import load_or_profile_model
from galvatron_hf.profiler.measure.cpu_timing import DeviceClock
from galvatron_hf.profiler.measure.model import circumstances, profile_model
from galvatron_hf.profiler.profiles.model import CALIBRATION_FACTORS, ModelProfile
from galvatron_hf.profiler.profiles.presets import hardware_preset
from galvatron_hf.profiler.trace.small_models import empty_model
from galvatron_hf.profiler.trace.tracing import profile_from_config
from planner_cases import random_model
from ranks import run_ranks
from tiny_models import FAMILIES


GALVATRON = Path(__file__).parent / "data" / "galvatron_profiles"
CLUSTER = hardware_preset("h100", 1, 8)


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.mark.slow
@pytest.mark.parametrize("max_degree", [4, pytest.param(64, marks=pytest.mark.slow)])
def test_a_large_model_is_profiled_from_its_configuration(max_degree):
    config = LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=8192,
    )
    profile = profile_from_config(config, CLUSTER, "bf16", max_degree=max_degree)
    weights = [*profile.embedding.weights, *profile.head.weights]
    weights += [weight for kind in profile.layers for weight in profile.kinds[kind].weights]
    assert sum(math.prod(weight.shape) for weight in weights) == 70_553_706_496  # as published for Llama 3 70B
    assert set(profile.kinds[0].times) == {tensor for tensor in (1, 2, 4, 8, 16, 32, 64) if tensor <= max_degree}
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
    profile = random_model(0, layers=2)
    stretch = {name: 1.0 + 0.25 * index for index, name in enumerate(CALIBRATION_FACTORS)}
    update = dict(optimizer_ms_per_weight=0.125, optimizer_ms_per_element=2.0**-20, adding_ms_per_element=2.0**-22)
    measured = replace(
        profile, calibration_factors=stretch, collective_launch_ms=0.75, weights_launch_ms=0.25, **update
    )
    again = ModelProfile.from_json(measured.to_json())
    assert again == measured != profile
    assert again.weights_launch_ms == 0.25
    assert (again.calibration_factors, again.collective_launch_ms, again.optimizer_ms_per_weight) == (
        stretch,
        0.75,
        0.125,
    )


def quick(dtype: str = "fp32", **options) -> ModelProfile:
    return profile_model(empty_model(small_config()), dtype=dtype, device="cpu", tokens=128, seconds=0.5, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype, packed",
    [
        ("fp32", True),
        pytest.param("bf16", False, marks=pytest.mark.slow),
        pytest.param("fp32", False, marks=pytest.mark.slow),
        pytest.param("bf16", True, marks=pytest.mark.slow),
    ],
)
def test_every_part_is_measured_for_every_degree(dtype, packed):
    profile = quick(dtype, packed=packed, max_degree=4)
    assert set(profile.kinds[0].times) == set(profile.embedding.times) == set(profile.head.times) == {1, 2, 4}
    for part in (*profile.kinds, profile.embedding, profile.head):
        for times in part.times.values():
            assert times.forward.ms(128, 128**2) > 0 and times.backward.ms(128, 128**2) > 0
            assert 0 <= times.forward_outside_tp <= times.forward.per_token
    for times in profile.kinds[0].times.values():
        assert 0 <= times.forward_after_last_saved <= times.forward.per_token
    assert set(profile.kinds[0].saved_bytes) == set(profile.kinds[0].working_bytes)
    assert {(4, True, 1), (2, True, 2), (2, False, 1), (1, False, 4)} <= set(profile.kinds[0].saved_bytes)
    assert profile.optimizer_ms_per_element > 0 < profile.adding_ms_per_element and not profile.assumed
    assert ModelProfile.from_json(profile.to_json()) == profile


@pytest.mark.slow
def test_bookkeeping_of_a_checkpoint_is_measured_for_each_layer(monkeypatch):
    """The repeated forward is not part of it. A forward takes 5 ms on this clock, and a checkpoint 20 ms longer."""
    now, forward = [0.0], LlamaMLP.forward

    def slow_forward(self, *args, **kwargs):
        now[0] += 5.0
        return forward(self, *args, **kwargs)

    def slow_checkpoint(*args, **kwargs):
        now[0] += 20.0
        return checkpoint(*args, **kwargs)

    def measured() -> float:
        times = quick(max_degree=2).kinds[0].times
        assert times[1].forward.ms(128, 128**2) == pytest.approx(5.0)
        assert times[1].recompute_fixed == times[2].recompute_fixed
        return times[1].recompute_fixed

    monkeypatch.setattr(DeviceClock, "now", lambda self: now[0])
    monkeypatch.setattr(DeviceClock, "wall_per_cpu", 1.0)
    monkeypatch.setattr(LlamaMLP, "forward", slow_forward)
    assert measured() == 0.0
    monkeypatch.setattr(block, "checkpoint", slow_checkpoint)
    assert measured() == pytest.approx(20)


def test_measuring_leaves_the_model_and_the_random_numbers_alone():
    model = FAMILIES["gpt2"].build()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    profile_model(model, device="cpu", tokens=32, max_degree=2, seconds=0.2)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.slow
def test_all_ranks_get_the_same_profile():
    texts = run_ranks(lambda: quick().to_json(), 2)
    assert texts[0] == texts[1]
    assert set(ModelProfile.from_json(texts[0]).kinds[0].times) == {1, 2}


def test_a_kept_profile_is_used_again_and_a_stale_or_broken_one_is_not(tmp_path, caplog, monkeypatch):
    """Measures once; later measurements only say under which circumstances they were made."""
    model, options = empty_model(small_config()), dict(device="cpu", tokens=64, max_degree=1, seconds=0.1)
    first = load_or_profile_model(tmp_path, model, **options)
    again = []

    def measure(model: PreTrainedModel, **arguments) -> ModelProfile:
        again.append(arguments)
        return replace(first, made=circumstances(model, **arguments) | {"time": f"the {len(again) + 1}th"})

    monkeypatch.setattr(cache, "profile_model", measure)
    assert load_or_profile_model(tmp_path, model, **options) == first
    assert not [record for record in caplog.records if record.name == cache.__name__] and not again
    [path] = tmp_path.iterdir()

    def reason(expected: str, **changes) -> None:
        caplog.clear()
        again.clear()
        with caplog.at_level(logging.WARNING):
            found = load_or_profile_model(tmp_path, model, **options | changes)
        assert found != first and found == ModelProfile.from_json(path)
        assert again == [options | changes]
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
    raw = json.loads(read_galvatron_model(GALVATRON).to_json())
    change(path, value)(raw)
    with pytest.raises(ValueError) as refusal:
        ModelProfile.from_json(raw)
    assert any(part in str(refusal.value) for part in sentence.split("|")), refusal.value
    assert "\n" not in str(refusal.value)


def test_galvatrons_figures_come_out_as_they_were_recorded():
    profile = read_galvatron_model(GALVATRON)
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
        read_galvatron_model(tmp_path)
    with pytest.raises(ValueError, match="pass the shape= of the model"):
        read_galvatron_model(
            GALVATRON, shape=ModelShape.llama(vocab=97, hidden=32, intermediate=40, layers=1, heads=4)
        )
    for path in (GALVATRON / "model").iterdir():
        (tmp_path / path.name.replace("llama2-7b", "unheard-of")).write_bytes(path.read_bytes())
    with pytest.raises(ValueError, match="only those of llama2-7b"):
        read_galvatron_model(tmp_path)


def test_models_that_the_runtime_does_not_know_are_refused():
    with pytest.raises(ValueError, match="no rate for 'int8'"):
        profile_from_config(small_config(), CLUSTER, "int8")
    with pytest.raises(ValueError, match="no folder and no file"):
        profile_from_config("/nowhere/at/all", CLUSTER)
    with pytest.raises(ValueError, match="use 'bf16'|use 'fp32'"):
        quick("fp16")


@pytest.mark.slow
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
    for flag, value in (("--device", "cpu"), ("--accuracy", "0.1"), ("--seconds", "3")):
        assert main([*arguments, "--cluster", "a100-80g", flag, value]) == 1
        assert f"{flag} applies to measuring" in capsys.readouterr().err


@pytest.mark.parametrize("packed", [True, False])
def test_micro_batches_with_more_tokens_than_positions_are_documents(packed):
    model = FAMILIES["gpt2"].build()  # has an embedding of positions, which ends
    profile = profile_model(model, tokens=256, seconds=0.2, max_degree=1, packed=packed)
    assert profile.max_length < 256
    assert profile.made["longest document"] == f"{profile.max_length} tokens"
