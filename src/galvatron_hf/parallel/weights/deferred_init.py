# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Replays a family's initialisation one weight at a time, with the random numbers of plain construction. Construction
writes every weight in place: when its module is made, and again in `_init_weights`. The writes are recorded on the
meta device, which costs no memory, then run in their order with memory for one weight at a time.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from galvatron_hf.utils.compat import (
    OpOverload,
    TorchDispatchMode,
    model_from_config,
    storage_key,
    written_arguments,
)
from galvatron_hf.utils.empty_weights import without_weights


# Operators whose result does not depend on the former content; random ones are recognised by their tag.
_OVERWRITES = ("zero_", "fill_", "copy_")


@dataclass(frozen=True, kw_only=True)
class _Write:
    """Records one in-place operation on a meta tensor, which may be a view of a weight. `target` keeps its storage
    alive, whose address identifies the weight.
    """

    operation: OpOverload
    target: torch.Tensor
    arguments: tuple
    options: dict[str, Any]

    @property
    def storage(self) -> int:
        return storage_key(self.target)

    @property
    def is_random(self) -> bool:
        return torch.Tag.nondeterministic_seeded in self.operation.tags

    @property
    def overwrites(self) -> bool:
        """Returns True if the operation replaces the whole content of the storage."""
        whole = self.target.numel() * self.target.itemsize == self.target.untyped_storage().nbytes()
        return whole and (self.is_random or self.operation.overloadpacket.__name__ in _OVERWRITES)

    @property
    def can_run(self) -> bool:
        return not any(isinstance(value, torch.Tensor) and value.is_meta for value in self.arguments)

    def run(self, storage: torch.Tensor) -> None:
        """Runs the operation on real memory, given as bytes."""
        view = storage.view(self.target.dtype)
        view = view.as_strided(self.target.shape, self.target.stride(), self.target.storage_offset())
        self.operation(view, *self.arguments, **self.options)


class _Memory:
    """Reuses buffers of the largest weight's size, because malloc may keep freed blocks of many sizes."""

    def __init__(self, largest_bytes: int):
        self.largest_bytes = -(-largest_bytes // 16) * 16  # whole elements of any format
        self._free: list[torch.Tensor] = []

    def take(self) -> torch.Tensor:
        return self._free.pop() if self._free else torch.empty(self.largest_bytes, dtype=torch.uint8)

    def give_back(self, room: torch.Tensor) -> None:
        self._free.append(room)


class _Recorder(TorchDispatchMode):
    """Records the operators that write to meta tensors in place."""

    def __init__(self):
        super().__init__()
        self.writes: list[_Write] = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        target = args[0] if args else None
        if isinstance(target, torch.Tensor) and target.is_meta:
            if written_arguments(operation)[0]:
                write = _Write(operation=operation, target=target, arguments=args[1:], options=kwargs or {})
                self.writes.append(write)
        return result


@dataclass(frozen=True, kw_only=True)
class Template:
    """Holds a family's model without memory for weights, and the recorded initialisation of its weights.

    Attributes:
        model ([`PreTrainedModel`]): the model, with parameters on the meta device and buffers on the CPU.
        names (`dict[int, tuple[str, ...]]`): names of the parameters by storage; a tied weight has several.
        writes (`list`): the in-place writes of construction, in order.
    """

    model: PreTrainedModel
    names: dict[int, tuple[str, ...]]
    writes: list[_Write] = field(repr=False)

    @classmethod
    def from_config(cls, family: type[PreTrainedModel], config, dtype: torch.dtype) -> Template:
        """Constructs the family's model as `from_config` does, without memory for weights."""
        recorder = _Recorder()
        with torch.random.fork_rng(devices=[]), without_weights(), recorder:
            model = model_from_config(family, copy.deepcopy(config), dtype)
        names: dict[int, tuple[str, ...]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names[storage_key(parameter)] = (*names.get(storage_key(parameter), ()), name)
        return cls(model=model, names=names, writes=recorder.writes)

    def tied_to(self, name: str) -> tuple[str, ...]:
        """Returns all names of a weight, including `name`; a buffer has one name."""
        return next((names for names in self.names.values() if name in names), (name,))

    def initial_values(self, only: set[str] | None = None) -> Iterator[tuple[tuple[str, ...], torch.Tensor]]:
        """Yields the names of each weight and its initial value, whose memory is reused after the next `next`. Values
        are drawn from the CPU's default generator. By default all numbers of plain construction are drawn. `only`
        names the weights that are missing after loading; numbers are then drawn for these alone.

        Raises:
            ValueError: if the family does not write one of the weights as a whole.
        """
        wanted = {key: names for key, names in self.names.items() if only is None or not only.isdisjoint(names)}
        begins = {write.storage: index for index, write in enumerate(self.writes) if write.overwrites}
        ends = {write.storage: index for index, write in enumerate(self.writes)}
        for key, names in wanted.items():
            self._require_replay(key, names, begins)
        memory = _Memory(max((write.target.untyped_storage().nbytes() for write in self.writes), default=0))
        begun: dict[int, torch.Tensor] = {}
        for index, write in enumerate(self.writes):
            key = write.storage
            if key in wanted and index >= begins[key]:
                if key not in begun:
                    begun[key] = memory.take()
                write.run(begun[key])
                if index == ends[key]:
                    parameter, room = self.model.get_parameter(wanted[key][0]), begun.pop(key)
                    yield wanted[key], room.view(parameter.dtype)[: parameter.numel()].view(parameter.shape)
                    memory.give_back(room)
            elif write.is_random and only is None:
                room = memory.take()
                write.run(room)  # overwritten later, but it advances the generator
                memory.give_back(room)

    def _require_replay(self, key: int, names: tuple[str, ...], begins: dict[int, int]) -> None:
        later = [write for write in self.writes[begins.get(key, 0) :] if write.storage == key]
        if key not in begins or not all(write.can_run for write in later):
            raise ValueError(
                f"{type(self.model).__name__} has no initialisation of {names[0]} that can run for one weight "
                "alone; build the model without torch.device('meta'), or load its weights from a folder."
            )
