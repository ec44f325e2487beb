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

    Interleaved stages go through the rank lists in rounds, all alike: what is one stage in a branch is then one of a
    round, and stands for those of all rounds on its ranks.

    Args:
        pipeline (`int`): Rank lists, p, each of world_size / pipeline consecutive ranks.
        micro_batches (`int`): Of a step, m.
        schedule (`str`): "1f1b", "gpipe" or "interleaved".
        rows (`int`): Of a micro-batch, with those that are added so that every data rank has one.
        rounds (`int`, defaults to 1): Stages on each rank list, v; more than 1 are interleaved, which needs m >= p.
    """

    pipeline: int
    micro_batches: int
    schedule: str
    rows: int
    rounds: int = 1

    @property
    def passes(self) -> int:
        """How often a micro-batch goes through a stage of a rank list in a step."""
        return self.rounds * self.micro_batches

    def in_flight(self) -> np.ndarray:
        """(p,) micro-batches whose activations a rank list keeps at most, each counted in every stage that has it."""
        if self.schedule == "gpipe":
            return np.full(self.pipeline, self.micro_batches)
        behind = np.arange(self.pipeline - 1, -1, -1)
        if self.rounds == 1:
            return np.minimum(self.micro_batches, 1 + behind)
        return np.minimum(self.passes, 1 + 2 * behind + (self.rounds - 1) * self._together)

    def ends_in_flight(self) -> tuple[int, int]:
        """As `in_flight`, of the first stage of all and of the last."""
        if self.rounds == 1:
            flight = self.in_flight()
            return int(flight[0]), int(flight[-1])
        return min(self.micro_batches, 2 * self._together), 1

    @property
    def _together(self) -> int:
        """Micro-batches that go through an interleaved round one after the other."""
        return self.micro_batches // max(1, self.micro_batches // self.pipeline)

    def ahead(self) -> np.ndarray:
        """(p,) micro-batches that go forward on a stage of 1F1B before its first one comes back; 0 if not all can."""
        if self.schedule != "1f1b" or self.micro_batches < self.pipeline:
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
        """(p,) whether a rank list keeps all micro-batches before its first backward."""
        return self.in_flight() == self.passes


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
        rounds, layers = self.shape.rounds, self.branch.layers
        stages = tuple(
            Stage(
                ranks=tuple(range(place * self.ranks, (place + 1) * self.ranks)),
                layers=(number * layers + first, number * layers + last),
            )
            for number in range(rounds)
            for place, (first, last) in enumerate(zip(choice.bounds[:-1], choice.bounds[1:], strict=True))
        )
        return ParallelPlan(
            world_size=self.ranks * self.shape.pipeline,
            stacks={"decoder": rounds * layers},
            micro_batches=self.shape.micro_batches,
            schedule=self.shape.schedule,
            precision=workload.precision,
            stages=stages,
            layers=tuple(self.strategies[option] for option in choice.options) * rounds,
            embedding=embedding,
            head=embedding if tied and len(stages) == 1 else head,
        )


def boundary_copies(shape: Shape) -> np.ndarray:
    """(p,) hidden states of stage boundaries that a rank has: what was sent of each micro-batch in flight, and what
    comes from either side."""
    if shape.rounds > 1:
        return shape.in_flight() + 2
    stages = np.arange(shape.pipeline)
    return (stages > 0) + (stages < shape.pipeline - 1) * (1 + shape.in_flight())


def received_and_later(shape: Shape) -> tuple[np.ndarray, np.ndarray]:
    """(p,) and (p,) how often a rank list receives something of a micro-batch, and how many of its stages are not the
    first of all."""
    places = np.arange(shape.pipeline)
    later = shape.rounds - (places == 0)
    return 2 * shape.rounds - (places == 0) - (places == shape.pipeline - 1), later


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
        self.kinds = np.array(model.layers[: len(model.layers) // shape.rounds])
        self._numbers = numbers = _Numbers(costs, shape, model)
        self._columns = numbers.layers(self.strategies)
        shared = model.tied and shape.pipeline == 1
        self.embeddings = list(embeddings)
        self.heads = list(heads)[:1] if shared else list(heads)
        self._starts = numbers.ends(self.embeddings, "both" if shared else "embedding")
        self._finishes = numbers.ends(self.heads, "none" if shared else "head")
        self.bound = self._bound()

    def _bound(self) -> float:
        kinds, stages = self.kinds, self.shape.pipeline
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
        received, later = received_and_later(shape)
        sent = picoseconds(costs.send_ms()) if stages > 1 else 0
        passed = received * sent + later * picoseconds(costs.later_stage_ms())
        first_received, first_later = received_and_later(replace(shape, rounds=1))
        first = first_received * sent + first_later * picoseconds(costs.later_stage_ms())
        once = (np.arange(stages) == 0) * picoseconds(costs.hardware.step_ms)
        branch = Branch(
            kinds=self.kinds,
            allowed=np.ones(self._columns["a"].shape, dtype=bool),
            move_a=move_a,
            move_b=move_b,
            boundary=self._numbers.index(costs.boundary()),
            in_flight=shape.in_flight(),
            at_once=shape.at_once(),
            stage_a=first + once,
            stage_b=shape.micro_batches * passed - first,
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
        costs, rounds = self.costs, self.shape.rounds
        kinds = [self._columns(costs.layer(kind, strategies), rounds) for kind in range(len(self.model.kinds))]
        columns = {name: np.stack([kind[name] for kind in kinds]) for name in kinds[0]}
        splits = [layer_split(strategy, self.costs.ranks) for strategy in strategies]
        return {**columns, "layout": np.array([self.index(split) for split in splits])}

    def _columns(self, costs: Costs, rounds: int = 1) -> dict[str, np.ndarray]:
        """Of a layer in each of so many rounds.

        Of one stage nothing waits for another: what it costs in a step is all in A.
        """
        again = rounds * self.shape.micro_batches - 1
        passed = picoseconds(costs.forward_ms + costs.backward_ms)
        once = rounds * (picoseconds(costs.sync_ms) + picoseconds(costs.update_ms))
        alone = self.shape.pipeline == 1
        return {
            "a": passed + (again * passed + once) * alone,
            "b": (again * passed + once) * (not alone),
            "state": rounds * np.ceil(costs.state_bytes).astype(np.int64),
            "activation": np.ceil(costs.activation_bytes).astype(np.int64),
            "shared": rounds * np.floor(costs.shared_bytes).astype(np.int64),
            "working": np.ceil(costs.working_bytes + costs.reduction_bytes * (not alone)).astype(np.int64),
        }

    def ends(self, strategies: list[VocabularyStrategy], which: str) -> Options:
        """Options of the embedding, the head, both as one, or of nothing."""
        splits = [vocabulary_split(one.tensor, self.costs.ranks, self.costs.rows) for one in strategies]
        layout = np.array([self.index(split) for split in splits])
        model, zeros = self.model, np.zeros(len(strategies), dtype=np.int64)
        a, b, memory, working = zeros, zeros, zeros, zeros
        parts = {"embedding": [model.embedding], "head": [model.head], "both": [model.embedding, model.head]}
        flight = self.shape.ends_in_flight()[which == "head"]
        at_once = flight == self.shape.micro_batches
        for part in parts.get(which, []):
            is_head = part is model.head
            owner = replace(part, weights=_NONE) if which == "both" and not is_head else part
            columns = self._columns(self.costs.end(owner, strategies, is_head=is_head))
            a, b = a + columns["a"], b + columns["b"]
            memory = memory + columns["state"] + flight * columns["activation"] - at_once * columns["shared"]
            working = np.maximum(working, columns["working"])
        if self.shape.rounds > 1:  # every round begins and ends with the layout in which stages hand on
            moved = picoseconds([self.costs.move_ms(one, self.costs.boundary()) for one in splits])
            a, b = a + moved, b + (self.shape.micro_batches - 1) * moved
            layout = np.zeros(len(strategies), dtype=np.int64)
        return Options(a=a, b=b, memory=memory, working=working, layout=layout)

    def moves(self) -> tuple[np.ndarray, np.ndarray]:
        """(Y, Y) A and B of a change of layout."""
        passed = picoseconds([[self.costs.move_ms(one, other) for other in self.splits] for one in self.splits])
        again = (self.shape.passes - 1) * passed
        return (passed + again, 0 * again) if self.shape.pipeline == 1 else (passed, again)
