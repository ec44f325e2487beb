# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""GalvatronTrainer with pipeline stages is plain Trainer on one process: training, evaluation, saving, resuming."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM, Trainer

from custom_losses import calls_super, sum_of_losses
from galvatron_hf import GalvatronTrainer
from galvatron_hf.plan import LayerStrategy
from oracle import Case, Rows, Stream, check_cases
from plans import mixed_plans, pipeline_plans, pipelined
from ranks import run_ranks
from test_trainer_evaluation import evaluate, keep, predict, three_sets
from tiny_models import FAMILIES
from trainer_runs import Run, StopAt, assert_equal_weights, assert_same_steps, on_ranks, run, trainer


PLANS = pipeline_plans()
ADAMW = dict(optim="adamw_torch", lr_scheduler_type="cosine", learning_rate=1e-2, weight_decay=0.5)
EVALUATED = dict(trainer=dict(eval_dataset=lambda: Rows(10, seed=2)))


def evaluating(**options: Any) -> dict[str, Any]:
    return dict(eval_strategy="steps", eval_steps=2, **options)


def measured(eval_dataset=lambda: Rows(10, seed=2), **options: Any) -> dict[str, Any]:
    return keep(eval_dataset=eval_dataset, **options)


def predicted(test_dataset: Callable[[], Any] = lambda: Rows(7, seed=3)) -> Callable[[Trainer], Any]:
    """Returns a function that evaluates, and then predicts."""
    return lambda trainer: [evaluate(trainer), predict(test_dataset)(trainer)]


def generated(trainer: Trainer) -> np.ndarray:
    generate = trainer.generate if isinstance(trainer, GalvatronTrainer) else trainer.model.eval().generate
    return generate(torch.tensor([[5, 6, 7, 8]]), max_new_tokens=5, do_sample=False).numpy()


# 27 and 11 rows are ragged: the last step of an epoch has 3, fewer than there are ranks and than micro-batches.
def test_trains_evaluates_and_generates_as_one_process():
    check_cases(
        {
            "1f1b": Case(
                plan=PLANS["1f1b_uneven"],
                accumulates=True,
                trainer=measured(),
                before=predicted(),
                options=evaluating(
                    include_num_input_tokens_seen="all",
                    include_for_metrics=["inputs", "loss"],
                    eval_on_start=True,
                    save_strategy="steps",
                    save_steps=3,
                    max_steps=6,  # beyond the first epoch
                ),
            ),
            "interleaved": Case(
                plan=PLANS["interleaved"],
                family="llama_tied",
                train=lambda: Rows(11),
                trainer=measured(),
                before=lambda trainer: [predicted()(trainer), generated(trainer)],
                options=evaluating(batch_eval_metrics=True, max_grad_norm=1e-2, num_train_epochs=2.5, max_steps=-1),
            ),
        },
    )


@pytest.mark.slow
def test_few_rows_and_a_stream_of_rows():
    check_cases(
        {
            "few_rows": Case(
                plan=PLANS["gpipe"],
                train=lambda: Rows(2),
                trainer=measured(three_sets),
                before=predicted(),
                options=dict(max_steps=2),
            ),
            # 4, 4 | 4, 1: the data ends inside the second step of each pass.
            "stream": Case(
                plan=PLANS["1f1b_of_four"],
                train=lambda: Stream(13),
                accumulates=True,
                trainer=measured(compute_loss_func=lambda: mean_of_own_targets),
                before=evaluate,
                options=evaluating(max_steps=3, per_device_eval_batch_size=2, **ADAMW),
                updates=False,
            ),
        },
    )


