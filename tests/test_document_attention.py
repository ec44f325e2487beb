# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Attention by document equals plain attention under a dense mask, and never makes anything of that mask's size."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers.masking_utils import (
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
)

from galvatron_hf.parallel.activation.documents import DocumentBounds
from galvatron_hf.parallel.layers import varlen_attention as document_attention
from galvatron_hf.parallel.layers.varlen_attention import attention_by_document


MIXED = [5, 1, 1, 17, 3, 3, 3, 30, 1]
LONG = [300, 1, 140, 140, 2]  # more than one block of queries, and a whole block and a bit


def row_of(
    lengths: list[int], heads: int = 4, key_value_heads: int = 2, dim: int = 8, value_dim: int = 8, seed: int = 0
) -> tuple[list[torch.Tensor], list[int], torch.Tensor]:
    """Returns query, key, value (views [1, heads, T, D], as in a model), bounds, and the output's gradient."""
    generator = torch.Generator().manual_seed(seed)
    tokens = sum(lengths)
    states = [
        torch.randn(1, tokens, heads_, dim_, generator=generator).transpose(1, 2)
        for heads_, dim_ in ((heads, dim), (key_value_heads, dim), (key_value_heads, value_dim))
    ]
    return states, [0, *accumulate(lengths)], torch.randn(1, tokens, heads, value_dim, generator=generator)


@pytest.mark.parametrize("capability, told", [((9, 0), False), ((8, 0), False), ((7, 5), True)])
def test_flash_attention_is_asked_for_where_the_gpu_has_it(monkeypatch, caplog, capability, told):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(document_attention.logger, "propagate", True)
    document_attention._has_flash_attention.cache_clear()
    found = [document_attention._has_flash_attention(torch.device("cuda", 0)) for _ in range(2)]
    document_attention._has_flash_attention.cache_clear()
    assert found == [not told] * 2
    assert len([record for record in caplog.records if "capability 7.5" in record.getMessage()]) == told


def dense_mask(bounds: list[int], causal: bool, window: int | None) -> torch.Tensor:
    """Returns [T, T], true if attended: in one document, not later if causal, less than `window` away."""
    position = torch.arange(bounds[-1])
    document = torch.bucketize(position, torch.tensor(bounds[1:]), right=True)
    distance = position[:, None] - position
    seen = document[:, None] == document
    if causal:
        seen &= distance >= 0
    if window is not None:
        seen &= distance.abs() < window
    return seen


def dense_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds: list[int],
    *,
    causal: bool,
    scale: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Computes attention by its definition, with all [T, T] scores, in the precision of its inputs."""
    copies = query.shape[1] // key.shape[1]
    key, value = (states.repeat_interleave(copies, dim=1) for states in (key, value))
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~dense_mask(bounds, causal, sliding_window), -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2)


def sdpa_dense(query, key, value, bounds, *, causal, scale=None, sliding_window=None) -> torch.Tensor:
    """Runs the fused kernel under a dense mask, as transformers runs packed rows."""
    mask = dense_mask(bounds, causal, sliding_window)
    output = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=scale, enable_gqa=True
    )
    return output.transpose(1, 2)


def eager_dense(query, key, value, bounds, *, softcap, **options) -> torch.Tensor:
    """Computes soft-capped attention like transformers: scores in the inputs' dtype, their softmax in float32."""
    copies = query.shape[1] // key.shape[1]
    key, value = (states.repeat_interleave(copies, dim=1) for states in (key, value))
    scores = query @ key.transpose(2, 3) * query.shape[-1] ** -0.5
    scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~dense_mask(bounds, options["causal"], options.get("sliding_window")), -torch.inf)
    return (scores.softmax(-1, dtype=torch.float32).to(value.dtype) @ value).transpose(1, 2)


def with_gradients(attention, states, bounds, grad, dtype=torch.float32, **options) -> list[torch.Tensor]:
    """Returns output, dq, dk, dv."""
    leaves = [each.detach().to(dtype).requires_grad_() for each in states]
    output = attention(*leaves, bounds, **options)
    return [output.detach(), *torch.autograd.grad(output, leaves, grad.to(dtype))]


def by_document(query, key, value, bounds, *, causal, scale=None, **options) -> torch.Tensor:
    return attention_by_document(query, key, value, bounds, causal=causal, scale=scale, **options)


