# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Packed documents under every kind of plan: loss, gradients and evaluation of one process on the padded batch."""

from __future__ import annotations

import copy
import random
import traceback
from collections.abc import Callable
from unittest import mock

import pytest
import torch

from equivalence import Reference, assert_near, assert_same_gradients, reference, whole, whole_gradients
from galvatron_hf.data.packing import pack, unpad
from galvatron_hf.data.placement import Placement, in_order
from galvatron_hf.parallel.comm.mesh import WorldMesh
from galvatron_hf.parallel.layers import parallel_layer as block
from galvatron_hf.parallel.layers.rng import random_stream
from galvatron_hf.parallel.model import ParallelModel
from galvatron_hf.parallel.parallelize import parallelize
from galvatron_hf.plan import ParallelPlan
from plans import EVERY_UNIFORM_PLAN, mixed_plans, pipeline_plans, pipeline_plans_on_eight, shared_out, uniform_plans
from ranks import run_ranks
from tiny_models import FAMILIES, VOCABULARY


LENGTHS = (1, 9, 2, 14, 5, 5, 5, 1, 11, 3, 7)


def long_tailed(lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> dict[str, torch.Tensor]:
    """Returns rows padded on the right, whose second token and some others are no targets."""
    draw = torch.Generator().manual_seed(seed)
    longest = max(lengths)
    ids = torch.randint(4, VOCABULARY, (len(lengths), longest), generator=draw)
    mask = (torch.arange(longest) < torch.tensor(lengths)[:, None]).long()
    ignored = (torch.rand(ids.shape, generator=draw) < 0.2) | (mask == 0)
    ignored[:, 1] = True
    return {
        "input_ids": ids.masked_fill(mask == 0, 3),
        "attention_mask": mask,
        "labels": ids.masked_fill(ignored, -100),
    }


def random_placement(documents: int, micro_batches: int, packs: int, seed: int = 0) -> Placement:
    """Returns a placement of every document anywhere; some packs may be empty."""
    draw = random.Random(seed)
    places: list[list[list[int]]] = [[[] for _ in range(packs)] for _ in range(micro_batches)]
    for index in range(documents):
        draw.choice(draw.choice(places)).append(index)
    return Placement(tuple(tuple(tuple(pack_) for pack_ in packs) for packs in places))


def packed(
    parallel: ParallelModel, batch: dict[str, torch.Tensor], micro_batches: int, seed: int | None = 0
) -> list[dict]:
    """Packs a batch at random; in order without a seed."""
    sequences, packs = unpad(batch, parallel.packing), parallel.resolved.packs
    if seed is None:
        placement = in_order(sequences.lengths, packs, max_tokens=None)
    else:
        placement = random_placement(len(sequences.lengths), micro_batches, packs, seed)
    return pack(sequences, placement, parallel.resolved.pack_multiple, pad_token_id=3, packing=parallel.packing)


def check_packed(oracle: Reference, plan: ParallelPlan, world: WorldMesh) -> None:
    parallel = parallelize(copy.deepcopy(oracle.model), plan, world)
    check_parts(oracle, parallel, packed(parallel, oracle.batch, plan.micro_batch_count))


def check_parts(oracle: Reference, parallel: ParallelModel, parts: list[dict]) -> None:
    """Compares packed micro-batches under a plan with one process on the padded batch."""
    loss = float(parallel.forward_backward(parts))
    gradients, norm = whole_gradients(parallel.model, oracle.model), float(parallel.grad_norm())
    parallel.model.zero_grad()
    parallel.model.eval()
    eval_loss = float(parallel.evaluate(parts).loss)
    assert_near("loss", loss, oracle.loss)
    assert_near("grad_norm", norm, oracle.grad_norm)
    assert_near("eval loss", eval_loss, oracle.eval_loss)
    assert_same_gradients(gradients, oracle.gradients)


def check_cases(world_size: int, cases: dict[str, tuple], check: Callable[..., None] = check_packed) -> None:
    """Runs `check` for each case, a reference, a plan and perhaps more, in one world of ranks."""

    def work() -> dict[str, str]:
        wrong, world = {}, WorldMesh("cpu")
        for name, case in cases.items():
            try:
                check(*case, world)
            except AssertionError as error:
                wrong[name] = str(error) or traceback.format_exc()
            except Exception as error:
                raise RuntimeError(f"case {name!r}") from error
        return wrong

    wrong = [found for found in run_ranks(work, world_size) if found]
    assert not wrong, wrong[0]


def oracle_of(family: str) -> Reference:
    return reference(FAMILIES[family].build(), long_tailed())


@pytest.mark.slow
@EVERY_UNIFORM_PLAN
def test_every_strategy_by_itself(world_size, names):
    oracle, plans = oracle_of("llama"), uniform_plans(world_size)
    check_cases(world_size, {name: (oracle, plans[name]) for name in names})


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=[] if name == "gemma2" else pytest.mark.slow) for name in FAMILIES],
)
def test_every_family_under_layers_that_differ(family):
    plans = mixed_plans() if family == "llama" else {"mixed_b": mixed_plans()["mixed_b"]}
    oracle = oracle_of(family)
    check_cases(4, {name: (oracle, plan) for name, plan in plans.items()})


