# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""A branch of the search made of profiles: which strategies its numbers stand for, and the plan that a solution is."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from galvatron_hf.plan import LayerStrategy, ParallelPlan, Stage, VocabularyStrategy
from galvatron_hf.plan.layout import Layout
from galvatron_hf.planner.cost.cost_model import CostModel, Workload
from galvatron_hf.planner.cost.step_shape import StepShape
from galvatron_hf.planner.cost.strategy_costs import Costs
from galvatron_hf.planner.solver.cut_bounds import below
from galvatron_hf.planner.solver.pareto import nondominated
from galvatron_hf.planner.solver.problem import Choice, Options, SearchProblem
from galvatron_hf.profiler.profiles.model import ModelProfile


PICOSECONDS = 10**9  # in a millisecond
MOST_MS = 4e9  # of a step, 46 days: 64 bits hold 106 days of picoseconds
_NONE = ()  # weights that the other end has


@dataclass(frozen=True, kw_only=True)
class PricedProblem:
    """A branch, and what its options are.

    Attributes:
        branch ([`SearchProblem`]): the numbers.
        shape ([`StepShape`]): of the step.
        ranks (`int`): of each stage.
        strategies (`list[LayerStrategy]`): by option.
        embeddings, heads (`list[VocabularyStrategy]`): by start and by finish.
        added (`bool`): whether rows were added for a layer that has as many data ranks.
    """

    branch: SearchProblem
    shape: StepShape
    ranks: int
    strategies: list[LayerStrategy]
    embeddings: list[VocabularyStrategy]
    heads: list[VocabularyStrategy]
    added: bool

    def is_priced(self, choice: Choice) -> bool:
        """Whether the solution costs what its plan does; without a layer for which rows were added it has fewer."""
        chosen = {self.strategies[option] for option in choice.options}
        return not self.added or any(one.data_degree(self.ranks) == self.shape.rows for one in chosen)

    def plan(self, choice: Choice, workload: Workload, model: ModelProfile) -> ParallelPlan:
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
            stacks=model.stack_sizes,
            micro_batches=self.shape.micro_batches,
            schedule=self.shape.schedule,
            precision=workload.precision,
            stages=stages,
            layers=tuple(self.strategies[option] for option in choice.options) * rounds,
            embedding=embedding,
            head=embedding if model.tied and len(stages) == 1 else head,
        )


class OptionCosts:
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
        splits (`list[Layout]`): layouts.
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
            own = [(replace(model.embedding, weights=_NONE), "embedding"), (model.head, "tied")]
        else:
            own = [(model.embedding, "embedding")]
        self.starts = [costs.end(end, self.embeddings, part) for end, part in own]
        self.finishes = [] if shared else [costs.end(model.head, self.heads, "head")]
        layouts = {costs.boundary(): 0}

        def numbers(splits: Iterable[Layout]) -> np.ndarray:
            return np.array([layouts.setdefault(split, len(layouts)) for split in splits])

        self.layer_layouts = numbers(Layout.from_strategy(one, costs.ranks) for one in self.strategies)
        self.start_layouts, self.finish_layouts = (
            numbers(Layout.from_vocabulary(one.tensor, costs.ranks, costs.rows) for one in ends)
            for ends in (self.embeddings, self.heads)
        )
        self.splits = list(layouts)


