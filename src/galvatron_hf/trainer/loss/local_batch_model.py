# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""A parallelised model as a custom loss sees it: own rows in, full-vocabulary logits of own rows out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers.modeling_outputs import CausalLMOutput

from galvatron_hf.data.loader import fill_rows, take_rows
from galvatron_hf.parallel.model import ParallelModel
from galvatron_hf.trainer.loss.per_token import PerTokenOutput, per_token_output


_LABELS = ("labels", "shift_labels")


class LocalBatchModel:
    """Called like the model with this rank's rows; computes the whole micro-batch with the other ranks.

    A loss that is a sum over own targets divided by `num_items_in_batch` adds up over the ranks to the loss of the
    micro-batch. Every rank has at least one row: where there are fewer rows than ranks, added ones have no targets.

    Args:
        parallel ([`ParallelModel`]): the model.
        micro_batch (`Mapping[str, Any]`): the whole micro-batch.
        num_items_in_batch (`torch.Tensor` or `int`, *optional*): targets of the global batch, by which the model's own
            loss is divided where the caller does not say.
        given ([`CausalLMOutput`], *optional*): what a pipeline has computed already, with logits of the own rows.
    """

    def __init__(
        self,
        parallel: ParallelModel,
        micro_batch: Mapping[str, Any],
        num_items_in_batch: torch.Tensor | int | None = None,
        given: CausalLMOutput | None = None,
    ):
        self._parallel, self._num_items, self._given = parallel, num_items_in_batch, given
        self._micro_batch = fill_rows(dict(micro_batch), parallel.mesh.size)
        self._outputs: list[CausalLMOutput] = []

    def local_inputs(self) -> dict[str, Any]:
        """This rank's rows of the micro-batch."""
        own = self._parallel.forward.local_rows(self._micro_batch["input_ids"].shape[0])
        return take_rows(self._micro_batch, own.start, own.stop)

    def __call__(self, **inputs: Any) -> CausalLMOutput | PerTokenOutput:
        """Logits [own rows, S, V] and, if labels are among the inputs, this rank's part of the loss.

        What the caller has taken out of the inputs does not reach the model. With `fused_lm_head=True`, TRL's, it
        gives a [`PerTokenOutput`] of the own rows.
        """
        per_token = inputs.pop("fused_lm_head", False)
        hidden = _LABELS if per_token else ()
        whole = {name: value for name, value in self._micro_batch.items() if name in inputs and name not in hidden}
        options = {name: value for name, value in inputs.items() if name not in self._micro_batch}
        options = {"num_items_in_batch": self._num_items} | options
        if self._given is None:
            outputs = self._parallel.model(**whole, **options, return_logits=True, whole_loss=False)
        else:
            outputs = self._given
        self._outputs.append(outputs)
        return _of_targets(outputs, inputs) if per_token else outputs

    def no_loss(self) -> torch.Tensor:
        """Zero, through whose backward this rank takes part in the others'."""
        return sum(0.0 * outputs.logits.float().sum() for outputs in self._outputs)

    def with_twice_the_items(self) -> Replay:
        """The same outputs again, as they were with twice as many items in the batch."""
        return Replay(self, list(self._outputs))

    def _get_name(self) -> str:
        # Trainer looks it up to know whether labels are shifted; sharding has put its own class over the family's.
        return self._parallel.family.__name__

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parallel.model, name)


class Replay:
    """Answers with the outputs that an [`LocalBatchModel`] gave, detached."""

    def __init__(self, model: LocalBatchModel, outputs: list[CausalLMOutput]):
        self._model, self._outputs = model, outputs

    def __call__(self, **inputs: Any) -> CausalLMOutput | PerTokenOutput:
        outputs = self._outputs.pop(0)
        if inputs.pop("fused_lm_head", False):
            return _of_targets(CausalLMOutput(logits=outputs.logits.detach()), inputs)
        loss = None if outputs.loss is None else outputs.loss.detach() / 2
        return CausalLMOutput(loss=loss, logits=outputs.logits.detach())

    def _get_name(self) -> str:
        return self._model._get_name()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def _of_targets(outputs: CausalLMOutput, inputs: Mapping[str, Any]) -> PerTokenOutput:
    labels = {name: inputs.get(name) for name in (*_LABELS, "num_items_in_batch")}
    return per_token_output(outputs.logits, **labels)
