# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The losses that model families compute, as tables: which labels they take, and which targets these become."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_outputs import CausalLMOutput
from transformers.utils import ModelOutput


IGNORED = -100


@dataclass(frozen=True, kw_only=True)
class LossKind:
    """Describes a loss that is summed over targets.

    Attributes:
        function (`Callable`): the family's own function, by which the loss is recognised.
        labels (`str`): the batch's labels [B, S], as the family takes them.
        targets (`str`): labels [B, S] that are targets already: position `i` holds what position `i` predicts.
        make_targets (`Callable[[torch.Tensor], torch.Tensor]`): makes targets [B, S] of labels [B, S].
        output (`type`): the class of the forward's output, which has `loss` and `logits`.
    """

    function: Callable
    labels: str
    targets: str
    make_targets: Callable[[torch.Tensor], torch.Tensor]
    output: type[ModelOutput] = CausalLMOutput

    @property
    def names(self) -> tuple[str, str]:
        """Returns the names under which a batch may have labels; the first that it has counts."""
        return self.targets, self.labels

    def is_labelled(self, batch: Mapping[str, Any]) -> bool:
        return any(batch.get(name) is not None for name in self.names)

    def targets_of(self, batch: Mapping[str, Any]) -> torch.Tensor | None:
        """Returns the targets [B, S] of a batch; None if it has no labels."""
        if batch.get(self.targets) is not None:
            return batch[self.targets]
        labels = batch.get(self.labels)
        return None if labels is None else self.make_targets(labels)


def shift_targets(labels: torch.Tensor) -> torch.Tensor:
    """Moves labels [B, S] one to the left, so that each position holds the token it predicts."""
    return F.pad(labels, (0, 1), value=IGNORED)[:, 1:].contiguous()


NEXT_TOKEN = LossKind(function=ForCausalLMLoss, labels="labels", targets="shift_labels", make_targets=shift_targets)


def count_targets(batch: Mapping[str, Any] | Sequence[Mapping[str, Any]], loss: LossKind = NEXT_TOKEN) -> torch.Tensor:
    """Counts the tokens that a batch, or a list of micro-batches, asks to predict."""
    if not isinstance(batch, Mapping):
        return torch.stack([count_targets(part, loss) for part in batch]).sum()
    return (loss.targets_of(batch) != IGNORED).sum()


def without_labels(batch: Mapping[str, Any], loss: LossKind = NEXT_TOKEN) -> dict[str, Any]:
    """Returns a batch without its labels, as the model gets it if the loss is computed elsewhere."""
    return {name: value for name, value in batch.items() if name not in loss.names}
