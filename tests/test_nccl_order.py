# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Pipelines end under NCCL's rules, whatever the hosts wait for; see nccl_simulator.py."""

from __future__ import annotations

from unittest import mock

import pytest
import torch.distributed as dist

from galvatron_hf.parallel.parallelize import parallelize
from galvatron_hf.plan.schedule import Action, PipelineShape, Work, actions
from nccl_simulator import Rules, Simulation
from plans import pipelined, uniform
from ranks import run_ranks
from tiny_models import FAMILIES


MICRO_BATCHES = (1, 2, 3, 4, 8, 16)
RULES = {
    "communicators made before": Rules(),
    "waits for the compute stream": Rules(waits_for_stream=True),
    "waits for the device": Rules(waits_for_device=True),
    "one stream": Rules(streams=1),
    "two streams": Rules(streams=2),
    "one stream, waits for the device": Rules(streams=1, waits_for_device=True),
    "communicators made in the step": Rules(made_before=False),
    "communicators made in the step, waits for the device": Rules(made_before=False, waits_for_device=True),
}


def shapes() -> dict[str, PipelineShape]:
    made = {}
    for ranks in (2, 4, 8):
        there = tuple(range(ranks))
        for name, schedule_name, ranks_of_stages in (
            ("gpipe", "gpipe", there),
            ("1f1b", "1f1b", there),
            ("interleaved", "interleaved", there * 2),
            ("zero_bubble", "zero_bubble", there * 2),
            ("zero_bubble_v", "zero_bubble", there + there[::-1]),
        ):
            shape = PipelineShape(schedule=schedule_name, pipeline_rank_of_stage=ranks_of_stages)
            made[f"{name}-{ranks}"] = shape
    return made


FORWARD = (Work.FORWARD, Work.SEND_FORWARD, Work.RECEIVE_FORWARD)


def parts_of_step(order: tuple[Action, ...]) -> dict[str, list[Action]]:
    """Returns the orders that the runtime plays: a step; an evaluation; and a step whose backwards follow all
    forwards, as under a loss of the user's own.
    """
    forward = [action for action in order if action.work in FORWARD]
    backward = [action for action in order if action.work not in (*FORWARD, Work.BACKWARD_WEIGHT)]
    return {"step": list(order), "evaluation": forward, "own loss": forward + backward}


def unchanged(order: tuple[Action, ...]) -> tuple[Action, ...]:
    return order


def posted_early(order: tuple[Action, ...]) -> tuple[Action, ...]:
    """Moves receives before the compute in front of them, so that messages arrive meanwhile. A receive passes no
    message of its own direction.
    """
    result: list[Action] = []
    for action in order:
        at = len(result)
        while action.work.is_receive and at > 0 and result[at - 1].work.direction != action.work.direction:
            at -= 1
            if result[at].work.is_compute:
                break
        result.insert(at, action)
    return tuple(result)


def stuck(rules: Rules, changed=unchanged) -> dict[str, list[str]]:
    """Returns the cases that never end, and where their hosts stand."""
    found = {}
    for name, shape in shapes().items():
        for micro_batches in MICRO_BATCHES:
            by_rank = [parts_of_step(changed(order)) for order in actions(shape, micro_batches)]
            for part in by_rank[0]:
                where = Simulation(shape, [orders[part] for orders in by_rank], rules).run()
                if where:
                    found[f"{name}, {micro_batches} micro-batches, {part}"] = where
    return found


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
def test_every_schedule_ends(rules):
    assert stuck(rules) == {}


@pytest.mark.parametrize("name", ["waits for the device", "one stream", "two streams"])
def test_receives_before_their_sender_has_computed_hang(name):
    """The simulation can fail: receives that are posted one compute early hang under all rules that let one wait."""
    assert stuck(RULES[name], posted_early)


def test_all_groups_connect_before_the_first_step():
    """Every group of a rank has had a collective, and every pair a message, when a plan has been applied."""
    plan = pipelined([(0, 1), (2, 3)], uniform(2, tensor=2).layers, "1f1b", micro_batches=2)

    def work() -> tuple[int, int, int, int]:
        summed, sent, all_reduce, batch = set(), set(), dist.all_reduce, dist.batch_isend_irecv

        def noted_sum(tensor, *args, group=None, **kwargs):
            summed.add(group)
            return all_reduce(tensor, *args, group=group, **kwargs)

        def noted_messages(messages):
            sent.update((message.group, message.op) for message in messages)
            return batch(messages)

        with (
            mock.patch.object(dist, "all_reduce", noted_sum),
            mock.patch.object(dist, "batch_isend_irecv", noted_messages),
        ):
            parallel = parallelize(FAMILIES["llama"].build(), plan)
        groups = {one for made in parallel.world._groups._groups.values() for one in made}
        own = {one for one in groups if one is not dist.GroupMember.NON_GROUP_MEMBER and one.size() > 1}
        pairs = {
            (one, op) for pair in parallel.pipeline.pairs.values() for one in pair for op in (dist.isend, dist.irecv)
        }
        return len(own), len(own - summed), len(pairs), len(pairs - sent)

    assert run_ranks(work, 4) == [(4, 0, 4, 0)] * 4
