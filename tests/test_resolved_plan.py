# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Compiled plans, against cases written by hand and against counts of ranks and tokens one by one."""

import itertools
import math
from collections.abc import Iterator

import numpy as np
import pytest

from galvatron_hf.plan import LayerStrategy, ParallelPlan, VocabularyStrategy
from galvatron_hf.plan.layout import AttentionHeads, Grid, Layout, PackedRow
from galvatron_hf.plan.resolved import GroupKey, MeshShape, RankGroup, ResolvedPlan, ResolvedStage, resolve
from plans import mixed_plans, pipeline_plans, pipeline_plans_on_eight, pipelined, uniform_plans, untied_plans


S, V = LayerStrategy, VocabularyStrategy
PLANS = {
    "one rank": ParallelPlan.uniform(1, 2),
    **{f"{name} on 8": plan for name, plan in uniform_plans(8).items()},
    **mixed_plans(),
    **untied_plans(),
    **{f"pipeline {name}": plan for name, plan in pipeline_plans().items()},
    **{f"pipeline {name} on 8": plan for name, plan in pipeline_plans_on_eight().items()},
}
every_plan = pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)


def resolved(plan: ParallelPlan, tied: bool = False) -> ResolvedPlan:
    return resolve(plan, heads=[(8, 2)] * plan.num_layers, tied=tied)


def test_a_pipeline_of_two_stages_by_hand():
    layers = (S(), S(tensor=2, megatron_sp=True, ulysses=2, recompute="full"), S(tensor=4, sharding="replicate"))
    plan = pipelined([(0, 2, 4, 6), (7, 5, 3, 1)], layers, cuts=[1], ends=(V(tensor=2), V(shard_degree=2)))
    found = resolved(plan, tied=True)
    first, last = found.stages
    assert (first.span, first.ranks, first.pipeline_rank) == (range(0, 1), (0, 2, 4, 6), 0)
    assert (last.span, last.ranks, last.pipeline_rank) == (range(1, 3), (7, 5, 3, 1), 1)
    assert (first.is_first, first.is_last, last.is_first, last.is_last) == (True, False, False, True)
    assert found.stages_of_rank(3) == (last,) and found.is_pipeline and found.stage_size == 4
    data, both, tensor = found.layers
    assert [layer.layout for layer in found.layers] == [Layout(4, 1, 1), Layout(1, 4, 1), Layout(1, 1, 4)]
    # the embedding's layout depends on the rows; a later stage brings what it receives to its first layer's
    assert [layer.source for layer in found.layers] == [None, both.layout, both.layout]
    assert both.attention_layout == Layout(1, 2, 2) and both.pack_layout == tensor.pack_layout == Layout(1, 1, 4)
    assert data.attention_layout == data.pack_layout == Layout(4, 1, 1)
    assert [layer.weights for layer in (data, both, tensor)] == [
        MeshShape(replicate=1, shard=4, tensor=1),
        MeshShape(replicate=1, shard=2, tensor=2),
        MeshShape(replicate=1, shard=1, tensor=4),
    ]
    assert found.embedding.weights == MeshShape(replicate=1, shard=2, tensor=2)
    assert found.head.weights == MeshShape(replicate=2, shard=2, tensor=1)
    assert both.ulysses == GroupKey(stride=2, size=2) and both.head_shards == tensor.head_shards == 4
    # 8 attention heads share 2 key/value heads
    assert data.heads == AttentionHeads(query=8, key_value=2)
    assert both.heads == AttentionHeads(query=4, key_value=1, copies=2)
    assert tensor.heads == AttentionHeads(query=2, key_value=1)
    assert [layer.strategy.recompute for layer in found.layers] == ["none", "full", "none"]
    assert found.neighbours == ((0, 1),)
    pairs = [(0, 7), (2, 5), (4, 3), (6, 1)]
    joined = [group for group in found.groups if group.joins_stages]
    assert joined == [
        *(RankGroup(ranks=pair, joins_stages=True) for pair in pairs),
        *(RankGroup(ranks=pair, copies=2, joins_stages=True) for pair in pairs),
    ]
    assert all(group.joins_stages for group in found.groups[-8:])


