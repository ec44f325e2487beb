# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Families whose layers no adapter cuts run inside their own forward on whole rows: what is found out about them, and
their numbers under data parallelism, sharding, recompute, experts and pipelines, against one process.
"""

from __future__ import annotations

import copy

import pytest
import torch

from equivalence import check_equivalence, reference, single_stage
from galvatron_hf.models.families import adapter_for
from galvatron_hf.models.losses import NEXT_TOKEN, SAME_POSITION
from galvatron_hf.models.structure import find_structure
from galvatron_hf.parallel.parallelize import parallelize
from galvatron_hf.plan import LayerStrategy, ParallelPlan, VocabularyStrategy
from galvatron_hf.plan.deal import Deal
from plans import pipelined, shared_out
from ranks import run_ranks
from test_parallelize import check_cases
from tiny_configurations import tiny_model
from tiny_models import BATCHES, LAYERS


S, V = LayerStrategy, VocabularyStrategy
MIXED = (S(shard_degree=2), S(sharding="zero2", recompute="full"), S(sharding="replicate"), S(recompute="full"))
ZERO2 = tuple(S(sharding="zero2", recompute=recompute) for recompute in ("none", "full", "none", "none"))
PAIRS = [(0, 1), (2, 3)]


def plans(pipeline: bool = True) -> dict[str, ParallelPlan]:
    """Returns plans on four ranks with whole rows."""
    replicate = V(sharding="replicate")
    found = {
        "mixed": single_stage(MIXED, 4, micro_batches=2),
        "replicate": single_stage((S(sharding="replicate"),) * LAYERS, 4, embedding=replicate, head=replicate),
    }
    if pipeline:
        zero2 = V(sharding="zero2")
        found |= {
            "1f1b": pipelined(PAIRS, MIXED, micro_batches=2),
            "interleaved": pipelined(PAIRS * 2, MIXED, "interleaved", micro_batches=2),
            "zero_bubble": pipelined(PAIRS, ZERO2, "zero_bubble", ends=zero2, micro_batches=2),
        }
    return found


# Each with another side: linear attention and experts; a state space whose head's weight is read; layers that return
# tuples and a bias of positions; labels that are not shifted and a norm after the embedding; a module before the head
# with a shared bias; logits that no adapter knows; a state that no pipeline passes on; an adapter of masks by name.
FAST = {
    "qwen3_next": ("mixed",),
    "mamba": ("interleaved",),
    "falcon": ("zero_bubble",),
    "bart": ("mixed",),
    "bert": ("replicate", "1f1b"),
    "recurrent_gemma": ("zero_bubble",),
    "rwkv": ("mixed",),
    "deepseek_v32": ("interleaved",),
}


@pytest.mark.slow
def test_whole_rows_match_one_process():
    cases = {}
    for number, (model_type, names) in enumerate(FAST.items()):
        oracle = reference(tiny_model(model_type), BATCHES[("right", "left", "odd")[number % 3]]())
        cases |= {f"{model_type}, {name}": (oracle, plans()[name]) for name in names}
    check_cases(4, cases)


MORE = (
    "codegen",
    "mpt",
    "gptj",
    "opt",
    "jamba",
    "nemotron_h",
    "lfm2_moe",
    "minimax",
    "xglm",
    "whisper",
    "gemma4_text",
    "qwen3_next",
    "mamba",
    "falcon",
    "bert",
)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", MORE)
def test_more_families_match_one_process(model_type):
    # The gradients of one process differ by 1.1e-5 if it runs Jamba with the weights of seed 0 row by row.
    oracle = reference(tiny_model(model_type, seed=2 if model_type == "jamba" else 0), BATCHES["odd"]())
    pipeline = adapter_for(oracle.model).structure.pipeline_obstacle is None
    chosen = shared_out(plans(pipeline), MORE.index(model_type), 2)
    check_cases(4, {name: (oracle, plan) for name, plan in chosen.items()})


def test_experts_of_a_hybrid_family_are_spread():
    oracle = reference(tiny_model("qwen3_next"), BATCHES["right"]())
    layers = (S(expert=2), S(expert=4, recompute="full"), S(expert=2, sharding="zero2"), S(expert=4))
    run_ranks(lambda: check_equivalence(oracle, single_stage(layers, 4)), 4)


def test_dropout_is_replayed_by_recompute():
    model = tiny_model("opt", dropout=0.3, attention_dropout=0.2)
    batch = BATCHES["plain"]()

    def work():
        losses, gradients = [], []
        for recompute in ("none", "full"):
            parallel = parallelize(copy.deepcopy(model), single_stage((S(recompute=recompute),) * LAYERS, 2))
            losses.append(float(parallel.forward_backward(batch)))
            gradients.append(float(parallel.grad_norm()))
        return losses, gradients

    for losses, gradients in run_ranks(work, 2):
        assert losses[0] == losses[1]
        assert gradients[0] == pytest.approx(gradients[1], rel=1e-6)


def test_packed_documents_are_refused():
    model, documents = tiny_model("mamba"), Deal.of_documents(bounds=(0, 4, 8), cuts=(0, 4, 8))
    ids = torch.ones(1, 8, dtype=torch.long)

    def work():
        parallel = parallelize(copy.deepcopy(model), single_stage((S(),) * LAYERS, 2))
        with pytest.raises(ValueError, match="packing='none'"):
            parallel.forward_backward([dict(input_ids=ids, position_ids=ids, shift_labels=ids, documents=documents)])

    run_ranks(work, 2)


# Layers, loss, whether the head's loss is fused, modules before and after the layers, and what keeps stages apart.
STRUCTURES = {
    "bloom": ("transformer.h", NEXT_TOKEN, ["transformer.word_embeddings_layernorm"], ["transformer.ln_f"], None),
    "mamba2": ("backbone.layers", NEXT_TOKEN, ["backbone.embeddings"], ["backbone.norm_f"], None),
    "bart": ("model.decoder.layers", SAME_POSITION, ["model.decoder.layernorm_embedding"], [], None),
    "electra": ("electra.encoder.layer", NEXT_TOKEN, ["electra.embeddings"], ["generator_predictions.dense"], None),
    "rwkv": ("rwkv.blocks", NEXT_TOKEN, ["rwkv.embeddings"], ["rwkv.ln_out"], "'state'"),
    "gemma4_text": ("model.layers", NEXT_TOKEN, ["model.embed_tokens_per_layer"], ["model.norm"], "per_layer_input"),
    "glm_moe_dsa": ("model.layers", NEXT_TOKEN, ["model.embed_tokens"], ["model.norm"], "prev_topk_indices"),
    "hy_v4": ("model.layers", NEXT_TOKEN, ["model.embed_tokens"], ["model.hc_head"], "dimensions"),
}


@pytest.mark.parametrize("model_type", STRUCTURES)
def test_the_structure_of_a_family_is_found(model_type):
    layers, loss, before, after, obstacle = STRUCTURES[model_type]
    found = find_structure(tiny_model(model_type))
    assert (found.layers, found.loss) == (layers, loss)
    for wanted, names in ((before, found.before), (after, found.after)):
        assert all(any(name.startswith(one) for name in names) for one in wanted)
    assert obstacle in found.pipeline_obstacle if obstacle else found.pipeline_obstacle is None


def test_a_model_on_the_meta_device_has_the_same_structure_and_stays_as_it_is():
    plain, empty = tiny_model("falcon_h1"), tiny_model("falcon_h1").to("meta")
    before = {name: id(module) for name, module in empty.named_modules()}
    assert find_structure(empty) == find_structure(plain)
    assert {name: id(module) for name, module in empty.named_modules()} == before
