# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Single prices of the cost model against closed forms: recomputing, messages, waits, sums of gradients, ends."""

import math
from dataclasses import replace

import pytest

from galvatron_hf import ParallelPlan
from galvatron_hf.models.shape import WeightShape
from galvatron_hf.plan import LayerStrategy, Precision, VocabularyStrategy
from galvatron_hf.plan.layout import Layout
from galvatron_hf.planner.cost.cost_model import CostModel
from galvatron_hf.planner.cost.step_shape import StepShape
from galvatron_hf.planner.estimate import Estimate, estimate_plan
from galvatron_hf.planner.report.explain import explain_plan
from galvatron_hf.profiler.profiles.layers import EndProfile, LayerProfile
from galvatron_hf.profiler.profiles.model import ModelProfile
from galvatron_hf.profiler.profiles.presets import hardware_preset
from planner_cases import random_hardware, random_model, workload


LAYERS, ROWS = 3, 4


def estimate(model: ModelProfile, ranks: int = 1, **plan) -> Estimate:
    hardware = random_hardware(0, world_size=ranks, memory_bytes=1 << 40)
    uniform = ParallelPlan.uniform(ranks, LAYERS, precision=Precision(compute="fp32"), **plan)
    return estimate_plan(hardware, model, workload(ROWS), uniform)


def elements(part: LayerProfile | EndProfile) -> int:
    return sum(math.prod(weight.shape) for weight in part.weights)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_recomputing_does_the_forward_up_to_the_last_saved_tensor(micro_batches):
    model = random_model(0, layers=LAYERS)
    times, length = model.kinds[0].times[1], workload(ROWS).length
    rows = ROWS // micro_batches
    again = times.forward.ms(rows * length, rows * length**2) - times.forward_after_last_saved * rows * length
    again += times.recompute_fixed
    assert times.forward_after_last_saved > 0 < times.recompute_fixed
    more = [estimate(model, micro_batches=micro_batches, recompute=one).step_ms for one in ("none", "full")]
    assert more[1] - more[0] == pytest.approx(LAYERS * micro_batches * again, rel=1e-6)


@pytest.mark.parametrize("pipeline", [1, 3])
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_gradients_of_all_but_the_first_micro_batch_are_added(pipeline, micro_batches):
    model = replace(random_model(0, layers=LAYERS), adding_ms_per_element=0.0)
    adding = replace(model, adding_ms_per_element=1e3)  # so much that the stage that has most decides
    layer, end = (elements(part) for part in (model.kinds[0], model.head))
    most = LAYERS * layer + 2 * end if pipeline == 1 else layer + end
    without, added = (
        estimate(one, ranks=pipeline, pipeline=pipeline, micro_batches=micro_batches, sharding="replicate").step_ms
        for one in (model, adding)
    )
    assert added - without == pytest.approx((micro_batches - 1) * 1e3 * most, rel=1e-3)


def test_gradients_of_copies_stand_twice_while_they_are_joined():
    """Counts one layer at a time, if it has several weights, in plans that hold nothing but their state."""

    def empty(part, **changes):
        nothing = {name: dict.fromkeys(getattr(part, name), 0.0) for name in ("saved_bytes", "working_bytes")}
        return replace(part, **nothing, **changes)

    model = random_model(0, layers=LAYERS)
    ends = dict(embedding=empty(model.embedding), head=empty(model.head))
    weights = WeightShape(shape=(64, 8), cut=0), WeightShape(shape=(8, 64), cut=1)
    for count in (1, 2):
        layer = empty(model.kinds[0], weights=weights[:count])
        one = replace(model, kinds=(layer,), **ends)
        [memory] = estimate(one, ranks=2, sharding="replicate", micro_batches=2).memory_bytes
        state = 16 * (LAYERS * elements(layer) + 2 * elements(model.head))  # weights, gradients and both moments
        # Of one weight: what the embedding's gradient takes before it is added to the one that is there.
        assert memory - state == 4 * (elements(layer) if count > 1 else elements(model.embedding))


