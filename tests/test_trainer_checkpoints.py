# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""A run that was interrupted goes on as if it had not been: under its plan, another one, other ranks, one process."""

from __future__ import annotations

import base64
import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from transformers import Trainer

from equivalence import single_stage
from galvatron_hf import ParallelPlan
from galvatron_hf.plan import LayerStrategy, VocabularyStrategy
from galvatron_hf.trainer.planning.auto_planner import AutoPlanner
from oracle import Rows
from plans import light_plan, mixed_plans, uniform
from tiny_models import FAMILIES
from trainer_runs import Run, StopAt, assert_equal_weights, assert_same_steps, on_ranks, run, trainer


S, V = LayerStrategy, VocabularyStrategy
MIXED = mixed_plans()
FIRST, SECOND, THIRD = (replace(MIXED[name], micro_batches=1) for name in ("mixed_a", "mixed_b", "shuffled"))
TWO_MICRO_BATCHES = replace(FIRST, micro_batches=2)
# Layers of two ranks: dropout is drawn again in recomputation, apart on Ulysses ranks and alike on tensor ranks.
RECOMPUTING = single_stage(
    (
        S(),
        S(tensor=2),
        S(tensor=2, megatron_sp=True, recompute="full"),
        S(ulysses=2, sharding="zero2", recompute="full"),
    ),
    2,
    embedding=V(tensor=2),
    head=V(tensor=2),
    micro_batches=2,
)
ZERO2, ZERO2_OF_TWO = (uniform(n, sharding="zero2", embedding=V(sharding="zero2")) for n in (4, 2))
# Fused and tied; untied with a scheduler that looks at the evaluation. And those that only the slow tests take.
FAMILY_NAMES, SLOW_NAMES = ("gpt2", "llama"), ("phi3", "llama_tied")
FAMILIES_AND_SLOW = [*FAMILY_NAMES, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_NAMES)]

# Two steps of the three of an epoch, then one more of it and one of the next.
SAVING = dict(save_strategy="steps", save_steps=2, max_steps=4, lr_scheduler_type="cosine", warmup_steps=2)
SAVED = "checkpoint-2"
RESUMED = SAVING | dict(save_strategy="no")
ALONE = SAVING | dict(gradient_accumulation_steps=1)
PLATEAU = dict(
    lr_scheduler_type="reduce_lr_on_plateau",
    lr_scheduler_kwargs=dict(patience=0, factor=0.5),
    learning_rate=0.4,
    eval_strategy="steps",
    eval_steps=1,
)
ONLY_MODEL = SAVING | dict(save_only_model=True)
BEST = dict(
    save_strategy="steps",
    save_steps=1,
    max_steps=3,
    eval_strategy="steps",
    eval_steps=1,
    load_best_model_at_end=True,
    metric_for_best_model="loss",
    greater_is_better=True,  # the loss falls, so that the best model is an early one
)


def evaluated() -> dict[str, Any]:
    return dict(eval_dataset=Rows(4, seed=2))


def of(family: str) -> dict[str, Any]:
    """Returns arguments of a family's run; those of Llama have a scheduler that looks at the evaluation."""
    return dict(family=family, train_dataset=Rows(19)) | (evaluated() if family == "llama" else {})


def options_of(family: str, options: dict[str, Any]) -> dict[str, Any]:
    return options | (PLATEAU if family == "llama" else {})


def plan_for_ranks(ranks: int) -> ParallelPlan:
    layers = (S(tensor=2), S(), S(ulysses=2), S(tensor=2, megatron_sp=True))
    return single_stage(layers, ranks, embedding=V(tensor=2), head=V(tensor=2))


