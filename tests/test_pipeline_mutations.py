# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The pipeline's equivalence tests can fail: each of these errors, injected into the runtime, is seen by them."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from equivalence import Reference, compare, observe, reference
from galvatron_hf.parallel.comm.dtensor import local_tensor, replicas
from galvatron_hf.parallel.comm.mesh import WorldMesh
from galvatron_hf.parallel.data_parallel.tied_weights import TiedWeights
from galvatron_hf.parallel.model import ParallelModel
from galvatron_hf.parallel.model_runner import ModelRunner
from galvatron_hf.parallel.parallelize import parallelize
from galvatron_hf.parallel.pipeline.runtime import Pipeline
from galvatron_hf.plan import ParallelPlan
from plans import pipeline_plans
from ranks import run_ranks
from test_mutations import GRADIENT, Mutation, replaced
from tiny_models import BATCHES, FAMILIES


PLANS = pipeline_plans()
ZERO3, MIXED, ZERO_BUBBLE = PLANS["1f1b"], PLANS["1f1b_mixed"], PLANS["zero_bubble"]
TIED = "tied"  # the tied family; others run the untied one


def around(owner: type, name: str, wrapper: Callable) -> Callable[[], contextlib.AbstractContextManager]:
    """Puts `wrapper(original, *args)` in place of a method."""
    original = getattr(owner, name)
    return replaced(owner, name, lambda *args, **kwargs: wrapper(original, *args, **kwargs))


def first_counts_twice(original, pipeline: Pipeline, step, action) -> None:
    original(pipeline, step, action)
    if action.micro_batch == 0:
        for parameter in pipeline.stages[action.stage].parameters():
            local_tensor(parameter.grad).mul_(2)


def only_the_last_counts(original, pipeline: Pipeline, step, action) -> None:
    if step.left[action.stage] == 1:
        for parameter in pipeline.stages[action.stage].parameters():
            parameter.grad = None
    original(pipeline, step, action)


def zero_gradient(original, pipeline: Pipeline, step, action, kept) -> None:
    if kept.received is not None and action.micro_batch == 2:
        for leaf in kept.received:
            leaf.grad.zero_()
    original(pipeline, step, action, kept)


def gradient_of_the_micro_batch_before() -> contextlib.AbstractContextManager:
    original, sent = Pipeline._send_backward, []

    def send(pipeline: Pipeline, step, action) -> None:
        own = step.gradients[action.stage, action.micro_batch]
        if sent:
            step.gradients[action.stage, action.micro_batch] = sent.pop()
        sent.append(own)
        original(pipeline, step, action)

    return patch.object(Pipeline, "_send_backward", send)


def activations_of_the_micro_batch_before() -> contextlib.AbstractContextManager:
    original, sent = Pipeline._send_forward, []

    def send(pipeline: Pipeline, step, action) -> None:
        kept = step.in_flight[action.stage, action.micro_batch]
        own = kept.result
        kept.result = sent.pop() if sent else own
        sent.append(own)
        original(pipeline, step, action)
        if step.has_backward:
            kept.result = own

    return patch.object(Pipeline, "_send_forward", send)


def without_gradient(original, forward: ModelRunner, stage, batch, received=None):
    return original(
        forward,
        stage,
        batch,
        received and replace(received, tensors={k: v.detach() for k, v in received.tensors.items()}),
    )


def loss_on_every_stage(original, pipeline: Pipeline, batches, between) -> list[torch.Tensor]:
    total = torch.stack([torch.zeros(()), *original(pipeline, batches, between)]).sum()
    dist.all_reduce(total)
    return [total / pipeline.runner.mesh.size]  # as if each rank's part were that of its own stage


def without_one_weight_backward(original, pipeline: Pipeline, step, action) -> None:
    if action.micro_batch == 1:
        step.in_flight[action.stage, action.micro_batch].weight_gradients = lambda: None
    original(pipeline, step, action)


@contextlib.contextmanager
def clipped_by_the_norm_of_one_stage() -> Iterator[None]:
    """Reports the right norm and scales by that of the rank's own stage."""

    def clip(parallel: ParallelModel, max_norm: float) -> torch.Tensor:
        own = [parameter.grad for parameter in parallel.model.parameters()]
        total = torch.stack([local_tensor(grad).square().sum() / replicas(grad) for grad in own]).sum()
        dist.all_reduce(total, group=parallel.mesh.block(parallel.mesh.size))
        scale = (max_norm / total.sqrt()).clamp(max=1.0)
        for grad in own:
            local_tensor(grad).mul_(scale)
        return parallel.grad_norm()

    with patch.object(ParallelModel, "clip_grad_norm_", clip):
        yield


