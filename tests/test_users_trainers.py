# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Trainers, losses, loaders and callbacks as people write them: each gives the results of plain Trainer on one
process. Each comparison can fail.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, WeightedRandomSampler
from transformers import DataCollatorForSeq2Seq, DataCollatorWithFlattening, Trainer, TrainerCallback

from galvatron_hf import GalvatronMixin
from galvatron_hf.data.loader import GlobalBatchLoader, batch_rows
from galvatron_hf.parallel.comm import collectives
from galvatron_hf.parallel.whole_batch import WholeBatchForward
from galvatron_hf.plan import ParallelPlan
from galvatron_hf.trainer import components
from galvatron_hf.trainer.data.global_batches import GlobalBatches
from oracle import Case, Rows, Stream, check_cases, collate
from packing_runs import tokenizer
from plans import light_plan, pipeline_plans, shared_out


PAIR = light_plan(2)
STAGES = ("1f1b", "zero_bubble", "interleaved")
ACCUMULATED = dict(accumulates=True, options=dict(max_steps=2))
Loss = Callable[[Any, dict[str, Any], Any], tuple[torch.Tensor, Any]]


def losing(loss: Loss) -> Callable[[type[Trainer]], type[Trainer]]:
    """Returns the maker of a subclass whose `compute_loss` is `loss(model, inputs, items)`: loss and outputs."""

    def override(trainer_class: type[Trainer]) -> type[Trainer]:
        class WithLoss(trainer_class):
            def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
                value, outputs = loss(model, inputs, num_items_in_batch)
                return (value, outputs) if return_outputs else value

        return WithLoss

    return override


# ---- A: the model computes the tensors that it is given ----


def masks_tokens(model, inputs, items):
    ids = inputs["input_ids"]
    outputs = model(**{**inputs, "input_ids": torch.where(ids % 3 == 0, 5, ids)}, num_items_in_batch=items)
    return outputs.loss, outputs


