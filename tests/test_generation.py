# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Generation by all ranks with the shards that they have, against the plain model's `generate`."""

from __future__ import annotations

import copy
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel

from encoder_decoder_models import ENCODER_DECODERS, padded_batch
from equivalence import single_stage
from galvatron_hf.parallel.layers import attention
from galvatron_hf.parallel.parallelize import parallelize
from galvatron_hf.plan import LayerStrategy, ParallelPlan, VocabularyStrategy
from galvatron_hf.trainer import generation
from plans import mixed_plans, pipelined
from ranks import run_ranks
from test_encoder_decoders import PLANS
from tiny_configurations import tiny_model
from tiny_models import BATCHES, FAMILIES, VOCABULARY


S, V = LayerStrategy, VocabularyStrategy
CUT = single_stage(
    (S(tensor=2, megatron_sp=True), S(ulysses=4, sharding="zero2"), S(tensor=4, recompute="full"), S()),
    4,
    embedding=V(tensor=2),
    head=V(tensor=2),
)
DATA = single_stage((S(), S(sharding="replicate"), S(sharding="zero2"), S(shard_degree=2)), 4)
GREEDY = dict(max_new_tokens=6, do_sample=False)


def prompts(model: PreTrainedModel, rows: int = 5) -> dict[str, torch.Tensor]:
    """Returns prompts padded as the family generates from."""
    if model.config.is_encoder_decoder:
        batch = padded_batch(model, rows)
        del batch["labels"]
        return batch
    batch = BATCHES["left"]()
    return {name: batch[name].repeat(2, 1)[:rows] for name in ("input_ids", "attention_mask")}


def case_of(model: PreTrainedModel, plan: ParallelPlan, rows: int = 5, **options: Any):
    """Returns a model, a plan, arguments of `generate`, and what the plain model generates."""
    given = prompts(model, rows) | GREEDY | options
    with torch.no_grad():
        wanted = copy.deepcopy(model).eval().generate(**given)
    return model, plan, given, wanted.tolist()


def generated(cases: dict) -> dict[str, Any]:
    """Returns by case what all ranks generate if it is not what the plain model does."""

    def work() -> dict[str, Any]:
        wrong = {}
        with patch.object(generation, "whole_weights", side_effect=AssertionError("the weights are gathered")):
            for name, (model, plan, given, wanted) in cases.items():
                parallel = parallelize(copy.deepcopy(model), plan)
                parallel.model.train()
                parallel.layers[1].eval()
                for _ in range(2):  # before the first training step, and once more
                    found = generation.generate(parallel, **given).tolist()
                    if found != wanted:
                        wrong[name] = found, wanted
                assert parallel.model.training and not parallel.layers[1].training and parallel.layers[2].training
        return wrong

    return run_ranks(work, 4)[0]


def ends_early(model: PreTrainedModel) -> dict[str, Any]:
    """Returns options by which rows end at different steps."""
    return dict(eos_token_id=list(range(4, VOCABULARY, 5)), pad_token_id=0, max_new_tokens=12)


def test_decoders_and_encoder_decoders_generate_with_their_shards():
    llama, t5 = FAMILIES["llama"].build(), ENCODER_DECODERS["t5"].build()
    cases = {
        "cut": case_of(llama, CUT),
        "rows that end early": case_of(llama, mixed_plans()["mixed_a"], **ends_early(llama)),
        "beams": case_of(llama, CUT, num_beams=3, num_return_sequences=2),
        "fewer rows than ranks": case_of(FAMILIES["gpt2"].build(), DATA, rows=2),
        "two stacks": case_of(t5, PLANS["sequence"], **ends_early(t5)),
        "two stacks, beams": case_of(t5, PLANS["mixed"], num_beams=2),
    }
    assert not generated(cases)


