# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Calibration: the plans and layers that are tried in whole steps, and the factors that are fitted to their times."""

import copy
import functools

import numpy as np
import pytest
import torch
import torch.distributed as dist

from galvatron_hf.parallel.comm.mesh import WorldMesh
from galvatron_hf.parallel.parallelize import parallelize
from galvatron_hf.plan import LayerStrategy, Precision
from galvatron_hf.profiler.measure import calibration
from galvatron_hf.profiler.measure.calibration import MOST, NOISE, SPREAD, WAIT_SPREAD, WAITS, fitted_factors
from galvatron_hf.profiler.profiles.model import CALIBRATION_FACTORS, ModelProfile
from galvatron_hf.profiler.profiles.presets import hardware_preset
from galvatron_hf.profiler.trace.tracing import profile_from_config
from galvatron_hf.trainer.planning.calibration import calibrated
from plans import pipelined
from tiny_models import BATCHES, FAMILIES
from trainer_runs import on_ranks


def test_factors_bring_the_parts_to_what_was_measured():
    """Fits factors to fourteen plans: a part that no plan has, and a part near zero, keep the factor 1.

    Times that are sums of parts have their factors in closed form: a ridge regression toward 1, of waits toward 0.
    """
    draw = np.random.default_rng(0)
    parts, counts = draw.uniform(0, 10, (14, len(CALIBRATION_FACTORS))), draw.integers(0, 8, (14, len(WAITS)))
    parts[:, 3], parts[:, 4] = 0.0, 1e-3
    truth, waits = np.array([1.1, 2.0, 3.0, 2.0, 4.0, 0.5]), np.array([0.75, 3.0])
    measured = 5 + parts @ truth + counts @ waits
    found, waiting, off = fitted_factors(lambda factors, waits: 5 + parts @ factors + counts @ waits, measured)
    columns = np.column_stack([parts, counts]) / measured[:, None] / NOISE
    wanted = (measured - 5 - parts.sum(axis=1)) / measured / NOISE
    prior = np.diag(1 / np.array([SPREAD] * len(CALIBRATION_FACTORS) + [*WAIT_SPREAD]) ** 2)
    closed = np.append(np.ones(len(CALIBRATION_FACTORS)), np.zeros(len(WAITS))) + np.linalg.solve(
        columns.T @ columns + prior, columns.T @ wanted
    )
    assert np.allclose([*found, *waiting], closed, rtol=2e-3)
    known = [0, 1, 2, 5]
    assert np.allclose(closed[known], truth[known], rtol=0.05) and closed[-2:] == pytest.approx(waits, rel=0.05)
    assert np.allclose(found[3:5], 1.0, atol=0.01)
    assert off < 0.005
    found, _, _ = fitted_factors(lambda factors, waits: parts @ factors, parts @ (100 * truth))
    assert np.allclose(found[:3], MOST, rtol=1e-3)
    _, waiting, _ = fitted_factors(lambda factors, waits: 10 + counts @ waits, np.full(14, 9.0))
    assert waiting == pytest.approx((0.0, 0.0), abs=0.01)  # nobody waits for less than nothing


@pytest.mark.slow
def test_simple_plans_are_tried_until_their_steps_agree_and_one_of_them_at_least():
    """The median of all steps of a plan counts, not those of a slow pass."""
    counted(4)  # once, before the ranks are forked
    slow, fast, steady = (90.0, 90.0, 91.0), (10.0, 10.4, 50.0), (10.0, 10.0, 10.2)
    cases = [(1e6, fast, slow, fast), (1e6, fast, steady), (1e6, steady), (0.0, steady)]
    disturbed, settled, quiet, hurried = on_ranks(lambda: [tried_plans(*case) for case in cases], 2)[0]
    tried, measured = disturbed
    once = len(tried) // 3
    assert once > 3 and tried == 3 * tried[:once] and len(set(tried)) == once
    assert measured == [50.0] * once
    assert settled == (2 * tried[:once], [10.1] * once)
    assert quiet == (tried[:once], [10.0] * once)
    assert hurried == (tried[:1], [10.0])


