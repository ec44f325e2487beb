# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""A branch of the search made of profiles: which strategies its numbers stand for, and the plan that a solution is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from galvatron_hf.plan import LayerStrategy, ParallelPlan, Stage, VocabularyStrategy
from galvatron_hf.planner.branch import Branch, Choice, Options
from galvatron_hf.planner.cost import CostModel, Costs, Workload
from galvatron_hf.planner.moves import Split
from galvatron_hf.planner.pareto import nondominated
from galvatron_hf.profiler.hardware_profile import HardwareProfile
from galvatron_hf.profiler.model_profile import ModelProfile


PICOSECONDS = 10**9  # in a millisecond


@dataclass(frozen=True, kw_only=True)
class Shape:
    """
    How a step is cut before its layers are looked at.

    Args:
        pipeline (`int`): Stages, each of world_size / pipeline consecutive ranks.
        micro_batches (`int`): Of a step.
        schedule (`str`): "1f1b" or "gpipe".
        rows (`int`): Of a micro-batch, with those that are added so that every data rank has one.
    """

    pipeline: int
    micro_batches: int
    schedule: str
    rows: int

    def in_flight(self) -> np.ndarray:
        """(p,) micro-batches whose activations a stage keeps at most."""
        if self.schedule == "gpipe":
            return np.full(self.pipeline, self.micro_batches)
        return np.minimum(self.micro_batches, np.arange(self.pipeline, 0, -1))


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A branch, and what its options are.

    Attributes:
        branch ([`Branch`]): the numbers.
        shape ([`Shape`]): of the step.
        ranks (`int`): of each stage.
        strategies (`list[LayerStrategy]`): by option.
        embeddings, heads (`list[VocabularyStrategy]`): by start and by finish.
    """

    branch: Branch
    shape: Shape
    ranks: int
    strategies: list[LayerStrategy]
    embeddings: list[VocabularyStrategy]
    heads: list[VocabularyStrategy]

    def plan(self, choice: Choice, workload: Workload, tied: bool) -> ParallelPlan:
        """The plan that a solution stands for."""
        head = self.heads[choice.finish]
        embedding = self.embeddings[choice.start]
        stages = tuple(
            Stage(ranks=tuple(range(stage * self.ranks, (stage + 1) * self.ranks)), layers=layers)
            for stage, layers in enumerate(zip(choice.bounds[:-1], choice.bounds[1:], strict=True))
        )
        return ParallelPlan(
            world_size=self.ranks * len(stages),
            stacks={"decoder": self.branch.layers},
            micro_batches=self.shape.micro_batches,
            schedule=self.shape.schedule,
            precision=workload.precision,
            stages=stages,
            layers=tuple(self.strategies[option] for option in choice.options),
            embedding=embedding,
            head=embedding if tied and len(stages) == 1 else head,
        )


def make_problem(
    hardware: HardwareProfile,
    model: ModelProfile,
    workload: Workload,
    shape: Shape,
    budget: int,
    strategies: Sequence[LayerStrategy],
    embeddings: Sequence[VocabularyStrategy],
    heads: Sequence[VocabularyStrategy],
    *,
    world_size: int,
    prune: bool = True,
) -> Problem:
    """
    Prices every strategy.

    Tied weights on one stage are one unit, of which the embedding's strategy decides: heads then are the same list,
    of one tensor degree, and all of their cost is the start's.

    Args:
        prune (`bool`): Whether to leave out strategies without which the best plan is as good. A plan that is only to
            be priced keeps all.
    """
    ranks = world_size // shape.pipeline
    costs = CostModel(hardware, model, workload, ranks, shape.rows)
    numbers = _Numbers(costs, shape, model)
    strategies, columns = numbers.layers(list(strategies))
    shared = model.tied and shape.pipeline == 1
    embeddings, starts = numbers.ends(list(embeddings), "both" if shared else "embedding", prune)
    heads, finishes = numbers.ends(list(heads)[:1] if shared else list(heads), "none" if shared else "head", prune)
    move_a, move_b = numbers.moves()
    stages = shape.pipeline
    received = np.array([(stage > 0) + (stage < stages - 1) for stage in range(stages)])
    sent = picoseconds(costs.send_ms()) if stages > 1 else 0
    branch = Branch(
        kinds=np.array(model.layers),
        allowed=np.ones(columns["a"].shape, dtype=bool),
        move_a=move_a,
        move_b=move_b,
        boundary=numbers.index(costs.boundary()),
        in_flight=shape.in_flight(),
        stage_a=received * sent,
        stage_b=received * sent * (shape.micro_batches - 1),
        stage_memory=received * costs.boundary_bytes,
        starts=starts,
        finishes=finishes,
        budget=budget,
        **columns,
    )
    if prune:
        kept = branch.worth_having()
        branch = branch.restricted(kept)
        strategies = [strategy for strategy, worth in zip(strategies, kept, strict=True) if worth]
    return Problem(
        branch=branch,
        shape=shape,
        ranks=ranks,
        strategies=strategies,
        embeddings=embeddings,
        heads=heads,
    )


def picoseconds(ms: np.ndarray | float) -> np.ndarray:
    """Milliseconds as whole picoseconds."""
    return np.rint(np.asarray(ms, dtype=float) * PICOSECONDS).astype(np.int64)


class _Numbers:
    """Costs as integers of A and B, and layouts as indices."""

    def __init__(self, costs: CostModel, shape: Shape, model: ModelProfile):
        self.costs, self.shape, self.model = costs, shape, model
        self.splits: list[Split] = [costs.boundary()]

    def index(self, split: Split) -> int:
        """The layout's number."""
        if split not in self.splits:
            self.splits.append(split)
        return self.splits.index(split)

    def layers(self, strategies: list[LayerStrategy]) -> tuple[list[LayerStrategy], dict]:
        """The strategies, and columns (K, S); `layout` (S,)."""
        kinds = [self._columns(self.costs.layer(kind, strategies)) for kind in range(len(self.model.kinds))]
        columns = {name: np.stack([kind[name] for kind in kinds]) for name in kinds[0]}
        splits = [Split.of_layer(strategy, self.costs.ranks) for strategy in strategies]
        return strategies, {**columns, "layout": np.array([self.index(split) for split in splits])}

    def _kept(self, columns: dict[str, np.ndarray], layout: np.ndarray) -> np.ndarray:
        """Indices of what nothing of the same layout is at most equal to in every column."""
        table = np.concatenate([columns[name] for name in columns]).T
        found = [np.nonzero(layout == one)[0] for one in np.unique(layout)]
        return np.sort(np.concatenate([members[nondominated(table[members])] for members in found]))

    def _columns(self, costs: Costs) -> dict[str, np.ndarray]:
        """Of one stage nothing waits for another: what it costs in a step is all in A."""
        again = self.shape.micro_batches - 1
        passed = picoseconds(costs.forward_ms + costs.backward_ms)
        once, update = picoseconds(costs.sync_ms), picoseconds(costs.update_ms)
        alone = self.shape.pipeline == 1
        return {
            "a": passed + once + (again * passed + update) * alone,
            "b": (again * passed + update) * (not alone),
            "state": np.ceil(costs.state_bytes).astype(np.int64),
            "activation": np.ceil(costs.activation_bytes).astype(np.int64),
            "working": np.ceil(costs.working_bytes).astype(np.int64),
        }

    def ends(
        self, strategies: list[VocabularyStrategy], which: str, prune: bool
    ) -> tuple[list[VocabularyStrategy], Options]:
        """Options of the embedding, the head, both as one, or of nothing."""
        layout = np.array(
            [self.index(Split.of_vocabulary(one.tensor, self.costs.ranks, self.costs.rows)) for one in strategies]
        )
        priced = [self._end(strategy, which) for strategy in strategies]
        columns = {name: np.array([int(one[name]) for one in priced]) for name in priced[0]}
        if prune and len(strategies) > 1:
            kept = self._kept({name: column[None] for name, column in columns.items()}, layout)
            columns = {name: column[kept] for name, column in columns.items()}
            strategies, layout = [strategies[index] for index in kept], layout[kept]
        return strategies, Options(**columns, layout=layout)

    def _end(self, strategy: VocabularyStrategy, which: str) -> dict[str, np.ndarray]:
        nothing = dict.fromkeys(("a", "b", "memory", "working"), 0)
        if which == "none":
            return nothing
        model, found = self.model, dict(nothing)
        parts = {"embedding": [model.embedding], "head": [model.head], "both": [model.embedding, model.head]}[which]
        for part in parts:
            is_head = part is model.head
            owner = replace(part, weights=()) if which == "both" and not is_head else part
            costs = self.costs.end(owner, strategy, is_head=is_head)
            columns = self._columns(costs)
            flight = int(self.shape.in_flight()[-1 if which == "head" else 0])
            found["a"] += columns["a"]
            found["b"] += columns["b"]
            found["memory"] += columns["state"] + flight * columns["activation"]
            found["working"] = max(found["working"], columns["working"])
        return found

    def moves(self) -> tuple[np.ndarray, np.ndarray]:
        """(Y, Y) A and B of a change of layout."""
        passed = picoseconds([[self.costs.move_ms(one, other) for other in self.splits] for one in self.splits])
        again = (self.shape.micro_batches - 1) * passed
        return (passed + again, 0 * again) if self.shape.pipeline == 1 else (passed, again)
