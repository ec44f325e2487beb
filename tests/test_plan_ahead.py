# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Checks that a plan made in the background is taken only for the lengths it was made for."""

import threading

import numpy as np
import pytest

from galvatron_hf.data.placement import Placement
from galvatron_hf.data.plan_ahead import PlanAhead


ORDER = Placement((((0,), (1,)),))


class Planner:
    """Remembers what it planned, on which thread; fails for a length of 13."""

    def __init__(self):
        self.asked: list[tuple[list[int], str]] = []

    def __call__(self, lengths: np.ndarray) -> Placement:
        self.asked.append((lengths.tolist(), threading.current_thread().name))
        if 13 in lengths:
            raise KeyError("unlucky")
        return Placement(((tuple(range(len(lengths))), ()),))


@pytest.fixture
def planner() -> Planner:
    return Planner()


@pytest.fixture
def ahead(planner):
    made = PlanAhead(planner, lambda lengths: ORDER)
    yield made
    made.end()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("galvatron-planner")]


def test_what_was_planned_is_taken_once(ahead, planner):
    ahead.begin(lambda: np.array([5, 3]))
    ahead._next.result()
    planned = ahead.take(np.array([5, 3]))
    assert planned.hidden and planned.failure is None and planned.placement.micro_batches == (((0, 1), ()),)
    ((lengths, thread),) = planner.asked
    assert lengths == [5, 3] and thread.startswith("galvatron-planner")
    assert not ahead.take(np.array([5, 3])).hidden


def test_a_plan_that_is_not_ready_is_waited_for(ahead, monkeypatch):
    go = threading.Event()
    ahead.begin(lambda: go.wait(600) and np.array([5, 3]))
    wait = ahead._next.result
    monkeypatch.setattr(ahead._next, "result", lambda: go.set() or wait())  # not ready until it is waited for
    planned = ahead.take(np.array([5, 3]))
    assert not planned.hidden and planned.placement.micro_batches == (((0, 1), ()),)


def test_other_lengths_are_planned_anew(ahead, planner):
    ahead.begin(lambda: np.array([5, 3]))
    planned = ahead.take(np.array([5, 3, 1]))
    assert not planned.hidden and planned.placement.micro_batches == (((0, 1, 2), ()),)
    assert [lengths for lengths, _ in planner.asked] == [[5, 3], [5, 3, 1]]


def fails() -> np.ndarray:
    raise OSError("no lengths")


@pytest.mark.parametrize("lengths", [lambda: None, fails])
def test_lengths_that_nobody_knows_are_planned_when_they_come(ahead, planner, lengths):
    ahead.begin(lengths)
    assert ahead.take(np.array([4])).placement.micro_batches == (((0,), ()),)
    assert [thread for _, thread in planner.asked] == [threading.current_thread().name]


@pytest.mark.parametrize("before", [True, False])
def test_a_planner_that_fails_leaves_the_order(ahead, before):
    if before:
        ahead.begin(lambda: np.array([13, 2]))
        ahead._next.result()
    planned = ahead.take(np.array([13, 2]))
    assert planned.placement is ORDER and planned.failure == "KeyError: 'unlucky'" and planned.hidden is before
