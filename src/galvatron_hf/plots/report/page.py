# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Makes the page of a training run: its plan, what was predicted and what was measured, its losses and its data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from galvatron_hf.plan.plan_words import words_of
from galvatron_hf.plan.table import COLUMNS, plan_rows, plan_title, ranks_text
from galvatron_hf.planner.report.explain import KINDS
from galvatron_hf.planner.report.run_files import WARM_UP, is_number
from galvatron_hf.plots.deal import deal_figure, run_deal
from galvatron_hf.plots.memory import memory_figure
from galvatron_hf.plots.plan_diagram import plan_figure
from galvatron_hf.plots.report.html import (
    MEASURED,
    PREDICTED,
    fact,
    facts,
    listed,
    number,
    page,
    paragraph,
    picture,
    section,
    table,
)
from galvatron_hf.plots.report.run import RunReport
from galvatron_hf.plots.run_charts import series, series_figure, step_times_figure
from galvatron_hf.plots.spans import predicted_timeline
from galvatron_hf.plots.timeline import timeline_figure


_WIDTH = 4.7  # inches of a picture: letters of 9 points are large enough on a phone
_MIB = 1 << 20
# Keys of the log that are numbers of the data, with their names and whether they were measured.
_DATA = {
    "useful_tokens_per_second": ("useful tokens/s", True),
    "padding_percent": ("padding, %", True),
    "predicted_imbalance": ("slowest rank / mean", False),
    "measured_imbalance": ("slowest rank / mean", True),
    "planner_ms": ("time of a placement, ms", True),
    "planner_hidden": ("placements ready in time, share", True),
    "shared_tokens_percent": ("tokens that ranks share, %", True),
    "mean_group_ranks": ("ranks that share, mean", True),
    "largest_group_ranks": ("ranks that share, most", True),
    "cut_sequences": ("documents cut so far", True),
}
_TIMES = ("train_runtime", "train_samples_per_second", "train_steps_per_second", "train_loss", "total_flos")


def report_page(report: RunReport) -> str:
    """Returns the page of a run as one HTML document, which loads nothing from anywhere."""
    return page(
        f"Training run {report.folder}",
        f"<h1>Training run <code>{escape(report.folder)}</code></h1>",
        paragraph(
            'Numbers marked <span class="predicted">predicted</span> were computed by the search for the plan, before '
            'training. Numbers marked <span class="measured">measured</span> are those of this run.'
        ),
        _summary(report),
        _plan(report),
        _step_time(report),
        _memory(report),
        _losses(report),
        _data(report),
        section("Not known", listed(report.missing)) if report.missing else "",
        section(
            "Sources",
            paragraph("This page was made from these files of the run:"),
            listed(report.sources),
            _profile_texts(report),
        ),
    )


def report_values(report: RunReport) -> dict[str, Any]:
    """Returns what the page shows, as JSON values."""
    explanation = report.explanation
    return {
        "folder": report.folder,
        "plan": words_of(report.plan),
        "global_step": None if report.run is None else report.run.global_step,
        "predicted_step_ms": report.predicted_ms,
        "predicted_memory_bytes": list(report.predicted_bytes),
        "outcome": dict(report.outcome) or None,
        "step_ms": list(report.run.step_ms) if report.run else [],
        "predicted_bubble_percent": report.predicted_bubble_percent,
        "bubble_percent": report.bubble_percent,
        "predicted_step_ms_by_kind": None if explanation is None else explanation.step_ms(),
        "predicted_bytes_by_kind": []
        if explanation is None
        else [dict(stage.bytes_by_kind) for stage in explanation.stages],
        "memory_budget_bytes": None if report.profiles is None else report.profiles.memory_bytes,
        "deal": None if report.run is None else report.run.deal,
        "timeline": None if report.timeline is None else report.timeline.values(),
        "log_history": [dict(log) for log in report.logs],
        "sources": list(report.sources),
        "missing": list(report.missing),
    }


def _summary(report: RunReport) -> str:
    outcome, entries = report.outcome, []
    entries.append(fact("plan", escape(words_of(report.plan))))
    entries.append(fact("ranks", number(report.plan.world_size)))
    if report.run is not None:
        entries.append(fact("steps", number(report.run.global_step)))
        if report.run.model:
            entries.append(fact("model", escape(report.run.model)))
    losses = [log["loss"] for log in report.logs if is_number(log.get("loss"))]
    if losses:
        entries.append(fact("last logged loss", number(losses[-1]), MEASURED))
    if report.predicted_ms is not None:
        entries.append(fact("step", f"{number(report.predicted_ms)} ms", PREDICTED))
    measured = outcome.get("measured_ms")
    if measured is not None:
        entries.append(fact("step, median", f"{number(measured)} ms", MEASURED))
    if report.predicted_bytes:
        entries.append(fact("peak memory of a rank", _mib(max(report.predicted_bytes)), PREDICTED))
    peaks = [peak for peak in outcome.get("measured_bytes", ()) if peak is not None]
    if peaks:
        entries.append(fact("peak memory of a rank", _mib(max(peaks)), MEASURED))
    return facts(entries)


