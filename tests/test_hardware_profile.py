# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Hardware profiles: JSON, what is refused, Galvatron's own figures, presets."""

import json
import math
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from galvatron_hf.interop.galvatron.hardware import read_galvatron_hardware
from galvatron_hf.profiler.profiles.hardware import KINDS, HardwareProfile, Link, arrangements, wire_share
from galvatron_hf.profiler.profiles.presets import PRESETS, hardware_preset


GALVATRON = Path(__file__).parent / "data" / "galvatron_profiles" / "hardware"
MIB = 1 << 20


def _link(**changes) -> Link:
    return Link(**{"kind": "all_reduce", "ranks": 2, "stride": 1, "latency_ms": 0.5, "bytes_per_s": 1e9} | changes)


def _profile(**changes) -> HardwareProfile:
    values = {
        "name": "two nodes",
        "nodes": 2,
        "devices_per_node": 4,
        "memory_bytes": 1 << 30,
        "flops_per_s": {"fp32": 1e12},
        "links": (_link(), _link(stride=4, latency_ms=2.0, points=((1024, 2.5), (4096, 3.0)))),
        "overlap_slowdown": 1.2,
        "assumed": {"memory_bytes": "data sheet"},
        "made": {"hosts": "a, b"},
    }
    return HardwareProfile(**values | changes)


# ---- JSON ----

_positive = st.floats(min_value=1e-300, max_value=1e300)
_text = st.dictionaries(st.text(max_size=8), st.text(max_size=8), max_size=3)


@st.composite
def _profiles(draw):
    nodes, devices = draw(st.integers(1, 5)), draw(st.integers(1, 9))
    shapes = [
        (kind, ranks, stride)
        for ranks, stride in arrangements(nodes * devices)
        for kind in KINDS
        if kind != "send" or ranks == 2
    ]
    chosen = draw(st.lists(st.sampled_from(shapes), unique=True)) if shapes else []
    links = []
    for kind, ranks, stride in chosen:
        sizes = sorted(draw(st.sets(st.integers(1, 2**40), max_size=4)))
        links.append(
            Link(
                kind=kind,
                ranks=ranks,
                stride=stride,
                latency_ms=draw(st.floats(0, 1e300)),
                bytes_per_s=draw(_positive),
                error=draw(st.floats(0, 1e300)),
                points=tuple((size, draw(_positive)) for size in sizes),
            )
        )
    return HardwareProfile(
        name=draw(st.text(min_size=1)),
        nodes=nodes,
        devices_per_node=devices,
        memory_bytes=draw(st.integers(1, 2**50)),
        flops_per_s=draw(st.dictionaries(st.text(max_size=8), _positive, max_size=3)),
        links=tuple(links),
        overlap_slowdown=draw(st.none() | st.floats(1, 1e300)),
        exposed_sync=draw(st.floats(0, 1)),
        step_ms=draw(st.floats(0, 1e300)),
        hides_gathers=draw(st.booleans()),
        assumed=draw(_text),
        made=draw(_text),
    )


@given(_profiles())
def test_what_is_written_is_read_again(profile):
    text = profile.to_json()
    assert HardwareProfile.from_json(text) == profile
    assert HardwareProfile.from_json(json.loads(text)) == profile
    assert HardwareProfile.from_json(text).to_json() == text


def test_a_file_holds_what_the_text_says(tmp_path):
    path = tmp_path / "hardware.json"
    text = _profile().to_json(path)
    assert path.read_text() == text
    assert HardwareProfile.from_json(path) == HardwareProfile.from_json(str(path)) == _profile()


def _broken(name, value):
    return lambda raw: raw | {name: value}


