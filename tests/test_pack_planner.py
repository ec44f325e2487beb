# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Which way to compute a step the planner of packs takes, and what it says of it; no ranks are needed."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from galvatron_hf.data.cost import GroupCost, SequenceCost, assumed_sharing
from galvatron_hf.plan import LayerStrategy, SequenceGroups
from galvatron_hf.trainer.data.pack_planner import PackPlanner
from galvatron_hf.trainer.data.sequence_cost import StepCost
from plans import pipelined, uniform


SEQUENCE = SequenceCost(per_token=1e-3, per_token_squared=1e-6, per_sequence=0.0)
COST = StepCost(sequence=SEQUENCE, overhead=0.01, measured=True)
GROUPS = GroupCost(sequence=SEQUENCE, sharing={kind: assumed_sharing(SEQUENCE) for kind in ("ring", "gather")})
OWN = PackPlanner(
    plan=replace(uniform(4), sequence_groups=SequenceGroups(max_tokens_per_rank=64, max_degree=4)),
    packs=4,
    multiple=1,
    bound=64,
    rows_of_block=1,
    longest_row=250,
    cost=COST,
    planner="longest_first",
    groups=GROUPS,
    degree=4,
)
TENSOR = replace(OWN, plan=uniform(4, tensor=4), packs=1, degree=1, share=200 / 64, number=1)
STAGES = replace(OWN, plan=pipelined([(0, 1), (2, 3)], (LayerStrategy(),) * 4), packs=2, degree=1, share=4.0, number=1)


def test_the_fastest_way_is_taken_moves_included():
    """Half the cost of a document is faster, until the moves take what that saves."""
    lengths = np.full(8, 50)
    half = replace(SEQUENCE, per_token=5e-4, per_token_squared=5e-7)
    faster = replace(OWN, groups=replace(GROUPS, sequence=half), number=1)
    own = OWN.place(lengths)
    saved = OWN._seconds(own, lengths) - faster._seconds(faster._place(lengths), lengths)
    assert saved > 0
    for moves, number in ((0.9 * saved, 1), (1.1 * saved, 0)):
        found = replace(OWN, variants=(replace(faster, move_seconds=moves),)).place(lengths)
        assert found.plan == number
        whole = [one for packs in found.micro_batches for pack in packs for one in pack]
        shared = [one.sequence for sequences in found.shared for one in sequences]
        assert sorted(whole + shared) == list(range(8))


def test_a_plan_that_cannot_hold_a_document_is_left_out():
    cheap = replace(TENSOR, groups=replace(GROUPS, sequence=replace(SEQUENCE, per_token=1e-9, per_token_squared=0.0)))
    planner = replace(OWN, variants=(cheap,))
    assert planner.place(np.array([250, 10, 20])).plan == 0
    assert planner.place(np.array([190, 10, 20])).plan == 1


def test_the_order_of_a_failed_planner_is_for_a_way_that_holds_the_longest_document():
    """The other plan holds more tokens in a pack, and shares none."""
    planner = replace(OWN, variants=(TENSOR,))
    assert TENSOR.capacity(np.array([250])) == 200 > OWN.capacity(np.array([250]))
    found = planner.in_order(np.array([250, 10, 20]))
    assert found.plan == 0 and [one.sequence for shared in found.shared for one in shared] == [0]
    assert planner.in_order(np.array([190, 10, 20])).plan == 1


def test_the_imbalance_is_that_of_the_plan_of_the_step():
    """A pipeline waits for the slowest of all bins, one stage for that of each micro-batch."""
    lengths = np.array([200, 200, 190, 60, 50, 20, 10])
    placed = STAGES._place(lengths)
    loads = placed.loads(lengths, GROUPS)
    found = replace(OWN, variants=(STAGES,)).imbalance(placed, lengths)
    assert found == pytest.approx(loads.max() * len(loads) / loads.mean(axis=1).sum())


@pytest.mark.parametrize("longest, tokens", [(1000, 250), (1001, 252)])
def test_ranks_that_share_a_row_hold_a_share_of_it(longest, tokens):
    """Its chunks, two for each rank, hold the longest document."""
    shared = dict(rows_of_block=1, packs_of_block=4, plan=uniform(4, context=4))
    planner = replace(OWN, bound=None, longest_row=longest, **shared)
    assert planner.capacity(np.array([10])) == tokens
    assert longest <= planner.longest_document(np.array([10])) <= longest + 7


def test_packs_of_other_plans_are_multiples_of_theirs():
    odd = replace(TENSOR, share=1.37, multiple=8)
    assert odd.capacity(np.array([10])) == int(64 * 1.37) // 8 * 8 == 80
    assert OWN.capacity(np.array([10])) == 64


@pytest.mark.parametrize("rows, length", [(1, 1001), (3, 1001), (3, 1003), (5, 1002), (8, 998)])
def test_ranks_that_share_rows_hold_the_rows_of_a_micro_batch(rows, length):
    """Whatever their length is: a pack holds two chunks of each, which are rounded up."""
    planner = replace(
        OWN,
        plan=uniform(4, context=4),
        bound=None,
        longest_row=length,
        rows_of_block=rows,
        packs_of_block=4,
        cost=replace(COST, overhead=1e3),
    )
    found = planner.place(np.full(rows, length))
    assert len(found.micro_batches) == 1
    assert planner.capacity(np.array([length])) <= rows * (length / 4 + 2)


def test_the_bound_of_a_pack_is_of_the_rows_that_a_step_has():
    """They are not always those of all devices."""
    plan = replace(uniform(4, context=2), micro_batches=2)
    resolved = SimpleNamespace(packs=4, pack_multiple=1, stage_size=4)
    cost = SimpleNamespace(variants=(), of_groups=lambda parallel: GROUPS)
    args = dict(train_batch_size=2, gradient_accumulation_steps=1, world_size=4, device=torch.device("cpu"))
    for split_batches, rows in ((False, None), (True, None), (False, 24)):
        arguments = SimpleNamespace(
            **args, global_batch_size=rows, accelerator_config=SimpleNamespace(split_batches=split_batches)
        )
        parallel = SimpleNamespace(plan=plan, resolved=resolved)
        planner = PackPlanner.from_model(parallel, arguments, cost, np.array([1000]))
        of_step = rows or (2 if split_batches else 8)
        assert planner.capacity(np.array([10])) == max(1, of_step // 2 // 2) * 1000 // 2
