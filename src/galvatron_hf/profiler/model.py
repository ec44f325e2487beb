# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""What a model costs, measured: each distinct layer and each end by itself, forward and backward, on every rank."""

from __future__ import annotations

import datetime
import hashlib
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from transformers import PreTrainedModel

from galvatron_hf.data.cost import fit_relative
from galvatron_hf.parallel.allocator import keep_freed_memory
from galvatron_hf.parallel.dtensor import local_tensor
from galvatron_hf.parallel.models import adapter_for
from galvatron_hf.parallel.rank_objects import gather_objects, on_every_rank
from galvatron_hf.parallel.sharding import DTYPES
from galvatron_hf.plan import LayerStrategy
from galvatron_hf.plan_checks import check_choice, check_int, check_number
from galvatron_hf.profiler.hardware import machine, progress_bar
from galvatron_hf.profiler.model_profile import ModelProfile, TimeFit, Times
from galvatron_hf.profiler.parts import LoneParts, Part, layer_kinds, one_of_each
from galvatron_hf.profiler.tracing import CountedModel, PartTimes, describe, positions, profile_of


DEFAULT_TOKENS = 2048
LEAST_TOKENS = 128
ADAM_WEIGHTS = 32
ADAM_ELEMENTS = 1 << 12, 1 << 22  # of all these weights
MOST_COPIES, UNCACHED_ELEMENTS = 4, 1 << 24
REPETITIONS = range(3, 16)  # as many as there is time for

Key = tuple  # what is timed: ("layer", kind, tensor, tokens, length), ("head", tensor, tokens)...


@dataclass(frozen=True, kw_only=True)
class _Job:
    """Something to time; `run` gives the milliseconds of forward and backward."""

    key: Key
    run: Callable[[], tuple[float, float]]


class _Clock:
    """Milliseconds of this device, which may be a share of a core.

    Where one thread computes on a CPU, the CPU's time is taken, and stretched by what the whole profile took: a quota
    stops a process for most of its period at once, and other ranks take turns with it, so the time on the wall of
    something short means nothing.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.shared = device.type == "cpu" and torch.get_num_threads() == 1
        self._wall = self._cpu = 0.0

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return 1e3 * (time.process_time() if self.shared else time.perf_counter())

    def __enter__(self) -> _Clock:
        self._began = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *unused) -> None:
        self._wall += time.perf_counter() - self._began[0]
        self._cpu += time.process_time() - self._began[1]

    @property
    def stretch(self) -> float:
        """What its milliseconds are multiplied by."""
        return max(1.0, self._wall / self._cpu) if self.shared and self._cpu else 1.0


def profile_model(
    model: PreTrainedModel,
    *,
    dtype: str = "fp32",
    device: torch.device | str | None = None,
    tokens: int | None = None,
    length: int | None = None,
    packed: bool = True,
    max_degree: int | None = None,
    seconds: float = 30.0,
    progress: bool = False,
) -> ModelProfile:
    """
    Measures forward and backward of a model's parts under each tensor degree, as the runtime computes them.

    Only the configuration of `model` is looked at: its parts are made anew, one layer of each kind, with the weights
    of one tensor rank and nobody to communicate with. Bytes are counted, not measured. Under a process group every
    rank measures at the same time, which loads the machine as training does, and the slowest counts.

    Args:
        model ([`PreTrainedModel`]): A causal language model, on any device, meta too; it stays as it is.
        dtype (`str`, defaults to `"fp32"`): In which layers compute: "fp32" or "bf16".
        device (`torch.device` or `str`, *optional*): What is measured; the current GPU, or the CPU if there is none.
        tokens (`int`, *optional*): Of the largest micro-batch that is timed; fewer are timed if these take too long.
        length (`int`, *optional*): Of the longest document that is timed; as many as `tokens` by default.
        packed (`bool`, defaults to `True`): Whether micro-batches are packed documents, or rows without padding.
        max_degree (`int`, *optional*): Most tensor and Ulysses ranks of a layer; by default the world, or 8 without
            a process group.
        seconds (`float`, defaults to 30): For timing, about; counting bytes comes on top.
        progress (`bool`, defaults to `False`): Whether rank 0 shows a bar.

    Returns:
        [`ModelProfile`]: The same on every rank.

    Raises:
        ValueError: in one sentence, for a model that the runtime does not know and for arguments that make no sense.
    """
    check_choice("dtype", dtype, ("fp32", "bf16"))
    check_number("seconds", seconds, positive=True)
    made = circumstances(
        model, dtype=dtype, device=device, tokens=tokens, length=length, packed=packed, max_degree=max_degree
    )
    max_degree = max_degree or _default_degree()
    check_int("max_degree", max_degree, high=1 << 20)
    device = _default_device(device)
    most = positions(model) or sys.maxsize
    tokens = tokens or DEFAULT_TOKENS
    length = min(length or tokens, tokens, most)
    for name, value in (("tokens", tokens), ("length", length)):
        check_int(name, value, high=1 << 40)
    if device.type == "cpu":
        keep_freed_memory()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        return _profile(model, dtype, device, tokens, length, packed, max_degree, seconds, progress, made)


def _profile(
    model: PreTrainedModel,
    dtype: str,
    device: torch.device,
    tokens: int,
    length: int,
    packed: bool,
    max_degree: int,
    seconds: float,
    progress: bool,
    made: dict[str, str],
) -> ModelProfile:
    """What [`profile_model`] gives, for arguments that are right."""
    counted = CountedModel(model, DTYPES[dtype], length, packed)
    measured = _Measured(model, counted, device, tokens, length, max_degree)
    found, stretch = measured.run(seconds, progress)
    made |= {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "largest micro-batch": f"{measured.tokens} tokens",
        "stretch of CPU time": f"{stretch:.3f}",
        **describe(measured.length, packed),
    }

    def build() -> str | None:
        if dist.is_initialized() and dist.get_rank() != 0:
            return None
        profile = profile_of(
            model,
            dtype,
            counted,
            _part_times(found, counted, measured),
            max_degree=max_degree,
            optimizer_ms=_optimizer_ms(found),
            assumed={},
            made=made,
        )
        return profile.to_json()

    text = on_every_rank(build)
    return ModelProfile.from_json(gather_objects(text)[0] if dist.is_initialized() else text)


def circumstances(
    model: PreTrainedModel,
    *,
    dtype: str = "fp32",
    device: torch.device | str | None = None,
    tokens: int | None = None,
    length: int | None = None,
    packed: bool = True,
    max_degree: int | None = None,
    **others: Any,
) -> dict[str, str]:
    """What a measurement depends on, as a profile's `made` has it; collective, and the same on every rank."""
    asked = {"tokens": tokens, "length": length, "packed": packed, "max_degree": max_degree or _default_degree()}
    return machine(_default_device(device)) | {
        "configuration": config_digest(model),
        "format": dtype,
        "asked for": ", ".join(f"{name} {value}" for name, value in asked.items()),
        "ranks": str(dist.get_world_size() if dist.is_initialized() else 1),
        "transformers": transformers.__version__,
    }


