# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Units of memory, for reading and for printing."""

import math


GIB = 1 << 30


def gib_rounded_up(size: int) -> str:
    """Returns bytes as GiB, rounded up to two decimals or three digits, so that a budget of the result is enough."""
    digits = max(2, 2 - math.floor(math.log10(max(size, 1) / GIB)))
    return f"{math.ceil(size * 10**digits / GIB) / 10**digits:.{digits}f}"
