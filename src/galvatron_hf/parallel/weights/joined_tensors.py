# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Tensors of safetensors files, and weights joined from several of them, of which any region can be read alone."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from safetensors import safe_open


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """Locates a tensor of a safetensors file."""

    file: str
    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype | None

    def read_into(self, target: torch.Tensor, region: tuple[slice, ...], dtype: torch.dtype | None = None) -> None:
        """Reads the region into `target`, rounding to `dtype` first. The file is opened for this tensor alone, because
        mapped pages count as memory of the process until it is closed.
        """
        if target.numel():
            with safe_open(self.file, framework="pt") as file:
                _copy(self.read(file, region), target, dtype)

    def read(self, file: Any, region: tuple[slice, ...]) -> torch.Tensor:
        """Returns the region of the tensor from its opened file."""
        return file.get_slice(self.key)[region] if self.shape else file.get_tensor(self.key)


@dataclass(frozen=True, kw_only=True)
class Part:
    """Places a stored tensor inside a joined one.

    Attributes:
        stored ([`StoredTensor`]): the tensor of a file.
        first (`tuple[int, ...]`): for each dimension of the joined tensor, the index at which the part begins.
        dims (`tuple[int | None, ...]`): for each dimension of the joined tensor, that of the stored one, or None for a
            dimension that the stored tensor lacks and in which the part has one index.
    """

    stored: StoredTensor
    first: tuple[int, ...]
    dims: tuple[int | None, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(1 if dim is None else self.stored.shape[dim] for dim in self.dims)

    def overlap(self, region: Sequence[slice]) -> list[tuple[int, int]]:
        """Returns the bounds of what the part and a region have in common along each dimension; empty ones if
        nothing.
        """
        own = zip(self.first, self.shape, region, strict=True)
        return [(max(first, cut.start), min(first + size, cut.stop)) for first, size, cut in own]

    def read(self, file: Any, bounds: Sequence[tuple[int, int]]) -> torch.Tensor:
        """Returns what is between bounds of the joined tensor, with its dimensions, from the part's opened file."""
        cuts = [slice(low - first, high - first) for (low, high), first in zip(bounds, self.first, strict=True)]
        kept = [dim for dim in self.dims if dim is not None]
        piece = self.stored.read(file, tuple(cuts[self.dims.index(dim)] for dim in range(len(kept)))).permute(kept)
        for position, dim in enumerate(self.dims):
            if dim is None:
                piece = piece.unsqueeze(position)
        return piece


@dataclass(frozen=True, kw_only=True)
class JoinedTensor:
    """Joins stored tensors, such as one for each expert of a layer, without reading them. Parts fill it without gaps.

    Attributes:
        shape (`tuple[int, ...]`): of the whole, for example [experts, 2 * intermediate, hidden].
        parts (`tuple[Part, ...]`): in the order in which they were joined.
    """

    shape: tuple[int, ...]
    parts: tuple[Part, ...]

    @classmethod
    def of(cls, stored: StoredTensor) -> JoinedTensor:
        """Returns a tensor of one part."""
        rank = len(stored.shape)
        return cls(shape=stored.shape, parts=(Part(stored=stored, first=(0,) * rank, dims=tuple(range(rank))),))

    @classmethod
    def stack(cls, tensors: Sequence[JoinedTensor], dim: int) -> JoinedTensor:
        """Joins tensors of one shape along a new dimension, as `torch.stack`; raises ValueError for other shapes."""
        dim %= len(tensors[0].shape) + 1
        return cls.concatenate([tensor._unsqueeze(dim) for tensor in tensors], dim)

    @classmethod
    def concatenate(cls, tensors: Sequence[JoinedTensor], dim: int) -> JoinedTensor:
        """Joins tensors along a dimension, as `torch.cat`; raises ValueError unless the others are equal."""
        dim %= len(tensors[0].shape)
        if len({(*tensor.shape[:dim], *tensor.shape[dim + 1 :]) for tensor in tensors}) > 1:
            shapes = sorted({tensor.shape for tensor in tensors})
            raise ValueError(f"{tensors[0].key} is joined with others, and they have the shapes {shapes}")
        parts, starts = [], itertools.accumulate((tensor.shape[dim] for tensor in tensors), initial=0)
        for start, tensor in zip(starts, tensors, strict=False):
            for part in tensor.parts:
                first = (*part.first[:dim], part.first[dim] + start, *part.first[dim + 1 :])
                parts.append(replace(part, first=first))
        size = sum(tensor.shape[dim] for tensor in tensors)
        return cls(shape=(*tensors[0].shape[:dim], size, *tensors[0].shape[dim + 1 :]), parts=tuple(parts))

    def transpose(self, first: int, second: int) -> JoinedTensor:
        """Exchanges two dimensions."""

        def exchanged(values: tuple) -> tuple:
            changed = list(values)
            changed[first], changed[second] = changed[second], changed[first]
            return tuple(changed)

        parts = [replace(part, first=exchanged(part.first), dims=exchanged(part.dims)) for part in self.parts]
        return JoinedTensor(shape=exchanged(self.shape), parts=tuple(parts))

    @property
    def file(self) -> str:
        return self.parts[0].stored.file

    @property
    def key(self) -> str:
        """Returns the key of the first part, which stands for all in messages."""
        return self.parts[0].stored.key

    def read_into(self, target: torch.Tensor, region: tuple[slice, ...], dtype: torch.dtype | None = None) -> None:
        """Reads the region into `target`, rounding to `dtype` first: from each part no more than the region has of
        it, and one part at a time.
        """
        whole = [slice(0, size) for size in self.shape]
        region = (*region, *whole[len(region) :])
        wanted = [(part, part.overlap(region)) for part in self.parts]
        wanted = [(part, bounds) for part, bounds in wanted if all(low < high for low, high in bounds)]
        by_file = itertools.groupby(sorted(wanted, key=_place), key=lambda pair: pair[0].stored.file)
        for path, parts in by_file:
            with safe_open(path, framework="pt") as file:
                for part, bounds in parts:
                    cuts = zip(bounds, region, strict=True)
                    place = tuple(slice(low - cut.start, high - cut.start) for (low, high), cut in cuts)
                    _copy(part.read(file, bounds), target[place], dtype)

    def _unsqueeze(self, dim: int) -> JoinedTensor:
        def longer(values: tuple, value: int | None) -> tuple:
            return (*values[:dim], value, *values[dim:])

        parts = [replace(part, first=longer(part.first, 0), dims=longer(part.dims, None)) for part in self.parts]
        return JoinedTensor(shape=longer(self.shape, 1), parts=tuple(parts))


def _place(pair: tuple[Part, Sequence[tuple[int, int]]]) -> tuple[str, str]:
    stored = pair[0].stored
    return stored.file, stored.key


def _copy(stored: torch.Tensor, target: torch.Tensor, dtype: torch.dtype | None) -> None:
    rounded = dtype not in (None, target.dtype) and stored.is_floating_point()
    target.copy_(stored.to(dtype) if rounded else stored)
