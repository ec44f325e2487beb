# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Pipeline schedules without ranks: all work is done once, no order waits for ever, and bubbles are the known ones."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from fractions import Fraction

import pytest

from galvatron_hf.parallel.pipeline.runtime import SENDS_UNDER_WAY
from galvatron_hf.plan.schedule import Action, PipelineShape, Work, actions, can_order, most_in_flight, most_under_way


MICRO_BATCHES = range(1, 13)
UNITS = {Work.FORWARD: 1, Work.BACKWARD: 2, Work.BACKWARD_INPUT: 1, Work.BACKWARD_WEIGHT: 1}
LETTERS = {Work.FORWARD: "F", Work.BACKWARD: "B", Work.BACKWARD_INPUT: "I", Work.BACKWARD_WEIGHT: "W"}


def loop(schedule: str, lists: int, virtual: int = 1) -> PipelineShape:
    return PipelineShape(schedule=schedule, pipeline_rank_of_stage=tuple(range(lists)) * virtual)


def there_and_back(lists: int) -> PipelineShape:
    return PipelineShape(schedule="zero_bubble", pipeline_rank_of_stage=(*range(lists), *reversed(range(lists))))


SHAPES = [
    *(loop(schedule, lists) for schedule in ("gpipe", "1f1b") for lists in (1, 2, 3, 4)),
    *(loop(name, lists, v) for name in ("interleaved", "zero_bubble") for lists in (1, 2, 3, 4) for v in (1, 2, 3)),
    *(there_and_back(lists) for lists in (2, 3, 4)),
]
every_shape = pytest.mark.parametrize(
    "shape", SHAPES, ids=lambda shape: f"{shape.schedule}-{shape.pipeline_rank_of_stage}"
)


def is_ready(action: Action, done: set[Action], last: int) -> bool:
    """Returns whether the inputs of an action exist, wherever they were computed."""
    stage, part = action.stage, action.micro_batch
    if action.work is Work.FORWARD:
        return stage == 0 or Action(Work.FORWARD, stage - 1, part) in done
    if action.work is Work.BACKWARD_WEIGHT:
        return Action(Work.BACKWARD_INPUT, stage, part) in done
    behind = {Action(work, stage + 1, part) for work in (Work.BACKWARD, Work.BACKWARD_INPUT)}
    return Action(Work.FORWARD, stage, part) in done and (stage == last or bool(behind & done))


