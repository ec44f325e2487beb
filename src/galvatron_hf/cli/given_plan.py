# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Reads the plan of --plan: a file of this project or of Galvatron, or words."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from dataclasses import asdict, replace

from galvatron_hf.interop.galvatron.plan import read_galvatron_plan
from galvatron_hf.plan import ParallelPlan
from galvatron_hf.plan.plan_words import PlanWords
from galvatron_hf.plan.serialization import read_object
from galvatron_hf.plan.validation import divisors
from galvatron_hf.planner.cost.workload import Workload
from galvatron_hf.planner.estimate import estimate_plan
from galvatron_hf.profiler.profiles.hardware import HardwareProfile
from galvatron_hf.profiler.profiles.model import ModelProfile


def read_plan(
    given: argparse.Namespace, hardware: HardwareProfile, model: ModelProfile, workload: Workload, budget: int
) -> ParallelPlan:
    """Reads a plan of this project or of Galvatron, or makes a plan in words. If its words do not say how many
    micro-batches it has, it has the number with which it is fastest, of those that divide the rows and fit.
    """
    words = None if os.path.isfile(given.plan) else PlanWords.from_text(given.plan)
    if words is None:
        raw = read_object(given.plan)
        plan = read_galvatron_plan(raw, hardware.world_size) if "pp_deg" in raw else ParallelPlan.from_json(raw)
        _check_degrees(plan, model)
        return plan
    plan = words.plan(hardware.world_size, model.stack_sizes)
    _check_degrees(plan, model)
    if words.micro_batches is not None or workload.rows == 1:
        return plan
    found = []
    for count in divisors(workload.rows):
        with contextlib.suppress(ValueError):  # such as fewer micro-batches than stages
            found.append(estimate_plan(hardware, model, workload, replace(plan, micro_batches=count)))
    fitting = [one for one in found if max(one.memory_bytes) <= budget]
    if fitting:
        return min(fitting, key=lambda one: one.step_ms).plan
    return min(found, key=lambda one: max(one.memory_bytes)).plan if found else plan


def _check_degrees(plan: ParallelPlan, model: ModelProfile) -> None:
    """Raises ValueError with the tensor degrees of the model's profile if a layer has another one."""
    known = sorted({degree for kind in model.kinds for degree in kind.times})
    for index, layer in enumerate(plan.layers):
        if layer.tensor not in known:
            raise ValueError(
                f"Layer {index} has tensor {layer.tensor}, and the profile of {model.name} has the tensor degrees "
                f"{', '.join(map(str, known))}: use one of these."
            )


def warn_of_precision(plan: ParallelPlan, workload: Workload) -> None:
    """Warns on standard error if the plan has other number formats than the prediction."""
    if plan.precision not in (None, workload.precision):
        own, priced_in = (json.dumps(asdict(precision)) for precision in (plan.precision, workload.precision))
        print(f"The plan's precision is {own}; the prediction is for {priced_in}.", file=sys.stderr)
