# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""What a layer or an end costs under each of several strategies, as arrays, and the memory that it works in.

Strategies have parts of their costs in common: what a micro-batch's pass takes and keeps ([`Pass`]) does not depend on
sharding, nor what weights take ([`~planner.weights.WeightCosts`]) on recompute. [`Distinct`] works each out once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from galvatron_hf.planner.cost.weight_costs import WeightCosts


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Of S strategies, arrays (S,): milliseconds, and bytes of one rank.

    Attributes:
        forward_ms, backward_ms: of one micro-batch, communication included; recompute is in the backward.
        communication_ms: of these two, what is not computing.
        sync_ms: once in a step, before the update.
        update_ms: of the optimizer, once in a step.
        adding_ms: of adding a micro-batch's gradients to those before.
        state_bytes: weights, gradients and optimizer state, and weights that stay gathered.
        gradient_bytes: of the state, gradients at rest.
        gathered_bytes: of the state, weights that stay gathered until their last backward.
        activation_bytes: kept of one micro-batch from its forward to its backward.
        working_bytes: needed beside these while the layer runs: intermediate results, weights that are gathered for
            it, and the message with the next one's.
        next_bytes: of the working memory, the next layer's weights.
        recomputed_bytes: activations that its backward brings back; of the head, logits and the message with its
            weight.
        released_bytes: of the activations, those that are gone when its backward has ended.
        made_gradient_bytes: of one weight's gradient, before it joins the others.
        whole_gradient_bytes: of gradients that are reduced after each backward, until they are; of the head, of the
            gradient that its backward scales.
        joined_bytes: of all gradients of copies, which are joined to be summed when the last has come.
        reduction_bytes: of gradients as they are sent to be reduced.
        reduced_bytes: of a layer's or the head's gradients at rest, where they are what the reduction leaves.
        reducing_bytes: needed beside the state while they are, with the next layer's weights.
        message_bytes: of the message that gathers its weights, which one rank does without.
        kept_bytes: of the message of the reduction before it, which stays until this one.
        first_kept_bytes: the same in a step's first backward.
        head_kept_bytes: the same behind the head, for the last layer.
        other_kept_bytes: of a layer's message, on another stage of the rank.
        part: "layer", "embedding", "head", or "tied", both ends as one.
    """

    forward_ms: np.ndarray
    backward_ms: np.ndarray
    communication_ms: np.ndarray
    sync_ms: np.ndarray
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
    made_gradient_bytes: np.ndarray
    whole_gradient_bytes: np.ndarray
    joined_bytes: np.ndarray
    reduction_bytes: np.ndarray
    reduced_bytes: np.ndarray
    reducing_bytes: np.ndarray
    message_bytes: np.ndarray
    kept_bytes: np.ndarray
    first_kept_bytes: np.ndarray
    head_kept_bytes: np.ndarray
    other_kept_bytes: np.ndarray
    part: str

    def updating_ms(self, micro_batches: int) -> np.ndarray:
        """(S,) of the optimizer, and of adding up the gradients that it needs."""
        return self.update_ms + (micro_batches - 1) * self.adding_ms

    def working(self, *, alone: bool, stages: int, micro_batches: int, one_layer: bool) -> np.ndarray:
        """(S,) bytes needed beside state and activations while the layer runs.

        A backward begins with what was recomputed and a first gradient, and ends with all gradients that are to be
        reduced.

        Args:
            alone (`bool`): Whether there is one stage, which has the head.
            stages (`int`): Of the rank, whose last reduction's message is still kept.
            micro_batches (`int`): Of a step. In the only one, sharded weights that stay gathered go when gradients
                have come, gradients that are whole at rest are in the state already, and those that a reduction leaves
                are not there before it: neither the layer's nor, if there is one, those of the backward's next.
            one_layer (`bool`): Whether each stage has one layer, and thus none a next one.
        """
        changing = np.maximum(
            self.recomputed_bytes + self.made_gradient_bytes, self.whole_gradient_bytes - self.released_bytes
        )
        released, gone, absent = self.released_bytes, 0, 0
        kept = self.kept_bytes if micro_batches > 1 else self.first_kept_bytes
        if alone:
            kept = np.maximum(kept, self.head_kept_bytes)
        elif self.part == "head":
            # FSDP2's root has no weights on such a stage and lets go of the message; among several ranks gloo's
            # reduce-scatter copies what it is given instead.
            kept = np.where(self.message_bytes > 0, kept, 0)
        if micro_batches == 1:
            gone = self._gathered_shards
            at_rest = np.where(self.reduction_bytes > 0, 0, self.gradient_bytes - self.shared_bytes(1))
            changing, released = changing - at_rest, released + gone
            absent = np.maximum(0, self.reduced_bytes - self.shared_bytes(1))
        ahead = (0 if one_layer else np.maximum(0, self.next_bytes - absent)) - self.next_bytes
        passing = self.working_bytes + ahead - absent + np.maximum(0, changing) + np.maximum(0, kept - gone)
        others = (stages - 1) * self.other_kept_bytes
        joining = self.joined_bytes - self.released_bytes + (self.shared_bytes(1) if micro_batches == 1 else 0)
        ending = np.maximum(self.reducing_bytes + ahead - released, joining)
        return np.ceil(np.maximum(passing, ending) + others).astype(np.int64)

    def shared_bytes(self, micro_batches: int) -> np.ndarray:
        """Of state and activations of one micro-batch, what is first the one and then the other.

        In the last backward gradients take the place of activations, layer by layer; if it is the only one, of sharded
        weights that stayed gathered too.
        """
        return np.minimum(self.gradient_bytes, self._gone_bytes(micro_batches))

    def own_bytes(self, micro_batches: int) -> np.ndarray:
        """(S,) of an end's state and activations, what is there only while it runs itself.

        In a step's only backward an embedding's gradient comes when all layers have theirs, and what a head's gradient
        leaves of the place of its activations and gathered shards is free before layers begin.
        """
        if micro_batches > 1 or self.part not in ("embedding", "head"):
            return np.zeros(len(self.gradient_bytes), dtype=np.int64)
        held = self.gradient_bytes if self.part == "embedding" else self._gone_bytes(1)
        return np.floor(held - self.shared_bytes(1)).astype(np.int64)

    def _gone_bytes(self, micro_batches: int) -> np.ndarray:
        """Of state and activations of one micro-batch, what the last backward leaves nothing of."""
        return self.activation_bytes + (self._gathered_shards if micro_batches == 1 else 0)

    @property
    def _gathered_shards(self) -> np.ndarray:
        """Copies of replicated weights stay until the whole backward has ended."""
        return np.where(self.reduction_bytes > 0, self.gathered_bytes, 0)


@dataclass(frozen=True, kw_only=True)
class Pass:
    """Of a layer or an end what sharding has no part in: computing and collectives of regions, and bytes.

    What the head works with has its weight's gradient, from the forward on: the backward scales it.
    """

    forward_ms: float
    backward_ms: float
    region_forward_ms: float
    region_backward_ms: float
    saved_bytes: float
    working_bytes: float
    recomputed_bytes: float = 0.0
    released_bytes: float = 0.0


class Distinct:
    """What strategies have, of which many have the same."""

    def __init__(self):
        self._places: dict[Any, int] = {}
        self._ones: list[Pass | WeightCosts] = []
        self._of: list[int] = []

    def add(self, key: Any, make: Callable[..., Pass | WeightCosts], *given: Any) -> None:
        """The next strategy's: what `make` makes of what is given, or made for the key before."""
        place = self._places.get(key)
        if place is None:
            place = self._places[key] = len(self._ones)
            self._ones.append(make(*given))
        self._of.append(place)

    def arrays(self) -> Pass | WeightCosts:
        """(S,) of each field."""
        kind = type(self._ones[0])
        names = kind.__annotations__
        return kind(**{name: np.array([getattr(one, name) for one in self._ones], float)[self._of] for name in names})