def _broken_link(name, value):
    return lambda raw: raw | {"links": [raw["links"][0] | {name: value}]}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda raw: raw | {"bandwith": 1}, "the hardware profile has the unknown field 'bandwith'"),
        (lambda raw: raw | {"memory_byte": 1}, "did you mean 'memory_bytes'"),
        (lambda raw: {k: v for k, v in raw.items() if k != "nodes"}, "has no field 'nodes'"),
        (_broken("version", 2), "version is 2, which this release cannot read"),
        (_broken("version", True), "version is True"),
        (_broken("name", ""), "name is '', which is not a word"),
        (_broken("nodes", 0), "nodes is 0, which is outside 1"),
        (_broken("devices_per_node", 1.5), "devices_per_node is 1.5, which is not an integer"),
        (_broken("memory_bytes", -1), "memory_bytes is -1"),
        (_broken("memory_bytes", True), "memory_bytes is True"),
        (_broken("flops_per_s", {"fp32": 0}), "flops_per_s['fp32'] is 0, which is too small"),
        (_broken("flops_per_s", {"fp32": "fast"}), "flops_per_s['fp32'] is 'fast', which is not a finite number"),
        (_broken("flops_per_s", [1e12]), "flops_per_s is [1000000000000.0], which is not an object"),
        (_broken("overlap_slowdown", 0.9), "overlap_slowdown is 0.9, which is too small: write a number of 1 or more"),
        (_broken("assumed", {"links": 3}), "assumed['links'] is 3, which is not text"),
        (_broken("made", "today"), "made is 'today', which is not an object"),
        (_broken("links", {}), "links is {}, which is not a list"),
        (lambda raw: raw | {"links": [5]}, "links[0] is 5, which is not an object"),
        (lambda raw: raw | {"links": raw["links"][:1] * 2}, "all_reduce over 2 ranks with stride 1, is there twice"),
        (_broken_link("kind", "broadcast"), "links[0]: kind is 'broadcast', which is not one of all_reduce"),
        (_broken_link("ranks", 1), "links[0]: ranks is 1, which is outside 2"),
        (_broken_link("stride", 8), "stride 8, reaches beyond the 8 ranks"),
        (_broken_link("latency_ms", -0.1), "links[0]: latency_ms is -0.1, which is too small"),
        (_broken_link("latency_ms", 10**400), "which is not a finite number"),
        (_broken_link("bytes_per_s", 0), "links[0]: bytes_per_s is 0, which is too small: write a number above 0"),
        (_broken_link("error", None), "links[0]: error is None, which is not a finite number"),
        (_broken_link("points", 3), "links[0]: points is 3, which is not a list"),
        (_broken_link("points", [[1, 2, 3]]), "points has [1, 2, 3], which is not a pair"),
        (_broken_link("points", [[4, 1.0], [4, 2.0]]), "the bytes of a point is 4, which is outside 5"),
        (_broken_link("points", [[4, 0.0]]), "the ms of a point is 0.0, which is too small"),
        (_broken_link("speed", 3), "links[0] has the unknown field 'speed'"),
    ],
)
def test_wrong_values_are_one_sentence(change, words):
    raw = change(json.loads(_profile().to_json()))
    with pytest.raises(ValueError) as refusal:
        HardwareProfile.from_json(raw)
    message = str(refusal.value)
    assert words in message
    assert "\n" not in message and len(message) < 300


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not JSON"),
        ('{"version": NaN}', "holds NaN"),
        ('{"nodes": 1, "nodes": 2}', "has the field 'nodes' twice"),
        ("no_such_file.json", "cannot be opened (no such file or directory)"),
    ],
)
def test_broken_sources_are_one_sentence(text, words):
    with pytest.raises(ValueError, match=re.escape(words)) as refusal:
        HardwareProfile.from_json(text)
    assert str(refusal.value).startswith("the hardware profile")


# ---- Links ----


def test_wire_bytes_are_those_of_docs_communication():
    # 4 ranks, input of 12 bytes each: what a ring sends through each rank's wire
    sent = {"all_reduce": 18, "all_gather": 36, "reduce_scatter": 9, "all_to_all": 9, "send": 12}
    assert {kind: 12 * wire_share(kind, 4) for kind in KINDS} == sent


