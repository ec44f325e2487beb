# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Experts at the edges: ranks to which no row comes, fewer tokens than ranks, each implementation of experts, bf16,
and compiled layers to which another number of rows comes in every step.
"""

from __future__ import annotations

import copy
import weakref
from unittest.mock import patch

import pytest
import torch

from equivalence import Reference, assert_near, assert_same_gradients, check_equivalence, reference, whole_gradients
from equivalence import single_stage as plan_of
from galvatron_hf.parallel.comm.mesh import WorldMesh
from galvatron_hf.parallel.layers.experts import ParallelExperts
from galvatron_hf.parallel.parallelize import parallelize
from galvatron_hf.plan import LayerStrategy, ParallelPlan, Precision, VocabularyStrategy
from ranks import run_ranks
from test_compile import compiled
from test_expert_costs import routings
from test_packed_rows import long_tailed, packed
from tiny_models import BATCHES, EXPERT_FAMILIES


S, V = LayerStrategy, VocabularyStrategy
IMPLEMENTATIONS = ("eager", "grouped_mm", "batched_mm")


def check(cases: dict[str, tuple[Reference, ParallelPlan]], received: dict[str, set[int]] | None = None) -> None:
    """Compares cases on 4 ranks with one process. `received` are the numbers of rows that arrived, of all ranks."""

    def work() -> dict[str, list[int]]:
        world, found = WorldMesh("cpu"), {}
        for name, (oracle, plan) in cases.items():
            try:
                with routings() as seen:
                    check_equivalence(oracle, plan, world, evaluation=False)
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from error
            found[name] = [sum(one.received) for one in seen]
        return found

    ranks = run_ranks(work, 4)
    for name, wanted in (received or {}).items():
        assert {number for found in ranks for number in found[name]} == wanted, name


# ---- No rows, few tokens ----


def all_at_the_first_experts(implementation: str) -> Reference:
    """Returns a model of a dense layer and one with experts, whose tokens all choose experts 0 and 1 of 8."""
    model = EXPERT_FAMILIES["deepseek_v3"].build(num_hidden_layers=2, experts_implementation=implementation)
    bias = dict(model.named_buffers())["model.layers.1.mlp.gate.e_score_correction_bias"]
    bias.copy_(torch.tensor([20.0, 10.0, *[0.0] * 6]))
    return reference(model, BATCHES["plain"]())


@pytest.mark.slow
def test_ranks_to_which_no_row_comes():
    cases, received = {}, {}
    for implementation in IMPLEMENTATIONS:
        oracle, pairs = all_at_the_first_experts(implementation), 2 * 64
        for sharding in ("zero3", "zero2", "replicate"):
            for expert in (2, 4):
                strategy = S(expert=expert, sharding=sharding, recompute="full" if sharding == "zero3" else "none")
                name = f"{implementation}, {sharding}, {expert} expert ranks"
                cases[name] = oracle, plan_of((S(), strategy), 4)
                received[name] = {0, pairs * expert // 4}
    check(cases, received)


@torch.no_grad()
def each_half_at_other_experts(implementation: str) -> Reference:
    """Returns a model in which even tokens choose among experts 0 to 3, odd ones among 4 to 7; and a batch whose first
    half of rows is even, and the second odd.
    """
    model = EXPERT_FAMILIES["mixtral"].build(num_hidden_layers=1, experts_implementation=implementation)
    embedding, router = model.base_model.embed_tokens.weight, model.base_model.layers[0].mlp.gate.weight
    embedding[::2, 0], embedding[1::2, 0] = 8.0, -8.0
    router[:4, 0], router[4:, 0] = 8.0, -8.0
    batch = BATCHES["plain"]()
    ids = batch["input_ids"].clamp(max=95) // 2 * 2
    ids[4:] += 1
    with torch.enable_grad():
        return reference(model, dict(input_ids=ids, labels=ids))


def test_ranks_that_share_experts_to_one_of_which_no_row_comes():
    """Both take part in the sums of gradients."""
    cases, received = {}, {}
    for implementation in IMPLEMENTATIONS:
        oracle = each_half_at_other_experts(implementation)
        for sharding in ("zero3", "zero2", "replicate"):
            name = f"{implementation}, {sharding}"
            cases[name] = oracle, plan_of((S(expert=2, sharding=sharding),), 4)
            received[name] = {0, 64}
    check(cases, received)


@pytest.mark.slow
def test_fewer_tokens_than_tensor_ranks():
    """One row of three tokens, and of two: with four tensor ranks, some take no token to the experts."""
    cases = {}
    for implementation in IMPLEMENTATIONS:
        model = EXPERT_FAMILIES["mixtral"].build(num_hidden_layers=2, experts_implementation=implementation)
        for length in (2, 3):
            ids = torch.arange(11, 11 + length)[None]
            oracle = reference(copy.deepcopy(model), dict(input_ids=ids, labels=ids))
            for sharding in ("zero3", "zero2", "replicate"):
                layers = (S(tensor=4, expert=4, sharding=sharding), S(tensor=4, recompute="full", expert=4))
                ends = dict(embedding=V(tensor=4), head=V(tensor=4))
                cases[f"{implementation}, {sharding}, {length} tokens"] = oracle, plan_of(layers, 4, **ends)
    check(cases)


# ---- bf16 ----


def losses_in_bf16(model, plans: dict[str, ParallelPlan], batch: dict) -> list[dict]:
    """Returns the loss and the gradients of each plan in bf16, and the types of what its experts compute on."""

    def work() -> dict:
        world, found = WorldMesh("cpu"), {}
        for name, plan in plans.items():
            types, call = set(), ParallelExperts.__call__

            def noted(self, hidden, choices, weights, call=call, types=types) -> torch.Tensor:
                output = call(self, hidden, choices, weights)
                types.add((hidden.dtype, weights.dtype, output.dtype))
                return output

            with patch.object(ParallelExperts, "__call__", noted):
                parallel = parallelize(copy.deepcopy(model), plan, world)
                loss = float(parallel.forward_backward(batch))
            found[name] = loss, whole_gradients(parallel.model, model), types
        return found

    return run_ranks(work, 4)


def test_experts_in_bf16():
    """The loss is within one rounding of bf16, 2^-8, of that of fp32, and so are the gradients of experts on other
    ranks of those on their own. Mixtral computes the weights of choices in fp32, which get to the experts as they are.
    """
    model, batch = EXPERT_FAMILIES["mixtral"].build(num_hidden_layers=2), BATCHES["right"]()
    oracle = reference(copy.deepcopy(model), batch)
    strategies = {"1": S(), "4": S(expert=4), "replicate": S(expert=4, sharding="replicate")}
    plans = {name: plan_of((one,) * 2, 4, precision=Precision(compute="bf16")) for name, one in strategies.items()}
    for found in losses_in_bf16(model, plans, batch):
        loss, gradients, _ = found["1"]
        assert abs(loss - oracle.loss) < 2**-8 * oracle.loss
        for other, seen, types in found.values():
            assert types == {(torch.bfloat16, torch.float32, torch.bfloat16)}
            assert abs(other - loss) < 1e-5 * loss  # experts compute on the same rows, in the same type
            for name, gradient in gradients.items():
                assert float((seen[name] - gradient).norm()) < 2**-8 * float(gradient.norm()), name


# ---- Recompute ----


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe"])
@pytest.mark.parametrize("expert", [1, 2])
def test_a_recompute_leaves_nothing_behind(family, expert):
    """Hidden states that outlive the backward of their layer hold its recomputed activations."""
    model, batch = EXPERT_FAMILIES[family].build(num_hidden_layers=3), BATCHES["plain"]()
    with_experts = S(expert=expert, recompute="full")
    second = S(recompute="full") if family == "qwen2_moe" else with_experts  # it is dense
    plan = plan_of((with_experts, second, with_experts), 2)

    def work() -> tuple[int, list[int]]:
        parallel, given, alive = parallelize(model, plan), [], []
        layers = [block for block in parallel.blocks if block.experts is not None]
        for block in layers:
            block.experts.module.register_forward_pre_hook(lambda module, args: given.append(weakref.ref(args[0])))
        first = parallel.blocks[0].layer.get_parameter("input_layernorm.weight")
        first.register_post_accumulate_grad_hook(
            lambda weight: alive.append(sum(tensor() is not None for tensor in given))
        )
        parallel.forward_backward(batch)
        alive.append(sum(tensor() is not None for tensor in given))
        return len(given) - 2 * len(layers), alive

    for calls, alive in run_ranks(work, 2):
        assert calls == 0 and not any(alive), alive


# ---- Packed rows ----


@pytest.mark.parametrize(
    "options", [dict(attn_temperature_tuning=True), dict(layer_types=["chunked_attention", "full_attention"])]
)
def test_attention_that_counts_from_the_first_position_of_a_row_refuses_packed_rows(options):
    """Llama 4 scales queries by their position in the row, and attends within chunks of it."""
    model = EXPERT_FAMILIES["llama4_text"].build(num_hidden_layers=2, no_rope_layers=[1, 0], **options)

    def work() -> None:
        parallel = parallelize(model, plan_of((S(),) * 2, 1))
        with pytest.raises(ValueError, match="Llama4TextAttention counts the positions of a row.*packing='none'"):
            parallel.forward_backward(packed(parallel, long_tailed(), 1))

    run_ranks(work, 1)


# ---- torch.compile ----


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe"])
def test_compiled_layers_are_not_compiled_again_for_other_numbers_of_rows(family):
    model, oracles = EXPERT_FAMILIES[family].build(num_hidden_layers=3), []
    for seed in range(4):
        ids = torch.randint(0, 97, (4, 12), generator=torch.Generator().manual_seed(seed))
        oracles.append(reference(copy.deepcopy(model), dict(input_ids=ids, labels=ids)))
    dense = S(tensor=2) if family == "qwen2_moe" else S(tensor=2, expert=2)  # its second layer has no experts
    plan = plan_of((S(expert=2), dense, S(expert=2, recompute="full")), 2)

    def work() -> tuple[list[int], set[int]]:
        parallel, counter = compiled(oracles[0], plan, WorldMesh("cpu"))
        graphs, received = [], set()
        for oracle in oracles:
            with routings() as found:
                loss = parallel.forward_backward(oracle.batch)
            assert_near("loss", float(loss), oracle.loss)
            assert_same_gradients(whole_gradients(parallel.model, oracle.model), oracle.gradients)
            parallel.model.zero_grad()
            graphs.append(counter.frame_count)
            received.add(sum(found[0].received))
        return graphs, received

    for graphs, received in run_ranks(work, 2):
        assert len(received) > 1 and graphs[-1] == graphs[0], (graphs, received)
