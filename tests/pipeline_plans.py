# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Plans of several stages for the tests, for models of four layers."""

from __future__ import annotations

from collections.abc import Sequence

from galvatron_hf.plan import LayerStrategy, ParallelPlan, Stage, VocabularyStrategy
from tiny_models import LAYERS


S, V = LayerStrategy, VocabularyStrategy
A, B = (0, 1), (2, 3)
ZERO2 = V(sharding="zero2")

# Layers that differ inside the stages; the second set for schedules that cannot run zero3.
MIXED = (S(tensor=2), S(recompute="full"), S(tensor=2, megatron_sp=True, sharding="replicate"), S(ulysses=2))
KEPT = (
    S(sharding="zero2"),
    S(tensor=2, sharding="replicate"),
    S(sharding="zero2", ulysses=2, recompute="full"),
    S(sharding="replicate"),
)


def staged(
    lists: Sequence[Sequence[int]],
    cuts: Sequence[int],
    layers: tuple[LayerStrategy, ...] = (S(),) * LAYERS,
    schedule: str = "1f1b",
    micro_batches: int = 4,
    embedding: VocabularyStrategy | None = None,
    head: VocabularyStrategy | None = None,
) -> ParallelPlan:
    """A plan whose stages run on `lists`, cut before the layers `cuts`; by default the head is like the embedding."""
    bounds = [0, *cuts, LAYERS]
    embedding = embedding or V()
    return ParallelPlan(
        world_size=len({rank for ranks in lists for rank in ranks}),
        stacks={"decoder": LAYERS},
        layers=layers,
        stages=tuple(
            Stage(ranks=tuple(ranks), layers=(bounds[index], bounds[index + 1])) for index, ranks in enumerate(lists)
        ),
        schedule=schedule,
        micro_batches=micro_batches,
        embedding=embedding,
        head=head or embedding,
    )


def pipeline_plans() -> dict[str, ParallelPlan]:
    """Every schedule on four ranks, with uneven cuts, layers that differ, permuted ranks and virtual stages."""
    singles = [(rank,) for rank in range(4)]
    return {
        "gpipe": staged([A, B], [2], schedule="gpipe"),
        "1f1b": staged([A, B], [1], MIXED, embedding=V(tensor=2)),
        "uneven": staged([(1, 0), (3, 2)], [3], MIXED, micro_batches=3, embedding=V(sharding="replicate")),
        "interleaved": staged([A, B, A, B], [1, 2, 3], MIXED, "interleaved", 2, V(tensor=2)),
        "four": staged(singles, [1, 2, 3], micro_batches=6),
        "four_permuted": staged([(2,), (0,), (3,), (1,)], [1, 2, 3], schedule="gpipe", micro_batches=5),
        "zero_bubble": staged([A, B], [2], KEPT, "zero_bubble", 4, ZERO2),
        "zero_bubble_loop": staged([A, B, A, B], [1, 2, 3], KEPT, "zero_bubble", 4, ZERO2),
        "zero_bubble_return": staged([A, B, B, A], [1, 2, 3], KEPT, "zero_bubble", 6, ZERO2),
    }
