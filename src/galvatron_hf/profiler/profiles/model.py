# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Stores the cost of a model as a value and as JSON. Imports no torch and no transformers."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from galvatron_hf.plan.serialization import check_stacks, check_version, read_object, write_file
from galvatron_hf.plan.strategies import DEFAULT_STACK
from galvatron_hf.plan.validation import (
    MAX_LAYERS,
    check_bool,
    check_choice,
    check_fields,
    check_int,
    check_number,
    show,
)
from galvatron_hf.profiler.profiles.layer_json import (
    MAX_SIZE,
    end_values,
    layer_values,
    read_each,
    read_end,
    read_layer,
)
from galvatron_hf.profiler.profiles.layers import EndProfile, LayerProfile


EXPERT_IMBALANCE = "expert imbalance"  # the name of this assumption
# Most choices that arrive at a rank over their mean, by expert degree: the middle of what trained routers of 8 experts
# showed, 1.1-1.7, 1.5-2.8 and 2.4-3.2. Other models and data differ.
ASSUMED_IMBALANCE = {2: 1.4, 4: 2.1, 8: 2.8}
MICRO_BATCHES = "micro-batches"  # what a profile's `made` says of them
PACKED = "packed"
CALIBRATION_FACTORS = ("computing", "communication", "synchronization", "weights", "sending", "copying")
_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class ModelProfile:
    """
    Describes the cost of a causal language model.

    Attributes:
        name (`str`): Name of the model.
        hidden, heads, kv_heads, head_dim (`int`): As in [`ModelShape`].
        dtype (`str`): Number format of the computation: "fp32" or "bf16".
        kinds (`tuple[LayerProfile, ...]`): Distinct kinds of layers.
        layers (`tuple[int, ...]`): Index into `kinds` of each layer.
        embedding, head ([`EndProfile`]): Ends of the model. The head includes the final norm.
        tied (`bool`): Whether embedding and head share one weight.
        max_length (`int`, *optional*): Positions of the model; None if unlimited.
        optimizer_ms_per_element, optimizer_ms_per_weight (`float`): Time of an update with gradient norm and clipping:
            for each element of a rank, and for each weight whatever its size.
        adding_ms_per_element (`float`): Time of adding a micro-batch's gradients to the earlier ones, per element of a
            rank.
        calibration_factors (`Mapping[str, float]`): Time in whole training steps over the time measured alone, of
            "computing", of four kinds of messages: "communication" (activations of tensor and Ulysses ranks, layout
            changes), "synchronization" (gradients of replicas), "weights" (gathers of weights and reduce-scatters of
            gradients) and "sending" (between stages), and of "copying" into messages and out of them. Empty if not
            calibrated: all are 1.
        collective_launch_ms (`float`): Wait of the ranks for each other before each collective of activations; 0 if
            not calibrated.
        weights_launch_ms (`float`): What each gather of a layer's weights and each reduction of its gradients takes
            besides messages and copies, on one rank too; 0 if not calibrated.
        router_loss (`bool`): Whether the model adds a loss of its routers.
        expert_imbalance (`Mapping[int, float]`): Most choices of experts that arrive at a rank over their mean, by
            expert degree, where it was measured.
        stacks (`Mapping[str, int]`): Number of layers of each stack, as in [`ParallelPlan`]; empty for one stack.
        whole_rows (`bool`): Whether embedding and head need whole rows on every rank.
        images (`bool`): Whether rows are images, of `max_length` positions each.
        shares_documents (`bool`): Whether ranks can share documents of packed rows, as context degrees need.
        assumed, made (`Mapping[str, str]`): As in [`HardwareProfile`].
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
    weights_launch_ms: float = 0.0
    router_loss: bool = False
    expert_imbalance: Mapping[int, float] = field(default_factory=dict)
    stacks: Mapping[str, int] = field(default_factory=dict)
    whole_rows: bool = False
    images: bool = False
    shares_documents: bool = False
    assumed: Mapping[str, str] = field(default_factory=dict)
    made: Mapping[str, str] = field(default_factory=dict)

    @property
    def packed(self) -> bool:
        """Returns whether the costs are those of packed documents, and not of rows."""
        return self.made.get(MICRO_BATCHES) == PACKED

    @property
    def stack_sizes(self) -> dict[str, int]:
        """Returns the stacks of a plan for this model."""
        return dict(self.stacks) or {DEFAULT_STACK: len(self.layers)}

    @property
    def stage_ratio(self) -> float:
        """Returns the tokens of a row whose states go from a stage to the next, at most, for each of the workload's:
        those of a layer, and those that it reads.
        """
        return max(kind.length_ratio + kind.read_ratio for kind in self.kinds)

    @property
    def element_bytes(self) -> int:
        """Returns the bytes of one element of an activation."""
        return {"fp32": 4, "bf16": 2}[self.dtype]

    @property
    def has_experts(self) -> bool:
        return any(kind.experts is not None for kind in self.kinds)

    def imbalance(self, degree: int) -> float:
        """Returns the most choices that arrive at a rank over their mean: `expert_imbalance` where it has a figure,
        else the assumed one. Between two known degrees it is that of the lower one, above them that of the highest.
        """
        known = {1: 1.0} | ASSUMED_IMBALANCE | dict(self.expert_imbalance)
        return known[max(each for each in known if each <= degree)]

    @classmethod
    def from_json(cls, source: str | os.PathLike | Mapping[str, Any]) -> ModelProfile:
        """Reads a profile from a file's path, JSON text, or the parsed object; raises `ValueError` for other input."""
        given = dict(read_object(source, "model profile"))
        names = tuple(entry.name for entry in fields(cls))
        check_fields("the model profile", given, ("version", *names), required=("version", *names[:11]))
        check_version(given.pop("version"))
        _check_plain(given)
        kinds = read_each("kinds", given["kinds"], read_layer)
        layers = read_each("layers", given["layers"], _read_index)
        stacks = given.get("stacks", {})
        if stacks and check_stacks(stacks) != len(layers):
            raise ValueError(f"stacks is {show(stacks)}, but there are {len(layers)} layers: make them agree")
        if len(layers) > MAX_LAYERS or max(layers) >= len(kinds):
            raise ValueError(
                f"layers has {len(layers)} entries up to {max(layers)}, but there are {len(kinds)} kinds: give each "
                "layer the number of its kind, counted from 0"
            )
        ends = {name: read_end(name, given[name]) for name in ("embedding", "head")}
        imbalance = read_imbalance(given.get("expert_imbalance", {}))
        return cls(**given | ends | {"kinds": kinds, "layers": layers, "expert_imbalance": imbalance})

    def to_json(self, path: str | os.PathLike | None = None) -> str:
        """Returns the profile as JSON text, and writes it to `path` if given."""
        values = {"version": _VERSION} | {entry.name: getattr(self, entry.name) for entry in fields(self)}
        lines = {
            name: json.dumps(dict(value) if isinstance(value, Mapping) else value)
            for name, value in values.items()
            if name not in ("kinds", "embedding", "head")
        }
        lines["kinds"] = json.dumps([layer_values(kind) for kind in self.kinds], indent=1)
        lines |= {name: json.dumps(end_values(values[name]), indent=1) for name in ("embedding", "head")}
        text = "{" + ",\n ".join(f"{json.dumps(name)}: {line}" for name, line in lines.items()) + "}\n"
        if path is not None:
            write_file(path, text)
        return text


