# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Reads and writes the layers and ends of a model profile as JSON. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from typing import Any, TypeVar

from galvatron_hf.models.shape import WeightShape
from galvatron_hf.plan.validation import check_bool, check_fields, check_int, check_number, show
from galvatron_hf.profiler.profiles.layers import EndProfile, ExpertsProfile, ExpertTimes, LayerProfile, TimeFit, Times


T = TypeVar("T")

MAX_SIZE = 1 << 40
_WEIGHT = ("shape", "cut", "used_in_part", "heads", "of_experts", "trained", "stored_bytes")
_STRATEGY = ("tensor", "megatron_sp", "ulysses")
_LAYER_BYTES = ("saved_bytes", "working_bytes", "recompute_bytes")
_LAYER_RATIOS = ("length_ratio", "read_ratio")
_END_BYTES = ("saved_bytes", "saved_fixed_bytes", "working_bytes", "working_fixed_bytes")


def layer_values(kind: LayerProfile) -> dict[str, Any]:
    """Returns a layer's profile as JSON values."""
    return {
        "weights": [asdict(weight) for weight in kind.weights],
        "times": _times(kind.times),
        "bytes": [
            dict(zip(_STRATEGY, strategy, strict=True))
            | {name: getattr(kind, name)[strategy] for name in _LAYER_BYTES if strategy in getattr(kind, name)}
            for strategy in kind.saved_bytes
        ],
        "regions": kind.regions,
        "saves_after_last_region": kind.saves_after_last_region,
        **({} if kind.experts is None else {"experts": _expert_values(kind.experts)}),
        **_ratios(kind, _LAYER_RATIOS),
        **({"bias_heads": kind.bias_heads} if kind.bias_heads else {}),
    }


def _ratios(profile: LayerProfile | EndProfile, names: tuple[str, ...]) -> dict[str, float]:
    """Returns the ratios of lengths that differ from those of a model with one stack."""
    plain = {field.name: field.default for field in fields(profile)}
    return {name: getattr(profile, name) for name in names if getattr(profile, name) != plain[name]}


def _read_ratios(where: str, given: dict[str, Any], names: tuple[str, ...]) -> dict[str, float]:
    for name in names:
        check_number(f"{where}.{name}", given.get(name, 1.0), positive=name == "length_ratio")
    return {name: float(given[name]) for name in names if name in given}


def _expert_values(experts: ExpertsProfile) -> dict[str, Any]:
    degrees = [{"expert": degree} | asdict(times) for degree, times in experts.degrees.items()]
    return {"count": experts.count, "top_k": experts.top_k, "degrees": degrees}


def end_values(end: EndProfile) -> dict[str, Any]:
    """Returns the profile of an embedding or a head as JSON values."""
    return {
        "weights": [asdict(weight) for weight in end.weights],
        "times": _times(end.times),
        "bytes": [
            {"tensor": tensor}
            | {name: getattr(end, name)[tensor] for name in _END_BYTES if tensor in getattr(end, name)}
            for tensor in end.saved_bytes
        ],
        **_ratios(end, _LAYER_RATIOS[:1]),
    }


def _times(times: Mapping[int, Times]) -> list[dict[str, Any]]:
    return [{"tensor": tensor} | asdict(each) for tensor, each in times.items()]


def read_each(name: str, value: Any, read: Callable[[str, Any], T]) -> tuple[T, ...]:
    """Reads the entries of a list that is not empty."""
    if not isinstance(value, list) or not value:
        raise ValueError(f"{name} is {show(value)}, which is not a list with something in it: write [...]")
    return tuple(read(f"{name}[{index}]", entry) for index, entry in enumerate(value))


def read_layer(where: str, given: Any) -> LayerProfile:
    """Reads what [`layer_values`] returned; `where` names it in errors."""
    names = ("weights", "times", "bytes", "regions", "saves_after_last_region")
    check_fields(where, given, (*names, "experts", *_LAYER_RATIOS, "bias_heads"), required=names)
    check_int(f"{where}.bias_heads", given.get("bias_heads", 0), low=0, high=MAX_SIZE)
    check_int(f"{where}.regions", given["regions"], low=0, high=1024)
    check_bool(f"{where}.saves_after_last_region", given["saves_after_last_region"])
    found: dict[str, dict] = {name: {} for name in _LAYER_BYTES}
    for place, entry in read_each(f"{where}.bytes", given["bytes"], lambda place, entry: (place, entry)):
        check_fields(place, entry, (*_STRATEGY, *_LAYER_BYTES), required=(*_STRATEGY, "saved_bytes"))
        check_int(f"{place}.tensor", entry["tensor"], high=MAX_SIZE)
        check_bool(f"{place}.megatron_sp", entry["megatron_sp"])
        check_int(f"{place}.ulysses", entry["ulysses"], high=MAX_SIZE)
        _read_bytes(place, entry, tuple(entry[name] for name in _STRATEGY), found)
    weights = read_each(f"{where}.weights", given["weights"], _read_weight)
    experts = _read_experts(f"{where}.experts", given["experts"]) if given.get("experts") is not None else None
    counts = {weight.shape[0] for weight in weights if weight.of_experts}
    if counts != ({experts.count} if experts is not None else set()):
        raise ValueError(
            f"{where} has weights of {sorted(counts)} experts and {experts and experts.count} in experts: make them "
            "agree"
        )
    return LayerProfile(
        weights=weights,
        times=_read_times(f"{where}.times", given["times"]),
        regions=given["regions"],
        saves_after_last_region=given["saves_after_last_region"],
        experts=experts,
        bias_heads=given.get("bias_heads", 0),
        **_read_ratios(where, given, _LAYER_RATIOS),
        **found,
    )


