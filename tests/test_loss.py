# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Vocabulary-parallel embedding and cross-entropy, against one process in fp64 that has the full logits."""

import functools
import math
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.trainer_pt_utils import LabelSmoother

from collective_counts import count_collectives
from galvatron_hf.parallel.layers.vocab_parallel_loss import (
    gather_local_logits,
    linear_cross_entropy,
    vocabulary_parallel_embedding,
    vocabulary_range,
)
from galvatron_hf.trainer.planning.cpu_peak_memory import allocation_peak, allocations_profiler
from ranks import run_ranks


TOKENS, HIDDEN, CHUNK = 22, 16, 5  # the last chunk is shorter


def problem(vocab_size, dtype=torch.float64, bias=False, tied=False, seed=0):
    """Returns values and targets of a head, equal on every rank: embedding [V, H], weight [V, H], bias [V] or None."""
    generator = torch.Generator().manual_seed(seed)
    draw = functools.partial(torch.randn, generator=generator, dtype=torch.float64)
    embedding = (draw(vocab_size, HIDDEN) * 0.5).to(dtype)
    weight = embedding if tied else (draw(vocab_size, HIDDEN) * 0.5).to(dtype)
    ids, targets = (torch.randint(vocab_size, (TOKENS,), generator=generator) for _ in range(2))
    targets[3:9] = -100
    return SimpleNamespace(
        embedding=embedding,
        weight=weight,
        bias=draw(vocab_size).to(dtype) if bias else None,
        mixing=(draw(HIDDEN, HIDDEN) * 0.3).to(dtype),
        ids=ids,
        targets=targets,
        tied=tied,
        vocab_size=vocab_size,
    )


def leaves_of(case, dtype, rows=slice(None)):
    """Returns fresh leaves of the given vocabulary rows; a tied weight is one leaf."""
    embedding = case.embedding[rows].to(dtype, copy=True).requires_grad_()
    weight = embedding if case.tied else case.weight[rows].to(dtype, copy=True).requires_grad_()
    bias = None if case.bias is None else case.bias[rows].to(dtype, copy=True).requires_grad_()
    return embedding, weight, bias


def reference(case, dtype=torch.float64, scale=1.0, softcap=None, smoothing=0.0):
    """Computes the sum of cross-entropies from full logits, and its gradients.

    The gradients are those of hidden states, embedding, weight and bias.
    """
    embedding, weight, bias = leaves_of(case, dtype)
    hidden = torch.tanh(F.embedding(case.ids, embedding) @ case.mixing.to(dtype))
    hidden.retain_grad()
    logits = F.linear(hidden, weight, bias)
    # in the models the head's output stays in the compute type and the loss widens it
    logits = logits.to(torch.promote_types(dtype, torch.float32)) * scale
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    loss = F.cross_entropy(logits, case.targets, reduction="sum", label_smoothing=smoothing)
    (loss / 7).backward()
    return [loss.detach(), hidden.grad, embedding.grad, weight.grad, None if bias is None else bias.grad]


def parallel(case, group, dtype=torch.float64, scale=1.0, softcap=None, smoothing=0.0, chunk=CHUNK, late=False):
    """Computes the same with the vocabulary over a group; gradients of the leaves are this rank's rows."""
    degree, index = (1, 0) if group is None else (group.size(), group.rank())
    start, stop = vocabulary_range(case.vocab_size, degree, index)
    embedding, weight, bias = leaves_of(case, dtype, slice(start, stop))
    embedded = vocabulary_parallel_embedding(lambda ids: F.embedding(ids, embedding), case.ids, start, stop, group)
    hidden = torch.tanh(embedded @ case.mixing.to(dtype))
    hidden.retain_grad()
    loss = linear_cross_entropy(
        hidden,
        weight,
        bias,
        case.targets,
        start=start,
        group=group,
        vocab_size=case.vocab_size,
        chunk_tokens=chunk,
        logit_scale=scale,
        softcap=softcap,
        label_smoothing=smoothing,
        recompute_logits_in_backward=late,
    )
    (loss / 7).backward()
    return [loss.detach(), hidden.grad, embedding.grad, weight.grad, None if bias is None else bias.grad]


def rows_of(results, vocab_size, group):
    start, stop = vocabulary_range(vocab_size, group.size(), group.rank())
    loss, hidden, *leaves = results
    return [loss, hidden, *(None if leaf is None else leaf[start:stop] for leaf in leaves)]


def error(results, references):
    """Returns the largest deviation of any result, relative to the largest entry of its reference."""
    worst = 0.0
    for result, expected in zip(results, references, strict=True):
        assert (result is None) == (expected is None)
        if result is not None and result.numel():
            largest = expected.double().abs().max().item()
            deviation = (result.double() - expected.double()).abs().max().item() / (largest or 1.0)
            assert math.isfinite(deviation)  # max() would lose a NaN
            worst = max(worst, deviation)
    return worst