def config_digest(model: PreTrainedModel) -> str:
    """16 hexadecimal digits that tell configurations of models apart, whatever their names and weights."""
    config = model.config.to_dict()
    for name in ("_name_or_path", "name_or_path", "transformers_version", "dtype", "torch_dtype"):
        config.pop(name, None)
    text = json.dumps([type(model).__name__, config], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _default_device(device: torch.device | str | None) -> torch.device:
    return torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))


def _default_degree() -> int:
    return dist.get_world_size() if dist.is_initialized() else 8


class _Measured:
    """Times everything on this rank; the slowest rank's times come out."""

    def __init__(
        self,
        model: PreTrainedModel,
        counted: CountedModel,
        device: torch.device,
        tokens: int,
        length: int,
        max_degree: int,
    ):
        self.counted, self.device, self.clock = counted, device, _Clock(device)
        self.degrees, self.end_degrees = counted.tensor_degrees(max_degree), counted.end_degrees(max_degree)
        self.tokens, self.length = tokens, length
        self._mesh: DeviceMesh | None = None
        self.copies = _copies(counted.small, layer_kinds(model))
        self.small = one_of_each(model, self.copies)

    def run(self, seconds: float, progress: bool) -> tuple[dict[Key, tuple[float, float]], float]:
        """Forward and backward ms of everything, and how much longer than the CPU's time they are."""
        self._shrink(seconds)
        jobs = self._jobs()
        samples: dict[Key, list[tuple[float, float]]] = {job.key: [] for job in jobs}
        for job in jobs:
            job.run()  # the first one sets things up
        self._together()
        began = time.perf_counter()
        with progress_bar(REPETITIONS.start * len(jobs), progress) as step, self.clock:
            for repetition in range(REPETITIONS.stop):
                each = (time.perf_counter() - began) / max(1, repetition)
                if repetition >= REPETITIONS.start and time.perf_counter() + each > began + seconds:
                    break
                for job in jobs:
                    samples[job.key].append(job.run())
                    step(f"timing {job.key[0]}s")
        stretch = self.clock.stretch
        own = {
            key: tuple(stretch * statistics.median(times) for times in zip(*found)) for key, found in samples.items()
        }
        ranks = gather_objects((own, stretch)) if dist.is_initialized() else [(own, stretch)]
        slowest = {key: tuple(np.max([rank[key] for rank, _ in ranks], axis=0).tolist()) for key in own}
        return slowest, max(stretch for _, stretch in ranks)

    def _shrink(self, seconds: float) -> None:
        """Halves the largest micro-batch until all of it can be timed; collective, and alike on every rank."""
        length = min(self.length, LEAST_TOKENS, self.tokens)
        few = min(LEAST_TOKENS, self.tokens) // length * length
        parts = self._parts(LayerStrategy())
        jobs = [*self._layer_jobs(parts, 1, few, length), *self._end_jobs(parts, 1, few)]
        for job in jobs:
            job.run()
        with self.clock:
            once = sum(sum(job.run()) for job in jobs) * 1e-3
        once *= self.clock.stretch
        once = max(gather_objects(once)) if dist.is_initialized() else once
        shares = sum(1 / degree for degree in self.degrees)
        rows = sum(tokens for tokens, _ in self._points())
        while REPETITIONS.start * once * shares * rows / few > seconds and self.tokens >= 2 * LEAST_TOKENS:
            self.tokens //= 2
            self.length = min(self.length, self.tokens)
            rows = sum(tokens for tokens, _ in self._points())

    def _points(self) -> list[tuple[int, int]]:
        """Tokens and length of the documents in each micro-batch to time; tensor and chunk sizes divide them."""
        found = []
        for tokens in (self.tokens, self.tokens // 4, max(self.tokens // 16, min(self.tokens, LEAST_TOKENS // 4))):
            longest = min(self.length, tokens)
            for length in (longest, max(1, longest // 4)):
                found.append((tokens // length * length, length))
        return [point for point in dict.fromkeys(found) if min(point) >= 1]

    def _parts(self, strategy: LayerStrategy, vocabulary: int = 1) -> LoneParts:
        parts = LoneParts.of(self.small, strategy, vocabulary, self.counted.packed, self.copies)
        parts.give_memory(self.device, self.counted.dtype)
        return parts

    def _jobs(self) -> list[_Job]:
        jobs = []
        for tensor in self.degrees:
            parts = self._parts(LayerStrategy(tensor=tensor))
            for tokens, length in self._points():
                jobs += self._layer_jobs(parts, tensor, tokens, length)
            if tensor == 1:
                jobs += self._outside_jobs(parts)
        for tensor in self.end_degrees:
            parts = self._parts(LayerStrategy(), tensor)
            for tokens in dict.fromkeys(tokens for tokens, _ in self._points()):
                jobs += self._end_jobs(parts, tensor, tokens)
        return self._spread([*jobs, *map(self._optimizer_job, ADAM_ELEMENTS)])

    def _spread(self, jobs: list[_Job]) -> list[_Job]:
        """Ends and the optimizer behind layers, which leave nothing of theirs in a cache."""
        layers = [job for job in jobs if job.key[0] == "layer"]
        others = [job for job in jobs if job.key[0] != "layer"]
        order = []
        for index in range(max(len(layers), len(others))):
            order += [layers[index % len(layers)]] * (index < len(layers)) + others[index : index + 1]
        return order

    def _layer_jobs(self, parts: LoneParts, tensor: int, tokens: int, length: int) -> list[_Job]:
        layers = parts.layers(parts.micro_batch(tokens, length))
        keys = (("layer", kind, tensor, tokens, length) for kind in range(len(layers)))
        return [self._job(key, part, self.copies) for key, part in zip(keys, layers, strict=True)]

    def _outside_jobs(self, parts: LoneParts) -> list[_Job]:
        jobs = []
        for kind, part in enumerate(parts.layers(parts.micro_batch(*self._points()[0]))):
            job = self._job(("outside", kind), part, self.copies)

            def run(inner: Callable = job.run) -> tuple[float, float]:
                with parts.without_regions():
                    return inner()

            jobs.append(_Job(key=job.key, run=run))
        return jobs

    def _end_jobs(self, parts: LoneParts, tensor: int, tokens: int) -> list[_Job]:
        packs = parts.rank.forward.packs
        length = max(1, min(self.length, tokens // packs))  # a model may have positions for no more
        batch = parts.micro_batch(packs * max(1, tokens // packs // length) * length, length)
        pair = {"embedding": parts.embedding(batch), "head": parts.head(batch)}
        return [self._job((name, tensor, tokens), part) for name, part in pair.items()]

    def _job(self, key: Key, part: Part, copies: int = 1) -> _Job:
        def run() -> tuple[float, float]:
            began = self.clock.now()
            output = part.run()
            between = self.clock.now()
            gradient = torch.ones_like(output)
            ready = self.clock.now()
            output.backward(gradient)
            ended = self.clock.now()
            part.forget_gradients()
            return (between - began) / copies, (ended - ready) / copies

        return _Job(key=key, run=run)

    def _optimizer_job(self, elements: int) -> _Job:
        """The norm of gradients, their clipping and an update; of DTensors where ranks are several."""
        weights = [
            self._at_rest(torch.zeros(elements // ADAM_WEIGHTS, device=self.device)) for _ in range(ADAM_WEIGHTS)
        ]
        for weight in weights:
            weight.grad = torch.full_like(weight, 1e-3)
        optimizer = torch.optim.AdamW(weights, lr=1e-5, fused=True)  # Trainer's default

        def run() -> tuple[float, float]:
            began = self.clock.now()
            gradients = [local_tensor(weight.grad) for weight in weights]
            norm = torch.stack(torch._foreach_norm(gradients)).norm()
            for gradient in gradients:
                gradient.mul_((1e-3 / (norm + 1e-6)).clamp(max=1.0))
            optimizer.step()
            return self.clock.now() - began, 0.0

        return _Job(key=("adam", elements), run=run)

    def _at_rest(self, tensor: torch.Tensor) -> torch.nn.Parameter:
        if not dist.is_initialized():
            return torch.nn.Parameter(tensor)
        if self._mesh is None:
            self._mesh = init_device_mesh(self.device.type, (dist.get_world_size(),))
        return torch.nn.Parameter(DTensor.from_local(tensor, self._mesh, [Replicate()], run_check=False))

    def _together(self) -> None:
        if dist.is_initialized():
            gather_objects(None)


def _optimizer_ms(found: dict[Key, tuple[float, float]]) -> tuple[float, float]:
    """Milliseconds for each element, and for each weight, of an update."""
    few, many = (found["adam", elements][0] for elements in ADAM_ELEMENTS)
    each = max(0.0, (many - few) / (ADAM_ELEMENTS[1] - ADAM_ELEMENTS[0]))
    return each, max(0.0, few - each * ADAM_ELEMENTS[0]) / ADAM_WEIGHTS


def _copies(small: PreTrainedModel, kinds: Sequence[int]) -> int:
    """Layers of each kind that are timed one behind the other, so that none finds its weights in a cache."""
    layers = small.base_model.get_submodule(adapter_for(small).layers)
    smallest = min(sum(weight.numel() for weight in layer.parameters()) for layer in layers)
    wanted = -(-UNCACHED_ELEMENTS // smallest)
    return max(1, min(wanted, MOST_COPIES, *Counter(kinds).values()))


def _part_times(found: dict[Key, tuple[float, float]], counted: CountedModel, measured: _Measured) -> PartTimes:
    """The lines through what was measured."""
    kinds = range(counted.small.base_model.config.num_hidden_layers)
    tokens = measured._points()[0][0]
    layers: list[dict[int, Times]] = [{} for _ in kinds]
    for kind in kinds:
        outside = found["outside", kind]
        for tensor in measured.degrees:
            points = {key[3:]: times for key, times in found.items() if key[:3] == ("layer", kind, tensor)}
            forward, backward = (_fit(list(points), [ms[way] for ms in points.values()]) for way in (0, 1))
            layers[kind][tensor] = Times(
                forward=forward,
                backward=backward,
                outside_forward=min(outside[0] / tokens, forward.per_token),
                outside_backward=min(outside[1] / tokens, backward.per_token),
            )
    ends: dict[str, dict[int, Times]] = {"embedding": {}, "head": {}}
    for name, tensor in ((name, tensor) for name in ends for tensor in measured.end_degrees):
        points = {(key[2], 0): times for key, times in found.items() if key[:2] == (name, tensor)}
        forward, backward = (_fit(list(points), [ms[way] for ms in points.values()]) for way in (0, 1))
        ends[name][tensor] = Times(forward=forward, backward=backward)
    return PartTimes(layers=layers, **ends)


def _fit(points: Sequence[tuple[int, int]], ms: Sequence[float]) -> TimeFit:
    """`a * tokens + b * tokens * length + c`, none negative, with the least squared relative error."""
    tokens, lengths = np.array(points, dtype=float).T
    measured = np.maximum(np.array(ms), 1e-6)
    columns = np.stack([tokens, tokens * lengths, np.ones_like(tokens)], axis=1)
    coefficients = fit_relative(columns, measured)
    error = float(np.median(np.abs(columns @ coefficients / measured - 1)))
    per_token, per_square, fixed = coefficients.tolist()
    return TimeFit(per_token=per_token, per_square=per_square, fixed=fixed, error=error)
