# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Documents that several data ranks share, under every kind of plan: the results of one process on unpacked rows."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from equivalence import Reference, assert_near, assert_same_gradients, reference, single_stage, whole_gradients
from galvatron_hf.data.packing import pack, unpad
from galvatron_hf.data.placement import Placement, SharedSequence
from galvatron_hf.parallel.comm.collective_log import observe_collectives
from galvatron_hf.parallel.comm.mesh import WorldMesh
from galvatron_hf.parallel.layers import parallel_layer, ring_attention
from galvatron_hf.parallel.layers.parallel_layer import ParallelLayer
from galvatron_hf.parallel.model import ParallelModel
from galvatron_hf.parallel.parallelize import parallelize
from galvatron_hf.plan import LayerStrategy, ParallelPlan, SequenceGroups, Stage, VocabularyStrategy
from galvatron_hf.plan.deal import EXECUTIONS
from ranks import run_ranks
from test_heads import MASKED, TOKEN
from test_packed_encoders import case_of
from test_packed_rows import check_cases, check_parts, long_tailed
from tiny_models import FAMILIES


S, V = LayerStrategy, VocabularyStrategy
LENGTHS = (37, 9, 2, 23, 5, 41, 5, 1, 11, 3, 7)  # three long ones
GROUPS = SequenceGroups(max_tokens_per_rank=64, max_degree=2)
Places = Sequence[Sequence[tuple[int, tuple[int, ...]]]]  # of each micro-batch: (document, its data ranks)


def placement_of(places: Places, packs: int, execution: str) -> Placement:
    micro_batches, shared = [], []
    for documents in places:
        whole: list[list[int]] = [[] for _ in range(packs)]
        for document, ranks in documents:
            if len(ranks) == 1:
                whole[ranks[0]].append(document)
        micro_batches.append(tuple(map(tuple, whole)))
        shared.append(
            tuple(
                SharedSequence(one, ranks, execution_of(one, ranks, execution))
                for one, ranks in documents
                if ranks[1:]
            )
        )
    return Placement(tuple(micro_batches), tuple(shared))


def execution_of(document: int, ranks: tuple[int, ...], execution: str) -> str:
    """Returns the execution of a document; "mixed" takes them in turn. Three ranks divide no number of heads."""
    if execution == "mixed":
        execution = EXECUTIONS[document % 3]
    return "gather" if execution == "ulysses" and len(ranks) == 3 else execution


def random_places(seed: int, packs: int, micro_batches: int, documents: int = len(LENGTHS)) -> Places:
    """Returns every document anywhere, on one rank or on any several; some ranks may be idle."""
    draw = random.Random(seed)
    places: list[list[tuple[int, tuple[int, ...]]]] = [[] for _ in range(micro_batches)]
    for document in range(documents):
        ranks = draw.sample(range(packs), draw.choice([1, 1, *range(1, packs + 1)]))
        draw.choice(places).append((document, tuple(ranks)))
    return places


def packed(parallel: ParallelModel, batch: dict[str, torch.Tensor], places: Places, execution: str) -> list[dict]:
    sequences = unpad(batch, parallel.packing)
    assert sorted(one for part in places for one, _ in part) == list(range(len(sequences.lengths)))
    placement = placement_of(places, parallel.resolved.packs, execution)
    return pack(sequences, placement, parallel.resolved.pack_multiple, pad_token_id=3, packing=parallel.packing)


def check_shared(oracle: Reference, plan: ParallelPlan, places: Places, execution: str, world: WorldMesh) -> None:
    parallel = parallelize(copy.deepcopy(oracle.model), plan, world)
    check_parts(oracle, parallel, packed(parallel, oracle.batch, places, execution))


def oracle_of(family: str) -> Reference:
    return reference(FAMILIES[family].build(), long_tailed(LENGTHS))


