# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Fewer rows to and from the experts (LSH-MoE, arXiv 2411.08446): rows that are alike travel as their mean.

Rows of one expert that fall into the same bucket of every hash are a cluster. The expert computes on the mean of a
cluster, its centroid; each row adds what it differs by: `E(centroid) + (row - centroid)`. The function and its
gradient are those of this formula, so they differ from the expert's own unless each row is a cluster of its own.

A hash is of the cross-polytope kind: a random projection to `width` numbers, of which the largest, with its sign, is
the bucket. Whoever makes the clusters knows their number only on the device; the host learns it when it learns how
many rows travel.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.autograd.function import once_differentiable

from galvatron_hf.parallel.layers.rng import stream_key
from galvatron_hf.plan.validation import check_int, check_number


MAX_HASHES = 64
MAX_WIDTH = 4096
_LARGEST_KEY = 2**62  # of what is sorted as a 64-bit integer


@dataclass(frozen=True, kw_only=True)
class LshDispatch:
    """Says which rows travel to the experts as one.

    Args:
        hashes (`int`): hashes whose buckets must all be equal; more of them make smaller clusters, of closer rows.
        width (`int`): numbers that a hash projects a row to; it has twice as many buckets.
        seed (`int`): of the random projections, which also differ from layer to layer.
        max_residual (`float`, *optional*): a row may differ from its centroid by this part of its own norm. If one row
            of a cluster differs by more, each row of the cluster travels by itself. With 0.0 only equal rows share.

    Raises:
        ValueError: if a number is out of range.
    """

    hashes: int
    width: int
    seed: int = 0
    max_residual: float | None = None

    def __post_init__(self):
        check_int("hashes", self.hashes, high=MAX_HASHES)
        check_int("width", self.width, high=MAX_WIDTH)
        check_int("seed", self.seed, low=0, high=2**63 - 1)
        if self.max_residual is not None:
            check_number("max_residual", self.max_residual)


@dataclass(frozen=True, kw_only=True)
class Clusters:
    """Says which rows travel as one.

    Attributes:
        of_row (`torch.Tensor`): [rows], the cluster of each row. Clusters are numbered from 0 in the order of their
            experts.
        counts (`torch.Tensor`): [experts], the clusters of each expert.
    """

    of_row: torch.Tensor
    counts: torch.Tensor


@dataclass(kw_only=True)
class DispatchStatistics:
    """Sums over the forwards of one layer on this rank, recomputed ones too: they send again.

    Attributes:
        pairs (`int`): choices of experts; without compression each is a row that travels.
        centroids (`int`): rows that travelled.
        sent_bytes, plain_bytes (`int`): bytes of these rows on the way to the experts, and of those without
            compression; what stays on this rank is counted too. Over all ranks of a layer the way back has as many,
            and so does each way of the backward.
    """

    pairs: int = 0
    centroids: int = 0
    sent_bytes: int = 0
    plain_bytes: int = 0
    _residuals: torch.Tensor | None = field(default=None, init=False)
    _cosines: torch.Tensor | None = field(default=None, init=False)

    @property
    def mean_residual(self) -> torch.Tensor | None:
        """Returns how far a row is from its centroid in the mean, as a part of its norm; a scalar on the device, None
        if no row came.
        """
        return None if self._residuals is None else self._residuals / self.pairs

    @property
    def mean_cosine(self) -> torch.Tensor | None:
        """Returns the mean cosine of a row and its centroid; a scalar on the device, None if no row came."""
        return None if self._cosines is None else self._cosines / self.pairs

    @torch.no_grad()
    def add(self, rows: torch.Tensor, means: torch.Tensor, of_row: torch.Tensor) -> None:
        """Adds one forward: its rows [rows, features], centroids [clusters, features] and the cluster of each row."""
        if not rows.shape[0]:
            return
        self.pairs += rows.shape[0]
        self.centroids += means.shape[0]
        self.sent_bytes += means.numel() * means.element_size()
        self.plain_bytes += rows.numel() * rows.element_size()
        total = residuals(rows, means, of_row).sum(dtype=torch.float64)
        self._residuals = total if self._residuals is None else self._residuals + total
        alike = torch.cosine_similarity(_wide(rows), _wide(means)[of_row], dim=1).sum(dtype=torch.float64)
        self._cosines = alike if self._cosines is None else self._cosines + alike


def projections(options: LshDispatch, features: int, layer: int, device: torch.device) -> torch.Tensor:
    """Returns the random projections [features, hashes, width] of a layer, the same on every rank."""
    generator = torch.Generator().manual_seed(stream_key(options.seed, layer))
    return torch.randn(features, options.hashes, options.width, generator=generator).to(device)


@torch.no_grad()
def buckets(rows: torch.Tensor, projected_by: torch.Tensor) -> torch.Tensor:
    """Returns the buckets [rows, hashes] of rows [rows, features] under [`projections`]: the index of the projected
    number that is largest by absolute value, plus `width` if it is negative.
    """
    projected = torch.einsum("rf,fhw->rhw", rows.float(), projected_by)
    largest = projected.abs().argmax(-1, keepdim=True)
    negative = projected.gather(-1, largest) < 0
    return (largest + negative * projected_by.shape[2]).squeeze(-1)


