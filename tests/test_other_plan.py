# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Steps of one training under several plans: the losses, gradients and weights of one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from equivalence import (
    RELATIVE,
    assert_near,
    assert_same_gradients,
    gradient_of,
    single_stage,
    total_norm,
    unequal_tensors,
    whole_gradients,
    whole_weights,
)
from galvatron_hf.parallel.comm.dtensor import local_tensor
from galvatron_hf.parallel.comm.mesh import WorldMesh
from galvatron_hf.parallel.model import ParallelModel
from galvatron_hf.parallel.other_plan import OtherPlan, empty_copy
from galvatron_hf.parallel.parallelize import parallelize
from galvatron_hf.parallel.weights import piece_move
from galvatron_hf.plan import LayerStrategy, ParallelPlan, VocabularyStrategy
from plans import mixed_plans, pipelined, uniform
from ranks import run_ranks
from test_packed_rows import long_tailed
from tiny_models import ALL_FAMILIES


S, V = LayerStrategy, VocabularyStrategy
LENGTHS = (37, 9, 2, 23, 5, 41, 5, 1)
PLANS = mixed_plans() | {
    "replicate": uniform(4, sharding="replicate", embedding=V(sharding="replicate")),
    "zero3": uniform(4),
    "tensor": uniform(4, tensor=4, embedding=V(tensor=4)),
    "hybrid": uniform(4, shard_degree=2, embedding=V(shard_degree=2)),
    "stages": pipelined([(0, 1), (2, 3)], (S(tensor=2), S(), S(sharding="zero2"), S())),
    "other ends": pipelined([(2, 3), (0, 1)], (S(),) * 4, ends=V(tensor=2)),
    "four stages": pipelined([(3,), (1,), (0,), (2,)], (S(),) * 4),
    "other ranks": single_stage((S(tensor=2),) * 4, 4, ranks=(2, 0, 3, 1), embedding=V(tensor=2), head=V(tensor=4)),
}


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Holds the losses, gradients and updates of a few steps of one process with SGD."""

    model: PreTrainedModel
    batch: dict[str, torch.Tensor]
    losses: list[float]
    gradients: list[dict[str, torch.Tensor]]
    weights: dict[str, torch.Tensor]


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD((one for one in model.parameters() if one.requires_grad), lr=0.05, momentum=0.9)


def steps_of(family: str, count: int, frozen: str = "", change: Callable = lambda model: model) -> Steps:
    model = change(ALL_FAMILIES[family].build())
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not frozen or frozen not in name)
    one, batch = copy.deepcopy(model), long_tailed(LENGTHS)
    optimizer, losses, gradients = sgd(one), [], []
    for _ in range(count):
        loss = one(**batch, use_cache=False).loss
        loss.backward()
        losses.append(float(loss.detach()))
        gradients.append({name: gradient_of(weight).clone() for name, weight in one.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: weight.detach() for name, weight in one.named_parameters()}
    return Steps(model=model, batch=batch, losses=losses, gradients=gradients, weights=weights)


def check_in_turn(steps: Steps, own: ParallelPlan, *others: ParallelPlan) -> None:
    """Computes steps under the plans in turn, beginning with the other ones."""
    world = WorldMesh("cpu")
    model = copy.deepcopy(steps.model)
    models = [empty_copy(model) for _ in others]
    owner = parallelize(model, own, world)
    plans = [*(OtherPlan(owner, *pair) for pair in zip(models, others, strict=True)), owner]
    optimizer = sgd(owner.model)
    for step, (loss, gradients) in enumerate(zip(steps.losses, steps.gradients, strict=True)):
        found = plans[step % len(plans)].forward_backward(steps.batch)
        assert_near(f"the loss of step {step}", float(found), loss)
        found = whole_gradients(owner.model, steps.model)
        wrong = unequal_tensors("gradient", found, gradients, relative=(1 + step) * RELATIVE)
        assert not wrong, f"step {step}: {wrong[0]}"
        assert_near(f"the norm of step {step}", float(owner.grad_norm()), total_norm(gradients))
        optimizer.step()
        optimizer.zero_grad()
    before = dict(steps.model.named_parameters())
    updates = [
        {name: value - before[name].detach() for name, value in weights.items()}
        for weights in (whole_weights(owner.model, steps.model), steps.weights)
    ]
    wrong = unequal_tensors("update", *updates, relative=1e-4)
    assert not wrong, wrong[0]
    for one in plans[:-1]:
        weights = map(local_tensor, one.parallel.model.state_dict().values())
        held = {tensor.untyped_storage().nbytes() for tensor in weights}
        assert held == {0}, f"the weights of another plan keep {held} bytes"


# The optimizer's plan first.
PAIRS = {
    "zero3, tensor": ("llama", ("zero3", "tensor")),
    "mixed": ("llama", ("mixed_a", "mixed_b", "replicate")),
    "stages": ("gpt2", ("hybrid", "stages", "other ends")),
    "from stages": ("gpt2", ("other ends", "zero3", "four stages")),
    "other ranks": ("qwen3", ("other ranks", "mixed_a")),
    "replicate": ("llama", ("replicate", "zero3")),
    "experts": ("mixtral", ("zero3", "stages")),
    "norm weights": ("gemma2", ("stages", "mixed_b")),
}
FAST = ("mixed", "stages", "from stages")


@pytest.mark.slow
@pytest.mark.parametrize("fast", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_steps_under_several_plans_are_those_of_one_process(fast):
    cases = {}
    for name, (family, plans) in PAIRS.items():
        if (name in FAST) is fast:
            cases[name] = steps_of(family, len(plans) + 1), *(PLANS[plan] for plan in plans)

    def work() -> dict[str, str]:
        wrong = {}
        for name, case in cases.items():
            # Small rounds, so that there are several.
            with mock.patch.object(piece_move, "ROUND_BYTES", 2**15):
                try:
                    check_in_turn(*case)
                except AssertionError as error:
                    wrong[name] = str(error)
        return wrong

    wrong = [found for found in run_ranks(work, 4) if found]
    assert not wrong, wrong[0]


def test_frozen_weights_stay():
    steps = steps_of("llama", 3, frozen="mlp")
    run_ranks(lambda: check_in_turn(steps, PLANS["zero3"], PLANS["stages"]), 4)


def test_gradients_add_up():
    """A second call before the update adds to the gradients, as under one plan."""
    steps = steps_of("llama", 1)

    def work() -> None:
        owner, other = made(steps.model, "hybrid", "tensor")
        for one in (other, owner, other):
            one.forward_backward(steps.batch)
        wanted = {name: 3 * gradient for name, gradient in steps.gradients[0].items()}
        assert_same_gradients(whole_gradients(owner.model, steps.model), wanted)

    run_ranks(work, 4)


def test_each_number_is_sent_once():
    """Of weights that all ranks need, a rank without them gets each number once; what it has it keeps."""
    steps = steps_of("llama", 1)

    def work() -> None:
        _, other = made(steps.model, "zero3", "replicate")
        weights = sum(one.numel() for one in steps.model.parameters())
        sent = torch.tensor([other._weights.sent_elements, other._gradients.sent_elements])
        dist.all_reduce(sent)
        assert sent.tolist() == [3 * weights, 0]

    run_ranks(work, 4)


def changed(model: PreTrainedModel) -> PreTrainedModel:
    """Changes what its configuration does not say: an activation, a buffer that is not saved, and one that counts."""

    class Counting(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(1))

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            if torch.is_grad_enabled():
                self.seen += 1.0
            return torch.tanh(hidden) * (1.0 + 0.1 * self.seen)

    for layer in model.model.layers:
        layer.mlp.act_fn = Counting()
    model.model.rotary_emb.inv_freq *= 0.5
    return model


@pytest.mark.slow
def test_a_model_that_was_changed_after_it_was_built():
    """Steps have the activations and buffers of the model itself, and what layers count goes on under all plans."""
    steps = steps_of("llama", 4, change=changed)
    run_ranks(lambda: check_in_turn(steps, PLANS["hybrid"], PLANS["replicate"], PLANS["zero3"]), 4)


def test_weights_without_a_part_in_the_loss_get_no_gradient():
    steps = steps_of("llama", 1)

    def work() -> None:
        model = copy.deepcopy(steps.model)
        model.model.layers[0].mlp.unused = torch.nn.Parameter(torch.ones(8))
        copied = empty_copy(model)
        owner = parallelize(model, PLANS["replicate"], WorldMesh("cpu"))
        other = OtherPlan(owner, copied, PLANS["zero3"])
        for one in (owner, other):
            one.forward_backward(steps.batch)
            assert model.model.layers[0].mlp.unused.grad is None
            assert model.model.layers[0].mlp.up_proj.weight.grad is not None
            owner.model.zero_grad()

    run_ranks(work, 4)


def test_models_of_other_sizes_are_refused_on_every_rank():
    steps = steps_of("llama", 1)

    def work() -> str:
        owner = parallelize(copy.deepcopy(steps.model), PLANS["zero3"], WorldMesh("cpu"))
        larger = ALL_FAMILIES["llama"].build(intermediate_size=2 * steps.model.config.intermediate_size)
        with pytest.raises(ValueError, match="has other sizes in the two models") as error:
            OtherPlan(owner, empty_copy(larger), PLANS["tensor"])
        return str(error.value)

    assert all("mlp" in message for message in run_ranks(work, 4))


def test_an_interrupted_step_leaves_no_gradient_and_no_memory():
    steps = steps_of("llama", 1)

    def work() -> None:
        owner, other = made(steps.model, "zero3", "tensor")
        with mock.patch.object(other, "hand_back", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            other.forward_backward(steps.batch)
        assert {
            local_tensor(one).untyped_storage().nbytes() for one in other.parallel.model.state_dict().values()
        } == {0}
        other.forward_backward(steps.batch)
        assert_same_gradients(whole_gradients(owner.model, steps.model), steps.gradients[0])

    run_ranks(work, 4)


def test_weights_that_are_frozen_later_are_refused():
    steps = steps_of("llama", 1)

    def work() -> str:
        owner, other = made(steps.model, "stages", "zero3")
        for name, parameter in owner.model.named_parameters():
            parameter.requires_grad_("layers.0.mlp" not in name)
        with pytest.raises(ValueError, match="freeze weights before, or use one plan") as error:
            other.forward_backward(steps.batch)
        return str(error.value)

    assert len(set(run_ranks(work, 4))) == 1


def made(model: PreTrainedModel, own: str, other: str) -> tuple[ParallelModel, OtherPlan]:
    model = copy.deepcopy(model)
    copied = empty_copy(model)
    owner = parallelize(model, PLANS[own], WorldMesh("cpu"))
    return owner, OtherPlan(owner, copied, PLANS[other])
