# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""GalvatronTrainer with pipeline stages is plain Trainer on one process: training, evaluation, saving, resuming."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM, Trainer

from custom_losses import calls_super, sum_of_losses
from galvatron_hf import GalvatronTrainer
from oracle import Case, Rows, Stream, check_cases
from plans import light_plan, pipeline_plans
from ranks import run_ranks
from test_trainer_evaluation import evaluate, keep, predict, three_sets
from tiny_models import FAMILIES
from trainer_runs import Run, assert_equal_weights, assert_same_steps, on_ranks, run, trainer


PLANS = pipeline_plans()
EVALUATED = dict(trainer=dict(eval_dataset=lambda: Rows(10, seed=2)))


def evaluating(**options: Any) -> dict[str, Any]:
    return dict(eval_strategy="steps", eval_steps=2, **options)


# 27 rows are ragged: the last step of an epoch has 3, fewer than there are ranks and than there are micro-batches.
def test_trains_as_one_process():
    check_cases(
        {
            "1f1b": Case(plan=PLANS["1f1b_mixed"], **EVALUATED, options=evaluating()),
            "uneven": Case(plan=PLANS["1f1b_uneven"], family="gpt2", options=dict(gradient_accumulation_steps=3)),
            "interleaved": Case(
                plan=PLANS["interleaved"], family="llama_tied", **EVALUATED, options=evaluating(max_grad_norm=1e-2)
            ),
            "four": Case(
                plan=PLANS["1f1b_of_four"],
                options=dict(optim="adamw_torch", lr_scheduler_type="cosine", learning_rate=1e-2, weight_decay=0.5),
                updates=False,
            ),
            "zero_bubble": Case(plan=PLANS["zero_bubble_v"], **EVALUATED, options=evaluating(max_steps=4)),
        },
    )


def test_epochs_counters_and_events():
    check_cases(
        {
            "epochs": Case(
                plan=PLANS["1f1b_mixed"], options=dict(max_steps=-1, num_train_epochs=2.5, max_grad_norm=0.0)
            ),
            "few_rows": Case(plan=PLANS["gpipe"], train=lambda: Rows(2), options=dict(max_steps=2)),
            "stream": Case(plan=PLANS["1f1b_of_four"], train=lambda: Stream(13), options=dict(max_steps=5)),
            "counters": Case(
                plan=PLANS["1f1b_uneven"],
                accumulates=True,
                **EVALUATED,
                options=evaluating(
                    include_num_input_tokens_seen="all",
                    eval_on_start=True,
                    save_strategy="steps",
                    save_steps=3,
                    max_steps=6,  # beyond the first epoch
                ),
            ),
        },
    )


def test_a_loss_function_of_the_users_own_and_label_smoothing():
    own = EVALUATED["trainer"] | dict(compute_loss_func=lambda: sum_of_losses)
    check_cases(
        {
            "1f1b": Case(plan=PLANS["1f1b_mixed"], trainer=own, options=evaluating(max_steps=3)),
            "zero_bubble": Case(plan=PLANS["zero_bubble"], trainer=own, options=evaluating(max_steps=2)),
            "mean": Case(
                plan=PLANS["1f1b_of_four"],
                trainer=EVALUATED["trainer"] | dict(compute_loss_func=lambda: mean_of_own_targets),
                options=evaluating(max_steps=3),
            ),
            "smoothing": Case(
                plan=PLANS["1f1b_uneven"], **EVALUATED, options=evaluating(max_steps=3, label_smoothing_factor=0.2)
            ),
        },
    )


def mean_of_own_targets(outputs, labels, num_items_in_batch=None):
    return torch.nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())


def test_a_compute_loss_of_the_users_own_is_refused(tmp_path):
    def work() -> str:
        with pytest.raises(ValueError) as refused:
            trainer(tmp_path, PLANS["gpipe"], trainer_class=calls_super(GalvatronTrainer))
        return str(refused.value)

    for message in on_ranks(work):
        assert message.startswith("Scaled overrides compute_loss") and "pass compute_loss_func" in message


def test_calling_the_model_is_refused_with_the_way_out(tmp_path):
    def work() -> str:
        made = trainer(tmp_path, PLANS["gpipe"])
        made.ensure_parallel()
        with pytest.raises(ValueError) as refused:
            made.model(input_ids=torch.ones(4, 4, dtype=torch.long))
        return str(refused.value)

    assert all("2 pipeline stages" in message and "evaluate" in message for message in on_ranks(work))


def untrained(plan, after=evaluate, **changes) -> Case:
    options = keep(eval_dataset=lambda: Rows(10, seed=2)) | changes.pop("trainer", {})
    return Case(plan=plan, train=None, trainer=options, after=after, **changes)


PREDICTING = ("gpipe", "1f1b_uneven", "interleaved_apart", "zero_bubble_v")


@pytest.mark.slow
def test_predictions_under_every_other_plan_are_those_of_one_process():
    plans = {name: plan for name, plan in PLANS.items() if name not in PREDICTING}
    check_cases({name: untrained(plan, predict(lambda: Rows(7, seed=3))) for name, plan in plans.items()})


