# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Shows a parallel plan as a table."""

import io
from typing import TYPE_CHECKING

from galvatron_hf.plan.serialization import fold
from galvatron_hf.plan.strategies import LayerStrategy, VocabularyStrategy


if TYPE_CHECKING:
    from rich.table import Table

    from galvatron_hf.plan import ParallelPlan

COLUMNS = ("part", "ranks", "tensor", "sequence", "data", "sharding", "expert", "recompute")
NOTHING = {"tensor": ("1",), "expert": ("1",), "recompute": ("none",)}  # what plans without the feature have


def plan_table(plan: "ParallelPlan") -> "Table":
    """Returns a table with one row for the embedding, each span of equal neighbouring layers, and the head."""
    from rich.table import Table

    table = Table(title=plan_title(plan), title_justify="left")
    rows = plan_rows(plan)
    shown = [index for index, name in enumerate(COLUMNS) if _says_something(name, [row[index] for row in rows])]
    for name in (COLUMNS[index] for index in shown):
        # Long lists of ranks and combined degrees wrap; names and counts are never cut.
        wraps = name in ("ranks", "sequence")
        table.add_column(name, justify="right" if name in ("tensor", "data", "expert") else "left", no_wrap=not wraps)
    for row in rows:
        table.add_row(*(row[index] for index in shown))
    return table


def _says_something(name: str, cells: list[str]) -> bool:
    """Returns whether a column has anything but what a plan without the feature has."""
    return not set(cells) <= {"-", *NOTHING.get(name, ())}


def plan_text(plan: "ParallelPlan", width: int = 119) -> str:
    """Returns the table as plain text of at most `width` columns."""
    from rich.console import Console

    console = Console(file=io.StringIO(), width=width, color_system=None, force_terminal=False, force_jupyter=False)
    console.print(plan_table(plan))
    return console.file.getvalue().rstrip("\n")


def plan_rows(plan: "ParallelPlan") -> list[tuple[str, ...]]:
    """Returns the cells of the table. A row of layers never crosses a stage or a stack."""
    rows = [_vocabulary_row("embedding", plan.embedding, plan.stages[0].ranks)]
    for stage in plan.stages:
        first = 0
        for name, count in plan.stacks.items():
            start, end = max(first, stage.layers[0]), min(first + count, stage.layers[1])
            for span, strategy in fold(plan.layers[start:end]):
                last = start + span[1] - 1
                layers = f"{start + span[0]}" if span[1] - span[0] == 1 else f"{start + span[0]}-{last}"
                rows.append(_layer_row(f"{name} {layers}", strategy, stage.ranks))
            first += count
    rows.append(_vocabulary_row("head", plan.head, plan.stages[-1].ranks))
    return rows


def plan_title(plan: "ParallelPlan") -> str:
    """Returns the sizes of a plan in one line."""
    title = f"{plan.world_size} ranks, {plan.num_layers} layers, {plan.micro_batch_count} micro-batch"
    title += "es" if plan.micro_batch_count > 1 else ""
    if len(plan.stages) > 1:
        title += f", {len(plan.stages)} stages ({plan.schedule})"
    if plan.precision is not None:
        formats = plan.precision
        title += f", compute {formats.compute}, weights {formats.master}, gradient sums {formats.reduce}"
    if plan.sequence_groups is not None:
        groups = plan.sequence_groups
        title += f", sequence groups of up to {groups.max_degree} ranks ({', '.join(groups.kinds)})"
    return title


def _layer_row(part: str, strategy: LayerStrategy, ranks: tuple[int, ...]) -> tuple[str, ...]:
    sequence = [f"ulysses {strategy.ulysses}"] if strategy.ulysses > 1 else []
    sequence += [f"context {strategy.context}"] if strategy.context > 1 else []
    sequence += [f"megatron {strategy.tensor}"] if strategy.megatron_sp else []
    return (
        part,
        ranks_text(ranks),
        str(strategy.tensor),
        ", ".join(sequence) or "-",
        str(strategy.data_degree(len(ranks))),
        _sharding(strategy, len(ranks)),
        str(strategy.expert),
        strategy.recompute,
    )


def _vocabulary_row(part: str, strategy: VocabularyStrategy, ranks: tuple[int, ...]) -> tuple[str, ...]:
    data = str(strategy.data_degree(len(ranks)))
    return (part, ranks_text(ranks), str(strategy.tensor), "-", data, _sharding(strategy, len(ranks)), "-", "-")


def _sharding(strategy: LayerStrategy | VocabularyStrategy, ranks: int) -> str:
    pieces = strategy.resolved_shard_degree(ranks)
    copies = ranks // strategy.tensor // pieces
    if strategy.sharding == "replicate":
        return f"replicate x {copies}"
    return f"{strategy.sharding} over {pieces}" + (f" x {copies}" if copies > 1 else "")


def ranks_text(ranks: tuple[int, ...]) -> str:
    """Returns ranks in a few characters, such as `0-3` or `0-6 by 2`."""
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    if len(ranks) < 3 or any(b - a != step for a, b in zip(ranks, ranks[1:])):
        return ",".join(map(str, ranks)) if len(ranks) <= 8 else f"{ranks[0]},{ranks[1]}...{ranks[-1]} ({len(ranks)})"
    return f"{ranks[0]}-{ranks[-1]}" + (f" by {step}" if step != 1 else "")
