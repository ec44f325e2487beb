# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Compares placement with enumeration, plain longest-first and Karmarkar-Karp, and bounds it on real lengths."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from galvatron_hf.data import placement
from galvatron_hf.data.cost import SequenceCost, fit_cost
from galvatron_hf.data.placement import PLANNERS, Placement, in_order, place
from plan_inputs import QUICK


COST = SequenceCost(per_token=1e-6, per_token_squared=1e-10, per_sequence=1e-5)
LENGTHS = np.loadtxt(Path(__file__).parent / "data" / "wikipedia" / "token_lengths.txt", dtype=np.int64)
ROUNDING = 1 + 1e-9  # sums of the same costs in another order

lengths_ = st.lists(st.integers(1, 4000) | st.integers(1, 60), max_size=40)
costs_ = st.sampled_from(
    [
        COST,
        SequenceCost(per_token=1e-6, per_token_squared=0.0, per_sequence=0.0),
        SequenceCost(per_token=0.0, per_token_squared=1e-9, per_sequence=0.0),
        SequenceCost(per_token=0.0, per_token_squared=0.0, per_sequence=1e-3),
    ]
)
steps_ = st.fixed_dictionaries(
    {
        "ranks": st.integers(1, 6),
        "cost": costs_,
        "slack": st.none() | st.sampled_from([1.0, 1.2, 3.0]),
        "overhead": st.sampled_from([0.0, 1e-3]),
        "stages": st.integers(1, 4),
        "least_micro_batches": st.integers(1, 4),
    }
)


def memory(lengths, slack: float | None) -> int | None:
    """Returns `max_tokens` of a step: `slack` times the longest sequence."""
    return None if slack is None else int(slack * max(lengths, default=1))


def partitions(n: int, most: int) -> Iterator[list[list[int]]]:
    """Yields all ways to put 0 ... n - 1 into at most `most` blocks that are not empty."""
    if n == 0:
        yield []
        return
    for blocks in partitions(n - 1, most):
        for index in range(len(blocks)):
            yield [block + [n - 1] * (place == index) for place, block in enumerate(blocks)]
        if len(blocks) < most:
            yield [*blocks, [n - 1]]


def brute_force(
    lengths, ranks, cost, *, max_tokens, overhead=0.0, stages=1, least_micro_batches=1, allowed=None
) -> float:
    """Returns the best objective over all sets of bins and all ways to make micro-batches of them."""
    seconds = cost.seconds(lengths)
    best = np.inf
    for bins in partitions(len(lengths), len(lengths)):
        if max_tokens is not None and any(sum(lengths[i] for i in bin_) > max_tokens for bin_ in bins):
            continue
        loads = [sum(seconds[i] for i in bin_) for bin_ in bins]
        for micro_batches in partitions(len(bins), len(bins)):
            if any(len(micro_batch) > ranks for micro_batch in micro_batches):
                continue
            count = max(least_micro_batches, len(micro_batches))
            while allowed is not None and not allowed(count):
                count += 1
            peaks = [max(loads[bin_] for bin_ in micro_batch) for micro_batch in micro_batches]
            if stages == 1:
                best = min(best, sum(peaks) + overhead * count)
            else:
                best = min(best, (max(peaks) + overhead) * (stages - 1 + count))
    return best


def plain_longest_first(costs: np.ndarray, tokens: np.ndarray, count: int, max_tokens: float) -> np.ndarray | None:
    """Returns loads of bins if each sequence goes, longest first, to the least loaded bin with room."""
    loads, used = np.zeros(count), np.zeros(count)
    for index in np.argsort(-tokens, kind="stable"):
        free = np.flatnonzero(used + tokens[index] <= max_tokens)
        if not len(free):
            return None
        chosen = free[loads[free].argmin()]
        loads[chosen] += costs[index]
        used[chosen] += tokens[index]
    return loads