@torch.no_grad()
def clusters(
    rows: torch.Tensor, experts: torch.Tensor, hashed: torch.Tensor, options: LshDispatch, count: int
) -> Clusters:
    """Finds the clusters of rows, without waiting for the device.

    Args:
        rows (`torch.Tensor`): [rows, features].
        experts (`torch.Tensor`): [rows], the expert of each row, in ascending order.
        hashed (`torch.Tensor`): [rows, hashes], the [`buckets`] of each row.
        options ([`LshDispatch`]): the bound on what rows differ by.
        count (`int`): experts of the layer.
    """
    base, keys, largest = 2 * options.width, experts, count
    for of_hash in hashed.unbind(1):
        if largest * base > _LARGEST_KEY:
            keys, largest = _numbered(keys), len(rows)
        keys, largest = keys * base + of_hash, largest * base
    of_row = _numbered(keys)
    if options.max_residual is not None:
        of_row = _numbered(of_row * len(rows) + _index_if_far(rows, of_row, options.max_residual))
    # There are as many places as rows, since the host does not know how many clusters there are.
    expert_of, exists = torch.zeros_like(of_row).scatter_(0, of_row, experts), torch.zeros_like(of_row)
    counts = experts.new_zeros(count).scatter_add_(0, expert_of, exists.scatter_(0, of_row, 1))
    return Clusters(of_row=of_row, counts=counts)


def _numbered(keys: torch.Tensor) -> torch.Tensor:
    """Numbers the different values of keys [rows] from 0, in their order; returns the number of each key."""
    ordered, order = torch.sort(keys)
    differs = torch.zeros_like(ordered)
    differs[1:] = ordered[1:] != ordered[:-1]
    return torch.empty_like(order).scatter_(0, order, differs.cumsum(0))


def _index_if_far(rows: torch.Tensor, of_row: torch.Tensor, bound: float) -> torch.Tensor:
    """Returns the index of each row whose cluster has a row that is farther from the centroid than the bound, else 0;
    clusters are as many as rows at most.
    """
    far = residuals(rows, _means(rows, of_row, len(rows)), of_row)
    farthest = torch.zeros_like(far).scatter_reduce_(0, of_row, far, "amax")
    # "not within", so that rows that are not finite spoil no others
    return torch.arange(len(rows), device=rows.device) * ~(farthest[of_row] <= bound)


@torch.no_grad()
def residuals(rows: torch.Tensor, means: torch.Tensor, of_row: torch.Tensor) -> torch.Tensor:
    """Returns how far each of the rows [rows, features] is from its centroid, as a part of its own norm: [rows]."""
    wide = _wide(rows)
    norms = wide.norm(dim=1).clamp(min=torch.finfo(wide.dtype).tiny)
    return (wide - means[of_row]).norm(dim=1) / norms


# ---- Differentiable ----


def centroids(rows: torch.Tensor, of_row: torch.Tensor, count: int) -> torch.Tensor:
    """Returns the means [count, features] of the rows [rows, features] of each cluster, in the rows' type. The mean of
    equal rows is the row itself, bit by bit. `of_row` is the cluster of each row; `count` is the number of clusters.
    """
    return _Means.apply(rows, of_row, count)


def expand(outputs: torch.Tensor, rows: torch.Tensor, means: torch.Tensor, of_row: torch.Tensor) -> torch.Tensor:
    """Returns `outputs + (row - centroid)` for each of the rows [rows, features].

    Args:
        outputs (`torch.Tensor`): [clusters, features], what the experts make of the centroids.
        rows (`torch.Tensor`): [rows, features].
        means (`torch.Tensor`): [clusters, features], the [`centroids`].
        of_row (`torch.Tensor`): [rows], the cluster of each row.
    """
    return _Spread.apply(outputs, of_row) + (rows - _Spread.apply(means, of_row))


class _Means(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, of_row, count):
        ctx.save_for_backward(of_row)
        return _means(rows, of_row, count)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (of_row,) = ctx.saved_tensors
        shares = _wide(grad) / _sizes(of_row, grad.shape[0])[:, None]
        return shares.to(grad.dtype)[of_row], None, None


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values, of_row):
        ctx.save_for_backward(of_row)
        ctx.count = values.shape[0]
        return values[of_row]

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (of_row,) = ctx.saved_tensors
        return _sums(_wide(grad), of_row, ctx.count).to(grad.dtype), None


def _means(rows: torch.Tensor, of_row: torch.Tensor, count: int) -> torch.Tensor:
    # Sums differences to a row of the cluster: they are smaller than the rows, and zero for equal ones.
    wide, index = _wide(rows), torch.arange(len(rows), device=rows.device)
    first = index.new_zeros(count).scatter_reduce_(0, of_row, index, "amin", include_self=False)
    start = wide[first]
    differences = _sums(wide - start[of_row], of_row, count)
    return (start + differences / _sizes(of_row, count)[:, None]).to(rows.dtype)


def _sums(rows: torch.Tensor, of_row: torch.Tensor, count: int) -> torch.Tensor:
    return rows.new_zeros(count, rows.shape[1]).index_add_(0, of_row, rows)


def _sizes(of_row: torch.Tensor, count: int) -> torch.Tensor:
    """Returns the rows of each cluster, 1 for clusters that do not exist."""
    return of_row.new_zeros(count).scatter_add_(0, of_row, torch.ones_like(of_row)).clamp(min=1)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
