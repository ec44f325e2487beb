# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The oracle of the trainer's tests: plain `transformers.Trainer` on one process whose batch is the global batch.

A [`Case`] says what is trained; [`run_oracle`] runs it before the ranks start and [`check_cases`] on the ranks, many
in one world, and compares what both saw.
"""

from __future__ import annotations

import functools
import math
import tempfile
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState
from transformers import PreTrainedModel, PrinterCallback, Trainer, TrainerCallback, TrainingArguments

import equivalence
from encoder_decoder_models import ENCODER_DECODERS
from galvatron_hf import GalvatronTrainer, GalvatronTrainingArguments, ParallelPlan
from ranks import run_ranks
from tiny_configurations import tiny_model
from tiny_models import ALL_FAMILIES, VOCABULARY


RELATIVE = 1e-5  # losses, norms, gradients
UPDATE = 1e-3  # each tensor's whole update under SGD
WORLD_SIZE = 4
PAD = 3

# Wall-clock, and where the plain Trainer prepared its model.
_TIMES = ("runtime", "per_second", "preparation_time")
# What is logged of the speed of steps beside what plain Trainer logs.
OF_PACE = ("step_ms", "mfu_percent", "peak_memory_gib", "predicted_memory_gib", "bubble_percent")
# What only packing logs.
_OF_PACKING = (
    "padding_percent",
    "imbalance",
    "planner_",
    "shared_tokens_percent",
    "group_ranks",
    "steps_with",
    "steps_under",
)
_EVENTS = [name for name in dir(TrainerCallback) if name.startswith("on_")]


class Rows(torch.utils.data.Dataset):
    """Holds rows of `shortest` to `longest` tokens, whose first two are no targets; `labels` may be left out."""

    def __init__(self, count: int, seed: int = 1, shortest: int = 4, longest: int = 11, labels: bool = True):
        draw = torch.Generator().manual_seed(seed)
        lengths = torch.randint(shortest, longest + 1, (count,), generator=draw).tolist()
        self.rows = [torch.randint(4, VOCABULARY, (length,), generator=draw) for length in lengths]
        self.labels = labels

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = self.rows[index]
        ignored = torch.arange(len(ids)) < 2
        return {"input_ids": ids} | ({"labels": ids.masked_fill(ignored, -100)} if self.labels else {})


class Stream(torch.utils.data.IterableDataset):
    """Yields the rows of [`Rows`], without a length."""

    def __init__(self, count: int, **options: Any):
        self.rows = Rows(count, **options)

    def __iter__(self):
        return iter(self.rows[index] for index in range(len(self.rows)))


def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Pads rows on the right; numbers become a tensor [B]."""
    fill = {"input_ids": PAD, "labels": -100}
    length = max(len(row["input_ids"]) for row in rows)
    batch = {
        name: torch.tensor([row[name] for row in rows])
        if isinstance(value, float)
        else torch.stack([_lengthen(torch.as_tensor(row[name]), length, fill[name]) for row in rows])
        for name, value in rows[0].items()
    }
    masks = [_lengthen(torch.ones(len(row["input_ids"]), dtype=torch.long), length, 0) for row in rows]
    return batch | {"attention_mask": torch.stack(masks)}


def _lengthen(row: torch.Tensor, length: int, value: int) -> torch.Tensor:
    return torch.nn.functional.pad(row, (0, length - len(row)), value=value)


class Recorder(TrainerCallback):
    """Records every event with its step, every log, and the gradients of the first step."""

    def __init__(self, plain: PreTrainedModel):
        self.plain, self.trainer = plain, None
        self.events: list[tuple[str, int]] = []
        self.logs: list[dict[str, Any]] = []
        self.gradients: dict[str, torch.Tensor] = {}

    def see(self, event: str, args, state, control, **seen) -> None:
        self.events.append((event, state.global_step))
        if event == "on_log":
            self.logs.append(dict(seen["logs"]))
        if event == "on_pre_optimizer_step" and not self.gradients:
            self.gradients = equivalence.whole_gradients(self.trainer.model, self.plain)


for _event in _EVENTS:
    setattr(Recorder, _event, functools.partialmethod(Recorder.see, _event))


