# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
import copy
import dataclasses
import itertools
import json
import math
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from galvatron_hf.plan import LayerStrategy, ParallelPlan, Precision, SequenceGroups, Stage, VocabularyStrategy
from galvatron_hf.plan.supported import require_runnable, unsupported
from galvatron_hf.plan.table import plan_table
from plan_inputs import JSON_VALUES, QUICK, refusal


EXAMPLE = {
    "version": 1,
    "world_size": 8,
    "stacks": {"decoder": 12},
    "micro_batches": 4,
    "schedule": "1f1b",
    "precision": {"compute": "bf16", "master": "fp32", "reduce": "fp32"},
    "stages": [{"ranks": [0, 1, 2, 3], "layers": [0, 6]}, {"ranks": [4, 5, 6, 7], "layers": [6, 12]}],
    "layers": [
        {
            "span": [0, 12],
            "tensor": 2,
            "megatron_sp": True,
            "ulysses": 1,
            "context": 1,
            "sharding": "zero3",
            "shard_degree": 2,
            "expert": 1,
            "recompute": "none",
        }
    ],
    "embedding": {"tensor": 2, "sharding": "zero3"},
    "head": {"tensor": 2, "sharding": "zero3"},
    "sequence_groups": None,
    "meta": {},
}


def changed(**fields):
    return {**copy.deepcopy(EXAMPLE), **fields}


def one_stage(layers, **fields):
    """A plan of one stage on 8 ranks with the given `layers` entries over 12 layers."""
    plan = {"version": 1, "world_size": 8, "stacks": {"decoder": 12}, "layers": layers}
    return {**plan, **fields}


