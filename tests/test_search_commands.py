# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""`galvatron search`, `estimate` and `explain`: what they print, and the sentence in which they refuse."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import LlamaConfig, MistralConfig, Phi3Config

from galvatron_hf.cli.main import main
from galvatron_hf.plan import ParallelPlan, Precision
from galvatron_hf.profiler.profiles.model import ModelProfile
from galvatron_hf.profiler.profiles.presets import hardware_preset
from galvatron_hf.profiler.trace import counted_model
from planner_cases import random_model


DATA = Path(__file__).parent / "data"
FLAGS = ["--galvatron-profiles", str(DATA / "galvatron_profiles"), "--nodes", "1", "--devices-per-node", "8"]
FLAGS += ["--memory-gib", "38", "--global-batch", "64", "--seq-length", "2048"]


def test_search_and_estimate_print_the_same_of_a_plan(capsys, tmp_path, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    path = tmp_path / "plan.json"
    assert main(["search", *FLAGS, "--output", str(path)]) == 0
    printed = capsys.readouterr().out
    rows = FLAGS[FLAGS.index("--global-batch") + 1]
    assert f"parallel_plan={str(path)!r} and global_batch_size={rows}." in printed
    assert "\u2026" not in printed  # a pipe has no width at which a table would be cut
    assert main(["search", *FLAGS, "--json", "--output", str(path)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert main(["estimate", *FLAGS, "--json", "--plan", str(path)]) == 0
    again = json.loads(capsys.readouterr().out)
    assert "overlap_slowdown" in found["assumed"]
    for key in ("samples_per_second", "step_ms", "memory_bytes", "plan", "assumed"):
        assert found[key] == again[key]
    assert found["search_seconds"] > 0 and found["memory_quantum_bytes"] == 1
    assert ParallelPlan.from_json(found["plan"]) == ParallelPlan.from_json(path)
    assert (
        main(["estimate", *FLAGS, "--json", "--plan", str(DATA / "galvatron_plans/main_1x8_38GB_bsz64_chunk8.json")])
        == 0
    )
    theirs = json.loads(capsys.readouterr().out)
    assert theirs["step_ms"] > found["step_ms"] and len(theirs["memory_bytes"]) == 2


def test_a_plan_of_other_number_formats_is_priced_with_a_word(capsys, tmp_path):
    path = tmp_path / "plan.json"
    ParallelPlan.uniform(8, 32, precision=Precision(compute="bf16", master="bf16")).to_json(path)
    assert main(["estimate", *FLAGS, "--json", "--plan", str(path)]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["step_ms"] > 0
    assert '"master": "bf16"' in printed.err and "the prediction is for" in printed.err


@pytest.mark.parametrize(
    "path, reason", [("", "is a folder"), ("none/plan.json", "is in a folder that does not exist")]
)
def test_an_output_that_cannot_be_written_is_refused_before_the_search(capsys, tmp_path, path, reason):
    with pytest.raises(SystemExit) as stopped:
        main(["search", *FLAGS, "--output", str(tmp_path / path)])
    assert stopped.value.code == 2 and reason in capsys.readouterr().err


@pytest.mark.parametrize(
    "given, reason",
    [
        ({"hidden_size": "x"}, "has no configuration that transformers knows"),
        ({"num_attention_heads": 3, "hidden_size": 64}, "has no configuration that transformers knows"),
        ({"num_hidden_layers": 0}, "The model has no layers"),
        ({"num_attention_heads": 0}, "has no configuration that transformers knows"),
        ({"num_key_value_heads": 0}, "no language model for a LlamaConfig (ZeroDivisionError"),
        ({"hidden_act": "nope"}, "no language model for a LlamaConfig (KeyError"),
        ({"rope_scaling": {"type": "nope", "factor": 2}}, "no language model for a LlamaConfig"),
        ({"torch_dtype": "nope"}, "has no configuration that transformers knows"),
        ({"pad_token_id": 99999}, "AssertionError"),
        ({"num_key_value_heads": 3, "num_attention_heads": 4, "hidden_size": 32}, "does not run"),
        ({"vocab_size": 0}, "has no elements"),
        ({"intermediate_size": 0}, "has no elements"),
    ],
)
def test_a_configuration_that_makes_no_model_is_told_in_a_sentence(capsys, tmp_path, given, reason):
    path = tmp_path / "config.json"
    sizes = dict(hidden_size=64, intermediate_size=64, num_attention_heads=4, vocab_size=128)
    path.write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 1, **sizes, **given}))
    flags = ["--model", str(path), "--cluster", "h100", "--seq-length", "64", "--global-batch", "8"]
    assert main(["search", *flags]) == 1
    printed = capsys.readouterr().err
    assert reason in printed and "Traceback" not in printed


def test_flags_that_say_something_else_than_a_profile_are_refused(capsys, tmp_path):
    hardware_preset("cpu", 1, 4).to_json(tmp_path / "hardware.json")
    random_model(0, layers=2).to_json(tmp_path / "model.json")
    profiles = [f"--{kind}-profile={tmp_path / kind}.json" for kind in ("hardware", "model")]
    given = ["search", *profiles, "--seq-length", "8", "--global-batch", "4", "--json"]
    for flag, value, own in (("nodes", "2", "1"), ("devices-per-node", "8", "4"), ("dtype", "bf16", "fp32")):
        assert main([*given, f"--{flag}", value]) == 1
        assert f"--{flag} is {value}, but the profile has {own}: " in capsys.readouterr().err
    assert main([*given, "--nodes", "1", "--devices-per-node", "4", "--dtype", "fp32"]) == 0
    assert json.loads(capsys.readouterr().out)["plan"]["world_size"] == 4


def test_a_tensor_degree_without_figures_is_refused_with_those_that_have_some(capsys, tmp_path):
    hardware_preset("cpu", 1, 3).to_json(tmp_path / "hardware.json")
    random_model(0, layers=2).to_json(tmp_path / "model.json")
    profiles = [f"--{kind}-profile={tmp_path / kind}.json" for kind in ("hardware", "model")]
    assert main(["estimate", *profiles, "--seq-length", "8", "--global-batch", "4", "--plan", "tp3"]) == 1
    message = capsys.readouterr().err
    assert "Layer 0 has tensor 3, and the profile of " in message and "degrees 1, 2" in message
    assert main(["estimate", *profiles, "--seq-length", "8", "--global-batch", "4", "--plan", "ulysses3"]) == 1
    message = capsys.readouterr().err
    assert "has no figures for degree tp1+ulysses3, but for tp1+ulysses1, " in message and ": use one of" in message


def test_steps_of_no_time_and_of_too_much_are_refused(capsys, tmp_path):
    hardware_preset("cpu", 1, 1).to_json(tmp_path / "hardware.json")
    raw = json.loads(random_model(0, layers=2).to_json())
    given = ["search", f"--hardware-profile={tmp_path}/hardware.json", f"--model-profile={tmp_path}/model.json"]
    given += ["--seq-length", "8", "--global-batch", "4", "--json"]
    for factor, reason in ((0.0, "a step of 0 ms"), (1e12, "A step is predicted to take"), (-1.0, "too small")):

        def scaled(value, factor=factor):
            if isinstance(value, list):
                return [scaled(one) for one in value]
            if not isinstance(value, dict):
                return value
            times = ("per_token", "per_square", "fixed", "optimizer_ms_per_element", "optimizer_ms_per_weight")
            return {name: factor * one if name in times else scaled(one) for name, one in value.items()}

        (tmp_path / "model.json").write_text(json.dumps(scaled(raw) | {"adding_ms_per_element": 0.0}))
        assert main(given) == 1
        assert reason in capsys.readouterr().err
    assert main([*given[:-4], "9" * 31, *given[-3:]]) == 1
    assert "is above 1073741824" in capsys.readouterr().err


def test_explain_holds_a_plan_against_the_fastest(capsys, tmp_path):
    plan = DATA / "galvatron_plans" / "main_1x8_38GB_bsz64_chunk8.json"
    assert main(["explain", *FLAGS, "--plan", str(plan), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["alternatives"]["the fastest"]["step_ms"] < found["step_ms"]
    assert "overlap_slowdown" in found["assumed"]
    assert sum(found["step_ms_by_kind"].values()) == pytest.approx(found["step_ms"])
    held = ("state_bytes", "activation_bytes", "working_bytes", "boundary_bytes")
    assert [sum(stage[kind] for kind in held) for stage in found["stages"]] == found["memory_bytes"]
    # The table of a small machine and model.
    hardware_preset("cpu", 1, 4).to_json(tmp_path / "hardware.json")
    random_model(0, layers=2).to_json(tmp_path / "model.json")
    ParallelPlan.uniform(4, 2, pipeline=2, micro_batches=2).to_json(tmp_path / "plan.json")
    small = [f"--{kind}-profile={tmp_path / kind}.json" for kind in ("hardware", "model")]
    small += ["--plan", str(tmp_path / "plan.json"), "--seq-length", "8", "--global-batch", "4"]
    assert main(["explain", *small]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "the fastest" in printed and "bubble" in printed


def test_the_tables_name_what_was_assumed(capsys):
    assert main(["search", *FLAGS, "--compare"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "Predicted, not measured; assumed: backward" in printed and "does not fit" in printed


@pytest.mark.parametrize(
    "flags, sentence",
    [
        (FLAGS[:-6] + ["--memory-gib", "3", "--global-batch", "64", "--seq-length", "2048"], "No plan fits 3.00 GiB"),
        (FLAGS[:6] + FLAGS[8:], "do not contain a device's memory: give --memory-gib"),
        ([*FLAGS, "--cluster", "h100"], "exclude each other: give one of them"),
        (["--global-batch", "8", "--seq-length", "128", "--cluster", "h100"], "No model is given"),
        (["--global-batch", "8", "--seq-length", "128"], "No cluster is given"),
        (["--global-batch", "0", "--seq-length", "128"], "--global-batch 0 counts from 1"),
        ([*FLAGS, "--rounds", "0"], "--rounds 0 is not a number of stages: give 1 or more."),
        ([*FLAGS, "--max-tensor", "0"], "tensor is 0, which is outside"),
        ([*FLAGS, "--max-expert", "0"], "expert is 0, which is outside"),
        ([*FLAGS, "--expert-imbalance", "4:1.3"], "--expert-imbalance 4:1.3 is not DEGREE=X"),
        ([*FLAGS, "--expert-imbalance", "4=0.5"], "expert_imbalance of 4 is 0.5"),
        (
            [*FLAGS, "--pipeline", "3"],
            "pipeline=(3,): 8 devices and 32 layers allow only the pipeline degrees 1, 2, 4, 8",
        ),
        (
            [*FLAGS, "--pipeline", "1", "5"],
            "pipeline=(1, 5): 8 devices and 32 layers allow only the pipeline degrees 1, 2, 4, 8",
        ),
        ([*FLAGS, "--micro-batches", "99"], "micro_batches=(99,): a step of 64 rows has 1 to 64 micro-batches"),
        ([*FLAGS, "--micro-batches", "8", "99"], "micro_batches=(8, 99): a step of 64 rows has 1 to 64 micro-batches"),
        ([*FLAGS, "--micro-batches", "0"], "micro_batches is 0, which is outside"),
        ([*FLAGS, "--dtype", "fp32"], "--dtype is fp32, but the profile has bf16: leave --dtype out"),
        ([*FLAGS, "--memory-gib", "1e-12"], "--memory-gib 1e-12 is not the memory of a device"),
        ([*FLAGS, "--global-batch", str(10**10)], "--global-batch 10000000000 is above"),
        ([*FLAGS, "--tokens", "1e300"], "--tokens 1e+300 is above 1e+18, which is that of no run: give such as 1e12"),
        ([*FLAGS, "--tokens", "1e9", "--price-per-hour", "1e300"], "--price-per-hour 1e+300 is above 1e+06, which is"),
    ],
)
def test_flags_that_do_not_fit_are_told_in_a_sentence(capsys, flags, sentence):
    assert main(["search", *flags]) == 1
    assert sentence in capsys.readouterr().err


def test_nothing_is_cut_in_a_terminal_of_usual_width(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["search", *FLAGS, "--compare"]) == 0
    printed = capsys.readouterr().out
    assert "\u2026" not in printed and max(map(len, printed.splitlines()[:-2])) <= 80


def saved_model(folder: Path, heads: int) -> str:
    config = LlamaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=heads, vocab_size=64
    )
    config.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def long_model(tmp_path):
    return saved_model(tmp_path, heads=4)


def test_rows_are_packed_as_in_training_where_the_family_allows_it(capsys, tmp_path):
    """A window of packed rows is one kernel that computes what is in it; a mask computes all."""
    case = ["estimate", "--plan", "ddp", "--cluster", "h100", "--gpus", "1", "--global-batch", "8", "--json"]
    case += ["--seq-length", "2048"]
    heads = dict(num_attention_heads=4, num_key_value_heads=2)
    sizes = dict(hidden_size=512, intermediate_size=64, num_hidden_layers=2, vocab_size=64, **heads)

    def step_ms(config, *flags: str) -> float:
        config.save_pretrained(tmp_path)
        assert main([*case, "--model", str(tmp_path), *flags]) == 0
        return json.loads(capsys.readouterr().out)["step_ms"]

    windows = MistralConfig(sliding_window=128, **sizes)
    packed = step_ms(windows)
    assert packed == step_ms(windows, "--packed") < step_ms(windows, "--no-packed")
    llama = LlamaConfig(**sizes)
    assert step_ms(llama) == pytest.approx(step_ms(llama, "--no-packed"), rel=0.01)
    assert main([*case, "--model", saved_longrope(tmp_path), "--packed"]) == 1
    assert "--packed is for models whose rows can be documents" in capsys.readouterr().err
    assert main(["search", *FLAGS, "--no-packed"]) == 1
    assert "--no-packed is for a model that is traced" in capsys.readouterr().err


def saved_longrope(folder: Path) -> str:
    """Saves a configuration whose rotary embeddings depend on the longest row, so that rows cannot be packed."""
    factors = dict(short_factor=[1.0] * 8, long_factor=[2.0] * 8)
    rope = dict(rope_type="longrope", original_max_position_embeddings=64, rope_theta=1e4, **factors)
    sizes = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, vocab_size=64)
    Phi3Config(rope_parameters=rope, max_position_embeddings=4096, pad_token_id=0, **sizes).save_pretrained(folder)
    return str(folder)


def test_dynamic_rotary_embeddings_are_traced(capsys, tmp_path, monkeypatch):
    """Up to the positions that the model was made for they are those without scaling, at the same cost."""
    sizes = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, vocab_size=64)
    case = ["estimate", "--plan", "ddp", "--cluster", "h100", "--gpus", "1", "--global-batch", "8", "--no-packed"]
    case += ["--seq-length", "64", "--model", str(tmp_path), "--json"]
    found = []
    for rope in ({"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}, None):
        LlamaConfig(rope_parameters=rope, **sizes).save_pretrained(tmp_path)
        assert main(case) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0]["step_ms"] == found[1]["step_ms"] and found[0]["memory_bytes"] == found[1]["memory_bytes"]
    LlamaConfig(rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}, **sizes).save_pretrained(
        tmp_path
    )
    monkeypatch.setattr(counted_model, "keep_rotary_frequencies", lambda model: None)
    assert main(case) == 1  # as for a family that compares values in another way
    assert "cannot be traced, because its forward depends on values of tensors" in capsys.readouterr().err


@pytest.mark.slow
def test_a_model_profile_of_other_devices_than_the_cluster_is_refused(capsys, tmp_path, long_model):
    counted, rows = str(tmp_path / "profile.json"), ["--global-batch", "8", "--seq-length", "64"]
    assert main(["profile-model", "--model", long_model, "--cluster", "h100", "--output", counted]) == 0
    case = ["search", "--model-profile", counted, "--devices-per-node", "2", *rows, "--json"]
    assert main([*case, "--cluster", "h100"]) == 0
    capsys.readouterr()
    assert main([*case, "--cluster", "rtx4090"]) == 1
    assert (
        "The model profile is of h100, the hardware profile of rtx4090: profile one device" in capsys.readouterr().err
    )
    measured = {name: str(tmp_path / f"{name}.json") for name in ("links", "layers")}
    for name, profile in (
        ("links", hardware_preset("h100", 1, 2)),
        ("layers", ModelProfile.from_json(counted)),
    ):
        replace(profile, made={"devices": f"those of {name}"}).to_json(measured[name])
    case = ["search", "--model-profile", measured["layers"], *rows]
    assert main([*case, "--hardware-profile", measured["links"]]) == 1
    assert "The model profile is of those of layers, the hardware profile of those of links" in capsys.readouterr().err
    assert main([*case, "--cluster", "h100", "--devices-per-node", "2"]) == 0  # a data sheet has names of its own


def test_sums_in_fewer_bits_than_layers_compute_in_are_refused(capsys, long_model):
    case = ["--model", long_model, "--cluster", "h100", "--global-batch", "8", "--seq-length", "64"]
    assert main(["search", *case, "--dtype", "fp32", "--reduce-dtype", "bf16"]) == 1
    assert "--reduce-dtype is bf16, but layers compute in fp32" in capsys.readouterr().err


@pytest.mark.slow
def test_all_devices_may_share_a_layer(capsys, tmp_path, long_model):
    """Uses as many ranks as the heads allow, on two nodes, for a batch of one row."""
    profile = str(tmp_path / "profile.json")
    assert main(["profile-model", "--model", long_model, "--cluster", "h100", "--output", profile]) == 0
    capsys.readouterr()
    case = ["--model-profile", profile, "--cluster", "h100", "--nodes", "2", "--devices-per-node", "2"]
    case += ["--global-batch", "1", "--seq-length", "2048"]
    assert main(["search", *case, "--json"]) == 0
    best = json.loads(capsys.readouterr().out)
    for strategy in ({"ulysses": 4}, {"tensor": 4}):
        path = tmp_path / "plan.json"
        ParallelPlan.uniform(4, 2, **strategy).to_json(path)
        assert main(["estimate", *case, "--plan", str(path), "--json"]) == 0
        assert best["step_ms"] <= json.loads(capsys.readouterr().out)["step_ms"]


@pytest.mark.slow
def test_sixteen_devices_may_share_a_layer(capsys, tmp_path):
    """Uses as many ranks as the heads allow, for a batch of one row of a model that is given by its configuration."""
    case = ["--model", saved_model(tmp_path, heads=16), "--cluster", "h100", "--nodes", "2"]
    case += ["--global-batch", "1", "--seq-length", "2048"]
    assert main(["search", *case, "--json"]) == 0
    best = json.loads(capsys.readouterr().out)
    for strategy in ({"ulysses": 16}, {"tensor": 16}):
        path = tmp_path / "plan.json"
        ParallelPlan.uniform(16, 2, **strategy).to_json(path)
        assert main(["estimate", *case, "--plan", str(path), "--json"]) == 0
        assert best["step_ms"] <= json.loads(capsys.readouterr().out)["step_ms"]
