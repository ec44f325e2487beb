# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""A branch of the search made of profiles: which strategies its numbers stand for, and the plan that a solution is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from galvatron_hf.plan import LayerStrategy, ParallelPlan, Stage, VocabularyStrategy
from galvatron_hf.planner.branch import Branch, Choice, Options
from galvatron_hf.planner.cost import CostModel, Costs, Workload, layer_split, vocabulary_split
from galvatron_hf.planner.moves import Split
from galvatron_hf.planner.pareto import nondominated
from galvatron_hf.profiler.model_profile import ModelProfile


PICOSECONDS = 10**9  # in a millisecond
_NONE = ()  # weights that the other end has


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

    def ahead(self) -> np.ndarray:
        """(p,) micro-batches that go forward on a stage of 1F1B before its first one comes back; 0 if not all can."""
        if self.schedule == "gpipe" or self.micro_batches < self.pipeline:
            return np.zeros(self.pipeline, dtype=np.int64)
        return np.arange(self.pipeline - 1, -1, -1)

    def least_step(self) -> float:
        """A step of 1F1B over the time of one micro-batch on all stages, under the best cut there could be.

        With x_i of that time on stage i, m x_i on the whole at least, and S_i behind stage i, the paths of `branch.py`
        say that T = 1 + t needs x_i <= (t + S_i) / (m - 1) and (m - 1 - k_i) x_i <= t - S_i. From the last stage on,
        as much as that allows is best for all before it.
        """
        others, behind = self.micro_batches - 1, 0.0
        if not self.ahead().any():
            return 1 + others / self.pipeline
        for ahead in reversed(self.ahead().tolist()):
            most = (1 + behind) / others
            behind += most if ahead == others else min(most, (1 - behind) / (others - ahead))
        return 1 + 1 / behind

    def at_once(self) -> np.ndarray:
        """(p,) whether a stage keeps all micro-batches before its first backward."""
        return self.in_flight() == self.micro_batches


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


def boundary_copies(shape: Shape) -> np.ndarray:
    """(p,) hidden states of stage boundaries that a rank has: what was sent of each micro-batch in flight, and what
    comes from either side."""
    stages = np.arange(shape.pipeline)
    return (stages > 0) + (stages < shape.pipeline - 1) * (1 + shape.in_flight())


class Draft:
    """
    A branch of which the costs of layers and ends are known, but not yet those of changes of layout.

    Tied weights on one stage are one unit, of which the embedding's strategy decides: heads then are the same list, of
    one tensor degree, and all of their cost is the start's.

    Args:
        costs ([`CostModel`]): For the stage's ranks and the micro-batch's rows.
        shape ([`Shape`]): Of the step.
        strategies (`Sequence[LayerStrategy]`), embeddings, heads (`Sequence[VocabularyStrategy]`): The options.

    Attributes:
        bound (`float`): below the cost of every solution: each layer has its cheapest option, memory does not count.
    """

    def __init__(
        self,
        costs: CostModel,
        shape: Shape,
        strategies: Sequence[LayerStrategy],
        embeddings: Sequence[VocabularyStrategy],
        heads: Sequence[VocabularyStrategy],
    ):
        self.costs, self.shape, self.strategies = costs, shape, list(strategies)
        model = costs.model
        self._numbers = numbers = _Numbers(costs, shape, model)
        self._columns = numbers.layers(self.strategies)
        shared = model.tied and shape.pipeline == 1
        self.embeddings = list(embeddings)
        self.heads = list(heads)[:1] if shared else list(heads)
        self._starts = numbers.ends(self.embeddings, "both" if shared else "embedding")
        self._finishes = numbers.ends(self.heads, "none" if shared else "head")
        self.bound = self._bound()

    def _bound(self) -> float:
        kinds, stages = np.array(self.costs.model.layers), self.shape.pipeline
        ends = [(one.a, one.b) for one in (self._starts, self._finishes)]

        def least(of_a: float, of_b: float) -> float:
            layers = (of_a * self._columns["a"] + of_b * self._columns["b"]).min(axis=1)[kinds].sum()
            return float(layers + sum((of_a * a + of_b * b).min() for a, b in ends))

        if not self.shape.ahead().any():
            return least(1.0, 1 / stages)
        # Of A alone, B being m - 1 times as much at least; or the mean A + B of stages; or anything between the two.
        step = self.shape.least_step()
        return max(least(share * step + (1 - share) / stages, (1 - share) / stages) for share in (0.0, 0.5, 0.9, 1.0))

    def problem(self, budget: int, *, prune: bool = True) -> Problem:
        """
        All of it.

        Args:
            budget (`int`): Bytes of a rank.
            prune (`bool`): Whether to leave out strategies without which the best plan is as good. A plan that is only
                to be priced keeps all.
        """
        shape, costs, stages = self.shape, self.costs, self.shape.pipeline
        starts, finishes, embeddings, heads = self._starts, self._finishes, self.embeddings, self.heads
        if prune:
            (embeddings, starts), (heads, finishes) = _pruned(embeddings, starts), _pruned(heads, finishes)
        move_a, move_b = self._numbers.moves()
        received = np.array([(stage > 0) + (stage < stages - 1) for stage in range(stages)])
        sent = picoseconds(costs.send_ms()) if stages > 1 else 0
        passed = received * sent + (np.arange(stages) > 0) * picoseconds(costs.later_stage_ms())
        once = (np.arange(stages) == 0) * picoseconds(costs.hardware.step_ms)
        branch = Branch(
            kinds=np.array(costs.model.layers),
            allowed=np.ones(self._columns["a"].shape, dtype=bool),
            move_a=move_a,
            move_b=move_b,
            boundary=self._numbers.index(costs.boundary()),
            in_flight=shape.in_flight(),
            at_once=shape.at_once(),
            stage_a=passed + once,
            stage_b=passed * (shape.micro_batches - 1),
            stage_memory=boundary_copies(shape) * costs.boundary_bytes,
            starts=starts,
            finishes=finishes,
            budget=budget,
            micro_batches=shape.micro_batches,
            ahead=shape.ahead(),
            **self._columns,
        )
        kept = np.arange(len(self.strategies))
        if prune:
            columns = (branch.a, branch.b, branch.state, branch.activation, branch.least, branch.working)
            kept = _kept(np.concatenate(columns), branch)
            branch = branch.restricted(kept)
            worth = np.nonzero(branch.worth_having())[0]
            kept, branch = kept[worth], branch.restricted(worth)
        return Problem(
            branch=branch,
            shape=shape,
            ranks=costs.ranks,
            strategies=[self.strategies[index] for index in kept],
            embeddings=embeddings,
            heads=heads,
        )


