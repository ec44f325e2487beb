# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Reports and logs of runs that are not as planned: that crash, follow another run, or have broken files."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import pytest
import torch

from galvatron_hf.cli.main import main
from galvatron_hf.plan import ParallelPlan
from galvatron_hf.planner.report.run_files import PLAN_FILE, RUN_FILE
from galvatron_hf.plots.report.page import report_page, report_values
from galvatron_hf.plots.report.run import read_run
from oracle import Rows
from trainer_runs import GLOBAL_BATCH, StopAt, on_ranks, run


PREDICTED = {"step_ms": 40.0, "memory_bytes": [1 << 20], "rows": GLOBAL_BATCH, "length": 8}


class Fault(StopAt):
    """Raises at the end of a step."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise RuntimeError("a fault")


class SlowRows(Rows):
    """Takes `SECONDS` for its first row."""

    SECONDS = 2.0

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        time.sleep(self.SECONDS * (index == 0))
        return super().__getitem__(index)


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Path, list[dict]]:
    """Returns the folder and the logs of a packed run on one rank, with an evaluation after each step."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    plan = ParallelPlan.uniform(2, 4, meta={"predicted": PREDICTED})
    options = dict(max_steps=4, packing="static", eval_strategy="steps", eval_steps=1)
    data = dict(train_dataset=Rows(40, shortest=8, longest=8), eval_dataset=SlowRows(2, shortest=8, longest=8))

    def work() -> list[dict]:
        return run(folder, plan, options=options, data_collator=None, **data).logs

    return folder, on_ranks(work, 2)[0]


def test_evaluations_are_no_time_of_training(finished):
    _, logs = finished
    measured = [log for log in logs if "useful_tokens_per_second" in log]
    assert len(measured) == 4 and any("eval_loss" in log for log in logs)
    for log in measured[2:]:  # the second step ends the recording of memory, which takes time
        assert log["useful_tokens_per_second"] > 8 * GLOBAL_BATCH / SlowRows.SECONDS
        assert log["step_ms"] < 1e3 * SlowRows.SECONDS


def test_a_run_that_fails_is_not_reported_with_the_numbers_of_the_one_before(finished, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(finished[0], folder)
    assert read_run(folder).run.global_step == 4

    def work() -> None:
        plan = ParallelPlan.uniform(2, 4, meta={"predicted": PREDICTED})
        with pytest.raises(RuntimeError, match="a fault"):
            run(folder, plan, callbacks=(Fault(1),))

    on_ranks(work, 2)
    report = read_run(folder)
    assert report.run is None and "The log of the run is missing" in report.missing[0]


def test_the_numbers_of_a_run_under_another_plan_are_not_shown(finished, tmp_path):
    for stages in (1, 2):
        folder = tmp_path / str(stages)
        shutil.copytree(finished[0], folder)
        ParallelPlan.uniform(2, 4, pipeline=stages, tensor=3 - stages).to_json(folder / PLAN_FILE)
        report = read_run(folder)
        assert report.run is None and f"{RUN_FILE} is of another plan than {PLAN_FILE}" in report.missing[0]
        assert "measured_ms" not in report_page(report) and report_values(report)["outcome"] is None


def test_a_prediction_for_other_rows_is_not_that_of_the_run(finished, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(finished[0], folder)
    values = json.loads((folder / RUN_FILE).read_text())
    assert values["outcome"]["predicted_ms"] == read_run(folder).predicted_ms == 40.0
    (folder / RUN_FILE).write_text(json.dumps(values | {"outcome": None, "step_ms": []}))
    report = read_run(folder)
    assert report.predicted_ms is None and not report.predicted_bytes
    assert f"prediction is for steps of {GLOBAL_BATCH} rows and not for those of this run" in report.missing[0]
    assert 'value="40.0"' not in report_page(report)


def test_the_log_of_a_run_that_goes_on_is_its_newest_one(tmp_path):
    ParallelPlan.uniform(2, 4).to_json(tmp_path / PLAN_FILE)
    for age, (place, step) in enumerate((("checkpoint-4", 4), (".", 9), ("checkpoint-20", 20))):
        (tmp_path / place).mkdir(exist_ok=True)
        state = tmp_path / place / "trainer_state.json"
        state.write_text(json.dumps(dict(global_step=step, log_history=[])))
        os.utime(state, (1e9 - 100 * age,) * 2)
    assert read_run(tmp_path).run.global_step == 4


@pytest.mark.parametrize(
    "changes, name, kind",
    [
        (dict(global_step="4"), "global_step", "whole number"),
        (dict(step_ms={"1": 2}), "step_ms", "list of numbers"),
        (dict(outcome=[1]), "outcome", "comparison"),
        (dict(outcome={"measured_ms": 1.0, "steps": 1}), "outcome", "comparison"),
        (dict(deal=[1]), "deal", "object"),
        (dict(trace=1), "trace", "path"),
    ],
)
def test_parts_of_another_kind_are_refused_in_one_sentence(finished, tmp_path, capsys, changes, name, kind):
    folder = tmp_path / "run"
    shutil.copytree(finished[0], folder)
    values = json.loads((folder / RUN_FILE).read_text())
    (folder / RUN_FILE).write_text(json.dumps(values | changes))
    assert main(["report", str(folder)]) == 1
    said = f"galvatron: {name} of {str(folder / RUN_FILE)!r} is no {kind}"
    assert said in capsys.readouterr().err and not (folder / "report.html").exists()


def test_values_that_are_no_numbers_are_left_out(finished, tmp_path, capsys):
    """JSON has no NaN and no infinities, and a picture none of 10^308."""
    folder = tmp_path / "run"
    shutil.copytree(finished[0], folder)
    values = json.loads((folder / RUN_FILE).read_text())
    odd = [float("nan"), float("-inf"), 1e308, -1e308, "<b>", None, [1], True, 10**400, 0, 1e-320]
    values["log_history"] = [{"step": step, "loss": value, "eval_loss": value} for step, value in enumerate(odd)]
    values["log_history"] += [{"loss": 1.5}, {"step": "<i>", "loss": 2.5}, {"step": 2**70, "grad_norm": 1.0}]
    (folder / RUN_FILE).write_text(json.dumps(values))
    assert main(["report", str(folder), "--json"]) == 0

    def refuse(word: str) -> None:
        raise AssertionError(word)

    shown = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert [log.get("loss") for log in shown["log_history"][:4]] == [None, None, 1e308, -1e308]
    page = (folder / "report.html").read_text()
    assert "<b>" not in page and "<i>" not in page and ">1.5<" in page and ">nan<" in page


def test_the_deal_of_a_run_that_logged_nothing_is_on_the_page(finished, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(finished[0], folder)
    values = json.loads((folder / RUN_FILE).read_text())
    (folder / RUN_FILE).write_text(json.dumps(values | {"log_history": []}))
    report = read_run(folder)
    page = report_page(report)
    assert report_values(report)["deal"] == values["deal"] is not None
    assert "The documents of the last packed step" in page and "as logged" not in page


def test_a_run_that_has_not_ended_is_no_dataset(tmp_path, capsys):
    ParallelPlan.uniform(2, 4).to_json(tmp_path / PLAN_FILE)
    assert main(["plot", "deal", str(tmp_path), "--output", str(tmp_path / "deal.png")]) == 1
    assert f"is of a run that has not ended, without {RUN_FILE}" in capsys.readouterr().err
