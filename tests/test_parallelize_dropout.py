# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Dropout: masks agree on replicas, differ on shards, are replayed by recompute, and depend on the streams alone."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
import torch.distributed as dist

from equivalence import single_stage, whole_gradients
from galvatron_hf.parallel.comm.dtensor import local_tensor
from galvatron_hf.parallel.comm.mesh import WorldMesh
from galvatron_hf.parallel.parallelize import parallelize
from galvatron_hf.plan import LayerStrategy, ParallelPlan, VocabularyStrategy
from plans import mixed_plans
from ranks import run_ranks
from tiny_models import BATCHES, FAMILIES, LAYERS


MODELS = {
    "gpt2": lambda: FAMILIES["gpt2"].build(resid_pdrop=0.2, embd_pdrop=0.2, attn_pdrop=0.2),
    "gpt2_eager": lambda: FAMILIES["gpt2_eager"].build(resid_pdrop=0.2, embd_pdrop=0.2, attn_pdrop=0.2),
    "llama": lambda: FAMILIES["llama"].build(attention_dropout=0.2),
    "llama_eager": lambda: FAMILIES["llama_eager"].build(attention_dropout=0.2),
}


def families(*fast: str) -> list:
    """Marks the other models slow."""
    return [name if name in fast else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]


def with_recompute(plan: ParallelPlan, recompute: str) -> ParallelPlan:
    layers = tuple(dataclasses.replace(layer, recompute=recompute) for layer in plan.layers)
    return dataclasses.replace(plan, layers=layers)


def step(parallel, plain, number: int) -> tuple[float, dict[str, torch.Tensor]]:
    parallel.streams.seed, parallel.streams.step = 17, number
    parallel.model.zero_grad()
    loss = float(parallel.forward_backward(BATCHES["right"]()))
    return loss, whole_gradients(parallel.model, plain)


def same(first, second) -> bool:
    return first[0] == second[0] and all(torch.equal(first[1][name], second[1][name]) for name in first[1])


@pytest.mark.slow
@pytest.mark.parametrize("family", families("gpt2", "llama_eager"))
def test_streams_are_replayed_and_keyed_by_step(family):
    plain, plan = MODELS[family](), dataclasses.replace(mixed_plans()["mixed_a"], micro_batches=2)

    def work():
        state, world = torch.get_rng_state(), WorldMesh("cpu")
        kept = parallelize(copy.deepcopy(plain), with_recompute(plan, "none"), world)
        replayed = parallelize(copy.deepcopy(plain), with_recompute(plan, "full"), world)
        first, second = step(kept, plain, 0), step(kept, plain, 1)
        assert not same(first, second)  # another step, other masks
        assert same(step(kept, plain, 0), first)
        assert same(step(replayed, plain, 0), first)
        assert torch.equal(torch.get_rng_state(), state)
        kept.model.eval()
        with torch.no_grad():
            losses = [float(kept.model(**BATCHES["right"]()).loss) for _ in range(2)]
            wanted = float(copy.deepcopy(plain).eval()(**BATCHES["right"]()).loss)
        assert losses == pytest.approx([wanted, wanted], rel=1e-5)

    run_ranks(work, 4)


@pytest.mark.parametrize("family, steps", [("gpt2", 2), pytest.param("llama_eager", 3, marks=pytest.mark.slow)])
def test_replicas_stay_equal_over_steps(family, steps):
    """Compares bit for bit, after SGD steps with dropout, the weights that several ranks hold."""
    S = LayerStrategy
    layers = (
        S(sharding="replicate"),
        S(tensor=2),
        S(tensor=4, megatron_sp=True),
        S(tensor=2, ulysses=2, shard_degree=1),
    )
    vocabulary = VocabularyStrategy(tensor=2, sharding="replicate")
    plan = single_stage(layers, 4, embedding=vocabulary, head=vocabulary)

    def work():
        parallel = parallelize(MODELS[family](), plan)
        optimizer = torch.optim.SGD(parallel.model.parameters(), lr=0.05)
        for number in range(steps):
            parallel.streams.step = number
            parallel.forward_backward(BATCHES["right"]())
            optimizer.step()
            optimizer.zero_grad()
        compared = 0
        for name, parameter in parallel.model.named_parameters():
            mesh = parameter.device_mesh
            for axis, placement in enumerate(parameter.placements):
                if placement.is_replicate() and mesh.size(axis) > 1:
                    local = local_tensor(parameter.detach()).contiguous()
                    copies = [torch.empty_like(local) for _ in range(mesh.size(axis))]
                    dist.all_gather(copies, local, group=mesh.get_group(axis))
                    assert all(torch.equal(copies[0], other) for other in copies), name
                    compared += 1
        return compared

    assert min(run_ranks(work, 4)) > 20


def dropped(strategies: list[LayerStrategy]) -> list[list[torch.Tensor]]:
    """Returns for each strategy, by rank, the mask of the first layer's last dropout: [rows, positions, H]."""

    def work():
        masks, world = [], WorldMesh("cpu")
        for strategy in strategies:
            parallel = parallelize(MODELS["gpt2"](), single_stage((strategy,) * LAYERS, 4), world)
            seen = []
            layer = parallel.model.base_model.h[0]
            layer.mlp.dropout.register_forward_hook(lambda *args, seen=seen: seen.append(args[-1] == 0))
            parallel.forward_backward(BATCHES["plain"]())
            masks.append(seen[0])
        return masks

    return [list(by_rank) for by_rank in zip(*run_ranks(work, 4), strict=True)]


def test_masks_agree_on_replicas_and_differ_on_shards():
    apart = [LayerStrategy(), LayerStrategy(tensor=4, megatron_sp=True), LayerStrategy(ulysses=4)]
    tensor, *others = dropped([LayerStrategy(tensor=2), *apart])
    assert torch.equal(tensor[0], tensor[1]) and torch.equal(tensor[2], tensor[3])
    assert not torch.equal(tensor[0], tensor[2])
    for masks in others:
        assert all(0.1 < mask.float().mean() < 0.3 for mask in masks)
        for first in range(4):
            assert not any(torch.equal(masks[first], masks[other]) for other in range(first))
