# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Evaluation, prediction and generation under a plan."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import recursively_apply
from torch import nn

from galvatron_hf.data.loader import batch_rows, equal_share, fill_rows
from galvatron_hf.parallel.weights.distributed_state import plain_model, whole_weights
from galvatron_hf.utils.compat import default_max_length


class EvaluationMixin:
    """The part of [`GalvatronMixin`] that evaluates; see there."""

    def evaluation_loop(self, *args, **kwargs):
        self.ensure_parallel()
        if self.parallel is None:
            return super().evaluation_loop(*args, **kwargs)
        self._gather_losses, self.gather_function = self.gather_function, self._gather
        try:
            return super().evaluation_loop(*args, **kwargs)
        finally:
            self.gather_function = self.accelerator.gather_for_metrics

    def _gather(self, tensors):
        """What all ranks have, in the order of the global batch and without the rows that filled up a share.

        The loss, which comes first in each step, is counted as often as one process would count it.
        """
        if self._loss_comes_next:
            self._loss_comes_next = False
            return self._gather_losses(tensors)
        ranks = torch.tensor(self.parallel.share_order())

        def in_order(gathered: torch.Tensor) -> torch.Tensor:
            return gathered.unflatten(0, (len(ranks), -1))[ranks.to(gathered.device)].flatten(0, 1)[: self._real_rows]

        return recursively_apply(in_order, self.accelerator.gather(tensors))

    def prediction_step(self, model: nn.Module, inputs, prediction_loss_only: bool, ignore_keys=None, **gen_kwargs):
        """Loss of the global batch, and logits and labels of this rank's equal share of it."""
        if self.parallel is None:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys=ignore_keys, **gen_kwargs)
        inputs.update(self._share(inputs.whole))
        whole = self._prepare_inputs(dict(inputs.whole))
        self._real_rows = batch_rows(whole)
        labels = whole.get("labels")
        if getattr(self.args, "predict_with_generate", False) and not prediction_loss_only:
            return self._generation_step(whole, labels, gen_kwargs)
        num_items = None if labels is None else self._get_num_items_in_batch([whole], self.args.device)
        self._loss_comes_next = labels is not None
        shares = -(-self._real_rows // self.args.world_size) * self.args.world_size
        batch = fill_rows(whole, shares)
        packed = None
        if prediction_loss_only and labels is not None:
            packed = self._packed_for_evaluation(inputs.whole)
        if packed is not None:
            smoothing = self.args.label_smoothing_factor
            outputs = self.parallel.evaluate(packed, num_items_in_batch=num_items, label_smoothing=smoothing)
        elif self._loss_needs_logits() and labels is not None:
            loss_of = self._custom_loss.loss_of(num_items, self._real_rows, outputs=True)
            outputs = self.parallel.evaluate(batch, loss_of=loss_of)
        else:
            smoothing = self.args.label_smoothing_factor
            wanted = {} if labels is None else {"num_items_in_batch": num_items, "label_smoothing": smoothing}
            outputs = self.parallel.evaluate(batch, **wanted, return_logits=not prediction_loss_only)
        loss, logits = outputs.loss, outputs.logits
        if prediction_loss_only:
            return loss, None, None
        own_labels = None if labels is None else self._share({"labels": labels})["labels"]
        return loss, logits, own_labels

    def _share(self, batch: dict[str, Any]) -> dict[str, Any]:
        """The rows whose logits this rank has."""
        return equal_share(batch, self.parallel.share_index, self.args.world_size)

    # ---- Generation ----

    def generate(self, *args, **kwargs) -> torch.Tensor:
        """`model.generate` under a plan; collective, and allowed in callbacks.

        The weights are gathered into the family's own model on rank 0, which generates and gives all ranks the result.
        Rank 0 needs memory for the whole model, in the plan's compute precision, for that time.

        Args:
            args, kwargs: as for [`~transformers.GenerationMixin.generate`]; those of rank 0 count.

        Returns:
            `torch.Tensor`: what rank 0 generated.
        """
        self.ensure_parallel()
        if self.parallel is None:
            return self.model.generate(*args, **kwargs)
        weights = whole_weights(self.parallel)
        result = [None]
        if dist.get_rank() == 0:
            precision = self.parallel.plan.precision
            plain = plain_model(self.parallel, weights)
            if precision is not None and precision.compute == "bf16":
                plain.bfloat16()
            with torch.no_grad():
                result[0] = plain.generate(*args, **{"use_cache": True, **kwargs})
        dist.broadcast_object_list(result, src=0)
        return result[0]

    def _generation_step(self, whole: dict[str, Any], labels: torch.Tensor | None, gen_kwargs: dict[str, Any]):
        """Seq2SeqTrainer's prediction step, generating for the whole batch at once."""
        options = dict(gen_kwargs or getattr(self, "_gen_kwargs", {}))
        options = {name: value for name, value in options.items() if value is not None}
        prompts = {name: value for name, value in whole.items() if name in ("input_ids", "attention_mask")}
        tokens = self.generate(**prompts, **options).to(self.args.device)
        loss = None
        if labels is not None:
            items = self._get_num_items_in_batch([whole], self.args.device)
            smoothing = self.args.label_smoothing_factor
            loss = self.parallel.evaluate(whole, num_items_in_batch=items, label_smoothing=smoothing).loss
            labels = self._lengthened(labels)
        self._loss_comes_next = labels is not None
        shares = self._share({"tokens": self._lengthened(tokens), "labels": labels})
        return loss, shares["tokens"], shares["labels"]

    def _lengthened(self, tokens: torch.Tensor) -> torch.Tensor:
        """Pads [B, S] to the length that Seq2SeqTrainer gives all batches: that of the model's generation config."""
        config = self.model.generation_config
        lengths = [config.max_length or default_max_length(config)]
        if config.max_new_tokens is not None:
            lengths.append(config.max_new_tokens + 1)
        length = next((length for length in lengths if tokens.shape[-1] < length), tokens.shape[-1])
        return self._pad_tensors_to_max_len(tokens, length) if length > tokens.shape[-1] else tokens
