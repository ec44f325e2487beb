# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Counts the cost of a model from its configuration, by running one layer of each kind on fake tensors."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from galvatron_hf.models.adapter import base_model
from galvatron_hf.models.families import adapter_for
from galvatron_hf.models.shape import ModelShape
from galvatron_hf.parallel.data_parallel.sharding import DTYPES
from galvatron_hf.plan import LayerStrategy
from galvatron_hf.plan.layout import HEAD_CHUNK_TOKENS
from galvatron_hf.profiler.profiles.hardware import DEVICES, HardwareProfile
from galvatron_hf.profiler.profiles.layers import (
    EndProfile,
    ExpertsProfile,
    ExpertTimes,
    LayerProfile,
    TimeFit,
    Times,
)
from galvatron_hf.profiler.profiles.model import EXPERT_IMBALANCE, ModelProfile
from galvatron_hf.profiler.trace.counting import Counts, OperationCount, count
from galvatron_hf.profiler.trace.isolated_layers import IsolatedLayers, empty_model, layer_kinds, one_of_each
from galvatron_hf.profiler.trace.shapes import model_shape_from_model, regions_of_kinds
from galvatron_hf.utils.compat import FakeTensorMode, experts_on_shapes


# FLOP/s of a layer over those of a large matrix product.
EFFICIENCY = 0.85
# Memory bandwidth in bytes/s by device name, from data sheets.
BANDWIDTHS = {"a100": 2.04e12, "h100": 3.35e12, "h200": 4.8e12, "4090": 1.01e12}
# FLOPs per byte of other devices: GPUs, and one CPU core.
FLOPS_PER_BYTE = {"gpu": 200.0, "cpu": 20.0}
CPU_FLOPS = 1e13  # FLOP/s that no CPU core reaches
IMBALANCE_TEXT = (
    "most rows at a rank over their mean as in trained routers of 8 experts, for degrees that expert_imbalance lacks"
)
ADAM_BYTES = 7 * 4  # AdamW reads a weight, its gradient and two moments, and writes all but the gradient, in fp32
ADDING_BYTES = 3 * 4  # bytes moved per element by a sum of two gradients in fp32

END_TOKENS = (HEAD_CHUNK_TOKENS, 2 * HEAD_CHUNK_TOKENS)  # tokens in the traces of embedding and head

