# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""What people reported to go wrong with a Trainer on several devices, tried under a plan: each is as on one process.
The docstrings of the cases cite the reports.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainerCallback
from transformers.loss.loss_utils import ForCausalLMLoss

from galvatron_hf.plan import ParallelPlan
from oracle import Case, Rows, check_cases
from plans import light_plan, pipeline_plans, shared_out, uniform


PAIR = light_plan(2)


def ignores_the_count(trainer_class: type[Trainer]) -> type[Trainer]:
    """github.com/huggingface/transformers/issues/37766: a loss that is a mean of its own, under accumulation."""

    class Means(trainer_class):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.model_accepts_loss_kwargs = False

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            outputs = model(**inputs)
            return (outputs.loss, outputs) if return_outputs else outputs.loss

    return Means


def library_loss(trainer_class: type[Trainer]) -> type[Trainer]:
    """github.com/huggingface/transformers/issues/37110: the library's loss function on logits, and numbers of its own
    in the logs (github.com/huggingface/transformers/pull/45558).
    """

    class Library(trainer_class):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            vocabulary = self.model.config.vocab_size
            loss = ForCausalLMLoss(outputs.logits, labels, vocabulary, num_items_in_batch=num_items_in_batch)
            self.entropy = -(outputs.logits.softmax(-1) * outputs.logits.log_softmax(-1)).sum(-1).mean().item()
            loss = loss + 1e-3 * outputs.logits.float().logsumexp(-1).square().mean()
            return (loss, outputs) if return_outputs else loss

        def log(self, logs, *args, **kwargs):
            super().log(logs | {"entropy": self.entropy} if "loss" in logs else logs, *args, **kwargs)

    return Library


def adversarial(trainer_class: type[Trainer]) -> type[Trainer]:
    """github.com/PaddlePaddle/PaddleNLP/issues/723, github.com/t6am3/public_tianchi_yiqing_nlp/issues/3: the fast
    gradient method disturbs the embedding along its gradient, and computes a second backward.
    """

    class Adversarial(trainer_class):
        def training_step(self, model, inputs, num_items_in_batch=None):
            loss = super().training_step(model, dict(inputs), num_items_in_batch)
            weight = model.get_input_embeddings().weight
            kept = weight.data.clone()
            norm = torch.norm(weight.grad)
            weight.data.add_(weight.grad / norm)
            super().training_step(model, dict(inputs), num_items_in_batch)
            weight.data.copy_(kept)
            return loss

    return Adversarial


class Average(TrainerCallback):
    """github.com/Lightning-AI/pytorch-lightning/pull/21414, github.com/NCAR/miles-credit/issues/414: keeps an
    exponential average of the weights, and evaluates it at the end.
    """

    def __init__(self):
        self.average = None

    def on_step_end(self, args, state, control, model=None, **kwargs):
        weights = {name: weight.detach() for name, weight in model.named_parameters()}
        if self.average is None:
            self.average = {name: weight.clone() for name, weight in weights.items()}
        for name, weight in weights.items():
            self.average[name].mul_(0.8).add_(weight, alpha=0.2)

    def evaluated(self, trainer: Trainer) -> float:
        with torch.no_grad():
            for name, weight in trainer.model.named_parameters():
                weight.copy_(self.average[name])
        return trainer.evaluate()["eval_loss"]


class Freezes(TrainerCallback):
    """github.com/ecmwf/anemoi-core/issues/3, github.com/pyannote/pyannote-audio/pull/630: freezes all but the last
    layers in the second step, and trains all again.
    """

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        for name, weight in model.named_parameters():
            layer = int(name.split(".")[2]) if ".layers." in name else 4
            weight.requires_grad_(state.global_step != 1 or layer >= 3)


class ScalesGradients(TrainerCallback):
    """Adds weight decay of its own to the gradients before the optimizer's step, and clips each by its value."""

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        for weight in model.parameters():
            if weight.grad is not None:
                weight.grad.add_(weight.detach(), alpha=0.1).clamp_(-0.05, 0.05)


class CountsBatches:
    """github.com/huggingface/transformers/issues/38851: metrics by batch see the batch of all ranks."""

    def __init__(self):
        self.rows = []

    def __call__(self, found, compute_result: bool = False) -> dict[str, float]:
        self.rows.append(len(found.predictions))
        if not compute_result:
            return {}
        rows, self.rows = self.rows, []
        return {"batches": float(len(rows)), "rows": float(sum(rows)), "first": float(rows[0])}


def best_of_several(trainer: Trainer) -> list[Any]:
    return [trainer.state.best_metric, trainer.state.best_global_step, trainer.evaluate(Rows(6, seed=9))["eval_loss"]]


def own(plan: ParallelPlan, **more: Any) -> Case:
    options = dict(max_steps=3) | more.pop("options", {})
    return Case(plan=plan, **{"accumulates": True, "options": options, **more})


EVALUATED = dict(eval_strategy="steps", eval_steps=1)


def averaged(trainer: Trainer) -> float:
    (callback,) = (one for one in trainer.callback_handler.callbacks if isinstance(one, Average))
    return callback.evaluated(trainer)


CASES: dict[str, Callable[[ParallelPlan], Case]] = {
    "mean under accumulation": lambda plan: own(plan, override=ignores_the_count),
    "the library's loss and further logs": lambda plan: own(plan, override=library_loss),
    "fast gradient method": lambda plan: own(plan, override=adversarial, options=dict(max_grad_norm=0.0)),
    "average of weights": lambda plan: own(
        plan,
        trainer=dict(callbacks=lambda: [Average()], eval_dataset=lambda: Rows(10, seed=2)),
        after=averaged,
    ),
    "freezing and unfreezing": lambda plan: own(plan, trainer=dict(callbacks=lambda: [Freezes()])),
    "gradients before the step": lambda plan: own(plan, trainer=dict(callbacks=lambda: [ScalesGradients()])),
    "metrics by batch": lambda plan: own(
        plan,
        trainer=dict(compute_metrics=CountsBatches, eval_dataset=lambda: Rows(10, seed=2)),
        options=EVALUATED | dict(batch_eval_metrics=True, per_device_eval_batch_size=2),
    ),
    # github.com/huggingface/transformers/issues/24962 and 30819,
    # github.com/huggingface/sentence-transformers/issues/2749
    "best of several evaluation sets": lambda plan: own(
        plan,
        trainer=dict(eval_dataset=lambda: {"a": Rows(10, seed=2), "b": Rows(5, seed=3)}),
        options=EVALUATED
        | dict(load_best_model_at_end=True, metric_for_best_model="eval_b_loss", save_strategy="steps", save_steps=1),
        after=best_of_several,
        updates=False,
    ),
    # github.com/huggingface/transformers/issues/13759
    "evaluating the training set": lambda plan: own(
        plan, after=lambda trainer: trainer.evaluate(trainer.train_dataset)["eval_loss"]
    ),
}


KINDS = ("zero3", "tensor", "1f1b_mixed", "zero_bubble")  # each report is made under one of each two


@pytest.mark.slow
def test_reports_on_two_ranks():
    check_cases({name: make(PAIR) for name, make in CASES.items()}, world_size=2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_reports_under_other_plans(kind):
    plans = {"zero3": uniform(4), "tensor": uniform(4, tensor=2, megatron_sp=True), **pipeline_plans()}
    cases = {name: make(plans[kind]) for name, make in shared_out(CASES, KINDS.index(kind), 2).items()}
    if len(plans[kind].stages) > 1:
        cases.pop("fast gradient method", None)  # other stages have no embedding, and say so
    check_cases(cases)
