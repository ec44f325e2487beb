# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Counters of packing between two logs."""

from __future__ import annotations

from dataclasses import dataclass

from galvatron_hf.trainer.data.step_prefetch import StepPlacement


@dataclass(kw_only=True)
class PackingRecord:
    """Sums steps, tokens, positions and the planner's time since `began`. `hidden` counts placements made ahead."""

    began: float
    steps: int = 0
    tokens: int = 0
    positions: int = 0
    imbalance: float = 0.0
    planner_seconds: float = 0.0
    hidden: int = 0

    def add(self, step: StepPlacement) -> None:
        """Counts a step; its tokens are counted when they are packed."""
        self.steps += 1
        self.planner_seconds += step.seconds
        self.hidden += step.hidden
        self.imbalance += step.imbalance

    def logs(self, now: float) -> dict[str, float]:
        """Returns the values to log; the imbalance is predicted by the cost model, the others are measured."""
        return {
            "useful_tokens_per_second": round(self.tokens / max(now - self.began, 1e-9), 1),
            "padding_percent": round(100 * (1 - self.tokens / max(self.positions, 1)), 2),
            "predicted_imbalance": round(self.imbalance / self.steps, 4),
            "planner_ms": round(1e3 * self.planner_seconds / self.steps, 2),
            "planner_hidden": round(self.hidden / self.steps, 2),
        }
