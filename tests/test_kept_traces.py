# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Profiles of counted models are kept for the next command, and only for the same model and code."""

import os
from importlib.metadata import version
from unittest import mock

import pytest
from transformers import LlamaConfig

from galvatron_hf.cli.main import main
from galvatron_hf.profiler.profiles.model import ModelProfile
from galvatron_hf.profiler.trace import kept_traces, tracing
from galvatron_hf.profiler.trace.kept_traces import kept_trace
from planner_cases import random_model


class Maker:
    """Makes a profile, and counts how often."""

    def __init__(self):
        self.times, self.profile = 0, random_model(0, layers=2)

    def __call__(self) -> ModelProfile:
        self.times += 1
        return self.profile


def test_a_profile_is_made_once_for_the_same_circumstances(tmp_path):
    make, folder = Maker(), tmp_path / "new" / "traces"
    for circumstances, times in (({"length": 8}, 1), ({"length": 8}, 1), ({"length": 16}, 2), ({"length": 8}, 2)):
        assert kept_trace(folder, circumstances, make) == make.profile
        assert make.times == times
    with mock.patch.object(kept_traces, "_source_digest", lambda: "another"):
        kept_trace(folder, {"length": 8}, make)
    assert make.times == 3
    for path in folder.iterdir():
        path.write_text("{")
    assert kept_trace(folder, {"length": 8}, make) == make.profile and make.times == 4
    assert kept_trace(folder, {"length": 8}, make) == make.profile and make.times == 4  # written anew


@pytest.mark.parametrize("package", ["torch", "transformers", "peft"])
def test_another_release_makes_a_new_profile(tmp_path, monkeypatch, package):
    make, release = Maker(), version(package)
    for other, times in ((release, 1), (f"{release}.1", 2), (release, 2)):
        monkeypatch.setattr(
            "importlib.metadata.version", lambda name, other=other: other if name == package else "1.0"
        )
        kept_trace(tmp_path, {"length": 8}, make)
        assert make.times == times


def test_a_path_that_is_too_long_is_no_file_of_a_model(tmp_path, capsys):
    sizes = ["--cluster", "h100", "--global-batch", "8", "--seq-length", "8", "--plan", "ddp"]
    assert main(["estimate", "--model", str(tmp_path / ("x" * 300)), *sizes]) == 1
    assert "is no folder and no file, and no id of the Hub" in capsys.readouterr().err
    (tmp_path / "model.safetensors").write_bytes(bytes(1 << 25))
    assert main(["estimate", "--model", str(tmp_path / "model.safetensors"), *sizes]) == 1
    assert "is too large for a configuration" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_keeps_nothing(tmp_path):
    make, file = Maker(), tmp_path / "file"
    file.write_text("")
    for times in (1, 2):
        assert kept_trace(file / "traces", {}, make) == make.profile
        assert make.times == times


def test_profiles_that_were_not_used_for_longest_make_room(tmp_path):
    make = Maker()
    with mock.patch.object(kept_traces, "MOST_KEPT", 2):
        for number in (1, 2):
            kept_trace(tmp_path, {"number": number}, make)
            for path in tmp_path.iterdir():
                os.utime(path, (path.stat().st_mtime - 100,) * 2)
        kept_trace(tmp_path, {"number": 1}, make)  # used again
        kept_trace(tmp_path, {"number": 3}, make)
        assert make.times == 3 and len(list(tmp_path.iterdir())) == 2
        kept_trace(tmp_path, {"number": 1}, make)
        assert make.times == 3
        kept_trace(tmp_path, {"number": 2}, make)
        assert make.times == 4


def test_the_second_command_about_a_model_does_not_trace_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("GALVATRON_CACHE", str(tmp_path / "cache"))
    config = LlamaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=64
    )
    config.save_pretrained(tmp_path)
    case = ["estimate", "--plan", "ddp", "--model", str(tmp_path), "--cluster", "h100", "--gpus", "2"]
    case += ["--global-batch", "8", "--seq-length", "64", "--json"]
    assert main(case) == 0
    first = capsys.readouterr().out
    with mock.patch.object(tracing, "CountedModel", side_effect=AssertionError("traced")):
        assert main(case) == 0
        assert capsys.readouterr().out == first
        assert main([*case, "--dtype", "fp32"]) == 1
        assert "(AssertionError: traced)" in capsys.readouterr().err
