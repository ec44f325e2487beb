# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Cuts a step into stages, pieces of rows and micro-batches in every way that limits allow, with the strategies that
each way allows. `search.py` searches them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from galvatron_hf.plan import LayerStrategy, VocabularyStrategy
from galvatron_hf.plan.validation import divisors
from galvatron_hf.planner.build_problem import UnsolvedProblem
from galvatron_hf.planner.cost.cost_model import CostModel, CostModels
from galvatron_hf.planner.cost.step_shape import StepShape
from galvatron_hf.planner.option_costs import PICOSECONDS, OptionCosts
from galvatron_hf.planner.solver.cut_bounds import round_down
from galvatron_hf.planner.space import (
    Limits,
    context_degrees,
    layer_strategies,
    micro_batch_sizes,
    pipeline_degrees,
    schedules,
    vocabulary_strategies,
)


class StepCut:
    """Holds the problems of a cut of the step into stages, pieces of rows and micro-batches of one size, which are not
    made yet. They differ in schedule and number of micro-batches. `bounds` of the shapes count neither weights nor
    memory: no solution costs less; `bound` is the least of them. `memory_bounds` are bytes that every solution of a
    group needs, by the group's key, known once the group was read.
    """

    def __init__(
        self,
        costs: CostModel,
        shapes: list[StepShape],
        strategies: list[LayerStrategy],
        choices_of_ends: list[list[VocabularyStrategy]],
        *,
        padded: bool,
    ):
        self.costs, self.shapes, self.strategies, self.choices_of_ends = costs, shapes, strategies, choices_of_ends
        self.padded = padded
        self.memory_bounds: dict[tuple, float] = {}
        of_layers, of_ends = costs.least_layers_ms(strategies), costs.least_ends_ms(choices_of_ends)
        self.bounds = [round_down(PICOSECONDS * shape.least_ms(of_layers, *of_ends)) for shape in shapes]
        self.bound = min(self.bounds)

    def problems(
        self, budget: int, uniform: bool = False
    ) -> Iterator[tuple[tuple, float, Iterator[tuple[float, UnsolvedProblem]]]]:
        """Yields groups of problems, each after a key that no other group of the step has and a bound of their cost.
        The problems of a group are made when it is read: one of all strategies, or if `uniform` one of each. They come
        in the order of their bounds, each after the bound of its solutions within a budget in bytes of a rank.
        """
        for ends in self.choices_of_ends:
            options: dict[bool, OptionCosts] = {}
            for bound, shape in zip(self.bounds, self.shapes, strict=True):
                key = shape, self.padded, ends[0].tensor if len(self.choices_of_ends) > 1 else None
                yield key, bound, self._group(key, budget, uniform, ends, options)

    def _group(
        self,
        key: tuple,
        budget: int,
        uniform: bool,
        ends: list[VocabularyStrategy],
        options: dict[bool, OptionCosts],
    ) -> Iterator[tuple[float, UnsolvedProblem]]:
        """Yields the problems of one shape; all shapes of the cut share `options`."""
        shape, *_ = key
        again = shape.recompute_logits_in_backward
        if again not in options:
            options[again] = OptionCosts(self.costs.of_shape(shape), shape.pipeline, self.strategies, ends, ends)
        problem = UnsolvedProblem(options[again], shape, padded=self.padded)
        self.memory_bounds[key] = problem.memory_bound
        if uniform:
            yield from problem.uniform(budget)
        else:
            yield problem.bound(budget), problem


def step_cuts(known: CostModels, limits: Limits) -> Iterator[StepCut]:
    """Yields every cut of the step, with the strategies that its stages and micro-batches allow. `limits.uniform` is
    not used here.
    """
    hardware, model, workload = known.hardware, known.model, known.workload
    for pipeline in pipeline_degrees(hardware.world_size, len(model.layers)):
        if limits.pipeline is not None and pipeline not in limits.pipeline:
            continue
        ranks = hardware.world_size // pipeline
        own = limits.without("zero3") if pipeline > 1 and not limits.zero3_in_pipeline else limits
        ends = _ends(vocabulary_strategies(ranks, model, own), model.tied)
        costs = known.of_stage(ranks)
        degrees = context_degrees(ranks, model, workload.packed, limits)
        of_layers = {context: layer_strategies(ranks, model, own, context) for context in degrees}
        data_degrees = {context: {data for _, data in found} for context, found in of_layers.items()}
        sizes = []
        for rows, counts in micro_batch_sizes(workload.rows):
            counts = [count for count in counts if limits.micro_batches is None or count in limits.micro_batches]
            if counts:
                sizes.append((rows, list(schedules(pipeline, counts, model.layers, limits, model.router_loss))))
        allowed: dict[tuple[int, int], list[LayerStrategy]] = {}
        for (rows, orders), context in itertools.product(sizes, degrees):
            if model.whole_rows:  # which every rank needs, whatever the layers' strategies
                rows = max(rows, ranks)
            for padded_rows in _padded_rows(rows, ranks // context):
                # Every data rank needs a row of each micro-batch; padding rows are added only for that.
                most = max((data for data in data_degrees[context] if data <= padded_rows), default=0)
                if most == 0 or rows < padded_rows != most:
                    continue
                if (context, most) not in allowed:
                    allowed[context, most] = [one for one, data in of_layers[context] if data <= most]
                strategies = allowed[context, most]
                shapes = [
                    StepShape(
                        pipeline=pipeline,
                        micro_batches=count,
                        schedule=schedule,
                        rows=padded_rows,
                        virtual_stages=virtual,
                        context=context,
                    )
                    for schedule, virtual, count in orders
                ]
                yield StepCut(
                    costs.with_rows(padded_rows, context=context),
                    shapes,
                    strategies,
                    ends,
                    padded=padded_rows > rows,
                )


def _padded_rows(rows: int, ranks: int) -> list[int]:
    """Returns the rows of a micro-batch without padding rows, and with those for each larger data degree."""
    return [rows] + [degree for degree in divisors(ranks) if degree > rows]


def _ends(vocabulary: list[VocabularyStrategy], tied: bool) -> list[list[VocabularyStrategy]]:
    """Returns lists of strategies that embedding and head can combine; tied ends have the same tensor degree."""
    if not tied:
        return [vocabulary]
    by_tensor = itertools.groupby(vocabulary, key=lambda strategy: strategy.tensor)
    return [list(group) for _, group in by_tensor]
