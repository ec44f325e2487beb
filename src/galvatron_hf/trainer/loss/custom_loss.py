# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Losses of the user's own under a plan: each rank computes that of its rows, and their sum is the global batch's."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from transformers import Trainer
from transformers.modeling_outputs import CausalLMOutput
from transformers.utils import logging

from galvatron_hf.data.loader import batch_rows
from galvatron_hf.plan.schedule import Action, Work
from galvatron_hf.trainer.loss.local_batch_model import LocalBatchModel


logger = logging.get_logger(__name__)


class CustomLossMixin:
    """The part of [`GalvatronMixin`] that calls `compute_loss`; see there.

    A loss divided by `num_items_in_batch` adds up over ranks and micro-batches. One that is the mean over the rows or
    targets it sees is weighted by their share of the global batch; `loss_is_scaled_for_ga` says which it is, and where
    it is not set, the first step asks for the loss once more, with twice as many items in the batch.
    """

    _divides_by_items: bool | None = None

    def _loss_needs_logits(self) -> bool:
        """Whether the loss is somebody's own function of logits: compute_loss_func, or compute_loss overridden."""
        return self._overrides_compute_loss() or self.compute_loss_func is not None

    def _overrides_compute_loss(self) -> bool:
        return type(self).compute_loss is not Trainer.compute_loss

    def _custom_forward_backward(self, batch: dict[str, Any], num_items: torch.Tensor | None) -> torch.Tensor:
        """Each rank's own loss of its own rows; their sum is the loss of the global batch."""
        rows = batch_rows(batch)
        if self.parallel.pipeline is not None:
            return self.parallel.forward_backward(
                batch, loss_of=lambda part, output: self._custom_loss(part, num_items, rows, given=output)[0]
            )
        total = torch.zeros((), device=self.args.device)
        span = self.parallel.timeline.span
        for index, micro_batch in enumerate(self.parallel.micro_batches(batch)):
            with span(Action(Work.FORWARD, 0, index)):
                loss, _ = self._custom_loss(micro_batch, num_items, rows)
            with span(Action(Work.BACKWARD, 0, index)):
                loss.backward()
            total += loss.detach()
        dist.all_reduce(total)
        return total

    @torch.no_grad()
    def _evaluate_custom_loss(
        self, batch: dict[str, Any], num_items: torch.Tensor | None, rows: int
    ) -> CausalLMOutput:
        """The loss of a batch, and what the model gave for it."""
        if self.parallel.pipeline is not None:
            return self.parallel.evaluate(
                batch, loss_of=lambda part, output: self._custom_loss(part, num_items, rows, given=output)[0]
            )
        loss, outputs = self._custom_loss(batch, num_items, rows, outputs=True)
        loss = loss.detach().clone()
        dist.all_reduce(loss)
        return CausalLMOutput(loss=loss, logits=outputs["logits"])

    def _custom_loss(
        self,
        micro_batch: dict[str, Any],
        num_items: torch.Tensor | None,
        rows: int,
        outputs: bool = False,
        given: CausalLMOutput | None = None,
    ) -> tuple[torch.Tensor, Any]:
        """This rank's part of the loss of a micro-batch; collective.

        Args:
            micro_batch (`dict[str, Any]`): whole.
            num_items (`torch.Tensor`, *optional*): targets of the global batch.
            rows (`int`): rows of the global batch.
            outputs (`bool`): whether the model's outputs are wanted too.
            given ([`CausalLMOutput`], *optional*): what a pipeline has computed of this rank's rows already.

        Returns:
            `tuple`: an fp32 scalar, and the outputs or None.
        """
        model = LocalBatchModel(self.parallel, micro_batch, num_items, given)
        with self._as_one_process():
            result = self._call_compute_loss(model, model.local_inputs(), num_items, outputs)
            loss, output = result if outputs else (result, None)
            if self._loss_is_divided(model, loss, num_items):
                return loss, output
        share = self._local_share(model.local_inputs(), micro_batch, num_items, rows)
        # A mean over nothing is not a number, and neither would be its gradient.
        return (loss * share if share > 0 else model.no_loss()), output

    def _call_compute_loss(self, model, inputs: dict[str, Any], num_items, outputs: bool):
        wanted = {"return_outputs": True} if outputs else {}
        return self.compute_loss(model, inputs, num_items_in_batch=num_items, **wanted)

    def _local_share(self, own: dict[str, Any], micro_batch: dict[str, Any], num_items, rows: int) -> float:
        """How much of the global batch this rank's rows are: of its targets, or of its rows where none are counted."""
        if num_items is not None:
            return float(self._get_num_items_in_batch([own], self.args.device) / num_items)
        mine = self.parallel.forward.local_rows(batch_rows(micro_batch))
        return (mine.stop - mine.start) / rows

    def _loss_is_divided(self, model: LocalBatchModel, loss: torch.Tensor, num_items) -> bool:
        """Whether a loss is divided by the items of the batch, so that it is a part of a sum; collective at first."""
        if self.loss_is_scaled_for_ga is not None:
            return self.loss_is_scaled_for_ga
        if num_items is None:
            return False
        if self._divides_by_items is None:
            with torch.no_grad():
                again = self._call_compute_loss(
                    model.with_twice_the_items(), model.local_inputs(), 2 * num_items, False
                )
            losses = torch.stack([loss.detach().float(), again.detach().float()])
            losses = torch.where(losses.isfinite().all(), losses, 0.0)
            self.parallel.sum_over_stage(losses)
            once, twice = losses.tolist()
            if once == 0.0:
                return True  # no rank has a target
            if not any(abs(twice / once - expected) < 1e-2 for expected in (0.5, 1.0)):
                logger.warning(
                    f"Part of {type(self).__name__}'s loss is divided by num_items_in_batch and part is not (twice as "
                    f"many items change it by {twice / once:.3f}); divide all of it, or set loss_is_scaled_for_ga."
                )
            self._divides_by_items = abs(twice / once - 0.5) < 0.25
        return self._divides_by_items
