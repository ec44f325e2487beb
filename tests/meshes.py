# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Meshes of a stage for tests of moves between layouts."""

from collections.abc import Iterable, Sequence

from galvatron_hf.parallel.comm.mesh import StageMesh, WorldMesh
from galvatron_hf.plan.resolved import GroupKey, RankGroup


def stage_mesh(ranks: Sequence[int], sizes: Iterable[int], world: WorldMesh | None = None) -> StageMesh:
    """A stage with groups of its aligned blocks of these sizes; collective."""
    world = world or WorldMesh("cpu")
    keys = [GroupKey(stride=1, size=size) for size in sizes]
    world.prepare(RankGroup(ranks=block) for key in keys for block in key.groups(tuple(ranks)))
    return world.stage(tuple(ranks))
