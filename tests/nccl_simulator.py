# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Plays the actions of a pipeline, or the collectives that ranks have issued, on devices with NCCL's rules, without
ranks or devices.

- The host of a rank runs ahead of its device: it puts operations on streams, whose operations run in order.
- A message is an operation on the stream of its communicator, on both ranks. It begins when it is the next one of both
  streams and when both have computed what their hosts had asked for before; then both end. A communicator joins two
  ranks in one direction of the pipeline.
- A communicator is made when the first message on it is posted, unless `made_before`: the host waits until its peer
  posts one too. NCCL makes no promise that two operations of a device run at the same time: with `streams`, all
  communicators of a device share as many streams.
- A host waits for the whole device when an allocation frees memory, a kernel is loaded or memory is pinned.

Source of the rules: NVIDIA's NCCL documentation, "Using multiple NCCL communicators concurrently" and "Group calls".
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from galvatron_hf.parallel.pipeline.runtime import SENDS_UNDER_WAY
from galvatron_hf.plan.schedule import Action, PipelineShape, Work


COMPUTE = "compute"
_NEEDS = {
    Work.FORWARD: Work.RECEIVE_FORWARD,
    Work.BACKWARD: Work.RECEIVE_BACKWARD,
    Work.BACKWARD_INPUT: Work.RECEIVE_BACKWARD,
}
Channel = tuple[int, int, str]  # the lower and the higher rank, and the direction
Waits = Iterator[Callable[[], bool]]  # a host yields what it waits for


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Says when hosts wait, and how communicators share a device.

    Attributes:
        made_before (`bool`): communicators are made before the first step.
        waits_for_device (`bool`): the host waits for all streams after each compute.
        waits_for_stream (`bool`): the host waits for the compute stream after each compute.
        measures (`bool`): the host waits for all streams before and after each action.
        streams (`int`, *optional*): streams that all communicators of a device share; None is one each.
    """

    made_before: bool = True
    waits_for_device: bool = False
    waits_for_stream: bool = False
    measures: bool = False
    streams: int | None = None


@dataclass(eq=False)
class _Operation:
    stream: object
    after: list[_Operation]
    done: bool = False

    def may_run(self) -> bool:
        return all(operation.done for operation in self.after)


@dataclass
class _Device:
    streams: dict[object, list[_Operation]] = field(default_factory=lambda: defaultdict(list))
    ended: dict[object, int] = field(default_factory=lambda: defaultdict(int))

    def put(self, stream: object, after: Sequence[_Operation] = ()) -> _Operation:
        operation = _Operation(stream, list(after))
        self.streams[stream].append(operation)
        return operation

    def is_next(self, operation: _Operation) -> bool:
        queue, at = self.streams[operation.stream], self.ended[operation.stream]
        return at < len(queue) and queue[at] is operation

    def end(self, operation: _Operation) -> None:
        operation.done = True
        self.ended[operation.stream] += 1

    def all_done(self, *streams: object) -> Callable[[], bool]:
        waited = [operation for stream in streams or tuple(self.streams) for operation in self.streams[stream]]
        return lambda: all(operation.done for operation in waited)


class Simulation:
    """Plays one step; `orders` are the actions of each pipeline rank, without backwards in an evaluation."""

    def __init__(self, shape: PipelineShape, orders: Sequence[Sequence[Action]], rules: Rules):
        self.shape, self.rules = shape, rules
        self.trains = any(action.work is Work.SEND_BACKWARD for order in orders for action in order)
        self.devices = [_Device() for _ in orders]
        self.messages: dict[Channel, dict[int, list[_Operation]]] = defaultdict(lambda: defaultdict(list))
        self.joined: dict[Channel, set[int]] = defaultdict(set)
        self.numbers: list[dict[Channel, int]] = [{} for _ in orders]
        self.at = ["its begin"] * len(orders)
        self.hosts = [self._host(rank, order) for rank, order in enumerate(orders)]

    def run(self) -> list[str]:
        """Returns where each host stands that never goes on; nothing if the step ends."""
        waits: dict[int, Callable[[], bool]] = dict.fromkeys(range(len(self.hosts)), lambda: True)
        while waits:
            moved = False
            for rank in list(waits):
                while rank in waits and waits[rank]():
                    moved = True
                    waits[rank] = next(self.hosts[rank], None)
                    if waits[rank] is None:
                        del waits[rank]
            while self._run_devices():
                moved = True
            if not moved:
                return [f"rank {rank} at {self.at[rank]}" for rank in waits]
        return []

    def _run_devices(self) -> bool:
        moved = False
        for (low, high, _), sides in self.messages.items():
            for one, other in zip(sides[low], sides[high], strict=False):
                if one.done:
                    continue
                ready = self.devices[low].is_next(one) and self.devices[high].is_next(other)
                if ready and one.may_run() and other.may_run():
                    self.devices[low].end(one)
                    self.devices[high].end(other)
                    moved = True
                break
        for device in self.devices:
            for operation in device.streams[COMPUTE][device.ended[COMPUTE] :]:
                if not operation.may_run():
                    break
                device.end(operation)
                moved = True
        return moved

    # ---- The host of a rank, as in `galvatron_hf.parallel.pipeline.runtime` ----

    def _host(self, rank: int, order: Sequence[Action]) -> Waits:
        device = self.devices[rank]
        arriving: dict[tuple, _Operation] = {}
        sent: dict[tuple, _Operation] = {}
        under_way: list[_Operation] = []
        for action in order:
            self.at[rank] = f"{action.work.value} of stage {action.stage}, micro-batch {action.micro_batch}"
            key = (action.stage, action.micro_batch)
            if self.rules.measures and not action.work.is_receive:
                yield device.all_done()
            if action.work.is_compute:
                yield from self._compute(rank, action, arriving, sent)
            else:
                message = yield from self._message(rank, action)
                if action.work.is_receive:
                    arriving[action.work, *key] = message
                elif action.work is Work.SEND_FORWARD and self.trains:
                    sent[key] = message
                else:
                    under_way.append(message)
                    while len(under_way) > SENDS_UNDER_WAY:
                        device.put(COMPUTE, [under_way.pop(0)])
            if self.rules.measures and not action.work.is_receive:
                yield device.all_done()
        device.put(COMPUTE, under_way)
        self.at[rank] = "its end"
        yield device.all_done()  # the norm of the gradients is read

    def _compute(self, rank: int, action: Action, arriving: dict, sent: dict) -> Waits:
        device, key = self.devices[rank], (action.stage, action.micro_batch)
        arrived = arriving.pop((_NEEDS.get(action.work), *key), None)
        if arrived is not None:
            device.put(COMPUTE, [arrived])
            if self.rules.measures:
                yield device.all_done()
        if action.work in (Work.BACKWARD, Work.BACKWARD_INPUT) and key in sent:
            device.put(COMPUTE, [sent.pop(key)])
        device.put(COMPUTE)
        if self.rules.waits_for_stream:
            yield device.all_done(COMPUTE)
        if self.rules.waits_for_device:
            yield device.all_done()

    def _message(self, rank: int, action: Action) -> Iterator:
        onwards = action.work in (Work.SEND_FORWARD, Work.RECEIVE_BACKWARD)
        peer = self.shape.pipeline_rank_of_stage[action.stage + (1 if onwards else -1)]
        channel = (min(rank, peer), max(rank, peer), action.work.direction)
        if not self.rules.made_before and rank not in self.joined[channel]:
            self.joined[channel].add(rank)
            yield lambda: len(self.joined[channel]) == 2
        device, stream = self.devices[rank], channel
        if self.rules.streams is not None:
            numbers = self.numbers[rank]
            stream = numbers.setdefault(channel, len(numbers)) % self.rules.streams
        message = device.put(stream, device.streams[COMPUTE][-1:])
        self.messages[channel][rank].append(message)
        return message


def play_collectives(
    issued: Sequence[Sequence[str]],
    members: Mapping[str, Sequence[int]],
    *,
    streams: int | None = None,
    slow: Sequence[int] = (),
    seed: int = 0,
) -> list[str]:
    """Plays what each rank has issued in a step, and returns where each stands that never goes on; nothing if all end.

    A collective begins when it is the next one of its stream on all members, and then ends on all. In between the
    hosts run ahead, in turns that are drawn at random, but for those of `slow` ranks, which move when no other can.

    Args:
        issued (`Sequence[Sequence[str]]`): of each rank, the communicators of its collectives as it issued them; ""
            is a wait of the host for all of them.
        members (`Mapping[str, Sequence[int]]`): the ranks of each communicator.
        streams (`int`, *optional*): streams that all communicators of a device share; None is one each.
        slow (`Sequence[int]`): ranks whose hosts are late.
        seed (`int`): of the turns.
    """
    draw, at = random.Random(seed), [0] * len(issued)
    queues: list[dict[object, list[str]]] = [defaultdict(list) for _ in issued]
    numbers: list[dict[str, int]] = [{} for _ in issued]

    def host_moves(rank: int) -> bool:
        if at[rank] == len(issued[rank]):
            return False
        name = issued[rank][at[rank]]
        if not name and any(queues[rank].values()):
            return False
        at[rank] += 1
        if name:
            number = numbers[rank].setdefault(name, len(numbers[rank]))
            queues[rank][name if streams is None else number % streams].append(name)
        return True

    def devices_move() -> bool:
        ended = False
        for name, ranks in members.items():
            heads = [next((queue for queue in queues[rank].values() if queue[:1] == [name]), None) for rank in ranks]
            if all(heads):
                ended = True
                for queue in heads:
                    queue.pop(0)
        return ended

    while True:
        fast = [rank for rank in range(len(issued)) if rank not in slow]
        draw.shuffle(fast)
        if not any([host_moves(rank) for rank in fast if draw.random() < 0.7]):
            if not (devices_move() or any([host_moves(rank) for rank in (*fast, *slow)])):
                break
    return [
        f"rank {rank} at {index} of {len(issued[rank])}, before {sum(map(len, queues[rank].values()))} collectives"
        for rank, index in enumerate(at)
        if index < len(issued[rank]) or any(queues[rank].values())
    ]
