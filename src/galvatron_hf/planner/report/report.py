# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Prints tables of a plan: its layers, where its time and memory go, and the time of other plans."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from galvatron_hf.plan.table import plan_table
from galvatron_hf.planner.report.alternatives import Alternative, alternatives
from galvatron_hf.planner.report.explain import KINDS, Explanation, explain_plan
from galvatron_hf.planner.search import SearchResult
from galvatron_hf.utils.units import GIB


if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True, kw_only=True)
class Report:
    """Prints an explanation and other plans as text, or as tables of `rich`; `budget` is in bytes of a rank, and
    `pace` are lines that say how fast the plan is. The table of the plan is left out unless `shows_plan`.
    """

    explanation: Explanation
    others: list[Alternative]
    budget: int
    pace: tuple[str, ...] = ()
    shows_plan: bool = True

    def __rich_console__(self, *unused: Any) -> Iterator[Table | str]:
        estimate = self.explanation.estimate
        if self.shows_plan:
            yield plan_table(estimate.plan)
        yield self._stage_table()
        yield self._time_table()
        hidden, waited = self.explanation.hidden_ms, self.explanation.step_ms()["communication"]
        yield f"Of communication {waited:.1f} ms are waited for, and {hidden:.1f} ms hidden by computing (predicted)."
        yield f"{estimate.step_ms:.1f} ms a step, {estimate.samples_per_second:.2f} samples/s (predicted)"
        yield from self.pace
        missing = (max(estimate.memory_bytes) - self.budget) / GIB
        if missing > 0:
            yield f"The plan does not fit: it needs {missing:.2f} GiB more on a device."
        if self.others:
            yield self._comparison()

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(width=120, color_system=None, force_jupyter=False)
        with console.capture() as captured:
            console.print(self)
        return captured.get()

    def _time_table(self) -> Table:
        parts = self.explanation.step_ms()
        total = sum(parts.values())
        table = _table("Milliseconds of a step (predicted)", numbers=(*parts, "all"))
        table.add_row(*(f"{ms:.1f} ({100 * ms / total:.0f}%)" for ms in parts.values()), f"{total:.1f}")
        return table

    def _stage_table(self) -> Table:
        columns = ("computing", "comm.", "layout", "states", "activations", "working", "all GiB", "of budget")
        table = _table("Stages: ms of a micro-batch, GiB of a rank (predicted)", "layers", columns)
        for stage in self.explanation.stages:
            *states, activations, working = (stage.bytes_by_kind[kind] for kind in KINDS)
            sizes = (sum(states), activations, working)
            table.add_row(
                ", ".join(f"{first}-{last - 1}" for first, last in stage.layers),
                *(f"{ms:.1f}" for ms in (stage.computing_ms, stage.communication_ms, stage.layout_ms)),
                *(f"{size / GIB:.2f}" for size in (*sizes, stage.memory_bytes)),
                f"{100 * stage.memory_bytes / self.budget:.0f}%",
            )
        return table

    def _comparison(self) -> Table:
        table = _table("Other plans (predicted)", "plan", ("ms a step",))
        table.add_column("compared with the plan above")
        for other in self.others:
            if other.best is None and other.least_memory_bytes is None:
                table.add_row(other.name, "-", "none was found in time")
            elif other.best is None:
                missing = (other.least_memory_bytes - self.budget) / GIB
                table.add_row(other.name, "-", f"does not fit: needs {missing:.2f} GiB more on a device")
            else:
                ratio = other.best.step_ms / self.explanation.estimate.step_ms
                table.add_row(other.name, f"{other.best.step_ms:.1f}", f"{ratio:.2f}x as long")
        return table


def explain(
    result: SearchResult,
    *,
    compare: bool = True,
    progress: bool = False,
    stop: Callable[[], bool] | None = None,
    interrupted: Callable[[], bool] = lambda: False,
) -> Report:
    """Reports where the time and the memory of the best plan of a search go.
    If `compare`, it also searches the best DDP, ZeRO-3, Megatron and Ulysses plans, which takes about as long as the
    search; `stop` ends these, as in [`search_plan`], and `interrupted` leaves out those that are not found yet. Raises
    `ValueError` if no plan fits, with the smallest budget with which one does.
    """
    if result.best is None:
        raise ValueError(result.no_plan_message)
    case, budget = (result.hardware, result.model, result.workload), result.memory_bytes
    options = dict(virtual_stages=result.limits.virtual_stages, progress=progress, stop=stop, costs=result.costs)
    others = alternatives(*case, memory_bytes=budget, interrupted=interrupted, **options) if compare else []
    return Report(explanation=explain_plan(*case, result.best.plan), others=others, budget=budget)


def _table(title: str, text: str | None = None, numbers: tuple[str, ...] = ()) -> Table:
    """Returns an empty table with a column of text, if named, and columns of numbers. In a narrow terminal words and
    numbers go on in the next line and are not cut.
    """
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    if text is not None:
        table.add_column(text, overflow="fold")
    for name in numbers:
        table.add_column(name, justify="right", overflow="fold")
    return table
