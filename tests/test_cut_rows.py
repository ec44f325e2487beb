# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Encoders and heads whose ends run on whole rows, and whose layers are cut by tensor and sequence ranks, against one
process.
"""

from __future__ import annotations

import copy
from unittest.mock import patch

import pytest
import torch
from transformers import PreTrainedModel

from equivalence import reference, single_stage
from family_runs import batch_of
from galvatron_hf.models.families import adapter_for
from galvatron_hf.parallel import model_runner
from galvatron_hf.parallel.activation.micro_batch import MicroBatch
from galvatron_hf.parallel.layers.parallel_layer import ParallelLayer
from galvatron_hf.parallel.parallelize import parallelize
from galvatron_hf.parallel.validate import check_model
from galvatron_hf.plan import LayerStrategy, VocabularyStrategy
from plans import pipelined
from ranks import run_ranks
from test_encoder_decoders import seen
from test_heads import ANSWER, MASKED, SEQUENCE, TOKEN, batch_with_types
from test_parallelize import check_cases
from tiny_configurations import tiny_model
from tiny_models import BATCHES


S = LayerStrategy
SP = dict(tensor=2, megatron_sp=True)
MIXED = (S(tensor=2), S(ulysses=4, recompute="full"), S(**SP, ulysses=2, sharding="zero2"), S())
FOUR = (S(tensor=4, sharding="replicate"), S(tensor=4, megatron_sp=True, recompute="full"), S(ulysses=2), S(**SP))
PAIRS, ZERO2 = [(0, 1), (2, 3)], VocabularyStrategy(sharding="zero2")
OF_PAIRS = (S(tensor=2), S(ulysses=2, recompute="full"), S(**SP), S(sharding="replicate"))
PLANS = {
    "mixed": single_stage(MIXED, 4, micro_batches=2),
    "four": single_stage(FOUR, 4),
    "1f1b": pipelined(PAIRS, OF_PAIRS, micro_batches=2),
    "interleaved": pipelined(PAIRS * 2, OF_PAIRS, "interleaved", micro_batches=2),
    "zero_bubble": pipelined(
        PAIRS, (S(tensor=2, sharding="replicate"),) * 4, "zero_bubble", ends=ZERO2, micro_batches=2
    ),
}


def one_row(model: PreTrainedModel, task: str) -> dict[str, torch.Tensor]:
    """Returns fewer rows than ranks."""
    return {name: value[:1] for name, value in batch_of(model, task).items()}


def with_positions(model: PreTrainedModel, task: str) -> dict[str, torch.Tensor]:
    """Returns rows whose positions begin with different numbers."""
    batch = batch_of(model, task)
    rows, length = batch["input_ids"].shape
    positions = torch.arange(length)[None] + 2 * torch.arange(rows)[:, None]
    return batch | {"position_ids": positions}


def padded_left(model: PreTrainedModel, task: str) -> dict[str, torch.Tensor]:
    return BATCHES["left"]()


def case_of(model_type: str, task: str, plan: str, make_batch=batch_of, **changes):
    model = tiny_model(model_type, task=task, **changes)
    assert adapter_for(model).stacks[0].cut
    return reference(model, make_batch(model, task)), PLANS[plan]


@pytest.mark.slow
def test_encoders_under_tensor_and_sequence_ranks():
    cases = {
        "masked": case_of("bert", MASKED, "mixed", padded_left),
        "rows": case_of("bert", SEQUENCE, "1f1b", batch_with_types),
        "windows": case_of("modernbert", TOKEN, "four"),
        "answers": case_of("distilbert", ANSWER, "interleaved"),
        "one row": case_of("roberta", SEQUENCE, "mixed", one_row),
    }
    check_cases(4, cases)


@pytest.mark.slow
def test_decoders_with_other_heads_under_tensor_and_sequence_ranks():
    cases = {
        "positions of rows": case_of("llama", SEQUENCE, "mixed", with_positions),
        "fused projections": case_of("gpt2", TOKEN, "1f1b"),
        "experts": case_of("qwen3_moe", SEQUENCE, "four"),
    }
    check_cases(4, cases)


@pytest.mark.slow
def test_more_families_under_tensor_and_sequence_ranks():
    cases = {
        "norm inside a region": case_of("roberta-prelayernorm", MASKED, "zero_bubble"),
        "electra": case_of("electra", MASKED, "interleaved"),
        "gte": case_of("gte", TOKEN, "mixed"),
        "jina": case_of("jina_embeddings_v3", MASKED, "four"),
        "nomic": case_of("nomic_bert", SEQUENCE, "zero_bubble"),
        "camembert, one row": case_of("camembert", TOKEN, "four", one_row),
        "modernbert, left": case_of("modernbert", MASKED, "mixed", padded_left),
        "gemma2, windows": case_of("gemma2", SEQUENCE, "mixed"),
        "phi3": case_of("phi3", TOKEN, "four"),
        "llama, answers": case_of("llama", ANSWER, "1f1b", with_positions),
        "nanochat": case_of("nanochat", "causal-lm", "mixed"),
        "hidden states scaled before the head": case_of("minicpm3", "causal-lm", "mixed"),
        "eager": case_of("bert", TOKEN, "mixed", attn_implementation="eager"),
    }
    check_cases(4, cases, evaluation=False)


def shared_positions(block: ParallelLayer, batch: MicroBatch, tensor: torch.Tensor) -> torch.Tensor:
    """Takes the first row for all."""
    return block._with_added_positions(batch, tensor)[:1]


ERRORS = {
    "positions of other rows": (
        case_of("llama", SEQUENCE, "mixed", with_positions),
        lambda: patch.object(ParallelLayer, "_of_attended_rows", shared_positions),
    ),
    "added positions are attended to": (
        case_of("bert", SEQUENCE, "mixed"),
        lambda: patch.object(
            model_runner, "add_positions", lambda x, length, value: _add_positions(x, length, value or 1)
        ),
    ),
}
_add_positions = model_runner.add_positions


@pytest.mark.parametrize("error", ERRORS)
def test_errors_are_seen(error):
    case, inject = ERRORS[error]
    assert seen(*case, inject)


def test_dropout_is_replayed_and_is_that_of_one_row_on_all_tensor_ranks():
    model = tiny_model("bert", task=SEQUENCE, hidden_dropout_prob=0.3, attention_probs_dropout_prob=0.2)
    batch = batch_of(model, SEQUENCE)

    def work():
        losses, gradients = [], []
        for recompute in ("none", "full"):
            layers = (S(tensor=2, recompute=recompute), S(**SP, recompute=recompute)) * 2
            parallel = parallelize(copy.deepcopy(model), single_stage(layers, 2))
            losses.append(float(parallel.forward_backward(batch)))
            gradients.append(float(parallel.grad_norm()))
        return losses, gradients

    for losses, gradients in run_ranks(work, 2):
        assert losses[0] == losses[1]
        assert gradients[0] == pytest.approx(gradients[1], rel=1e-6)


# Whether attention is causal, and why layers are not cut: a bias that earlier layers make, a mask with windows that no
# configuration names, a mask of another kind, modules that no table names.
FOUND = {
    ("llama", SEQUENCE): (True, None),
    ("bert", "causal-lm"): (True, None),
    ("bert", MASKED): (False, None),
    ("mpnet", MASKED): (None, "position_bias"),
    ("openai_privacy_filter", TOKEN): (None, "mask of their own kind"),
    ("megatron-bert", TOKEN): (None, "no table names the modules"),
}


@pytest.mark.parametrize("model_type, task", FOUND)
def test_what_layers_are_called_with_is_found(model_type, task):
    model = tiny_model(model_type, task=task, **({"is_decoder": True} if task == "causal-lm" else {}))
    (stack,) = adapter_for(model).stacks
    causal, reason = FOUND[model_type, task]
    if reason is None:
        assert stack.cut and stack.causal is causal
    else:
        assert not stack.cut and reason in stack.unsupported


def test_ends_on_whole_rows_have_no_tensor_degree():
    model = tiny_model("bert", task=SEQUENCE)
    plan = single_stage((S(tensor=2),) * 4, 2, embedding=VocabularyStrategy(tensor=2))
    with pytest.raises(ValueError, match="embedding has tensor 2.*BertForSequenceClassification.*use tensor 1"):
        check_model(model, adapter_for(model), plan)
