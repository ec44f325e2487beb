# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""A guard between the backward and the optimizer: it refuses steps whose loss or gradient norm is not finite."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from transformers import TrainingArguments
from transformers.utils import logging

from galvatron_hf.models.losses import count_targets
from galvatron_hf.parallel.comm.objects import gather_objects
from galvatron_hf.parallel.debug.nonfinite import NonFinite, find_nonfinite
from galvatron_hf.parallel.executor import Batch
from galvatron_hf.parallel.model import ParallelModel
from galvatron_hf.trainer.data.dataset_rows import DatasetRows
from galvatron_hf.trainer.step_state import StepState


logger = logging.get_logger(__name__)

SKIPPED_IN_A_ROW = 10  # this many skipped steps are not one bad batch: the weights or the data are wrong


class NonFiniteError(FloatingPointError):
    """A step's loss or gradient is infinite or not a number; the weights are those of the step before."""


@dataclass(kw_only=True)
class NonfiniteGuard:
    """Checks each step, and skips it or ends training if its numbers are not finite. Loss and gradient norm are sums
    over all ranks: one bad number makes them bad everywhere, so all ranks decide alike. A bad step is computed again,
    to find where the bad number came from.

    Args:
        policy (`Callable`): returns "stop" or "skip"; see [`GalvatronTrainingArguments`].
        compute (`Callable`): runs forward and backward of a step, and returns its loss.
        dataset_rows (`Callable`): returns the [`DatasetRows`] of the present run; called on rank 0.
        computing (`Callable`, *optional*): returns the model that computes a step; by default `parallel`.
        skipped_steps (`int`): steps without an update since training began.
    """

    parallel: ParallelModel
    policy: Callable[[], str]
    compute: Callable[[StepState], torch.Tensor]
    dataset_rows: Callable[[], DatasetRows]
    computing: Callable[[StepState], ParallelModel] | None = None
    skipped_steps: int = 0
    _skipped_in_a_row: int = 0

    def skips(self, step: StepState, grad_norm: float, loss: float) -> bool:
        """Returns whether the optimizer must leave a step out; collective if the step is not finite. Every rank raises
        NonFiniteError if the policy is to stop, or after `SKIPPED_IN_A_ROW` skipped steps.
        """
        if math.isfinite(grad_norm) and math.isfinite(loss):
            self._skipped_in_a_row = 0
            return False
        if math.isfinite(grad_norm) and self._has_no_targets(step.batch):
            if dist.get_rank() == 0:
                logger.warning(f"Step {step.number + 1} has no targets: its loss is 0/0, its gradient zero.")
            self._skipped_in_a_row = 0
            return False
        self._refuse(step, f"gradient norm {grad_norm}, loss {loss}")
        self._skipped_in_a_row += 1
        return True

    def _has_no_targets(self, batch: Batch) -> bool:
        kind, parts = self.parallel.runner.loss, [batch] if isinstance(batch, Mapping) else batch
        return all(kind.is_labelled(part) for part in parts) and bool((count_targets(parts, kind) == 0).any())

    def _refuse(self, step: StepState, numbers: str) -> None:
        """Reports where the bad numbers came from, and ends training or counts the step as skipped."""
        number, origin = step.number + 1, self._origin(step)
        message = f"Step {number} is not finite ({numbers}) and was not taken: {origin}."
        enough = self._skipped_in_a_row + 1 == SKIPPED_IN_A_ROW
        if self.policy() == "stop" or enough:
            with contextlib.suppress(RuntimeError):  # a rank has left already
                dist.barrier()  # no rank leaves while others still read its report
            reason = f"{SKIPPED_IN_A_ROW} steps in a row were skipped" if enough else "nonfinite_policy='stop'"
            raise NonFiniteError(
                f"{message} Training ends here, because {reason}; the weights are those of step {number - 1}, and "
                "checkpoints are as they were. Look at these rows, lower the learning rate, or give "
                "nonfinite_policy='skip' to leave such steps out."
            )
        self.skipped_steps += 1
        if dist.get_rank() == 0:
            logger.warning(f"{message} It is skipped, the {self.skipped_steps}. so far.")

    def _origin(self, step: StepState) -> str:
        """Computes the step again, and describes where its first bad numbers came from; leaves no gradients."""
        parallel = self.parallel
        parallel.model.zero_grad()
        devices = [parallel.device] if parallel.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            losses: list[torch.Tensor] = []
            computing = parallel if self.computing is None else self.computing(step)
            found = find_nonfinite(computing, step.batch, lambda: losses.append(self.compute(step)))
        loss, norm = float(losses[0]), float(parallel.sum_with_grad_norm(0.0)[0])
        parallel.model.zero_grad()
        if found:
            return describe(found, gather_objects(self._rows_of(step))[0])
        if math.isfinite(norm) and not math.isfinite(loss):
            return "the loss itself, while every gradient is finite; look at the function that computes it"
        if math.isfinite(norm):
            return (
                "computed again it is finite, so it cannot be reproduced, which points to hardware or to a kernel "
                "that is not deterministic"
            )
        return "every rank's own numbers are finite, so it arises in the sum over ranks or in the norm, as an overflow"

    def _rows_of(self, step: StepState) -> list[int] | None:
        rows = self.dataset_rows() if dist.get_rank() == 0 else None
        return rows.of_step(step.number) if rows is not None and rows.known else None

    def begin(self) -> None:
        self.skipped_steps = self._skipped_in_a_row = 0

    def add_logs(self, logs: dict[str, float]) -> None:
        """Adds the number of skipped steps to a log, once there are any."""
        if self.skipped_steps:
            logs["skipped_steps"] = self.skipped_steps

    @contextlib.contextmanager
    def unfiltered(self, args: TrainingArguments) -> Iterator[None]:
        """Logs losses as they are: Trainer's `logging_nan_inf_filter` replaces bad losses by an average."""
        filtered = args.logging_nan_inf_filter
        args.logging_nan_inf_filter = False
        try:
            yield
        finally:
            args.logging_nan_inf_filter = filtered


def describe(found: list[NonFinite], dataset_rows: list[int] | None) -> str:
    """Describes the values of the first micro-batch that has any, with their dataset rows if these are known."""
    first = [one for one in found if one.micro_batch == found[0].micro_batch]
    texts = [str(one) + _in_dataset(one, dataset_rows) for one in first]
    others = len({one.micro_batch for one in found}) - 1
    return "; ".join(texts) + (f"; and {others} later micro-batches" if others else "")


def _in_dataset(found: NonFinite, dataset_rows: list[int] | None) -> str:
    if dataset_rows is None or max(found.rows) >= len(dataset_rows):
        return ""
    return f" (dataset {', '.join(str(dataset_rows[row]) for row in found.rows)})"
