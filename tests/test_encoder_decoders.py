# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Encoder-decoders under every kind of plan, against one process; and errors that the comparison must see."""

from __future__ import annotations

import copy
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from transformers import MarianConfig, MarianMTModel

from encoder_decoder_models import ENCODER_DECODERS, padded_batch, random_plan, two_stacks
from equivalence import Reference, compare, observe, reference
from galvatron_hf.models import adapter as adapters
from galvatron_hf.models.families import adapter_for, count_layers
from galvatron_hf.parallel.comm.collectives import copy_to_group
from galvatron_hf.parallel.comm.dtensor import local_tensor
from galvatron_hf.parallel.data_parallel.replicated import ReplicatedUnit
from galvatron_hf.parallel.data_parallel.tied_weights import WeightCopies
from galvatron_hf.parallel.layers import parallel_layer, tensor_parallel
from galvatron_hf.parallel.layers.relative_bias import SharedBias
from galvatron_hf.parallel.parallelize import parallelize
from galvatron_hf.parallel.weights.distributed_state import load_state, save_state
from galvatron_hf.plan import LayerStrategy, VocabularyStrategy
from galvatron_hf.plan.resolved import ResolvedLayer
from plans import shared_out
from ranks import run_ranks
from test_parallelize import check_cases


S, V = LayerStrategy, VocabularyStrategy
FULL = dict(recompute="full")
PAIRS, SINGLE = ((0, 1), (2, 3)), ((0,), (1,), (2,), (3,))

# One stage. "few rows": each micro-batch has one row, so that embeddings and head split positions.
PLANS = {
    "data": two_stacks([S(), S(sharding="zero2"), S(sharding="replicate")], [S(**FULL), S(shard_degree=2)]),
    "tensor": two_stacks([S(tensor=4)] * 3, [S(tensor=4)] * 2, ends=V(tensor=4)),
    "mixed": two_stacks([S(tensor=2), S(), S(tensor=4, **FULL)], [S(tensor=2, megatron_sp=True), S(ulysses=2)]),
    "sequence": two_stacks(
        [S(tensor=2, megatron_sp=True), S(tensor=4, megatron_sp=True), S(ulysses=4)],
        [S(tensor=2, ulysses=2, megatron_sp=True, **FULL), S(ulysses=4, sharding="replicate")],
        ends=V(tensor=2),
    ),
    "few rows": two_stacks(
        [S(tensor=4), S(ulysses=4), S(tensor=2, ulysses=2)],
        [S(tensor=4, megatron_sp=True), S(ulysses=4, **FULL)],
        ends=V(tensor=2),
        micro_batches=4,
    ),
}
PIPELINES = {
    "between the stacks": two_stacks([S()] * 3, [S()] * 2, lists=PAIRS, cuts=[3], micro_batches=2),
    "inside the decoder": two_stacks(
        [S(), S(tensor=2), S()], [S(tensor=2, **FULL), S(ulysses=2)], lists=PAIRS, cuts=[4], micro_batches=4
    ),
    "inside the encoder": two_stacks(
        [S(), S(tensor=2), S()],
        [S(tensor=2, megatron_sp=True, **FULL), S()],
        lists=PAIRS,
        cuts=[2],
        ends=V(tensor=2),
        micro_batches=4,
        schedule="gpipe",
    ),
    "four stages": two_stacks(
        [S(), S(sharding="zero2"), S()], [S(sharding="replicate"), S()], lists=SINGLE, cuts=[1, 3, 4], micro_batches=4
    ),
    # The decoder's embedding and the head are on the same ranks, and cut differently.
    "ends that differ": two_stacks(
        [S()] * 3, [S()] * 2, lists=PAIRS, cuts=[2], ends=V(sharding="replicate"), micro_batches=2, head=V()
    ),
    "interleaved": two_stacks(
        [S()] * 3,
        [S(), S(tensor=2)],
        lists=PAIRS * 2,
        cuts=[1, 3, 4],
        micro_batches=4,
        schedule="interleaved",
    ),
}
ZERO_BUBBLE = two_stacks(
    [S(sharding="zero2")] * 3,
    [S(sharding="zero2")] * 2,
    lists=SINGLE,
    cuts=[1, 3, 4],
    ends=V(sharding="zero2"),
    micro_batches=4,
    schedule="zero_bubble",
)


def oracle_of(family: str, **changes) -> Reference:
    model = ENCODER_DECODERS[family].build(**changes)
    batch = padded_batch(model)
    return reference(model, batch | {"decoder_input_ids": adapters.decoder_ids_of_labels(model, batch["labels"])})


@pytest.mark.parametrize("family", ["t5", pytest.param("bart", marks=pytest.mark.slow)])
def test_both_kinds_of_family_under_every_kind_of_layer(family):
    oracle = oracle_of(family)
    check_cases(4, {name: (oracle, plan) for name, plan in PLANS.items()})