def plain_karmarkar_karp(costs: np.ndarray, tokens: np.ndarray, count: int, max_tokens: float) -> np.ndarray | None:
    """Returns loads by textbook differencing: every partition has all its parts, the empty ones too."""
    waiting = [
        (order, [(0.0, 0)] * (count - 1) + [(costs[index], tokens[index])])
        for order, index in enumerate(np.argsort(-tokens, kind="stable"))
    ]
    while len(waiting) > 1:
        waiting.sort(key=lambda entry: (entry[1][0][0] - entry[1][-1][0], entry[0]))
        (order, parts), (_, others), *rest = waiting
        united = [(a + b, s + t) for (a, s), (b, t) in zip(parts, reversed(others), strict=True)]
        waiting = [(order, sorted(united)), *rest]
    if not waiting:
        return np.zeros(count)
    loads, used = zip(*waiting[0][1], strict=True)
    return np.array(loads) if max(used) <= max_tokens else None


def objective(loads: np.ndarray, ranks: int, overhead: float, stages: int) -> float:
    """Returns the cost of bins with these loads, the slowest ones in the same micro-batch."""
    table = np.sort(loads)[::-1].reshape(-1, ranks)
    if stages == 1:
        return float((table[:, 0] + overhead).sum())
    return float((table[0, 0] + overhead) * (stages - 1 + len(table)))


def small_cases(count: int) -> list[tuple[list[int], dict]]:
    random = np.random.default_rng(0)
    cases = []
    for _ in range(count):
        lengths = np.minimum(random.choice(LENGTHS, random.integers(1, 8)), 4096).tolist()
        stages = int(random.choice([1, 1, 2, 4]))
        arguments = {
            "ranks": int(random.integers(1, 4)),
            "cost": COST,
            "max_tokens": memory(lengths, random.choice([None, 1.0, 1.3, 2.0])),
            "overhead": float(random.choice([0.0, 5e-4])),
            "stages": stages,
            "least_micro_batches": int(random.choice([1, stages])),
        }
        if stages > 1 and random.random() < 0.5:
            arguments["allowed"] = lambda count, stages=stages: count % stages == 0
        cases.append((lengths, arguments))
    return cases


def seconds_of(placement: Placement, lengths, arguments: dict) -> float:
    return placement.seconds(lengths, arguments["cost"], overhead=arguments["overhead"], stages=arguments["stages"])


def test_exact_equals_enumeration_and_the_default_is_near():
    ratios = []
    for lengths, arguments in small_cases(60):
        best = brute_force(lengths, **arguments)
        exact = place(lengths, **arguments, planner="exact")
        assert seconds_of(exact, lengths, arguments) == pytest.approx(best, rel=1e-9), (lengths, arguments)
        ratios.append(seconds_of(place(lengths, **arguments), lengths, arguments) / best)
    assert min(ratios) >= 1 - 1e-9
    assert max(ratios) <= 1.03


def test_a_schedule_that_cannot_run_all_numbers_gets_the_best_that_it_can():
    """Forces numbers of micro-batches, in a case where the next larger one is a tenth slower than a smaller one."""
    lengths = [385, 549, 246, 18, 483, 326, 633, 212, 50, 382, 319, 279, 127, 110, 13, 36, 147, 7, 21]
    options = dict(max_tokens=8000, overhead=1e-3, stages=2)

    def seconds(allowed) -> float:
        placed = place(lengths, 1, COST, allowed=allowed, **options)
        assert allowed(len(placed.micro_batches))
        return placed.seconds(lengths, COST, overhead=1e-3, stages=2)

    forced = [seconds(lambda count, wanted=wanted: count >= wanted and count % 2 == 0) for wanted in range(2, 20, 2)]
    assert seconds(lambda count: count % 2 == 0) <= min(forced) * 1.001


def test_numbers_that_nothing_fits_into_are_not_tried_one_by_one(monkeypatch):
    """Places 512 sequences of which no two fit into a bin: 33 micro-batches by their tokens, 64 are needed."""
    tried, original = [], placement._starts
    monkeypatch.setattr(placement, "_starts", lambda *args, **more: tried.append(1) or original(*args, **more))
    found = place([2100] * 512, 8, COST, max_tokens=4096, overhead=1e-3)
    assert len(found.micro_batches) == 64 and len(tried) <= 4


