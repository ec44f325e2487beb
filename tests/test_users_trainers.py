# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Trainers, losses, loaders and callbacks as people write them, and the batch of a step: each gives the results of
plain Trainer on one process, or an error that says what to do. Each comparison can fail.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, WeightedRandomSampler
from transformers import DataCollatorForSeq2Seq, DataCollatorWithFlattening, Trainer, TrainerCallback

from galvatron_hf import GalvatronMixin, GalvatronTrainer
from galvatron_hf.data.loader import GlobalBatchLoader, batch_rows
from galvatron_hf.parallel.comm import collectives
from galvatron_hf.parallel.comm.meeting import Meetings
from galvatron_hf.parallel.model_runner import ModelRunner
from galvatron_hf.parallel.whole_batch import WholeBatchForward
from galvatron_hf.plan import ParallelPlan
from galvatron_hf.trainer import arguments as trainer_arguments
from galvatron_hf.trainer import components, mixin, start
from galvatron_hf.trainer.arguments import check_arguments
from galvatron_hf.trainer.data import global_batches
from galvatron_hf.trainer.data.global_batches import GlobalBatches
from galvatron_hf.utils.progress import tell
from oracle import Case, Rows, Stream, check_cases, collate
from packing_runs import tokenizer
from plans import light_plan, pipeline_plans, pipelined, shared_out, uniform, uniform_plans
from ranks import run_ranks
from trainer_runs import Run, arguments, assert_same_steps, on_ranks, run, trainer


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


# ---- F: numbers of parts; G: calls that some ranks do not make ----


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_a_number_of_a_part_of_a_weight_is_refused_and_one_of_the_whole_is_right(tmp_path):
    plain = trainer(tmp_path / "plain", trainer_class=Trainer).model.model.embed_tokens.weight.detach()

    def work() -> tuple[str, str, float]:
        made = trainer(tmp_path / "run", PAIR)
        made.ensure_parallel()
        weight = made.model.model.embed_tokens.weight.detach()
        return (
            error_of(lambda: weight.norm().item()),
            error_of(lambda: float(weight.sum())),
            weight.full_tensor().norm(),
        )

    for of_item, of_float, norm in run_ranks(work, 2):
        assert "full_tensor()" in of_item and "full_tensor()" in of_float
        assert float(norm) == pytest.approx(float(plain.norm()), rel=1e-6)


CALLS: dict[str, Callable[[Trainer], Any]] = {
    "train": lambda made: made.train(),
    "evaluate or predict": lambda made: made.evaluate(Rows(4)),
    "save_model": lambda made: made.save_model(),
    "generate": lambda made: made.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=2),
    "model(...)": lambda made: made.model(input_ids=torch.tensor([[5, 6, 7]])),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_a_rank_does_not_make_names_it_after_the_timeout(call, tmp_path):
    def work() -> str:
        made = trainer(tmp_path, PAIR, options=dict(max_steps=1, ddp_timeout=2))
        made.ensure_parallel()
        return error_of(lambda: CALLS[call](made)) if made.args.process_index == 0 else ""

    message, _ = run_ranks(work, 2, timeout=60)
    assert message.startswith(f"RuntimeError: {call} was called on rank 0, and rank 1 did not call it within 2 s"), (
        message
    )
    assert "call it on every rank" in message


class _Repairing(GalvatronTrainer):
    """Replaces bad gradients by none, and says so by the norm that it returns."""

    def _clip_grad_norm(self, model):
        if self.state.global_step == 0:
            for weight in model.parameters():
                weight.grad.fill_(float("nan"))
        norm = super()._clip_grad_norm(model)
        if norm.isfinite():
            return norm
        for weight in model.parameters():
            weight.grad.zero_()
        return torch.zeros(())


def test_the_norm_that_a_clipping_of_ones_own_returns_is_the_one_that_is_checked(tmp_path):
    def work() -> list[float]:
        made = trainer(tmp_path, uniform(1), trainer_class=_Repairing, options=dict(max_steps=2))
        made.train()
        return [log["grad_norm"] for log in made.state.log_history if "grad_norm" in log]

    first, second = on_ranks(work, 1)[0]
    assert first == 0.0 and second > 0.0


def test_a_second_trainer_of_a_script_names_missing_ranks_too(tmp_path):
    def work() -> str:
        trainer(tmp_path, PAIR, options=dict(max_steps=1)).train()
        made = trainer(tmp_path, PAIR, options=dict(max_steps=1, ddp_timeout=2))
        return error_of(made.train) if made.args.process_index == 0 else ""

    message, _ = run_ranks(work, 2, timeout=60)
    assert "train was called on rank 0, and rank 1 did not call it within 2 s" in message, message


def test_ranks_that_make_different_calls_are_told(tmp_path):
    def work() -> str:
        made = trainer(tmp_path, PAIR, options=dict(max_steps=1))
        made.ensure_parallel()
        call = CALLS["save_model" if made.args.process_index == 0 else "evaluate or predict"]
        return error_of(lambda: call(made))

    first, second = run_ranks(work, 2, timeout=60)
    assert "Rank 0 called save_model, and rank 1 called evaluate or predict" in first
    assert "Rank 1 called evaluate or predict, and rank 0 called save_model" in second


