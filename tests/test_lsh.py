# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Rows that travel to the experts as their mean: hashes and clusters against loops, gradients against the closed form,
layers in which no two rows are alike against plain ones, and the others against one process with loops.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from unittest import mock

import pytest
import torch
from torch import nn

from equivalence import Reference, compare, observe, reference, unequal_tensors
from galvatron_hf.parallel.comm.collective_log import observe_collectives
from galvatron_hf.parallel.comm.fake_process_group import FakeProcessGroup
from galvatron_hf.parallel.comm.mesh import WorldMesh
from galvatron_hf.parallel.layers import experts as experts_module
from galvatron_hf.parallel.layers import stage_layers
from galvatron_hf.parallel.layers.experts import ParallelExperts, route
from galvatron_hf.parallel.layers.lsh import (
    DispatchStatistics,
    LshDispatch,
    buckets,
    centroids,
    clusters,
    expand,
    projections,
    residuals,
)
from galvatron_hf.parallel.model import ParallelModel
from galvatron_hf.parallel.parallelize import parallelize
from galvatron_hf.plan import ParallelPlan
from galvatron_hf.utils.compat import FakeTensorMode
from plans import expert_plans
from ranks import run_ranks
from tiny_models import BATCHES, EXPERT_FAMILIES


SINGLE = LshDispatch(hashes=1, width=2, max_residual=0.0)
FEW = LshDispatch(hashes=1, width=4, seed=5)
BOUNDED = LshDispatch(hashes=1, width=4, seed=5, max_residual=0.9)


def random_rows(count: int, features: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Returns rows that are near one of a few others, so that they fall into common buckets."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(5, features, generator=generator)
    rows = centres[torch.randint(0, 5, (count,), generator=generator)]
    return (rows + 0.3 * torch.randn(count, features, generator=generator)).to(dtype)


def sorted_experts(count: int, experts: int) -> torch.Tensor:
    return torch.randint(0, experts, (count,), generator=torch.Generator().manual_seed(3)).sort().values


def looped_codes(rows: torch.Tensor, projected_by: torch.Tensor) -> list[tuple[int, ...]]:
    """Returns the buckets of each row, number by number."""
    codes = []
    for row in rows.float():
        code = []
        for of_hash in projected_by.unbind(1):
            numbers = (row @ of_hash).tolist()
            best = max(range(len(numbers)), key=lambda index: abs(numbers[index]))
            code.append(best + len(numbers) * (numbers[best] < 0))
        codes.append(tuple(code))
    return codes


def looped_clusters(
    rows: torch.Tensor, experts: list[int], codes: list[tuple[int, ...]], bound: float | None
) -> dict[tuple, list[int]]:
    """Returns the rows of each cluster, by a key that begins with the expert."""
    found: dict[tuple, list[int]] = {}
    for index, (expert, code) in enumerate(zip(experts, codes, strict=True)):
        found.setdefault((expert, *code), []).append(index)
    if bound is None:
        return found
    kept: dict[tuple, list[int]] = {}
    for key, members in found.items():
        own = rows[members].double()
        far = ((own - own.mean(0)).norm(dim=1) / own.norm(dim=1)).max() > bound
        kept |= {(*key, index): [index] for index in members} if far else {key: members}
    return kept


# ---- Options ----


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(hashes=0), "hashes is 0"),
        (dict(hashes=2.0), "hashes is 2.0"),
        (dict(width=5000), "width is 5000"),
        (dict(seed=-1), "seed is -1"),
        (dict(max_residual=-0.1), "max_residual is -0.1"),
        (dict(max_residual=float("nan")), "max_residual is nan"),
        (dict(max_residual="small"), "max_residual is 'small'"),
    ],
)
def test_options_out_of_range_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        LshDispatch(**(dict(hashes=2, width=8, seed=0) | changes))


# ---- Hashes and clusters ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("hashes", "width"), [(1, 1), (3, 4), (2, 40)])
def test_buckets_are_those_of_a_loop_over_numbers(dtype, hashes, width):
    rows = random_rows(50, 12, dtype)
    by = projections(LshDispatch(hashes=hashes, width=width, seed=1), 12, 0, rows.device)
    found = buckets(rows, by)
    assert [tuple(code) for code in found.tolist()] == looped_codes(rows, by)
    assert 0 <= int(found.min()) and int(found.max()) < 2 * width
    assert int(found.max()) >= width, "some largest number is negative"


