# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""GalvatronTrainer and GalvatronSeq2SeqTrainer with encoder-decoders, against the plain Trainers on one process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer

import oracle
from encoder_decoder_models import ENCODER_DECODERS, two_stacks
from galvatron_hf import GalvatronSeq2SeqTrainer, GalvatronSeq2SeqTrainingArguments
from galvatron_hf.plan import LayerStrategy, VocabularyStrategy
from ranks import run_ranks
from test_encoder_decoders import PIPELINES, PLANS
from tiny_models import VOCABULARY
from trainer_runs import run, trainer


S, V = LayerStrategy, VocabularyStrategy
LIGHT = two_stacks([S(tensor=2), S(), S()], [S(ulysses=2), S(recompute="full")], micro_batches=2)


class Pairs(torch.utils.data.Dataset):
    """Holds pairs of a source and a target of different lengths; some targets are ignored."""

    def __init__(self, count: int, seed: int = 1):
        draw = torch.Generator().manual_seed(seed)
        lengths = torch.randint(3, 10, (count, 2), generator=draw).tolist()
        self.rows = [[torch.randint(4, VOCABULARY, (n,), generator=draw) for n in pair] for pair in lengths]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        source, target = self.rows[index]
        return {"input_ids": source, "labels": target.masked_fill(target % 11 == 0, -100)}


def collate_pairs(rows: list[dict[str, torch.Tensor]], pad: int = 0) -> dict[str, torch.Tensor]:
    pad_rows = torch.nn.utils.rnn.pad_sequence
    return {
        "input_ids": pad_rows([row["input_ids"] for row in rows], True, pad),
        "attention_mask": pad_rows([torch.ones_like(row["input_ids"]) for row in rows], True, 0),
        "labels": pad_rows([row["labels"] for row in rows], True, -100),
    }


def with_decoder_tokens(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Collates as DataCollatorForSeq2Seq with a model does."""
    batch = collate_pairs(rows)
    return batch | {"decoder_input_ids": ENCODER_DECODERS["t5"].build()._shift_right(batch["labels"])}


def case(plan, family: str = "t5", collator=collate_pairs, **options: Any) -> oracle.Case:
    trainer = dict(data_collator=lambda: collator, eval_dataset=lambda: Pairs(10, seed=2))
    return oracle.Case(plan=plan, family=family, train=lambda: Pairs(27), trainer=trainer, **options)


def predictions(trainer: Trainer) -> list:
    """Returns the logits, the encoder's output, and the metrics of a prediction."""
    found = trainer.predict(trainer.eval_dataset)
    logits, encoded = found.predictions
    return [logits, encoded, found.label_ids, found.metrics["test_loss"]]


def test_losses_updates_and_predictions():
    evaluated = dict(eval_strategy="steps", eval_steps=2)
    oracle.check_cases(
        {
            "evaluated": case(LIGHT, options=evaluated),
            "predicted": case(PLANS["sequence"], after=predictions, options=dict(max_steps=1)),
        }
    )


@pytest.mark.slow
def test_losses_updates_and_predictions_in_pipelines():
    oracle.check_cases(
        {
            "pipeline": case(PIPELINES["inside the decoder"], family="bart"),
            "smoothed": case(LIGHT, collator=with_decoder_tokens, options=dict(label_smoothing_factor=0.2)),
            "predicted in a pipeline": case(
                PIPELINES["between the stacks"], after=predictions, options=dict(max_steps=1)
            ),
        }
    )


def generated(folder, trainer_class, args_class, eval_rows: int, **options: Any) -> list:
    """Returns losses of two steps, then generated tokens and labels of rows, and their loss."""
    args = args_class(
        output_dir=str(folder),
        use_cpu=True,
        max_steps=2,
        per_device_train_batch_size=eval_rows,
        per_device_eval_batch_size=eval_rows,
        predict_with_generate=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        **options,
    )
    GradientState._reset_state()
    model = ENCODER_DECODERS["t5"].build(eos_token_id=2)
    made = trainer_class(model, args, data_collator=collate_pairs, train_dataset=Pairs(27))
    loss = made.train().training_loss
    found = made.predict(Pairs(10, seed=2), max_new_tokens=6, num_beams=2)
    return [found.predictions, found.label_ids, loss, found.metrics["test_loss"]]


@pytest.mark.slow
def test_tokens_are_generated_as_seq2seq_trainer_generates_them(tmp_path):
    wanted = generated(tmp_path / "plain", Seq2SeqTrainer, Seq2SeqTrainingArguments, 8)
    AcceleratorState._reset_state(True)

    def work() -> list:
        options = dict(parallel_plan=LIGHT)
        return generated(tmp_path / "ranks", GalvatronSeq2SeqTrainer, GalvatronSeq2SeqTrainingArguments, 2, **options)

    for found in run_ranks(work, 4):
        assert np.array_equal(found[0], wanted[0]) and np.array_equal(found[1], wanted[1])
        assert found[2:] == pytest.approx(wanted[2:], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["t5", "bart"])
def test_a_run_resumes_under_another_plan(tmp_path, family):
    options = dict(train_dataset=Pairs(27), data_collator=collate_pairs)
    saving = dict(save_strategy="steps", save_steps=3)
    first, second = PIPELINES["four stages"], PLANS["tensor"]

    def work():
        whole = run(tmp_path / "whole", second, model=ENCODER_DECODERS[family].build(), **options)
        run(tmp_path / "parts", first, model=ENCODER_DECODERS[family].build(), options=saving, **options)
        checkpoint = tmp_path / "parts" / "checkpoint-3"
        resumed = run(tmp_path / "rest", second, model=ENCODER_DECODERS[family].build(), resume=checkpoint, **options)
        return whole, resumed

    for whole, resumed in run_ranks(work, 4):
        wanted = [pytest.approx(step, rel=1e-5) for step in whole.steps(after=3)]
        assert resumed.steps(after=3) == wanted and len(wanted) == 3
        for name, weight in whole.weights.items():
            torch.testing.assert_close(resumed.weights[name], weight, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_a_saved_model_loads_in_transformers_and_by_shard(tmp_path):
    plain = ENCODER_DECODERS["t5"].build()
    options = dict(train_dataset=Pairs(27), data_collator=collate_pairs)
    short = dict(max_steps=1)

    def work():
        made = run(
            tmp_path / "run",
            PIPELINES["four stages"],
            model=ENCODER_DECODERS["t5"].build(),
            options=short,
            then=lambda trainer: trainer.save_model(str(tmp_path / "saved")),
            **options,
        )
        again = trainer(tmp_path / "again", LIGHT, model=str(tmp_path / "saved"), options=short, **options)
        return made.weights, again.train().training_loss

    found = run_ranks(work, 4)
    weights = {name: weight for of_rank, _ in found for name, weight in of_rank.items()}
    loaded = type(plain).from_pretrained(tmp_path / "saved")
    for name, weight in loaded.named_parameters():
        assert torch.equal(weight, weights[name])
    AcceleratorState._reset_state(True)
    at_once = short | dict(gradient_accumulation_steps=1)  # T5's own loss is not divided by accumulation
    plain_run = run(tmp_path / "plain", trainer_class=Trainer, model=loaded, options=at_once, **options)
    ((wanted,),) = plain_run.steps("loss")
    assert [loss for _, loss in found] == pytest.approx([wanted] * 4, rel=1e-5)
