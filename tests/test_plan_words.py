# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Plans in words: what they mean, on the command line and for the Trainer."""

import json
from dataclasses import replace

import pytest
from transformers import LlamaConfig

from galvatron_hf import ParallelPlan
from galvatron_hf.cli.main import main
from galvatron_hf.plan import LayerStrategy
from galvatron_hf.plan.plan_words import PlanWords, check_is_plan, words_of
from galvatron_hf.profiler.profiles.presets import hardware_preset
from planner_cases import random_model
from tiny_models import FAMILIES
from trainer_runs import on_ranks, trainer


MEANINGS = {
    "ddp": dict(sharding="replicate"),
    "zero2": dict(sharding="zero2"),
    "zero3": dict(sharding="zero3"),
    "TP4": dict(tensor=4, sharding="replicate"),
    "tp4+sp+zero3": dict(tensor=4, megatron_sp=True, sharding="zero3"),
    "ulysses2+cp2": dict(ulysses=2, context=2, sharding="replicate"),
    "tp4 + pp2": dict(tensor=4, pipeline=2, sharding="replicate"),
    "pp4+mb8+zero2+recompute": dict(pipeline=4, micro_batches=8, sharding="zero2", recompute="full"),
    "ep2+zero3": dict(expert=2, sharding="zero3"),
}


@pytest.mark.parametrize("text", MEANINGS)
def test_words_are_a_uniform_plan(text):
    stacks = {"decoder": 8}
    plan = ParallelPlan.uniform(8, stacks, **MEANINGS[text])
    words = PlanWords.from_text(text)
    assert words.plan(8, stacks) == plan
    count = MEANINGS[text].get("micro_batches", 3)
    assert words.plan(8, stacks, 3) == replace(plan, micro_batches=count)


@pytest.mark.parametrize("text", ["", "plan.json", "tp", "tp4+foo", "zero4", "tp4-pp2", '{"version": 1}', "tp4++pp2"])
def test_other_texts_are_no_words(text):
    assert PlanWords.from_text(text) is None


@pytest.mark.parametrize(
    "text, reason",
    [("ddp+zero3", "says sharding twice"), ("tp2+tp4", "says tensor twice"), ("sp+zero3", "sp, which is for tensor")],
)
def test_words_that_exclude_each_other_are_refused(text, reason):
    with pytest.raises(ValueError, match=reason):
        PlanWords.from_text(text)


def test_a_text_that_is_nothing_is_told_so(tmp_path, monkeypatch):
    (tmp_path / "plan.json").write_text("{}")
    for text in ("tp4+pp2", str(tmp_path / "plan.json"), '{"version": 1}'):
        check_is_plan(text)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ddp").mkdir()  # such as an output folder
    check_is_plan("ddp")
    with pytest.raises(ValueError, match="'zero4' is no file, and not made of ddp, zero2"):
        check_is_plan("zero4")


def test_a_plan_in_one_line():
    for text in ("tp4+sp+zero3", "ulysses2+zero2+recompute", "ep2+ddp"):
        plan = PlanWords.from_text(text).plan(8, {"decoder": 8}, 2)
        assert words_of(plan) == f"mb2, {text}"
    layers = (LayerStrategy(tensor=2, shard_degree=2), LayerStrategy(tensor=2, shard_degree=2), *[LayerStrategy()] * 2)
    plan = ParallelPlan(world_size=8, stacks={"decoder": 4}, layers=layers, micro_batches=4)
    assert words_of(plan) == "mb4, 2 x tp2+zero3/2, 2 x zero3"
    rounds = ParallelPlan.uniform(2, 4, pipeline=2, micro_batches=4)
    assert words_of(rounds) == "pp2, mb4, zero3"


# ---- The command line ----


