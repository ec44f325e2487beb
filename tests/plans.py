# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Named plans for the tests of the runtime, for models of four layers on 2, 4 or 8 ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from equivalence import single_stage
from galvatron_hf.plan import LayerStrategy, ParallelPlan, Stage, VocabularyStrategy
from tiny_models import LAYERS


def shared_out(plans: dict[str, Any], turn: int, parts: int) -> dict[str, Any]:
    """Returns every `parts`-th plan, from the `turn`-th: families that take turns run every plan between them."""
    return dict(list(plans.items())[turn % parts :: parts])


def uniform(world_size: int, *, embedding: VocabularyStrategy | None = None, **strategy) -> ParallelPlan:
    """Returns a plan with one strategy for all layers; embedding and head are alike, by default in zero3."""
    layers = (LayerStrategy(**strategy),) * LAYERS
    return single_stage(layers, world_size, embedding=embedding, head=embedding)


def uniform_plans(world_size: int) -> dict[str, ParallelPlan]:
    """Returns plans of one strategy each; on 2 ranks those that need no third rank."""
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


# Uniform plans of two degrees that are not among those on 2 ranks, one of a kind.
TWO_DEGREES = ("hybrid_sharding", "tensor_data", "ulysses_data", "tensor_ulysses", "megatron_sp_ulysses")
# Parametrises a test over the uniform plans: fast are all on two ranks, and on four ranks those that two cannot run.
EVERY_UNIFORM_PLAN = pytest.mark.parametrize(
    "world_size, names",
    [
        (2, list(uniform_plans(2))),
        (4, TWO_DEGREES),
        pytest.param(4, [name for name in uniform_plans(4) if name not in TWO_DEGREES], marks=pytest.mark.slow),
    ],
    ids=["2", "4_of_two_degrees", "4"],
)


def mixed_plans() -> dict[str, ParallelPlan]:
    """Returns plans on 4 ranks whose layers differ; together they change layouts in every way."""
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


def light_plan(world_size: int = 4, **options: Any) -> ParallelPlan:
    """Returns a plan with few collectives, for tests of other things than the plan.

    Three layers are replicated, the fourth is cut over two tensor ranks, and embedding and head are in zero3.
    """
    layers = (LayerStrategy(sharding="replicate"),) * 3 + (LayerStrategy(tensor=2, sharding="zero2"),)
    return single_stage(layers, world_size, **options)


def untied_plans() -> dict[str, ParallelPlan]:
    """Returns plans on 4 ranks whose embedding and head differ."""
    S, V = LayerStrategy, VocabularyStrategy
    layers = (S(tensor=2), S(ulysses=4), S(), S(tensor=4))
    return {
        "embedding_tensor": single_stage(layers, 4, embedding=V(tensor=4), head=V(sharding="replicate")),
        "head_tensor": single_stage(layers, 4, embedding=V(sharding="zero2"), head=V(tensor=2, shard_degree=1)),
    }


