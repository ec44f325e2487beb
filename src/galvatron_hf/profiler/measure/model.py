# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Measures the cost of a model: forward and backward of each distinct layer and each end alone, on every rank."""

from __future__ import annotations

import datetime
import hashlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import transformers
from transformers import PreTrainedModel

from galvatron_hf.data.cost import fit_relative
from galvatron_hf.models.families import adapter_for
from galvatron_hf.models.lora import is_added
from galvatron_hf.parallel.comm.objects import from_rank_0
from galvatron_hf.parallel.data_parallel.sharding import DTYPES
from galvatron_hf.plan.validation import check_choice, check_int, check_number
from galvatron_hf.profiler.measure.hardware import accuracy_text, machine
from galvatron_hf.profiler.measure.layer_timing import Key, LayerTimer, adding_ms, optimizer_ms
from galvatron_hf.profiler.measure.rounds import WANTED_ERROR
from galvatron_hf.profiler.profiles.layers import TimeFit, Times
from galvatron_hf.profiler.profiles.model import ModelProfile
from galvatron_hf.profiler.trace.counted_model import CountedModel, ExpertPasses, PartTimes
from galvatron_hf.profiler.trace.small_models import image_positions, positions
from galvatron_hf.profiler.trace.tracing import describe, profile_of, rows_of_stacks
from galvatron_hf.utils.allocator import keep_freed_memory


DEFAULT_TOKENS = 2048


def profile_model(
    model: PreTrainedModel,
    *,
    dtype: str = "fp32",
    device: torch.device | str | None = None,
    tokens: int | None = None,
    length: int | None = None,
    target_length: int | None = None,
    packed: bool = True,
    max_degree: int | None = None,
    accuracy: float = WANTED_ERROR,
    seconds: float = 30.0,
    progress: bool = False,
) -> ModelProfile:
    """
    Measures forward and backward of a model's parts under each tensor degree, as the runtime computes them.

    One layer of each kind is built from the configuration of `model` with the weights of one tensor rank; its
    collectives send nothing. Bytes are counted, not measured. All ranks of a process group measure at the same time,
    which loads the machine as training does, and the slowest rank counts. Measuring ends when the medians are accurate
    enough.

    Args:
        model ([`PreTrainedModel`]): A causal language model on any device, also meta. It is not changed.
        dtype (`str`, defaults to `"fp32"`): Number format of the computation: "fp32" or "bf16".
        device (`torch.device` or `str`, *optional*): Device to measure; by default the current GPU, or the CPU.
        tokens (`int`, *optional*): Tokens of the largest micro-batch; fewer if this one takes too long.
        length (`int`, *optional*): Tokens of the longest document; by default `tokens`.
        target_length (`int`, *optional*): Tokens that a row has in the decoder, if the model has an encoder too, for
            `length` tokens in the encoder; by default as many.
        packed (`bool`, defaults to `True`): Whether micro-batches are packed documents, or rows without padding, as
            those of an encoder and a decoder are.
        max_degree (`int`, *optional*): Largest tensor and Ulysses degree; by default the world size, or 8 without a
            process group.
        accuracy (`float`, defaults to 0.05): Wanted relative standard error of the medians, on average over the parts.
        seconds (`float`, defaults to 30): Approximate upper bound of the time for timing; counting is extra.
        progress (`bool`, defaults to `False`): Whether rank 0 shows what is measured.

    Returns:
        [`ModelProfile`]: The profile, the same on every rank.

    Raises:
        ValueError: If the family of the model is unknown or an argument is out of range.
    """
    check_choice("dtype", dtype, ("fp32", "bf16"))
    check_number("seconds", seconds, positive=True)
    check_number("accuracy", accuracy, positive=True)
    made = circumstances(
        model,
        dtype=dtype,
        device=device,
        tokens=tokens,
        length=length,
        target_length=target_length,
        packed=packed,
        max_degree=max_degree,
        accuracy=accuracy,
    )
    max_degree = max_degree or _default_degree()
    check_int("max_degree", max_degree, high=1 << 20)
    device = _default_device(device)
    most = positions(model) or sys.maxsize
    tokens, of_image = tokens or DEFAULT_TOKENS, image_positions(model)
    tokens = tokens if of_image is None else max(tokens, of_image)
    length = of_image or min(length or tokens, tokens, most)
    for name, value in (("tokens", tokens), ("length", length), ("target_length", target_length or 1)):
        check_int(name, value, high=1 << 40)
    packed, ratio = rows_of_stacks(model, packed, length, target_length)
    if device.type == "cpu":
        keep_freed_memory()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        counted = CountedModel(model, DTYPES[dtype], length, packed, device, ratio)
        timer = LayerTimer(model, counted, device, tokens, length, max_degree, accuracy)
        found, wall_per_cpu = timer.run(seconds, progress)
        made |= {
            "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "largest micro-batch": f"{timer.tokens} tokens",
            "wall time over CPU time": f"{wall_per_cpu:.3f}",
            **describe(timer.length, packed, ratio),
        }
        parts = dict(max_degree=max_degree, optimizer_ms=optimizer_ms(found), adding_ms=adding_ms(found))
        times = _part_times(found, counted, timer)
        text = from_rank_0(lambda: profile_of(model, dtype, counted, times, assumed={}, made=made, **parts).to_json())
    return ModelProfile.from_json(text)


