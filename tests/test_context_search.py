# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Context degrees in the search: the plan that is found is the cheapest, and a ring costs what its hops cost."""

import itertools
import json
from collections.abc import Iterator
from dataclasses import fields, replace

import numpy as np
import pytest

from galvatron_hf.cli.main import main
from galvatron_hf.plan import LayerStrategy, ParallelPlan, VocabularyStrategy
from galvatron_hf.plan.chunks import largest_share
from galvatron_hf.plan.ring_traffic import RingTraffic
from galvatron_hf.planner.cost import rings
from galvatron_hf.planner.cost.cost_model import CostModel, CostModels
from galvatron_hf.planner.estimate import estimate_plan
from galvatron_hf.planner.report.explain import explain_plan
from galvatron_hf.planner.search import search_plan
from galvatron_hf.planner.space import Limits
from galvatron_hf.planner.step_cuts import step_cuts
from galvatron_hf.profiler.profiles.hardware import HardwareProfile, Link
from galvatron_hf.profiler.profiles.model import ModelProfile
from galvatron_hf.profiler.profiles.presets import hardware_preset
from galvatron_hf.profiler.trace.tracing import profile_from_config
from planner_cases import every_estimate, random_hardware, random_model, workload
from tiny_configurations import tiny_model
from tiny_models import FAMILIES


PLAIN = Limits(sequence=(), sharding=("zero3",), hybrid_sharding=False)
CASES = [
    # world size, layers, rows, kinds of layers, tied, limits
    (2, 2, 3, 1, False, replace(PLAIN, sequence=("megatron",))),
    (4, 2, 1, 1, True, replace(PLAIN, sharding=("replicate", "zero3"), hybrid_sharding=True)),
    (4, 2, 2, 2, False, replace(PLAIN, sequence=("ulysses",), recompute=("none",))),
    (6, 2, 1, 1, False, replace(PLAIN, recompute=("none",))),  # degrees 1, 2, 3 and 6
    (4, 4, 2, 1, False, replace(PLAIN, recompute=("none",), pipeline=(2,))),  # virtual stages too
]


