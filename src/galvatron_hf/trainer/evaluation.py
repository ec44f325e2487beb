# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Evaluation and prediction under a plan."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate.state import GradientState
from accelerate.utils import gather, recursively_apply
from transformers import GenerationConfig, TrainingArguments

from galvatron_hf.data.loader import batch_rows, equal_share, fill_rows
from galvatron_hf.models.losses import without_labels
from galvatron_hf.parallel.executor import PackedBatch
from galvatron_hf.parallel.model import ParallelModel
from galvatron_hf.utils.compat import default_max_length


Labels = torch.Tensor | tuple[torch.Tensor, ...]
Prediction = tuple[torch.Tensor | None, torch.Tensor | tuple[()] | None, Labels | None]


@dataclass(kw_only=True)
class Evaluator:
    """Evaluates global batches. The loss is that of all rows. Logits and labels are those of this rank's share, unless
    a method of the user's own has computed them: then they are whole.

    Args:
        label_names (`Callable`): returns the names of a batch's labels, as Trainer's `label_names`.
        prepare (`Callable`): moves a batch to the device, as Trainer's `_prepare_inputs`.
        pack (`Callable`): returns the packed micro-batches of a batch, or None if it stays padded.
        pack_for_logits (`Callable`): returns the documents of a batch whose logits are wanted, or None if ranks
            compute whole rows.
        repeats (`bool`): the loss of a smaller last batch is counted as often as that of the others.
    """

    parallel: ParallelModel
    args: TrainingArguments
    label_names: Callable[[], list[str]]
    prepare: Callable[[dict[str, Any]], dict[str, Any]]
    count_items: Callable[[list[dict[str, Any]]], torch.Tensor | None]
    pack: Callable[[dict[str, Any]], list[dict[str, Any]] | None]
    pack_for_logits: Callable[[dict[str, Any]], PackedBatch | None] = lambda batch: None
    repeats: bool = False
    _real_rows: int = 0
    _whole: bool = False
    _next: list[str] = field(default_factory=list)

    def share(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Returns the rows whose logits this rank has."""
        return equal_share(batch, self.parallel.share_index, self.args.world_size)

    def predict(self, whole: dict[str, Any], loss_only: bool, ignored: Collection[str] = ()) -> Prediction:
        """Returns loss, logits and labels of a global batch, the last two None if `loss_only`; collective. Loss and
        labels are None if the batch lacks one of the label names. Logits are an empty tuple if they are `ignored`.
        """
        if not loss_only:
            self._check_router_outputs(ignored)
        batch = self.prepare(dict(whole))
        labels = self._labels(batch)
        self._begin(batch, whole=False, has_loss=labels is not None)
        items = None if labels is None else self.count_items([batch])
        if labels is None:
            batch = without_labels(batch, self.parallel.runner.loss)
        packed = self.pack(whole) if loss_only and labels is not None else None
        shares = -(-self._real_rows // self.args.world_size) * self.args.world_size
        options = {} if packed is not None else {"return_logits": not loss_only}
        if not loss_only:
            options["documents"] = self.pack_for_logits(whole)
        options |= self._loss_options(items)
        outputs = self.parallel.evaluate(fill_rows(batch, shares) if packed is None else packed, **options)
        if loss_only:
            return outputs.loss, None, None
        if labels is not None:
            labels = tuple(self.share(labels).values())
            labels = labels[0] if len(labels) == 1 else labels
        found = tuple(value for name, value in outputs.items() if name not in ("loss", *ignored))
        return outputs.loss, found[0] if len(found) == 1 else found, labels

    def _check_router_outputs(self, ignored: Collection[str]) -> None:
        """Refuses predictions in which plain Trainer would have what routers put out."""
        names, model = ("aux_loss", "router_logits"), self.parallel.model
        if self.parallel.adapter.adds_router_loss(model) and not {*names} <= {*ignored}:
            raise ValueError(
                f"The predictions of {type(model).__name__} with output_router_logits=True would have aux_loss and "
                "the router_logits of all layers, which no rank keeps; give evaluate and predict "
                f"ignore_keys={list(names)}, or set model.config.keys_to_ignore_at_inference to them."
            )

    def generate(
        self,
        whole: dict[str, Any],
        generate: Callable[..., torch.Tensor],
        pad: Callable[[torch.Tensor, int], torch.Tensor],
        options: dict[str, Any],
    ) -> Prediction:
        """Returns loss, generated tokens and labels, as Seq2SeqTrainer's prediction step does; collective. Tokens of
        the whole global batch are generated at once by `generate` with `options`; `pad` pads tokens [B, S] to a
        length.
        """
        batch, config = self.prepare(dict(whole)), self.parallel.model.generation_config
        labels = batch.get(self.parallel.runner.loss.labels)
        self._begin(batch, whole=False, has_loss=labels is not None)
        prompts = {name: value for name, value in batch.items() if name in ("input_ids", "attention_mask")}
        if labels is None:  # else the decoder's tokens may be the labels, and all is to be generated
            prompts |= {name: batch[name] for name in ("decoder_input_ids", "decoder_attention_mask") if name in batch}
        options = {name: value for name, value in options.items() if value is not None}
        tokens, loss = generate(**prompts, **options).to(self.args.device), None
        if labels is not None:
            loss = self.parallel.evaluate(batch, **self._loss_options(self.count_items([batch]))).loss
            labels = _lengthened(labels, config, pad)
        return (loss, *self.share({"tokens": _lengthened(tokens, config, pad), "labels": labels}).values())

    def whole(self, batch: dict[str, Any], prediction: Prediction) -> Prediction:
        """Returns a prediction of the whole batch, which is not gathered."""
        self._begin(batch, whole=True, has_loss=prediction[0] is not None)
        return prediction

    def gather(self, tensors: Any) -> Any:
        """Gathers what Trainer gathers in a step of evaluation: the loss, the inputs if metrics ask for them, logits
        and labels. The loss is counted as often as one process would count it. Tensors [share, ...] of all ranks are
        gathered in the order of the global batch and without added rows; collective.
        """
        kind = self._next.pop(0) if self._next else "whole" if self._whole else "share"
        if kind == "loss":
            state, rows = GradientState(), self.args.eval_batch_size * self.args.world_size
            ends_small = state.end_of_dataloader and state.remainder > 0 and not self.repeats
            return tensors[:1].repeat(state.remainder if ends_small else rows)
        if kind == "whole":
            return tensors
        ranks, rows = torch.tensor(self.parallel.share_order()), self._real_rows

        def in_order(gathered: torch.Tensor) -> torch.Tensor:
            return gathered.unflatten(0, (len(ranks), -1))[ranks.to(gathered.device)].flatten(0, 1)[:rows]

        return recursively_apply(in_order, gather(tensors))

    def _labels(self, batch: dict[str, Any]) -> dict[str, torch.Tensor] | None:
        """Returns the labels of a batch by name; None if it lacks one."""
        labels = {name: batch.get(name) for name in self.label_names()}
        return labels if labels and all(value is not None for value in labels.values()) else None

    def _begin(self, batch: dict[str, Any], whole: bool, has_loss: bool) -> None:
        self._real_rows, self._whole = batch_rows(batch), whole
        self._next = ["loss"] * has_loss + ["whole"] * ("inputs" in self.args.include_for_metrics)

    def _loss_options(self, items: torch.Tensor | None) -> dict[str, Any]:
        return {"num_items_in_batch": items, "label_smoothing": self.args.label_smoothing_factor}


def _lengthened(
    tokens: torch.Tensor, config: GenerationConfig, pad: Callable[[torch.Tensor, int], torch.Tensor]
) -> torch.Tensor:
    """Pads [B, S] to the length that Seq2SeqTrainer gives all batches: that of the model's generation config."""
    lengths = [config.max_length or default_max_length(config)]
    if config.max_new_tokens is not None:
        lengths.append(config.max_new_tokens + 1)
    length = next((length for length in lengths if tokens.shape[-1] < length), tokens.shape[-1])
    return pad(tokens, length) if length > tokens.shape[-1] else tokens
