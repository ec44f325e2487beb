# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Each collective and its backward, against the same computation on one process, on subgroups of a larger world."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from collective_counts import count_collectives
from galvatron_hf.parallel.comm import collectives, objects
from ranks import run_ranks


ROWS, LENGTH, HIDDEN, INNER = 2, 6, 4, 8


def test_objects_go_through_gloo_where_the_default_group_moves_no_tensors_of_the_host():
    def work() -> tuple:
        made, new_group = [], dist.new_group

        def counted(*args, **kwargs):
            made.append(kwargs)
            return new_group(*args, **kwargs)

        alone = objects.host_group() is dist.group.WORLD
        with mock.patch.multiple(dist, get_backend_config=lambda: "cuda:nccl", new_group=counted):
            found = [objects.gather_objects(dist.get_rank()), objects.broadcast_object({"rank": dist.get_rank()})]
        return alone, made, found

    assert run_ranks(work, 2) == [(True, [{"backend": "gloo"}], [[0, 1], {"rank": 0}])] * 2


def subgroup():
    """Returns the group of ranks 0 and 2, or of ranks 1 and 3."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    return groups[dist.get_rank() % 2]


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def leaf(tensor):
    return tensor.clone().requires_grad_()


def mlp(x, norm, up, down):
    """Computes on one process a norm's weight, a column- and a row-parallel linear, and the residual."""
    return x + torch.tanh((x * norm) @ up) @ down


def full_mlp():
    leaves = leaf(draw(ROWS, LENGTH, HIDDEN)), leaf(draw(HIDDEN)), leaf(draw(HIDDEN, INNER)), leaf(draw(INNER, HIDDEN))
    out = mlp(*leaves)
    out.backward(torch.cos(out.detach()))
    return out.detach(), [x.grad for x in leaves]


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_tensor_parallel_region_equals_one_process():
    def work():
        for group in (dist.group.WORLD, subgroup()):
            n, k = group.size(), group.rank()
            expected, grads = full_mlp()
            x, norm = leaf(draw(ROWS, LENGTH, HIDDEN)), leaf(draw(HIDDEN))
            up, down = leaf(draw(HIDDEN, INNER).chunk(n, 1)[k]), leaf(draw(INNER, HIDDEN).chunk(n, 0)[k])
            entered = collectives.copy_to_group(x * norm, group)
            out = x + collectives.reduce_from_group(torch.tanh(entered @ up) @ down, group)
            close(out, expected)
            out.backward(torch.cos(out.detach()))
            wanted = [grads[0], grads[1], grads[2].chunk(n, 1)[k], grads[3].chunk(n, 0)[k]]
            for actual, grad in zip((x, norm, up, down), wanted, strict=True):
                close(actual.grad, grad)

    run_ranks(work, 4)


def test_sequence_parallel_region_equals_one_process():
    def work():
        group = subgroup()
        n, k = group.size(), group.rank()
        expected, grads = full_mlp()
        x, norm = leaf(draw(ROWS, LENGTH, HIDDEN).chunk(n, 1)[k]), leaf(draw(HIDDEN))
        up, down = leaf(draw(HIDDEN, INNER).chunk(n, 1)[k]), leaf(draw(INNER, HIDDEN).chunk(n, 0)[k])
        entered = collectives.gather_positions(x * collectives.sum_gradient(norm, group), group)
        out = x + collectives.scatter_sum_positions(torch.tanh(entered @ up) @ down, group)
        close(out, expected.chunk(n, 1)[k])
        out.backward(torch.cos(out.detach()))
        wanted = [grads[0].chunk(n, 1)[k], grads[1], grads[2].chunk(n, 1)[k], grads[3].chunk(n, 0)[k]]
        for actual, grad in zip((x, norm, up, down), wanted, strict=True):
            close(actual.grad, grad)

    run_ranks(work, 4)


def test_ulysses_attention_equals_one_process():
    def work():
        for group in (dist.group.WORLD, subgroup()):
            n, k = group.size(), group.rank()
            sizes = enumerate((8, 4, 4))  # heads of [B, heads, S, D]
            whole = [leaf(draw(ROWS, heads, 8, 3, seed=seed)) for seed, heads in sizes]
            options = dict(is_causal=True, enable_gqa=True)
            expected = F.scaled_dot_product_attention(*whole, **options)
            expected.backward(torch.cos(expected.detach()))
            own = [leaf(x.detach().chunk(n, 2)[k]) for x in whole]
            heads = collectives.exchange(own, 1, 2, group)
            mixed = F.scaled_dot_product_attention(*heads, **options)
            (out,) = collectives.exchange((mixed,), -2, -3, group)
            close(out, expected.detach().chunk(n, 2)[k])
            out.backward(torch.cos(out.detach()))
            for actual, x in zip(own, whole, strict=True):
                close(actual.grad, x.grad.chunk(n, 2)[k])

    run_ranks(work, 4)


