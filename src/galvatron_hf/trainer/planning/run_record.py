# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Writes the files of a training run from which `galvatron report` makes its page."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
from torch import nn
from transformers import TrainerState, TrainingArguments
from transformers.utils import logging

from galvatron_hf.plan import ParallelPlan
from galvatron_hf.planner.report.run_files import MOST_STEPS, PROFILES_FILE, RUN_FILE, PlanProfiles, TrainingRun
from galvatron_hf.planner.search import SearchResult
from galvatron_hf.trainer.data.step_prefetch import StepPlacement
from galvatron_hf.trainer.planning.step_meter import Outcome, prediction


logger = logging.get_logger(__name__)


def write_profiles(result: SearchResult | None, plan: ParallelPlan, args: TrainingArguments) -> None:
    """Writes what a plan was searched with into the output folder; on rank 0, which has the result of the search. A
    plan without a prediction was not searched.
    """
    if result is None or prediction(plan) is None or not args.should_save:
        return
    profiles = PlanProfiles(
        plan=plan,
        hardware=result.hardware,
        model=result.model,
        workload=result.workload,
        memory_bytes=result.memory_bytes,
    )
    _write(profiles.to_json, args, PROFILES_FILE)


def forget_run(args: TrainingArguments) -> None:
    """Removes what an earlier run has left in the output folder, when training begins: a run that does not come to its
    end must not be reported with the numbers of another.
    """
    if args.should_save:
        with contextlib.suppress(OSError):
            os.remove(os.path.join(args.output_dir, RUN_FILE))


def write_run(
    state: TrainerState,
    args: TrainingArguments,
    outcome: Outcome | None,
    placed: tuple[StepPlacement, np.ndarray] | None,
    trace: str | None,
    model: nn.Module,
    plan: ParallelPlan,
) -> None:
    """Writes what a run has logged and measured into the output folder; on rank 0. `placed` is the placement of the
    last packed step with the tokens of its documents, `trace` the folder of the run's timeline.
    """
    if not (args.should_save and state.is_world_process_zero):
        return
    compared = {} if outcome is None else asdict(outcome)
    step_ms = compared.pop("step_ms", ())
    run = TrainingRun(
        global_step=state.global_step,
        log_history=state.log_history,
        outcome=compared or None,
        step_ms=list(step_ms)[-MOST_STEPS:],
        deal=None if placed is None else _deal(*placed),
        trace=None if not trace else os.path.relpath(trace, args.output_dir),
        model=type(model).__name__,
        plan=json.loads(plan.to_json()),
    )
    _write(run.to_json, args, RUN_FILE)


def _deal(placed: StepPlacement, lengths: np.ndarray) -> dict[str, Any]:
    placement = placed.placement
    return {
        "lengths": lengths.tolist(),
        "micro_batches": placement.micro_batches,
        "shared": placement.shared,
        "predicted_imbalance": placed.imbalance,
    }


def _write(write: Callable[[str], None], args: TrainingArguments, name: str) -> None:
    """Writes a file; a failure is a warning, because training does not need the file."""
    try:
        os.makedirs(args.output_dir, exist_ok=True)
        write(os.path.join(args.output_dir, name))
    except (OSError, TypeError, ValueError) as error:
        logger.warning(f"{name} cannot be written into {args.output_dir} ({error}): galvatron report will lack it.")
