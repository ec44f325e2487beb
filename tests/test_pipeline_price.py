# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""What a pipeline's stages make of a step: against its schedule, played action by action, and a linear program."""

import numpy as np
import pytest
from scipy.optimize import linprog

from galvatron_hf.planner.branch import Branch, Choice, Options, score
from galvatron_hf.planner.problem import Shape
from galvatron_hf.schedule import PipelineShape, Work, actions


UNIT = 10**6


def played(schedule: str, forward: np.ndarray, backward: np.ndarray, micro_batches: int) -> float:
    """When the last rank has done its work, each action taking its stage's time as soon as what it needs is there."""
    stages = len(forward)
    orders = actions(PipelineShape(schedule=schedule, places=tuple(range(stages))), micro_batches)
    clocks, waiting = np.zeros(stages), [[one for one in order if one.work.is_compute] for order in orders]
    done: dict[tuple[Work, int, int], float] = {}
    while any(waiting):
        for stage, order in enumerate(waiting):
            if not order:
                continue
            first, step = order[0], -1 if order[0].work is Work.FORWARD else 1
            needed = (first.work, stage + step, first.micro_batch)
            if 0 <= stage + step < stages and needed not in done:
                continue
            time = forward[stage] if first.work is Work.FORWARD else backward[stage]
            clocks[stage] = max(clocks[stage], done.get(needed, 0.0)) + time
            done[first.work, stage, first.micro_batch] = clocks[stage]
            order.pop(0)
    return clocks.max()


def priced(schedule: str, times: np.ndarray, micro_batches: int) -> float:
    """The cost of stages of one layer each that take so long for a micro-batch, forward and backward."""
    stages = len(times)
    shape = Shape(pipeline=stages, micro_batches=micro_batches, schedule=schedule, rows=1)
    a = np.rint(UNIT * times).astype(np.int64)[:, None]
    none, nothing = np.zeros(1, dtype=np.int64), np.zeros(stages, dtype=np.int64)
    end = Options(a=none, b=none, memory=none, working=none, layout=none)
    branch = Branch(
        kinds=np.arange(stages),
        a=a,
        b=(micro_batches - 1) * a,
        **dict.fromkeys(("state", "activation", "working", "shared"), 0 * a),
        allowed=a >= 0,
        layout=none,
        move_a=none[:, None],
        move_b=none[:, None],
        boundary=0,
        in_flight=shape.in_flight(),
        at_once=shape.at_once(),
        stage_a=nothing,
        stage_b=nothing,
        stage_memory=nothing,
        starts=end,
        finishes=end,
        budget=1,
        micro_batches=micro_batches,
        ahead=shape.ahead(),
    )
    choice = Choice(bounds=tuple(range(stages + 1)), options=(0,) * stages, start=0, finish=0)
    return score(branch, choice).cost / UNIT


@pytest.mark.parametrize("stages", [1, 2, 4, 8])
def test_a_step_is_what_its_schedule_takes(stages):
    """1F1B of stages that differ by up to a half to 0.2%, by three times to 8%; never too long. GPipe never too short.

    With fewer micro-batches than stages the slowest is counted as if it were the first: up to a sixth too long.
    """
    draw = np.random.default_rng(0)
    for micro_batches in (1, 2, 4, 8, 16):
        for most, low, high in ((1.0, 0.999, 1.001), (1.5, 0.998, 1.001), (3.0, 0.92, 1.001)):
            for _ in range(10):
                times = draw.uniform(1, most, stages)
                forward = times * draw.uniform(0.3, 0.37)
                ratio = priced("1f1b", times, micro_batches) / played("1f1b", forward, times - forward, micro_batches)
                assert low <= ratio <= (high if micro_batches >= stages else 1.17), (micro_batches, times)
                slow = priced("gpipe", times, micro_batches) / played("gpipe", forward, times - forward, micro_batches)
                assert 0.999 <= slow <= 1.17, (micro_batches, times)


def test_the_least_step_is_a_linear_program_s():
    for stages in (2, 3, 4, 8):
        for micro_batches in range(1, 3 * stages):
            shape = Shape(pipeline=stages, micro_batches=micro_batches, schedule="1f1b", rows=1)
            waits, rows = 2 if micro_batches >= stages else 1, []
            for stage, ahead in enumerate(shape.ahead()):
                for done, times in ((micro_batches - 1, 0), (micro_batches - 1 - ahead, waits)):
                    row = [1.0 if one <= stage else times for one in range(stages)]
                    row[stage] += done
                    rows.append([*row, -1.0])
            every = [[1.0] * stages + [0.0]]
            found = linprog([0.0] * stages + [1.0], np.array(rows), np.zeros(len(rows)), every, [1.0])
            assert shape.least_step() == pytest.approx(found.fun, rel=1e-9), (stages, micro_batches)
