# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The equivalence tests can fail: each of these errors, injected into the runtime, is seen by the same comparison."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from unittest.mock import patch

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from equivalence import Reference, compare, observe, reference
from galvatron_hf.models.parameter_specs import ParameterSpec
from galvatron_hf.parallel import executor, model, model_runner
from galvatron_hf.parallel.activation.redistribute import view
from galvatron_hf.parallel.comm import collectives
from galvatron_hf.parallel.comm.dtensor import local_tensor
from galvatron_hf.parallel.comm.mesh import WorldMesh
from galvatron_hf.parallel.layers import embedding_and_head, parallel_layer
from galvatron_hf.parallel.layers import tensor_parallel as tensor
from galvatron_hf.parallel.layers import vocab_parallel_loss as loss
from galvatron_hf.parallel.model import ParallelModel
from galvatron_hf.parallel.model_runner import ModelRunner
from galvatron_hf.parallel.parallelize import parallelize
from galvatron_hf.plan import ParallelPlan, VocabularyStrategy
from galvatron_hf.plan.layout import Rectangle
from plans import mixed_plans, uniform
from ranks import run_ranks
from tiny_models import BATCHES, FAMILIES


TENSOR = uniform(4, tensor=4, embedding=VocabularyStrategy(tensor=4))
MEGATRON_SP = uniform(4, tensor=2, megatron_sp=True, embedding=VocabularyStrategy(tensor=2))
ULYSSES = uniform(4, ulysses=4)
DATA = uniform(4)
HYBRID = uniform(4, shard_degree=2)
MIXED = replace(mixed_plans()["mixed_a"], micro_batches=2)


@dataclass(frozen=True, kw_only=True)
class Mutation:
    """Holds an error and where it shows.

    Attributes:
        inject (`Callable`): makes the context manager that holds while the model is set up and runs.
        plan (`ParallelPlan`): on 4 ranks.
        batch (`str`): of the tiny batches.
        seen_in (`str`): the text that the comparison's complaint must have.
    """

    inject: Callable[[], contextlib.AbstractContextManager]
    plan: ParallelPlan
    seen_in: str
    batch: str = "right"


def replaced(owner: object, name: str, value: object) -> Callable[[], contextlib.AbstractContextManager]:
    return lambda: patch.object(owner, name, value)


def unchanged(x: torch.Tensor, *unused) -> torch.Tensor:
    return x


def scaled_gradient(factor: float) -> Callable:
    """Returns a `sum_gradient` whose summed gradients, those of norms under Megatron-SP, are wrong by a factor."""
    original = tensor.sum_gradient

    def scaled(weight: torch.Tensor, group) -> torch.Tensor:
        summed = original(weight, group)
        return summed if group is None else factor * summed + (1 - factor) * summed.detach()

    return scaled


class GatherThatSlices(torch.autograd.Function):
    """Gathers as for replicated consumers, although each consumer's gradient is partial."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group, ctx.length = group, x.shape[1]
        return torch.cat(list(collectives.all_gather_stacked(x, group)), dim=1)

    @staticmethod
    def backward(ctx, grad):
        start = ctx.group.rank() * ctx.length
        return grad[:, start : start + ctx.length].contiguous(), None


class SumThatSumsBack(torch.autograd.Function):
    """Sums forward and backward, as PyTorch derives it: right only if the consumers were different."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return collectives.all_reduce_sum(x, group)

    @staticmethod
    def backward(ctx, grad):
        return collectives.all_reduce_sum(grad, ctx.group), None


def without_key_value_sums() -> contextlib.AbstractContextManager:
    original = tensor.LocalParameter.local

    def local(view: tensor.LocalParameter) -> torch.Tensor:
        if view.features is None:
            return original(view)
        whole = view.module._parameters[view.name].to_local()
        return whole.narrow(0, view.features[0], view.features[1] - view.features[0])

    return patch.object(tensor.LocalParameter, "local", local)


def without_copied_rows() -> contextlib.AbstractContextManager:
    """Makes every rank use the first key/value head."""
    original = ParameterSpec.used_features
    return patch.object(ParameterSpec, "used_features", lambda spec, degree, index: original(spec, degree, 0))


