# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Heads that classify rows or positions, and masked language models, against one process."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import PreTrainedModel, Trainer

import oracle
from equivalence import reference, single_stage
from family_runs import batch_of
from galvatron_hf.models.families import adapter_for
from galvatron_hf.parallel import executor
from galvatron_hf.plan import LayerStrategy
from plans import pipelined
from test_encoder_decoders import seen
from test_parallelize import check_cases
from tiny_configurations import LABELS, tiny_model
from tiny_models import VOCABULARY
from trainer_runs import on_ranks, trainer


S, FULL = LayerStrategy, dict(recompute="full")
LAYERS = (S(), S(sharding="zero2"), S(sharding="replicate", **FULL), S(shard_degree=2, **FULL))
PLANS = {
    "one stage": single_stage(LAYERS, 4, micro_batches=2),
    "two stages": pipelined([(0, 1), (2, 3)], (S(), S(sharding="zero2"), S(sharding="replicate"), S(**FULL))),
    "four stages": pipelined([(0,), (1,), (2,), (3,)], (S(),) * 4, "gpipe", micro_batches=2),
}
SEQUENCE, TOKEN, MASKED = "sequence-classification", "token-classification", "masked-lm"
ANSWER = "question-answering"


def batch_with_types(model: PreTrainedModel, task: str) -> dict[str, torch.Tensor]:
    """Returns a batch whose tokens are of two types, as those of pairs of sentences are."""
    batch = batch_of(model, task)
    second = (torch.arange(batch["input_ids"].shape[1]) > 4).long()
    return batch | {"token_type_ids": second.expand_as(batch["input_ids"]).contiguous()}


def case_of(model_type: str, task: str, plan: str, make_batch=batch_of, **changes: Any):
    model = tiny_model(model_type, task=task, **changes)
    return reference(model, make_batch(model, task)), PLANS[plan]


@pytest.mark.slow
def test_every_head_of_a_family_with_segments():
    cases = {
        "rows": case_of("bert", SEQUENCE, "one stage", batch_with_types),
        "rows, stages": case_of("bert", SEQUENCE, "two stages", batch_with_types),
        "positions": case_of("bert", TOKEN, "two stages", batch_with_types),
        "masked": case_of("bert", MASKED, "four stages", batch_with_types),
        "answers": case_of("bert", ANSWER, "one stage", batch_with_types),
        "answers, stages": case_of("bert", ANSWER, "two stages"),
    }
    check_cases(4, cases)


@pytest.mark.slow
def test_families_of_encoders_and_decoders():
    cases = {
        "roberta": case_of("roberta", MASKED, "one stage"),
        "modernbert": case_of("modernbert", SEQUENCE, "two stages"),
        "deberta-v2": case_of("deberta-v2", TOKEN, "one stage"),
        "distilbert": case_of("distilbert", SEQUENCE, "four stages"),
        "electra": case_of("electra", ANSWER, "one stage"),
        "gptj, answers": case_of("gptj", ANSWER, "one stage"),  # caches unless its configuration says otherwise
        "roberta, answers": case_of("roberta", ANSWER, "four stages"),
        "gpt2": case_of("gpt2", SEQUENCE, "two stages"),
        "llama": case_of("llama", SEQUENCE, "one stage"),
    }
    check_cases(4, cases, evaluation=False)


def regression(model: PreTrainedModel, task: str) -> dict[str, torch.Tensor]:
    batch = batch_of(model, task)
    return batch | {"labels": torch.linspace(-1.0, 2.0, len(batch["input_ids"]))}


def several_labels(model: PreTrainedModel, task: str) -> dict[str, torch.Tensor]:
    batch = batch_of(model, task)
    return batch | {"labels": torch.arange(len(batch["input_ids"]) * LABELS).view(-1, LABELS).remainder(2).float()}


def some_ignored(model: PreTrainedModel, task: str) -> dict[str, torch.Tensor]:
    batch = batch_of(model, task)
    batch["labels"][1] = -100
    return batch


@pytest.mark.slow
def test_every_kind_of_labels_of_rows():
    multi = dict(problem_type="multi_label_classification")
    cases = {
        "numbers": case_of("bert", SEQUENCE, "two stages", regression, num_labels=1),
        "several labels": case_of("bert", SEQUENCE, "one stage", several_labels, **multi),
        "ignored rows": case_of("bert", SEQUENCE, "two stages", some_ignored),
    }
    check_cases(4, cases)


def test_the_error_that_a_row_too_many_is_counted():
    case = case_of("bert", SEQUENCE, "four stages")

    def inject():
        return patch.object(executor, "count_targets", lambda batch, loss: loss.count(loss.targets_of(batch)) + 1)

    assert "loss" in seen(*case, inject)


class Labelled(torch.utils.data.Dataset):
    """Holds rows of different lengths with one label each."""

    def __init__(self, count: int, seed: int = 1):
        draw = torch.Generator().manual_seed(seed)
        lengths = torch.randint(3, 10, (count,), generator=draw).tolist()
        self.rows = [torch.randint(4, VOCABULARY, (n,), generator=draw) for n in lengths]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self.rows[index], "labels": int(self.rows[index].sum()) % LABELS}


