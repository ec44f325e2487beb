# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Plans: JSON, copies, defaults and tables; uniform plans; plans that do not run yet."""

import copy
import json
import os
import pickle
import re
import subprocess
import sys

import pytest
from hypothesis import given

import galvatron_hf
from galvatron_hf.plan import LayerStrategy, ParallelPlan, Precision, Stage, VocabularyStrategy
from galvatron_hf.plan.supported import require_runnable, unsupported
from galvatron_hf.plan.table import plan_table
from plan_inputs import EXAMPLE, QUICK, one_stage, plans


def test_the_design_example_is_read_as_written():
    plan = ParallelPlan.from_json(EXAMPLE)
    assert plan.num_layers == 12 and plan.world_size == 8 and plan.micro_batches == 4
    assert plan.stages[1] == Stage(ranks=(4, 5, 6, 7), layers=(6, 12))
    assert [(stage.ranks[0], stage.layers) for stage in plan.stages] == [(0, (0, 6)), (4, (6, 12))]
    layer = plan.layers[11]
    assert (layer.tensor, layer.megatron_sp, layer.sharding, layer.shard_degree) == (2, True, "zero3", 2)
    assert layer.data_degree(4) == 2 and layer.sequence_degree == 2
    assert plan.precision == Precision(compute="bf16", master="fp32", reduce="fp32")
    assert json.loads(plan.to_json()) == EXAMPLE


def test_text_path_and_object_give_the_same_plan(tmp_path):
    plan = ParallelPlan.from_json(EXAMPLE)
    path = tmp_path / "plan.json"
    text = plan.to_json(path)
    assert path.read_text() == text and os.listdir(tmp_path) == ["plan.json"]
    assert plan == ParallelPlan.from_json(text) == ParallelPlan.from_json(path) == ParallelPlan.from_json(str(path))


def test_left_out_fields_have_the_documented_defaults():
    plan = ParallelPlan.from_json(one_stage([{"span": [0, 12]}]))
    assert plan.stages == (Stage(ranks=tuple(range(8)), layers=(0, 12)),)
    assert set(plan.layers) == {LayerStrategy()} and plan.embedding == plan.head == VocabularyStrategy()
    assert plan.micro_batch_count == 1 and ParallelPlan.from_json(plan.to_json()) == plan
    assert (plan.micro_batches, plan.schedule, plan.precision, plan.sequence_groups, plan.meta) == (
        None,
        "1f1b",
        None,
        None,
        {},
    )
    assert plan.layers[0].resolved_shard_degree(8) == 8


def test_equal_neighbours_are_folded_and_spans_may_come_in_any_order():
    plan = ParallelPlan.from_json(
        one_stage([{"span": [6, 12], "tensor": 2}, {"span": [0, 3]}, {"span": [3, 6], "sharding": "zero3"}])
    )
    written = json.loads(plan.to_json())["layers"]
    assert [entry["span"] for entry in written] == [[0, 6], [6, 12]]
    assert [layer.tensor for layer in plan.layers] == [1] * 6 + [2] * 6


@QUICK
@given(plans())
def test_random_valid_plans_survive_json_copy_and_pickle(plan):
    again = ParallelPlan.from_json(plan.to_json())
    assert again == plan and list(again.stacks) == list(plan.stacks) and again.to_json() == plan.to_json()
    assert copy.deepcopy(plan) == plan == pickle.loads(pickle.dumps(plan))
    assert hash(again) == hash(plan)


@QUICK
@given(plans())
def test_a_table_shows_every_layer_once(plan):
    table = str(plan)
    shown = {name: [] for name in plan.stacks}
    for name, first, last in re.findall(r"(encoder|decoder) (\d+)(?:-(\d+))?", table):
        shown[name] += range(int(first), int(last or first) + 1)
    assert sum(shown.values(), []) == list(range(plan.num_layers))