def test_stages_that_return_to_a_rank_group_and_tied_weights_by_hand():
    layers = (S(sharding="replicate"),) * 6
    loop = pipelined([(0,), (1,), (2,)] * 2, layers, "interleaved", micro_batches=3)
    found = resolved(loop, tied=True)
    assert [stage.pipeline_rank for stage in found.stages] == [0, 1, 2, 0, 1, 2]
    assert found.neighbours == ((0, 1), (0, 2), (1, 2))
    assert [stage.index for stage in found.stages_of_rank(1)] == [1, 4]
    assert [(group.ranks, group.copies) for group in found.groups if group.joins_stages] == [
        ((0, 1, 2), 1),
        ((0, 1), 2),
        ((0, 2), 2),
        ((1, 2), 2),
        ((0, 2), 1),  # embedding and head
    ]
    there_and_back = pipelined([(0,), (1,), (1,), (0,)], layers[:4], "zero_bubble")
    assert not any(group.ranks == (0, 0) for group in resolved(there_and_back, tied=True).groups)


def test_weights_have_groups_of_their_own_where_activations_use_the_same_ranks():
    def of_weights(**strategy) -> list[tuple[int, ...]]:
        ends = V(tensor=strategy.get("tensor", 1))
        plan = ParallelPlan.uniform(4, 2, embedding=ends, head=ends, **strategy)
        return [group.ranks for group in resolved(plan).groups if group.of_weights]

    assert of_weights(ulysses=4) == [(0, 1, 2, 3)]  # heads and weights are exchanged by the same ranks
    assert of_weights(ulysses=2) == [(0, 1, 2, 3)]  # so are the loss and weights
    assert of_weights(ulysses=2, shard_degree=2)[:2] == [(0, 1), (2, 3)]
    assert of_weights(tensor=4) == []  # each rank has its own piece of each weight
    assert of_weights(tensor=2) == []  # (0, 2) and (1, 3) exchange weights alone


def axis_groups(ranks: tuple[int, ...], shape: tuple[int, ...]) -> set[tuple[int, ...]]:
    """The groups along every axis of a mesh, as an array of ranks has them."""
    mesh = np.array(ranks).reshape(shape)
    lines = [np.moveaxis(mesh, axis, -1).reshape(-1, size) for axis, size in enumerate(shape)]
    return {tuple(line.tolist()) for of_axis in lines for line in of_axis}


