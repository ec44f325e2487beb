# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Counters of packing between two logs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from galvatron_hf.trainer.data.step_prefetch import StepPlacement


@dataclass(kw_only=True)
class PackingRecord:
    """Sums steps, tokens, positions and the planner's time since `began`. `hidden` counts placements made ahead;
    `shared_tokens` and `groups` are the tokens of documents that ranks share, and the numbers of these ranks.
    """

    began: float
    steps: int = 0
    tokens: int = 0
    positions: int = 0
    imbalance: float = 0.0
    planner_seconds: float = 0.0
    hidden: int = 0
    shared_tokens: int = 0
    groups: list[int] = field(default_factory=list)
    measured_imbalance: float = 0.0
    measured_steps: int = 0
    recomputes: list[str] = field(default_factory=list)
    plans: list[int] = field(default_factory=list)

    def add(self, step: StepPlacement) -> None:
        """Counts a step; its tokens are counted when they are packed."""
        self.steps += 1
        self.planner_seconds += step.seconds
        self.hidden += step.hidden
        self.imbalance += step.imbalance
        self.shared_tokens += step.shared_tokens
        self.groups += step.groups
        if step.placement.recompute is not None:
            self.recomputes.append(step.placement.recompute)
        if step.placement.plan:
            self.plans.append(step.placement.plan)

    def add_seconds(self, seconds: Sequence[float]) -> None:
        """Counts the CPU seconds that each rank computed in a step."""
        self.measured_steps += 1
        self.measured_imbalance += max(seconds) / (sum(seconds) / len(seconds))

    def logs(self, now: float) -> dict[str, float]:
        """Returns the values to log; `predicted_imbalance` is predicted by the cost model, the others are measured."""
        found = {
            "useful_tokens_per_second": round(self.tokens / max(now - self.began, 1e-9), 1),
            "padding_percent": round(100 * (1 - self.tokens / max(self.positions, 1)), 2),
            "predicted_imbalance": round(self.imbalance / self.steps, 4),
            "planner_ms": round(1e3 * self.planner_seconds / self.steps, 2),
            "planner_hidden": round(self.hidden / self.steps, 2),
        }
        if self.measured_steps:
            found["measured_imbalance"] = round(self.measured_imbalance / self.measured_steps, 4)
        for kind in sorted(set(self.recomputes)):
            found[f"steps_with_recompute_{kind}"] = round(self.recomputes.count(kind) / self.steps, 2)
        for number in sorted(set(self.plans)):
            found[f"steps_under_plan_{number}"] = round(self.plans.count(number) / self.steps, 2)
        if self.groups:
            found["shared_tokens_percent"] = round(100 * self.shared_tokens / max(self.tokens, 1), 2)
            found["mean_group_ranks"] = round(sum(self.groups) / len(self.groups), 2)
            found["largest_group_ranks"] = max(self.groups)
        return found
