# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Several optimizer steps: updates and losses are those of one process; bf16 is as near to fp32 as one process."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from equivalence import reference, total_norm, whole_gradients, whole_weights
from galvatron_hf.parallel.parallelize import parallelize
from galvatron_hf.plan import ParallelPlan, Precision
from plans import mixed_plans, uniform
from ranks import run_ranks
from tiny_models import BATCHES, FAMILIES


BATCH_NAMES = ["right", "odd", "plain"]
MORE_BATCHES = ["right", "odd", "left", "plain", "right"]
MAX_NORM = 1.0


def train_plain(model, make_optimizer, batches: list[str]) -> list[float]:
    """Returns the losses of a plain loop."""
    optimizer, losses = make_optimizer(model.parameters()), []
    for name in batches:
        loss = model(**BATCHES[name](), use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def train_parallel(parallel, make_optimizer, batches: list[str]) -> list[float]:
    optimizer, losses = make_optimizer(parallel.model.parameters()), []
    for step, name in enumerate(batches):
        parallel.streams.step = step
        losses.append(float(parallel.forward_backward(BATCHES[name]())))
        parallel.clip_grad_norm_(MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def check_sgd_updates(start, plans: dict[str, ParallelPlan], batches: list[str]) -> None:
    """Compares updates of steps with clipping, over batches of different shapes.

    Each tensor's update may be off by 1e-3 of its largest entry.
    """

    def sgd(parameters):
        return torch.optim.SGD(parameters, lr=0.05)

    plain = copy.deepcopy(start)
    losses = train_plain(plain, sgd, batches)
    before, wanted = dict(start.named_parameters()), dict(plain.named_parameters())

    def work():
        for name, plan in plans.items():
            parallel = parallelize(copy.deepcopy(start), plan)
            assert train_parallel(parallel, sgd, batches) == pytest.approx(losses, rel=1e-5)
            for key, weight in whole_weights(parallel.model, start).items():
                update, expected = weight - before[key], wanted[key] - before[key]
                # A key bias moves by rounding alone: the floor is the rounding of the weight itself.
                bound = max(1e-3 * expected.abs().max().item(), 1e-7 * before[key].abs().max().item())
                assert (update - expected).abs().max().item() <= bound, (name, key)

    run_ranks(work, 4)


@pytest.mark.parametrize(
    "family, names, batches",
    [
        ("llama", ["mixed_a"], BATCH_NAMES),
        ("gpt2", ["mixed_b", "mixed_c"], BATCH_NAMES),
        pytest.param("llama", ["mixed_b", "mixed_c"], MORE_BATCHES, marks=pytest.mark.slow),
        pytest.param("gpt2", ["mixed_a"], MORE_BATCHES, marks=pytest.mark.slow),
    ],
)
def test_sgd_updates_and_losses(family, names, batches):
    check_sgd_updates(FAMILIES[family].build(), {name: mixed_plans()[name] for name in names}, batches)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, batches",
    [("permuted", BATCH_NAMES), pytest.param("mixed_a", MORE_BATCHES, marks=pytest.mark.slow)],
)
def test_adamw_losses(name, batches):
    """Takes steps of each of its implementations, over layers whose meshes differ."""
    start = FAMILIES["llama"].build()
    losses = train_plain(copy.deepcopy(start), lambda p: torch.optim.AdamW(p, lr=3e-3), batches)

    def work():
        for options in (dict(foreach=False), dict(foreach=True), dict(fused=True)):
            parallel = parallelize(copy.deepcopy(start), mixed_plans()[name])
            found = train_parallel(parallel, lambda p: torch.optim.AdamW(p, lr=3e-3, **options), batches)
            assert found == pytest.approx(losses, rel=1e-5)

    run_ranks(work, 4)


def bf16_oracle(model, batch) -> tuple[float, dict[str, torch.Tensor]]:
    """Returns loss and fp32 gradients of one process that computes with bf16 copies of fp32 master weights."""
    masters = dict(model.named_parameters())
    copies = {name: parameter.bfloat16() for name, parameter in masters.items()}
    loss = torch.func.functional_call(model, copies, kwargs=dict(batch, use_cache=False)).loss
    gradients = torch.autograd.grad(loss, list(masters.values()))
    return float(loss.detach()), dict(zip(masters, gradients, strict=True))


def distance(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    return total_norm({name: first[name] - second[name] for name in second})


@pytest.mark.slow
@pytest.mark.parametrize(
    "names", [("mixed_b", "mixed_c"), pytest.param(("mixed_a",), marks=pytest.mark.slow)], ids="-".join
)
def test_bf16_is_as_near_to_fp32_as_one_process_in_bf16(names):
    """Compares both with fp32: two roundings of one computation differ, so that neither is the other's truth.

    Rounding errors of independent roundings add as squares, so an equally good computation lies within a small factor
    of one process's distance to fp32: 1.5 for all gradients together. And it must not be fp32 in disguise: at least
    half that distance.
    """
    start = FAMILIES["llama"].build()
    batch = BATCHES["right"]()
    exact = reference(start, batch)
    loss, gradients = bf16_oracle(start, batch)
    oracle_distance = distance(gradients, exact.gradients)
    loss_distance = abs(loss - exact.loss)
    precision = Precision(compute="bf16", reduce="fp32", master="fp32")

    def work():
        found = {}
        for name in names:
            plan = dataclasses.replace(mixed_plans()[name], precision=precision)
            parallel = parallelize(copy.deepcopy(start), plan)
            loss = float(parallel.forward_backward(batch))
            assert all(p.dtype == p.grad.dtype == torch.float32 for p in parallel.model.parameters())
            found[name] = loss, distance(whole_gradients(parallel.model, start), exact.gradients)
        return found

    for found in run_ranks(work, 4):
        for name, (parallel_loss, parallel_distance) in found.items():
            assert 0.5 * oracle_distance <= parallel_distance <= 1.5 * oracle_distance, name
            assert abs(parallel_loss - exact.loss) <= max(2 * loss_distance, 2**-8 * exact.loss), name


class _Gathers(TorchDispatchMode):
    """Counts gathers of weights, in all units."""

    count = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.count += "allgather_base" in operation.name()
        return operation(*args, **(kwargs or {}))


def test_a_layer_gathers_the_next_one_before_it_computes():
    def work() -> list[int]:
        parallel = parallelize(FAMILIES["llama"].build(), uniform(2))
        found = []
        for block in parallel.blocks:

            def original(*args, inner=block.original, **kwargs):
                found.append(gathers.count)
                return inner(*args, **kwargs)

            block.original = original
        with _Gathers() as gathers:
            parallel.forward_backward(BATCHES["plain"]())
        return [count - found[0] for count in found]

    # Before the first layer computes, two are gathered; before the last one, nothing more.
    assert run_ranks(work, 2) == [[0, 1, 2, 2]] * 2