def test_projections_depend_on_seed_and_layer_and_on_nothing_else():
    def made(seed: int, layer: int) -> torch.Tensor:
        return projections(LshDispatch(hashes=2, width=3, seed=seed), 6, layer, torch.device("cpu"))

    first = made(1, 1)
    torch.manual_seed(9)
    torch.testing.assert_close(made(1, 1), first, rtol=0, atol=0)
    assert not torch.equal(made(1, 2), first) and not torch.equal(made(2, 1), first)


@pytest.mark.parametrize("bound", [None, 0.0, 0.4, 10.0])
@pytest.mark.parametrize(("hashes", "width"), [(2, 2), (1, 8), (9, 4096)])  # the last has too many keys for 64 bits
def test_clusters_are_those_of_a_loop_over_rows(hashes, width, bound):
    options = LshDispatch(hashes=hashes, width=width, seed=2, max_residual=bound)
    rows, experts = random_rows(150, 8), sorted_experts(150, 6)
    rows[10:40:3] = rows[10]  # exact copies may share whatever the bound; some are of one expert
    by = projections(options, 8, 0, rows.device)
    hashed = buckets(rows, by)
    found = clusters(rows, experts, hashed, options, 6)
    wanted = looped_clusters(rows, experts.tolist(), [tuple(code) for code in hashed.tolist()], bound)
    members: dict[int, list[int]] = {}
    for index, number in enumerate(found.of_row.tolist()):
        members.setdefault(number, []).append(index)
    assert sorted(members.values()) == sorted(wanted.values())
    assert sorted(members) == list(range(len(wanted)))  # numbers without gaps, in the order of the experts
    expert_of = [int(experts[members[number][0]]) for number in range(len(wanted))]
    assert expert_of == sorted(expert_of)
    assert found.counts.tolist() == [Counter(expert_of)[expert] for expert in range(6)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_shared_centroid_is_farther_than_the_bound(dtype):
    options = LshDispatch(hashes=1, width=4, seed=2, max_residual=0.5)
    rows, experts = random_rows(300, 16, dtype), sorted_experts(300, 4)
    by = projections(options, 16, 0, rows.device)
    free = clusters(rows, experts, buckets(rows, by), dataclasses.replace(options, max_residual=None), 4)
    found = clusters(rows, experts, buckets(rows, by), options, 4)
    count, fewer = int(found.counts.sum()), int(free.counts.sum())
    assert fewer < count < 300, "the bound splits some clusters and leaves others"
    far = residuals(rows, centroids(rows, found.of_row, count), found.of_row)
    sizes = torch.bincount(found.of_row)[found.of_row]
    assert float(far[sizes > 1].max()) <= 0.5 and float(far[sizes == 1].max()) == 0.0
    assert float(residuals(rows, centroids(rows, free.of_row, fewer), free.of_row).max()) > 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("bound", [None, 0.0])
def test_equal_rows_share_one_centroid_without_loss(dtype, bound):
    options = LshDispatch(hashes=4, width=16, seed=0, max_residual=bound)
    distinct = torch.randn(3, 24, generator=torch.Generator().manual_seed(1)).to(dtype)
    rows, experts = distinct.repeat(7, 1), torch.arange(21) // 21  # 7 copies of each, all of one expert
    found = clusters(rows, experts, buckets(rows, projections(options, 24, 0, rows.device)), options, 2)
    assert found.counts.tolist() == [3, 0]
    means = centroids(rows, found.of_row, 3)
    assert torch.equal(means[found.of_row], rows)
    outputs = torch.randn_like(means)
    assert torch.equal(expand(outputs, rows, means, found.of_row), outputs[found.of_row])


def test_no_rows_make_no_clusters():
    rows, experts = torch.zeros(0, 4, requires_grad=True), torch.zeros(0, dtype=torch.long)
    found = clusters(rows, experts, buckets(rows, projections(BOUNDED, 4, 0, rows.device)), BOUNDED, 3)
    assert found.of_row.shape == (0,) and found.counts.tolist() == [0, 0, 0]
    means = centroids(rows, found.of_row, 0)
    expand(means, rows, means, found.of_row).sum().backward()
    assert means.shape == rows.grad.shape == (0, 4)


def test_a_trace_without_numbers_takes_every_row_for_a_cluster():
    group = FakeProcessGroup(4)
    with FakeTensorMode():
        choices = torch.zeros(6, 2, dtype=torch.long)
        routing = route(choices, 8, group, compress=pytest.fail)
        plain = route(choices, 8, group)
    assert routing.clusters.shape == (12,) and sum(routing.sent) == 12
    assert plain.clusters is None and plain.sent == routing.sent


# ---- Gradients ----


def test_the_gradient_of_rows_is_the_closed_form():
    generator = torch.Generator().manual_seed(0)
    rows = random_rows(60, 6, torch.float64).requires_grad_()
    gradients = torch.randn(60, 6, dtype=torch.float64, generator=generator)
    expert = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 6)).double()
    hashed = buckets(rows, projections(FEW, 6, 0, rows.device))
    found = clusters(rows, torch.zeros(60, dtype=torch.long), hashed, FEW, 1)
    count, of_row = int(found.counts.sum()), found.of_row
    assert count < 20
    means = centroids(rows, of_row, count)
    expand(expert(means), rows, means, of_row).backward(gradients)
    for cluster in range(count):
        members = of_row == cluster
        mean, summed = rows[members].mean(0).detach(), gradients[members].sum(0)
        jacobian = torch.autograd.functional.jacobian(expert, mean)
        wanted = gradients[members] + (jacobian.T @ summed - summed) / members.sum()
        torch.testing.assert_close(rows.grad[members], wanted, rtol=0, atol=1e-12)


