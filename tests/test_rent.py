# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""What a predicted step means in tokens/s, MFU, days and a price, and `galvatron rent`."""

import json
from dataclasses import replace

import pytest
from transformers import LlamaConfig, MixtralConfig

from galvatron_hf.cli.main import main
from galvatron_hf.cli.rent import days_of
from galvatron_hf.plan import ParallelPlan, Precision
from galvatron_hf.planner.cost.workload import Workload
from galvatron_hf.planner.report.throughput import model_flops, throughput_of
from galvatron_hf.profiler.profiles.presets import hardware_preset
from galvatron_hf.profiler.trace.tracing import profile_from_config


SMALL = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, vocab_size=256)
BF16 = Precision(compute="bf16")
OFFERS = [
    {"name": "fast", "cluster": "h100", "nodes": 1, "devices_per_node": 2, "price_per_hour": 9.0},
    {"name": "slow", "cluster": "a100-80g", "nodes": 1, "devices_per_node": 2, "price_per_hour": 0.5},
]


def traced(config):
    return profile_from_config(config, hardware_preset("h100", 1, 1), length=128, packed=False, max_degree=1)


@pytest.mark.parametrize("tied", [False, True])
def test_model_flops_are_six_for_each_weight_and_the_scores(tied):
    model = traced(LlamaConfig(**SMALL, num_key_value_heads=2, tie_word_embeddings=tied))
    weights = 2 * (64 * 64 + 2 * 32 * 64 + 64 * 64 + 3 * 64 * 96) + 64 * 256  # without norms and embedding
    work = Workload(rows=8, length=128, precision=BF16)
    assert model_flops(model, work) == 6 * weights * 8 * 128 + 2 * 12 * 64 * 8 * 128**2


def test_experts_count_as_often_as_a_token_chooses_them():
    model = traced(MixtralConfig(**SMALL, num_key_value_heads=4, num_local_experts=4, num_experts_per_tok=2))
    weights = 2 * (4 * 64 * 64 + 2 * 3 * 64 * 96 + 4 * 64) + 64 * 256  # attention, two experts, router
    work = Workload(rows=8, length=128, precision=BF16)
    assert model_flops(model, work) == 6 * weights * 8 * 128 + 2 * 12 * 64 * 8 * 128**2


def test_a_pace_is_told_in_tokens_days_hours_and_a_price():
    model, work = traced(LlamaConfig(**SMALL)), Workload(rows=100, length=128, precision=BF16)
    pace = throughput_of(hardware_preset("h100", 2, 8), model, work, step_ms=64.0)
    assert (pace.tokens_per_second, pace.tokens_per_second_and_device) == (200_000, 12_500)
    assert pace.mfu == pytest.approx(model_flops(model, work) / 0.064 / (16 * 989e12))
    tokens = 200_000 * 86_400 * 2.5
    assert (pace.days(tokens), pace.device_hours(tokens)) == (2.5, 2.5 * 24 * 16)
    run = "4.32e+10 tokens: 2.5 days, 960 device-hours, 1,920 at 2 an hour (predicted, without interruptions)"
    assert pace.lines(tokens, 2.0)[1] == run and pace.lines() == pace.lines(tokens)[:1]
    short = "2e+06 tokens: 0.00012 days, 0.044 device-hours, 0.089 at 2 an hour (predicted, without interruptions)"
    assert pace.lines(2e6, 2.0)[1] == short
    assert pace.lines()[0] == f"200,000 tokens/s, 12,500 a device, {pace.mfu:.0%} MFU (predicted)"
    values = pace.values(tokens, 2.0)
    assert (values["days"], values["device_hours"], values["price"]) == (2.5, 960, 1920)
    assert "days" not in pace.values() and "price" not in pace.values(tokens)
    assert throughput_of(hardware_preset("cpu", 1, 2), model, work, 64.0).mfu is None
    unknown = replace(hardware_preset("h100", 1, 2), name="my machine", made={})
    assert throughput_of(unknown, model, work, 64.0).mfu is None
    measured = replace(unknown, name="NVIDIA A100-SXM4-80GB")
    assert throughput_of(measured, model, work, 64.0).mfu == pytest.approx(
        model_flops(model, work) / 0.064 / (2 * 312e12)
    )


@pytest.fixture
def flags(tmp_path) -> list[str]:
    LlamaConfig(**SMALL).save_pretrained(tmp_path / "model")
    (tmp_path / "offers.json").write_text(json.dumps(OFFERS))
    names = ["--model", str(tmp_path / "model"), "--offers", str(tmp_path / "offers.json"), "--seq-length", "128"]
    return ["rent", *names, "--global-batch", "64"]


