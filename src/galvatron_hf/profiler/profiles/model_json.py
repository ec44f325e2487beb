# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Model profiles as JSON: strict reading, and writing with a line for each entry of a list."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from typing import Any, TypeVar

from galvatron_hf.models.shape import WeightShape
from galvatron_hf.plan.serialization import check_version, read_object
from galvatron_hf.plan.validation import (
    MAX_LAYERS,
    check_bool,
    check_choice,
    check_fields,
    check_int,
    check_number,
    show,
)
from galvatron_hf.profiler.profiles.model import (
    CALIBRATION_FACTORS,
    EndProfile,
    LayerProfile,
    ModelProfile,
    TimeFit,
    Times,
)


VERSION = 1
T = TypeVar("T")

_MAX = 1 << 40
_WEIGHT = ("shape", "cut", "used_in_part", "heads")
_STRATEGY = ("tensor", "megatron_sp", "ulysses")
_LAYER_BYTES = ("saved_bytes", "working_bytes", "recompute_bytes")
_END_BYTES = ("saved_bytes", "saved_fixed_bytes", "working_bytes", "working_fixed_bytes")


def write_profile(profile: ModelProfile) -> str:
    """The profile as JSON text."""
    values: dict[str, Any] = {"version": VERSION}
    for field in fields(profile):
        value = getattr(profile, field.name)
        if field.name == "kinds":
            value = [_layer(kind) for kind in value]
        elif field.name in ("embedding", "head"):
            value = _end(value)
        elif isinstance(value, Mapping):
            value = dict(value)
        values[field.name] = value
    lines = {name: json.dumps(value) for name, value in values.items() if name not in ("kinds", "embedding", "head")}
    lines |= {name: json.dumps(values[name], indent=1) for name in ("kinds", "embedding", "head")}
    return "{" + ",\n ".join(f"{json.dumps(name)}: {text}" for name, text in lines.items()) + "}\n"


def _layer(kind: LayerProfile) -> dict[str, Any]:
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
    }


def _end(end: EndProfile) -> dict[str, Any]:
    return {
        "weights": [asdict(weight) for weight in end.weights],
        "times": _times(end.times),
        "bytes": [
            {"tensor": tensor}
            | {name: getattr(end, name)[tensor] for name in _END_BYTES if tensor in getattr(end, name)}
            for tensor in end.saved_bytes
        ],
    }


def _times(times: Mapping[int, Times]) -> list[dict[str, Any]]:
    return [{"tensor": tensor} | asdict(each) for tensor, each in times.items()]


def read_profile(source: str | os.PathLike | Mapping[str, Any]) -> ModelProfile:
    """
    Reads what [`write_profile`] wrote.

    Raises:
        ValueError: in one sentence, for anything else.
    """
    given = dict(read_object(source, "model profile"))
    names = tuple(field.name for field in fields(ModelProfile))
    check_fields("the model profile", given, ("version", *names), required=("version", *names[:11]))
    check_version(given.pop("version"))
    for name in ("hidden", "heads", "kv_heads", "head_dim"):
        check_int(name, given[name], high=_MAX)
    if type(given["name"]) is not str:
        raise ValueError(f"name is {show(given['name'])}, which is not a word: write 'my model'")
    check_choice("dtype", given["dtype"], ("fp32", "bf16"))
    check_bool("tied", given["tied"])
    if given.get("max_length") is not None:
        check_int("max_length", given["max_length"], high=_MAX)
    for name in (
        "optimizer_ms_per_element",
        "optimizer_ms_per_weight",
        "adding_ms_per_element",
        "collective_launch_ms",
    ):
        check_number(name, given.get(name, 0.0))
    calibration_factors = given.get("calibration_factors", {})
    check_fields("calibration_factors", calibration_factors, CALIBRATION_FACTORS)
    for name, factor in calibration_factors.items():
        check_number(f"calibration_factors of {name}", factor)
    for name in ("assumed", "made"):
        _check_texts(name, given.get(name, {}))
    given["kinds"] = _each("kinds", given["kinds"], _read_layer)
    layers = _each("layers", given["layers"], _read_index)
    if len(layers) > MAX_LAYERS or max(layers) >= len(given["kinds"]):
        raise ValueError(
            f"layers has {len(layers)} entries up to {max(layers)}, of {len(given['kinds'])} kinds: give each layer "
            "the number of its kind, counted from 0"
        )
    ends = {name: _read_end(name, given[name]) for name in ("embedding", "head")}
    return ModelProfile(**given | ends | {"layers": layers})


