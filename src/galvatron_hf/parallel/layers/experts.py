# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Expert parallelism of one layer (arXiv 2006.16668): whole experts are spread over ranks, and each token goes to the
ranks of its experts and back by an all-to-all of uneven pieces. Nothing is dropped.

Every rank of a stage has other tokens here: tensor ranks, which have the same, take a part each. A token's experts are
so reached from one rank, and the gradient of an expert is a sum over the tokens of all ranks. The router runs as the
family wrote it, and the weights of its choices are applied on the rank that sent the token. The family's own experts
compute on rows of one choice each.

The host waits for the device once for each layer and micro-batch, to learn how many rows arrive; the backward and a
recompute use the numbers of the forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed import ProcessGroup

from galvatron_hf.models.adapter import ExpertsAdapter
from galvatron_hf.models.parameter_specs import ParameterSpec
from galvatron_hf.parallel.comm.collectives import all_to_all_pieces, gather_rows, is_trivial, move_rows, take_rows
from galvatron_hf.parallel.comm.fake_process_group import FakeProcessGroup
from galvatron_hf.parallel.comm.mesh import WeightMesh
from galvatron_hf.parallel.layers.parallel_layer import ParallelLayer
from galvatron_hf.parallel.layers.tensor_parallel import LocalParameter, cut_parameter, local_parameters
from galvatron_hf.parallel.router_loss import with_router_gradient
from galvatron_hf.plan.layout import even_parts
from galvatron_hf.utils.compat import FakeTensor


@dataclass(frozen=True, kw_only=True)
class Routing:
    """Says where the choices of this rank's tokens go.

    Attributes:
        choices (`torch.Tensor`): [tokens, top_k], the experts of each token.
        order (`torch.Tensor`): [tokens * top_k], the choices in the order of their experts.
        sent, received (`list[int]`): choices to and from each rank.
        experts (`torch.Tensor`): [sum(received)], this rank's own expert, from 0, of each choice that arrives.
    """

    choices: torch.Tensor
    order: torch.Tensor
    sent: list[int]
    received: list[int]
    experts: torch.Tensor


class ParallelExperts:
    """Runs the experts of one layer under its strategy; replaces the forward of their module.

    Args:
        module (`nn.Module`): the family's experts, whose weights may be cut.
        count (`int`): experts of the layer, on all ranks together.
        group (`ProcessGroup`, *optional*): the ranks over which they are spread, in order.
        tensor_group (`ProcessGroup`, *optional*): the ranks that come with the same tokens.
        views (`list[LocalParameter]`): local views of the weights.
        block ([`ParallelLayer`]): the layer.
    """

    def __init__(
        self,
        module: nn.Module,
        count: int,
        group: ProcessGroup | None,
        tensor_group: ProcessGroup | None,
        views: list[LocalParameter],
        block: ParallelLayer,
    ):
        self.module, self.count, self.group, self.tensor_group = module, count, group, tensor_group
        self.views, self.block = views, block
        self.compute: Callable = module.forward
        self._logits: torch.Tensor | None = None

    def keep_logits(self, index: int) -> Callable:
        """Returns a forward hook of the router, which keeps its logits for the routers' loss of this layer."""

        def hook(module: nn.Module, args: tuple, output: torch.Tensor | tuple) -> None:
            if self.block.current.value.options.routers is not None:
                self._logits = output[index] if isinstance(output, (tuple, list)) else output

        return hook

    @torch.compiler.disable
    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Maps hidden states [tokens, features] to those after the experts; the experts and the weights of each token
        are [tokens, top_k].
        """
        group, count = self.tensor_group, hidden_states.shape[0]
        parts = [slice(*bounds) for bounds in even_parts(count, 1 if group is None else group.size())]
        own = parts[0 if group is None else group.rank()]
        hidden, weights = (take_rows(x, parts, group) for x in (hidden_states, top_k_weights))
        with local_parameters(self.views):
            output = self._run(hidden, top_k_index[own], weights)
        return self._with_router_gradient(gather_rows(output, parts, group))

    def _run(self, hidden: torch.Tensor, choices: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if is_trivial(self.group):
            return self._compute(hidden, choices, weights)
        top_k, routing = choices.shape[1], self._routing(choices)
        rows = move_rows(hidden[routing.order // top_k], routing.received, routing.sent, self.group)
        ones = rows.new_ones(rows.shape[0], 1)
        done = self._compute(rows, routing.experts[:, None], ones)
        back = move_rows(done, routing.sent, routing.received, self.group)
        placed = back[torch.argsort(routing.order)].unflatten(0, (-1, top_k))
        return (placed * weights.unsqueeze(-1)).sum(1).to(hidden.dtype)

    def _compute(self, rows: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Runs the family's experts. Without rows it runs a row of zeros, as all ranks need gradients of weights."""
        if rows.shape[0]:
            return self.compute(rows, experts, weights)
        row, expert = rows.new_zeros(1, rows.shape[1]), experts.new_zeros(1, experts.shape[1])
        return self.compute(row, expert, weights.new_ones(1, experts.shape[1]))[:0] + rows

    # ---- Routing ----

    def _routing(self, choices: torch.Tensor) -> Routing:
        """Returns where choices go. A recompute goes where the first pass went: other ranks expect those rows."""
        if not self.block.recomputes:
            return route(choices, self.count, self.group)
        index, routings = self.block.resolved.index, self.block.current.value.routings
        first = routings.get(index)
        if first is None:
            routings[index] = route(choices, self.count, self.group)
            return routings[index]
        if choices.device.type == "cpu" and not torch.equal(first.choices, choices):
            raise RuntimeError(
                f"The router of layer {index} chooses other experts in the recompute than in the forward; take what "
                'is random out of it, or use recompute "none".'
            )
        return first

    def _with_router_gradient(self, output: torch.Tensor) -> torch.Tensor:
        logits, self._logits = self._logits, None
        if logits is None:
            return output
        batch, block = self.block.current.value, self.block
        statistics, rectangle = batch.options.routers, block.rectangle(batch)
        weights = batch.real_tokens[
            rectangle.row_start : rectangle.row_stop, rectangle.position_start : rectangle.position_stop
        ].flatten()
        statistics.add(logits, weights / block.resolved.layout.replicas)
        return with_router_gradient(output, logits, weights, statistics)