@pytest.mark.slow
def test_whole_steps_are_tried_with_the_layers_there_are_up_to_eight_or_until_steps_are_long_enough():
    cases = [(3, 1e6), (9, 1e6), (3, 0.0), (9, 0.0)]
    for layers in (3, 9):
        counted(layers)  # once, before the ranks are forked
    assert on_ranks(lambda: [layers_tried(*case) for case in cases], 2)[0] == [{3}, {8}, {3}, {4}]


def test_calibration_has_plans_with_many_exchanges_and_one_that_is_sharded_in_pairs(monkeypatch):
    """Checks plans that alone show the waits of two Ulysses ranks and the costs of copied shards."""
    small = FAMILIES["llama"].build()
    monkeypatch.setattr(calibration.dist, "get_world_size", lambda: 4)
    for rows, most in ((16, 8), (6, 6)):
        plans = calibration._plans(small, rows, Precision(compute="fp32"))
        assert max(plan.micro_batch_count for plan in plans) == most
        (exchanging,) = (plan for plan in plans if plan.layers[0].ulysses > 1 and len(plan.stages) > 1)
        assert exchanging.micro_batches == most
        copied, paired = (plan for plan in plans if plan.layers[0].shard_degree not in (None, 4))
        assert (paired.layers[0].sharding, paired.layers[0].shard_degree) == ("zero3", 2)
        assert (copied.layers[0].sharding, copied.layers[0].shard_degree) == ("zero3", 1)
        assert len(copied.stages) == 2 and copied.micro_batches == most


@functools.cache
def counted(layers: int) -> ModelProfile:
    """Returns the counted profile of a Llama for two ranks."""
    config = FAMILIES["llama"].build(num_hidden_layers=layers).config
    return profile_from_config(config, hardware_preset("cpu", 1, 2), "fp32", length=32, max_degree=2)


def layers_tried(count: int, step_ms: float) -> set[int]:
    """Returns the layers of the models that calibration trains for a model of `count` layers and such steps."""
    seen = set()

    def steps_ms(steps, *unused):
        seen.add(steps.new_model().config.num_hidden_layers)
        return [10.0]

    model, hardware = FAMILIES["llama"].build(num_hidden_layers=count), hardware_preset("cpu", 1, 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration, "_steps_ms", steps_ms)
        patch.setattr(calibration, "STEP_MS", step_ms)
        calibrated(counted(count), model, hardware, rows=4, length=32, device=torch.device("cpu"), seconds=0.0)
    return seen


def tried_plans(seconds: float, *passes: tuple[float, ...]) -> tuple[list[str], list[float]]:
    """Returns the plans that calibration tries, and what it finds if the steps of its passes take so many ms."""
    tried, seen = [], []

    def steps_ms(steps, plan, *unused):
        tried.append(plan.to_json())
        return list(passes[tried.count(tried[-1]) - 1])

    def fitted(predicted, measured):
        seen.extend(measured.tolist())
        return (1.0,) * len(CALIBRATION_FACTORS), (0.0,) * len(WAITS), 0.0

    model, hardware = FAMILIES["llama"].build(num_hidden_layers=4), hardware_preset("cpu", 1, 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration, "_steps_ms", steps_ms)
        patch.setattr(calibration, "fitted_factors", fitted)
        options = dict(rows=4, length=32, device=torch.device("cpu"), seconds=seconds)
        calibrated(counted(4), model, hardware, **options)
    return tried, seen


def test_groups_of_a_plan_are_freed_and_made_again():
    model, plan = FAMILIES["llama"].build(), pipelined([(0,), (1,)], (LayerStrategy(),) * 4)
    batch = BATCHES["plain"]()

    def work() -> list[float]:
        world, losses = WorldMesh("cpu"), []
        for _ in range(2):
            parallel = parallelize(copy.deepcopy(model), plan, world)
            losses.append(float(parallel.forward_backward(batch)))
            groups = [group for group in world.own_groups().values() if group is not dist.group.WORLD]
            assert groups
            world.free()
            for group in groups:
                with pytest.raises(ValueError, match="not initialized"):
                    dist.get_backend(group)
        return losses

    first, second = on_ranks(work, 2)[0]
    assert first == second
