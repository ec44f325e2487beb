# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The pictures draw the project's own numbers, can be read without colour, and are written by `galvatron plot`."""

from __future__ import annotations

import builtins
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from matplotlib.patches import Rectangle

from galvatron_hf.cli.main import main
from galvatron_hf.data.cost import GroupCost, SequenceCost, assumed_sharing
from galvatron_hf.data.forecast import DataWorkload, drawn_batches, forecast_modes
from galvatron_hf.data.group_placement import place_groups
from galvatron_hf.data.placement import place
from galvatron_hf.plan import LayerStrategy, ParallelPlan, Precision, Stage, VocabularyStrategy
from galvatron_hf.planner.cost.workload import Workload
from galvatron_hf.planner.estimate import Estimate, estimate_plan
from galvatron_hf.planner.report.explain import KINDS, Explanation, StageParts, explain_plan
from galvatron_hf.plots.accuracy import accuracy_figure, accuracy_values, read_comparisons
from galvatron_hf.plots.deal import deal_figure, step_deal
from galvatron_hf.plots.lengths import length_bins, lengths_figure
from galvatron_hf.plots.memory import memory_figure
from galvatron_hf.plots.plan_diagram import plan_figure, plan_runs
from galvatron_hf.plots.spans import measured_timeline, predicted_timeline
from galvatron_hf.plots.style import contrast, look, save
from galvatron_hf.plots.timeline import LOOKS, timeline_figure
from planner_cases import random_hardware, random_model
from test_search_commands import FLAGS


FP32 = Precision()
MIXED = ParallelPlan(
    world_size=4,
    stacks={"decoder": 6},
    micro_batches=4,
    stages=(Stage(ranks=(0, 1), layers=(0, 4)), Stage(ranks=(2, 3), layers=(4, 6))),
    layers=(LayerStrategy(tensor=2, megatron_sp=True, sharding="replicate"),) * 2
    + (LayerStrategy(recompute="full"),) * 3
    + (LayerStrategy(sharding="zero2"),),
    head=VocabularyStrategy(tensor=2, sharding="replicate"),
)
COST = SequenceCost(per_token=1e-5, per_token_squared=1e-9, per_sequence=1e-4)
LENGTHS = np.random.default_rng(0).lognormal(4, 1.2, size=203).astype(np.int64) + 1


def texts(figure) -> list[str]:
    """Returns all text in a picture."""
    found = [text.get_text() for axes in figure.axes for text in axes.texts]
    found += [axes.get_title(loc="left") for axes in figure.axes]
    found += [label.get_text() for axes in figure.axes for label in axes.get_yticklabels()]
    return found + [text.get_text() for legend in figure.legends for text in legend.get_texts()]


def rectangles(axes) -> list[Rectangle]:
    return [patch for patch in axes.patches if isinstance(patch, Rectangle)]


# ---- What predictions consist of ----


@pytest.mark.parametrize("seed", range(4))
def test_kinds_of_memory_and_passes_add_up(seed):
    """Whatever the plan is, nothing is counted twice or left out."""
    hardware = random_hardware(seed, world_size=4, memory_bytes=10**9)
    model = random_model(seed, layers=4, tied=seed == 1)
    workload = Workload(rows=8, length=16, precision=FP32)
    kinds = itertools.product((1, 2), (1, 2, 4), ("replicate", "zero2", "zero3"), ("none", "full"))
    for pipeline, micro_batches, sharding, recompute in kinds:
        plan = ParallelPlan.uniform(
            4, 4, pipeline=pipeline, micro_batches=micro_batches, sharding=sharding, recompute=recompute
        )
        found = explain_plan(hardware, model, workload, plan)
        for stage, memory in zip(found.stages, found.estimate.memory_bytes, strict=True):
            assert tuple(stage.bytes_by_kind) == KINDS and min(stage.bytes_by_kind.values()) >= 0, plan
            assert sum(stage.bytes_by_kind.values()) == stage.memory_bytes == memory
            assert sum(stage.forward_ms) + sum(stage.backward_ms) == pytest.approx(stage.micro_batch_ms)


