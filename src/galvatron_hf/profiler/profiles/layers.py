# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Stores times, weights and bytes of one layer, and of the embedding and the head. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from galvatron_hf.models.shape import WeightShape


@dataclass(frozen=True, kw_only=True)
class TimeFit:
    """Models the time of a pass in ms: per_token * T + per_square * S + fixed, with coefficients of 0 or more, and
    `least` at least, which the host needs to issue its operations. T is the number of tokens. S is the sum of the
    squared document lengths. `error` is the median of |fitted / measured - 1|, and 0 if nothing was measured.
    """

    per_token: float
    per_square: float = 0.0
    fixed: float = 0.0
    error: float = 0.0
    least: float = 0.0

    def ms(self, tokens: float, squares: float, without: float = 0.0) -> float:
        """Returns the time of a pass; `without` are ms of work that other ranks do."""
        return max(self.least, self.per_token * tokens + self.per_square * squares + self.fixed - without)


@dataclass(frozen=True, kw_only=True)
class Times:
    """Holds times of one module on one device.

    Attributes:
        forward, backward ([`TimeFit`]): The two passes. The backward excludes recomputation.
        forward_outside_tp, backward_outside_tp (`float`): Part of `per_token` outside the tensor-parallel regions
            (norms, residuals). Megatron-SP divides this part among the tensor ranks.
        forward_after_last_saved (`float`): Part of the forward's `per_token` after the last tensor saved for the
            backward; in most layers the last matrix product. Recomputation skips it.
        recompute_fixed (`float`): Constant overhead of full recompute in ms, besides the repeated forward.
    """

    forward: TimeFit
    backward: TimeFit
    forward_outside_tp: float = 0.0
    backward_outside_tp: float = 0.0
    forward_after_last_saved: float = 0.0
    recompute_fixed: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ExpertTimes:
    """Holds the cost of a layer's experts under one expert degree, with choosing ranks' permutations and without
    messages, for each token that a rank brings. The attributes that begin with `received` are the part that grows with
    the choices that arrive at a rank: for each token, if as many arrive as the rank sends.

    Attributes:
        forward, backward ([`TimeFit`]): times with experts that are chosen equally often.
        saved_bytes, working_bytes (`float`): as in [`LayerProfile`].
    """

    forward: TimeFit
    backward: TimeFit
    saved_bytes: float
    working_bytes: float
    received_forward: float = 0.0
    received_backward: float = 0.0
    received_saved_bytes: float = 0.0
    received_working_bytes: float = 0.0

    def times(self, tokens: float, imbalance: float) -> tuple[float, float]:
        """Returns forward and backward in ms on the rank at which `imbalance` times the mean of choices arrives."""
        more = (imbalance - 1.0) * tokens
        return (
            self.forward.ms(tokens, 0.0) + more * self.received_forward,
            self.backward.ms(tokens, 0.0) + more * self.received_backward,
        )

    def bytes(self, tokens: float, imbalance: float) -> tuple[float, float]:
        """Returns saved and working bytes on such a rank."""
        more = (imbalance - 1.0) * tokens
        return (
            self.saved_bytes * tokens + self.received_saved_bytes * more,
            self.working_bytes * tokens + self.received_working_bytes * more,
        )


@dataclass(frozen=True, kw_only=True)
class ExpertsProfile:
    """Holds the number of experts of a layer, of the choices of a token, and the costs by expert degree; degree 1 is
    included, and is a part of the layer's own costs.
    """

    count: int
    top_k: int
    degrees: Mapping[int, ExpertTimes]


@dataclass(frozen=True, kw_only=True)
class LayerProfile:
    """Holds the cost of one kind of layer.
    The bytes are for each token that the layer's tensor and Ulysses ranks share, on one of these ranks. Their keys are
    (tensor, megatron_sp, ulysses).

    Attributes:
        weights (`tuple[WeightShape, ...]`): Weights of the layer.
        times (`Mapping[int, Times]`): Times of one tensor rank's slice, by tensor degree.
        saved_bytes (`Mapping`): Activations kept from the forward to the backward.
        working_bytes (`Mapping`): Peak of the other activations and activation gradients during a pass. Excludes
            weights and weight gradients.
        recompute_bytes (`Mapping`): Activations kept under full recompute. A missing strategy keeps the layer's input.
        regions (`int`): Tensor-parallel regions of the layer, each entered and left once; 0 if no rank cuts it.
        saves_after_last_region (`bool`): As in [`ModelShape`].
        experts ([`ExpertsProfile`], *optional*): Costs of its experts under other expert degrees than 1, which the
            other figures are for; None for a dense layer.
        length_ratio (`float`): Tokens that a row has in the layer's stack, for each token of the workload's rows.
        read_ratio (`float`): The same of the stack that it reads by cross-attention; 0 if it reads none. The costs of
            reading are in the other figures, for this ratio.
        bias_heads (`int`): Heads of a bias of scores [1, heads, S, S] that the layers of a stack share; 0 for none. It
            is in no other figure.
    """

    weights: tuple[WeightShape, ...]
    times: Mapping[int, Times]
    saved_bytes: Mapping[tuple[int, bool, int], float]
    working_bytes: Mapping[tuple[int, bool, int], float] = field(default_factory=dict)
    recompute_bytes: Mapping[tuple[int, bool, int], float] = field(default_factory=dict)
    regions: int = 2
    saves_after_last_region: bool = False
    experts: ExpertsProfile | None = None
    length_ratio: float = 1.0
    read_ratio: float = 0.0
    bias_heads: int = 0


@dataclass(frozen=True, kw_only=True)
class EndProfile:
    """Holds the cost of the embedding, or of the final norm and the head with the loss.
    The bytes are those of one tensor rank, by tensor degree. Those without `fixed` in the name are for each token that
    the tensor ranks share.

    Attributes:
        weights (`tuple[WeightShape, ...]`): Weights of the module. A tied weight is in both ends.
        times (`Mapping[int, Times]`): Times by tensor degree.
        saved_bytes (`Mapping[int, float]`): Activations kept from the forward to the backward.
        saved_fixed_bytes (`Mapping[int, float]`): Bytes kept whatever the number of tokens. The head keeps the
            gradient of its weight, unless several micro-batches are in flight.
        working_bytes, working_fixed_bytes (`Mapping[int, float]`): Peak of the other bytes during a pass. The larger
            of the two counts; the fixed one holds the logits of 1,024 tokens in all their forms.
        length_ratio (`float`): Tokens that a row has here, for each token of the workload's rows. The embedding looks
            up those of all stacks, the head takes those of the last one.
    """

    weights: tuple[WeightShape, ...]
    times: Mapping[int, Times]
    saved_bytes: Mapping[int, float]
    working_bytes: Mapping[int, float] = field(default_factory=dict)
    saved_fixed_bytes: Mapping[int, float] = field(default_factory=dict)
    working_fixed_bytes: Mapping[int, float] = field(default_factory=dict)
    length_ratio: float = 1.0