REST = [(1, (3,)), (2, (3,)), (4, (3,)), (6, (3,)), (7, (3,))]
TWO = [[(5, (0, 1, 2)), *REST], [(0, (0,)), (3, (1,)), (8, (2,)), (9, (3,)), (10, (3,))]]
OVERLAPPING = [
    [(5, (0, 1, 2)), (0, (2, 3)), (3, (1, 3)), (1, (0,)), (2, (0,)), (4, (1,))],
    [(6, (3, 1)), (7, (2,)), (8, (0, 3, 2, 1)), (9, (1,)), (10, (0,))],
]
IDLE = [
    [(5, (1, 3, 2)), (0, (3, 1))],
    [(3, (0, 3)), (1, (2,)), *((one, (2,)) for one in (2, 4, 6, 7, 8, 9, 10))],
]
ALL = [[(one, (0, 1, 2, 3)) for one in range(11)]]
PAIRS = [[(one, (0, 1) if one % 2 else (2, 3)) for one in range(11)]]
ON_TWO = [
    [(5, (0, 1)), (1, (0,)), (2, (1,))],
    [(0, (1, 0)), (3, (0, 1))],
    [(4, (0,)), (6, (1,)), (7, (0,)), (8, (1,)), (9, (0,)), (10, (1,))],
]
LAYERS_THAT_DIFFER = (
    S(),
    S(tensor=2, sharding="zero2"),
    S(tensor=2, megatron_sp=True, recompute="full"),
    S(recompute="full"),
)
WITH_ULYSSES = (S(), S(ulysses=2, recompute="full"), S(tensor=2, ulysses=2, megatron_sp=True), S(ulysses=4))
ZERO2_ENDS = dict(embedding=V(sharding="zero2"), head=V(sharding="zero2"))
PIPELINE = (Stage(ranks=(0, 1), layers=(0, 2)), Stage(ranks=(2, 3), layers=(2, 4)))


def one_stage(layers: tuple[LayerStrategy, ...], micro_batches: int = 2, **options) -> ParallelPlan:
    return single_stage(layers, 4, micro_batches=micro_batches, sequence_groups=GROUPS, **options)


def two_stages(layers: tuple[LayerStrategy, ...], **options) -> ParallelPlan:
    return ParallelPlan(
        world_size=4,
        stacks={"decoder": 4},
        stages=PIPELINE,
        micro_batches=3,
        layers=layers,
        sequence_groups=GROUPS,
        **options,
    )


CASES = {
    "zero3, {3, 1} then {1, 1, 1, 1}": ("llama", one_stage((S(),) * 4), TWO),
    "zero2": ("llama", one_stage((S(sharding="zero2"),) * 4), TWO),
    "recompute": ("llama", one_stage((S(recompute="full"),) * 4), TWO),
    "layers that differ": ("llama", one_stage(LAYERS_THAT_DIFFER, embedding=V(tensor=2), head=V(tensor=2)), TWO),
    "overlapping groups": ("llama", one_stage((S(),) * 4), OVERLAPPING),
    "overlapping groups, layers that differ": (
        "llama",
        one_stage(LAYERS_THAT_DIFFER, embedding=V(tensor=4), head=V(tensor=2)),
        OVERLAPPING,
    ),
    "idle ranks": ("llama", one_stage((S(shard_degree=2),) * 4), IDLE),
    "context 4": ("llama", single_stage((S(context=4),) * 4, 4), ALL),
    "context 2, data 2": ("llama", single_stage((S(context=2),) * 4, 4), PAIRS),
    "pipeline": ("llama", two_stages((S(),) * 4), ON_TWO),
    "pipeline, layers that differ": ("llama", two_stages(LAYERS_THAT_DIFFER), ON_TWO),
    "zero-bubble pipeline": (
        "llama",
        two_stages((S(sharding="zero2"), S(tensor=2, sharding="zero2")) * 2, schedule="zero_bubble", **ZERO2_ENDS),
        ON_TWO,
    ),
    "ulysses inside": ("llama", one_stage((S(ulysses=2),) * 4, 3), ON_TWO),
    "ulysses, layers that differ": ("llama", one_stage(WITH_ULYSSES), OVERLAPPING),
    "window and soft-cap": ("gemma2", one_stage((S(),) * 4), TWO),
    "window and soft-cap, layers that differ": ("gemma2", one_stage(LAYERS_THAT_DIFFER), OVERLAPPING),
}


