# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The model that a custom loss is given: local rows in, logits of the whole vocabulary for local rows out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers.utils import ModelOutput

from galvatron_hf.data.loader import fill_rows, take_rows
from galvatron_hf.models.losses import NEXT_TOKEN
from galvatron_hf.parallel.executor import RunModel
from galvatron_hf.parallel.model import ParallelModel
from galvatron_hf.trainer.loss.per_token import PerTokenOutput, per_token_output


_LABELS = NEXT_TOKEN.names


class LocalBatchModel:
    """Looks like the model on this rank's rows, and computes the whole micro-batch together with the other ranks. A
    loss that is a sum over local targets divided by `num_items_in_batch` adds up over the ranks to the loss of the
    micro-batch. Every rank has at least one row: if there are fewer rows than ranks, rows without targets are added.

    Args:
        micro_batch (`Mapping[str, Any]`): the whole micro-batch.
        run ([`RunModel`]): runs the model on the whole micro-batch, and returns logits of the local rows.
        num_items_in_batch (`torch.Tensor` or `int`, *optional*): targets of the global batch. The model's own loss is
            divided by them unless the caller passes another number.
    """

    def __init__(
        self,
        parallel: ParallelModel,
        micro_batch: Mapping[str, Any],
        run: RunModel,
        num_items_in_batch: torch.Tensor | int | None = None,
    ):
        self._parallel, self._run, self._num_items = parallel, run, num_items_in_batch
        self._micro_batch = fill_rows(dict(micro_batch), parallel.mesh.size)
        self._outputs: list[ModelOutput] = []

    def local_inputs(self) -> dict[str, Any]:
        """Returns this rank's rows of the micro-batch."""
        local = self._parallel.runner.local_rows(self._micro_batch["input_ids"].shape[0])
        return take_rows(self._micro_batch, local.start, local.stop)

    def __call__(self, **inputs: Any) -> ModelOutput | PerTokenOutput:
        """Returns logits [local rows, S, V] and, if labels are among the inputs, this rank's part of the loss. Inputs
        that the caller has taken out do not reach the model. With `fused_lm_head=True`, an option of TRL's trainers,
        the result is a [`PerTokenOutput`] of the local rows.
        """
        per_token = inputs.pop("fused_lm_head", False)
        hidden = _LABELS if per_token else ()
        whole = {name: value for name, value in self._micro_batch.items() if name in inputs and name not in hidden}
        options = {name: value for name, value in inputs.items() if name not in self._micro_batch}
        outputs = self._run(**whole, **{"num_items_in_batch": self._num_items} | options)
        self._outputs.append(outputs)
        return _of_targets(outputs, inputs) if per_token else outputs

    def no_loss(self) -> torch.Tensor:
        """Returns zero with a backward, through which this rank takes part in the other ranks' backward."""
        return sum(0.0 * outputs.logits.float().sum() for outputs in self._outputs)

    def with_twice_the_items(self) -> Replay:
        """Returns a model that gives the same outputs again, as they were with twice as many items in the batch."""
        return Replay(self, list(self._outputs))

    def _get_name(self) -> str:
        # Trainer asks for the name to know whether labels are shifted; sharding has replaced the family's class.
        return self._parallel.family.__name__

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parallel.model, name)


class Replay:
    """Returns the outputs that a [`LocalBatchModel`] has given, detached, one after the other."""

    def __init__(self, model: LocalBatchModel, outputs: list[ModelOutput]):
        self._model, self._outputs = model, outputs

    def __call__(self, **inputs: Any) -> ModelOutput | PerTokenOutput:
        outputs = self._outputs.pop(0)
        if inputs.pop("fused_lm_head", False):
            return _of_targets(type(outputs)(logits=outputs.logits.detach()), inputs)
        loss = None if outputs.loss is None else outputs.loss.detach() / 2
        return type(outputs)(loss=loss, logits=outputs.logits.detach())

    def _get_name(self) -> str:
        return self._model._get_name()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def _of_targets(outputs: ModelOutput, inputs: Mapping[str, Any]) -> PerTokenOutput:
    labels = {name: inputs.get(name) for name in (*_LABELS, "num_items_in_batch")}
    return per_token_output(outputs.logits, **labels)