class Writer:
    """Trains on several ranks, and keeps their checkpoints in one folder."""

    def __init__(self, folder: Path, plain: Path):
        self.folder, self.plain = folder, plain

    def whole(self, family: str, plan: ParallelPlan = FIRST) -> Run:
        return run(self.folder / family, plan, options=options_of(family, SAVING), **of(family))

    def interrupted(self, plan: ParallelPlan) -> dict[str, Run]:
        """Returns a whole run with dropout, one that stops, and one that continues it."""

        def dropping(name: str, options: dict[str, Any], **more) -> Run:
            model = FAMILIES["gpt2"].build(resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1)
            return run(self.folder / name, plan, model=model, options=options, train_dataset=Rows(19), **more)

        whole, stopped = dropping("whole", RESUMED), dropping("stopped", SAVING, callbacks=(StopAt(3),))
        return dict(whole=whole, stopped=stopped, continued=dropping("stopped", RESUMED, resume=True))

    def resumed(self, family: str, plan, source: Path | None = None, **more) -> Run:
        checkpoint = (source or self.folder) / family / SAVED
        options = options_of(family, RESUMED)
        return run(self.folder / "resumed", plan, options=options, resume=checkpoint, **of(family), **more)

    def resumed_from_plain(self, family: str, plan) -> Run:
        return self.resumed(family, plan, source=self.plain)


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> tuple[Path, dict[str, Run]]:
    """Returns whole runs of plain Trainer, with a checkpoint after step 2."""
    folder = tmp_path_factory.mktemp("plain")
    runs = {
        family: run(folder / family, options=options_of(family, ALONE), trainer_class=Trainer, **of(family))
        for family in (*FAMILY_NAMES, *SLOW_NAMES)
    }
    return folder, runs


@pytest.fixture(scope="module")
def ranks(tmp_path_factory, plain) -> tuple[Path, list[dict[str, Run]]]:
    """Returns runs of four ranks by name, from one world; a family's name is its uninterrupted run."""
    folder = tmp_path_factory.mktemp("ranks")
    writer = Writer(folder, plain[0])

    def plan_in_use(made: Trainer) -> ParallelPlan:
        return made.parallel.plan

    def work() -> dict[str, Run]:
        runs = {"gpt2": writer.whole("gpt2")}
        runs["gpt2 b"] = writer.resumed("gpt2", SECOND, then=plan_in_use)
        runs["gpt2 auto"] = writer.resumed("gpt2", "auto", then=plan_in_use)
        runs["gpt2 plain"] = writer.resumed_from_plain("gpt2", SECOND)
        return runs

    return folder, on_ranks(work)


@pytest.fixture(scope="module")
def pair(tmp_path_factory, plain) -> tuple[Path, list[dict[str, Run]]]:
    """Returns the same as `ranks`, of two ranks."""
    folder = tmp_path_factory.mktemp("pair")
    writer = Writer(folder, plain[0])

    def best_after(made: Trainer) -> tuple[str, float, float]:
        return made.state.best_model_checkpoint, made.evaluate()["eval_loss"], made.state.best_metric

    def work() -> dict[str, Run]:
        runs = writer.interrupted(RECOMPUTING)
        runs["llama"] = writer.whole("llama", light_plan(2))
        runs["llama plain"] = writer.resumed_from_plain("llama", ZERO2_OF_TWO)
        runs["best"] = run(folder / "best", light_plan(2), options=BEST, then=best_after, **evaluated())
        return runs

    return folder, on_ranks(work, 2)