@QUICK
@given(plans())
def test_degrees_account_for_all_ranks(plan):
    for stage in plan.stages:
        ranks = len(stage.ranks)
        for layer in plan.layers[slice(*stage.layers)]:
            assert layer.tensor * layer.ulysses * layer.context * layer.data_degree(ranks) == ranks
            pieces = layer.resolved_shard_degree(ranks)
            assert (ranks // layer.tensor) % pieces == 0
            if layer.sharding == "replicate":
                assert pieces == 1
            elif layer.shard_degree is None:
                assert pieces == ranks // layer.tensor


def test_uniform_splits_ranks_and_layers_evenly():
    plan = ParallelPlan.uniform(
        8, {"encoder": 5, "decoder": 6}, tensor=2, megatron_sp=True, pipeline=4, sharding="zero2"
    )
    assert [stage.layers for stage in plan.stages] == [(0, 3), (3, 6), (6, 9), (9, 11)]
    assert [stage.ranks for stage in plan.stages] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert set(plan.layers) == {LayerStrategy(tensor=2, megatron_sp=True, sharding="zero2")}
    assert plan.embedding == plan.head == VocabularyStrategy(tensor=2, sharding="zero2")
    with pytest.raises(ValueError, match="pipeline is 3.* use pipeline=4"):
        ParallelPlan.uniform(8, 12, pipeline=3)
    with pytest.raises(ValueError, match="more than the layers.* use pipeline=2"):
        ParallelPlan.uniform(8, 3, pipeline=8)


@pytest.mark.parametrize(
    "fields, feature",
    [
        ({"pipeline": 2, "schedule": "zero_bubble"}, "zero_bubble"),
        ({"precision": Precision(compute="fp16")}, "loss scaling"),
    ],
)
def test_what_does_not_run_yet_is_named_and_refused_before_a_step(fields, feature):
    plan = ParallelPlan.uniform(8, 12, **fields)
    assert len(unsupported(plan)) == 1 and feature in unsupported(plan)[0] and ": use " in unsupported(plan)[0]
    with pytest.raises(ValueError, match=feature):
        require_runnable(plan, 8)


def test_a_plan_for_another_world_size_says_how_to_launch():
    plan = ParallelPlan.uniform(8, 12, tensor=2, megatron_sp=True, ulysses=2, recompute="full", shard_degree=2)
    assert unsupported(plan) == []
    require_runnable(plan, 8)
    with pytest.raises(ValueError, match="--num_processes 8.*world_size=1") as caught:
        require_runnable(plan, 1)
    assert "\n" not in str(caught.value)


def test_the_table_shows_strategies_and_folds_layers():
    plan = ParallelPlan.from_json(
        one_stage(
            [{"span": [0, 4], "tensor": 2, "megatron_sp": True}, {"span": [4, 12], "ulysses": 4, "recompute": "full"}],
            stacks={"encoder": 2, "decoder": 10},
        )
    )
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in str(plan).splitlines() if "│" in line]
    assert cells == [
        ["embedding", "0-7", "1", "-", "8", "zero3 over 8", "-"],
        ["encoder 0-1", "0-7", "2", "megatron 2", "4", "zero3 over 4", "none"],
        ["decoder 2-3", "0-7", "2", "megatron 2", "4", "zero3 over 4", "none"],
        ["decoder 4-11", "0-7", "1", "ulysses 4", "2", "zero3 over 8", "full"],
        ["head", "0-7", "1", "-", "8", "zero3 over 8", "-"],
    ]
    assert plan_table(plan).row_count == 5


def test_the_table_has_no_column_for_what_a_plan_lacks():
    def columns(**strategy) -> list[str]:
        return [column.header for column in plan_table(ParallelPlan.uniform(4, 2, **strategy)).columns]

    always = ["part", "ranks", "data", "sharding"]
    assert columns() == always
    assert columns(tensor=2) == ["part", "ranks", "tensor", "data", "sharding"]
    assert columns(context=2, recompute="full") == ["part", "ranks", "sequence", "data", "sharding", "recompute"]
    assert columns(expert=2) == ["part", "ranks", "data", "sharding", "expert"]


def test_importing_plans_and_the_planner_loads_neither_torch_nor_transformers():
    modules = tuple(f"galvatron_hf.{name}" for name in ("plan", "plan.layout", "plan.resolved", "planner.search"))
    code = f"import sys, {', '.join(modules)}; print(sorted({{'torch', 'transformers', 'scipy'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_importing_plans_loads_no_other_package():
    code = (
        "import sys, galvatron_hf.plan; print(sorted({'torch', 'transformers', 'numpy', 'rich'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_importing_the_package_loads_no_other_package_and_names_what_it_offers():
    code = (
        "import sys, galvatron_hf; print(sorted({'numpy', 'rich', 'torch', 'transformers'} & set(sys.modules))); "
        "assert set(galvatron_hf.__all__) <= set(dir(galvatron_hf)); assert not hasattr(galvatron_hf, 'absent')"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
    for name in galvatron_hf.__all__:
        assert getattr(galvatron_hf, name).__name__ == name
