# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Finds when each rank computes: as predicted, by playing the plan's schedule with predicted times, or as measured,
from the trace of a training run.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from galvatron_hf.plan.pipeline_shape import PipelineShape
from galvatron_hf.plan.table import ranks_text
from galvatron_hf.planner.report.explain import Explanation


FORWARD, BACKWARD, WAIT, SUMS, UPDATE = "forward", "backward", "wait", "gradient sums", "optimizer"
_WORK = re.compile(r"(?:wait: )?(forward|backward|send|receive)\b")


@dataclass(frozen=True, kw_only=True)
class PlayedSpan:
    """Holds what a row of the timeline does from `begin_ms` to `end_ms`, counted from the begin of the step.

    Attributes:
        kind (`str`): "forward", "backward", "wait", "gradient sums" or "optimizer".
        stage, micro_batch (`int`, *optional*): of a forward, a backward or a wait.
    """

    kind: str
    begin_ms: float
    end_ms: float
    stage: int | None = None
    micro_batch: int | None = None


@dataclass(frozen=True, kw_only=True)
class StepTimeline:
    """Holds the spans of one step.

    Attributes:
        rows (`Mapping[str, tuple[PlayedSpan, ...]]`): by the name of a rank, or of ranks that do the same.
        measured (`bool`): whether the times were measured; otherwise they are predicted.
        step_ms (`float`, *optional*): the step that the cost model predicts for the plan.
        step (`int`, *optional*): the number of a measured step.
        stages (`int`): number of stages.
    """

    rows: Mapping[str, tuple[PlayedSpan, ...]]
    measured: bool
    stages: int
    step_ms: float | None = None
    step: int | None = None

    @property
    def end_ms(self) -> float:
        """Returns the end of the last span."""
        return max(span.end_ms for spans in self.rows.values() for span in spans)

    @property
    def idle_share(self) -> float:
        """Returns the share of the rows' time in which they neither compute nor sum nor update."""
        busy = sum(span.end_ms - span.begin_ms for spans in self.rows.values() for span in spans if span.kind != WAIT)
        return 1 - busy / (len(self.rows) * self.end_ms)

    def values(self) -> dict[str, Any]:
        """Returns the timeline as JSON values."""
        return {
            "measured": self.measured,
            "predicted_step_ms": self.step_ms,
            "step": self.step,
            "end_ms": self.end_ms,
            "idle_share": self.idle_share,
            "rows": {name: [vars(span) for span in spans] for name, spans in self.rows.items()},
        }


def predicted_timeline(explanation: Explanation) -> StepTimeline:
    """Plays the schedule of a plan with the predicted forward and backward of each stage, in the order in which the
    runtime computes, and then the gradient sums, with the constant time of a step, and the update of each pipeline
    rank. Messages have no spans: their predicted time is part of the forward and the backward. The cost model has
    formulas for a step instead (docs/search.md), so that the end of the played step may differ from `step_ms`.
    """
    from galvatron_hf.plan.schedule import Work, actions  # it imports torch

    plan, stages = explanation.estimate.plan, explanation.stages
    shape = PipelineShape.from_plan(plan)
    orders = actions(shape, plan.micro_batch_count)
    waiting = {
        rank: [action for action in order if action.work in (Work.FORWARD, Work.BACKWARD)]
        for rank, order in enumerate(orders)
    }
    rank_of = shape.pipeline_rank_of_stage
    place_of = {stage: rank_of[:stage].count(rank) for stage, rank in enumerate(rank_of)}  # among its rank's stages
    done: dict[tuple[str, int, int], float] = {}
    clocks = [0.0] * len(orders)
    rows: list[list[PlayedSpan]] = [[] for _ in orders]

    def ready(action: Any) -> float | None:
        """Returns when an action's input is there; None if its sender has not computed it yet."""
        stage, part = action.stage, action.micro_batch
        if action.work is Work.FORWARD:
            return 0.0 if stage == 0 else done.get((FORWARD, stage - 1, part))
        following = 0.0 if stage == shape.stages - 1 else done.get((BACKWARD, stage + 1, part))
        own = done.get((FORWARD, stage, part))
        return None if None in (following, own) else max(following, own)

    while any(waiting.values()):
        before = sum(map(len, waiting.values()))
        for rank, order in waiting.items():
            while order and (begin := ready(order[0])) is not None:
                action = order.pop(0)
                kind = FORWARD if action.work is Work.FORWARD else BACKWARD
                times = getattr(stages[rank], f"{kind}_ms")
                begin = max(begin, clocks[rank])
                clocks[rank] = end = begin + times[place_of[action.stage]]
                done[kind, action.stage, action.micro_batch] = end
                rows[rank].append(
                    PlayedSpan(
                        kind=kind,
                        begin_ms=begin,
                        end_ms=end,
                        stage=action.stage,
                        micro_batch=action.micro_batch,
                    )
                )
        assert sum(map(len, waiting.values())) < before, "the schedule waits for itself"
    for rank, parts in enumerate(stages):
        for kind, ms in ((SUMS, parts.sync_ms + explanation.once_ms), (UPDATE, parts.update_ms)):
            if ms > 0:
                rows[rank].append(PlayedSpan(kind=kind, begin_ms=clocks[rank], end_ms=clocks[rank] + ms))
                clocks[rank] += ms
    return StepTimeline(
        rows={_name(group): tuple(spans) for group, spans in zip(plan.rank_groups, rows, strict=True)},
        measured=False,
        stages=shape.stages,
        step_ms=explanation.estimate.step_ms,
    )


