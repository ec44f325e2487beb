# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""What a model costs, measured: each distinct layer and each end by itself, forward and backward, on every rank."""

from __future__ import annotations

import datetime
import hashlib
import json
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import transformers
from transformers import PreTrainedModel

from galvatron_hf.data.cost import fit_relative
from galvatron_hf.models.families import adapter_for
from galvatron_hf.parallel.comm.objects import from_rank_0
from galvatron_hf.parallel.data_parallel.sharding import DTYPES
from galvatron_hf.plan.validation import check_choice, check_int, check_number
from galvatron_hf.profiler.measure.hardware import machine
from galvatron_hf.profiler.measure.layer_timing import Key, PartTimer, adding_ms, optimizer_ms
from galvatron_hf.profiler.profiles.layers import TimeFit, Times
from galvatron_hf.profiler.profiles.model import ModelProfile
from galvatron_hf.profiler.trace.tracing import CountedModel, PartTimes, describe, positions, profile_of
from galvatron_hf.utils.allocator import keep_freed_memory


DEFAULT_TOKENS = 2048


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
    timer = PartTimer(model, counted, device, tokens, length, max_degree)
    found, stretch = timer.run(seconds, progress)
    made |= {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "largest micro-batch": f"{timer.tokens} tokens",
        "stretch of CPU time": f"{stretch:.3f}",
        **describe(timer.length, packed),
    }

    def build() -> str:
        profile = profile_of(
            model,
            dtype,
            counted,
            _part_times(found, counted, timer),
            max_degree=max_degree,
            optimizer_ms=optimizer_ms(found),
            adding_ms=adding_ms(found),
            assumed={},
            made=made,
        )
        return profile.to_json()

    return ModelProfile.from_json(from_rank_0(build))


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


def _part_times(found: dict[Key, tuple[float, ...]], counted: CountedModel, timer: PartTimer) -> PartTimes:
    """The lines through what was measured."""
    kinds = range(len(adapter_for(counted.small).layers(counted.small)))
    tokens = timer.points()[0][0]
    layers: list[dict[int, Times]] = [{} for _ in kinds]
    for kind in kinds:
        outside, recompute_fixed = found["outside", kind], _recompute_fixed(found, kind, timer)
        for tensor in timer.degrees:
            last = found["layer", kind, tensor, *timer.points()[0]][2]
            points = {key[3:]: times for key, times in found.items() if key[:3] == ("layer", kind, tensor)}
            forward, backward = (_fit(list(points), [ms[way] for ms in points.values()]) for way in (0, 1))
            layers[kind][tensor] = Times(
                forward=forward,
                backward=backward,
                forward_outside_tp=min(outside[0] / tokens, forward.per_token),
                backward_outside_tp=min(outside[1] / tokens, backward.per_token),
                forward_after_last_saved=min(last / tokens, forward.per_token),
                recompute_fixed=recompute_fixed,
            )
    ends: dict[str, dict[int, Times]] = {"embedding": {}, "head": {}}
    for name, tensor in ((name, tensor) for name in ends for tensor in timer.end_degrees):
        points = {(key[2], 0): times for key, times in found.items() if key[:2] == (name, tensor)}
        forward, backward = (_fit(list(points), [ms[way] for ms in points.values()]) for way in (0, 1))
        ends[name][tensor] = Times(forward=forward, backward=backward)
    return PartTimes(layers=layers, **ends)


def _recompute_fixed(found: dict[Key, tuple[float, ...]], kind: int, timer: PartTimer) -> float:
    """What a layer takes with recompute over what it takes without and the forward up to the last saved tensor."""
    most, point = timer.points()[0], timer.recompute_point
    forward, backward = found["layer", kind, 1, *point][:2]
    last = found["layer", kind, 1, *most][2] * point[0] / most[0]
    return max(0.0, sum(found["recompute", kind]) - (2 * forward + backward - last))


def _fit(points: Sequence[tuple[int, int]], ms: Sequence[float]) -> TimeFit:
    """`a * tokens + b * tokens * length + c`, none negative, with the least squared relative error."""
    tokens, lengths = np.array(points, dtype=float).T
    measured = np.maximum(np.array(ms), 1e-6)
    columns = np.stack([tokens, tokens * lengths, np.ones_like(tokens)], axis=1)
    coefficients = fit_relative(columns, measured)
    error = float(np.median(np.abs(columns @ coefficients / measured - 1)))
    per_token, per_square, fixed = coefficients.tolist()
    return TimeFit(per_token=per_token, per_square=per_square, fixed=fixed, error=error)