def check_all(execution: str, names: Sequence[str] = tuple(CASES)) -> None:
    oracles = {family: oracle_of(family) for family in {CASES[name][0] for name in names}}
    check_cases(4, {name: (oracles[CASES[name][0]], *CASES[name][1:], execution) for name in names}, check_shared)


def test_documents_that_ranks_share():
    """Each kind of plan, and all executions; the other plans are slow."""
    check_all("mixed", list(CASES)[1::2])


@pytest.mark.slow
@pytest.mark.parametrize("execution", [*EXECUTIONS, "mixed"])
def test_documents_that_ranks_share_under_every_plan(execution):
    check_all(execution)


@pytest.mark.slow
def test_documents_of_encoders_that_ranks_share():
    """Every token sees the whole document, wherever that lies."""
    cases = {}
    for seed, (family, task, name) in enumerate(
        [("bert", MASKED, "mixed"), ("roberta", MASKED, "1f1b"), ("modernbert", TOKEN, "four")]
    ):
        oracle, plan = case_of(family, task, name)
        packs = len(plan.stages[0].ranks)
        degree = max(layer.data_degree(packs) for layer in plan.layers)
        plan = replace(plan, sequence_groups=replace(GROUPS, max_degree=degree))
        cases[family] = oracle, plan, random_places(seed, packs, plan.micro_batch_count), "mixed"
    check_cases(4, cases, check_shared)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_random_groups_one_step_after_the_other(family):
    """All messages of a rank have the same tag: the order in which they are issued is all that matches them."""
    oracle, plan = oracle_of(family), one_stage(LAYERS_THAT_DIFFER, 3)

    def work() -> list[str]:
        parallel, wrong = parallelize(copy.deepcopy(oracle.model), plan), []
        made = []
        with mock.patch.object(dist, "new_group", side_effect=lambda *args, **kwargs: made.append(args)):
            for seed in range(24):
                places = random_places(seed, 4, 3)
                loss = float(parallel.forward_backward(packed(parallel, oracle.batch, places, "mixed")))
                gradients = whole_gradients(parallel.model, oracle.model)
                parallel.model.zero_grad()
                try:
                    assert_near("loss", loss, oracle.loss)
                    assert_same_gradients(gradients, oracle.gradients)
                except AssertionError as error:
                    wrong.append(f"{seed}: {error}")
        return wrong + [f"a group was made after set-up: {one}" for one in made]

    assert run_ranks(work, 4) == [[]] * 4


def test_documents_do_not_see_each_other():
    """Other tokens in one document leave the hidden states of all others as they are, bit for bit."""
    model, plan, batch = FAMILIES["llama"].build(), one_stage(LAYERS_THAT_DIFFER), long_tailed(LENGTHS)
    changed = dict(batch, input_ids=batch["input_ids"].clone())
    changed["input_ids"][5, :41] = (changed["input_ids"][5, :41] + 7) % 40 + 4

    def work() -> list[tuple[int, int]]:
        parallel = parallelize(copy.deepcopy(model), plan)
        found: list[list[torch.Tensor]] = []
        block = parallel.blocks[-1]
        original = ParallelLayer._compute

        def compute(self, micro_batch, hidden, arguments):
            output = original(self, micro_batch, hidden, arguments)
            if self is block:
                part = self.rectangle(micro_batch)
                at = range(part.position_start, part.position_stop)
                rows = [self.stream(micro_batch).documents.rows_at([position]) for position in at]
                found[-1].append((rows, output.detach().clone()))
            return output

        parallel.model.eval()
        with mock.patch.object(ParallelLayer, "_compute", compute):
            for one in (batch, changed):
                found.append([])
                parallel.evaluate(packed(parallel, one, OVERLAPPING, "mixed"))
        same = different = 0
        for (rows, before), (_, after) in zip(*found, strict=True):
            for position, row in enumerate(rows):
                equal = bool(torch.equal(before[0, position], after[0, position]))
                assert equal or row == [5], (row, position)
                same, different = same + equal, different + (not equal)
        return same, different

    found = run_ranks(work, 4)
    assert sum(different for _, different in found) >= 40 and all(same for same, _ in found)


