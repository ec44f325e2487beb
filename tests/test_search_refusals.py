# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Plans that the cost model cannot price, and limits that no plan is within, are refused in a sentence."""

from dataclasses import replace

import pytest

from galvatron_hf.plan import LayerStrategy, ParallelPlan, Precision, SequenceGroups, Stage, VocabularyStrategy
from galvatron_hf.planner.estimate import estimate_plan
from galvatron_hf.planner.search import search_plan
from galvatron_hf.planner.space import Limits
from galvatron_hf.profiler.trace.tracing import profile_from_config
from planner_cases import random_hardware, random_model, workload
from tiny_configurations import tiny_model


def test_a_family_whose_layers_cannot_be_run_alone_has_no_profile():
    hardware = random_hardware(0, world_size=4, memory_bytes=1 << 40)
    config = tiny_model("rwkv").config
    with pytest.raises(ValueError, match="RwkvForCausalLM has layers that cannot be run alone.*'state'.*write a plan"):
        profile_from_config(config, hardware, next(iter(hardware.flops_per_s)), length=128)


def test_plans_without_a_price_are_refused():
    hardware, model = random_hardware(0, world_size=4, memory_bytes=1 << 40), random_model(0, layers=4)
    many = ParallelPlan.uniform(4, 5)
    with pytest.raises(ValueError, match="The plan has 5 layers and the model 4; make a plan for 4 layers."):
        estimate_plan(hardware, model, workload(8), many)
    named = replace(ParallelPlan.uniform(4, 4), stacks={"encoder": 2, "decoder": 2})
    with pytest.raises(ValueError, match="has the stacks {'encoder': 2, 'decoder': 2} and the model {'decoder': 4}"):
        estimate_plan(hardware, model, workload(8), named)
    unknown = ParallelPlan(world_size=4, stacks={"decoder": 4}, layers=(LayerStrategy(tensor=4),) * 4)
    with pytest.raises(ValueError, match="has no figures for degree .*: use one of these, or profile"):
        estimate_plan(hardware, model, workload(8), unknown)
    with pytest.raises(ValueError, match="for 2 devices and the hardware profile has 4; make a plan for 4"):
        estimate_plan(hardware, model, workload(8), ParallelPlan.uniform(2, 4))
    mixed = replace(ParallelPlan.uniform(4, 4), layers=(LayerStrategy(), LayerStrategy(context=2)) * 2)
    with pytest.raises(ValueError, match=r"context degrees \[1, 2\] in one plan yet; use context=2 in every layer."):
        estimate_plan(hardware, model, workload(8), mixed)
    with pytest.raises(ValueError, match="has context=2, but the profile of random does not say.*use context=1"):
        alone = replace(model, shares_documents=False)
        estimate_plan(hardware, alone, workload(8), ParallelPlan.uniform(4, 4, context=2))
    with pytest.raises(ValueError, match="layer 0 has expert=2, but no experts; use expert=1."):
        estimate_plan(hardware, model, workload(8), ParallelPlan.uniform(4, 4, expert=2))
    grouped = replace(ParallelPlan.uniform(4, 4), sequence_groups=SequenceGroups(max_tokens_per_rank=8, max_degree=2))
    with pytest.raises(ValueError, match="no formula for sequence_groups yet; leave them out."):
        estimate_plan(hardware, model, workload(8), grouped)
    strided = [Stage(ranks=(0, 2), layers=(0, 2)), Stage(ranks=(1, 3), layers=(2, 4))]
    with pytest.raises(ValueError, match="no formula for stages on the ranks .*; use consecutive ranks, from 0 on."):
        estimate_plan(hardware, model, workload(8), replace(ParallelPlan.uniform(4, 4), stages=tuple(strided)))
    late = ParallelPlan.uniform(4, 4, pipeline=2, micro_batches=4, schedule="zero_bubble", sharding="zero2")
    with pytest.raises(ValueError, match="no formula for schedule 'zero_bubble' yet"):
        estimate_plan(hardware, model, workload(8), late)
    equal = interleaved(replicate := LayerStrategy(), replicate, micro_batches=4)
    assert estimate_plan(hardware, model, workload(8), equal).step_ms > 0
    differ = "no formula for 2 different virtual stages per rank yet"
    with pytest.raises(ValueError, match=differ):
        estimate_plan(hardware, model, workload(8), interleaved(replicate, LayerStrategy(sharding="zero2")))
    with pytest.raises(ValueError, match=differ):
        kinds = replace(model, kinds=model.kinds * 2, layers=(0, 0, 0, 1))
        estimate_plan(hardware, kinds, workload(8), equal)
    with pytest.raises(ValueError, match=differ):
        stages = tuple(
            Stage(ranks=ranks, layers=layers)
            for ranks, layers in zip([(0, 1), (2, 3)] * 2, [(0, 1), (1, 2), (2, 4), (4, 5)], strict=True)
        )
        uneven = replace(equal, stacks={"decoder": 5}, layers=(replicate,) * 5, stages=stages)
        estimate_plan(hardware, replace(model, layers=(0,) * 5), workload(8), uneven)
    with pytest.raises(
        ValueError, match="no formula for micro_batches=5 interleaved on 2 pipeline ranks; use a multiple of 2"
    ):
        estimate_plan(hardware, model, workload(8), replace(equal, micro_batches=5))