def check(lengths: list[int], *, causal: bool, shape: dict | None = None, **options) -> None:
    """Compares with the definition in float64: sums have up to 2,400 terms, and sqrt(2400) roundings are 6e-6."""
    states, bounds, grad = row_of(lengths, **(shape or {}))
    found = with_gradients(by_document, states, bounds, grad, causal=causal, **options)
    truth = with_gradients(dense_attention, states, bounds, grad, torch.float64, causal=causal, **options)
    assert found[0].shape == grad.shape
    # One scale for the four tensors: under a window of 1, dq and dk are sums that cancel to zero.
    largest = max(each.abs().max() for each in truth)
    for name, one, other in zip(("output", "dq", "dk", "dv"), found, truth, strict=True):
        assert (one - other).abs().max() < 5e-6 * largest, name


@given(
    lengths=st.one_of(
        st.lists(st.integers(1, 40), min_size=1, max_size=12),
        st.lists(st.sampled_from([1, 2, 9]), min_size=1, max_size=30),
        st.lists(st.integers(1, 400), min_size=1, max_size=2),
    ),
    causal=st.booleans(),
    heads=st.sampled_from([(4, 4), (4, 2), (6, 1)]),
    window=st.sampled_from([None, 1, 2, 7, 33, 127, 128, 129, 130, 1000]),
    softcap=st.sampled_from([None, 2.0]),
    scale=st.sampled_from([None, 0.3]),
)
@settings(deadline=None, max_examples=150)
def test_random_documents_match_dense_attention(lengths, causal, heads, window, softcap, scale):
    shape = {"heads": heads[0], "key_value_heads": heads[1]}
    check(lengths, causal=causal, shape=shape, sliding_window=window, softcap=softcap, scale=scale)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 1, 100, 129, 200, 299, 300])
def test_documents_of_many_blocks_match_dense_attention(window, softcap, causal):
    check(LONG, causal=causal, sliding_window=window, softcap=softcap)


@pytest.mark.parametrize("dims", [(8, 4), (4, 8), (12, 1)])
@pytest.mark.parametrize("options", [{}, {"sliding_window": 4}, {"softcap": 2.0}], ids=str)
def test_values_of_another_width(dims, options):
    check(MIXED, causal=True, shape={"dim": dims[0], "value_dim": dims[1]}, **options)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("options", [{}, {"sliding_window": 100}, {"softcap": 2.0}], ids=str)
def test_bfloat16_is_as_exact_as_the_dense_one(options, causal):
    """Bounds the mean square error of each of the four tensors by 1.25 times the error of dense attention."""
    states, bounds, grad = row_of([*LONG, *MIXED], dim=32, value_dim=32)
    states, grad = [each.bfloat16().float() for each in states], grad.bfloat16().float()
    truth = with_gradients(dense_attention, states, bounds, grad, torch.float64, causal=causal, **options)
    dense = eager_dense if "softcap" in options else sdpa_dense
    usual = with_gradients(dense, states, bounds, grad, torch.bfloat16, causal=causal, **options)
    found = with_gradients(by_document, states, bounds, grad, torch.bfloat16, causal=causal, **options)
    for one, other, true in zip(found, usual, truth, strict=True):
        assert one.dtype == torch.bfloat16
        assert (one - true).square().mean() <= 1.25**2 * (other - true).square().mean()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"sliding_window": 9}, {"softcap": 2.0}, {"dropout": 0.3, "softcap": 2.0}], ids=str
)
def test_recomputation_changes_nothing(options, reentrant):
    states, bounds, grad = row_of([*LONG, *MIXED])

    def recomputed(query, key, value, bounds, **options):
        return checkpoint(
            lambda *states: by_document(*states, bounds, **options), query, key, value, use_reentrant=reentrant
        )

    results = []
    for attention in (by_document, recomputed):
        torch.manual_seed(3)
        leaves = [each.detach().requires_grad_() for each in states]
        output = attention(*leaves, bounds, causal=True, **options)
        torch.autograd.backward(output, grad)
        results.append([output.detach(), *(leaf.grad for leaf in leaves), torch.rand(1)])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("options", [{}, {"sliding_window": 9}, {"softcap": 2.0}, {"dropout": 0.3}], ids=str)
