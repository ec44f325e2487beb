# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Galvatron's strategy files: read into a plan and written from one."""

import os
import re
from collections.abc import Mapping
from typing import Any

from galvatron_hf.plan import ParallelPlan
from galvatron_hf.plan.serialization import read_object
from galvatron_hf.plan.strategies import DEFAULT_STACK, LayerStrategy, Stage, VocabularyStrategy
from galvatron_hf.plan.validation import (
    MAX_LAYERS,
    MAX_MICRO_BATCHES,
    MAX_RANKS,
    check_bool,
    check_choice,
    check_fields,
    check_int,
    divisors,
    nearest,
    show,
)


REQUIRED = ("pp_deg", "tp_sizes_enc", "tp_consecutive_flags", "dp_types_enc", "global_bsz", "chunks")
# The values of Galvatron's reader for absent fields (its arguments' defaults for the last three).
DEFAULTS = {
    "use_sp": 0,
    "checkpoint": 0,
    "cp_sizes_enc": 1,
    "vtp": 1,
    "vsp": 0,
    "embed_sdp": 0,
    "pipeline_type": "gpipe",
    "default_dp_type": "ddp",
}
COLUMNS = ("use_sp", "checkpoint", "cp_sizes_enc")
FIELDS = (*REQUIRED, *DEFAULTS, "pp_division", "world_size", "vocab_sdp")
SCHEDULE_OF = {"gpipe": "gpipe", "pipedream_flush": "1f1b"}
SHARDING_OF = {"ddp": "replicate", "zero2": "zero2", "zero3": "zero3"}


def read_galvatron_plan(
    source: str | os.PathLike | Mapping[str, Any], world_size: int | None = None, *, megatron_sp: bool = True
) -> ParallelPlan:
    """Reads a strategy file of Galvatron.

    The per-layer lists are comma-separated. `dp_types_enc` and `embed_sdp` (newer readers call it `vocab_sdp`) are 1
    for ZeRO-3 and 0 for `default_dp_type`. `use_sp` 1 makes a layer's entry of `tp_sizes_enc` its Ulysses degree, and
    `vsp` 1 leaves the vocabulary unsplit. `vtp` and `embed_sdp` apply to embedding and head alike. Values without a
    field in a plan (such as `global_bsz`, or `vtp` under `vsp`) go to `meta["galvatron"]` for [`to_galvatron`].
    Source: PKU-DAIR/Hetu-Galvatron, `galvatron/utils/config_utils.py`,
    `galvatron/core/runtime/hybrid_parallel_config.py` and `galvatron/core/runtime/transformer/attention.py`.

    Args:
        source (`str`, `os.PathLike` or `Mapping`): the path of a JSON file, JSON text, or the parsed object.
        world_size (`int`, *optional*): number of ranks, for files without the field `world_size`.
        megatron_sp (`bool`, defaults to `True`): tensor-parallel layers also use Megatron sequence parallelism.
            Galvatron has this as the launch argument `sequence_parallel`, not in its files. Its runtime refuses to
            start without the argument and its cost model assumes it.

    Raises:
        `ValueError`: in one sentence, for a broken file or one that a plan cannot express.
    """
    raw = read_object(source, "Galvatron plan")
    check_fields("the Galvatron plan", raw, FIELDS, required=REQUIRED)
    check_bool("megatron_sp", megatron_sp)
    default_type = raw.get("default_dp_type", DEFAULTS["default_dp_type"])
    check_choice("default_dp_type", default_type, tuple(SHARDING_OF))
    pipeline_type = raw.get("pipeline_type", DEFAULTS["pipeline_type"])
    check_choice("pipeline_type", pipeline_type, tuple(SCHEDULE_OF))
    check_int("global_bsz", raw["global_bsz"], high=MAX_MICRO_BATCHES)
    check_int("chunks", raw["chunks"], high=MAX_MICRO_BATCHES)
    ranks = _world_size(raw, world_size)
    layers = _layers(raw, SHARDING_OF[default_type], megatron_sp)
    stages = _stages(raw, ranks, len(layers))
    vocabulary = _vocabulary(raw, len(stages[0].ranks), SHARDING_OF[default_type])
    return ParallelPlan(
        world_size=ranks,
        stacks={DEFAULT_STACK: len(layers)},
        micro_batches=raw["chunks"],
        schedule=SCHEDULE_OF[pipeline_type],
        stages=stages,
        layers=layers,
        embedding=vocabulary,
        head=vocabulary,
        meta={"galvatron": _kept(raw, default_type)},
    )


