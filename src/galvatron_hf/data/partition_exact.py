# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Finds the best assignment of a few items to bins by a mixed-integer program (HiGHS)."""

from __future__ import annotations

import numpy as np
import scipy.optimize
import scipy.sparse

from galvatron_hf.data.partition import Bins, Items


_LARGEST = 1500  # items * bins; larger searches may not end in reasonable time
_SOLVED, _INFEASIBLE = 0, 2  # of scipy.optimize.milp


class TooLargeError(ValueError):
    """The case is too large for an exact solution."""


def solve(
    items: Items, bins: Bins, *, overhead: float = 0.0, least_groups: int = 1, effort: int | None = None
) -> np.ndarray | None:
    """Minimises sum of peaks + `overhead` * used groups; a group's peak is the load of its most loaded bin.

    Variables, in this order: item i is in bin b [n * bins], the peak of each group, the group is used. Groups are
    ordered by falling peak, which excludes equal permutations. The first `least_groups` groups cost no overhead.
    `effort` limits nodes * items * bins; a limit of time would give different placements on different machines.
    Returns the assignment, whose first groups are the used ones, or `None` if the items do not fit.

    Raises:
        TooLargeError: if there are too many items and bins, or the search does not end within `effort`.
    """
    n, width, groups = len(items), bins.count, bins.groups
    if n * width > _LARGEST:
        raise TooLargeError(
            f"{n} sequences for {width} bins: planner='exact' is for small cases, up to {_LARGEST} as a product; use "
            "planner='longest_first'."
        )
    nodes = None if effort is None else max(1, effort // (n * width or 1))
    scale = items.costs.max(initial=0) or 1.0
    costs = items.costs / scale
    chosen = np.arange(n * width).reshape(n, width)
    peak, used = n * width + np.arange(groups), n * width + groups + np.arange(groups)
    total = n * width + 2 * groups
    group_of = np.arange(width) // bins.width
    rows = scipy.sparse.lil_array((n + 2 * width + 2 * (groups - 1) + n * groups, total))
    low, high = np.full(rows.shape[0], -np.inf), np.zeros(rows.shape[0])
    for item in range(n):  # each item once
        rows[item, chosen[item]] = 1
        low[item] = high[item] = 1
    for bin_ in range(width):
        rows[n + bin_, chosen[:, bin_]] = costs
        rows[n + bin_, peak[group_of[bin_]]] = -1
        rows[n + width + bin_, chosen[:, bin_]] = items.tokens
        high[n + width + bin_] = min(bins.max_tokens, int(items.tokens.sum()))
    row = n + 2 * width
    for group in range(groups - 1):  # peak[group] >= peak[group + 1], and used ones first
        for kind in (peak, used):
            rows[row, kind[group + 1]], rows[row, kind[group]] = 1, -1
            row += 1
    for item in range(n):
        for group in range(groups):
            rows[row, chosen[item, group_of == group]] = 1
            rows[row, used[group]] = -1
            row += 1
    objective = np.concatenate([np.zeros(n * width), np.ones(groups), np.full(groups, overhead / scale)])
    objective[used[:least_groups]] = 0
    upper = np.ones(total)
    upper[peak] = np.inf
    for item in range(min(n, bins.width)):  # bins of a group are alike: the i-th item needs at most i + 1 of them
        upper[chosen[item, np.arange(width) % bins.width > item]] = 0
    result = scipy.optimize.milp(
        objective,
        constraints=scipy.optimize.LinearConstraint(rows.tocsr(), low, high),
        integrality=np.where(np.isin(np.arange(total), peak), 0, 1),
        bounds=scipy.optimize.Bounds(np.zeros(total), upper),
        options={"mip_rel_gap": 1e-9} | ({} if nodes is None else {"node_limit": nodes}),
    )
    if nodes is not None and result.status not in (_SOLVED, _INFEASIBLE):
        raise TooLargeError(
            f"{n} sequences for {width} bins: planner='exact' did not end within {nodes} nodes; use "
            "planner='longest_first'."
        )
    if result.x is None:
        return None
    return result.x[chosen].argmax(axis=1).astype(np.int64)
