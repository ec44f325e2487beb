# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The process groups of a plan: all ranks make all of them, in one order, before anything is cut."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch.distributed as dist

from galvatron_hf.parallel.comm.mesh import WorldMesh
from galvatron_hf.plan import ParallelPlan
from galvatron_hf.plan.layout import Layout, block_sizes, vocabulary_layouts
from galvatron_hf.plan.schedule import PipelineShape


def prepare_groups(world: WorldMesh, plan: ParallelPlan) -> None:
    """Creates every group of the plan, in an order that all ranks share; collective."""
    for stage in plan.stages:
        mesh = world.stage(stage.ranks)
        layouts = [Layout.from_strategy(strategy, mesh.size) for strategy in plan.layers[slice(*stage.layers)]]
        sizes = {*block_sizes(layouts), mesh.size}
        before = 1 if stage is not plan.stages[0] else plan.embedding.tensor
        for start in vocabulary_layouts(before, mesh.size):
            sizes.update(block_sizes([start, layouts[0]]))
        behind = 1 if stage is not plan.stages[-1] else plan.head.tensor
        for stop in vocabulary_layouts(behind, mesh.size):
            sizes.update(block_sizes([layouts[-1], stop]))
        mesh.groups.prepare(sorted(sizes))
        for strategy in plan.layers[slice(*stage.layers)]:
            mesh.prepare(strategy)
    world.stage(plan.stages[0].ranks).prepare(plan.embedding)
    world.stage(plan.stages[-1].ranks).prepare(plan.head)
    if len(plan.stages) > 1:
        world.join(plan.rank_groups)
        neighbour_pairs(world, PipelineShape.from_plan(plan), plan.rank_groups)


def neighbour_pairs(
    world: WorldMesh, shape: PipelineShape, lists: list[tuple[int, ...]]
) -> dict[int, Sequence[dist.ProcessGroup]]:
    """For each rank list that this rank's exchanges hidden states with, the groups for it; collective."""
    own = next(place for place, ranks in enumerate(lists) if dist.get_rank() in ranks)
    neighbours = {tuple(sorted(pair)) for pair in itertools.pairwise(shape.rank_group_of_stage) if pair[0] != pair[1]}
    found = {}
    for first, second in sorted(neighbours):
        groups = world.join([lists[first], lists[second]], copies=2)
        if groups:
            found[second if own == first else first] = groups
    return found