def test_recomputed_layers_keep_what_rings_gave_them():
    """The results are the same bit for bit, and keys and values go round in the backward, not again before it."""
    oracle, plan = oracle_of("llama"), one_stage((S(recompute="full"), S(recompute="full"), S(), S(recompute="full")))

    def work() -> list[tuple[float, list[torch.Tensor], int]]:
        parallel, found = parallelize(copy.deepcopy(oracle.model), plan), []
        parts = packed(parallel, oracle.batch, OVERLAPPING, "ring")
        for keeps in (False, True):
            parallel.keep_rings(keeps)
            sent: list[int] = []
            with observe_collectives(lambda kind, x, group: sent.append(x.numel()) if kind == "send" else None):
                loss = float(parallel.forward_backward(parts))
            gradients = [one.grad.to_local().clone() for one in parallel.model.parameters()]
            parallel.model.zero_grad()
            found.append((loss, gradients, sum(sent)))
        return found

    for (loss, gradients, sent), (again, kept, fewer) in run_ranks(work, 4):
        assert loss == again and all(torch.equal(one, other) for one, other in zip(gradients, kept, strict=True))
        # Three of four layers send keys and values in the forward and in the backward, not in the recompute too.
        assert fewer < sent


# ---- Errors are seen ----

EVEN = (24, 48, 24, 24)  # of equal chunks on two ranks and on three
RING = [[(0, (0, 1, 2)), (1, (1, 2, 3)), (2, (0, 3)), (3, (2,))]]


def of_another_rank(self, hop):
    return self.ring.holders[(self.own + hop) % self.size]


def without_gradient_of_keys(self, block, of_key, of_value):
    """Adds what belongs to the values alone."""
    ring_attention._Hops.add_own.original(self, torch.stack([torch.zeros_like(block[0]), block[1]]), of_key, of_value)


def at_wrong_places(deal, data, index):
    held = HELD(deal, data, index)
    rings = []
    for ring in held.share.rings:
        documents = []
        for one in ring.documents:
            first, *others = one.holders
            runs = {**one.runs, first: one.runs[others[0]], others[0]: one.runs[first]}
            documents.append(replace(one, runs=runs))
        rings.append(replace(ring, documents=tuple(documents)))
    held.share = replace(held.share, rings=tuple(rings))
    return held


ADD_OWN, HELD = ring_attention._Hops.add_own, parallel_layer.held_documents
ERRORS = {
    "hops in the other order": (ring_attention._Hops, "holder", of_another_rank),
    "a dropped gradient of keys": (ring_attention._Hops, "add_own", without_gradient_of_keys),
    "chunks at wrong positions": (parallel_layer, "held_documents", at_wrong_places),
}


@pytest.mark.parametrize("error", ERRORS)
def test_an_error_in_a_ring_is_seen(error):
    oracle = reference(FAMILIES["llama"].build(), long_tailed(EVEN))
    with mock.patch.object(*ERRORS[error]), pytest.raises(AssertionError, match="loss|gradient|grad_norm"):
        check_cases(4, {error: (oracle, one_stage((S(),) * 4, 1), RING, "ring")}, check_shared)