VARIANTS = [
    {},
    {"scale": 0.25},
    {"softcap": 3.0},
    {"scale": 1.7, "softcap": 2.0},
    {"smoothing": 0.1},
    {"smoothing": 0.2, "softcap": 3.0, "scale": 0.5},
]


def cases():
    for vocab_size in (96, 97, 5):  # over 4 ranks: even, uneven, and one rank without rows
        for bias, tied in ((False, False), (True, False), (False, True)):
            yield vocab_size, bias, tied


@pytest.mark.parametrize("variant", VARIANTS)
def test_one_process_equals_full_logits(variant):
    for vocab_size, bias, tied in cases():
        case = problem(vocab_size, bias=bias, tied=tied)
        for late in (False, True):
            assert error(parallel(case, None, late=late, **variant), reference(case, **variant)) < 1e-12


def test_label_smoothing_is_that_of_transformers():
    case = problem(33)
    hidden = torch.tanh(case.embedding[case.ids])
    logits = (hidden @ case.weight.t())[None]
    counted = (case.targets != -100).sum()
    expected = LabelSmoother(epsilon=0.1)({"logits": logits}, case.targets[None].clone()) * counted
    options = {"start": 0, "group": None, "vocab_size": 33, "chunk_tokens": CHUNK, "label_smoothing": 0.1}
    loss = linear_cross_entropy(hidden, case.weight, None, case.targets, **options)
    # LabelSmoother adds up the uniform part in fp32, whatever the input
    torch.testing.assert_close(loss, expected, rtol=1e-7, atol=0)


# Whether gradients are computed late, in turn for each case; the slow parameter has what the fast one leaves out.
@pytest.mark.parametrize(
    "lates_of_all, lates_of_two",
    [
        ([(False, True)], [(False,), (True,)]),
        pytest.param([()], [(True,), (False,)], marks=pytest.mark.slow),
    ],
    ids=["fast", "others"],
)
def test_vocabulary_over_ranks_equals_full_logits(lates_of_all, lates_of_two):
    problems = [problem(vocab_size, bias=bias, tied=tied) for vocab_size, bias, tied in cases()]
    references = [[reference(case, **variant) for case in problems] for variant in VARIANTS]

    def work():
        pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        for group, lates in ((dist.group.WORLD, lates_of_all), (pairs[dist.get_rank() % 2], lates_of_two)):
            for variant, of_variant in zip(VARIANTS, references, strict=True):
                for index, ((vocab_size, bias, tied), case, whole) in enumerate(
                    zip(cases(), problems, of_variant, strict=True)
                ):
                    expected = rows_of(whole, vocab_size, group)
                    for late in lates[index % len(lates)]:
                        found = error(parallel(case, group, late=late, **variant), expected)
                        assert found < 1e-12, (vocab_size, bias, tied, variant, group.size(), late, found)

    run_ranks(work, 4)


def test_single_precision_and_bf16_are_as_good_as_full_logits():
    def work():
        errors = {}
        for dtype in (torch.float32, torch.bfloat16):
            for variant in VARIANTS:
                case = problem(97, dtype=dtype, bias=True)
                exact = rows_of(reference(case, **variant), 97, dist.group.WORLD)
                plain = rows_of(reference(case, dtype, **variant), 97, dist.group.WORLD)
                ours = parallel(case, dist.group.WORLD, dtype, **variant)
                assert ours[0].dtype == torch.float32 and all(x.dtype == dtype for x in ours[1:])
                errors[dtype, str(variant)] = error(ours, exact), error(plain, exact)
        return errors

    for errors in run_ranks(work, 4):
        for (dtype, variant), (ours, plain) in errors.items():
            # Both round the same quantities to the same type, in another order; each rounding is half an eps, and ours
            # has one more for each rank's part of the hidden states' gradient.
            bound = max(1.5 * plain, 2 * torch.finfo(dtype).eps)
            assert ours < bound, (dtype, variant, ours, plain)


def test_replicas_are_bitwise_equal():
    def work():
        loss, hidden_grad, *_ = parallel(problem(97, torch.bfloat16), dist.group.WORLD, torch.bfloat16)
        return loss.item(), hidden_grad.float().numpy().tobytes()

    assert len(set(run_ranks(work, 4))) == 1


def test_the_scale_of_the_loss_is_not_rounded():
    """1/7 in bf16 is off by 2e-3; the gradient must be that of the sum, scaled in fp32 and rounded once."""
    case = problem(32, torch.bfloat16)
    start, stop = vocabulary_range(32, 1, 0)

    def gradient(factor):
        hidden = torch.tanh(case.embedding[case.ids]).requires_grad_()
        options = {"start": start, "group": None, "vocab_size": stop, "chunk_tokens": CHUNK}
        (linear_cross_entropy(hidden, case.weight, None, case.targets, **options) * factor).backward()
        return hidden.grad

    assert torch.equal(gradient(1 / 7), (gradient(1.0).float() * torch.tensor(1 / 7)).bfloat16())


