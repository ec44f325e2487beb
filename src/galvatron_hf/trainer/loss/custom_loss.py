# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Custom losses under a plan: each rank computes the loss of its rows; the sum is the loss of the global batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers.utils import ModelOutput, logging

from galvatron_hf.data.loader import batch_rows
from galvatron_hf.parallel.executor import LossOf, RunModel
from galvatron_hf.parallel.model import ParallelModel
from galvatron_hf.trainer.loss.local_batch_model import LocalBatchModel


logger = logging.get_logger(__name__)


@dataclass(kw_only=True)
class CustomLoss:
    """Calls `compute_loss` with this rank's rows of each micro-batch, and weights the result. A loss divided by
    `num_items_in_batch` adds up over ranks and micro-batches. A mean over rows or targets is multiplied by the local
    share of the global batch.

    Args:
        compute_loss (`Callable`): has the signature of [`~transformers.Trainer.compute_loss`].
        count_items (`Callable`): returns the number of targets in a list of batches.
        declared (`Callable`): returns whether the loss is divided by `num_items_in_batch`. After None the first step
            finds out: it computes the loss once more, with twice as many items in the batch.
        name (`str`): the owner of the loss, for warnings.
    """

    parallel: ParallelModel
    compute_loss: Callable[..., Any]
    count_items: Callable[[list[dict[str, Any]]], torch.Tensor]
    declared: Callable[[], bool | None] = lambda: None
    name: str = "The Trainer"
    _found_divided: bool | None = None

    def loss_of(self, num_items: torch.Tensor | None, rows: int, outputs: bool = False) -> LossOf:
        """Returns the function that computes this rank's part of a micro-batch's loss, and logits if `outputs`; see
        [`LossOf`]. `num_items` and `rows` are the targets and rows of the global batch.
        """
        return partial(self._local_loss, num_items=num_items, rows=rows, outputs=outputs)

    def _local_loss(
        self,
        micro_batch: dict[str, Any],
        run: RunModel,
        num_items: torch.Tensor | None,
        rows: int,
        outputs: bool,
    ) -> ModelOutput:
        model = LocalBatchModel(self.parallel, micro_batch, run, num_items)
        wanted = {"return_outputs": True} if outputs else {}
        result = self.compute_loss(model, model.local_inputs(), num_items_in_batch=num_items, **wanted)
        loss, logits = (result[0], result[1]["logits"]) if outputs else (result, None)
        if not self._is_divided(model, loss, num_items):
            share = self._local_share(model.local_inputs(), micro_batch, num_items, rows)
            # A mean over nothing is not a number, and neither is its gradient.
            loss = loss * share if share > 0 else model.no_loss()
        # Sums over micro-batches and ranks are fp32 on every rank, also on one whose loss is of no row.
        return self.parallel.runner.loss.output(loss=loss.float(), logits=logits)

    def _local_share(self, local: dict[str, Any], micro_batch: dict[str, Any], num_items, rows: int) -> float:
        """Returns this rank's share of the global batch's targets, or of its rows if targets are not counted."""
        if num_items is not None:
            return float(self.count_items([local]) / num_items)
        mine = self.parallel.runner.local_rows(batch_rows(micro_batch))
        return (mine.stop - mine.start) / rows

    def _is_divided(self, model: LocalBatchModel, loss: torch.Tensor, num_items: torch.Tensor | None) -> bool:
        """Returns whether a loss is divided by the items of the batch; collective until that is known."""
        declared = self.declared()
        if declared is not None:
            return declared
        if num_items is None:
            return False
        if self._found_divided is not None:
            return self._found_divided
        with torch.no_grad():
            replay, inputs = model.with_twice_the_items(), model.local_inputs()
            again = self.compute_loss(replay, inputs, num_items_in_batch=2 * num_items)
        losses = torch.stack([loss.detach().float(), again.detach().float()])
        losses = torch.where(losses.isfinite().all(), losses, 0.0)
        self.parallel.sum_over_stage(losses)
        once, twice = losses.tolist()
        if once == 0.0:
            return True  # no rank has a target
        if not any(abs(twice / once - expected) < 1e-2 for expected in (0.5, 1.0)):
            logger.warning(
                f"Part of {self.name}'s loss is divided by num_items_in_batch and part is not (twice as many items "
                f"change it by {twice / once:.3f}); divide all of it, or set loss_is_scaled_for_ga."
            )
        self._found_divided = abs(twice / once - 0.5) < 0.25
        return self._found_divided