def test_sharded_weights_and_optimizer_states_are_those_of_arithmetic():
    """ZeRO-3 over 4 ranks: 4 bytes of a weight and 8 of two moments, for a fourth of the elements."""
    hardware, model = random_hardware(0, world_size=4, memory_bytes=10**9), random_model(0, layers=4)
    plan = ParallelPlan.uniform(4, 4, micro_batches=2, sharding="zero3")
    [stage] = explain_plan(hardware, model, Workload(rows=8, length=16, precision=FP32), plan).stages
    elements = 4 * (32 * 8 + 8 * 32 + 8) + 2 * 64 * 8
    assert stage.bytes_by_kind["optimizer states"] == 8 * elements // 4
    assert stage.bytes_by_kind["weights"] == pytest.approx(4 * elements // 4, abs=8)


def equal_stages(plan: ParallelPlan, forward: float, backward: float, **times: float) -> Explanation:
    """Returns an explanation in which every stage takes equally long."""
    ranks, virtual = len(plan.rank_groups), len(plan.stages) // len(plan.rank_groups)
    zero = dict.fromkeys(
        ("computing_ms", "communication_ms", "layout_ms", "sync_ms", "update_ms", "hidden_ms", "hidden_sync_ms"), 0.0
    )
    sizes = dict.fromkeys(("state_bytes", "activation_bytes", "working_bytes", "boundary_bytes"), 0)
    stage = StageParts(
        layers=((0, 1),) * virtual,
        forward_ms=(forward,) * virtual,
        backward_ms=(backward,) * virtual,
        bytes_by_kind=dict.fromkeys(KINDS, 1 << 20),
        **zero | sizes | times,
    )
    estimate = Estimate(plan=plan, step_ms=1.0, samples_per_second=1.0, memory_bytes=(5 << 20,) * ranks)
    return Explanation(estimate=estimate, stages=(stage,) * ranks, slowest=0)


@pytest.mark.parametrize("schedule, virtual", [("1f1b", 1), ("gpipe", 1), ("interleaved", 2)])
def test_played_steps_end_as_the_closed_form_says(schedule, virtual):
    """p ranks, m micro-batches, v stages a rank: (v m + p - 1)(F + B), then the update (arXiv 2104.04473)."""
    ranks, count, forward, backward = 4, 8, 2.0, 3.0
    plan = ParallelPlan(
        world_size=ranks,
        stacks={"decoder": ranks * virtual},
        micro_batches=count,
        schedule=schedule,
        stages=tuple(Stage(ranks=(i % ranks,), layers=(i, i + 1)) for i in range(ranks * virtual)),
        layers=(LayerStrategy(),) * (ranks * virtual),
    )
    played = predicted_timeline(equal_stages(plan, forward, backward, sync_ms=1.0, update_ms=4.0))
    end = (virtual * count + ranks - 1) * (forward + backward)
    assert max(span.end_ms for span in played.rows["rank 0"]) == pytest.approx(end + 5.0)
    busy = virtual * count * (forward + backward) + 5.0
    assert played.idle_share == pytest.approx(1 - busy / played.end_ms)
    for spans in played.rows.values():
        assert all(one.end_ms <= two.begin_ms + 1e-9 for one, two in itertools.pairwise(spans))


# ---- What pictures show ----


def test_a_plan_is_drawn_with_a_letter_and_words_for_each_strategy():
    runs, words = plan_runs(MIXED)
    assert [(run.row, run.start, run.end, run.strategy) for run in runs] == [
        (0, 0, 2, 0),
        (0, 2, 4, 1),
        (1, 4, 5, 1),
        (1, 5, 6, 2),
    ]
    assert words == ["tp2+sp+ddp", "zero3+recompute", "zero2"]
    figure = MIXED.plot()
    shown = texts(figure)
    for text in ("A: tp2+sp+ddp", "B: zero3+recompute", "C: zero2", "E: embedding zero3", "H: head tp2+ddp"):
        assert text in shown
    assert [text for text in shown if text in "ABC"] == ["A", "B", "B", "C"]
    assert "ranks 0,1" in shown and "ranks 2,3" in shown
    widths = [(one.get_x(), one.get_width()) for one in rectangles(figure.axes[0])]
    assert widths[:4] == [(run.start, run.end - run.start) for run in runs] and len(widths) == 6


def test_two_stacks_and_the_prediction_are_written_into_the_plan(tmp_path):
    plan = ParallelPlan.uniform(2, {"encoder": 3, "decoder": 2}, pipeline=2, micro_batches=2)
    estimate = Estimate(plan=plan, step_ms=12.345, samples_per_second=1.0, memory_bytes=(3 << 30, 1 << 30))
    figure = estimate.plot()
    assert {"encoder", "decoder", "rank 0\n3 GiB", "rank 1\n1 GiB"} <= set(texts(figure))
    assert "12.35 ms a step" in figure.axes[0].get_xlabel()
    save(figure, tmp_path / "plan.svg")
    first = (tmp_path / "plan.svg").read_bytes()
    save(plan_figure(plan, estimate), tmp_path / "plan.svg")
    assert b"http://www.w3.org/2000/svg" in first


def test_bars_of_memory_are_the_predicted_bytes():
    hardware, model = random_hardware(0, world_size=4, memory_bytes=10**9), random_model(0, layers=4)
    found = explain_plan(
        hardware, model, Workload(rows=8, length=16, precision=FP32), ParallelPlan.uniform(4, 4, pipeline=2)
    )
    figure = memory_figure(found, budget=1 << 16, measured=[1 << 15, None])
    axes, mib = figure.axes[0], 1 << 20
    for row, stage in enumerate(found.stages):
        drawn = [one.get_width() * mib for one in rectangles(axes) if row - 0.5 < one.get_y() + 0.33 < row + 0.5]
        assert drawn == pytest.approx([size for size in stage.bytes_by_kind.values() if size])
    assert [line.get_xdata()[0] * mib for line in axes.lines] == pytest.approx([1 << 15, 1 << 16])
    assert {"budget", "measured peak", *KINDS} <= set(texts(figure))


def trace(path: Path) -> Path:
    """Writes a trace of two ranks and two steps, as a run with `trace_dir` writes it."""
    events = [{"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "rank 0"}}]
    for step, (rank, name, kind, begin, length) in itertools.product(
        (3, 4),
        [
            (0, "forward 0", "compute", 0, 2000),
            (0, "send activations 0", "send", 2000, 10),
            (0, "backward 0", "compute", 6000, 3000),
            (1, "wait: receive activations 0", "wait", 500, 1500),
            (1, "forward 0", "compute", 2000, 1000),
            (1, "backward of the input 0", "compute", 3000, 3000),
        ],
    ):
        args = {"micro_batch": 0, "stage": rank, "step": step}
        events.append(
            {
                "name": name,
                "cat": kind,
                "ph": "X",
                "ts": 1e5 * step + begin,
                "dur": length,
                "pid": rank + 1,
                "tid": 9,
                "args": args,
            }
        )
    path.write_text(json.dumps({"traceEvents": events}))
    return path


def test_a_measured_step_is_that_of_the_trace(tmp_path):
    found = measured_timeline(trace(tmp_path / "timeline.json"))
    assert found.step == 4 and found.end_ms == pytest.approx(9.0)
    assert [(span.kind, span.begin_ms, span.end_ms) for span in found.rows["rank 1"]] == [
        ("wait", pytest.approx(0.5), pytest.approx(2.0)),
        ("forward", pytest.approx(2.0), pytest.approx(3.0)),
        ("backward", pytest.approx(3.0), pytest.approx(6.0)),
    ]
    assert found.idle_share == pytest.approx(1 - (5 + 4) / 18)
    assert measured_timeline(tmp_path, step=3).step == 3
    shown = texts(timeline_figure(found))
    assert {"wait", "forward", "backward", "measured, step 4: 9 ms, idle 50%"} <= set(shown)
    with pytest.raises(ValueError, match="no step 7: give one of 3 to 4"):
        measured_timeline(tmp_path, step=7)
    (tmp_path / "timeline.json").write_text("[]")
    with pytest.raises(ValueError, match="it is no trace"):
        measured_timeline(tmp_path)
    (tmp_path / "timeline.json").write_bytes(b"\xff")
    with pytest.raises(ValueError, match="it is no trace"):
        measured_timeline(tmp_path)
    event = {"ph": "X", "cat": "compute", "ts": 0, "dur": 1, "pid": 1, "args": {"step": 0}}
    for broken in (event, event | {"cat": "send", "args": {"step": 0, "stage": 0}}):
        (tmp_path / "timeline.json").write_text(json.dumps({"traceEvents": [broken]}))
        with pytest.raises(ValueError, match="step 0 is no trace|no time of computing"):
            measured_timeline(tmp_path)


def test_padding_of_lengths_is_that_of_the_forecast():
    workload = DataWorkload(batch_size=32, ranks=4, max_tokens=2 * int(LENGTHS.max()), steps=5)
    bins = length_bins(LENGTHS, workload)
    [padded, *_] = forecast_modes(LENGTHS, workload, COST)
    assert bins.padding_share == pytest.approx(padded.padding, rel=1e-12)
    assert bins.tokens.sum() == padded.useful_tokens and bins.sequences.sum() == 5 * 32
    figure = lengths_figure(bins)
    assert any(f"{padded.padding:.1%} padding" in text for text in texts(figure))
    heights = sum(one.get_height() for one in rectangles(figure.axes[1]))
    assert heights == bins.tokens.sum() + bins.padding.sum()


def test_a_deal_has_every_document_once():
    [batch] = drawn_batches(LENGTHS, DataWorkload(batch_size=32, ranks=4, steps=1))
    limit = int(batch.sum() // 5)
    groups = GroupCost(sequence=COST, sharing={"ring": assumed_sharing(COST)})
    dynamic = place_groups(batch, 4, groups, max_tokens=int(batch.max()) // 2)
    for placement, cost in ((place(batch, 4, COST, max_tokens=limit), COST), (dynamic, groups)):
        deal = step_deal(placement, batch, cost, limit=limit)
        held = [one for ranks in deal.bins for documents in ranks for one in documents]
        tokens = np.zeros(len(batch))
        np.add.at(tokens, [one.document for one in held], [one.tokens for one in held])
        assert tokens == pytest.approx(batch)
        assert deal.imbalance == pytest.approx(placement.imbalance(batch, cost))
        assert any(f"{deal.imbalance:.3f} (predicted)" in text for text in texts(deal_figure(deal)))
    assert any(len(one.ranks) > 1 for one in held)  # shared ones are drawn, too
    assert "shared by several ranks" in texts(deal_figure(deal))


def test_points_are_the_predicted_and_measured_steps_of_files(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "training_run.json").write_text(json.dumps({"outcome": {"predicted_ms": 11.0, "measured_ms": 10.0}}))
    cases = [{"predicted_ms": 18.0, "measured_ms": 20.0}, {"predicted_ms": 40.0, "measured_ms": 40.0}]
    (tmp_path / "cases.json").write_text(json.dumps({"name": "64x4", "cases": cases}))
    found = [*read_comparisons(run), *read_comparisons(tmp_path / "cases.json")]
    assert [(one.source, one.error) for one in found] == [
        ("run", pytest.approx(0.1)),
        ("64x4", pytest.approx(-0.1)),
        ("64x4", 0.0),
    ]
    assert accuracy_values(found)["median_error"] == pytest.approx(0.1)
    axes = accuracy_figure(found).axes[0]
    points = [line.get_xydata().tolist() for line in axes.lines if line.get_linestyle() == "None"]
    assert points == [[[10.0, 11.0]], [[20.0, 18.0], [40.0, 40.0]]]
    (run / "training_run.json").write_text(json.dumps({"outcome": None}))
    with pytest.raises(ValueError, match="no step with a predicted and a measured time"):
        read_comparisons(run)


def test_names_with_dollars_are_no_formulas(tmp_path):
    names = ["a$b", r"$\frac$", "_x$^$"]
    for name in names:
        (tmp_path / f"{name}.json").write_text(json.dumps({"cases": [{"predicted_ms": 1.0, "measured_ms": 1.0}]}))
    figure = accuracy_figure([one for name in names for one in read_comparisons(tmp_path / f"{name}.json")])
    save(figure, tmp_path / "picture.svg")
    picture = (tmp_path / "picture.svg").read_text()
    assert all(f">{name}</text>" in picture for name in names)
    plan = ParallelPlan.uniform(1, {"$\\x$": 1, "b": 1})
    save(plan_figure(plan), tmp_path / "plan.svg")
    assert ">$\\x$</text>" in (tmp_path / "plan.svg").read_text()


def test_pictures_can_be_read_without_colour():
    """Text has the contrast of WCAG's level AA, and things differ in their hatches as well."""
    looks = [look(number) for number in range(49)]
    assert len({(one.fill, one.hatch) for one in looks}) == 49
    assert len({one.hatch for one in looks[:7]}) == 7
    for one in (*looks, *LOOKS.values()):
        assert contrast(one.ink, one.fill) >= 4.5
    assert len({one.hatch for one in LOOKS.values()}) == len(LOOKS)
    assert contrast("#ffffff", "#000000") == pytest.approx(21)


# ---- The command ----


def plot(capsys, *arguments: str) -> dict:
    assert main(["plot", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_plans_steps_and_memory_are_drawn_from_the_arguments_of_other_commands(capsys, tmp_path):
    case = [*FLAGS, "--plan", "tp2+sp+pp2+mb4"]
    plan = plot(capsys, "plan", *case, "--output", str(tmp_path / "plan.png"))
    memory = plot(capsys, "memory", *case, "--output", str(tmp_path / "memory.svg"))
    steps = plot(
        capsys, "timeline", *case, "--trace", str(trace(tmp_path / "t.json")), "--output", str(tmp_path / "t.png")
    )
    assert main(["estimate", *case, "--json"]) == 0
    estimate = json.loads(capsys.readouterr().out)
    assert plan["predicted_step_ms"] == steps["timelines"][0]["predicted_step_ms"] == estimate["step_ms"]
    assert [one["predicted_bytes"] for one in memory["pipeline_ranks"]] == estimate["memory_bytes"]
    assert [one["measured"] for one in steps["timelines"]] == [False, True]
    for name in ("plan.png", "t.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "memory.svg").read_text()


def test_a_plan_of_a_file_needs_no_case(capsys, tmp_path):
    MIXED.to_json(tmp_path / "plan.json")
    found = plot(capsys, "plan", "--plan", str(tmp_path / "plan.json"), "--output", str(tmp_path / "plan.png"))
    assert found["predicted_step_ms"] is None and len(found["runs"]) == 4
    assert main(["plot", "plan", "--plan", "zero3", "--output", str(tmp_path / "plan.png")]) == 1
    assert "--global-batch is missing" in capsys.readouterr().err


def test_lengths_and_deals_are_drawn_from_the_arguments_of_galvatron_data(capsys, tmp_path):
    (tmp_path / "lengths").write_text("\n".join(map(str, LENGTHS)))
    batches = [str(tmp_path / "lengths"), "--batch-size", "32", "--ranks", "4", "--steps", "5"]
    found = plot(capsys, "lengths", *batches, "--output", str(tmp_path / "lengths.png"))
    assert main(["data", *batches, "--json", str(tmp_path / "data.json")]) == 0
    capsys.readouterr()
    padded = json.loads((tmp_path / "data.json").read_text())["modes"][0]
    assert found["padding_share"] == pytest.approx(padded["padding"])
    deal = plot(capsys, "deal", *batches, "--step", "1", "--output", str(tmp_path / "deal.svg"))
    assert len({held["document"] for ranks in deal["micro_batches"] for one in ranks for held in one}) == 32


@pytest.mark.parametrize("arguments", [["plot", "plan", "--plan", "x", "--output", "plan.gif"], ["plot"]])
def test_wrong_pictures_end_with_usage(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2 and "usage: galvatron plot" in capsys.readouterr().err


def test_without_matplotlib_one_sentence_names_the_extra(monkeypatch, capsys, tmp_path):
    real = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name.split(".")[0] == "matplotlib":
            raise ModuleNotFoundError("No module named 'matplotlib'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr("galvatron_hf.utils.drawing.import_module", lambda name: refuse(name))
    with pytest.raises(ImportError, match=r"in the clone of the repository, or pip install matplotlib\.$"):
        MIXED.plot()
    MIXED.to_json(tmp_path / "plan.json")
    arguments = ["plot", "plan", "--plan", str(tmp_path / "plan.json"), "--output", str(tmp_path / "plan.png")]
    assert main(arguments) == 1
    assert "pip install -e '.[plots]' -c constraints.txt in the clone" in capsys.readouterr().err
    assert not (tmp_path / "plan.png").exists()


def test_estimates_and_explanations_draw_themselves():
    hardware, model = random_hardware(0, world_size=2, memory_bytes=10**9), random_model(0, layers=4)
    case = hardware, model, Workload(rows=8, length=16, precision=FP32), ParallelPlan.uniform(2, 4, pipeline=2)
    found = explain_plan(*case)
    assert texts(found.plot_memory(1 << 20)) and texts(found.plot_timeline()) and texts(estimate_plan(*case).plot())
