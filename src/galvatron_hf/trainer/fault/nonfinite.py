# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""A step whose loss or gradient is not finite never reaches the optimizer."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers.utils import logging

from galvatron_hf.models.losses import count_targets
from galvatron_hf.parallel.comm.objects import gather_objects
from galvatron_hf.parallel.debug.nonfinite import NonFinite, find_nonfinite
from galvatron_hf.trainer.arguments import nonfinite_policy
from galvatron_hf.trainer.data.dataset_rows import DatasetRows
from galvatron_hf.utils.compat import mark_step_skipped


logger = logging.get_logger(__name__)

SKIPPED_IN_A_ROW = 10  # so many, and it is not one bad batch: the weights or the data are wrong


class NonFiniteError(FloatingPointError):
    """A step's loss or gradient is infinite or not a number; the weights are those of the step before."""


class HealthMixin:
    """The part of [`GalvatronMixin`] between a step's backward and the optimizer; see there.

    The loss and the norm of the gradients are sums over all ranks, so that one bad number on one rank makes them bad
    on all, and all ranks decide alike. Only then the step is computed again, to see where it came from.

    Attributes:
        skipped_steps (`int`): steps without an update since training began, logged under this name.
    """

    skipped_steps: int = 0
    _skipped_in_a_row: int = 0
    _step: tuple[dict[str, Any], Any, torch.Tensor] | None = None

    def _watched_step(self, batch: dict[str, Any], num_items: torch.Tensor | None) -> torch.Tensor:
        """Forward and backward of a global batch, which is kept until the step has been found to be good."""
        loss = self._forward_backward(batch, num_items)
        self._step = batch, num_items, loss
        return loss

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        if self.parallel is None:
            return super()._clip_grad_norm(model)
        return self.parallel.clip_grad_norm_(self.args.max_grad_norm, self._reduced_norm())

    def _reduced_norm(self) -> torch.Tensor:
        """The norm of all gradients, the same on every rank even where each could know it by itself."""
        norm, self._stop_votes = self.parallel.sum_with_grad_norm(self._stop_vote())
        return norm

    def _get_grad_norm(self, model: nn.Module, grad_norm=None):
        """The norm of all gradients; called once in each step before the optimizer's, whatever is clipped or logged.

        Raises:
            NonFiniteError: on every rank, if the policy is to stop.
        """
        if self.parallel is None:
            return super()._get_grad_norm(model, grad_norm=grad_norm)
        norm = self._reduced_norm() if grad_norm is None else grad_norm
        self._check_step(norm)
        return norm

    def _check_step(self, norm: torch.Tensor) -> None:
        batch, num_items, loss = self._step
        self._step = None
        # One wait for the device, where Trainer's filter of losses would have been another.
        norm_value, loss_value, votes = torch.stack([norm, loss.to(norm), self._stop_votes[0].to(norm)]).tolist()
        self._count_stop_votes(votes)
        skipped = not (math.isfinite(norm_value) and math.isfinite(loss_value))
        without_targets = skipped and math.isfinite(norm_value) and int(count_targets(batch)) == 0
        skipped = skipped and not without_targets
        if skipped:
            self._handle_nonfinite(batch, num_items, f"gradient norm {norm_value}, loss {loss_value}")
        elif without_targets:
            logger.warning(f"Step {self.state.global_step + 1} has no targets: its loss is 0/0, its gradient zero.")
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if skipped else 0
        # Trainer asks this before it steps the learning rate; without gradients optimizers change nothing.
        mark_step_skipped(self.optimizer, skipped)
        self.parallel.timeline.action = None

    def _handle_nonfinite(self, batch: dict[str, Any], num_items: torch.Tensor | None, numbers: str) -> None:
        """Says where it came from, and ends training or takes the gradients away."""
        found = self._computed_again(batch, num_items)
        step, policy = self.state.global_step + 1, nonfinite_policy(self.args)
        message = f"Step {step} is not finite ({numbers}) and was not taken: {self._describe(found)}."
        enough = self._skipped_in_a_row + 1 == SKIPPED_IN_A_ROW
        if policy == "stop" or enough:
            with contextlib.suppress(RuntimeError):  # of a rank that has left already
                dist.barrier()  # nobody leaves while others still read what it reported
            reason = f"{SKIPPED_IN_A_ROW} steps in a row were skipped" if enough else "nonfinite_policy='stop'"
            raise NonFiniteError(
                f"{message} Training ends here, because {reason}; the weights are those of step {step - 1}, and "
                "checkpoints are as they were. Look at these rows, lower the learning rate, or give "
                "nonfinite_policy='skip' to leave such steps out."
            )
        self.skipped_steps += 1
        if self.is_world_process_zero():
            logger.warning(f"{message} It is skipped, the {self.skipped_steps}. so far.")

    def _computed_again(self, batch: dict[str, Any], num_items: torch.Tensor | None) -> list[NonFinite]:
        """The step once more, from the same random streams; leaves no gradients."""
        self.model.zero_grad()
        devices = [self.args.device] if self.args.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            losses: list[torch.Tensor] = []
            found = find_nonfinite(
                self.parallel, batch, lambda: losses.append(self._forward_backward(batch, num_items))
            )
        self._loss_again = float(losses[0])
        self._norm_again = float(self.parallel.sum_with_grad_norm(0.0)[0])
        self.model.zero_grad()
        return found

    def _describe(self, found: list[NonFinite]) -> str:
        """Where it came from, of the first micro-batch that has it."""
        if not found:
            if math.isfinite(self._norm_again) and not math.isfinite(self._loss_again):
                return "the loss itself, while every gradient is finite; look at the function that computes it"
            if math.isfinite(self._norm_again):
                return (
                    "computed again it is finite, so it cannot be reproduced, which points to hardware or to a kernel "
                    "that is not deterministic"
                )
            return "no rank's own part is to blame, so it arises in the sum over ranks or in the norm, as an overflow"
        first = [one for one in found if one.micro_batch == found[0].micro_batch]
        order = gather_objects(self._dataset_rows())[0]
        texts = [str(one) + _in_dataset(one, order) for one in first]
        others = len({one.micro_batch for one in found}) - 1
        return "; ".join(texts) + (f"; and {others} later micro-batches" if others else "")

    def _dataset_rows(self) -> list[int] | None:
        """Which rows of the dataset this step's are, where that is known; rank 0 reads them."""
        if self.args.process_index != 0:
            return None
        rows = DatasetRows(self.callback_handler.train_dataloader, self.args.gradient_accumulation_steps)
        return rows.of_step(self.state.global_step) if rows.known else None

    def _maybe_log_save_evaluate(self, tr_loss: torch.Tensor, *args, **kwargs) -> None:
        """As Trainer's, which empties the sum of losses by taking it from itself: what is no number would stay so."""
        super()._maybe_log_save_evaluate(tr_loss, *args, **kwargs)
        if self.parallel is not None and self._globalstep_last_logged == self.state.global_step:
            tr_loss.zero_()

    def log(self, logs: dict[str, float], *args, **kwargs) -> None:
        """As Trainer's; with the number of skipped steps, once there are any."""
        if self.skipped_steps:
            logs["skipped_steps"] = self.skipped_steps
        super().log(logs, *args, **kwargs)

    @contextlib.contextmanager
    def _nothing_filtered(self) -> Iterator[None]:
        """Logs losses as they are: Trainer's `logging_nan_inf_filter` puts an average in the place of bad ones."""
        filtered = self.args.logging_nan_inf_filter
        self.skipped_steps = self._skipped_in_a_row = 0
        self.args.logging_nan_inf_filter = filtered and self.parallel is None
        try:
            yield
        finally:
            self.args.logging_nan_inf_filter = filtered


def _in_dataset(found: NonFinite, order: list[int] | None) -> str:
    if order is None or max(found.rows) >= len(order):
        return ""
    return f" (dataset {', '.join(str(order[row]) for row in found.rows)})"