def test_metrics_see_the_arrays_of_one_process():
    cases = {name: untrained(PLANS[name], predict(lambda: Rows(7, seed=3))) for name in PREDICTING}
    cases |= {
        "sets": untrained(PLANS["1f1b_mixed"], trainer=keep(eval_dataset=three_sets)),
        "no_labels": untrained(
            PLANS["1f1b_uneven"], trainer=keep(eval_dataset=lambda: Rows(5, labels=False)), family="gpt2"
        ),
        "two_a_rank": untrained(PLANS["1f1b_of_four"], options=dict(per_device_eval_batch_size=2)),
        "by_batch": untrained(PLANS["interleaved"], options=dict(batch_eval_metrics=True)),
        "included": untrained(PLANS["1f1b_mixed"], options=dict(include_for_metrics=["inputs", "loss"])),
        "loss_only": untrained(PLANS["1f1b_mixed"], options=dict(prediction_loss_only=True)),
    }
    check_cases(cases)


# ---- Saving and resuming ----

SAVING = dict(save_strategy="steps", save_steps=3, max_steps=5, lr_scheduler_type="cosine", warmup_steps=2)
RESUMED = SAVING | dict(save_strategy="no")
ALONE = SAVING | dict(gradient_accumulation_steps=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("pipeline")


@pytest.fixture(scope="module")
def plain(folder) -> dict[str, Run]:
    """Whole runs of plain Trainer, with a checkpoint after step 3."""
    return {
        family: run(folder / f"plain_{family}", family=family, options=ALONE, trainer_class=Trainer)
        for family in ("gpt2", "llama_tied")
    }


@pytest.fixture(scope="module")
def ranks(folder, plain) -> list[dict[str, Run]]:
    """Runs of four ranks, in one world: from "a" to "b" resumes under b what a has saved."""
    flat = light_plan()

    def resumed(name: str, family: str, plan, source: str, **more: Any) -> Run:
        checkpoint = folder / source / "checkpoint-3"
        return run(folder / name, plan, family=family, options=RESUMED, resume=checkpoint, **more)

    def work() -> dict[str, Run]:
        whole = dict(family="gpt2", options=SAVING)
        runs = {
            "gpt2 staged": run(folder / "gpt2_staged", PLANS["1f1b_uneven"], **whole),
            "gpt2 flat": run(folder / "gpt2_flat", flat, **whole),
            "tied staged": run(folder / "tied_staged", PLANS["interleaved"], family="llama_tied", options=SAVING),
        }
        runs["gpt2 staged to staged"] = resumed("r1", "gpt2", PLANS["1f1b_uneven"], "gpt2_staged")
        runs["gpt2 staged to flat"] = resumed("r2", "gpt2", flat, "gpt2_staged")
        runs["gpt2 flat to staged"] = resumed("r3", "gpt2", PLANS["1f1b_mixed"], "gpt2_flat")
        runs["gpt2 plain to staged"] = resumed("r4", "gpt2", PLANS["1f1b_of_four"], "plain_gpt2")
        runs["tied staged to returning"] = resumed("r5", "llama_tied", PLANS["zero_bubble_v"], "tied_staged")
        runs["tied plain to staged"] = resumed("r6", "llama_tied", PLANS["1f1b_mixed"], "plain_llama_tied")
        runs["tied staged to auto"] = resumed(
            "r7", "llama_tied", "auto", "tied_staged", then=lambda made: made.parallel.plan
        )
        return runs

    return on_ranks(work)


def test_whole_runs_are_those_of_one_process(ranks, plain):
    for runs in ranks:
        for name, family in {"gpt2 staged": "gpt2", "tied staged": "llama_tied"}.items():
            assert_same_steps(runs[name], plain[family])


@pytest.mark.parametrize("source", ["gpt2 staged", "gpt2 flat", "gpt2 plain", "tied staged", "tied plain"])
def test_checkpoints_resume_under_other_plans(ranks, plain, source):
    wanted = plain["gpt2" if source.startswith("gpt2") else "llama_tied"]
    for runs in ranks:
        names = [name for name in runs if name.startswith(f"{source} to")]
        assert names
        for name in names:
            assert_same_steps(runs[name], wanted, after=3)


def test_the_same_plan_goes_on_bit_for_bit(ranks):
    for runs in ranks:
        resumed, whole = runs["gpt2 staged to staged"], runs["gpt2 staged"]
        assert resumed.steps(after=3) == whole.steps(after=3)
        assert_equal_weights(resumed.weights, whole.weights)


def test_auto_takes_the_plan_of_the_checkpoint(ranks):
    assert ranks[0]["tied staged to auto"].result.stages == PLANS["interleaved"].stages


@pytest.mark.parametrize("family, source", [("gpt2", "gpt2_staged"), ("llama_tied", "tied_staged")])
def test_checkpoints_resume_on_one_process(ranks, plain, folder, tmp_path, family, source):
    seen = run(tmp_path, family=family, options=ALONE, resume=folder / source / "checkpoint-3")
    assert_same_steps(seen, plain[family], after=3)


def test_the_saved_model_opens_with_plain_transformers(ranks, folder):
    model = LlamaForCausalLM.from_pretrained(folder / "tied_staged" / "checkpoint-3")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    weights = dict(FAMILIES["llama_tied"].build().named_parameters())
    assert dict(model.named_parameters()).keys() == weights.keys()
    assert all(not torch.equal(parameter, weights[name]) for name, parameter in model.named_parameters())


def test_generates_as_the_whole_model(tmp_path):
    prompt = torch.tensor([[5, 6, 7, 8]])
    wanted = FAMILIES["llama_tied"].build().eval().generate(prompt, max_new_tokens=5, do_sample=False)

    def work() -> np.ndarray:
        made = trainer(tmp_path, PLANS["interleaved"], family="llama_tied")
        return made.generate(prompt, max_new_tokens=5, do_sample=False).numpy()

    for tokens in on_ranks(work):
        assert np.array_equal(tokens, wanted.numpy())


def only_the_head():
    model = FAMILIES["llama"].build()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("lm_head"))
    return model