def _kept(columns: np.ndarray, options: Branch | Options) -> np.ndarray:
    """Indices of what nothing of the same layout is at most equal to in every column (C, S)."""
    found = [np.nonzero(options.layout == one)[0] for one in np.unique(options.layout)]
    return np.sort(np.concatenate([members[nondominated(columns.T[members])] for members in found]))


def _pruned(strategies: list[VocabularyStrategy], options: Options) -> tuple[list[VocabularyStrategy], Options]:
    kept = _kept(np.stack([options.a, options.b, options.memory, options.working]), options)
    names = ("a", "b", "memory", "working", "layout")
    return [strategies[index] for index in kept], Options(**{name: getattr(options, name)[kept] for name in names})


def picoseconds(ms: np.ndarray | float) -> np.ndarray:
    """Milliseconds as whole picoseconds."""
    return np.rint(np.asarray(ms, dtype=float) * PICOSECONDS).astype(np.int64)


class _Numbers:
    """Costs as integers of A and B, and layouts as indices."""

    def __init__(self, costs: CostModel, shape: Shape, model: ModelProfile):
        self.costs, self.shape, self.model = costs, shape, model
        self.splits: dict[Split, int] = {costs.boundary(): 0}

    def index(self, split: Split) -> int:
        """The layout's number."""
        return self.splits.setdefault(split, len(self.splits))

    def layers(self, strategies: list[LayerStrategy]) -> dict[str, np.ndarray]:
        """Columns (K, S); `layout` (S,)."""
        kinds = [self._columns(self.costs.layer(kind, strategies)) for kind in range(len(self.model.kinds))]
        columns = {name: np.stack([kind[name] for kind in kinds]) for name in kinds[0]}
        splits = [layer_split(strategy, self.costs.ranks) for strategy in strategies]
        return {**columns, "layout": np.array([self.index(split) for split in splits])}

    def _columns(self, costs: Costs) -> dict[str, np.ndarray]:
        """Of one stage nothing waits for another: what it costs in a step is all in A."""
        again = self.shape.micro_batches - 1
        passed = picoseconds(costs.forward_ms + costs.backward_ms)
        once, update = picoseconds(costs.sync_ms), picoseconds(costs.update_ms)
        alone = self.shape.pipeline == 1
        return {
            "a": passed + (again * passed + once + update) * alone,
            "b": (again * passed + once + update) * (not alone),
            "state": np.ceil(costs.state_bytes).astype(np.int64),
            "activation": np.ceil(costs.activation_bytes).astype(np.int64),
            "shared": np.floor(costs.shared_bytes).astype(np.int64),
            "working": np.ceil(costs.working_bytes + costs.reduction_bytes * (not alone)).astype(np.int64),
        }

    def ends(self, strategies: list[VocabularyStrategy], which: str) -> Options:
        """Options of the embedding, the head, both as one, or of nothing."""
        splits = [vocabulary_split(one.tensor, self.costs.ranks, self.costs.rows) for one in strategies]
        layout = np.array([self.index(split) for split in splits])
        model, zeros = self.model, np.zeros(len(strategies), dtype=np.int64)
        a, b, memory, working = zeros, zeros, zeros, zeros
        parts = {"embedding": [model.embedding], "head": [model.head], "both": [model.embedding, model.head]}
        stage = -1 if which == "head" else 0
        flight, at_once = int(self.shape.in_flight()[stage]), int(self.shape.at_once()[stage])
        for part in parts.get(which, []):
            is_head = part is model.head
            owner = replace(part, weights=_NONE) if which == "both" and not is_head else part
            columns = self._columns(self.costs.end(owner, strategies, is_head=is_head))
            a, b = a + columns["a"], b + columns["b"]
            memory = memory + columns["state"] + flight * columns["activation"] - at_once * columns["shared"]
            working = np.maximum(working, columns["working"])
        return Options(a=a, b=b, memory=memory, working=working, layout=layout)

    def moves(self) -> tuple[np.ndarray, np.ndarray]:
        """(Y, Y) A and B of a change of layout."""
        passed = picoseconds([[self.costs.move_ms(one, other) for other in self.splits] for one in self.splits])
        again = (self.shape.micro_batches - 1) * passed
        return (passed + again, 0 * again) if self.shape.pipeline == 1 else (passed, again)