def test_different_batches_of_the_ranks_are_refused(tmp_path):
    def work() -> str:
        made = trainer(tmp_path, PAIR)
        made.ensure_parallel()
        ids = torch.tensor([[5, 6, 7 + made.args.process_index]])
        return error_of(lambda: made.model(input_ids=ids))

    for message in run_ranks(work, 2):
        assert "called the model with different tokens" in message


@pytest.mark.parametrize("name", ["use_cache", "output_hidden_states", "past_key_values", "inputs_embeds"])
def test_what_has_no_layout_is_refused_by_name(name, tmp_path):
    value = torch.zeros(1, 3, 32) if name == "inputs_embeds" else True

    def work() -> str:
        made = trainer(tmp_path, PAIR)
        made.ensure_parallel()
        return error_of(lambda: made.model(input_ids=torch.tensor([[5, 6, 7]]), **{name: value}))

    for message in run_ranks(work, 2):
        assert f"called with {name!r}" in message and "leave it out" in message


def penalizes_weights(model, inputs, items):
    outputs = model(**inputs)
    return outputs.loss + 1e-4 * sum((weight**2).sum() for weight in model.parameters()), outputs


@pytest.mark.parametrize("name", ["zero3", "replicate", "tensor", "pipeline"])
def test_a_loss_that_computes_with_weights_is_refused(name, tmp_path):
    plans = uniform_plans(2) | {"pipeline": pipelined([(0,), (1,)], uniform(2).layers, "1f1b", micro_batches=2)}

    def work() -> str:
        made = trainer(tmp_path, plans[name], trainer_class=losing(penalizes_weights)(GalvatronTrainer))
        return error_of(made.train)

    for message in run_ranks(work, 2):
        assert "ValueError" in message and "weight_decay" in message


@pytest.mark.parametrize("by_config", [True, False])
def test_a_tuple_is_returned_where_the_call_or_the_config_asks_for_it(by_config, tmp_path):
    def work() -> tuple[bool, bool]:
        made = trainer(tmp_path, PAIR)
        made.ensure_parallel()
        batch = {name: torch.tensor([[5, 6, 7]]) for name in ("input_ids", "labels")}
        made.model.config.return_dict = not by_config
        outputs = made.model(**batch) if by_config else made.model(**batch, return_dict=False)
        named = made.model(**batch, return_dict=True)
        return isinstance(outputs, tuple), torch.equal(outputs[1], named.logits)

    assert run_ranks(work, 2) == [(True, True)] * 2


# ---- H: the batch of a step ----


def batch_run(folder: Path, plan: ParallelPlan | str, **more: Any) -> Run:
    """Trains with SGD; `more` are arguments of training, and of the Trainer's."""
    options = dict(optim="sgd", learning_rate=0.2, max_steps=4, per_device_train_batch_size=1) | more.pop("options")
    then = lambda made: (made.state.epoch, made.state.max_steps)  # noqa: E731
    return run(folder, plan, options=options, then=then, **more)


BATCHES: dict[str, tuple[int, dict[str, Any]]] = {
    "one row": (1, dict(gradient_accumulation_steps=1)),
    "three rows": (3, dict(gradient_accumulation_steps=1)),
    "accumulated": (6, dict(gradient_accumulation_steps=2)),
    "epochs": (5, dict(gradient_accumulation_steps=1, max_steps=-1, num_train_epochs=1)),
    "packed": (5, dict(gradient_accumulation_steps=1, packing="static")),
}


