# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Deals of documents: who holds which tokens, and the order in which ranks that share documents send."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from galvatron_hf.plan.chunks import chunks_of, shared_tokens
from galvatron_hf.plan.deal import PADDING, Deal, Piece
from galvatron_hf.plan.dealing import deal_out, missing_tokens


@pytest.mark.parametrize("degree", range(1, 9))
def test_chunks_cover_a_document_and_balance_causal_work(degree):
    for length in (*range(1, 40), 1000, 4096):
        parts = chunks_of(length, degree)
        tokens = [token for runs in parts for run in runs for token in range(*run)]
        assert sorted(tokens) == list(range(length)) and len(parts) == degree
        assert shared_tokens(length, degree) == [sum(b - a for a, b in runs) for runs in parts]
    # A query sees the tokens up to its own: ranks compute as many scores as each other, but for rounding.
    work = [sum(position + 1 for run in runs for position in range(*run)) for runs in chunks_of(4096, degree)]
    assert max(work) / min(work) < 1.005


def random_deal(seed: int, packs: int = 4, documents: int = 12, multiple: int = 1) -> tuple[Deal, list[int]]:
    draw = random.Random(seed)
    lengths = [draw.choice([1, 2, 5, 9, 17, 40]) for _ in range(documents)]
    whole: list[list[int]] = [[] for _ in range(packs)]
    shared = []
    for index in range(documents):
        ranks = draw.sample(range(packs), draw.randint(1, packs))
        if len(ranks) == 1:
            whole[ranks[0]].append(index)
        else:
            shared.append((index, tuple(ranks), draw.choice(["ring", "gather", "ulysses"])))
    tokens = [sum(lengths[one] for one in pack) for pack in whole]
    for index, ranks, _ in shared:
        for rank, count in zip(ranks, shared_tokens(lengths[index], len(ranks)), strict=True):
            tokens[rank] += count
    missing = [missing_tokens(count, multiple) for count in tokens]
    return deal_out(lengths, whole, shared, missing, [100 + index for index in range(documents)]), lengths


def row_of(deal: Deal) -> list[tuple[int, int]]:
    """Returns the (document, token) at each position of the row."""
    return [(piece.document, token) for piece in deal.pieces for token in range(piece.start, piece.stop)]


