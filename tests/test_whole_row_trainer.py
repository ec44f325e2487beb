# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""GalvatronTrainer with families that run on whole rows, against plain Trainer, and their checkpoints."""

from __future__ import annotations

import functools

import pytest
import torch

import oracle
from equivalence import single_stage, whole_weights
from galvatron_hf.plan import LayerStrategy
from plans import pipelined
from test_whole_rows import plans
from tiny_configurations import model_class, tiny_model
from tiny_models import LAYERS
from trainer_runs import assert_same_steps, on_ranks, run


PLANS = plans()
LAST = single_stage((LayerStrategy(sharding="zero2"), LayerStrategy(recompute="full")) * 2, 2)


@pytest.mark.slow
def test_trainer_on_whole_rows():
    """Losses, updates and evaluation: convolutions with experts, labels that are not shifted, logits that are none
    of the head's.
    """
    evaluated = dict(eval_dataset=lambda: oracle.Rows(10, seed=2))
    evaluation = dict(eval_strategy="steps", eval_steps=2)
    oracle.check_cases(
        {
            "hybrid": oracle.Case(plan=PLANS["mixed"], family="lfm2_moe", options=evaluation, trainer=evaluated),
            "not shifted": oracle.Case(plan=PLANS["1f1b"], build=lambda: tiny_model("bart")),
            "smoothed": oracle.Case(
                plan=PLANS["1f1b"], family="recurrent_gemma", options=dict(label_smoothing_factor=0.2)
            ),
        }
    )


@pytest.mark.slow
def test_checkpoints_of_whole_rows(tmp_path):
    """A run under one plan goes on under another, and what it saves is a model of its family."""
    first = pipelined([(0,), (1,)], (LayerStrategy(),) * LAYERS, micro_batches=2)
    models = {name: tiny_model(name) for name in ("bert", "mamba")}

    def work():
        found = {}
        for name, model in models.items():
            folder = tmp_path / name
            options = dict(save_strategy="steps", save_steps=3)
            whole = run(folder, first, model=tiny_model(name), options=options)
            weights = functools.partial(whole_weights, plain=model)
            resumed = run(
                folder,
                LAST,
                model=tiny_model(name),
                resume=folder / "checkpoint-3",
                then=lambda trainer, weights=weights: weights(trainer.model),
            )
            assert_same_steps(resumed, whole, after=3)
            found[name] = resumed.result
        return found

    for name, weights in on_ranks(work, 2)[0].items():
        loaded = model_class(name).from_pretrained(tmp_path / name / "checkpoint-6", dtype=torch.float32)
        for key, weight in loaded.named_parameters():
            assert float((weight - weights[key]).abs().max()) <= 1e-5 * float(weights[key].abs().max()), key