class UnsolvedProblem:
    """
    A branch of which the costs of layers and ends are known, but not yet those of changes of layout.

    Args:
        prices ([`OptionCosts`]): Of the options.
        shape ([`StepShape`]): Of the step.
        added (`bool`, defaults to `False`): Whether rows were added, so that a layer with as many data ranks has one
            on each. The branch allows solutions without such a layer, but they are other plans: see `parts`.

    Attributes:
        bound (`float`): below the cost of every solution: each layer has its cheapest option, memory does not count.
    """

    def __init__(self, prices: OptionCosts, shape: StepShape, *, added: bool = False):
        self.prices, self.shape, self.added = prices, shape, added
        self.strategies = prices.strategies
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
            return below(float(layers + sum((of_a * a + of_b * b).min() for a, b in rest)))

        if not self.shape.ahead().any():
            return least(1.0, 1 / stages)
        # Of A alone, B being m - 1 times as much at least; or the mean A + B of stages; or anything between the two.
        step = self.shape.least_step()
        return max(least(share * step + (1 - share) / stages, (1 - share) / stages) for share in (0.0, 0.5, 0.9, 1.0))

    def _of_stages(self) -> tuple[np.ndarray, np.ndarray]:
        """(p,) and (p,) what a micro-batch takes beside a rank list's layers, in all rounds and in one of them."""
        costs = self.prices.costs
        made = picoseconds(costs.later_stage_ms())
        every, one = (
            picoseconds(costs.received_ms(shape.received())) + shape.later_stages() * made
            for shape in (self.shape, replace(self.shape, rounds=1))
        )
        return every, one

    def problem(self, budget: int, *, prune: bool = True) -> PricedProblem:
        """
        All of it.

        Args:
            budget (`int`): Bytes of a rank.
            prune (`bool`): Whether to leave out strategies without which the best plan is as good. A plan that is only
                to be priced keeps all.
        """
        shape, prices, costs = self.shape, self.prices, self.prices.costs
        starts, finishes, embeddings, heads = self._starts, self._finishes, prices.embeddings, prices.heads
        if prune:
            ahead = int(shape.ahead().max())
            embeddings, starts = _pruned(embeddings, starts, ahead)
            heads, finishes = _pruned(heads, finishes, ahead)
        move_a, move_b = _Numbers(costs, shape).moves(prices.splits)
        passed, first = self._of_stages()
        branch = SearchProblem(
            kinds=self.kinds,
            allowed=np.ones(self._columns["a"].shape, dtype=bool),
            move_a=move_a,
            move_b=move_b,
            boundary=0,
            in_flight=shape.in_flight(),
            at_once=shape.at_once(),
            stage_a=first,
            stage_b=shape.micro_batches * passed - first + picoseconds(costs.hardware.step_ms),
            stage_memory=shape.boundary_copies() * costs.boundary_bytes,
            starts=starts,
            finishes=finishes,
            budget=budget,
            ahead=shape.ahead(),
            waits=shape.waits(),
            **self._columns,
        )
        kept = np.arange(len(self.strategies))
        if prune:
            waiting = branch.b - ahead * branch.a
            columns = (branch.a, waiting, branch.state, branch.activation, branch.least, branch.working)
            kept = _kept(np.concatenate(columns), branch)
            branch = branch.restricted(kept)
            worth = np.nonzero(branch.worth_having())[0]
            kept, branch = kept[worth], branch.restricted(worth)
        return PricedProblem(
            branch=branch,
            shape=shape,
            ranks=costs.ranks,
            strategies=[self.strategies[index] for index in kept],
            embeddings=embeddings,
            heads=heads,
            added=self.added,
        )

    def parts(self, budget: int) -> Iterator[PricedProblem]:
        """
        Problems that together have just the plans for which the rows were added, one for each layer.

        In it that layer is the first that has as many data ranks as there are rows.
        """
        whole = self.problem(budget, prune=False)
        full = np.array([one.data_degree(whole.ranks) == self.shape.rows for one in whole.strategies])
        columns = ("a", "b", "state", "activation", "shared", "working")
        thrice = {name: np.tile(getattr(whole.branch, name), (3, 1)) for name in columns}  # before it, it, behind it
        count = len(whole.branch.a)
        allowed = np.repeat(np.stack([~full, full, np.ones_like(full)]), count, axis=0)
        for first in range(len(self.kinds)):
            place = 1 + np.sign(np.arange(len(self.kinds)) - first)
            branch = replace(whole.branch, kinds=self.kinds + count * place, allowed=allowed, **thrice)
            worth = np.nonzero(branch.worth_having())[0]
            strategies = [whole.strategies[index] for index in worth]
            yield replace(whole, branch=branch.restricted(worth), strategies=strategies)

    def alike(self) -> Iterator[UnsolvedProblem]:
        """The same with one strategy for all layers: one for each."""
        for index, strategy in enumerate(self.strategies):
            if self.added and strategy.data_degree(self.prices.costs.ranks) != self.shape.rows:
                continue
            one = copy.copy(self)
            one.strategies, one.added = [strategy], False
            one._columns = {name: column[..., [index]] for name, column in self._columns.items()}
            one.bound = one._bound()
            yield one


def _kept(columns: np.ndarray, options: SearchProblem | Options) -> np.ndarray:
    """Indices of what nothing of the same layout is at most equal to in every column (C, S)."""
    found = [np.nonzero(options.layout == one)[0] for one in np.unique(options.layout)]
    return np.sort(np.concatenate([members[nondominated(columns.T[members])] for members in found]))