def test_time_without_points_is_latency_and_wire_bytes():
    link = _link(kind="all_gather", ranks=4, latency_ms=2.0, bytes_per_s=3e6)
    assert link.ms(1000) == pytest.approx(2.0 + 1e3 * 3 * 1000 / 3e6)
    assert link.ms(np.array([0, 1000])) == pytest.approx([2.0, 3.0])


def test_time_between_points_is_on_the_line_that_joins_them_and_goes_on_beyond():
    link = _link(bytes_per_s=1e6, points=((1000, 4.0), (2000, 6.0), (4000, 7.0)))
    per_byte = 1e3 / 1e6  # two ranks send as many bytes as they hold
    assert link.ms(np.array([1000, 1500, 2000, 3000, 4000])) == pytest.approx([4, 5, 6, 6.5, 7])
    assert link.ms(5000) == pytest.approx(7 + 1000 * per_byte)
    assert link.ms(500) == pytest.approx(4 - 500 * per_byte)
    assert link.ms(0) == pytest.approx(3)
    assert _link(bytes_per_s=1e3, points=((1000, 4.0), (2000, 6.0))).ms(0) == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("latency_ms", [0.0, 0.25])
def test_a_fit_recovers_latency_and_bandwidth(kind, latency_ms):
    ranks = 2 if kind == "send" else 8
    truth = _link(kind=kind, ranks=ranks, latency_ms=latency_ms, bytes_per_s=7e9)
    points = [(size, float(truth.ms(size))) for size in (1 << 12, 1 << 16, 1 << 20, 1 << 26)]
    found = Link.fitted(kind, ranks, 1, points)
    assert found.latency_ms == pytest.approx(latency_ms, abs=1e-9)
    assert found.bytes_per_s == pytest.approx(7e9)
    assert found.error == pytest.approx(0, abs=1e-9)
    assert found.points == tuple(points)


def test_a_fit_of_noise_has_no_negative_coefficient():
    found = Link.fitted("send", 2, 1, [(1000, 3.0), (2000, 2.0), (4000, 1.0)])
    assert found.latency_ms > 0
    assert found.bytes_per_s == pytest.approx(4000 / 1e-3)
    assert found.error > 0.3


def test_a_group_that_was_not_measured_has_the_nearest_link_of_its_side_of_the_nodes():
    profile = _profile(links=(_link(), _link(stride=4, latency_ms=2.0)))
    assert profile.ms("all_reduce", 1, 1, 1e6) == 0
    assert profile.link("all_reduce", 4, 1).latency_ms == 0.5  # inside a node
    assert profile.link("all_reduce", 8, 1).latency_ms == 2.0  # of both
    assert profile.link("all_reduce", 8, 1).ranks == 8
    assert profile.ms("all_reduce", 4, 1, 1e6) == pytest.approx(0.5 + 1e3 * 2 * 3 / 4 * 1e6 / 1e9)
    with pytest.raises(ValueError, match="'two nodes' has no send between ranks"):
        profile.link("send", 2, 1)


@pytest.mark.parametrize("world_size", range(1, 65))
def test_arrangements_are_the_aligned_groups_that_tile_a_world(world_size):
    powers = [1 << exponent for exponent in range(7)]
    wanted = {(n, s) for n in powers[1:] for s in powers if world_size % (n * s) == 0}
    found = list(arrangements(world_size))
    assert len(set(found)) == len(found)
    assert wanted <= set(found)
    for ranks, stride in found:
        assert ranks > 1 and stride in powers and world_size % (ranks * stride) == 0
    if world_size > 1:
        assert (world_size, 1) in found


# ---- Galvatron ----


def _galvatron(nodes, devices_per_node=8):
    return read_galvatron_hardware(GALVATRON, nodes, devices_per_node, 38 << 30)


