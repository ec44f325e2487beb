# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The weight that embedding and head share, if they are on two stages: two copies that take the same steps."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from galvatron_hf.models.adapter import ModelAdapter
from galvatron_hf.parallel.comm.dtensor import assign, full_tensor, local_tensor
from galvatron_hf.parallel.comm.mesh import WorldMesh
from galvatron_hf.parallel.comm.objects import gather_objects
from galvatron_hf.plan.resolved import ResolvedPlan


@dataclass(frozen=True, kw_only=True)
class TiedWeights:
    """Holds the two copies of a tied weight. The norm of all gradients counts the embedding's copy alone, and
    checkpoints save it alone.

    Attributes:
        names (`tuple[str, str]`): names of the embedding's weight and of the head's.
        group (`ProcessGroup`, *optional*): the two ranks that hold the same piece; None on other stages' ranks, and if
            one rank has both copies.
        uniform (`bool`): whether both copies are cut in the same way, so that the two ranks hold the same piece.
    """

    embedding: nn.Module | None
    head: nn.Module | None
    names: tuple[str, str]
    group: dist.ProcessGroup | None
    uniform: bool

    @classmethod
    def separate(
        cls, model: PreTrainedModel, adapter: ModelAdapter, resolved: ResolvedPlan, world: WorldMesh
    ) -> TiedWeights | None:
        """Gives the head its own copy of a tied weight if other stages lie between it and the embedding."""
        if not resolved.is_pipeline or not resolved.tied:
            return None
        embedding, head = adapter.embeddings(model)[0], adapter.head(model)
        first, last = resolved.stages[0].ranks, resolved.stages[-1].ranks
        joined = world.joined([first, last]) if first != last else []
        head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=head.weight.requires_grad)
        names = {id(module): name for name, module in model.named_modules()}
        return cls(
            embedding=embedding if dist.get_rank() in first else None,
            head=head if dist.get_rank() in last else None,
            names=(f"{names[id(embedding)]}.weight", f"{names[id(head)]}.weight"),
            group=joined[0] if joined else None,
            uniform=resolved.embedding == resolved.head,
        )

    def is_copy(self, parameter: torch.Tensor) -> bool:
        """Tells whether a parameter is the head's copy, which norms and checkpoints leave out."""
        return self.head is not None and parameter is self.head.weight

    @torch.no_grad()
    def copy_weight(self) -> None:
        """Copies the embedding's weight to the head's, if one rank has both: loading fills the first alone."""
        if self.embedding is not None and self.head is not None:
            local_tensor(self.head.weight).copy_(local_tensor(self.embedding.weight))

    def _weights(self) -> list[nn.Parameter]:
        return [module.weight for module in (self.embedding, self.head) if module is not None]

    def check_options(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuses an optimizer that would take different steps with the two copies; collective over all ranks. The
        options of their parameter groups must be equal, and both must be in a group.
        """
        groups = {id(weight): group for group in optimizer.param_groups for weight in group["params"]}
        own = [groups.get(id(weight)) for weight in self._weights()]
        own = [None if group is None else repr({k: v for k, v in group.items() if k != "params"}) for group in own]
        if len({options for options_of_rank in gather_objects(own) for options in options_of_rank}) > 1:
            embedding, head = self.names
            raise ValueError(
                f"{embedding} and {head} are one weight with a copy on the first and the last stage, and the "
                "optimizer has them in groups with different options; give both names the same."
            )

    def take_gradients(self) -> list[torch.Tensor | None]:
        """Takes out and returns the copies' gradients of earlier calls, which are sums over both copies already."""
        earlier = [weight.grad for weight in self._weights()]
        for weight in self._weights():
            weight.grad = None
        return earlier

    @torch.no_grad()
    def sum_gradients(self, earlier: list[torch.Tensor | None]) -> None:
        """Gives both copies the sum of their gradients and adds the earlier ones; collective over both stages."""
        copies = [weight.grad for weight in self._weights()]
        if not copies or copies[0] is None:
            return
        if len(copies) == 2:
            copies[0].to_local().add_(copies[1].to_local())
            copies[1].to_local().copy_(copies[0].to_local())
        elif self.uniform:
            dist.all_reduce(local_tensor(copies[0]), group=self.group)
        else:
            whole = full_tensor(copies[0]).contiguous()
            dist.all_reduce(whole, group=self.group)
            assign(copies[0], whole)
        for gradient, before in zip(copies, earlier, strict=True):
            if before is not None:
                local_tensor(gradient).add_(local_tensor(before))