def test_the_cheapest_offer_in_time_is_found(flags, tmp_path, capsys):
    assert main([*flags, "--tokens", "1e12", "--json", "--output", str(tmp_path / "plan.json")]) == 0
    found = json.loads(capsys.readouterr().out)
    fast, slow = found["offers"]
    assert found["cheapest"] == "slow" and fast["days"] < slow["days"] and fast["price"] > slow["price"]
    for offer, one in zip(OFFERS, found["offers"], strict=True):
        assert one["price"] == pytest.approx(one["days"] * 24 * 2 * offer["price_per_hour"])
        assert one["days"] == pytest.approx(1e12 / (64 * 128 / one["step_ms"] * 1e3) / 86_400)
    assert ParallelPlan.from_json(tmp_path / "plan.json").world_size == 2
    between = f"{24 * (fast['days'] + slow['days']) / 2:.6f}h"
    assert main([*flags, "--tokens", "1e12", "--deadline", between]) == 0
    printed = capsys.readouterr().out
    assert "fast is the cheapest in time" in printed and "(late)" in printed
    assert main([*flags, "--tokens", "1e12", "--deadline", f"{24 * fast['days'] / 2:.6f}h", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["cheapest"] is None


def test_an_offer_without_memory_has_no_plan(flags, capsys):
    assert main([*flags, "--tokens", "1e9", "--memory-gib", "0.0001", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["cheapest"] is None and all("No plan fits" in one["no_plan"] for one in found["offers"])


def test_names_of_offers_are_shown_as_they_are(flags, tmp_path, capsys):
    """A console reads words in square brackets as styles."""
    names = ["[bold]a[/]", "[/red] 50% $ <b>"]
    offers = [offer | {"name": name} for offer, name in zip(OFFERS, names, strict=True)]
    (tmp_path / "offers.json").write_text(json.dumps(offers))
    assert main([*flags, "--tokens", "1e9"]) == 0
    printed = capsys.readouterr().out
    assert " 0 for " not in printed and " 0.0 days" not in printed
    assert printed.count(names[0]) == 1 and printed.count(names[1]) == 2


@pytest.mark.parametrize(
    "more, sentence",
    [
        ([], "give its length, such as --tokens 1e12"),
        (["--tokens", "-1"], "--tokens -1 is not a number above 0"),
        (["--tokens", "1e9", "--deadline", "soon"], "--deadline soon is not a time"),
    ],
)
def test_flags_that_do_not_fit_are_told_in_a_sentence(flags, more, sentence, capsys):
    assert main([*flags, *more]) == 1
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--nodes", "--cluster", "--hardware-profile", "--price-per-hour"])
def test_offers_alone_name_devices_and_prices(flags, flag, capsys):
    with pytest.raises(SystemExit):
        main([*flags, "--tokens", "1e9", flag, "2"])
    assert f"unrecognized arguments: {flag}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text, sentence",
    [
        ("{", "is not JSON"),
        ("[]", "not a list with something in it"),
        ('{"name": "a"}', "not a list"),
        ('[{"name": "a", "cluster": "h100"}]', "price_per_hour"),
        ('[{"name": "a", "cluster": "h100", "price_per_hour": 0}]', "offers[0].price_per_hour"),
        ('[{"name": "a", "cluster": "h100", "price_per_hour": 1, "nodes": 0}]', "offers[0].nodes"),
        ('[{"name": "a", "cluster": "h900", "price_per_hour": 1}]', "h900"),
        ('[{"name": "a", "cluster": "a100", "price_per_hour": 1}]', "use 'a100-40g'"),
        ('[{"name": 3, "cluster": "h100", "price_per_hour": 1}]', "offers[0].name is 3"),
        ('[{"name": "a", "cluster": "h100", "price_per_hour": 1, "prize": 1}]', "prize"),
        ("[3]", "offers[0]"),
    ],
)
def test_broken_offers_are_told_in_a_sentence(flags, tmp_path, text, sentence, capsys):
    (tmp_path / "offers.json").write_text(text)
    assert main([*flags, "--tokens", "1e9"]) == 1
    assert sentence in capsys.readouterr().err


def test_times_are_hours_days_or_weeks():
    assert [days_of(text) for text in ("36h", "30d", "1.5w")] == [1.5, 30.0, 10.5]
