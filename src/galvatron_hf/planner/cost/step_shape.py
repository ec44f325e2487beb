# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Describes the cut of a step into micro-batches and stages, and the waits and the memory of its schedule."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from galvatron_hf.plan import ParallelPlan
from galvatron_hf.plan.pipeline_shape import in_a_round
from galvatron_hf.planner.cost.workload import Workload
from galvatron_hf.profiler.profiles.model import ModelProfile


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """Describes how a step is cut, whatever the strategies of its layers.
    All virtual stages of a pipeline rank are equal. The search problem therefore has one stage per pipeline rank,
    which stands for all its virtual stages. Each of the `pipeline` = p pipeline ranks has world_size / p consecutive
    ranks and `virtual_stages` = v stages; v > 1 is interleaved and needs `micro_batches` = m >= p. The schedule is
    "1f1b", "gpipe" or "interleaved". `rows` are those of a micro-batch, padded so that every data rank has one.
    `context` ranks share each row.
    """

    pipeline: int
    micro_batches: int
    schedule: str
    rows: int
    virtual_stages: int = 1
    context: int = 1

    @classmethod
    def from_plan(cls, plan: ParallelPlan, workload: Workload, model: ModelProfile) -> StepShape:
        """Reads the shape of a plan. No step has more micro-batches than rows; every data rank gets a row, of the ends
        too if they need whole rows.
        """
        ranks = len(plan.stages[0].ranks)
        count = min(plan.micro_batch_count, workload.rows)
        data = ranks if model.whole_rows else max(strategy.data_degree(ranks) for strategy in set(plan.layers))
        rows, pipeline = max(-(-workload.rows // count), data), len(plan.rank_groups)
        virtual = len(plan.stages) // pipeline
        schedule = "1f1b" if plan.schedule == "interleaved" and virtual == 1 else plan.schedule
        return cls(
            pipeline=pipeline,
            micro_batches=count,
            schedule=schedule,
            rows=rows,
            virtual_stages=virtual,
            context=plan.layers[0].context,
        )

    def counts_choices(self, model: ModelProfile) -> bool:
        """Returns whether a step begins with a forward for the counts of routers alone: their loss needs the choices
        of all micro-batches before the first backward.
        """
        return model.router_loss and self.micro_batches > 1 and self.schedule != "gpipe"

    @property
    def passes(self) -> int:
        """Returns v m, how often a pipeline rank runs a micro-batch through a stage in a step."""
        return self.virtual_stages * self.micro_batches

    @property
    def active_stages(self) -> int:
        """Returns the maximum number of a rank's stages that are between their first and their last backward. If all
        micro-batches go through a stage together, its backwards end before the rank's previous stage begins any.
        """
        return 1 if self._one_round else self.virtual_stages

    @property
    def _one_round(self) -> bool:
        """Returns whether all micro-batches go through a stage before any goes through the rank's next one."""
        return in_a_round(self.pipeline, self.micro_batches) == self.micro_batches

    def in_flight(self) -> np.ndarray:
        """Returns (p,) the maximum number of micro-batches whose activations a rank keeps, summed over its stages."""
        if self.schedule == "gpipe":
            return np.full(self.pipeline, self.micro_batches)
        later = np.arange(self.pipeline - 1, -1, -1)
        if self.virtual_stages == 1:
            return np.minimum(self.micro_batches, 1 + later)
        together = in_a_round(self.pipeline, self.micro_batches)
        return np.minimum(self.passes, 1 + 2 * later + (self.virtual_stages - 1) * together)

    def ends_in_flight(self) -> tuple[int, int]:
        """Returns the maximum numbers of micro-batches in flight in the model's first and last stage."""
        if self.virtual_stages == 1:
            flight = self.in_flight()
            return int(flight[0]), int(flight[-1])
        return min(self.micro_batches, 2 * in_a_round(self.pipeline, self.micro_batches)), 1

    @property
    def recompute_logits_in_backward(self) -> bool:
        """Returns whether several micro-batches wait between the head's forward and its backward."""
        return self.pipeline > 1 and self.ends_in_flight()[1] > 1

    def warmup(self) -> np.ndarray:
        """Returns (p,) k_i, the warm-up micro-batches of 1F1B; 0 for interleaved schedules or if m < p. GPipe uses
        those of 1F1B, because its cost is the maximum of both (see `later_stage_weights`).
        """
        if self.schedule == "interleaved" or self.micro_batches < self.pipeline:
            return np.zeros(self.pipeline, dtype=np.int64)
        return np.arange(self.pipeline - 1, -1, -1)

    def later_stage_weights(self) -> tuple[int, int, int]:
        """Returns the factors of L_i in the three paths of `solver/problem.py`."""
        return (0 if self.schedule == "1f1b" else 1, 1, 2) if self.warmup().any() else (1, 1, 1)

    def least_step(self) -> float:
        """Returns a lower bound of a 1F1B step, in units of the time of one micro-batch on all stages.
        Stage i has a share x_i of that time, and the later stages S_i. All other micro-batches take at least
        (m - 1) x_i. With a step of 1 + t, the paths of `solver/problem.py` require
            (m - 1) x_i <= t + S_i,   (m - 1 - k_i / 3) x_i <= t,   (m - 1 - k_i) x_i <= t - S_i.
        The largest x_i that these allow, from the last stage to the first, give the best possible cut.
        """
        others, later = self.micro_batches - 1, 0.0
        if not self.warmup().any():
            return 1 + others / self.pipeline
        for warmup in reversed(self.warmup().tolist()):
            most = min((1 + later) / others, 1 / (others - warmup / 3))
            later += most if warmup == others else min(most, (1 - later) / (others - warmup))
        return 1 + 1 / later

    def least_ms(self, layers_ms: Sequence[float], embedding_ms: float, head_ms: float) -> float:
        """Returns a lower bound of a step, of which a micro-batch takes so long in each layer and in the ends."""
        stages, count, least = self.pipeline, self.micro_batches, min(layers_ms)
        layers, ends = sum(layers_ms), embedding_ms + head_ms
        if self.warmup().any():
            # The mean of a stage's paths without and with all of its warm-up, in `solver/problem.py`.
            others = count - 1 - (stages - 1) / 2
            fullest = least_fullest(len(layers_ms), stages, least, embedding_ms, head_ms)
            whole = layers + ends
            return max(max(self.least_step(), count / stages) * whole, whole + others * fullest)
        of_stages = layers / self.virtual_stages
        passes, others = self.passes - 1, count - 1
        fullest = least_fullest(
            len(layers_ms) // self.virtual_stages, stages, passes * least, others * embedding_ms, others * head_ms
        )
        return of_stages + ends + max((passes * of_stages + others * ends) / stages, fullest)

    def reuse_count(self) -> np.ndarray:
        """Returns (p,) on how many of a rank's stages gradients reuse the memory that activations free. These are the
        stages without gradients when the rank's first activations are freed: all stages if every forward comes before
        the first backward, all but one if all micro-batches go through a stage together.
        """
        count = (self.virtual_stages - 1) * self._one_round
        return np.where(self.in_flight() == self.passes, self.virtual_stages, count)

    def receives(self) -> np.ndarray:
        """Returns (p, p) how often a rank receives a micro-batch's hidden states, or their gradient, from another
        rank. Neighbours send in every virtual stage; the two ends of the pipeline send between two virtual stages.
        """
        ranks = self.pipeline
        counts = self.virtual_stages * (np.eye(ranks, k=1, dtype=np.int64) + np.eye(ranks, k=-1, dtype=np.int64))
        if ranks > 1:
            counts[0, -1] += self.virtual_stages - 1
            counts[-1, 0] += self.virtual_stages - 1
        return counts

    def stages_after_first(self) -> np.ndarray:
        """Returns (p,) how many of a rank's stages are not the model's first stage."""
        return self.virtual_stages - (np.arange(self.pipeline) == 0)

    def boundary_copies(self) -> np.ndarray:
        """Returns (p,) the hidden states of stage boundaries that a rank holds: one sent for each micro-batch in
        flight, and one received from each side.
        """
        if self.virtual_stages > 1:
            return self.in_flight() + 2
        ranks = np.arange(self.pipeline)
        return (ranks > 0) + (ranks < self.pipeline - 1) * (1 + self.in_flight())


def least_fullest(layers: int, stages: int, layer_ms: float, embedding_ms: float, head_ms: float) -> float:
    """Returns a lower bound of the longest stage's time, whatever the cut: layers are whole, and the ends of the model
    are in the first and in the last stage.
    """
    mean = (layers * layer_ms + embedding_ms + head_ms) / stages
    if stages == 1 or layer_ms <= 0:
        return mean

    def fits(longest: float) -> bool:
        counts = [math.floor((longest - end) / layer_ms + 1e-9) for end in (embedding_ms, head_ms, 0.0)]
        return min(counts) >= 0 and counts[0] + counts[1] + (stages - 2) * counts[2] >= layers

    # The longest stage has a whole number of layers, and an end or none.
    fewest = [(end, max(0, math.ceil((mean - end) / layer_ms - 1e-9))) for end in (0.0, embedding_ms, head_ms)]
    tried = sorted(end + (count + more) * layer_ms for end, count in fewest for more in range(3))
    return next((longest for longest in tried if fits(longest)), mean)
