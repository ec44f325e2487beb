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

import pytest
import torch
from safetensors.torch import load_file
from transformers import Trainer

from equivalence import single_stage
from galvatron_hf import ParallelPlan
from galvatron_hf.plan import LayerStrategy, VocabularyStrategy
from oracle import Rows
from plans import light_plan, mixed_plans, uniform
from tiny_models import FAMILIES
from trainer_runs import Run, StopAt, assert_equal_weights, assert_same_steps, on_ranks, run, trainer


S, V = LayerStrategy, VocabularyStrategy
MIXED = mixed_plans()
FIRST, SECOND, THIRD = (replace(MIXED[name], micro_batches=1) for name in ("mixed_a", "mixed_b", "shuffled"))
TWO_MICRO_BATCHES = replace(FIRST, micro_batches=2)
ZERO2 = uniform(4, sharding="zero2", embedding=V(sharding="zero2"))
# Fused and tied; untied with a scheduler that looks at the evaluation. And those that only the slow tests take.
FAMILY_NAMES, SLOW_NAMES = ("gpt2", "llama"), ("phi3", "llama_tied")
FAMILIES_AND_SLOW = [*FAMILY_NAMES, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_NAMES)]

# Three steps of the four of an epoch, then one more of it and one of the next.
SAVING = dict(save_strategy="steps", save_steps=3, max_steps=5, lr_scheduler_type="cosine", warmup_steps=2)
RESUMED = SAVING | dict(save_strategy="no")
ALONE = SAVING | dict(gradient_accumulation_steps=1)
PLATEAU = dict(
    lr_scheduler_type="reduce_lr_on_plateau",
    lr_scheduler_kwargs=dict(patience=0, factor=0.5),
    learning_rate=0.2,
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
    """The family's run; those of Llama have a scheduler that looks at the evaluation."""
    return dict(family=family) | (evaluated() if family == "llama" else {})


def options_of(family: str, options: dict[str, Any]) -> dict[str, Any]:
    return options | (PLATEAU if family == "llama" else {})


def plan_for_ranks(ranks: int) -> ParallelPlan:
    layers = (S(tensor=2), S(), S(ulysses=2), S(tensor=2, megatron_sp=True))
    return single_stage(layers, ranks, embedding=V(tensor=2), head=V(tensor=2))


class Writer:
    """Runs of several ranks in one folder."""

    def __init__(self, folder: Path, plain: Path):
        self.folder, self.plain = folder, plain

    def whole(self, family: str, plan: ParallelPlan = FIRST) -> Run:
        return run(self.folder / family, plan, options=options_of(family, SAVING), **of(family))

    def interrupted(self, plan: ParallelPlan) -> dict[str, Run]:
        """Returns a whole run with dropout, one that stops, and one that continues it."""

        def dropping(name: str, options: dict[str, Any], **more) -> Run:
            model = FAMILIES["gpt2"].build(resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1)
            return run(self.folder / name, plan, model=model, options=options, **more)

        whole, stopped = dropping("whole", RESUMED), dropping("stopped", SAVING, callbacks=(StopAt(4),))
        return dict(whole=whole, stopped=stopped, continued=dropping("stopped", RESUMED, resume=True))

    def resumed(self, family: str, plan, source: Path | None = None, **more) -> Run:
        checkpoint = (source or self.folder) / family / "checkpoint-3"
        options = options_of(family, RESUMED)
        return run(self.folder / "resumed", plan, options=options, resume=checkpoint, **of(family), **more)

    def resumed_from_plain(self, family: str, plan) -> Run:
        return self.resumed(family, plan, source=self.plain)


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> tuple[Path, dict[str, Run]]:
    """Whole runs of plain Trainer, with a checkpoint after step 3."""
    folder = tmp_path_factory.mktemp("plain")
    runs = {
        family: run(folder / family, options=options_of(family, ALONE), trainer_class=Trainer, **of(family))
        for family in (*FAMILY_NAMES, *SLOW_NAMES)
    }
    only_model = ONLY_MODEL | dict(gradient_accumulation_steps=1)
    run(folder / "only_model", options=only_model, trainer_class=Trainer)
    checkpoint = folder / "only_model" / "checkpoint-3"
    runs["fresh"] = run(folder / "fresh", options=only_model, trainer_class=Trainer, resume=checkpoint)
    return folder, runs


@pytest.fixture(scope="module")
def ranks(tmp_path_factory, plain) -> tuple[Path, list[dict[str, Run]]]:
    """Runs of four ranks, in one world, by name; a family's name is its uninterrupted run."""
    folder = tmp_path_factory.mktemp("ranks")
    writer = Writer(folder, plain[0])

    def plan_in_use(made: Trainer) -> ParallelPlan:
        return made.parallel.plan

    def best_after(made: Trainer) -> tuple[str, float, float]:
        return made.state.best_model_checkpoint, made.evaluate()["eval_loss"], made.state.best_metric

    def work() -> dict[str, Run]:
        runs = writer.interrupted(light_plan(micro_batches=2))
        runs |= {"gpt2": writer.whole("gpt2"), "llama": writer.whole("llama", light_plan())}
        runs["gpt2 b"] = writer.resumed("gpt2", SECOND, then=plan_in_use)
        runs["gpt2 auto"] = writer.resumed("gpt2", "auto", then=plan_in_use)
        runs["gpt2 plain"] = writer.resumed_from_plain("gpt2", SECOND)
        runs["llama plain"] = writer.resumed_from_plain("llama", ZERO2)
        runs["best"] = run(folder / "best", light_plan(), options=BEST, then=best_after, **evaluated())
        return runs

    return folder, on_ranks(work)


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
        checkpoint = folder / "only_model" / "checkpoint-3"
        runs["fresh"] = run(folder / "fresh", SECOND, options=ONLY_MODEL, resume=checkpoint)
        limited = dict(save_strategy="steps", save_steps=1, max_steps=3, save_total_limit=2)
        runs["limited"] = run(folder / "limited", ZERO2, options=limited)
        return runs

    return folder, on_ranks(work)


def runs_of(request: pytest.FixtureRequest, family: str) -> tuple[Path, list[dict[str, Run]]]:
    return request.getfixturevalue("more_ranks" if family in SLOW_NAMES else "ranks")


@pytest.mark.parametrize("world", ["ranks", pytest.param("more_ranks", marks=pytest.mark.slow)])
def test_resumed_run_is_bit_equal_to_the_uninterrupted_one(request, world):
    _, results = request.getfixturevalue(world)
    for runs in results:
        whole = runs["whole"]
        assert len(whole.steps()) == 5
        resumed = runs["continued"]
        assert resumed.steps(after=3) == whole.steps(after=3)
        assert resumed.random == whole.random
        assert_equal_weights(resumed.weights, whole.weights)
    assert [step for _, step in results[0]["continued"].steps("loss", "step")] == [4, 5]  # it did not begin anew


@pytest.mark.parametrize("name", ["gpt2 b", "gpt2 auto"])
def test_checkpoint_resumes_under_another_plan(ranks, name):
    for runs in ranks[1]:
        assert_same_steps(runs[name], runs["gpt2"], after=3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["phi3 shuffled", "llama_tied zero2", "llama b"])
def test_more_checkpoints_resume_under_another_plan(more_ranks, name):
    for runs in more_ranks[1]:
        assert_same_steps(runs[name], runs[name.split()[0]], after=3)


def test_plan_of_the_checkpoint_is_used_unless_another_one_is_given(ranks):
    runs = ranks[1][0]
    assert runs["gpt2 auto"].result.layers == FIRST.layers
    assert runs["gpt2 auto"].result.embedding == FIRST.embedding
    assert runs["gpt2 b"].result.layers == SECOND.layers


@pytest.mark.parametrize("family", FAMILIES_AND_SLOW)
def test_checkpoint_of_plain_trainer_resumes_under_a_plan(request, plain, family):
    for runs in runs_of(request, family)[1]:
        assert_same_steps(runs[f"{family} plain"], plain[1][family], after=3)


@pytest.mark.parametrize("family", FAMILIES_AND_SLOW)
def test_checkpoint_of_ranks_resumes_on_one_process(request, tmp_path, family):
    folder, (whole, *_) = runs_of(request, family)
    checkpoint = folder / family / "checkpoint-3"
    seen = run(tmp_path, options=options_of(family, ALONE), resume=checkpoint, **of(family))
    assert_same_steps(seen, whole[family], after=3)


def test_one_process_continues_the_generators_of_rank_0(ranks, tmp_path):
    checkpoint = ranks[0] / "gpt2" / "checkpoint-3"
    saved = json.loads((checkpoint / "rng_state_0.json").read_text())
    assert not (checkpoint / "rng_state.pth").exists()
    made = trainer(tmp_path)
    made._load_rng_state(str(checkpoint))
    assert torch.get_rng_state().numpy().tobytes() == base64.b64decode(saved["torch"])


def test_checkpoint_resumes_on_two_ranks(ranks, tmp_path):
    folder, (whole, *_) = ranks

    def work() -> dict[str, Run]:
        checkpoint = folder / "gpt2" / "checkpoint-3"
        # The checkpoint's plan is for four ranks: "auto" makes another one.
        return {
            name: run(tmp_path / name, plan, family="gpt2", options=RESUMED, resume=checkpoint)
            for name, plan in {"given": plan_for_ranks(2), "auto": "auto"}.items()
        }

    for runs in on_ranks(work, 2):
        for seen in runs.values():
            assert_same_steps(seen, whole["gpt2"], after=3)


@pytest.mark.slow
def test_checkpoint_resumes_on_eight_ranks(ranks, tmp_path):
    folder, (whole, *_) = ranks

    def work() -> Run:
        checkpoint = folder / "gpt2" / "checkpoint-3"
        return run(tmp_path, plan_for_ranks(8), family="gpt2", options=ALONE, resume=checkpoint)

    for seen in on_ranks(work, 8):
        assert_same_steps(seen, whole["gpt2"], after=3)


def test_state_of_a_scheduler_that_looks_at_the_evaluation(ranks):
    """Its rate fell before and after the checkpoint, so the tests of Llama above have seen it go on."""
    folder, (whole, *_) = ranks
    rates = [rate for (rate,) in whole["llama"].steps("learning_rate")]
    assert rates[0] > rates[2] > rates[-1]

    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    for family in ("llama", "gpt2"):
        json.loads((folder / family / "checkpoint-3" / "scheduler.json").read_text(), parse_constant=refuse)


def test_own_state_is_read_without_unpickling(ranks, tmp_path, monkeypatch):
    folder, (whole, *_) = ranks

    def refuse(*args, **kwargs):
        raise AssertionError("a pickle is read")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "load", refuse)
        patch.setattr(pickle, "load", refuse)
        patch.setattr(pickle, "Unpickler", refuse)
        seen = run(tmp_path, family="gpt2", options=ALONE, resume=folder / "gpt2" / "checkpoint-3")
    assert_same_steps(seen, whole["gpt2"], after=3)