@pytest.fixture(scope="module")
def more_ranks(tmp_path_factory, plain) -> tuple[Path, list[dict[str, Run]]]:
    """Returns the same as `ranks`, for the slow tests."""
    folder = tmp_path_factory.mktemp("more_ranks")
    writer = Writer(folder, plain[0])

    def work() -> dict[str, Run]:
        runs = writer.interrupted(TWO_MICRO_BATCHES)
        runs |= {family: writer.whole(family) for family in (*SLOW_NAMES, "llama")}
        runs["phi3 shuffled"] = writer.resumed("phi3", THIRD)
        runs["llama_tied zero2"] = writer.resumed("llama_tied", ZERO2)
        runs["llama b"] = writer.resumed("llama", SECOND)
        runs["phi3 plain"] = writer.resumed_from_plain("phi3", FIRST)
        runs["llama_tied plain"] = writer.resumed_from_plain("llama_tied", THIRD)
        runs["only_model"] = run(folder / "only_model", FIRST, options=ONLY_MODEL)
        checkpoint = folder / "only_model" / SAVED
        runs["fresh"] = run(folder / "fresh", SECOND, options=ONLY_MODEL, resume=checkpoint)
        limited = dict(save_strategy="steps", save_steps=1, max_steps=3, save_total_limit=2)
        runs["limited"] = run(folder / "limited", ZERO2, options=limited)
        return runs

    return folder, on_ranks(work)


def runs_of(request: pytest.FixtureRequest, family: str) -> tuple[Path, list[dict[str, Run]]]:
    return request.getfixturevalue(dict(gpt2="ranks", llama="pair").get(family, "more_ranks"))


def check_interrupted(results: list[dict[str, Run]]) -> None:
    for runs in results:
        whole, resumed = runs["whole"], runs["continued"]
        assert len(whole.steps()) == 4
        assert resumed.steps(after=2) == whole.steps(after=2)
        assert resumed.random == whole.random
        assert_equal_weights(resumed.weights, whole.weights)
    assert [step for _, step in results[0]["continued"].steps("loss", "step")] == [3, 4]  # it did not begin anew


def test_resumed_run_is_bit_equal_to_the_uninterrupted_one(pair):
    check_interrupted(pair[1])


@pytest.mark.slow
def test_resumed_run_of_four_ranks_is_bit_equal_to_the_uninterrupted_one(more_ranks):
    check_interrupted(more_ranks[1])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2 b", "gpt2 auto"])
def test_checkpoint_resumes_under_another_plan(ranks, name):
    for runs in ranks[1]:
        assert_same_steps(runs[name], runs["gpt2"], after=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["phi3 shuffled", "llama_tied zero2", "llama b"])
def test_more_checkpoints_resume_under_another_plan(more_ranks, name):
    for runs in more_ranks[1]:
        assert_same_steps(runs[name], runs[name.split()[0]], after=2)


@pytest.mark.slow
def test_plan_of_the_checkpoint_is_used_unless_another_one_is_given(ranks):
    runs = ranks[1][0]
    assert runs["gpt2 auto"].result.layers == FIRST.layers
    assert runs["gpt2 auto"].result.embedding == FIRST.embedding
    assert runs["gpt2 b"].result.layers == SECOND.layers


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES_AND_SLOW)
def test_checkpoint_of_plain_trainer_resumes_under_a_plan(request, plain, family):
    for runs in runs_of(request, family)[1]:
        assert_same_steps(runs[f"{family} plain"], plain[1][family], after=2)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES_AND_SLOW)
def test_checkpoint_of_ranks_resumes_on_one_process(request, tmp_path, family):
    folder, (whole, *_) = runs_of(request, family)
    checkpoint = folder / family / SAVED
    seen = run(tmp_path, options=options_of(family, ALONE), resume=checkpoint, **of(family))
    assert_same_steps(seen, whole[family], after=2)


@pytest.mark.slow
def test_one_process_continues_the_generators_of_rank_0(ranks, tmp_path):
    checkpoint = ranks[0] / "gpt2" / SAVED
    saved = json.loads((checkpoint / "rng_state_0.json").read_text())
    assert not (checkpoint / "rng_state.pth").exists()
    made = trainer(tmp_path)
    made._load_rng_state(str(checkpoint))
    assert torch.get_rng_state().numpy().tobytes() == base64.b64decode(saved["torch"])


