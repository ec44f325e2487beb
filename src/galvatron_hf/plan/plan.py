# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Defines the parallel plan: which ranks compute which layer, and how. The planner writes it, the runtime reads it."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from galvatron_hf.plan.serialization import (
    check_covered,
    check_next_range,
    check_stacks,
    check_version,
    copy_meta,
    fold,
    plan_arguments,
    read_object,
    write_file,
    write_text,
)
from galvatron_hf.plan.strategies import (
    DEFAULT_STACK,
    LayerStrategy,
    Precision,
    SequenceGroups,
    Stage,
    VocabularyStrategy,
)
from galvatron_hf.plan.table import plan_text
from galvatron_hf.plan.validation import MAX_MICRO_BATCHES, MAX_RANKS, check_choice, check_int, divisors, nearest, show
from galvatron_hf.utils.drawing import drawing


if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["LayerStrategy", "ParallelPlan", "Precision", "SequenceGroups", "Stage", "VocabularyStrategy"]

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble")


@dataclass(frozen=True, kw_only=True)
class ParallelPlan:
    """
    States how `world_size` ranks compute a model, in schema version 1.

    The constructor checks that the plan is possible on `world_size` ranks for some model.
    [`~galvatron_hf.plan.supported.unsupported`] lists the parts that this release cannot run.

    Args:
        version (`int`, defaults to 1): Schema version.
        world_size (`int`): Number of ranks.
        stacks (`Mapping[str, int]`): Layers of each stack in execution order (`encoder` before `decoder`); layers have
            one global index over all stacks.
        micro_batches (`int`, *optional*): Pieces into which the global batch of an optimizer step is split; None takes
            the training arguments' `gradient_accumulation_steps`, and 1 without them.
        schedule (`str`, defaults to `"1f1b"`): `"gpipe"` (all forwards, then all backwards), `"1f1b"`
            (arXiv 2104.04473), `"interleaved"` (1F1B over virtual stages) or `"zero_bubble"` (arXiv 2401.10241).
        precision ([`Precision`], *optional*): Number formats; None takes them from the training arguments.
        stages (`tuple[Stage, ...]`, *optional*): Stages in execution order; None is one stage of all ranks and layers.
            Ranks that occur again make a virtual stage.
        layers (`tuple[LayerStrategy, ...]`): One strategy per layer.
        embedding ([`VocabularyStrategy`], *optional*): Strategy of the embedding, on the ranks of the first stage.
        head ([`VocabularyStrategy`], *optional*): Strategy of the head, on the ranks of the last stage.
        sequence_groups ([`SequenceGroups`], *optional*): Groups chosen per micro-batch; needs ulysses = context = 1.
        meta (`dict`, *optional*): JSON values that are kept and never interpreted.

    Raises:
        `ValueError`: in one sentence with the value, the reason and the nearest value that works.
    """

    version: int = 1
    world_size: int
    stacks: Mapping[str, int] = field(hash=False)
    micro_batches: int | None = None
    schedule: str = "1f1b"
    precision: Precision | None = None
    stages: tuple[Stage, ...] | None = None
    layers: tuple[LayerStrategy, ...]
    embedding: VocabularyStrategy = field(default_factory=VocabularyStrategy)
    head: VocabularyStrategy = field(default_factory=VocabularyStrategy)
    sequence_groups: SequenceGroups | None = None
    meta: dict[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self):
        check_version(self.version)
        check_int("world_size", self.world_size, high=MAX_RANKS)
        num_layers = check_stacks(self.stacks)
        object.__setattr__(self, "stacks", dict(self.stacks))
        if self.micro_batches is not None:
            check_int("micro_batches", self.micro_batches, high=MAX_MICRO_BATCHES)
        check_choice("schedule", self.schedule, SCHEDULES)
        if self.stages is None:
            whole = Stage(ranks=tuple(range(self.world_size)), layers=(0, num_layers))
            object.__setattr__(self, "stages", (whole,))
        object.__setattr__(self, "meta", copy_meta(self.meta))
        _check_parts(self, num_layers)
        _check_stages(self, num_layers)
        _check_virtual_stages(self)
        _check_degrees(self)
        _check_sequence_groups(self)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def shares_documents(self) -> bool:
        """Returns whether data ranks may share documents of packed rows."""
        return self.sequence_groups is not None or any(layer.context > 1 for layer in self.layers)

    @property
    def most_data_ranks(self) -> int:
        """Returns the data ranks of the layer that has most of them."""
        return max(
            self.layers[layer].data_degree(len(stage.ranks)) for stage in self.stages for layer in range(*stage.layers)
        )

    @property
    def micro_batch_count(self) -> int:
        """Returns the number of micro-batches of a step, 1 if the plan does not say it."""
        return self.micro_batches or 1

    @property
    def rank_groups(self) -> list[tuple[int, ...]]:
        """Returns the distinct ranks of the stages in the order of first occurrence; virtual stages share them."""
        return list(dict.fromkeys(stage.ranks for stage in self.stages))

    @classmethod
    def from_json(cls, source: str | os.PathLike | Mapping[str, Any]) -> "ParallelPlan":
        """Reads a plan from the path of a JSON file, JSON text, or the parsed object. Raises `ValueError` in one
        sentence if the source is not a possible plan.
        """
        return cls(**plan_arguments(read_object(source)))

    def to_json(self, path: str | os.PathLike | None = None) -> str:
        """Returns the plan as JSON text with equal neighbouring layers in one span; writes it to `path` if given."""
        text = write_text(self)
        if path is not None:
            write_file(path, text)
        return text

    @classmethod
    def uniform(
        cls,
        world_size: int,
        num_layers: int | Mapping[str, int],
        *,
        pipeline: int = 1,
        micro_batches: int | None = None,
        schedule: str = "1f1b",
        precision: Precision | None = None,
        embedding: VocabularyStrategy | None = None,
        head: VocabularyStrategy | None = None,
        meta: Mapping[str, Any] | None = None,
        **strategy: Any,
    ) -> "ParallelPlan":
        """Returns a plan with one strategy for all layers.

        Args:
            world_size (`int`): Number of ranks.
            num_layers (`int` or `Mapping[str, int]`): Layers of one stack called `decoder`, or of each stack.
            pipeline (`int`, defaults to 1): Stages, each with world_size / pipeline consecutive ranks and an even
                share of the layers (earlier stages take the remainder).
            micro_batches, schedule, precision, meta: As in [`ParallelPlan`].
            embedding, head ([`VocabularyStrategy`], *optional*): By default, the layers' tensor degree and sharding.
            **strategy: The fields of [`LayerStrategy`], such as tensor, ulysses and sharding.

        Raises:
            `ValueError`: in one sentence, if the plan is impossible.
        """
        check_int("world_size", world_size, high=MAX_RANKS)
        stacks = num_layers if isinstance(num_layers, Mapping) else {DEFAULT_STACK: num_layers}
        total = check_stacks(stacks)
        layer = LayerStrategy(**strategy)
        vocabulary = VocabularyStrategy(tensor=layer.tensor, sharding=layer.sharding, shard_degree=layer.shard_degree)
        return cls(
            world_size=world_size,
            stacks=stacks,
            micro_batches=micro_batches,
            schedule=schedule,
            precision=precision,
            stages=even_stages(world_size, total, pipeline),
            layers=(layer,) * total,
            embedding=embedding or vocabulary,
            head=head or vocabulary,
            meta=dict(meta or {}),
        )

    def __str__(self) -> str:
        return plan_text(self)

    def plot(self) -> "Figure":
        """Draws the plan with matplotlib; see [`~galvatron_hf.plots.plan_diagram.plan_figure`]. Raises ImportError if
        matplotlib is missing.
        """
        return drawing("plan_diagram").plan_figure(self)

    def check_tied(self) -> None:
        """Raises `ValueError` if embedding and head cannot share one tied weight under this plan."""
        same_ranks = self.stages[0].ranks == self.stages[-1].ranks
        if same_ranks and self.embedding != self.head:
            raise ValueError(
                "embedding and head differ, but their weights are tied and on the same ranks: "
                "give head the fields of embedding"
            )
        if self.embedding.tensor != self.head.tensor:
            raise ValueError(
                f"embedding has tensor={self.embedding.tensor} and head tensor={self.head.tensor}, but their weights "
                f"are tied: use tensor={self.embedding.tensor} for head"
            )