class LargestTensor(TorchDispatchMode):
    """Remembers the largest result of any operator, and which operators ran."""

    def __init__(self):
        super().__init__()
        self.numel, self.names = 0, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.names.append(func.__name__)
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        return out


def _head_memory(tokens, vocab_size, chunk, grad):
    group = dist.group.WORLD if dist.is_initialized() else None
    degree, index = (1, 0) if group is None else (group.size(), group.rank())
    start, stop = vocabulary_range(vocab_size, degree, index)
    hidden = torch.randn(tokens, HIDDEN, requires_grad=grad)
    weight = torch.randn(stop - start, HIDDEN, requires_grad=grad)
    targets = torch.randint(vocab_size, (tokens,))
    if group is not None:
        for tensor in (hidden.data, targets):
            dist.broadcast(tensor, 0)
    kept = []

    def keep(x):
        kept.append(x.shape)
        return x

    with LargestTensor() as watch, torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        loss = linear_cross_entropy(
            hidden, weight, None, targets, start=start, group=group, vocab_size=vocab_size, chunk_tokens=chunk
        )
    return watch, kept, loss


def test_full_logits_never_exist():
    def work():
        tokens, vocab_size, chunk = 256, 1000, 16
        watch, kept, _ = _head_memory(tokens, vocab_size, chunk, grad=True)
        part = vocab_size // 4
        assert watch.numel == max(chunk * part, tokens * HIDDEN, part * HIDDEN) < tokens * part // 15
        assert sorted(kept) == sorted([torch.Size([tokens, HIDDEN]), torch.Size([part, HIDDEN])])

    run_ranks(work, 4)


def test_no_gradient_work_and_nothing_kept_without_gradients():
    for grad, context in ((False, torch.enable_grad()), (True, torch.no_grad())):
        with context:
            watch, kept, loss = _head_memory(64, 100, 16, grad)
        assert not loss.requires_grad and kept == []
        assert sum(name.startswith(("mm", "addmm")) for name in watch.names) == 64 // 16


def test_logits_of_one_chunk_are_there_at_a_time():
    """Compares four chunks with one: they need no more than their part of the gradient of `hidden`."""
    chunk, width, words = 64, 8, 5000
    peaks = []
    for tokens in (chunk, 4 * chunk):
        hidden, weight = torch.randn(tokens, width).requires_grad_(), torch.randn(words, width).requires_grad_()
        targets = torch.arange(tokens)
        with allocations_profiler() as profiler:
            options = dict(start=0, group=None, vocab_size=words, chunk_tokens=chunk)
            linear_cross_entropy(hidden, weight, None, targets, **options)
        peaks.append(allocation_peak(profiler))
    assert peaks[0] > chunk * words * 4
    assert peaks[1] - peaks[0] < 3 * chunk * width * 4 + 1000


def test_frozen_weight_costs_no_weight_gradient():
    hidden, weight = torch.randn(8, 4, requires_grad=True), torch.randn(10, 4)
    targets = torch.arange(8)
    with LargestTensor() as watch:
        loss = linear_cross_entropy(hidden, weight, None, targets, start=0, group=None, vocab_size=10, chunk_tokens=8)
    loss.backward()
    assert sum(name.startswith(("mm", "addmm")) for name in watch.names) == 2
    expected = (F.softmax(hidden.detach() @ weight.t(), -1) - F.one_hot(targets, 10)) @ weight
    torch.testing.assert_close(hidden.grad, expected, rtol=1e-5, atol=1e-6)


def test_nothing_waits_for_a_device():
    case = problem(50, torch.float32)
    with LargestTensor() as watch:
        parallel(case, None, torch.float32, softcap=3.0, smoothing=0.1)
    waiting = ("_local_scalar_dense", "nonzero", "masked_select", "index.Tensor", "index_put", "is_nonzero", "item")
    assert [name for name in watch.names if name.startswith(waiting)] == []


