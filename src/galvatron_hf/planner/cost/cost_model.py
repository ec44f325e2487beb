# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""What each strategy of a layer costs in time and memory, for all strategies at once.

A micro-batch passes a layer in `forward_ms` and `backward_ms`; once in a step come `sync_ms` (copies of gradients that
are summed, weights that are gathered once) and `update_ms` (the optimizer). What is sent is what docs/communication.md
says; what its time is, the hardware profile; computing, the model profile. Where weights and gradients are sent beside
computing (`overlap_slowdown` s), both take s times as long while both last: the pair takes `max + (s - 1) min`.
Elsewhere (gloo) it takes the sum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from galvatron_hf.plan import LayerStrategy, Precision, VocabularyStrategy
from galvatron_hf.plan.layout import HEAD_CHUNK_TOKENS, AttentionHeads, Layout
from galvatron_hf.planner.cost.resharding import most_sent_tokens
from galvatron_hf.planner.cost.strategy_costs import Costs, Distinct, Pass
from galvatron_hf.planner.cost.weight_costs import GRADIENT_BYTES, WeightCosts, weight_costs
from galvatron_hf.profiler.profiles.hardware import HardwareProfile
from galvatron_hf.profiler.profiles.layers import EndProfile, LayerProfile, Times
from galvatron_hf.profiler.profiles.model import CALIBRATION_FACTORS, ModelProfile


BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True, kw_only=True)
class Workload:
    """
    What a step computes.

    Args:
        rows (`int`): Of the global batch.
        length (`int`): Tokens of a row; of the longest one, for which there has to be memory.
        precision ([`Precision`]): Number formats.
        mean_length (`int`, *optional*): Tokens of a row on average, which take time; `length` if absent.
        mean_square (`float`, *optional*): Of a row's squared tokens on average; by default of `mean_length`.
    """

    rows: int
    length: int
    precision: Precision
    mean_length: int | None = None
    mean_square: float | None = None

    @property
    def computed_length(self) -> int:
        """Tokens of a row that take time."""
        return self.length if self.mean_length is None else self.mean_length

    @property
    def computed_square(self) -> float:
        """Of a row, what the time of attention goes with."""
        return self.computed_length**2 if self.mean_square is None else self.mean_square


def _weights_key(strategy: LayerStrategy | VocabularyStrategy) -> tuple:
    return strategy.tensor, strategy.sharding, strategy.shard_degree


