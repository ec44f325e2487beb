# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Where the weights of a model without any come from, as each rank sees it: pieces with names and regions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from galvatron_hf.parallel.weights.deferred_init import Template


@dataclass(frozen=True, kw_only=True)
class Place:
    """A piece of a family's weight on this rank.

    Attributes:
        name (`str`): the weight in the family's files, for example "transformer.h.0.attn.c_attn.weight".
        region (`tuple[slice, ...]`): the piece inside it.
        tensor (`torch.Tensor`): its memory.
    """

    name: str
    region: tuple[slice, ...]
    tensor: torch.Tensor


class WeightSource(Protocol):
    """Where the weights of a model on the meta device come from."""

    @property
    def dtype(self) -> torch.dtype | None:
        """The format that values have on their way into the parameters, which may have a wider one; None: theirs."""

    def fill(self, template: Template, places: list[Place]) -> None:
        """Gives this rank's pieces their values; collective."""


@dataclass(frozen=True, kw_only=True)
class FamilyWeights:
    """The family's own initialisation: the values of `from_config` on one process, from rank 0's CPU generator."""

    dtype: torch.dtype | None = None

    def fill(self, template: Template, places: list[Place]) -> None:
        fill_with_initial_values(template, places)


@dataclass(frozen=True, kw_only=True)
class LaterWeights:
    """No weights yet, because a checkpoint is read next; what it left out would be seen as NaN."""

    dtype: torch.dtype | None = None

    def fill(self, template: Template, places: list[Place]) -> None:
        for place in places:
            if place.tensor.is_floating_point():
                place.tensor.fill_(float("nan"))


@torch.no_grad()
def fill_with_initial_values(template: Template, places: list[Place], only: set[str] | None = None) -> None:
    """Gives pieces the values that the family begins with; collective, from rank 0's CPU generator.

    Args:
        template ([`Template`]): of the family.
        places (`list[Place]`): this rank's pieces.
        only (`set[str]`, *optional*): the weights that are wanted, see [`Template.initial_values`].
    """
    state = [torch.get_rng_state()]
    dist.broadcast_object_list(state, src=0)
    torch.set_rng_state(state[0])
    by_name: dict[str, list[Place]] = {}
    for place in places:
        by_name.setdefault(place.name, []).append(place)
    buffers = dict(template.model.named_buffers())
    for name in by_name.keys() & buffers.keys():
        if only is None or name in only:
            _copy(buffers[name], by_name[name])
    for names, value in template.initial_values(only):
        for name in names:
            _copy(value, by_name.get(name, []))


def _copy(value: torch.Tensor, places: Iterable[Place]) -> None:
    for place in places:
        place.tensor.copy_(value[place.region])