def test_collectives_of_the_head():
    def work():
        tokens, chunk = 64, 16
        with count_collectives() as log:
            _, _, loss = _head_memory(tokens, 100, chunk, grad=True)
            loss.backward()
        assert [call.kind for call in log.calls] == ["all_gather"] * (tokens // chunk) + ["all_reduce"]
        assert log.bytes("all_reduce") == tokens * HIDDEN * 4
        assert log.bytes("all_gather") == 4 * tokens * 4

    run_ranks(work, 2)


def test_tokens_that_do_not_count_may_be_infinite():
    case = problem(20)
    hidden = torch.tanh(case.embedding[case.ids])
    hidden[4] = math.inf  # its target is -100
    hidden.requires_grad_()
    weight = case.weight.clone().requires_grad_()
    options = {"start": 0, "group": None, "vocab_size": 20, "chunk_tokens": CHUNK}
    counted = case.targets != -100
    loss = linear_cross_entropy(hidden, case.weight, None, case.targets, **options)
    other = linear_cross_entropy(hidden.detach()[counted], weight, None, case.targets[counted], **options)
    assert torch.equal(loss.detach().isfinite(), torch.tensor(True))
    torch.testing.assert_close(loss, other, rtol=1e-14, atol=0)


def test_masked_vocabulary_and_ignored_batches():
    def work():
        group = dist.group.WORLD
        case = problem(10, bias=True)
        case.bias[5:] = -math.inf  # all of rank 1's part
        case.targets[case.targets >= 5] = 2
        assert error(parallel(case, group), rows_of(reference(case), 10, group)) < 1e-12
        case.targets[:] = -100
        results = parallel(case, group)
        assert results[0] == 0 and all((grad == 0).all() for grad in results[1:])

    run_ranks(work, 2)


def test_no_tokens():
    hidden, weight = torch.randn(0, 4, requires_grad=True), torch.randn(6, 4, requires_grad=True)
    targets = torch.zeros(0, dtype=torch.long)
    loss = linear_cross_entropy(hidden, weight, None, targets, start=0, group=None, vocab_size=6, chunk_tokens=3)
    loss.backward()
    assert loss == 0 and hidden.grad.shape == (0, 4) and (weight.grad == 0).all()


def test_wrong_use_is_refused():
    hidden, weight = torch.randn(3, 4), torch.randn(6, 4)
    options = {"start": 0, "group": None, "vocab_size": 6}
    for target in (6, -1):
        with pytest.raises(RuntimeError, match="neither a token"):
            linear_cross_entropy(hidden, weight, None, torch.tensor([0, 1, target]), chunk_tokens=2, **options)
    with pytest.raises(ValueError, match="at least one token"):
        linear_cross_entropy(hidden, weight, None, torch.zeros(3, dtype=torch.long), chunk_tokens=0, **options)
    with pytest.raises(ValueError, match="flatten"):
        linear_cross_entropy(hidden, weight, None, torch.zeros(1, 3, dtype=torch.long), chunk_tokens=2, **options)


def test_ranges_are_those_of_dtensor():
    def work():
        mesh = init_device_mesh("cpu", (4,))
        for vocab_size in (96, 97, 5, 3, 1):
            rows = torch.arange(vocab_size)[:, None]
            start, stop = vocabulary_range(vocab_size, 4, dist.get_rank())
            local = distribute_tensor(rows, mesh, [Shard(0)]).to_local()
            assert torch.equal(local, rows[start:stop]), (vocab_size, start, stop)

    run_ranks(work, 4)


def test_embedding_uses_the_models_own_lookup():
    """A scaled lookup, any shape of ids, and ranks without rows, which still get a gradient."""

    def work():
        for vocab_size in (9, 5):
            table = torch.randn(vocab_size, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
            ids = torch.arange(12).view(2, 3, 2) % vocab_size
            start, stop = vocabulary_range(vocab_size, 4, dist.get_rank())
            local = table[start:stop].clone().requires_grad_()
            out = vocabulary_parallel_embedding(
                lambda ids, local=local: F.embedding(ids, local) * 4, ids, start, stop, dist.group.WORLD
            )
            assert torch.equal(out, table[ids] * 4)
            out.backward(torch.ones_like(out))
            uses = torch.bincount(ids.flatten(), minlength=vocab_size)[start:stop, None]
            assert torch.equal(local.grad, (uses * 4.0).double().expand(-1, 3))

    run_ranks(work, 4)


def test_own_logits_are_the_full_rows_and_the_way_back_is_exact():
    def work():
        for rows, vocab_size in ((4, 12), (5, 13), (2, 5), (1, 9)):
            full = torch.randn(rows, 3, vocab_size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
            rank = dist.get_rank()
            start, stop = vocabulary_range(vocab_size, 4, rank)
            own = slice(rank * rows // 4, (rank + 1) * rows // 4)
            local = full[..., start:stop].clone().requires_grad_()
            logits = gather_local_logits(local, dist.group.WORLD, vocab_size=vocab_size)
            assert torch.equal(logits, full[own])
            logits.backward(2 * full[own])
            assert torch.equal(local.grad, 2 * full[..., start:stop])
        with pytest.raises(ValueError, match="last dimension should be 3"):
            gather_local_logits(torch.zeros(1, 1, 4), dist.group.WORLD, vocab_size=12)

    run_ranks(work, 4)