@pytest.mark.slow
def test_eight_ranks():
    oracle = oracle_of("llama")
    cases = {f"pipeline {name}": (oracle, plan) for name, plan in pipeline_plans_on_eight().items()}
    plans = shared_out(uniform_plans(8), 0, 4)
    check_cases(8, cases | {name: (oracle, plan) for name, plan in plans.items()})


# Each schedule with stages of two ranks, and one with stages of one rank; learned positions, fused projections.
FAST_SCHEDULES = {
    "gpipe_apart": "phi3",
    "1f1b_mixed": "gpt2",
    "interleaved": "llama",
    "1f1b_of_four": "gemma2",
    "zero_bubble_v": "llama",
}


SLOW_SCHEDULES = {name: "llama" for name in pipeline_plans() if FAST_SCHEDULES.get(name) != "llama"}


@pytest.mark.slow
@pytest.mark.parametrize("families", [FAST_SCHEDULES, pytest.param(SLOW_SCHEDULES, marks=pytest.mark.slow)], ids=len)
def test_every_schedule(families):
    plans = pipeline_plans()
    check_cases(4, {name: (oracle_of(family), plans[name]) for name, family in families.items()})


def isolated(
    parallel: ParallelModel, batch: dict[str, torch.Tensor], rows: range
) -> tuple[float, torch.Tensor | None]:
    """Returns the loss of some rows alone of a packed batch, and the embedding's gradient; collective.

    The gradient is None on ranks without the first stage.
    """
    labels = torch.full_like(batch["labels"], -100)
    labels[rows.start : rows.stop] = batch["labels"][rows.start : rows.stop]
    parallel.model.zero_grad()
    parts = packed(parallel, batch | {"labels": labels}, parallel.plan.micro_batch_count)
    loss = float(parallel.forward_backward(parts, num_items_in_batch=50))
    embedding = dict(parallel.model.named_parameters()).get("model.embed_tokens.weight")
    return loss, None if embedding is None else whole(embedding.grad)


# Both have zero3, tensor, Megatron-SP and Ulysses layers; the second has several micro-batches.
FAST_PLANS = ("permuted", "1f1b_mixed")


@pytest.mark.parametrize(
    "plan",
    [*FAST_PLANS, *(pytest.param(name, marks=pytest.mark.slow) for name in ("zero3", "tensor", "ulysses", "mixed_a"))],
)
def test_a_document_changes_nothing_of_another_bit_for_bit(plan):
    """Changes one row's tokens: the loss of all other rows and its gradient of the embedding stay the same."""
    plans = uniform_plans(4) | mixed_plans() | pipeline_plans()
    batch, changed = long_tailed(), long_tailed()
    row = 3  # the longest, in the middle of the batch
    changed["input_ids"][row, : LENGTHS[row]] = (batch["input_ids"][row, : LENGTHS[row]] + 7) % VOCABULARY

    def work() -> list[bool]:
        parallel = parallelize(FAMILIES["llama"].build(), plans[plan])
        same = []
        for rows in (range(row), range(row + 1, len(LENGTHS))):
            loss, gradient = isolated(parallel, batch, rows)
            other, other_gradient = isolated(parallel, changed, rows)
            same.append(loss == other)
            if gradient is not None:
                same += [torch.equal(gradient, other_gradient), bool(gradient.abs().sum() > 0)]
        loss, _ = isolated(parallel, batch, range(row, row + 1))
        return [*same, loss != isolated(parallel, changed, range(row, row + 1))[0]]

    first_stage = plans[plan].stages[0].ranks
    assert run_ranks(work, 4) == [[True] * (7 if rank in first_stage else 3) for rank in range(4)]


def test_attention_dropout_of_two_packs_differs():
    """Gives the ranks the same document: they drop different weights, tensor ranks and a recompute the same ones."""
    ids = torch.arange(4, 20)[None].repeat(4, 1)
    batch = {"input_ids": ids, "labels": torch.full_like(ids, -100)}

    def work(plan: ParallelPlan) -> list[tuple[int, ...]]:
        keys = []
        parallel = parallelize(FAMILIES["llama"].build(), plan)
        for layer in parallel.layers:
            layer.self_attn.attention_dropout = 0.5
        with mock.patch.object(block, "random_stream", recorded(keys)):
            parallel.forward_backward(packed(parallel, batch, 1, seed=None))
        return [key for key in keys if len(key) == 7]  # those of attention

    for name, alike in (("replicate", None), ("tensor_data", 2)):
        by_rank = run_ranks(work, 4, uniform_plans(4)[name])
        firsts = [keys[0] for keys in by_rank]
        assert len(set(firsts)) == 4, firsts  # other packs, or other heads
        assert alike is None or len({key[:5] for key in firsts}) == 2


def recorded(keys: list[tuple[int, ...]]):
    def stream(device, *key):
        keys.append(key)
        return random_stream(device, *key)

    return stream