@dataclass(frozen=True, kw_only=True)
class Case:
    """Describes a training run, and how far its results may differ from the oracle's.

    Attributes:
        plan ([`ParallelPlan`] or `str`): the plan of the ranks.
        family (`str`): of `FAMILIES`, `EXPERT_FAMILIES` or `ENCODER_DECODERS`, or a model type of transformers.
        build (`Callable`, *optional*): makes another model.
        train (`Callable`): makes the training set; None does not train.
        options (`dict`): training arguments beside the defaults below.
        own_options (`dict`): training arguments of the ranks alone, which plain Trainer does not know.
        trainer (`dict`): further arguments of the Trainer, made anew for each: name to a function without arguments.
        override (`Callable`): from a Trainer class to the subclass that is tested.
        before, after (`Callable`, *optional*): called with the trainer before and after training; what they return is
            compared too.
        accumulates (`bool`): whether the oracle accumulates as the ranks do, so that batches and events are the same.
        fault (`Callable`): makes a context in which the ranks, not the oracle, run.
        updates (`bool`): whether each weight's update is compared: not under AdamW, which divides rounding by itself.
    """

    plan: ParallelPlan | str
    family: str = "llama"
    build: Callable[[], PreTrainedModel] | None = None
    train: Callable[[], Any] | None = lambda: Rows(27)
    options: dict[str, Any] = field(default_factory=dict)
    own_options: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Callable[[], Any]] = field(default_factory=dict)
    override: Callable[[type], type] = lambda trainer_class: trainer_class
    before: Callable[[Trainer], Any] | None = None
    after: Callable[[Trainer], Any] | None = None
    accumulates: bool = False
    fault: Callable[[], AbstractContextManager] = nullcontext
    updates: bool = True

    def arguments(self, folder: str) -> dict[str, Any]:
        defaults = dict(
            output_dir=folder,
            use_cpu=True,
            per_device_train_batch_size=1,
            per_device_eval_batch_size=1,
            gradient_accumulation_steps=2,
            max_steps=4,
            logging_steps=1,
            logging_first_step=True,
            optim="sgd",
            learning_rate=0.2,
            weight_decay=0.05,
            max_grad_norm=0.8,
            lr_scheduler_type="linear",
            warmup_steps=2,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            seed=5,
        )
        return defaults | self.options


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Holds the results of one run; see [`Recorder`] and [`Case`]."""

    logs: list[dict[str, Any]]
    events: list[tuple[str, int]]
    gradients: dict[str, torch.Tensor]
    updates: dict[str, torch.Tensor]
    results: dict[str, Any]
    state: dict[str, Any]


def run_oracle(case: Case, world_size: int = WORLD_SIZE) -> Outcome:
    """Runs the case on one process with the global batch."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = case.arguments(folder)
        rows = world_size
        if not case.accumulates:
            rows *= arguments["gradient_accumulation_steps"]
            arguments["gradient_accumulation_steps"] = 1
        arguments["per_device_train_batch_size"] *= rows
        arguments["per_device_eval_batch_size"] *= world_size
        return _run(case, Trainer, TrainingArguments(**arguments))


def run_case(case: Case) -> Outcome:
    """Runs the case under its plan; on every rank."""
    with tempfile.TemporaryDirectory() as folder:
        shared = [folder]
        dist.broadcast_object_list(shared)
        args = GalvatronTrainingArguments(**case.arguments(shared[0]), **case.own_options, parallel_plan=case.plan)
        outcome = _run(case, GalvatronTrainer, args)
        dist.barrier()  # rank 0's folder is everybody's
    return outcome


def _run(case: Case, trainer_class: type[Trainer], args: TrainingArguments) -> Outcome:
    GradientState._reset_state()
    known = (ALL_FAMILIES | ENCODER_DECODERS).get(case.family)
    build = case.build or (functools.partial(tiny_model, case.family) if known is None else known.build)
    model, plain = build(), build()
    recorder = Recorder(plain)
    options = {"data_collator": collate} | {name: make() for name, make in case.trainer.items()}
    trainer = case.override(trainer_class)(
        model=model,
        args=args,
        train_dataset=case.train() if case.train else None,
        callbacks=[recorder, *options.pop("callbacks", [])],
        **options,
    )
    trainer.remove_callback(PrinterCallback)
    recorder.trainer = trainer
    results = {"before": case.before(trainer)} if case.before else {}
    if case.train:
        results["train"] = trainer.train().training_loss
    if case.after:
        results["after"] = case.after(trainer)
    weights = equivalence.whole_weights(trainer.model, plain)
    state = trainer.state
    return Outcome(
        logs=recorder.logs,
        events=recorder.events,
        gradients=recorder.gradients,
        updates={name: weights[name] - start.detach() for name, start in plain.named_parameters()},
        results=results,
        state=dict(
            step=state.global_step, epoch=state.epoch, flos=state.total_flos, tokens=state.num_input_tokens_seen
        ),
    )


