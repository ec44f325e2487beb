# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Computes what ranks of a stage send while a micro-batch runs: inside layers, and where the layout changes between
them. The hardware profile gives the time of a message; docs/communication.md defines what is sent.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np

from galvatron_hf.plan import LayerStrategy
from galvatron_hf.plan.chunks import largest_share
from galvatron_hf.plan.layout import AttentionHeads, Layout
from galvatron_hf.plan.ring_traffic import RingTraffic
from galvatron_hf.planner.cost import rings
from galvatron_hf.planner.cost.resharding import most_sent_tokens
from galvatron_hf.planner.cost.weight_costs import GRADIENT_BYTES
from galvatron_hf.planner.cost.workload import Workload
from galvatron_hf.profiler.profiles.hardware import HardwareProfile
from galvatron_hf.profiler.profiles.layers import ExpertTimes, LayerProfile, Times
from galvatron_hf.profiler.profiles.model import CALIBRATION_FACTORS, ModelProfile


BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


def computing_key(strategy: LayerStrategy) -> tuple:
    """Returns what of a strategy decides compute without recompute; the expert degree comes last."""
    return strategy.tensor, strategy.megatron_sp, strategy.ulysses, strategy.expert


class MessagePrices:
    """Prices messages on stages of `ranks` ranks for micro-batches of `rows` rows on all ranks together.
    The workload gives lengths and number formats; its `rows` are not used. `context` is the context degree of all
    layers.
    """

    def __init__(
        self,
        hardware: HardwareProfile,
        model: ModelProfile,
        workload: Workload,
        ranks: int,
        rows: int,
        *,
        context: int = 1,
    ):
        self.hardware, self.model, self.workload, self.context = hardware, model, workload, context
        self.ranks, self.rows = ranks, rows
        self.element = BYTES[workload.precision.compute]
        self.calibration_factors = dict.fromkeys(CALIBRATION_FACTORS, 1.0) | dict(model.calibration_factors)
        self._prices: dict[tuple, Any] = {}

    @property
    def pieces(self) -> int:
        """Returns the pieces of rows that context ranks make of a micro-batch; hidden states are laid out by them."""
        return self.rows * self.context

    def piece_tokens(self, length: int, ratio: float = 1.0) -> int:
        """Returns the tokens of the largest piece of a row of `length` times `ratio` tokens."""
        length = round(length * ratio)
        return length if self.context == 1 else largest_share(length, self.context)

    # ---- Tokens of a rank ----

    def _tokens(self, strategy: LayerStrategy, length: int, ratio: float = 1.0) -> tuple[int, int, int]:
        """Returns the maximum tokens of a data rank, inside a tensor region, and between regions. A row has `length`
        times `ratio` tokens.
        """
        shared = self._rows(strategy) * self.piece_tokens(length, ratio)
        region = -(-shared // strategy.ulysses)
        return shared, region, -(-region // strategy.tensor) if strategy.megatron_sp else region

    def _rows(self, strategy: LayerStrategy) -> int:
        """Returns the most rows of a data rank."""
        return -(-self.rows // strategy.data_degree(self.ranks))

    def _squares(self, layer: LayerProfile, strategy: LayerStrategy) -> float:
        """Returns the squared tokens of rows, to which a rank's attention is proportional."""
        squares = self._rows(strategy) * self.workload.computed_square * layer.length_ratio**2 / strategy.ulysses
        return squares if self.context == 1 else rings.CUTTING_FACTOR * squares / self.context

    def _experts(
        self, layer: LayerProfile, strategy: LayerStrategy, length: int
    ) -> tuple[int, float, ExpertTimes, ExpertTimes] | None:
        """Returns the tokens that a rank brings to the experts, the imbalance of what arrives, and the costs of
        experts under the strategy's degree and under degree 1; None for a dense layer.
        """
        if layer.experts is None:
            return None
        _, region, _ = self._tokens(strategy, length, layer.length_ratio)
        degrees = layer.experts.degrees
        found = at_degree(degrees, strategy.expert)
        return -(-region // strategy.tensor), self.model.imbalance(strategy.expert), found, degrees[1]

    def _computing_key(self, part: str, layer: LayerProfile, strategy: LayerStrategy) -> tuple:
        """Returns the key of a part of a price that depends neither on recompute nor on sharding."""
        return part, id(layer), *computing_key(strategy), self._rows(strategy), self.context

    # ---- Messages inside layers ----

    def _regions(self, layer: LayerProfile, strategy: LayerStrategy) -> tuple[float, float]:
        """Returns the time of tensor and Ulysses collectives and partial gradients, in forward and backward."""
        _, region, between = self._tokens(strategy, self.workload.computed_length, layer.length_ratio)
        tensor, count = strategy.tensor, layer.regions
        again = strategy.recompute == "full"
        piece = between * self.model.hidden * self.element
        forward = backward = 0.0
        if tensor > 1:
            left_again = again * (count - (not layer.saves_after_last_region))
            if strategy.megatron_sp:
                gather = self._ms("all_gather", tensor, 1, piece)
                scatter = self._ms("reduce_scatter", tensor, 1, tensor * piece)
                forward += count * (gather + scatter)
                backward += (count + again * count) * gather + (count + left_again) * scatter
            else:
                reduce = self._ms("all_reduce", tensor, 1, piece)
                forward += count * reduce
                backward += (count + left_again) * reduce
            for weight in layer.weights:
                if weight.trained and weight.sums_gradient(tensor, strategy.megatron_sp):
                    backward += self._ms("all_reduce", tensor, 1, 4 * math.prod(weight.shape))
        if strategy.ulysses > 1:
            model = self.model
            heads = AttentionHeads.from_degrees(
                query=model.heads, key_value=model.kv_heads, tensor=tensor, ulysses=strategy.ulysses
            )
            size = region * model.head_dim * self.element
            exchange = sum(
                self._exchanged_ms(strategy, count * size)
                for count in (heads.query + 2 * heads.sent_key_value, heads.query)  # of the inputs, and the output
            )
            forward += exchange
            backward += exchange * (1 + again)
        more = self._dispatch(layer, strategy), self._reading(layer, strategy), self._ring(layer, strategy)
        for more_forward, more_backward in more:
            forward, backward = forward + more_forward, backward + more_backward
        return forward, backward

    def _dispatch(self, layer: LayerProfile, strategy: LayerStrategy) -> tuple[float, float]:
        """Returns the time of the messages of experts in forward and backward. Choices go to the experts' ranks and
        come back, each way as many as arrive at the fullest rank. Tensor ranks with the same tokens take a part each
        and gather the results, and in the backward the gradients.
        """
        experts, forward, backward = self._experts(layer, strategy, self.workload.computed_length), 0.0, 0.0
        if experts is None:
            return forward, backward
        (own, imbalance, _, _), again = experts, strategy.recompute == "full"
        row = self.model.hidden * self.element
        if strategy.tensor > 1 and not strategy.megatron_sp:
            gathered = self._ms("all_gather", strategy.tensor, 1, own * row)
            forward, backward = gathered, gathered * (1 + again)
        if strategy.expert > 1:
            size = imbalance * own * layer.experts.top_k * row
            moved = 2 * self._ms("all_to_all", strategy.expert, 1, size)
            counted = self._ms("all_to_all", strategy.expert, 1, 8 * layer.experts.count)
            forward, backward = forward + moved + counted, backward + moved * (1 + again)
        return forward, backward

    def _exchanged_ms(self, strategy: LayerStrategy, size: float) -> float:
        """Returns the time in which Ulysses ranks exchange positions for heads, of `size` bytes on each: they copy
        these into a message and out of it.
        """
        return self._ms("all_to_all", strategy.ulysses, strategy.tensor, size) + 2 * self._copying_ms(size)

    def _ring(self, layer: LayerProfile, strategy: LayerStrategy) -> tuple[float, float]:
        """Returns by how much the messages and copies of context ranks lengthen forward and backward. A message is as
        slow as the slowest link of the ring: between nodes, if its ranks are on several.
        """
        if self.context == 1:
            return 0.0, 0.0
        key = self._computing_key("ring", layer, strategy)
        forward, backward = self._once(key, lambda: self._ring_without_recompute(layer, strategy))
        return forward, backward + forward * (strategy.recompute == "full")

    def _ring_without_recompute(self, layer: LayerProfile, strategy: LayerStrategy) -> tuple[float, float]:
        times, squares = at_degree(layer.times, strategy.tensor), self._squares(layer, strategy)
        factor, stride = self.calibration_factors["computing"], strategy.tensor * strategy.ulysses
        if self.hardware.crosses_nodes(self.context, stride):
            stride = max(stride, self.hardware.devices_per_node)
        traffic = self.ring_traffic(strategy, self.workload.computed_length)
        sizes = traffic.block_bytes, traffic.gradient_bytes
        forward, backward = rings.exposed_ms(
            self.context,
            *(factor * fit.per_square * squares for fit in (times.forward, times.backward)),
            *(self._ms("send", 2, stride, size, "sending") for size in sizes),
            self._overlapped,
        )
        copied = rings.copied_bytes(traffic, self.model.heads // (strategy.tensor * strategy.ulysses))
        return forward + self._copying_ms(copied[0]), backward + self._copying_ms(copied[1])

    def ring_traffic(self, strategy: LayerStrategy, length: int) -> RingTraffic:
        """Returns what a rank sends for documents of `length` tokens. Ulysses ranks have exchanged their positions for
        heads before.
        """
        model, ulysses = self.model, strategy.ulysses
        heads = AttentionHeads.from_degrees(
            query=model.heads, key_value=model.kv_heads, tensor=strategy.tensor, ulysses=ulysses
        )
        return RingTraffic(
            degree=self.context,
            tokens=self._tokens(strategy, length)[0],
            key_value_heads=heads.sent_key_value // ulysses,
            head_dim=model.head_dim,
            element_bytes=self.element,
        )

    def _reading(self, layer: LayerProfile, strategy: LayerStrategy) -> tuple[float, float]:
        """Returns the time of the messages by which a layer reads another stack. Its states enter the region of the
        cross-attention as hidden states do: Megatron-SP gathers them, and their gradients are shares of a sum. Ulysses
        ranks exchange their keys and values for heads. The layers of a stage share the move to their layout.
        """
        if not layer.read_ratio:
            return 0.0, 0.0
        _, region, between = self._tokens(strategy, self.workload.computed_length, layer.read_ratio)
        _, own, _ = self._tokens(strategy, self.workload.computed_length, layer.length_ratio)
        again, model, tensor = strategy.recompute == "full", self.model, strategy.tensor
        moved = self.read_moves * self._resharding_ms(self.boundary(), Layout.from_strategy(strategy, self.ranks))
        forward = backward = moved
        piece = between * model.hidden * self.element
        if tensor > 1 and strategy.megatron_sp:
            gather = self._ms("all_gather", tensor, 1, piece)
            forward, backward = forward + gather, backward + again * gather
            backward += self._ms("reduce_scatter", tensor, 1, tensor * piece)
        elif tensor > 1:
            backward += self._ms("all_reduce", tensor, 1, piece)
        if strategy.ulysses > 1:
            heads = AttentionHeads.from_degrees(
                query=model.heads, key_value=model.kv_heads, tensor=tensor, ulysses=strategy.ulysses
            )
            size = model.head_dim * self.element
            counts = own * heads.query + 2 * region * heads.sent_key_value, own * heads.query
            exchange = sum(self._exchanged_ms(strategy, count * size) for count in counts)
            forward, backward = forward + exchange, backward + exchange * (1 + again)
        return forward, backward

    @cached_property
    def read_moves(self) -> float:
        """Returns how often a stage moves the states that its layers read, for each layer: layers of one layout share
        one move. Stages are taken to have equal shares of the layers.
        """
        return self.hardware.world_size / self.ranks / len(self.model.layers)

    # ---- Between layers ----

    def resharding_ms(self, before: Layout, after: Layout) -> float:
        """Returns the time of one micro-batch's change of layout, forward and backward."""
        return sum(self._resharding_ms(*pair) for pair in ((before, after), (after, before)))

    def _resharding_ms(self, before: Layout, after: Layout) -> float:
        length = self.piece_tokens(self.workload.computed_length, self.mean_ratio)
        block, tokens = most_sent_tokens(before, after, self.pieces, length)
        if block == 1:
            return 0.0
        size = tokens * self.model.hidden * self.element * block / (block - 1)  # nothing of it stays on the rank
        return self._ms("all_to_all", block, 1, size) + 2 * self._copying_ms(size)  # into a message and out of it

    @cached_property
    def mean_ratio(self) -> float:
        """Returns the mean of the layers' length ratios: one price of a change of layout holds for all stacks."""
        ratios = [self.model.kinds[kind].length_ratio for kind in self.model.layers]
        return sum(ratios) / len(ratios)

    def boundary(self) -> Layout:
        return self.end_layout(1)

    def end_layout(self, tensor: int) -> Layout:
        """Returns the layout of hidden states at an end whose vocabulary `tensor` ranks split."""
        return Layout.from_vocabulary(tensor, self.ranks, self.pieces)

    # ---- Messages, copies and prices that are known ----

    def _ms(self, kind: str, ranks: int, stride: int, size: float, factor: str = "communication") -> float:
        """Returns the time of a collective in a training step."""
        launch = self.model.collective_launch_ms if ranks > 1 and factor == "communication" else 0.0
        if factor == "weights" and (ranks > 1 or kind != "all_reduce"):
            launch = self.model.weights_launch_ms
        if ranks == 1:
            return launch
        return launch + self.calibration_factors[factor] * float(self.hardware.ms(kind, ranks, stride, size))

    def _copying_ms(self, size: float) -> float:
        """Returns the time of copying so many bytes. The memory reads and writes each, while an addition of gradients
        reads two numbers of 4 bytes and writes one.
        """
        return self.calibration_factors["copying"] * self.model.adding_ms_per_element * 2 * size / (3 * GRADIENT_BYTES)

    def _overlapped(self, computing: np.ndarray, communicating: np.ndarray) -> np.ndarray:
        slowdown = self.hardware.overlap_slowdown
        if slowdown is None:
            return computing + communicating
        return np.maximum(computing, communicating) + (slowdown - 1) * np.minimum(computing, communicating)

    def _once(self, key: tuple, make: Callable[[], Any]) -> Any:
        """Returns a price of `make`, and makes it only once for a key, which has all that it depends on."""
        if key not in self._prices:
            self._prices[key] = make()
        return self._prices[key]


def at_degree(table: dict, key: object) -> Times | float:
    if key not in table:
        known = ", ".join(map(degree_text, sorted(table)))
        raise ValueError(
            f"The model profile has no figures for degree {degree_text(key)}, but for {known}: use one of these, or "
            "profile the model with it."
        )
    return table[key]


def degree_text(key: object) -> str:
    """Returns a tensor degree, or one with Megatron's sequence parallelism and a Ulysses degree, in a plan's words."""
    if not isinstance(key, tuple):
        return str(key)
    tensor, megatron_sp, ulysses = key
    return f"tp{tensor}{'+sp' if megatron_sp else ''}+ulysses{ulysses}"