@pytest.mark.slow
def test_a_loss_function_of_the_users_own_and_label_smoothing():
    own = dict(compute_loss_func=lambda: sum_of_losses)
    check_cases(
        {
            "1f1b": Case(
                plan=PLANS["1f1b_mixed"],
                accumulates=True,
                train=lambda: Rows(11),
                override=calls_super,
                trainer=measured(),
                before=evaluate,
                options=evaluating(max_steps=3, prediction_loss_only=True, max_grad_norm=0.0),
            ),
            "zero_bubble": Case(
                plan=PLANS["zero_bubble_v"],
                accumulates=True,
                trainer=measured(**own),
                before=predicted(),
                options=evaluating(max_steps=2),
            ),
            "smoothing": Case(
                plan=PLANS["1f1b_uneven"],
                family="gpt2",
                train=lambda: Rows(15),
                trainer=measured(),
                before=predicted(lambda: Rows(5, labels=False)),
                options=evaluating(max_steps=2, label_smoothing_factor=0.2, gradient_accumulation_steps=3),
            ),
        },
    )


def mean_of_own_targets(outputs, labels, num_items_in_batch=None):
    return torch.nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())


@pytest.mark.slow
def test_predictions_and_a_loss_under_other_plans_are_those_of_one_process():
    seen = ("gpipe", "1f1b_uneven", "interleaved", "zero_bubble_v")  # by the fast tests
    plans = {name: plan for name, plan in PLANS.items() if name not in seen}
    cases = {
        name: Case(plan=plan, train=None, trainer=measured(), after=predict(lambda: Rows(7, seed=3)))
        for name, plan in plans.items()
    }
    own = EVALUATED["trainer"] | dict(compute_loss_func=lambda: sum_of_losses)
    cases["loss"] = Case(plan=PLANS["zero_bubble"], trainer=own, options=evaluating(max_steps=2))
    check_cases(cases)


@pytest.mark.slow
def test_more_plans_train_as_one_process():
    check_cases(
        {
            "1f1b": Case(plan=PLANS["1f1b_mixed"], **EVALUATED, options=evaluating(max_steps=6)),
            "epochs": Case(
                plan=PLANS["1f1b_mixed"], options=dict(max_steps=-1, num_train_epochs=2.5, max_grad_norm=0.0)
            ),
            "uneven": Case(
                plan=PLANS["1f1b_uneven"], family="gpt2", options=dict(gradient_accumulation_steps=3, max_steps=6)
            ),
            "four": Case(plan=PLANS["1f1b_of_four"], options=dict(max_steps=6, **ADAMW), updates=False),
            "zero_bubble": Case(plan=PLANS["zero_bubble_v"], **EVALUATED, options=evaluating(max_steps=4)),
        },
    )


# ---- What stages exclude ----

# For what is the same with more ranks.
PAIR = pipelined([(0,), (1,)], (LayerStrategy(),) * 4, "gpipe")


def refusal(work: Callable[[], Any]) -> str:
    with pytest.raises(ValueError) as refused:
        work()
    return str(refused.value)


class EmbeddingsLearnSlowly(GalvatronTrainer):
    def create_optimizer(self, model=None):
        groups = {True: [], False: []}
        for name, parameter in self.model.named_parameters():
            groups["embed" in name].append(parameter)
        options = ({"params": groups[True], "lr": 0.05}, {"params": groups[False]})
        self.optimizer = torch.optim.SGD([group for group in options if group["params"]], lr=0.2)
        return self.optimizer


def test_what_stages_exclude_is_refused_with_the_way_out(tmp_path):
    def work() -> str:
        apart = trainer(tmp_path, PAIR, family="llama_tied", trainer_class=EmbeddingsLearnSlowly)
        return refusal(apart.train)

    for copies_apart in on_ranks(work, 2):
        assert copies_apart.startswith("model.embed_tokens.weight and lm_head.weight are one weight")


# ---- Saving and resuming ----

# Two steps of the three of an epoch, then one more of it and one of the next.
SAVING = dict(save_strategy="steps", save_steps=2, max_steps=4, lr_scheduler_type="cosine", warmup_steps=2)
RESUMED = SAVING | dict(save_strategy="no")
ALONE = SAVING | dict(gradient_accumulation_steps=1)
SAVED = "checkpoint-2"
# What is saved and resumed does not depend on the number of micro-batches.
RESUMING = {
    name: replace(PLANS[name], micro_batches=2)
    for name in ("1f1b_uneven", "1f1b_mixed", "interleaved", "zero_bubble_v")
}