@pytest.mark.slow
def test_checkpoint_of_the_model_alone(plain, more_ranks):
    folder, (runs, *_) = more_ranks
    assert_same_steps(runs["fresh"], plain[1]["fresh"], after=3)
    # An optimizer that starts anew is seen in the losses, so that the other tests would see a lost state.
    assert runs["fresh"].steps()[-1] != pytest.approx(runs["only_model"].steps()[-1], rel=1e-3)
    files = {path.name for path in (folder / "only_model" / "checkpoint-3").iterdir()}
    plain_files = {path.name for path in (plain[0] / "only_model" / "checkpoint-3").iterdir()}
    assert files == plain_files | {"parallel_plan.json", "manifest.json"}


@pytest.mark.slow
def test_only_as_many_checkpoints_are_kept_as_asked(more_ranks):
    folders = sorted(path.name for path in (more_ranks[0] / "limited").glob("checkpoint-*"))
    assert folders == ["checkpoint-2", "checkpoint-3"]


def test_best_model_is_loaded_at_the_end(ranks):
    for runs in ranks[1]:
        checkpoint, loss, best = runs["best"].result
        assert Path(checkpoint).name != "checkpoint-3"
        assert loss == pytest.approx(best, rel=1e-6)
        assert_equal_weights(runs["best"].weights, load_file(Path(checkpoint) / "model.safetensors"))
