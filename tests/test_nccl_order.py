# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Pipelines end under NCCL's rules, whatever the hosts wait for; see nccl_simulator.py."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass, field
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from equivalence import single_stage
from galvatron_hf.parallel.comm.mesh import WorldMesh
from galvatron_hf.parallel.parallelize import parallelize
from galvatron_hf.plan import LayerStrategy, ParallelPlan
from galvatron_hf.plan.schedule import Action, PipelineShape, Work, actions
from galvatron_hf.utils.device import HostCopy
from nccl_simulator import Rules, Simulation, play_collectives
from plans import expert_plans, pipelined, uniform
from ranks import run_ranks
from tiny_models import ALL_FAMILIES, BATCHES, EXPERT_FAMILIES


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


S = LayerStrategy
CONNECTED = {
    "llama": pipelined([(0, 1), (2, 3)], uniform(2, tensor=2).layers, "1f1b", micro_batches=2),
    "mixtral": single_stage((S(expert=2), S(expert=4), S(tensor=2, expert=2), S(expert=2, sharding="replicate")), 4),
}


@pytest.mark.parametrize("family", CONNECTED)
def test_all_groups_connect_before_the_first_step(family):
    """Every group of a rank has had a collective, and every pair a message, when a plan has been applied. With experts
    these are the groups of neighbours and of all ranks, for rows, and those of all ranks and of ranks that are two
    apart, for weights.
    """
    plan = CONNECTED[family]

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
            parallel = parallelize(ALL_FAMILIES[family].build(), plan)
        made = {one for made in parallel.world._groups._groups.values() for one in made}
        own = {one for one in made if one is not dist.GroupMember.NON_GROUP_MEMBER and one.size() > 1}
        of_pairs = parallel.pipeline.pairs.values() if parallel.pipeline is not None else ()
        pairs = {(one, op) for pair in of_pairs for one in pair for op in (dist.isend, dist.irecv)}
        return len(own), len(own - summed), len(pairs), len(pairs - sent)

    assert run_ranks(work, 4) == [(4, 0, 4 if family == "llama" else 0, 0)] * 4


# ---- What ranks with experts issue ----


@dataclass(kw_only=True)
class Issued:
    """Holds what a rank has issued in a step: (communicator, operator, elements) of each collective or message, and
    ("", "wait", 0) for each wait of the host; and the ranks of each communicator.
    """

    calls: list[tuple[str, str, int]] = field(default_factory=list)
    members: dict[str, list[int]] = field(default_factory=dict)


class _Watch(TorchDispatchMode):
    def __init__(self, issued: Issued):
        super().__init__()
        self.issued = issued

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if any(issubclass(one, DTensor) for one in types):
            return NotImplemented
        names = [argument.name for argument in operator._schema.arguments]
        given = dict(zip(names, args, strict=False)) | (kwargs or {})
        group = given.get("process_group", given.get("group_name"))
        if operator.namespace in ("c10d", "_c10d_functional") and group is not None:
            group = _resolve_process_group(group) if isinstance(group, str) else ProcessGroup.unbox(group)
            if group.size() > 1:
                tensors = [one for one in tree_leaves(list(given.values())) if isinstance(one, torch.Tensor)]
                kind = operator._schema.name.split("::")[1]
                self.issued.calls.append((group.group_name, kind, sum(map(torch.Tensor.numel, tensors))))
                self.issued.members[group.group_name] = dist.get_process_group_ranks(group)
        return operator(*args, **(kwargs or {}))


def issued_by_all_ranks(cases: dict[str, tuple[str, ParallelPlan]]) -> dict[str, list[Issued]]:
    """Returns what each rank issues in a step of each family and plan, with rows that go where the routers say."""
    models = {family: EXPERT_FAMILIES[family].build() for family, _ in cases.values()}
    read = HostCopy.tolist

    def work() -> dict[str, Issued]:
        world, found = WorldMesh("cpu"), {}
        for name, (family, plan) in cases.items():
            parallel, issued = parallelize(copy.deepcopy(models[family]), plan, world), Issued()

            def wait(self, issued=issued) -> list:
                issued.calls.append(("", "wait", 0))
                return read(self)

            with mock.patch.object(HostCopy, "tolist", wait), _Watch(issued):
                parallel.forward_backward(BATCHES["right"]())
            found[name] = issued
        return found

    ranks = run_ranks(work, 4)
    return {name: [found[name] for found in ranks] for name in cases}


