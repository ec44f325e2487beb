# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Translates a plan into the terms of Galvatron's formulas (galvatron_formulas.py), or says why it cannot."""

from collections.abc import Iterator
from dataclasses import dataclass

from galvatron_profiles import GalvatronProfiles

from galvatron_hf.plan import LayerStrategy, ParallelPlan, VocabularyStrategy


ENGINES = ("main", "240")


@dataclass(frozen=True, kw_only=True)
class Part:
    """One layer, or the vocabulary, on the R ranks of a stage."""

    ranks: int
    degree: int
    ulysses: bool
    sharding: str
    shard_degree: int
    recompute: bool = False

    @property
    def data(self) -> int:
        """Number of data ranks."""
        return self.ranks // self.degree

    @property
    def sharing(self) -> int:
        """Number of ranks with the same piece of the weights."""
        return self.ranks if self.ulysses else self.data

    @property
    def tensor(self) -> int:
        """Number of pieces of the weights."""
        return 1 if self.ulysses else self.degree


@dataclass(frozen=True, kw_only=True)
class Case:
    """A plan in the terms of the formulas."""

    engine: str
    profiles: GalvatronProfiles
    global_batch: int
    micro_batches: int
    schedule: str
    ranks: int
    stages: tuple[tuple[Part, ...], ...]
    ends: tuple[Part, Part]

    @property
    def main(self) -> bool:
        return self.engine == "main"

    @property
    def pipeline(self) -> int:
        return len(self.stages)

    @property
    def vocabulary(self) -> list[tuple[int, str, Part]]:
        """Yields (stage, table, part) for each table of the profiles: both ends together, or each separately."""
        if self.pipeline == 1 and self.ends[0] == self.ends[1]:
            return [(0, "whole", self.ends[0])]
        return [(0, "first", self.ends[0]), (self.pipeline - 1, "last", self.ends[1])]

    def rows(self, part: Part) -> int:
        """Returns the rows of a data rank in a micro-batch."""
        return self.global_batch // self.micro_batches // part.data

    def link_ms(self, part: Part, ranks: int) -> float:
        """Returns ms per MiB reduced over `ranks` of the ranks that share the part's weights."""
        return self.profiles.ms_per_mib(ranks, consecutive=part.tensor == 1)


def case_of(profiles: GalvatronProfiles, plan: ParallelPlan, global_batch: int | None, engine: str) -> Case:
    """Returns the plan in the terms of the formulas.

    Raises:
        `ValueError`: if the formulas do not cover such a plan.
    """
    if engine not in ENGINES:
        raise ValueError(f"engine is {engine!r}: use 'main' or '240'")
    if plan.world_size != profiles.world_size:
        raise ValueError(
            f"the plan is for {plan.world_size} ranks, but the profiles are of {profiles.world_size} devices: "
            f"use a plan with world_size={profiles.world_size}"
        )
    _check(plan)
    global_batch = _global_batch(plan, global_batch)
    ranks = len(plan.stages[0].ranks)
    if engine == "main" and plan.micro_batch_count < len(plan.stages):
        raise ValueError(
            f"micro_batches is {plan.micro_batch_count}, but engine main takes no fewer than the {len(plan.stages)} "
            f"stages: use micro_batches={len(plan.stages)}"
        )
    layers = [_layer_part(layer, ranks) for layer in plan.layers]
    rows = global_batch / plan.micro_batch_count
    case = Case(
        engine=engine,
        profiles=profiles,
        global_batch=global_batch,
        micro_batches=plan.micro_batch_count,
        schedule=plan.schedule,
        ranks=ranks,
        stages=tuple(tuple(layers[slice(*stage.layers)]) for stage in plan.stages),
        ends=tuple(_vocabulary_part(plan, end, ranks, rows, engine) for end in (plan.embedding, plan.head)),
    )
    for part in {*layers, *case.ends}:
        if rows % part.data:
            raise ValueError(
                f"{global_batch} rows in {plan.micro_batch_count} micro-batches do not give {part.data} data ranks as "
                "many each, and the formulas round: use a global batch divisible by "
                f"{plan.micro_batch_count * part.data}"
            )
    return case