def test_gradients_are_those_of_finite_differences():
    rows = random_rows(12, 4, torch.float64).requires_grad_()
    outputs = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    of_row = torch.tensor([0, 1, 1, 2, 3, 3, 3, 4, 0, 2, 2, 2])
    assert torch.autograd.gradcheck(lambda rows: centroids(rows, of_row, 5), rows)
    assert torch.autograd.gradcheck(
        lambda outputs, rows: expand(outputs, rows, centroids(rows, of_row, 5), of_row), (outputs, rows)
    )


def test_sums_of_many_bf16_rows_are_rounded_once():
    of_row = torch.zeros(1000, dtype=torch.long)
    rows = random_rows(1000, 8, torch.bfloat16).requires_grad_()
    outputs = torch.zeros(1, 8, dtype=torch.bfloat16, requires_grad=True)
    means = centroids(rows, of_row, 1)
    gradient = random_rows(1000, 8, torch.bfloat16, seed=1)
    expand(outputs, rows, means, of_row).backward(gradient)
    half = torch.finfo(torch.bfloat16).eps
    torch.testing.assert_close(means.double(), rows.double().mean(0, keepdim=True), rtol=half, atol=1e-6)
    torch.testing.assert_close(outputs.grad.double(), gradient.double().sum(0, keepdim=True), rtol=half, atol=1e-4)


# ---- On ranks ----


@contextlib.contextmanager
def compressed(options: LshDispatch | None) -> Iterator[None]:
    """Makes models that are parallelised now compress what goes to their experts."""
    attach = functools.partial(experts_module.attach_experts, compression=options)
    with mock.patch.object(stage_layers, "attach_experts", attach):
        yield


def experts_of(parallel: ParallelModel) -> list[ParallelExperts]:
    modules = parallel.model.modules()
    return [module.forward for module in modules if isinstance(vars(module).get("forward"), ParallelExperts)]


def oracle_of(batch: str = "right", **changes) -> Reference:
    return reference(EXPERT_FAMILIES["qwen3_moe"].build(**changes), BATCHES[batch]())


