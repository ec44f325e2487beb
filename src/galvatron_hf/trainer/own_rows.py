# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""A parallelised model as a custom loss sees it: own rows in, full-vocabulary logits of own rows out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers.modeling_outputs import CausalLMOutput

from galvatron_hf.parallel.micro_batch import IGNORED
from galvatron_hf.parallel.model import ParallelModel


_FILL = {"labels": IGNORED, "shift_labels": IGNORED}


class OwnRowsModel:
    """Called like the model with this rank's rows; computes the whole micro-batch with the other ranks.

    A loss that is a sum over own targets divided by `num_items_in_batch` adds up over the ranks to the loss of the
    micro-batch. Every rank has at least one row: where there are fewer rows than ranks, added ones have no targets.

    Args:
        parallel ([`ParallelModel`]): the model.
        micro_batch (`Mapping[str, Tensor]`): the whole micro-batch.
    """

    def __init__(self, parallel: ParallelModel, micro_batch: Mapping[str, Any]):
        self._parallel, self._micro_batch = parallel, micro_batch

    def own_inputs(self) -> dict[str, Any]:
        """This rank's rows of the micro-batch."""
        forward = self._parallel.forward
        return {
            name: forward.own_part(value, _FILL.get(name)) if isinstance(value, torch.Tensor) else value
            for name, value in self._micro_batch.items()
        }

    def __call__(self, **inputs: Any) -> CausalLMOutput:
        """Logits [own rows, S, V] and, if labels are among the inputs, this rank's part of the loss."""
        whole = {name: value for name, value in self._micro_batch.items() if name not in _FILL or name in inputs}
        options = {name: value for name, value in inputs.items() if name not in self._micro_batch}
        return self._parallel.model(**whole, **options, return_logits=True, whole_loss=False)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parallel.model, name)