def to_galvatron(plan: ParallelPlan) -> dict[str, Any]:
    """Returns the fields of a strategy file of Galvatron, to be written as JSON. A plan that was read from a file
    gives the fields of that file. Megatron-SP (`sequence_parallel`), precision (`mixed_precision`) and stacks are
    launch arguments of Galvatron and no fields of the file. `global_bsz` comes from `meta["galvatron"]`, else it is
    one row per data rank and micro-batch.

    Raises:
        `ValueError`: in one sentence, with the first field that Galvatron cannot express.
    """
    _check_expressible(plan)
    kept = plan.meta.get("galvatron")
    kept = kept if isinstance(kept, dict) else {}
    count = plan.num_layers
    default_type = _default_type(plan, kept)
    degrees = [layer.tensor * layer.ulysses for layer in plan.layers]
    # If two values of a flag mean the same, the file's own value is written.
    same_type = default_type == "zero3"
    zero3 = _kept_flags(kept, "dp_types_enc", count, 1) if same_type else [1] * count
    ulysses = _kept_flags(kept, "use_sp", count, 0)
    split_positions = plan.embedding.tensor == 1 and kept.get("vsp") == 1 and type(kept.get("vtp")) is int
    vocabulary_zero3 = int(plan.embedding.sharding == "zero3")
    if same_type and kept.get("embed_sdp") in (0, 1):
        vocabulary_zero3 = int(kept["embed_sdp"])
    fields = {
        "pp_deg": len(plan.stages),
        "tp_sizes_enc": _joined(degrees),
        "tp_consecutive_flags": _joined([1] * count),
        "cp_sizes_enc": _joined(layer.context for layer in plan.layers),
        "dp_types_enc": _joined(int(layer.sharding == "zero3" and flag) for layer, flag in zip(plan.layers, zero3)),
        "use_sp": _joined(
            int(layer.ulysses > 1 or (degree == 1 and flag))
            for layer, degree, flag in zip(plan.layers, degrees, ulysses)
        ),
        "checkpoint": _joined(int(layer.recompute == "full") for layer in plan.layers),
        "world_size": plan.world_size,
        "global_bsz": kept.get("global_bsz", _default_batch(plan)),
        "chunks": plan.micro_batch_count,
        "pp_division": _joined(stage.layers[1] - stage.layers[0] for stage in plan.stages),
        "pipeline_type": next(name for name, schedule in SCHEDULE_OF.items() if schedule == plan.schedule),
        "default_dp_type": default_type,
        "vtp": kept["vtp"] if split_positions else plan.embedding.tensor,
        "vsp": int(split_positions),
        # Galvatron writes the first name and reads the second.
        "embed_sdp": vocabulary_zero3,
        "vocab_sdp": vocabulary_zero3,
    }
    return {name: value for name, value in fields.items() if not _left_out(name, value, plan, kept)}


def _layers(raw: dict[str, Any], default: str, megatron_sp: bool) -> tuple[LayerStrategy, ...]:
    degrees = _numbers("tp_sizes_enc", raw["tp_sizes_enc"])
    columns = {name: _column(raw, name, len(degrees)) for name in ("tp_consecutive_flags", "dp_types_enc", *COLUMNS)}
    for name, column in columns.items():
        for layer, flag in enumerate(column):
            if flag > 1 and name != "cp_sizes_enc":
                raise ValueError(f"{name} is {flag} for layer {layer}, which has no meaning here: use 0 or 1")
    if 0 in columns["tp_consecutive_flags"]:
        layer = columns["tp_consecutive_flags"].index(0)
        raise ValueError(
            f"tp_consecutive_flags is 0 for layer {layer}, but here tensor ranks are always consecutive: use 1"
        )
    del columns["tp_consecutive_flags"]
    return tuple(
        LayerStrategy(
            tensor=1 if ulysses else degree,
            megatron_sp=megatron_sp and not ulysses and degree > 1,
            ulysses=degree if ulysses else 1,
            context=context,
            sharding="zero3" if zero3 else default,
            recompute="full" if recompute else "none",
        )
        for degree, zero3, ulysses, recompute, context in zip(degrees, *columns.values())
    )


