# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""What a model costs, as far as planning needs it: times and saved bytes of its layers and ends, sizes of its weights.

Importing this module needs neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from galvatron_hf.planner.shapes import WeightShape


@dataclass(frozen=True, kw_only=True)
class TimeFit:
    """Milliseconds = per_token * tokens + per_square * (sum of squared lengths) + fixed.

    Attributes:
        per_token, per_square, fixed (`float`): the coefficients, none negative.
        error (`float`): median of |fitted / measured - 1|; 0 where nothing was measured.
    """

    per_token: float
    per_square: float = 0.0
    fixed: float = 0.0
    error: float = 0.0

    def ms(self, tokens: float, squares: float) -> float:
        """Of `tokens` tokens in documents whose squared lengths add up to `squares`."""
        return self.per_token * tokens + self.per_square * squares + self.fixed


@dataclass(frozen=True, kw_only=True)
class Times:
    """
    Attributes:
        forward, backward ([`TimeFit`]): of one module on one device. The backward has no recomputation in it.
        outside_forward, outside_backward (`float`): of their `per_token`, what is spent outside tensor regions (norms,
            residuals), and so is divided among tensor ranks under Megatron-SP.
    """

    forward: TimeFit
    backward: TimeFit
    outside_forward: float = 0.0
    outside_backward: float = 0.0


@dataclass(frozen=True, kw_only=True)
class LayerProfile:
    """One kind of layer.

    Attributes:
        weights (`tuple[WeightShape, ...]`): of the layer.
        times (`Mapping[int, Times]`): by tensor degree, of the slice that one tensor rank has.
        saved_bytes (`Mapping[tuple[int, bool, int], float]`): kept from forward to backward, for each token that the
            layer's tensor and Ulysses ranks share, on one of them, by (tensor, megatron_sp, ulysses).
        working_bytes (`Mapping`): beside these, at most, while its forward or backward runs; likewise. Without weights
            and their gradients; with the gradients that go in and out.
        regions (`int`): tensor regions, each entered and left once.
        saves_after_last_region (`bool`): see [`~planner.shapes.ModelShape`].
    """

    weights: tuple[WeightShape, ...]
    times: Mapping[int, Times]
    saved_bytes: Mapping[tuple[int, bool, int], float]
    working_bytes: Mapping[tuple[int, bool, int], float] = field(default_factory=dict)
    regions: int = 2
    saves_after_last_region: bool = False


@dataclass(frozen=True, kw_only=True)
class EndProfile:
    """The embedding, or the final norm and the head with the loss.

    Attributes:
        weights (`tuple[WeightShape, ...]`): of one unit; shared ones are in both ends.
        times (`Mapping[int, Times]`): by tensor degree.
        saved_bytes (`Mapping[int, float]`): for each token that the tensor ranks share, on one of them, by their
            number.
        working_bytes (`Mapping[int, float]`): beside these for each token, as long as forward or backward runs.
        saved_fixed_bytes, working_fixed_bytes (`Mapping[int, float]`): beside these, whatever the number of tokens: the
            head keeps the gradient of its weight, and works on the logits of 1,024 tokens at a time.
    """

    weights: tuple[WeightShape, ...]
    times: Mapping[int, Times]
    saved_bytes: Mapping[int, float]
    working_bytes: Mapping[int, float] = field(default_factory=dict)
    saved_fixed_bytes: Mapping[int, float] = field(default_factory=dict)
    working_fixed_bytes: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ModelProfile:
    """A causal language model.

    Attributes:
        name (`str`): of the model.
        hidden, heads, kv_heads, head_dim (`int`): as in [`~planner.shapes.ModelShape`].
        dtype (`str`): in which it computes: "fp32" or "bf16".
        kinds (`tuple[LayerProfile, ...]`): the distinct kinds of layers.
        layers (`tuple[int, ...]`): index into `kinds` of each layer.
        embedding, head ([`EndProfile`]): the head has the final norm.
        tied (`bool`): whether they share one weight.
        max_length (`int`, *optional*): positions that the model has.
        optimizer_ms_per_element (`float`): of an update, for each element of a rank.
        assumed, made (`Mapping[str, str]`): as in [`~profiler.hardware_profile.HardwareProfile`].
    """

    name: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    kinds: tuple[LayerProfile, ...]
    layers: tuple[int, ...]
    embedding: EndProfile
    head: EndProfile
    tied: bool
    max_length: int | None = None
    optimizer_ms_per_element: float = 0.0
    assumed: Mapping[str, str] = field(default_factory=dict)
    made: Mapping[str, str] = field(default_factory=dict)

    @property
    def element_bytes(self) -> int:
        """Bytes of one element of an activation."""
        return {"fp32": 4, "bf16": 2}[self.dtype]