def counted(difference: int) -> Callable[[], contextlib.AbstractContextManager]:
    original = executor.count_targets
    return replaced(executor, "count_targets", lambda batch, loss: original(batch, loss) + difference)


def with_targets_of_added_rows() -> contextlib.AbstractContextManager:
    """Counts the last row's tokens again in every row that is only there to give each rank one."""
    original = model_runner.add_rows
    return patch.object(model_runner, "add_rows", lambda x, rows, value=None: original(x, rows))


def forward_rectangle(batch) -> Rectangle:
    rows, length = batch.last.rows, batch.last.length
    return Rectangle(row_start=0, row_stop=rows, position_start=0, position_stop=length)


def with_ignored_targets() -> contextlib.AbstractContextManager:
    """Makes one rank count the targets that are to be ignored."""
    original = ModelRunner.micro_batch

    def shifted(forward: ModelRunner, *args, **inputs):
        batch = original(forward, *args, **inputs)
        if forward.mesh.index == 1 and batch.targets is not None:
            part = batch.last.grid.rectangle(batch.ends.head, 1)
            own = view(batch.targets, part, forward_rectangle(batch))
            own[own == -100] = 5
        return batch

    return patch.object(ModelRunner, "micro_batch", shifted)


def divided_by_ranks() -> contextlib.AbstractContextManager:
    original = ModelRunner._scaled_loss

    def divided(forward: ModelRunner, own, *args):
        return original(forward, own / forward.mesh.size, *args)

    return patch.object(ModelRunner, "_scaled_loss", divided)


def local_norm(parallel: ParallelModel) -> torch.Tensor:
    """Returns the norm of one rank's shards, as `torch.nn.utils.get_total_norm` gives it."""
    return torch.stack([local_tensor(p.grad).square().sum() for p in parallel.model.parameters()]).sum().sqrt()


@contextlib.contextmanager
def clipped_by_the_local_norm() -> Iterator[None]:
    """Reports the right norm and scales by a wrong one."""

    def clip(parallel: ParallelModel, max_norm: float, norm: torch.Tensor | None = None) -> torch.Tensor:
        scale = (max_norm / local_norm(parallel)).clamp(max=1.0)
        for parameter in parallel.model.parameters():
            local_tensor(parameter.grad).mul_(scale)
        return parallel.grad_norm()

    with patch.object(ParallelModel, "clip_grad_norm_", clip):
        yield


@contextlib.contextmanager
def averaged_by_fsdp() -> Iterator[None]:
    """Leaves FSDP2's default on: gradients are divided by the number of ranks that hold shards."""
    with (
        patch.object(FSDPModule, "set_gradient_divide_factor", lambda module, factor: None),
        patch.object(FSDPModule, "set_force_sum_reduction_for_comms", lambda module, enable: None),
    ):
        yield


@contextlib.contextmanager
def without_padding_row() -> Iterator[None]:
    original = embedding_and_head.parallel_embeddings

    def wrong(embeddings, mesh):
        original(embeddings, mesh)
        embeddings[0].padding_idx = None

    with patch.object(embedding_and_head, "parallel_embeddings", wrong):
        yield


def with_rectangles_of_a_neighbour() -> contextlib.AbstractContextManager:
    """Makes every rank take the position embeddings of its rows' first piece."""
    original = parallel_layer._part

    def part(x: torch.Tensor, batch, rectangle: Rectangle, positions: bool) -> torch.Tensor:
        if positions:
            length = rectangle.position_stop - rectangle.position_start
            rectangle = Rectangle(
                row_start=rectangle.row_start, row_stop=rectangle.row_stop, position_start=0, position_stop=length
            )
        return original(x, batch, rectangle, positions)

    return patch.object(parallel_layer, "_part", part)


