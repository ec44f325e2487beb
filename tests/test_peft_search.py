# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""What the search knows of adapters and frozen weights: shapes, profiles as JSON, costs, and the commands."""

from __future__ import annotations

import json
from unittest import mock

import pytest
import torch
from peft import get_peft_model

from adapted_models import adapted, lora
from galvatron_hf.cli.main import main
from galvatron_hf.models.lora import inner_model
from galvatron_hf.models.shape import WeightShape
from galvatron_hf.plan import LayerStrategy
from galvatron_hf.planner.cost.weight_costs import weight_costs
from galvatron_hf.profiler.measure.model import config_digest
from galvatron_hf.profiler.profiles.model import ModelProfile
from galvatron_hf.profiler.profiles.presets import hardware_preset
from galvatron_hf.profiler.trace import tracing
from galvatron_hf.profiler.trace.tracing import profile_from_config
from tiny_models import FAMILIES


LARGER = dict(hidden_size=512, intermediate_size=1408, num_hidden_layers=2)  # whose products take most of the time
HARDWARE = hardware_preset("cpu", 1, 4)


def traced(model: torch.nn.Module) -> ModelProfile:
    return profile_from_config(model, HARDWARE, "fp32", length=16, packed=False, max_degree=2)


def test_a_profile_knows_what_is_trained_and_keeps_it_as_json():
    model = adapted(modules_to_save=["lm_head"], layers_to_transform=[0, 2])
    profile = traced(model)
    assert ModelProfile.from_json(profile.to_json()) == profile
    assert profile.layers == (0, 1, 0, 1)
    owners = [*(profile.kinds[kind] for kind in profile.layers), profile.embedding, profile.head]
    weights = [weight for owner in owners for weight in owner.weights]
    for trained in (True, False):
        counted = sum(torch.Size(weight.shape).numel() for weight in weights if weight.trained is trained)
        assert counted == sum(one.numel() for one in model.parameters() if one.requires_grad is trained)


@pytest.mark.slow
def test_frozen_layers_take_less_time_and_adapters_more_than_none():
    plain, frozen, base = (FAMILIES["llama"].build(**LARGER) for _ in range(3))
    frozen.model.layers.requires_grad_(False)
    models = plain, get_peft_model(base, lora()), frozen
    times = [traced(model).kinds[0].times[1].backward.per_token for model in models]
    assert times[0] > times[1] > times[2] > 0
    assert len({config_digest(inner_model(model)) for model in (*models, adapted(), adapted(r=2))}) == 5


def test_costs_of_frozen_weights():
    """Compares with closed forms: bytes at rest, what is reduced, and what the optimizer updates."""
    frozen, trained = WeightShape(shape=(64, 32), trained=False), WeightShape(shape=(4, 32))
    half, sent = WeightShape(shape=(64, 32), trained=False, stored_bytes=2), {}

    def ms(kind: str, ranks: int, stride: int, size: float, factor: str) -> float:
        sent[kind] = size
        return size

    options = dict(ranks=4, element=4, reduced=4, ms=ms, copying_ms=lambda size: 0.0)
    costs = weight_costs([frozen, trained], LayerStrategy(), **options)
    assert sent["all_gather"] == 4 * (64 + 4) * 32 / 4 and sent["reduce_scatter"] == 4 * 4 * 32
    assert costs.state_bytes == (64 * 32 * 4 + 4 * 32 * 16) / 4
    assert (costs.count, costs.elements, costs.largest_bytes) == (1, 32, 4 * 4 * 32)
    assert costs.unsharded_gradient_bytes == costs.reduce_input_bytes == 4 * 4 * 32
    replicated = weight_costs([half, trained], LayerStrategy(sharding="replicate"), **options | dict(element=2))
    assert replicated.state_bytes == 64 * 32 * 2 + 4 * 32 * (16 + 2)  # the trained weight has a copy in bf16


@pytest.mark.slow
def test_the_commands_take_an_adapter(tmp_path, capsys):
    FAMILIES["llama"].build(**LARGER).config.save_pretrained(tmp_path / "model")
    lora().save_pretrained(tmp_path / "lora")
    # On a GPU adapters of so small a model move more bytes than the gradients of its weights take time.
    case = ["--model", str(tmp_path / "model"), "--cluster", "cpu", "--devices-per-node", "2", "--json"]
    case += ["--global-batch", "8", "--seq-length", "16"]

    def found(*more: str) -> dict:
        assert main(["search", *case, *more]) == 0
        return json.loads(capsys.readouterr().out)

    plain, with_adapter = found(), found("--adapter", str(tmp_path / "lora"))
    assert with_adapter["step_ms"] < plain["step_ms"]


def test_a_folder_without_an_adapter_is_refused_before_the_model_is_traced(tmp_path, capsys):
    FAMILIES["llama"].build(**LARGER).config.save_pretrained(tmp_path)
    case = ["--model", str(tmp_path), "--cluster", "cpu", "--global-batch", "8", "--seq-length", "16"]
    with mock.patch.object(tracing, "profile_from_config", side_effect=AssertionError("traced")):
        assert main(["search", *case, "--adapter", str(tmp_path)]) == 1
    assert "has no adapter_config.json" in capsys.readouterr().err