def even_stages(world_size: int, num_layers: int, pipeline: int) -> tuple[Stage, ...]:
    """Returns `pipeline` stages of equally many consecutive ranks; earlier stages take the remaining layers."""
    check_int("pipeline", pipeline, high=MAX_RANKS)
    if world_size % pipeline or pipeline > num_layers:
        fitting = nearest(pipeline, [degree for degree in divisors(world_size) if degree <= num_layers])
        reason = f"does not divide the {world_size} ranks" if world_size % pipeline else "is more than the layers"
        raise ValueError(f"pipeline is {pipeline}, which {reason}: use pipeline={fitting}")
    size = world_size // pipeline
    share, more = divmod(num_layers, pipeline)
    starts = [index * share + min(index, more) for index in range(pipeline + 1)]
    return tuple(
        Stage(ranks=tuple(range(index * size, (index + 1) * size)), layers=(starts[index], starts[index + 1]))
        for index in range(pipeline)
    )


def _check_parts(plan: ParallelPlan, num_layers: int) -> None:
    for name, kind in (("stages", Stage), ("layers", LayerStrategy)):
        value = getattr(plan, name)
        if not isinstance(value, (list, tuple)) or not value or any(not isinstance(item, kind) for item in value):
            raise ValueError(f"{name} is {show(value)}, which is not a tuple of {kind.__name__}: give such a tuple")
        object.__setattr__(plan, name, tuple(value))
    for name in ("embedding", "head"):
        if not isinstance(getattr(plan, name), VocabularyStrategy):
            raise ValueError(f"{name} is {show(getattr(plan, name))}: give a VocabularyStrategy")
    for name, kind in (("precision", Precision), ("sequence_groups", SequenceGroups)):
        value = getattr(plan, name)
        if value is not None and not isinstance(value, kind):
            raise ValueError(f"{name} is {show(value)}: give a {kind.__name__} or None")
    if len(plan.layers) != num_layers:
        raise ValueError(
            f"layers has {len(plan.layers)} strategies, but the stacks have {num_layers} layers: give {num_layers}"
        )