def test_a_head_that_waits_keeps_its_input_and_computes_the_logits_again():
    """Its forward has one of three equal products, and its backward computes all three."""
    hardware, model = random_hardware(0, world_size=4, memory_bytes=1 << 40), random_model(0, layers=4)
    fixed = dict.fromkeys(model.head.saved_bytes, 5000.0)
    whole = [VocabularyStrategy(sharding="replicate")]
    light = CostModel(hardware, model, workload(8), 2, 4).end(model.head, whole, "head")
    model = replace(model, head=replace(model.head, saved_fixed_bytes=fixed))
    at_once, late = (
        CostModel(hardware, model, workload(8), 2, 4, recompute_logits_in_backward=late).end(model.head, whole, "head")
        for late in (False, True)
    )
    for each in (at_once, late):
        assert each.activation_bytes == light.activation_bytes
        for count in (1, 2):
            needs = dict(one_stage=True, active_stages=1, micro_batches=count, one_layer=False)
            assert each.peak_working_bytes(**needs) == light.peak_working_bytes(**needs) + 5000
    assert late.forward_ms == pytest.approx(at_once.forward_ms / 3)
    assert late.backward_ms == pytest.approx(at_once.backward_ms + at_once.forward_ms)
    plan = ParallelPlan.uniform(4, 4, pipeline=2, micro_batches=4, precision=Precision())
    one, all_at_once = (
        explain_plan(hardware, model, workload(8), replace(plan, schedule=schedule)).stages[-1]
        for schedule in ("1f1b", "gpipe")
    )
    assert all_at_once.activation_bytes == 4 * one.activation_bytes


def test_messages_within_a_node_are_priced_as_such():
    """Prices four stages on two nodes, eight virtual stages on the same ranks, and two stages of two ranks each."""
    hardware = hardware_preset("a100-80g", 2, 2)
    costs = CostModel(hardware, random_model(0, layers=8), workload(8), 1, 4)
    inside, between = (hardware.ms("send", 2, stride, costs.boundary_bytes) for stride in (1, 2))
    assert inside < between
    shape = StepShape(pipeline=4, micro_batches=4, schedule="1f1b", rows=4)
    both = inside + between
    assert costs.received_ms(shape.receives()) == pytest.approx([inside, both, both, inside])
    around = replace(shape, schedule="interleaved", virtual_stages=2)
    ends = 2 * inside + between
    assert costs.received_ms(around.receives()) == pytest.approx([ends, 2 * both, 2 * both, ends])
    two = CostModel(hardware, random_model(0, layers=8), workload(8), 2, 4)
    between = hardware.ms("send", 2, 2, two.boundary_bytes)
    halves = replace(shape, pipeline=2)
    assert two.received_ms(halves.receives()) == pytest.approx([between, between])


def test_ranks_wait_before_each_collective_and_each_use_of_sharded_weights():
    """They do not wait before sums of copies, which are one message of many layers. Weights of a single shard take
    their time too.
    """
    hardware, model = random_hardware(0, world_size=4, memory_bytes=1 << 40), random_model(0, layers=4)
    patient = replace(model, collective_launch_ms=0.5, weights_launch_ms=0.25)
    strategies = [
        LayerStrategy(sharding="replicate"),
        LayerStrategy(sharding="zero3"),
        LayerStrategy(sharding="zero3", shard_degree=1),
        LayerStrategy(sharding="replicate", ulysses=2),
        LayerStrategy(sharding="replicate", ulysses=2, recompute="full"),
    ]
    at_once, late = (CostModel(hardware, one, workload(8), 4, 4).layer(0, strategies) for one in (model, patient))
    more = late.forward_ms + late.backward_ms - at_once.forward_ms - at_once.backward_ms
    # Gathered twice and reduced once; inputs of attention and results, forward and backward, and forward again.
    assert more == pytest.approx([0.0, 0.25 * 3, 0.25 * 3, 0.5 * 4, 0.5 * 6])
    assert late.sync_ms == pytest.approx(at_once.sync_ms)


