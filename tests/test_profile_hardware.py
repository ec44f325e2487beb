# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Measuring the machine, on real ranks; what is tested is the structure of what was measured, never its speed."""

import contextlib
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from galvatron_hf import HardwareProfile, profile_hardware
from galvatron_hf.cli.main import main
from galvatron_hf.cli.profile_hardware import message_sizes
from galvatron_hf.profiler.measure import hardware
from galvatron_hf.profiler.measure.links import _call, _own_group, count_steps, measure_links
from galvatron_hf.profiler.measure.rounds import Accuracy
from galvatron_hf.profiler.profiles.hardware import KINDS
from ranks import run_ranks


CPU = torch.device("cpu")
SIZES = (4096, 65537)
QUICK = {"sizes": SIZES, "repetitions": 2}


@pytest.fixture(scope="module")
def measured():
    """Measures on four ranks of two nodes; returns the profile of each rank."""
    texts = run_ranks(lambda: profile_hardware(local_world_size=2, **QUICK).to_json(), 4)
    return [HardwareProfile.from_json(text) for text in texts]


@pytest.mark.slow
def test_ranks_agree(measured):
    assert all(profile == measured[0] for profile in measured)


def test_what_a_step_sends_besides_its_work_takes_time_and_a_part_of_a_message_is_hidden_at_most(measured):
    assert measured[0].step_ms > 0
    assert 0 <= measured[0].exposed_sync <= 1


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
            found = measure_links(CPU, 3, SIZES, Accuracy(least=3, most=3), 0.1, seconds, names.append)
            told[seconds] = names
        return told, len(found)

    told, count = run_ranks(steps, 3)[1]
    assert count == 6  # four of all three ranks, sends to the next and to the one after it
    assert len(told[1e6]) == count_steps(3, 3, SIZES, 3)
    assert told[0.0].count("timing links") == count * len(SIZES)


def test_arguments_that_measure_nothing_are_refused():
    for arguments, words in [
        ({"local_world_size": 2}, "local_world_size=2 does not divide 1 ranks"),
        ({"local_world_size": 0}, "local_world_size=0 does not divide 1 ranks"),
        ({"sizes": [4096]}, "two different numbers of bytes"),
        ({"sizes": [4096, 0]}, "two different numbers of bytes"),
        ({"sizes": [4096, 1 << 60]}, "give messages that fit"),
        ({"repetitions": 0}, "repetitions=0 measures nothing"),
        ({"accuracy": 0.0}, "accuracy is 0.0, which is too small"),
    ]:
        with pytest.raises(ValueError, match=words):
            profile_hardware(**arguments)


def test_the_announced_time_limits_links_alone_and_is_not_zero_for_one_process(monkeypatch):
    """Times in a round of 1 s: 4 windows of products, 10 of overlap, and 1.2 of each trial of links."""
    announced = []

    @contextlib.contextmanager
    def phase(what, at_least, at_most, shown):
        announced.append((at_least, at_most))
        yield

    monkeypatch.setattr(hardware, "phase", phase)
    for name in ("measure_flops", "measure_overlap", "measure_step", "measure_links"):
        monkeypatch.setattr(hardware, name, lambda *arguments: None)
    for ranks, seconds in ((1, 40.0), (4, 1e6), (4, 40.0)):
        sweep = hardware._Sweep(sizes=SIZES, accuracy=Accuracy(most=9), window_ms=1e3, seconds=seconds)
        hardware._measured(CPU, sweep, 1, ranks, False)
    trials = 1.2 * hardware.count_trials(4, 4, SIZES)
    wanted = [(4 * 4, 10 * 4), (4 * (14 + trials), 10 * (14 + trials)), (4 * (14 + trials), 10 * 14 + 40)]
    assert announced == [pytest.approx(pair) for pair in wanted]


# ---- Commands ----


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
    assert "'1MB', which is not a number of bytes: write it as 64KiB,1MiB" in capsys.readouterr().err


@pytest.mark.slow
def test_profile_hardware_of_launched_ranks(tmp_path):
    path = tmp_path / "out.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command += ["-m", "galvatron_hf.cli.main", "profile-hardware", "--cpu", "--output", str(path)]
    subprocess.run([*command, "--sizes", "4KiB,64KiB", "--repetitions", "1"], check=True, timeout=240)
    profile = HardwareProfile.from_json(path)
    assert (profile.nodes, profile.devices_per_node, profile.made["backend"]) == (1, 2, "gloo")
    assert len(profile.links) == 5