@pytest.mark.slow
def test_every_kind_of_family_generates_with_its_shards():
    build = {**FAMILIES, **ENCODER_DECODERS}
    cases = {name: case_of(build[name].build(), CUT) for name in ("gpt2", "gemma2", "phi3", "qwen2") if name in build}
    cases |= {
        name: case_of(build[name].build(), PLANS["mixed"]) for name in ("bart", "marian", "m2m_100", "umt5", "pegasus")
    }
    cases |= {
        "whole rows": case_of(tiny_model("mamba"), DATA),
        "ends on whole rows": case_of(tiny_model("nanochat"), single_stage((S(tensor=2), S(), S(ulysses=2), S()), 4)),
        "eager": case_of(ENCODER_DECODERS["t5_eager"].build(), PLANS["tensor"]),
        "without a cache": case_of(FAMILIES["llama"].build(), CUT, use_cache=False),
    }
    assert not generated(cases)


def test_training_goes_on_after_a_generation():
    """The loss and the gradients of a step are those without a generation before."""
    model, batch = FAMILIES["llama"].build(), BATCHES["right"]()

    def work() -> list[float]:
        found = []
        for generates in (False, True):
            parallel = parallelize(copy.deepcopy(model), CUT)
            if generates:
                generation.generate(parallel, **prompts(model), **GREEDY)
            found.append(float(parallel.forward_backward(batch)))
            found.append(float(parallel.grad_norm()))
        return found

    for loss, norm, other_loss, other_norm in run_ranks(work, 4):
        assert loss == other_loss and norm == other_norm


def test_an_error_of_the_first_head_is_seen():
    t5 = ENCODER_DECODERS["t5"].build()
    cases = {"bias of other heads": case_of(t5, PLANS["tensor"])}
    original = attention._attend_on_whole_rows

    def other_heads(module, query, key, value, mask, **kwargs):
        if kwargs.get(attention.BIAS) is not None:
            kwargs[attention.BIAS] = kwargs[attention.BIAS].roll(query.shape[1], 1)
        return original(module, query, key, value, mask, **kwargs)

    with patch.object(attention, "_attend_on_whole_rows", other_heads):
        assert generated(cases)


def test_what_a_given_configuration_leaves_open_is_that_of_the_models_own():
    model = FAMILIES["llama"].build()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = list(range(4, VOCABULARY, 5)), 3
    given = prompts(model) | {"generation_config": GenerationConfig(max_new_tokens=9)}
    wanted = copy.deepcopy(model).eval().generate(**given).tolist()
    assert not generated({"padding": (model, CUT, given, wanted)})
    drawing = copy.deepcopy(model)
    drawing.generation_config.do_sample = True

    def work() -> str | None:
        return generation.shared_obstacle(parallelize(copy.deepcopy(drawing), ParallelPlan.uniform(2, 4)), **given)

    assert run_ranks(work, 2)[0] == "tokens are drawn at random, as one process draws them"


OBSTACLES = {
    "each rank's clock would end its rows": (None, dict(max_time=1.0)),
    "the plan has several stages": (pipelined([(0,), (1,)], (S(),) * 4, micro_batches=2), {}),
    "tokens are drawn at random, as one process draws them": (None, dict(do_sample=True)),
    "more than tokens is returned": (None, dict(return_dict_in_generate=True)),
    "streamer is a object": (None, dict(streamer=object())),
    "there is a stopping_criteria": (None, dict(stopping_criteria=[len])),
    "there are no rows of tokens": (None, dict(input_ids=None, attention_mask=None)),
}


def test_what_ranks_do_not_share_says_why():
    model = FAMILIES["llama"].build()

    def work() -> dict[str, str | None]:
        plain = parallelize(copy.deepcopy(model), ParallelPlan.uniform(2, 4))
        return {
            reason: generation.shared_obstacle(
                plain if plan is None else parallelize(copy.deepcopy(model), plan), **prompts(model) | GREEDY | options
            )
            for reason, (plan, options) in OBSTACLES.items()
        }

    found = run_ranks(work, 2)[0]
    assert {reason: reason for reason in OBSTACLES} == found
