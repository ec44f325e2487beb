# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Computes what a micro-batch's forward and backward take in a layer or an end of a rank, whatever the sharding of its
weights: compute, messages inside it (`message_prices.py`), and bytes. The model profile gives the time of compute.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from galvatron_hf.plan import LayerStrategy
from galvatron_hf.plan.layout import HEAD_CHUNK_TOKENS
from galvatron_hf.planner.cost import rings
from galvatron_hf.planner.cost.message_prices import MessagePrices, at_degree
from galvatron_hf.planner.cost.strategy_costs import Grouped, PassCosts
from galvatron_hf.profiler.profiles.layers import EndProfile, LayerProfile


INDEX_BYTES = 8  # of an index of a bias's table


def pass_key(strategy: LayerStrategy) -> tuple:
    """Returns what of a strategy decides a pass; the expert degree comes last."""
    return strategy.tensor, strategy.megatron_sp, strategy.ulysses, strategy.recompute, strategy.expert


class PassPrices(MessagePrices):
    """Prices passes: compute, messages inside them, and bytes. If `recompute_logits_in_backward`, the head keeps its
    input and computes the logits again, with its gradients, in the backward. The head does so if several micro-batches
    wait for their backward.
    """

    def __init__(self, *args: Any, recompute_logits_in_backward: bool = False, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.recompute_logits_in_backward = recompute_logits_in_backward

    # ---- Layers ----

    def _passes(self, layer: LayerProfile, groups: Grouped) -> list[PassCosts]:
        """Returns the costs of a layer under the strategies of groups."""
        of_bias = self.ranks if layer.bias_heads else None  # the layers of a stage share a bias
        return self._of_groups("pass", layer, groups, self._new_pass, of_bias)

    def _times(self, layer: LayerProfile, groups: Grouped) -> list[tuple[float, float, float, float]]:
        """Returns the four times of [`PassCosts`] under the strategies of groups."""
        return self._of_groups("times", layer, groups, self._new_times)

    def _of_groups(
        self,
        part: str,
        layer: LayerProfile,
        groups: Grouped,
        price: Callable[[LayerProfile, LayerStrategy], Any],
        *more: int | None,
    ) -> list[Any]:
        """Returns prices that depend on the groups' keys, on the most rows of a data rank, and on `more`."""
        if layer.read_ratio:  # depends on the layout between stages, and so on all rows
            return [price(layer, one) for one in groups.distinct]
        widths = np.array([one.tensor * one.ulysses for one in groups.distinct])
        rows = -(-self.rows // (self.ranks // (self.context * widths)))
        return [
            self._once((part, id(layer), *key, most, self.context, *more), lambda one=one: price(layer, one))
            for key, most, one in zip(groups.keys, rows.tolist(), groups.distinct, strict=True)
        ]

    def _new_times(self, layer: LayerProfile, strategy: LayerStrategy) -> tuple[float, float, float, float]:
        return *self._computing(layer, strategy), *self._regions(layer, strategy)

    def _new_pass(self, layer: LayerProfile, strategy: LayerStrategy) -> PassCosts:
        (times,) = self._times(layer, Grouped([strategy], pass_key))
        saved, working, recomputed = self._activations(layer, strategy)
        shared, waiting = self._bias_bytes(layer, strategy)
        return PassCosts(
            *times,
            saved_bytes=saved + shared,
            working_bytes=working + waiting,
            recomputed_bytes=recomputed,
            released_bytes=0.0 if recomputed else saved,
            shared_bytes=shared + self._read_bytes(layer, strategy),
        )

    def _computing(self, layer: LayerProfile, strategy: LayerStrategy) -> tuple[float, float]:
        """Returns forward and backward time. PyTorch's recompute, in the backward, ends with the last saved tensor."""
        forward, backward, region = self._once(
            self._computing_key("computing", layer, strategy), lambda: self._without_recompute(layer, strategy)
        )
        if strategy.recompute == "full":
            times, factor = at_degree(layer.times, strategy.tensor), self.calibration_factors["computing"]
            more = forward + factor * (times.recompute_fixed - times.forward_after_last_saved * region)
            backward += max(0.0, more)
        return forward, backward

    def _without_recompute(self, layer: LayerProfile, strategy: LayerStrategy) -> tuple[float, float, int]:
        """Returns forward and backward time and the tokens inside tensor regions."""
        _, region, between = self._tokens(strategy, self.workload.computed_length, layer.length_ratio)
        times, squares = at_degree(layer.times, strategy.tensor), self._squares(layer, strategy)
        pairs = ((times.forward, times.forward_outside_tp), (times.backward, times.backward_outside_tp))
        factor = self.calibration_factors["computing"]
        forward, backward = (
            factor * fit.ms(region, squares, without=outside * (region - between)) for fit, outside in pairs
        )
        experts = self._experts(layer, strategy, self.workload.computed_length)
        if experts is not None:
            own, imbalance, under_degree, alone = experts
            pairs = zip(under_degree.times(own, imbalance), alone.times(own, 1.0), strict=True)
            more = [factor * (there - here) for there, here in pairs]
            forward, backward = max(0.0, forward + more[0]), max(0.0, backward + more[1])
        return forward, backward, region

    def _activations(self, layer: LayerProfile, strategy: LayerStrategy) -> tuple[float, float, float]:
        """Returns the bytes of one micro-batch that are saved, temporary, and recomputed."""
        shared, _, between = self._tokens(strategy, self.workload.length, layer.length_ratio)
        key = (strategy.tensor, strategy.megatron_sp, strategy.ulysses)
        saved, working = shared * at_degree(layer.saved_bytes, key), shared * layer.working_bytes.get(key, 0.0)
        read_bytes = self._read_bytes(layer, strategy)
        experts = self._experts(layer, strategy, self.workload.length)
        if experts is not None:
            own, imbalance, under_degree, alone = experts
            (more_saved, most), (less_saved, least) = under_degree.bytes(own, imbalance), alone.bytes(own, 1.0)
            saved, working = max(0.0, saved + more_saved - less_saved), max(working, working + most - least)
        if self.context > 1:
            traffic = self.ring_traffic(strategy, self.workload.length)
            working += rings.working_bytes(traffic, self.model.heads // (strategy.tensor * strategy.ulysses))
        if strategy.recompute == "none":
            return saved + read_bytes, working, 0.0
        kept = layer.recompute_bytes.get(key)
        kept_bytes = between * self.model.hidden * self.element if kept is None else shared * kept
        return kept_bytes + read_bytes, working, saved

    def _read_bytes(self, layer: LayerProfile, strategy: LayerStrategy) -> float:
        """Returns a layer's part of the states of another stack that the layers of a stage read."""
        if not layer.read_ratio:
            return 0.0
        read = self._tokens(strategy, self.workload.length, layer.read_ratio)[2]
        return min(1.0, self.read_moves) * read * self.model.hidden * self.element

    def _bias_bytes(self, layer: LayerProfile, strategy: LayerStrategy) -> tuple[float, float]:
        """Returns a layer's part of what its stack shares in a stage, and the gradients that wait there for those of
        this layer. Shared are the indices [S, S] of a bias of scores and, if layers are computed again, the bias
        [1, heads, S, S]; kernels of a GPU keep it anyway. It is shared by as many layers as stages have in the mean.
        """
        if not layer.bias_heads:
            return 0.0, 0.0
        square = math.ceil(self.workload.length * layer.length_ratio) ** 2
        bias = layer.bias_heads / (strategy.tensor * strategy.ulysses) * square * self.element
        is_kept = strategy.recompute != "none" or self.hardware.overlap_slowdown is not None
        of_stack = sum(self.model.kinds[kind] is layer for kind in self.model.layers)
        layers = max(1.0, min(of_stack, len(self.model.layers) * self.ranks / self.hardware.world_size))
        return (bias * is_kept + INDEX_BYTES * square) / layers, bias * (layers > 1)

    # ---- Embedding and head ----

    def _pass_end(self, end: EndProfile, tensor: int, *, is_head: bool) -> PassCosts:
        layout, lengths = self.end_layout(tensor), (self.workload.length, self.workload.computed_length)
        tokens = [layout.most_tokens(self.pieces, self.piece_tokens(one, end.length_ratio)) for one in lengths]
        key = "end", is_head, tensor, *tokens, self.recompute_logits_in_backward
        return self._once(key, lambda: self._new_pass_end(end, tensor, is_head, *tokens))

    def _new_pass_end(self, end: EndProfile, tensor: int, is_head: bool, kept: int, tokens: int) -> PassCosts:
        """Returns the costs of an end for so many tokens of the longest rows, and of rows of mean length."""
        times = at_degree(end.times, tensor)
        forward, backward = (
            self.calibration_factors["computing"] * fit.ms(tokens, 0.0) for fit in (times.forward, times.backward)
        )
        summed = self._ms("all_reduce", tensor, 1, tokens * self.model.hidden * self.element)
        regions, fixed = (summed, 0.0), end.saved_fixed_bytes.get(tensor, 0.0)
        if is_head:
            chunks = -(-tokens // HEAD_CHUNK_TOKENS)
            merged = chunks * self._ms("all_gather", tensor, 1, 16 * min(tokens, HEAD_CHUNK_TOKENS))
            regions = (merged, summed + self.recompute_logits_in_backward * merged)
        chunk = end.working_fixed_bytes.get(tensor, 0.0) * min(1.0, kept / HEAD_CHUNK_TOKENS)
        results = max(kept * end.working_bytes.get(tensor, 0.0), chunk)
        if is_head and self.recompute_logits_in_backward:  # the logits are one of three equal matrix products
            forward, backward = forward / 3, backward + forward
        return PassCosts(
            forward_ms=forward,
            backward_ms=backward,
            region_forward_ms=regions[0],
            region_backward_ms=regions[1],
            saved_bytes=kept * at_degree(end.saved_bytes, tensor),
            working_bytes=fixed if is_head else fixed + results,
            recomputed_bytes=results if is_head else 0.0,  # freed before its gradients are scaled
        )

    def later_stage_ms(self) -> float:
        """Returns the time per micro-batch of positions and rotary embeddings, on each stage after the first."""
        return self.calibration_factors["computing"] * at_degree(self.model.embedding.times, 1).forward.fixed
