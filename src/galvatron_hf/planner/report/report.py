# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""What people are shown of a plan: its layers, where its time and memory go, and what well-known plans would take."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from galvatron_hf.plan.table import plan_table
from galvatron_hf.planner.report.alternatives import Alternative
from galvatron_hf.planner.report.explain import Explanation
from galvatron_hf.planner.search import GIB


if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True, kw_only=True)
class Report:
    """Prints as text, and through `rich` as tables.

    Attributes:
        explanation ([`Explanation`]): of the plan.
        others (`list[Alternative]`): to hold it against.
        budget (`int`): bytes of a rank.
    """

    explanation: Explanation
    others: list[Alternative]
    budget: int

    def __rich_console__(self, *unused: Any) -> Iterator[Table | str]:
        estimate = self.explanation.estimate
        yield plan_table(estimate.plan)
        yield self.explanation.stage_table(self.budget)
        yield self.explanation.time_table()
        yield f"{estimate.step_ms:.1f} ms a step, {estimate.samples_per_second:.2f} samples/s (predicted)"
        missing = (max(estimate.memory_bytes) - self.budget) / GIB
        if missing > 0:
            yield f"It does not fit: {missing:.2f} GiB a device are missing."
        if self.others:
            yield self.comparison()

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(width=120, color_system=None)
        with console.capture() as captured:
            console.print(self)
        return captured.get()

    def comparison(self) -> Table:
        """The other plans: how much longer they take, or how much memory they miss."""
        from rich.table import Table

        table = Table(title="Instead (predicted)", title_justify="left")
        table.add_column("plan")
        table.add_column("ms a step", justify="right")
        table.add_column("beside the plan above")
        for other in self.others:
            if other.best is None:
                missing = (other.least_memory_bytes - self.budget) / GIB
                table.add_row(other.name, "-", f"does not fit: {missing:.2f} GiB a device are missing")
            else:
                ratio = other.best.step_ms / self.explanation.estimate.step_ms
                table.add_row(other.name, f"{other.best.step_ms:.1f}", f"{ratio:.2f}x as long")
        return table
