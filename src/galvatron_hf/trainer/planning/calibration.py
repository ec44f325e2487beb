# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""What computing and communicating take in whole training steps, over what they take by themselves.

Between two collectives ranks do not keep exactly the same pace, and each collective waits for the slowest; kernels
find cold caches; a collective meets others on its way. A few simple plans of a model with few layers are trained for
some steps on the real ranks; the factors, and the wait before each collective of activations or weights, that bring
the cost model nearest to them are kept in the profile.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from scipy.optimize import least_squares
from transformers import PreTrainedModel

from galvatron_hf.models.families import adapter_for
from galvatron_hf.parallel.comm.mesh import WorldMesh
from galvatron_hf.parallel.comm.objects import from_rank_0, gather_objects, is_rank_0
from galvatron_hf.parallel.parallelize import parallelize
from galvatron_hf.parallel.validate import check_model
from galvatron_hf.plan import ParallelPlan, Precision
from galvatron_hf.planner.cost.workload import Workload
from galvatron_hf.planner.estimate import estimate_plan
from galvatron_hf.profiler.profiles.hardware import HardwareProfile
from galvatron_hf.profiler.profiles.model import CALIBRATION_FACTORS, ModelProfile
from galvatron_hf.profiler.trace.isolated_layers import layer_kinds, one_of_each
from galvatron_hf.utils.progress import progress_bar


MOST_TOKENS = 4096  # of a rank in a step
LAYERS = 8  # of each kind, at most: what a layer takes is then most of a step, and steps are longer than their noise
# Where CPUs are shared, single steps of a plan are a tenth apart, and so are minutes: of three passes, one that met a
# slow minute is outvoted. The first two steps are slower than all that follow.
PASSES, WARM_UP, ROUNDS = 3, 2, 4  # through all plans; steps of a plan in each, not counted and counted
MICRO_BATCHES = 8  # where waits before messages are to be many
MEMORY_SHARE = 0.5  # of a device's, that such a plan may take
LEAST, MOST = 0.25, 8.0  # factors beyond these are a disturbance and no property
NOISE, SPREAD = 0.04, 1.0  # of a measured step, of itself; of factors, and of the wait in milliseconds


