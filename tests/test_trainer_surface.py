# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Everything that people override or set on a Trainer: each method of Trainer is called under a plan as it is without
one, or refused at construction; each training argument has its row.
"""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
from transformers import Trainer

from galvatron_hf import GalvatronMixin
from galvatron_hf.trainer.overrides import NEVER_CALLED
from oracle import Rows
from plans import light_plan
from trainer_runs import on_ranks, run


METHODS = sorted(
    name
    for name, value in vars(Trainer).items()
    if inspect.isfunction(value) and name != "__init__" and not isinstance(value, property)
)
# Methods that plain Trainer does not call in the scenario below.
NOT_IN_THE_SCENARIO = {
    *("_defer_fsdp_gradient_reduction", "_sync_replicated_trainable_parameters", "_mixed_mesh_grad_norm"),
    *("_push_from_checkpoint", "push_to_hub", "init_hf_repo", "create_model_card", "end"),
    *("_tune_save_checkpoint", "hyperparameter_search", "call_model_init", "_update_auto_batch_size"),
    *("_remove_unused_columns", "create_optimizer_and_scheduler", "pop_callback"),
    *("get_learning_rates", "get_num_trainable_parameters", "get_optimizer_group"),
    *("log_metrics", "metrics_format", "save_metrics", "save_state"),
}
SEEN = dict(
    max_steps=2,
    eval_strategy="steps",
    eval_steps=1,
    save_strategy="steps",
    save_steps=1,
    load_best_model_at_end=True,
    include_num_input_tokens_seen="all",
)


def recording(name: str, base: type[Trainer], calls: list[str]) -> type[Trainer]:
    """Returns a class above `base` that notes each call of a method and passes it on."""

    def method(self, *args, **kwargs):
        calls.append(name)
        return getattr(super(kind, self), name)(*args, **kwargs)

    kind = type("Recording", (base,), {name: method, "__module__": __name__})  # `method` calls what is above it
    return kind


def scenario(folder: Path, plan, trainer_class: type[Trainer]) -> None:
    """Trains with evaluation and checkpoints, saves, predicts, and resumes from the first checkpoint."""
    options = dict(options=SEEN, trainer_class=trainer_class, eval_dataset=Rows(4, seed=2))

    def then(made: Trainer) -> None:
        made.save_model(str(folder / "saved"))
        made.predict(Rows(4, seed=3))

    run(folder, plan, then=then, **options)
    run(folder, plan, resume=folder / "checkpoint-1", **options)


def test_every_method_of_trainer_has_its_row():
    assert set(METHODS) >= NEVER_CALLED.keys() | NOT_IN_THE_SCENARIO
    for name, reason in NEVER_CALLED.items():
        assert "; " in reason, name


def recording_all(names: list[str], calls: list[str]) -> type[Trainer]:
    kind: type[Trainer] = Trainer
    for name in names:
        kind = recording(name, kind, calls)
    return kind


def called_without_a_plan(folder: Path) -> set[str]:
    calls: list[str] = []
    scenario(folder, "auto", recording_all(METHODS, calls))
    return set(calls)


TOGETHER = 6  # methods that are overridden at once


def check_methods(names: list[str], folder: Path) -> None:
    """Overrides a few methods at a time: each is called under a plan. One that a plan never calls is overridden by
    itself, and refused at construction with the way out.
    """
    refused = [[name] for name in names if name in NEVER_CALLED]
    called = [name for name in names if name not in NEVER_CALLED]
    groups = refused + [called[start : start + TOGETHER] for start in range(0, len(called), TOGETHER)]

    def work() -> dict[str, str]:
        wrong = {}
        for number, group in enumerate(groups):
            calls: list[str] = []
            outcome, kind = "not called", recording_all(group, calls)
            overriding = type("Galvatron", (GalvatronMixin, kind), {"__module__": __name__})
            try:
                scenario(folder / str(number), light_plan(2), overriding)
            except ValueError as error:
                outcome = str(error)
            for name in group:
                if name in NEVER_CALLED:
                    if f"overrides {name}, which a plan never calls" not in outcome:
                        wrong[name] = outcome
                elif name not in calls or outcome != "not called":
                    wrong[name] = outcome
        return wrong

    first, second = on_ranks(work, 2)
    assert first == {}
    assert {name: outcome for name, outcome in second.items() if outcome != "not called"} == {}  # rank 0 saves alone


# The methods that people override most, and those that were not called once.
FAST = [
    *("training_step", "prediction_step", "get_batch_samples", "save_model", "_save_checkpoint", "_save"),
    *("_load_best_model", "_load_from_checkpoint", "_load_optimizer_and_scheduler", "_clip_grad_norm"),
    *("compute_loss_context_manager", "_save_rng_state"),
]


def test_methods_that_people_override_are_called_or_refused(tmp_path):
    check_methods(FAST, tmp_path)


@pytest.mark.slow
def test_every_method_that_plain_trainer_calls_is_called_or_refused(tmp_path):
    called = called_without_a_plan(tmp_path / "plain")
    assert set(METHODS) - called == NOT_IN_THE_SCENARIO, "this version of Trainer has other methods"
    check_methods(sorted(called | NEVER_CALLED.keys()), tmp_path)
