# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Random search problems, and two other ways to solve them: enumeration and a mixed-integer program."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from scipy import sparse
from scipy.optimize import Bounds, LinearConstraint, milp

from galvatron_hf.planner.solver.problem import Options, SearchProblem


def fast_and_slow(fast: int, all_seeds: int) -> Iterator:
    """Yields the first seeds for a fast test, and the others for a slow one."""
    yield pytest.param(range(fast), id="fast")
    yield pytest.param(range(fast, all_seeds), id="more", marks=pytest.mark.slow)


def random_problem(
    seed: int, *, layers: int, stages: int, options: int, layouts: int = 2, kinds: int = 1, tightness: float = 0.5
) -> SearchProblem:
    """Returns a problem in which faster options mostly need more memory.

    A `tightness` of 0 gives a budget near the smallest memory, 1 one near the largest. The other cost of everything is
    at least its first cost times the number of warm-up micro-batches.
    """
    draw = np.random.default_rng(seed)
    speed = draw.integers(5, 40, (kinds, options))
    first, stage_first = speed + draw.integers(0, 30, (kinds, options)), draw.integers(0, 9, stages)
    state = 400 // speed + draw.integers(0, 20, (kinds, options))
    activation = 200 // speed + draw.integers(0, 10, (kinds, options))
    reused = (draw.random((kinds, options)) * np.minimum(state, activation)).astype(np.int64)
    ends = [draw.integers(1, 4) for _ in range(2)]
    in_flight = np.arange(stages, 0, -1)
    order = np.sort(draw.integers(0, kinds, layers)) if draw.random() < 0.5 else draw.integers(0, kinds, layers)
    resharding = [draw.integers(0, 12, (layouts, layouts)) * (1 - np.eye(layouts, dtype=np.int64)) for _ in range(2)]
    warmup = np.arange(stages - 1, -1, -1) * int(draw.random() < 0.7)
    most_warmup = int(warmup.max())
    least = (state + in_flight[:, None, None] * activation).min() * layers / stages
    most = (state + in_flight[:, None, None] * activation).max() * layers / stages
    return SearchProblem(
        kinds=order,
        first_cost=first,
        other_cost=most_warmup * first + speed * draw.integers(0, 5),
        state=state,
        activation=activation,
        working=draw.integers(0, 40, (kinds, options)),
        allowed=draw.random((kinds, options)) < 0.9,
        layout=draw.integers(0, layouts, options),
        first_resharding=resharding[0],
        other_resharding=most_warmup * resharding[0] + resharding[1],
        boundary=int(draw.integers(0, layouts)),
        in_flight=in_flight,
        reused=reused,
        reuse_count=draw.random(stages) < 0.3,
        stage_first_cost=stage_first,
        stage_other_cost=most_warmup * stage_first + draw.integers(0, 9, stages),
        stage_memory=draw.integers(0, 20, stages),
        starts=_ends(draw, ends[0], layouts, most_warmup),
        finishes=_ends(draw, ends[1], layouts, most_warmup),
        budget=int(least + tightness * (most - least)) + 60,
        warmup=warmup,
        later_stage_weights=(int(draw.random() < 0.2), 1, 2) if most_warmup else (1, 1, 1),
    )


def _ends(draw: np.random.Generator, count: int, layouts: int, most_warmup: int) -> Options:
    sizes = (count,)
    first = draw.integers(0, 30, sizes)
    return Options(
        first_cost=first,
        other_cost=most_warmup * first + draw.integers(0, 30, sizes),
        memory=draw.integers(0, 30, sizes),
        working=draw.integers(0, 60, sizes),
        layout=draw.integers(0, layouts, sizes),
    )


def brute_force(problem: SearchProblem) -> int | None:
    """Returns the smallest cost of all solutions that fit; None if none does. Does not call [`score`]."""
    choices, costs = _every_choice(problem), []
    for cut in itertools.combinations(range(1, problem.layers), problem.stages - 1):
        bounds = (0, *cut, problem.layers)
        stages = [_stage_sums(problem, choices, stage, *bounds[stage : stage + 2]) for stage in range(problem.stages)]
        first, other, memory = (np.stack(sums) for sums in zip(*stages, strict=True))
        costs.append(_costs(problem, first, other)[memory.max(axis=0) <= problem.budget])
    return min((int(cost) for cost in np.concatenate(costs)), default=None)