def measured_timeline(path: str | os.PathLike, step: int | None = None) -> StepTimeline:
    """Reads a step from `timeline.json`, which a run with `trace_dir` writes.

    Args:
        path (`str` or `os.PathLike`): The file, or its folder.
        step (`int`, *optional*): The step, counted from 0; by default the last one.

    Raises:
        ValueError: if the file is no such trace, or has no such step.
    """
    file = os.path.join(path, "timeline.json") if os.path.isdir(path) else os.fspath(path)
    try:
        with open(file, encoding="utf-8") as opened:
            events = json.load(opened)["traceEvents"]
        spans = [event for event in events if event["ph"] == "X"]
        steps = sorted({event["args"]["step"] for event in spans})
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError) as error:
        reason = str(error).splitlines()[0] if isinstance(error, OSError) else f"it is no trace ({error!r})"
        raise ValueError(
            f"{file!r} cannot be read: {reason}; give the timeline.json of a run with trace_dir."
        ) from None
    if not spans:
        raise ValueError(f"{file!r} has no step: train longer with trace_dir.")
    chosen = steps[-1] if step is None else step
    if chosen not in steps:
        raise ValueError(f"{file!r} has no step {chosen}: give one of {steps[0]} to {steps[-1]}.")
    try:
        return _of_events([event for event in spans if event["args"]["step"] == chosen], chosen)
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"{file!r} cannot be read: step {chosen} is no trace ({error!r}); give the timeline.json of a run with "
            "trace_dir."
        ) from None


def _of_events(spans: Sequence[Mapping[str, Any]], step: int) -> StepTimeline:
    """Returns the timeline of a step from its events."""
    first = min(event["ts"] for event in spans)
    if not any(event["dur"] > 0 and event["cat"] in ("compute", "wait") for event in spans):
        raise ValueError(f"step {step} of the trace has no time of computing: give another step.")
    rows: dict[int, list[PlayedSpan]] = {}
    for event in spans:
        kind = _kind(event)
        if kind is not None:
            begin = (event["ts"] - first) / 1e3
            args = event["args"]
            span = PlayedSpan(
                kind=kind,
                begin_ms=begin,
                end_ms=begin + event["dur"] / 1e3,
                stage=args["stage"],
                micro_batch=args["micro_batch"],
            )
            rows.setdefault(event["pid"] - 1, []).append(span)
    return StepTimeline(
        rows={_name((rank,)): tuple(sorted(rows[rank], key=lambda span: span.begin_ms)) for rank in sorted(rows)},
        measured=True,
        stages=1 + max(event["args"]["stage"] for event in spans),
        step=step,
    )


def _kind(event: Mapping[str, Any]) -> str | None:
    """Returns the kind of a trace's event; None for the start of a send."""
    if event["cat"] == "wait":
        return WAIT
    if event["cat"] != "compute":
        return None
    match = _WORK.match(event["name"])
    return BACKWARD if match and match[1] == BACKWARD else FORWARD


def _name(ranks: tuple[int, ...]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks_text(ranks)}"
