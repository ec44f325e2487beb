# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Weights that several stages use: copies that take the same steps. One is the vocabulary's, which embeddings and a
tied head share; others are biases of scores that all layers of a stack share.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from galvatron_hf.models.adapter import ModelAdapter, base_model
from galvatron_hf.parallel.comm.dtensor import assign, full_tensor, local_tensor
from galvatron_hf.parallel.comm.mesh import WorldMesh
from galvatron_hf.parallel.comm.objects import gather_objects
from galvatron_hf.plan.resolved import ResolvedPlan


@dataclass(frozen=True, kw_only=True)
class WeightCopies:
    """Holds the copies of one weight. The norm of all gradients counts the first copy alone, and checkpoints save it
    alone.

    Attributes:
        names (`tuple[str, ...]`): the name of each copy's weight.
        modules (`tuple[nn.Module | None, ...]`): the module that holds each copy; None for copies on other ranks.
        group (`ProcessGroup`, *optional*): the ranks that hold the same piece; None on ranks of other stages, and if
            one rank has all copies.
        uniform (`bool`): whether all copies are cut in the same way, so that the ranks hold the same piece.
    """

    names: tuple[str, ...]
    modules: tuple[nn.Module | None, ...]
    group: dist.ProcessGroup | None
    uniform: bool

    @property
    def own(self) -> list[nn.Parameter]:
        """Returns the copies of this rank."""
        return [module.weight for module in self.modules if module is not None]

    @property
    def has_first(self) -> bool:
        """Tells whether this rank has the copy that is counted and saved."""
        return self.modules[0] is not None

    def is_copy(self, parameter: torch.Tensor) -> bool:
        """Tells whether a parameter is a copy other than the first."""
        return any(module is not None and parameter is module.weight for module in self.modules[1:])

    @torch.no_grad()
    def copy_weight(self) -> None:
        """Copies the first of this rank's copies to its others: loading fills that one alone."""
        if len(self.own) > 1:
            first, *others = self.own
            self._give(first, others)

    def _give(self, first: torch.Tensor, others: Sequence[torch.Tensor]) -> None:
        """Copies a tensor to others of this rank; collective over its stage if they are cut differently."""
        whole = None if self.uniform else full_tensor(first)
        for other in others:
            if whole is None:
                local_tensor(other).copy_(local_tensor(first))
            else:
                assign(other, whole)

    @torch.no_grad()
    def sum_gradients(self, earlier: Sequence[torch.Tensor | None]) -> None:
        """Gives all copies the sum of their gradients and adds the earlier ones; collective over their stages."""
        gradients = [weight.grad for weight in self.own]
        if not gradients or gradients[0] is None:
            return
        first, *others = gradients
        if self.uniform:
            for other in others:
                local_tensor(first).add_(local_tensor(other))
            if self.group is not None:
                dist.all_reduce(local_tensor(first), group=self.group)
        else:
            whole = sum((full_tensor(other) for other in others), full_tensor(first)).contiguous()
            if self.group is not None:
                dist.all_reduce(whole, group=self.group)
            assign(first, whole)
        if others:
            self._give(first, others)
        for gradient, before in zip(gradients, earlier, strict=True):
            if before is not None:
                local_tensor(gradient).add_(local_tensor(before))