def _kept(raw: dict[str, Any], default_type: str) -> dict[str, Any]:
    """Returns the values of a strategy file that a plan has no field for, so that the file can be written again."""
    kept = {"fields": [name for name in FIELDS if name in raw], "default_dp_type": default_type}
    kept.update({name: raw[name] for name in ("global_bsz", "use_sp", "vsp", "vtp") if name in raw})
    if default_type == "zero3":
        kept["dp_types_enc"] = raw["dp_types_enc"]
        kept["embed_sdp"] = raw.get("embed_sdp", raw.get("vocab_sdp", 0))
    return kept


def _kept_flags(kept: dict[str, Any], name: str, count: int, otherwise: int) -> list[int]:
    try:
        flags = _numbers(name, kept.get(name))
    except ValueError:
        flags = []
    return flags if len(flags) == count and set(flags) <= {0, 1} else [otherwise] * count


def _world_size(raw: dict[str, Any], given: int | None) -> int:
    if "world_size" not in raw and given is None:
        raise ValueError("the Galvatron plan has no world_size: pass world_size, its number of ranks")
    found = raw.get("world_size", given)
    check_int("world_size", found, high=MAX_RANKS)
    if given is not None and given != found:
        raise ValueError(
            f"the Galvatron plan has world_size={found}, but world_size={show(given)} was passed: "
            f"use world_size={found}"
        )
    return found


def _stages(raw: dict[str, Any], ranks: int, count: int) -> tuple[Stage, ...]:
    degree = raw["pp_deg"]
    check_int("pp_deg", degree, high=MAX_RANKS)
    if ranks % degree or degree > count:
        reason = f"does not divide the {ranks} ranks" if ranks % degree else f"is more than the {count} layers"
        fitting = nearest(degree, [d for d in divisors(ranks) if d <= count])
        raise ValueError(f"pp_deg is {degree}, which {reason}: use pp_deg={fitting}")
    even = _even_division(count, degree)
    division = _numbers("pp_division", raw["pp_division"]) if "pp_division" in raw else even
    if len(division) != degree or sum(division) != count or 0 in division:
        raise ValueError(
            f"pp_division is {show(raw.get('pp_division'))}, which does not cut {count} layers into {degree} stages: "
            f"use {show(_joined(even))}"
        )
    size = ranks // degree
    starts = [sum(division[:index]) for index in range(degree + 1)]
    return tuple(
        Stage(ranks=tuple(range(index * size, (index + 1) * size)), layers=(starts[index], starts[index + 1]))
        for index in range(degree)
    )