@pytest.mark.slow
@pytest.mark.parametrize("family", [pytest.param("t5", marks=pytest.mark.slow), "bart"])
def test_pipelines_through_both_stacks(family):
    oracle = oracle_of(family)
    cases = PIPELINES | ({"zero bubble": ZERO_BUBBLE} if family == "bart" else {})
    check_cases(4, {name: (oracle, plan) for name, plan in cases.items()}, evaluation=family == "t5")


@pytest.mark.slow
def test_every_family():
    cases, plans = {}, [PLANS["mixed"], PLANS["sequence"], PIPELINES["inside the decoder"]]
    for index, family in enumerate(ENCODER_DECODERS):
        cases[family] = oracle_of(family), plans[index % len(plans)]
    check_cases(4, cases, evaluation=False)


@pytest.mark.slow
@pytest.mark.parametrize("family", [name for name in ENCODER_DECODERS if name not in ("t5", "bart")])
def test_more_plans_of_every_family(family):
    """Runs half of the plans in each family, and each plan in half of the families."""
    oracle, turn = oracle_of(family), list(ENCODER_DECODERS).index(family)
    check_cases(4, {name: (oracle, plan) for name, plan in shared_out(PLANS | PIPELINES, turn, 2).items()})


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(2, 36), marks=pytest.mark.slow)], ids=["fast", "many"])
def test_random_plans(seeds):
    oracles = [oracle_of("t5"), oracle_of("mbart"), oracle_of("t5_gated", tie_word_embeddings=False)]
    check_cases(4, {str(seed): (oracles[seed % 3], random_plan(seed)) for seed in seeds}, evaluation=False)


@pytest.mark.slow
def test_decoder_tokens_and_masks_may_be_given_or_made():
    """Without decoder tokens they are the labels, shifted; with a decoder mask they are as many as it says."""
    model = ENCODER_DECODERS["bart"].build()
    batch = padded_batch(model)
    without_mask = {name: value for name, value in batch.items() if name != "attention_mask"}
    ids = adapters.decoder_ids_of_labels(model, batch["labels"])
    masked = batch | {"decoder_input_ids": ids, "decoder_attention_mask": (batch["labels"] != -100).long()}
    cases = {"made": batch, "no mask": without_mask, "masked": masked}
    plans = {"made": PLANS["few rows"], "no mask": PLANS["sequence"], "masked": PLANS["few rows"]}
    oracles = {name: reference(model, one) for name, one in cases.items()}
    check_cases(4, {name: (oracles[name], plans[name]) for name in cases}, evaluation=False)


# ---- Errors that must be seen ----


def seen(oracle: Reference, plan, inject) -> str:
    """Returns the complaint of the comparison with an error in the runtime."""

    def work() -> str:
        with inject():
            found = observe(parallelize(copy.deepcopy(oracle.model), plan), oracle, evaluation=False)
        try:
            compare(found, oracle)
        except AssertionError as error:
            return str(error)
        return ""

    return " ".join(run_ranks(work, 4))


def entered_alone(region, group, megatron_sp):
    """Leaves the encoder's output out of what enters a tensor-parallel region."""

    def pre_hook(module, args, kwargs):
        return (copy_to_group(args[0], group), *args[1:]), kwargs

    region.register_forward_pre_hook(pre_hook, with_kwargs=True)


def test_the_error_that_a_rank_takes_the_bias_of_other_heads():
    oracle, original = oracle_of("t5"), SharedBias._lookup
    inject = lambda: patch.object(  # noqa: E731
        SharedBias, "_lookup", lambda self, buckets, first, heads: original(self, buckets, 0, heads)
    )
    assert "loss" in seen(oracle, PLANS["tensor"], inject)


@pytest.mark.slow
def test_a_bias_of_each_layer():
    oracle = oracle_of("umt5")
    check_cases(4, {name: (oracle, PLANS[name]) for name in ("sequence", "few rows")})


def test_the_error_that_a_rank_takes_another_part_of_its_layers_bias():
    inject = lambda: patch.object(ResolvedLayer, "ulysses_index", lambda self, index: 0)  # noqa: E731
    assert seen(oracle_of("umt5"), PLANS["sequence"], inject)


def test_the_error_that_gradients_of_the_bias_are_not_summed():
    oracle = oracle_of("t5")

    def inject():
        return patch.object(ReplicatedUnit, "_start", lambda self: None)

    assert "relative_attention_bias" in seen(oracle, PLANS["tensor"], inject)


@pytest.mark.slow
def test_the_error_that_stages_do_not_sum_the_gradients_of_the_bias():
    oracle, original = oracle_of("t5"), WeightCopies.sum_gradients

    def without_bias(self, earlier):
        if "relative" not in self.names[0]:
            original(self, earlier)

    inject = lambda: patch.object(WeightCopies, "sum_gradients", without_bias)  # noqa: E731
    plan = PIPELINES["inside the encoder"]

    def work() -> list[float]:
        with inject():
            found = parallelize(copy.deepcopy(oracle.model), plan)
            found.forward_backward(oracle.batch)
        (table,) = [p for n, p in found.model.named_parameters() if n.startswith("encoder") and "relative" in n]
        return table.grad.to_local().flatten().tolist()

    first, second = (torch.tensor(found) for found in run_ranks(work, 4)[::2])
    wanted = oracle.gradients["encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"].flatten()
    assert not torch.allclose(first, wanted, rtol=1e-3) and torch.allclose(
        first + second, wanted, rtol=1e-4, atol=1e-6
    )


