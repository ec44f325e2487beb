# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Measures how much longer computation and communication take in whole training steps than alone.
Between two collectives the ranks do not keep exactly the same pace, and each collective waits for the slowest. Kernels
find cold caches, and collectives meet each other. A few simple plans of a model with few layers are therefore trained
for some steps on the real ranks. The profile keeps the factors, the wait before each collective of activations, and
what each use of sharded weights takes, that bring the predictions nearest to the measured steps.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from scipy.optimize import least_squares
from torch import nn
from transformers import PreTrainedModel

from galvatron_hf.models.families import adapter_for
from galvatron_hf.models.lora import has_adapters
from galvatron_hf.parallel.comm.mesh import WorldMesh
from galvatron_hf.parallel.comm.objects import from_rank_0, gather_objects, is_rank_0
from galvatron_hf.parallel.data_parallel.sharding import DTYPES
from galvatron_hf.parallel.parallelize import parallelize
from galvatron_hf.parallel.validate import check_model
from galvatron_hf.plan import ParallelPlan, Precision
from galvatron_hf.profiler.measure.rounds import WANTED_ERROR, median_error, phase
from galvatron_hf.profiler.profiles.model import CALIBRATION_FACTORS, ModelProfile
from galvatron_hf.profiler.trace.isolated_rows import batch_of_rows
from galvatron_hf.profiler.trace.small_models import image_positions, layer_kinds, most_copies, one_of_each
from galvatron_hf.utils.progress import progress_bar


MOST_TOKENS = 4096  # of a rank in a step
LAYERS = 4, 8  # layers of each kind: fewest and most
STEP_MS = 100.0  # layers are added until a step is predicted to take this long, so that its noise is small
# On shared CPUs the speed differs between steps and between minutes. A first pass measures all plans, up to two more
# passes those whose steps differ too much. The first step of a pass is slower than the others and does not count.
PASSES, WARM_UP, STEPS = 3, 1, 3
SETUP_SECONDS = 0.5  # of a plan in one pass, approximately
MICRO_BATCHES = 8  # of plans that are to wait for many messages
MEMORY_SHARE = 0.5  # share of a device's memory that a plan may use
LEAST, MOST = 0.25, 8.0  # factors outside these bounds are disturbances
NOISE, SPREAD = 0.04, 1.0  # relative noise of a measured step; prior deviation of factors
WAITS = ("collective_launch_ms", "weights_launch_ms")
WAIT_SPREAD = 1.0, 4.0  # prior deviation in ms

# (profile, plan, rows, length) -> (milliseconds of a step, largest bytes of a rank)
Predict = Callable[[ModelProfile, ParallelPlan, int, int], tuple[float, int]]


@dataclass(frozen=True, kw_only=True)
class _Steps:
    """Describes trial training steps: `rows` of `length` tokens, with a model of `copies` layers of each kind."""

    model: PreTrainedModel
    copies: int
    rows: int
    length: int
    device: torch.device
    length_ratio: float = 1.0
    dtype: str = "fp32"

    def batch(self) -> dict[str, torch.Tensor]:
        """Returns rows of tokens and their labels; a second stack has these as tokens, `length_ratio` as many."""
        ids = torch.arange(self.rows * self.length, device=self.device).reshape(self.rows, self.length)
        ids %= getattr(self.model.config, "vocab_size", 2)
        adapter = adapter_for(self.model)
        if len(adapter.stacks) == 1:
            return batch_of_rows(adapter, ids, DTYPES[self.dtype])
        labels = ids[:, :1].expand(self.rows, max(1, round(self.length * self.length_ratio))).contiguous()
        last = adapter.stacks[-1]
        return {"input_ids": ids, last.tokens.ids: labels, "labels": labels}

    def new_model(self) -> PreTrainedModel:
        """Returns the model on the meta device. One with adapters has random weights, as no source makes them, and so
        has one of images, whose weights before the layers are not made one by one.
        """
        made = one_of_each(self.model, self.copies)
        if not has_adapters(made) and image_positions(self.model) is None:
            return made
        for module in made.modules():
            for name, weight in module.named_parameters(recurse=False):
                values = torch.empty(weight.shape, device=self.device).normal_(std=0.02)
                setattr(module, name, nn.Parameter(values, requires_grad=weight.requires_grad))
        made.tie_weights()
        return made.to(self.device)


