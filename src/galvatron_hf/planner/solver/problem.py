# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Defines the search problem of one pipeline degree, number of micro-batches and schedule, as integer arrays.
The solver knows nothing of models. Layers 0 to L - 1 are cut into p consecutive runs, the stages. Every layer gets one
option of its kind. Neighbouring layers with different layouts pay a resharding cost.

    F_i = fixed + sum over layers + resharding     first micro-batch on stage i
    O_i = fixed + sum over layers + resharding     other micro-batches on stage i, and what comes once in a step
    memory_i = fixed + sum over layers of (state + in_flight * activation - reuse_count * reused)
               + max over layers of working        must be <= budget
    L_i = F_i+1 + ... + F_p-1                      first micro-batch on all later stages
    cost = max over stages i of three paths, each plus F_0 + ... + F_i:
        O_i                                        stage i never waits for later stages
        O_i - k_i F_i / 3 + L_i                    stage i waits for its first gradient
        O_i - k_i F_i     + 2 L_i                  stage i also waits for its last gradient

k_i = p - 1 - i is the number of warm-up micro-batches of 1F1B: stage i runs their forwards before its first backward.
A forward takes a third of F_i. If all stages take equally long, the maximum is the known `sum F + max O`. Interleaved
schedules, and steps of fewer micro-batches than stages, cost that sum: k_i = 0, and L_i counts once in every path.
GPipe costs that sum or the third path, whichever is larger, because its stages wait for gradients as well.
Costs are integers (picoseconds) and memory is in bytes. Sums are exact in any order, so equal plans cost the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np


Numbers = np.ndarray | int


@dataclass(frozen=True, kw_only=True)
class Options:
    """Holds the options of one end as arrays of one length; `layout` is an index of the problem's layouts."""

    first_cost: np.ndarray
    other_cost: np.ndarray
    memory: np.ndarray
    working: np.ndarray
    layout: np.ndarray

    def __len__(self) -> int:
        return len(self.layout)