def _every_choice(problem: SearchProblem) -> np.ndarray:
    """Returns (L + 2, R) all choices: an option of each layer, of the embedding and of the head."""
    allowed = [np.nonzero(problem.allowed[kind])[0] for kind in problem.kinds]
    ends = (np.arange(len(end)) for end in (problem.starts, problem.finishes))
    return np.stack(np.meshgrid(*allowed, *ends, indexing="ij")).reshape(problem.layers + 2, -1)


def _stage_sums(
    problem: SearchProblem, choices: np.ndarray, stage: int, begin: int, end: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns (R,) F, O and memory of a stage with the layers from `begin` up to `end`, for all choices."""
    count, working = choices.shape[1], np.zeros(choices.shape[1], dtype=np.int64)
    first, other, held = (
        np.full(count, fixed[stage])
        for fixed in (problem.stage_first_cost, problem.stage_other_cost, problem.stage_memory)
    )
    layer_memory = problem.state + problem.in_flight[stage] * problem.activation
    layer_memory = layer_memory - problem.reuse_count[stage] * problem.reused
    columns = (problem.first_cost, problem.other_cost, layer_memory, problem.working)
    parts = [
        (*(column[problem.kinds[layer], choices[layer]] for column in columns), problem.layout[choices[layer]])
        for layer in range(begin, end)
    ]
    embedding, head = (
        tuple(column[chosen] for column in (one.first_cost, one.other_cost, one.memory, one.working, one.layout))
        for one, chosen in zip((problem.starts, problem.finishes), choices[-2:], strict=True)
    )
    boundary = np.full(count, problem.boundary)
    layouts = [part[-1] for part in parts]
    layouts.insert(0, embedding[-1] if stage == 0 else boundary)
    layouts.append(head[-1] if stage == problem.stages - 1 else boundary)
    parts += [embedding] * (stage == 0) + [head] * (stage == problem.stages - 1)
    for first_cost, other_cost, memory, needed, _ in parts:
        first, other, held, working = (
            first + first_cost,
            other + other_cost,
            held + memory,
            np.maximum(working, needed),
        )
    for before, after in itertools.pairwise(layouts):
        first = first + problem.first_resharding[before, after]
        other = other + problem.other_resharding[before, after]
    return first, other, held + working


def _costs(problem: SearchProblem, first: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Returns (R,) the longest of the three paths through each stage, from (p, R) F and O."""
    paths = []
    for stage, warmup in enumerate(problem.warmup.tolist()):
        now, later = first[: stage + 1].sum(axis=0) + other[stage], first[stage + 1 :].sum(axis=0)
        waits = (0, warmup * first[stage] // 3, warmup * first[stage])
        paths += [now - wait + weight * later for wait, weight in zip(waits, problem.later_stage_weights, strict=True)]
    return np.max(paths, axis=0)


class _Program:
    """Holds variables and constraints of a mixed-integer program, row by row."""

    def __init__(self) -> None:
        self.count, self.cost, self.integral = 0, [], []
        self.rows, self.low, self.high = [], [], []

    def variable(self, cost: float = 0.0, integral: bool = True) -> int:
        self.cost.append(cost)
        self.integral.append(int(integral))
        self.count += 1
        return self.count - 1

    def constrain(self, row: dict[int, float], low: float, high: float) -> None:
        self.rows.append(row)
        self.low.append(low)
        self.high.append(high)

    def solve(self) -> float | None:
        matrix = sparse.lil_matrix((len(self.rows), self.count))
        for index, row in enumerate(self.rows):
            for variable, factor in row.items():
                matrix[index, variable] = factor
        upper = [1.0 if flag else np.inf for flag in self.integral]
        result = milp(
            np.array(self.cost),
            integrality=np.array(self.integral),
            bounds=Bounds(0, np.array(upper)),
            constraints=LinearConstraint(matrix.tocsr(), self.low, self.high),
            options={"mip_rel_gap": 0.0},
        )
        return None if result.x is None else float(result.fun)


@dataclass(frozen=True)
class _Arc:
    """Describes a step from node to node in a stage, taken or not."""

    tail: tuple
    head: tuple
    stage: int
    first: float
    other: float
    memory: float = 0.0
    working: float = 0.0


_SOURCE, _SINK = ("source",), ("sink",)


def _arcs(problem: SearchProblem) -> Iterator[_Arc]:
    """Yields the arcs of paths from source to sink through ("in" or "out", stage, layers so far, layout).

    Each path is a solution.
    """
    starts, finishes, last = problem.starts, problem.finishes, problem.stages - 1
    layouts = range(problem.first_resharding.shape[0])
    for index, layout in enumerate(starts.layout.tolist()):
        sizes = starts.memory[index], starts.working[index]
        yield _Arc(_SOURCE, ("in", 0, 0, layout), 0, starts.first_cost[index], starts.other_cost[index], *sizes)
    for stage in range(problem.stages):
        for layer in range(problem.layers):
            yield from _arcs_of_a_layer(problem, stage, layer)
    for stage, layer, layout in itertools.product(range(last), range(1, problem.layers), layouts):
        moved = (costs[layout, problem.boundary] for costs in (problem.first_resharding, problem.other_resharding))
        yield _Arc(("out", stage, layer, layout), ("in", stage + 1, layer, problem.boundary), stage, *moved)
    for layout, (index, to) in itertools.product(layouts, enumerate(finishes.layout.tolist())):
        first = problem.first_resharding[layout, to] + finishes.first_cost[index]
        other = problem.other_resharding[layout, to] + finishes.other_cost[index]
        end = ("out", last, problem.layers, layout)
        yield _Arc(end, _SINK, last, first, other, finishes.memory[index], finishes.working[index])


def _arcs_of_a_layer(problem: SearchProblem, stage: int, layer: int) -> Iterator[_Arc]:
    """Yields arcs from every layout before the layer, as a stage's first layer or after another, by every option."""
    kind, opened = problem.kinds[layer], problem.starts.layout.tolist() if stage == 0 else [problem.boundary]
    entered = opened if (layer == 0) == (stage == 0) else []
    tails = [("in", stage, layer, layout) for layout in sorted(set(entered))]
    if layer:
        tails += [("out", stage, layer, layout) for layout in range(problem.first_resharding.shape[0])]
    for tail, option in itertools.product(tails, np.nonzero(problem.allowed[kind])[0]):
        to = int(problem.layout[option])
        yield _Arc(
            tail,
            ("out", stage, layer + 1, to),
            stage,
            problem.first_resharding[tail[-1], to] + problem.first_cost[kind, option],
            problem.other_resharding[tail[-1], to] + problem.other_cost[kind, option],
            problem.memory(stage)[kind, option],
            problem.working[kind, option],
        )


def mixed_integer(problem: SearchProblem) -> int | None:
    """Returns the smallest cost by HiGHS, with the path through (stage, layer, option) as a flow."""
    program = _Program()
    arcs = {program.variable(): arc for arc in _arcs(problem)}
    _add_flow(program, arcs)
    _add_memory(program, arcs, problem)
    _add_paths(program, arcs, problem)
    found = program.solve()
    return None if found is None else math.ceil(found - 1e-6)


def _add_flow(program: _Program, arcs: dict[int, _Arc]) -> None:
    """Constrains the flow into a node to equal the flow out of it."""
    nodes: dict[tuple, dict[int, float]] = {}  # flow in minus flow out
    for variable, arc in arcs.items():
        nodes.setdefault(arc.tail, {})[variable] = -1.0
        nodes.setdefault(arc.head, {})[variable] = 1.0
    for node, flow in nodes.items():
        wanted = {_SOURCE: -1.0, _SINK: 1.0}.get(node, 0.0)
        program.constrain(flow, wanted, wanted)


def _add_memory(program: _Program, arcs: dict[int, _Arc], problem: SearchProblem) -> None:
    """Constrains a stage's memory and its peak of working memory to the budget."""
    peaks = [program.variable(integral=False) for _ in range(problem.stages)]
    for variable, arc in arcs.items():
        program.constrain({variable: arc.working, peaks[arc.stage]: -1.0}, -np.inf, 0.0)
    for stage, peak in enumerate(peaks):
        held = {variable: arc.memory for variable, arc in arcs.items() if arc.stage == stage}
        program.constrain({**held, peak: 1.0}, -np.inf, problem.budget - problem.stage_memory[stage])


def _add_paths(program: _Program, arcs: dict[int, _Arc], problem: SearchProblem) -> None:
    """Constrains the cost to be at least each of the three paths through every stage."""
    longest = program.variable(1.0, integral=False)
    for stage, warmup in enumerate(problem.warmup.tolist()):
        for less, later in zip((0, warmup / 3, warmup), problem.later_stage_weights, strict=True):
            times = [1 if one < stage else later for one in range(problem.stages)]
            times[stage] = 1 - less
            row = {variable: times[arc.stage] * arc.first for variable, arc in arcs.items()}
            for variable, arc in arcs.items():
                row[variable] += arc.other * (arc.stage == stage)
            constant = problem.stage_other_cost[stage] + np.dot(times, problem.stage_first_cost)
            program.constrain({**row, longest: -1.0}, -np.inf, -constant)