@pytest.mark.parametrize(("nodes", "ranks", "gigabytes"), [(1, 8, 154.203), (2, 16, 44.682), (1, 4, 159.119)])
def test_gradients_of_data_ranks_take_what_galvatron_says(nodes, ranks, gigabytes):
    megabytes = 193.0
    message = 2 * (ranks - 1) / ranks * megabytes  # its formula: MiB over GB/s are milliseconds
    profile = _galvatron(nodes)
    assert profile.ms("all_reduce", ranks, 1, megabytes * MIB) == pytest.approx(message / gigabytes)


def test_strided_groups_and_stages_have_galvatrons_bandwidths():
    profile = _galvatron(2)
    assert profile.ms("all_reduce", 4, 4, MIB) == pytest.approx(2 * 3 / 4 / 16.22)
    assert profile.ms("all_gather", 4, 4, MIB / 4) == pytest.approx(3 / 4 / 16.22)  # half of it, as for ZeRO-3
    assert profile.ms("reduce_scatter", 2, 8, MIB) == pytest.approx(1 / 2 / 8.13007)
    assert profile.ms("all_to_all", 16, 1, MIB) == pytest.approx(15 / 16 / 44.682)
    assert profile.ms("send", 2, 8, 32 * MIB) == pytest.approx(32 / 7.65998)  # 2 stages of 8 devices
    assert profile.ms("send", 2, 1, 32 * MIB) == pytest.approx(32 / 8.13177)  # 16 stages
    assert profile.overlap_slowdown == 1.125552573612729
    assert (profile.world_size, profile.memory_bytes) == (16, 38 << 30)


def test_tensor_ranks_take_half_of_galvatrons_all_reduce_and_ulysses_its_all_to_all():
    profile = _galvatron(1)
    assert profile.ms("all_gather", 8, 1, 16 * MIB / 8) == pytest.approx(0.29410 / 2)
    assert profile.ms("reduce_scatter", 8, 1, 16 * MIB) == pytest.approx(0.29410 / 2)
    assert profile.ms("reduce_scatter", 8, 1, 24 * MIB) == pytest.approx((0.29410 + 0.4157) / 4)
    assert profile.ms("all_to_all", 4, 1, 64 * MIB) == pytest.approx(0.3654)
    assert len(profile.link("all_to_all", 2, 1).points) == 11


@pytest.mark.parametrize(("nodes", "devices_per_node"), [(1, 4), (1, 8), (2, 8), (8, 8)])
def test_galvatrons_links_cover_its_groups_and_survive_json(nodes, devices_per_node):
    profile = _galvatron(nodes, devices_per_node)
    assert HardwareProfile.from_json(profile.to_json()) == profile
    for kind in KINDS:
        for ranks, stride in arrangements(profile.world_size):
            assert profile.ms(kind, 2 if kind == "send" else ranks, stride, MIB) > 0


def test_folders_that_are_not_galvatrons_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"no allreduce_bandwidth_4nodes.*\(1 x 4, 1 x 8, 2 x 8, 8 x 8\)"):
        _galvatron(4)
    with pytest.raises(ValueError, match=r"devices per node of its files \(none\)"):
        read_galvatron_hardware(tmp_path / "nothing", 1, 8, 1 << 30)
    with pytest.raises(ValueError, match="nodes is 0"):
        _galvatron(0)
    copy = tmp_path / "hardware"
    shutil.copytree(GALVATRON, copy)
    bandwidth = copy / "allreduce_bandwidth_1nodes_8gpus_per_node.json"
    for text, words in [
        ('{"allgather_size_8": 3}', "unknown field 'allgather_size_8'"),
        ('{"allreduce_size_8_consec_1": 0}', "allreduce_size_8_consec_1 is 0, which is too small"),
        ('{"allreduce_size_3_consec_1": 5.0}', "allreduce_size_3 does not divide 8 devices"),
        ("[]", "is not an object"),
    ]:
        bandwidth.write_text(text)
        with pytest.raises(ValueError, match=re.escape(words)):
            read_galvatron_hardware(copy, 1, 8, 1 << 30)


