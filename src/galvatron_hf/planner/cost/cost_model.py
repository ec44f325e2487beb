# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Computes the time and memory of a layer, an end and a resharding, for all strategies at once: what passes take
(`pass_prices.py`), with the weights that they use.
A micro-batch takes `forward_ms` and `backward_ms` in a layer. Once in a step come `sync_ms` (all-reduces between
replicas, weights gathered once) and `update_ms` (the optimizer). If the hardware overlaps communication with compute,
with slowdown s, compute c and communication m take `max(c, m) + (s - 1) min(c, m)`. Otherwise (gloo) they take
`c + m`. Messages of weights and of context ranks overlap compute, each on its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from galvatron_hf.plan import LayerStrategy, ParallelPlan, VocabularyStrategy
from galvatron_hf.plan.layout import Layout
from galvatron_hf.planner.cost.message_prices import BYTES, computing_key
from galvatron_hf.planner.cost.pass_prices import PassPrices, pass_key
from galvatron_hf.planner.cost.step_shape import StepShape
from galvatron_hf.planner.cost.strategy_costs import Grouped, PassCosts, StrategyCosts
from galvatron_hf.planner.cost.weight_costs import GRADIENT_BYTES, WeightCosts, weight_costs
from galvatron_hf.planner.cost.workload import Workload
from galvatron_hf.profiler.profiles.hardware import HardwareProfile
from galvatron_hf.profiler.profiles.layers import EndProfile, LayerProfile
from galvatron_hf.profiler.profiles.model import ModelProfile


Strategies = Sequence[LayerStrategy] | Sequence[VocabularyStrategy]


def _weights_key(strategy: LayerStrategy | VocabularyStrategy) -> tuple:
    """Returns what of a strategy decides the costs of weights; the expert degree comes last."""
    return strategy.tensor, strategy.sharding, strategy.shard_degree, getattr(strategy, "expert", 1)


class CostModels:
    """Holds the cost models of one case, so that several searches of it share what they have priced. `cuts` are those
    of the step, by their limits, and `bounds` those of the problems of each search, by its limits and budget.
    """

    def __init__(self, hardware: HardwareProfile, model: ModelProfile, workload: Workload):
        self.hardware, self.model, self.workload = hardware, model, workload
        self._known: dict[int, CostModel] = {}
        self._prices: dict[tuple, Any] = {}
        self.cuts: dict[Any, list[Any]] = {}
        self.bounds: dict[tuple, dict[tuple, float]] = {}

    def of_stage(self, ranks: int) -> CostModel:
        """Returns the cost model of stages of so many ranks, for any number of rows (see [`CostModel.with_rows`])."""
        if ranks not in self._known:
            found = CostModel(self.hardware, self.model, self.workload, ranks, self.workload.rows)
            found._prices = self._prices  # of all stages: few depend on their ranks
            self._known[ranks] = found
        return self._known[ranks]

    def of_plan(self, plan: ParallelPlan, shape: StepShape) -> CostModel:
        """Returns the cost model of a stage's layers, for the ranks of a plan and the micro-batches of its step."""
        return self.of_stage(len(plan.stages[0].ranks)).of_shape(shape)


