# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Packed pairs of documents: encoder-decoders read each source with its own target, against one process."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from transformers import DataCollatorForSeq2Seq, PreTrainedModel

import oracle
from encoder_decoder_models import ENCODER_DECODERS, random_plan
from equivalence import Reference, reference
from galvatron_hf.data.packing import NotPackable, Sequences, limit_lengths, pack, unpad
from galvatron_hf.data.placement import Placement
from galvatron_hf.models.families import adapter_for
from galvatron_hf.models.losses import IGNORED
from galvatron_hf.parallel import model_runner
from galvatron_hf.parallel.activation.documents import DocumentBounds
from galvatron_hf.parallel.debug.nonfinite import find_nonfinite
from galvatron_hf.parallel.layers import relative_bias
from galvatron_hf.parallel.layers.parallel_layer import ParallelLayer
from galvatron_hf.parallel.layers.varlen_attention import attention_by_document
from galvatron_hf.parallel.parallelize import parallelize
from galvatron_hf.plan import ParallelPlan
from packing_runs import tokenizer
from ranks import run_ranks
from test_encoder_decoder_trainer import LIGHT, Pairs
from test_encoder_decoders import PIPELINES, PLANS, ZERO_BUBBLE
from test_packed_rows import check_cases, packed
from tiny_models import VOCABULARY


SOURCES, TARGETS = (9, 2, 14, 5, 5, 1, 11, 3), (1, 6, 6, 3, 12, 2, 1, 8)


