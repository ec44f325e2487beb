# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Bounds what a rank sends when hidden states change from one layer's layout to the next one's."""

import math
from dataclasses import replace
from functools import lru_cache

from galvatron_hf.plan.layout import Grid, Layout, block_size, sent_tokens


@lru_cache(maxsize=65536)
def most_sent_tokens(before: Layout, after: Layout, rows: int, length: int) -> tuple[int, int]:
    """Returns the ranks of the all-to-all (1: nothing is sent) and the most tokens that a rank sends in it. If both
    layouts first cut the rows into the same number of pieces, the largest of these pieces stands for all.
    """
    common = math.gcd(before.data, after.data)
    if common > 1:
        before, after = (replace(layout, data=layout.data // common) for layout in (before, after))
        return most_sent_tokens(before, after, -(-rows // common), length)
    block = block_size(before, after)
    return block, 0 if block == 1 else max(sent_tokens(before, after, Grid(rows, length)))