class Simulation:
    """All rank lists at once, with transfers that take no time but wait for both ends.

    Transfers of two lists in one direction run one after the other, as they do on one communicator of a GPU. A
    compute waits for what it needs, a backward also for the activations it sent, and no more than
    [`SENDS_UNDER_WAY`] gradients are on their way.
    """

    def __init__(self, shape: PipelineShape, micro_batches: int):
        self.shape = shape
        self.orders = [deque(order) for order in actions(shape, micro_batches)]
        self.clocks = [0] * shape.pipeline_ranks
        self.busy = [0] * shape.pipeline_ranks
        self.done: set[Action] = set()
        self.queues: dict[tuple, deque] = {}
        self.free: Counter = Counter()
        self.arrived: dict[tuple[str, int, int], int] = {}
        self.leaving: list[deque] = [deque() for _ in range(shape.pipeline_ranks)]
        self.ends: dict[Action, int] = {}

    def run(self) -> Simulation:
        moved = True
        while moved:
            moved = False
            for place in range(self.shape.pipeline_ranks):
                while self.orders[place] and self._advance(place, self.orders[place][0]):
                    self.orders[place].popleft()
                    moved = True
        stuck = [order[0] for order in self.orders if order]
        assert not stuck, f"these wait for ever: {stuck}"
        assert not any(self.queues.values()), "a transfer has one end"
        return self

    @property
    def idle_share(self) -> Fraction:
        return 1 - Fraction(sum(self.busy), self.shape.pipeline_ranks * max(self.clocks))

    def _transfer(self, action: Action) -> tuple[str, int, int]:
        """Direction, stage that sends, micro-batch."""
        behind = {Work.RECEIVE_FORWARD: -1, Work.RECEIVE_BACKWARD: 1}
        return action.work.direction, action.stage + behind.get(action.work, 0), action.micro_batch

    def _ends(self, key: tuple[str, int, int]) -> list[int]:
        """The lists that send and receive."""
        direction, sender, _ = key
        return [
            self.shape.pipeline_rank_of_stage[stage]
            for stage in (sender, sender + (1 if direction == "forward" else -1))
        ]

    def _end(self, key: tuple[str, int, int], place: int) -> tuple:
        """Returns the place of a transfer in the order of one of its pipeline ranks."""
        return (place, key[0], *sorted(self._ends(key)))

    def _advance(self, place: int, action: Action) -> bool:
        if action.work.is_compute:
            return self._compute(place, action)
        key = self._transfer(action)
        if action.work is Work.SEND_BACKWARD:
            self.leaving[place].append(key)
            if not self._wait_for_sends(place):
                self.leaving[place].pop()
                return False
        if not action.work.is_receive:
            works = [Work.FORWARD] if key[0] == "forward" else [Work.BACKWARD, Work.BACKWARD_INPUT]
            assert any(Action(work, action.stage, action.micro_batch) in self.done for work in works)
        end = self._end(key, place)
        self.queues.setdefault(end, deque()).append((key, self.clocks[place]))
        self._move(end)
        return True

    def _wait_for_sends(self, place: int) -> bool:
        leaving = self.leaving[place]
        while len(leaving) > SENDS_UNDER_WAY:
            if leaving[0] not in self.arrived:
                return False
            self.clocks[place] = max(self.clocks[place], self.arrived[leaving.popleft()])
        return True

    def _compute(self, place: int, action: Action) -> bool:
        last = self.shape.stages - 1
        stage, part = action.stage, action.micro_batch
        forward, needed = action.work is Work.FORWARD, []
        neighbour = stage + (-1 if forward else 1)
        if action.work is not Work.BACKWARD_WEIGHT:
            if 0 <= neighbour <= last and self.shape.pipeline_rank_of_stage[neighbour] != place:
                needed.append(("forward" if forward else "backward", neighbour, part))
                if not forward:
                    needed.append(("forward", stage, part))
        if any(key not in self.arrived for key in needed):
            return False
        assert is_ready(action, self.done, last), f"{action} has nothing to compute from"
        begin = max([self.clocks[place], *(self.arrived[key] for key in needed)])
        self.clocks[place] = begin + UNITS[action.work]
        self.busy[place] += UNITS[action.work]
        self.done.add(action)
        return True

    def _move(self, end: tuple) -> None:
        """Completes what is first in line at `end` and at its other end, and then what comes next."""
        if not self.queues.get(end):
            return
        key, _ = self.queues[end][0]
        ends = [self._end(key, place) for place in self._ends(key)]
        if not all(self.queues.get(end) and self.queues[end][0][0] == key for end in ends):
            return
        posted = [self.queues[end].popleft()[1] for end in ends]
        self.arrived[key] = time = max(*posted, *(self.free[end] for end in ends))
        for end in ends:
            self.free[end] = time
        for end in ends:
            self._move(end)


def compute_of(order: tuple[Action, ...]) -> Iterator[Action]:
    return (action for action in order if action.work.is_compute)


@every_shape
def test_every_stage_does_its_work_once(shape):
    split = shape.schedule == "zero_bubble"
    for micro_batches in MICRO_BATCHES:
        works = [Work.FORWARD, Work.BACKWARD_INPUT, Work.BACKWARD_WEIGHT] if split else [Work.FORWARD, Work.BACKWARD]
        for place, order in enumerate(actions(shape, micro_batches)):
            stages = [stage for stage, owner in enumerate(shape.pipeline_rank_of_stage) if owner == place]
            wanted = [Action(w, stage, part) for w in works for stage in stages for part in range(micro_batches)]
            assert Counter(compute_of(order)) == Counter(wanted), micro_batches


@every_shape
def test_nothing_waits_for_ever(shape):
    for micro_batches in MICRO_BATCHES:
        simulation = Simulation(shape, micro_batches).run()
        units = 3 * micro_batches * shape.stages // shape.pipeline_ranks
        assert simulation.busy == [units] * shape.pipeline_ranks