def interleaved(first: LayerStrategy, second: LayerStrategy, micro_batches: int = 4) -> ParallelPlan:
    """Returns a plan of four layers, two virtual stages on each of two pipeline ranks, and a strategy for each."""
    stages = tuple(Stage(ranks=((0, 1), (2, 3))[index % 2], layers=(index, index + 1)) for index in range(4))
    return ParallelPlan(
        world_size=4,
        stacks={"decoder": 4},
        layers=(first, first, second, second),
        stages=stages,
        schedule="interleaved",
        micro_batches=micro_batches,
        precision=Precision(),
    )


def test_limits_without_a_plan_are_told():
    hardware, model = random_hardware(0, world_size=4, memory_bytes=1 << 40), random_model(0, layers=4)
    with pytest.raises(ValueError, match="No plan for 4 devices and 8 rows is within the limits"):
        search_plan(hardware, model, workload(8), limits=Limits(sharding=(), pipeline=(1,)))
    with pytest.raises(
        ValueError, match=r"pipeline=\(3,\): 4 devices and 4 layers allow only the pipeline degrees 1, 2, 4"
    ):
        search_plan(hardware, model, workload(8), limits=Limits(pipeline=(3,)))
    with pytest.raises(ValueError, match=r"context=\(2,\): rows are not packed; use context=\(1,\)."):
        search_plan(hardware, model, workload(8), limits=Limits(context=(2,)))
    with pytest.raises(ValueError, match=r"context=\(3,\): 4 devices allow only the context degrees 1, 2, 4"):
        search_plan(hardware, model, workload(8, packed=True), limits=Limits(context=(3,)))
    with pytest.raises(ValueError, match=r"context=\(1, 2\): ranks cannot share documents of random; use"):
        alone = replace(model, shares_documents=False)
        search_plan(hardware, alone, workload(8, packed=True), limits=Limits(context=(1, 2)))
    with pytest.raises(ValueError, match="context is 0"):
        Limits(context=(0,))


def test_tied_ends_that_differ_have_no_price():
    hardware, model = random_hardware(0, world_size=2, memory_bytes=1 << 40), random_model(0, layers=2, tied=True)
    plan = replace(ParallelPlan.uniform(2, 2), head=VocabularyStrategy(tensor=2))
    with pytest.raises(ValueError, match="their weights are tied and on the same ranks: give head the fields"):
        estimate_plan(hardware, model, workload(8), plan)