@pytest.mark.slow
def test_the_default_is_near_the_exact_placement_of_a_dozen_sequences():
    random = np.random.default_rng(1)
    for _ in range(6):
        lengths = np.minimum(random.choice(LENGTHS, 12), 4096)
        for max_tokens in (None, int(1.5 * lengths.max())):
            arguments = {"ranks": 3, "cost": COST, "max_tokens": max_tokens}
            exact = place(lengths, **arguments, planner="exact").seconds(lengths, COST)
            assert exact / ROUNDING <= place(lengths, **arguments).seconds(lengths, COST) <= 1.03 * exact


@QUICK
@given(lengths_, steps_, st.sampled_from(["longest_first", "karmarkar_karp", "in_order"]))
def test_every_sequence_stands_once_and_no_rank_holds_more_than_it_may(lengths, step, planner):
    arguments = dict(step)
    max_tokens = memory(lengths, arguments.pop("slack"))
    if planner == "in_order":
        placement = in_order(
            lengths, step["ranks"], max_tokens=max_tokens, least_micro_batches=step["least_micro_batches"]
        )
    else:
        placement = place(lengths, **arguments, max_tokens=max_tokens, planner=planner)
        assert (
            place(np.array(lengths, dtype=np.int32), **arguments, max_tokens=max_tokens, planner=planner) == placement
        )
    bins = [bin_ for micro_batch in placement.micro_batches for bin_ in micro_batch]
    assert sorted(index for bin_ in bins for index in bin_) == list(range(len(lengths)))
    assert all(list(bin_) == sorted(bin_) for bin_ in bins)
    assert {len(micro_batch) for micro_batch in placement.micro_batches} == {step["ranks"]}
    assert len(placement.micro_batches) >= step["least_micro_batches"]
    assert max_tokens is None or max(sum(lengths[index] for index in bin_) for bin_ in bins) <= max_tokens
    if planner == "in_order":
        assert [index for bin_ in bins for index in bin_] == list(range(len(lengths)))


@QUICK
@given(lengths_.filter(bool), steps_)
def test_the_default_is_never_worse_than_longest_first_or_karmarkar_karp(lengths, step):
    arguments = dict(step)
    arguments["max_tokens"] = memory(lengths, arguments.pop("slack"))
    ours = place(lengths, **arguments)
    seconds = seconds_of(ours, lengths, arguments)
    assert seconds <= seconds_of(place(lengths, **arguments, planner="karmarkar_karp"), lengths, arguments) * ROUNDING
    costs, tokens, count = step["cost"].seconds(lengths), np.array(lengths), len(ours.micro_batches) * step["ranks"]
    for plain in (plain_longest_first, plain_karmarkar_karp):
        loads = plain(costs, tokens, count, arguments["max_tokens"] or np.inf)
        if loads is not None:
            assert seconds <= objective(loads, step["ranks"], step["overhead"], step["stages"]) * ROUNDING


@pytest.mark.parametrize("stages", [1, 4])
@pytest.mark.parametrize("ranks, rows", [(8, 64), (8, 256), (64, 512), (64, 4000)])
@pytest.mark.parametrize("cap", [2048, 8192, 32768])
def test_real_lengths_are_within_two_percent_of_the_bound(ranks, rows, cap, stages):
    lengths = np.minimum(np.random.default_rng(0).permutation(LENGTHS)[:rows], cap)
    overhead = 1e-3 * (stages > 1)
    placement = place(
        lengths, ranks, COST, max_tokens=4 * cap, stages=stages, least_micro_batches=stages, overhead=overhead
    )
    costs, count = COST.seconds(lengths), len(placement.micro_batches)
    if stages == 1:
        bound = max(costs.sum() / ranks, costs.max())
    else:  # the number of micro-batches with the best bound, of all there might be
        counts = np.arange(stages, rows + 1)
        bound = ((np.maximum(costs.sum() / ranks / counts, costs.max()) + overhead) * (stages - 1 + counts)).min()
    assert bound / ROUNDING <= placement.seconds(lengths, COST, stages=stages, overhead=overhead) <= 1.02 * bound
    assert placement.imbalance(lengths, COST, stages=stages) == pytest.approx(
        max(1.0, costs.max() * ranks * (count if stages > 1 else 1) / costs.sum()), rel=0.02
    )


