# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Single prices of the cost model against closed forms: what recomputing, sums of gradients and ends add to a step."""

import math
from dataclasses import replace

import pytest

from galvatron_hf import ParallelPlan
from galvatron_hf.plan import Precision
from galvatron_hf.planner.search import Estimate, estimate_plan
from galvatron_hf.profiler.model_profile import EndProfile, LayerProfile, ModelProfile, WeightShape
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
    again = times.forward.ms(rows * length, rows * length**2) - times.last_forward * rows * length
    again += times.recompute_fixed
    assert times.last_forward > 0 < times.recompute_fixed
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
        estimate(one, ranks=pipeline, pipeline=pipeline, micro_batches=micro_batches).step_ms
        for one in (model, adding)
    )
    assert added - without == pytest.approx((micro_batches - 1) * 1e3 * most, rel=1e-3)


def test_gradients_of_copies_stand_twice_while_they_are_joined():
    """Of one layer at a time, if it has several weights; nothing else is there beside the state."""

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