def _check_stages(plan: ParallelPlan, num_layers: int) -> None:
    done = 0
    owner: dict[int, int] = {}
    for index, stage in enumerate(plan.stages):
        start, end = stage.layers
        check_next_range("stages", "stage", start, end, done, num_layers)
        done = end
        if max(stage.ranks) >= plan.world_size:
            raise ValueError(
                f"stages[{index}] has rank {max(stage.ranks)}, but world_size is {plan.world_size}: "
                f"use ranks 0 to {plan.world_size - 1} or world_size={max(stage.ranks) + 1}"
            )
        earlier = {owner.setdefault(rank, index) for rank in stage.ranks} - {index}
        if earlier and stage.ranks != plan.stages[min(earlier)].ranks:
            rank = next(rank for rank in stage.ranks if owner[rank] == min(earlier))
            raise ValueError(
                f"rank {rank} is in stages[{min(earlier)}] and in stages[{index}], whose ranks differ: "
                "give both the same ranks in one order (virtual stages), or no rank in common"
            )
    check_covered("stages", "stage", done, num_layers)
    if len(owner) < plan.world_size:
        idle = next(rank for rank in range(plan.world_size) if rank not in owner)
        raise ValueError(
            f"world_size is {plan.world_size}, but rank {idle} is in no stage: "
            f"add it to one or use world_size={len(owner)} with ranks 0 to {len(owner) - 1}"
        )


def _check_virtual_stages(plan: ParallelPlan) -> None:
    lists, distinct = [stage.ranks for stage in plan.stages], plan.rank_groups
    if len(lists) == len(distinct):
        return
    if plan.schedule not in ("interleaved", "zero_bubble"):
        raise ValueError(
            f"schedule is {plan.schedule!r}, which cannot run two stages on the same ranks (virtual stages): "
            "use 'interleaved'"
        )
    rounds = [lists[start : start + len(distinct)] for start in range(0, len(lists), len(distinct))]
    loop = all(part == distinct for part in rounds)
    there_and_back = plan.schedule == "zero_bubble" and lists == distinct + distinct[::-1]
    if not loop and not there_and_back:
        raise ValueError(
            f"stages list ranks again in an order that {plan.schedule!r} cannot run: list the {len(distinct)} "
            "different groups of ranks in one order, then again in the same order"
        )


def _check_degrees(plan: ParallelPlan) -> None:
    for stage in plan.stages:
        start, end = stage.layers
        for (first, _), strategy in fold(plan.layers[start:end]):
            _fits(f"layer {start + first}", strategy, len(stage.ranks))
    _fits("embedding", plan.embedding, len(plan.stages[0].ranks))
    _fits("head", plan.head, len(plan.stages[-1].ranks))


def _fits(where: str, strategy: LayerStrategy | VocabularyStrategy, ranks: int) -> None:
    try:
        strategy.check_ranks(ranks)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _check_sequence_groups(plan: ParallelPlan) -> None:
    groups = plan.sequence_groups
    if groups is None:
        return
    for stage in plan.stages:
        for layer in range(*stage.layers):
            strategy = plan.layers[layer]
            if strategy.context > 1:
                raise ValueError(
                    f"layer {layer} has context={strategy.context}, but sequence_groups chooses groups per "
                    "micro-batch: use context=1"
                )
    most = plan.most_data_ranks
    if groups.max_degree > most:
        raise ValueError(
            f"sequence_groups has max_degree={groups.max_degree}, but layers have {most} data ranks at most: "
            f"use max_degree={most}"
        )