def test_tensors_of_several_types_keep_their_own():
    def work():
        tensors = [torch.full((1, 2, 1), 1.0 + 2**-20, dtype=dtype) for dtype in (torch.bfloat16, torch.float32)]
        found = collectives.exchange(tensors, 1, 2, dist.group.WORLD)
        assert [x.dtype for x in found] == [x.dtype for x in tensors]
        assert [x.unique().item() for x in found] == [1.0, 1.0 + 2**-20]

    run_ranks(work, 2)


def test_summed_gradients_are_summed_in_single_precision():
    def work():
        weight = torch.zeros(3, dtype=torch.bfloat16, requires_grad=True)
        # 256 + 1 + 1 + 1 is 259: 260 in bf16; adding one at a time in bf16 stays at 256
        share = torch.full((3,), 256.0 if dist.get_rank() == 0 else 1.0, dtype=torch.bfloat16)
        collectives.sum_gradient(weight, dist.group.WORLD).backward(share)
        assert weight.grad.dtype == torch.bfloat16
        return weight.grad.tolist()

    assert run_ranks(work, 4) == [[260.0] * 3] * 4


def test_shares_of_a_loss_are_summed_and_keep_their_own_gradient():
    def work():
        share = torch.tensor(float(dist.get_rank() + 1), requires_grad=True)
        total = collectives.reduce_from_group(share * 2, dist.group.WORLD)
        (total * 3).backward()
        return total.item(), share.grad.item(), share.item()

    assert run_ranks(work, 3) == [(12.0, 6.0, float(rank + 1)) for rank in range(3)]


def test_inputs_are_left_as_they_were():
    def work():
        x = draw(2, 4, 4)
        kept = x.clone()
        for function in (
            collectives.reduce_from_group,
            collectives.copy_to_group,
            collectives.gather_positions,
            collectives.scatter_sum_positions,
        ):
            function(x, dist.group.WORLD)
        gradient = draw(2, 4, 4, seed=1)
        collectives.copy_to_group(leaf(x), dist.group.WORLD).backward(gradient)
        assert torch.equal(x, kept) and torch.equal(gradient, draw(2, 4, 4, seed=1))

    run_ranks(work, 2)


def test_no_group_is_no_communication():
    x = draw(2, 4, 4)
    with count_collectives() as log:
        for function in (
            collectives.copy_to_group,
            collectives.reduce_from_group,
            collectives.gather_positions,
            collectives.scatter_sum_positions,
            collectives.sum_gradient,
        ):
            assert function(x, None) is x
        assert collectives.exchange([x], 1, 2, None)[0] is x
    assert log.count() == 0

    def work():
        with count_collectives() as log:
            assert collectives.gather_positions(x, dist.group.WORLD) is x
        return log.count()

    assert run_ranks(work, 1) == [0]


def test_uneven_positions_are_refused():
    def work():
        with pytest.raises(ValueError, match="pad it to a multiple of 2"):
            collectives.scatter_sum_positions(torch.zeros(1, 5, 2), dist.group.WORLD)
        with pytest.raises(ValueError, match="Dimension 2"):
            collectives.exchange([torch.zeros(1, 4, 3)], -1, 1, dist.group.WORLD)

    run_ranks(work, 2)


def test_the_log_counts_forward_and_backward_while_it_is_open():
    def work():
        group = subgroup()
        x = leaf(draw(ROWS, LENGTH, HIDDEN))
        size = x.numel() * 8
        with count_collectives() as outer:
            gathered = collectives.gather_positions(x, group)
            with count_collectives() as inner:
                gathered.sum().backward()
        collectives.reduce_from_group(x, group)
        assert [(call.kind, call.group_size, call.bytes) for call in outer.calls] == [
            ("all_gather", 2, size),
            ("reduce_scatter", 2, 2 * size),
        ]
        assert inner.count() == inner.count("reduce_scatter") == 1 and inner.count("all_reduce") == 0
        assert outer.bytes() == 3 * size and outer.bytes("all_gather") == size

    run_ranks(work, 4)
