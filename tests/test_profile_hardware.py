# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Measuring the machine, on real ranks; what is tested is the structure of what was measured, never its speed."""

import dataclasses
import json
import logging
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from galvatron_hf import HardwareProfile, load_or_profile_hardware, profile_hardware
from galvatron_hf.cli.main import main
from galvatron_hf.cli.profile_hardware import message_sizes
from galvatron_hf.profiler import cache, compute, hardware, links, machine
from galvatron_hf.profiler.hardware_profile import KINDS, arrangements, wire_share
from galvatron_hf.profiler.links import _call, _own_group, count_steps, measure_links
from ranks import run_ranks


CPU = torch.device("cpu")
SIZES = (4096, 65537)
QUICK = {"sizes": SIZES, "repetitions": 2}


@pytest.fixture(scope="module")
def measured():
    """The profiles of four ranks on two nodes."""
    texts = run_ranks(lambda: profile_hardware(local_world_size=2, **QUICK).to_json(), 4, timeout=120)
    return [HardwareProfile.from_json(text) for text in texts]


def test_ranks_agree(measured):
    assert all(profile == measured[0] for profile in measured)


def test_what_a_step_sends_beside_its_work_takes_time_and_a_part_of_a_message_is_hidden_at_most(measured):
    assert measured[0].step_ms > 0
    assert 0 <= measured[0].exposed_sync <= 1


