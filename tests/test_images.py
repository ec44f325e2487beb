# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Models that classify images, whose patches are the positions, against one process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import ViTConfig, ViTForImageClassification, default_data_collator

import oracle
from equivalence import reference
from family_runs import batch_of
from galvatron_hf.models.families import adapter_for
from galvatron_hf.parallel.parallelize import parallelize
from galvatron_hf.plan import ParallelPlan, Precision
from ranks import run_ranks
from test_cut_rows import PLANS
from test_heads import EVALUATED, predictions
from test_parallelize import check_cases
from tiny_configurations import LABELS, tiny_model
from trainer_runs import on_ranks, trainer


IMAGE = "image-classification"


def case_of(model_type: str, plan: str, **changes: Any):
    model = tiny_model(model_type, task=IMAGE, **changes)
    assert adapter_for(model).stacks[0].cut
    return reference(model, batch_of(model, IMAGE)), PLANS[plan]


def test_patches_under_every_kind_of_plan():
    """The 17 positions of an image are divided by no degree."""
    cases = {
        "a class token": case_of("vit", "mixed"),
        "stages": case_of("vit", "1f1b"),
        "a tower": case_of("clip", "four"),
        "attention after the layers": case_of("siglip", "interleaved"),
    }
    check_cases(4, cases)


@pytest.mark.slow
def test_more_families_of_images():
    cases = {
        "deit": case_of("deit", "zero_bubble"),
        "dinov2": case_of("dinov2", "interleaved"),
        "beit": case_of("beit", "mixed"),
        "ijepa": case_of("ijepa", "four"),
        "wide images": case_of("vit", "1f1b", image_size=(8, 16)),
    }
    check_cases(4, cases, evaluation=False)


class Images(torch.utils.data.Dataset):
    def __init__(self, count: int, seed: int = 1):
        self.images = torch.randn(count, 3, 16, 16, generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"pixel_values": self.images[index], "labels": index % LABELS}


@pytest.mark.slow
def test_trainer_with_images():
    """Losses, updates, evaluation and predictions of plain Trainer; the last batch is smaller."""
    data = dict(data_collator=lambda: default_data_collator, eval_dataset=lambda: Images(10, seed=2))
    case = dict(build=lambda: tiny_model("vit", task=IMAGE), train=lambda: Images(27), trainer=data)
    oracle.check_cases(
        {
            "one stage": oracle.Case(**case, plan=PLANS["mixed"], options=EVALUATED, after=predictions),
            "stages": oracle.Case(**case, plan=PLANS["1f1b"], options=EVALUATED, after=predictions),
        }
    )


def test_a_configuration_without_a_padding_token_trains(tmp_path):
    """Configurations of images have none, but for those of the other tests."""
    config = ViTConfig(
        hidden_size=16, intermediate_size=20, num_attention_heads=2, num_hidden_layers=2, image_size=16, patch_size=8
    )
    assert not hasattr(config, "pad_token_id")
    model = ViTForImageClassification(config)
    options = dict(max_steps=1, gradient_accumulation_steps=2)

    def work() -> int:
        made = trainer(
            tmp_path,
            ParallelPlan.uniform(1, 2),
            model=model,
            train_dataset=[row | {"labels": 0} for row in Images(4)],
            data_collator=default_data_collator,
            options=options,
        )
        made.train()
        return made.state.global_step

    assert on_ranks(work, 1) == [1]


def test_ranks_that_call_with_different_images_are_told():
    model = tiny_model("vit", task=IMAGE)

    def work():
        parallel = parallelize(model, PLANS["four"])
        images = torch.full((4, 3, 16, 16), float(dist.get_rank()))
        with pytest.raises(ValueError, match="called the model with different inputs"):
            parallel.model(pixel_values=images)

    run_ranks(work, 4)


def test_images_of_another_size_are_refused_before_anything_is_computed():
    model = tiny_model("vit", task=IMAGE)

    def work():
        parallel = parallelize(model, PLANS["four"])
        batch = {"pixel_values": torch.zeros(4, 3, 8, 8), "labels": torch.zeros(4, dtype=torch.long)}
        with pytest.raises(ValueError, match=r"images have the shape \(3, 8, 8\).*\(3, 16, 16\); resize them"):
            parallel.forward_backward(batch)

    run_ranks(work, 4)


def test_half_precision_follows_one_process():
    """Images are cast to the type of the weights."""
    model = tiny_model("vit", task=IMAGE)
    batch = batch_of(model, IMAGE)
    wanted = float(model(**batch).loss)

    def work():
        plan = replace(PLANS["mixed"], precision=Precision(compute="bf16"))
        return float(parallelize(model, plan).forward_backward(batch))

    assert run_ranks(work, 4) == [pytest.approx(wanted, rel=0.02)] * 4
