# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Calibrates a model profile with the planner's cost model."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from galvatron_hf.plan import ParallelPlan
from galvatron_hf.planner.cost.workload import Workload
from galvatron_hf.planner.estimate import estimate_plan
from galvatron_hf.profiler.measure.calibration import calibrate_profile
from galvatron_hf.profiler.profiles.hardware import HardwareProfile
from galvatron_hf.profiler.profiles.model import ModelProfile


def calibrated(
    profile: ModelProfile, model: PreTrainedModel, hardware: HardwareProfile, **options: Any
) -> ModelProfile:
    """Returns the profile with the factors that bring the cost model nearest to measured steps; collective. Both
    profiles were measured on these ranks; `model` gives the configuration; `options` are those of
    [`calibrate_profile`].
    """

    def predict(profile: ModelProfile, plan: ParallelPlan, rows: int, length: int) -> tuple[float, int]:
        workload = Workload(rows=rows, length=length, precision=plan.precision)
        estimate = estimate_plan(hardware, profile, workload, plan)
        return estimate.step_ms, max(estimate.memory_bytes)

    return calibrate_profile(profile, model, predict, memory_bytes=hardware.memory_bytes, **options)