@pytest.mark.parametrize("sharding", ["zero2", "zero3"])
def test_the_only_layer_of_a_stage_has_no_next_one_in_memory(sharding):
    """The only micro-batch of a step also has no gradients of layers that come later in its backward."""
    hardware, model = random_hardware(0, world_size=4, memory_bytes=1 << 40), random_model(0, layers=4)
    layer = CostModel(hardware, model, workload(8), 4, 4).layer(0, [LayerStrategy(sharding=sharding)])
    weights = 4 * sum(math.prod(weight.shape) for weight in model.kinds[0].weights)
    ahead = weights if sharding == "zero3" else 0

    def working(**given) -> int:
        return int(layer.peak_working_bytes(one_stage=False, active_stages=1, **given)[0])

    assert working(micro_batches=2, one_layer=False) - working(micro_batches=2, one_layer=True) == ahead
    assert working(micro_batches=1, one_layer=False) - working(micro_batches=1, one_layer=True) <= ahead
    assert working(micro_batches=1, one_layer=False) <= working(micro_batches=2, one_layer=False)


@pytest.mark.parametrize("sharding", ["replicate", "zero2", "zero3"])
def test_the_sum_of_copies_of_shards_hides_behind_nothing_where_computing_hides_nothing(sharding):
    """It follows the reduction of each unit, and the backward waits for its end. DDP's runs during the backward."""
    hardware = replace(random_hardware(0, world_size=4, memory_bytes=1 << 40), exposed_sync=0.25)
    stretch = {"synchronization": 2.0, "weights": 3.0, "copying": 5.0}
    model = replace(random_model(0, layers=4), calibration_factors=stretch)
    shards = 1 if sharding == "replicate" else 2
    strategy = LayerStrategy(sharding=sharding, shard_degree=None if sharding == "replicate" else shards)
    sizes = [4 * math.prod(weight.shape) // shards for weight in model.kinds[0].weights]
    reduced = hardware.ms("all_reduce", 4 // shards, shards, sum(sizes))
    expected = 0.25 * 2.0 * reduced if sharding == "replicate" else 3.0 * reduced
    if sharding == "zero2":
        copied = 3 * sum(sizes)  # the rank's shard into the message, and both shards out of it
        expected += 3.0 * hardware.ms("all_gather", shards, 1, sum(sizes)) + 5.0 * copying_ms(model, copied)
    (found,) = CostModel(hardware, model, workload(8), 4, 4).layer(0, [strategy]).sync_ms
    assert found == pytest.approx(expected)


@pytest.mark.parametrize("sharding", ["replicate", "zero2", "zero3"])
def test_what_of_communication_is_hidden_and_exposed_is_all_of_it(sharding):
    """Computing takes so long that it hides all messages but for what it is slowed down; or hides nothing."""
    model, hardware = random_model(0, layers=2), random_hardware(0, world_size=4, memory_bytes=1 << 40)
    slow = replace(model, calibration_factors={"computing": 1e6})
    plan = ParallelPlan.uniform(4, 2, sharding=sharding)
    for overlap in (None, 1.25):
        found = explain_plan(replace(hardware, overlap_slowdown=overlap, exposed_sync=1.0), slow, workload(4), plan)
        alone = explain_plan(replace(hardware, overlap_slowdown=None, exposed_sync=1.0), slow, workload(4), plan)
        exposed, whole = (one.step_ms()["communication"] - one.once_ms for one in (found, alone))
        assert found.hidden_ms + exposed == pytest.approx(whole, rel=1e-6)
        assert found.hidden_ms == 0.0 if overlap is None else 0.0 < found.hidden_ms < 0.76 * whole


def copying_ms(model: ModelProfile, size: float) -> float:
    """Returns the time of reading and writing so many bytes; adding a gradient moves 12 bytes of an element."""
    return model.adding_ms_per_element * 2 * size / 12


def test_what_ranks_exchange_is_copied_into_messages_and_out_of_them():
    """Compares layers whose copies take time with layers whose copies take none."""
    model, hardware = random_model(0, layers=2, degree=4), random_hardware(0, world_size=4, memory_bytes=1 << 40)
    free = replace(model, adding_ms_per_element=0.0)
    strategies = [
        LayerStrategy(sharding="replicate", ulysses=2),
        LayerStrategy(sharding="replicate", ulysses=2, recompute="full"),
        LayerStrategy(sharding="replicate", tensor=2),
    ]
    one, other = (CostModel(hardware, each, workload(8), 4, 8).layer(0, strategies) for each in (model, free))
    tokens = 8 // 2 * workload(8).length // 2
    size = tokens * model.head_dim * 4 * (2 * model.heads + 2 * model.kv_heads)
    copies = 2 * copying_ms(model, size)
    assert one.forward_ms - other.forward_ms == pytest.approx([copies, copies, 0.0])
    assert one.backward_ms - other.backward_ms == pytest.approx([copies, 2 * copies, 0.0])
    there_and_back = [
        CostModel(hardware, each, workload(8), 4, 8).resharding_ms(Layout(4), Layout(1, 4)) for each in (model, free)
    ]
    own = 8 // 4 * workload(8).length * model.hidden * 4
    assert there_and_back[0] - there_and_back[1] == pytest.approx(4 * copying_ms(model, own))


@pytest.mark.parametrize("seed", range(4))
def test_shards_of_a_single_piece_are_priced_as_whole_weights_that_are_copied(seed):
    """Weights are copied for each use, and gradients twice when they exist."""
    model = random_model(seed, layers=3)
    hardware = replace(random_hardware(seed, world_size=4, memory_bytes=1 << 40), overlap_slowdown=None)
    whole = estimate_plan(hardware, model, workload(8), ParallelPlan.uniform(4, 3, sharding="replicate"))
    layers = sum(elements(model.kinds[kind]) for kind in model.layers)
    ends = elements(model.head) + (0 if model.tied else elements(model.embedding))
    units, launch = 1 if model.tied else 2, model.weights_launch_ms
    for sharding, uses in (("zero2", 1), ("zero3", 2)):
        cut = ParallelPlan.uniform(4, 3, sharding=sharding, shard_degree=1)
        copied = 4 * ((uses + 2) * layers + (1 + 2) * ends)
        found = estimate_plan(hardware, model, workload(8), cut).step_ms
        factor = model.calibration_factors.get("copying", 1.0)
        launched = launch * ((uses + 1) * len(model.layers) + 2 * units)
        assert found - whole.step_ms == pytest.approx(factor * copying_ms(model, copied) + launched, rel=1e-6)


def test_a_kind_that_no_layer_is_of_has_the_bias_of_one_layer():
    """A profile may describe kinds that its model does not use."""
    model = random_model(0, layers=LAYERS)
    kind = replace(model.kinds[0], bias_heads=2)
    unused = replace(model, kinds=(*model.kinds, kind))
    costs = CostModel(random_hardware(0, world_size=1, memory_bytes=1 << 40), unused, workload(ROWS), 1, ROWS)
    biased, plain = (costs.layer(index, [LayerStrategy()]) for index in (len(model.kinds), 0))
    recomputed, square = LayerStrategy(recompute="full"), workload(ROWS).length ** 2
    bias, indices = 2 * square * 4, 8 * square  # fp32
    assert costs._bias_bytes(kind, LayerStrategy()) == (indices, 0)
    assert costs._bias_bytes(kind, recomputed) == (bias + indices, 0)  # no other layer's gradient waits for its own
    used = replace(model, kinds=(kind, *model.kinds[1:]))
    shared, waiting = CostModel(costs.hardware, used, workload(ROWS), 1, ROWS)._bias_bytes(kind, recomputed)
    count = sum(index == 0 for index in model.layers)
    assert (shared, waiting) == ((bias + indices) / count, bias) and count > 1
    assert (biased.activation_bytes > plain.activation_bytes).all()
