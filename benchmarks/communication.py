# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Prints the example of docs/communication.md, and one step's collectives next to the formula."""

from collections import Counter

from collective_recorder import totals
from step_traffic import Traffic, step_traffic

from galvatron_hf.models.shape import ModelShape
from galvatron_hf.plan import LayerStrategy, ParallelPlan, VocabularyStrategy


def mixed_plan(world_size: int, layers: int) -> ParallelPlan:
    """Returns a plan of two micro-batches and four alternating kinds of layers."""
    turns = (
        LayerStrategy(tensor=2, megatron_sp=True, sharding="zero2"),
        LayerStrategy(ulysses=2),
        LayerStrategy(shard_degree=world_size // 2),
        LayerStrategy(tensor=2, sharding="replicate", recompute="full"),
    )
    return ParallelPlan(
        world_size=world_size,
        stacks={"decoder": layers},
        micro_batches=2,
        layers=tuple(turns[index % len(turns)] for index in range(layers)),
        embedding=VocabularyStrategy(tensor=2),
        head=VocabularyStrategy(tensor=2),
    )


def traffic_table(step: Traffic) -> str:
    """Returns a Markdown table of one step's collectives on one rank: count and bytes by purpose."""
    lines = ["| for | kind | ranks | count | bytes |", "|---|---|--:|--:|--:|"]
    groups: dict[tuple[str, str, int], list[int]] = {}
    for item in step.collectives:
        group = groups.setdefault((item.source, item.kind, item.ranks), [0, 0])
        group[0] += item.count
        group[1] += item.count * item.bytes
    for (source, kind, ranks), (count, size) in groups.items():
        lines.append(f"| {source} | {kind} | {ranks} | {count} | {size:,} |")
    lines.append(f"| **all** | | | **{step.count()}** | **{step.bytes():,}** |")
    return "\n".join(lines)


def example_table() -> str:
    """Returns the table of rank 0 of 4 in `mixed_plan`, for the default model and batch of overhead.py."""
    shape = ModelShape.llama(vocab=4096, hidden=320, intermediate=832, layers=6, heads=8, kv_heads=4)
    return traffic_table(step_traffic(mixed_plan(4, 6), shape, rows=8, length=512))


def comparison(calls: Counter[tuple[str, int, int]], step: Traffic) -> str:
    """Compares recorded `calls` of a [`CollectiveRecorder`] with the formula, by kind."""
    wanted: Counter[tuple[str, int, int]] = Counter()
    for item in step.collectives:
        wanted[item.kind, item.ranks, item.bytes] += item.count
    seen, formula = totals(calls), totals(wanted)
    lines = [f"{'kind':16s}{'counted':>9s}{'formula':>9s}{'bytes counted':>17s}{'bytes formula':>17s}"]
    for kind in sorted(seen.keys() | formula.keys()):
        (count, size), (wanted_count, wanted_size) = seen.get(kind, (0, 0)), formula.get(kind, (0, 0))
        lines.append(f"{kind:16s}{count:9d}{wanted_count:9d}{size:17,d}{wanted_size:17,d}")
    lines.append("equal, call by call" if calls == wanted else "DIFFERENT: " + str((calls - wanted, wanted - calls)))
    return "\n".join(lines)