def check_cases(cases: dict[str, Case], world_size: int = WORLD_SIZE) -> None:
    """Runs cases in one world of ranks and fails with all that differ from their oracles, on any rank."""
    oracles = {name: run_oracle(case, world_size) for name, case in cases.items()}
    AcceleratorState._reset_state(True)

    def work() -> dict[str, str]:
        warnings.simplefilter("ignore")
        wrong = {}
        for name, case in cases.items():
            try:
                with case.fault():
                    outcome = run_case(case)
            except Exception as error:
                raise RuntimeError(f"case {name!r}") from error
            found = differences(outcome, oracles[name], case)
            if found:
                wrong[name] = "; ".join(found[:4])
        return wrong

    wrong: dict[str, str] = {}
    for rank, found in enumerate(run_ranks(work, world_size)):
        for name, message in found.items():
            wrong.setdefault(name, f"rank {rank}: {message}")
    assert not wrong, "\n".join(f"{name}: {message}" for name, message in wrong.items())


def differences(seen: Outcome, wanted: Outcome, case: Case, relative: float = RELATIVE) -> list[str]:
    """Returns the differences between a rank's outcome and the oracle's."""
    same_batches = case.accumulates or case.arguments("")["gradient_accumulation_steps"] == 1
    # Trainer counts batches, the last of them smaller ones, and their padding.
    counted = () if same_batches else ("flos", "tokens", "epoch")
    found = unequal("log", _comparable(seen.logs, counted), _comparable(wanted.logs, counted), relative)
    found += unequal("result", _comparable(seen.results, counted), _comparable(wanted.results, counted), relative)
    found += unequal("state", _comparable(seen.state, counted), _comparable(wanted.state, counted), relative)
    if same_batches and seen.events != wanted.events:
        found.append(f"events {seen.events} are {wanted.events} on one process")
    if case.train:
        found += equivalence.unequal_tensors("gradient", seen.gradients, wanted.gradients, relative)
        if case.updates:
            found += equivalence.unequal_tensors("update", seen.updates, wanted.updates, UPDATE)
    return found


def _comparable(value: Any, counted: tuple[str, ...]) -> Any:
    """Leaves out times and pace, and what is counted from padded batches if the oracle has other batches."""
    if isinstance(value, dict):
        left_out = (*_TIMES, *OF_PACE, *_OF_PACKING, *counted)
        return {k: _comparable(v, counted) for k, v in value.items() if not any(word in str(k) for word in left_out)}
    if isinstance(value, (list, tuple)):
        return [_comparable(item, counted) for item in value]
    return value


def unequal(where: str, seen: Any, wanted: Any, relative: float) -> list[str]:
    """Compares nested values: numbers and arrays up to `relative`, everything else exactly."""
    if isinstance(wanted, dict) and isinstance(seen, dict) and seen.keys() == wanted.keys():
        return [text for key in wanted for text in unequal(f"{where}.{key}", seen[key], wanted[key], relative)]
    if isinstance(wanted, list) and isinstance(seen, list) and len(seen) == len(wanted):
        pairs = enumerate(zip(seen, wanted, strict=True))
        return [text for i, pair in pairs for text in unequal(f"{where}[{i}]", *pair, relative)]
    if isinstance(wanted, np.ndarray) and isinstance(seen, np.ndarray):
        if seen.shape != wanted.shape or seen.dtype != wanted.dtype:
            return [f"{where} is {seen.dtype}{seen.shape}, and {wanted.dtype}{wanted.shape} on one process"]
        if np.issubdtype(wanted.dtype, np.integer):
            return [] if np.array_equal(seen, wanted) else [f"{where} has other integers"]
        error = float(np.abs(seen - wanted).max(initial=0.0)) / (float(np.abs(wanted).max(initial=0.0)) or 1.0)
        return [] if error <= relative else [f"{where} is off by {error:.2e} of its largest entry"]
    if isinstance(wanted, float) and isinstance(seen, float):
        if math.isnan(wanted) and math.isnan(seen) or abs(seen - wanted) <= relative * abs(wanted):
            return []
    elif type(seen) is type(wanted) and seen == wanted:
        return []
    return [f"{where} is {seen!r}, and {wanted!r} on one process"]


def with_options(case: Case, **options: Any) -> Case:
    return replace(case, options=case.options | options)
