# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Experts in profiles, in the cost model and in the search."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from galvatron_hf.plan import LayerStrategy, ParallelPlan, Precision, VocabularyStrategy
from galvatron_hf.planner.cost.cost_model import CostModel
from galvatron_hf.planner.cost.weight_costs import weight_costs
from galvatron_hf.planner.estimate import estimate_plan
from galvatron_hf.planner.search import search_plan
from galvatron_hf.planner.space import Limits, layer_strategies
from galvatron_hf.profiler.profiles.model import ModelProfile
from galvatron_hf.profiler.profiles.presets import hardware_preset
from galvatron_hf.profiler.trace.tracing import profile_from_config
from planner_cases import every_estimate, random_hardware, random_model, workload
from tiny_models import EXPERT_FAMILIES


LIMITS = [
    (2, 2, 2, 2, Limits(sequence=(), sharding=("zero3",), recompute=("none",))),
    (2, 2, 3, 1, Limits(sequence=("none",), sharding=("replicate", "zero3"), recompute=("none", "full"))),
    (4, 2, 4, 2, Limits(sequence=(), sharding=("zero3", "zero2"), hybrid_sharding=False, recompute=("none",))),
]
SLOW_LIMITS = [pytest.param(*limits, marks=pytest.mark.slow) for limits in LIMITS[1:]]