def test_the_error_that_decoder_tokens_are_not_shifted():
    model = ENCODER_DECODERS["t5"].build()
    oracle = reference(model, padded_batch(model))
    inject = lambda: patch.object(adapters, "decoder_ids_of_labels", lambda model, labels: labels.clamp(min=0))  # noqa: E731
    assert "loss" in seen(oracle, PLANS["data"], inject)


def test_the_error_that_gradients_of_the_encoder_output_are_not_reduced():
    inject = lambda: patch.object(tensor_parallel, "_gather_region_input", entered_alone)  # noqa: E731
    assert "gradient" in seen(oracle_of("bart"), PLANS["tensor"], inject)


@pytest.mark.slow
def test_the_error_that_the_decoder_reads_the_encoder_without_a_gradient():
    original = parallel_layer.ParallelLayer._read
    inject = lambda: patch.object(  # noqa: E731
        parallel_layer.ParallelLayer, "_read", lambda self, *args: original(self, *args).detach()
    )
    assert "gradient of model.shared" in seen(oracle_of("bart"), PLANS["mixed"], inject)


@pytest.mark.slow
def test_the_error_that_each_rank_counts_positions_from_zero():
    def unchanged(module, *unused):
        return None

    inject = lambda: patch("galvatron_hf.parallel.stage_module.count_from_own_position", unchanged)  # noqa: E731
    assert "loss" in seen(oracle_of("bart"), PLANS["few rows"], inject)


# ---- Refusals ----


def test_what_cannot_run_is_refused_in_a_sentence():
    t5, bart = ENCODER_DECODERS["t5"], ENCODER_DECODERS["bart"]
    cases = {
        "zero_bubble": (t5.build(), ZERO_BUBBLE),
        "encoder_layerdrop is 0.1": (bart.build(encoder_layerdrop=0.1), PLANS["data"]),
        r"stacks \{'encoder': 2, 'decoder': 3\}": (
            t5.build(),
            replace(PLANS["data"], stacks={"encoder": 2, "decoder": 3}),
        ),
    }

    def work() -> None:
        for text, (model, plan) in cases.items():
            with pytest.raises(ValueError, match=text) as error:
                parallelize(model, plan)
            assert "\n" not in str(error.value)

    run_ranks(work, 4)


def test_separate_embeddings_of_the_stacks_are_refused():
    config = MarianConfig(
        vocab_size=97,
        decoder_vocab_size=97,
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        share_encoder_decoder_embeddings=False,
        pad_token_id=1,
    )
    with pytest.raises(ValueError, match="MarianMTModel has embeddings of its own for the decoder"):
        adapter_for(MarianMTModel(config))


@pytest.mark.parametrize("family", ENCODER_DECODERS)
def test_layers_are_counted_without_a_model(family):
    model = ENCODER_DECODERS[family].build()
    assert count_layers(model.config) == len(adapter_for(model).layers(model)) == 5


COPIES = {
    # The decoder begins on the last stage, which has its embedding, the head and the second copy of the bias.
    "three copies": two_stacks([S()] * 3, [S()] * 2, lists=PAIRS, cuts=[2], micro_batches=2),
    "cut differently": PIPELINES["ends that differ"],
    "on four stages": PIPELINES["four stages"],
}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["t5", "bart"])
def test_a_checkpoint_fills_every_copy_of_a_weight(family, tmp_path):
    """A run that is resumed under the same pipeline goes on as one that was not interrupted, on every rank."""
    model, other = ENCODER_DECODERS[family].build(), ENCODER_DECODERS[family].build()
    with torch.no_grad():
        for weight in other.parameters():
            weight.mul_(0.5)
    batch = padded_batch(model)

    def made(start, plan):
        parallel = parallelize(copy.deepcopy(start), plan)
        return parallel, torch.optim.AdamW(parallel.model.parameters(), lr=0.01)

    def step(parallel, optimizer) -> float:
        loss = float(parallel.forward_backward(batch))
        optimizer.step()
        parallel.model.zero_grad()
        return loss

    def work() -> None:
        for name, plan in COPIES.items():
            whole, optimizer = made(model, plan)
            step(whole, optimizer)
            save_state(whole, optimizer, tmp_path / name)
            resumed, its_optimizer = made(other, plan)
            load_state(resumed, its_optimizer, tmp_path / name)
            assert step(whole, optimizer) == step(resumed, its_optimizer), name
            pairs = zip(whole.model.named_parameters(), resumed.model.named_parameters(), strict=True)
            for (weight_name, weight), (_, found) in pairs:
                assert torch.equal(local_tensor(weight), local_tensor(found)), f"{name}: {weight_name}"

    run_ranks(work, 4)