def pipelined(
    lists: Sequence[Sequence[int]],
    layers: tuple[LayerStrategy, ...],
    schedule: str = "1f1b",
    *,
    cuts: Sequence[int] | None = None,
    ends: tuple[VocabularyStrategy, VocabularyStrategy] | VocabularyStrategy | None = None,
    micro_batches: int = 4,
    **options: Any,
) -> ParallelPlan:
    """Returns a plan with a stage for each list of ranks; lists may repeat.

    `cuts` are the layers at which the stages after the first begin.
    """
    count = len(lists)
    bounds = [0, *(cuts or (len(layers) * stage // count for stage in range(1, count))), len(layers)]
    embedding, head = ends if isinstance(ends, tuple) else (ends or VocabularyStrategy(),) * 2
    return ParallelPlan(
        world_size=len({rank for ranks in lists for rank in ranks}),
        stacks={"decoder": len(layers)},
        stages=tuple(
            Stage(ranks=tuple(ranks), layers=(bounds[stage], bounds[stage + 1])) for stage, ranks in enumerate(lists)
        ),
        layers=layers,
        schedule=schedule,
        micro_batches=micro_batches,
        embedding=embedding,
        head=head,
        **options,
    )


# Layers of two ranks that differ; the second four have no zero3, which zero-bubble schedules cannot run.
PAIR_LAYERS = (
    LayerStrategy(tensor=2),
    LayerStrategy(recompute="full"),
    LayerStrategy(tensor=2, megatron_sp=True, sharding="replicate"),
    LayerStrategy(ulysses=2, sharding="zero2"),
)
KEPT_LAYERS = (
    LayerStrategy(sharding="zero2"),
    LayerStrategy(tensor=2, sharding="replicate"),
    LayerStrategy(sharding="zero2", ulysses=2, recompute="full"),
    LayerStrategy(sharding="replicate"),
)


def pipeline_plans() -> dict[str, ParallelPlan]:
    """Returns every schedule on 4 ranks: 2 lists of 2 ranks and 4 of 1, even and uneven, in order and permuted."""
    S, V = LayerStrategy, VocabularyStrategy
    two, apart, four = [(0, 1), (2, 3)], [(2, 0), (1, 3)], [(0,), (1,), (2,), (3,)]
    zero3, zero2, replicate, tensor = (S(),) * 4, V(sharding="zero2"), V(sharding="replicate"), V(tensor=2)
    alone = (S(), S(recompute="full"), S(sharding="zero2"), S(sharding="replicate"))
    return {
        "gpipe": pipelined(two, zero3, "gpipe"),
        "1f1b": pipelined(two, zero3),
        "1f1b_mixed": pipelined(two, PAIR_LAYERS, cuts=[1], ends=tensor),
        "1f1b_uneven": pipelined([(1, 0), (3, 2)], PAIR_LAYERS, cuts=[3], ends=replicate, micro_batches=3),
        "gpipe_apart": pipelined(apart, PAIR_LAYERS[::-1], "gpipe", ends=(tensor, replicate), micro_batches=3),
        "interleaved": pipelined(two * 2, PAIR_LAYERS, "interleaved", ends=tensor, micro_batches=2),
        "interleaved_apart": pipelined(apart * 2, zero3, "interleaved", ends=(replicate, tensor), micro_batches=4),
        "gpipe_of_four": pipelined([(2,), (0,), (3,), (1,)], alone, "gpipe", micro_batches=5),
        "1f1b_of_four": pipelined(four, alone, micro_batches=6),
        "zero_bubble": pipelined(two, KEPT_LAYERS, "zero_bubble", ends=zero2),
        "zero_bubble_of_four": pipelined(four, KEPT_LAYERS[:1] * 4, "zero_bubble", ends=replicate, micro_batches=6),
        "zero_bubble_loop": pipelined(two * 2, KEPT_LAYERS, "zero_bubble", ends=(zero2, replicate)),
        "zero_bubble_v": pipelined(apart + apart[::-1], KEPT_LAYERS, "zero_bubble", ends=zero2, micro_batches=6),
    }


def pipeline_plans_on_eight() -> dict[str, ParallelPlan]:
    """Returns plans on 8 ranks: 2 lists of 4 ranks and 4 of 2."""
    S, V = LayerStrategy, VocabularyStrategy
    two, four = [(0, 2, 4, 6), (1, 3, 5, 7)], [(6, 7), (4, 5), (2, 3), (0, 1)]
    wide = (S(), S(tensor=4, megatron_sp=True, recompute="full"), S(tensor=2, ulysses=2), S(shard_degree=2))
    kept = (S(sharding="zero2", shard_degree=2), S(tensor=4, sharding="zero2"), *KEPT_LAYERS[2:])
    zero2 = V(tensor=2, sharding="zero2")
    return {
        "gpipe": pipelined(two, wide, "gpipe", cuts=[1], ends=(V(tensor=4), V(shard_degree=2))),
        "1f1b_of_four": pipelined(four, PAIR_LAYERS, ends=V(tensor=2), micro_batches=6),
        "interleaved": pipelined(two * 2, wide, "interleaved", ends=V(tensor=2)),
        "zero_bubble_of_four": pipelined(four, KEPT_LAYERS, "zero_bubble", ends=zero2),
        "zero_bubble_v": pipelined(two + two[::-1], kept, "zero_bubble", ends=zero2),
    }


def expert_plans(*, dense: Sequence[int] = (), tensor: bool = True, sequence: bool = True) -> dict[str, ParallelPlan]:
    """Returns plans on 4 ranks for a model with experts in all layers but `dense`. Without `tensor` no layer has a
    tensor degree, without `sequence` none has pieces of a sequence.
    """

    def mixed(*strategies: LayerStrategy) -> tuple[LayerStrategy, ...]:
        layers = [strategies[index % len(strategies)] for index in range(LAYERS)]
        return tuple(replace(one, expert=1) if index in dense else one for index, one in enumerate(layers))

    def strategy(**degrees) -> LayerStrategy:
        if not sequence:
            degrees.pop("ulysses", None)
        return LayerStrategy(**degrees)

    two = [(0, 1), (2, 3)]
    plans = {
        "expert_1": single_stage(mixed(strategy()), 4),
        "expert_2": single_stage(mixed(strategy(expert=2)), 4),
        "expert_4": single_stage(mixed(strategy(expert=4)), 4),
        "shardings": single_stage(
            mixed(
                strategy(expert=2, sharding="zero2"),
                strategy(expert=4, sharding="replicate"),
                strategy(expert=2, sharding="replicate"),
                strategy(expert=2, shard_degree=2),
            ),
            4,
        ),
        "recompute": single_stage(
            mixed(
                strategy(expert=2, recompute="full"),
                strategy(expert=4, recompute="full"),
                strategy(recompute="full"),
                strategy(expert=2, sharding="replicate", recompute="full"),
            ),
            4,
        ),
        "micro_batches": single_stage(
            mixed(strategy(expert=4), strategy(expert=2, ulysses=2, recompute="full")), 4, micro_batches=2
        ),
        "permuted": single_stage(
            mixed(strategy(expert=2, ulysses=2), strategy(expert=4), strategy(), strategy(expert=2, sharding="zero2")),
            4,
            ranks=(2, 0, 3, 1),
            micro_batches=2,
        ),
        "gpipe": pipelined(
            two,
            mixed(
                strategy(expert=2),
                strategy(expert=2, recompute="full"),
                strategy(ulysses=2, expert=2),
                strategy(expert=2, sharding="zero2"),
            ),
            "gpipe",
            micro_batches=2,
        ),
        "1f1b": pipelined(
            two,
            mixed(
                strategy(expert=2),
                strategy(expert=2, recompute="full"),
                strategy(ulysses=2, expert=2),
                strategy(expert=2, sharding="replicate"),
            ),
            micro_batches=4,
        ),
        "interleaved": pipelined(
            two * 2, mixed(strategy(expert=2), strategy(expert=1, recompute="full")), "interleaved", micro_batches=2
        ),
        "zero_bubble": pipelined(
            two,
            mixed(strategy(expert=2, sharding="zero2"), strategy(expert=2, sharding="replicate")),
            "zero_bubble",
            micro_batches=2,
            ends=VocabularyStrategy(sharding="zero2"),
        ),
    }
    if sequence:
        plans["ulysses"] = single_stage(
            mixed(
                strategy(expert=2, ulysses=2),
                strategy(expert=4, ulysses=4),
                strategy(expert=4, ulysses=2, recompute="full"),
                strategy(ulysses=2),
            ),
            4,
        )
    if tensor:
        vocabulary = VocabularyStrategy(tensor=2)
        ends = dict(embedding=vocabulary, head=vocabulary)
        plans |= {
            "tensor": single_stage(
                mixed(
                    strategy(tensor=2, expert=2),
                    strategy(tensor=2, expert=4),
                    strategy(tensor=2),
                    strategy(tensor=4, expert=4),
                ),
                4,
                **ends,
            ),
            "megatron_sp": single_stage(
                mixed(
                    strategy(tensor=2, expert=2, megatron_sp=True),
                    strategy(tensor=2, megatron_sp=True, expert=4, recompute="full"),
                    strategy(tensor=4, megatron_sp=True, expert=4),
                    strategy(tensor=2, megatron_sp=True, ulysses=2, expert=4),
                ),
                4,
                **ends,
            ),
            "all_kinds": single_stage(
                mixed(
                    strategy(tensor=2, expert=4, recompute="full"),
                    strategy(expert=4, sharding="zero2"),
                    strategy(tensor=2, megatron_sp=True, expert=2),
                    strategy(ulysses=2, expert=2, sharding="replicate"),
                ),
                4,
                micro_batches=2,
                **ends,
            ),
            "tensor_1f1b": pipelined(
                two,
                mixed(
                    strategy(tensor=2, expert=2),
                    strategy(tensor=2, megatron_sp=True, expert=2, recompute="full"),
                ),
                micro_batches=2,
            ),
        }
    return plans
