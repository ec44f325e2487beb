# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The strategies that a layer, the embedding and the head can have on the ranks of one stage: the decision tree.

First the ranks are shared out to tensor, Ulysses and data parallelism (context and expert degrees, which
[`~galvatron_hf.plan.LayerStrategy`] has too, stay 1 until they run), then positions are split over the tensor ranks or
not, then weights are sharded or copied, then activations are kept or computed again. Degrees are powers of two.
Source: Galvatron (arXiv 2211.13878), section 3.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from galvatron_hf.plan import LayerStrategy, VocabularyStrategy


@dataclass(frozen=True, kw_only=True)
class Limits:
    """
    What the search may use.

    Args:
        tensor (`int`, *optional*): Largest tensor degree; None leaves it to the model's heads.
        sequence (`tuple[str, ...]`): Of "none", "megatron" and "ulysses", what may split positions.
        sharding (`tuple[str, ...]`): Of "replicate", "zero2" and "zero3".
        hybrid_sharding (`bool`): Whether fewer ranks than all may hold the pieces of a copy.
        recompute (`tuple[str, ...]`): Of "none" and "full".
        schedules (`tuple[str, ...]`): Of "1f1b" and "zero_bubble"; GPipe takes as long as 1F1B and more memory.
        pipeline, micro_batches (`tuple[int, ...]`, *optional*): Degrees and counts; None allows all.
    """

    tensor: int | None = None
    sequence: tuple[str, ...] = ("none", "megatron", "ulysses")
    sharding: tuple[str, ...] = ("replicate", "zero2", "zero3")
    hybrid_sharding: bool = True
    recompute: tuple[str, ...] = ("none", "full")
    schedules: tuple[str, ...] = ("1f1b",)
    pipeline: tuple[int, ...] | None = None
    micro_batches: tuple[int, ...] | None = None


def powers(most: int) -> list[int]:
    """1, 2, 4, ... up to `most`."""
    return [1 << exponent for exponent in range(max(most, 0).bit_length())]


def layer_strategies(ranks: int, heads: int, kv_heads: int, limits: Limits, data: int) -> list[LayerStrategy]:
    """
    All strategies of a layer.

    Args:
        ranks (`int`): R, of its stage.
        heads, kv_heads (`int`): of the model, which tensor and Ulysses ranks share evenly.
        limits ([`Limits`]): What may be used.
        data (`int`): Largest data degree, so that every data rank has a row of each micro-batch.
    """
    found = []
    for tensor in powers(min(ranks, heads, limits.tensor or ranks)):
        for ulysses in powers(ranks // tensor) if "ulysses" in limits.sequence else [1]:
            fits = ranks % (tensor * ulysses) == 0 and heads % (tensor * ulysses) == 0
            if not fits or not _shares(kv_heads, tensor) or ranks // (tensor * ulysses) > data:
                continue
            for megatron_sp in [False, True]:
                wanted = "megatron" if megatron_sp else "none"
                if (tensor == 1 and megatron_sp) or (tensor > 1 and wanted not in limits.sequence):
                    continue
                for sharding, shard_degree in _shardings(ranks // tensor, limits):
                    for recompute in limits.recompute:
                        found.append(
                            LayerStrategy(
                                tensor=tensor,
                                megatron_sp=megatron_sp,
                                ulysses=ulysses,
                                sharding=sharding,
                                shard_degree=shard_degree,
                                recompute=recompute,
                            )
                        )
    return found


def vocabulary_strategies(ranks: int, heads: int, limits: Limits) -> list[VocabularyStrategy]:
    """All strategies of the embedding or the head; tensor degrees are those that a layer could have."""
    return [
        VocabularyStrategy(tensor=tensor, sharding=sharding, shard_degree=shard_degree)
        for tensor in powers(min(ranks, heads, limits.tensor or ranks))
        if ranks % tensor == 0
        for sharding, shard_degree in _shardings(ranks // tensor, limits)
    ]


def _shares(kv_heads: int, tensor: int) -> bool:
    return kv_heads % tensor == 0 or tensor % kv_heads == 0


def _shardings(ranks: int, limits: Limits) -> Iterator[tuple[str, int | None]]:
    """Sharding and shard degree over `ranks` ranks that hold the same weights; None is all of them."""
    if ranks == 1:
        yield "replicate", None
        return
    for sharding in limits.sharding:
        if sharding == "replicate":
            yield sharding, None
            continue
        yield sharding, None
        if limits.hybrid_sharding:
            for degree in powers(ranks // 2)[1:]:
                if ranks % degree == 0:
                    yield sharding, degree