def test_a_document_knows_nothing_of_the_others(options, causal, dtype):
    """Bitwise: another document's tokens change neither its output nor its gradients."""
    states, bounds, grad = row_of([*MIXED, *LONG])
    for begin, end in [(7, 24), (24, 27), (27, 30), (64, 364)]:  # alone, and inside a run of equal lengths
        assert {begin, end} <= set(bounds)
        other = [each.clone() for each in states]
        for each in other:
            each[:, :, begin:end] *= -3.0
        results = []
        for inputs in (states, other):
            torch.manual_seed(5)
            results.append(with_gradients(by_document, inputs, bounds, grad, dtype, causal=causal, **options))
        kept = torch.ones(bounds[-1], dtype=torch.bool)
        kept[begin:end] = False
        (out, *grads), (other_out, *other_grads) = results
        assert torch.equal(out[:, kept], other_out[:, kept])
        assert not torch.equal(out, other_out)
        for one, changed in zip(grads, other_grads, strict=True):
            assert torch.equal(one[:, :, kept], changed[:, :, kept])


@pytest.mark.parametrize("window", [1, 3, 150])
def test_windows_are_those_of_transformers(window):
    """A module passes its attention function the config's window if causal, and that window + 1 if bidirectional."""
    rows, columns = torch.arange(300)[:, None], torch.arange(300)
    causal = sliding_window_causal_mask_function(window)(0, 0, rows, columns)
    bidirectional = sliding_window_bidirectional_mask_function(window)(0, 0, rows, columns)
    # Identity values show the weights: heads 1, value D = T.
    states, bounds, _ = row_of([300], heads=1, key_value_heads=1)
    values = torch.eye(300)[None, None]
    for is_causal, passed, expected in ((True, window, causal), (False, window + 1, bidirectional)):
        for softcap in (None, 2.0):
            weights = by_document(
                *states[:2], values, bounds, causal=is_causal, sliding_window=passed, softcap=softcap
            )
            assert torch.equal(weights[0, :, 0] > 0, expected)


@pytest.mark.parametrize("options", [{}, {"sliding_window": 20}, {"softcap": 2.0}], ids=str)
def test_dropout_drops_weights_of_its_document_and_keeps_their_mean(options):
    """With identity values the output is the weights: each is dropped or scaled by 1 / (1 - p)."""
    probability = 0.25
    lengths = [40, 1, 30, 30, 150]
    states, bounds, _ = row_of(lengths, heads=8, key_value_heads=1)
    values = torch.eye(bounds[-1])[None, None]
    kept = by_document(*states[:2], values, bounds, causal=True, **options)
    torch.manual_seed(11)
    dropped = by_document(*states[:2], values, bounds, causal=True, dropout=probability, **options)
    seen = dense_mask(bounds, True, options.get("sliding_window"))[:, None].expand(-1, 8, -1)
    assert dropped[0][~seen].eq(0).all()
    scaled = dropped[0][seen] / kept[0][seen] * (1 - probability)
    survivors = scaled > 0.5
    torch.testing.assert_close(scaled, survivors.float(), rtol=1e-4, atol=0)
    deviation = (probability * (1 - probability) / survivors.numel()) ** 0.5
    assert abs(survivors.float().mean() - (1 - probability)) < 4 * deviation
    # Documents of one length and heads draw masks of their own.
    first, second = (survivors_of(dropped[0, begin:end, :, begin:end]) for begin, end in ((41, 71), (71, 101)))
    assert not torch.equal(first, second)
    assert not torch.equal(first[:, 0], first[:, 1])
    assert not torch.equal(
        dropped, by_document(*states[:2], values, bounds, causal=True, dropout=probability, **options)
    )


def survivors_of(weights: torch.Tensor) -> torch.Tensor:
    return weights > 0


def test_gradients_under_dropout_belong_to_the_weights_of_the_forward_pass():
    """Dropped weights are the linear map of the values, so the values' gradient is its transpose: no second draw."""
    states, bounds, grad = row_of(LONG, value_dim=8)
    values = states[2].clone().requires_grad_()
    torch.manual_seed(7)
    output = by_document(*states[:2], values, bounds, causal=True, dropout=0.4)
    after = torch.rand(1)
    (found,) = torch.autograd.grad(output, values, grad)
    torch.testing.assert_close((output.detach() * grad).sum(), (found * states[2]).sum(), rtol=1e-4, atol=1e-4)
    torch.manual_seed(7)
    by_document(*states[:2], values, bounds, causal=True, dropout=0.4)
    assert torch.equal(after, torch.rand(1))