@pytest.mark.slow
def test_checkpoint_resumes_on_two_ranks(ranks, tmp_path):
    """Resumes from a checkpoint whose plan is for four ranks, so that another plan is asked of the planner."""
    folder, (whole, *_) = ranks
    plan = plan_for_ranks(2)

    def work() -> Run:
        with mock.patch.object(AutoPlanner, "plan_for", lambda planner, model: plan):
            return run(
                tmp_path,
                "auto",
                options=RESUMED,
                resume=folder / "gpt2" / SAVED,
                then=lambda made: made.parallel.plan,
                **of("gpt2"),
            )

    for seen in on_ranks(work, 2):
        assert seen.result.layers == plan.layers and seen.result.world_size == 2
        assert_same_steps(seen, whole["gpt2"], after=2)


@pytest.mark.slow
def test_checkpoint_resumes_on_eight_ranks(ranks, tmp_path):
    folder, (whole, *_) = ranks

    def work() -> Run:
        checkpoint = folder / "gpt2" / SAVED
        return run(tmp_path, plan_for_ranks(8), options=ALONE, resume=checkpoint, **of("gpt2"))

    for seen in on_ranks(work, 8):
        assert_same_steps(seen, whole["gpt2"], after=2)


@pytest.mark.slow
def test_state_of_a_scheduler_that_looks_at_the_evaluation(ranks, pair):
    """Checks that the rate fell before and after the checkpoint, so that the tests of Llama above saw it go on."""
    folder, (whole, *_) = pair
    rates = [rate for (rate,) in whole["llama"].steps("learning_rate")]
    assert rates[1] > rates[2] > rates[3]

    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    for checkpoint in (folder / "llama" / SAVED, ranks[0] / "gpt2" / SAVED):
        json.loads((checkpoint / "scheduler.json").read_text(), parse_constant=refuse)


@pytest.mark.slow
def test_own_state_is_read_without_unpickling(ranks, tmp_path, monkeypatch):
    folder, (whole, *_) = ranks

    def refuse(*args, **kwargs):
        raise AssertionError("a pickle is read")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "load", refuse)
        patch.setattr(pickle, "load", refuse)
        patch.setattr(pickle, "Unpickler", refuse)
        seen = run(tmp_path, options=ALONE, resume=folder / "gpt2" / SAVED, **of("gpt2"))
    assert_same_steps(seen, whole["gpt2"], after=2)


@pytest.mark.slow
def test_checkpoint_of_the_model_alone(tmp_path, more_ranks):
    folder, (runs, *_) = more_ranks
    options = dict(options=ONLY_MODEL | dict(gradient_accumulation_steps=1), trainer_class=Trainer)
    run(tmp_path / "only_model", **options)
    plain_checkpoint = tmp_path / "only_model" / SAVED
    fresh = run(tmp_path / "fresh", resume=plain_checkpoint, **options)
    assert_same_steps(runs["fresh"], fresh, after=2)
    # An optimizer that starts anew is seen in the losses, so that the other tests would see a lost state.
    assert runs["fresh"].steps()[-1] != pytest.approx(runs["only_model"].steps()[-1], rel=1e-3)
    files = {path.name for path in (folder / "only_model" / SAVED).iterdir()}
    plain_files = {path.name for path in plain_checkpoint.iterdir()}
    assert files == plain_files | {"parallel_plan.json", "manifest.json"}


@pytest.mark.slow
def test_only_as_many_checkpoints_are_kept_as_asked(more_ranks):
    folders = sorted(path.name for path in (more_ranks[0] / "limited").glob("checkpoint-*"))
    assert folders == ["checkpoint-2", "checkpoint-3"]


def test_best_model_is_loaded_at_the_end(pair):
    for runs in pair[1]:
        checkpoint, loss, best = runs["best"].result
        assert Path(checkpoint).name != "checkpoint-3"
        assert loss == pytest.approx(best, rel=1e-6)
        assert_equal_weights(runs["best"].weights, load_file(Path(checkpoint) / "model.safetensors"))
