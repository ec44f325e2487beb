# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Galvatron's plan files: read layer by layer, written back, and refused if they say what no plan can."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from galvatron_hf.interop.galvatron.plan import read_galvatron_plan, to_galvatron
from galvatron_hf.plan import ParallelPlan, VocabularyStrategy
from plan_inputs import JSON_VALUES, QUICK, refusal


GALVATRON = Path(__file__).parent / "data" / "galvatron_plans"


def numbers(text):
    return [int(part) for part in text.split(",")]


@pytest.mark.parametrize("path", sorted(GALVATRON.glob("*.json")), ids=lambda path: path.stem)
def test_galvatron_files_are_read_layer_by_layer_and_written_back(path):
    raw = json.loads(path.read_text())
    nodes, devices = numbers(re.search(r"_(\d+x\d+)_", path.name)[1].replace("x", ","))
    ranks = nodes * devices
    plan = read_galvatron_plan(path, None if "world_size" in raw else ranks)
    assert plan.world_size == ranks and plan.micro_batches == raw["chunks"] and plan.schedule == "1f1b"
    assert [stage.layers[1] - stage.layers[0] for stage in plan.stages] == numbers(raw["pp_division"])
    assert [stage.ranks[0] for stage in plan.stages] == [i * ranks // raw["pp_deg"] for i in range(raw["pp_deg"])]
    assert [layer.tensor * layer.ulysses for layer in plan.layers] == numbers(raw["tp_sizes_enc"])
    assert [int(layer.ulysses > 1) for layer in plan.layers] == numbers(raw["use_sp"])
    assert [{"zero3": 1, "zero2": 0}[layer.sharding] for layer in plan.layers] == numbers(raw["dp_types_enc"])
    assert [{"full": 1, "none": 0}[layer.recompute] for layer in plan.layers] == numbers(raw["checkpoint"])
    assert all(layer.megatron_sp == (layer.tensor > 1) for layer in plan.layers)
    assert plan.embedding == plan.head
    assert plan.embedding.tensor == (1 if raw["vsp"] else raw["vtp"])
    assert plan.embedding.sharding == ("zero3" if raw["embed_sdp"] else "zero2")
    assert to_galvatron(plan) == raw
    assert to_galvatron(ParallelPlan.from_json(plan.to_json())) == raw


def galvatron(**fields):
    plain = {
        "pp_deg": 1,
        "tp_sizes_enc": "2,2,1,4",
        "tp_consecutive_flags": "1,1,1,1",
        "dp_types_enc": "1,0,0,1",
        "global_bsz": 64,
        "chunks": 8,
        "world_size": 8,
    }
    return {name: value for name, value in {**plain, **fields}.items() if value is not None}


def test_galvatron_ulysses_context_and_missing_fields():
    raw = galvatron(use_sp="1,0,1,0", cp_sizes_enc="1,2,1,1", default_dp_type="ddp", pp_deg=2, pp_division="1,3")
    plan = read_galvatron_plan(raw, megatron_sp=False)
    assert [(layer.tensor, layer.ulysses, layer.context) for layer in plan.layers] == [
        (1, 2, 1),
        (2, 1, 2),
        (1, 1, 1),
        (4, 1, 1),
    ]
    assert [layer.sharding for layer in plan.layers] == ["zero3", "replicate", "replicate", "zero3"]
    assert plan.schedule == "gpipe" and not any(layer.megatron_sp for layer in plan.layers)
    assert [stage.layers for stage in plan.stages] == [(0, 1), (1, 4)]
    assert to_galvatron(plan) == raw


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"default_dp_type": "zero3", "embed_sdp": 0},
        {"default_dp_type": "zero3", "vocab_sdp": 1},
        {"vtp": 4, "vsp": 1, "vocab_sdp": 1, "embed_sdp": 1},
        {"pipeline_type": "gpipe", "checkpoint": "1,1,0,0", "vtp": 8},
        {"pp_deg": 2, "use_sp": "0,1,1,0"},
    ],
)
def test_galvatron_fields_are_written_back_as_they_were(fields):
    raw = galvatron(**fields)
    assert to_galvatron(read_galvatron_plan(raw)) == raw


def test_an_edited_galvatron_plan_is_written_as_edited():
    plan = read_galvatron_plan(galvatron())
    edited = dataclasses.replace(
        plan,
        world_size=16,
        stages=None,
        layers=tuple(dataclasses.replace(layer, recompute="full") for layer in plan.layers),
    )
    written = to_galvatron(edited)
    assert written["checkpoint"] == "1,1,1,1" and written["world_size"] == 16 and written["global_bsz"] == 64


