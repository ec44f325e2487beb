# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Checks the share of the machine that a rank may use, and the report of it."""

import json

import torch

from galvatron_hf.cli.main import main
from galvatron_hf.utils import machine


CPU = torch.device("cpu")


def _control_groups(monkeypatch, tmp_path, own: str, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = tmp_path / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "own").write_text(own)
    monkeypatch.setattr(machine, "_CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(machine, "_OWN_CGROUPS", tmp_path / "own")


def test_limits_of_control_groups_of_version_1(monkeypatch, tmp_path):
    files = {
        "cpu/cpu.cfs_quota_us": "-1\n",
        "cpu/cpu.cfs_period_us": "100000\n",
        "cpu/job/cpu.cfs_quota_us": "50000\n",
        "cpu/job/cpu.cfs_period_us": "100000\n",
        "memory/a/memory.limit_in_bytes": "5000000\n",
        "memory/a/b/memory.limit_in_bytes": "9223372036854771712\n",
    }
    _control_groups(monkeypatch, tmp_path, "4:memory:/a/b\n3:cpu,cpuacct:/job\n0::/\n", files)
    assert machine.cpu_quota() == (0.5, 0.1)
    assert min(machine.memory_limits()) == 5000000
    assert machine.device_memory_bytes(CPU, 4) == 1250000
    assert machine.identity(CPU)["cores"].endswith(", of which 0.5")


def test_limits_of_control_groups_of_version_2(monkeypatch, tmp_path):
    files = {"a/cpu.max": "200000 50000\n", "a/b/cpu.max": "max 100000\n", "a/b/memory.max": "7000\n"}
    _control_groups(monkeypatch, tmp_path, "0::/a/b\n", files | {"a/memory.max": "max\n"})
    assert machine.cpu_quota() == (4.0, 0.05)
    assert machine.memory_limits() == [7000]


def test_without_limits_there_is_no_quota(monkeypatch, tmp_path):
    _control_groups(monkeypatch, tmp_path, "0::/\n", {})
    assert machine.cpu_quota() is None and machine.memory_limits() == []
    monkeypatch.setattr(machine, "_OWN_CGROUPS", tmp_path / "nothing")
    assert machine.cpu_quota() is None and machine.memory_limits() == []


def test_env_prints_what_a_report_needs(capsys):
    assert main(["env", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["torch"].startswith("2.") and facts["cores"] >= 1 and facts["gloo"] is True
    assert main(["env"]) == 0
    assert "- transformers: " in capsys.readouterr().out
