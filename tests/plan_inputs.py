# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Helpers that draw plans and other inputs with Hypothesis, and that check how a bad plan is refused."""

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from galvatron_hf.plan import ParallelPlan


QUICK = settings(
    max_examples=60, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)

JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


def drawn(strategy: st.SearchStrategy, count: int) -> list:
    """Returns as many examples as asked, always the same ones, so that one world of ranks can run all of them."""
    found = []

    @settings(parent=QUICK, max_examples=count, phases=[Phase.generate])
    @given(strategy)
    def draw(example) -> None:
        found.append(example)

    draw()
    assert len(found) == count
    return found


def refusal(source, make=ParallelPlan.from_json):
    with pytest.raises(ValueError) as caught:
        make(source)
    message = str(caught.value)
    assert "\n" not in message and ": " in message and len(message) < 500, message
    return message