def test_what_is_computed_between_messages_is_no_part_of_their_time(monkeypatch):
    clock = [0.0]

    def takes(ms: float):
        def run() -> None:
            clock[0] += 1e-3 * ms

        return run

    monkeypatch.setattr(links, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(links, "synchronize", lambda device: None)
    runs = []
    between = SimpleNamespace(
        run=lambda: runs.append(takes(2.0)()), begin=runs.clear, taken_ms=lambda: 2.0 * len(runs)
    )

    def measured(ms: float, transfers: int = 1) -> float:
        trial = links.Trial(kind="send", ranks=2, stride=1, size=4, call=takes(ms), transfers=transfers, calls=20)
        return links._measured(trial, CPU, between)

    assert measured(0.5) == pytest.approx(0.5)
    assert measured(0.5, transfers=2) == pytest.approx(0.25)
    assert measured(0.0) == links._LEAST_MS


def test_every_link_is_there_and_takes_time(measured):
    profile = measured[0]
    assert (profile.nodes, profile.devices_per_node) == (2, 2)
    wanted = [
        (kind, ranks, stride)
        for ranks, stride in ((2, 1), (4, 1), (2, 2))
        for kind in KINDS
        if kind != "send" or ranks == 2
    ]
    assert sorted((link.kind, link.ranks, link.stride) for link in profile.links) == sorted(wanted)
    assert all(ms > 0 for link in profile.links for _, ms in link.points)
    assert all(link.bytes_per_s > 0 and link.latency_ms >= 0 for link in profile.links)


def test_sizes_are_of_the_whole_message_in_whole_elements(measured):
    for link in measured[0].links:
        whole = [4096, 65544 if link.ranks == 2 else 65552]
        parts = link.ranks if link.kind == "all_gather" else 1
        assert [size for size, _ in link.points] == [size // parts for size in whole]


def test_a_prediction_is_an_interpolation_of_what_was_measured(measured):
    profile = measured[0]
    for link in profile.links:
        (small, first), (large, last) = link.points
        assert profile.ms(link.kind, link.ranks, link.stride, small) == pytest.approx(first)
        assert profile.ms(link.kind, link.ranks, link.stride, (small + large) / 2) == pytest.approx((first + last) / 2)


def test_what_gloo_does_not_overlap_is_measured_and_not_promised(measured):
    profile = measured[0]
    assert profile.overlap_slowdown is None
    assert float(profile.made["slowdown of computing"]) >= 1
    assert float(profile.made["slowdown of communicating"]) >= 1
    assert profile.made["backend"] == "gloo"
    assert profile.assumed == {}


def test_one_process_has_no_links():
    profile = profile_hardware(**QUICK)
    assert profile.world_size == 1 and profile.links == () and profile.overlap_slowdown is None
    assert set(profile.flops_per_s) == {"fp32", "bf16"}
    assert profile.made["backend"] == "none"
    assert profile.ms("all_reduce", 1, 1, 100) == 0


def test_ranks_of_a_node_share_its_memory(measured):
    whole = profile_hardware(**QUICK).memory_bytes
    assert measured[0].memory_bytes == whole // 2


def test_calls_do_what_they_are_named():
    def results():
        rank, group, found = dist.get_rank(), _own_group(2, 2), {}
        for kind in KINDS:
            message = torch.arange(4.0) + 10 * rank
            result = _call(kind, message, group)()
            found[kind] = (message if kind == "send" else result).tolist()
        return found

    found = run_ranks(results, 4)
    first, second = [0.0, 1, 2, 3], [20.0, 21, 22, 23]  # of ranks 0 and 2
    assert found[0] == {
        "all_reduce": [20, 22, 24, 26],
        "all_gather": first + second,
        "reduce_scatter": [20, 22],
        "all_to_all": [0, 1, 20, 21],
        "send": first,
    }
    assert found[2]["reduce_scatter"] == [24, 26]
    assert found[2]["all_to_all"] == [2, 3, 22, 23]
    assert found[2]["send"] == first  # what rank 0 sent went there and back
    assert found[1]["all_gather"] == [10, 11, 12, 13, 30, 31, 32, 33]


def test_timing_ends_in_time_and_steps_are_counted():
    def steps():
        told = {}
        for seconds in (0.0, 1e6):
            names = []
            found = measure_links(CPU, SIZES, 3, 0.1, seconds, names.append)
            told[seconds] = names
        return told, len(found)

    told, count = run_ranks(steps, 3)[1]
    assert count == len(list(arrangements(3))) * 4 == 4
    assert len(told[1e6]) == count_steps(3, SIZES, 3)
    assert told[0.0].count("timing links") == count * len(SIZES)


def test_links_of_a_synthetic_machine_are_recovered(monkeypatch):
    """Half as long on all ranks but one, and much longer in one repetition of three: neither counts."""
    repetition = [0]

    def measured(trial, device, between):
        repetition[0] += 1
        truth = 0.25 * trial.ranks + trial.stride + 1e3 * wire_share(trial.kind, trial.ranks) * trial.size / 3e9
        disturbed = 100 if repetition[0] % 3 == 0 else 1
        return truth * disturbed * (1 if dist.get_rank() == 2 else 0.5)

    def fitted():
        monkeypatch.setattr(links, "_measured", measured)
        repetition[0] = 0
        # 28 trials: the third call is another one's in each repetition, and all have one disturbed of three
        return [
            dataclasses.astuple(link) for link in measure_links(CPU, (4096, 1 << 20), 3, 10.0, 1e6, lambda what: None)
        ]

    found = run_ranks(fitted, 4)
    assert found[0] == found[1] == found[2] == found[3]
    for kind, ranks, stride, latency_ms, bytes_per_s, error, points in found[0]:
        assert latency_ms == pytest.approx(0.25 * ranks + stride)
        assert bytes_per_s == pytest.approx(3e9)
        assert error == pytest.approx(0, abs=1e-9) and len(points) == 2


def test_a_measurement_is_of_one_message(monkeypatch):
    now = [0.0]

    def call():
        now[0] += 0.006

    monkeypatch.setattr(links, "synchronize", lambda device: None)
    monkeypatch.setattr(links.time, "perf_counter", lambda: now[0])
    trial = links.Trial(kind="send", ranks=2, stride=1, size=8, call=call, transfers=2, calls=5)
    between = SimpleNamespace(
        run=lambda: now.__setitem__(0, now[0] + 0.004), begin=lambda: None, taken_ms=lambda: 5 * 4.0
    )
    assert links._measured(trial, CPU, between) == pytest.approx(3.0)


def test_a_cpu_that_became_slower_does_not_make_messages_longer(monkeypatch):
    """A run takes 1 ms of the CPU and 2 ms on the wall, then 1.5 and 3."""
    wall, cpu, pace = [0.0], [0.0], [1.0]

    def multiply(*unused, **ignored):
        wall[0] += 2e-3 * pace[0]
        cpu[0] += 1e-3 * pace[0]

    clocks = dict(perf_counter=lambda: wall[0], thread_time=lambda: cpu[0], process_time=lambda: cpu[0])
    monkeypatch.setattr(links, "time", SimpleNamespace(**clocks))
    monkeypatch.setattr(links.torch, "mm", multiply)
    monkeypatch.setattr(links, "synchronize", lambda device: None)
    monkeypatch.setattr(links, "slowest", lambda values, device: values)
    between = links.Between(CPU)
    between.products = 1
    between.measure(100.0)
    assert between.ms == pytest.approx(2.0)
    pace[0] = 1.5
    between.begin()
    between.run(), between.run()
    assert between.taken_ms() == pytest.approx(6.0)
    between.device = torch.device("cuda")  # where a CPU's time says nothing
    assert between.taken_ms() == pytest.approx(4.0)
    between.device = CPU
    trial = links.Trial(
        kind="all_reduce", ranks=2, stride=1, size=8, call=lambda: wall.__setitem__(0, wall[0] + 7e-3), calls=5
    )
    assert links._measured(trial, CPU, between) == pytest.approx(7.0)


@pytest.mark.parametrize(("pace", "exposed"), [(1.0, 0.75), (1.5, 0.75), (0.8, 0.75)])
def test_what_is_exposed_is_what_a_message_adds_to_computing_at_the_cpus_pace_then(monkeypatch, pace, exposed):
    """Products of 10 ms, messages of 8 ms of which three quarters are not hidden; the last run is at another pace."""

    def beside(product, messages, products, reduces, device):
        faster = pace if products and reduces and products > reduces else 1.0
        computed = faster * 10.0 * products
        waited = exposed * 8.0 * reduces if products else 8.0 * reduces
        return computed, computed + waited if reduces else 0.0, computed / 2

    class Products:
        def __init__(self, *unused):
            pass

        def run(self, calls):
            return 10.0 * calls

    monkeypatch.setattr(compute, "_beside", beside)
    monkeypatch.setattr(compute, "_Products", Products)
    monkeypatch.setattr(compute, "slowest", lambda values, device: values)
    found = compute.measure_overlap(CPU, 3, 80.0, lambda what: None)
    assert found["exposed"] == pytest.approx(exposed)


@pytest.mark.parametrize(
    ("quota", "window_ms"),
    [
        ((0.5, 0.01), 150.0),
        ((0.5, 0.04), 160.0),
        ((0.5, 0.07), 210.0),
        ((0.5, 0.1), 200.0),
        ((0.5, 0.002), 60.0),
        ((1.0, 0.1), 60.0),
        (None, 60.0),
    ],
)
def test_a_measurement_lasts_for_many_periods_of_a_quota_or_for_whole_ones(monkeypatch, quota, window_ms):
    monkeypatch.setattr(hardware, "cpu_quota", lambda: quota)
    assert hardware._window_ms(CPU) == pytest.approx(window_ms)


def test_no_longer_message_takes_less():
    assert dict(links._rising([(8, 1.0), (4, 2.0), (16, 3.0)])) == pytest.approx({4: 1.2, 8: 1.2, 16: 3.0})
    assert links._rising([(4, 1.0), (8, 2.0)]) == [(4, 1.0), (8, 2.0)]


def test_arguments_that_measure_nothing_are_refused():
    for arguments, words in [
        ({"local_world_size": 2}, "local_world_size=2 does not divide 1 ranks"),
        ({"local_world_size": 0}, "local_world_size=0 does not divide 1 ranks"),
        ({"sizes": [4096]}, "two different numbers of bytes"),
        ({"sizes": [4096, 0]}, "two different numbers of bytes"),
        ({"repetitions": 0}, "repetitions=0 measures nothing"),
    ]:
        with pytest.raises(ValueError, match=words):
            profile_hardware(**arguments)


# ---- The cache ----


@pytest.fixture
def counted(monkeypatch):
    """How often the machine was measured."""
    calls = []

    def measure(**arguments):
        calls.append(arguments)
        return profile_hardware(**arguments)

    monkeypatch.setattr(cache, "profile_hardware", measure)
    return calls


def test_what_was_measured_is_read_again(tmp_path, counted, caplog):
    folder = tmp_path / "new" / "cache"
    first = load_or_profile_hardware(folder, **QUICK)
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


@pytest.mark.parametrize("name", ["hosts", "devices", "cores", "threads", "torch", "galvatron_hf", "backend"])
def test_a_profile_of_another_machine_is_not_used(tmp_path, counted, caplog, name):
    own = profile_hardware(**QUICK)
    other = dataclasses.replace(own, made=own.made | {name: "another"})
    other.to_json(tmp_path / "hardware.json")
    load_or_profile_hardware(tmp_path, **QUICK)
    assert f"was made under other circumstances ({name} another and not {own.made[name]})" in _warned(caplog)
    assert len(counted) == 1


def test_a_profile_of_another_world_is_not_used(tmp_path, counted, caplog):
    own = profile_hardware(**QUICK)
    dataclasses.replace(own, nodes=2).to_json(tmp_path / "hardware.json")
    assert load_or_profile_hardware(tmp_path, **QUICK).nodes == 1
    assert "nodes x devices 2 x 1 and not 1 x 1" in _warned(caplog)


def test_a_cache_that_cannot_be_written_is_no_failure(tmp_path, caplog):
    (tmp_path / "file").touch()
    assert load_or_profile_hardware(tmp_path / "file", **QUICK).world_size == 1
    assert "cannot be kept in" in _warned(caplog)


def test_rank_0_alone_reads_and_writes(tmp_path, measured):
    def load():
        own = tmp_path / str(dist.get_rank())
        return load_or_profile_hardware(own, local_world_size=2, **QUICK).to_json()

    measured[0].to_json(tmp_path / "1.json")
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "hardware.json").write_text("broken, and nobody looks")
    first = run_ranks(load, 2, timeout=120)
    second = run_ranks(load, 2, timeout=120)
    assert len({*first, *second}) == 1
    assert (tmp_path / "0" / "hardware.json").read_text() == first[0]
    assert (tmp_path / "1" / "hardware.json").read_text() == "broken, and nobody looks"


# ---- What a rank may use ----


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


# ---- Commands ----


def test_env_prints_what_a_report_needs(capsys):
    assert main(["env", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["torch"].startswith("2.") and facts["cores"] >= 1 and facts["gloo"] is True
    assert main(["env"]) == 0
    assert "- transformers: " in capsys.readouterr().out


def test_profile_hardware_of_one_process(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    path = tmp_path / "out.json"
    assert main(["profile-hardware", "--json", "--cpu", "--name", "box", "--output", str(path)]) == 0
    profile = HardwareProfile.from_json(capsys.readouterr().out)
    assert profile == HardwareProfile.from_json(path) and profile.name == "box"
    assert main(["profile-hardware", "--cpu"]) == 0
    assert "matrix products, bf16" in capsys.readouterr().out


def test_message_sizes_are_read_as_people_write_them(capsys):
    assert message_sizes("100, 64KiB,1mib") == [100, 1 << 16, 1 << 20]
    assert main(["profile-hardware", "--sizes", "1MB"]) == 1
    assert "'1MB', which is no number of bytes: write it as 64KiB,1MiB" in capsys.readouterr().err


@pytest.mark.slow
def test_profile_hardware_of_launched_ranks(tmp_path):
    path = tmp_path / "out.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command += ["-m", "galvatron_hf.cli.main", "profile-hardware", "--cpu", "--output", str(path)]
    subprocess.run([*command, "--sizes", "4KiB,64KiB", "--repetitions", "1"], check=True, timeout=240)
    profile = HardwareProfile.from_json(path)
    assert (profile.nodes, profile.devices_per_node, profile.made["backend"]) == (1, 2, "gloo")
    assert len(profile.links) == 5
