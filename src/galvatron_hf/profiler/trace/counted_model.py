# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Counts the operations and bytes of a model's parts, by running one layer of each kind on fake tensors."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace

import torch
from transformers import PreTrainedModel

from galvatron_hf.models.families import adapter_for
from galvatron_hf.parallel.layers.varlen_attention import kernels_of_gpus
from galvatron_hf.plan import LayerStrategy
from galvatron_hf.plan.layout import HEAD_CHUNK_TOKENS
from galvatron_hf.profiler.profiles.attention_rates import AttentionRates
from galvatron_hf.profiler.profiles.layers import ExpertsProfile, ExpertTimes, TimeFit, Times
from galvatron_hf.profiler.trace.counting import AttentionKernel, Counts, OperationCount, count
from galvatron_hf.profiler.trace.isolated_layers import IsolatedLayers
from galvatron_hf.profiler.trace.isolated_rows import isolated_layers
from galvatron_hf.profiler.trace.small_models import image_positions, keep_rotary_frequencies, one_of_each, positions
from galvatron_hf.utils.compat import FakeTensorMode, experts_on_shapes


END_TOKENS = HEAD_CHUNK_TOKENS  # fewest tokens in the traces of embedding and head

Strategy = tuple[int, bool, int]  # tensor, megatron_sp, ulysses


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Holds the assumed rates of a device. What products compute and write, and what other operations read and write,
    takes time one after the other.

    Attributes:
        flops_per_ms (`float`): Rate of matrix products.
        bytes_per_ms (`float`): Memory bandwidth.
        attention ([`AttentionRates`], *optional*): Rates of fused attention; by default that of products.
        launch_ms (`float`): Time from one operation to the next that the host needs to issue it.
        compiled (`bool`): Whether torch.compile fuses the layers' operations.
    """

    flops_per_ms: float
    bytes_per_ms: float
    attention: AttentionRates | None = None
    launch_ms: float = 0.0
    compiled: bool = False

    def ms(self, work: OperationCount) -> float:
        """Returns the time of the device's work."""
        attention = sum(flops / self._attention_per_ms(kernel) for kernel, flops in work.attention_flops.items())
        moved = work.fused_bytes if self.compiled else work.moved_bytes
        return work.product_flops / self.flops_per_ms + attention + moved / self.bytes_per_ms

    def least_ms(self, work: OperationCount) -> float:
        """Returns the time that the host needs to issue the operations."""
        return (work.fused_launches if self.compiled else work.launches) * self.launch_ms

    def _attention_per_ms(self, kernel: AttentionKernel) -> float:
        return self.flops_per_ms if self.attention is None else self.attention.flops_per_s(**asdict(kernel)) / 1e3


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


