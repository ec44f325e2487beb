# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Data ranks that share documents inside the Trainer: the losses, gradients and updates of plain Trainer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

import pytest
from transformers import TrainerCallback

from equivalence import single_stage
from galvatron_hf.data.packing import pack
from galvatron_hf.plan import LayerStrategy, ParallelPlan, SequenceGroups
from galvatron_hf.trainer.data import step_packer
from oracle import Case, Rows, check_cases
from plans import pipelined, uniform
from tiny_models import EXPERT_FAMILIES, FAMILIES


S = LayerStrategy
DYNAMIC = dict(packing="dynamic", max_tokens_per_rank=24)
LONG_TAIL = dict(train=lambda: Rows(27, shortest=1, longest=90), options=dict(max_steps=3))


def case(plan, **more) -> Case:
    own = more.pop("own_options", DYNAMIC)
    return Case(plan=plan, own_options=own, **(LONG_TAIL | more))


MIXED = (S(), S(tensor=2, sharding="zero2"), S(tensor=2, megatron_sp=True, recompute="full"), S(shard_degree=2))
CASES = {
    "zero3": case(uniform(4)),
    "mixed": case(single_stage(MIXED, 4)),
    "context 2": case(uniform(4, context=2), own_options=dict(max_tokens_per_rank=48)),
    "context 4, recompute": case(uniform(4, context=4, recompute="full"), own_options=dict(max_tokens_per_rank=24)),
    "context 4, 2, 1": case(
        single_stage((S(context=4), S(context=2), S(tensor=2), S(context=4, recompute="full")), 4),
        own_options=dict(max_tokens_per_rank=32),
    ),
    "context 2 and 1 in a pipeline": case(
        pipelined([(0, 1), (2, 3)], (S(), S(context=2), S(), S(context=2, recompute="full"))),
        own_options=dict(max_tokens_per_rank=64),
    ),
    "pipeline": case(pipelined([(0, 1), (2, 3)], (S(),) * 4), own_options=DYNAMIC | dict(max_tokens_per_rank=48)),
    "experts": case(uniform(4, expert=2), family="mixtral"),
    "loss of routers": case(
        uniform(4, expert=2),
        # A large coefficient, so that a token that counts twice is seen.
        build=lambda: EXPERT_FAMILIES["mixtral"].build(output_router_logits=True, router_aux_loss_coef=5.0),
    ),
}


class Kinds(TrainerCallback):
    """Raises an error at the end of training if no step was computed with recompute."""

    def __init__(self):
        self.seen: set[str] = set()

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.seen |= {name for name in logs if name.startswith("steps_with_recompute")}

    def on_train_end(self, args, state, control, **kwargs):
        if getattr(args, "per_step", False) and "steps_with_recompute_full" not in self.seen:
            raise RuntimeError(f"No step was recomputed: {self.seen}.")


@pytest.mark.slow
def test_each_step_is_recomputed_or_not():
    """A rank holds rows above `max_tokens_per_rank` only with recompute, so that steps with one change to it."""
    more = dict(train=lambda: Rows(27, shortest=1, longest=44), options=dict(max_steps=3))
    more["trainer"] = dict(callbacks=lambda: [Kinds()])
    own = dict(packing="static", max_tokens_per_rank=28, per_step=True)
    cases = {
        "none": case(uniform(2, sharding="replicate"), own_options=own, **more),
        "pipeline": case(pipelined([(0,), (1,)], (S(), S(), S(recompute="full"), S())), own_options=own, **more),
    }
    check_cases(cases, 2)


FAST = ("context 4, 2, 1",)


@pytest.mark.parametrize("fast", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_ranks_that_share_documents_train_as_one_process(fast):
    check_cases({name: one for name, one in CASES.items() if (name in FAST) is fast})


GROUPS = SequenceGroups(max_tokens_per_rank=24, max_degree=4)


def limited(*kinds: str) -> ParallelPlan:
    return replace(uniform(4), sequence_groups=replace(GROUPS, kinds=kinds))


@contextlib.contextmanager
def only(*executions: str) -> Iterator[None]:
    """Raises an error for steps whose shared documents have other executions, and if none is shared."""
    seen: set[str] = set()

    def checked(sequences, placement, *others):
        seen.update(one.execution for shared in placement.shared for one in shared)
        return pack(sequences, placement, *others)

    with mock.patch.object(step_packer, "pack", checked):
        yield
    if not seen or not seen <= set(executions):
        raise RuntimeError(f"Documents were shared by {seen}, not by {executions}.")


@pytest.mark.slow
@pytest.mark.parametrize("fast", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_executions_that_a_plan_allows(fast):
    """Groups use the executions of the plan alone, measured or not, and exchange heads only if all layers can."""
    determined = dict(max_steps=2, full_determinism=True)
    six_heads = dict(hidden_size=48, num_attention_heads=6, num_key_value_heads=2)
    merged = single_stage(
        (S(), S(tensor=2)) * 2, 4, sequence_groups=replace(GROUPS, max_tokens_per_rank=32, max_degree=3)
    )
    cases = {
        "gather": case(limited("gather"), own_options={}, fault=lambda: only("gather")),
        "unmeasured": case(limited("gather"), own_options={}, options=determined, fault=lambda: only("gather")),
        "ulysses": case(limited("ulysses"), own_options={}, fault=lambda: only("ulysses")),
        "heads of merged packs": case(merged, own_options={}, build=lambda: FAMILIES["llama"].build(**six_heads)),
    }
    check_cases({name: one for name, one in cases.items() if (name == "unmeasured") is fast})


def test_rows_that_need_recompute_are_evaluated_without_it():
    """Evaluation has no recompute, and packs of the longest row suffice for it."""
    more = dict(train=lambda: Rows(27, shortest=1, longest=44), options=dict(max_steps=3))
    more |= dict(trainer=dict(eval_dataset=lambda: Rows(9, 3, 20, 44)), after=lambda one: one.evaluate())
    own = dict(packing="static", max_tokens_per_rank=28, per_step=True)
    check_cases({"rows": case(uniform(2, sharding="replicate"), own_options=own, **more)}, 2)