def _mib(size: int, unit: str = " MiB") -> str:
    amount = size / _MIB
    return number(size, f"{amount:,.0f}" if amount >= 1e3 else f"{amount:.4g}") + unit


def _plan(report: RunReport) -> str:
    plan = report.plan
    text = f"Plan: {plan_title(plan)}. {words_of(plan)}."
    rows = [[escape(cell) for cell in row] for row in plan_rows(plan)]
    return section(
        "Plan",
        picture(
            plan_figure(plan, width=_WIDTH),
            "plan",
            text,
            "Layers from left to right, ranks from top to bottom; E is the embedding, H the head.",
        ),
        table("Strategies of the embedding, the layers and the head", COLUMNS, rows),
    )


def _step_time(report: RunReport) -> str:
    outcome, parts = report.outcome, []
    predicted, measured = report.predicted_ms, outcome.get("measured_ms")
    if predicted is not None and measured is not None:
        off = 100 * (measured / predicted - 1)
        parts.append(
            paragraph(
                f'<span class="predicted">Predicted</span> {number(predicted)} ms a step, '
                f'<span class="measured">measured</span> {number(measured)} ms ({off:+.1f}%), the median of '
                f"{number(outcome['steps'])} steps on the slowest rank."
            )
        )
    elif predicted is not None:
        parts.append(
            paragraph(f'<span class="predicted">Predicted</span> {number(predicted)} ms a step; it was not measured.')
        )
    if report.bubble_percent is not None:
        parts.append(_bubble(report))
    pictures = []
    if report.run is not None and report.run.step_ms:
        times = report.run.step_ms
        pictures.append(
            picture(
                step_times_figure(times, predicted, first_step=report.run.global_step - len(times) + 1, width=_WIDTH),
                "steps",
                f"Measured times of {len(times)} steps of rank 0, with their median and the predicted step.",
                f"{MEASURED} Steps of rank 0, without the first {WARM_UP}.",
            )
        )
    if report.explanation is not None:
        pictures.append(
            picture(
                timeline_figure(predicted_timeline(report.explanation), width=_WIDTH),
                "played",
                "Predicted timeline of a step: when each pipeline rank runs forwards and backwards.",
                f"{PREDICTED} The schedule, played with the predicted times of the stages; numbers are micro-batches.",
            )
        )
    if report.timeline is not None:
        pictures.append(
            picture(
                timeline_figure(report.timeline, width=_WIDTH),
                "traced",
                f"Measured timeline of step {report.timeline.step}: when each rank computes and waits.",
                f"{MEASURED} Step {number(report.timeline.step)}, counted from 0. Updates are not traced.",
            )
        )
    if pictures:
        parts.append(f'<div class="pictures">{"".join(pictures)}</div>')
    if report.explanation is not None:
        rows = [[escape(name), number(ms)] for name, ms in report.explanation.step_ms().items()]
        parts.append(table("Predicted milliseconds of a step, by purpose", ("purpose", "ms"), rows))
    # Trainer adds the time so far to each log if it counts tokens; the last value is that of the whole run.
    last = {name: log[name] for log in report.logs for name in _TIMES if is_number(log.get(name))}
    if last:
        speeds = [[escape(name), number(last[name])] for name in _TIMES if name in last]
        parts.append(table("Measured by Trainer over the whole run", ("key of the log", "value"), speeds))
    return section("Step time", *parts)


def _bubble(report: RunReport) -> str:
    """Says how long the busiest pipeline rank waits for others."""
    predicted, logs = report.predicted_bubble_percent, number(len(report.bubbles))
    known = "" if predicted is None else f'<span class="predicted">predicted</span> {number(predicted)}%, '
    return paragraph(
        "Share of a step in which the busiest pipeline rank waits for others (bubble): "
        f'{known}<span class="measured">measured</span> {number(report.bubble_percent)}%, the median of {logs} logs.'
    )


