# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""A parallelised model as a training loop sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel
from transformers.distributed.pipeline_parallel import PipelineIdentityLayer
from transformers.modeling_outputs import CausalLMOutput

from galvatron_hf.models.adapter import ModelAdapter
from galvatron_hf.models.fused_weights import FusedNames
from galvatron_hf.models.losses import count_targets, without_labels
from galvatron_hf.parallel.activation.micro_batch import split_rows
from galvatron_hf.parallel.comm.dtensor import local_tensor, replicas
from galvatron_hf.parallel.comm.mesh import StageMesh, WorldMesh
from galvatron_hf.parallel.data_parallel.sharding import ShardedUnits
from galvatron_hf.parallel.data_parallel.tied_weights import TiedWeights
from galvatron_hf.parallel.evaluate import evaluate_pipelined
from galvatron_hf.parallel.pipeline.forward import ModelRunner, StreamPosition
from galvatron_hf.parallel.pipeline.runtime import Pipeline
from galvatron_hf.parallel.pipeline.trace import Timeline
from galvatron_hf.plan import ParallelPlan
from galvatron_hf.plan.schedule import Action, Work
from galvatron_hf.utils.compat import tensor_norms


# A global batch [B, S], or its micro-batches where packing has chosen them.
Batch = Mapping[str, torch.Tensor] | Sequence[Mapping[str, Any]]
LossOf = Callable[[dict[str, Any], CausalLMOutput], torch.Tensor]


