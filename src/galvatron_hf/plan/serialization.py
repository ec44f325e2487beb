# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Reads plans of schema v1 from JSON, strictly and from bounded files, and writes them compactly."""

import json
import os
import stat
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from galvatron_hf.plan.strategies import (
    LayerStrategy,
    Precision,
    SequenceGroups,
    Stage,
    VocabularyStrategy,
    check_range,
)
from galvatron_hf.plan.validation import MAX_LAYERS, check_fields, check_int, show


if TYPE_CHECKING:
    from galvatron_hf.plan import ParallelPlan

MAX_BYTES = 16 * 1024 * 1024
MAX_DEPTH = 64
VERSION = 1

GROUP_FIELDS = ("max_tokens_per_rank", "max_degree")
LAYER_FIELDS = ("tensor", "megatron_sp", "ulysses", "context", "sharding", "shard_degree", "expert", "recompute")
VOCABULARY_FIELDS = ("tensor", "sharding", "shard_degree")
PLAN_FIELDS = (
    "version",
    "world_size",
    "stacks",
    "micro_batches",
    "schedule",
    "precision",
    "stages",
    "layers",
    "embedding",
    "head",
    "sequence_groups",
    "meta",
)


def read_object(source: Any, what: str = "plan") -> dict[str, Any]:
    """Reads one JSON object from JSON text (starts with a brace), a file's path, or a parsed object, called `what` in
    errors. Raises `ValueError` for a missing or oversized source, broken JSON, repeated names, NaN and infinities.
    """
    if isinstance(source, Mapping):
        text = _dump(dict(source), what)
    elif isinstance(source, str) and source.lstrip().startswith("{"):
        text = source
    elif isinstance(source, (str, os.PathLike)):
        text = _read_file(source, what)
    else:
        kind = type(source).__name__
        raise ValueError(f"the {what} is a {kind}, which cannot be read: give a path, JSON text or a dict")
    if len(text) > MAX_BYTES:
        raise ValueError(f"the {what} has {len(text)} characters, above the limit of {MAX_BYTES}: shorten it")
    try:
        parsed = json.loads(text, object_pairs_hook=_unique_names, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise ValueError(
            f"the {what} is not JSON ({error.msg.lower().removesuffix(' at')} at {where}): correct it there"
        ) from None
    except RecursionError:
        raise ValueError(f"the {what} is nested too deeply to be read: flatten it") from None
    except _Refused as error:
        raise ValueError(f"the {what} {error}") from None
    except ValueError:
        raise ValueError(f"the {what} holds a number with too many digits: write a smaller one") from None
    if not isinstance(parsed, dict):
        raise ValueError(f"the {what} is {show(parsed)}, which is not an object: write {{...}}")
    _check_depth(parsed, what)
    return parsed


def copy_meta(meta: Any) -> dict[str, Any]:
    """Returns a deep copy of `meta` through JSON, so that a plan equals the one read from its file."""
    if not isinstance(meta, Mapping):
        raise ValueError(f"meta is {show(meta)}, which is not an object: write {{}}")
    return read_object(meta, "meta")


def plan_arguments(raw: dict[str, Any]) -> dict[str, Any]:
    """Returns the keyword arguments of `ParallelPlan` for a parsed plan; spans become one strategy per layer."""
    check_fields("the plan", raw, PLAN_FIELDS, required=("version", "world_size", "stacks", "layers"))
    given = dict(raw)
    check_version(given["version"])
    num_layers = check_stacks(given["stacks"])
    given["layers"] = _expand(given["layers"], num_layers)
    for name in ("embedding", "head"):
        if name in given:
            given[name] = _build(VocabularyStrategy, VOCABULARY_FIELDS, given[name], name)
    if given.get("precision") is not None:
        given["precision"] = _build(Precision, ("compute", "master", "reduce"), given["precision"], "precision")
    if given.get("sequence_groups") is not None:
        given["sequence_groups"] = _build(
            SequenceGroups,
            (*GROUP_FIELDS, "kinds"),
            given["sequence_groups"],
            "sequence_groups",
            required=GROUP_FIELDS,
        )
    if "stages" in given:
        fields = ("ranks", "layers")
        given["stages"] = tuple(
            _build(Stage, fields, stage, f"stages[{index}]", required=fields)
            for index, stage in enumerate(_list("stages", given["stages"]))
        )
    return given


def check_version(version: Any) -> None:
    """Raises `ValueError` unless `version` is the schema version of this release."""
    if type(version) is not int or version != VERSION:
        raise ValueError(f"version is {show(version)}, which this release cannot read: use version {VERSION}")


def check_stacks(stacks: Any) -> int:
    """Checks the names and counts of stacks, and returns the number of all their layers."""
    if not isinstance(stacks, Mapping) or not stacks:
        raise ValueError(f"stacks is {show(stacks)}, which has no stack of layers: write {{'decoder': 12}}")
    for name, count in stacks.items():
        if type(name) is not str or not name:
            raise ValueError(f"stacks has the name {show(name)}, which is not a word: write {{'decoder': 12}}")
        check_int(f"stacks[{show(name)}]", count, high=MAX_LAYERS)
    total = sum(stacks.values())
    check_int("the sum of stacks", total, high=MAX_LAYERS)
    return total


def _expand(spans: Any, num_layers: int) -> tuple[LayerStrategy, ...]:
    found = []
    for index, entry in enumerate(_list("layers", spans)):
        where = f"layers[{index}]"
        check_fields(where, entry, ("span", *LAYER_FIELDS), required=("span",))
        span = tuple(_list(f"{where}.span", entry["span"]))
        check_range(f"{where}.span", span)
        settings = {name: value for name, value in entry.items() if name != "span"}
        found.append((span, _build(LayerStrategy, LAYER_FIELDS, settings, f"{where} (span {list(span)})")))
    layers: list[LayerStrategy] = []
    for (start, end), strategy in sorted(found, key=lambda item: item[0]):
        done = len(layers)
        check_next_range("layers", "span", start, end, done, num_layers)
        layers.extend([strategy] * (end - start))
    check_covered("layers", "span", len(layers), num_layers)
    return tuple(layers)


def check_next_range(field: str, unit: str, start: int, end: int, done: int, num_layers: int) -> None:
    """Raises `ValueError` unless a range begins where the previous one ended and ends by the last layer."""
    if start > done:
        raise ValueError(f"{field} leaves layer {done} without a {unit}: begin {unit} [{start}, {end}] at {done}")
    if start < done:
        fix = f"begin it at {done}" if end > done else "remove it"
        raise ValueError(f"{field} gives layer {start} twice, again in {unit} [{start}, {end}]: {fix}")
    if end > num_layers:
        raise ValueError(
            f"{field} has the {unit} {show([start, end])}, but the stacks have {num_layers} layers: "
            + (f"end it at {num_layers}" if start < num_layers else "remove it")
        )


def check_covered(field: str, unit: str, done: int, num_layers: int) -> None:
    """Raises `ValueError` if the ranges end before the last layer."""
    if done < num_layers:
        raise ValueError(f"{field} leaves layer {done} without a {unit}: end the last {unit} at {num_layers}")


def write_text(plan: "ParallelPlan") -> str:
    """Returns the plan as JSON text with one line per field, stage and span of equal neighbouring layers."""
    fields: dict[str, str] = {
        "version": json.dumps(plan.version),
        "world_size": json.dumps(plan.world_size),
        "stacks": json.dumps(dict(plan.stacks)),
    }
    if plan.micro_batches is not None:
        fields["micro_batches"] = json.dumps(plan.micro_batches)
    fields["schedule"] = json.dumps(plan.schedule)
    if plan.precision is not None:
        fields["precision"] = json.dumps(_settings(plan.precision, ("compute", "master", "reduce")))
    fields["stages"] = _lines([{"ranks": list(s.ranks), "layers": list(s.layers)} for s in plan.stages])
    spans = fold(plan.layers)
    fields["layers"] = _lines([{"span": list(span), **_settings(s, LAYER_FIELDS)} for span, s in spans])
    fields["embedding"] = json.dumps(_settings(plan.embedding, VOCABULARY_FIELDS))
    fields["head"] = json.dumps(_settings(plan.head, VOCABULARY_FIELDS))
    groups = plan.sequence_groups
    fields["sequence_groups"] = json.dumps(
        groups and {name: getattr(groups, name) for name in GROUP_FIELDS} | {"kinds": list(groups.kinds)}
    )
    fields["meta"] = json.dumps(plan.meta, allow_nan=False)
    return "{" + ",\n ".join(f"{json.dumps(name)}: {text}" for name, text in fields.items()) + "}\n"


def write_file(path: str | os.PathLike, text: str) -> None:
    """Writes a file atomically: a reader sees the old file or the complete new one, even after a power cut."""
    target = Path(path)
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        with open(partial, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, target)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def fold(layers: tuple[LayerStrategy, ...]) -> list[tuple[tuple[int, int], LayerStrategy]]:
    """Returns the half-open spans of equal neighbouring layers with their strategies."""
    spans = []
    start = 0
    for strategy, run in groupby(layers):
        end = start + sum(1 for _ in run)
        spans.append(((start, end), strategy))
        start = end
    return spans


class _Refused(Exception):
    """Reports a problem from inside the JSON parser, which does not know the name of the object."""


def _unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise _Refused(f"has the field {show(name)} twice in one object: keep one of them")
            seen.add(name)
    return result


def _refuse_constant(word: str) -> None:
    raise _Refused(f"holds {word}, which is not JSON: write a finite number")


def _read_file(path: str | os.PathLike, what: str) -> str:
    try:
        # Checked before opening, because opening a pipe waits for a writer.
        regular = stat.S_ISREG(os.stat(path).st_mode)
        content = b""
        if regular:
            with open(path, "rb") as file:
                content = file.read(MAX_BYTES + 1)
    except OSError as error:
        reason = (error.strerror or type(error).__name__).lower()
        raise ValueError(
            f"the {what} {show(str(path))} cannot be opened ({reason}): give the path of a JSON file or its text"
        ) from None
    except ValueError:
        raise ValueError(f"the {what} {show(str(path))} is not a path: give the path of a JSON file") from None
    if not regular:
        raise ValueError(f"the {what} {show(str(path))} is not a regular file: give the path of a JSON file")
    if len(content) > MAX_BYTES:
        raise ValueError(f"the {what} {show(str(path))} is above the limit of {MAX_BYTES} bytes: shorten it")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(f"the {what} {show(str(path))} is not UTF-8 text: save it as UTF-8") from None


def _check_depth(parsed: dict, what: str) -> None:
    level: list[Any] = [parsed]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for item in level
            for child in (item.values() if isinstance(item, dict) else item)
            if isinstance(child, (dict, list))
        ]
        if not level:
            return
    raise ValueError(f"the {what} is nested more than {MAX_DEPTH} deep: flatten it")


def _dump(value: dict, what: str) -> str:
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError, OverflowError) as error:
        raise ValueError(
            f"the {what} cannot be written as JSON ({' '.join(str(error).split())[:80]}): "
            "use plain dicts, lists, strings, finite numbers, true, false and null"
        ) from None


def _build(kind: type, fields: tuple[str, ...], given: Any, where: str, required: tuple[str, ...] = ()) -> Any:
    check_fields(where, given, fields, required)
    try:
        return kind(**given)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _list(name: str, value: Any) -> list | tuple:
    if not isinstance(value, (list, tuple)) or not value:
        raise ValueError(f"{name} is {show(value)}, which is not a list with something in it: write [...]")
    return value


def _settings(value: Any, names: tuple[str, ...]) -> dict[str, Any]:
    settings = {name: getattr(value, name) for name in names}
    return {name: setting for name, setting in settings.items() if setting is not None}


def _lines(items: list[dict]) -> str:
    return "[\n  " + ",\n  ".join(json.dumps(item) for item in items) + "]"