class CountedModel:
    """Counts the operations and bytes of a model's parts on one rank under any strategy. `model` may be on the meta
    device and is not changed. Traced documents have `length` tokens, rounded up to a multiple of 128. `device` chooses
    the operators: those of a GPU can be traced where PyTorch finds one. On a CPU packed rows take the kernels of a GPU
    if `gpu_kernels`. A row has `length_ratio` tokens in the last of two stacks for each in the first.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        dtype: torch.dtype,
        length: int,
        packed: bool,
        device: torch.device | str = "cpu",
        length_ratio: float = 1.0,
        gpu_kernels: bool = False,
    ):
        self.gpu_kernels = gpu_kernels
        self.small, self.dtype, self.packed = one_of_each(model), dtype, packed
        keep_rotary_frequencies(self.small)
        self.device, self.length_ratio = torch.device(device), length_ratio
        adapter = adapter_for(self.small)
        of_last = [place.stack is adapter.stacks[-1] for place in adapter.places(self.small)]
        self.length_ratios = [length_ratio if last else 1.0 for last in of_last]  # of each kind of layer
        self.whole_rows = adapter.structure is not None
        # What sequence ranks can share evenly, if learned positions reach so far.
        even, most = -(-length // 128) * 128, positions(self.small)
        self.length = length if self.whole_rows and (most is None or even > most) else even
        self.of_image = image_positions(self.small)  # tokens of every row, if the model takes images
        self.longest, self.length = self.of_image or length, self.of_image or self.length
        few = -(-END_TOKENS // (self.of_image or 1)) * (self.of_image or 1)
        self.end_tokens = few, 2 * few  # in the traces of embedding and head
        if any(self.expert_counts()):
            self.small.set_experts_implementation("grouped_mm")  # others ask for values, which fakes have not
        self._parts: dict[tuple, IsolatedLayers] = {}
        self._layers: dict[tuple, list[Counts]] = {}
        self._ends: dict[tuple, dict[str, Counts]] = {}

    def parts(self, strategy: LayerStrategy, vocabulary: int = 1) -> IsolatedLayers:
        """Returns the parts on fake tensors; raises `ValueError` if the strategy does not fit the model."""
        key = strategy, vocabulary
        if key not in self._parts:
            options = dict(packed=self.packed, length_ratio=self.length_ratio)
            parts = isolated_layers(self.small, strategy, vocabulary, **options)
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
        with self.mode, experts_on_shapes(), kernels_of_gpus() if self.gpu_kernels else contextlib.nullcontext():
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

    def tokens_of(self, strategy: LayerStrategy, length: int) -> int:
        """Returns the tokens of a trace of documents of `length` tokens. Each rank has an image: positions are added
        only to be shared.
        """
        return length * (1 if self.of_image is None else strategy.tensor * strategy.ulysses)

    def _length_of_rows(self, strategy: LayerStrategy) -> int:
        """Returns the length of a document whose bytes are counted. Rows have no more positions than their ranks add,
        because scores that are kept grow with the square of the length.
        """
        ranks = strategy.tensor * strategy.ulysses
        return self.length if self.packed else min(self.length, -(-self.longest // ranks) * ranks)

    def layers(self, strategy: LayerStrategy, tokens: int, length: int) -> list[Counts]:
        key = strategy, tokens, length
        if key not in self._layers:
            parts = self.parts(strategy)
            with self.tracing():
                self._layers[key] = [count(part) for part in parts.layers(parts.micro_batch(tokens, length))]
        return self._layers[key]

    def outside(self, strategy: LayerStrategy) -> list[Counts]:
        """Returns the counts of each kind of layer without its tensor-parallel regions."""
        parts, tokens = self.parts(strategy), self.tokens_of(strategy, self.length)
        with self.tracing(), parts.without_regions():
            return [count(part) for part in parts.layers(parts.micro_batch(tokens, self.length))]

    def ends(self, tensor: int, tokens: int) -> dict[str, Counts]:
        if (tensor, tokens) not in self._ends:
            parts = self.parts(LayerStrategy(), tensor)
            with self.tracing():
                length = math.gcd(tokens, self.length) if self.whole_rows else tokens // tensor
                batch = parts.micro_batch(tokens, length, 1.0)
                found = {"embedding": count(parts.embedding(batch)), "head": count(parts.head(batch))}
            self._ends[tensor, tokens] = found
        return self._ends[tensor, tokens]

    def layer_bytes(self, max_degree: int) -> dict[Strategy, list[tuple[float, float]]]:
        """Returns (saved, working) bytes per token of each kind of layer, by strategy."""
        found = {}
        for strategy in self.strategies(max_degree):
            length = self._length_of_rows(strategy)
            traced = self.tokens_of(strategy, length)
            counts = self.layers(strategy, traced, length)
            tokens = [traced * ratio for ratio in self.length_ratios]
            found[strategy.tensor, strategy.megatron_sp, strategy.ulysses] = [
                (each.saved_bytes / own, each.working_bytes / own) for each, own in zip(counts, tokens, strict=True)
            ]
        return found

    def strategies(self, max_degree: int) -> Iterator[LayerStrategy]:
        """Yields the strategies with power-of-two degrees that fit the model."""
        degrees = [2**power for power in range(max_degree.bit_length())]
        for tensor, megatron_sp, ulysses in itertools.product(degrees, (False, True), degrees):
            ranks = tensor * ulysses
            uneven = self.of_image is None and self.length % ranks  # the runtime adds positions
            if ranks > max_degree or uneven or (megatron_sp and tensor == 1):
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
            traced = self.tokens_of(strategy, self.length)
            whole = self.layers(strategy, traced, self.length)
            # All images have the same positions, so that nothing depends on their number.
            halves = whole if self.of_image else self.layers(strategy, traced, self.length // 2)
            for kind, outside in zip(kinds, self.outside(strategy), strict=True):
                tokens = traced * self.length_ratios[kind]
                forward, backward = (
                    replace(
                        _fit(speed.ms(getattr(whole[kind], name)), speed.ms(getattr(halves[kind], name)), tokens),
                        least=speed.least_ms(getattr(whole[kind], name)),
                    )
                    for name in ("forward", "backward")
                )
                layers[kind][tensor] = Times(
                    forward=forward,
                    backward=backward,
                    forward_outside_tp=speed.ms(outside.forward) / tokens,
                    backward_outside_tp=speed.ms(outside.backward) / tokens,
                    forward_after_last_saved=speed.ms(whole[kind].forward_after_last_saved) / tokens,
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
        if self.whole_rows:
            return [1]
        rows = adapter_for(self.small).embeddings(self.small)[0].weight.shape[0]
        return [degree for degree in (2**power for power in range(max_degree.bit_length())) if degree <= rows]

    def _end_times(self, tensor: int, speed: Speed) -> dict[str, Times]:
        first, second = self.end_tokens
        few, many = self.ends(tensor, first), self.ends(tensor, second)
        found = {}
        for name in ("embedding", "head"):
            fits = []
            for direction in ("forward", "backward"):
                short, long = (speed.ms(getattr(counts[name], direction)) for counts in (few, many))
                slope, rest = _line(short, long, first, second)
                least = speed.least_ms(getattr(few[name], direction))
                fits.append(TimeFit(per_token=slope, fixed=rest, least=least))
            found[name] = Times(forward=fits[0], backward=fits[1])
        return found

    def end_bytes(self, degrees: Sequence[int]) -> dict[str, dict[str, dict[int, float]]]:
        """Returns the bytes of [`EndProfile`] by field and tensor degree, for embedding and head."""
        fields = ("saved_bytes", "saved_fixed_bytes", "working_bytes", "working_fixed_bytes")
        found = {name: {field: {} for field in fields} for name in ("embedding", "head")}
        for tensor in degrees:
            first, second = self.end_tokens
            few, many = self.ends(tensor, first), self.ends(tensor, second)
            for name, values in found.items():
                short, long = few[name], many[name]
                saved = _line(short.saved_bytes, long.saved_bytes, first, second)
                # The forward needs the larger of a chunk's and all tokens' bytes, the backward all tokens'.
                chunk = short.forward_peak_bytes - short.saved_bytes
                growth = (long.forward_peak_bytes - long.saved_bytes - chunk) / (second - first)
                each = max(growth, (long.backward_peak_bytes - long.saved_bytes) / second)
                for field, value in zip(fields, (*saved, each, chunk), strict=True):
                    values[field][tensor] = max(0.0, value)
        return found


def _line(short: float, long: float, few: int, many: int) -> tuple[float, float]:
    """Returns slope and intercept of the line through two points, each at least 0."""
    slope = max(0.0, (long - short) / (many - few))
    return slope, max(0.0, short - slope * few)


def _fit(whole: float, halves: float, length: float) -> TimeFit:
    """Fits times of one document of `length` and of two documents of half of it, in tokens and squared lengths."""
    per_square = max(0.0, (whole - halves) / (length * length / 2))
    return TimeFit(per_token=(whole - per_square * length * length) / length, per_square=per_square)
