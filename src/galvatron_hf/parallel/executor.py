# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Training and evaluation of a batch in micro-batches, with and without a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from galvatron_hf.models.losses import count_targets
from galvatron_hf.parallel.activation.micro_batch import HeadRows, map_rows, split_rows
from galvatron_hf.parallel.comm.objects import gather_objects
from galvatron_hf.parallel.data_parallel.sharding import ShardedUnits
from galvatron_hf.parallel.data_parallel.tied_weights import TiedWeights
from galvatron_hf.parallel.model_runner import ModelRunner
from galvatron_hf.parallel.pipeline.runtime import Pipeline
from galvatron_hf.parallel.pipeline.trace import Timeline
from galvatron_hf.parallel.router_loss import RouterStatistics
from galvatron_hf.plan import ParallelPlan
from galvatron_hf.plan.dealing import deal_in_rows
from galvatron_hf.plan.schedule import Action, Work, runs_forwards_first


@dataclass(frozen=True, kw_only=True)
class PackedBatch:
    """Holds the documents of a padded batch.

    Attributes:
        micro_batches (`list[dict]`): packed, with [`Deal`]s that name documents by their number in the batch.
        columns (`np.ndarray`): [documents], the position in its row at which each begins.
    """

    micro_batches: list[dict[str, Any]]
    columns: np.ndarray


# A global batch [B, S], or its micro-batches if packing has chosen them.
Batch = Mapping[str, torch.Tensor] | Sequence[Mapping[str, Any]]