@QUICK
@given(st.lists(st.integers(1, 4000), min_size=1, max_size=40), st.integers(1, 6))
def test_karmarkar_karp_is_the_textbook_s(lengths, ranks):
    placement = place(lengths, ranks, COST, max_tokens=None, planner="karmarkar_karp")
    expected = plain_karmarkar_karp(COST.seconds(lengths), np.array(lengths), ranks, np.inf)
    assert np.sort(placement.loads(lengths, COST).ravel()) == pytest.approx(np.sort(expected), rel=1e-9)


def test_local_search_betters_longest_first_and_karmarkar_karp():
    lengths = np.minimum(np.random.default_rng(0).permutation(LENGTHS)[:512], 2048)
    costs = COST.seconds(lengths)
    bound = costs.sum() / 64
    assert place(lengths, 64, COST, max_tokens=None).seconds(lengths, COST) <= 1.002 * bound
    assert plain_longest_first(costs, lengths, 64, np.inf).max() > 1.003 * bound
    assert plain_karmarkar_karp(costs, lengths, 64, np.inf).max() > 1.003 * bound


def test_long_sequences_share_a_micro_batch():
    # Two fit nowhere together; of the sums of slowest ranks, 8 + 4 is the least and 8 + 8 the sampler's.
    cost = SequenceCost(per_token=1.0, per_token_squared=0.0, per_sequence=0.0)
    lengths = [8, 4, 8, 4]
    placement = place(lengths, 2, cost, max_tokens=8)
    assert placement.micro_batches == (((0,), (2,)), ((1,), (3,)))
    assert placement.seconds(lengths, cost) == 12
    assert in_order(lengths, 2, max_tokens=8).seconds(lengths, cost) == 16


def test_what_fits_by_tokens_alone_is_placed_in_the_fewest_micro_batches():
    # Equal cost for all, so that by cost alone the bins would get equally many: 5 + 3 + 3 > 10 >= 5 + 5.
    cost = SequenceCost(per_token=0.0, per_token_squared=0.0, per_sequence=1.0)
    lengths = [7, 5, 5, 3]
    placement = place(lengths, 2, cost, max_tokens=10)
    assert placement.micro_batches in ((((0, 3), (1, 2)),), (((1, 2), (0, 3)),))


def test_a_pipeline_takes_more_micro_batches_to_fill_its_bubble():
    cost = SequenceCost(per_token=1.0, per_token_squared=0.0, per_sequence=0.0)
    lengths = [1] * 64
    # (64 / v + c)(p - 1 + v): without an overhead as many as there are sequences, with one sqrt(64 * 3 / 12) = 4.
    assert len(place(lengths, 1, cost, max_tokens=None, stages=4).micro_batches) == 64
    placement = place(lengths, 1, cost, max_tokens=None, stages=4, overhead=12.0)
    assert len(placement.micro_batches) == 4
    assert placement.seconds(lengths, cost, stages=4, overhead=12.0) == (16 + 12) * 7
    assert len(place(lengths, 1, cost, max_tokens=None, overhead=0.0).micro_batches) == 1


def test_loads_seconds_and_imbalance():
    cost = SequenceCost(per_token=2.0, per_token_squared=1.0, per_sequence=0.5)
    placement = Placement((((0, 2), (1,)), ((), (3,))))
    lengths = [1, 2, 3, 4]  # 3.5, 8.5, 15.5, 24.5 seconds
    assert placement.loads(lengths, cost).tolist() == [[19.0, 8.5], [0.0, 24.5]]
    assert placement.seconds(lengths, cost, overhead=1.0) == 20.0 + 25.5
    assert placement.seconds(lengths, cost, overhead=1.0, stages=3) == 25.5 * 4
    assert placement.imbalance(lengths, cost) == 43.5 / 26
    assert placement.imbalance(lengths, cost, stages=3) == 24.5 / 13
    assert Placement((((), ()),)).imbalance([], cost) == 1.0