@every_shape
def test_transfers_have_two_ends_in_one_order(shape):
    """Without tags, a message between two ranks is told from the next by its order alone."""
    for micro_batches in MICRO_BATCHES:
        sent, received = {}, {}
        for place, order in enumerate(actions(shape, micro_batches)):
            for action in order:
                if action.work.is_compute:
                    continue
                step = (-1 if action.work.direction == "backward" else 1) * (-1 if action.work.is_receive else 1)
                peer = shape.pipeline_rank_of_stage[action.stage + step]
                assert peer != place
                sender = action.stage + (step if action.work.is_receive else 0)
                pair = (peer, place) if action.work.is_receive else (place, peer)
                side = received if action.work.is_receive else sent
                side.setdefault((*pair, action.work.direction), []).append((sender, action.micro_batch))
        assert sent == received
        ends = sum(
            shape.pipeline_rank_of_stage[stage] != shape.pipeline_rank_of_stage[stage + 1]
            for stage in range(shape.stages - 1)
        )
        assert sum(map(len, sent.values())) == 2 * ends * micro_batches


def in_flight(order: tuple[Action, ...]) -> int:
    """The most micro-batches, of all stages together, between forward and the end of the backward."""
    now = most = 0
    for action in order:
        now += action.work is Work.FORWARD
        most = max(most, now)
        now -= action.work in (Work.BACKWARD, Work.BACKWARD_WEIGHT)
    return most


@pytest.mark.parametrize("lists", [1, 2, 3, 4])
def test_micro_batches_in_flight(lists):
    for micro_batches in MICRO_BATCHES:
        gpipe = actions(loop("gpipe", lists), micro_batches)
        alternating = actions(loop("1f1b", lists), micro_batches)
        for stage in range(lists):
            assert most_in_flight(gpipe[stage], stage) == micro_batches
            assert most_in_flight(alternating[stage], stage) == min(micro_batches, lists - stage)
        assert most_under_way(loop("1f1b", lists), micro_batches) == min(micro_batches, lists)
        assert most_under_way(loop("gpipe", lists), micro_batches) == (1 if lists == 1 else micro_batches)


@pytest.mark.parametrize("virtual", [2, 3])
@pytest.mark.parametrize("lists", [2, 3, 4])
def test_micro_batches_in_flight_when_interleaved(lists, virtual):
    """Two forwards ahead for each list behind, and a round of each stage but the last (arXiv 2104.04473)."""
    shape = loop("interleaved", lists, virtual)
    for micro_batches in MICRO_BATCHES:
        if not can_order(shape, micro_batches):
            continue
        a_round = micro_batches // max(1, micro_batches // lists)
        for place, order in enumerate(actions(shape, micro_batches)):
            ahead = (virtual - 1) * a_round + 2 * (lists - 1 - place)
            assert in_flight(order) == min(virtual * micro_batches, ahead + 1)
            own = [most_in_flight(order, stage) for stage in range(place, shape.stages, lists)]
            assert max(own) <= in_flight(order) <= sum(own)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
@pytest.mark.parametrize("lists", [1, 2, 3, 4])
def test_bubbles(schedule, lists):
    """Every rank list idles for p - 1 forwards and backwards, of m * v (arXiv 2104.04473, section 2.2)."""
    for virtual in (1, 2, 3) if schedule == "interleaved" else (1,):
        for micro_batches in MICRO_BATCHES:
            if virtual > 1 and micro_batches % lists:
                continue
            simulation = Simulation(loop(schedule, lists, virtual), micro_batches).run()
            bubble = Fraction(lists - 1, virtual * micro_batches + lists - 1)
            assert simulation.idle_share == bubble, (virtual, micro_batches)


