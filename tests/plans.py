# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Named plans for the tests of the runtime, for models of four layers on 2, 4 or 8 ranks."""

from __future__ import annotations

from equivalence import single_stage
from galvatron_hf.plan import LayerStrategy, ParallelPlan, VocabularyStrategy
from tiny_models import LAYERS


def uniform(world_size: int, *, embedding: VocabularyStrategy | None = None, **strategy) -> ParallelPlan:
    """One strategy for all layers; embedding and head alike, by default in zero3 over all ranks."""
    layers = (LayerStrategy(**strategy),) * LAYERS
    return single_stage(layers, world_size, embedding=embedding, head=embedding)


def uniform_plans(world_size: int) -> dict[str, ParallelPlan]:
    """Every strategy by itself."""
    half, vocabulary = world_size // 2, VocabularyStrategy(tensor=world_size)
    plans = {
        "replicate": uniform(world_size, sharding="replicate", embedding=VocabularyStrategy(sharding="replicate")),
        "zero2": uniform(world_size, sharding="zero2", embedding=VocabularyStrategy(sharding="zero2")),
        "zero3": uniform(world_size),
        "zero3_recompute": uniform(world_size, recompute="full"),
        "tensor": uniform(world_size, tensor=world_size, embedding=vocabulary),
        "tensor_recompute": uniform(world_size, tensor=world_size, recompute="full"),
        "megatron_sp": uniform(world_size, tensor=world_size, megatron_sp=True, embedding=vocabulary),
        "megatron_sp_recompute": uniform(world_size, tensor=world_size, megatron_sp=True, recompute="full"),
        "ulysses": uniform(world_size, ulysses=world_size),
        "ulysses_recompute": uniform(world_size, ulysses=world_size, recompute="full", sharding="zero2"),
    }
    if half > 1:
        two = VocabularyStrategy(tensor=2, sharding="zero2")
        plans |= {
            "hybrid_sharding": uniform(world_size, shard_degree=half, embedding=VocabularyStrategy(shard_degree=half)),
            "tensor_data": uniform(world_size, tensor=2, embedding=two),
            "tensor_replicate": uniform(world_size, tensor=2, sharding="replicate", embedding=two),
            "megatron_sp_data": uniform(world_size, tensor=2, megatron_sp=True, sharding="zero2", embedding=two),
            "ulysses_data": uniform(world_size, ulysses=2, shard_degree=2),
            "tensor_ulysses": uniform(world_size, tensor=half, ulysses=2, embedding=two),
            "megatron_sp_ulysses": uniform(world_size, tensor=2, ulysses=half, megatron_sp=True, embedding=two),
        }
    return plans


def mixed_plans() -> dict[str, ParallelPlan]:
    """Layers that differ, on 4 ranks; together they take every kind of step from one layout to another."""
    S, V = LayerStrategy, VocabularyStrategy
    first = (S(), S(tensor=2), S(tensor=4, megatron_sp=True, recompute="full"), S(ulysses=2, sharding="zero2"))
    second = (
        S(tensor=4),
        S(tensor=2, ulysses=2, megatron_sp=True, recompute="full"),
        S(ulysses=4, shard_degree=2),
        S(tensor=2, megatron_sp=True, sharding="replicate"),
    )
    third = (
        S(tensor=2, ulysses=2, sharding="replicate"),
        S(sharding="replicate"),
        S(tensor=2, sharding="zero2", recompute="full"),
        S(shard_degree=2),
    )
    return {
        "mixed_a": single_stage(first, 4, embedding=V(tensor=2), head=V(tensor=2), micro_batches=3),
        "mixed_b": single_stage(second, 4, embedding=V(tensor=4), head=V(tensor=4)),
        "mixed_c": single_stage(third, 4, micro_batches=2),
        "permuted": single_stage(first, 4, ranks=(1, 0, 3, 2), embedding=V(tensor=2), head=V(tensor=2)),
        "shuffled": single_stage(second, 4, ranks=(2, 0, 3, 1), embedding=V(tensor=2), head=V(tensor=2)),
    }


def untied_plans() -> dict[str, ParallelPlan]:
    """Plans whose embedding and head differ, on 4 ranks."""
    S, V = LayerStrategy, VocabularyStrategy
    layers = (S(tensor=2), S(ulysses=4), S(), S(tensor=4))
    return {
        "embedding_tensor": single_stage(layers, 4, embedding=V(tensor=4), head=V(sharding="replicate")),
        "head_tensor": single_stage(layers, 4, embedding=V(sharding="zero2"), head=V(tensor=2, shard_degree=1)),
    }
