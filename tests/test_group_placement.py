# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Compares placements that share documents with enumeration, with `place` and with bounds on real lengths."""

from __future__ import annotations

import itertools
import json
import random
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from galvatron_hf.data.cost import SequenceCost
from galvatron_hf.data.group_bound import lower_bounds
from galvatron_hf.data.group_placement import GroupPlacement, lower_bound, place_groups
from galvatron_hf.data.near_ranks import on_nodes
from galvatron_hf.data.placement import place
from galvatron_hf.plan.chunks import largest_share
from plan_inputs import QUICK
from test_placement import LENGTHS, partitions


sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import sequence_planner  # noqa: E402


ROUNDING = 1 + 1e-9  # sums of the same costs in another order


@dataclass(frozen=True)
class Ring:
    """Work is divided by the degree; each share pays for transfers of the document, and a constant."""

    per_token: float = 1e-6
    per_token_squared: float = 1e-10
    transfer: float = 1e-7
    constant: float = 0.0

    def seconds(self, lengths, degree: int) -> np.ndarray:
        lengths = np.asarray(lengths, dtype=np.float64)
        work = self.per_token * lengths + self.per_token_squared * lengths**2
        return (work + (degree > 1) * self.transfer * lengths) / degree + self.constant


@dataclass(frozen=True)
class Useless:
    """All ranks that share a document take as long as one."""

    cost: SequenceCost = SequenceCost(per_token=1e-6, per_token_squared=1e-10, per_sequence=1e-5)

    def seconds(self, lengths, degree: int = 1) -> np.ndarray:
        return self.cost.seconds(lengths)


RING = Ring()
lengths_ = st.lists(st.integers(1, 4000) | st.integers(1, 60), max_size=24)
costs_ = st.sampled_from([RING, Ring(transfer=1e-6), Ring(per_token_squared=0.0, constant=1e-5), Useless()])
steps_ = st.fixed_dictionaries(
    {
        "ranks": st.integers(1, 6),
        "cost": costs_,
        "overhead": st.sampled_from([0.0, 1e-3]),
        "stages": st.integers(1, 3),
        "least_micro_batches": st.integers(1, 3),
        "candidates": st.sampled_from([None, None, (2, 3)]),
        "effort": st.sampled_from([1, 8]),
    }
)