Strategy = tuple[int, bool, int]  # tensor, megatron_sp, ulysses


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Holds the assumed rate of matrix products and attention, and the memory bandwidth of the other operations."""

    flops_per_ms: float
    bytes_per_ms: float

    def ms(self, work: OperationCount) -> float:
        return work.flops / self.flops_per_ms + work.moved_bytes / self.bytes_per_ms


def profile_from_config(
    config: PreTrainedConfig | str | os.PathLike,
    hardware: HardwareProfile,
    dtype: str = "bf16",
    *,
    length: int | None = None,
    packed: bool = True,
    max_degree: int = 64,
    efficiency: float = EFFICIENCY,
) -> ModelProfile:
    """Counts the work of a model from its configuration, without weights and without a device.

    Args:
        config (`PreTrainedConfig`, `str` or `os.PathLike`): Configuration of a causal language model of a known
            family, its file, or the folder of the file.
        hardware ([`HardwareProfile`]): Gives the rate of matrix products, from which the times follow.
        dtype (`str`, defaults to `"bf16"`): Number format of the layers' computation: "fp32" or "bf16".
        length (`int`, *optional*): Tokens of the longest document; by default 4,096, or the positions of the model.
        packed (`bool`, defaults to `True`): Whether micro-batches are packed documents, or rows without padding.
        max_degree (`int`, defaults to 64): Largest product of tensor and Ulysses degree of a layer.
        efficiency (`float`, *optional*): FLOP/s of a layer over those of a large matrix product.

    Raises:
        ValueError: If the configuration is missing, its family is unknown, or its sizes do not fit together.
    """
    config = read_config(config)
    model = empty_model(config)
    longest = positions(model)
    length = min(length or 4096, longest or sys.maxsize)
    if dtype not in hardware.flops_per_s:
        raise ValueError(
            f"The hardware profile {hardware.name!r} has no rate for {dtype!r}; use one of "
            f"{', '.join(sorted(hardware.flops_per_s))}, or profile the machine."
        )
    flops = hardware.flops_per_s[dtype] * efficiency
    bandwidth = memory_bandwidth(hardware)
    speed = Speed(flops_per_ms=flops / 1e3, bytes_per_ms=bandwidth / 1e3)
    assumed = {
        **hardware.assumed,
        "times": f"counted FLOPs at {efficiency:g} of the rate of matrix products and other operations' bytes at "
        f"{bandwidth / 1e9:,.0f} GB/s; nothing was measured",
    }
    try:
        with torch.random.fork_rng(devices=[]):
            made = describe(length, packed) | {key: hardware.made[key] for key in DEVICES if key in hardware.made}
            counts = CountedModel(model, DTYPES[dtype], length, packed)
            return profile_of(
                model,
                dtype,
                counts,
                counts.times(max_degree, speed),
                max_degree=max_degree,
                optimizer_ms=(ADAM_BYTES / speed.bytes_per_ms, 0.0),
                adding_ms=ADDING_BYTES / speed.bytes_per_ms,
                assumed=assumed,
                made=made,
            )
    except ValueError:
        raise
    except Exception as error:  # some families build models of odd sizes that cannot run
        raise ValueError(
            f"The model of this {type(config).__name__} does not run ({type(error).__name__}: "
            f"{' '.join(str(error).split())[:80]}); give a configuration whose sizes fit together."
        ) from error


def memory_bandwidth(hardware: HardwareProfile) -> float:
    """Returns the assumed memory bandwidth of a device in bytes/s."""
    fastest = max(hardware.flops_per_s.values())
    guess = fastest / FLOPS_PER_BYTE["gpu" if fastest > CPU_FLOPS else "cpu"]
    return next((rate for name, rate in BANDWIDTHS.items() if name in hardware.name.lower()), guess)


def read_config(source: PreTrainedConfig | str | os.PathLike) -> PreTrainedConfig:
    """Returns a configuration, or reads it from a folder or `config.json`; raises `ValueError` if there is none."""
    if isinstance(source, PreTrainedConfig):
        return source
    if not os.path.exists(source):
        raise ValueError(f"{str(source)!r} is no folder and no file: give a folder with a config.json, or the file.")
    try:
        return AutoConfig.from_pretrained(source, local_files_only=True)
    except Exception as error:  # configuration classes raise various errors
        problem = " ".join(str(error).split())[:120]
        raise ValueError(
            f"{str(source)!r} has no configuration that transformers knows ({problem}); give a config.json."
        ) from None


@dataclass(frozen=True, kw_only=True)
class ExpertPasses:
    """Holds the times of [`ExpertTimes`]."""

    forward: TimeFit
    backward: TimeFit
    received_forward: float
    received_backward: float


@dataclass(frozen=True, kw_only=True)
class PartTimes:
    """Holds times by tensor degree: of each kind of layer, the embedding and the head; and the costs of experts of
    each kind of layer by expert degree.
    """

    layers: list[dict[int, Times]]
    embedding: dict[int, Times]
    head: dict[int, Times]
    experts: list[ExpertsProfile | None]


def profile_of(
    model: PreTrainedModel,
    dtype: str,
    counts: CountedModel,
    times: PartTimes,
    *,
    max_degree: int,
    optimizer_ms: tuple[float, float],
    adding_ms: float,
    assumed: dict[str, str],
    made: dict[str, str],
) -> ModelProfile:
    """Returns the profile of counted bytes and of counted or measured times. `optimizer_ms` is the time of an update
    for each element and for each weight; `adding_ms` is the time of adding gradients for each element.
    """
    shape, kinds = model_shape_from_model(model, counts.small), layer_kinds(model)
    regions, has_experts = regions_of_kinds(model), any(experts is not None for experts in times.experts)
    bytes_of = counts.layer_bytes(max_degree)
    ends = counts.end_bytes(sorted(times.embedding))
    return ModelProfile(
        name=os.path.basename(model.config.name_or_path.rstrip("/")) or model.config.model_type,
        hidden=shape.hidden,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        dtype=dtype,
        kinds=tuple(
            LayerProfile(
                weights=shape.layers[kinds.index(kind)],
                times=times.layers[kind],
                saved_bytes={strategy: found[kind][0] for strategy, found in bytes_of.items()},
                working_bytes={strategy: found[kind][1] for strategy, found in bytes_of.items()},
                regions=regions[kind],
                saves_after_last_region=shape.saves_after_last_region,
                experts=times.experts[kind],
            )
            for kind in range(max(kinds) + 1)
        ),
        layers=kinds,
        embedding=EndProfile(weights=shape.embedding, times=times.embedding, **ends["embedding"]),
        head=EndProfile(weights=_head_weights(shape), times=times.head, **ends["head"]),
        tied=shape.tied,
        stacks=adapter_for(model).stack_sizes(model),
        max_length=positions(model),
        optimizer_ms_per_element=optimizer_ms[0],
        optimizer_ms_per_weight=optimizer_ms[1],
        adding_ms_per_element=adding_ms,
        router_loss=adapter_for(model).adds_router_loss(model),
        assumed=assumed | ({EXPERT_IMBALANCE: IMBALANCE_TEXT} if has_experts else {}),
        made=made,
    )


def _head_weights(shape: ModelShape) -> tuple:
    """Returns the weights of the final norm and of the head; a tied head has the weight of the embedding."""
    return (*shape.final_norm, *(shape.embedding[:1] if shape.tied else ()), *shape.head)


class CountedModel:
    """Counts the operations and bytes of a model's parts on one rank under any strategy. `model` may be on the meta
    device and is not changed. Traced documents have `length` tokens, rounded up to a multiple of 128. `device` chooses
    the operators: those of a GPU can be traced where PyTorch finds one.
    """

    def __init__(
        self, model: PreTrainedModel, dtype: torch.dtype, length: int, packed: bool, device: torch.device | str = "cpu"
    ):
        self.small, self.dtype, self.packed = one_of_each(model), dtype, packed
        self.device = torch.device(device)
        self.length = -(-length // 128) * 128  # what sequence ranks can share evenly
        if any(self.expert_counts()):
            self.small.set_experts_implementation("grouped_mm")  # others ask for values, which fakes have not
        self._parts: dict[tuple, IsolatedLayers] = {}
        self._layers: dict[tuple, list[Counts]] = {}
        self._ends: dict[tuple, dict[str, Counts]] = {}

    def parts(self, strategy: LayerStrategy, vocabulary: int = 1) -> IsolatedLayers:
        """Returns the parts on fake tensors; raises `ValueError` if the strategy does not fit the model."""
        key = strategy, vocabulary
        if key not in self._parts:
            parts = IsolatedLayers.from_model(self.small, strategy, vocabulary, self.packed)
            self.mode = FakeTensorMode(allow_non_fake_inputs=True)
            with self.mode:
                parts.give_memory(self.device, self.dtype)
            self._parts = {key: parts}  # one at a time
        return self._parts[key]

    def expert_counts(self) -> list[int]:
        """Returns the number of experts of each kind of layer, 0 for a dense one."""
        return adapter_for(self.small).expert_counts(self.small)

    def expert_degrees(self, max_degree: int) -> list[int]:
        """Returns the expert degrees, powers of two, that share the experts of all layers that have some."""
        counts = [count for count in self.expert_counts() if count]
        degrees = (2**power for power in range(max_degree.bit_length()))
        return [degree for degree in degrees if counts and not any(count % degree for count in counts)]

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        """Lets operators run on shapes alone while the body runs; [`CountedModel.parts`] was called before."""
        with self.mode, experts_on_shapes():
            yield

    def top_k(self) -> list[int]:
        """Returns for each kind of layer how many experts a token chooses, 0 for a dense one."""
        parts = self.parts(LayerStrategy())
        with self.tracing():
            return parts.top_k(parts.micro_batch(self.length, self.length))

    def experts(self, degree: int, kind: int, top_k: int, received: int = 1) -> Counts:
        """Returns the counts of the experts of one kind of layer; see [`IsolatedLayers.experts`]."""
        parts = self.parts(LayerStrategy(expert=degree))
        with self.tracing():
            return count(parts.experts(kind, self.length, top_k, received))

    def expert_profiles(
        self, max_degree: int, times: Callable[[int, int, int], ExpertPasses]
    ) -> list[ExpertsProfile | None]:
        """Returns the costs of experts of each kind of layer. `times` gives those of a kind, a degree and a number of
        choices of a token.
        """
        degrees = self.expert_degrees(max_degree)
        if not degrees:
            return [None] * len(self.expert_counts())
        found: list[ExpertsProfile | None] = []
        for kind, (count_of_kind, top_k) in enumerate(zip(self.expert_counts(), self.top_k(), strict=True)):
            by_degree = {degree: self._expert_times(degree, kind, top_k, times) for degree in degrees if count_of_kind}
            experts = ExpertsProfile(count=count_of_kind, top_k=top_k, degrees=by_degree) if count_of_kind else None
            found.append(experts)
        return found

    def _expert_times(
        self, degree: int, kind: int, top_k: int, times: Callable[[int, int, int], ExpertPasses]
    ) -> ExpertTimes:
        even, passes = self.experts(degree, kind, top_k), times(kind, degree, top_k)
        more = self.experts(degree, kind, top_k, received=2) if degree > 1 else even
        return ExpertTimes(
            forward=passes.forward,
            backward=passes.backward,
            saved_bytes=even.saved_bytes / self.length,
            working_bytes=max(0, even.working_bytes) / self.length,
            received_forward=passes.received_forward,
            received_backward=passes.received_backward,
            received_saved_bytes=max(0, more.saved_bytes - even.saved_bytes) / self.length,
            received_working_bytes=max(0, more.working_bytes - even.working_bytes) / self.length,
        )

    def counted_expert_times(self, speed: Speed) -> Callable[[int, int, int], ExpertPasses]:
        """Returns the function of [`CountedModel.expert_profiles`] for counted operations at a speed."""

        def times(kind: int, degree: int, top_k: int) -> ExpertPasses:
            even = self.experts(degree, kind, top_k)
            more = self.experts(degree, kind, top_k, received=2) if degree > 1 else even
            forward, backward = (speed.ms(getattr(even, way)) / self.length for way in ("forward", "backward"))
            again = [speed.ms(getattr(more, way)) / self.length for way in ("forward", "backward")]
            return ExpertPasses(
                forward=TimeFit(per_token=forward),
                backward=TimeFit(per_token=backward),
                received_forward=max(0.0, again[0] - forward),
                received_backward=max(0.0, again[1] - backward),
            )

        return times

    def layers(self, strategy: LayerStrategy, tokens: int, length: int) -> list[Counts]:
        key = strategy, tokens, length
        if key not in self._layers:
            parts = self.parts(strategy)
            with self.tracing():
                self._layers[key] = [count(part) for part in parts.layers(parts.micro_batch(tokens, length))]
        return self._layers[key]

    def outside(self, strategy: LayerStrategy) -> list[Counts]:
        """Returns the counts of each kind of layer without its tensor-parallel regions."""
        parts = self.parts(strategy)
        with self.tracing(), parts.without_regions():
            return [count(part) for part in parts.layers(parts.micro_batch(self.length, self.length))]

    def ends(self, tensor: int, tokens: int) -> dict[str, Counts]:
        if (tensor, tokens) not in self._ends:
            parts = self.parts(LayerStrategy(), tensor)
            with self.tracing():
                batch = parts.micro_batch(tokens, tokens // tensor)
                found = {"embedding": count(parts.embedding(batch)), "head": count(parts.head(batch))}
            self._ends[tensor, tokens] = found
        return self._ends[tensor, tokens]

    def layer_bytes(self, max_degree: int) -> dict[Strategy, list[tuple[float, float]]]:
        """Returns (saved, working) bytes per token of each kind of layer, by strategy."""
        found = {}
        for strategy in self.strategies(max_degree):
            counts = self.layers(strategy, self.length, self.length)
            found[strategy.tensor, strategy.megatron_sp, strategy.ulysses] = [
                (each.saved_bytes / self.length, each.working_bytes / self.length) for each in counts
            ]
        return found

    def strategies(self, max_degree: int) -> Iterator[LayerStrategy]:
        """Yields the strategies with power-of-two degrees that fit the model."""
        degrees = [2**power for power in range(max_degree.bit_length())]
        for tensor, megatron_sp, ulysses in itertools.product(degrees, (False, True), degrees):
            ranks = tensor * ulysses
            if ranks > max_degree or self.length % ranks or (megatron_sp and tensor == 1):
                continue
            strategy = LayerStrategy(tensor=tensor, megatron_sp=megatron_sp, ulysses=ulysses)
            try:
                self.parts(strategy)
            except ValueError:
                continue
            yield strategy

    def tensor_degrees(self, max_degree: int) -> list[int]:
        return [each.tensor for each in self.strategies(max_degree) if not each.megatron_sp and each.ulysses == 1]

    def times(self, max_degree: int, speed: Speed) -> PartTimes:
        kinds = range(len(adapter_for(self.small).layers(self.small)))
        layers: list[dict[int, Times]] = [{} for _ in kinds]
        for tensor in self.tensor_degrees(max_degree):
            strategy = LayerStrategy(tensor=tensor)
            whole = self.layers(strategy, self.length, self.length)
            halves = self.layers(strategy, self.length, self.length // 2)
            for kind, outside in zip(kinds, self.outside(strategy), strict=True):
                forward, backward = (
                    _fit(speed.ms(getattr(whole[kind], name)), speed.ms(getattr(halves[kind], name)), self.length)
                    for name in ("forward", "backward")
                )
                layers[kind][tensor] = Times(
                    forward=forward,
                    backward=backward,
                    forward_outside_tp=speed.ms(outside.forward) / self.length,
                    backward_outside_tp=speed.ms(outside.backward) / self.length,
                    forward_after_last_saved=speed.ms(whole[kind].forward_after_last_saved) / self.length,
                )
        ends = {tensor: self._end_times(tensor, speed) for tensor in self.end_degrees(max_degree)}
        return PartTimes(
            layers=layers,
            embedding={tensor: found["embedding"] for tensor, found in ends.items()},
            head={tensor: found["head"] for tensor, found in ends.items()},
            experts=self.expert_profiles(max_degree, self.counted_expert_times(speed)),
        )

    def end_degrees(self, max_degree: int) -> list[int]:
        """Returns the tensor degrees of embedding and head, up to one token of the vocabulary per rank."""
        degrees = (2**power for power in range(max_degree.bit_length()))
        return [
            degree for degree in degrees if degree <= adapter_for(self.small).embeddings(self.small)[0].weight.shape[0]
        ]

    def _end_times(self, tensor: int, speed: Speed) -> dict[str, Times]:
        first, second = END_TOKENS
        few, many = self.ends(tensor, first), self.ends(tensor, second)
        found = {}
        for name in ("embedding", "head"):
            fits = []
            for direction in ("forward", "backward"):
                short, long = (speed.ms(getattr(counts[name], direction)) for counts in (few, many))
                slope, rest = _line(short, long, first, second)
                fits.append(TimeFit(per_token=slope, fixed=rest))
            found[name] = Times(forward=fits[0], backward=fits[1])
        return found

    def end_bytes(self, degrees: Sequence[int]) -> dict[str, dict[str, dict[int, float]]]:
        """Returns the bytes of [`EndProfile`] by field and tensor degree, for embedding and head."""
        fields = ("saved_bytes", "saved_fixed_bytes", "working_bytes", "working_fixed_bytes")
        found = {name: {field: {} for field in fields} for name in ("embedding", "head")}
        for tensor in degrees:
            first, second = END_TOKENS
            few, many = self.ends(tensor, first), self.ends(tensor, second)
            for name, values in found.items():
                short, long = few[name], many[name]
                saved = _line(short.saved_bytes, long.saved_bytes, first, second)
                # The forward needs the larger of a chunk's and all tokens' bytes, the backward all tokens'.
                chunk = short.forward_peak_bytes - short.saved_bytes
                growth = (long.forward_peak_bytes - long.saved_bytes - chunk) / (second - first)
                each = max(growth, (long.backward_peak_bytes - long.saved_bytes) / second)
                for field, value in zip(fields, (*saved, each, chunk), strict=True):
                    values[field][tensor] = value
        return found


def describe(length: int, packed: bool) -> dict[str, str]:
    """Returns document length and kind of micro-batches for a profile's `made`."""
    return {"longest document": f"{length} tokens", "micro-batches": "packed" if packed else "rows"}


def _line(short: float, long: float, few: int, many: int) -> tuple[float, float]:
    """Returns slope and intercept of the line through two points, each at least 0."""
    slope = max(0.0, (long - short) / (many - few))
    return slope, max(0.0, short - slope * few)


def _fit(whole: float, halves: float, length: int) -> TimeFit:
    """Fits times of one document of `length` and of two documents of half of it, in tokens and squared lengths."""
    per_square = max(0.0, (whole - halves) / (length * length / 2))
    return TimeFit(per_token=(whole - per_square * length * length) / length, per_square=per_square)


def positions(model: PreTrainedModel) -> int | None:
    """Returns the number of positions of the model; None if it is unlimited."""
    config = base_model(model).config
    return getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