def test_the_order_of_the_sampler_is_cut_into_even_pieces():
    assert in_order([3, 3, 3, 3], 2, max_tokens=None).micro_batches == (((0, 1), (2, 3)),)
    assert in_order([3, 3, 3, 3], 2, max_tokens=5).micro_batches == (((0,), (1,)), ((2,), (3,)))
    assert in_order([5, 1, 1, 1], 2, max_tokens=None).micro_batches == (((0,), (1, 2, 3)),)
    assert in_order([7], 2, max_tokens=7, least_micro_batches=2).micro_batches == (((0,), ()), ((), ()))


SHAPES = [(16, 1), (16, 8), (64, 1), (256, 1), (1024, 1), (4096, 1), (16384, 1)]


def timed(overhead: float) -> np.ndarray:
    return np.array([count * COST.seconds([length])[0] + overhead for length, count in SHAPES])


def test_a_fit_finds_the_coefficients_and_none_below_zero():
    fitted, overhead = fit_cost(SHAPES, timed(0.03))
    assert [fitted.per_token, fitted.per_token_squared, fitted.per_sequence] == pytest.approx(
        [COST.per_token, COST.per_token_squared, COST.per_sequence], rel=1e-5
    )
    assert overhead == pytest.approx(0.03, rel=1e-5)
    # Growing more slowly than linearly: a free fit would make the square negative.
    lengths = [(length, 1) for length, _ in SHAPES[1:]]
    assert fit_cost(lengths, np.sqrt([length for length, _ in lengths]))[0].per_token_squared == 0
    # Always the same time: nothing can be told of a token but that there were so many.
    assert fit_cost([(10, 1), (10, 8)], [2.0, 2.0])[0].per_token == pytest.approx(2.0 / 80)


@pytest.mark.parametrize(
    "call, says",
    [
        (lambda: place([5, 9], 2, COST, max_tokens=8), "a sequence of 9 tokens: .* max_tokens=8; .*truncate"),
        (lambda: in_order([5, 9], 2, max_tokens=8), "a sequence of 9 tokens"),
        (lambda: place([5], 2, COST, max_tokens=8, planner="best"), "planner='best': .*longest_first"),
        (lambda: place([5], 0, COST, max_tokens=8), "ranks=0"),
        (lambda: place([5], 1, COST, max_tokens=8, least_micro_batches=0), "least_micro_batches=0"),
        (lambda: place([5], 1, COST, max_tokens=8, stages=0), "stages=0"),
        (lambda: place([5], 1, COST, max_tokens=8, overhead=float("nan")), "overhead=nan"),
        (lambda: place([5, 0], 1, COST, max_tokens=8), "a sequence of 0 tokens"),
        (lambda: place([[5]], 1, COST, max_tokens=8), r"shape \(1, 1\)"),
        (lambda: place(LENGTHS, 8, COST, max_tokens=None, planner="exact"), "4000 sequences for 8 bins"),
        (
            lambda: place(LENGTHS[:24], 4, COST, max_tokens=None, planner="exact", effort=2000),
            "24 sequences for .* within .* nodes",
        ),
        (lambda: SequenceCost(per_token=-1.0, per_token_squared=0.0, per_sequence=0.0), "per_token=-1.0"),
        (
            lambda: SequenceCost(per_token=0.0, per_token_squared=float("inf"), per_sequence=0.0),
            "per_token_squared=inf",
        ),
        (lambda: fit_cost([(1, 1), (2, 1)], [1.0]), "shapes"),
        (lambda: fit_cost([(1, 1), (2, 1)], [1.0, 0.0]), "seconds=0.0"),
    ],
)
def test_refusals_say_the_value_the_reason_and_the_fix(call, says):
    with pytest.raises(ValueError, match=says) as caught:
        call()
    assert ": " in str(caught.value) and ";" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("planner", PLANNERS)
def test_a_step_without_sequences_or_with_one(planner):
    assert place([], 2, COST, max_tokens=8, planner=planner).micro_batches == (((), ()),)
    placed = place([8], 2, COST, max_tokens=8, planner=planner, stages=2, least_micro_batches=2).micro_batches
    assert sorted(bin_ for micro_batch in placed for bin_ in micro_batch) == [(), (), (), (0,)]