def rows() -> dict[str, Any]:
    return dict(train_dataset=Rows(19))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("pipeline")


@pytest.fixture(scope="module")
def plain(folder) -> dict[str, Run]:
    """Returns whole runs of plain Trainer, with a checkpoint after step 2."""
    return {
        family: run(folder / f"plain_{family}", family=family, options=ALONE, trainer_class=Trainer, **rows())
        for family in ("gpt2", "llama_tied")
    }


def resumed(folder: Path, name: str, family: str, plan, source: str, **more: Any) -> Run:
    checkpoint = folder / source / SAVED
    return run(folder / name, plan, family=family, options=RESUMED, resume=checkpoint, **rows(), **more)


def saved(folder: Path, name: str, family: str, plan, **more: Any) -> Run:
    return run(folder / name, plan, family=family, options=SAVING, **rows(), **more)


@pytest.fixture(scope="module")
def gpt2(folder, plain) -> list[dict[str, Run]]:
    """Returns runs of four ranks, from one world: "a to b" resumes under b what a has saved."""
    flat = replace(mixed_plans()["mixed_a"], micro_batches=1)

    def work() -> dict[str, Run]:
        runs = {"gpt2 staged": saved(folder, "gpt2_staged", "gpt2", RESUMING["1f1b_uneven"])}
        saved(folder, "gpt2_flat", "gpt2", flat, callbacks=(StopAt(2),))
        runs["gpt2 staged to auto"] = resumed(
            folder, "r1", "gpt2", "auto", "gpt2_staged", then=lambda made: made.parallel.plan
        )
        runs["gpt2 staged to flat"] = resumed(folder, "r2", "gpt2", flat, "gpt2_staged")
        runs["gpt2 flat to staged"] = resumed(folder, "r3", "gpt2", RESUMING["1f1b_mixed"], "gpt2_flat")
        return runs

    return on_ranks(work)


@pytest.fixture(scope="module")
def llama_tied(folder, plain) -> list[dict[str, Run]]:
    """Returns the same as `gpt2`, of a model whose embedding and head are one weight."""

    def work() -> dict[str, Run]:
        saved(folder, "tied_staged", "llama_tied", RESUMING["interleaved"], callbacks=(StopAt(2),))
        plans = {"staged to returning": "zero_bubble_v", "plain to staged": "1f1b_mixed"}
        sources = {"staged to returning": "tied_staged", "plain to staged": "plain_llama_tied"}
        return {
            f"llama_tied {name}": resumed(folder, name, "llama_tied", RESUMING[plans[name]], source)
            for name, source in sources.items()
        }

    return on_ranks(work)


@pytest.mark.slow
def test_a_whole_run_is_that_of_one_process(gpt2, plain):
    for runs in gpt2:
        assert_same_steps(runs["gpt2 staged"], plain["gpt2"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "source",
    [
        pytest.param("gpt2 staged", marks=pytest.mark.slow),
        pytest.param("gpt2 flat", marks=pytest.mark.slow),
        "llama_tied staged",
        "llama_tied plain",
    ],
)
def test_checkpoints_resume_under_other_plans(request, plain, source):
    family = source.split()[0]
    for runs in request.getfixturevalue(family):
        names = [name for name in runs if name.startswith(f"{source} to")]
        assert names
        for name in names:
            assert_same_steps(runs[name], plain[family], after=2)


@pytest.mark.slow
def test_a_checkpoint_of_plain_trainer_with_fused_weights_resumes_on_four_stages(folder, plain):
    plan = PLANS["1f1b_of_four"]
    for seen in on_ranks(lambda: resumed(folder, "r6", "gpt2", plan, "plain_gpt2")):
        assert_same_steps(seen, plain["gpt2"], after=2)


@pytest.mark.slow
def test_auto_takes_the_plan_of_the_checkpoint_and_goes_on_bit_for_bit(gpt2):
    for runs in gpt2:
        continued, whole = runs["gpt2 staged to auto"], runs["gpt2 staged"]
        assert replace(continued.result, precision=None) == RESUMING["1f1b_uneven"]
        assert continued.steps(after=2) == whole.steps(after=2)
        assert_equal_weights(continued.weights, whole.weights)


@pytest.mark.slow
@pytest.mark.parametrize(
    "family, source", [pytest.param("gpt2", "gpt2_staged", marks=pytest.mark.slow), ("llama_tied", "tied_staged")]
)
def test_checkpoints_resume_on_one_process(request, plain, folder, tmp_path, family, source):
    request.getfixturevalue(family)
    seen = run(tmp_path, family=family, options=ALONE, resume=folder / source / SAVED, **rows())
    assert_same_steps(seen, plain[family], after=2)


def test_the_saved_model_opens_with_plain_transformers(llama_tied, folder):
    model = LlamaForCausalLM.from_pretrained(folder / "tied_staged" / SAVED)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    weights = dict(FAMILIES["llama_tied"].build().named_parameters())
    assert dict(model.named_parameters()).keys() == weights.keys()
    assert all(not torch.equal(parameter, weights[name]) for name, parameter in model.named_parameters())


def only_the_head():
    model = FAMILIES["llama"].build()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("lm_head"))
    return model


