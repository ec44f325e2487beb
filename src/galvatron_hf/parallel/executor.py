# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Training and evaluation of a batch in micro-batches, with and without a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from galvatron_hf.models.losses import LossKind, count_targets, without_labels
from galvatron_hf.parallel.activation.micro_batch import map_rows, split_rows
from galvatron_hf.parallel.data_parallel.sharding import ShardedUnits
from galvatron_hf.parallel.data_parallel.tied_weights import TiedWeights
from galvatron_hf.parallel.pipeline.runtime import Pipeline
from galvatron_hf.parallel.pipeline.trace import Timeline
from galvatron_hf.plan import ParallelPlan
from galvatron_hf.plan.schedule import Action, Work


# A global batch [B, S], or its micro-batches if packing has chosen them.
Batch = Mapping[str, torch.Tensor] | Sequence[Mapping[str, Any]]
# Runs the model on a micro-batch's inputs. Under a pipeline the output exists already, and the inputs are ignored.
RunModel = Callable[..., ModelOutput]
# Returns a rank's part of a micro-batch's loss, and in evaluation the logits of the rank's rows.
LossOf = Callable[[dict[str, Any], RunModel], ModelOutput]


@dataclass(kw_only=True)
class Executor:
    """Computes batches that every rank has as a whole; all methods are collective. Without `loss_of` the loss is the
    model's own. A given `loss_of` is called for each micro-batch on the ranks that have its logits, and the model gets
    no labels.
    """

    model: PreTrainedModel
    plan: ParallelPlan
    units: ShardedUnits
    timeline: Timeline
    pipeline: Pipeline | None = None
    tied: TiedWeights | None = None

    def train(self, batch: Batch, loss_of: LossOf | None = None, **options) -> torch.Tensor:
        """Runs forward and backward of a global batch; returns its loss, the same on every rank."""
        if loss_of is None and options.get("num_items_in_batch") is None:
            options["num_items_in_batch"] = count_targets(batch, self._loss)
        options |= {"return_logits": loss_of is not None, "whole_loss": False}
        compute, inputs_of = self._functions(loss_of)
        count = self.micro_batch_count(batch)
        parts = [dict(part) for part in (split_rows(batch, count) if isinstance(batch, Mapping) else batch)]
        if self.pipeline is None:
            return self._train_in_turn(parts, compute, options)
        total = self._sum(self._train_in_pipeline(parts, compute, inputs_of, options))
        dist.all_reduce(total)
        return total

    def _train_in_turn(self, parts: list[dict[str, Any]], loss_of: LossOf, options: dict[str, Any]) -> torch.Tensor:
        losses, position, last = [], self.model.forward.position, len(parts) - 1
        for index, part in enumerate(parts):
            position.micro_batch = index
            self.units.begin_micro_batch(last=index == last)
            with self.timeline.span(Action(Work.FORWARD, 0, index)):
                loss = loss_of(part, partial(self.model, **options)).loss
            losses.append(loss.detach())
            if index == last:
                total = self._sum(losses)
                summed = dist.all_reduce(total, async_op=True)  # overlaps with the backward
            with self.timeline.span(Action(Work.BACKWARD, 0, index)):
                loss.backward()
        summed.wait()
        return total

    def _train_in_pipeline(
        self, parts: list[dict[str, Any]], loss_of: LossOf, inputs_of: Callable, options: dict[str, Any]
    ) -> list[torch.Tensor]:
        runner, batches = self.model.forward, []
        for index, part in enumerate(parts):
            runner.position.micro_batch = index
            batches.append(runner.micro_batch(**inputs_of(part), **options))
        earlier = self.tied.take_gradients() if self.tied is not None else []
        losses = self.pipeline.train(batches, lambda index, output: loss_of(parts[index], _returning(output)).loss)
        if self.tied is not None:
            self.tied.sum_gradients(earlier)
        return losses

    @torch.no_grad()
    def evaluate(self, batch: Batch, loss_of: LossOf | None = None, **options) -> ModelOutput:
        """Computes loss and logits of a batch without gradients. The batch may be packed micro-batches. The loss is
        the same on every rank. With `loss_of`, logits are returned too. Without a pipeline they are of the rows that
        [`ModelRunner.local_rows`] names. Under a pipeline they are of the rank's equal share of the rows, see
        [`ParallelModel.share_index`]; the world's size must then divide the number of rows.
        """
        packed = not isinstance(batch, Mapping)
        labelled = packed or self._loss.is_labelled(batch)
        logits = options.pop("return_logits", None)
        logits = not packed and (loss_of is not None or (not labelled if logits is None else logits))
        if labelled and options.get("num_items_in_batch") is None:
            options["num_items_in_batch"] = count_targets(batch, self._loss)
        options |= {"return_logits": logits, "whole_loss": False}
        parts = list(batch) if packed else list(self._evaluation_parts(batch, logits))
        compute, inputs_of = self._functions(loss_of)
        outputs = [compute(dict(part), run) for part, run in self._forward(parts, inputs_of, options)]
        self.units.reshard()
        loss = None
        if labelled:
            loss = self._sum([output.loss for output in outputs])
            dist.all_reduce(loss)
        found = self._share_logits([output.logits for output in outputs]) if logits else None
        return self._loss.output(loss=loss, logits=found)

    def micro_batch_count(self, batch: Batch) -> int:
        """Returns the number of micro-batches of a global batch: the plan's, or fewer if it has fewer rows."""
        if not isinstance(batch, Mapping):
            return len(batch)
        return min(self.plan.micro_batches, batch["input_ids"].shape[0])

    def _forward(
        self, parts: list[Mapping[str, Any]], inputs_of: Callable, options: dict[str, Any]
    ) -> Iterator[tuple[Mapping[str, Any], RunModel]]:
        """Yields each micro-batch whose output this rank gets, with a function that returns the output."""
        if self.pipeline is None:
            yield from ((part, partial(self.model, **options)) for part in parts)
            return
        batches = [self.model.forward.micro_batch(**inputs_of(part), **options) for part in parts]
        outputs = self.pipeline.evaluate(batches)
        yield from zip(parts, map(_returning, outputs), strict=bool(outputs))

    def _evaluation_parts(self, batch: Mapping[str, Any], logits: bool) -> Iterator[Mapping[str, Any]]:
        """Yields the whole batch, or a pipeline's micro-batches. Each micro-batch has a part of every rank's share of
        the rows, so that the logits of a share come out in order.
        """
        if self.pipeline is None:
            yield batch
            return
        rows, shares = batch["input_ids"].shape[0], self.plan.world_size if logits else 1
        if rows % shares:
            raise ValueError(
                f"Logits of {rows} rows are wanted of {shares} ranks, which get equally many each; "
                f"fill the batch up to {-(-rows // shares) * shares} rows."
            )
        share = rows // shares
        count = min(self.plan.micro_batches, share)
        for index in range(count):
            part = slice(index * share // count, (index + 1) * share // count)
            yield map_rows(batch, lambda value, part=part: value.unflatten(0, (shares, share))[:, part].flatten(0, 1))

    def _share_logits(self, logits: list[torch.Tensor]) -> torch.Tensor:
        """Gives each rank its share of the logits; under a pipeline the last stage has them all."""
        if self.pipeline is None:
            return logits[0]
        pipeline = self.pipeline
        group, lists, device = pipeline.group, pipeline.shape.pipeline_ranks, self._device
        source = pipeline.shape.pipeline_rank_of_stage[-1]
        pieces = None
        shape: list[Any] = [None]
        if pipeline.has_last:
            by_share = [part.unflatten(0, (lists, -1)) for part in logits]
            pieces = list(torch.cat(by_share, dim=1).contiguous().unbind(0))
            shape = [(tuple(pieces[0].shape), pieces[0].dtype)]
        dist.broadcast_object_list(shape, group=group, group_src=source, device=device)
        local = torch.empty(shape[0][0], dtype=shape[0][1], device=device)
        dist.scatter(local, pieces, group=group, group_src=source)
        return local

    def _sum(self, losses: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(losses).sum() if losses else torch.zeros((), device=self._device)

    def _functions(self, loss_of: LossOf | None) -> tuple[LossOf, Callable]:
        """Returns the function that computes the loss, and the one that selects a pipeline's inputs."""
        if loss_of is None:
            return (lambda micro_batch, run: run(**micro_batch)), dict
        return loss_of, partial(without_labels, loss=self._loss)

    @property
    def _loss(self) -> LossKind:
        return self.model.forward.loss

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device


def _returning(output: ModelOutput) -> RunModel:
    """Returns a function that ignores its inputs and returns an output that exists already."""
    return lambda **inputs: output