@pytest.mark.parametrize("world, layers, rows, kinds, limits", [LIMITS[0], *SLOW_LIMITS])
def test_no_plan_with_experts_is_faster_than_the_one_found(world, layers, rows, kinds, limits):
    for seed in range(4):
        model = random_model(seed, layers=layers, kinds=kinds, experts=True)
        hardware, work = random_hardware(seed, world_size=world, memory_bytes=1 << 40), workload(rows)
        every = list(every_estimate(hardware, model, work, limits))
        needed = sorted(max(estimate.memory_bytes) for estimate in every)
        for budget in (needed[0], needed[len(needed) // 3], needed[-1]):
            found = search_plan(hardware, model, work, memory_bytes=budget, limits=limits)
            fitting = [estimate.step_ms for estimate in every if max(estimate.memory_bytes) <= budget]
            assert found.best.step_ms == min(fitting)
            again = estimate_plan(hardware, model, work, found.best.plan)
            assert (again.step_ms, again.memory_bytes) == (found.best.step_ms, found.best.memory_bytes)
            for kind, strategy in zip(model.layers, found.best.plan.layers, strict=True):
                assert strategy.expert == 1 or model.kinds[kind].experts is not None


def plan_of(model: ModelProfile, world: int, **strategy) -> ParallelPlan:
    options = {key: strategy.pop(key) for key in ("pipeline", "micro_batches", "schedule") if key in strategy}
    return ParallelPlan.uniform(world, len(model.layers), precision=Precision(), **options, **strategy)


def test_times_of_experts_are_added_by_hand():
    """Holds one layer's compute, messages and saved bytes under degree 4 against those under degree 1."""
    model = replace(random_model(1, layers=1, experts=True), expert_imbalance={2: 1.25, 4: 1.5})
    hardware = replace(random_hardware(1, world_size=4, memory_bytes=1 << 40), overlap_slowdown=None)
    costs = CostModel(hardware, model, workload(4), 4, 4)
    one, four = LayerStrategy(sharding="replicate"), LayerStrategy(sharding="replicate", expert=4)
    found, tokens, profile = costs.layer(0, [one, four]), 8, model.kinds[0].experts
    alone, spread = profile.degrees[1], profile.degrees[4]
    computing = model.calibration_factors["computing"]
    size = 1.5 * tokens * profile.top_k * model.hidden * 4
    message = costs._ms("all_to_all", 4, 1, size)
    counts = costs._ms("all_to_all", 4, 1, 8 * profile.count)
    forward = computing * (spread.forward.ms(tokens, 0) + 0.5 * tokens * spread.received_forward)
    forward += 2 * message + counts - computing * alone.forward.ms(tokens, 0)
    np.testing.assert_allclose(np.diff(found.forward_ms), [forward])
    backward = computing * (spread.backward.ms(tokens, 0) + 0.5 * tokens * spread.received_backward)
    backward += 2 * message - computing * alone.backward.ms(tokens, 0)
    np.testing.assert_allclose(np.diff(found.backward_ms), [backward])
    saved = tokens * (spread.saved_bytes + 0.5 * spread.received_saved_bytes - alone.saved_bytes)
    np.testing.assert_allclose(np.diff(found.activation_bytes), [saved])


@pytest.mark.parametrize(
    "strategy, elements",
    [
        (LayerStrategy(expert=1), 512 / 8),  # of 4 x 16 x 8, in as many pieces as a copy of the layer has ranks
        (LayerStrategy(expert=2), 512 / 8),
        (LayerStrategy(expert=4), 512 / 8),
        (LayerStrategy(expert=2, sharding="replicate"), 512 / 2),
        (LayerStrategy(expert=4, shard_degree=2), 512 / 4),
        (LayerStrategy(expert=2, shard_degree=4), 512 / 4),
        (LayerStrategy(tensor=2, expert=4, shard_degree=1), 512 / 4),
    ],
)
def test_elements_of_experts_on_a_rank(strategy, elements):
    weights = [weight for weight in random_model(0, layers=1, experts=True).kinds[0].weights if weight.of_experts]
    found = weight_costs(
        weights, strategy, 8, element=4, reduced=4, ms=lambda *unused: 0.0, copying_ms=lambda size: 0.0
    )
    assert found.elements == elements


def test_uneven_choices_cost_time_and_memory():
    model, hardware = random_model(2, layers=2, experts=True), random_hardware(2, world_size=4, memory_bytes=1 << 40)
    plan = plan_of(model, 4, expert=4)
    even, uneven = (
        estimate_plan(hardware, replace(model, expert_imbalance={4: ratio}), workload(4), plan) for ratio in (1.0, 2.0)
    )
    assert uneven.step_ms > even.step_ms and max(uneven.memory_bytes) > max(even.memory_bytes)
    assert [model.imbalance(degree) for degree in (1, 2, 4, 8, 16)] == [1.0, 1.4, 2.1, 2.8, 2.8]
    measured = replace(model, expert_imbalance={4: 1.3})
    assert [measured.imbalance(degree) for degree in (1, 2, 4, 8)] == [1.0, 1.4, 1.3, 2.8]


def test_the_loss_of_routers_costs_a_forward_where_it_needs_one():
    model, hardware = random_model(2, layers=2, experts=True), random_hardware(2, world_size=4, memory_bytes=1 << 40)
    without = replace(model, router_loss=False)
    for fields, needs in (
        (dict(micro_batches=1), False),
        (dict(micro_batches=4), True),
        (dict(micro_batches=4, pipeline=2), True),
        (dict(micro_batches=4, pipeline=2, schedule="gpipe"), False),
    ):
        plan = plan_of(model, 4, sharding="replicate", **fields)
        with_loss, none = (estimate_plan(hardware, one, workload(4), plan).step_ms for one in (model, without))
        assert (with_loss > none) == needs, fields


def test_expert_degrees_of_the_space():
    model = random_model(0, layers=1, experts=True)
    degrees = {(one.tensor, one.expert) for one, _ in layer_strategies(8, model, Limits())}
    assert degrees == {(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (2, 4)}
    assert {one.expert for one, _ in layer_strategies(8, model, Limits(expert=2))} == {1, 2}
    assert {one.expert for one, _ in layer_strategies(8, random_model(0, layers=1), Limits())} == {1}


@pytest.fixture(scope="module")
def profile() -> ModelProfile:
    config = EXPERT_FAMILIES["qwen2_moe"].build().config  # layer 1 is dense
    return profile_from_config(config, hardware_preset("h100", 1, 4), "fp32", length=128, max_degree=4)


def test_a_profile_of_experts_is_counted_and_kept_in_json(profile):
    (sparse, dense), kinds = profile.kinds, profile.layers
    assert kinds == (0, 1, 0, 0) and dense.experts is None and profile.router_loss
    assert (sparse.regions, dense.regions) == (1, 2)
    experts = sparse.experts
    assert (experts.count, experts.top_k, sorted(experts.degrees)) == (8, 2, [1, 2, 4])
    assert "expert imbalance" in profile.assumed
    assert ModelProfile.from_json(profile.to_json()) == profile
    # Of a row that arrives: the row, both halves of the first product, the gate's activation and the gated half, its
    # weight, its expert and its place.
    hidden, intermediate = 32, 24
    for degree in (2, 4):
        received = experts.degrees[degree].received_saved_bytes / experts.top_k
        assert received == 4 * (hidden + 4 * intermediate) + 4 + 2 * 8


@pytest.mark.parametrize(
    "change, sentence",
    [
        (lambda experts: experts.update(count=0), "count is 0"),
        (lambda experts: experts.update(top_k=9), "top_k=9.*do not fit together"),
        (lambda experts: experts.update(count=16), "weights of .8. experts and 16"),
        (lambda experts: experts.update(degrees=[]), "degrees is \\[\\]"),
        (lambda experts: experts["degrees"].pop(0), "no expert=1"),
        (lambda experts: experts["degrees"][0].update(saved_bytes=-1), "saved_bytes is -1"),
        (lambda experts: experts["degrees"][0].update(speed=1), "unknown field .speed"),
    ],
)
def test_what_is_no_profile_of_experts_is_refused(profile, change, sentence):
    given = json.loads(profile.to_json())
    change(given["kinds"][0]["experts"])
    with pytest.raises(ValueError, match=sentence):
        ModelProfile.from_json(given)


def test_an_imbalance_that_cannot_be_is_refused(profile):
    for value in ({"2": 0.5}, {"two": 1.0}, [1.4], {"4": 4.5}):
        with pytest.raises(ValueError, match="expert_imbalance"):
            ModelProfile.from_json(json.loads(profile.to_json()) | {"expert_imbalance": value})


def test_an_expert_degree_of_a_dense_layer_is_not_priced(profile):
    plan = plan_of(profile, 4, expert=2)
    with pytest.raises(ValueError, match="layer 1 has expert=2.*no experts"):
        estimate_plan(hardware_preset("h100", 1, 4), profile, replace(workload(4), length=128), plan)


def test_a_model_with_experts_is_searched(profile):
    hardware = hardware_preset("h100", 1, 4)
    found = search_plan(hardware, replace(profile, expert_imbalance={2: 1.0}), replace(workload(8), length=128))
    assert found.best is not None and found.best.plan.layers[1].expert == 1
    assert isinstance(found.best.plan.embedding, VocabularyStrategy)
