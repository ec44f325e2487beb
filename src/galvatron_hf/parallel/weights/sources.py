# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Sources of the weights of a model on the meta device: each fills the pieces that a rank holds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch

from galvatron_hf.parallel.comm.objects import broadcast_object
from galvatron_hf.parallel.weights.deferred_init import Template


@dataclass(frozen=True, kw_only=True)
class WeightPiece:
    """Holds the memory of the piece of a weight that this rank has; `region` is its position inside the weight. `name`
    is that of the family's files, for example "transformer.h.0.attn.c_attn.weight".
    """

    name: str
    region: tuple[slice, ...]
    tensor: torch.Tensor


class WeightSource(Protocol):
    """Gives a model on the meta device its weights."""

    @property
    def dtype(self) -> torch.dtype | None:
        """Returns the format to which values are rounded before they are copied; None for no rounding."""

    def fill(self, template: Template, pieces: list[WeightPiece]) -> None:
        """Writes the values of this rank's pieces; collective."""


@dataclass(frozen=True, kw_only=True)
class FamilyWeights:
    """Draws new weights: the values of `from_config` on one process with the CPU generator of rank 0."""

    dtype: torch.dtype | None = None

    def fill(self, template: Template, pieces: list[WeightPiece]) -> None:
        fill_with_initial_values(template, pieces)


@dataclass(frozen=True, kw_only=True)
class LaterWeights:
    """Fills weights with NaN, because a checkpoint is read next; a weight that it lacks is then noticed."""

    dtype: torch.dtype | None = None

    def fill(self, template: Template, pieces: list[WeightPiece]) -> None:
        for piece in pieces:
            if piece.tensor.is_floating_point():
                piece.tensor.fill_(float("nan"))


@torch.no_grad()
def fill_with_initial_values(template: Template, pieces: list[WeightPiece], only: set[str] | None = None) -> None:
    """Fills pieces with the family's initial values, drawn from the CPU generator of rank 0; collective. `only` names
    the weights to fill, see [`Template.initial_values`].
    """
    torch.set_rng_state(broadcast_object(torch.get_rng_state()))
    by_name: dict[str, list[WeightPiece]] = {}
    for piece in pieces:
        by_name.setdefault(piece.name, []).append(piece)
    buffers = dict(template.model.named_buffers())
    for name in by_name.keys() & buffers.keys():
        if only is None or name in only:
            _copy(buffers[name], by_name[name])
    for names, value in template.initial_values(only):
        for name in names:
            _copy(value, by_name.get(name, []))


def _copy(value: torch.Tensor, pieces: Iterable[WeightPiece]) -> None:
    for piece in pieces:
        piece.tensor.copy_(value[piece.region])