@pytest.mark.parametrize(
    "plan", [PAIR, pytest.param(PLANS["1f1b_of_four"], marks=pytest.mark.slow)], ids=["two", "four"]
)
def test_frozen_stages_log_and_resume_as_one_process(tmp_path, plan):
    """Trains the head alone: on all ranks but one the optimizer's groups are empty."""
    model = only_the_head()
    wanted = run(tmp_path / "plain", model=model, options=ALONE, trainer_class=Trainer, **rows())
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)

    def work() -> tuple[Run, Run]:
        checkpoint = tmp_path / "whole" / SAVED
        whole = run(tmp_path / "whole", plan, model=only_the_head(), options=SAVING, **rows())
        counted = dict(then=lambda made: made.get_num_trainable_parameters())
        return whole, run(
            tmp_path / "resumed", plan, model=only_the_head(), options=RESUMED, resume=checkpoint, **rows(), **counted
        )

    for whole, continued in on_ranks(work, plan.world_size):
        assert_same_steps(whole, wanted)
        assert_same_steps(continued, wanted, after=2)
        assert continued.result == trained


class FlatList(GalvatronTrainer):
    def create_optimizer(self, model=None):
        self.optimizer = torch.optim.SGD([p for p in self.model.parameters() if p.requires_grad], lr=0.2)
        return self.optimizer


def test_an_optimizer_of_nothing_is_refused_with_the_way_out(tmp_path):
    def work() -> None:
        made = trainer(tmp_path, PAIR, model=only_the_head(), trainer_class=FlatList)
        made.train()

    with pytest.raises(AssertionError, match=r"(?s)Nothing is trained in the stages of rank 0, .* may be empty"):
        on_ranks(work, 2)


def test_a_trace_is_written_where_the_environment_asks(tmp_path, monkeypatch):
    monkeypatch.setenv("GALVATRON_TRACE", str(tmp_path / "trace"))

    def work() -> None:
        run(tmp_path / "out", PAIR, options=dict(max_steps=2))

    on_ranks(work, 2)
    events = json.loads((tmp_path / "trace" / "timeline.json").read_text())["traceEvents"]
    computed = [event for event in events if event["ph"] == "X" and event["cat"] == "compute"]
    # Two steps of four micro-batches, forward and backward, on two ranks.
    assert len(computed) == 2 * 4 * 2 * 2
    assert len({event["pid"] for event in computed}) == 2


def test_a_rank_that_fails_in_a_step_ends_the_others_with_its_traceback(tmp_path):
    def work() -> None:
        from galvatron_hf.parallel.pipeline.runtime import Pipeline

        made = trainer(tmp_path, PAIR)
        made.ensure_parallel()
        if torch.distributed.get_rank() == 1:
            Pipeline._backward = lambda *unused: (_ for _ in ()).throw(RuntimeError("this rank fails in mid-step"))
        made.train()

    with pytest.raises(AssertionError, match="(?s)Rank 1 failed.*this rank fails in mid-step"):
        run_ranks(work, 2)