def calibrated(
    profile: ModelProfile,
    model: PreTrainedModel,
    hardware: HardwareProfile,
    *,
    rows: int,
    length: int,
    device: torch.device,
    seconds: float,
    world: WorldMesh | None = None,
    progress: bool = False,
) -> ModelProfile:
    """
    The profile with factors for whole steps; collective. On one rank, and if nothing can be tried, it is as it was.

    Args:
        profile ([`ModelProfile`]): Of `model`, measured on these ranks.
        model ([`PreTrainedModel`]): Only its configuration is looked at.
        hardware ([`HardwareProfile`]): Of these ranks.
        rows, length (`int`): Of the steps that are tried.
        device (`torch.device`): Where they compute.
        seconds (`float`): After which, about, no further plan is tried, nor one once more.
        world ([`WorldMesh`], *optional*): Whose groups the plans use; new ones if absent, which stay.
        progress (`bool`, defaults to `False`): Whether rank 0 shows a bar.
    """
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    if world_size == 1:
        return profile
    copies = max(1, min(LAYERS, *(profile.layers.count(kind) for kind in range(len(profile.kinds)))))
    small = one_of_each(model, copies)
    few = replace(profile, layers=layer_kinds(small))
    rows = max(world_size, min(rows, MOST_TOKENS * world_size // length))
    work = Workload(rows=rows, length=length, precision=Precision(compute=profile.dtype))
    plans = [plan for plan in _plans(small, work) if _fits(hardware, few, work, plan)]
    world, steps = world or WorldMesh(device.type), [[] for _ in plans]
    began = time.perf_counter()
    with progress_bar(PASSES * len(plans), progress and is_rank_0()) as step:
        for tried, index in enumerate(list(range(len(plans))) * PASSES, start=1):
            step("trying whole steps")
            steps[index] += _steps_ms(one_of_each(model, copies), plans[index], work, world, device)
            spent = max(gather_objects(time.perf_counter() - began))
            if spent + spent / tried > seconds:
                break
    measured = [statistics.median(of_plan) for of_plan in steps if of_plan]
    if not measured:
        return profile

    def predicted(factors: np.ndarray, collective_launch_ms: float) -> np.ndarray:
        stretched = replace(
            few,
            calibration_factors=dict(zip(CALIBRATION_FACTORS, factors.tolist(), strict=True)),
            collective_launch_ms=collective_launch_ms,
        )
        return np.array([estimate_plan(hardware, stretched, work, plan).step_ms for plan in plans[: len(measured)]])

    factors, collective_launch_ms, off = from_rank_0(lambda: fitted_factors(predicted, np.array(measured)))
    made = dict(profile.made) | {"whole steps": f"of {len(measured)} plans, {100 * off:.1f}% off in the median"}
    calibration_factors = dict(zip(CALIBRATION_FACTORS, factors, strict=True))
    return replace(
        profile, calibration_factors=calibration_factors, collective_launch_ms=collective_launch_ms, made=made
    )


def fitted_factors(
    predicted: Callable[[np.ndarray, float], np.ndarray], measured: np.ndarray
) -> tuple[tuple[float, ...], float, float]:
    """
    The factors, in the order of `CALIBRATION_FACTORS`, and the wait that bring predictions nearest to what was
    measured.

    A measurement is known to `NOISE` of itself. A factor is 1, and the wait 0 ms, give or take `SPREAD` as long as no
    plan says otherwise: what is a small part of every plan keeps the figure that was measured by itself.

    Args:
        predicted (`Callable`): Milliseconds [n] of the plans under factors [m] and a wait in milliseconds.
        measured (`np.ndarray`): Milliseconds [n].

    Returns:
        `tuple`: The factors, the wait in milliseconds, and the median of the relative errors that are left.
    """
    usual = np.array([1.0] * len(CALIBRATION_FACTORS) + [0.0])
    bounds = np.array([(LEAST, MOST)] * len(CALIBRATION_FACTORS) + [(0.0, np.inf)]).T

    def errors(found: np.ndarray) -> np.ndarray:
        return predicted(found[:-1], float(found[-1])) / measured - 1

    def residuals(found: np.ndarray) -> np.ndarray:
        return np.concatenate([errors(found) / NOISE, (found - usual) / SPREAD])

    # Prices have kinks, where another stage becomes the slowest: differences are taken over a thousandth.
    start = np.ones_like(usual)
    found = least_squares(residuals, start, bounds=bounds, diff_step=1e-3, xtol=1e-3, ftol=1e-4).x
    *factors, collective_launch_ms = found.tolist()
    return tuple(factors), collective_launch_ms, float(np.median(np.abs(errors(found))))


def _plans(small: PreTrainedModel, work: Workload) -> list[ParallelPlan]:
    """Simple plans that stress one thing each."""
    world_size, adapter, many = dist.get_world_size(), adapter_for(small), min(MICRO_BATCHES, work.rows)
    kinds = [  # those without which a factor would be unknown come first
        dict(sharding="replicate"),
        dict(sharding="zero3"),
        dict(sharding="replicate", ulysses=world_size),
        dict(sharding="replicate", tensor=world_size),
        dict(sharding="replicate", pipeline=2, micro_batches=4),
        dict(sharding="replicate", pipeline=4, micro_batches=many),
        dict(sharding="replicate", micro_batches=2),
        dict(sharding="zero2", ulysses=2, micro_batches=2, recompute="full"),
        dict(sharding="zero3", tensor=2, megatron_sp=True),
        dict(sharding="zero2", tensor=2, micro_batches=2),
        dict(sharding="replicate", pipeline=2, ulysses=2, micro_batches=many, recompute="full"),
        dict(sharding="zero3", shard_degree=2, recompute="full", micro_batches=2),
    ]
    plans = []
    for kind in kinds:
        try:
            plan = ParallelPlan.uniform(world_size, adapter.stack_sizes(small), precision=work.precision, **kind)
            check_model(small, adapter, plan)
        except ValueError:  # this model's heads, or this world, cannot be cut so
            continue
        plans.append(plan)
    return plans


def _fits(hardware: HardwareProfile, few: ModelProfile, work: Workload, plan: ParallelPlan) -> bool:
    return max(estimate_plan(hardware, few, work, plan).memory_bytes) < MEMORY_SHARE * hardware.memory_bytes


def _steps_ms(
    model: PreTrainedModel, plan: ParallelPlan, work: Workload, world: WorldMesh, device: torch.device
) -> list[float]:
    """Of a few steps, each as long as on the slowest rank."""
    parallel = parallelize(model, plan, world=world, device=device)
    optimizer = torch.optim.AdamW(parallel.model.parameters(), lr=1e-5, fused=True)
    ids = torch.arange(work.rows * work.length, device=device).reshape(work.rows, work.length)
    ids %= model.config.vocab_size
    batch, times = {"input_ids": ids, "labels": ids}, []
    for _ in range(WARM_UP + ROUNDS):
        dist.all_reduce(torch.zeros(1, device=device))
        began = _now(device)
        parallel.forward_backward(batch)
        parallel.clip_grad_norm_(1.0)
        optimizer.step()
        parallel.model.zero_grad()
        times.append(1e3 * (_now(device) - began))
    found = [max(of_step) for of_step in zip(*gather_objects(times[WARM_UP:]), strict=True)]
    del parallel, optimizer, model
    gc.collect()
    return found


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