class CostModel:
    """
    Costs on stages of `ranks` ranks for micro-batches of `rows` rows.

    Args:
        hardware ([`HardwareProfile`]), model ([`ModelProfile`]): What was profiled.
        workload ([`Workload`]): Its `rows` are not looked at.
        ranks (`int`): Of a stage.
        rows (`int`): Of a micro-batch, on all ranks together.
        late_head (`bool`, defaults to `False`): Whether the head computes its gradients in the backward, with the
            logits once more, and keeps its input until then: where several micro-batches wait for it.
    """

    def __init__(
        self,
        hardware: HardwareProfile,
        model: ModelProfile,
        workload: Workload,
        ranks: int,
        rows: int,
        *,
        late_head: bool = False,
    ):
        self.hardware, self.model, self.workload = hardware, model, workload
        self.ranks, self.rows, self.late_head = ranks, rows, late_head
        self.element = BYTES[workload.precision.compute]
        self.reduced = BYTES[workload.precision.reduce]
        self._known_weights: dict[tuple, WeightCosts] = {}
        self.calibration_factors = dict.fromkeys(CALIBRATION_FACTORS, 1.0) | dict(model.calibration_factors)
        # Bytes of gradients that are sent to be reduced: of the largest kind of layer, and of the head.
        sizes = [sum(math.prod(one.shape) for one in owner.weights) for owner in (*model.kinds, model.head)]
        self._messages = self.reduced * max(sizes[:-1]), self.reduced * sizes[-1]

    def with_rows(self, rows: int) -> CostModel:
        """The same for other micro-batches; what does not depend on them is worked out once for all."""
        other = CostModel(self.hardware, self.model, self.workload, self.ranks, rows, late_head=self.late_head)
        other._known_weights = self._known_weights
        return other

    # ---- Layers ----

    def layer(self, kind: int, strategies: Sequence[LayerStrategy]) -> Costs:
        """Costs of a layer of `kind` under each of the strategies."""
        layer, passes, weights = self.model.kinds[kind], Distinct(), Distinct()
        for strategy in strategies:
            key = (strategy.tensor, strategy.megatron_sp, strategy.ulysses, strategy.recompute)
            passes.add(key, self._pass, layer, strategy)
            weights.add(_weights_key(strategy), self._weights, layer, strategy)
        return self._units(passes.arrays(), weights.arrays(), strategies, "layer")

    def _pass(self, layer: LayerProfile, strategy: LayerStrategy) -> Pass:
        forward, backward = self._computing(layer, strategy)
        region_forward, region_backward = self._regions(layer, strategy)
        saved, working, recomputed = self._activations(layer, strategy)
        return Pass(
            forward_ms=forward,
            backward_ms=backward,
            region_forward_ms=region_forward,
            region_backward_ms=region_backward,
            saved_bytes=saved,
            working_bytes=working,
            recomputed_bytes=recomputed,
            released_bytes=0.0 if recomputed else saved,
        )

    def _units(
        self,
        passed: Pass,
        weights: WeightCosts,
        strategies: Sequence[LayerStrategy | VocabularyStrategy],
        part: str,
    ) -> Costs:
        """From arrays (S,). `part` is "layer", "embedding", "head" or "tied", both ends as one.

        The ends' backward needs no weights that the forward has not gathered just before. Both ends as one are FSDP2's
        root: their weights stay gathered beside all layers, and the head's gradient waits there for the embedding's.
        """
        is_layer, is_head, tied = part == "layer", part in ("head", "tied"), part == "tied"
        forward = self._with_weights(passed.forward_ms, weights.gather_ms) + passed.region_forward_ms
        again = weights.gather_ms * is_layer
        backward = self._with_weights(passed.backward_ms, again, weights.reduce_ms) + passed.region_backward_ms
        computing, model, whole = passed.forward_ms + passed.backward_ms, self.model, weights.whole_gradient_bytes
        reduced = weights.reduction_bytes
        tensor, none = np.array([strategy.tensor for strategy in strategies]), np.zeros(len(strategies))
        layer, head = (np.where(reduced > 0, size / tensor, 0.0) for size in self._messages)
        before = layer if part == "embedding" else reduced
        gradient = weights.elements * GRADIENT_BYTES
        return Costs(
            forward_ms=forward,
            backward_ms=backward,
            communication_ms=np.maximum(0.0, forward + backward - computing),
            sync_ms=weights.gather_once_ms
            + self._exposed(passed.backward_ms, weights.copies_ms, self.hardware.exposed_sync)
            + self._exposed(passed.backward_ms, weights.shard_copies_ms, 1.0),
            update_ms=weights.elements * model.optimizer_ms_per_element
            + weights.count * model.optimizer_ms_per_weight,
            adding_ms=weights.elements * model.adding_ms_per_element,
            state_bytes=weights.state_bytes + tied * (weights.passing_bytes + whole),
            gradient_bytes=gradient,
            gathered_bytes=weights.gathered_bytes,
            activation_bytes=passed.saved_bytes,
            working_bytes=passed.working_bytes + weights.passing_bytes * (2 * is_layer + is_head - tied),
            next_bytes=weights.passing_bytes * is_layer,
            recomputed_bytes=passed.recomputed_bytes + weights.message_bytes * is_head,
            released_bytes=passed.released_bytes,
            made_gradient_bytes=none if is_head else weights.made_gradient_bytes,
            whole_gradient_bytes=np.maximum(whole, weights.largest_bytes) if is_head else whole,
            joined_bytes=weights.joined_bytes,
            reduction_bytes=reduced,
            reduced_bytes=np.where(reduced > 0, gradient, 0.0) * (is_layer or part == "head"),
            reducing_bytes=whole + reduced + weights.passing_bytes * is_layer,
            message_bytes=weights.message_bytes,
            kept_bytes=before,
            first_kept_bytes=none if is_head else before,
            head_kept_bytes=head * is_layer,
            other_kept_bytes=reduced if is_layer else layer,
            part=part,
        )

    def _tokens(self, strategy: LayerStrategy, length: int) -> tuple[int, int, int]:
        """Tokens of a data rank, inside a tensor region, and between regions, of the rank that has most."""
        shared = -(-self.rows // strategy.data_degree(self.ranks)) * length
        region = -(-shared // strategy.ulysses)
        return shared, region, -(-region // strategy.tensor) if strategy.megatron_sp else region

    def _computing(self, layer: LayerProfile, strategy: LayerStrategy) -> tuple[float, float]:
        """Forward and backward; PyTorch's recomputing, in the backward, ends with the last tensor that is saved."""
        _, region, between = self._tokens(strategy, self.workload.computed_length)
        times, rows = _at(layer.times, strategy.tensor), -(-self.rows // strategy.data_degree(self.ranks))
        squares = rows * self.workload.computed_square / strategy.ulysses
        pairs = ((times.forward, times.forward_outside_tp), (times.backward, times.backward_outside_tp))
        calibration_factors = self.calibration_factors["computing"]
        forward, backward = (
            calibration_factors * (fit.ms(region, squares) - outside * (region - between)) for fit, outside in pairs
        )
        if strategy.recompute == "full":
            backward += forward + calibration_factors * (
                times.recompute_fixed - times.forward_after_last_saved * region
            )
        return forward, backward

    def _regions(self, layer: LayerProfile, strategy: LayerStrategy) -> tuple[float, float]:
        """Tensor and Ulysses collectives and gradients that tensor ranks share, in forward and backward."""
        _, region, between = self._tokens(strategy, self.workload.computed_length)
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
                if weight.sums_gradient(tensor, strategy.megatron_sp):
                    backward += self._ms("all_reduce", tensor, 1, 4 * math.prod(weight.shape))
        if strategy.ulysses > 1:
            model = self.model
            heads = AttentionHeads.from_degrees(
                query=model.heads, key_value=model.kv_heads, tensor=tensor, ulysses=strategy.ulysses
            )
            size = region * model.head_dim * self.element
            exchange = 2 * sum(
                self._ms("all_to_all", strategy.ulysses, tensor, count * size)
                for count in (heads.query, heads.sent_key_value)
            )
            forward += exchange
            backward += exchange * (1 + again)
        return forward, backward

    def _activations(self, layer: LayerProfile, strategy: LayerStrategy) -> tuple[float, float, float]:
        """Bytes of a micro-batch that are saved, that its forward or backward needs beside them, and recomputed."""
        shared, _, between = self._tokens(strategy, self.workload.length)
        key = (strategy.tensor, strategy.megatron_sp, strategy.ulysses)
        saved, working = shared * _at(layer.saved_bytes, key), shared * layer.working_bytes.get(key, 0.0)
        if strategy.recompute == "none":
            return saved, working, 0.0
        kept = layer.recompute_bytes.get(key)
        return between * self.model.hidden * self.element if kept is None else shared * kept, working, saved

    # ---- Embedding and head ----

    def end(self, end: EndProfile, strategies: Sequence[VocabularyStrategy], part: str) -> Costs:
        """Costs of an end, which is the "embedding", the "head" or both of one stage, "tied", under each strategy."""
        passes, weights = Distinct(), Distinct()
        for strategy in strategies:
            passes.add(strategy.tensor, self._pass_end, end, strategy.tensor, part != "embedding")
            weights.add(_weights_key(strategy), self._weights, end, strategy)
        return self._units(passes.arrays(), weights.arrays(), strategies, part)

    def _pass_end(self, end: EndProfile, tensor: int, is_head: bool) -> Pass:
        split, workload = Layout.from_vocabulary(tensor, self.ranks, self.rows), self.workload
        kept = split.most_tokens(self.rows, workload.length)
        tokens = split.most_tokens(self.rows, workload.computed_length)
        times = _at(end.times, tensor)
        forward, backward = (
            self.calibration_factors["computing"] * fit.ms(tokens, 0.0) for fit in (times.forward, times.backward)
        )
        summed = self._ms("all_reduce", tensor, 1, tokens * self.model.hidden * self.element)
        regions, fixed = (summed, 0.0), end.saved_fixed_bytes.get(tensor, 0.0)
        if is_head:
            chunks = -(-tokens // HEAD_CHUNK_TOKENS)
            merged = chunks * self._ms("all_gather", tensor, 1, 16 * min(tokens, HEAD_CHUNK_TOKENS))
            regions = (merged, summed + self.late_head * merged)
        chunk = end.working_fixed_bytes.get(tensor, 0.0) * min(1.0, kept / HEAD_CHUNK_TOKENS)
        results = max(kept * end.working_bytes.get(tensor, 0.0), chunk)
        if is_head and self.late_head:  # of three products of its size, the logits are one
            forward, backward = forward / 3, backward + forward
        return Pass(
            forward_ms=forward,
            backward_ms=backward,
            region_forward_ms=regions[0],
            region_backward_ms=regions[1],
            saved_bytes=kept * _at(end.saved_bytes, tensor),
            working_bytes=fixed if is_head else fixed + results,
            recomputed_bytes=results if is_head else 0.0,  # gone when its gradients are scaled
        )

    # ---- Weights ----

    def _weights(self, owner: LayerProfile | EndProfile, strategy: LayerStrategy | VocabularyStrategy) -> WeightCosts:
        key = (id(owner.weights), *_weights_key(strategy))
        if key not in self._known_weights:
            self._known_weights[key] = weight_costs(
                owner.weights,
                strategy,
                self.ranks,
                element=self.element,
                reduced=self.reduced,
                ms=self._ms,
            )
        return self._known_weights[key]

    def _with_weights(
        self, computing: np.ndarray, gathered: np.ndarray, reduced: np.ndarray | float = 0.0
    ) -> np.ndarray:
        """Computing, and weights and gradients that are communicated for it."""
        if self.hardware.hides_gathers:
            return self._beside(computing, gathered + reduced)
        return self._beside(computing, reduced) + gathered

    def _beside(self, computing: np.ndarray, communicating: np.ndarray) -> np.ndarray:
        slowdown = self.hardware.overlap_slowdown
        if slowdown is None:
            return computing + communicating
        return np.maximum(computing, communicating) + (slowdown - 1) * np.minimum(computing, communicating)

    def _exposed(self, computing: np.ndarray, communicating: np.ndarray, share: float) -> np.ndarray:
        """Of a sum of gradients that begins during the backward; `share` of it where nothing is hidden by measure."""
        if self.hardware.overlap_slowdown is None:
            return share * communicating
        return self._beside(computing, communicating) - computing

    # ---- Between layers and stages ----

    def move_ms(self, before: Layout, after: Layout) -> float:
        """Of one micro-batch, forward and backward."""
        return sum(self._moved(*pair) for pair in ((before, after), (after, before)))

    def _moved(self, before: Layout, after: Layout) -> float:
        block, tokens = most_sent_tokens(before, after, self.rows, self.workload.computed_length)
        if block == 1:
            return 0.0
        size = tokens * self.model.hidden * self.element * block / (block - 1)  # all of it leaves the rank
        return self._ms("all_to_all", block, 1, size)

    def _ms(self, kind: str, ranks: int, stride: int, size: float, factor: str = "communication") -> float:
        """Of a collective in a step of training."""
        waits = ranks > 1 and factor in ("communication", "weights")
        waiting = self.model.collective_launch_ms if waits else 0.0
        return waiting + self.calibration_factors[factor] * float(self.hardware.ms(kind, ranks, stride, size))

    def later_stage_ms(self) -> float:
        """Of one micro-batch, what every stage makes for its layers anew (positions, rotary embeddings)."""
        return self.calibration_factors["computing"] * _at(self.model.embedding.times, 1).forward.fixed

    def boundary(self) -> Layout:
        """How hidden states lie when they go from stage to stage."""
        return Layout.from_vocabulary(1, self.ranks, self.rows)

    @cached_property
    def boundary_bytes(self) -> int:
        """Of the hidden states of the longest rows that the rank which has most sends to the next stage."""
        return self._boundary_bytes(self.workload.length)

    def _boundary_bytes(self, length: int) -> int:
        return self.boundary().most_tokens(self.rows, length) * self.model.hidden * self.element

    def received_ms(self, counts: np.ndarray) -> np.ndarray:
        """(p,) what rank lists that receive hidden states, or their gradient, (p, p) times from each other wait for.

        A message is as slow as the slowest of its ranks' links: between nodes, if any of them crosses.
        """
        if len(counts) == 1:
            return np.zeros(1)
        hardware, size = self.hardware, self._boundary_bytes(self.workload.computed_length)
        nodes = np.arange(len(counts) * self.ranks).reshape(-1, self.ranks) // hardware.devices_per_node
        crosses = (nodes[:, None] != nodes).any(axis=2)
        strides = self.ranks, max(self.ranks, hardware.devices_per_node)
        inside, between = (self._ms("send", 2, stride, size, "sending") for stride in strides)
        return (counts * np.where(crosses, between, inside)).sum(axis=1)


def _at(table: dict, key: object) -> Times | float:
    if key not in table:
        raise ValueError(f"The model profile says nothing of degree {key}; profile the model with it.")
    return table[key]
