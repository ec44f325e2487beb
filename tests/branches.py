# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Random search problems, and two other ways to solve them: enumeration and a mixed-integer program."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from scipy import sparse
from scipy.optimize import Bounds, LinearConstraint, milp

from galvatron_hf.planner.solver.problem import Choice, Options, SearchProblem, score


def random_branch(
    seed: int, *, layers: int, stages: int, options: int, layouts: int = 2, kinds: int = 1, tightness: float = 0.5
) -> SearchProblem:
    """Faster options need more memory, as a rule; `tightness` 0 asks for the least memory, 1 for the most.

    Of every choice B is at least as many times A as micro-batches go ahead of a first gradient.
    """
    draw = np.random.default_rng(seed)
    speed = draw.integers(5, 40, (kinds, options))
    a, stage_a = speed + draw.integers(0, 30, (kinds, options)), draw.integers(0, 9, stages)
    state = 400 // speed + draw.integers(0, 20, (kinds, options))
    activation = 200 // speed + draw.integers(0, 10, (kinds, options))
    shared = (draw.random((kinds, options)) * np.minimum(state, activation)).astype(np.int64)
    ends = [draw.integers(1, 4) for _ in range(2)]
    in_flight = np.arange(stages, 0, -1)
    order = np.sort(draw.integers(0, kinds, layers)) if draw.random() < 0.5 else draw.integers(0, kinds, layers)
    moves = [draw.integers(0, 12, (layouts, layouts)) * (1 - np.eye(layouts, dtype=np.int64)) for _ in range(2)]
    ahead = np.arange(stages - 1, -1, -1) * int(draw.random() < 0.7)
    most_ahead = int(ahead.max())
    least = (state + in_flight[:, None, None] * activation).min() * layers / stages
    most = (state + in_flight[:, None, None] * activation).max() * layers / stages
    return SearchProblem(
        kinds=order,
        a=a,
        b=most_ahead * a + speed * draw.integers(0, 5),
        state=state,
        activation=activation,
        working=draw.integers(0, 40, (kinds, options)),
        allowed=draw.random((kinds, options)) < 0.9,
        layout=draw.integers(0, layouts, options),
        move_a=moves[0],
        move_b=most_ahead * moves[0] + moves[1],
        boundary=int(draw.integers(0, layouts)),
        in_flight=in_flight,
        shared=shared,
        at_once=draw.random(stages) < 0.3,
        stage_a=stage_a,
        stage_b=most_ahead * stage_a + draw.integers(0, 9, stages),
        stage_memory=draw.integers(0, 20, stages),
        starts=_ends(draw, ends[0], layouts, most_ahead),
        finishes=_ends(draw, ends[1], layouts, most_ahead),
        budget=int(least + tightness * (most - least)) + 60,
        ahead=ahead,
        waits=(int(draw.random() < 0.2), 1, 2) if most_ahead else (1, 1, 1),
    )


def _ends(draw: np.random.Generator, count: int, layouts: int, most_ahead: int) -> Options:
    sizes = (count,)
    a = draw.integers(0, 30, sizes)
    return Options(
        a=a,
        b=most_ahead * a + draw.integers(0, 30, sizes),
        memory=draw.integers(0, 30, sizes),
        working=draw.integers(0, 60, sizes),
        layout=draw.integers(0, layouts, sizes),
    )


def brute_force(branch: SearchProblem) -> int | None:
    """The least cost of all solutions that fit; None if none does."""
    best = None
    cuts = itertools.combinations(range(1, branch.layers), branch.stages - 1)
    allowed = [np.nonzero(branch.allowed[kind])[0].tolist() for kind in branch.kinds]
    for cut in cuts:
        bounds = (0, *cut, branch.layers)
        for options in itertools.product(*allowed):
            for start, finish in itertools.product(range(len(branch.starts)), range(len(branch.finishes))):
                found = score(branch, Choice(bounds=bounds, options=options, start=start, finish=finish))
                if max(found.memory) <= branch.budget and (best is None or found.cost < best):
                    best = found.cost
    return best


class _Program:
    """Variables and constraints of a mixed-integer program, row by row."""

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
    """A step from node to node, in a stage: nothing of it, or all."""

    tail: tuple
    head: tuple
    stage: int
    a: float
    b: float
    memory: float = 0.0
    working: float = 0.0


_SOURCE, _SINK = ("source",), ("sink",)


