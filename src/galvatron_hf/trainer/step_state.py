# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The state of one optimizer step, from the reading of its batches to the check of its gradients."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from galvatron_hf.parallel.executor import Batch
from galvatron_hf.trainer.data.step_prefetch import StepPlacement
from galvatron_hf.utils.device import HostCopy


@dataclass(frozen=True, kw_only=True)
class StepState:
    """Holds the values of one optimizer step. Each part of the step returns a new state with its results.

    Attributes:
        number (`int`): optimizer steps before this one, over all epochs.
        placement ([`StepPlacement`], *optional*): the placement of the step's documents, if they are packed.
        plan (`int`): the plan under which the step is computed, see [`StepPlans`].
        count (`int`): global batches of the step; fewer than usual where the data ends.
        batches (`tuple[dict[str, Any], ...]`): global batches of the step so far.
        num_items (`torch.Tensor` or `int`, *optional*): targets of all batches of the step.
        batch ([`Batch`], *optional*): what is computed: one global batch of all batches, or packed micro-batches, or
            the batches that the Trainer's own methods have computed one by one.
        loss (`torch.Tensor`, *optional*): the loss of the step, an fp32 scalar.
        grad_norm (`torch.Tensor`, *optional*): the norm of all gradients, an fp32 scalar.
        stop_votes (`torch.Tensor`, *optional*): the number of ranks that were asked to stop, fp64 [1].
        numbers ([`HostCopy`], *optional*): gradient norm, loss and votes on the host.
    """

    number: int
    placement: StepPlacement | None = None
    plan: int = 0
    count: int = 1
    batches: tuple[dict[str, Any], ...] = ()
    num_items: torch.Tensor | int | None = None
    batch: Batch | None = None
    loss: torch.Tensor | None = None
    grad_norm: torch.Tensor | None = None
    stop_votes: torch.Tensor | None = None
    numbers: HostCopy | None = None

    def with_batch(self, batch: dict[str, Any], num_items: torch.Tensor | int | None) -> StepState:
        return replace(self, batches=(*self.batches, batch), num_items=num_items)

    def with_numbers(self, grad_norm: torch.Tensor, stop_votes: torch.Tensor) -> StepState:
        """Starts to copy the numbers of the step to the host: its gradient norm (a scalar), and its votes, [1]."""
        numbers = torch.stack([grad_norm, self.loss.to(grad_norm), stop_votes[0].to(grad_norm)])
        return replace(self, grad_norm=grad_norm, stop_votes=stop_votes, numbers=HostCopy(numbers))

    def with_norm(self, grad_norm: torch.Tensor | float) -> StepState:
        """Returns the state with another norm, which a subclass's own clipping has returned."""
        if grad_norm is self.grad_norm:
            return self
        return self.with_numbers(torch.as_tensor(grad_norm).to(self.grad_norm), self.stop_votes)
