# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""An optimizer's state by the names of its weights, so that another plan or other parameter groups can load it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from galvatron_hf.models.fused_weights import FusedNames
from galvatron_hf.parallel.comm.dtensor import assign, full_tensor
from galvatron_hf.plan.validation import show


@dataclass(kw_only=True)
class NamedOptimizerState:
    """Holds the state of an optimizer by weight.

    Attributes:
        tensors (`dict[str, dict[str, torch.Tensor]]`): by kind ("exp_avg") and weight's name, a tensor of the weight's
            shape or a scalar.
        numbers (`dict[str, dict[str, float]]`): by kind and weight's name, a state that is a Python number.
        options (`dict[str, dict[str, Any]]`): by the family's name of a weight, the options of its group ("lr", ...).
    """

    tensors: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    numbers: dict[str, dict[str, float]] = field(default_factory=dict)
    options: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def from_optimizer(
        cls, optimizer: torch.optim.Optimizer, names: Mapping[int, str], fused: FusedNames
    ) -> NamedOptimizerState:
        """Reads an optimizer with tensors and numbers as state; `names` has this runtime's names by `id`."""
        state = cls()
        for group in optimizer.param_groups:
            options = {name: _plain(value) for name, value in group.items() if name != "params"}
            for parameter in group["params"]:
                name = names[id(parameter)]
                state.options[fused.family_name(name)] = options
                for kind, value in optimizer.state.get(parameter, {}).items():
                    state._add(kind, name, value)
        return state

    @classmethod
    def from_file(
        cls, path: str | os.PathLike, names: Sequence[Sequence[str]], fused: FusedNames
    ) -> NamedOptimizerState:
        """Reads an `optimizer.pt` of a plain model, which numbers weights by their position in the groups. `names` has
        the family's names of each group's weights, in order; other sizes of the groups are refused.
        """
        saved = torch.load(path, map_location="cpu", weights_only=True)
        sizes = [len(group["params"]) for group in saved["param_groups"]]
        if sizes != [len(group) for group in names]:
            raise ValueError(
                f"{path} has groups of {sizes} weights, and this model's optimizer has groups of "
                f"{[len(group) for group in names]}; resume with the arguments and the model that wrote it."
            )
        state = cls()
        for group, group_names in zip(saved["param_groups"], names, strict=True):
            options = {name: _plain(value) for name, value in group.items() if name != "params"}
            for index, name in zip(group["params"], group_names, strict=True):
                state.options[name] = options
                for kind, value in saved["state"].get(index, {}).items():
                    state._add(kind, name, value)
        return state.renamed(fused.split)

    def _add(self, kind: str, name: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            self.tensors.setdefault(kind, {})[name] = value
        elif isinstance(value, (int, float)):
            self.numbers.setdefault(kind, {})[name] = value
        elif value is not None:
            raise ValueError(
                f"The optimizer keeps a {type(value).__name__} {kind!r} for {name}, which a checkpoint cannot hold; "
                "use an optimizer whose state is tensors and numbers, or save_only_model=True."
            )

    def renamed(self, rename) -> NamedOptimizerState:
        """Returns the state under other names; `rename` is [`FusedNames.join`] or [`FusedNames.split`]."""
        as_tensors = {kind: {n: torch.tensor(v) for n, v in values.items()} for kind, values in self.numbers.items()}
        return NamedOptimizerState(
            tensors={kind: rename(values) for kind, values in self.tensors.items()},
            numbers={kind: {n: v.item() for n, v in rename(values).items()} for kind, values in as_tensors.items()},
            options=self.options,
        )

    def load_into(self, optimizer: torch.optim.Optimizer, names: Mapping[int, str], fused: FusedNames) -> None:
        """Loads the state into an optimizer with any parameter groups; refuses one whose weights it lacks. Collective
        over ranks that have several copies of one weight.
        """
        state, groups, index = {}, [], 0
        copied = Counter(names[id(one)] for group in optimizer.param_groups for one in group["params"])
        for group in optimizer.param_groups:
            parameters = group["params"]
            local = [names[id(parameter)] for parameter in parameters]
            missing = [name for name in local if fused.family_name(name) not in self.options]
            if missing:
                raise ValueError(
                    f"The checkpoint's optimizer does not know {missing[0]}, because it was frozen there; "
                    "resume with the same weights frozen, or start anew from save_model's folder."
                )
            # The groups of a frozen stage are empty, but their learning rate may be logged: they take another group's.
            options = dict(
                self.options[fused.family_name(local[0])] if local else next(iter(self.options.values()), {})
            )
            for name, value in options.items():
                options[name] = tuple(value) if isinstance(group.get(name), tuple) else value
            groups.append({**group, **options, "params": list(range(index, index + len(local)))})
            for name, parameter in zip(local, parameters, strict=True):
                kinds = [*self.tensors.items(), *self.numbers.items()]
                values = {kind: by_name[name] for kind, by_name in kinds if name in by_name}
                if copied[name] > 1:  # copies of a tied weight need separate states
                    values = {kind: _copy_for(parameter, value) for kind, value in values.items()}
                if values:
                    state[index] = values
                index += 1
        optimizer.load_state_dict({"state": state, "param_groups": groups})

    def options_json(self) -> list[dict[str, Any]]:
        """Returns the options as JSON values: each set of options once, with the names of its weights."""
        groups: list[dict[str, Any]] = []
        for name, options in self.options.items():
            group = next((group for group in groups if group["options"] == options), None)
            if group is None:
                groups.append({"options": options, "names": [name]})
            else:
                group["names"].append(name)
        return groups


def options_from_json(groups: Any) -> dict[str, dict[str, Any]]:
    """Returns the options by weight from [`NamedOptimizerState.options_json`]; refuses values of another form."""
    check_groups(groups, "options")
    return {name: group["options"] for group in groups for name in group["names"]}


def numbers_from_json(numbers: Any) -> dict[str, dict[str, int | float]]:
    """Checks and returns [`NamedOptimizerState.numbers`] read from a file; refuses values of another form."""
    kinds = list(numbers.values()) if isinstance(numbers, dict) else [None]
    if not all(isinstance(kind, dict) and all(type(n) in (int, float) for n in kind.values()) for kind in kinds):
        raise ValueError(f"numbers is {show(numbers)}, which is not the state of an optimizer: use another checkpoint")
    return numbers


def check_groups(groups: Any, values: str) -> None:
    """Raises a `ValueError` unless `groups` is a list of objects with `names` and an object named `values`."""
    for group in groups if isinstance(groups, list) else [groups]:
        names, given = (group.get("names"), group.get(values)) if isinstance(group, dict) else (None, None)
        if not isinstance(given, dict) or not isinstance(names, list) or not all(type(name) is str for name in names):
            raise ValueError(f"a group is {show(group)}, without names and {values}: use another checkpoint")


@torch.no_grad()
def _copy_for(parameter: torch.Tensor, value: Any) -> Any:
    """Returns a copy of a state of another weight, cut as the parameter is; collective if that is cut otherwise."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.shape != parameter.shape:
        return value.clone()
    copy = torch.zeros_like(parameter, dtype=value.dtype)
    assign(copy, full_tensor(value))
    return copy


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.item()
    return list(value) if isinstance(value, tuple) else value
