# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""What a model costs, as far as planning needs it: times and saved bytes of its layers and ends, sizes of its weights.

Importing this module needs neither torch nor transformers.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from galvatron_hf.models.shape import WeightShape
from galvatron_hf.plan.serialization import write_file
from galvatron_hf.profiler.profiles.hardware import HardwareProfile


if TYPE_CHECKING:
    from transformers import PreTrainedConfig


CALIBRATION_FACTORS = ("computing", "communication", "synchronization", "weights", "sending")


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
        forward_outside_tp, backward_outside_tp (`float`): of their `per_token`, what is spent outside tensor regions
            (norms, residuals), and so is divided among tensor ranks under Megatron-SP.
        forward_after_last_saved (`float`): of the forward's `per_token`, what comes behind the last tensor that is
        saved for the
            backward (of most layers, their last matrix product). Recomputing leaves it out.
        recompute_fixed (`float`): ms of full recompute beside the forward that it repeats, whatever the number of
            tokens: a checkpoint's bookkeeping.
    """

    forward: TimeFit
    backward: TimeFit
    forward_outside_tp: float = 0.0
    backward_outside_tp: float = 0.0
    forward_after_last_saved: float = 0.0
    recompute_fixed: float = 0.0


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
        recompute_bytes (`Mapping`): kept under full recompute, likewise; where nothing is said, the layer's input.
        regions (`int`): tensor regions, each entered and left once.
        saves_after_last_region (`bool`): see [`~model_shape.ModelShape`].
    """

    weights: tuple[WeightShape, ...]
    times: Mapping[int, Times]
    saved_bytes: Mapping[tuple[int, bool, int], float]
    working_bytes: Mapping[tuple[int, bool, int], float] = field(default_factory=dict)
    recompute_bytes: Mapping[tuple[int, bool, int], float] = field(default_factory=dict)
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
        saved_fixed_bytes (`Mapping[int, float]`): kept beside these, whatever the number of tokens: the head keeps the
            gradient of its weight, unless several micro-batches are in flight.
        working_bytes, working_fixed_bytes (`Mapping[int, float]`): what forward or backward needs beside what is kept:
            the larger of the one for each token and of the other, the logits of 1,024 tokens in all their forms.
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
        hidden, heads, kv_heads, head_dim (`int`): as in [`~model_shape.ModelShape`].
        dtype (`str`): in which it computes: "fp32" or "bf16".
        kinds (`tuple[LayerProfile, ...]`): the distinct kinds of layers.
        layers (`tuple[int, ...]`): index into `kinds` of each layer.
        embedding, head ([`EndProfile`]): the head has the final norm.
        tied (`bool`): whether they share one weight.
        max_length (`int`, *optional*): positions that the model has.
        optimizer_ms_per_element, optimizer_ms_per_weight (`float`): of an update, with the norm of the gradients and
            their clipping, for each element of a rank and for each weight, however small.
        adding_ms_per_element (`float`): of adding a micro-batch's gradients to those before, for each element of a
            rank.
        calibration_factors (`Mapping[str, float]`): what whole steps of training take over the sum of their parts,
            where that was measured: of "computing"; of what is sent by "communication" (of activations, by tensor and
            Ulysses ranks and changes of layout), "synchronization" (of copies), "weights" (gathered, and their
            gradients scattered) and "sending" (between stages).
        collective_launch_ms (`float`): that ranks wait for each other, beside this, before each collective of
            activations or weights, where that was measured.
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
    optimizer_ms_per_weight: float = 0.0
    adding_ms_per_element: float = 0.0
    calibration_factors: Mapping[str, float] = field(default_factory=dict)
    collective_launch_ms: float = 0.0
    assumed: Mapping[str, str] = field(default_factory=dict)
    made: Mapping[str, str] = field(default_factory=dict)

    @property
    def element_bytes(self) -> int:
        """Bytes of one element of an activation."""
        return {"fp32": 4, "bf16": 2}[self.dtype]

    @classmethod
    def from_json(cls, source: str | os.PathLike | Mapping[str, Any]) -> ModelProfile:
        """
        Reads a profile.

        Args:
            source (`str`, `os.PathLike` or `Mapping`): The path of a JSON file, JSON text, or the parsed object.

        Raises:
            ValueError: in one sentence, for anything that is not a profile.
        """
        from galvatron_hf.profiler.profiles.model_json import read_profile

        return read_profile(source)

    def to_json(self, path: str | os.PathLike | None = None) -> str:
        """The profile as JSON text; also written to `path` if given."""
        from galvatron_hf.profiler.profiles.model_json import write_profile

        text = write_profile(self)
        if path is not None:
            write_file(path, text)
        return text

    @classmethod
    def from_config(
        cls,
        config: PreTrainedConfig | str | os.PathLike,
        hardware: HardwareProfile,
        dtype: str = "bf16",
        **options: Any,
    ) -> ModelProfile:
        """
        Counts a model's work from its configuration, without weights and without a device.

        Args:
            config (`PreTrainedConfig`, `str` or `os.PathLike`): The configuration, its file or the folder of it.
            hardware ([`HardwareProfile`]): Its rate of matrix products tells the times.
            dtype (`str`, defaults to `"bf16"`): In which layers compute: "fp32" or "bf16".
            **options: Of [`~profiler.tracing.profile_from_config`].

        Raises:
            ValueError: in one sentence, for a model that the runtime does not know.
        """
        from galvatron_hf.profiler.trace.tracing import profile_from_config, read_config

        return profile_from_config(read_config(config), hardware, dtype, **options)

    @classmethod
    def from_galvatron(cls, folder: str | os.PathLike, **options: Any) -> ModelProfile:
        """Reads a folder of Galvatron's own JSON, see [`galvatron_hf.interop.galvatron.model`]."""
        from galvatron_hf.interop.galvatron.model import read_galvatron_model

        return read_galvatron_model(folder, **options)