def test_frozen_stages_log_and_resume_as_one_process(tmp_path):
    """On three of the four ranks nothing is trained, and the optimizer's groups are empty."""
    model = only_the_head()
    wanted = run(tmp_path / "plain", model=model, options=ALONE, trainer_class=Trainer)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)

    def work() -> tuple[Run, Run]:
        plan, checkpoint = PLANS["1f1b_of_four"], tmp_path / "whole" / "checkpoint-3"
        whole = run(tmp_path / "whole", plan, model=only_the_head(), options=SAVING)
        counted = dict(then=lambda made: made.get_num_trainable_parameters())
        return whole, run(
            tmp_path / "resumed", plan, model=only_the_head(), options=RESUMED, resume=checkpoint, **counted
        )

    for whole, resumed in on_ranks(work):
        assert_same_steps(whole, wanted)
        assert_same_steps(resumed, wanted, after=3)
        assert resumed.result == trained


class EmbeddingsLearnSlowly(GalvatronTrainer):
    def create_optimizer(self, model=None):
        groups = {True: [], False: []}
        for name, parameter in self.model.named_parameters():
            groups["embed" in name].append(parameter)
        options = ({"params": groups[True], "lr": 0.05}, {"params": groups[False]})
        self.optimizer = torch.optim.SGD([group for group in options if group["params"]], lr=0.2)
        return self.optimizer


def test_an_optimizer_that_tells_the_copies_of_a_tied_weight_apart_is_refused(tmp_path):
    def work() -> str:
        made = trainer(tmp_path, PLANS["1f1b_mixed"], family="llama_tied", trainer_class=EmbeddingsLearnSlowly)
        with pytest.raises(ValueError) as refused:
            made.train()
        return str(refused.value)

    for message in on_ranks(work):
        assert message.startswith("model.embed_tokens.weight and lm_head.weight are one weight")


class FlatList(GalvatronTrainer):
    def create_optimizer(self, model=None):
        self.optimizer = torch.optim.SGD([p for p in self.model.parameters() if p.requires_grad], lr=0.2)
        return self.optimizer


def test_an_optimizer_of_nothing_is_refused_with_the_way_out(tmp_path):
    def work() -> str:
        made = trainer(tmp_path, PLANS["1f1b_of_four"], model=only_the_head(), trainer_class=FlatList)
        made.train()

    with pytest.raises(AssertionError, match=r"(?s)Nothing is trained in the stages of rank \d, .* may be empty"):
        on_ranks(work)


def test_a_trace_is_written_where_the_environment_asks(tmp_path, monkeypatch):
    monkeypatch.setenv("GALVATRON_TRACE", str(tmp_path / "trace"))

    def work() -> None:
        run(tmp_path / "out", PLANS["gpipe"], options=dict(max_steps=2))

    on_ranks(work)
    events = json.loads((tmp_path / "trace" / "timeline.json").read_text())["traceEvents"]
    computed = [event for event in events if event["ph"] == "X" and event["cat"] == "compute"]
    # Two steps of four micro-batches, forward and backward, on four ranks.
    assert len(computed) == 2 * 4 * 2 * 4
    assert len({event["pid"] for event in computed}) == 4


def test_a_rank_that_fails_in_a_step_ends_the_others_with_its_traceback(tmp_path):
    plan = PLANS["1f1b_mixed"]

    def work() -> None:
        from galvatron_hf.parallel.pipeline.runtime import Pipeline

        made = trainer(tmp_path, plan)
        made.ensure_parallel()
        if torch.distributed.get_rank() == 3:
            Pipeline._backward = lambda *unused: (_ for _ in ()).throw(RuntimeError("this rank fails in mid-step"))
        made.train()

    with pytest.raises(AssertionError, match="(?s)Rank 3 failed.*this rank fails in mid-step"):
        run_ranks(work, 4)