@dataclass(kw_only=True)
class ParallelModel:
    """What [`parallelize`] returns.

    Attributes:
        model ([`PreTrainedModel`]): the model; its parameters are DTensors now, under a pipeline those of this rank's
            stages.
        plan ([`ParallelPlan`]): the plan it computes under.
        adapter ([`ModelAdapter`]): its family.
        world ([`WorldMesh`]): meshes and groups of all stages.
        mesh ([`StageMesh`]): those of this rank's stages.
        units ([`ShardedUnits`]): what is gathered and reduced together.
        family (`type`): the model's own class.
        fused ([`FusedNames`]): its fused weights.
        timeline ([`Timeline`]): told when each micro-batch's work begins and ends.
        pipeline ([`Pipeline`], *optional*): runs a plan of several stages.
        tied ([`TiedWeights`], *optional*): a tied weight with stages between its copies.
    """

    model: PreTrainedModel
    plan: ParallelPlan
    adapter: ModelAdapter
    world: WorldMesh
    mesh: StageMesh
    units: ShardedUnits
    family: type[PreTrainedModel]
    fused: FusedNames
    timeline: Timeline
    pipeline: Pipeline | None = None
    tied: TiedWeights | None = None

    @property
    def forward(self) -> ModelRunner:
        return self.model.forward

    @property
    def streams(self) -> StreamPosition:
        """Where the random streams stand; a training loop sets `seed` once and `step` before each step."""
        return self.forward.position

    @property
    def layers(self) -> list[nn.Module]:
        """The layers of this rank's stages, in order."""
        layers = self.adapter.layers(self.model)
        return [layer for layer in layers if not isinstance(layer, PipelineIdentityLayer)]

    def tied_names(self) -> list[str]:
        """Names under which a weight appears a second time in the state dict."""
        seen, tied = set(), []
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            if id(tensor) in seen or (self.tied is not None and self.tied.is_copy(tensor)):
                tied.append(name)
            seen.add(id(tensor))
        return tied

    def parameter_names(self) -> dict[int, str]:
        """From the `id` of a parameter, as an optimizer holds it, to its name; tied copies share one."""
        self.units.reshard()
        names: dict[int, str] = {}
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            copy = self.tied is not None and self.tied.is_copy(tensor)
            names.setdefault(id(tensor), self.tied.names[0] if copy else name)
        return names

    def forward_backward(
        self,
        batch: Batch,
        num_items_in_batch: torch.Tensor | int | None = None,
        *,
        loss_of: LossOf | None = None,
        **options,
    ) -> torch.Tensor:
        """Forward and backward of a global batch in the plan's micro-batches.

        Args:
            batch (`Mapping[str, torch.Tensor]`): [B, S] tensors with `labels` or `shift_labels`, the same on every
                rank. Or a list of micro-batches, packed ones as [`galvatron_hf.data.packing.pack`] makes them.
            num_items_in_batch (`torch.Tensor` or `int`, *optional*): targets of the global batch; counted if absent.
            loss_of (`Callable`, *optional*): this rank's part of a micro-batch's loss, from the micro-batch and a
                [`CausalLMOutput`] with logits of the own rows; called on the ranks that have them. The default is the
                loss of next-token prediction.
            options: passed to the model's forward.

        Returns:
            `torch.Tensor`: the loss of the global batch, an fp32 scalar, the same on every rank.
        """
        if loss_of is None:
            if num_items_in_batch is None:
                num_items_in_batch = count_targets(batch)
            options = options | {"num_items_in_batch": num_items_in_batch, "whole_loss": False}
        else:
            options = options | {"return_logits": True}
        if self.pipeline is None:
            return self._one_by_one(batch, loss_of, options)
        losses = self._pipelined(list(self.micro_batches(batch)), loss_of, options)
        total = torch.stack(losses).sum() if losses else torch.zeros((), device=self.device)
        dist.all_reduce(total)
        return total

    def _one_by_one(self, batch: Batch, loss_of: LossOf | None, options: dict) -> torch.Tensor:
        losses = []
        for index, part in enumerate(self.micro_batches(batch)):
            with self.timeline.span(Action(Work.FORWARD, 0, index)):
                if loss_of is None:
                    loss = self.model(**part, **options).loss
                else:
                    loss = loss_of(part, self.model(**without_labels(part), **options))
            losses.append(loss.detach())
            if index + 1 == self.micro_batch_count(batch):
                total = torch.stack(losses).sum()
                summed = dist.all_reduce(total, async_op=True)  # while the backward goes on
            with self.timeline.span(Action(Work.BACKWARD, 0, index)):
                loss.backward()
        summed.wait()
        return total

    def _pipelined(self, parts: list[dict], loss_of: LossOf | None, options: dict) -> list[torch.Tensor]:
        batches = []
        for index, part in enumerate(parts):
            self.streams.micro_batch = index
            inputs = part if loss_of is None else without_labels(part)
            batches.append(self.forward.micro_batch(**inputs, **options))
        own = (lambda index, output: output.loss) if loss_of is None else lambda i, output: loss_of(parts[i], output)
        earlier = self.tied.take_gradients() if self.tied is not None else []
        losses = self.pipeline.train(batches, own)
        if self.tied is not None:
            self.tied.sum_gradients(earlier)
        return losses

    @torch.no_grad()
    def evaluate(self, batch: Batch, *, loss_of: LossOf | None = None, **options) -> CausalLMOutput:
        """Loss and logits of a batch, without gradients; collective.

        Args:
            batch (`Mapping[str, torch.Tensor]`): [B, S] tensors, the same on every rank. Under a pipeline with logits
                it has a multiple of the world's size of rows. Or a list of packed micro-batches, which have a loss
                alone.
            loss_of (`Callable`, *optional*): as in [`ParallelModel.forward_backward`]; logits are then returned too.
            options: passed to the model's forward.

        Returns:
            [`CausalLMOutput`]: `loss`, the same on every rank. `logits`: without a pipeline, of the rows that
                [`ModelRunner.local_rows`] names; under one, of the rank's equal share of the rows, see
                [`ParallelModel.share_index`].
        """
        if not isinstance(batch, Mapping):
            return CausalLMOutput(loss=self._evaluate_packed(batch, options))
        if self.pipeline is not None:
            return evaluate_pipelined(self, batch, options, loss_of)
        if loss_of is None:
            return self.model(**batch, **options)
        output = self.model(**without_labels(batch), **options)
        loss = loss_of(dict(batch), output).detach().clone()
        self.sum_over_stage(loss)
        return CausalLMOutput(loss=loss, logits=output.logits)

    def _evaluate_packed(self, parts: Sequence[Mapping[str, Any]], options: dict[str, Any]) -> torch.Tensor:
        if options.get("num_items_in_batch") is None:
            options = options | {"num_items_in_batch": count_targets(parts)}
        options = options | {"return_logits": False, "whole_loss": False}
        if self.pipeline is not None:
            outputs = self.pipeline.evaluate([self.forward.micro_batch(**part, **options) for part in parts])
        else:
            outputs = [self.model(**part, **options) for part in parts]
        losses = [output.loss for output in outputs]
        loss = torch.stack(losses).sum() if losses else torch.zeros((), device=self.device)
        dist.all_reduce(loss)
        return loss

    def sum_over_stage(self, tensor: torch.Tensor) -> None:
        """Sums a tensor in place over the ranks of this rank's stages; collective over them."""
        if self.mesh.size > 1:
            dist.all_reduce(tensor, group=self.mesh.groups.block(self.mesh.size))

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def share_index(self) -> int:
        """Index of the equal share of an evaluated batch's rows whose logits this rank gets."""
        place = 0 if self.pipeline is None else self.pipeline.pipeline_rank
        return self.mesh.index * (self.plan.world_size // self.mesh.size) + place

    def share_order(self) -> list[int]:
        """The ranks in the order of their shares of an evaluated batch."""
        return [ranks[index] for index in range(self.mesh.size) for ranks in self.plan.rank_groups]

    def micro_batch_count(self, batch: Batch) -> int:
        """Into how many micro-batches a global batch is split."""
        if not isinstance(batch, Mapping):
            return len(batch)
        return min(self.plan.micro_batches, batch["input_ids"].shape[0])

    def micro_batches(self, batch: Batch) -> Iterator[dict[str, Any]]:
        """Splits a global batch by rows into the plan's micro-batches (fewer if it has fewer rows).

        A list of micro-batches is handed on as it is.

        Without a pipeline, gradient synchronisation and random streams are set for a micro-batch while it is handed
        out.

        Yields:
            `dict[str, torch.Tensor]`: the micro-batch.
        """
        parts = split_rows(batch, self.micro_batch_count(batch)) if isinstance(batch, Mapping) else batch
        for index, part in enumerate(parts):
            if self.pipeline is None:
                self.streams.micro_batch = index
                self.units.begin_micro_batch(last=index == self.micro_batch_count(batch) - 1)
            yield dict(part)

    def grad_norm(self) -> torch.Tensor:
        """The 2-norm of all gradients, each counted once however many ranks hold it; an fp32 scalar."""
        return self.sum_with_grad_norm()[0]

    def sum_with_grad_norm(self, *values: float) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm of all gradients, and sums of other numbers over all ranks, in one collective.

        Args:
            values (`float`): this rank's numbers; the other ranks give as many.

        Returns:
            `tuple`: the norm, an fp32 scalar, and the sums, fp64 [values].
        """
        counted = [parameter for parameter in self.model.parameters() if parameter.grad is not None]
        if self.tied is not None:
            counted = [parameter for parameter in counted if not self.tied.is_copy(parameter)]
        copies = [replicas(parameter.grad) for parameter in counted]
        sums = torch.tensor([0.0, *values], dtype=torch.float64, device=self.device)
        if counted:
            norms = tensor_norms([local_tensor(parameter.grad) for parameter in counted])
            sums[0] = (norms.double().square() / torch.tensor(copies, device=self.device)).sum()
        everywhere = all(count == self.plan.world_size for count in copies) and self.pipeline is None
        if everywhere and not values:
            sums *= self.plan.world_size  # every rank has all gradients
        else:
            dist.all_reduce(sums)
        return sums[0].sqrt().float(), sums[1:]

    def clip_grad_norm_(self, max_norm: float, norm: torch.Tensor | None = None) -> torch.Tensor:
        """Scales all gradients so that their norm is at most `max_norm`; returns that before, which may be given."""
        norm = self.grad_norm() if norm is None else norm
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                local_tensor(parameter.grad).mul_(scale)
        return norm


@torch.no_grad()
def broadcast_weights(model: nn.Module) -> None:
    """Gives every rank the weights and buffers of rank 0."""
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.device.type != "meta":
            dist.broadcast(tensor.data, src=0)
