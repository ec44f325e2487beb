# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Reads what a training run has left in its output folder."""

from __future__ import annotations

import os
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from galvatron_hf.plan import ParallelPlan
from galvatron_hf.planner.report.explain import Explanation, explain_plan
from galvatron_hf.planner.report.run_files import (
    PLAN_FILE,
    PROFILES_FILE,
    RUN_FILE,
    WARM_UP,
    PlanProfiles,
    TrainingRun,
    is_number,
    read_values,
)
from galvatron_hf.plots.spans import StepTimeline, measured_timeline


STATE_FILE = "trainer_state.json"
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """Holds everything that the page of a run shows.

    Attributes:
        folder (`str`): the output folder.
        plan ([`ParallelPlan`]): the plan of `parallel_plan.json`.
        run ([`TrainingRun`], *optional*): what was logged and measured.
        profiles ([`PlanProfiles`], *optional*): what the plan was searched with.
        explanation ([`Explanation`], *optional*): the prediction by parts, computed again from the profiles.
        timeline ([`StepTimeline`], *optional*): a measured step of `timeline.json`.
        sources (`tuple[str, ...]`): the files that were read.
        missing (`tuple[str, ...]`): sentences about what is not known, and how to have it.
    """

    folder: str
    plan: ParallelPlan
    run: TrainingRun | None = None
    profiles: PlanProfiles | None = None
    explanation: Explanation | None = None
    timeline: StepTimeline | None = None
    sources: tuple[str, ...] = ()
    missing: tuple[str, ...] = field(default_factory=tuple)

    @property
    def outcome(self) -> Mapping[str, Any]:
        """Returns predicted and measured time and memory; empty if nothing was compared."""
        return (self.run.outcome if self.run else None) or {}

    @property
    def predicted_ms(self) -> float | None:
        """Returns the predicted time of a step that the plan notes."""
        noted = self.plan.meta.get("predicted")
        value = noted.get("step_ms") if isinstance(noted, Mapping) else None
        return float(value) if type(value) in (int, float) and value > 0 else None

    @property
    def predicted_bubble_percent(self) -> float | None:
        """Returns the predicted share of a step in which the busiest pipeline rank waits, in percent."""
        bubble_ms = self.plan.meta["predicted"].get("bubble_ms") if self.predicted_ms is not None else None
        return 100 * bubble_ms / self.predicted_ms if is_number(bubble_ms) else None

    @property
    def bubbles(self) -> Sequence[float]:
        """Returns the measured shares of the logs, in percent, without those of the warm-up alone if there are others;
        empty without a pipeline.
        """
        logs = [log for log in self.logs if is_number(log.get("bubble_percent"))]
        later = [log for log in logs if not is_number(log.get("step")) or log["step"] > WARM_UP]
        return [log["bubble_percent"] for log in later or logs]

    @property
    def bubble_percent(self) -> float | None:
        """Returns the median of [`RunReport.bubbles`]; None if nothing was measured."""
        return statistics.median(self.bubbles) if self.bubbles else None

    @property
    def predicted_bytes(self) -> Sequence[int]:
        """Returns the predicted peak of each pipeline rank that the plan notes; empty if it notes none."""
        noted = self.plan.meta.get("predicted")
        sizes = noted.get("memory_bytes") if isinstance(noted, Mapping) else None
        complete = isinstance(sizes, Sequence) and len(sizes) == len(self.plan.rank_groups)
        return list(sizes) if complete else []

    @property
    def logs(self) -> Sequence[Mapping[str, Any]]:
        """Returns Trainer's log; empty if there is none."""
        return self.run.log_history if self.run else []


def read_run(folder: str | os.PathLike, trace: str | os.PathLike | None = None) -> RunReport:
    """Reads the files of a run.

    Args:
        folder (`str` or `os.PathLike`): Its `output_dir`.
        trace (`str` or `os.PathLike`, *optional*): A `timeline.json`, or its folder; by default that of the run.

    Raises:
        ValueError: if the folder has no plan, or a file in it is broken.
    """
    root = Path(folder)
    if not (root / PLAN_FILE).is_file():
        raise ValueError(
            f"{os.fspath(folder)!r} has no {PLAN_FILE}, so that no training under a plan has begun there: give the "
            "output_dir of such a run."
        )
    found = RunReport(folder=root.resolve().name, plan=ParallelPlan.from_json(root / PLAN_FILE), sources=(PLAN_FILE,))
    found = _with_predictions(_with_run(found, root), root)
    return _with_trace(found, root, trace)