def changes_labels_and_positions(model, inputs, items):
    ids, labels = inputs["input_ids"], inputs["labels"]
    positions = (torch.arange(ids.shape[1], device=ids.device) // 2).expand_as(ids)
    first = labels.masked_fill(torch.arange(ids.shape[1], device=ids.device) > 5, -100)
    outputs = model(ids, inputs["attention_mask"], position_ids=positions, labels=first)
    return 3.0 * outputs.loss, outputs


def cuts_positions(model, inputs, items):
    """Gives a slice, by position."""
    outputs = model(inputs["input_ids"][:, :-1], inputs["attention_mask"][:, :-1])
    losses = torch.nn.functional.cross_entropy(
        outputs.logits.transpose(1, 2), inputs["labels"][:, 1:], reduction="sum"
    )
    return losses / items, outputs


def calls_twice(model, inputs, items):
    """Draws two computations of other tokens together, as R-Drop and contrastive losses do."""
    first = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
    second = model(input_ids=inputs["input_ids"].flip(0), attention_mask=inputs["attention_mask"].flip(0))
    a, b = first.logits.log_softmax(-1), second.logits.log_softmax(-1)
    apart = torch.nn.functional.kl_div(a, b, log_target=True, reduction="batchmean") / a.shape[1]
    labels = inputs["labels"][:, 1:]
    losses = torch.nn.functional.cross_entropy(first.logits[:, :-1].transpose(1, 2), labels, reduction="sum")
    return losses / items + 0.5 * apart, first


# ---- B: methods of a step ----


def own_step(trainer_class: type[Trainer]) -> type[Trainer]:
    """Trains on a second, disturbed batch, and halves all gradients."""

    class OwnStep(trainer_class):
        def training_step(self, model, inputs, num_items_in_batch=None):
            loss = super().training_step(model, dict(inputs), num_items_in_batch)
            ids = inputs["input_ids"]
            disturbed = inputs | {"input_ids": torch.where(ids % 5 == 0, 7, ids)}
            loss = loss + super().training_step(model, disturbed, num_items_in_batch)
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(0.5)
            return loss

    return OwnStep


def own_batches(trainer_class: type[Trainer]) -> type[Trainer]:
    """Leaves every row with an odd first token out of the loss."""

    class OwnBatches(trainer_class):
        def get_batch_samples(self, epoch_iterator, num_batches, device):
            batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
            for batch in batches:
                batch["labels"] = batch["labels"].masked_fill(batch["input_ids"][:, :1] % 2 == 1, -100)
            return batches, self._get_num_items_in_batch(batches, device)

    return OwnBatches


# ---- C: rows that belong together ----


def collate_pairs(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Puts the chosen rows first and the rejected ones behind them."""
    rejected = [row | {"input_ids": (7 * row["input_ids"] + 11) % 93 + 4} for row in rows]
    return collate(rows + rejected)


def prefers_chosen(model, inputs, items):
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    outputs = model(input_ids=ids, attention_mask=mask)
    of_tokens = outputs.logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    chosen, rejected = (of_tokens * mask[:, 1:]).sum(-1).chunk(2)
    return -torch.nn.functional.logsigmoid(0.1 * (chosen - rejected)).mean(), outputs


class Tasks(Rows):
    def __getitem__(self, index: int) -> dict[str, Any]:
        return super().__getitem__(index) | {"task": "code" if index % 3 == 0 else "chat"}


def collate_tasks(rows: list[dict[str, Any]]) -> dict[str, Any]:
    names = [row["task"] for row in rows]
    return collate([{name: row[name] for name in ("input_ids", "labels")} for row in rows]) | {"task": names}


def weighs_tasks(model, inputs, items):
    names, labels = inputs.pop("task"), inputs.pop("labels")
    outputs = model(**inputs)
    losses = torch.nn.functional.cross_entropy(
        outputs.logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none"
    ).sum(-1)
    weights = {"code": 3.0, "chat": 0.25}
    return sum(weights[name] * loss for name, loss in zip(names, losses, strict=True)) / items, outputs


# ---- D: loaders of one's own ----


def own_loaders(trainer_class: type[Trainer]) -> type[Trainer]:
    class OwnLoaders(trainer_class):
        def get_train_dataloader(self):
            draw = torch.Generator().manual_seed(7)
            weights = [1.0 + index % 4 for index in range(len(self.train_dataset))]
            sampler = WeightedRandomSampler(weights, len(weights), generator=draw)
            return self.accelerator.prepare(self._loader(self.train_dataset, self.args.train_batch_size, sampler))

        def get_eval_dataloader(self, eval_dataset=None):
            rows = self.eval_dataset if eval_dataset is None else eval_dataset
            return self.accelerator.prepare(self._loader(rows, self.args.eval_batch_size))

        def _loader(self, rows: Dataset, size: int, sampler=None) -> DataLoader:
            return DataLoader(rows, batch_size=size, sampler=sampler, collate_fn=self.data_collator)

    return OwnLoaders


def flattening() -> Callable[[list[dict[str, Any]]], dict[str, torch.Tensor]]:
    """Makes one row of the rows of a batch, whose number only the dataset knows."""
    collator = DataCollatorWithFlattening()

    def collate_flat(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        return collator([{name: value.tolist() for name, value in row.items()} for row in rows])

    return collate_flat


# ---- E: data that changes while it is read; F: callbacks that call the model ----


class Warming(Dataset):
    """Shows the first tokens of its rows, more and more of them."""

    def __init__(self):
        self.rows, self.longest = Rows(64, shortest=11), 4

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return {name: value[: self.longest].tolist() for name, value in self.rows[index].items()}


class Lengthens(TrainerCallback):
    def __init__(self):
        self.dataset = None

    def on_train_begin(self, args, state, control, train_dataloader=None, **kwargs):
        self.dataset = train_dataloader
        while not isinstance(self.dataset, Warming):
            self.dataset = getattr(self.dataset, "dataset", None) or self.dataset.loader

    def on_step_end(self, args, state, control, **kwargs):
        self.dataset.longest = 4 + state.global_step


class CallsTheModel(TrainerCallback):
    """Computes the loss of evaluation batches itself, and the norm of a whole weight."""

    def __init__(self):
        self.seen = []

    def on_evaluate(self, args, state, control, model=None, eval_dataloader=None, **kwargs):
        with torch.no_grad():
            losses = [float(model(**batch).loss) for batch in eval_dataloader]
            logits = [model(**batch).logits[0].double().abs().sum().item() for batch in eval_dataloader]
        self.seen.append((losses, logits))


def kept_by(callback_class: type[TrainerCallback]) -> Callable[[Trainer], Any]:
    def seen(trainer: Trainer) -> Any:
        (found,) = (one for one in trainer.callback_handler.callbacks if isinstance(one, callback_class))
        return found.seen

    return seen


# ---- I: counters, epochs, learning rates ----


def counts_calls(trainer_class: type[Trainer]) -> type[Trainer]:
    class Counts(trainer_class):
        calls = 0

        def compute_loss(self, *args, **kwargs):
            self.calls += 1
            return super().compute_loss(*args, **kwargs)

    return Counts


class ByEpoch(IterableDataset):
    """Yields other rows in every epoch."""

    def __init__(self):
        self.epoch, self.rows = 3, Rows(20, seed=2)  # accelerate sets 0 when it begins

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self):
        return (self.rows[index] for index in range(5 * self.epoch, 5 * self.epoch + 5))


def rates_by_layer(trainer_class: type[Trainer]) -> type[Trainer]:
    """Trains later layers faster."""

    class ByLayer(trainer_class):
        def create_optimizer(self, model=None):
            groups: dict[float, list] = {}
            for name, parameter in self.model.named_parameters():
                layer = int(name.split(".")[2]) if ".layers." in name else 0
                groups.setdefault(0.05 * (1 + layer), []).append(parameter)
            named = [{"params": groups[rate], "lr": rate} for rate in sorted(groups)]
            self.optimizer = torch.optim.SGD(named, lr=0.05)
            return self.optimizer

    return ByLayer


def divides_by_batches(trainer_class: type[Trainer]) -> type[Trainer]:
    """Divides the loss of a step by the number of its batches, as for a model without `num_items_in_batch`."""

    class Divides(trainer_class):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.model_accepts_loss_kwargs = False

    return Divides


# ---- The cases ----

EVALUATED = dict(eval_dataset=lambda: Rows(10, seed=2))
WARMING = dict(
    train=Warming,
    trainer=dict(data_collator=lambda: DataCollatorForSeq2Seq(tokenizer()), callbacks=lambda: [Lengthens()]),
    options=dict(max_steps=6, gradient_accumulation_steps=1, per_device_train_batch_size=2),
)


def own(plan: ParallelPlan, **more: Any) -> Case:
    options = ACCUMULATED["options"] | more.pop("options", {})
    return Case(plan=plan, **{"accumulates": True, "options": options, **more})


CASES: dict[str, Callable[[ParallelPlan], Case]] = {
    "A_masks_tokens": lambda plan: own(plan, override=losing(masks_tokens)),
    "A_changes_labels_and_positions": lambda plan: own(plan, override=losing(changes_labels_and_positions)),
    "A_cuts_positions": lambda plan: own(plan, override=losing(cuts_positions)),
    "A_calls_twice": lambda plan: own(plan, override=losing(calls_twice)),
    "B_own_step": lambda plan: own(plan, override=own_step, options=dict(max_grad_norm=0.0)),
    "B_own_batches": lambda plan: own(plan, override=own_batches),
    "C_pairs": lambda plan: own(
        plan,
        override=losing(prefers_chosen),
        train=lambda: Rows(27, shortest=8, longest=8),
        trainer=dict(data_collator=lambda: collate_pairs),
    ),
    "C_strings": lambda plan: own(
        plan,
        override=losing(weighs_tasks),
        train=lambda: Tasks(27),
        trainer=dict(data_collator=lambda: collate_tasks),
        options=dict(remove_unused_columns=False),
    ),
    "D_own_loaders": lambda plan: own(
        plan, override=own_loaders, trainer=EVALUATED, options=dict(eval_strategy="steps", eval_steps=2)
    ),
    "D_flattened": lambda plan: own(
        plan,
        trainer=EVALUATED | dict(data_collator=flattening),
        options=dict(eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=2),
    ),
    "E_length_warm_up": lambda plan: Case(plan=plan, accumulates=True, **WARMING),
    "F_callback_calls_the_model": lambda plan: own(
        plan,
        trainer=EVALUATED | dict(callbacks=lambda: [CallsTheModel()]),
        after=kept_by(CallsTheModel),
        options=dict(eval_strategy="steps", eval_steps=1),
    ),
    "I_calls": lambda plan: own(plan, override=counts_calls, after=lambda trainer: trainer.calls),
    "I_evaluation_stream": lambda plan: own(
        plan,
        trainer=dict(eval_dataset=ByEpoch),
        options=dict(eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=2),
    ),
    "I_rates_by_layer": lambda plan: own(plan, override=rates_by_layer),
    "H_mean_of_means": lambda plan: own(plan, override=divides_by_batches, trainer=EVALUATED),
    # Batches of 2, 2 | 2, 2 | 2 rows, or 4, 4 | 2: the gradients of a pass's last batch stay for the next step.
    "I_stream": lambda plan: own(plan, train=lambda: Stream(10), options=dict(max_steps=4)),
    "I_stream_of_own_loss": lambda plan: own(
        plan, override=losing(masks_tokens), train=lambda: Stream(10), options=dict(max_steps=4)
    ),
}


FAST = ("A_calls_twice", "B_own_step", "C_pairs", "D_own_loaders", "I_evaluation_stream")


@pytest.mark.parametrize(
    "names",
    [FAST, pytest.param([name for name in CASES if name not in FAST], marks=pytest.mark.slow)],
    ids=["fast", "others"],
)
def test_as_on_one_process(names):
    check_cases({name: CASES[name](PAIR) for name in names}, world_size=2)


@pytest.mark.slow
def test_as_on_one_process_under_pipelines():
    """Runs each case under one of three pipelines."""
    cases = {}
    for index, name in enumerate(STAGES):
        plan = pipeline_plans()[name]
        cases |= {f"{case} {name}": make(plan) for case, make in shared_out(CASES, index, len(STAGES)).items()}
    check_cases(cases)


# ---- The comparisons can fail ----


def the_first_tokens_of_a_step():
    """Has the model compute the tokens of the step's first call, whatever it is given."""
    original, first = WholeBatchForward._arguments, {}

    def arguments_of(self, args, kwargs):
        inputs = original(self, args, kwargs)
        key = (self.batch, tuple(inputs["input_ids"].shape))
        inputs["input_ids"] = first.setdefault(key, inputs["input_ids"])
        return inputs

    return mock.patch.object(WholeBatchForward, "_arguments", arguments_of)


def steps_of_trainer_alone():
    """Drops a subclass's own step."""
    original = GalvatronMixin._compute_batch

    def compute(self, method, *args):
        return original(self, partial(Trainer.training_step, self), *args)

    return mock.patch.object(GalvatronMixin, "_compute_batch", compute)


def the_first_epoch_again():
    return mock.patch.object(GlobalBatchLoader, "set_epoch", lambda self, epoch: None)


def rows_of_the_batch():
    return mock.patch.object(GlobalBatchLoader, "_rows_of_last", lambda self, batch: batch_rows(batch))


def rows_of_ranks_in_turn():
    """Gathers rows so that the ranks' parts are exchanged."""
    original = collectives._GatherRows.forward

    def forward(ctx, local, parts, group):
        return original(ctx, local, parts, group).roll(1, 0)

    return mock.patch.object(collectives._GatherRows, "forward", staticmethod(forward))


def loaders_read_a_share():
    return mock.patch.object(GlobalBatches, "joined", lambda self, loader: loader)


def streams_are_read_ahead():
    return mock.patch.object(components, "has_callbacks_of_others", lambda trainer: False)


FAULTS: dict[str, tuple[str, Callable]] = {
    "A": ("A_masks_tokens", the_first_tokens_of_a_step),
    "A twice": ("A_calls_twice", the_first_tokens_of_a_step),
    "B": ("B_own_step", steps_of_trainer_alone),
    "C": ("C_pairs", rows_of_ranks_in_turn),
    "D": ("D_own_loaders", loaders_read_a_share),
    "D flattened": ("D_flattened", rows_of_the_batch),
    "E": ("E_length_warm_up", streams_are_read_ahead),
    "F": ("F_callback_calls_the_model", rows_of_ranks_in_turn),
    "I": ("I_evaluation_stream", the_first_epoch_again),
}


@pytest.mark.slow
def test_faults_are_seen():
    """Each fault changes the numbers of its case."""
    cases = {name: replace(CASES[case](PAIR), fault=fault) for name, (case, fault) in FAULTS.items()}
    with pytest.raises(AssertionError) as error:
        check_cases(cases, world_size=2)
    for name in cases:
        assert f"{name}: rank" in str(error.value), name
