# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Helpers that draw plans and other inputs with Hypothesis, and that check how a bad plan is refused."""

import copy
import itertools
import math

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from galvatron_hf.plan import LayerStrategy, ParallelPlan, Precision, SequenceGroups, Stage, VocabularyStrategy


QUICK = settings(
    max_examples=60, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)

JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


def drawn(strategy: st.SearchStrategy, count: int) -> list:
    """Returns as many examples as asked, always the same ones, so that one world of ranks can run all of them."""
    found = []

    @settings(parent=QUICK, max_examples=count, phases=[Phase.generate])
    @given(strategy)
    def draw(example) -> None:
        found.append(example)

    draw()
    assert len(found) == count
    return found


def refusal(source, make=ParallelPlan.from_json):
    with pytest.raises(ValueError) as caught:
        make(source)
    message = str(caught.value)
    assert "\n" not in message and ": " in message and len(message) < 500, message
    return message


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
    """Returns a plan of one stage on 8 ranks with the given `layers` entries over 12 layers."""
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