def route(choices: torch.Tensor, count: int, group: ProcessGroup) -> Routing:
    """Finds where the choices [tokens, top_k] of this rank's tokens among `count` experts go; collective over a group
    whose ranks have `count / size` experts each, in order.
    """
    size, flat = group.size(), choices.flatten()
    order = torch.argsort(flat, stable=True)
    if isinstance(choices, FakeTensor):
        return _even_routing(choices, order, count, group)
    counts = flat.new_zeros(count).scatter_add_(0, flat, torch.ones_like(flat))
    arriving = all_to_all_pieces(counts, [count // size] * size, [count // size] * size, group)
    if isinstance(group, FakeProcessGroup):
        arriving = arriving * group.received
    sent, received = torch.stack([of.view(size, -1).sum(1) for of in (counts, arriving)]).tolist()
    experts = torch.arange(count // size, device=flat.device).repeat(size)
    experts = experts.repeat_interleave(arriving, output_size=sum(received))
    return Routing(choices=choices, order=order, sent=sent, received=received, experts=experts)


def _even_routing(choices: torch.Tensor, order: torch.Tensor, count: int, group: FakeProcessGroup) -> Routing:
    """Stands for a routing where there are no numbers, in a trace of memory and work: as even as may be."""
    size = group.size()
    sent = [stop - start for start, stop in even_parts(choices.numel(), size)]
    received = [sent[0] * group.received] * size
    experts = torch.arange(sum(received), device=choices.device) % (count // size)
    return Routing(choices=choices, order=order, sent=sent, received=received, experts=experts)


def attach_experts(
    layer: nn.Module,
    adapter: ExpertsAdapter,
    specs: Sequence[ParameterSpec],
    weights: WeightMesh,
    tensor_group: ProcessGroup | None,
    block: ParallelLayer,
) -> ParallelExperts:
    """Spreads the experts of a layer over the ranks of their mesh, in place. `specs` are those of the layer's
    parameters; `tensor_group` has the ranks that come with the same tokens.
    """
    module, of_experts = layer.get_submodule(adapter.module), [spec for spec in specs if spec.mesh == "experts"]
    count, degree, views = of_experts[0].shape[0], weights.tensor_degree, []
    if degree > 1:
        views = [cut_parameter(layer, spec, weights) for spec in of_experts]
        module.num_experts = count // degree
    experts = ParallelExperts(
        module=module,
        count=count,
        group=weights.tensor_group if degree > 1 else None,
        tensor_group=tensor_group,
        views=views,
        block=block,
    )
    layer.get_submodule(adapter.router).register_forward_hook(experts.keep_logits(adapter.logits))
    module.forward = experts
    return experts