@settings(deadline=None, max_examples=150, derandomize=True, database=None)
@given(st.integers(0, 10**6), st.sampled_from([1, 2, 4]), st.sampled_from([1, 3]))
def test_shares_hold_every_token_once_in_the_order_that_they_say(seed, data, multiple):
    deal, lengths = random_deal(seed, multiple=multiple)
    row, held = row_of(deal), []
    by_row = {row_: document for document, row_ in enumerate(deal.rows) if row_ != PADDING}
    assert all(deal.lengths[by_row[100 + index]] == length for index, length in enumerate(lengths))
    assert all((stop - start) % multiple == 0 for start, stop in zip(deal.cuts, deal.cuts[1:]))
    starts = [deal.cuts[k * 4 // data] for k in range(data + 1)]
    holders: dict[int, set[int]] = {}
    for position, (document, _) in enumerate(row):
        holders.setdefault(document, set()).add(np.searchsorted(starts, position, side="right") - 1)
    for index in range(data):
        share = deal.share(data, index)
        part = row[starts[index] : starts[index + 1]]
        taken = part if share.order is None else [part[at] for run in share.order for at in range(*run)]
        assert sorted(taken) == sorted(part) and share.tokens == len(part)
        held += taken
        # Whole documents come first, each from its first token to its last.
        for start, stop in zip(share.offsets, share.offsets[1:]):
            document = taken[start][0]
            assert taken[start:stop] == [(document, token) for token in range(deal.lengths[document])]
            assert holders[document] == {index}
        shared = [one for ring in share.rings for one in ring.documents] + [*share.gathered, *share.exchanged]
        assert sorted(one.at for one in shared) == sorted({one.at for one in shared})
        assert share.whole_tokens + sum(one.tokens for one in shared) == len(part)
        for one in shared:
            own = [(one.document, token) for run in one.runs[index] for token in range(*run)]
            assert taken[one.at : one.at + one.tokens] == own
            assert set(one.holders) == holders[one.document] and one.length == deal.lengths[one.document]
            every = [token for runs in one.runs.values() for run in runs for token in range(*run)]
            assert sorted(every) == list(range(one.length))
    assert sorted(held) == sorted(row)


def test_whole_documents_are_today_s_bounds():
    bounds, cuts = (0, 3, 4, 8, 9), (0, 4, 9)
    deal = Deal.of_documents(bounds=bounds, cuts=cuts, rows=(5, -1, 2, 7))
    assert not deal.is_shared and deal.longest == 4 and deal.pieces_of_packs() == [2, 2]
    for index, offsets in enumerate([(0, 3, 4), (0, 4, 5)]):
        share = deal.share(2, index)
        assert share.is_whole and share.offsets == offsets
    assert deal.share(1, 0).offsets == bounds
    assert deal == deal_out([3, 1, 4, 1], [(0, 1), (2, 3)], (), (0, 0), (5, -1, 2, 7))


@pytest.mark.parametrize(
    "pieces, cuts, message",
    [
        ([(0, 0, 3, 0), (1, 0, 2, 4)], (0, 6), "does not follow the 3 positions"),
        ([(0, 0, 3, 0), (0, 2, 4, 3)], (0, 5), "do not cover it once"),
        ([(0, 1, 3, 0)], (0, 2), "do not cover it once"),
        ([(1, 0, 3, 0)], (0, 3), "number the documents from 0"),
        ([(0, 0, 3, 0), (1, 0, 2, 3)], (0, 4, 5), "do not cut the row of 5"),
        ([(0, 0, 0, 0)], (0, 0), "1 token or more"),
    ],
)
def test_pieces_that_do_not_fit_are_refused(pieces, cuts, message):
    with pytest.raises(ValueError, match=message):
        Deal(pieces=tuple(Piece(*one) for one in pieces), cuts=cuts)


def test_packs_that_data_ranks_do_not_divide_are_refused():
    deal, _ = random_deal(0)
    with pytest.raises(ValueError, match="4 packs cannot be split over 3 data ranks"):
        deal.share(3, 0)


# ---- The order of rings ----


def hops_of(deal: Deal, data: int, order) -> list[list[tuple[tuple[int, ...], int]]]:
    """Returns the hops of each data rank, as (the ring's ranks, number of the hop), in the order of issue."""
    found = []
    for index in range(data):
        rings = [ring.holders for ring in deal.share(data, index).rings]
        found.append([(ring, hop) for ring in order(index, rings) for hop in range(len(ring) - 1)])
    return found


def where_ranks_hang(hops: list[list[tuple[tuple[int, ...], int]]]) -> list[int]:
    """Plays hops: one ends when both neighbours in the ring have reached it, so that what the rank sends and receives
    is under way. Returns the ranks that never end.
    """
    at = [0] * len(hops)
    while True:
        ready = []
        for rank, own in enumerate(hops):
            if at[rank] == len(own):
                continue
            ring, hop = own[at[rank]]
            place = ring.index(rank)
            neighbours = {ring[place - 1], ring[(place + 1) % len(ring)]}
            if all((ring, hop) in hops[one][: at[one] + 1] for one in neighbours):
                ready.append(rank)
        if not ready:
            return [rank for rank, own in enumerate(hops) if at[rank] < len(own)]
        for rank in ready:
            at[rank] += 1


def test_rings_in_one_order_never_hang_and_in_ranks_own_orders_do():
    hanging = 0
    for seed in range(300):
        deal, _ = random_deal(seed, packs=6, documents=16)
        assert where_ranks_hang(hops_of(deal, 6, lambda index, rings: rings)) == []

        def own_order(index, rings):  # as if numbered by what the rank itself takes part in
            return random.Random(index).sample(rings, len(rings))

        hanging += bool(where_ranks_hang(hops_of(deal, 6, own_order)))
    assert hanging > 10