@dataclass(kw_only=True)
class Executor:
    """Computes the model's own loss of batches that every rank has as a whole; all methods are collective."""

    model: PreTrainedModel
    runner: ModelRunner
    plan: ParallelPlan
    units: ShardedUnits
    timeline: Timeline
    pipeline: Pipeline | None = None
    tied: TiedWeights | None = None

    def train(self, batch: Batch, **options) -> torch.Tensor:
        """Runs forward and backward of a global batch; returns its loss, the same on every rank."""
        batch = self._with_positions(batch)
        if options.get("num_items_in_batch") is None:
            options["num_items_in_batch"] = count_targets(batch, self.runner.loss)
        options |= {"return_logits": False, "whole_loss": False, "routers": self._router_statistics(options)}
        count = self.micro_batch_count(batch)
        parts = [dict(part) for part in (split_rows(batch, count) if isinstance(batch, Mapping) else batch)]
        if self.pipeline is None:
            total = self._train_in_turn(parts, options)
        else:
            with self.timeline.waits.step():
                total = self._sum(self._train_in_pipeline(parts, options))
                with self.timeline.waits.wait():  # for the stages that end later
                    dist.all_reduce(total)
        return total + self._of_routers(options["routers"])

    def _router_statistics(self, options: Mapping[str, Any]) -> RouterStatistics | None:
        """Returns new counts for the routers' loss, which Hugging Face's trainer does not add to a smoothed loss."""
        if options.get("label_smoothing"):
            return None
        statistics = self.runner.router_statistics(self._device)
        if statistics is not None:
            statistics.scale = statistics.kind.coefficient
        return statistics

    def _of_routers(self, statistics: RouterStatistics | None) -> torch.Tensor | float:
        return 0.0 if statistics is None else statistics.kind.coefficient * statistics.value()

    @torch.no_grad()
    def _count_choices(self, statistics: RouterStatistics, forward: Callable[[], Any]) -> None:
        """Runs a forward of all micro-batches for the counts of their routers alone; collective."""
        statistics.counts_only = True
        forward()
        statistics.counts_only = False
        self.units.reshard()
        statistics.sum_over_ranks()

    def _train_in_turn(self, parts: list[dict[str, Any]], options: dict[str, Any]) -> torch.Tensor:
        losses, last, routers = [], len(parts) - 1, options["routers"]
        if routers is not None and last > 0:
            self._count_choices(routers, lambda: self._forward_in_turn(parts, options))
        for index, part in enumerate(parts):
            self.runner.position.micro_batch = index
            self.units.begin_micro_batch(last=index == last)
            with self.timeline.span(Action(Work.FORWARD, 0, index)):
                loss = self.runner(**part, **options).loss
            losses.append(loss.detach())
            if routers is not None and not routers.complete:
                routers.sum_over_ranks()
            if index == last:
                total = self._sum(losses)
                summed = dist.all_reduce(total, async_op=True)  # overlaps with the backward
            with self.timeline.span(Action(Work.BACKWARD, 0, index)):
                loss.backward()
        self.units.finish_step()
        summed.wait()
        return total

    def _forward_in_turn(self, parts: list[dict[str, Any]], options: dict[str, Any]) -> None:
        for index, part in enumerate(parts):
            self.runner.position.micro_batch = index
            self.runner(**part, **options)

    def _train_in_pipeline(self, parts: list[dict[str, Any]], options: dict[str, Any]) -> list[torch.Tensor]:
        batches = []
        for index, part in enumerate(parts):
            self.runner.position.micro_batch = index
            batches.append(self.runner.micro_batch(**part, **options))
        earlier = self.tied.take_gradients() if self.tied is not None else []
        routers, between = options["routers"], None
        if routers is not None and runs_forwards_first(self.pipeline.shape, len(batches)):
            between = routers.sum_over_ranks
        elif routers is not None:
            self._count_choices(routers, lambda: self.pipeline.evaluate(batches))
        losses = self.pipeline.train(batches, between)
        if self.tied is not None:
            with self.timeline.waits.wait():  # the last stage for the first one
                self.tied.sum_gradients(earlier)
        return losses

    @torch.no_grad()
    def evaluate(self, batch: Batch, documents: PackedBatch | None = None, **options) -> ModelOutput:
        """Computes loss and logits of a batch without gradients. The batch may be packed micro-batches. The loss is
        the same on every rank. Logits, which `return_logits` asks for and a batch without labels gives, are without a
        pipeline of the rows that [`ModelRunner.local_rows`] names. Under a pipeline they are of the rank's equal share
        of the rows, see [`ParallelModel.share_index`]; the world's size must then divide the number of rows.

        With the `documents` of a padded batch, layers run on these, and the head alone on rows: no rank holds whole
        rows before. Positions of no document then have the logits of a hidden state of zeros.
        """
        packed, batch = not isinstance(batch, Mapping), self._with_positions(batch)
        labelled = packed or self.runner.loss.is_labelled(batch)
        logits = options.pop("return_logits", None)
        logits = not packed and (not labelled if logits is None else logits)
        if labelled and options.get("num_items_in_batch") is None:
            options["num_items_in_batch"] = count_targets(batch, self.runner.loss)
        routers = self._router_statistics(options) if labelled else None
        options |= {"return_logits": logits, "whole_loss": False, "routers": routers}
        if documents is not None:
            outputs = self._evaluate_in_rows(batch, documents, options)
        else:
            outputs = list(self._run(list(batch) if packed else list(self._evaluation_parts(batch, logits)), options))
        self.units.reshard()
        loss = None
        if labelled:
            loss = self._sum([output.loss for output in outputs])
            dist.all_reduce(loss)
        if routers is not None:
            routers.sum_over_ranks()
            loss = loss + self._of_routers(routers)
        found = {"logits": None}
        if logits:
            names = ["logits", *(f"{stack.reads}_last_hidden_state" for stack in self.runner.adapter.readers)]
            found = {name: self._share([output[name] for output in outputs]) for name in names}
        return self.runner.loss.outputs(loss=loss, **found)

    def _run(self, parts: Sequence[Mapping[str, Any]], options: dict[str, Any]) -> Iterable[ModelOutput]:
        """Runs the forward of micro-batches; gives what the last stage's ranks compute."""
        if self.pipeline is None:
            return (self.runner(**part, **options) for part in parts)
        return self.pipeline.evaluate([self.runner.micro_batch(**part, **options) for part in parts])

    def _evaluate_in_rows(
        self, batch: Mapping[str, Any], documents: PackedBatch, options: dict[str, Any]
    ) -> list[ModelOutput]:
        whole = self.runner.micro_batch(**batch, **options)
        rows = whole.last.rows, whole.last.length
        parts = [
            part | {"head_rows": HeadRows(deal=deal_in_rows(deal, documents.columns, *rows), layout=whole.ends.head)}
            for part, deal in ((part, part["documents"]) for part in self._with_positions(documents.micro_batches))
        ]
        hidden = None
        for output in self._run(parts, options | {"return_logits": False}):
            # Each token is in one micro-batch, and the others have zeros in its place.
            hidden = output.hidden_states if hidden is None else hidden.add_(output.hidden_states)
        if hidden is None:
            return []  # a stage before the last
        (last,) = (stage for stage in self.runner.stages if stage.is_last)
        return [self.runner.head(last, whole, hidden)]

    def micro_batch_count(self, batch: Batch) -> int:
        """Returns the number of micro-batches of a global batch: the plan's, or fewer if it has fewer rows."""
        if not isinstance(batch, Mapping):
            return len(batch)
        return min(self.plan.micro_batch_count, self._with_positions(batch)["input_ids"].shape[0])

    def _with_positions(self, batch: Batch) -> Batch:
        """Returns a batch whose parts have [`ModelAdapter.with_positions`]."""
        add = self.runner.adapter.with_positions
        return add(batch) if isinstance(batch, Mapping) else [add(part) for part in batch]

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
        count = min(self.plan.micro_batch_count, share)
        for index in range(count):
            part = slice(index * share // count, (index + 1) * share // count)
            yield map_rows(batch, lambda value, part=part: value.unflatten(0, (shares, share))[:, part].flatten(0, 1))

    def _share(self, found: list[torch.Tensor]) -> torch.Tensor:
        """Gives each rank its share of the logits, or of another output [B, S, ...] of all micro-batches; under a
        pipeline the last stage has them all.
        """
        if self.pipeline is None:
            return found[0]
        pipeline = self.pipeline
        group, lists, device = pipeline.group, pipeline.shape.pipeline_ranks, self._device
        source = pipeline.shape.pipeline_rank_of_stage[-1]
        pieces = None
        shape = None
        if pipeline.has_last:
            by_share = [part.unflatten(0, (lists, -1)) for part in found]
            pieces = list(torch.cat(by_share, dim=1).contiguous().unbind(0))
            shape = tuple(pieces[0].shape), pieces[0].dtype
        size, dtype = next(one for one in gather_objects(shape) if one is not None)
        local = torch.empty(size, dtype=dtype, device=device)
        dist.scatter(local, pieces, group=group, group_src=source)
        return local

    def _sum(self, losses: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(losses).sum() if losses else torch.zeros((), device=self._device)

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device