@every_plan
def test_every_mesh_has_the_groups_of_its_axes(plan):
    found = resolved(plan)
    made = {group.ranks for group in found.groups}
    for stage in found.stages:
        ranks = len(stage.ranks)
        ends = [found.embedding] * stage.is_first + [found.head] * stage.is_last
        for part in (*stage.layers, *ends):
            sizes, strategy = part.weights.sizes, part.strategy
            assert math.prod(sizes) == ranks and sizes[2] == strategy.tensor
            assert sizes[1] == (
                strategy.shard_degree or (1 if strategy.sharding == "replicate" else ranks // strategy.tensor)
            )
            axes = (*part.weights.data_keys, part.weights.tensor_key)
            keys = {group for key in axes for group in key.groups(stage.ranks)}
            assert keys == axis_groups(stage.ranks, sizes) and keys <= made
        for layer in stage.layers:
            shape = (-1, layer.strategy.ulysses, layer.strategy.tensor)
            lines = np.moveaxis(np.array(stage.ranks).reshape(shape), 1, -1).reshape(-1, layer.strategy.ulysses)
            wanted = {tuple(line.tolist()) for line in lines}
            assert set(layer.ulysses.groups(stage.ranks)) == wanted
            assert layer.strategy.ulysses == 1 or wanted <= made


def micro_batches(found: ResolvedPlan) -> Iterator[tuple[Grid | PackedRow, object]]:
    """Shapes of micro-batches with the layouts of their ends."""
    for rows, length in itertools.product((1, 2, 3, 5, 8), (1, 7, 16)):
        for logits in (False, True):
            shape = found.padded(rows, length, logits=logits)
            yield Grid(*shape), found.end_layouts(shape[0])
    pack = found.pack_multiple
    cuts = [0, *itertools.accumulate(pack * (1 + index % 3) for index in range(found.packs))]
    yield PackedRow(tuple(cuts)), found.pack_end_layouts


def chain(stage: ResolvedStage, ends) -> list[Layout]:
    """The layouts that hidden states pass through in a stage."""
    before = ends.embedding if stage.is_first else ends.boundary
    return [before, *(layer.layout for layer in stage.layers), ends.head if stage.is_last else ends.boundary]


@every_plan
def test_there_are_groups_for_every_change_of_layout_there_and_back(plan):
    """A rank finds each token that it needs in a group that is made, or has it."""
    found = resolved(plan)
    made = {group.ranks for group in found.groups}
    for grid, ends in micro_batches(found):
        for stage in found.stages:
            layouts = chain(stage, ends)
            for src, dst in (*itertools.pairwise(layouts), *itertools.pairwise(layouts[::-1])):
                if src == dst:
                    continue
                held = [tokens(grid, src, index) for index in range(len(stage.ranks))]
                needed = [tokens(grid, dst, index) for index in range(len(stage.ranks))]
                local = all(need <= have for need, have in zip(needed, held, strict=True))
                blocks = [group for group in made if set(group) <= set(stage.ranks) and len(group) > 1]
                for index, rank in enumerate(stage.ranks):
                    groups = [group for group in blocks if rank in group]
                    assert local or any(
                        needed[index] <= set().union(*(held[stage.ranks.index(other)] for other in group))
                        for group in groups
                    )


def tokens(grid: Grid | PackedRow, layout: Layout, index: int) -> set[tuple[int, int]]:
    part = grid.rectangle(layout, index)
    return {
        (row, position)
        for row in range(part.row_start, part.row_stop)
        for position in range(part.position_start, part.position_stop)
    }


@every_plan
def test_padding_gives_every_rank_equally_many_positions_and_is_the_least(plan):
    found = resolved(plan)

    def even(grid, ends) -> bool:
        """Returns whether each rank has a token in each layout and the sequence ranks of a row have equally many."""
        for stage in found.stages:
            inside = [layer.layout for layer in stage.layers]
            for layout in {*inside, *chain(stage, ends)}:
                parts = [grid.rectangle(layout, index).shape for index in range(len(stage.ranks))]
                if min(rows * positions for rows, positions in parts) == 0:
                    return False
                if not grid.packed and len({positions for _, positions in parts}) > 1:
                    return False
        return True

    for rows, length in itertools.product((1, 3, 8), (1, 6, 16)):
        padded = found.padded(rows, length)
        assert even(Grid(*padded), found.end_layouts(padded[0]))
        assert padded[0] >= rows and 0 <= padded[1] - length
        for fewer in range(length, padded[1]):
            assert not even(Grid(padded[0], fewer), found.end_layouts(padded[0]))
        for fewer in range(rows, padded[0]):
            layers = [layer.layout for layer in found.layers]
            assert any(fewer < layout.data for layout in layers)
        assert found.padded(rows, length, logits=True)[0] == max(rows, found.stage_size)
    assert all(even(grid, ends) for grid, ends in micro_batches(found) if grid.packed)
    assert all(found.packs % layer.layout.data == 0 for layer in found.layers)


def test_groups_that_do_not_tile_a_stage_are_refused():
    assert GroupKey(stride=2, size=2).groups((5, 4, 3, 2, 1, 0, 6, 7)) == [(5, 3), (4, 2), (1, 6), (0, 7)]
    with pytest.raises(ValueError, match="a divisor of 4"):
        GroupKey(stride=1, size=3).groups((0, 1, 2, 3))
