# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""A branch of the search made of profiles: which strategies its numbers stand for, and the plan that a solution is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from galvatron_hf.pipeline_shape import in_a_round
from galvatron_hf.plan import LayerStrategy, ParallelPlan, Stage, VocabularyStrategy
from galvatron_hf.planner.branch import Branch, Choice, Options
from galvatron_hf.planner.cost import CostModel, Costs, Workload, layer_split, vocabulary_split
from galvatron_hf.planner.moves import Split
from galvatron_hf.planner.pareto import nondominated


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

    @property
    def kept_reductions(self) -> int:
        """Gradients that are summed, of a layer of each stage, which stay until the stage's next ones are."""
        return self.rounds if self.pipeline > 1 else 0

    def in_flight(self) -> np.ndarray:
        """(p,) micro-batches whose activations a rank list keeps at most, each counted in every stage that has it."""
        if self.schedule == "gpipe":
            return np.full(self.pipeline, self.micro_batches)
        behind = np.arange(self.pipeline - 1, -1, -1)
        if self.rounds == 1:
            return np.minimum(self.micro_batches, 1 + behind)
        return np.minimum(
            self.passes, 1 + 2 * behind + (self.rounds - 1) * in_a_round(self.pipeline, self.micro_batches)
        )

    def ends_in_flight(self) -> tuple[int, int]:
        """As `in_flight`, of the first stage of all and of the last."""
        if self.rounds == 1:
            flight = self.in_flight()
            return int(flight[0]), int(flight[-1])
        return min(self.micro_batches, 2 * in_a_round(self.pipeline, self.micro_batches)), 1

    @property
    def late_head(self) -> bool:
        """Whether several micro-batches wait between the head's forward and its backward."""
        return self.pipeline > 1 and self.ends_in_flight()[1] > 1

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
        """(p,) of how many of its stages a rank list has no gradients before it begins to give activations back.

        Of all if every micro-batch goes forward in all of them first; of all but the last, if in one round of each.
        """
        one_round = self.micro_batches < 2 * self.pipeline
        return np.where(self.in_flight() == self.passes, self.rounds, (self.rounds - 1) * one_round)


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


class Prices:
    """
    What options cost in a pass of a micro-batch and once in a step, whatever the order of the step's work.

    Tied weights on one stage are one unit, of which the embedding's strategy decides: heads then are the same list, of
    one tensor degree, and all of their cost is the embedding's.

    Args:
        costs ([`CostModel`]): For the stage's ranks and the micro-batch's rows.
        pipeline (`int`): Rank lists.
        strategies (`Sequence[LayerStrategy]`), embeddings, heads (`Sequence[VocabularyStrategy]`): The options.

    Attributes:
        layers (`list[Costs]`): by kind of layer.
        starts, finishes (`list[Costs]`): what the embedding's options and the head's decide of.
        splits (`list[Split]`): layouts.
        layer_layouts, start_layouts, finish_layouts (`np.ndarray`): index of the layout of each option.
    """

    def __init__(
        self,
        costs: CostModel,
        pipeline: int,
        strategies: Sequence[LayerStrategy],
        embeddings: Sequence[VocabularyStrategy],
        heads: Sequence[VocabularyStrategy],
    ):
        self.costs, self.strategies, self.embeddings, self.heads = (
            costs,
            list(strategies),
            list(embeddings),
            list(heads),
        )
        model, shared = costs.model, costs.model.tied and pipeline == 1
        self.layers = [costs.layer(kind, self.strategies) for kind in range(len(model.kinds))]
        if shared:
            self.heads = self.heads[:1]
            own = [(replace(model.embedding, weights=_NONE), False), (model.head, True)]
        else:
            own = [(model.embedding, False)]
        self.starts = [costs.end(end, self.embeddings, is_head=is_head) for end, is_head in own]
        self.finishes = [] if shared else [costs.end(model.head, self.heads, is_head=True)]
        layouts = {costs.boundary(): 0}

        def numbers(splits: Iterable[Split]) -> np.ndarray:
            return np.array([layouts.setdefault(split, len(layouts)) for split in splits])

        self.layer_layouts = numbers(layer_split(one, costs.ranks) for one in self.strategies)
        self.start_layouts, self.finish_layouts = (
            numbers(vocabulary_split(one.tensor, costs.ranks, costs.rows) for one in ends)
            for ends in (self.embeddings, self.heads)
        )
        self.splits = list(layouts)


