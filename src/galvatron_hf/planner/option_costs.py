# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Converts the costs of strategies to the integers of a search problem: picoseconds and bytes. `solver/problem.py`
defines F, the cost of the first micro-batch, and O, that of the others and of what comes once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from galvatron_hf.plan import LayerStrategy, VocabularyStrategy
from galvatron_hf.plan.layout import Layout
from galvatron_hf.planner.cost.cost_model import CostModel
from galvatron_hf.planner.cost.step_shape import StepShape
from galvatron_hf.planner.cost.strategy_costs import StrategyCosts
from galvatron_hf.planner.solver.problem import Options


PICOSECONDS = 10**9  # in a millisecond
MOST_MS = 4e9  # of a step, 46 days: 64 bits hold 106 days of picoseconds


class OptionCosts:
    """Holds the costs of options for a micro-batch and for a step, whatever the schedule.
    Tied weights on one stage are one unit, which has the embedding's strategy. Then `heads` has one entry, and
    `starts` include all costs of the head.

    Attributes:
        layers (`list[StrategyCosts]`): by kind of [`CostModel.layer_kinds`].
        starts, finishes (`list[StrategyCosts]`): parts that the embedding's options, and the head's, decide.
        layouts (`list[Layout]`): the layouts; the first is that between stages.
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
        self.costs, self.strategies = costs, strategies
        self.embeddings, self.heads = embeddings, heads
        model, one_unit = costs.model, costs.model.tied and pipeline == 1
        self.layers = [costs.layer(kind, self.strategies) for kind in range(1 + max(costs.layer_kinds))]
        if one_unit:
            self.heads = self.heads[:1]
            own = [(replace(model.embedding, weights=()), "embedding"), (model.head, "tied")]
        else:
            own = [(model.embedding, "embedding")]
        self.starts = [costs.end(end, self.embeddings, part) for end, part in own]
        self.finishes = [] if one_unit else [costs.end(model.head, self.heads, "head")]
        layouts = {costs.boundary(): 0}

        def indices(found: list[Layout], index: np.ndarray) -> np.ndarray:
            return np.array([layouts.setdefault(layout, len(layouts)) for layout in found])[index]

        self.layer_layouts = indices(*costs.layouts(strategies))
        self.start_layouts, self.finish_layouts = (
            indices(*costs.end_layouts(ends)) for ends in (self.embeddings, self.heads)
        )
        self.layouts = list(layouts)

    @cached_property
    def moved_to_boundary(self) -> np.ndarray:
        """Returns picoseconds of a change from each layout of an end to the one between stages, and back, by layout; 0
        for those that no end has.
        """
        found = np.zeros(len(self.layouts), dtype=np.int64)
        for one in np.unique(np.concatenate([self.start_layouts, self.finish_layouts])):
            found[one] = picoseconds(self.costs.resharding_ms(self.layouts[one], self.layouts[0]))
        return found


class StepCosts:
    """Converts option costs to the integers of one step."""

    def __init__(self, options: OptionCosts, shape: StepShape):
        self.options, self.costs, self.shape = options, options.costs, shape

    def layers(self) -> dict[str, np.ndarray]:
        """Returns columns (K, S) of a [`SearchProblem`] by name, and `layout` (S,)."""
        kinds = [self._columns(kind, self.shape.virtual_stages) for kind in self.options.layers]
        columns = {name: np.stack([kind[name] for kind in kinds]) for name in kinds[0]}
        return {**columns, "layout": self.options.layer_layouts}

    def _columns(self, costs: StrategyCosts, virtual_stages: int = 1) -> dict[str, np.ndarray]:
        """Returns columns of a layer in each of `virtual_stages`. One stage waits for none, so all its cost is F."""
        shape, one_stage = self.shape, self.shape.pipeline == 1
        count, layers = shape.micro_batches, len(self.costs.model.layers)
        counted = costs.forward_ms * (costs.part == "layer" and shape.counts_choices(self.costs.model))
        passed = picoseconds(costs.forward_ms + costs.backward_ms + counted, shape.passes * layers)
        once = virtual_stages * (picoseconds(costs.sync_ms) + picoseconds(costs.total_update_ms(count)))
        rest = (virtual_stages * count - 1) * passed + once
        return {
            "first_cost": passed + rest * one_stage,
            "other_cost": rest * (not one_stage),
            "state": virtual_stages * np.ceil(costs.state_bytes).astype(np.int64),
            "activation": np.ceil(costs.activation_bytes).astype(np.int64),
            "reused": np.floor(costs.reused_bytes(count)).astype(np.int64),
            "working": costs.peak_working_bytes(
                one_stage=one_stage,
                active_stages=shape.active_stages,
                micro_batches=count,
                one_layer=layers == shape.virtual_stages * shape.pipeline,
            ),
        }

    def starts(self) -> Options:
        """Returns the options of the embedding, or of both ends as one unit."""
        flight, _ = self.shape.ends_in_flight()
        return self._end(self.options.starts, flight, self.options.start_layouts)

    def finishes(self) -> Options:
        """Returns the options of the head, all zero if it is one unit with the embedding."""
        _, flight = self.shape.ends_in_flight()
        return self._end(self.options.finishes, flight, self.options.finish_layouts)

    def _end(self, parts: list[StrategyCosts], flight: int, layout: np.ndarray) -> Options:
        """Returns the options of an end of which `flight` micro-batches are in flight. Memory that exists only while
        the end itself runs counts as working memory, not with that of layers.
        """
        zeros = np.zeros(len(layout), dtype=np.int64)
        first, other, memory, working = zeros, zeros, zeros, zeros
        count = self.shape.micro_batches
        for part in parts:
            columns, end_only = self._columns(part), part.end_only_bytes(count)
            first, other = first + columns["first_cost"], other + columns["other_cost"]
            memory = memory + columns["state"] + flight * columns["activation"] - end_only
            memory = memory - (flight == count) * columns["reused"]
            working = np.maximum(working, columns["working"] + end_only)
        if self.shape.virtual_stages > 1:  # every virtual stage begins and ends in the layout between stages
            moved = self.options.moved_to_boundary[layout]
            first, other = first + moved, other + (count - 1) * moved
            layout = zeros
        return Options(first_cost=first, other_cost=other, memory=memory, working=working, layout=layout)

    def resharding(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns (Y, Y) first and other costs of a change of layout."""
        layouts, passes = self.options.layouts, self.shape.passes * len(self.costs.model.layers)
        passed = picoseconds([[self.costs.resharding_ms(one, to) for to in layouts] for one in layouts], passes)
        rest = (self.shape.passes - 1) * passed
        return (passed + rest, 0 * rest) if self.shape.pipeline == 1 else (passed, rest)

    def stages(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns (p,) F and O of a pipeline rank besides its layers: received messages, and positions."""
        positions = picoseconds(self.costs.later_stage_ms())
        every, one = (
            picoseconds(self.costs.received_ms(shape.receives())) + shape.stages_after_first() * positions
            for shape in (self.shape, replace(self.shape, virtual_stages=1))
        )
        return one, self.shape.micro_batches * every - one


def picoseconds(ms: np.ndarray | float, times: int = 1) -> np.ndarray:
    """Returns milliseconds, which occur `times` times in a step, as whole picoseconds. Raises `ValueError` if a step
    takes longer than 64-bit integers can hold.
    """
    step_ms = times * np.max(ms, initial=0.0)
    if not step_ms <= MOST_MS:
        raise ValueError(
            f"A step is predicted to take {step_ms:.3g} ms or more, above the maximum of {MOST_MS:.0e} ms; use "
            "shorter rows, fewer rows, or profiles of this machine and model."
        )
    return np.rint(np.asarray(ms, dtype=float) * PICOSECONDS).astype(np.int64)