class LargestTensor(TorchDispatchMode):
    """Records the elements of the largest tensor that any operation makes."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        for each in output if isinstance(output, (list, tuple)) else [output]:
            if isinstance(each, torch.Tensor):
                self.elements = max(self.elements, each.numel())
        return output


KINDS = [
    {},
    {"sliding_window": 50},
    {"softcap": 2.0},
    {"softcap": 2.0, "sliding_window": 50},
    {"dropout": 0.1},
    {"value_dim": 4},
]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("options", KINDS, ids=str)
def test_no_tensor_has_the_size_of_all_scores(options, causal):
    """One document, the worst case; one head, so that a block of scores is 128 x T."""
    tokens, options = 2000, dict(options)
    shape = {"heads": 1, "key_value_heads": 1, "dim": 8, "value_dim": options.pop("value_dim", 8)}
    states, bounds, grad = row_of([tokens], **shape)
    with LargestTensor() as largest:
        with_gradients(by_document, states, bounds, grad, causal=causal, **options)
    block = document_attention.BLOCK
    if options.keys() & {"softcap", "dropout"} and "sliding_window" not in options:
        assert largest.elements <= block * (tokens + block)
    else:
        assert largest.elements <= max(8 * tokens, 3 * block**2)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("options", KINDS, ids=str)
def test_what_backward_needs_is_linear_in_the_tokens(options, causal):
    def saved_bytes(tokens: int) -> int:
        kind = dict(options)
        shape = {"dim": 8, "value_dim": kind.pop("value_dim", 8)}
        states, bounds, _ = row_of([tokens], **shape)
        leaves = [each.requires_grad_() for each in states]
        storages = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storages[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            output = by_document(*leaves, bounds, causal=causal, **kind)
        assert output.requires_grad
        return sum(tensor.untyped_storage().nbytes() for tensor in storages.values())

    small, large = saved_bytes(1024), saved_bytes(4096)
    assert large <= 4.4 * small


@pytest.mark.parametrize("bounds", [[0], [0, 5], [1, 6], [0, 3, 3, 6], [0, 4, 2, 6], [0, 7], []])
def test_bounds_that_do_not_cover_the_row_are_refused(bounds):
    states, _, _ = row_of([6])
    with pytest.raises(ValueError, match=r"do not (rise from 0|end at the row's 6 tokens); pass the offset"):
        by_document(*states, bounds, causal=True)


def test_documents_of_one_length_side_by_side_are_one_call(monkeypatch):
    calls = []
    fused = document_attention._fused_attention

    def counted(*args, **kwargs):
        calls.append(tuple(args[0].shape[::2]))
        return fused(*args, **kwargs)

    monkeypatch.setattr(document_attention, "_fused_attention", counted)
    states, bounds, _ = row_of(MIXED)
    by_document(*states, bounds, causal=True)
    assert calls == [(1, 5), (2, 1), (1, 17), (3, 3), (1, 30), (1, 1)]
    assert [end - begin for begin, end in pairwise(bounds)] == MIXED


@pytest.mark.parametrize("lengths", [[256] * 3, [512], [256, 512, 256]], ids=str)
@pytest.mark.parametrize("causal", [True, False])
def test_rows_of_one_length_match_dense_attention(lengths, causal):
    check(lengths, causal=causal, shape={"heads": 2, "key_value_heads": 1})


@pytest.mark.parametrize(
    "options, rows", [({}, True), ({"sliding_window": 300}, True), ({"sliding_window": 9}, False)]
)
def test_rows_of_one_length_are_one_graph(options, rows):
    """Where documents are no rows, the CPU's path breaks the graph."""
    states, bounds, _ = row_of([256, 256])
    torch._dynamo.reset()
    compiled = torch.compile(by_document, backend="eager", fullgraph=True)
    bounds = DocumentBounds(bounds)
    if not rows:
        with pytest.raises(torch._dynamo.exc.Unsupported):
            compiled(*states, bounds, causal=True, **options)
        return
    found = compiled(*states, bounds, causal=True, **options)
    torch.testing.assert_close(found, by_document(*states, bounds, causal=True, **options))


@pytest.mark.parametrize(
    "lengths, rows", [([256, 256], 2), ([512], 1), ([256, 512], None), ([100, 100], None), ([1], None)]
)
def test_only_lengths_that_come_again_are_rows(lengths, rows):
    assert DocumentBounds([0, *accumulate(lengths)]).rows == rows