def collate_labelled(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    ids = [row["input_ids"] for row in rows]
    pad = torch.nn.utils.rnn.pad_sequence
    return {
        "input_ids": pad(ids, True, 3),
        "attention_mask": pad([torch.ones_like(one) for one in ids], True, 0),
        "labels": torch.tensor([row["labels"] for row in rows]),
    }


def predictions(trainer: Trainer) -> list:
    found = trainer.predict(trainer.eval_dataset)
    return [found.predictions, found.label_ids, found.metrics["test_loss"]]


def trained(task: str, rows: type[Labelled], collator, **more: Any) -> oracle.Case:
    """Returns the case of a BERT with the head of a task, whose last batches are smaller."""
    data = dict(data_collator=lambda: collator, eval_dataset=lambda: rows(10, seed=2))
    return oracle.Case(build=lambda: tiny_model("bert", task=task), train=lambda: rows(27), trainer=data, **more)


EVALUATED = dict(eval_strategy="steps", eval_steps=2)


@pytest.mark.slow
def test_trainer_with_a_classifier():
    """Losses, updates, evaluation and predictions of plain Trainer."""
    case = functools.partial(trained, SEQUENCE, Labelled, collate_labelled, after=predictions)
    oracle.check_cases(
        {
            "one stage": case(plan=PLANS["one stage"], options=EVALUATED),
            "stages": case(plan=PLANS["two stages"], options=dict(label_smoothing_factor=0.1)),
        }
    )


@pytest.mark.slow
def test_a_classifier_given_by_name_is_that_of_its_folder(tmp_path):
    """Each rank reads its own weights of the model with the head that was saved."""
    tiny_model("bert", task=SEQUENCE).save_pretrained(tmp_path / "saved")

    def steps_of(folder: Path, **more: Any) -> tuple[list[tuple[float, float]], str]:
        once = dict(gradient_accumulation_steps=1)
        made = trainer(folder, train_dataset=Labelled(27), data_collator=collate_labelled, options=once, **more)
        made.train()
        steps = [(log["loss"], log["grad_norm"]) for log in made.state.log_history if "loss" in log]
        return steps, type(made.model).__name__

    wanted, name = steps_of(tmp_path / "plain", model=tiny_model("bert", task=SEQUENCE), trainer_class=Trainer)
    assert len(wanted) == 6
    named = dict(model=str(tmp_path / "saved"), plan=PLANS["one stage"])
    for steps, found in on_ranks(lambda: steps_of(tmp_path / "run", **named), 4):
        assert found == name
        assert steps == [pytest.approx(step, rel=1e-5) for step in wanted]


class Answered(Labelled):
    """Holds rows with an answer each, of which some begin or end behind their row."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = self.rows[index]
        start = int(ids[0]) % len(ids)
        found = {"start_positions": start if index % 5 else 1000, "end_positions": len(ids) - 1 if index % 3 else 1000}
        return {"input_ids": ids} | found


def collate_answered(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    names = ("start_positions", "end_positions")
    batch = collate_labelled([{"input_ids": row["input_ids"], "labels": 0} for row in rows])
    del batch["labels"]
    return batch | {name: torch.tensor([row[name] for row in rows]) for name in names}


def starts_alone(trainer_class: type[Trainer]) -> type[Trainer]:
    """Looks at the first positions alone, by a loss of its own."""

    class StartsAlone(trainer_class):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            start = inputs.pop("start_positions")
            inputs.pop("end_positions")
            outputs = model(**inputs)
            ignored = start.masked_fill(start >= outputs.start_logits.shape[1], -100)
            losses = torch.nn.functional.cross_entropy(outputs.start_logits, ignored, reduction="sum")
            loss = losses / 8 + outputs.end_logits.pow(2).mean()
            return (loss, outputs) if return_outputs else loss

    return StartsAlone


@pytest.mark.slow
def test_trainer_with_answers():
    """Predictions and labels are pairs: those of first and of last positions. Logits of padding count in the loss, so
    that the padding of a step's batches has to be that of one batch.
    """
    case = functools.partial(trained, ANSWER, Answered, collate_answered)
    cases = {}
    for plan in ("one stage", "two stages"):
        cases[plan] = case(plan=PLANS[plan], options=EVALUATED, after=predictions)
        cases[f"own loss, {plan}"] = case(plan=PLANS[plan], override=starts_alone, accumulates=True)
    oracle.check_cases(cases)


def test_what_has_no_known_loss_is_refused():
    class Unknown(type(tiny_model("bert", task=SEQUENCE))):
        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            output.loss = None if output.loss is None else 2.0 * output.loss
            return output

    model = tiny_model("bert", task=SEQUENCE)
    model.__class__ = Unknown
    with pytest.raises(ValueError, match="Unknown has no head with a loss of labels"):
        adapter_for(model)
    albert = tiny_model("albert", task=SEQUENCE)
    with pytest.raises(ValueError, match="Albert.* has no list of layers that its forward calls once each"):
        adapter_for(albert)
