# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Builds search problems from the cost model, and plans from their solutions."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from galvatron_hf.plan import LayerStrategy, ParallelPlan, Stage, VocabularyStrategy
from galvatron_hf.planner.cost.cost_model import strategy_of_kind
from galvatron_hf.planner.cost.step_shape import StepShape
from galvatron_hf.planner.cost.workload import Workload
from galvatron_hf.planner.option_costs import OptionCosts, StepCosts, picoseconds
from galvatron_hf.planner.solver.cut_bounds import least_memory, round_down
from galvatron_hf.planner.solver.pareto import nondominated
from galvatron_hf.planner.solver.problem import Options, SearchProblem, Solution
from galvatron_hf.planner.solver.stage_bounds import GRID
from galvatron_hf.profiler.profiles.model import ModelProfile


STAGE_GROUPS = 8  # that bound a problem together


@dataclass(frozen=True, kw_only=True)
class PlanProblem:
    """Holds a search problem on stages of `ranks` ranks with the strategies of its options, starts and finishes.
    If `padded`, the number of rows was rounded up so that a layer with as many data ranks as rows can be chosen.
    """

    problem: SearchProblem
    shape: StepShape
    ranks: int
    strategies: list[LayerStrategy]
    embeddings: list[VocabularyStrategy]
    heads: list[VocabularyStrategy]
    padded: bool

    def is_exact(self, solution: Solution) -> bool:
        """Returns whether the solution costs what its plan costs; a plan without such a layer has no padding rows."""
        chosen = {self.strategies[option] for option in solution.options}
        return not self.padded or any(one.data_degree(self.ranks) == self.shape.rows for one in chosen)

    def plan(self, solution: Solution, workload: Workload, model: ModelProfile) -> ParallelPlan:
        embedding, head = self.embeddings[solution.start], self.heads[solution.finish]
        virtual, layers = self.shape.virtual_stages, self.problem.layers
        cuts = list(zip(solution.bounds[:-1], solution.bounds[1:], strict=True))
        stages = tuple(
            Stage(
                ranks=tuple(range(location * self.ranks, (location + 1) * self.ranks)),
                layers=(number * layers + first, number * layers + last),
            )
            for number in range(virtual)
            for location, (first, last) in enumerate(cuts)
        )
        return ParallelPlan(
            world_size=self.ranks * self.shape.pipeline,
            stacks=model.stack_sizes,
            micro_batches=self.shape.micro_batches,
            schedule=self.shape.schedule,
            precision=workload.precision,
            stages=stages,
            layers=tuple(
                strategy_of_kind(self.strategies[option], model.kinds[kind])
                for kind, option in zip(model.layers, itertools.chain(*[solution.options] * virtual), strict=True)
            ),
            embedding=embedding,
            head=embedding if model.tied and len(stages) == 1 else head,
        )