@dataclass(frozen=True, kw_only=True)
class SearchProblem:
    """Holds one problem; the module defines the symbols. L layers, K kinds, S options, Y layouts, p stages.

    Args:
        kinds (`np.ndarray`): (L,) kind of each layer.
        first_cost, other_cost (`np.ndarray`): (K, S) picoseconds of a layer, its parts of F and O.
        state, activation, working (`np.ndarray`): (K, S) bytes of a layer: parameters, gradients and optimizer state;
            activations of one micro-batch; peak of temporary memory.
        reused (`np.ndarray`): (K, S) bytes that activations free and gradients then use.
        allowed (`np.ndarray`): (K, S) whether a layer of the kind may have the option.
        layout (`np.ndarray`): (S,) index of the option's layout.
        first_resharding, other_resharding (`np.ndarray`): (Y, Y) cost from one layout to the next.
        boundary (`int`): the layout of hidden states between stages.
        in_flight (`np.ndarray`): (p,) maximum number of micro-batches whose activations a stage keeps.
        reuse_count (`np.ndarray`): (p,) how often `reused` counts in a stage, at most `in_flight`.
        stage_first_cost, stage_other_cost, stage_memory (`np.ndarray`): (p,) fixed terms of each stage.
        starts, finishes ([`Options`]): options of the embedding, in the first stage, and of the head, in the last.
        budget (`int`): bytes of a rank.
        warmup (`np.ndarray`): (p,) k_i; the other cost of every stage is at least k_i times its first cost.
        later_stage_weights (`tuple[int, int, int]`): factor of L_i in each of the three paths.
    """

    kinds: np.ndarray
    first_cost: np.ndarray
    other_cost: np.ndarray
    state: np.ndarray
    activation: np.ndarray
    working: np.ndarray
    reused: np.ndarray
    allowed: np.ndarray
    layout: np.ndarray
    first_resharding: np.ndarray
    other_resharding: np.ndarray
    boundary: int
    in_flight: np.ndarray
    reuse_count: np.ndarray
    stage_first_cost: np.ndarray
    stage_other_cost: np.ndarray
    stage_memory: np.ndarray
    starts: Options
    finishes: Options
    budget: int
    warmup: np.ndarray
    later_stage_weights: tuple[int, int, int]

    @property
    def stages(self) -> int:
        """Returns p."""
        return len(self.in_flight)

    @property
    def layers(self) -> int:
        """Returns L."""
        return len(self.kinds)

    @property
    def longest_stage(self) -> int:
        """Returns the most layers that a stage may have, as each other stage has one."""
        return self.layers - (self.stages - 1)

    def path_costs(self, stage: int, first: Numbers, other: Numbers) -> tuple[Numbers, ...]:
        """Returns F + O, F + O - k F / 3 and F + O - k F of a stage; fractions are rounded up."""
        warmup = int(self.warmup[stage]) * first
        return first + other, first + other - warmup // 3, first + other - warmup

    def without_warmup(self, warmup: int) -> SearchProblem:
        """Returns the problem with O - k F for O.
        Every path of a stage with this k is a sum of non-negative multiples of F and O - k F.
        """
        ends = (
            replace(end, other_cost=end.other_cost - warmup * end.first_cost) for end in (self.starts, self.finishes)
        )
        starts, finishes = ends
        return replace(
            self,
            other_cost=self.other_cost - warmup * self.first_cost,
            other_resharding=self.other_resharding - warmup * self.first_resharding,
            stage_other_cost=self.stage_other_cost - warmup * self.stage_first_cost,
            starts=starts,
            finishes=finishes,
        )

    def resharding(self) -> np.ndarray:
        """Returns (Y, Y, 2) first and other cost of a resharding."""
        return np.stack([self.first_resharding, self.other_resharding], axis=2)

    def detours(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns arrays [i, j] (Y, Y, 2): the maximum extra cost to reach, and to leave, layout i instead of j."""
        resharding = self.resharding()
        reach = (resharding[:, :, None] - resharding[:, None]).max(axis=0)
        return reach, (resharding[:, None] - resharding[None]).max(axis=2)

    def useful_options(self) -> np.ndarray:
        """Returns (S,) booleans: the options that may improve the best solution. An option is useless if another one
        costs no more and needs no more memory for any kind of layer. This must hold even with the largest resharding
        cost to reach and to leave the other option's layout.
        """
        steady = self.without_warmup(int(self.warmup.max()))
        extra = sum(steady.detours())
        columns = (self.state, self.activation, self.min_memory, self.working)
        kept = np.ones(len(self.layout), dtype=bool)
        for option in range(len(kept)):
            more = extra[self.layout, self.layout[option]]
            better = self.first_cost + more[:, 0] <= self.first_cost[:, [option]]
            better &= steady.other_cost + more[:, 1] <= steady.other_cost[:, [option]]
            for column in columns:
                better &= column <= column[:, [option]]
            better = (better & (self.allowed | ~self.allowed[:, [option]])).all(axis=0) & kept
            better[option] = False
            kept[option] = not better.any()
        return kept

    def restricted(self, kept: np.ndarray) -> SearchProblem:
        """Returns the problem with the options of these indices only."""
        columns = ("first_cost", "other_cost", "state", "activation", "reused", "working", "allowed")
        fewer = {name: getattr(self, name)[:, kept] for name in columns}
        return replace(self, **fewer, layout=self.layout[kept])

    @property
    def min_memory(self) -> np.ndarray:
        """Returns (K, S) bytes of a layer with one micro-batch at the largest `reuse_count`. The memory of a layer in
        any stage is a sum of non-negative multiples of this, `state` and `activation`.
        """
        return self.state + self.activation - max(1, int(self.reuse_count.max())) * self.reused

    def memory(self, stages: int | np.ndarray) -> np.ndarray:
        """Returns (K, S) bytes of a layer in a stage, without working memory; (Q, K, S) for (Q,) stages."""
        flight, count = (values[stages, ..., None, None] for values in (self.in_flight, self.reuse_count))
        return self.state + flight * self.activation - count * self.reused


@dataclass(frozen=True, kw_only=True)
class Solution:
    """Chooses `bounds` (p + 1 layer indices) and an option of each layer, of the embedding and of the head."""

    bounds: tuple[int, ...]
    options: tuple[int, ...]
    start: int
    finish: int


@dataclass(frozen=True, kw_only=True)
class Score:
    """Holds F, O and memory of each stage, and the cost of a solution."""

    first_cost: tuple[int, ...]
    other_cost: tuple[int, ...]
    memory: tuple[int, ...]
    cost: int


def score(problem: SearchProblem, solution: Solution) -> Score:
    """Adds up a solution layer by layer."""
    stages = [_score_stage(problem, solution, stage) for stage in range(problem.stages)]
    first, other, memory = zip(*stages, strict=True)
    cost = max(
        sum(first[:stage]) + own + weight * sum(first[stage + 1 :])
        for stage in range(problem.stages)
        for own, weight in zip(
            problem.path_costs(stage, first[stage], other[stage]), problem.later_stage_weights, strict=True
        )
    )
    return Score(first_cost=first, other_cost=other, memory=memory, cost=cost)


def _score_stage(problem: SearchProblem, solution: Solution, stage: int) -> tuple[int, int, int]:
    first, other = int(problem.stage_first_cost[stage]), int(problem.stage_other_cost[stage])
    held, working, layout = int(problem.stage_memory[stage]), 0, problem.boundary
    layer_memory = problem.memory(stage)

    def reshard(to: int) -> None:
        nonlocal first, other, layout
        first += int(problem.first_resharding[layout, to])
        other += int(problem.other_resharding[layout, to])
        layout = to

    def add_end(end: Options, index: int) -> None:
        nonlocal first, other, held, working
        first += int(end.first_cost[index])
        other += int(end.other_cost[index])
        held += int(end.memory[index])
        working = max(working, int(end.working[index]))

    if stage == 0:
        add_end(problem.starts, solution.start)
        layout = int(problem.starts.layout[solution.start])
    for layer in range(*solution.bounds[stage : stage + 2]):
        kind, option = problem.kinds[layer], solution.options[layer]
        reshard(int(problem.layout[option]))
        first += int(problem.first_cost[kind, option])
        other += int(problem.other_cost[kind, option])
        held += int(layer_memory[kind, option])
        working = max(working, int(problem.working[kind, option]))
    if stage < problem.stages - 1:
        reshard(problem.boundary)
    else:
        reshard(int(problem.finishes.layout[solution.finish]))
        add_end(problem.finishes, solution.finish)
    return first, other, held + working
