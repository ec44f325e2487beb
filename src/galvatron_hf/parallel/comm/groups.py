# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Process groups: each is made once, by all ranks of the world in one order."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from galvatron_hf.plan.resolved import RankGroup


OF_ACTIVATIONS, OF_WEIGHTS, JOINING_STAGES = "ranks", "weights of ranks", "stages' ranks"
OF_TOKENS = "documents of ranks"


def _kind(group: RankGroup) -> str:
    marks = {JOINING_STAGES: group.joins_stages, OF_WEIGHTS: group.of_weights, OF_TOKENS: group.of_tokens}
    return next((kind for kind, marked in marks.items() if marked), OF_ACTIVATIONS)


class ProcessGroups:
    """Makes process groups and keeps them, so that plans on the same ranks share them: a group costs memory and time.
    Groups do not take over the default group's timeout: `timeout` None is the backend's default.
    """

    def __init__(self, device_type: str, timeout: timedelta | None = None):
        self.device_type, self.timeout = device_type, timeout
        self._groups: dict[tuple[tuple[int, ...], str], list[ProcessGroup]] = {}

    def prepare(self, groups: Iterable[RankGroup]) -> None:
        """Makes and connects the groups that do not exist yet; collective: all ranks give the same list."""
        new = []
        for group in groups:
            made = self._groups.setdefault((group.ranks, _kind(group)), [])
            while len(made) < group.copies:
                made.append(self._make(group))
                new.append((group, made[-1]))
        for group, process_group in new:
            if len(group.ranks) > 1 and dist.get_rank() in group.ranks:
                self._connect(group, process_group)

    def get(self, ranks: tuple[int, ...], kind: str = OF_ACTIVATIONS) -> list[ProcessGroup]:
        """Returns the groups of these ranks, one for each copy; refuses ranks for which none was prepared. `kind` is
        "ranks", "weights of ranks" (by default the same groups), "stages' ranks" or "documents of ranks".
        """
        if (ranks, kind) not in self._groups:
            if kind == OF_WEIGHTS:
                return self.get(ranks)
            raise ValueError(
                f"The ranks {list(ranks)} have no process group, because it was not prepared; give it to "
                "WorldMesh.prepare on every rank first."
            )
        return self._groups[ranks, kind]

    def own(self) -> dict[str, ProcessGroup]:
        """Returns the groups of several ranks that this rank is in, by their ranks."""
        found = {}
        for (ranks, kind), made in self._groups.items():
            if len(ranks) > 1 and dist.get_rank() in ranks:
                copies = [f" ({index + 1} of {len(made)})" if len(made) > 1 else "" for index in range(len(made))]
                found |= {f"{kind} {list(ranks)}{copy}": one for copy, one in zip(copies, made, strict=True)}
        return found

    def free(self) -> None:
        """Destroys all groups but the world's; collective, when nothing communicates any more."""
        for made in self._groups.values():
            for group in made:
                if group not in (dist.group.WORLD, dist.GroupMember.NON_GROUP_MEMBER):
                    dist.destroy_process_group(group)
        self._groups.clear()

    def _connect(self, group: RankGroup, process_group: ProcessGroup) -> None:
        """Has the ranks of a group connect now, all groups in one order. NCCL connects at the first collective, and at
        the first message of two ranks, and the host waits: within a step, ranks may wait for each other in a circle.
        """
        tensors = [torch.zeros(1, device=self.device_type) for _ in range(3)]
        dist.all_reduce(tensors[0], group=process_group)
        if group.of_tokens:  # messages between any two of them
            pieces = torch.zeros(len(group.ranks), device=self.device_type)
            dist.all_to_all_single(torch.empty_like(pieces), pieces, group=process_group)
        if group.joins_stages and len(group.ranks) == 2:
            peer = 1 - dist.get_group_rank(process_group, dist.get_rank())
            messages = [
                dist.P2POp(dist.isend, tensors[1], group=process_group, group_peer=peer),
                dist.P2POp(dist.irecv, tensors[2], group=process_group, group_peer=peer),
            ]
            for work in dist.batch_isend_irecv(messages):
                work.wait()

    def _make(self, group: RankGroup) -> ProcessGroup:
        ranks = list(group.ranks)
        # Neither transfers between stages nor weights wait for a collective of the whole world.
        if len(ranks) > 1 and ranks == list(range(dist.get_world_size())) and _kind(group) == OF_ACTIVATIONS:
            return dist.group.WORLD
        # PyTorch would number ranks by global rank: pieces would arrive in another order than the plan's.
        return dist.new_group(ranks, timeout=self.timeout, sort_ranks=ranks == sorted(ranks))
