# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The state of a learning-rate scheduler by the names of weights, because a plan decides the optimizer's groups."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.utils import logging

from galvatron_hf.models.fused_weights import FusedNames
from galvatron_hf.parallel.weights.optimizer_state import check_groups
from galvatron_hf.plan.validation import show


logger = logging.get_logger(__name__)

SCHEDULER_FILE = "scheduler.json"


@dataclass(frozen=True, kw_only=True)
class SchedulerState:
    """Holds the values of a scheduler, for optimizers with any groups.

    Attributes:
        common (`dict[str, Any]`): numbers, strings and lists of them that belong to no group.
        groups (`list[dict]`): for each group the `names` of its weights and its `values`, for example of "base_lrs".
    """

    common: dict[str, Any] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any], groups: Sequence[Sequence[str]]) -> SchedulerState:
        """Reads a scheduler's `state_dict`; `groups` are the names of each group's weights."""
        common: dict[str, Any] = {}
        values: list[dict[str, Any]] = [{} for _ in groups]
        for name, value in state.items():
            if isinstance(value, (list, tuple)) and len(value) == len(groups):
                for of_group, one in zip(values, value, strict=True):
                    of_group[name] = one
            elif _is_plain(value):
                common[name] = value
            else:
                logger.warning(f"The scheduler's {name} is a {type(value).__name__}, which is not saved.")
        named = [{"names": list(names), "values": found} for names, found in zip(groups, values, strict=True)]
        return cls(common=common, groups=named)

    @classmethod
    def from_ranks(cls, states: Sequence[SchedulerState]) -> SchedulerState:
        """Joins the states of the ranks of all stages; ranks of one stage have the same groups."""
        groups: list[dict[str, Any]] = []
        for state in states:
            groups += [group for group in state.groups if group not in groups]
        return cls(common=states[0].common, groups=groups)

    def for_groups(self, state: Mapping[str, Any], groups: Sequence[Sequence[str]]) -> dict[str, Any]:
        """Returns a `state_dict` for a scheduler whose optimizer may have other groups. `state` is its present one,
        which has the wanted names and types; `groups` are the names of each group's weights.
        """
        by_name = {name: group["values"] for group in self.groups for name in group["names"]}
        loaded = dict(state) | {name: value for name, value in self.common.items() if name in state}
        missing = [names[0] for names in groups if names and names[0] not in by_name]
        if missing:
            raise ValueError(f"the scheduler's state does not know {missing[0]}: use another checkpoint")
        # The groups of a frozen stage are empty, but their learning rate is logged: they take that of the first group.
        first = next((group["values"] for group in self.groups if group["names"]), {})
        found = [by_name[names[0]] if names else first for names in groups]
        for name in {name for values in found for name in values} & set(state):
            present = state[name]
            if not isinstance(present, (list, tuple)) or len(present) != len(groups):
                raise ValueError(f"the scheduler's {name} is no group's: use another checkpoint")
            loaded[name] = [values.get(name, present[i]) for i, values in enumerate(found)]
        for name, value in loaded.items():
            if not _is_like(value, state[name]):
                raise ValueError(
                    f"the scheduler's {name} is {show(value)} and should be like {show(state[name])}: "
                    "use another checkpoint"
                )
        return loaded

    def load_into(self, scheduler: Any, groups: Sequence[Sequence[str]]) -> None:
        """Loads the state into a scheduler; `groups` are the names of each of its optimizer's groups."""
        scheduler.load_state_dict(self.for_groups(scheduler.state_dict(), groups))

    def to_json(self) -> dict[str, Any]:
        """Returns JSON values; numbers that JSON lacks, such as infinity, become strings."""
        return {"common": _encoded(self.common), "groups": _encoded(self.groups)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> SchedulerState:
        """Reads what [`SchedulerState.to_json`] returned; any other value raises ValueError."""
        common, groups = values.get("common"), values.get("groups")
        if not isinstance(common, dict):
            raise ValueError(f"common is {show(common)}, which is not an object: use another checkpoint")
        check_groups(groups, "values")
        return cls(common=_decoded(common), groups=_decoded(groups))


def group_names(optimizer: torch.optim.Optimizer, names: Mapping[int, str], fused: FusedNames) -> list[list[str]]:
    """Returns the family's names of each group's weights; `names` maps a parameter's `id` to its model name."""
    return [[fused.family_name(names[id(p)]) for p in group["params"]] for group in optimizer.param_groups]


def _is_like(value: Any, present: Any) -> bool:
    """Returns whether a value that was read may replace a present one."""
    if value is None or present is None:
        return True
    numbers = (bool, int, float)
    if isinstance(value, (list, tuple)) and isinstance(present, (list, tuple)):
        return len(value) == len(present) and all(map(_is_like, value, present))
    return isinstance(value, type(present)) or (isinstance(value, numbers) and isinstance(present, numbers))


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    return value is None or isinstance(value, (bool, int, float, str))


_NOT_FINITE = ("inf", "-inf", "nan")


def _encoded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _encoded(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_encoded(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _decoded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _decoded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_decoded(item) for item in value]
    return float(value) if isinstance(value, str) and value in _NOT_FINITE else value