def summed_on_one_stage(original, tied: TiedWeights, *earlier) -> None:
    """Leaves the head's copy with its own gradient."""
    (copies,) = tied.weights
    head = copies.modules[-1]
    own = None if head is None else local_tensor(head.weight.grad).clone()
    original(tied, *earlier)
    if own is not None:
        local_tensor(head.weight.grad).copy_(own)


def summed_twice(original, tied: TiedWeights, *earlier) -> None:
    original(tied, *earlier)
    original(tied, *earlier)


MUTATIONS = {
    "tied gradients not summed": Mutation(
        inject=replaced(TiedWeights, "sum_gradients", lambda *unused: None),
        plan=MIXED,
        batch=TIED,
        seen_in="copies of model.embed_tokens.weight differ",
    ),
    "tied gradients summed on one stage": Mutation(
        inject=around(TiedWeights, "sum_gradients", summed_on_one_stage),
        plan=MIXED,
        batch=TIED,
        seen_in="copies of model.embed_tokens.weight differ",
    ),
    "tied gradients summed twice": Mutation(
        inject=around(TiedWeights, "sum_gradients", summed_twice), plan=MIXED, batch=TIED, seen_in="embed_tokens"
    ),
    "tied copy counted in the norm": Mutation(
        inject=replaced(TiedWeights, "is_copy", lambda tied, parameter: False),
        plan=MIXED,
        batch=TIED,
        seen_in="grad_norm",
    ),
    "first micro-batch reduced twice": Mutation(
        inject=around(Pipeline, "_backward", first_counts_twice), plan=ZERO3, seen_in=GRADIENT
    ),
    "only the last micro-batch's gradient": Mutation(
        inject=around(Pipeline, "_backward", only_the_last_counts), plan=ZERO3, seen_in=GRADIENT
    ),
    "boundary gradient dropped": Mutation(
        inject=around(Pipeline, "_hand_back", zero_gradient), plan=MIXED, seen_in=GRADIENT
    ),
    "boundary gradient of another micro-batch": Mutation(
        inject=gradient_of_the_micro_batch_before, plan=MIXED, seen_in=GRADIENT
    ),
    "activations of another micro-batch": Mutation(
        inject=activations_of_the_micro_batch_before, plan=MIXED, seen_in="loss"
    ),
    "received activations without gradient": Mutation(
        inject=around(ModelRunner, "run", without_gradient), plan=MIXED, seen_in=GRADIENT
    ),
    "loss counted on every stage": Mutation(
        inject=around(Pipeline, "train", loss_on_every_stage), plan=MIXED, seen_in="loss"
    ),
    "clip by the norm of one stage": Mutation(
        inject=clipped_by_the_norm_of_one_stage, plan=MIXED, seen_in="norm after clipping"
    ),
    "weights' backward skipped once": Mutation(
        inject=around(Pipeline, "_backward_weight", without_one_weight_backward), plan=ZERO_BUBBLE, seen_in=GRADIENT
    ),
}


@pytest.fixture(scope="module")
def oracles() -> dict[str, Reference]:
    """Returns results for eight rows without padding: micro-batches of one shape can be mistaken for each other."""
    families = {"right": "llama", TIED: "llama_tied"}
    return {name: reference(FAMILIES[family].build(), BATCHES["plain"]()) for name, family in families.items()}


def complaint(oracle: Reference, plan: ParallelPlan, world: WorldMesh) -> str:
    """Returns the comparison's complaint about a training step on this rank; empty if nothing is wrong."""
    try:
        # Copies of a tied weight that differ are seen on all ranks alike, as soon as gradients are gathered.
        compare(observe(parallelize(copy.deepcopy(oracle.model), plan, world), oracle, evaluation=False), oracle)
    except AssertionError as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_nothing_is_seen_without_an_error(oracles):
    def work():
        world = WorldMesh("cpu")
        cases = {(id(m.plan), m.batch): (oracles[m.batch], m.plan) for m in MUTATIONS.values()}
        return [complaint(*case, world) for case in cases.values()]

    assert all(not any(found) for found in run_ranks(work, 4))


@pytest.mark.slow
def test_every_injected_error_is_seen(oracles):
    def work():
        found, world = {}, WorldMesh("cpu")
        for name, mutation in MUTATIONS.items():
            with mutation.inject():
                found[name] = complaint(oracles[mutation.batch], mutation.plan, world)
        return found

    results = run_ranks(work, 4)
    for name, mutation in MUTATIONS.items():
        complaints = {found[name] for found in results} - {""}
        assert complaints, f"nothing was seen of: {name}"
        assert any(mutation.seen_in in text for text in complaints), (name, complaints)
