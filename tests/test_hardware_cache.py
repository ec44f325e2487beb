# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""A measured machine is kept, and measured again if the file is another machine's or broken."""

import dataclasses
import logging

import pytest
import torch.distributed as dist

from galvatron_hf import HardwareProfile, load_or_profile_hardware, profile_hardware
from galvatron_hf.profiler import cache
from ranks import run_ranks


QUICK = {"sizes": (4096, 65537), "repetitions": 2}


@pytest.fixture(scope="module")
def own():
    """Measures the machine once for all tests of one process."""
    return profile_hardware(**QUICK)


@pytest.fixture
def counted(monkeypatch, own):
    """Counts how often the machine is measured, and gives what was measured once."""
    calls = []

    def measure(**arguments):
        calls.append(arguments)
        return own

    monkeypatch.setattr(cache, "profile_hardware", measure)
    return calls


def test_what_was_measured_is_read_again(tmp_path, counted, own, caplog):
    folder = tmp_path / "new" / "cache"
    first = load_or_profile_hardware(folder, **QUICK)
    assert first == own
    assert HardwareProfile.from_json(folder / "hardware.json") == first
    assert load_or_profile_hardware(folder, **QUICK) == first
    assert len(counted) == 1 and caplog.text == ""


def _warned(caplog) -> str:
    (record,) = (record for record in caplog.records if record.levelno == logging.WARNING)
    return record.getMessage()


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"version": 1}', "\0"])
def test_a_corrupt_cache_is_measured_anew_and_said(tmp_path, counted, caplog, text):
    (tmp_path / "hardware.json").write_text(text)
    profile = load_or_profile_hardware(tmp_path, **QUICK)
    assert "cannot be used (the" in _warned(caplog) and "\n" not in _warned(caplog)
    assert len(counted) == 1
    assert HardwareProfile.from_json(tmp_path / "hardware.json") == profile


@pytest.mark.parametrize(
    "name", ["hosts", "devices", "cores", "threads", "torch", "galvatron_hf", "backend", "method"]
)
def test_a_profile_of_another_machine_is_not_used(tmp_path, counted, own, caplog, name):
    other = dataclasses.replace(own, made=own.made | {name: "another"})
    other.to_json(tmp_path / "hardware.json")
    load_or_profile_hardware(tmp_path, **QUICK)
    assert f"was made under other circumstances ({name} another and not {own.made[name]})" in _warned(caplog)
    assert len(counted) == 1


@pytest.mark.parametrize("accuracy", ["1%", "5%", "20%", None, "good"])
def test_a_profile_is_used_if_it_is_as_accurate_as_asked_for(tmp_path, counted, own, caplog, accuracy):
    made = {name: value for name, value in own.made.items() if name != "accuracy"}
    kept = dataclasses.replace(own, made=made | ({} if accuracy is None else {"accuracy": accuracy}))
    kept.to_json(tmp_path / "hardware.json")
    used = accuracy in ("1%", "5%")
    assert load_or_profile_hardware(tmp_path, **QUICK, accuracy=0.05) == (kept if used else own)
    assert len(counted) == (0 if used else 1)
    if not used:
        reason = {"20%": "accuracy 20% and not 5%", None: "accuracy unknown and not 5%"}
        assert reason.get(accuracy, "cannot be used (could not convert") in _warned(caplog)


def test_a_profile_of_another_world_is_not_used(tmp_path, counted, own, caplog):
    dataclasses.replace(own, nodes=2).to_json(tmp_path / "hardware.json")
    assert load_or_profile_hardware(tmp_path, **QUICK).nodes == 1
    assert "nodes x devices 2 x 1 and not 1 x 1" in _warned(caplog)


@pytest.mark.parametrize("name", ["file", "x" * 300])  # no folder, and a name no file system takes
def test_a_cache_that_cannot_be_written_is_no_failure(tmp_path, counted, caplog, name):
    (tmp_path / "file").touch()
    assert load_or_profile_hardware(tmp_path / name, **QUICK).world_size == 1
    assert len(counted) == 1
    assert "cannot be kept in" in _warned(caplog)


@pytest.mark.slow
def test_rank_0_alone_reads_and_writes(tmp_path):
    def load():
        own = tmp_path / str(dist.get_rank())
        return load_or_profile_hardware(own, local_world_size=2, **QUICK).to_json()

    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "hardware.json").write_text("broken, and nobody looks")
    first = run_ranks(load, 2)
    second = run_ranks(load, 2)
    assert len({*first, *second}) == 1
    assert (tmp_path / "0" / "hardware.json").read_text() == first[0]
    assert (tmp_path / "1" / "hardware.json").read_text() == "broken, and nobody looks"