def _memory(report: RunReport) -> str:
    outcome, groups = report.outcome, report.plan.rank_groups
    peaks = list(outcome.get("measured_bytes") or [None] * len(groups))
    parts = []
    budget = None if report.profiles is None else report.profiles.memory_bytes
    if report.explanation is not None:
        parts.append(
            picture(
                memory_figure(report.explanation, budget, peaks, width=_WIDTH),
                "memory",
                "Predicted memory of a rank of each pipeline rank by kind, with the measured peak.",
                f"{PREDICTED} Bars by kind. Diamonds are measured peaks.",
            )
        )
    predicted = list(report.predicted_bytes) or [None] * len(groups)
    if any(one is not None for one in (*predicted, *peaks)):
        kinds = KINDS if report.explanation is not None else ()
        columns = ("ranks", *kinds, "peak, predicted", "peak, measured")
        rows = []
        for index, group in enumerate(groups):
            stage = None if report.explanation is None else report.explanation.stages[index].bytes_by_kind
            cells = [_mib(stage[kind], "") for kind in kinds]
            cells += ["-" if one is None else _mib(one, "") for one in (predicted[index], peaks[index])]
            rows.append([escape(ranks_text(group)), *cells])
        parts.append(table("Memory of one rank in MiB; kinds are predicted", columns, rows))
    if budget is not None:
        parts.append(paragraph(f"The search allowed {_mib(budget)} on a rank."))
    return section("Memory", *parts)


def _losses(report: RunReport) -> str:
    names = {name: text for name, text in (("loss", "training"), ("eval_loss", "evaluation")) if _logged(report, name)}
    if not names:
        return ""
    shown = ("loss", "eval_loss", "grad_norm", "learning_rate")
    columns = [name for name in shown if _logged(report, name)]
    return section(
        "Loss",
        picture(
            series_figure(report.logs, names, "loss", width=_WIDTH),
            "losses",
            f"Losses over {len(series(report.logs, next(iter(names)))[0])} logs.",
            f"{MEASURED} Mean of the steps since the log before, as Trainer logs it.",
        ),
        _log_table("Losses, norms of gradients and learning rates, as logged", report.logs, columns),
    )


def _data(report: RunReport) -> str:
    columns = [name for name in _DATA if _logged(report, name)]
    pictures = []
    if "useful_tokens_per_second" in columns:
        pictures.append(
            picture(
                series_figure(
                    report.logs,
                    {"useful_tokens_per_second": "useful tokens"},
                    "useful tokens/s",
                    width=_WIDTH,
                ),
                "tokens",
                "Useful tokens per second at each log.",
                f"{MEASURED} Tokens without padding, per second since the log before.",
            )
        )
    balance = {
        name: f"{'measured' if _DATA[name][1] else 'predicted'}"
        for name in ("predicted_imbalance", "measured_imbalance")
        if name in columns
    }
    if balance:
        pictures.append(
            picture(
                series_figure(report.logs, balance, "slowest rank / mean", width=_WIDTH),
                "balance",
                "Time of the slowest rank over the mean of the ranks at each log.",
                "Time of the slowest rank over the mean; 1 means that no rank waits.",
            )
        )
    if report.run is not None and report.run.deal is not None:
        pictures.append(
            picture(
                deal_figure(run_deal(report.run.deal), width=_WIDTH),
                "deal",
                "The documents of the last packed step on micro-batches and data ranks.",
                "The last packed step: tokens of each document on the data ranks of each micro-batch (mb).",
            )
        )
    names = {name: f"{text} ({'measured' if known else 'predicted'})" for name, (text, known) in _DATA.items()}
    return section(
        "Data",
        f'<div class="pictures">{"".join(pictures)}</div>' if pictures else "",
        _log_table("Padding and balance, as logged", report.logs, columns, names) if columns else "",
    )


def _logged(report: RunReport, name: str) -> bool:
    return any(is_number(log.get(name)) for log in report.logs)


def _log_table(
    caption: str, logs: Sequence[Mapping[str, Any]], columns: Sequence[str], names: Mapping[str, str] | None = None
) -> str:
    """Returns the logs that have one of the columns, with their steps."""
    rows = []
    for log in logs:
        if any(is_number(log.get(name)) for name in columns):
            cells = [number(log[name]) if is_number(log.get(name)) else "-" for name in columns]
            rows.append([number(log["step"]) if is_number(log.get("step")) else "-", *cells])
    return table(caption, ["step", *((names or {}).get(name, name) for name in columns)], rows, tall=True)


def _profile_texts(report: RunReport) -> str:
    """Says what the profiles were made of."""
    if report.profiles is None:
        return ""
    hardware, model = report.profiles.hardware, report.profiles.model
    assumed = {**hardware.assumed, **model.assumed}
    lines = [
        f"machine: {hardware.name}, {hardware.nodes} x {hardware.devices_per_node} devices",
        f"model: {model.name}",
    ]
    lines += [f"assumed, not measured: {name} ({source})" for name, source in assumed.items()]
    return paragraph("The profiles of the search are of:") + listed(lines)
