# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Holds the cost of a layer or an end under each of several strategies, and computes its peak of working memory.
[`Grouped`] computes shared parts once: the forward and backward of a micro-batch ([`PassCosts`]) do not depend on
sharding, and the weights ([`~planner.cost.weight_costs.WeightCosts`]) do not depend on recompute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from galvatron_hf.planner.cost.weight_costs import WeightCosts


@dataclass(frozen=True, kw_only=True)
class StrategyCosts:
    """Holds arrays (S,) of S strategies, in milliseconds and in bytes of one rank.

    Attributes:
        forward_ms, backward_ms: one micro-batch, communication included; the backward includes recompute.
        communication_ms: the part of forward_ms + backward_ms that is not compute.
        hidden_ms: messages of weights in one micro-batch that compute hides.
        sync_ms: gradient reductions once in a step, before the update; hidden_sync_ms is what the backward hides.
        update_ms: the optimizer, once in a step.
        adding_ms: the addition of a micro-batch's gradients to the earlier ones.
        state_bytes: weights, gradients, optimizer state, and weights that stay gathered.
        gradient_bytes: part of the state: gradients at rest.
        gathered_bytes: part of the state: weights that stay gathered until their last backward.
        activation_bytes: activations that one micro-batch keeps from its forward to its backward.
        working_bytes: temporary memory of the running layer: intermediate results, its gathered weights, and the
            gather message with the next layer's weights.
        next_bytes: part of the working memory: the next layer's weights.
        recomputed_bytes: activations that recompute restores; for the head, logits, and for tied ends also the message
            with their weight.
        released_bytes: part of the activations: those freed at the end of the layer's backward.
        shared_bytes: part of the activations: the layer's share of those that layers of a stage have in common. They
            are freed after the last backward of these layers.
        new_gradient_bytes: the gradient of one weight, before it joins the others.
        unsharded_gradient_bytes: gradients to be reduced after each backward; for the head, the gradient that its
            backward scales.
        bucket_bytes: the flat copy of all gradients of replicas, made for their all-reduce after the last of them.
        reduce_input_bytes: the message with the gradients to be reduced.
        reduce_output_bytes: gradients at rest of a layer or the head, if the reduction creates them.
        reducing_bytes: memory besides the state during the reduction, with the next layer's weights.
        message_bytes: the message that gathers the weights; 0 on one rank.
        previous_message_bytes: the previous reduction's message, which stays until this one.
        first_previous_message_bytes: the same in the first backward of a step.
        head_message_bytes: the same after the head, for the last layer.
        other_stage_message_bytes: the message of a layer on another stage of the rank.
        part: "layer", "embedding", "head", or "tied" (both ends as one).
    """

    forward_ms: np.ndarray
    backward_ms: np.ndarray
    communication_ms: np.ndarray
    hidden_ms: np.ndarray
    sync_ms: np.ndarray
    hidden_sync_ms: np.ndarray
    update_ms: np.ndarray
    adding_ms: np.ndarray
    state_bytes: np.ndarray
    gradient_bytes: np.ndarray
    gathered_bytes: np.ndarray
    activation_bytes: np.ndarray
    working_bytes: np.ndarray
    next_bytes: np.ndarray
    recomputed_bytes: np.ndarray
    released_bytes: np.ndarray
    shared_bytes: np.ndarray
    new_gradient_bytes: np.ndarray
    unsharded_gradient_bytes: np.ndarray
    bucket_bytes: np.ndarray
    reduce_input_bytes: np.ndarray
    reduce_output_bytes: np.ndarray
    reducing_bytes: np.ndarray
    message_bytes: np.ndarray
    previous_message_bytes: np.ndarray
    first_previous_message_bytes: np.ndarray
    head_message_bytes: np.ndarray
    other_stage_message_bytes: np.ndarray
    part: str

    def total_update_ms(self, micro_batches: int) -> np.ndarray:
        """Returns (S,) milliseconds of a step's optimizer update and gradient additions."""
        return self.update_ms + (micro_batches - 1) * self.adding_ms

    def peak_working_bytes(
        self, *, one_stage: bool, active_stages: int, micro_batches: int, one_layer: bool
    ) -> np.ndarray:
        """Returns (S,) the peak of memory besides state and activations while the layer runs.
        A backward begins with recomputed activations and a first gradient, and ends with all gradients to be reduced.

        Args:
            one_stage (`bool`): Whether there is one stage, which has the head.
            active_stages (`int`): Stages of the rank between their first and last backward, each of which keeps the
                message of its last reduction.
            micro_batches (`int`): Micro-batches of a step. With one, sharded weights that stay gathered are freed when
                gradients exist, gradients that are unsharded at rest are in the state already, and gradients that a
                reduction creates do not exist before it.
            one_layer (`bool`): Whether each stage has one layer, and so no next layer.
        """
        released, freed, absent = self.released_bytes, 0, 0
        message = self.previous_message_bytes if micro_batches > 1 else self.first_previous_message_bytes
        if one_stage:
            message = np.maximum(message, self.head_message_bytes)
        elif self.part == "head":
            # FSDP2's root has no weights on such a stage and frees the message of a reduction, not that of a gather.
            message = np.where((self.message_bytes > 0) & (self.reduce_input_bytes == 0), message, 0)
        gathered = 0
        if self.part == "head":
            # The weight's message is there while the logits are. If the weight stays gathered, that is in the first
            # micro-batch only, before there is a gradient or a reduction's message.
            first = np.maximum(0, self.message_bytes - self.reduce_output_bytes - message)
            gathered = np.where((self._gathered_shards > 0) & (micro_batches > 1), first, self.message_bytes)
        changing = np.maximum(
            self.recomputed_bytes + gathered + self.new_gradient_bytes,
            self.unsharded_gradient_bytes - self.released_bytes,
        )
        if micro_batches == 1:
            freed = self._gathered_shards
            at_rest = np.where(self.reduce_input_bytes > 0, 0, self.gradient_bytes - self.reused_bytes(1))
            changing, released = changing - at_rest, released + freed
            absent = np.maximum(0, self.reduce_output_bytes - self.reused_bytes(1))
        ahead = (0 if one_layer else np.maximum(0, self.next_bytes - absent)) - self.next_bytes
        running = self.working_bytes + ahead - absent + np.maximum(0, changing) + np.maximum(0, message - freed)
        others = (active_stages - 1) * self.other_stage_message_bytes
        bucket = self.bucket_bytes - self.released_bytes + (self.reused_bytes(1) if micro_batches == 1 else 0)
        added = self.reduce_output_bytes * (self.part == "head" and micro_batches > 1)  # to the gradient at rest
        ending = np.maximum(self.reducing_bytes + added + ahead - released, bucket)
        return np.ceil(np.maximum(running, ending) + others).astype(np.int64)

    def reused_bytes(self, micro_batches: int) -> np.ndarray:
        """Returns (S,) bytes that activations free in the last backward and gradients then use. In a step of one
        micro-batch, sharded weights that stayed gathered are freed too.
        """
        return np.minimum(self.gradient_bytes, self.released_in_backward(micro_batches))

    def end_only_bytes(self, micro_batches: int) -> np.ndarray:
        """Returns (S,) bytes of an end's state and activations that exist only while the end itself runs. In a step of
        one micro-batch, the embedding's gradient comes after those of all layers. The memory that the head's
        activations and gathered shards free, beyond its gradient, is free before the layers' backward.
        """
        if micro_batches > 1 or self.part not in ("embedding", "head"):
            return np.zeros(len(self.gradient_bytes), dtype=np.int64)
        held = self.gradient_bytes if self.part == "embedding" else self.released_in_backward(1)
        return np.floor(held - self.reused_bytes(1)).astype(np.int64)

    def released_in_backward(self, micro_batches: int) -> np.ndarray:
        """Returns (S,) bytes of state and one micro-batch's activations that the last backward frees."""
        return self.activation_bytes + (self._gathered_shards if micro_batches == 1 else 0)

    @property
    def _gathered_shards(self) -> np.ndarray:
        """Returns the bytes of gathered shards; cast copies of replicated weights stay until the backward ends."""
        return np.where(self.reduce_input_bytes > 0, self.gathered_bytes, 0)