def check_like_plain_layers(cases: dict[str, tuple[Reference, ParallelPlan]]) -> None:
    """Compares layers in which no two rows are alike with one process, and with layers that do not compress."""

    def work() -> dict[str, int]:
        pairs, world = {}, WorldMesh("cpu")
        for name, (oracle, plan) in cases.items():
            with compressed(None):
                plain = observe(parallelize(copy.deepcopy(oracle.model), plan, world), oracle, evaluation=False)
            with compressed(SINGLE):
                parallel = parallelize(copy.deepcopy(oracle.model), plan, world)
            seen = observe(parallel, oracle, evaluation=False)
            pairs[name] = sum(experts.take_statistics().pairs for experts in experts_of(parallel))
            compare(seen, oracle)
            assert abs(seen.loss - plain.loss) <= 1e-6 * plain.loss, name
            assert not unequal_tensors(name, seen.gradients, plain.gradients, relative=1e-6), name
        return pairs

    pairs = run_ranks(work, 4)
    assert all(any(of_rank[name] for of_rank in pairs) for name in cases), "some plan compresses nothing"


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [
        ("tensor", "1f1b"),
        *(
            pytest.param(names, marks=pytest.mark.slow)
            for names in (("expert_2", "expert_4"), ("all_kinds", "ulysses"))
        ),
    ],
)
def test_rows_that_travel_by_themselves_are_those_of_plain_layers(names):
    oracle, plans = oracle_of(), expert_plans()
    cases = {name: (oracle, plans[name]) for name in names}
    if "tensor" in names:  # fewer tokens than ranks
        cases["short"] = oracle_of("one_short_row"), plans["tensor"]
    check_like_plain_layers(cases)


@pytest.mark.slow
def test_rows_that_travel_by_themselves_under_every_plan():
    oracle = oracle_of("odd")
    check_like_plain_layers({name: (oracle, plan) for name, plan in expert_plans().items() if name != "expert_1"})