def _pruned(
    strategies: list[VocabularyStrategy], options: Options, ahead: int
) -> tuple[list[VocabularyStrategy], Options]:
    waiting = options.b - ahead * options.a
    kept = _kept(np.stack([options.a, waiting, options.memory, options.working]), options)
    names = ("a", "b", "memory", "working", "layout")
    return [strategies[index] for index in kept], Options(**{name: getattr(options, name)[kept] for name in names})


def picoseconds(ms: np.ndarray | float, times: int = 1) -> np.ndarray:
    """Milliseconds as whole picoseconds.

    Args:
        ms (`np.ndarray` or `float`): The milliseconds.
        times (`int`, defaults to 1): How often they come in a step.

    Raises:
        ValueError: for a step that takes longer than integers can say.
    """
    step_ms = times * np.max(ms, initial=0.0)
    if not step_ms <= MOST_MS:
        raise ValueError(
            f"A step is predicted to take {step_ms:.3g} ms or more, which is above {MOST_MS:.0e}; give shorter rows, "
            "fewer of them, or profiles of this machine and model."
        )
    return np.rint(np.asarray(ms, dtype=float) * PICOSECONDS).astype(np.int64)


class _Numbers:
    """Costs of a step as integers of A and B."""

    def __init__(self, costs: CostModel, shape: StepShape):
        self.costs, self.shape = costs, shape

    def layers(self, prices: OptionCosts) -> dict[str, np.ndarray]:
        """Columns (K, S); `layout` (S,)."""
        kinds = [self._columns(kind, self.shape.rounds) for kind in prices.layers]
        columns = {name: np.stack([kind[name] for kind in kinds]) for name in kinds[0]}
        return {**columns, "layout": prices.layer_layouts}

    def _columns(self, costs: Costs, rounds: int = 1) -> dict[str, np.ndarray]:
        """Of a layer in each of so many rounds.

        Of one stage nothing waits for another: what it costs in a step is all in A.
        """
        again = rounds * self.shape.micro_batches - 1
        count, passes = self.shape.micro_batches, self.shape.passes * len(self.costs.model.layers)
        passed = picoseconds(costs.forward_ms + costs.backward_ms, passes)
        once = rounds * (picoseconds(costs.sync_ms) + picoseconds(costs.updating_ms(count)))
        shape, alone = self.shape, self.shape.pipeline == 1
        one_layer = len(self.costs.model.layers) == shape.rounds * shape.pipeline
        needs = dict(stages=shape.stages_at_work, micro_batches=shape.micro_batches, one_layer=one_layer)
        return {
            "a": passed + (again * passed + once) * alone,
            "b": (again * passed + once) * (not alone),
            "state": rounds * np.ceil(costs.state_bytes).astype(np.int64),
            "activation": np.ceil(costs.activation_bytes).astype(np.int64),
            "shared": np.floor(costs.shared_bytes(shape.micro_batches)).astype(np.int64),
            "working": costs.working(alone=alone, **needs),
        }

    def ends(self, parts: list[Costs], flight: int, layout: np.ndarray, splits: list[Layout]) -> Options:
        """Options of the embedding, the head, both as one, or of nothing, of which so many are in flight.

        What an end needs only while it runs itself stands beside its working memory, not beside the layers'.
        """
        zeros = np.zeros(len(layout), dtype=np.int64)
        a, b, memory, working = zeros, zeros, zeros, zeros
        count = self.shape.micro_batches
        at_once = flight == count
        for part in parts:
            columns, own = self._columns(part), part.own_bytes(count)
            a, b = a + columns["a"], b + columns["b"]
            memory = memory + columns["state"] + flight * columns["activation"] - at_once * columns["shared"] - own
            working = np.maximum(working, columns["working"] + own)
        if self.shape.rounds > 1:  # every round begins and ends with the layout in which stages hand on
            moved = picoseconds([self.costs.move_ms(splits[index], self.costs.boundary()) for index in layout])
            a, b, layout = a + moved, b + (self.shape.micro_batches - 1) * moved, zeros
        return Options(a=a, b=b, memory=memory, working=working, layout=layout)

    def moves(self, splits: list[Layout]) -> tuple[np.ndarray, np.ndarray]:
        """(Y, Y) A and B of a change of layout."""
        passes = self.shape.passes * len(self.costs.model.layers)
        passed = picoseconds([[self.costs.move_ms(one, other) for other in splits] for one in splits], passes)
        again = (self.shape.passes - 1) * passed
        return (passed + again, 0 * again) if self.shape.pipeline == 1 else (passed, again)
