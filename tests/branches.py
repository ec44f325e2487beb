# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Random search problems, and two other ways to solve them: enumeration and a mixed-integer program."""

import itertools
import math

import numpy as np
from scipy import sparse
from scipy.optimize import Bounds, LinearConstraint, milp

from galvatron_hf.planner.branch import Branch, Choice, Options, score


def random_branch(
    seed: int, *, layers: int, stages: int, options: int, layouts: int = 2, kinds: int = 1, tightness: float = 0.5
) -> Branch:
    """Faster options need more memory, as a rule; `tightness` 0 asks for the least memory, 1 for the most."""
    draw = np.random.default_rng(seed)
    speed = draw.integers(5, 40, (kinds, options))
    state = 400 // speed + draw.integers(0, 20, (kinds, options))
    activation = 200 // speed + draw.integers(0, 10, (kinds, options))
    shared = (draw.random((kinds, options)) * np.minimum(state, activation)).astype(np.int64)
    ends = [draw.integers(1, 4) for _ in range(2)]
    in_flight = np.arange(stages, 0, -1)
    order = np.sort(draw.integers(0, kinds, layers)) if draw.random() < 0.5 else draw.integers(0, kinds, layers)
    moves = [draw.integers(0, 12, (layouts, layouts)) * (1 - np.eye(layouts, dtype=np.int64)) for _ in range(2)]
    micro_batches = int(draw.integers(1, 2 * stages + 3))
    ahead = np.arange(stages - 1, -1, -1) * (micro_batches >= stages)
    least = (state + in_flight[:, None, None] * activation).min() * layers / stages
    most = (state + in_flight[:, None, None] * activation).max() * layers / stages
    return Branch(
        kinds=order,
        a=speed + draw.integers(0, 30, (kinds, options)),
        b=speed * draw.integers(1, 5),
        state=state,
        activation=activation,
        working=draw.integers(0, 40, (kinds, options)),
        allowed=draw.random((kinds, options)) < 0.9,
        layout=draw.integers(0, layouts, options),
        move_a=moves[0],
        move_b=moves[1],
        boundary=int(draw.integers(0, layouts)),
        in_flight=in_flight,
        shared=shared,
        at_once=draw.random(stages) < 0.3,
        stage_a=draw.integers(0, 9, stages),
        stage_b=draw.integers(0, 9, stages),
        stage_memory=draw.integers(0, 20, stages),
        starts=_ends(draw, ends[0], layouts),
        finishes=_ends(draw, ends[1], layouts),
        budget=int(least + tightness * (most - least)) + 60,
        micro_batches=micro_batches,
        ahead=ahead,
    )


def _ends(draw: np.random.Generator, count: int, layouts: int) -> Options:
    sizes = (count,)
    return Options(
        a=draw.integers(0, 30, sizes),
        b=draw.integers(0, 30, sizes),
        memory=draw.integers(0, 30, sizes),
        working=draw.integers(0, 60, sizes),
        layout=draw.integers(0, layouts, sizes),
    )


def brute_force(branch: Branch) -> int | None:
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


def mixed_integer(branch: Branch) -> int | None:
    """The least cost, by HiGHS: a path through (stage, layer, option) as a flow, memory and the slowest as rows."""
    program, stages, layers = _Program(), branch.stages, branch.layers
    nodes: dict[tuple, dict[int, float]] = {}  # flow in minus flow out
    memory: list[dict[int, float]] = [{} for _ in range(stages)]
    first: list[dict[int, float]] = [{} for _ in range(stages)]  # A
    others: list[dict[int, float]] = [{} for _ in range(stages)]  # B
    peaks = [program.variable(integral=False) for _ in range(stages)]
    slowest = program.variable(1.0, integral=False)

    def arc(tail: tuple, head: tuple, stage: int, a: float, b: float, held: float, working: float) -> None:
        variable = program.variable()
        nodes.setdefault(tail, {})[variable] = -1.0
        nodes.setdefault(head, {})[variable] = 1.0
        first[stage][variable], others[stage][variable] = a, b
        memory[stage][variable] = held
        program.constrain({variable: working, peaks[stage]: -1.0}, -np.inf, 0.0)

    starts, finishes, last = branch.starts, branch.finishes, stages - 1
    for index in range(len(starts)):
        head = ("in", 0, 0, int(starts.layout[index]))
        arc(("source",), head, 0, starts.a[index], starts.b[index], starts.memory[index], starts.working[index])
    entries = {(0, int(layout)) for layout in starts.layout}
    for stage in range(stages):
        for layer in range(layers):
            kind = branch.kinds[layer]
            for option in np.nonzero(branch.allowed[kind])[0]:
                to = int(branch.layout[option])
                froms = range(branch.move_a.shape[0])
                for layout in froms:
                    tails = [("out", stage, layer, layout)] if layer else []
                    if (stage, layout) in entries and layer == 0 or (stage and layout == branch.boundary and layer):
                        tails.append(("in", stage, layer, layout))
                    for tail in tails:
                        arc(
                            tail,
                            ("out", stage, layer + 1, to),
                            stage,
                            branch.move_a[layout, to] + branch.a[kind, option],
                            branch.move_b[layout, to] + branch.b[kind, option],
                            branch.memory(stage)[kind, option],
                            branch.working[kind, option],
                        )
    for stage in range(last):
        for layer in range(1, layers):
            for layout in range(branch.move_a.shape[0]):
                arc(
                    ("out", stage, layer, layout),
                    ("in", stage + 1, layer, branch.boundary),
                    stage,
                    branch.move_a[layout, branch.boundary],
                    branch.move_b[layout, branch.boundary],
                    0.0,
                    0.0,
                )
    for layout in range(branch.move_a.shape[0]):
        for index in range(len(finishes)):
            to = int(finishes.layout[index])
            arc(
                ("out", last, layers, layout),
                ("sink",),
                last,
                branch.move_a[layout, to] + finishes.a[index],
                branch.move_b[layout, to] + finishes.b[index],
                finishes.memory[index],
                finishes.working[index],
            )
    for node, flow in nodes.items():
        wanted = {("source",): -1.0, ("sink",): 1.0}.get(node, 0.0)
        program.constrain(flow, wanted, wanted)
    for stage in range(stages):
        room = branch.budget - branch.stage_memory[stage]
        program.constrain({**memory[stage], peaks[stage]: 1.0}, -np.inf, room)
        # The two paths through the stage; with fewer micro-batches than stages both are the sum of A and its B.
        few = branch.micro_batches < stages
        done = 1.0 if few or stages == 1 else 1 - (last - stage) / (branch.micro_batches - 1)
        for share, waits in ((1.0, 0), (done, 1 if few else 2)):
            times = [1 if one <= stage else waits for one in range(stages)]
            row = {slowest: -1.0} | {variable: share * b for variable, b in others[stage].items()}
            for one, often in enumerate(times):
                row |= {variable: row.get(variable, 0.0) + often * a for variable, a in first[one].items()}
            constant = share * branch.stage_b[stage] + np.dot(times, branch.stage_a)
            program.constrain(row, -np.inf, -constant)
    found = program.solve()
    return None if found is None else math.ceil(found - 1e-6)
