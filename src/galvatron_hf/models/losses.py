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
from transformers.modeling_outputs import (
    CausalLMOutput,
    QuestionAnsweringModelOutput,
    Seq2SeqLMOutput,
    SequenceClassifierOutput,
)
from transformers.utils import ModelOutput


IGNORED = -100


@dataclass(frozen=True, kw_only=True)
class LossKind:
    """Describes a loss that is summed over targets.

    Attributes:
        function (`Callable`, *optional*): the family's own function, by which the loss is recognised; None if the
            families compute it in their forward.
        labels (`str`): the batch's labels [B, S], as the family takes them.
        targets (`str`, *optional*): labels [B, S] that are targets already: position `i` holds what position `i`
            predicts; None if the family takes no such labels beside `labels`.
        make_targets (`Callable[[torch.Tensor], torch.Tensor]`): makes targets [B, S] of labels [B, S].
        output (`type`): the class of the forward's output, which has `loss` and `logits`.
        of_rows (`bool`): whether targets are those of rows, [B] or [B, C], and not of positions.
    """

    function: Callable | None
    labels: str
    targets: str | None
    make_targets: Callable[[torch.Tensor], torch.Tensor]
    output: type[ModelOutput] = CausalLMOutput
    of_rows: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Returns the names under which a batch may have labels; the first that it has counts."""
        return (self.labels,) if self.targets is None else (self.targets, self.labels)

    @property
    def looks_ahead(self) -> bool:
        """Tells whether the target of a token is the label of the next one."""
        return self.make_targets is shift_targets

    def is_labelled(self, batch: Mapping[str, Any]) -> bool:
        return any(batch.get(name) is not None for name in self.names)

    def targets_of(self, batch: Mapping[str, Any]) -> torch.Tensor | None:
        """Returns the targets [B, S] of a batch; None if it has no labels."""
        if self.targets is not None and batch.get(self.targets) is not None:
            return batch[self.targets]
        labels = batch.get(self.labels)
        return None if labels is None else self.make_targets(labels)

    def count(self, targets: torch.Tensor) -> torch.Tensor:
        """Returns the number of targets by which the sum of losses is divided; as many numbers as sums."""
        return (targets != IGNORED).sum()

    def example(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns labels, by name, for rows of `tokens` [B, S]; their values do not matter."""
        return {self.labels: torch.zeros_like(tokens)}

    def outputs(self, loss: torch.Tensor | None, logits: torch.Tensor | None, **others: Any) -> ModelOutput:
        """Returns what the family's forward would return, given all logits."""
        return self.output(loss=loss, logits=logits, **others)

    def sum_of_logits(self, logits: torch.Tensor, targets: torch.Tensor, label_smoothing: float = 0.0) -> torch.Tensor:
        """Returns the sum of the losses of logits [..., C] and as many targets, an fp32 scalar."""
        return F.cross_entropy(
            logits.float().flatten(0, -2),
            targets.flatten(),
            reduction="sum",
            ignore_index=IGNORED,
            label_smoothing=label_smoothing,
        )