EXPERT_ORDERS = {
    name: ("mixtral", expert_plans()[name]) for name in ("expert_4", "recompute", "all_kinds", "gpipe", "tensor_1f1b")
}
# These compute shared experts, which tensor ranks have cut, while rows are on their way. Their second layer is dense.
EXPERT_ORDERS["shared"] = "qwen2_moe", expert_plans(dense=[1])["all_kinds"]


@pytest.fixture(scope="module")
def issued() -> dict[str, list[Issued]]:
    return issued_by_all_ranks(EXPERT_ORDERS)


def hangs(ranks: list[Issued], **rules) -> list[str]:
    members = {name: one for issued in ranks for name, one in issued.members.items()}
    return play_collectives([[name for name, *_ in issued.calls] for issued in ranks], members, **rules)


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPERT_ORDERS)
def test_ranks_with_experts_never_wait_for_each_other(issued, name):
    """Whatever streams communicators share, and whichever hosts are late."""
    for streams in (None, 2, 1):
        for slow in ((), (0,), (1, 2), (3,)):
            assert hangs(issued[name], streams=streams, slow=slow) == []


@pytest.mark.slow
def test_experts_exchange_rows_where_no_weights_are_moved(issued):
    """Weights are moved by operators that work in place, rows by functional ones."""
    of_weights = {"_allgather_base_", "_reduce_scatter_base_"}
    for name, ranks in issued.items():
        for rank in ranks:
            exchanging = {group for group, kind, _ in rank.calls if kind == "all_to_all_single"}
            assert exchanging and {group for group, kind, _ in rank.calls if kind in of_weights}, name
            assert not [call for call in rank.calls if call[0] in exchanging and call[1] in of_weights], name


@pytest.mark.slow
def test_the_routers_loss_is_one_sum_between_forwards_and_backwards(issued):
    for name in ("expert_4", "recompute", "gpipe"):
        for rank in issued[name]:
            sums = [index for index, (_, kind, size) in enumerate(rank.calls) if kind == "allreduce_" and size == 17]
            reads = [index for index, (_, kind, _) in enumerate(rank.calls) if kind == "wait"]
            reduced = [index for index, (_, kind, _) in enumerate(rank.calls) if kind == "_reduce_scatter_base_"]
            assert len(sums) == 1 and max(reads) < sums[0] < min(reduced), name
            assert rank.members[rank.calls[sums[0]][0]] == [0, 1, 2, 3]


def test_ranks_that_issue_in_another_order_hang():
    """The simulation can fail: two ranks with two communicators in other orders, if these share a stream or a host
    waits in between.
    """
    members, orders = {"a": [0, 1], "b": [0, 1]}, [["a", "b"], ["b", "a"]]
    waiting = [["a", "", "b"], ["b", "", "a"]]
    assert play_collectives(orders, members) == [] and play_collectives(orders, members, streams=1)
    assert play_collectives(waiting, members) and play_collectives([["a"], []], members)


@pytest.mark.slow
def test_a_rank_that_exchanges_rows_too_early_hangs(issued):
    """Moves one exchange of one rank ahead of the collective before it, of another communicator."""
    ranks, draw = issued["all_kinds"], random.Random(0)
    calls = list(ranks[1].calls)
    places = [index for index in range(1, len(calls)) if calls[index][1] == "all_to_all_single"]
    places = [index for index in places if calls[index - 1][0] not in ("", calls[index][0])]
    index = draw.choice(places)
    calls[index - 1 : index + 1] = calls[index], calls[index - 1]
    assert hangs([ranks[0], Issued(calls=calls, members=ranks[1].members), *ranks[2:]], streams=1)