class PassCosts(NamedTuple):
    """Holds the costs of a layer or an end that do not depend on sharding: compute, region collectives, and bytes. The
    head's `working_bytes` include its weight's gradient, which the forward computes and the backward scales. The first
    four are all of its time.
    """

    forward_ms: float
    backward_ms: float
    region_forward_ms: float
    region_backward_ms: float
    saved_bytes: float
    working_bytes: float
    recomputed_bytes: float = 0.0
    released_bytes: float = 0.0
    shared_bytes: float = 0.0


class Grouped:
    """Groups strategies whose costs are equal. `keys` are those of the groups, in order of appearance, `distinct` has
    one strategy of each; `index` (S,) is the group of each strategy.
    """

    def __init__(self, strategies: Sequence[Any], key: Callable[[Any], tuple]):
        groups: dict[tuple, int] = {}
        self.index = np.array([groups.setdefault(key(one), len(groups)) for one in strategies])
        self.keys = list(groups)
        first = np.unique(self.index, return_index=True)[1]
        self.distinct = [strategies[place] for place in first]

    def arrays(self, costs: list[PassCosts] | list[WeightCosts]) -> PassCosts | WeightCosts:
        """Returns the fields of each group's costs as arrays (S,)."""
        return type(costs[0])(*np.array(costs, dtype=float).T[:, self.index])