@st.composite
def layer_strategies(draw, ranks, groups=False):
    divisor = st.sampled_from([d for d in range(1, ranks + 1) if ranks % d == 0])
    tensor = draw(divisor)
    rest = ranks // tensor
    ulysses = 1 if groups else math.gcd(draw(divisor), rest)
    context = 1 if groups else math.gcd(draw(divisor), rest // ulysses)
    sharding = draw(st.sampled_from(["replicate", "zero2", "zero3"]))
    shard_degree = draw(st.none() | st.sampled_from([d for d in range(1, rest + 1) if rest % d == 0]))
    if sharding == "replicate":
        shard_degree = draw(st.sampled_from([None, 1]))
    return LayerStrategy(
        tensor=tensor,
        megatron_sp=tensor > 1 and draw(st.booleans()),
        ulysses=ulysses,
        context=context,
        sharding=sharding,
        shard_degree=shard_degree,
        expert=draw(st.sampled_from([1] + [tensor * d for d in range(1, rest + 1) if rest % d == 0])),
        recompute=draw(st.sampled_from(["none", "full"])),
    )


@st.composite
def vocabulary_strategies(draw, ranks):
    layer = draw(layer_strategies(ranks))
    return VocabularyStrategy(tensor=layer.tensor, sharding=layer.sharding, shard_degree=layer.shard_degree)


@st.composite
def plans(draw):
    sizes = draw(st.lists(st.sampled_from([1, 2, 3, 4, 6, 8]), min_size=1, max_size=3))
    order = draw(st.permutations(range(sum(sizes))))
    ends = list(itertools.accumulate(sizes))
    rank_groups = [tuple(order[end - size : end]) for size, end in zip(sizes, ends)]
    schedule = draw(st.sampled_from(["gpipe", "1f1b", "interleaved", "zero_bubble"]))
    if schedule in ("interleaved", "zero_bubble"):
        rank_groups = rank_groups * draw(st.integers(1, 3))
    groups = draw(st.booleans())
    stages, layers, start = [], [], 0
    for ranks in rank_groups:
        part = draw(st.lists(layer_strategies(len(ranks), groups), min_size=1, max_size=3))
        repeated = [layer for layer in part for _ in range(draw(st.integers(1, 3)))]
        stages.append(Stage(ranks=ranks, layers=(start, start + len(repeated))))
        layers += repeated
        start += len(repeated)
    first = draw(st.integers(1, len(layers)))
    stacks = {"encoder": first, "decoder": len(layers) - first} if first < len(layers) else {"decoder": first}
    most = min(layers[i].data_degree(len(stage.ranks)) for stage in stages for i in range(*stage.layers))
    return ParallelPlan(
        world_size=sum(sizes),
        stacks=stacks,
        micro_batches=draw(st.integers(1, 64)),
        schedule=schedule,
        precision=draw(st.none() | st.builds(Precision, compute=st.sampled_from(["fp32", "bf16", "fp16"]))),
        stages=tuple(stages),
        layers=tuple(layers),
        embedding=draw(vocabulary_strategies(len(stages[0].ranks))),
        head=draw(vocabulary_strategies(len(stages[-1].ranks))),
        sequence_groups=SequenceGroups(max_tokens_per_rank=4096, max_degree=most) if groups else None,
        meta=draw(st.dictionaries(st.text(max_size=8), JSON_VALUES, max_size=3)),
    )


# Reading and writing


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
    assert (plan.micro_batches, plan.schedule, plan.precision, plan.sequence_groups, plan.meta) == (
        1,
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


# Refusals


@pytest.mark.parametrize(
    "source, words",
    [
        (changed(world_size=True), "world_size is True"),
        (changed(world_size=8.0), "world_size is 8.0"),
        (changed(world_size=10**30), "outside 1 to 1048576"),
        (changed(version=2), "use version 1"),
        (changed(tensr=2), "unknown field 'tensr'"),
        (changed(meta=[]), "meta is []"),
        (changed(micro_batches=0), "use 1"),
        (changed(schedule="1F1b"), "use '1f1b'"),
        (changed(precision={"compute": "fp8"}), "compute is 'fp8'"),
        (changed(precision={"comput": "bf16"}), "did you mean 'compute'"),
        (
            changed(embedding={"tensor": 3}),
            "embedding: tensor=3 does not divide the 4 ranks of its stage: use tensor=4",
        ),
        (changed(head={"tensor": 2, "ulysses": 2}), "head has the unknown field 'ulysses'"),
        (changed(stacks={}), "has no stack"),
        (changed(stacks={"decoder": 10**12}), "use 65536"),
        (changed(stacks={"encoder": 60000, "decoder": 60000}), "sum of stacks"),
        (changed(stacks={"decoder": 13}), "leaves layer 12 without a span: end the last span at 13"),
        (changed(stacks={"decoder": 11}), "stacks have 11 layers: end it at 11"),
        (changed(sequence_groups={"max_tokens_per_rank": 1024, "max_degree": 4}), "use max_degree=2"),
        (changed(sequence_groups={"max_degree": 4}), "no field 'max_tokens_per_rank'"),
        (changed(sequence_groups={"max_tokens_per_rank": 8, "max_degree": 1, "kinds": ["rign"]}), "use 'ring'"),
        (one_stage([{"span": [0, 12], "tensor": 3}]), "layer 0: tensor=3"),
        (one_stage([{"span": [0, 12], "tensor": 3}]), "use tensor=4"),
        (one_stage([{"span": [0, 6]}, {"span": [6, 12], "tensor": 4, "ulysses": 4}]), "layer 6: tensor=4, ulysses=4"),
        (one_stage([{"span": [0, 12], "tensor": 2, "shard_degree": 3}]), "use shard_degree=4"),
        (one_stage([{"span": [0, 12], "sharding": "replicate", "shard_degree": 2}]), "drop shard_degree"),
        (one_stage([{"span": [0, 12], "sharding": "zero1"}]), "use 'zero3'"),
        (one_stage([{"span": [0, 12], "recompute": "selective"}]), "not available yet: use 'full' or 'none'"),
        (one_stage([{"span": [0, 12], "megatron_sp": True}]), "use megatron_sp=false or tensor=2"),
        (one_stage([{"span": [0, 12], "megatron_sp": 1}]), "neither true nor false"),
        (one_stage([{"span": [0, 12], "tensor": 2, "expert": 3}]), "use expert=4"),
        (one_stage([{"span": [0, 12], "expert": 3}]), "use expert=4"),
        (one_stage([{"span": [0, 12], "tensor": 0}]), "tensor is 0"),
        (one_stage([{"span": [0, 5]}, {"span": [6, 12]}]), "layer 5 without a span: begin span [6, 12] at 5"),
        (one_stage([{"span": [0, 6]}, {"span": [5, 12]}]), "layer 5 twice, again in span [5, 12]: begin it at 6"),
        (one_stage([{"span": [0, 12]}, {"span": [2, 3]}]), "layer 2 twice, again in span [2, 3]: remove it"),
        (one_stage([{"span": [0, 12]}, {"span": [12, 13]}]), "12 layers: remove it"),
        (one_stage([{"span": [0, 10**9]}]), "end it at 12"),
        (one_stage([{"span": [3, 3]}]), "holds no layer"),
        (one_stage([{"span": [0, 12, 1]}]), "not two integers"),
        (one_stage([{"tensor": 2}]), "no field 'span'"),
        (one_stage([]), "not a list with something in it"),
        (one_stage([{"span": [0, 12], "ulysses": 2}], sequence_groups=EXAMPLE["sequence_groups"], head=None), "head"),
        (
            one_stage(
                [{"span": [0, 12], "ulysses": 2}],
                sequence_groups={"max_tokens_per_rank": 1024, "max_degree": 2},
            ),
            "use ulysses=1 and context=1",
        ),
    ],
)
def test_impossible_plans_are_refused_with_the_fix(source, words):
    assert words in refusal(source)
    # The same through text, as a person would edit it.
    assert words.split("is [")[0] in refusal(json.dumps(source))


@pytest.mark.parametrize(
    "stages, words",
    [
        (
            [{"ranks": [0, 1, 2, 3], "layers": [0, 6]}, {"ranks": [4, 5, 6], "layers": [6, 12]}],
            "rank 7 is in no stage",
        ),
        ([{"ranks": [0, 1, 2, 3], "layers": [0, 6]}, {"ranks": [4, 5, 6, 6], "layers": [6, 12]}], "rank 6 is listed"),
        ([{"ranks": [0, 1, 2, 3], "layers": [0, 6]}, {"ranks": [3, 4, 5, 6], "layers": [6, 12]}], "rank 3 is in stag"),
        ([{"ranks": [0, 1, 2, 3], "layers": [0, 6]}, {"ranks": [4, 5, 6, 8], "layers": [6, 12]}], "or world_size=9"),
        ([{"ranks": [0, 1, 2, 3], "layers": [0, 5]}, {"ranks": [4, 5, 6, 7], "layers": [6, 12]}], "leaves layer 5"),
        ([{"ranks": [0, 1, 2, 3], "layers": [0, 7]}, {"ranks": [4, 5, 6, 7], "layers": [6, 12]}], "gives layer 6 twi"),
        ([{"ranks": [0, 1, 2, 3], "layers": [0, 6]}, {"ranks": [4, 5, 6, 7], "layers": [6, 11]}], "leaves layer 11"),
        ([{"ranks": [0, 1, 2, 3], "layers": [0, 6]}, {"ranks": [4, 5, 6, 7], "layers": [6, 13]}], "end it at 12"),
        ([{"ranks": [], "layers": [0, 12]}], "ranks is empty"),
        ([{"ranks": [0, 1, 2, 3, 4, 5, 6, -7], "layers": [0, 12]}], "rank is -7"),
        ([{"ranks": [0, 1, 2, 3, 4, 5, 6, "7"], "layers": [0, 12]}], "rank is '7'"),
        ([{"ranks": list(range(8)), "layers": [0, 6]}, {"ranks": list(range(8)), "layers": [6, 12]}], "'interleaved'"),
    ],
)
def test_impossible_stages_are_refused_by_name(stages, words):
    assert words in refusal(changed(stages=stages))


def virtual(order, schedule):
    ranks = {"a": (0, 1), "b": (2, 3)}
    stages = tuple(Stage(ranks=ranks[name], layers=(index, index + 1)) for index, name in enumerate(order))
    return ParallelPlan(
        world_size=4,
        stacks={"decoder": len(order)},
        schedule=schedule,
        stages=stages,
        layers=(LayerStrategy(),) * len(order),
    )


def test_virtual_stages_repeat_in_the_order_of_their_schedule():
    assert len(virtual("abab", "interleaved").stages) == 4
    assert len(virtual("abba", "zero_bubble").stages) == 4
    for order, schedule in [("abba", "interleaved"), ("aba", "interleaved"), ("aabb", "zero_bubble")]:
        with pytest.raises(ValueError, match="repeat all 2 rank lists in their first order"):
            virtual(order, schedule)
    with pytest.raises(ValueError, match="use 'interleaved'"):
        virtual("abab", "1f1b")


def test_stages_of_unequal_size_are_legal_and_told_apart():
    plan = ParallelPlan.from_json(
        changed(
            stages=[{"ranks": [0, 1], "layers": [0, 6]}, {"ranks": [2, 3, 4, 5, 6, 7], "layers": [6, 12]}],
            layers=[{"span": [0, 12], "tensor": 2}],
        )
    )
    assert any("unequal" in sentence for sentence in unsupported(plan))


@QUICK
@given(
    st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16]),
    st.integers(1, 20),
    st.integers(1, 20),
    st.integers(1, 20),
    st.none() | st.integers(1, 20),
    st.booleans(),
)
def test_the_suggested_degrees_work_and_none_is_nearer(ranks, tensor, ulysses, context, shard_degree, megatron_sp):
    layer = LayerStrategy(
        tensor=tensor,
        ulysses=ulysses,
        context=context,
        shard_degree=shard_degree,
        megatron_sp=megatron_sp and tensor > 1,
    )
    fits = ranks % (tensor * ulysses * context) == 0
    if fits and (shard_degree is None or (ranks // tensor) % shard_degree == 0):
        return layer.check_ranks(ranks)
    with pytest.raises(ValueError) as caught:
        layer.check_ranks(ranks)
    changes = {
        name: {"false": False, "None": None}.get(value) if not value.isdigit() else int(value)
        for name, value in re.findall(r"(\w+)=(\w+)", str(caught.value).split(": use ")[1])
    }
    fixed = dataclasses.replace(layer, **changes)
    fixed.check_ranks(ranks)

    def distance(degrees):
        return sum(abs(math.log(a / b)) for a, b in zip((tensor, ulysses, context), degrees))

    smallest = min(
        distance(degrees)
        for degrees in itertools.product(range(1, ranks + 1), repeat=3)
        if ranks % math.prod(degrees) == 0
    )
    assert distance((fixed.tensor, fixed.ulysses, fixed.context)) == pytest.approx(smallest)


def test_a_plan_made_in_code_is_checked_like_one_that_is_read():
    for fields, words in [
        ({"layers": ()}, "layers is"),
        ({"layers": (LayerStrategy(),)}, "give 12"),
        ({"stages": ("whole",)}, "not a tuple of Stage"),
        ({"precision": "bf16"}, "give a Precision"),
        ({"embedding": {"tensor": 2}}, "give a VocabularyStrategy"),
        ({"meta": {"when": {1, 2}}}, "cannot be written as JSON"),
        ({"meta": {"loss": float("nan")}}, "cannot be written as JSON"),
    ]:
        base = {"world_size": 8, "stacks": {"decoder": 12}, "layers": (LayerStrategy(),) * 12}
        assert words in refusal({**base, **fields}, lambda arguments: ParallelPlan(**arguments))


def test_tied_embeddings_need_equal_strategies_on_shared_ranks():
    plan = ParallelPlan.uniform(8, 12, tensor=2)
    plan.check_tied()
    whole = VocabularyStrategy(sharding="zero2", tensor=2)
    with pytest.raises(ValueError, match="give head the fields of embedding"):
        dataclasses.replace(plan, head=whole).check_tied()
    apart = ParallelPlan.uniform(8, 12, tensor=2, pipeline=2, head=whole)
    apart.check_tied()
    with pytest.raises(ValueError, match="use tensor=2 for head"):
        dataclasses.replace(apart, head=VocabularyStrategy(tensor=4)).check_tied()


# Hostile input


@pytest.mark.parametrize(
    "text, words",
    [
        ('{"version": 1, "version": 1}', "'version' twice"),
        ('{"meta": {"a": NaN}}', "NaN"),
        ('{"meta": {"a": -Infinity}}', "-Infinity"),
        ('{"meta": ' + '{"a":' * 200000 + "1" + "}" * 200001, "deep"),
        ('{"meta": ' + '{"a":' * 100 + "1" + "}" * 101, "more than 64 deep"),
        ('{"version": ' + "9" * 10000 + "}", "too many digits"),
        ('{"version": 1', "not JSON"),
        ("{" + " " * (16 * 1024 * 1024) + "}", "above the limit"),
        ("[1, 2]", "cannot be opened"),
        ("a\0b", "not a path"),
        ("\ud800", "not a path"),
        ("x" * 10000, "cannot be opened"),
        ("", "cannot be opened"),
        (None, "NoneType"),
        (7, "int"),
        (b"{}", "bytes"),
        (json.dumps(EXAMPLE).replace('"meta": {}', '"meta": {"a": 1e999}'), "cannot be written as JSON"),
    ],
)
def test_hostile_text_is_refused_in_one_line(text, words):
    assert words in refusal(text)


def test_hostile_files_are_refused_in_one_line(tmp_path):
    big = tmp_path / "big.json"
    with open(big, "wb") as file:
        file.truncate(17 * 1024 * 1024)
    latin = tmp_path / "latin.json"
    latin.write_bytes(b'{"meta": "\xff"}')
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path, words in [
        (big, "above the limit"),
        (latin, "not UTF-8"),
        (pipe, "not a regular file"),
        (tmp_path, "not a regular file"),
        (Path("/dev/zero"), "not a regular file"),
        (tmp_path / "missing.json", "no such file"),
    ]:
        assert words in refusal(path)


def nodes(value, path=()):
    yield path
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield from nodes(child, (*path, key))


@settings(parent=QUICK, max_examples=200)
@given(plans(), st.data())
def test_mutated_objects_give_a_plan_or_one_line(plan, data):
    raw = json.loads(plan.to_json())
    path = data.draw(st.sampled_from([path for path in nodes(raw) if path]))
    holder = raw
    for key in path[:-1]:
        holder = holder[key]
    action = data.draw(st.sampled_from(["replace", "nudge", "remove", "add"]))
    if action == "remove":
        del holder[path[-1]]
    elif action == "nudge" and type(holder[path[-1]]) is int:
        holder[path[-1]] += data.draw(st.sampled_from([-1, 1, 2, 10**9, 10**18]))
    elif action == "add" and isinstance(holder, dict):
        holder[data.draw(st.text(max_size=5))] = data.draw(JSON_VALUES)
    else:
        holder[path[-1]] = data.draw(JSON_VALUES)
    for source in (raw, json.dumps(raw)):
        try:
            made = ParallelPlan.from_json(source)
        except ValueError as error:
            assert "\n" not in str(error) and ": " in str(error) and len(str(error)) < 500, str(error)
        else:
            assert ParallelPlan.from_json(made.to_json()) == made


@settings(parent=QUICK, max_examples=150)
@given(plans(), st.data())
def test_mutated_text_gives_a_plan_or_one_line(plan, data):
    text = plan.to_json()
    start = data.draw(st.integers(0, len(text)))
    end = min(len(text), start + data.draw(st.integers(0, 5)))
    text = text[:start] + data.draw(st.text(max_size=5) | st.sampled_from(list('[]{},:"0-.'))) + text[end:]
    try:
        ParallelPlan.from_json(text)
    except ValueError as error:
        assert "\n" not in str(error) and ": " in str(error) and len(str(error)) < 500, str(error)


def test_large_plans_are_checked_in_seconds():
    plan = ParallelPlan.uniform(65536, 4096, tensor=8, pipeline=64, micro_batches=128)
    assert ParallelPlan.from_json(plan.to_json()) == plan


# Uniform plans, what runs, what is shown


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
        ({"context": 2}, "context parallelism"),
        ({"expert": 2}, "expert parallelism"),
        ({"precision": Precision(compute="fp16")}, "loss scaling"),
    ],
)
def test_what_does_not_run_yet_is_named_and_refused_before_a_step(fields, feature):
    plan = ParallelPlan.uniform(8, 12, **fields)
    assert len(unsupported(plan)) == 1 and feature in unsupported(plan)[0] and ": use " in unsupported(plan)[0]
    with pytest.raises(ValueError, match=feature):
        require_runnable(plan, 8)


def test_sequence_groups_do_not_run_yet():
    groups = SequenceGroups(max_tokens_per_rank=4096, max_degree=8)
    plan = dataclasses.replace(ParallelPlan.uniform(8, 12), sequence_groups=groups)
    assert ["sequence_groups" in sentence for sentence in unsupported(plan)] == [True]


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
        ["embedding", "0-7", "1", "-", "8", "zero3 over 8", "-", "-"],
        ["encoder 0-1", "0-7", "2", "megatron 2", "4", "zero3 over 4", "1", "none"],
        ["decoder 2-3", "0-7", "2", "megatron 2", "4", "zero3 over 4", "1", "none"],
        ["decoder 4-11", "0-7", "1", "ulysses 4", "2", "zero3 over 8", "1", "full"],
        ["head", "0-7", "1", "-", "8", "zero3 over 8", "-", "-"],
    ]
    assert plan_table(plan).row_count == 5


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
        "assert set(galvatron_hf.__all__) <= set(dir(galvatron_hf)); assert not hasattr(galvatron_hf, 'absent'); "
        "assert all(getattr(galvatron_hf, name).__name__ == name for name in galvatron_hf.__all__)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