def _read_experts(where: str, given: Any) -> ExpertsProfile:
    names, fits = ("count", "top_k", "degrees"), ("forward", "backward")
    check_fields(where, given, names, required=names)
    for name in names[:2]:
        check_int(f"{where}.{name}", given[name], high=MAX_SIZE)
    numbers = [field.name for field in fields(ExpertTimes) if field.name not in fits]
    degrees = {}
    for place, entry in read_each(f"{where}.degrees", given["degrees"], lambda place, entry: (place, entry)):
        check_fields(place, entry, ("expert", *fits, *numbers), ("expert", *fits, "saved_bytes", "working_bytes"))
        check_int(f"{place}.expert", entry["expert"], high=MAX_SIZE)
        for name in numbers:
            check_number(f"{place}.{name}", entry.get(name, 0.0))
        read = {name: _read_fit(f"{place}.{name}", entry[name]) for name in fits}
        degrees[entry["expert"]] = ExpertTimes(**read, **{name: entry[name] for name in numbers if name in entry})
    for degree in degrees:
        if given["count"] % degree or given["top_k"] > given["count"]:
            raise ValueError(
                f"{where} has count={given['count']}, top_k={given['top_k']} and expert={degree}, which do not fit "
                "together: a token chooses different experts, and ranks have equally many"
            )
    if 1 not in degrees:
        raise ValueError(f"{where}.degrees has no expert=1, with which the others are compared: add it")
    return ExpertsProfile(count=given["count"], top_k=given["top_k"], degrees=degrees)


def read_end(where: str, given: Any) -> EndProfile:
    """Reads what [`end_values`] returned; `where` names it in errors."""
    names = ("weights", "times", "bytes")
    check_fields(where, given, (*names, *_LAYER_RATIOS[:1]), required=names)
    found: dict[str, dict] = {name: {} for name in _END_BYTES}
    for place, entry in read_each(f"{where}.bytes", given["bytes"], lambda place, entry: (place, entry)):
        check_fields(place, entry, ("tensor", *_END_BYTES), required=("tensor", "saved_bytes"))
        check_int(f"{place}.tensor", entry["tensor"], high=MAX_SIZE)
        _read_bytes(place, entry, entry["tensor"], found)
    # What a model of images has before its layers counts with its head.
    weights = () if given["weights"] == [] else read_each(f"{where}.weights", given["weights"], _read_weight)
    return EndProfile(
        weights=weights,
        times=_read_times(f"{where}.times", given["times"]),
        **_read_ratios(where, given, _LAYER_RATIOS[:1]),
        **found,
    )


def _read_bytes(where: str, entry: dict[str, Any], key: Any, found: dict[str, dict]) -> None:
    for name, values in found.items():
        if name in entry:
            check_number(f"{where}.{name}", entry[name])
            values[key] = entry[name]


def _read_weight(where: str, given: Any) -> WeightShape:
    check_fields(where, given, _WEIGHT, required=("shape",))
    shape = read_each(
        f"{where}.shape", given["shape"], lambda place, size: (check_int(place, size, high=MAX_SIZE), size)[1]
    )
    if given.get("cut") is not None:
        check_int(f"{where}.cut", given["cut"], low=0, high=len(shape) - 1)
    for name in ("used_in_part", "of_experts"):
        check_bool(f"{where}.{name}", given.get(name, False))
    check_bool(f"{where}.trained", given.get("trained", True))
    check_int(f"{where}.stored_bytes", given.get("stored_bytes", 4), high=8)
    if given.get("heads") is not None:
        check_int(f"{where}.heads", given["heads"], high=MAX_SIZE)
    return WeightShape(**given | {"shape": shape})


def _read_times(where: str, given: Any) -> dict[int, Times]:
    shares = ("forward_outside_tp", "backward_outside_tp", "forward_after_last_saved", "recompute_fixed")
    found = {}
    for place, entry in read_each(where, given, lambda place, entry: (place, entry)):
        check_fields(place, entry, ("tensor", "forward", "backward", *shares), ("tensor", "forward", "backward"))
        check_int(f"{place}.tensor", entry["tensor"], high=MAX_SIZE)
        for name in shares:
            check_number(f"{place}.{name}", entry.get(name, 0.0))
        fits = {name: _read_fit(f"{place}.{name}", entry[name]) for name in ("forward", "backward")}
        found[entry["tensor"]] = Times(**fits, **{name: entry[name] for name in shares if name in entry})
    return found


def _read_fit(where: str, given: Any) -> TimeFit:
    names = tuple(field.name for field in fields(TimeFit))
    check_fields(where, given, names, required=names[:1])
    for name, value in given.items():
        check_number(f"{where}.{name}", value)
    return TimeFit(**given)