@pytest.mark.parametrize("world, layers, rows, kinds, tied, limits", CASES)
def test_no_plan_of_any_context_degree_is_faster_than_the_one_found(world, layers, rows, kinds, tied, limits):
    degrees = set()
    for seed in range(2):
        model = random_model(seed, layers=layers, kinds=kinds, tied=tied)
        hardware = random_hardware(seed, world_size=world, memory_bytes=1 << 40)
        work = workload(rows, length=24, packed=True)
        every = list(every_estimate(hardware, model, work, limits))
        for estimate in every[seed::47]:
            priced = estimate_plan(hardware, model, work, estimate.plan)
            assert estimate == replace(priced, peak_bytes=())
            assert all(peak <= most for peak, most in zip(priced.peak_bytes, priced.memory_bytes, strict=True))
        needed = sorted(max(estimate.memory_bytes) for estimate in every)
        for budget in (needed[0], needed[len(needed) // 20], needed[len(needed) // 3], needed[-1]):
            found = search_plan(hardware, model, work, memory_bytes=budget, limits=limits).best
            fitting = [estimate for estimate in every if max(estimate.memory_bytes) <= budget]
            assert found.step_ms == min(estimate.step_ms for estimate in fitting)
            again = estimate_plan(hardware, model, work, found.plan)
            assert (again.step_ms, again.memory_bytes) == (found.step_ms, found.memory_bytes)
            parts = explain_plan(hardware, model, work, found.plan).step_ms()
            assert sum(parts.values()) == pytest.approx(found.step_ms, rel=1e-9)
            assert found.bubble_ms == pytest.approx(parts["bubble"], rel=1e-6, abs=1e-6)
            degrees.add(found.plan.layers[0].context)
            text = found.plan_with_prediction(work).to_json()
            assert ParallelPlan.from_json(text).layers == found.plan.layers
        too_little = search_plan(hardware, model, work, memory_bytes=needed[0] - 1, limits=limits)
        assert too_little.best is None and too_little.least_memory_bytes == needed[0]
    assert max(degrees) > 1


def test_rows_that_are_not_packed_are_not_shared():
    hardware = random_hardware(0, world_size=4, memory_bytes=1 << 40)
    for model, packed, shared in itertools.product((True, False), (True, False), (True, False)):
        profile = replace(random_model(0, layers=2), shares_documents=model)
        limits = Limits(context=None if shared else (1,))
        cuts = list(step_cuts(CostModels(hardware, profile, workload(1, packed=packed)), limits))
        degrees = {shape.context for cut in cuts for shape in cut.shapes}
        assert degrees == ({1, 2, 4} if model and packed and shared else {1})


# ---- The price of a ring ----


def hop_by_hop(degree: int, hop_ms: tuple[float, float], block_ms: float, gradient_ms: float) -> Iterator[float]:
    """Yields the time of a ring's forward and backward: each hop begins when what it needs is there."""
    forward, backward = hop_ms
    now = 0.0
    for hop in range(degree):
        arrives = now + block_ms * (hop + 1 < degree)
        now = max(now + forward, arrives)
    yield now
    now, gradient_arrives = 0.0, 0.0
    for hop in range(degree):
        wire = now + (block_ms if hop + 1 < degree else 0.0)  # one wire: a gradient under way delays the block
        wire += gradient_ms if hop > 0 else 0.0
        now = max(now + backward, wire)
    yield now + gradient_ms + gradient_arrives


@pytest.mark.parametrize("degree", [2, 3, 4, 7])
@pytest.mark.parametrize("block_ms, gradient_ms", [(0.5, 1.0), (2.0, 4.0), (9.0, 18.0)])
def test_a_hop_takes_the_longer_of_its_compute_and_its_messages(degree, block_ms, gradient_ms):
    forward_hop, backward_hop = 3.0, 7.5
    found = rings.exposed_ms(
        degree, degree * forward_hop, degree * backward_hop, block_ms, gradient_ms, lambda c, m: max(c, m)
    )
    whole = [one + hops for one, hops in zip(found, (degree * forward_hop, degree * backward_hop), strict=True)]
    assert whole == pytest.approx(list(hop_by_hop(degree, (forward_hop, backward_hop), block_ms, gradient_ms)))
    # Without overlap every message is waited for.
    added = rings.exposed_ms(degree, 1.0, 2.0, block_ms, gradient_ms, lambda c, m: c + m)
    assert added == pytest.approx(((degree - 1) * block_ms, (degree - 1) * block_ms + degree * gradient_ms))
    assert rings.exposed_ms(1, 1.0, 2.0, block_ms, gradient_ms, max) == (0.0, 0.0)


def test_the_bytes_of_a_ring_are_counted():
    traffic = RingTraffic(degree=4, tokens=10, key_value_heads=3, head_dim=5, element_bytes=2)
    assert (traffic.block_bytes, traffic.gradient_bytes) == (2 * 10 * 3 * 5 * 2, 2 * 10 * 3 * 5 * 4)
    assert traffic.sent_bytes() == 6 * 600 + 4 * 1200 and traffic.sent_bytes(recompute=True) == 9 * 600 + 4 * 1200
    assert rings.working_bytes(traffic, query_heads=6) == 2 * 600 + 4 * 1200 + 10 * 6 * 5 * 4
    alone = replace(traffic, degree=1)
    assert alone.sent_bytes() == rings.working_bytes(alone, query_heads=6) == 0
    assert [largest_share(9, degree) for degree in (1, 2, 3, 9)] == [9, 5, 3, 1]


STRATEGIES = [
    LayerStrategy(tensor=tensor, ulysses=ulysses, megatron_sp=tensor > 1, recompute=recompute, sharding=sharding)
    for tensor, ulysses in ((1, 1), (2, 1), (1, 2))
    for recompute in ("none", "full")
    for sharding in ("replicate", "zero2", "zero3")
]


def patient(hardware: HardwareProfile) -> HardwareProfile:
    """Returns a machine that overlaps nothing, so that all times add up."""
    return replace(hardware, overlap_slowdown=None)


@pytest.mark.parametrize("context, ranks", [(2, 4), (4, 8)])
def test_a_row_that_ranks_share_costs_what_its_pieces_cost_and_the_ring(context, ranks):
    """Prices a row of 32 tokens as `context` rows: only attention and the ring's messages and blocks differ."""
    model = replace(random_model(0, layers=2), calibration_factors={"sending": 1.5, "computing": 0.75})
    hardware = patient(random_hardware(0, world_size=ranks, memory_bytes=1 << 40))
    (layer,), length, rows = model.kinds, 32, ranks // context
    shared = CostModel(hardware, model, workload(rows, length), ranks, rows, context=context)
    pieces = CostModel(hardware, model, workload(rows, length // context), ranks, rows * context)
    own = shared.layer(0, [replace(one, context=context) for one in STRATEGIES])
    others = pieces.layer(0, STRATEGIES)
    differing = {"forward_ms", "backward_ms", "communication_ms", "working_bytes"}
    for field in fields(own):
        if field.name not in {"part"} | differing:
            assert np.array_equal(getattr(own, field.name), getattr(others, field.name)), field.name
    for index, one in enumerate(STRATEGIES):
        times, degree = layer.times[one.tensor], one.tensor * one.ulysses
        of_rank = rows // (ranks // degree // context)  # rows of a data rank
        squares = 1.06 * of_rank * length**2 / context / one.ulysses
        squares -= of_rank * (length // context) ** 2 / one.ulysses  # of a piece of each row
        # Two key/value heads, of which a rank has one if there are two ranks for different heads.
        block = 2 * (of_rank * length // context) * (2 // degree) * model.head_dim * 4
        ms = 1.5 * hardware.ms("send", 2, degree, block)
        again = one.recompute == "full"
        forward, backward = copied_ms(model, block, context)
        forward += 0.75 * times.forward.per_square * squares + (context - 1) * ms
        backward += 0.75 * times.backward.per_square * squares + (2 * context - 1) * ms + again * forward
        assert own.forward_ms[index] - others.forward_ms[index] == pytest.approx(forward)
        assert own.backward_ms[index] - others.backward_ms[index] == pytest.approx(backward)
        # Keys and values twice, their gradients four times, and the gradient of queries, which have twice the heads.
        assert own.working_bytes[index] - others.working_bytes[index] == (2 + 4) * block + block
    for end, part in ((model.embedding, "embedding"), (model.head, "head")):
        ends = [VocabularyStrategy(tensor=tensor) for tensor in (1, 2)]
        one, other = shared.end(end, ends, part), pieces.end(end, ends, part)
        for field in fields(one):
            assert np.array_equal(getattr(one, field.name), getattr(other, field.name)), field.name
    assert shared.boundary_bytes == pieces.boundary_bytes


def copied_ms(model: ModelProfile, block: int, context: int) -> tuple[float, float]:
    """Returns the time of a ring's copies if queries, a block and its gradient are all of `block` bytes. A hop of the
    forward scales results and adds them up, one of the backward adds up the gradients of queries and of the block.
    """
    copy = model.adding_ms_per_element * 2 * block / (3 * 4)
    return copy * (1 + context * 1.25 * 3.5), copy * (1 + context * (1.25 * 1.5 * 2 + 2))


def test_the_estimate_of_a_plan_is_the_sum_by_hand():
    model, length, ranks, micro_batches = random_model(2, layers=3), 32, 4, 2
    hardware = patient(random_hardware(2, world_size=ranks, memory_bytes=1 << 40))
    plan = ParallelPlan.uniform(ranks, 3, context=4, micro_batches=micro_batches)
    apart = ParallelPlan.uniform(ranks, 3, micro_batches=micro_batches)
    found = estimate_plan(hardware, model, workload(micro_batches, length), plan)
    pieces = estimate_plan(hardware, model, workload(4 * micro_batches, length // 4), apart)
    times = model.kinds[0].times[1]
    squares = 1.06 * length**2 / 4 - (length // 4) ** 2
    block = 2 * (length // 4) * model.kv_heads * model.head_dim * 4
    ring = (2 * 3 + 4) * float(hardware.ms("send", 2, 1, block)) + sum(copied_ms(model, block, 4))
    layer = (times.forward.per_square + times.backward.per_square) * squares + ring
    assert found.step_ms - pieces.step_ms == pytest.approx(3 * micro_batches * layer)
    # A working layer has seven blocks more, but the head may need more than a layer.
    assert 0 <= found.memory_bytes[0] - pieces.memory_bytes[0] <= 7 * block


def test_a_ring_over_nodes_is_as_slow_as_the_link_between_them():
    hardware, model = hardware_preset("h100", 2, 4), random_model(0, layers=1, degree=8)
    work = workload(1, 64)

    def ms(context: int, **degrees: int) -> tuple[float, list[Link]]:
        asked = []
        profile = replace(hardware)
        object.__setattr__(profile, "ms", lambda *key: asked.append(key[:3]) or hardware.ms(*key))
        costs = CostModel(profile, model, work, 8, 1, context=context)
        strategy = LayerStrategy(context=context, sharding="replicate", **degrees)
        return costs._ring(model.kinds[0], strategy), set(asked)

    assert ms(4)[1] == {("send", 2, 1)}
    assert ms(8)[1] == {("send", 2, 4)}
    assert ms(2, ulysses=4)[1] == {("send", 2, 4)}
    assert ms(2, ulysses=2)[1] == {("send", 2, 2)}
    assert ms(4, ulysses=2)[1] == {("send", 2, 4)}


# ---- Models and commands ----


def test_profiles_say_which_models_share_documents():
    hardware = hardware_preset("cpu", 1, 2)

    def shares(config) -> bool:
        return profile_from_config(config, hardware, "fp32", length=32, packed=False, max_degree=1).shares_documents

    llama = FAMILIES["llama"].build().config
    assert shares(llama) and shares(tiny_model("gpt2", attn_pdrop=0.0).config)
    assert not shares(FAMILIES["llama"].build(attention_dropout=0.1).config)
    assert not shares(tiny_model("t5", task="seq2seq-lm").config)


def test_the_command_takes_context_degrees(capsys, tmp_path):
    path, plan = tmp_path / "model.json", tmp_path / "plan.json"
    model = random_model(0, layers=4, degree=4)
    replace(model, max_length=None).to_json(path)
    flags = ["--model-profile", str(path), "--cluster", "cpu", "--devices-per-node", "4", "--global-batch", "1"]
    flags += ["--seq-length", "64", "--json"]
    assert main(["search", *flags, "--context", "2", "--output", str(plan)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {layer["context"] for layer in found["plan"]["layers"]} == {2}
    assert "1.06 times" in found["assumed"]["attention of shared documents"]
    assert main(["estimate", *flags, "--plan", str(plan)]) == 0
    assert json.loads(capsys.readouterr().out)["step_ms"] == found["step_ms"]
    assert "context 2" in str(ParallelPlan.from_json(plan))
    assert main(["search", *flags, "--context", "1"]) == 0
    assert "attention of shared documents" not in json.loads(capsys.readouterr().out)["assumed"]
    assert main(["search", *flags, "--context", "3"]) != 0
    assert "allow only the context degrees 1, 2, 4" in capsys.readouterr().err
