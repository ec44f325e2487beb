# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Plans that cannot be, and hostile input: each is refused in one line that says how to mend it."""

import dataclasses
import itertools
import json
import math
import os
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from galvatron_hf.plan import LayerStrategy, ParallelPlan, Stage, VocabularyStrategy
from galvatron_hf.plan.supported import unsupported
from plan_inputs import EXAMPLE, JSON_VALUES, QUICK, changed, one_stage, plans, refusal


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
        (changed(precision={"compute": "fp4"}), "compute is 'fp4'"),
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
                [{"span": [0, 12], "context": 2}],
                sequence_groups={"max_tokens_per_rank": 1024, "max_degree": 2},
            ),
            "use context=1",
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
        with pytest.raises(ValueError, match="list the 2 different groups of ranks in one order"):
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
