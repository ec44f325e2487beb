# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The best assignment of a few items to bins, as a mixed-integer program that HiGHS solves."""

from __future__ import annotations

import numpy as np
import scipy.optimize
import scipy.sparse

from galvatron_hf.data.partition import Bins, Items


_LARGEST = 1500  # choices of a bin for an item; beyond, the search may not end in reasonable time
_SOLVED, _INFEASIBLE = 0, 2  # of scipy.optimize.milp


class TooLargeError(ValueError):
    """A case that is too large to be solved to the end."""


def solve(
    items: Items, bins: Bins, *, overhead: float = 0.0, least_groups: int = 1, effort: int | None = None
) -> np.ndarray | None:
    """
    Minimises the sum over groups of the most loaded bin, and `overhead` for each group used beyond the fewest.

    Variables are, in this order: whether item i is in bin b [n * bins], the peak of each group, whether it is used.
    Groups stand by falling peak, which leaves one of their equal permutations.

    Args:
        effort (`int`, *optional*): Nodes of the search times items times bins, after which it is given up; a clock
            would give one placement here and another there.

    Returns:
        The assignment, whose first groups are the used ones, or `None` when the items do not fit.

    Raises:
        TooLargeError: when there are too many items and bins, or the search does not come to an end.
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
    for place in range(width):
        rows[n + place, chosen[:, place]] = costs
        rows[n + place, peak[group_of[place]]] = -1
        rows[n + width + place, chosen[:, place]] = items.tokens
        high[n + width + place] = min(bins.max_tokens, int(items.tokens.sum()))
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
            f"{n} sequences for {width} bins: planner='exact' did not come to an end within {nodes} nodes; use "
            "planner='longest_first'."
        )
    if result.x is None:
        return None
    return result.x[chosen].argmax(axis=1).astype(np.int64)
