# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Measured step time and memory of a training run, next to the prediction of its plan."""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import TrainerCallback

from galvatron_hf.parallel.comm.objects import gather_objects
from galvatron_hf.plan import ParallelPlan
from galvatron_hf.planner.report.run_files import WARM_UP
from galvatron_hf.trainer.planning.cpu_peak_memory import allocation_peak, allocations_profiler
from galvatron_hf.utils.compat import profiler_is_running


MIB = 1 << 20


class StepMeter(TrainerCallback):
    """Times optimizer steps, from the batch that has been read to the update, and finds their peak memory. A GPU's
    allocator reports the peak of all steps. On a CPU the first two steps run under PyTorch's profiler, which records
    every allocation; the bytes that exist before them (`held_bytes`) are added. These steps are not timed. `seconds`
    are the times of the steps after the warm-up, `peak_bytes` is the peak memory of this rank. What was recorded is
    read in the context `apart`, which leaves that time out of the pace of training.
    """

    def __init__(
        self,
        device: torch.device,
        held_bytes: Callable[[], int],
        apart: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ):
        self.device, self.held_bytes, self.apart = device, held_bytes, apart
        self.seconds: list[float] = []
        self.peak_bytes: int | None = None
        self._steps = 0
        self._began: Any = None
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._recording: tuple[torch.autograd.profiler.profile, int] | None = None

    def on_train_begin(self, args, state, control, **kwargs):
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        elif not profiler_is_running():
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler would log its start and stop
            self._recording = allocations_profiler(), self.held_bytes()
            self._recording[0].__enter__()

    def on_step_begin(self, args, state, control, **kwargs):
        self._began = _recorded_event() if self.device.type == "cuda" else time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        self._steps += 1
        if self._steps == WARM_UP:
            with self.apart():
                self._end_recording()
        elif self._steps > WARM_UP and self.device.type == "cuda":
            self._events.append((self._began, _recorded_event()))
        elif self._steps > WARM_UP:
            self.seconds.append(time.perf_counter() - self._began)

    def _end_recording(self) -> None:
        if self._recording is not None:
            (profiler, held), self._recording = self._recording, None
            profiler.__exit__(None, None, None)
            if self._steps == WARM_UP:
                self.peak_bytes = held + allocation_peak(profiler)

    @contextlib.contextmanager
    def measuring(self) -> Iterator[None]:
        """Ends the measurement after the body, which trains."""
        try:
            yield
        finally:
            self.finish()

    def finish(self) -> None:
        self._end_recording()
        if self.device.type == "cuda" and self._steps:
            torch.cuda.synchronize(self.device)
            self.seconds = [begin.elapsed_time(end) / 1e3 for begin, end in self._events]
            self.peak_bytes = torch.cuda.max_memory_allocated(self.device)


def _recorded_event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def held_bytes(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Returns the bytes of a rank's weights, gradients, buffers and optimizer state; shared storages count once."""
    tensors = [*model.parameters(), *model.buffers()]
    tensors += [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    tensors += [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    locals_ = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in locals_}
    return sum(storages.values())


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Compares prediction and measurement of a training run.

    Attributes:
        predicted_ms (`float`): predicted time of a step.
        measured_ms (`float`, *optional*): median of the steps after the warm-up; None if there were none.
        steps (`int`): number of timed steps.
        predicted_bytes, measured_bytes (`tuple[int | None, ...]`): peak of a rank at each pipeline rank, which runs
            one or several stages.
        step_ms (`tuple[float, ...]`): measured times of this rank's steps after the warm-up.
    """

    predicted_ms: float
    measured_ms: float | None
    steps: int
    predicted_bytes: tuple[int, ...]
    measured_bytes: tuple[int | None, ...]
    step_ms: tuple[float, ...] = ()

    def __str__(self) -> str:
        lines = []
        if self.measured_ms is None:
            lines.append(f"Predicted {self.predicted_ms:.1f} ms a step; the run was too short to measure it.")
        else:
            off = 100 * (self.measured_ms / self.predicted_ms - 1)
            lines.append(
                f"Predicted {self.predicted_ms:.1f} ms a step, measured {self.measured_ms:.1f} ms ({off:+.1f}%), the "
                f"median of {self.steps} steps."
            )
        for group, (predicted, measured) in enumerate(zip(self.predicted_bytes, self.measured_bytes, strict=True)):
            where = f" of pipeline rank {group}" if len(self.predicted_bytes) > 1 else ""
            text = "not measured" if measured is None else f"measured {measured / MIB:,.1f} MiB"
            if measured is not None:
                text += f" ({100 * (measured / predicted - 1):+.1f}%)"
            lines.append(f"Predicted {predicted / MIB:,.1f} MiB on a rank{where} at most, {text}.")
        return "\n".join(lines)


def prediction(plan: ParallelPlan) -> Mapping[str, Any] | None:
    """Returns the prediction that a search has noted in a plan's `meta`, or None if it is not complete."""
    noted = plan.meta.get("predicted")
    if not isinstance(noted, Mapping):
        return None
    step_ms, sizes = noted.get("step_ms"), noted.get("memory_bytes")
    numbers = isinstance(sizes, Sequence) and len(sizes) == len(plan.rank_groups)
    numbers = numbers and all(_positive(size) for size in sizes)
    return noted if numbers and _positive(step_ms) else None


def is_predicted(plan: ParallelPlan, rows: int) -> bool:
    """Returns whether a search has predicted a plan for steps of this number of rows."""
    noted = prediction(plan)
    return noted is not None and noted.get("rows", rows) == rows


def _positive(value: Any) -> bool:
    return type(value) in (int, float) and value > 0


def outcome(meter: StepMeter, plan: ParallelPlan) -> Outcome:
    """Returns the measurements of all ranks; collective."""
    noted = prediction(plan)
    ranks = gather_objects((statistics.median(meter.seconds) if meter.seconds else None, meter.peak_bytes))
    seconds = [one for one, _ in ranks if one is not None]
    peaks = []
    for members in plan.rank_groups:
        known = [ranks[rank][1] for rank in members if ranks[rank][1] is not None]
        peaks.append(max(known, default=None))
    return Outcome(
        predicted_ms=noted["step_ms"],
        measured_ms=1e3 * max(seconds) if seconds else None,
        steps=len(meter.seconds),
        predicted_bytes=tuple(noted["memory_bytes"]),
        measured_bytes=tuple(peaks),
        step_ms=tuple(1e3 * one for one in meter.seconds),
    )
