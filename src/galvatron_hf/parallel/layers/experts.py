# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Expert parallelism of one layer (arXiv 2006.16668): whole experts are spread over ranks, and each token goes to the
ranks of its experts and back by an all-to-all of uneven pieces. Nothing is dropped.

Every rank of a stage has other tokens here: tensor ranks, which have the same, take a part each. A token's experts are
so reached from one rank, and the gradient of an expert is a sum over the tokens of all ranks. The router runs as the
family wrote it, and the weights of its choices are applied on the rank that sent the token. The family's own experts
compute on rows of one choice each.

With `compression`, choices of one expert whose tokens are alike travel as one row (lsh.py).

The host waits for the device once in each forward of a layer, to learn how many rows arrive; the backward and a
recompute use the numbers of the forward. The `eager` experts of transformers wait more often.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed import ProcessGroup

from galvatron_hf.models.adapter import ExpertsAdapter
from galvatron_hf.models.parameter_specs import ParameterSpec
from galvatron_hf.parallel.comm.collectives import (
    MovingRows,
    all_to_all_pieces,
    gather_rows,
    is_trivial,
    move_rows,
    take_rows,
)
from galvatron_hf.parallel.comm.fake_process_group import FakeProcessGroup
from galvatron_hf.parallel.comm.mesh import WeightMesh
from galvatron_hf.parallel.layers.lsh import (
    Clusters,
    DispatchStatistics,
    LshDispatch,
    buckets,
    centroids,
    clusters,
    expand,
    projections,
)
from galvatron_hf.parallel.layers.parallel_layer import ParallelLayer
from galvatron_hf.parallel.layers.tensor_parallel import LocalParameter, cut_parameter, local_parameters
from galvatron_hf.parallel.router_loss import with_router_gradient
from galvatron_hf.plan.layout import even_parts
from galvatron_hf.utils.compat import FakeTensor, storage_key
from galvatron_hf.utils.device import HostCopy


@dataclass(frozen=True, kw_only=True)
class Routing:
    """Says where the choices of this rank's tokens go.

    Attributes:
        choices (`torch.Tensor`): [tokens, top_k], the experts of each token.
        order (`torch.Tensor`): [tokens * top_k], the choices in the order of their experts.
        sent, received (`list[int]`): rows to and from each rank: choices, or clusters of them.
        experts (`torch.Tensor`): [sum(received)], this rank's own expert, from 0, of each row that arrives.
        clusters (`torch.Tensor`, *optional*): [tokens * top_k], the row sent for each choice, in the order of `order`;
            None if each choice is a row.
    """

    choices: torch.Tensor
    order: torch.Tensor
    sent: list[int]
    received: list[int]
    experts: torch.Tensor
    clusters: torch.Tensor | None = None


FORWARDS_KEPT = 1000  # of which the numbers of rows are kept for [`ParallelExperts.take_received`]


@dataclass(kw_only=True)
class LastForward:
    """Holds the rows that the last forward of a layer in training brought on this rank, and the clusters that they
    were or would have been; None if nothing was clustered.
    """

    rows: int = 0
    clusters: torch.Tensor | int | None = None


class SharedExperts:
    """Runs the MLP of a layer that every token goes through; replaces its forward. If the family runs it after the
    experts, on the same hidden states, it is computed while rows are on their way to them: the first forward tells.

    Attributes:
        follows (`bool`): whether the family runs it after the experts, on what they got.
    """

    def __init__(self, module: nn.Module):
        self.module, self.original, self.follows = module, module.forward, False
        self._result: torch.Tensor | None = None
        self._of_experts: torch.Tensor | None = None

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        result, self._result = self._result, None
        if result is not None:
            return result.view(hidden_states.shape)
        given, self._of_experts = self._of_experts, None
        same = given is not None and storage_key(given) == storage_key(hidden_states)
        self.follows = self.follows or (same and given.numel() == hidden_states.numel())
        return self.original(hidden_states)

    @property
    def is_computed(self) -> bool:
        """Tells whether the result of the next call exists already."""
        return self._result is not None

    def compute_ahead(self, hidden_states: torch.Tensor) -> None:
        """Computes the result of the next call, for the same hidden states in another shape."""
        self._result = self.module(hidden_states)

    def note_experts(self, hidden_states: torch.Tensor) -> None:
        """Notes that the experts have run on these hidden states."""
        self._of_experts = None if self.follows else hidden_states

    def forget(self) -> None:
        self._result = self._of_experts = None


