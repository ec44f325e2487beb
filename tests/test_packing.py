# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Checks that documents get from padded batches into packs, token by token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from galvatron_hf.data.packing import NotPackable, Sequences, limit_lengths, pack, pieces, unpad
from galvatron_hf.data.placement import Placement
from galvatron_hf.plan.deal import Deal


IGNORED, PAD = -100, 3


@st.composite
def padded_batches(draw) -> dict[str, torch.Tensor]:
    """Draws rows padded on the right, with labels at random places; some rows may be empty."""
    lengths = draw(st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    mask = (torch.arange(max(lengths) + draw(st.integers(0, 2))) < torch.tensor(lengths)[:, None]).long()
    ids = torch.randint(4, 99, mask.shape, generator=generator)
    ignored = (mask == 0) | (torch.rand(mask.shape, generator=generator) < 0.3)
    batch = {"input_ids": ids.masked_fill(mask == 0, PAD), "attention_mask": mask}
    return batch | {"labels": ids.masked_fill(ignored, IGNORED)}


def triples_of_rows(batch: dict[str, torch.Tensor]) -> list[list[tuple[int, int, int]]]:
    """Returns (token, position, target) of each row, read one by one: the oracle."""
    found = []
    for ids, mask, labels in zip(*(batch[n].tolist() for n in ("input_ids", "attention_mask", "labels")), strict=True):
        following = [*labels[1:], IGNORED]
        row = [(ids[p], p, following[p]) for p in range(len(ids)) if mask[p]]
        if row:
            found.append(row)
    return found


def triples_of_packs(parts: list[dict[str, Any]]) -> tuple[list[list[tuple[int, int, int]]], list[tuple]]:
    """Returns the same of each document in packed micro-batches, and of the padding of packs."""
    documents, padding = [], []
    for part in parts:
        ids, positions, targets = (part[n][0].tolist() for n in ("input_ids", "position_ids", "shift_labels"))
        whole = part["documents"]
        for row, piece in zip(whole.rows, whole.pieces, strict=True):
            start, stop = piece.at, piece.end
            tokens = list(zip(ids[start:stop], positions[start:stop], targets[start:stop], strict=True))
            documents.append(tokens) if row >= 0 else padding.extend(tokens)
    return documents, padding


@settings(deadline=None, max_examples=200, derandomize=True, database=None)
@given(
    padded_batches(),
    st.integers(1, 3),
    st.integers(1, 4),
    st.sampled_from([1, 2, 8]),
    st.randoms(use_true_random=False),
)
def test_every_document_arrives_whole_wherever_it_is_placed(batch, micro_batches, packs, multiple, draw):
    sequences = unpad(batch)
    places = [[[] for _ in range(packs)] for _ in range(micro_batches)]
    for index in range(len(sequences.lengths)):
        draw.choice(draw.choice(places)).append(index)
    parts = pack(sequences, Placement(tuple(tuple(map(tuple, packs_)) for packs_ in places)), multiple, PAD)
    documents, padding = triples_of_packs(parts)
    assert sorted(documents) == sorted(triples_of_rows(batch))
    assert all(token == (PAD, 0, IGNORED) for token in padding)
    for part, packs_ in zip(parts, places, strict=True):
        cuts = part["documents"].cuts
        for pack_, start, stop in zip(packs_, cuts[:-1], cuts[1:], strict=True):
            tokens = sum(int(sequences.lengths[index]) for index in pack_)
            assert stop - start == max(-(-tokens // multiple), 1) * multiple


def test_batches_of_a_step_count_their_rows_on():
    first = {"input_ids": torch.ones(2, 3, dtype=torch.long), "labels": torch.ones(2, 3, dtype=torch.long)}
    second = {"input_ids": torch.ones(1, 5, dtype=torch.long), "labels": torch.ones(1, 5, dtype=torch.long)}
    nothing = {name: value[:0] for name, value in second.items()}
    sequences = Sequences.from_batches([first, second, nothing])
    assert sequences.lengths.tolist() == [3, 3, 5] and sequences.rows.tolist() == [0, 1, 2]
    assert sequences.position_ids.tolist() == [0, 1, 2, 0, 1, 2, 0, 1, 2, 3, 4]


def test_rows_that_were_packed_already_are_taken_apart():
    positions = torch.tensor([[0, 1, 2, 0, 0, 1]])
    ids = torch.arange(6)[None]
    sequences = unpad({"input_ids": ids, "labels": ids, "position_ids": positions})
    assert sequences.bounds.tolist() == [0, 3, 4, 6] and sequences.rows.tolist() == [0, 0, 0]
    # Where a mask says what belongs together, positions are positions alone, as in the Hugging Face models.
    masked = unpad({"input_ids": ids, "labels": ids, "position_ids": positions, "attention_mask": torch.ones(1, 6)})
    assert masked.bounds.tolist() == [0, 6]


def test_shifted_labels_and_left_padding_without_targets():
    mask = torch.tensor([[0, 0, 1, 1, 1]])
    shifted = torch.tensor([[IGNORED, IGNORED, 7, 8, IGNORED]])
    sequences = unpad({"input_ids": torch.arange(5)[None], "attention_mask": mask, "shift_labels": shifted})
    assert sequences.targets.tolist() == [7, 8, IGNORED]
    assert sequences.position_ids.tolist() == [2, 3, 4]  # where the model would have seen them


@pytest.mark.parametrize(
    "change, reason",
    [
        (lambda batch: batch | {"token_type_ids": torch.zeros(1, 4)}, "'token_type_ids'"),
        (lambda batch: batch | {"attention_mask": torch.tensor([[1, 0, 1, 1]])}, "holes"),
        (lambda batch: batch | {"attention_mask": torch.tensor([[0, 1, 1, 1]])}, "left padding"),
        (lambda batch: batch | {"attention_mask": torch.ones(1, 1, 4, 4)}, r"the shape \(1, 1, 4, 4\)"),
        (lambda batch: batch | {"position_ids": torch.arange(4)}, r"position_ids have the shape \(4,\)"),
        (lambda batch: {name: value for name, value in batch.items() if name != "labels"}, "no labels"),
        (lambda batch: batch | {"input_ids": torch.arange(4)}, r"the shape \(4,\) instead of"),
        (lambda batch: batch | {"cu_seq_lens_q": torch.tensor([0, 4])}, "cu_seq_lens_q"),
    ],
)
def test_what_cannot_be_packed_is_named(change, reason):
    batch = {"input_ids": torch.arange(4)[None], "labels": torch.tensor([[1, 1, IGNORED, 2]])}
    with pytest.raises(NotPackable, match=reason):
        unpad(change(batch))


def long_batch() -> dict[str, torch.Tensor]:
    ids = torch.arange(10, 20)[None]
    return {"input_ids": ids, "labels": ids}


def test_long_documents_are_truncated():
    sequences = limit_lengths(unpad(long_batch()), 4, "truncate")
    assert sequences.input_ids.tolist() == [10, 11, 12, 13] and sequences.targets.tolist() == [11, 12, 13, IGNORED]
    assert sequences.cut == 1 and sequences.rows.tolist() == [0]


def test_long_documents_are_split():
    sequences = limit_lengths(unpad(long_batch()), 4, "split")
    assert sequences.bounds.tolist() == [0, 4, 8, 10] and sequences.rows.tolist() == [0, 0, 0] and sequences.cut == 1
    assert sequences.position_ids.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]
    targets = [11, 12, 13, IGNORED, 15, 16, 17, IGNORED, 19, IGNORED]
    assert sequences.targets.tolist() == targets


@pytest.mark.parametrize("policy", ["truncate", "split"])
def test_documents_that_are_short_enough_keep_all_their_targets(policy):
    """Shifts labels before: a last document keeps its targets, and so does the end of a document that was split."""
    ids = torch.arange(12).reshape(2, 6)
    mask = torch.tensor([[1] * 6, [1] * 3 + [0] * 3])
    shifted = (ids + 1).masked_fill(mask == 0, IGNORED)
    sequences = limit_lengths(unpad({"input_ids": ids, "attention_mask": mask, "shift_labels": shifted}), 4, policy)
    first = [1, 2, 3, IGNORED] if policy == "truncate" else [1, 2, 3, IGNORED, 5, 6]
    assert sequences.targets.tolist() == [*first, 7, 8, 9]


def test_long_documents_are_refused_and_short_ones_left_alone():
    sequences = unpad(long_batch())
    assert limit_lengths(sequences, 10, "error") is sequences
    with pytest.raises(ValueError, match=r"Row 0 of the global batch has 10 tokens, above max_tokens_per_rank \(9\)"):
        limit_lengths(sequences, 9, "error")


@settings(deadline=None, max_examples=200, derandomize=True, database=None)
@given(padded_batches(), st.integers(1, 10), st.sampled_from(["truncate", "split"]))
def test_lengths_alone_tell_what_is_left_of_documents(batch, longest, policy):
    """Compares with slices of each document, token by token."""
    wanted, cut = [], 0
    for document in triples_of_rows(batch):
        cut += len(document) > longest
        for start in range(0, len(document) if policy == "split" else 1, longest):
            piece = document[start : start + longest]
            if start + longest < len(document):
                piece[-1] = (*piece[-1][:2], IGNORED)
            wanted.append([(token, position - start, target) for token, position, target in piece])
    sequences = unpad(batch)
    limited = limit_lengths(sequences, longest, policy)
    names = ("input_ids", "position_ids", "targets")
    tokens = list(zip(*(getattr(limited, name).tolist() for name in names), strict=True))
    bounds = limited.bounds.tolist()
    found = [tokens[start:stop] for start, stop in zip(bounds[:-1], bounds[1:], strict=True)]
    assert found == wanted and limited.cut == cut
    assert pieces(sequences.lengths, longest, policy).lengths.tolist() == [len(piece) for piece in wanted]


@pytest.mark.parametrize(
    "bounds, cuts, rows, message",
    [
        ((0,), (0, 0), (), "are not consecutive documents"),
        ((0, 3, 3), (0, 3), (), "are not consecutive documents"),
        ((1, 3), (1, 3), (), "are not consecutive documents"),
        ((0, 3), (0, 3), (0, 1), "are not consecutive documents"),
        ((0, 3, 5), (0, 4, 5), (), "do not cut the row of 5"),
        ((0, 3, 5), (0, 3), (), "do not cut the row of 5"),
        ((0, 3, 5), (0, 5, 3, 5), (), "do not cut the row of 5"),
    ],
)
def test_bounds_that_do_not_fit_are_refused(bounds, cuts, rows, message):
    with pytest.raises(ValueError, match=message):
        Deal.of_documents(bounds=bounds, cuts=cuts, rows=rows)


def test_rows_of_positions():
    documents = Deal.of_documents(bounds=(0, 3, 4, 8, 9), cuts=(0, 4, 9), rows=(5, -1, 2, -1))
    assert documents.rows_at([0, 3, 7]) == [2, 5] and documents.rows_at([3, 8]) == []
    assert sum(documents.lengths) == documents.grid.length == 9