GRADIENT = "gradient of"
MUTATIONS = {
    "dropped all-reduce after a row cut": Mutation(
        inject=replaced(tensor, "reduce_from_group", unchanged), plan=TENSOR, seen_in="loss"
    ),
    "dropped all-reduce in backward": Mutation(
        inject=replaced(tensor, "copy_to_group", unchanged), plan=TENSOR, seen_in=GRADIENT
    ),
    "all-reduce that also sums gradients": Mutation(
        inject=replaced(tensor, "reduce_from_group", SumThatSumsBack.apply), plan=TENSOR, seen_in=GRADIENT
    ),
    "dropped all-reduce after the embedding": Mutation(
        inject=replaced(loss, "reduce_from_group", unchanged), plan=TENSOR, seen_in="loss"
    ),
    "norm gradients not summed": Mutation(
        inject=replaced(tensor, "sum_gradient", unchanged), plan=MEGATRON_SP, seen_in="norm"
    ),
    "norm gradients doubled": Mutation(
        inject=replaced(tensor, "sum_gradient", scaled_gradient(2.0)), plan=MEGATRON_SP, seen_in="norm"
    ),
    "norm gradients halved": Mutation(
        inject=replaced(tensor, "sum_gradient", scaled_gradient(0.5)), plan=MEGATRON_SP, seen_in="norm"
    ),
    "gather with the wrong backward": Mutation(
        inject=replaced(tensor, "gather_positions", GatherThatSlices.apply), plan=MEGATRON_SP, seen_in=GRADIENT
    ),
    "one target too many": Mutation(inject=counted(1), plan=MIXED, seen_in="loss"),
    "one target too few": Mutation(inject=counted(-1), plan=MIXED, seen_in="loss"),
    "tokens of added rows count": Mutation(
        inject=with_targets_of_added_rows, plan=DATA, seen_in="loss", batch="one_short_row"
    ),
    "ignored tokens count": Mutation(inject=with_ignored_targets, plan=ULYSSES, seen_in="loss"),
    "loss divided by ranks": Mutation(inject=divided_by_ranks, plan=MIXED, seen_in="loss"),
    "key/value gradients not summed": Mutation(inject=without_key_value_sums, plan=TENSOR, seen_in="k_proj"),
    "wrong key/value head": Mutation(inject=without_copied_rows, plan=TENSOR, seen_in="loss"),
    "clip by the local norm": Mutation(inject=clipped_by_the_local_norm, plan=MIXED, seen_in="norm after clipping"),
    "local norm": Mutation(inject=replaced(ParallelModel, "grad_norm", local_norm), plan=MIXED, seen_in="grad_norm"),
    "replicas counted in the norm": Mutation(
        inject=replaced(model, "replicas", lambda gradient: 1), plan=HYBRID, seen_in="grad_norm"
    ),
    "mean instead of sum over shards": Mutation(inject=averaged_by_fsdp, plan=DATA, seen_in=GRADIENT),
    "gradient for the padding token": Mutation(inject=without_padding_row, plan=TENSOR, seen_in="embed_tokens"),
    "wrong positions": Mutation(inject=with_rectangles_of_a_neighbour, plan=ULYSSES, seen_in="loss"),
}


@pytest.fixture(scope="module")
def oracles() -> dict[str, Reference]:
    return {name: reference(FAMILIES["llama"].build(), BATCHES[name]()) for name in ("right", "one_short_row")}


def complaint(oracle: Reference, plan: ParallelPlan, world: WorldMesh) -> str:
    """Returns the comparison's complaint about a training step on this rank; empty if nothing is wrong."""
    seen = observe(parallelize(copy.deepcopy(oracle.model), plan, world), oracle, evaluation=False)
    try:
        compare(seen, oracle)
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
@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in (1, 2))])
def test_every_injected_error_is_seen(oracles, part):
    mutations = dict(list(MUTATIONS.items())[part::3])

    def work():
        found, world = {}, WorldMesh("cpu")
        for name, mutation in mutations.items():
            with mutation.inject():
                found[name] = complaint(oracles[mutation.batch], mutation.plan, world)
        return found

    results = run_ranks(work, 4)
    for name, mutation in mutations.items():
        complaints = {found[name] for found in results} - {""}
        assert complaints, f"nothing was seen of: {name}"
        assert any(mutation.seen_in in text for text in complaints), (name, complaints)