def _arcs(branch: SearchProblem) -> Iterator[_Arc]:
    """Those of the ways from source to sink through ("in" or "out", stage, layers so far, layout), one a solution."""
    starts, finishes, last = branch.starts, branch.finishes, branch.stages - 1
    layouts = range(branch.move_a.shape[0])
    for index, layout in enumerate(starts.layout.tolist()):
        sizes = starts.memory[index], starts.working[index]
        yield _Arc(_SOURCE, ("in", 0, 0, layout), 0, starts.a[index], starts.b[index], *sizes)
    for stage in range(branch.stages):
        for layer in range(branch.layers):
            yield from _arcs_of_a_layer(branch, stage, layer)
    for stage, layer, layout in itertools.product(range(last), range(1, branch.layers), layouts):
        moved = branch.move_a[layout, branch.boundary], branch.move_b[layout, branch.boundary]
        yield _Arc(("out", stage, layer, layout), ("in", stage + 1, layer, branch.boundary), stage, *moved)
    for layout, (index, to) in itertools.product(layouts, enumerate(finishes.layout.tolist())):
        a, b = branch.move_a[layout, to] + finishes.a[index], branch.move_b[layout, to] + finishes.b[index]
        end = ("out", last, branch.layers, layout)
        yield _Arc(end, _SINK, last, a, b, finishes.memory[index], finishes.working[index])


def _arcs_of_a_layer(branch: SearchProblem, stage: int, layer: int) -> Iterator[_Arc]:
    """From every layout in which it can be entered, as a stage's first layer or behind another, by every option."""
    kind, opened = branch.kinds[layer], branch.starts.layout.tolist() if stage == 0 else [branch.boundary]
    entered = opened if (layer == 0) == (stage == 0) else []
    tails = [("in", stage, layer, layout) for layout in sorted(set(entered))]
    if layer:
        tails += [("out", stage, layer, layout) for layout in range(branch.move_a.shape[0])]
    for tail, option in itertools.product(tails, np.nonzero(branch.allowed[kind])[0]):
        to = int(branch.layout[option])
        yield _Arc(
            tail,
            ("out", stage, layer + 1, to),
            stage,
            branch.move_a[tail[-1], to] + branch.a[kind, option],
            branch.move_b[tail[-1], to] + branch.b[kind, option],
            branch.memory(stage)[kind, option],
            branch.working[kind, option],
        )


def mixed_integer(branch: SearchProblem) -> int | None:
    """The least cost, by HiGHS: a way through (stage, layer, option) as a flow, the rest as rows."""
    program = _Program()
    arcs = {program.variable(): arc for arc in _arcs(branch)}
    _add_flow(program, arcs)
    _add_memory(program, arcs, branch)
    _add_paths(program, arcs, branch)
    found = program.solve()
    return None if found is None else math.ceil(found - 1e-6)


def _add_flow(program: _Program, arcs: dict[int, _Arc]) -> None:
    """One way: what comes to a node goes on from it."""
    nodes: dict[tuple, dict[int, float]] = {}  # flow in minus flow out
    for variable, arc in arcs.items():
        nodes.setdefault(arc.tail, {})[variable] = -1.0
        nodes.setdefault(arc.head, {})[variable] = 1.0
    for node, flow in nodes.items():
        wanted = {_SOURCE: -1.0, _SINK: 1.0}.get(node, 0.0)
        program.constrain(flow, wanted, wanted)


def _add_memory(program: _Program, arcs: dict[int, _Arc], branch: SearchProblem) -> None:
    """A stage's sum and its largest working memory fit."""
    peaks = [program.variable(integral=False) for _ in range(branch.stages)]
    for variable, arc in arcs.items():
        program.constrain({variable: arc.working, peaks[arc.stage]: -1.0}, -np.inf, 0.0)
    for stage, peak in enumerate(peaks):
        held = {variable: arc.memory for variable, arc in arcs.items() if arc.stage == stage}
        program.constrain({**held, peak: 1.0}, -np.inf, branch.budget - branch.stage_memory[stage])


def _add_paths(program: _Program, arcs: dict[int, _Arc], branch: SearchProblem) -> None:
    """The cost is at least that of the three paths through every stage."""
    longest = program.variable(1.0, integral=False)
    for stage, ahead in enumerate(branch.ahead.tolist()):
        for less, behind in zip((0, ahead / 3, ahead), branch.waits, strict=True):
            times = [1 if one < stage else behind for one in range(branch.stages)]
            times[stage] = 1 - less
            row = {variable: times[arc.stage] * arc.a for variable, arc in arcs.items()}
            for variable, arc in arcs.items():
                row[variable] += arc.b * (arc.stage == stage)
            constant = branch.stage_b[stage] + np.dot(times, branch.stage_a)
            program.constrain({**row, longest: -1.0}, -np.inf, -constant)