class ParallelExperts:
    """Runs the experts of one layer under its strategy; replaces the forward of their module.

    Args:
        module (`nn.Module`): the family's experts, whose weights may be cut.
        count (`int`): experts of the layer, on all ranks together.
        group (`ProcessGroup`, *optional*): the ranks over which they are spread, in order.
        tensor_group (`ProcessGroup`, *optional*): the ranks that come with the same tokens.
        views (`list[LocalParameter]`): local views of the weights.
        block ([`ParallelLayer`]): the layer.
        compression ([`LshDispatch`], *optional*): which choices travel to the experts of other ranks as one row in
            training; None if each is a row.

    Attributes:
        probed ([`LshDispatch`], *optional*): whose clusters are counted while each choice is a row.
        features (`int`): of hidden states, known after the first forward.
        last ([`LastForward`]): the last forward in training.
    """

    def __init__(
        self,
        module: nn.Module,
        count: int,
        group: ProcessGroup | None,
        tensor_group: ProcessGroup | None,
        views: list[LocalParameter],
        block: ParallelLayer,
        compression: LshDispatch | None = None,
    ):
        self.module, self.count, self.group, self.tensor_group = module, count, group, tensor_group
        self.views, self.block, self.compression = views, block, compression
        self.compute: Callable = module.forward
        self._logits: torch.Tensor | None = None
        self._statistics = DispatchStatistics()
        self._projections: dict[tuple, torch.Tensor] = {}
        self.probed: LshDispatch | None = None
        self.features = 0
        self.last = LastForward()
        self._received: deque[int] = deque(maxlen=FORWARDS_KEPT)
        self.shared: SharedExperts | None = None
        self._given: torch.Tensor | None = None

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
        top_k_weights = self._with_router_gradient(top_k_weights)
        self._given = hidden_states
        output = self._of_own_tokens(hidden_states, top_k_index, top_k_weights)
        self._given = None
        if self.shared is not None:
            self.shared.note_experts(hidden_states)
        return output

    def _of_own_tokens(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        group, count = self.tensor_group, hidden_states.shape[0]
        parts = [slice(*bounds) for bounds in even_parts(count, 1 if group is None else group.size())]
        own = parts[0 if group is None else group.rank()]
        hidden, weights = (take_rows(x, parts, group) for x in (hidden_states, top_k_weights))
        with local_parameters(self.views):
            output = self._run(hidden, top_k_index[own], weights)
        return gather_rows(output, parts, group)

    def _run(self, hidden: torch.Tensor, choices: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if is_trivial(self.group):
            return self._compute(hidden, choices, weights)
        routing = self._routing(choices, hidden)
        rows = hidden[routing.order // choices.shape[1]]
        self.features = hidden.shape[1]
        if self.module.training:
            self._received.append(sum(routing.received))
            self.last = LastForward(rows=len(rows))
            if routing.clusters is not None:
                self.last.clusters = sum(routing.sent)
            elif self.probed is not None:
                self.last.clusters = self._clusters(choices, hidden, routing.order, self.probed).counts.sum()
        if routing.clusters is None:
            back = self._there_and_back(rows, routing)
        else:
            means = centroids(rows, routing.clusters, sum(routing.sent))
            self._statistics.add(rows, means, routing.clusters)
            back = expand(self._there_and_back(means, routing), rows, means, routing.clusters)
        placed = back[torch.argsort(routing.order)].unflatten(0, choices.shape)
        return (placed * weights.unsqueeze(-1)).sum(1).to(hidden.dtype)

    def _there_and_back(self, rows: torch.Tensor, routing: Routing) -> torch.Tensor:
        """Returns what the experts, on whatever ranks, make of this rank's rows. What every token goes through besides
        is computed while the rows are on their way.
        """
        there = MovingRows(routing.received, routing.sent, self.group)
        moving = there.start(rows)
        if self._computes_shared_ahead():
            self.shared.compute_ahead(self._given)
        arrived = there.finish(moving)
        done = self._compute(arrived, routing.experts[:, None], arrived.new_ones(arrived.shape[0], 1))
        return move_rows(done, routing.sent, routing.received, self.group)

    def _computes_shared_ahead(self) -> bool:
        """Tells whether the shared experts run now; in a recompute if they did in the forward."""
        if self.shared is None or not self.block.recomputes:
            return self.shared is not None and self.shared.follows
        return self.block.current.value.routings.setdefault(("shared", self.block.resolved.index), self.shared.follows)

    def _compute(self, rows: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Runs the family's experts. Without rows it runs a row of zeros, as all ranks need gradients of weights."""
        if rows.shape[0]:
            return self.compute(rows, experts, weights)
        row, expert = rows.new_zeros(1, rows.shape[1]), experts.new_zeros(1, experts.shape[1])
        return self.compute(row, expert, weights.new_ones(1, experts.shape[1]))[:0] + rows

    def forget(self) -> None:
        """Forgets what the layer's forward has left, or an earlier one that did not end, as a recompute need not."""
        self._logits = self._given = None
        if self.shared is not None:
            self.shared.forget()

    def take_statistics(self) -> DispatchStatistics:
        """Returns what compression saved since this was last called. The host waits for nothing."""
        taken, self._statistics = self._statistics, DispatchStatistics()
        return taken

    def take_received(self) -> list[int]:
        """Returns the rows that arrived in each forward of training since this was last called, those of a recompute
        and of a forward for counts too; the last `FORWARDS_KEPT` of them.
        """
        taken = list(self._received)
        self._received.clear()
        return taken

    # ---- Routing ----

    def _routing(self, choices: torch.Tensor, hidden: torch.Tensor) -> Routing:
        """Returns where choices go. A recompute goes where the first pass went: other ranks expect those rows."""
        if not self.block.recomputes:
            return self._new_routing(choices, hidden)
        index, routings = self.block.resolved.index, self.block.current.value.routings
        first = routings.get(index)
        if first is None:
            routings[index] = self._new_routing(choices, hidden)
            return routings[index]
        if choices.device.type == "cpu" and not torch.equal(first.choices, choices):
            raise RuntimeError(
                f"The router of layer {index} chooses other experts in the recompute than in the forward; take what "
                'is random out of it, or use recompute "none".'
            )
        return first

    def _clusters(
        self, choices: torch.Tensor, hidden: torch.Tensor, order: torch.Tensor, options: LshDispatch
    ) -> Clusters:
        """Returns the clusters of the choices in `order`. Hashes the tokens, of which each has several choices."""
        key = options, hidden.shape[1], self.block.resolved.index, hidden.device
        if key not in self._projections:
            self._projections = {key: projections(*key)}
        token, hidden = order // choices.shape[1], hidden.detach()
        hashed = buckets(hidden, self._projections[key])[token]
        return clusters(hidden[token], choices.flatten()[order], hashed, options, self.count)

    def _new_routing(self, choices: torch.Tensor, hidden: torch.Tensor) -> Routing:
        options, compress = self.compression if self.module.training else None, None
        if options is not None:
            compress = functools.partial(self._clusters, choices, hidden, options=options)
        return route(choices, self.count, self.group, compress)

    def _with_router_gradient(self, top_k_weights: torch.Tensor) -> torch.Tensor:
        """Returns the weights of choices, whose backward also starts that of the routers' loss of these tokens."""
        logits, self._logits = self._logits, None
        if logits is None:
            return top_k_weights
        batch, block = self.block.current.value, self.block
        statistics, rectangle = batch.options.routers, block.rectangle(batch)
        weights = (
            batch.streams[block.resolved.stack]
            .real_tokens[rectangle.row_start : rectangle.row_stop, rectangle.position_start : rectangle.position_stop]
            .flatten()
        )
        statistics.add(logits, weights / block.resolved.layout.replicas)
        return with_router_gradient(top_k_weights, logits, weights, statistics)


def route(
    choices: torch.Tensor,
    count: int,
    group: ProcessGroup,
    compress: Callable[[torch.Tensor], Clusters] | None = None,
) -> Routing:
    """Finds where the choices [tokens, top_k] of this rank's tokens among `count` experts go; collective over a group
    whose ranks have `count / size` experts each, in order. `compress` returns the clusters of the choices in an order
    [tokens * top_k], that of their experts; without it each choice is a row.
    """
    size, flat = group.size(), choices.flatten()
    order = torch.argsort(flat, stable=True)
    if isinstance(choices, FakeTensor):
        return _even_routing(choices, order, count, group, compressed=compress is not None)
    found = None if compress is None else compress(order)
    counts = flat.new_zeros(count).scatter_add_(0, flat, torch.ones_like(flat)) if found is None else found.counts
    arriving = all_to_all_pieces(counts, [count // size] * size, [count // size] * size, group)
    if isinstance(group, FakeProcessGroup):
        arriving = arriving * group.received
    sent, received = HostCopy(torch.stack([of.view(size, -1).sum(1) for of in (counts, arriving)])).tolist()
    experts = torch.arange(count // size, device=flat.device).repeat(size)
    experts = experts.repeat_interleave(arriving, output_size=sum(received))
    of_row = None if found is None else found.of_row
    return Routing(choices=choices, order=order, sent=sent, received=received, experts=experts, clusters=of_row)


def _even_routing(
    choices: torch.Tensor, order: torch.Tensor, count: int, group: FakeProcessGroup, *, compressed: bool
) -> Routing:
    """Stands for a routing where there are no numbers, in a trace of memory and work: as even as may be, and without
    two choices that are alike.
    """
    size = group.size()
    sent = [stop - start for start, stop in even_parts(choices.numel(), size)]
    received = [sent[0] * group.received] * size
    experts = torch.arange(sum(received), device=choices.device) % (count // size)
    of_row = torch.arange(choices.numel(), device=choices.device) if compressed else None
    return Routing(choices=choices, order=order, sent=sent, received=received, experts=experts, clusters=of_row)


def attach_experts(
    layer: nn.Module,
    adapter: ExpertsAdapter,
    specs: Sequence[ParameterSpec],
    weights: WeightMesh,
    tensor_group: ProcessGroup | None,
    block: ParallelLayer,
    compression: LshDispatch | None = None,
) -> ParallelExperts:
    """Spreads the experts of a layer over the ranks of their mesh, in place. `specs` are those of the layer's
    parameters; `tensor_group` has the ranks that come with the same tokens; `compression` says which choices travel as
    one row, by default none.
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
        compression=compression,
    )
    layer.get_submodule(adapter.router).register_forward_hook(experts.keep_logits(adapter.logits))
    module.forward = experts
    shared = None if adapter.shared is None else dict(layer.named_modules()).get(adapter.shared)
    if shared is not None and experts.group is not None:
        shared.forward = experts.shared = SharedExperts(shared)
    return experts
