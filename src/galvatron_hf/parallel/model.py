# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""A parallelised model as a training loop sees it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from galvatron_hf.parallel.causal_lm import CausalLMForward, StreamPosition
from galvatron_hf.parallel.mesh import StageMesh
from galvatron_hf.parallel.micro_batch import IGNORED, shift_targets
from galvatron_hf.parallel.models import DecoderAdapter
from galvatron_hf.parallel.sharding import ShardedUnits, local_tensor, replicas
from galvatron_hf.plan import ParallelPlan


@dataclass(kw_only=True)
class ParallelModel:
    """What [`parallelize`] returns.

    Attributes:
        model ([`PreTrainedModel`]): the model; its parameters are DTensors now.
        plan ([`ParallelPlan`]): the plan it computes under.
        adapter ([`DecoderAdapter`]): its family.
        mesh ([`StageMesh`]): meshes and groups.
        units ([`ShardedUnits`]): its FSDP2 units.
        family (`type`): the model's own class, which FSDP2 has put a subclass over.
    """

    model: PreTrainedModel
    plan: ParallelPlan
    adapter: DecoderAdapter
    mesh: StageMesh
    units: ShardedUnits
    family: type[PreTrainedModel]

    @property
    def forward(self) -> CausalLMForward:
        return self.model.forward

    @property
    def streams(self) -> StreamPosition:
        """Where the random streams stand; a training loop sets `seed` once and `step` before each step."""
        return self.forward.position

    @property
    def layers(self) -> list[nn.Module]:
        return list(self.model.base_model.get_submodule(self.adapter.layers))

    def tied_names(self) -> list[str]:
        """Names under which a weight appears a second time in the state dict."""
        seen, tied = set(), []
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            if id(tensor) in seen:
                tied.append(name)
            seen.add(id(tensor))
        return tied

    def forward_backward(
        self, batch: Mapping[str, torch.Tensor], num_items_in_batch: torch.Tensor | int | None = None, **options
    ) -> torch.Tensor:
        """Forward and backward of a global batch in the plan's micro-batches.

        Args:
            batch (`Mapping[str, torch.Tensor]`): [B, S] tensors with `labels` or `shift_labels`, the same on every
                rank.
            num_items_in_batch (`torch.Tensor` or `int`, *optional*): targets of the global batch; counted if absent.
            options: passed to the model's forward.

        Returns:
            `torch.Tensor`: the loss of the global batch, an fp32 scalar, the same on every rank.
        """
        if num_items_in_batch is None:
            num_items_in_batch = count_targets(batch)
        losses = []
        for micro_batch in self.micro_batches(batch):
            options = options | {"num_items_in_batch": num_items_in_batch, "whole_loss": False}
            loss = self.model(**micro_batch, **options).loss
            loss.backward()
            losses.append(loss.detach())
        total = torch.stack(losses).sum()
        dist.all_reduce(total, group=self.mesh.groups.block(self.mesh.size))
        return total

    def micro_batches(self, batch: Mapping[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
        """Splits a global batch by rows into the plan's micro-batches (fewer if it has fewer rows).

        While one is handed out, gradient synchronisation and random streams are set for it.

        Yields:
            `dict[str, torch.Tensor]`: the micro-batch.
        """
        rows = next(iter(batch.values())).shape[0]
        count = min(self.plan.micro_batches, rows)
        for index in range(count):
            part = slice(index * rows // count, (index + 1) * rows // count)
            self.streams.micro_batch = index
            self.units.begin_micro_batch(last=index == count - 1)
            yield {name: value[part] if isinstance(value, torch.Tensor) else value for name, value in batch.items()}

    def grad_norm(self) -> torch.Tensor:
        """The 2-norm of all gradients, each counted once however many ranks hold it; an fp32 scalar."""
        device = next(self.model.parameters()).device
        total = torch.zeros((), dtype=torch.float64, device=device)
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                square = local_tensor(parameter.grad).double().square().sum()
                total += square / replicas(parameter.grad)
        dist.all_reduce(total, group=self.mesh.groups.block(self.mesh.size))
        return total.sqrt().float()

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scales all gradients so that their norm is at most `max_norm`; returns the norm before."""
        norm = self.grad_norm()
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                local_tensor(parameter.grad).mul_(scale)
        return norm


def count_targets(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Number of tokens that a batch asks to predict."""
    targets = batch["shift_labels"] if batch.get("shift_labels") is not None else shift_targets(batch["labels"])
    return (targets != IGNORED).sum()


@torch.no_grad()
def broadcast_weights(model: nn.Module) -> None:
    """Gives every rank the weights and buffers of rank 0."""
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.device.type != "meta":
            dist.broadcast(tensor.data, src=0)
