# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""What a run logs of its steps: their time, MFU and memory, beside what was predicted."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback

from galvatron_hf.parallel.pipeline.waits import Waits
from galvatron_hf.profiler.profiles.devices import device_of_name
from galvatron_hf.profiler.trace.training_flops import TrainingFlops
from galvatron_hf.utils.machine import device_name
from galvatron_hf.utils.units import GIB


class Pace(TrainerCallback):
    """Times the optimizer steps between two logs, from the batch that has been read to the update, and adds to a log
    of training:

    - `step_ms`: the mean time of these steps. On a GPU the host runs ahead by a step at most.
    - `mfu_percent`: FLOPs of the model on real tokens over the peak of all devices, if that is known.
    - `peak_memory_gib`: the most memory that tensors of the rank that logs have taken, on a GPU.
    - `bubble_percent`: the share of these steps in which the ranks of the busiest pipeline rank have waited for other
      stages, under a pipeline: of each pipeline rank the mean of its ranks, and of these the least.
    - `predicted_step_ms`, `predicted_memory_gib`, `predicted_bubble_percent`: of a plan that was searched or estimated
      for steps of so many rows; the memory is that of the fullest rank.

    Args:
        device (`torch.device`): the rank's device.
        devices (`int`): number of ranks.
        dtype (`str`): number format of compute, "bf16" or "fp32".
        flops (`Callable`): returns the FLOPs of the model, or None; called once, where a device's peak is known.
        predicted (`Mapping`, *optional*): the prediction in the `meta` of the plan.
        waits ([`Waits`], *optional*): those of this rank, under a pipeline.
    """

    def __init__(
        self,
        *,
        device: torch.device,
        devices: int,
        dtype: str,
        flops: Callable[[], TrainingFlops | None],
        predicted: Mapping[str, Any] | None,
        waits: Waits | None = None,
    ):
        self.device, self.predicted, self.waits = device, predicted, waits
        self._peak_flops = devices * _peak_flops(device, dtype)
        self._flops = flops() if self._peak_flops else None
        self._began: float | None = None
        self._forget()

    def _forget(self) -> None:
        self._seconds, self._steps, self._work = 0.0, 0, 0.0
        self._waited, self._of_waits, self._bubble = 0.0, 0.0, None

    def count(self, lengths: Callable[[], np.ndarray]) -> None:
        """Counts a step; `lengths` returns the real tokens of each of its documents, and is called only for MFU."""
        if self._flops is not None:
            self._work += self._flops.of_documents(lengths())

    def on_step_begin(self, args, state, control, **kwargs):
        if self.waits is not None:
            self.waits.take()  # forgets those before the step, such as where the cost of documents was measured
        self._began = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        if self._began is not None:
            seconds = time.perf_counter() - self._began
            self._seconds, self._steps, self._began = self._seconds + seconds, self._steps + 1, None
            waited = None if self.waits is None else self.waits.take()
            if waited is not None:  # not in a step that Trainer's own methods, or another plan, have computed
                self._waited, self._of_waits = self._waited + waited, self._of_waits + seconds

    @property
    def waited_share(self) -> float | None:
        """Returns the share of the measured steps since the last log in which this rank waited for other stages."""
        return self._waited / self._of_waits if self._of_waits else None

    def note_bubble(self, shares: Sequence[float | None], groups: Sequence[Sequence[int]]) -> None:
        """Takes the shares of all ranks, and the ranks of each pipeline rank, for the next log."""
        if None not in shares:
            self._bubble = min(sum(shares[rank] for rank in ranks) / len(ranks) for ranks in groups)

    def add_logs(self, logs: dict[str, float]) -> None:
        """Adds the values since the last log to a log of training."""
        if not self._steps or "loss" not in logs:
            return
        logs["step_ms"] = round(1e3 * self._seconds / self._steps, 2)
        if self._work:
            logs["mfu_percent"] = round(100 * self._work / (self._seconds * self._peak_flops), 2)
        if self.device.type == "cuda":
            logs["peak_memory_gib"] = round(torch.cuda.max_memory_allocated(self.device) / GIB, 3)
        if self._bubble is not None:
            logs["bubble_percent"] = round(100 * self._bubble, 2)
        if self.predicted is not None:
            logs |= _predictions(self.predicted)
        self._forget()


def _predictions(noted: Mapping[str, Any]) -> dict[str, float]:
    found = {
        "predicted_step_ms": round(noted["step_ms"], 2),
        "predicted_memory_gib": round(max(noted["memory_bytes"]) / GIB, 3),
    }
    if type(noted.get("bubble_ms")) in (int, float):
        found["predicted_bubble_percent"] = round(100 * noted["bubble_ms"] / noted["step_ms"], 2)
    return found


def _peak_flops(device: torch.device, dtype: str) -> float:
    """Returns the FLOP/s of a GPU's data sheet; 0 if they are not known."""
    known = device_of_name(device_name(device)) if device.type == "cuda" else None
    return 0.0 if known is None else known.peak_flops.get(dtype, 0.0)