def looped_experts(experts: nn.Module, options: LshDispatch, layer: int, ranks: int) -> Callable:
    """Returns a forward of experts that makes the clusters of each rank's tokens, in loops; in training alone."""
    compute = experts.forward

    def forward(hidden: torch.Tensor, choices: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if not experts.training:
            return compute(hidden, choices, weights)
        by = projections(options, hidden.shape[1], layer, hidden.device)
        outputs = []
        for rows, of_rows, shares in zip(hidden.chunk(ranks), choices.chunk(ranks), weights.chunk(ranks), strict=True):
            top_k = of_rows.shape[1]
            codes = [code for code in looped_codes(rows.detach(), by) for _ in range(top_k)]
            pairs = rows.repeat_interleave(top_k, 0)
            found = looped_clusters(pairs.detach(), of_rows.flatten().tolist(), codes, options.max_residual)
            means = torch.stack([pairs[members].mean(0) for members in found.values()])
            of_means = torch.tensor([key[0] for key in found])[:, None]
            done, parts = compute(means, of_means, torch.ones_like(means[:, :1])), [None] * len(pairs)
            for number, members in enumerate(found.values()):
                for index in members:
                    parts[index] = done[number] + pairs[index] - means[number]
            outputs.append((torch.stack(parts).unflatten(0, of_rows.shape) * shares[..., None]).sum(1))
        return torch.cat(outputs)

    return forward


def looped_oracle(options: LshDispatch, plan: ParallelPlan) -> Reference:
    """Returns the results of one process that makes the clusters of 4 ranks, in the layers that compress."""
    plain = EXPERT_FAMILIES["qwen3_moe"].build()
    looped = copy.deepcopy(plain)
    for index, (layer, strategy) in enumerate(zip(looped.model.layers, plan.layers, strict=True)):
        if strategy.expert > 1:
            layer.mlp.experts.forward = looped_experts(layer.mlp.experts, options, index, 4)
    return dataclasses.replace(reference(looped, BATCHES["plain"]()), model=plain)


@pytest.mark.parametrize("options", [FEW, pytest.param(BOUNDED, marks=pytest.mark.slow)])
def test_shared_centroids_are_those_of_one_process_with_loops(options):
    plans = {name: expert_plans()[name] for name in ("expert_4", "recompute")}
    oracles = {name: looped_oracle(options, plan) for name, plan in plans.items()}
    clusterings = mock.Mock(side_effect=clusters)

    def work() -> list[DispatchStatistics]:
        world, taken = WorldMesh("cpu"), []
        for name, plan in plans.items():
            parallel = parallelize(copy.deepcopy(oracles[name].model), plan, world)
            clusterings.reset_mock()
            parallel.forward_backward(oracles[name].batch)
            # A recompute takes the clusters of the forward. Experts on one rank have none.
            assert clusterings.call_count == sum(strategy.expert > 1 for strategy in plan.layers)
            parallel.model.zero_grad()
            compare(observe(parallel, oracles[name]), oracles[name])
            taken += [experts.take_statistics() for experts in experts_of(parallel) if experts.group is not None]
        return taken

    with compressed(options), mock.patch.object(experts_module, "clusters", clusterings):
        taken = [one for of_rank in run_ranks(work, 4) for one in of_rank]
    assert 0.2 < sum(one.centroids for one in taken) / sum(one.pairs for one in taken) < 0.95


def without_residuals(outputs, rows, means, of_row):
    return outputs[of_row]


def without_their_gradient(outputs, rows, means, of_row):
    return expand(outputs, rows.detach(), means, of_row)


@pytest.mark.parametrize(
    ("mutation", "seen_in"), [(without_residuals, "loss is"), (without_their_gradient, "gradient of")]
)
def test_residuals_that_are_left_out_are_seen(mutation, seen_in):
    plan = expert_plans()["expert_4"]
    oracle = looped_oracle(FEW, plan)

    def work() -> None:
        parallel = parallelize(copy.deepcopy(oracle.model), plan, WorldMesh("cpu"))
        compare(observe(parallel, oracle, evaluation=False), oracle)

    with (
        compressed(FEW),
        mock.patch.object(experts_module, "expand", mutation),
        pytest.raises(AssertionError, match=seen_in),
    ):
        run_ranks(work, 4)


@pytest.mark.parametrize(("name", "forwards", "moves"), [("expert_4", 1, 4), ("recompute", 2, 6)])
def test_statistics_are_what_was_sent(name, forwards, moves):
    plan = expert_plans()[name]
    model = EXPERT_FAMILIES["qwen3_moe"].build(output_router_logits=False)
    batch, row = BATCHES["plain"](), 32 * 4  # bytes of a row
    layers = sum(strategy.expert > 1 for strategy in plan.layers)

    def work() -> tuple[int, int]:
        sizes: list[int] = []

        def note(kind: str, x: torch.Tensor, group) -> None:
            if kind == "all_to_all" and x.is_floating_point():  # counts are not
                sizes.append(x.numel() * x.element_size())

        with compressed(FEW):
            parallel = parallelize(model, plan, WorldMesh("cpu"))
        with observe_collectives(note):
            parallel.forward_backward(batch)
        taken = [experts.take_statistics() for experts in experts_of(parallel) if experts.group is not None]
        assert len(taken) == layers and len(sizes) == moves * layers
        # The ways there and back of the first forward alternate.
        assert [one.sent_bytes // forwards for one in taken] == sizes[: 2 * layers : 2]
        for one in taken:
            assert one.pairs == forwards * 16 * 2  # two rows of 8 tokens, each with two experts
            assert (one.sent_bytes, one.plain_bytes) == (one.centroids * row, one.pairs * row)
            assert 0 < one.centroids < one.pairs
            assert 0.1 < float(one.mean_residual) < 1.5
        again = [experts.take_statistics() for experts in experts_of(parallel)]
        assert all(one.pairs == one.sent_bytes == 0 and one.mean_residual is None for one in again)
        return sum(sizes), sum(one.sent_bytes for one in taken)

    sent, counted = (sum(column) for column in zip(*run_ranks(work, 4), strict=True))
    assert sent * forwards == counted * moves


def test_every_rank_makes_the_same_clusters_of_the_same_rows():
    rows, experts = random_rows(100, 16), sorted_experts(100, 4)

    def work() -> list[int]:
        torch.manual_seed(torch.distributed.get_rank())
        by = projections(FEW, 16, 3, rows.device)
        return clusters(rows, experts, buckets(rows, by), FEW, 4).of_row.tolist()

    first, second = run_ranks(work, 2)
    assert first == second and max(first) < 60