class Draft:
    """
    A branch of which the costs of layers and ends are known, but not yet those of changes of layout.

    Args:
        prices ([`Prices`]): Of the options.
        shape ([`Shape`]): Of the step.

    Attributes:
        bound (`float`): below the cost of every solution: each layer has its cheapest option, memory does not count.
    """

    def __init__(self, prices: Prices, shape: Shape):
        self.prices, self.shape = prices, shape
        layers = prices.costs.model.layers
        self.kinds = np.array(layers[: len(layers) // shape.rounds])
        numbers = _Numbers(prices.costs, shape)
        self._columns = numbers.layers(prices)
        start_flight, finish_flight = shape.ends_in_flight()
        self._starts = numbers.ends(prices.starts, start_flight, prices.start_layouts, prices.splits)
        self._finishes = numbers.ends(prices.finishes, finish_flight, prices.finish_layouts, prices.splits)
        self.bound = self._bound()

    def _bound(self) -> float:
        kinds, stages = self.kinds, self.shape.pipeline
        passed, first = self._of_stages()
        rest = [(first.sum(), (self.shape.micro_batches * passed - first).sum())]
        rest += [(one.a, one.b) for one in (self._starts, self._finishes)]

        def least(of_a: float, of_b: float) -> float:
            layers = (of_a * self._columns["a"] + of_b * self._columns["b"]).min(axis=1)[kinds].sum()
            return float(layers + sum((of_a * a + of_b * b).min() for a, b in rest))

        if not self.shape.ahead().any():
            return least(1.0, 1 / stages)
        # Of A alone, B being m - 1 times as much at least; or the mean A + B of stages; or anything between the two.
        step = self.shape.least_step()
        return max(least(share * step + (1 - share) / stages, (1 - share) / stages) for share in (0.0, 0.5, 0.9, 1.0))

    def _of_stages(self) -> tuple[np.ndarray, np.ndarray]:
        """(p,) and (p,) what a micro-batch takes beside a rank list's layers, in all rounds and in one of them."""
        costs, found = self.prices.costs, []
        sent = picoseconds(costs.send_ms()) if self.shape.pipeline > 1 else 0
        for shape in (self.shape, replace(self.shape, rounds=1)):
            received, later = received_and_later(shape)
            found.append(received * sent + later * picoseconds(costs.later_stage_ms()))
        return found[0], found[1]

    def problem(self, budget: int, *, prune: bool = True) -> Problem:
        """
        All of it.

        Args:
            budget (`int`): Bytes of a rank.
            prune (`bool`): Whether to leave out strategies without which the best plan is as good. A plan that is only
                to be priced keeps all.
        """
        shape, prices, costs, stages = self.shape, self.prices, self.prices.costs, self.shape.pipeline
        starts, finishes, embeddings, heads = self._starts, self._finishes, prices.embeddings, prices.heads
        if prune:
            (embeddings, starts), (heads, finishes) = _pruned(embeddings, starts), _pruned(heads, finishes)
        move_a, move_b = _Numbers(costs, shape).moves(prices.splits)
        passed, first = self._of_stages()
        once = (np.arange(stages) == 0) * picoseconds(costs.hardware.step_ms)
        branch = Branch(
            kinds=self.kinds,
            allowed=np.ones(self._columns["a"].shape, dtype=bool),
            move_a=move_a,
            move_b=move_b,
            boundary=0,
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
        kept = np.arange(len(prices.strategies))
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
            strategies=[prices.strategies[index] for index in kept],
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
    """Costs of a step as integers of A and B."""

    def __init__(self, costs: CostModel, shape: Shape):
        self.costs, self.shape = costs, shape

    def layers(self, prices: Prices) -> dict[str, np.ndarray]:
        """Columns (K, S); `layout` (S,)."""
        kinds = [self._columns(kind, self.shape.rounds) for kind in prices.layers]
        columns = {name: np.stack([kind[name] for kind in kinds]) for name in kinds[0]}
        return {**columns, "layout": prices.layer_layouts}

    def _columns(self, costs: Costs, rounds: int = 1) -> dict[str, np.ndarray]:
        """Of a layer in each of so many rounds.

        Of one stage nothing waits for another: what it costs in a step is all in A.
        """
        again = rounds * self.shape.micro_batches - 1
        passed = picoseconds(costs.forward_ms + costs.backward_ms)
        once = rounds * (picoseconds(costs.sync_ms) + picoseconds(costs.update_ms))
        shape, alone = self.shape, self.shape.pipeline == 1
        return {
            "a": passed + (again * passed + once) * alone,
            "b": (again * passed + once) * (not alone),
            "state": rounds * np.ceil(costs.state_bytes).astype(np.int64),
            "activation": np.ceil(costs.activation_bytes).astype(np.int64),
            "shared": np.floor(costs.shared_bytes).astype(np.int64),
            "working": costs.working(kept_reductions=shape.kept_reductions, micro_batches=shape.micro_batches),
        }

    def ends(self, parts: list[Costs], flight: int, layout: np.ndarray, splits: list[Split]) -> Options:
        """Options of the embedding, the head, both as one, or of nothing, of which so many are in flight."""
        zeros = np.zeros(len(layout), dtype=np.int64)
        a, b, memory, working = zeros, zeros, zeros, zeros
        at_once = flight == self.shape.micro_batches
        for part in parts:
            columns = self._columns(part)
            a, b = a + columns["a"], b + columns["b"]
            memory = memory + columns["state"] + flight * columns["activation"] - at_once * columns["shared"]
            working = np.maximum(working, columns["working"])
        if self.shape.rounds > 1:  # every round begins and ends with the layout in which stages hand on
            moved = picoseconds([self.costs.move_ms(splits[index], self.costs.boundary()) for index in layout])
            a, b, layout = a + moved, b + (self.shape.micro_batches - 1) * moved, zeros
        return Options(a=a, b=b, memory=memory, working=working, layout=layout)

    def moves(self, splits: list[Split]) -> tuple[np.ndarray, np.ndarray]:
        """(Y, Y) A and B of a change of layout."""
        passed = picoseconds([[self.costs.move_ms(one, other) for other in splits] for one in splits])
        again = (self.shape.passes - 1) * passed
        return (passed + again, 0 * again) if self.shape.pipeline == 1 else (passed, again)
