# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Layers with experts under every kind of plan, against one process: every family, the loss of the routers over the
global batch with a coefficient of 0.5, packed rows, and a model's own forward.
"""

from __future__ import annotations

import pytest

from equivalence import Reference, reference
from galvatron_hf.models.families import adapter_for
from galvatron_hf.plan import ParallelPlan
from plans import expert_plans
from test_parallelize import check_cases
from tiny_models import BATCHES, EXPERT_FAMILIES


# Families in which layers of other kinds than attention are refused.
REFUSED = ("minimax", "llama4_text")
FAMILIES = [name for name in EXPERT_FAMILIES if name not in REFUSED]
# With few of their plans in the fast tests: each kind of plan occurs.
FAST = {
    "mixtral": ["expert_2", "tensor", "zero_bubble"],
    "qwen2_moe": ["all_kinds", "interleaved"],
    "qwen3_moe": ["expert_4", "megatron_sp", "ulysses", "gpipe", "1f1b", "tensor_1f1b"],
    "olmoe": ["recompute"],
    "phimoe": ["shardings"],
    "granitemoe": ["expert_1"],
    "granitemoeshared": ["micro_batches"],
    "deepseek_v2": ["permuted"],
    "deepseek_v3": ["ulysses"],
    "glm4_moe": ["all_kinds"],
    "ernie4_5_moe": ["megatron_sp"],
    "dots1": ["tensor"],
    "minimax_m2": ["expert_2"],
    "gpt_oss": ["recompute"],
    "hunyuan_v1_moe": ["1f1b"],
}


def plans_of(oracle: Reference) -> dict[str, ParallelPlan]:
    """Returns the plans that a family's layers fit."""
    adapter = adapter_for(oracle.model)
    (stack,), counts = adapter.stacks, adapter.expert_counts(oracle.model)
    attention = oracle.model.base_model.layers[0].self_attn
    return expert_plans(
        dense=[index for index, count in enumerate(counts) if not count],
        tensor=stack.unsupported is None and stack.style("self_attn.q_proj") is not None,
        sequence=not list(attention.parameters(recurse=False)),
    )


def oracle_of(family: str, batch: str = "right", **changes) -> Reference:
    return reference(EXPERT_FAMILIES[family].build(**changes), BATCHES[batch]())


@pytest.mark.parametrize("part", range(4))
def test_every_family_with_experts(part):
    cases = {}
    for family in list(FAST)[part::4]:
        oracle = oracle_of(family)
        plans = plans_of(oracle)
        cases |= {f"{family} {name}": (oracle, plans[name]) for name in FAST[family]}
    check_cases(4, cases)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_with_experts_under_every_plan(family):
    oracles = {batch: oracle_of(family, batch) for batch in ("right", "left", "odd", "plain")}
    cases = {}
    for index, (name, plan) in enumerate(plans_of(oracles["right"]).items()):
        batch = list(oracles)[index % len(oracles)]
        cases[f"{name}, {batch}"] = oracles[batch], plan
    check_cases(4, cases)