def batch_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Returns pairs of different lengths; some tokens inside a target have no label, one target has none at all."""
    draw = torch.Generator().manual_seed(4)
    ids = torch.randint(4, VOCABULARY, (len(SOURCES), max(SOURCES)), generator=draw)
    labels = torch.randint(4, VOCABULARY, (len(TARGETS), max(TARGETS)), generator=draw)
    mask = (torch.arange(max(SOURCES)) < torch.tensor(SOURCES)[:, None]).long()
    labels[torch.arange(max(TARGETS)) >= torch.tensor(TARGETS)[:, None]] = IGNORED
    labels[2, 1:4] = IGNORED
    if model.config.model_type not in (
        "mbart",
        "plbart",
    ):  # which takes its decoder's first token from the end of each target
        labels[6] = IGNORED
    return {
        "input_ids": ids.masked_fill(mask == 0, model.config.pad_token_id),
        "attention_mask": mask,
        "labels": labels,
    }


def oracle_of(family: str, **changes: Any) -> Reference:
    model = ENCODER_DECODERS[family].build(**changes)
    assert adapter_for(model).packing(model).obstacle is None
    return reference(model, batch_of(model))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["t5", pytest.param("bart", marks=pytest.mark.slow)])
def test_pairs_under_every_kind_of_layer(family):
    found = oracle_of(family)
    check_cases(4, {name: (found, plan) for name, plan in PLANS.items()})


@pytest.mark.parametrize("family", [pytest.param("t5", marks=pytest.mark.slow), "bart"])
def test_pairs_in_pipelines(family):
    found = oracle_of(family)
    plans = PIPELINES if family == "t5" else {"inside": PIPELINES["inside the decoder"], "zero bubble": ZERO_BUBBLE}
    check_cases(4, {name: (found, plan) for name, plan in plans.items()})


@pytest.mark.slow
def test_pairs_of_every_family_under_random_plans():
    refused = ("umt5", "m2m_100")
    families = [name for name in ENCODER_DECODERS if name not in (*refused, "t5", "bart")]
    cases = {name: (oracle_of(name), random_plan(seed)) for seed, name in enumerate(families)}
    check_cases(4, cases)


def test_families_whose_pairs_are_not_packed_say_why():
    reasons = {
        "umt5": "makes a bias of all positions in its attention",
        "m2m_100": "makes its positions of its tokens",
    }
    for family, reason in reasons.items():
        model = ENCODER_DECODERS[family].build()
        assert adapter_for(model).packing(model).obstacle == reason


def of_previous(block: ParallelLayer) -> DocumentBounds:
    """Lets targets read sources with the bounds of other documents."""
    bounds = RIGHT_BOUNDS(block)
    return DocumentBounds([0, *(np.cumsum(bounds.lengths[::-1]))])


RIGHT_BOUNDS = ParallelLayer.read_bounds
ERRORS = {
    "sources of other targets": (ParallelLayer, "read_bounds", of_previous, "t5"),
    "a bias whose buckets are shifted": (
        relative_bias.SharedBias,
        "_lookup",
        lambda self, buckets, first, heads: torch.nn.functional.embedding(
            buckets.roll(1, 0), self.table.weight[:, first : first + heads]
        ),
        "t5",
    ),
    "positions that count on": (
        model_runner,
        "token_positions",
        lambda deal: torch.arange(deal.tokens)[None].clamp(max=deal.longest - 1),
        "bart",
    ),
}


@pytest.mark.parametrize("error", ERRORS)
def test_an_error_of_packed_pairs_is_seen(error):
    owner, name, wrong, family = ERRORS[error]
    found = oracle_of(family)
    with patch.object(owner, name, wrong), pytest.raises(AssertionError, match="loss|gradient|grad_norm"):
        check_cases(4, {error: (found, PLANS["mixed"])})


@pytest.mark.parametrize("stack, layer", [("encoder", 1), ("decoder", 4)])
def test_a_bad_number_is_found_in_the_row_of_its_pair(stack, layer):
    """Positions in the encoder are those of sources, in the decoder those of targets, of which there are others."""
    model, row = ENCODER_DECODERS["t5"].build(), 4

    def work() -> tuple[list[tuple[str, tuple[int, ...]]], int]:
        parallel = parallelize(model, ParallelPlan.uniform(1, {"encoder": 3, "decoder": 2}))
        parts = packed(parallel, batch_of(model), 1, seed=None)
        documents = parts[0]["documents"][stack]
        first = documents.pieces[documents.rows.index(row)].at

        def spoil(module, inputs, output):
            return (output[0].index_fill(1, torch.tensor([first]), float("nan")), *output[1:])

        parallel.layers[layer].register_forward_hook(spoil)
        found = find_nonfinite(parallel, parts, lambda: parallel.forward_backward(parts))
        return [(one.what, one.rows) for one in found], first

    (found, first) = run_ranks(work, 1)[0]
    assert found == [(f"the output of layer {layer}", (row,))] and first > 0


def packing_of_t5():
    model = ENCODER_DECODERS["t5"].build()
    return adapter_for(model).packing(model)


def test_a_source_and_its_target_go_into_the_same_pack():
    """Padding is a document on both sides or on neither."""
    packing = packing_of_t5()
    batch = {
        "input_ids": torch.tensor([[5, 6, 7, 0], [8, 9, 0, 0], [4, 4, 4, 4]]),
        "attention_mask": torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1]]),
        "labels": torch.tensor([[20, 21, -100], [22, -100, 23], [24, -100, -100]]),
    }
    sequences = unpad(batch, packing)
    assert sequences.lengths.tolist() == [5, 5, 5] and sequences.tokens == 15
    (part,) = pack(sequences, Placement((((0, 1), (2,)),)), 2, 0, packing)
    assert part["input_ids"][0].tolist() == [8, 9, 5, 6, 7, 0, 4, 4, 4, 4, 0, 0]
    assert part["decoder_input_ids"][0].tolist() == [0, 22, 0, 0, 20, 0, 0, 0]
    assert part["labels"][0].tolist() == [22, -100, 23, 20, 21, -100, 24, -100]
    source, target = part["documents"]["encoder"], part["documents"]["decoder"]
    assert (source.lengths, source.cuts) == ([2, 3, 1, 4, 2], (0, 6, 12))
    assert (target.lengths, target.cuts) == ([3, 2, 1, 1, 1], (0, 6, 8))
    assert source.rows == target.rows == (1, 0, -1, 2, -1)


def test_batches_of_a_step_are_joined():
    packing = packing_of_t5()
    batches = [batch_of(ENCODER_DECODERS["t5"].build()) for _ in range(2)]
    joined = Sequences.from_batches(batches, packing)
    assert joined.rows.tolist() == joined.target.rows.tolist() == list(range(2 * len(SOURCES)))
    targets = [1, 6, 6, 3, 12, 2, 1, 8]
    assert joined.target.own_lengths.tolist() == targets * 2
    assert joined.lengths.tolist() == [source + target for source, target in zip(SOURCES, targets, strict=True)] * 2


def test_what_pairs_cannot_keep_is_refused():
    packing, batch = packing_of_t5(), batch_of(ENCODER_DECODERS["t5"].build())
    empty = batch["attention_mask"].clone()
    empty[3] = 0
    hidden = torch.ones_like(batch["labels"])
    hidden[0, 0] = 0
    cases = {
        "a row has no token that its target could read": {"attention_mask": empty},
        "decoder_attention_mask hides tokens before the last target": {"decoder_attention_mask": hidden},
        "'token_type_ids', which cannot be packed": {"token_type_ids": batch["input_ids"]},
    }
    for reason, change in cases.items():
        with pytest.raises(NotPackable, match=reason):
            unpad(batch | change, packing)
    left = batch["attention_mask"].flip(1)
    assert unpad(batch | {"attention_mask": left}, packing).own_lengths.tolist() == list(SOURCES)
    model = ENCODER_DECODERS["bart"].build()
    with pytest.raises(NotPackable, match="sources are padded on the left, where this family counts positions"):
        unpad(batch | {"attention_mask": left}, adapter_for(model).packing(model))
    with pytest.raises(ValueError, match="long_sequences='split' cuts no pairs of documents, and row 2 has 20 tokens"):
        limit_lengths(unpad(batch, packing), 8, "split", packing)


def dense(query, key, value, bounds, key_bounds, bias):
    """Computes attention of each document by its definition."""
    outputs, pairs = [], zip(bounds.offsets, bounds.lengths, key_bounds.offsets, key_bounds.lengths, strict=False)
    for start, length, key_start, key_length in pairs:
        own = slice(start, start + length), slice(key_start, key_start + key_length)
        scores = query[:, :, own[0]] @ key[:, :, own[1]].mT
        scores = scores if bias is None else scores + bias[:, :, :length, :key_length]
        outputs.append(scores.softmax(-1) @ value[:, :, own[1]])
    return torch.cat(outputs, 2).transpose(1, 2)


@pytest.mark.parametrize("lengths", [(3, 3, 1, 5), (130, 2, 2, 300)], ids=str)
@pytest.mark.parametrize("crosses", [False, True])
def test_bias_and_bounds_of_keys(lengths, crosses):
    """Output and gradients of queries, keys, values and bias are those of the definition in float64."""
    draw = torch.Generator().manual_seed(0)
    bounds = DocumentBounds(np.cumsum([0, *lengths]))
    keys = DocumentBounds(np.cumsum([0, *reversed(lengths)])) if crosses else bounds
    states = [torch.randn(1, 4, sum(lengths), 8, generator=draw) for _ in range(3)]
    bias = None if crosses else torch.randn(1, 4, max(lengths), max(lengths), generator=draw)
    gradient = torch.randn(1, sum(lengths), 4, 8, generator=draw)
    given = [*states, *([] if bias is None else [bias])]
    found = []
    for dtype in (torch.float32, torch.float64):
        leaves = [each.to(dtype).requires_grad_() for each in given]
        added = None if crosses else leaves[3]
        if dtype is torch.float64:
            output = dense(*leaves[:3], bounds, keys, added)
        else:
            options = dict(bias=added, key_bounds=keys if crosses else None)
            output = attention_by_document(*leaves[:3], bounds, causal=False, scale=1.0, **options)
        found.append([output, *torch.autograd.grad(output, leaves, gradient.to(dtype))])
    for seen, wanted in zip(*found, strict=True):
        torch.testing.assert_close(seen.double(), wanted, rtol=2e-4, atol=2e-5)


def test_documents_without_a_pair_are_refused():
    states = torch.zeros(1, 2, 4, 8)
    with pytest.raises(ValueError, match="2 documents of queries cannot attend to 1 documents of keys; give each"):
        attention_by_document(
            states, states, states, [0, 2, 4], causal=False, scale=1.0, key_bounds=DocumentBounds([0, 4])
        )


def padding():
    words = tokenizer()
    words.pad_token = "w0"
    return DataCollatorForSeq2Seq(words)


@pytest.mark.slow
def test_trainer_packs_pairs():
    """Losses, updates and evaluation are those of plain Trainer on padded rows."""
    options = dict(eval_strategy="steps", eval_steps=2, gradient_accumulation_steps=1, per_device_train_batch_size=2)
    trainer = dict(data_collator=padding, eval_dataset=lambda: Pairs(10, seed=2))
    case = oracle.Case(
        plan=LIGHT,
        family="t5",
        train=lambda: Pairs(27),
        trainer=trainer,
        options=options,
        own_options=dict(packing="static"),
    )
    oracle.check_cases({"pairs": case})
