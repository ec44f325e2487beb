# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The costs of sharing documents, the blocks of a context degree, and the decision to share; no ranks are needed."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from transformers import LlamaConfig

from galvatron_hf.data.context_placement import in_smaller_blocks, place_in_blocks
from galvatron_hf.data.cost import GroupCost, SequenceCost, SharingCost, fit_sharing
from galvatron_hf.data.placement import Placement, SharedSequence
from galvatron_hf.plan import LayerStrategy, ParallelPlan, SequenceGroups
from galvatron_hf.plan.chunks import shared_tokens
from galvatron_hf.plan.resolved import resolve
from galvatron_hf.trainer.data.kept_rings import kept_bytes
from galvatron_hf.trainer.data.packing_record import PackingRecord
from galvatron_hf.trainer.data.step_prefetch import StepPlacement
from galvatron_hf.trainer.planning.sequence_groups import with_sequence_groups


WHOLE = SequenceCost(per_token=1.0, per_token_squared=0.01, per_sequence=2.0)
NEAR = {"ring": SharingCost(per_hop=1.0, per_token=0.5), "ulysses": SharingCost(per_hop=5.0, per_token=0.1)}
FAR = {"ring": SharingCost(per_hop=20.0, per_token=5.0)}


# ---- Costs ----


def test_the_cost_of_sharing_is_fitted():
    wanted = SharingCost(per_hop=0.3, per_token=2e-4)
    shapes = [(length, degree) for length in (128, 4096) for degree in (2, 4, 8)]
    seconds = [float(wanted.seconds(np.array([length]), degree)[0]) for length, degree in shapes]
    found = fit_sharing(shapes, seconds)
    assert found.per_hop == pytest.approx(0.3) and found.per_token == pytest.approx(2e-4)
    assert fit_sharing([(100, 2), (100, 4)], [-1.0, -2.0]) == SharingCost(per_hop=0.0, per_token=0.0)  # noise


def test_a_shared_document_costs_its_part_and_the_hops_of_the_cheapest_execution():
    cost = GroupCost(sequence=WHOLE, sharing=NEAR, far=FAR, node_ranks=4, exchangeable=frozenset({2, 4}))
    lengths = np.array([10, 1000])
    work = 1.0 * lengths + 0.01 * lengths**2
    assert cost.seconds(lengths, 1) == pytest.approx(work + 2.0)
    ring, heads = (1 + 0.5 * lengths / 2), (5 + 0.1 * lengths / 2)
    assert cost.seconds(lengths, 2) == pytest.approx(work / 2 + 2.0 + np.minimum(ring, heads))
    assert [cost.execution(length, 2) for length in (10, 1000)] == ["ring", "ulysses"]
    assert cost.execution(1000, 3) == "ring"  # three ranks exchange no heads
    assert cost.seconds(lengths, 5) == pytest.approx(work / 5 + 2.0 + 4 * (20 + 5 * lengths / 5))  # over nodes
    only = replace(cost, sharing={"ulysses": NEAR["ulysses"]}, far={}, node_ranks=None)
    assert only.degrees(5) == [1, 2, 4] and np.isinf(only.seconds(lengths, 3)).all()


@pytest.mark.parametrize("seed", range(20))
def test_ranks_exchange_heads_only_if_all_that_may_meet_divide_them(seed):
    """Packs that a layer with fewer data ranks joins: every set of packs is looked at."""
    draw = random.Random(seed)
    heads = draw.choice([6, 8, 12])
    layers = tuple(LayerStrategy(tensor=draw.choice([1, 2])) for _ in range(2))
    plan = ParallelPlan(world_size=4, stacks={"decoder": 2}, layers=layers)
    resolved = resolve(plan, heads=[(heads, 2)] * 2, tied=False)
    for packs in range(2, resolved.packs + 1):
        fine = all(
            heads // layer.tensor % len({pack * (4 // layer.tensor) // resolved.packs for pack in chosen}) == 0
            for layer in layers
            for chosen in itertools.combinations(range(resolved.packs), packs)
        )
        assert resolved.exchanges_heads(packs) is fine


# ---- Blocks of a context degree ----


