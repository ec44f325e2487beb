# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""How a step is cut into micro-batches and stages, and what its schedule makes of that: what waits, what is kept."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from galvatron_hf.plan import ParallelPlan
from galvatron_hf.plan.pipeline_shape import in_a_round
from galvatron_hf.planner.cost.cost_model import Workload


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """
    How a step is cut before its layers are looked at.

    Interleaved stages go through the rank lists in rounds, all alike: what is one stage in a branch is then one of a
    round, and stands for those of all rounds on its ranks.

    Args:
        pipeline (`int`): Rank lists, p, each of world_size / pipeline consecutive ranks.
        micro_batches (`int`): Of a step, m.
        schedule (`str`): "1f1b", "gpipe" or "interleaved".
        rows (`int`): Of a micro-batch, with those that are added so that every data rank has one.
        rounds (`int`, defaults to 1): Stages on each rank list, v; more than 1 are interleaved, which needs m >= p.
    """

    pipeline: int
    micro_batches: int
    schedule: str
    rows: int
    rounds: int = 1

    @classmethod
    def of(cls, workload: Workload, plan: ParallelPlan) -> StepShape:
        """How the plan cuts a step; there are no more micro-batches than rows, and a row for every data rank."""
        ranks = len(plan.stages[0].ranks)
        count = min(plan.micro_batches, workload.rows)
        data = max(strategy.data_degree(ranks) for strategy in set(plan.layers))
        rows, pipeline = max(-(-workload.rows // count), data), len(plan.rank_groups)
        rounds = len(plan.stages) // pipeline
        schedule = "1f1b" if plan.schedule == "interleaved" and rounds == 1 else plan.schedule
        return cls(pipeline=pipeline, micro_batches=count, schedule=schedule, rows=rows, rounds=rounds)

    @property
    def passes(self) -> int:
        """How often a micro-batch goes through a stage of a rank list in a step."""
        return self.rounds * self.micro_batches

    @property
    def stages_at_work(self) -> int:
        """Stages of a rank list that have had some of their micro-batches back, but not all, at the same time.

        In one round of micro-batches a stage has had all of them back before the one before it has the first.
        """
        return 1 if self._one_round else self.rounds

    @property
    def _one_round(self) -> bool:
        """Whether all micro-batches go through a stage before any goes through the rank list's next one."""
        return in_a_round(self.pipeline, self.micro_batches) == self.micro_batches

    def in_flight(self) -> np.ndarray:
        """(p,) micro-batches whose activations a rank list keeps at most, each counted in every stage that has it."""
        if self.schedule == "gpipe":
            return np.full(self.pipeline, self.micro_batches)
        behind = np.arange(self.pipeline - 1, -1, -1)
        if self.rounds == 1:
            return np.minimum(self.micro_batches, 1 + behind)
        together = in_a_round(self.pipeline, self.micro_batches)
        return np.minimum(self.passes, 1 + 2 * behind + (self.rounds - 1) * together)

    def ends_in_flight(self) -> tuple[int, int]:
        """As `in_flight`, of the first stage of all and of the last."""
        if self.rounds == 1:
            flight = self.in_flight()
            return int(flight[0]), int(flight[-1])
        return min(self.micro_batches, 2 * in_a_round(self.pipeline, self.micro_batches)), 1

    @property
    def late_head(self) -> bool:
        """Whether several micro-batches wait between the head's forward and its backward."""
        return self.pipeline > 1 and self.ends_in_flight()[1] > 1

    def ahead(self) -> np.ndarray:
        """(p,) micro-batches that go forward on a stage of 1F1B before its first one comes back; 0 if not all can.

        Of GPipe, which has the same paths and a longer one (see `waits`), they are those of 1F1B.
        """
        if self.schedule == "interleaved" or self.micro_batches < self.pipeline:
            return np.zeros(self.pipeline, dtype=np.int64)
        return np.arange(self.pipeline - 1, -1, -1)

    def waits(self) -> tuple[int, int, int]:
        """How often what is behind a stage counts on each of its paths, see `branch.py`."""
        return (0 if self.schedule == "1f1b" else 1, 1, 2) if self.ahead().any() else (1, 1, 1)

    def least_step(self) -> float:
        """A step of 1F1B over the time of one micro-batch on all stages, under the best cut there could be.

        With x_i of that time on stage i, m x_i on the whole at least, and S_i behind stage i, the paths of `branch.py`
        say that T = 1 + t needs (m - 1) x_i <= t + S_i, (m - 1 - k_i / 3) x_i <= t and (m - 1 - k_i) x_i <= t - S_i.
        From the last stage on, as much as that allows is best for all before it.
        """
        others, behind = self.micro_batches - 1, 0.0
        if not self.ahead().any():
            return 1 + others / self.pipeline
        for ahead in reversed(self.ahead().tolist()):
            most = min((1 + behind) / others, 1 / (others - ahead / 3))
            behind += most if ahead == others else min(most, (1 - behind) / (others - ahead))
        return 1 + 1 / behind

    def at_once(self) -> np.ndarray:
        """(p,) of how many of its stages a rank list has no gradients before it begins to give activations back.

        Of all if every micro-batch goes forward in all of them first; of all but the last, if in one round of each.
        """
        return np.where(self.in_flight() == self.passes, self.rounds, (self.rounds - 1) * self._one_round)

    def received(self) -> np.ndarray:
        """(p, p) how often each rank list receives hidden states of a micro-batch, or their gradient, from each.

        It does from those beside it in every round, and from the other end of the pipeline between two rounds.
        """
        lists = self.pipeline
        counts = self.rounds * (np.eye(lists, k=1, dtype=np.int64) + np.eye(lists, k=-1, dtype=np.int64))
        if lists > 1:
            counts[0, -1] += self.rounds - 1
            counts[-1, 0] += self.rounds - 1
        return counts

    def later_stages(self) -> np.ndarray:
        """(p,) how many of a rank list's stages are not the first of all."""
        return self.rounds - (np.arange(self.pipeline) == 0)

    def boundary_copies(self) -> np.ndarray:
        """(p,) hidden states of stage boundaries that a rank has: what was sent of each micro-batch in flight, and
        what comes from either side."""
        if self.rounds > 1:
            return self.in_flight() + 2
        places = np.arange(self.pipeline)
        return (places > 0) + (places < self.pipeline - 1) * (1 + self.in_flight())