def _with_run(found: RunReport, root: Path) -> RunReport:
    run, source = None, RUN_FILE
    if (root / RUN_FILE).is_file():
        run = TrainingRun.from_json(root / RUN_FILE)
        if not _is_under(run, found.plan):
            run, found = None, _lacking(found, f"{RUN_FILE} is of another plan than {PLAN_FILE}, and was not used.")
    if run is None:
        source = _state_file(root)
        if source is None:
            return _lacking(found, "The log of the run is missing: training has not ended, and saved no checkpoint.")
        state = read_values(root / source)
        logs = state.get("log_history")
        if not isinstance(logs, list) or not all(isinstance(log, Mapping) for log in logs):
            raise ValueError(f"{os.fspath(root / source)!r} has no log_history: give the output_dir of a run.")
        step = state.get("global_step")
        run = TrainingRun(global_step=step if type(step) is int else 0, log_history=logs)
        found = _lacking(found, f"{RUN_FILE} is missing, because training has not ended: the log is that of {source}.")
    found = replace(found, run=run, sources=(*found.sources, source))
    if run.outcome is None:
        noted = found.plan.meta.get("predicted")
        if source == RUN_FILE and isinstance(noted, Mapping):
            others = {name: value for name, value in found.plan.meta.items() if name != "predicted"}
            return _lacking(
                replace(found, plan=replace(found.plan, meta=others)),
                f"The plan's prediction is for steps of {noted.get('rows')} rows and not for those of this run, so "
                "that it was not used, and step times and peak memory were not measured.",
            )
        return _lacking(
            found,
            "Step times and peak memory were not measured: that is done under a plan with a prediction for the "
            "run's batch, as parallel_plan='auto' and galvatron search --output make them.",
        )
    return found


def _is_under(run: TrainingRun, plan: ParallelPlan) -> bool:
    """Returns whether a run was under a plan, or may have been: earlier releases did not write it."""
    if run.plan is not None:
        return ParallelPlan.from_json(run.plan) == plan
    return run.outcome is None or len(run.outcome["measured_bytes"]) == len(plan.rank_groups)


def _state_file(root: Path) -> str | None:
    """Returns the newest state of the Trainer, of the folder or of a checkpoint: another run may have left some there
    with more steps.
    """
    steps = {root: -1} | {
        path: int(match[1]) for path in root.iterdir() if (match := _CHECKPOINT.fullmatch(path.name))
    }
    files = [(path / STATE_FILE, step) for path, step in steps.items() if (path / STATE_FILE).is_file()]
    if not files:
        return None
    newest, _ = max(files, key=lambda one: (one[0].stat().st_mtime_ns, one[1]))
    return newest.relative_to(root).as_posix()


def _with_predictions(found: RunReport, root: Path) -> RunReport:
    if not (root / PROFILES_FILE).is_file():
        return _lacking(
            found,
            "Predictions by part are missing, because the plan was not searched in this run: galvatron explain shows "
            "them for a model and a cluster.",
        )
    profiles = PlanProfiles.from_json(root / PROFILES_FILE)
    if RUN_FILE in found.sources and not found.outcome:
        return _lacking(found, f"{PROFILES_FILE} is of steps of other rows than this run's, and was not used.")
    if _priced(profiles.plan) != _priced(found.plan):
        return _lacking(found, f"{PROFILES_FILE} is of another plan than {PLAN_FILE}, and was not used.")
    explanation = explain_plan(profiles.hardware, profiles.model, profiles.workload, _priced(profiles.plan))
    return replace(found, profiles=profiles, explanation=explanation, sources=(*found.sources, PROFILES_FILE))


def _priced(plan: ParallelPlan) -> ParallelPlan:
    """Returns the part of a plan that the cost model prices: the arguments add number formats and groups to it."""
    return replace(plan, precision=None, sequence_groups=None)


def _with_trace(found: RunReport, root: Path, trace: str | os.PathLike | None) -> RunReport:
    recorded = [found.run.trace] if found.run and found.run.trace else []
    places = [Path(trace)] if trace is not None else [root, *(root / one for one in recorded)]
    for place in places:
        file = place / "timeline.json" if place.is_dir() else place
        if file.is_file():
            return replace(found, timeline=measured_timeline(file), sources=(*found.sources, file.name))
    if trace is not None:
        raise ValueError(f"{os.fspath(trace)!r} has no timeline.json: give the trace_dir of the run.")
    return _lacking(found, "A measured timeline is missing: train with trace_dir, and give it as --trace.")


def _lacking(found: RunReport, sentence: str) -> RunReport:
    return replace(found, missing=(*found.missing, sentence))