def tokens_of(placement: Placement, lengths: np.ndarray, ranks: int) -> np.ndarray:
    tokens = np.zeros((len(placement.micro_batches), ranks), dtype=np.int64)
    for row, packs in enumerate(placement.micro_batches):
        for rank, pack in enumerate(packs):
            tokens[row, rank] += sum(int(lengths[one]) for one in pack)
        for one in placement.shared_in(row):
            tokens[row, list(one.ranks)] += shared_tokens(int(lengths[one.sequence]), len(one.ranks))
    return tokens


def members(placement: Placement, row: int, ranks: range) -> list[int]:
    """Returns the sequences that ranks hold, in whole or in part, in a micro-batch."""
    whole = [one for rank in ranks for one in placement.micro_batches[row][rank]]
    return sorted(whole + [one.sequence for one in placement.shared_in(row) if one.ranks[0] in ranks])


@pytest.mark.parametrize("seed", range(30))
def test_blocks_hold_every_sequence_once_within_their_capacity(seed):
    draw = random.Random(seed)
    context = draw.choice([2, 4])
    lengths = np.array([draw.choice([1, 3, 9, 40, 111, 64 * context]) for _ in range(draw.randint(1, 24))])
    cost = GroupCost(sequence=WHOLE, sharing={"ring": NEAR["ring"]})
    found = place_in_blocks(lengths, 8, context, cost, max_tokens=64, overhead=1.0)
    rows = range(len(found.micro_batches))
    assert sorted(one for row in rows for one in members(found, row, range(8))) == list(range(len(lengths)))
    assert tokens_of(found, lengths, 8).max() <= 64
    for row in rows:
        for one in found.shared_in(row):
            assert one.ranks == tuple(range(one.ranks[0], one.ranks[0] + context)) and one.ranks[0] % context == 0
    smaller = in_smaller_blocks(found, lengths, 8, context, context // 2, cost)
    for row in rows:  # the same sequences in the same micro-batch and block, shared by half of its ranks
        for first in range(0, 8, context):
            block = range(first, first + context)
            assert members(smaller, row, block) == members(found, row, block)
        assert all(len(one.ranks) == context // 2 for one in smaller.shared_in(row))


def test_blocks_are_nearly_as_fast_as_can_be():
    """Against every way to give each sequence to one rank of the block or to all."""
    cost, ratios = GroupCost(sequence=WHOLE, sharing={"ring": NEAR["ring"]}), []
    for seed in range(60):
        draw = random.Random(seed)
        context = draw.choice([2, 3])
        lengths = np.array([draw.choice([5, 20, 60, 150, 400]) for _ in range(draw.randint(2, 6))])
        found = place_in_blocks(lengths, context, context, cost, max_tokens=None, overhead=1e6)
        alone, together = cost.seconds(lengths, 1), cost.seconds(lengths, context)
        best = np.inf
        for homes in itertools.product(range(context + 1), repeat=len(lengths)):
            loads = np.bincount(homes, alone, context + 1)[:context]
            best = min(best, loads.max() + together[np.array(homes) == context].sum())
        ratios.append(found.seconds(lengths, cost) / best)
    assert max(ratios) < 1.1 and np.mean(ratios) < 1.01


def test_short_sequences_of_a_block_stay_whole():
    cost = GroupCost(sequence=WHOLE, sharing={"ring": NEAR["ring"]})
    found = place_in_blocks([100, 7, 7, 7, 7], 4, 4, cost, max_tokens=None)
    assert [one.sequence for one in found.shared_in(0)] == [0]
    assert sorted(map(len, found.micro_batches[0])) == [1, 1, 1, 1]
    with pytest.raises(ValueError, match="context=3 does not divide the 4 data ranks; use a divisor of 4."):
        place_in_blocks([5], 4, 3, cost, max_tokens=None)


# ---- The decision to share ----

CONFIG = LlamaConfig(vocab_size=97, hidden_size=32, intermediate_size=40, num_hidden_layers=4, num_attention_heads=4)
PLAN = ParallelPlan.uniform(4, 4)
EVEN, LONG_TAILED = np.full(64, 100), np.array([20_000] + [50] * 63)


def decided(
    lengths: np.ndarray = LONG_TAILED,
    plan: ParallelPlan = PLAN,
    obstacle: str | None = None,
    known: SequenceGroups | None = None,
    **given,
):
    """Returns the plan with groups or without, under arguments."""
    options = dict(
        packing="auto",
        max_tokens_per_rank=None,
        long_sequences="error",
        global_batch_size=64,
        gradient_accumulation_steps=1,
    )
    args = SimpleNamespace(**(options | given))
    return with_sequence_groups(plan, args, CONFIG, obstacle=lambda: obstacle, lengths=lambda: lengths, known=known)


@pytest.mark.parametrize(
    "given, shares",
    [
        (dict(), True),  # one document would keep three ranks waiting
        (dict(lengths=EVEN), False),
        (dict(lengths=EVEN, max_tokens_per_rank=64), True),  # no rank holds a row
        (dict(lengths=EVEN, max_tokens_per_rank=64, long_sequences="truncate"), False),
        (dict(lengths=np.zeros(0, dtype=np.int64)), False),
        (dict(obstacle="its attention has dropout"), False),
        (dict(packing="static"), False),
        (dict(packing="none"), False),
        (dict(packing="dynamic", lengths=EVEN), True),
        (dict(packing="dynamic", plan=ParallelPlan.uniform(4, 4, tensor=4)), False),  # one data rank
    ],
)
def test_groups_are_made_where_they_are_asked_for_or_predicted_to_pay(given, shares):
    found = decided(**given)
    assert found.shares_documents is shares
    if shares:
        limit = given.get("max_tokens_per_rank")
        assert found.sequence_groups == SequenceGroups(max_tokens_per_rank=limit, max_degree=4)


@pytest.mark.parametrize(
    "given, limit", [(dict(), 640), (dict(max_tokens_per_rank=96), 96), (dict(packing="auto"), None)]
)
def test_groups_hold_what_the_search_has_found_unless_arguments_say_it(given, limit):
    known = SequenceGroups(max_tokens_per_rank=640, max_degree=4)
    found = decided(**(dict(packing="dynamic") | given), known=known)
    assert found.sequence_groups.max_tokens_per_rank == limit


def test_a_plan_that_shares_stays_as_it_is():
    plan = ParallelPlan.uniform(4, 4, context=2)
    assert decided(plan=plan, packing="dynamic") is plan


# ---- What is kept, and what is logged ----


def kept(plan: ParallelPlan, placement: Placement, lengths: list[int], precision: str = "fp32") -> int:
    resolved = resolve(plan, heads=[(8, 2)] * plan.num_layers, tied=False)
    blocks = [SimpleNamespace(resolved=layer) for layer in resolved.layers]
    config = SimpleNamespace(hidden_size=32, num_attention_heads=8)
    resolved = SimpleNamespace(packs=resolved.packs, precision=SimpleNamespace(activations=precision))
    parallel = SimpleNamespace(plan=plan, resolved=resolved, blocks=blocks, config=config)
    return kept_bytes(parallel, placement, np.array(lengths))


def test_bytes_that_recomputed_layers_keep():
    """Of the fullest rank: tokens in rings times the features, and a log-sum-exp, of its heads in each such layer."""
    layers = (LayerStrategy(recompute="full"), LayerStrategy(), LayerStrategy(tensor=2, recompute="full"))
    plan = ParallelPlan(world_size=4, stacks={"decoder": 3}, layers=layers)
    ring, gathered = SharedSequence(0, (0, 1), "ring"), SharedSequence(1, (0, 1), "gather")
    placement = Placement((((),) * 4,), ((ring, gathered),))
    per_token = 8 * (4 * 4 + 4) + 4 * (4 * 4 + 4)  # 8 and 4 heads of 4 features
    assert kept(plan, placement, [40, 100]) == 20 * per_token
    assert kept(plan, placement, [40, 100], "bf16") == 20 * (8 + 4) * (4 * 2 + 4)
    assert kept(plan, replace(placement, recompute="none"), [40, 100]) == 0
    assert kept(plan, Placement((((),) * 4,), ((gathered,),)), [40, 100]) == 0


def test_groups_and_imbalances_are_logged():
    record = PackingRecord(began=0.0, tokens=100, positions=100)
    placed = dict(placement=Placement((((), ()),), recompute="full"), longest=9, imbalance=1.2, seconds=0.01)
    record.add(StepPlacement(**placed, hidden=True, shared_tokens=60, groups=(2, 4)))
    record.add_seconds([1.0, 3.0])
    logs = record.logs(now=2.0)
    assert logs["shared_tokens_percent"] == 60.0 and logs["mean_group_ranks"] == 3.0
    assert logs["largest_group_ranks"] == 4 and logs["steps_with_recompute_full"] == 1.0
    assert logs["predicted_imbalance"] == 1.2 and logs["measured_imbalance"] == 1.5