def test_the_global_batch_is_that_of_one_process(tmp_path):
    def own(name: str, rows: int, options: dict[str, Any]) -> Run:
        packs = dict(data_collator=DataCollatorForSeq2Seq(tokenizer())) if name == "packed" else {}
        return batch_run(tmp_path / name, PAIR, options=options | dict(global_batch_size=rows), **packs)

    found = on_ranks(lambda: {name: own(name, *case) for name, case in BATCHES.items()}, 2)
    for name, (rows, options) in BATCHES.items():
        steps = options["gradient_accumulation_steps"]
        plain = {key: value for key, value in options.items() if key != "packing"}
        plain |= dict(per_device_train_batch_size=rows // steps)
        wanted = batch_run(tmp_path / "plain" / name, options=plain, plan="auto", trainer_class=Trainer)
        for seen in found:
            assert_same_steps(seen[name], wanted)
            assert seen[name].result == wanted.result
            for key, weight in wanted.weights.items():
                torch.testing.assert_close(seen[name].weights[key], weight, rtol=1e-4, atol=1e-6)


def test_a_run_with_a_global_batch_resumes(tmp_path):
    options = dict(gradient_accumulation_steps=1, global_batch_size=3, save_strategy="steps", save_steps=2)

    def work() -> tuple[Run, Run]:
        whole = batch_run(tmp_path, PAIR, options=options)
        return whole, batch_run(tmp_path, PAIR, options=options, resume=tmp_path / "checkpoint-2")

    for whole, resumed in on_ranks(work, 2):
        assert resumed.steps(after=2) == whole.steps(after=2)
        assert all(torch.equal(resumed.weights[name], weight) for name, weight in whole.weights.items())


@pytest.mark.parametrize(
    "rows, steps, reason", [(0, 1, "positive integer"), (5, 2, "not a multiple"), (2.5, 1, "number")]
)
def test_a_global_batch_that_is_none_is_refused(rows, steps, reason, tmp_path):
    args = arguments(
        tmp_path, gradient_accumulation_steps=steps, global_batch_size=rows, per_device_train_batch_size=1
    )
    with pytest.raises(ValueError, match=f"global_batch_size {rows}.*{reason}"):
        check_arguments(args, None)


@pytest.mark.parametrize("given, wanted", [(None, [4, 4]), (1, [8]), (4, [2, 2, 2, 2])])
def test_a_plan_without_micro_batches_takes_them_from_the_accumulation(given, wanted, tmp_path):
    """Counts the rows of each forward of a step."""

    def work() -> list[int]:
        seen, original = [], ModelRunner.micro_batch

        def micro_batch(self, input_ids, **inputs):
            seen.append(input_ids.shape[0])
            return original(self, input_ids, **inputs)

        with mock.patch.object(ModelRunner, "micro_batch", micro_batch):
            made = trainer(tmp_path, replace(PAIR, micro_batches=given), options=dict(max_steps=1, packing="none"))
            made.train()
        return seen

    assert run_ranks(work, 2) == [wanted, wanted]


def test_micro_batches_that_a_loss_of_whole_batches_leaves_unused_are_told(tmp_path):
    def work() -> list[list[str]]:
        told = []
        for micro_batches, own in ((4, True), (2, True), (4, False)):
            loss = own_loss if own else None
            with mock.patch.object(start.logger, "warning") as warning:
                trainer(tmp_path, replace(PAIR, micro_batches=micro_batches), compute_loss_func=loss)
            told.append([str(call.args[0]) for call in warning.mock_calls])
        return told

    first, second = run_ranks(work, 2)
    assert [len(one) for one in first] == [1, 0, 0] and second == [[], [], []]
    assert "micro_batches=4 of the plan is not used" in first[0][0]


def own_loss(outputs, labels, num_items_in_batch=None):
    return outputs.logits.float().logsumexp(-1).mean()


FAULTS_OF_BATCHES: dict[str, tuple[Any, str, Any, Callable[[Path], None]]] = {
    "global batch": (
        global_batches,
        "batch_rows_of",
        lambda args: 2 * args.train_batch_size,
        lambda folder: test_the_global_batch_is_that_of_one_process(folder),
    ),
    "micro-batches": (
        trainer_arguments,
        "with_micro_batches",
        lambda plan, args: plan,
        lambda folder: test_a_plan_without_micro_batches_takes_them_from_the_accumulation(None, [4, 4], folder),
    ),
    "missing ranks": (
        Meetings,
        "_missing",
        lambda self: [],
        lambda folder: test_a_call_that_a_rank_does_not_make_names_it_after_the_timeout("save_model", folder),
    ),
}


@pytest.mark.parametrize(
    "name", [pytest.param("global batch", marks=pytest.mark.slow), "micro-batches", "missing ranks"]
)
def test_faults_of_batches_and_meetings_are_seen(name, tmp_path, monkeypatch):
    owner, attribute, wrong, test = FAULTS_OF_BATCHES[name]
    monkeypatch.setattr(owner, attribute, wrong)
    with pytest.raises(AssertionError):
        test(tmp_path)


# ---- I: what is said ----


def test_a_resumed_run_says_from_where_and_an_evaluation_counts_all_rows(tmp_path):
    options = dict(max_steps=2, save_strategy="steps", save_steps=1)

    def work() -> tuple[bool, float]:
        trainer(tmp_path, PAIR, options=options).train()
        made = trainer(tmp_path, PAIR, options=options)
        with mock.patch.object(mixin.logger, "warning") as warning:
            made.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
        told = mock.call(f"Training resumes from {tmp_path / 'checkpoint-1'}.") in warning.mock_calls
        metrics = made.evaluate(Rows(10))
        return told, metrics["eval_samples_per_second"] * metrics["eval_runtime"]

    (first, count), (second, other) = run_ranks(work, 2)
    assert first and not second
    assert [count, other] == pytest.approx([10, 10], abs=0.1)


@pytest.mark.parametrize("shown", [True, False])
def test_progress_is_printed_or_logged(shown, capsys, caplog):
    tell("Measuring.", shown)
    tell("The plan.", shown, result=True)
    printed = capsys.readouterr()
    assert (printed.err, printed.out) == (("Measuring.\n", "The plan.\n") if shown else ("", ""))
    assert caplog.messages == ([] if shown else ["Measuring.", "The plan."])