def _even_division(count: int, degree: int) -> list[int]:
    """Returns Galvatron's division for files without one: the last stage takes the remaining layers."""
    return [count // degree] * (degree - 1) + [count - count // degree * (degree - 1)]


def _vocabulary(raw: dict[str, Any], ranks: int, default: str) -> VocabularyStrategy:
    if "embed_sdp" in raw and "vocab_sdp" in raw and raw["embed_sdp"] != raw["vocab_sdp"]:
        raise ValueError("embed_sdp and vocab_sdp are two names of one field and differ: keep one of them")
    name = "vocab_sdp" if "vocab_sdp" in raw else "embed_sdp"
    tensor, ulysses, zero3 = raw.get("vtp", 1), raw.get("vsp", 0), raw.get(name, 0)
    check_int("vtp", tensor, high=MAX_RANKS)
    check_int("vsp", ulysses, low=0, high=1)
    check_int(name, zero3, low=0, high=1)
    if ranks % tensor:
        fitting = nearest(tensor, divisors(ranks))
        raise ValueError(f"vtp is {tensor}, which does not divide the {ranks} ranks of a stage: use vtp={fitting}")
    return VocabularyStrategy(tensor=1 if ulysses else tensor, sharding="zero3" if zero3 else default)


def _column(raw: dict[str, Any], name: str, count: int) -> list[int]:
    if name not in raw:
        return [DEFAULTS[name]] * count
    found = _numbers(name, raw[name])
    if len(found) != count:
        raise ValueError(f"{name} has {len(found)} entries, but tp_sizes_enc has {count} layers: give {count}")
    return found


def _numbers(name: str, text: Any) -> list[int]:
    if type(text) is not str or not re.fullmatch(r"\s*\d{1,8}\s*(,\s*\d{1,8}\s*)*", text, re.ASCII):
        raise ValueError(f"{name} is {show(text)}, which is not a comma-separated list of numbers: write '1,1'")
    found = [int(number) for number in text.split(",")]
    if len(found) > MAX_LAYERS:
        raise ValueError(f"{name} has {len(found)} entries, above the limit of {MAX_LAYERS}: shorten it")
    return found


def _joined(numbers: Any) -> str:
    return ",".join(map(str, numbers))


def _left_out(name: str, value: Any, plan: ParallelPlan, kept: dict[str, Any]) -> bool:
    """Returns whether the plan's file had no such field and `value` is Galvatron's default for it."""
    given = kept.get("fields")
    if not isinstance(given, list) or not given or name in given or name in REQUIRED:
        return False
    if name in ("world_size", "vocab_sdp"):
        return name == "world_size" or "embed_sdp" in given or value == 0
    if name == "embed_sdp":
        return "vocab_sdp" in given or value == 0
    if name == "pp_division":
        return value == _joined(_even_division(plan.num_layers, len(plan.stages)))
    default = DEFAULTS[name]
    return value == (_joined([default] * plan.num_layers) if name in COLUMNS else default)


def _default_batch(plan: ParallelPlan) -> int:
    ranks = len(plan.stages[0].ranks)
    return max(layer.data_degree(ranks) for layer in set(plan.layers)) * plan.micro_batch_count


def _default_type(plan: ParallelPlan, kept: dict[str, Any]) -> str:
    found: dict[str, str] = {}
    for index, layer in enumerate(plan.layers):
        found.setdefault(layer.sharding, f"layer {index}")
    found.setdefault(plan.embedding.sharding, "the embedding")
    if "replicate" in found and "zero2" in found:
        raise ValueError(
            f"{found['replicate']} is 'replicate' and {found['zero2']} 'zero2', but Galvatron has one default_dp_type "
            "besides ZeRO-3: use one of the two"
        )
    names = {sharding: name for name, sharding in SHARDING_OF.items()}
    for sharding in ("replicate", "zero2"):
        if sharding in found:
            return names[sharding]
    default = kept.get("default_dp_type")
    return default if isinstance(default, str) and default in SHARDING_OF else "zero2"


def _check_expressible(plan: ParallelPlan) -> None:
    if plan.schedule not in SCHEDULE_OF.values():
        raise ValueError(f"schedule is {plan.schedule!r}, which Galvatron does not have: use '1f1b' or 'gpipe'")
    if plan.sequence_groups is not None:
        raise ValueError("sequence_groups is given, which Galvatron does not have: use sequence_groups=null")
    ranks = len(plan.stages[0].ranks)
    for index, stage in enumerate(plan.stages):
        expected = tuple(range(index * ranks, (index + 1) * ranks))
        if stage.ranks != expected:
            raise ValueError(
                f"stages[{index}] has ranks {show(list(stage.ranks))}, but Galvatron gives stages equally many "
                f"consecutive ranks: use {ranks} ranks from {index * ranks} on"
            )
    for index, layer in enumerate(plan.layers):
        if layer.tensor > 1 and layer.ulysses > 1:
            problem, fix = f"tensor={layer.tensor} and ulysses={layer.ulysses}", "one of them"
        elif layer.expert > 1:
            problem, fix = f"expert={layer.expert}", "expert=1"
        elif layer.sharding != "replicate" and layer.resolved_shard_degree(ranks) != ranks // layer.tensor:
            problem, fix = f"shard_degree={layer.shard_degree}", f"shard_degree={ranks // layer.tensor}"
        else:
            continue
        raise ValueError(f"layer {index} has {problem}, which Galvatron cannot express: use {fix}")
    split = {layer.megatron_sp for layer in plan.layers if layer.tensor > 1}
    if len(split) > 1:
        raise ValueError(
            "megatron_sp is true for some tensor-parallel layers and false for others, but Galvatron has one switch "
            "for all: use true everywhere"
        )
    if plan.embedding != plan.head:
        raise ValueError("embedding and head differ, but Galvatron has one strategy for both: make them equal")
    pieces = plan.embedding.resolved_shard_degree(ranks)
    if plan.embedding.sharding != "replicate" and pieces != ranks // plan.embedding.tensor:
        raise ValueError(
            f"embedding has shard_degree={pieces}, which Galvatron cannot express: "
            f"use shard_degree={ranks // plan.embedding.tensor}"
        )
