# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The page of a training run has the run's own numbers, says what is predicted and what is missing, and can be read on
a phone.
"""

from __future__ import annotations

import functools
import json
import re
import shutil
import statistics
import subprocess
from dataclasses import asdict
from html.parser import HTMLParser
from pathlib import Path

import pytest

from galvatron_hf.cli.main import main
from galvatron_hf.plan import ParallelPlan
from galvatron_hf.planner.estimate import estimate_plan
from galvatron_hf.planner.report.run_files import PlanProfiles, TrainingRun
from galvatron_hf.planner.space import Limits
from galvatron_hf.plots.deal import run_deal
from galvatron_hf.plots.report.page import report_page, report_values
from galvatron_hf.plots.report.run import read_run
from galvatron_hf.profiler.trace.tracing import profile_from_config
from galvatron_hf.trainer.planning.auto_planner import AutoPlanner
from planner_cases import random_hardware
from tiny_models import FAMILIES
from trainer_runs import on_ranks, run


CHROMIUM = next(
    (found for found in map(shutil.which, ("chromium", "chromium-browser", "google-chrome")) if found), None
)
CHROMIUM_OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)


class Page(HTMLParser):
    """Collects what a page has."""

    def __init__(self, text: str):
        super().__init__()
        self.headings: list[int] = []
        self.values: list[tuple[float, str]] = []  # and their texts
        self.pictures: list[str | None] = []  # their texts for readers who do not see them
        self.names: list[str] = []
        self.addresses: list[str] = []
        self.tags: list[str] = []
        self._value: str | None = None
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.tags.append(tag)
        if re.fullmatch(r"h[1-6]", tag):
            self.headings.append(int(tag[1]))
        if tag == "data":
            self._value = given["value"]
        if tag == "svg":
            self.pictures.append(given.get("aria-label"))
        if "id" in given:
            self.names.append(given["id"])
        self.addresses += [value for name, value in attributes if name in ("src", "href", "xlink:href", "action")]

    def handle_data(self, data):
        if self._value is not None:
            self.values.append((json.loads(self._value), data))
            self._value = None

    @property
    def numbers(self) -> set[float]:
        return {value for value, _ in self.values}


def trained(folder: Path) -> dict:
    """Trains under the plan of a search, whose profiles are counted and not measured, so that the test is short."""
    options = dict(max_steps=6, trace_dir=str(folder / "trace"), save_strategy="no", packing="static")
    found = run(folder / "run", "auto", options=options, then=lambda made: made.plan_outcome)
    return dict(logs=found.logs, outcome=found.result)


@pytest.fixture(scope="module")
def trained_run(tmp_path_factory) -> tuple[Path, dict]:
    """Returns the output folder of a run on two ranks, a stage on each, and what the run says of itself."""
    folder = tmp_path_factory.mktemp("report")
    hardware = random_hardware(1, world_size=2, memory_bytes=1 << 30)
    config = folder / "config"
    FAMILIES["llama"].build().config.save_pretrained(config)
    profile = profile_from_config(str(config), hardware, "fp32", length=16, packed=True, max_degree=2)
    with pytest.MonkeyPatch.context() as patch:
        where = "galvatron_hf.trainer.planning.auto_planner"
        patch.setattr(f"{where}.load_or_profile_hardware", lambda *args, **options: hardware)
        patch.setattr(f"{where}.load_or_profile_model", lambda *args, **options: profile)
        patch.setattr(AutoPlanner, "limits", lambda self: Limits(pipeline=(2,), micro_batches=(4,)))
        found = on_ranks(functools.partial(trained, folder), 2)
    return folder / "run", found[0]


def test_a_run_leaves_its_numbers_and_the_profiles_of_its_plan(trained_run):
    folder, found = trained_run
    left = TrainingRun.from_json(folder / "training_run.json")
    wanted = asdict(found["outcome"])
    assert left.step_ms == list(wanted.pop("step_ms")) and len(left.step_ms) == 4
    assert left.outcome == json.loads(json.dumps(wanted)) and left.global_step == 6
    losses = [log["loss"] for log in found["logs"] if "loss" in log]
    assert [log["loss"] for log in left.log_history if "loss" in log] == losses and len(losses) == 6
    assert "train_runtime" in left.log_history[-1]
    placed = [index for ranks in left.deal["micro_batches"] for one in ranks for index in one]
    assert sorted(placed) == list(range(8)) and len(left.deal["lengths"]) == 8
    drawn = run_deal(left.deal)
    assert drawn.tokens.sum() == sum(left.deal["lengths"]) and drawn.imbalance >= 1
    profiles = PlanProfiles.from_json(folder / "plan_profiles.json")
    plan = ParallelPlan.from_json(folder / "parallel_plan.json")
    assert profiles.plan == plan and len(plan.rank_groups) == 2
    again = estimate_plan(profiles.hardware, profiles.model, profiles.workload, plan)
    assert again.step_ms == pytest.approx(plan.meta["predicted"]["step_ms"], rel=1e-9)
    assert list(again.peak_bytes) == plan.meta["predicted"]["memory_bytes"]


def test_numbers_of_the_page_are_those_of_the_run(trained_run, capsys, tmp_path):
    folder, _ = trained_run
    assert main(["report", str(folder), "--output", str(tmp_path / "report.html"), "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    shown = Page((tmp_path / "report.html").read_text())
    left = json.loads((folder / "training_run.json").read_text())
    plan = json.loads((folder / "parallel_plan.json").read_text())
    wanted = {left["outcome"]["measured_ms"], plan["meta"]["predicted"]["step_ms"], left["global_step"]}
    wanted |= {*left["outcome"]["measured_bytes"], *plan["meta"]["predicted"]["memory_bytes"]}
    keys = ("loss", "grad_norm", "learning_rate", "padding_percent", "predicted_imbalance", "train_runtime")
    logged = {log[key] for log in left["log_history"] for key in keys if key in log}
    assert len(logged) > 15 and wanted | logged <= shown.numbers
    assert values["outcome"] == left["outcome"] and values["log_history"] == left["log_history"]
    assert values["step_ms"] == left["step_ms"] and values["timeline"]["measured"]
    shares = [log["bubble_percent"] for log in left["log_history"] if "loss" in log and log["step"] > 2]
    noted = plan["meta"]["predicted"]
    assert (
        values["bubble_percent"] == statistics.median(shares) in shown.numbers
        and 0 < max(shares) < 100
        and len(shares) == 4
    )
    assert values["predicted_bubble_percent"] == 100 * noted["bubble_ms"] / noted["step_ms"] in shown.numbers
    for stage in values["predicted_bytes_by_kind"]:
        assert set(stage.values()) <= shown.numbers
    for value, text in shown.values:  # what is read is what is meant
        digits = float(text.replace(",", ""))
        assert any(digits == pytest.approx(value / size, rel=6e-4, abs=0.051 * (size > 1)) for size in (1, 1 << 20))


def test_times_so_far_are_not_those_of_the_whole_run(trained_run, tmp_path):
    """Trainer logs the seconds so far at each log of a run that counts its tokens."""
    run = tmp_path / "run"
    shutil.copytree(trained_run[0], run)
    left = json.loads((run / "training_run.json").read_text())
    left["log_history"][0]["train_runtime"] = 0.1234567
    (run / "training_run.json").write_text(json.dumps(left))
    assert main(["report", str(run)]) == 0
    shown = Page((run / "report.html").read_text()).numbers
    assert 0.1234567 not in shown and left["log_history"][-1]["train_runtime"] in shown


def test_the_page_loads_nothing_and_has_alternatives_for_its_pictures(trained_run):
    report = read_run(trained_run[0])
    text = report_page(report)
    page = Page(text)
    assert page.headings[0] == 1 and page.headings.count(1) == 1
    assert all(after <= before + 1 for before, after in zip(page.headings, page.headings[1:], strict=False))
    assert len(page.pictures) >= 6 and all(page.pictures)
    assert {"script", "link", "img", "iframe", "object"} & set(page.tags) == {"link"}  # an empty icon
    assert {address for address in page.addresses if not address.startswith("#")} == {"data:,"}
    assert len(page.names) == len(set(page.names)) > 50
    used = {address[1:] for address in page.addresses if address.startswith("#")}
    assert (used | set(re.findall(r"url\(#([^)]+)\)", text))) <= set(page.names)
    assert "prefers-color-scheme: dark" in text and "@import" not in text
    assert not report.missing and "Not known" not in text
    assert text.count("predicted</") > 3 and text.count("measured</") > 3


def test_what_is_missing_is_said(trained_run, tmp_path):
    folder = trained_run[0]
    bare = tmp_path / "a <b>run"
    bare.mkdir()
    with pytest.raises(ValueError, match="has no parallel_plan.json"):
        read_run(bare)
    ParallelPlan.uniform(2, 4).to_json(bare / "parallel_plan.json")
    text = report_page(read_run(bare))
    for said in ("The log of the run is missing", "Predictions by part are missing", "A measured timeline is missing"):
        assert said in text
    assert "a &lt;b&gt;run" in text and "<b>run" not in text
    shutil.copy(folder / "plan_profiles.json", bare)
    assert "is of another plan than" in report_page(read_run(bare))
    state = dict(global_step=3, log_history=[dict(step=1, loss=float("nan")), dict(step=2, loss=1.25)])
    for number in (2, 10):
        (bare / f"checkpoint-{number}").mkdir()
        (bare / f"checkpoint-{number}" / "trainer_state.json").write_text(json.dumps(state | dict(global_step=number)))
    found = read_run(bare)
    assert found.run.global_step == 10 and "checkpoint-10/trainer_state.json" in found.sources
    page = Page(report_page(found))
    assert 1.25 in page.numbers and any(text == "nan" for _, text in page.values)
    assert report_values(found)["missing"] == list(found.missing)


def test_a_broken_file_is_refused_in_one_sentence(trained_run, tmp_path, capsys):
    broken = tmp_path / "broken"
    shutil.copytree(trained_run[0], broken)
    (broken / "training_run.json").write_text("{")
    assert main(["report", str(broken)]) == 1
    assert "training_run.json' cannot be read (it is no JSON)" in capsys.readouterr().err
    (broken / "training_run.json").write_text('{"version": 1, "log_history": [], "more": 1}')
    assert main(["report", str(broken)]) == 1
    assert "lacks a part or has an unknown one" in capsys.readouterr().err
    assert not (broken / "report.html").exists()


def browse(tmp_path: Path, address: str, *options: str) -> subprocess.CompletedProcess:
    """Opens a page in a browser that has no profile."""
    shutil.rmtree(tmp_path / "profile", ignore_errors=True)
    command = [CHROMIUM, *CHROMIUM_OPTIONS, f"--user-data-dir={tmp_path / 'profile'}", *options, address]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium; the parser's tests of the page run everywhere")
def test_a_browser_shows_the_page_without_errors_on_a_phone(trained_run, tmp_path):
    path = tmp_path / "report.html"
    assert main(["report", str(trained_run[0]), "--output", str(path)]) == 0
    opened = browse(tmp_path, path.as_uri(), "--enable-logging=stderr", "--dump-dom", "--window-size=360,800")
    assert "CONSOLE" not in opened.stderr
    assert Page(opened.stdout).values == Page(path.read_text()).values
    # A frame of 360 pixels, because the window of a headless browser may be wider than asked for.
    frame = tmp_path / "frame.html"
    html = path.read_text().replace("default-src 'none';", "default-src 'none'; script-src 'unsafe-inline';")
    measure = "<script>parent.postMessage([document.documentElement.scrollWidth, innerWidth], '*')</script></body>"
    inner = html.replace("</body>", measure).replace("&", "&amp;").replace('"', "&quot;")
    frame.write_text(
        "<script>onmessage = event => document.body.append('widths ' + event.data)</script>"
        f'<iframe style="width:360px;height:800px;border:0" srcdoc="{inner}"></iframe>'
    )
    seen = browse(tmp_path, frame.as_uri(), "--dump-dom", "--virtual-time-budget=3000")
    assert re.search(r"widths 360,360", seen.stdout), re.findall(r"widths [\d,]+", seen.stdout)