def circumstances(
    model: PreTrainedModel,
    *,
    dtype: str = "fp32",
    device: torch.device | str | None = None,
    tokens: int | None = None,
    length: int | None = None,
    target_length: int | None = None,
    packed: bool = True,
    max_degree: int | None = None,
    accuracy: float = WANTED_ERROR,
    **others: Any,
) -> dict[str, str]:
    """Returns the conditions of the measurement, for a profile's `made`; collective."""
    asked = {"tokens": tokens, "length": length, "packed": packed, "max_degree": max_degree or _default_degree()}
    asked |= {} if target_length is None else {"target_length": target_length}
    return (
        machine(_default_device(device))
        | accuracy_text(accuracy)
        | {
            "configuration": config_digest(model),
            "format": dtype,
            "asked for": ", ".join(f"{name} {value}" for name, value in asked.items()),
            "ranks": str(dist.get_world_size() if dist.is_initialized() else 1),
            "transformers": transformers.__version__,
        }
    )


def config_digest(model: PreTrainedModel) -> str:
    """Returns 16 hexadecimal digits that identify a configuration, adapters, and which weights are frozen, whatever
    the model's name and values.
    """
    config = model.config.to_dict()
    for name in ("_name_or_path", "name_or_path", "transformers_version", "dtype", "torch_dtype"):
        config.pop(name, None)
    weights = [(name, *weight.shape) for name, weight in model.named_parameters() if is_added(name)]
    frozen = [name for name, weight in model.named_parameters() if not weight.requires_grad]
    more = [weights, frozen] if weights or frozen else []
    text = json.dumps([type(model).__name__, config, *more], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _default_device(device: torch.device | str | None) -> torch.device:
    return torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))


def _default_degree() -> int:
    return dist.get_world_size() if dist.is_initialized() else 8


def _part_times(found: dict[Key, tuple[float, ...]], counted: CountedModel, timer: LayerTimer) -> PartTimes:
    kinds = range(len(adapter_for(counted.small).layers(counted.small)))
    layers: list[dict[int, Times]] = [{} for _ in kinds]
    for kind in kinds:
        tokens = timer.tokens_of(kind, *timer.points()[0])[0]
        outside, recompute_fixed = found["outside", kind], _recompute_fixed(found, kind, timer)
        for tensor in timer.degrees:
            last = found["layer", kind, tensor, *timer.points()[0]][2]
            points = {key[3:]: times for key, times in found.items() if key[:3] == ("layer", kind, tensor)}
            sizes = [timer.tokens_of(kind, *point) for point in points]
            if counted.of_image is not None:  # of one length, of which nothing depends then
                sizes = [(tokens_of_point, 0) for tokens_of_point, _ in sizes]
            forward, backward = (_fit(sizes, [ms[way] for ms in points.values()]) for way in (0, 1))
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
    experts = counted.expert_profiles(max(timer.expert_degrees, default=1), _expert_passes(found, timer))
    return PartTimes(layers=layers, experts=experts, **ends)


def _expert_passes(found: dict[Key, tuple[float, ...]], timer: LayerTimer) -> Callable[[int, int, int], ExpertPasses]:
    """Returns the function of [`CountedModel.expert_profiles`] for measured times."""

    def passes(kind: int, degree: int, top_k: int) -> ExpertPasses:
        points = {
            key[3]: times for key, times in found.items() if key[:3] == ("experts", kind, degree) and key[4] == 1
        }
        most = max(points)
        fits = [_straight({tokens: times[way] for tokens, times in points.items()}) for way in (0, 1)]
        more = found.get(("experts", kind, degree, most, 2), points[most])
        received = [max(0.0, more[way] - points[most][way]) / most for way in (0, 1)]
        return ExpertPasses(
            forward=fits[0], backward=fits[1], received_forward=received[0], received_backward=received[1]
        )

    return passes


def _straight(points: Mapping[int, float]) -> TimeFit:
    """Returns the straight line through the times of the fewest and of the most tokens."""
    few, most = min(points), max(points)
    if few == most:
        return TimeFit(per_token=points[most] / most)
    slope = max(0.0, (points[most] - points[few]) / (most - few))
    return TimeFit(per_token=slope, fixed=max(0.0, points[few] - slope * few))


def _recompute_fixed(found: dict[Key, tuple[float, ...]], kind: int, timer: LayerTimer) -> float:
    """Returns the time with recompute, less forward, backward, and the forward up to the last saved tensor."""
    most, point = timer.points()[0], timer.recompute_point
    forward, backward = found["layer", kind, 1, *point][:2]
    last = found["layer", kind, 1, *most][2] * point[0] / most[0]
    return max(0.0, sum(found["recompute", kind]) - (2 * forward + backward - last))


def _fit(points: Sequence[tuple[int, int]], ms: Sequence[float]) -> TimeFit:
    """Fits ms = a * tokens + b * tokens * length + c with a, b, c >= 0 and the least squared relative error."""
    tokens, lengths = np.array(points, dtype=float).T
    measured = np.maximum(np.array(ms), 1e-6)
    columns = np.stack([tokens, tokens * lengths, np.ones_like(tokens)], axis=1)
    coefficients = fit_relative(columns, measured)
    error = float(np.median(np.abs(columns @ coefficients / measured - 1)))
    per_token, per_square, fixed = coefficients.tolist()
    return TimeFit(per_token=per_token, per_square=per_square, fixed=fixed, error=error)