@dataclass(frozen=True, kw_only=True)
class RowLossKind(LossKind):
    """Describes the loss of a head that classifies rows, as the families' ForSequenceClassification classes compute
    it: squared errors of numbers, cross-entropy of classes, or binary cross-entropy of several labels.

    Attributes:
        classes (`int`): the number of logits of a row.
        problem (`str`, *optional*): "regression", "single_label_classification" or "multi_label_classification"; by
            default the labels say which.
    """

    classes: int
    problem: str | None = None

    def _problem(self, targets: torch.Tensor) -> str:
        if self.problem is not None:
            return self.problem
        if self.classes == 1:
            return "regression"
        whole = targets.dtype in (torch.long, torch.int)
        return "single_label_classification" if whole else "multi_label_classification"

    def count(self, targets: torch.Tensor) -> torch.Tensor:
        if self._problem(targets) == "single_label_classification":
            return super().count(targets)
        return torch.tensor(targets.numel(), device=targets.device)

    def example(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        labels = tokens.new_zeros(len(tokens))
        if self.problem == "multi_label_classification":
            labels = labels[:, None].expand(-1, self.classes).float()
        return {self.labels: labels}

    def sum_of_logits(self, logits: torch.Tensor, targets: torch.Tensor, label_smoothing: float = 0.0) -> torch.Tensor:
        problem = self._problem(targets)
        if problem == "single_label_classification":
            return super().sum_of_logits(logits, targets, label_smoothing)
        logits, targets = logits.float().flatten(), targets.float().flatten()
        if problem == "regression":
            return F.mse_loss(logits, targets, reduction="sum")
        return F.binary_cross_entropy_with_logits(logits, targets, reduction="sum")


def row_loss(classes: int, problem: str | None = None) -> RowLossKind:
    """Returns the loss of a head that classifies rows."""
    return RowLossKind(
        function=None,
        labels="labels",
        targets=None,
        make_targets=_same,
        output=SequenceClassifierOutput,
        of_rows=True,
        classes=classes,
        problem=problem,
    )


@dataclass(frozen=True, kw_only=True)
class SpanLossKind(LossKind):
    """Describes the loss of a head that finds the first and the last position of an answer in each row, as the
    families' ForQuestionAnswering classes compute it: half the mean cross-entropy of the first positions, and half
    that of the last ones. Logits are [B, S, 2], targets [B, 2]; counts and sums are [2], of the first and of the last.
    A position behind the row does not count.

    Attributes:
        last (`str`): the batch's last positions [B]; `labels` are the first ones.
    """

    last: str = "end_positions"

    @property
    def names(self) -> tuple[str, ...]:
        return self.labels, self.last

    def is_labelled(self, batch: Mapping[str, Any]) -> bool:
        return all(batch.get(name) is not None for name in self.names)

    def targets_of(self, batch: Mapping[str, Any]) -> torch.Tensor | None:
        if not self.is_labelled(batch):
            return None
        positions = torch.stack([batch[name].view(-1) for name in self.names], dim=1).clamp(min=0)
        return positions.masked_fill(positions >= batch["input_ids"].shape[1], IGNORED)

    def count(self, targets: torch.Tensor) -> torch.Tensor:
        return 2 * (targets != IGNORED).sum(0)

    def sum_of_logits(self, logits: torch.Tensor, targets: torch.Tensor, label_smoothing: float = 0.0) -> torch.Tensor:
        parts = zip(logits.unbind(-1), targets.unbind(-1), strict=True)
        return torch.stack([super(SpanLossKind, self).sum_of_logits(*part, label_smoothing) for part in parts])

    def example(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        return dict.fromkeys(self.names, tokens.new_zeros(len(tokens)))

    def outputs(self, loss: torch.Tensor | None, logits: torch.Tensor | None, **others: Any) -> ModelOutput:
        start, end = (None, None) if logits is None else logits.unbind(-1)
        return QuestionAnsweringModelOutput(loss=loss, start_logits=start, end_logits=end)


def logits_of(output: ModelOutput) -> torch.Tensor | None:
    """Returns the logits of a family's output; those of first and last positions [B, S, 2] if it has these."""
    if getattr(output, "start_logits", None) is not None:
        return torch.stack([output.start_logits, output.end_logits], dim=-1)
    return getattr(output, "logits", None)


def shift_targets(labels: torch.Tensor) -> torch.Tensor:
    """Moves labels [B, S] one to the left, so that each position holds the token it predicts."""
    return F.pad(labels, (0, 1), value=IGNORED)[:, 1:].contiguous()


@dataclass(frozen=True, kw_only=True)
class RouterLossKind:
    """Describes the loss that balances the experts: `coefficient * experts * sum_e F_e P_e`. Over all layers and all
    real tokens of a batch, `F_e` is the mean number of the token's `top_k` choices that are expert e, `P_e` the mean
    probability of expert e, and both come from the softmax of the router's logits (arXiv 2101.03961, as
    `load_balancing_loss_func` of transformers computes it).
    """

    coefficient: float
    experts: int
    top_k: int

    def statistics(self, logits: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Returns the sums over tokens from which the loss follows: how often each expert is chosen, the probabilities
        of each, the number of tokens; fp64 [2 * experts + 1].

        Args:
            logits (`torch.Tensor`): [tokens, experts], those of one layer.
            weights (`torch.Tensor`): [tokens], how often a token counts; 0 for padding.
        """
        probabilities, weights = torch.softmax(logits, -1), weights.double()
        chosen = torch.topk(probabilities, self.top_k, -1).indices.flatten()
        counts = torch.zeros(self.experts, dtype=torch.float64, device=logits.device)
        counts.scatter_add_(0, chosen, weights.repeat_interleave(self.top_k))
        return torch.cat([counts, weights @ probabilities.double(), weights.sum()[None]])

    def value(self, statistics: torch.Tensor) -> torch.Tensor:
        """Returns the loss, without its coefficient, of the statistics of all layers and tokens together."""
        counts, probabilities, tokens = self._parts(statistics)
        return self.experts * (counts * probabilities).sum() / tokens**2

    def gradient(self, logits: torch.Tensor, weights: torch.Tensor, statistics: torch.Tensor) -> torch.Tensor:
        """Returns the gradient of [`RouterLossKind.value`] for the logits of some tokens. Choices have none."""
        counts, _, tokens = self._parts(statistics)
        probabilities = torch.softmax(logits.float(), -1)
        outer = (self.experts / tokens**2 * counts).float() * weights[:, None].float()
        inner = (probabilities * outer).sum(-1, keepdim=True)
        return (probabilities * (outer - inner)).to(logits.dtype)

    def _parts(self, statistics: torch.Tensor) -> tuple[torch.Tensor, ...]:
        counts, probabilities, tokens = statistics.split([self.experts, self.experts, 1])
        return counts, probabilities, tokens[0]


def _same(labels: torch.Tensor) -> torch.Tensor:
    return labels


SAME_POSITION = LossKind(function=None, labels="labels", targets=None, make_targets=_same, output=Seq2SeqLMOutput)
SPAN = SpanLossKind(
    function=None,
    labels="start_positions",
    targets=None,
    make_targets=_same,
    output=SequenceClassifierOutput,  # between ranks; others have both parts of the logits
    of_rows=True,
)
NEXT_TOKEN = LossKind(function=ForCausalLMLoss, labels="labels", targets="shift_labels", make_targets=shift_targets)


def count_targets(batch: Mapping[str, Any] | Sequence[Mapping[str, Any]], loss: LossKind = NEXT_TOKEN) -> torch.Tensor:
    """Counts the tokens that a batch, or a list of micro-batches, asks to predict."""
    if not isinstance(batch, Mapping):
        return torch.stack([count_targets(part, loss) for part in batch]).sum(0)
    targets, added = loss.targets_of(batch), batch.get("added_rows")
    return loss.count(targets if added is None or not loss.of_rows else targets[~added])


def without_labels(batch: Mapping[str, Any], loss: LossKind = NEXT_TOKEN) -> dict[str, Any]:
    """Returns a batch without its labels, as the model gets it if the loss is computed elsewhere."""
    return {name: value for name, value in batch.items() if name not in loss.names}
