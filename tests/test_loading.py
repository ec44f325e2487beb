# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Models that no rank ever has whole: read from files piece by piece, or initialised piece by piece."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, PreTrainedModel

from equivalence import whole_weights
from galvatron_hf import ParallelPlan, parallelize
from galvatron_hf.parallel.mesh import WorldMesh
from plans import mixed_plans, pipeline_plans, uniform_plans
from ranks import run_ranks
from tiny_models import FAMILIES


PLANS = mixed_plans() | uniform_plans(4) | pipeline_plans()
FEW = ("mixed_b", "shuffled", "1f1b_uneven", "interleaved", "zero_bubble_loop")


def meta_model(plain: PreTrainedModel) -> PreTrainedModel:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(copy.deepcopy(plain.config), dtype=plain.dtype)


def different(seen: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> list[str]:
    assert seen.keys() == wanted.keys()
    return [name for name in wanted if not torch.equal(seen[name], wanted[name])]


def weights_of(plain: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: tensor.detach() for name, tensor in plain.named_parameters()}


@pytest.mark.parametrize("family", ["llama", "llama_tied", "gpt2", "phi3", "gemma2"])
def test_weights_read_in_pieces_are_those_of_from_pretrained(tmp_path, family):
    FAMILIES[family].build().save_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)

    def work() -> dict[str, list[str]]:
        wrong, world = {}, WorldMesh("cpu")
        for name in FEW:
            model = parallelize(meta_model(plain), PLANS[name], world, weights=tmp_path).model
            wrong[name] = different(whole_weights(model, plain), weights_of(plain))
        return wrong

    for wrong in run_ranks(work, 4):
        assert wrong == {name: [] for name in FEW}


@pytest.mark.parametrize("family", ["llama", "llama_tied", "gpt2", "phi3", "gemma2"])
def test_initial_weights_are_those_of_one_process_under_every_plan(family):
    config = FAMILIES[family].build().config
    torch.manual_seed(7)
    plain = AutoModelForCausalLM.from_config(copy.deepcopy(config))
    after = torch.rand(())

    def work() -> dict[str, list[str]]:
        wrong, world = {}, WorldMesh("cpu")
        for name in FEW:
            torch.manual_seed(7 + dist.get_rank())
            model = parallelize(meta_model(plain), PLANS[name], world).model
            assert torch.equal(torch.rand(()), after)
            wrong[name] = different(whole_weights(model, plain), weights_of(plain))
        return wrong

    for wrong in run_ranks(work, 4):
        assert wrong == {name: [] for name in FEW}