# ---- Presets ----


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_every_group_of_every_cluster(name):
    for nodes in (1, 2, 3, 4, 8, 16, 32, 64, 128):
        profile = hardware_preset(name, nodes, 8)
        there = {(link.kind, link.ranks, link.stride) for link in profile.links}
        for ranks, stride in arrangements(nodes * 8):
            for kind in KINDS if ranks == 2 else KINDS[:-1]:
                assert (kind, ranks, stride) in there
                assert profile.ms(kind, ranks, stride, MIB) > 0
        assert HardwareProfile.from_json(profile.to_json()) == profile


@pytest.mark.parametrize("name", PRESETS)
def test_presets_say_where_each_figure_is_from(name):
    profile = hardware_preset(name, 2, 8)
    figures = {"memory_bytes", "flops_per_s", "links inside a node", "links between nodes", "overlap_slowdown"}
    assert set(profile.assumed) == figures | {"memory bandwidth", "attention", "launches"}
    assert all(len(source) > 10 for source in profile.assumed.values())
    assert profile.made == {"cluster": name}


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_slower_between_nodes_than_inside(name):
    profile = hardware_preset(name, 4, 8)
    for kind in KINDS:
        ranks = 2 if kind == "send" else 4
        assert profile.ms(kind, ranks, 8, 64 * MIB) > profile.ms(kind, ranks, 1, 64 * MIB)


def test_a_ring_over_nodes_uses_the_adapters_of_all_its_ranks():
    profile = hardware_preset("a100-80g", 4, 8)
    # one rank of each node, two, four, eight: 24 GB/s each
    for stride, ranks, gigabytes in ((8, 4, 24), (4, 8, 48), (2, 16, 96), (1, 32, 192)):
        assert profile.link("all_gather", ranks, stride).bytes_per_s == gigabytes * 1e9
    # of 32 pieces a rank sends 24 to other nodes through its own adapter
    wire_ms = 1e3 * 24 / 32 * 64 * MIB / 24e9
    steps_ms = 0.0034 * math.log2(8) + 0.014 * math.log2(4)
    assert profile.ms("all_to_all", 32, 1, 64 * MIB) == pytest.approx(wire_ms + steps_ms)


@pytest.mark.parametrize("nodes", [1, 2, 64])
def test_a_ring_takes_a_step_for_each_rank_and_a_tree_for_each_level(nodes):
    """Compares with NCCL's own formulas (`ncclTopoTuneModel` in src/graph/tuning.cc)."""
    profile, ranks, inside, across = hardware_preset("h100", nodes, 8), 8 * nodes, 3.4e-3, 14e-3
    gathered = (nodes - 1) * across + (ranks - nodes) * inside
    assert profile.link("all_gather", ranks, 1).latency_ms == pytest.approx(gathered)
    assert profile.link("reduce_scatter", ranks, 1).latency_ms == pytest.approx(gathered)
    tree = 2 * ((8 - 1) * inside + math.log2(nodes) * across)
    assert profile.link("all_reduce", ranks, 1).latency_ms == pytest.approx(min(2 * gathered, tree))
    assert profile.link("send", 2, 1).latency_ms == pytest.approx(inside)


def test_what_crosses_nodes_is_not_hidden_as_well_as_what_stays_in_one():
    assert hardware_preset("h100", 2, 8).overlap_slowdown > hardware_preset("h100", 1, 8).overlap_slowdown > 1
    assert hardware_preset("cpu", 2, 8).overlap_slowdown is None


def test_an_unknown_preset_is_refused_with_the_nearest():
    with pytest.raises(
        ValueError, match="the cluster is 'H100s', which is not one of a100-40g, a100-80g, .*: use 'h100'"
    ):
        hardware_preset("H100s", 1, 8)
    with pytest.raises(ValueError, match="nodes is 0"):
        hardware_preset("h100", 0, 8)
