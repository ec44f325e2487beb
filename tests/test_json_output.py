# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""JSON that commands print has no NaN and no infinities, which other languages cannot read: they are null."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from galvatron_hf.cli import env
from galvatron_hf.cli.main import main
from galvatron_hf.planner.report.throughput import Throughput
from galvatron_hf.profiler.profiles.presets import hardware_preset
from planner_cases import random_model


def strictly(text: str) -> Any:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.fixture
def case(tmp_path) -> list[str]:
    """Returns the flags of a small case on devices of a preset."""
    random_model(0, layers=2).to_json(tmp_path / "model.json")
    return [
        f"--model-profile={tmp_path / 'model.json'}",
        "--seq-length",
        "8",
        "--global-batch",
        "4",
        "--tokens",
        "1e9",
    ]


@pytest.mark.parametrize("command", ["search", "estimate", "explain", "rent"])
def test_predictions(command, case, tmp_path, capsys, monkeypatch):
    hardware_preset("cpu", 1, 2).to_json(tmp_path / "hardware.json")
    offer = {"name": "an offer", "cluster": "cpu", "devices_per_node": 2, "price_per_hour": 1.0}
    (tmp_path / "offers.json").write_text(json.dumps([offer]))
    where = ["--offers", str(tmp_path / "offers.json")] if command == "rent" else []
    where = where or [f"--hardware-profile={tmp_path / 'hardware.json'}"]
    plan = ["--plan", "ddp"] if command in ("estimate", "explain") else []
    monkeypatch.setattr(Throughput, "days", lambda self, tokens: math.inf)
    monkeypatch.setattr(Throughput, "device_hours", lambda self, tokens: math.nan)
    assert main([command, *case, *where, *plan, "--json"]) == 0
    found = strictly(capsys.readouterr().out)
    found = found["offers"][0] if command == "rent" else found
    assert found["days"] is None is found["device_hours"] and found["step_ms"] > 0


def test_pictures(tmp_path: Path, capsys):
    """The error of a prediction that is so far off is infinite."""
    cases = {
        "name": "odd",
        "cases": [{"predicted_ms": 1e200, "measured_ms": 1e-200}, {"predicted_ms": 2, "measured_ms": 4}],
    }
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    picture = str(tmp_path / "picture.png")
    assert main(["plot", "accuracy", str(tmp_path / "cases.json"), "--output", picture, "--json"]) == 0
    assert None in _leaves(strictly(capsys.readouterr().out))


def test_figures_of_a_dataset(tmp_path: Path):
    """A row that takes no time has an infinite speed."""
    (tmp_path / "lengths").write_text("5\n7\n" * 8)
    written = tmp_path / "figures.json"
    options = ["--cost", "1e-320,0,0", "--batch-size", "4", "--ranks", "2", "--json", str(written)]
    assert main(["data", str(tmp_path / "lengths"), *options]) == 0
    modes = strictly(written.read_text())["modes"]
    assert {mode["useful_tokens_per_second"] for mode in modes} == {None}


def test_the_environment(capsys, monkeypatch):
    monkeypatch.setattr(env, "environment", lambda: {"memory GiB": math.inf, "gpus": [math.nan]})
    assert main(["env", "--json"]) == 0
    assert strictly(capsys.readouterr().out) == {"memory GiB": None, "gpus": [None]}


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for one in value.values() for leaf in _leaves(one)]
    if isinstance(value, list):
        return [leaf for one in value for leaf in _leaves(one)]
    return [value]
