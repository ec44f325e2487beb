# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Defines the files that a training run leaves for its report: the profiles that its plan was searched with, and what
was logged and measured. They are JSON in the output folder, beside `parallel_plan.json`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from galvatron_hf.plan import ParallelPlan, Precision
from galvatron_hf.plan.serialization import check_version, read_object, write_file
from galvatron_hf.planner.cost.workload import Workload
from galvatron_hf.profiler.profiles.hardware import HardwareProfile
from galvatron_hf.profiler.profiles.model import ModelProfile


PLAN_FILE = "parallel_plan.json"
PROFILES_FILE = "plan_profiles.json"
RUN_FILE = "training_run.json"
VERSION = 1
MOST_STEPS = 10_000  # whose times are kept, the last ones
WARM_UP = 2  # steps that are not timed: caches and allocators fill, and on a CPU memory is recorded


@dataclass(frozen=True, kw_only=True)
class PlanProfiles:
    """Holds what a plan was searched with: from it, all predictions can be computed again.

    Attributes:
        plan ([`ParallelPlan`]): the plan that was found.
        hardware ([`HardwareProfile`]), model ([`ModelProfile`]), workload ([`Workload`]): what it was priced with.
        memory_bytes (`int`): bytes that it might use on a rank.
    """

    plan: ParallelPlan
    hardware: HardwareProfile
    model: ModelProfile
    workload: Workload
    memory_bytes: int

    def to_json(self, path: str | os.PathLike) -> None:
        """Writes the profiles to a file."""
        profiles = {name: json.loads(getattr(self, name).to_json()) for name in ("plan", "hardware", "model")}
        values = {"version": VERSION, "memory_bytes": self.memory_bytes, "workload": asdict(self.workload)}
        write_file(path, json.dumps(values | profiles, indent=1) + "\n")

    @classmethod
    def from_json(cls, path: str | os.PathLike) -> PlanProfiles:
        """Reads a file; raises ValueError in one sentence if it is not such a file."""
        given = read_object(path, "file of profiles")
        check_version(given.get("version"))
        try:
            workload = dict(given["workload"])
            return cls(
                plan=ParallelPlan.from_json(given["plan"]),
                hardware=HardwareProfile.from_json(given["hardware"]),
                model=ModelProfile.from_json(given["model"]),
                workload=Workload(**workload | {"precision": Precision(**workload["precision"])}),
                memory_bytes=int(given["memory_bytes"]),
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"{os.fspath(path)!r} lacks a part or has a wrong one ({error}): train again.") from None


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """Holds what a training run has logged and measured.

    Attributes:
        global_step (`int`): steps of the run, with those before a checkpoint that it resumed from.
        log_history (`list[dict]`): Trainer's log.
        outcome (`dict`, *optional*): predicted and measured time and memory, as in `GalvatronTrainer.plan_outcome`;
            None under a plan without a prediction for this batch.
        step_ms (`Sequence[float]`): measured times of rank 0's last steps, without the warm-up; empty without
            `outcome`.
        deal (`dict`, *optional*): the documents of the last packed step: their `lengths`, the indices on each rank of
            each micro-batch (`micro_batches`), those that ranks share (`shared`: index, ranks, execution), and the
            `predicted_imbalance`.
        trace (`str`, *optional*): the folder of the run's `timeline.json`, from the output folder on.
        model (`str`, *optional*): name of the model's class.
        plan (`dict`, *optional*): the plan of the run, as its JSON; absent in files of earlier releases.
    """

    global_step: int
    log_history: Sequence[Mapping[str, Any]]
    outcome: Mapping[str, Any] | None = None
    step_ms: Sequence[float] = field(default_factory=list)
    deal: Mapping[str, Any] | None = None
    trace: str | None = None
    model: str | None = None
    plan: Mapping[str, Any] | None = None

    def to_json(self, path: str | os.PathLike) -> None:
        """Writes the run to a file."""
        write_file(path, json.dumps({"version": VERSION} | asdict(self), indent=1, default=_plain) + "\n")

    @classmethod
    def from_json(cls, path: str | os.PathLike) -> TrainingRun:
        """Reads a file; raises ValueError in one sentence if it is not such a file."""
        given = read_values(path)
        check_version(given.pop("version", None))
        try:
            run = cls(**given)
        except TypeError as error:
            raise ValueError(
                f"{os.fspath(path)!r} lacks a part or has an unknown one ({error}): train again."
            ) from None
        for name, (fits, kind) in _PARTS.items():
            if not fits(getattr(run, name)):
                raise ValueError(f"{name} of {os.fspath(path)!r} is no {kind}: train again.")
        return run


def is_number(value: Any) -> bool:
    """Returns whether a JSON value is a number, which may be infinite or NaN."""
    return type(value) in (int, float)


def _is_outcome(value: Any) -> bool:
    if value is None:
        return True
    sizes = value.get("measured_bytes") if isinstance(value, Mapping) else None
    known = isinstance(sizes, list) and all(one is None or is_number(one) for one in sizes)
    measured = value.get("measured_ms") if known else None
    return known and (measured is None or is_number(measured)) and is_number(value.get("steps"))


# What the parts of a training run are, beside a name of a folder and of a class.
_PARTS = {
    "global_step": (lambda value: type(value) is int, "whole number"),
    "log_history": (
        lambda value: isinstance(value, list) and all(isinstance(log, Mapping) for log in value),
        "list of objects",
    ),
    "outcome": (_is_outcome, "comparison of predicted and measured time and memory"),
    "step_ms": (lambda value: isinstance(value, list) and all(map(is_number, value)), "list of numbers"),
    "deal": (lambda value: value is None or isinstance(value, Mapping), "object"),
    "plan": (lambda value: value is None or isinstance(value, Mapping), "object"),
    "trace": (lambda value: value is None or isinstance(value, str), "path"),
    "model": (lambda value: value is None or isinstance(value, str), "name"),
}


def read_values(path: str | os.PathLike) -> dict[str, Any]:
    """Reads a JSON object that may have NaN and infinities, as Trainer writes them; raises ValueError in one sentence
    for other files.
    """
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no JSON"
        raise ValueError(f"{os.fspath(path)!r} cannot be read ({reason}): give a file of a training run.") from None
    if not isinstance(found, dict):
        raise ValueError(f"{os.fspath(path)!r} has no JSON object: give a file of a training run.")
    return found


def _plain(value: Any) -> Any:
    """Returns a number of NumPy or of a tensor as one of Python; json has no form for others."""
    if not hasattr(value, "item"):
        raise TypeError(f"a {type(value).__name__} is no JSON value")
    return value.item()