class CostModel(PassPrices):
    """Computes costs of strategies on stages, for micro-batches as in [`PassPrices`]."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.reduced = BYTES[self.workload.precision.reduce]
        self._known_of_strategies: dict[tuple, tuple[Strategies, Any]] = {}
        # Bytes of the gradient messages of the largest kind of layer and of the head.
        owners = (*self.model.kinds, self.model.head)
        sizes = [sum(math.prod(one.shape) for one in owner.weights if one.trained) for owner in owners]
        self._messages = self.reduced * max(sizes[:-1]), self.reduced * sizes[-1]

    def with_rows(self, rows: int, *, context: int = 1, recompute_logits_in_backward: bool = False) -> CostModel:
        """Returns the model for other micro-batches and another context degree; both share the costs that depend on
        neither.
        """
        other = CostModel(
            self.hardware,
            self.model,
            self.workload,
            self.ranks,
            rows,
            context=context,
            recompute_logits_in_backward=recompute_logits_in_backward,
        )
        for name in ("_prices", "_known_of_strategies"):
            setattr(other, name, getattr(self, name))
        return other

    def of_shape(self, shape: StepShape) -> CostModel:
        """Returns the model for the micro-batches of a step; it shares costs as [`CostModel.with_rows`] does."""
        again = shape.recompute_logits_in_backward
        return self.with_rows(shape.rows, context=shape.context, recompute_logits_in_backward=again)

    # ---- Layers ----

    @cached_property
    def layer_kinds(self) -> tuple[int, ...]:
        """Returns the kind of each layer. In a pipeline the first layer of each later stack has a kind of its own,
        after those of the profile: its stage looks tokens up in a copy of the embedding.
        """
        kinds, begin = list(self.model.layers), 0
        for number, size in enumerate(self.model.stack_sizes.values()):
            if number and self.ranks < self.hardware.world_size:
                kinds[begin] = len(self.model.kinds) + number - 1
            begin += size
        return tuple(kinds)

    def layer(self, kind: int, strategies: Sequence[LayerStrategy]) -> StrategyCosts:
        """Returns the costs of one kind of [`CostModel.layer_kinds`]; of a dense one, as [`strategy_of_kind`] changes
        the strategies.
        """
        if kind >= len(self.model.kinds):
            return self._with_embedding(
                self.layer(self.model.layers[self.layer_kinds.index(kind)], strategies), strategies
            )
        layer = self.model.kinds[kind]
        passes = self._kept(strategies, ("passes", kind), lambda: _grouped(strategies, layer, pass_key))
        passed = passes.arrays(self._passes(layer, passes))
        return self._units(passed, self._weights_of(layer, strategies), strategies, "layer")

    def _with_embedding(self, costs: StrategyCosts, strategies: Sequence[LayerStrategy]) -> StrategyCosts:
        """Adds a copy of the embedding's weights, taken to be sharded as the layer's. Tied copies are in FSDP2's root:
        shards of them are gathered for the whole forward and the whole backward of a stage.
        """
        copied = self._weights_of(self.model.embedding, strategies)
        none, model = np.zeros(len(strategies)), self.model
        forward, backward = self._with_weights(none, copied.gather_ms), self._with_weights(none, copied.reduce_ms)
        backward = backward + model.tied * forward
        return replace(
            costs,
            forward_ms=costs.forward_ms + forward,
            backward_ms=costs.backward_ms + backward,
            communication_ms=costs.communication_ms + forward + backward,
            sync_ms=costs.sync_ms + copied.gather_once_ms + copied.replica_reduce_ms + copied.shard_reduce_ms,
            update_ms=costs.update_ms + self._update_ms(copied),
            adding_ms=costs.adding_ms + copied.elements * model.adding_ms_per_element,
            state_bytes=costs.state_bytes + copied.state_bytes + model.tied * copied.transient_bytes,
            gradient_bytes=costs.gradient_bytes + copied.elements * GRADIENT_BYTES,
            gathered_bytes=costs.gathered_bytes + copied.gathered_bytes,
        )

    def _update_ms(self, weights: WeightCosts) -> np.ndarray:
        """Returns (S,) the time of the optimizer."""
        model = self.model
        return weights.elements * model.optimizer_ms_per_element + weights.count * model.optimizer_ms_per_weight

    def _units(
        self,
        passed: PassCosts,
        weights: WeightCosts,
        strategies: Sequence[LayerStrategy | VocabularyStrategy],
        part: str,
    ) -> StrategyCosts:
        """Combines arrays (S,). `part` is "layer", "embedding", "head" or "tied" (both ends as one)."""
        tensor = np.array([strategy.tensor for strategy in strategies])
        times, sizes = self._unit_times(passed, weights, part), self._unit_bytes(passed, weights, tensor, part)
        return StrategyCosts(**times, **sizes, part=part)

    def _unit_times(self, passed: PassCosts, weights: WeightCosts, part: str) -> dict[str, np.ndarray]:
        """Returns the milliseconds of [`StrategyCosts`] by name. The backward of an end gathers no weights: they have
        just been gathered by its forward.
        """
        forward = self._with_weights(passed.forward_ms, weights.gather_ms) + passed.region_forward_ms
        again = weights.gather_ms * (part == "layer")
        backward = self._with_weights(passed.backward_ms, again, weights.reduce_ms) + passed.region_backward_ms
        computing = passed.forward_ms + passed.backward_ms
        communication = np.maximum(0.0, forward + backward - computing)
        messages = weights.gather_ms + again + weights.reduce_ms
        regions = passed.region_forward_ms + passed.region_backward_ms
        reductions = (weights.replica_reduce_ms, self.hardware.exposed_sync), (weights.shard_reduce_ms, 1.0)
        exposed = sum(self._exposed(passed.backward_ms, ms, share) for ms, share in reductions)
        return dict(
            forward_ms=forward,
            backward_ms=backward,
            communication_ms=communication,
            hidden_ms=_hidden(messages + regions, communication),
            sync_ms=weights.gather_once_ms + exposed,
            hidden_sync_ms=_hidden(weights.replica_reduce_ms + weights.shard_reduce_ms, exposed),
            update_ms=self._update_ms(weights),
            adding_ms=weights.elements * self.model.adding_ms_per_element,
        )

    def _unit_bytes(
        self, passed: PassCosts, weights: WeightCosts, tensor: np.ndarray, part: str
    ) -> dict[str, np.ndarray]:
        """Returns the bytes of [`StrategyCosts`] by name, for strategies of these tensor degrees (S,). Tied ends are
        FSDP2's root: their weights stay gathered while layers run, and the head's gradient waits for the embedding's.
        """
        is_layer, is_head, tied = part == "layer", part in ("head", "tied"), part == "tied"
        unsharded, reduced = weights.unsharded_gradient_bytes, weights.reduce_input_bytes
        none = np.zeros(len(tensor))
        layer, head = (np.where(reduced > 0, size / tensor, 0.0) for size in self._messages)
        # The message that reduces gradients is as large as the one that gathers weights, unless some are frozen: then
        # the last gather's message, which stays until the next, is the larger one.
        gathered = np.where(weights.next_bytes > 0, weights.message_bytes, 0.0)
        previous = layer if part == "embedding" else np.maximum(reduced, gathered)
        gradient = weights.elements * GRADIENT_BYTES
        # An end's gradient lives until the end of its reduction, beside gloo's copy of the input, and an embedding's
        # beside the result too.
        copied = reduced * (weights.message_bytes > 0) * (self.hardware.overlap_slowdown is None)
        result = np.where(reduced > 0, gradient, 0.0)
        reduced_end = copied * (part in ("embedding", "head")) + result * (part == "embedding")
        return dict(
            state_bytes=weights.state_bytes + tied * (weights.transient_bytes + unsharded),
            gradient_bytes=gradient,
            gathered_bytes=weights.gathered_bytes,
            activation_bytes=passed.saved_bytes,
            working_bytes=passed.working_bytes
            + weights.next_bytes * is_layer
            + weights.transient_bytes * (is_layer + is_head - tied),
            next_bytes=weights.next_bytes * is_layer,
            recomputed_bytes=passed.recomputed_bytes + weights.message_bytes * tied,
            released_bytes=passed.released_bytes,
            shared_bytes=passed.shared_bytes,
            new_gradient_bytes=none if is_head else weights.new_gradient_bytes,
            unsharded_gradient_bytes=np.maximum(unsharded, weights.largest_bytes) if is_head else unsharded,
            bucket_bytes=weights.bucket_bytes,
            reduce_input_bytes=reduced,
            reduce_output_bytes=result * (is_layer or part == "head"),
            reducing_bytes=unsharded + reduced + weights.next_bytes * is_layer + reduced_end,
            message_bytes=weights.message_bytes,
            previous_message_bytes=previous,
            first_previous_message_bytes=none if is_head else previous,
            head_message_bytes=head * is_layer,
            other_stage_message_bytes=reduced if is_layer else layer,
        )

    def least_layers_ms(self, strategies: Sequence[LayerStrategy]) -> list[float]:
        """Returns the least time of a micro-batch in each layer, forward and backward, under any strategy: without the
        messages of weights, and without recompute.
        """

        def of_kind(kind: LayerProfile) -> Grouped:
            own = _grouped(strategies, kind, computing_key).distinct
            return Grouped([replace(one, recompute="none") for one in own], pass_key)

        least = []
        for index, kind in enumerate(self.model.kinds):
            groups = self._kept(strategies, ("computing", index), lambda kind=kind: of_kind(kind))
            if kind.read_ratio:  # its messages depend on the layout between stages, and are left out
                least.append(min(sum(self._computing(kind, one)) for one in groups.distinct))
            else:
                least.append(min(map(sum, self._times(kind, groups))))
        return [least[kind] for kind in self.model.layers]

    # ---- Embedding and head ----

    def least_ends_ms(self, choices: Sequence[Sequence[VocabularyStrategy]]) -> tuple[float, float]:
        """Returns the least compute of a micro-batch in embedding and head, each under any strategy of the choices."""
        found, distinct = [], [one for strategies in choices for one in self._by_tensor(strategies).distinct]
        for end, is_head in ((self.model.embedding, False), (self.model.head, True)):
            passes = [self._pass_end(end, one.tensor, is_head=is_head) for one in distinct]
            found.append(min(one.forward_ms + one.backward_ms for one in passes))
        return tuple(found)

    def end(self, end: EndProfile, strategies: Sequence[VocabularyStrategy], part: str) -> StrategyCosts:
        """Returns the costs of an end; `part` is "embedding", "head" or "tied" (both ends)."""
        passes = self._by_tensor(strategies)
        is_head = part != "embedding"
        passed = passes.arrays([self._pass_end(end, one.tensor, is_head=is_head) for one in passes.distinct])
        return self._units(passed, self._weights_of(end, strategies), strategies, part)

    # ---- Weights ----

    def _weights_of(self, owner: LayerProfile | EndProfile, strategies: Strategies) -> WeightCosts:
        """Returns arrays (S,) of the costs of weights."""

        def arrays() -> WeightCosts:
            groups = _grouped(strategies, owner, _weights_key)
            return groups.arrays([self._weights(owner, one) for one in groups.distinct])

        is_dense = getattr(owner, "experts", None) is None
        return self._kept(strategies, ("weights", id(owner.weights), is_dense), arrays)

    def _kept(self, strategies: Strategies, name: tuple, make: Callable[[], Any]) -> Any:
        """Returns what is the same for all rows, and makes it only once for these very strategies: a search asks for
        the same ones hundreds of times.
        """
        key = id(strategies), *name
        if key not in self._known_of_strategies:
            self._known_of_strategies[key] = strategies, make()  # with the strategies, whose identity is the key
        return self._known_of_strategies[key][1]

    def layouts(self, strategies: Strategies) -> tuple[list[Layout], np.ndarray]:
        """Returns the distinct layouts of layers, and (S,) the index of each strategy's."""

        def make() -> tuple[list[Layout], np.ndarray]:
            found: dict[Layout, int] = {}
            index = [found.setdefault(Layout.from_strategy(one, self.ranks), len(found)) for one in strategies]
            return list(found), np.array(index)

        return self._kept(strategies, ("layouts",), make)

    def end_layouts(self, strategies: Sequence[VocabularyStrategy]) -> tuple[list[Layout], np.ndarray]:
        """Returns the distinct layouts at an end, and (S,) the index of each strategy's."""
        groups = self._by_tensor(strategies)
        return [self.end_layout(one.tensor) for one in groups.distinct], groups.index

    def _by_tensor(self, strategies: Sequence[VocabularyStrategy]) -> Grouped:
        return self._kept(strategies, ("passes", "end"), lambda: Grouped(strategies, lambda one: (one.tensor,)))

    def _weights(self, owner: LayerProfile | EndProfile, strategy: LayerStrategy | VocabularyStrategy) -> WeightCosts:
        def make() -> WeightCosts:
            return weight_costs(
                owner.weights,
                strategy,
                self.ranks,
                element=self.element,
                reduced=self.reduced,
                ms=self._ms,
                copying_ms=self._copying_ms,
            )

        return self._once(("weights", self.ranks, id(owner.weights), *_weights_key(strategy)), make)

    def _with_weights(
        self, computing: np.ndarray, gathered: np.ndarray, reduced: np.ndarray | float = 0.0
    ) -> np.ndarray:
        if self.hardware.hides_gathers:
            return self._overlapped(computing, gathered + reduced)
        return self._overlapped(computing, reduced) + gathered

    def _exposed(self, computing: np.ndarray, communicating: np.ndarray, share: float) -> np.ndarray:
        """Returns the part of a gradient reduction that the backward does not hide; `share` of it without overlap."""
        if self.hardware.overlap_slowdown is None:
            return share * communicating
        return self._overlapped(computing, communicating) - computing

    # ---- Between stages ----

    @cached_property
    def boundary_bytes(self) -> int:
        """Returns the maximum bytes of hidden states that a rank sends to the next stage, for the longest rows."""
        return self._boundary_bytes(self.workload.length)

    def stage_bytes(self, shape: StepShape) -> np.ndarray:
        """Returns (p,) bytes of hidden states of boundaries that pipeline ranks hold besides their layers and ends."""
        return shape.boundary_copies() * self.boundary_bytes

    def _boundary_bytes(self, length: int) -> int:
        # Between two stages of a decoder also the encoder's output goes on; elsewhere fewer states do.
        tokens = self.boundary().most_tokens(self.pieces, self.piece_tokens(length, self.model.stage_ratio))
        return tokens * self.model.hidden * self.element

    def received_ms(self, counts: np.ndarray) -> np.ndarray:
        """Returns (p,) the time that pipeline ranks wait for (p, p) messages from each other. A message is as slow as
        the slowest link of its ranks: between nodes, if any rank sends to another node.
        """
        if len(counts) == 1:
            return np.zeros(1)
        hardware, size = self.hardware, self._boundary_bytes(self.workload.computed_length)
        nodes = np.arange(len(counts) * self.ranks).reshape(-1, self.ranks) // hardware.devices_per_node
        crosses = (nodes[:, None] != nodes).any(axis=2)
        strides = self.ranks, max(self.ranks, hardware.devices_per_node)
        inside, between = (self._ms("send", 2, stride, size, "sending") for stride in strides)
        return (counts * np.where(crosses, between, inside)).sum(axis=1)


def _hidden(communication: np.ndarray, exposed: np.ndarray) -> np.ndarray:
    """Returns what of communication is not exposed; rounding leaves nothing where nothing is hidden."""
    hidden = communication - exposed
    return np.where(hidden > 1e-9 * communication, hidden, 0.0)


def strategy_of_kind(strategy: LayerStrategy, layer: LayerProfile) -> LayerStrategy:
    """Returns a strategy as a layer of one kind has it: a dense layer has no expert degree."""
    return strategy if layer.experts is not None or strategy.expert == 1 else replace(strategy, expert=1)


def _grouped(strategies: Strategies, owner: LayerProfile | EndProfile, key: Callable[[Any], tuple]) -> Grouped:
    """Groups strategies by a key that ends with the expert degree, which counts only in layers with experts."""
    if getattr(owner, "experts", None) is not None:
        return Grouped(strategies, key)
    groups = Grouped(strategies, lambda one: (*key(one)[:-1], 1))
    if isinstance(owner, LayerProfile):
        groups.distinct = [strategy_of_kind(one, owner) for one in groups.distinct]
    return groups