class UnsolvedProblem:
    """Holds a problem whose changes of layout have no cost yet, with quick bounds.
    If `padded`, padding rows were added for a layer with as many data ranks. Solutions without such a layer stand for
    other plans, see `split`.
    """

    def __init__(self, options: OptionCosts, shape: StepShape, *, padded: bool = False):
        self.options, self.shape, self.padded = options, shape, padded
        self.strategies = options.strategies
        layers = options.costs.layer_kinds
        self.kinds = np.array(layers[: len(layers) // shape.virtual_stages])
        self._step = StepCosts(options, shape)
        self._columns = self._step.layers()
        self._starts, self._finishes = self._step.starts(), self._step.finishes()
        self._stages = self._step.stages()

    def bound(self, budget: int) -> float:
        """Returns a lower bound of the cost of every solution within a budget in bytes of a rank, infinite if some
        rank needs more. Changes of layout are free, and ranks share their memory: for a multiplier l >= 0, `cost +
        l * (memory - budget)` of all ranks is at most the cost. Without memory, stages have whole numbers of layers.
        """
        if self.memory_bound > budget:
            return np.inf
        found = float(self._bounds(budget, _of_best))
        if self.shape.pipeline == 1:
            return found
        layers = self._columns["first_cost"].min(axis=1)[self.kinds].tolist() * self.shape.virtual_stages
        ends = (float(end.first_cost.min()) for end in (self._starts, self._finishes))
        return max(found, round_down(self.shape.least_ms(layers, *ends)))

    def closer_bound(self, budget: int) -> float:
        """Returns a lower bound that knows how many micro-batches each stage holds: neighbouring stages share their
        memory, and each of a few such groups has a multiplier of its own.
        """
        return float(self._bounds(budget, _of_best, groups=STAGE_GROUPS))

    def _bounds(
        self, budget: int, of_layers: Callable[[np.ndarray, np.ndarray], np.ndarray], groups: int = 1
    ) -> np.ndarray:
        """Returns bounds (...) from costs of all layers: `of_layers` makes (P, ...) of (P, K, S) costs of a layer with
        P multipliers and of (K,) numbers of layers.
        """
        stages, counts = self.shape.pipeline, np.bincount(self.kinds, minlength=len(self._columns["state"]))
        held, fixed, sizes = self._least_held_by_all if groups == 1 else self._least_held(groups)
        of_stages = [costs.sum() for costs in self._stages]

        def least(first_weight: float, other_weight: float) -> np.ndarray:
            """Returns the bounds of a weighted sum of F and O over all stages, which bounds the cost."""

            def weighted(first: np.ndarray, other: np.ndarray) -> np.ndarray:
                return first_weight * first + other_weight * other

            layers = weighted(self._columns["first_cost"], self._columns["other_cost"])
            scale = max(float(layers.min(axis=1) @ counts), 1.0) / (stages * budget)
            multipliers = self._multipliers(scale * GRID, layers, held, counts)
            rest = weighted(*of_stages) + multipliers @ (fixed - sizes * budget)
            for end, multiplier in ((self._starts, multipliers[:, 0]), (self._finishes, multipliers[:, -1])):
                costs = weighted(end.first_cost, end.other_cost)
                rest = rest + (costs + multiplier[:, None] * end.memory).min(axis=1)
            priced = (layers + multipliers[:, :, None, None] * held).min(axis=1)
            return (of_layers(priced, counts).T + rest).max(axis=-1)

        if not self.shape.warmup().any():
            return round_down(least(1.0, 1 / stages))
        # F times the least step, as O is at least m - 1 times F; or the mean F + O of stages; or a mixture of both.
        step, shares = self.shape.least_step(), (0.0, 0.5, 0.9, 1.0)
        bounds = [least(share * step + (1 - share) / stages, (1 - share) / stages) for share in shares]
        return round_down(np.max(bounds, axis=0))

    @staticmethod
    def _multipliers(grid: np.ndarray, layers: np.ndarray, held: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Returns multipliers (P, J) of groups of stages, with which a layer costs about the same in each group as in
        the first one with the multipliers (P,) of a grid: else all layers would be in the group where it costs least.
        """
        if len(held) == 1:
            return grid[:, None]
        prices = np.stack([(layers + grid[:, None, None] * own).min(axis=2) @ counts for own in held])  # (J, P)
        return np.stack([np.interp(prices[0], own, grid) for own in prices], axis=1)

    def _least_held(self, groups: int = 1) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns, for J groups of neighbouring stages, (J, K, S) bytes that an option holds in the stage where it
        needs the least, (J,) those that the group's stages hold together whatever the options, and its (J,) stages.
        """
        shape, ends = self.shape, (self._starts, self._finishes)
        flight, reused = (values[:, None, None] for values in (shape.in_flight(), shape.reuse_count()))
        held = self._columns["state"] + flight * self._columns["activation"] - reused * self._columns["reused"]
        working = self._columns["working"].min(axis=1)[self.kinds]
        if shape.pipeline > 1:
            most = working.min()
        else:
            most = max(working.max(), *(end.working.min() for end in ends))
        fixed = self.options.costs.stage_bytes(shape) + most
        first = np.arange(min(groups, shape.pipeline)) * shape.pipeline // min(groups, shape.pipeline)
        sizes = np.diff(first, append=shape.pipeline)
        return np.minimum.reduceat(held, first), np.add.reduceat(fixed, first), sizes

    @cached_property
    def _least_held_by_all(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self._least_held()

    @property
    def memory_bound(self) -> float:
        """Returns bytes of which some rank needs at least as many, whatever the cut: the mean of all pipeline ranks
        with options that need the least, and the least working memory.
        """
        held, fixed, _ = self._least_held_by_all
        ends = sum(end.memory.min() for end in (self._starts, self._finishes))
        return (held[0].min(axis=1)[self.kinds].sum() + ends + fixed[0]) / self.shape.pipeline

    def build(self, budget: int, *, prune: bool = True) -> PlanProblem:
        """Builds the whole problem for a budget in bytes of a rank. If `prune`, it leaves out strategies that cannot
        improve the best plan. Estimates of a given plan keep all.
        """
        shape, options = self.shape, self.options
        starts, finishes, embeddings, heads = self._starts, self._finishes, options.embeddings, options.heads
        warmup = int(shape.warmup().max())
        if prune:
            embeddings, starts = _pruned_end(embeddings, starts, warmup)
            heads, finishes = _pruned_end(heads, finishes, warmup)
        problem = self._problem(budget, self._columns, starts, finishes, self._step.resharding())
        strategies = self.strategies
        if prune:
            problem, strategies = _pruned_layers(problem, strategies, warmup)
        return PlanProblem(
            problem=problem,
            shape=shape,
            ranks=options.costs.ranks,
            strategies=strategies,
            embeddings=embeddings,
            heads=heads,
            padded=self.padded,
        )

    def without_moves(self, budget: int) -> SearchProblem:
        """Builds the problem as if all strategies had one layout: no solution of the whole problem costs less than the
        best of this one.
        """
        problem = self._without_layouts(budget)
        return problem.restricted(_front_of_layers(problem, int(self.shape.warmup().max())))

    def _without_layouts(self, budget: int) -> SearchProblem:
        starts, finishes = (replace(end, layout=0 * end.layout) for end in (self._starts, self._finishes))
        columns = self._columns | {"layout": 0 * self._columns["layout"]}
        free = np.zeros((1, 1), dtype=np.int64)
        return self._problem(budget, columns, starts, finishes, (free, free))

    def _problem(
        self,
        budget: int,
        columns: dict[str, np.ndarray],
        starts: Options,
        finishes: Options,
        resharding: tuple[np.ndarray, np.ndarray],
    ) -> SearchProblem:
        shape, costs = self.shape, self.options.costs
        stage_first_cost, stage_other_cost = self._stages
        return SearchProblem(
            kinds=self.kinds,
            allowed=np.ones(columns["first_cost"].shape, dtype=bool),
            first_resharding=resharding[0],
            other_resharding=resharding[1],
            boundary=0,
            in_flight=shape.in_flight(),
            reuse_count=shape.reuse_count(),
            stage_first_cost=stage_first_cost,
            stage_other_cost=stage_other_cost + picoseconds(costs.hardware.step_ms),
            stage_memory=costs.stage_bytes(shape),
            starts=starts,
            finishes=finishes,
            budget=budget,
            warmup=shape.warmup(),
            later_stage_weights=shape.later_stage_weights(),
            **columns,
        )

    def split(self, budget: int) -> Iterator[PlanProblem]:
        """Yields problems, one per layer, that together have exactly the plans for which the padding rows were added.
        In each problem, that layer is the first with as many data ranks as there are rows.
        """
        whole = self.build(budget, prune=False)
        for problem in self._parts(whole.problem, self._full()):
            useful = np.nonzero(problem.useful_options())[0]
            strategies = [whole.strategies[index] for index in useful]
            yield replace(whole, problem=problem.restricted(useful), strategies=strategies)

    def _full(self) -> np.ndarray:
        """Returns (S,) booleans: the strategies with as many data ranks as there are rows."""
        return np.array([one.data_degree(self.options.costs.ranks) == self.shape.rows for one in self.strategies])

    def _parts(self, whole: SearchProblem, full: np.ndarray) -> Iterator[SearchProblem]:
        """Yields a problem per layer, in which that one is the first with one of the options `full` (S,)."""
        columns = ("first_cost", "other_cost", "state", "activation", "reused", "working")
        # Every kind of layer exists three times: before that layer, at it, and after it.
        thrice = {name: np.tile(getattr(whole, name), (3, 1)) for name in columns}
        count = len(whole.first_cost)
        allowed = np.repeat(np.stack([~full, full, np.ones_like(full)]), count, axis=0)
        for first in range(len(self.kinds)):
            part = 1 + np.sign(np.arange(len(self.kinds)) - first)
            yield replace(whole, kinds=self.kinds + count * part, allowed=allowed, **thrice)

    def least_memory(self, limit: float = np.inf) -> float:
        """Returns the smallest budget, in bytes, with which the problem has a solution; if that is `limit` or more,
        perhaps less than it, but at least `limit`. Times do not matter, so few options are enough.
        """
        whole = self._without_layouts(1)
        memory = np.concatenate([whole.state, whole.activation, whole.min_memory, whole.working])
        found = least_memory(whole.restricted(nondominated(memory.T)))
        if found >= limit or not self.padded:
            return found
        full = self._full()
        kept = np.concatenate([np.nonzero(one)[0][nondominated(memory.T[one])] for one in (full, ~full) if one.any()])
        return min(least_memory(part) for part in self._parts(whole.restricted(kept), full[kept]))

    def uniform(self, budget: int) -> Iterator[tuple[float, UnsolvedProblem]]:
        """Yields the problems in which all layers have one strategy, in the order of their bounds, after these."""
        bounds = self._bounds(budget, lambda costs, counts: np.einsum("pks,k->ps", costs, counts))
        bounds = np.maximum(bounds, self._fullest_stage_bounds(budget))
        for index in np.argsort(bounds, kind="stable").tolist():
            if not self.padded or self.strategies[index].data_degree(self.options.costs.ranks) == self.shape.rows:
                yield float(bounds[index]), self._only(index)

    def _fullest_stage_bounds(self, budget: int) -> np.ndarray:
        """Returns (S,) bounds of the cost if all layers have one strategy, infinite if they do not fit: what memory
        leaves to the other stages makes the stage with most layers take at least so many.
        """
        columns, shape = self._columns, self.shape
        flight, reused = (values[:, None, None] for values in (shape.in_flight(), shape.reuse_count()))
        held = columns["state"] + flight * columns["activation"] - reused * columns["reused"]
        free = budget - self.options.costs.stage_bytes(shape).astype(float)
        free[0] -= self._starts.memory.min()
        free[-1] -= self._finishes.memory.min()
        most = np.floor((free[:, None] - columns["working"].min(axis=0)) / held.min(axis=1)).clip(0)
        sizes = np.arange(1, len(self.kinds) + 1)
        placed = np.minimum(most[..., None], sizes).sum(axis=0)  # (S, L) layers, if no stage has more than so many
        fewest = 1 + (placed < len(self.kinds)).sum(axis=1)
        fits = (most.min(axis=0) >= 1) & (placed[:, -1] >= len(self.kinds))
        stages = np.sum(self._stages, axis=0).min()
        cost = fewest * (columns["first_cost"] + columns["other_cost"]).min(axis=0) + stages
        return np.where(fits, round_down(cost), np.inf)

    def _only(self, index: int) -> UnsolvedProblem:
        one = copy.copy(self)
        one.strategies, one.padded = [self.strategies[index]], False
        one._columns = {name: column[..., [index]] for name, column in self._columns.items()}
        one.__dict__.pop("_least_held_by_all", None)  # of all strategies
        return one


def _of_best(costs: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Returns (P,) costs of all layers, each with its best option, of (P, K, S) costs of a layer."""
    return costs.min(axis=2) @ counts


def _pruned_layers(
    problem: SearchProblem, strategies: list[LayerStrategy], warmup: int
) -> tuple[SearchProblem, list[LayerStrategy]]:
    kept = _front_of_layers(problem, warmup)
    problem = problem.restricted(kept)
    useful = np.nonzero(problem.useful_options())[0]
    return problem.restricted(useful), [strategies[index] for index in kept[useful]]


def _front_of_layers(problem: SearchProblem, warmup: int) -> np.ndarray:
    """Returns indices of the strategies of layers that no other one of the same layout dominates."""
    steady = problem.other_cost - warmup * problem.first_cost
    columns = (problem.first_cost, steady, problem.state, problem.activation, problem.min_memory, problem.working)
    return _front_of_layouts(np.concatenate(columns), problem.layout)


def _pruned_end(
    strategies: list[VocabularyStrategy], options: Options, warmup: int
) -> tuple[list[VocabularyStrategy], Options]:
    steady = options.other_cost - warmup * options.first_cost
    columns = np.stack([options.first_cost, steady, options.memory, options.working])
    kept = _front_of_layouts(columns, options.layout)
    names = ("first_cost", "other_cost", "memory", "working", "layout")
    return [strategies[index] for index in kept], Options(**{name: getattr(options, name)[kept] for name in names})


def _front_of_layouts(columns: np.ndarray, layout: np.ndarray) -> np.ndarray:
    """Returns indices of options that no other option of the same layout dominates in the columns (C, S)."""
    found = [np.nonzero(layout == one)[0] for one in np.unique(layout)]
    return np.sort(np.concatenate([members[nondominated(columns.T[members])] for members in found]))