@pytest.fixture
def case(tmp_path) -> list[str]:
    hardware_preset("cpu", 1, 4).to_json(tmp_path / "hardware.json")
    random_model(0, layers=4).to_json(tmp_path / "model.json")
    files = [f"--{kind}-profile={tmp_path / kind}.json" for kind in ("hardware", "model")]
    return [*files, "--seq-length", "8", "--global-batch", "8", "--json"]


def test_the_commands_take_words_with_the_fastest_micro_batches(case, tmp_path, capsys, monkeypatch):
    def step_ms(plan: str) -> float:
        assert main(["estimate", *case, "--plan", plan]) == 0
        return json.loads(capsys.readouterr().out)["step_ms"]

    counted = {count: step_ms(f"pp2+zero2+mb{count}") for count in (1, 2, 4, 8)}
    assert step_ms("pp2+zero2") == min(counted.values()) < max(counted.values())
    path = tmp_path / "plan.json"
    ParallelPlan.uniform(4, 4, pipeline=2, micro_batches=4, sharding="zero2").to_json(path)
    assert step_ms(str(path)) == counted[4]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "zero3").mkdir()
    assert step_ms("zero3") > 0
    assert main(["estimate", *case, "--plan", "zero4"]) == 1
    assert "'zero4' is no file" in capsys.readouterr().err
    assert main(["estimate", *case, "--plan", "tp3"]) == 1
    assert "tensor" in capsys.readouterr().err


def test_explain_shows_and_writes_a_faster_plan(case, tmp_path, capsys):
    path = tmp_path / "faster.json"
    flags = ["explain", *case[:-1], "--plan", "pp4+mb1+recompute", "--output", str(path)]
    assert main(flags) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "times as fast (predicted)" in printed
    assert main(["estimate", *case, "--plan", "pp4+mb1+recompute"]) == 0
    slow = json.loads(capsys.readouterr().out)["step_ms"]
    assert main(["estimate", *case, "--plan", str(path)]) == 0
    assert json.loads(capsys.readouterr().out)["step_ms"] < slow


def test_all_devices_are_given_at_once(tmp_path, capsys):
    sizes = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, vocab_size=256)
    LlamaConfig(**sizes).save_pretrained(tmp_path)
    flags = ["estimate", "--model", str(tmp_path), "--cluster", "h100", "--seq-length", "128", "--global-batch", "64"]
    found = []
    for size in (["--gpus", "16"], ["--nodes", "2"], ["--gpus", "16", "--devices-per-node", "8"]):
        assert main([*flags, *size, "--plan", "ddp", "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out)["step_ms"])
    assert len(set(found)) == 1
    refusals = {
        ("--gpus", "12"): "does not fill machines of 8 devices: give 8",
        ("--gpus", "8", "--nodes", "2"): "leave --nodes out",
        ("--gpus", "0"): "--gpus 0 counts from 1",
        ("--nodes", "100000"): "no plan for so many is searched",
    }
    for size, sentence in refusals.items():
        assert main([*flags, *size, "--plan", "ddp"]) == 1
        assert sentence in capsys.readouterr().err


# ---- The Trainer ----


def test_the_trainer_takes_words(tmp_path):
    def work() -> ParallelPlan:
        made = trainer(tmp_path, "tp2+sp+mb2", model=FAMILIES["llama"].build(), options=dict(max_steps=1))
        made.train()
        return made.parallel.plan

    layers = {"decoder": FAMILIES["llama"].build().config.num_hidden_layers}
    for plan in on_ranks(work, 2):
        expected = PlanWords.from_text("tp2+sp").plan(2, layers, 2)
        assert replace(plan, precision=None, meta={}) == expected


def test_words_need_the_model(tmp_path):
    with pytest.raises(ValueError, match="a plan in words is made for the model's layers"):
        trainer(tmp_path, "zero3", model_init=FAMILIES["llama"].build)
    with pytest.raises(ValueError, match="parallel_plan='zero4': 'zero4' is no file"):
        trainer(tmp_path, "zero4", model=FAMILIES["llama"].build())
