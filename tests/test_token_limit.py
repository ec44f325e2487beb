# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""How many tokens a rank can hold where ranks share documents, by the memory model; no ranks are needed."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from transformers import LlamaConfig

from galvatron_hf.plan import LayerStrategy, ParallelPlan, Precision, SequenceGroups
from galvatron_hf.planner.cost.workload import Workload
from galvatron_hf.planner.estimate import estimate_plan
from galvatron_hf.planner.search import search_plan
from galvatron_hf.planner.simplify import simplest
from galvatron_hf.planner.token_limit import MULTIPLE, most_tokens
from galvatron_hf.profiler.profiles.presets import hardware_preset
from galvatron_hf.profiler.trace.tracing import profile_from_config
from galvatron_hf.trainer.planning.auto_planner import SHARE_OF_TOKENS, AutoPlanner


S = LayerStrategy
HARDWARE = hardware_preset("a100-80g", nodes=1, devices_per_node=4)
CONFIG = LlamaConfig(
    vocab_size=1000, hidden_size=256, intermediate_size=640, num_hidden_layers=4, num_attention_heads=8,
    num_key_value_heads=2, max_position_embeddings=1 << 20,
)  # fmt: skip
MODEL = profile_from_config(CONFIG, HARDWARE, "fp32", length=4096, max_degree=4)
WORK = Workload(rows=16, length=1, precision=Precision(), packed=True)
PLANS = {
    "zero3": ParallelPlan.uniform(4, 4),
    "recompute": ParallelPlan.uniform(4, 4, recompute="full", micro_batches=4),
    "tensor": ParallelPlan.uniform(4, 4, tensor=2, micro_batches=2),
    "ulysses": ParallelPlan.uniform(4, 4, ulysses=2),
    "pipeline": ParallelPlan.uniform(4, 4, pipeline=2, micro_batches=4),
    "mixed": replace(ParallelPlan.uniform(4, 4), layers=(S(), S(tensor=2), S(tensor=2), S())),
    "one data rank": ParallelPlan.uniform(4, 4, tensor=4),
}


def needed(plan: ParallelPlan, rows: int, length: int) -> int:
    work = Workload(rows=rows, length=length, precision=Precision(), packed=True)
    return max(estimate_plan(HARDWARE, MODEL, work, plan).memory_bytes)


@pytest.mark.parametrize("name", list(PLANS))
def test_full_packs_fit_and_longer_ones_do_not(name):
    """Whole documents fill the packs, or one document that all data ranks of a layer share."""
    plan, budget = PLANS[name], 1 << 30
    packs = max(layer.data_degree(len(plan.stages[0].ranks)) for layer in plan.layers)
    steps = plan.micro_batch_count

    def most(tokens: int) -> int:
        found = [needed(plan, steps * packs, tokens)]
        if packs > 1 and name != "mixed":
            shared = replace(plan, layers=tuple(replace(layer, context=packs) for layer in plan.layers))
            found.append(needed(shared, steps, tokens * packs))
        return max(found)

    tokens = most_tokens(HARDWARE, MODEL, WORK, plan, budget)
    assert tokens % MULTIPLE == 0 and tokens > 1000
    assert most(tokens) <= budget
    assert most(round((1.1 if name == "mixed" else 1.0) * (tokens + MULTIPLE))) > budget


def test_nothing_fits_beside_the_weights():
    assert most_tokens(HARDWARE, MODEL, WORK, PLANS["zero3"], 1 << 20) == 0


DATA = dict(tensor=1, sequence=("none",))  # whose ranks have rows of their own


def planner(budget: int, lengths: np.ndarray, space: dict = DATA, **given) -> AutoPlanner:
    options = dict(
        memory_gib=budget / 2**30,
        world_size=4,
        global_batch_size=16,
        gradient_accumulation_steps=1,
        activation_checkpointing=False,
        disable_tqdm=True,
        bf16=False,
        max_tokens_per_rank=None,
        long_sequences="error",
        length_column_name="length",
    )
    rows = [dict(input_ids=range(int(length))) for length in lengths]
    made = AutoPlanner(
        args=SimpleNamespace(**(options | given)), dataset=lambda: rows, packing=lambda: ("dynamic", True)
    )
    made.row_lengths = lambda column="input_ids": lengths
    made._packs = made.shares = lambda model: True
    limits = replace(made.limits(), **space)
    made.limits = lambda: limits
    return made


LENGTHS = np.array([200_000] + [2_000] * 99)


def test_groups_hold_a_row_that_no_rank_holds():
    """The search plans for usual rows, and the memory that its plan leaves says how many tokens a rank gets."""
    budget = 3 << 30
    made = planner(budget, LENGTHS)
    work = replace(made.workload(tiny()), precision=Precision())
    assert work.length == 50_000 and work.mean_length == round(LENGTHS.mean())
    result, groups = made._fastest(HARDWARE, MODEL, work)
    plan = result.best.plan
    assert not plan.shares_documents
    assert groups.max_tokens_per_rank == most_tokens(HARDWARE, MODEL, work, plan, int(SHARE_OF_TOKENS * budget))
    assert groups.max_tokens_per_rank < 200_000 <= groups.max_tokens_per_rank * groups.max_degree
    assert needed(plan, 4 * plan.micro_batch_count, 200_000) > budget  # as "static" would need


def test_a_plan_for_more_tokens_is_searched_where_the_longest_row_needs_it():
    budget = 2300 << 20
    made = planner(budget, LENGTHS)
    short = replace(made.workload(tiny()), length=64)
    result, groups = made._fastest(HARDWARE, MODEL, short)
    assert result.workload.length > 64
    assert groups.max_tokens_per_rank * groups.max_degree >= 200_000


def test_one_data_rank_gets_a_plan_for_the_longest_row():
    made = planner(3 << 30, LENGTHS, space=dict(sequence=("ulysses",), sharding=("zero3",)))
    result, groups = made._fastest(HARDWARE, MODEL, replace(made.workload(tiny()), precision=Precision()))
    degree = max(layer.data_degree(4) for layer in result.best.plan.layers)
    if groups is None:
        assert degree == 1
        assert needed(result.best.plan, result.best.plan.micro_batch_count, 200_000) <= 3 << 30
    else:
        assert groups.max_tokens_per_rank * degree >= 200_000


def test_a_given_number_of_tokens_stays():
    made = planner(3 << 30, LENGTHS, max_tokens_per_rank=8192)
    work = made.workload(tiny())
    assert work.length == 50_000 and made.limits().context == (1,)
    assert made._fastest(HARDWARE, MODEL, replace(work, precision=Precision()))[1] is None


def test_the_plan_is_the_simplest_of_those_that_are_about_as_fast():
    made = planner(2 << 30, LENGTHS, space={}, max_tokens_per_rank=8192)
    work = replace(made.workload(tiny()), precision=Precision())
    found, _ = made._fastest(HARDWARE, MODEL, work)
    whole = search_plan(HARDWARE, MODEL, work, memory_bytes=found.memory_bytes, limits=made.limits())
    assert found.best.plan == simplest(whole).plan != whole.best.plan
    assert found.best.step_ms <= 1.01 * whole.best.step_ms


def tiny():
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2))


def test_a_plan_says_what_the_search_found():
    groups = SequenceGroups(max_tokens_per_rank=640, max_degree=4)
    plan = replace(PLANS["zero3"], sequence_groups=groups)
    assert ParallelPlan.from_json(plan.to_json()).sequence_groups == groups