@dataclass(frozen=True, kw_only=True)
class TiedWeights:
    """Holds all weights of which several stages have a copy."""

    weights: tuple[WeightCopies, ...]

    @classmethod
    def separate(
        cls, model: PreTrainedModel, adapter: ModelAdapter, resolved: ResolvedPlan, world: WorldMesh
    ) -> TiedWeights | None:
        """Gives each stage its own copy of a weight that several stages use; None if there is no such weight."""
        if not resolved.is_pipeline:
            return None
        found = [_vocabulary(model, adapter, resolved, world)]
        found += [
            _bias(model, stack.bias.table, stack.name, resolved, world) for stack in adapter.stacks if stack.bias
        ]
        weights = tuple(one for one in found if one is not None)
        return cls(weights=weights) if weights else None

    def is_copy(self, parameter: torch.Tensor) -> bool:
        """Tells whether a parameter is a copy that norms and checkpoints leave out."""
        return any(one.is_copy(parameter) for one in self.weights)

    def name_of(self, parameter: torch.Tensor) -> str | None:
        """Returns the name of the copy that is saved if the parameter is another one, else None."""
        return next((one.names[0] for one in self.weights if one.is_copy(parameter)), None)

    @property
    def saved_elsewhere(self) -> list[str]:
        """Returns the names of weights whose saved copy other ranks have."""
        return [one.names[0] for one in self.weights if not one.has_first]

    def copy_weight(self) -> None:
        """Copies the first copy that this rank has of each weight to its others."""
        for one in self.weights:
            one.copy_weight()

    def check_options(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuses an optimizer that would take different steps with the copies; collective over all ranks. The options
        of their parameter groups must be equal, and all must be in a group.
        """
        groups = {id(weight): group for group in optimizer.param_groups for weight in group["params"]}
        own = {}
        for one in self.weights:
            options = [groups.get(id(weight)) for weight in one.own]
            own[one.names] = [
                None if group is None else repr({k: v for k, v in group.items() if k != "params"}) for group in options
            ]
        everywhere = gather_objects(own)
        for names in own:
            if len({options for found in everywhere for options in found[names]}) > 1:
                first, *others = names
                raise ValueError(
                    f"{first} and {' and '.join(others)} are one weight with copies on several stages, and the "
                    "optimizer has them in groups with different options; give all names the same."
                )

    def take_gradients(self) -> list[list[torch.Tensor | None]]:
        """Takes out and returns the copies' gradients of earlier calls, which are sums over all copies already."""
        earlier = [[weight.grad for weight in one.own] for one in self.weights]
        for one in self.weights:
            for weight in one.own:
                weight.grad = None
        return earlier

    def sum_gradients(self, earlier: Sequence[Sequence[torch.Tensor | None]]) -> None:
        """Gives all copies of each weight the sum of their gradients and adds the earlier ones; collective."""
        for one, before in zip(self.weights, earlier, strict=True):
            one.sum_gradients(before)


def _vocabulary(
    model: PreTrainedModel, adapter: ModelAdapter, resolved: ResolvedPlan, world: WorldMesh
) -> WeightCopies | None:
    """Separates the embeddings of stacks that begin on other stages, and a tied head on another stage."""
    first, *others = resolved.vocabulary_stages
    if not others:
        return None
    modules, stages = [adapter.lookups(model)[0]], [first]
    for stage in resolved.stages[1:]:
        for part in (part for part in stage.parts if part.is_first):
            stack = adapter.stack(part.stack)
            module = copy.deepcopy(modules[0])
            base_model(model).set_submodule(stack.embedding, module)
            modules.append(module)
            stages.append(stage)
    if resolved.tied:
        head = adapter.head(model)
        head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=head.weight.requires_grad)
        modules.append(head)
        stages.append(resolved.stages[-1])
    names = {id(module): name for name, module in model.named_modules()}
    return _copies(
        [names[id(module)] for module in modules],
        modules,
        [stage.ranks for stage in stages],
        world,
        uniform=not resolved.tied or resolved.embedding == resolved.head,
    )


def _bias(
    model: PreTrainedModel, table: str, stack: str, resolved: ResolvedPlan, world: WorldMesh
) -> WeightCopies | None:
    """Returns the copies of a bias whose stack lies on several stages; each rank has one, under the same name."""
    ranks = list(dict.fromkeys(stage.ranks for stage in resolved.stages_of_stack(stack)))
    module, base = base_model(model).get_submodule(table), base_model(model)
    if len(ranks) == 1:
        return None
    prefix = next(name for name, one in model.named_modules() if one is base)
    name = f"{prefix}.{table}".removeprefix(".")
    return _copies([name] * len(ranks), [module] * len(ranks), ranks, world, uniform=True)


def _copies(
    names: Sequence[str],
    modules: Sequence[nn.Module],
    ranks: Sequence[tuple[int, ...]],
    world: WorldMesh,
    uniform: bool,
) -> WeightCopies:
    lists = list(dict.fromkeys(ranks))
    joined = world.joined(lists) if len(lists) > 1 else []
    return WeightCopies(
        names=tuple(f"{name}.weight" for name in names),
        modules=tuple(
            module if dist.get_rank() in of_copy else None for module, of_copy in zip(modules, ranks, strict=True)
        ),
        group=joined[0] if joined else None,
        uniform=uniform,
    )