def _each(name: str, value: Any, read: Callable[[str, Any], T]) -> tuple[T, ...]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"{name} is {show(value)}, which is not a list with something in it: write [...]")
    return tuple(read(f"{name}[{index}]", entry) for index, entry in enumerate(value))


def _read_index(where: str, value: Any) -> int:
    check_int(where, value, low=0, high=MAX_LAYERS)
    return value


def _check_texts(name: str, value: Any) -> None:
    if not isinstance(value, dict) or any(type(text) is not str for text in value.values()):
        raise ValueError(f"{name} is {show(value)}, which is no object of texts: write {{}}")


def _read_layer(where: str, given: Any) -> LayerProfile:
    names = ("weights", "times", "bytes", "regions", "saves_after_last_region")
    check_fields(where, given, names, required=names)
    check_int(f"{where}.regions", given["regions"], high=1024)
    check_bool(f"{where}.saves_after_last_region", given["saves_after_last_region"])
    found: dict[str, dict] = {name: {} for name in _LAYER_BYTES}
    for place, entry in _each(f"{where}.bytes", given["bytes"], lambda place, entry: (place, entry)):
        check_fields(place, entry, (*_STRATEGY, *_LAYER_BYTES), required=(*_STRATEGY, "saved_bytes"))
        check_int(f"{place}.tensor", entry["tensor"], high=_MAX)
        check_bool(f"{place}.megatron_sp", entry["megatron_sp"])
        check_int(f"{place}.ulysses", entry["ulysses"], high=_MAX)
        _read_bytes(place, entry, tuple(entry[name] for name in _STRATEGY), found)
    return LayerProfile(
        weights=_each(f"{where}.weights", given["weights"], _read_weight),
        times=_read_times(f"{where}.times", given["times"]),
        regions=given["regions"],
        saves_after_last_region=given["saves_after_last_region"],
        **found,
    )


def _read_end(where: str, given: Any) -> EndProfile:
    names = ("weights", "times", "bytes")
    check_fields(where, given, names, required=names)
    found: dict[str, dict] = {name: {} for name in _END_BYTES}
    for place, entry in _each(f"{where}.bytes", given["bytes"], lambda place, entry: (place, entry)):
        check_fields(place, entry, ("tensor", *_END_BYTES), required=("tensor", "saved_bytes"))
        check_int(f"{place}.tensor", entry["tensor"], high=_MAX)
        _read_bytes(place, entry, entry["tensor"], found)
    return EndProfile(
        weights=_each(f"{where}.weights", given["weights"], _read_weight),
        times=_read_times(f"{where}.times", given["times"]),
        **found,
    )


def _read_bytes(where: str, entry: dict[str, Any], key: Any, found: dict[str, dict]) -> None:
    for name, values in found.items():
        if name in entry:
            check_number(f"{where}.{name}", entry[name])
            values[key] = entry[name]


def _read_weight(where: str, given: Any) -> WeightShape:
    check_fields(where, given, _WEIGHT, required=("shape",))
    shape = _each(f"{where}.shape", given["shape"], lambda place, size: (check_int(place, size, high=_MAX), size)[1])
    if given.get("cut") is not None:
        check_int(f"{where}.cut", given["cut"], low=0, high=len(shape) - 1)
    check_bool(f"{where}.used_in_part", given.get("used_in_part", False))
    if given.get("heads") is not None:
        check_int(f"{where}.heads", given["heads"], high=_MAX)
    return WeightShape(**given | {"shape": shape})


def _read_times(where: str, given: Any) -> dict[int, Times]:
    shares = ("forward_outside_tp", "backward_outside_tp", "forward_after_last_saved", "recompute_fixed")
    found = {}
    for place, entry in _each(where, given, lambda place, entry: (place, entry)):
        check_fields(place, entry, ("tensor", "forward", "backward", *shares), ("tensor", "forward", "backward"))
        check_int(f"{place}.tensor", entry["tensor"], high=_MAX)
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
