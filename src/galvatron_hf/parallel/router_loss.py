# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The loss that balances the experts, over one batch of any number of micro-batches, ranks and stages. Its gradient
needs the choices of all tokens: the counts must be complete before the first backward. They are after the forward of
the only micro-batch, after the last forward of a schedule that runs all forwards first, or after a forward of all
micro-batches without gradients, for the counts alone, which costs about a third of a step.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from galvatron_hf.models.losses import RouterLossKind


class RouterStatistics:
    """Counts the choices of all routers for one batch; its micro-batches share it.

    Attributes:
        complete (`bool`): whether the counts are those of all tokens; routers add nothing then.
        counts_only (`bool`): whether the present forward is for the counts alone, and needs no head.
        scale (`float` or `torch.Tensor`): the gradient of the training loss for this loss, coefficient and all.
    """

    def __init__(self, kind: RouterLossKind, device: torch.device):
        self.kind, self.complete, self.counts_only, self.scale = kind, False, False, 0.0
        self.sums = torch.zeros(2 * kind.experts + 1, dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(self, logits: torch.Tensor, weights: torch.Tensor) -> None:
        """Adds the tokens of one layer on this rank; arguments as for [`RouterLossKind.statistics`]."""
        if not self.complete:
            self.sums += self.kind.statistics(logits, weights)

    def sum_over_ranks(self) -> None:
        """Completes the counts after the forward of all micro-batches; collective over all ranks of the world."""
        dist.all_reduce(self.sums)
        self.complete = True

    def value(self) -> torch.Tensor:
        """Returns the loss without its coefficient, an fp32 scalar that is the same on every rank."""
        return self.kind.value(self.sums).float()

    def added_to(self, anchor: torch.Tensor) -> torch.Tensor:
        """Returns the loss without its coefficient, differentiable: its backward sets `scale`, before that of the
        layers. `anchor` is any tensor through which the caller's loss depends on all layers, such as its other part.
        """
        return _Value.apply(anchor, self)


class _Value(torch.autograd.Function):
    @staticmethod
    def forward(ctx, anchor, statistics):
        ctx.save_for_backward(anchor)
        ctx.statistics = statistics
        return statistics.value()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        ctx.statistics.scale = grad
        return torch.zeros_like(ctx.saved_tensors[0]), None


class _AddGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, chosen, logits, weights, statistics):
        ctx.save_for_backward(logits, weights)
        ctx.statistics = statistics
        return chosen.view_as(chosen)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        statistics = ctx.statistics
        if not statistics.complete:
            raise RuntimeError(
                "The backward of a layer with experts began before all choices of its batch were known."
            )
        logits, weights = ctx.saved_tensors
        gradient = statistics.kind.gradient(logits, weights, statistics.sums)
        return grad, (gradient * statistics.scale).to(logits.dtype), None, None


def with_router_gradient(
    chosen: torch.Tensor, logits: torch.Tensor, weights: torch.Tensor, statistics: RouterStatistics
) -> torch.Tensor:
    """Returns the weights of the tokens' choices unchanged, whose backward also starts that of the routers' loss.

    What the experts return is left as it is: FSDP2 gathers their weights in its backward, and a view of it that is
    changed in place would lose that.

    Args:
        chosen (`torch.Tensor`): [tokens, top_k], what the router made of the logits; its backward runs before theirs.
        logits (`torch.Tensor`): [tokens, experts].
        weights (`torch.Tensor`): [tokens], 0 for padding, else 1.
    """
    return _AddGradient.apply(chosen, logits, weights, statistics)