def test_a_plan_of_our_own_becomes_a_galvatron_file_and_back():
    plan = ParallelPlan.uniform(8, 6, tensor=2, megatron_sp=True, pipeline=2, micro_batches=4, recompute="full")
    written = to_galvatron(plan)
    again = read_galvatron_plan(json.loads(json.dumps(written)))
    assert dataclasses.replace(again, meta={}) == plan
    assert written["global_bsz"] == 8 and written["pp_division"] == "3,3" and written["tp_sizes_enc"] == "2,2,2,2,2,2"


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"world_size": None}, "pass world_size"),
        ({"tp_consecutive_flags": "1,1,0,1"}, "tp_consecutive_flags is 0 for layer 2"),
        ({"dp_types_enc": "1,0"}, "dp_types_enc has 2 entries"),
        ({"checkpoint": "2,0,0,0"}, "checkpoint is 2 for layer 0"),
        ({"tp_sizes_enc": "2,x"}, "not a comma-separated list"),
        ({"tp_sizes_enc": [2, 2, 1, 4]}, "not a comma-separated list"),
        ({"tp_sizes_enc": "2,2,3,4"}, "layer 2: tensor=3"),
        ({"tp_sizes_enc": "2,2,0,4"}, "tensor is 0"),
        ({"pp_deg": 3}, "use pp_deg=4"),
        ({"pp_deg": 8}, "use pp_deg=4"),
        ({"pp_deg": 2, "pp_division": "1,2"}, "use '2,2'"),
        ({"vtp": 3}, "use vtp=4"),
        ({"vtp": 1, "embed_sdp": 0, "vocab_sdp": 1}, "two names of one field"),
        ({"default_dp_type": "zero1"}, "default_dp_type is 'zero1'"),
        ({"pipeline_type": "1f1b"}, "pipeline_type is '1f1b'"),
        ({"chunks": 0}, "chunks is 0"),
        ({"global_bsz": "64"}, "global_bsz is '64'"),
        ({"ep_sizes_enc": "1,1,1,1"}, "unknown field 'ep_sizes_enc'"),
        ({"dp_types_enc": None}, "no field 'dp_types_enc'"),
    ],
)
def test_broken_galvatron_files_are_refused_by_field(fields, words):
    assert words in refusal(galvatron(**fields), read_galvatron_plan)


def test_a_galvatron_file_for_another_world_size_is_refused():
    with pytest.raises(ValueError, match="use world_size=8"):
        read_galvatron_plan(galvatron(), 16)


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"tensor": 2, "ulysses": 2}, "tensor=2 and ulysses=2"),
        ({"shard_degree": 4}, "use shard_degree=8"),
        ({"expert": 2}, "expert=2"),
        ({"schedule": "zero_bubble"}, "'zero_bubble'"),
        ({"head": VocabularyStrategy()}, "embedding and head differ"),
        ({"sharding": "zero2", "embedding": VocabularyStrategy(sharding="replicate")}, "one default_dp_type"),
    ],
)
def test_what_galvatron_cannot_express_is_named(fields, words):
    if "sharding" in fields:
        fields = {**fields, "head": fields["embedding"]}
    elif "head" in fields:
        fields = {**fields, "embedding": VocabularyStrategy(tensor=2)}
    with pytest.raises(ValueError, match=re.escape(words)):
        to_galvatron(ParallelPlan.uniform(8, 4, **fields))


@settings(parent=QUICK, max_examples=150)
@given(st.data())
def test_mutated_galvatron_files_give_a_plan_or_one_line(data):
    raw = galvatron(use_sp="0,1,0,0", vtp=2, vsp=0, embed_sdp=1, pp_division="4", default_dp_type="zero2")
    name = data.draw(st.sampled_from(sorted(raw)))
    raw[name] = data.draw(JSON_VALUES | st.sampled_from(["1,1,1,1", "0,0,0,0", "9,9,9,9", "99999999", "4", -1, 2, 3]))
    try:
        plan = read_galvatron_plan(raw)
    except ValueError as error:
        assert "\n" not in str(error) and ": " in str(error) and len(str(error)) < 500, str(error)
    else:
        assert to_galvatron(plan) == raw
