# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Short training runs for the tests of what surrounds training: checkpoints, saving, callbacks, searches."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from transformers import PreTrainedModel, PrinterCallback, Trainer, TrainerCallback

from equivalence import whole_weights
from galvatron_hf import GalvatronTrainer, GalvatronTrainingArguments, ParallelPlan
from oracle import Rows, collate
from ranks import run_ranks
from tiny_models import FAMILIES


GLOBAL_BATCH = 8
RELATIVE = 1e-5


class Logs(TrainerCallback):
    """Keeps all logged values."""

    def __init__(self):
        self.all: list[dict[str, Any]] = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.all.append({**logs, "step": state.global_step})


class StopAt(TrainerCallback):
    """Ends training after a step, as an interruption does."""

    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step >= self.step


@dataclass(kw_only=True)
class Run:
    """Holds the results of a run.

    Attributes:
        logs (`list[dict]`): what was logged at the steps.
        weights (`dict`): all weights at the end.
        random (`float`): the next number of the generator.
        result (`Any`): of `then`.
    """

    logs: list[dict[str, Any]]
    weights: dict[str, torch.Tensor]
    random: float
    result: Any = None

    def steps(self, *names: str, after: int = 0) -> list[tuple]:
        """Returns the named values at every step after one."""
        names = names or ("loss", "grad_norm", "learning_rate")
        return [tuple(log[n] for n in names) for log in self.logs if names[0] in log and log["step"] > after]


def arguments(folder: str | Path, **options: Any) -> GalvatronTrainingArguments:
    """Returns arguments for six steps of eight rows, on as many processes as there are."""
    args = GalvatronTrainingArguments(
        **(
            dict(
                output_dir=str(folder),
                use_cpu=True,
                max_steps=6,
                logging_steps=1,
                learning_rate=1e-2,
                weight_decay=0.1,
                max_grad_norm=0.8,
                adam_epsilon=1e-3,  # without it AdamW turns rounding errors of tiny gradients into steps
                report_to=[],
                save_strategy="no",
                disable_tqdm=True,
                seed=5,
                # of each process, whatever their number: two batches make a step
                gradient_accumulation_steps=2,
                per_device_train_batch_size=1,
            )
            | options
        )
    )
    if "per_device_train_batch_size" not in options:
        args.per_device_eval_batch_size = GLOBAL_BATCH // args.world_size
        args.per_device_train_batch_size = GLOBAL_BATCH // args.world_size // args.gradient_accumulation_steps
    return args


def trainer(
    folder: str | Path,
    plan: ParallelPlan | str = "auto",
    *,
    family: str = "llama",
    model: PreTrainedModel | str | Path | None = None,
    trainer_class: type[Trainer] = GalvatronTrainer,
    options: dict[str, Any] | None = None,
    **more: Any,
) -> Trainer:
    """Returns a Trainer of a tiny model; `options` are training arguments, `more` are the Trainer's own."""
    warnings.simplefilter("ignore")
    GradientState._reset_state()
    args = arguments(folder, parallel_plan=plan, **(options or {}))
    more = {"train_dataset": Rows(27), "data_collator": collate} | more
    if "model_init" not in more:
        more["model"] = model or FAMILIES[family].build()
    made = trainer_class(args=args, **more)
    made.remove_callback(PrinterCallback)
    return made


def run(
    folder: str | Path,
    plan: ParallelPlan | str = "auto",
    *,
    resume: str | bool | None = None,
    then: Callable[[Trainer], Any] | None = None,
    callbacks: tuple[TrainerCallback, ...] = (),
    **more: Any,
) -> Run:
    """Trains on every rank that calls it, and returns the results."""
    logs = Logs()
    made = trainer(folder, plan, callbacks=[logs, *callbacks], **more)
    made.train(resume_from_checkpoint=None if resume is None else resume if resume is True else str(resume))
    random = float(torch.rand(()))
    result = then(made) if then else None
    given = more.get("model")
    plain = given if isinstance(given, PreTrainedModel) else FAMILIES[more.get("family", "llama")].build()
    return Run(logs=logs.all, weights=whole_weights(made.model, plain), random=random, result=result)


def on_ranks(work: Callable[[], Any], world_size: int = 4) -> list[Any]:
    """Runs `work` on ranks, forgetting what a Trainer in this process has set up."""
    AcceleratorState._reset_state(True)
    return run_ranks(work, world_size)


def assert_same_steps(seen: Run, wanted: Run, after: int = 0, names: tuple[str, ...] = ()) -> None:
    """Checks that losses, norms and rates of all steps after one agree to 1e-5."""
    seen_steps, wanted_steps = seen.steps(*names, after=after), wanted.steps(*names, after=after)
    assert len(wanted_steps) > 0
    assert len(seen_steps) == len(wanted_steps)
    for step, (own, other) in enumerate(zip(seen_steps, wanted_steps, strict=True), after + 1):
        assert own == pytest.approx(other, rel=RELATIVE), f"step {step}"


def assert_equal_weights(seen: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert seen.keys() == wanted.keys()
    different = [name for name in wanted if not torch.equal(seen[name], wanted[name])]
    assert not different, different