def memory(lengths, ranks: int, slack: float | None) -> int | None:
    """Returns `max_tokens` of a step, even: `slack` times what all ranks together need for the longest document."""
    return None if slack is None else 2 * int(slack * (max(lengths, default=1) // (2 * ranks) + 1))


def chunk_tokens(length: int, degree: int) -> list[int]:
    """Returns the tokens of each rank that shares a document."""
    cuts = [index * length // (2 * degree) for index in range(2 * degree + 1)]
    sizes = [stop - start for start, stop in itertools.pairwise(cuts)]
    return [sizes[index] + sizes[2 * degree - 1 - index] for index in range(degree)]


def least_peak(lengths, ranks: int, cost, max_tokens: int | None) -> float:
    """Returns the least seconds of the slowest rank of one micro-batch, over all sets of ranks for each document."""
    masks = np.array(list(itertools.product([0, 1], repeat=ranks)))[1:]
    loads, tokens = np.zeros((1, ranks)), np.zeros((1, ranks))
    for length in lengths:
        degrees = masks.sum(axis=1)
        seconds = np.array([cost.seconds(np.array([length]), int(degree))[0] for degree in degrees])
        shares = np.array([max(chunk_tokens(length, int(degree))) for degree in degrees])
        loads = (loads[:, None] + (masks * seconds[:, None])).reshape(-1, ranks)
        tokens = (tokens[:, None] + (masks * shares[:, None])).reshape(-1, ranks)
        if max_tokens is not None:
            fits = (tokens <= max_tokens).all(axis=1)
            loads, tokens = loads[fits], tokens[fits]
    return float(loads.max(axis=1).min()) if len(loads) else np.inf


def brute_force(
    lengths, ranks, cost, *, max_tokens, overhead=0.0, stages=1, least_micro_batches=1, allowed=None
) -> float:
    """Returns the best objective over all ways to make micro-batches, and all sets of ranks for each document."""
    peaks = {
        subset: least_peak([lengths[i] for i in subset], ranks, cost, max_tokens)
        for size in range(1, len(lengths) + 1)
        for subset in itertools.combinations(range(len(lengths)), size)
    }
    best = np.inf
    for blocks in partitions(len(lengths), len(lengths)):
        found = [peaks[tuple(block)] for block in blocks]
        count = max(least_micro_batches, len(found))
        while allowed is not None and not allowed(count):
            count += 1
        if stages == 1:
            best = min(best, sum(found) + overhead * count)
        else:
            best = min(best, (max(found) + overhead) * (stages - 1 + count))
    return best


def seconds_of(placement: GroupPlacement, lengths, arguments: dict) -> float:
    """Returns the objective, from the pairs alone."""
    table = np.zeros((len(placement.micro_batches), arguments["ranks"]))
    for row, pairs in zip(table, placement.micro_batches, strict=True):
        for document, ranks in pairs:
            for rank in ranks:
                row[rank] += arguments["cost"].seconds(np.array([lengths[document]]), len(ranks))[0]
    if arguments.get("stages", 1) == 1:
        return table.max(axis=1).sum() + arguments["overhead"] * len(table)
    return (table.max() + arguments["overhead"]) * (arguments["stages"] - 1 + len(table))


def small_cases(count: int) -> list[tuple[list[int], dict]]:
    random = np.random.default_rng(0)
    cases = []
    for _ in range(count):
        ranks = int(random.integers(2, 4))
        lengths = np.minimum(random.choice(LENGTHS, random.integers(2, 6)), 9000).tolist()
        stages = int(random.choice([1, 1, 2]))
        arguments = {
            "ranks": ranks,
            "cost": [RING, Ring(transfer=4e-7)][int(random.integers(2))],
            "max_tokens": memory(lengths, ranks, random.choice([None, 1.0, 1.3, 2.0])),
            "overhead": float(random.choice([0.0, 5e-4])),
            "stages": stages,
            "least_micro_batches": int(random.choice([1, stages])),
        }
        if stages > 1 and random.random() < 0.5:
            arguments["allowed"] = lambda count, stages=stages: count % stages == 0
        cases.append((lengths, arguments))
    return cases


def test_the_result_is_that_of_enumeration_nearly_always_and_the_bound_is_below():
    ratios, tightness = [], []
    for lengths, arguments in small_cases(80):
        best = brute_force(lengths, **arguments)
        ratios.append(seconds_of(place_groups(lengths, **arguments), lengths, arguments) / best)
        if arguments["stages"] == 1:
            limits = {name: arguments[name] for name in ("ranks", "cost", "max_tokens", "overhead")}
            bounds = lower_bounds(lengths, **limits)
            assert max(bounds) == lower_bound(lengths, **limits) <= best * ROUNDING, (lengths, arguments)
            tightness.append(best / max(bounds))
    assert min(ratios) >= 1 / ROUNDING
    assert max(ratios) <= 1.01
    assert np.mean(np.array(ratios) <= ROUNDING) >= 0.95
    assert np.median(tightness) <= 1.02


def test_largest_shares_are_those_of_the_chunks():
    for degree in range(1, 24):
        lengths = np.arange(1, 200)
        expected = [max(chunk_tokens(length, degree)) for length in lengths.tolist()]
        assert largest_share(lengths, degree).tolist() == expected
        assert all(sum(chunk_tokens(length, degree)) == length for length in lengths.tolist())


@QUICK
@given(lengths_, steps_, st.none() | st.sampled_from([1.0, 1.2, 3.0]))
def test_every_document_stands_once_and_no_rank_holds_more_than_it_may(lengths, step, slack):
    ranks = step["ranks"]
    degrees = {1, *(degree for degree in step["candidates"] or range(1, ranks + 1) if degree <= ranks)}
    step = step | {"candidates": sorted(degrees)}
    max_tokens = memory(lengths, max(degrees), slack)
    placement = place_groups(lengths, **step, max_tokens=max_tokens)
    assert place_groups(np.array(lengths, dtype=np.int32), **step, max_tokens=max_tokens) == placement
    assert placement.ranks == ranks
    assert len(placement.micro_batches) >= step["least_micro_batches"]
    pairs = [pair for micro_batch in placement.micro_batches for pair in micro_batch]
    assert sorted(document for document, _ in pairs) == list(range(len(lengths)))
    assert all(list(micro_batch) == sorted(micro_batch) for micro_batch in placement.micro_batches)
    tokens = np.zeros((len(placement.micro_batches), ranks), dtype=np.int64)
    for row, micro_batch in zip(tokens, placement.micro_batches, strict=True):
        for document, group in micro_batch:
            assert len(set(group)) == len(group) and set(group) <= set(range(ranks)) and len(group) in degrees
            for rank, held in zip(group, chunk_tokens(lengths[document], len(group)), strict=True):
                row[rank] += held
    assert placement.tokens(lengths).tolist() == tokens.tolist()
    assert max_tokens is None or tokens.max(initial=0) <= max_tokens
    arguments = {"overhead": step["overhead"], "stages": step["stages"]}
    seconds = placement.seconds(lengths, step["cost"], **arguments)
    assert seconds == pytest.approx(seconds_of(placement, lengths, step), rel=1e-9)
    if step["stages"] == 1:
        bound = lower_bound(lengths, ranks, step["cost"], max_tokens=max_tokens, overhead=step["overhead"])
        assert bound <= seconds * ROUNDING
    if max_tokens is None or max(lengths, default=1) <= max_tokens:
        limits = {name: step[name] for name in ("overhead", "stages", "least_micro_batches")}
        cost = SequenceCost(per_token=1e-6, per_token_squared=1e-10, per_sequence=1e-5)
        ours = place_groups(lengths, ranks, Useless(cost), max_tokens=max_tokens, **limits)
        alone = place(lengths, ranks, cost, max_tokens=max_tokens, **limits)
        assert ours.seconds(lengths, Useless(cost), **arguments) <= alone.seconds(lengths, cost, **arguments)


@pytest.mark.parametrize(
    "ranks, rows, gap", [(1, 16, 0.001), (3, 32, 0.02), (6, 64, 0.01), (8, 64, 0.01), (12, 96, 0.02), (96, 400, 0.04)]
)
def test_real_lengths_are_near_the_bound_in_odd_worlds_too(ranks, rows, gap):
    cost, max_tokens = sequence_planner.COST, sequence_planner.capacity(ranks)
    random = np.random.default_rng(0)
    limits = {"max_tokens": max_tokens, "overhead": sequence_planner.OVERHEAD}
    degrees = set()
    for _ in range(2):
        lengths = np.minimum(random.choice(LENGTHS, rows, replace=False), ranks * max_tokens)
        placement = place_groups(lengths, ranks, cost, **limits)
        bound = lower_bound(lengths, ranks, cost, **limits)
        seconds = placement.seconds(lengths, cost, overhead=sequence_planner.OVERHEAD)
        assert bound / ROUNDING <= seconds <= bound * (1 + gap)
        for name in ("homogeneous", "hybrid", "hdp"):
            assert seconds <= sequence_planner.BASELINES[name](lengths, ranks, max_tokens) * ROUNDING
        degrees |= {len(group) for micro_batch in placement.micro_batches for _, group in micro_batch}
    assert ranks < 6 or degrees - {1, 2, 4, 8, 16, 32, 64}


def test_ranks_of_a_shared_document_take_others_too():
    lengths = [4000] + [500] * 8 + [100] * 10
    placement = place_groups(lengths, 3, RING, max_tokens=3500)
    (pairs,) = placement.micro_batches
    groups = dict(pairs)
    assert len(groups[0]) > 1
    assert all(any(rank in group for document, group in pairs if document) for rank in groups[0])
    assert placement.seconds(lengths, RING) <= 1.02 * lower_bound(lengths, 3, RING, max_tokens=3500)
    assert placement.imbalance(lengths, RING) <= 1.02


def test_what_no_rank_has_room_for_whole_is_shared_out():
    # Beside a document of 6 tokens, each rank has room for half of the third one.
    assert len(place_groups([6, 6, 6], 2, Useless(), max_tokens=10, overhead=1.0).micro_batches) == 1
    # The same if documents are too many to be looked at one by one: 8 * 6 + 6 / 2 tokens on each rank.
    assert len(place_groups([6] * 17, 2, Useless(), max_tokens=52, overhead=1.0).micro_batches) == 1


def test_a_pipeline_runs_what_its_schedule_allows():
    lengths = np.minimum(LENGTHS[:60], 6000)

    def seconds(**arguments) -> float:
        placement = place_groups(lengths, 4, RING, max_tokens=4000, overhead=1e-3, stages=4, **arguments)
        assert arguments.get("allowed", bool)(len(placement.micro_batches))
        assert len(placement.micro_batches) >= arguments.get("least_micro_batches", 1)
        total = (placement.loads(lengths, RING).max() + 1e-3) * (3 + len(placement.micro_batches))
        assert placement.seconds(lengths, RING, overhead=1e-3, stages=4) == pytest.approx(total)
        return total

    work = RING.seconds(lengths, 1).sum()
    counts = np.arange(1, 61)
    bounds = (work / 4 / counts + 1e-3) * (3 + counts)
    free = seconds()
    assert bounds.min() <= free <= 1.03 * bounds.min()
    assert seconds(allowed=lambda count: count % 4 == 0) <= 1.05 * bounds[counts % 4 == 0].min()
    assert seconds(least_micro_batches=20) >= free


def test_loads_tokens_seconds_and_imbalance():
    placement = GroupPlacement((((0, (0, 1)), (2, (1,))), ((1, (2, 0, 1)),)), 3)
    cost = Ring(per_token=1.0, per_token_squared=0.0, transfer=0.5)
    lengths = [4, 9, 5]
    assert placement.loads(lengths, cost).tolist() == [[3.0, 8.0, 0.0], [4.5, 4.5, 4.5]]
    assert placement.tokens(lengths).tolist() == [[2, 7, 0], [3, 3, 3]]
    assert placement.seconds(lengths, cost, overhead=1.0) == 9.0 + 5.5
    assert placement.seconds(lengths, cost, overhead=1.0, stages=3) == 9.0 * 4
    assert placement.imbalance(lengths, cost) == pytest.approx(12.5 / (11 / 3 + 4.5))
    assert placement.imbalance(lengths, cost, stages=3) == pytest.approx(16 / (11 / 3 + 4.5))
    assert GroupPlacement(((),), 2).imbalance([], cost) == 1.0


def test_a_step_without_documents_or_with_one():
    assert place_groups([], 2, RING, max_tokens=8) == GroupPlacement(((),), 2)
    assert lower_bound([], 2, RING, max_tokens=8, overhead=2.0) == 2.0
    placed = place_groups([8], 2, RING, max_tokens=4, stages=2, least_micro_batches=2).micro_batches
    assert sorted(placed) == [(), ((0, (0, 1)),)]


@pytest.mark.parametrize("rows", [4, 40])
def test_documents_that_take_no_time_are_placed(rows):
    free = Ring(per_token=0.0, per_token_squared=0.0, transfer=0.0)
    placement = place_groups([50] * rows, 40, free, max_tokens=20, overhead=1.0)
    assert sorted(document for row in placement.micro_batches for document, _ in row) == list(range(rows))
    assert lower_bound([50] * rows, 40, free, max_tokens=20) == 0.0


@pytest.mark.parametrize(
    "call, says",
    [
        (lambda: place_groups([5, 17], 2, RING, max_tokens=8), "a document of 17 tokens: 2 ranks .*max_tokens=8.*"),
        (lambda: place_groups([9], 4, RING, max_tokens=4, max_degree=2), "a document of 9 tokens: 2 ranks"),
        (lambda: lower_bound([5, 17], 2, RING, max_tokens=8), "a document of 17 tokens: 2 ranks"),
        (lambda: place_groups([5], 2, RING, max_tokens=8, max_degree=3), "max_degree=3"),
        (lambda: place_groups([5], 2, RING, max_tokens=8, candidates=[4]), "candidates="),
        (lambda: place_groups([5], 0, RING, max_tokens=8), "ranks=0"),
        (lambda: place_groups([5], 1, RING, max_tokens=0), "max_tokens=0"),
        (lambda: place_groups([5], 1, RING, max_tokens=8, least_micro_batches=0), "least_micro_batches=0"),
        (lambda: place_groups([5], 1, RING, max_tokens=8, stages=0), "stages=0"),
        (lambda: place_groups([5], 1, RING, max_tokens=8, effort=0), "effort=0"),
        (lambda: place_groups([5], 1, RING, max_tokens=8, overhead=float("nan")), "overhead=nan"),
        (lambda: place_groups([5, 0], 1, RING, max_tokens=8), "a sequence of 0 tokens"),
        (lambda: place_groups([[5]], 1, RING, max_tokens=8), r"shape \(1, 1\)"),
    ],
)
def test_refusals_say_the_value_the_reason_and_the_fix(call, says):
    with pytest.raises(ValueError, match=says) as caught:
        call()
    assert ": " in str(caught.value) and ";" in str(caught.value) and "\n" not in str(caught.value)


def test_the_benchmark_prints_its_figures(monkeypatch, capsys):
    options = ["--ranks", "6", "--batch-size", "48", "--batches", "2", "--seed", "1"]
    monkeypatch.setattr(sys, "argv", ["sequence_planner.py", *options, "--json"])
    sequence_planner.main()
    found = json.loads(capsys.readouterr().out)
    assert found["max_tokens"] == 2072 and 0 <= found["gap_median"] <= found["gap_max"] <= 0.05
    assert found["gap_mean"] <= found["gap_mean_two_bounds"] and found["ms_per_step"] > 0
    assert min(found["least_ratios"][name] for name in ("homogeneous", "hybrid", "hdp")) >= 1 / ROUNDING
    monkeypatch.setattr(sys, "argv", ["sequence_planner.py", *options])
    sequence_planner.main()
    assert "gap_mean" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["sequence_planner.py", "--batch-size", "5000"])
    with pytest.raises(SystemExit):
        sequence_planner.main()
    assert "the file has 4000 lengths" in capsys.readouterr().err


# ---- Nodes ----


def cut_groups(pairs, node_ranks: int) -> int:
    return sum(len({rank // node_ranks for rank in held}) > 1 for _, held in pairs)


@pytest.mark.parametrize("seed", range(30))
def test_ranks_that_share_documents_are_on_one_node(seed):
    draw = random.Random(seed)
    ranks, node = draw.choice([(4, 2), (8, 4), (8, 2), (12, 4)])
    whole = draw.sample(range(ranks), ranks)
    groups = []
    while whole:  # disjoint groups that nodes have room for
        size = min(len(whole), draw.choice([1, 2, node]))
        groups.append(tuple(whole[:size]))
        whole = whole[size:]
    pairs = tuple(enumerate(groups))
    found = on_nodes(pairs, ranks, node)
    assert [len(held) for _, held in found] == [len(held) for _, held in pairs]
    assert sorted(rank for _, held in found for rank in held) == list(range(ranks))  # an order of the same ranks
    assert cut_groups(found, node) <= cut_groups(pairs, node)
    if all(len(group) in (1, node) for group in groups):
        assert cut_groups(found, node) == 0


def test_documents_stay_together_in_another_order_of_ranks():
    pairs = ((0, (0, 3)), (1, (3, 1)), (2, (2,)), (3, (0,)))
    found = dict(on_nodes(pairs, 4, 2))
    number = dict(zip((0, 3, 1), (found[0][0], found[0][1], found[1][1]), strict=True))
    assert found[1][0] == number[3] and found[3] == (number[0],) and len({*number.values(), *found[2]}) == 4