@pytest.mark.parametrize("lists", [2, 3, 4])
def test_bubbles_of_zero_bubble_schedules(lists):
    """Every rank list idles for p - 1 forwards alone (arXiv 2401.10241), given enough micro-batches."""
    for shape in (loop("zero_bubble", lists), loop("zero_bubble", lists, 2), there_and_back(lists)):
        for micro_batches in range(2 * lists - 1, 13):
            if not can_order(shape, micro_batches):
                continue
            work = 3 * micro_batches * shape.virtual_stages
            simulation = Simulation(shape, micro_batches).run()
            assert simulation.idle_share == Fraction(lists - 1, work + lists - 1), (shape, micro_batches)


def text(order: tuple[Action, ...]) -> str:
    return " ".join(f"{LETTERS[action.work]}{action.stage}.{action.micro_batch}" for action in compute_of(order))


PINNED = {
    (loop("interleaved", 2, 2), 4): (
        "F0.0 F0.1 F2.0 F2.1 F0.2 B2.0 F0.3 B2.1 F2.2 B0.0 F2.3 B0.1 B2.2 B2.3 B0.2 B0.3",
        "F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 F1.2 B1.0 F1.3 B1.1 F3.2 B3.2 F3.3 B3.3 B1.2 B1.3",
    ),
    (loop("interleaved", 3, 2), 3): (
        "F0.0 F0.1 F0.2 F3.0 F3.1 F3.2 B3.0 B3.1 B3.2 B0.0 B0.1 B0.2",
        "F1.0 F1.1 F1.2 F4.0 F4.1 F4.2 B4.0 B4.1 B4.2 B1.0 B1.1 B1.2",
        "F2.0 F2.1 F2.2 F5.0 B5.0 F5.1 B5.1 F5.2 B5.2 B2.0 B2.1 B2.2",
    ),
    (loop("zero_bubble", 2), 4): (
        "F0.0 F0.1 I0.0 W0.0 F0.2 I0.1 W0.1 F0.3 I0.2 W0.2 I0.3 W0.3",
        "F1.0 I1.0 F1.1 I1.1 W1.0 F1.2 I1.2 W1.1 F1.3 I1.3 W1.2 W1.3",
    ),
    (loop("zero_bubble", 2, 2), 2): (
        "F0.0 F0.1 F2.0 F2.1 I2.0 W2.0 I2.1 W2.1 I0.0 W0.0 I0.1 W0.1",
        "F1.0 F1.1 F3.0 I3.0 F3.1 I3.1 W3.0 I1.0 W3.1 I1.1 W1.0 W1.1",
    ),
    (there_and_back(2), 3): (
        "F0.0 F0.1 F0.2 F3.0 I3.0 W3.0 F3.1 I3.1 W3.1 I0.0 W0.0 F3.2 I3.2 W3.2 I0.1 W0.1 I0.2 W0.2",
        "F1.0 F2.0 F1.1 F2.1 I2.0 W2.0 F1.2 I1.0 W1.0 F2.2 I2.1 W2.1 I1.1 I2.2 I1.2 W1.1 W2.2 W1.2",
    ),
}


@pytest.mark.parametrize("shape, micro_batches", list(PINNED), ids=lambda value: str(value).split("(")[0])
def test_orders_of_torch_are_those_of_the_pinned_version(shape, micro_batches):
    """A cost model and the closed forms of memory count on them; a new version of torch may bring others."""
    assert tuple(map(text, actions(shape, micro_batches))) == PINNED[shape, micro_batches]


@every_shape
def test_numbers_that_a_schedule_does_not_order_keep_no_more_in_flight(shape):
    """A last, smaller global batch has fewer micro-batches than the plan: it needs no more memory."""
    for micro_batches in MICRO_BATCHES:
        if not can_order(shape, micro_batches):
            more = next(count for count in range(micro_batches, 2 * micro_batches) if can_order(shape, count))
            for order, whole in zip(actions(shape, micro_batches), actions(shape, more), strict=True):
                left = [action for action in compute_of(whole) if action.micro_batch < micro_batches]
                assert list(compute_of(order)) == left and in_flight(order) <= in_flight(whole)


def test_which_numbers_a_schedule_does_not_order():
    shape = loop("interleaved", 2, 2)
    assert [count for count in MICRO_BATCHES if not can_order(shape, count)] == [5, 7, 9, 11]