def _check_plain(given: Mapping[str, Any]) -> None:
    for name in ("hidden", "heads", "kv_heads", "head_dim"):
        check_int(name, given[name], high=MAX_SIZE)
    if type(given["name"]) is not str:
        raise ValueError(f"name is {show(given['name'])}, which is not a word: write 'my model'")
    check_choice("dtype", given["dtype"], ("fp32", "bf16"))
    check_bool("tied", given["tied"])
    for name in ("router_loss", "whole_rows", "images", "shares_documents"):
        check_bool(name, given.get(name, False))
    if given.get("max_length") is not None:
        check_int("max_length", given["max_length"], high=MAX_SIZE)
    for name in (
        "optimizer_ms_per_element",
        "optimizer_ms_per_weight",
        "adding_ms_per_element",
        "collective_launch_ms",
        "weights_launch_ms",
    ):
        check_number(name, given.get(name, 0.0))
    factors = given.get("calibration_factors", {})
    check_fields("calibration_factors", factors, CALIBRATION_FACTORS)
    for name, factor in factors.items():
        check_number(f"calibration_factors of {name}", factor)
    for name in ("assumed", "made"):
        value = given.get(name, {})
        if not isinstance(value, dict) or any(type(text) is not str for text in value.values()):
            raise ValueError(f"{name} is {show(value)}, which is no object of texts: write {{}}")


def read_imbalance(given: Any) -> dict[int, float]:
    """Reads `expert_imbalance`; JSON has the degrees as texts. Raises `ValueError` for what is none."""
    if not isinstance(given, dict) or not all(str(degree).isdecimal() and int(degree) > 0 for degree in given):
        raise ValueError(
            f'expert_imbalance is {show(given)}, which is no object of figures by degree: write {{"2": 1.4}}'
        )
    for degree, value in given.items():
        check_number(f"expert_imbalance of {degree}", value, low=1.0)
        if value > int(degree):
            raise ValueError(f"expert_imbalance of {degree} is {show(value)}, but all rows at one rank are {degree}")
    return {int(degree): value for degree, value in given.items()}


def _read_index(where: str, value: Any) -> int:
    check_int(where, value, low=0, high=MAX_LAYERS)
    return value
