# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Rows that no other row beats, against comparing all pairs."""

import numpy as np

from galvatron_hf.planner.solver.pareto import dominated, nondominated


def test_fronts_are_those_of_pairwise_comparison():
    draw = np.random.default_rng(0)
    for columns in (2, 3, 4):
        values = draw.integers(0, 6, (700, columns))
        less = (values[:, None] <= values).all(axis=2) & (values[:, None] < values).any(axis=2)
        wanted = {tuple(row) for row in values[~less.any(axis=0)]}
        kept = values[nondominated(values)]
        assert {tuple(row) for row in kept} == wanted and len(kept) == len(wanted)
        for count in (40, 300):
            by = draw.integers(2, 6, (count, columns))
            least = (by[:, None] <= values).all(axis=2)
            assert dominated(values, by, strictly=False).tolist() == least.any(axis=0).tolist()
            strictly = (least & (by[:, None] < values).any(axis=2)).any(axis=0)
            assert dominated(values, by, strictly=True).tolist() == strictly.tolist()