def calibrate_profile(
    profile: ModelProfile,
    model: PreTrainedModel,
    predict: Predict,
    *,
    memory_bytes: int,
    rows: int,
    length: int,
    device: torch.device,
    seconds: float,
    accuracy: float = WANTED_ERROR,
    progress: bool = False,
) -> ModelProfile:
    """Returns the profile with factors for whole steps; collective. One rank alone keeps the profile.

    Args:
        profile ([`ModelProfile`]), model ([`PreTrainedModel`]): Profile measured on these ranks, and its model, of
            which only the configuration is used.
        predict (`Callable`): `predict(profile, plan, rows, length)` returns the milliseconds of a step, and the bytes
            of the rank that needs most.
        memory_bytes (`int`): Memory of a device.
        rows, length (`int`): Rows of a training step, and their tokens.
        accuracy (`float`): Wanted standard error of a plan's step, relative to the step.
        seconds (`float`): Approximate upper bound of the time. One plan is always tried.
    """
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    if world_size == 1:
        return profile
    rows, precision = max(world_size, min(rows, MOST_TOKENS * world_size // length)), Precision(compute=profile.dtype)
    few = _with_layers(profile, model, predict, rows, length)
    ratio = profile.head.length_ratio
    steps = _Steps(
        model=model,
        copies=few.layers.count(0),
        rows=rows,
        length=length,
        device=device,
        length_ratio=ratio,
        dtype=profile.dtype,
    )
    plans, step_ms = [], []
    for plan in _plans(steps.new_model(), rows, precision):
        ms, needed = predict(few, plan, rows, length)
        if needed < MEMORY_SHARE * memory_bytes:
            plans.append(plan)
            step_ms.append(ms)
    one_pass = sum(SETUP_SECONDS + 1e-3 * (WARM_UP + STEPS) * ms for ms in step_ms)
    with phase(f"steps of {len(plans)} simple plans", one_pass, min(PASSES * one_pass, seconds), progress):
        world = WorldMesh(device.type)
        measured = _measured(plans, steps, world, accuracy, seconds, progress)
        world.free()  # each communicator of a GPU takes memory
    if not measured:
        return profile

    def predicted(factors: np.ndarray, waits: np.ndarray) -> np.ndarray:
        factors_by_name = dict(zip(CALIBRATION_FACTORS, factors.tolist(), strict=True))
        waits_by_name = dict(zip(WAITS, waits.tolist(), strict=True))
        tried = replace(few, calibration_factors=factors_by_name, **waits_by_name)
        return np.array([predict(tried, plan, rows, length)[0] for plan in plans[: len(measured)]])

    factors, waits, error = from_rank_0(lambda: fitted_factors(predicted, np.array(measured)))
    made = {"whole steps": f"of {len(measured)} plans, {100 * error:.1f}% off in the median"}
    return replace(
        profile,
        calibration_factors=dict(zip(CALIBRATION_FACTORS, factors, strict=True)),
        **dict(zip(WAITS, waits, strict=True)),
        made=dict(profile.made) | made,
    )


def _with_layers(
    profile: ModelProfile, model: PreTrainedModel, predict: Predict, rows: int, length: int
) -> ModelProfile:
    """Returns the profile of a model with as few layers of each kind as make steps of `STEP_MS`."""
    there, adapter = min(profile.layers.count(kind) for kind in range(len(profile.kinds))), adapter_for(model)
    there = most_copies(model, min(there, LAYERS[1]))
    precision = Precision(compute=profile.dtype)
    for copies in range(min(there, LAYERS[0]), there + 1):
        small = one_of_each(model, copies)
        few = replace(profile, layers=layer_kinds(small), stacks=adapter.stack_sizes(small))
        plan = ParallelPlan.uniform(dist.get_world_size(), adapter.stack_sizes(small), precision=precision)
        if predict(few, plan, rows, length)[0] >= STEP_MS:
            break
    return few


def _measured(
    plans: Sequence[ParallelPlan], steps: _Steps, world: WorldMesh, accuracy: float, seconds: float, progress: bool
) -> list[float]:
    """Returns the median milliseconds of a step of each plan; of the first plans if there is no time for all."""
    found: list[list[float]] = [[] for _ in plans]
    began, tried = time.perf_counter(), 0
    with progress_bar(len(plans), progress and is_rank_0()) as step:
        for number, index in itertools.product(range(PASSES), range(len(plans))):
            if number > 0 and median_error(found[index]) <= accuracy:
                continue
            spent = max(gather_objects(time.perf_counter() - began))
            if tried and spent + spent / tried > seconds:
                break
            step("training with simple plans")
            found[index] += _steps_ms(steps, plans[index], world)
            tried += 1
    return [statistics.median(of_plan) for of_plan in found if of_plan]


def fitted_factors(
    predicted: Callable[[np.ndarray, np.ndarray], np.ndarray], measured: np.ndarray
) -> tuple[tuple[float, ...], tuple[float, ...], float]:
    """Fits the factors, in the order of `CALIBRATION_FACTORS`, and the waits, in that of `WAITS`.
    Plan i has predicted and measured times p_i and m_i. The unknowns f_j are the factors (f0 = 1, s = SPREAD) and the
    waits in ms (f0 = 0, s = WAIT_SPREAD). The fit minimizes sum_i ((p_i / m_i - 1) / NOISE)^2 + sum_j ((f_j - f0_j) /
    s_j)^2. The second sum keeps the unknowns of work that is a small part of every plan near f0. `predicted` returns
    milliseconds [n] of the plans for factors [m] and waits [2]; `measured` are milliseconds [n]. Returns the factors,
    the waits, and the median of the remaining relative errors.
    """
    count = len(CALIBRATION_FACTORS)
    usual, spread = np.array([1.0] * count + [0.0] * len(WAITS)), np.array([SPREAD] * count + [*WAIT_SPREAD])
    bounds = np.array([(LEAST, MOST)] * count + [(0.0, np.inf)] * len(WAITS)).T

    def errors(found: np.ndarray) -> np.ndarray:
        return predicted(found[:count], found[count:]) / measured - 1

    def residuals(found: np.ndarray) -> np.ndarray:
        return np.concatenate([errors(found) / NOISE, (found - usual) / spread])

    # The predictions have kinks where another stage becomes the slowest, hence the large difference step.
    start = np.ones_like(usual)
    found = least_squares(residuals, start, bounds=bounds, diff_step=1e-3, xtol=1e-3, ftol=1e-4).x
    return tuple(found[:count].tolist()), tuple(found[count:].tolist()), float(np.median(np.abs(errors(found))))


def _plans(small: PreTrainedModel, rows: int, precision: Precision) -> list[ParallelPlan]:
    """Returns simple plans that each stress one kind of work."""
    world_size, adapter, many = dist.get_world_size(), adapter_for(small), min(MICRO_BATCHES, rows)
    kinds = [  # plans without which a factor would be unknown come first
        dict(sharding="replicate"),
        dict(sharding="zero3"),
        dict(sharding="replicate", ulysses=world_size),
        dict(sharding="replicate", tensor=world_size),
        dict(sharding="replicate", pipeline=2, micro_batches=4),
        dict(sharding="replicate", pipeline=4, micro_batches=many),
        dict(sharding="replicate", micro_batches=2),
        dict(sharding="zero2", ulysses=2, micro_batches=2, recompute="full"),
        dict(sharding="zero3", tensor=2, megatron_sp=True),
        dict(sharding="zero3", pipeline=2, micro_batches=many),
        dict(sharding="zero3", shard_degree=1, pipeline=2, micro_batches=many),  # copies weights, and sends none
        dict(sharding="zero2", tensor=2, micro_batches=2),
        dict(sharding="replicate", pipeline=2, ulysses=2, micro_batches=many, recompute="full"),
        dict(sharding="zero3", shard_degree=2, recompute="full", micro_batches=2),
    ]
    plans = []
    for kind in kinds:
        try:
            plan = ParallelPlan.uniform(world_size, adapter.stack_sizes(small), precision=precision, **kind)
            check_model(small, adapter, plan)
        except ValueError:  # the strategy does not fit the model's heads or the world
            continue
        plans.append(plan)
    return plans


def _steps_ms(steps: _Steps, plan: ParallelPlan, world: WorldMesh) -> list[float]:
    """Returns the milliseconds of a few steps, each on its slowest rank."""
    device = steps.device
    parallel = parallelize(steps.new_model(), plan, world=world, device=device)
    optimizer = torch.optim.AdamW(parallel.model.parameters(), lr=1e-5, fused=True)
    batch, found = steps.batch(), []
    while len(found) < WARM_UP + STEPS:
        dist.all_reduce(torch.zeros(1, device=device))
        began = _now(device)
        parallel.forward_backward(batch)
        parallel.clip_grad_norm_(1.0)
        optimizer.step()
        parallel.model.zero_grad()
        found.append(max(gather_objects(1e3 * (_now(device) - began))))
    del parallel, optimizer
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the next plan needs blocks of other sizes
    return found[WARM_UP:]


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