def extensions_of(plan: ParallelPlan) -> Iterator[str]:
    """Returns the extensions of the formulas that a plan needs, beyond Galvatron's files or search."""
    ranks = len(plan.stages[0].ranks)
    sizes = [stage.layers[1] - stage.layers[0] for stage in plan.stages]
    if len(set(sizes[:-1])) > 1 or (sizes[0] != plan.num_layers // len(sizes)):
        yield f"stages have {sizes} layers, but its search cuts evenly: the same sums over these stages"
    kinds = {layer.sharding for layer in plan.layers if layer.data_degree(ranks) > 1}
    if {"replicate", "zero2"} <= kinds:
        yield "layers are 'replicate' and 'zero2', but it has one of them next to ZeRO-3: each by its own formula"
    if any(layer.ulysses == ranks > 1 and layer.sharding == "zero3" for layer in plan.layers):
        yield "a layer has ZeRO-3 with one data rank, which its search leaves out: states shared by the Ulysses ranks"
    parts = [*plan.layers, plan.embedding, plan.head]
    sharded = [part for part in parts if part.sharding != "replicate"]
    if any(part.resolved_shard_degree(ranks) != ranks // part.tensor for part in sharded):
        yield (
            "states are sharded over fewer ranks than share them: state share and gathers are counted for the "
            "shard_degree ranks, the gradients' reduction for all"
        )
    if plan.embedding != plan.head:
        yield (
            "embedding and head differ, but it has one strategy for both: each by its own, and from the tables of a "
            "pipeline's first and last stage"
        )


def _check(plan: ParallelPlan) -> None:
    if plan.schedule not in ("1f1b", "gpipe"):
        raise ValueError(f"schedule is {plan.schedule!r}, which Galvatron does not have: use '1f1b' or 'gpipe'")
    if plan.sequence_groups is not None:
        raise ValueError("sequence_groups is given, which Galvatron does not have: use sequence_groups=null")
    ranks = len(plan.stages[0].ranks)
    for index, stage in enumerate(plan.stages):
        if stage.ranks != tuple(range(index * ranks, (index + 1) * ranks)):
            raise ValueError(
                f"stages[{index}] has ranks {list(stage.ranks)}, but Galvatron's formulas are for stages of equally "
                f"many consecutive ranks: use {ranks} ranks from {index * ranks} on"
            )
    for index, layer in enumerate(plan.layers):
        if layer.context > 1:
            problem, fix = f"context={layer.context}, whose ring the formulas leave out", "context=1"
        elif layer.expert > 1:
            problem, fix = f"expert={layer.expert}, and the profiles are of dense layers", "expert=1"
        elif layer.tensor > 1 and layer.ulysses > 1:
            problem, fix = f"tensor={layer.tensor} and ulysses={layer.ulysses}, and Galvatron has one", "ulysses=1"
        elif layer.tensor > 1 and not layer.megatron_sp:
            problem = f"tensor={layer.tensor} without megatron_sp, which was not profiled and engine main refuses"
            fix = "megatron_sp=true"
        else:
            continue
        raise ValueError(f"layer {index} has {problem}: use {fix}")


def _global_batch(plan: ParallelPlan, given: int | None) -> int:
    kept = plan.meta.get("galvatron")
    found = kept.get("global_bsz") if isinstance(kept, dict) else None
    if given is None and found is None:
        raise ValueError("the plan does not name its global batch: pass global_batch")
    return found if given is None else given


def _layer_part(layer: LayerStrategy, ranks: int) -> Part:
    degree = layer.tensor * layer.ulysses
    return Part(
        ranks=ranks,
        degree=degree,
        ulysses=layer.ulysses > 1,
        sharding=_sharding(layer.sharding, ranks // degree, layer.ulysses > 1),
        shard_degree=layer.resolved_shard_degree(ranks),
        recompute=layer.recompute == "full",
    )


def _vocabulary_part(plan: ParallelPlan, end: VocabularyStrategy, ranks: int, rows: float, engine: str) -> Part:
    """Returns the embedding or the head.

    If its weights are whole, positions are split (Galvatron's `vsp`) over the `vtp` ranks of the plan's file, else
    over the fewest ranks that leave each group whole rows.
    """
    kept = plan.meta.get("galvatron")
    kept = kept if isinstance(kept, dict) else {}
    degree = end.tensor
    if degree == 1 and kept.get("vsp") == 1:
        degree = kept.get("vtp", 1)
    elif degree == 1:
        while degree < ranks and rows % (ranks // degree):
            degree *= 2
    ulysses = end.tensor == 1 and degree > 1
    return Part(
        ranks=ranks,
        degree=degree,
        ulysses=ulysses,
        # 2.4.0 takes the share of one rank for sharded, 0.3% above the whole.
        sharding=_sharding(end.sharding, ranks // degree, ulysses) if engine == "main" else end.sharding,
        shard_degree=end.resolved_shard_degree(ranks),
    )


def _sharding(sharding: str, data: int, ulysses: bool) -> str:
    """Returns the sharding: engines treat one data rank as unsharded; ZeRO-3 over Ulysses ranks is our reading."""
    return "replicate" if data == 1 and (sharding == "zero2" or not ulysses) else sharding
