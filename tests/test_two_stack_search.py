# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Profiles, prices and plans of models with an encoder and a decoder: their rows have other lengths in each."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration, Trainer

from encoder_decoder_models import ENCODER_DECODERS
from galvatron_hf import ParallelPlan
from galvatron_hf.cli.main import main
from galvatron_hf.models.families import adapter_for
from galvatron_hf.parallel.validate import check_model
from galvatron_hf.plan import LayerStrategy, Precision
from galvatron_hf.planner.cost.cost_model import CostModel
from galvatron_hf.planner.cost.workload import Workload
from galvatron_hf.planner.estimate import estimate_plan
from galvatron_hf.planner.search import search_plan
from galvatron_hf.planner.space import Limits
from galvatron_hf.profiler.measure.model import profile_model
from galvatron_hf.profiler.profiles.model import ModelProfile
from galvatron_hf.profiler.profiles.presets import hardware_preset
from galvatron_hf.profiler.trace.counted_model import CountedModel, Speed
from galvatron_hf.profiler.trace.small_models import empty_model, layer_kinds
from galvatron_hf.profiler.trace.tracing import profile_from_config
from planner_cases import every_estimate, random_hardware, random_model, workload
from test_encoder_decoder_trainer import Pairs, collate_pairs
from test_predicted_memory import let_gloo_free_nothing
from tiny_models import FAMILIES
from trainer_runs import on_ranks, run, trainer


HIDDEN, INNER, MLP, LENGTH, TARGET = 64, 96, 160, 256, 64
CONFIG = T5Config(
    d_model=HIDDEN, d_kv=24, d_ff=MLP, num_heads=4, num_layers=3, num_decoder_layers=2, vocab_size=200, dropout_rate=0
)
WORK = Workload(rows=16, length=LENGTH, precision=Precision(compute="bf16"))


@pytest.fixture(scope="module")
def profile() -> ModelProfile:
    """Returns T5's profile by counting, for rows of 256 tokens in the encoder and of 64 in the decoder."""
    return profile_from_config(CONFIG, hardware_preset("cpu", 1, 4), length=LENGTH, target_length=TARGET, max_degree=4)


def test_layers_of_a_stack_are_of_one_kind_though_one_has_the_table_of_the_bias():
    assert layer_kinds(empty_model(CONFIG)) == (0, 0, 0, 1, 1)
    assert (
        layer_kinds(ENCODER_DECODERS["bart"].build()).count(0)
        == ENCODER_DECODERS["bart"].build().config.encoder_layers
    )


@pytest.mark.parametrize("tensor", [1, 2])
def test_matrix_products_of_both_stacks_are_those_of_the_closed_form(tensor):
    """Counts multiply-adds of a row; the decoder's keys and values of what it reads come from the encoder's tokens."""
    counts = CountedModel(empty_model(CONFIG), torch.float32, LENGTH, False, length_ratio=TARGET / LENGTH)
    times = counts.times(2, Speed(flops_per_ms=1.0, bytes_per_ms=float("inf")))
    encoder, decoder = (kind[tensor].forward for kind in times.layers)
    mlp = 2 * HIDDEN * MLP
    found = [2 * LENGTH * (4 * HIDDEN * INNER + mlp), 2 * LENGTH**2 * 2 * INNER]
    assert [encoder.per_token * LENGTH, encoder.per_square * LENGTH**2] == pytest.approx([x / tensor for x in found])
    projected = TARGET * (6 * HIDDEN * INNER + mlp) + LENGTH * 2 * HIDDEN * INNER
    found = [2 * projected, 2 * (TARGET**2 + TARGET * LENGTH) * 2 * INNER]
    assert [decoder.per_token * TARGET, decoder.per_square * TARGET**2] == pytest.approx([x / tensor for x in found])
    backward = times.layers[1][tensor].backward
    assert backward.per_token * TARGET == pytest.approx(2 * found[0] / tensor)  # also for the encoder's output


def test_a_profile_says_what_each_stack_has_of_a_row(profile):
    assert profile.stack_sizes == {"encoder": 3, "decoder": 2}
    assert [(kind.length_ratio, kind.read_ratio, kind.regions) for kind in profile.kinds] == [(1, 0, 2), (0.25, 1, 3)]
    assert (profile.embedding.length_ratio, profile.head.length_ratio) == (1.25, 0.25)
    assert profile.stage_ratio == 1.25
    tables = [one for kind in profile.kinds for one in kind.weights if 32 in one.shape]
    assert not tables  # of the shared bias, which belongs to no layer
    assert ModelProfile.from_json(profile.to_json()) == profile
    assert "tokens of the decoder" in profile.made


@pytest.mark.parametrize("tensor, recompute", [(1, "none"), (2, "full"), (1, "full")])
def test_the_bias_that_a_stack_shares_is_in_its_activations_once(profile, tensor, recompute):
    """Compares with the closed form: [1, heads of the rank, S, S] of each stack if layers are computed again, which
    need it, and indices [S, S].
    """
    assert [kind.bias_heads for kind in profile.kinds] == [4, 4]
    without = replace(profile, kinds=tuple(replace(kind, bias_heads=0) for kind in profile.kinds))
    strategy = LayerStrategy(sharding="replicate", tensor=tensor, recompute=recompute)
    hardware, held = hardware_preset("cpu", 1, 4), []
    for one in (profile, without):
        costs = CostModel(hardware, one, WORK, 4, 16)
        held.append(sum(costs.layer(kind, [strategy]).activation_bytes[0] for kind in one.layers))
    assert held[0] - held[1] == pytest.approx((2 * 4 // tensor * (recompute == "full") + 8) * (LENGTH**2 + TARGET**2))


def test_kept_scores_are_those_of_the_rows_and_not_of_a_longer_trace():
    """Compares with what autograd keeps in the second layer of transformers' own encoder."""
    length, model, kept = 77, T5ForConditionalGeneration(CONFIG), {}
    layer = model.encoder.block[1]
    inside, weights = [False], {one.untyped_storage().data_ptr() for one in model.parameters()}
    layer.register_forward_pre_hook(lambda *unused: inside.__setitem__(0, True))
    layer.register_forward_hook(lambda *unused: inside.__setitem__(0, False))

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if inside[0] and storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = (
                storage.nbytes(),
                tensor,
            )  # held, so that its place is not used again
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.encoder(input_ids=torch.ones(1, length, dtype=torch.long))
    lengths = dict(length=length, target_length=length, max_degree=1)
    found = profile_from_config(CONFIG, hardware_preset("cpu", 1, 1), "fp32", **lengths)
    saved = length * found.kinds[0].saved_bytes[1, False, 1]
    assert saved == pytest.approx(sum(size for size, _ in kept.values()), rel=0.01)


class LongPairs(torch.utils.data.Dataset):
    """Holds pairs of 256 and 64 tokens."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: 1 + torch.arange(size) % 199 for name, size in (("input_ids", LENGTH), ("labels", TARGET))}


@pytest.mark.slow
def test_both_stages_of_a_pipeline_need_the_memory_that_is_predicted(tmp_path):
    """Without the bias the first is predicted a tenth too small, without its own copy of the embedding the second."""
    config = T5Config(
        d_model=64, d_kv=8, d_ff=128, num_heads=8, num_layers=4, vocab_size=4000, dropout_rate=0, use_cache=False
    )
    config.decoder_start_token_id = 0
    hardware, work = hardware_preset("cpu", 1, 2), replace(WORK, rows=8, precision=Precision(compute="fp32"))
    found = profile_from_config(config, hardware, "fp32", length=LENGTH, target_length=TARGET, max_degree=1)
    stages = dict(sharding="replicate", pipeline=2, micro_batches=8)
    plan = ParallelPlan.uniform(2, found.stack_sizes, precision=work.precision, **stages)
    plan = estimate_plan(hardware, found, work, plan).plan_with_prediction(work)

    def work_of_rank() -> tuple[tuple[int, ...], tuple[int, ...]]:
        let_gloo_free_nothing()
        options = dict(max_steps=2, packing="none")
        data = dict(train_dataset=LongPairs(), data_collator=None, options=options)
        made = trainer(tmp_path, plan, model=T5ForConditionalGeneration(config), **data)
        made.train()
        return made.plan_outcome.predicted_bytes, made.plan_outcome.measured_bytes

    # The least of two, because a thread of gloo that is late holds a message longer: in 14 runs the first stage's peak
    # was 0.2 to 6.2% above the least in three, and within 5 bytes of it in the others.
    (predicted, *_), measured = zip(*(on_ranks(work_of_rank, 2)[0] for _ in range(2)), strict=True)
    assert predicted == pytest.approx(tuple(map(min, *measured)), rel=0.05)


@pytest.mark.slow
def test_twice_the_targets_cost_the_decoder_more_and_the_encoder_nothing(profile):
    longer = profile_from_config(
        CONFIG, hardware_preset("cpu", 1, 4), length=LENGTH, target_length=2 * TARGET, max_degree=4
    )
    hardware = hardware_preset("cpu", 1, 4)
    few, many = (CostModel(hardware, one, WORK, 4, 16) for one in (profile, longer))
    for kind, changes in ((0, False), (1, True)):
        first, second = (one.layer(kind, [LayerStrategy(sharding="replicate")]) for one in (few, many))
        assert bool(second.forward_ms[0] > 1.2 * first.forward_ms[0]) is changes
        assert changes or second.forward_ms[0] == first.forward_ms[0]


def test_what_a_layer_reads_is_sent_as_its_strategy_asks(profile):
    """Sums the bytes of the messages for a link of one byte in a millisecond, without waits, and of the copies."""

    class Bytes(CostModel):
        def _ms(self, kind, ranks, stride, size, factor="communication"):
            return float(size) if ranks > 1 else 0.0

        def _copying_ms(self, size):
            return size / 1024

        def _resharding_ms(self, before, after):
            return 0.0

    costs = Bytes(hardware_preset("cpu", 1, 4), profile, WORK, 4, 16)
    decoder, rows, element = profile.kinds[1], 16, 2
    states = LENGTH * HIDDEN * element  # of a row of the encoder
    # A data rank of four has 4 rows, one of two 8.
    assert costs._reading(decoder, LayerStrategy()) == (0.0, 0.0)
    assert costs._reading(decoder, LayerStrategy(tensor=2)) == (0.0, rows / 2 * states)
    forward, backward = costs._reading(decoder, LayerStrategy(tensor=2, megatron_sp=True))
    assert (forward, backward) == (rows / 2 * states / 2, rows / 2 * states)
    pieces = rows * (TARGET * 2 + 2 * LENGTH) / 4 * 24 * 4 * element
    assert costs._reading(decoder, LayerStrategy(ulysses=4)) == (pieces * (1 + 2 / 1024),) * 2
    assert costs._reading(profile.kinds[0], LayerStrategy(ulysses=4)) == (0.0, 0.0)


def two_stacks(seed: int) -> ModelProfile:
    """Returns a random model of two layers in the first stack and two that read it."""
    made = random_model(seed, layers=4, kinds=2)
    second = replace(made.kinds[1], length_ratio=[0.5, 0.25][seed % 2], read_ratio=1.0)
    return replace(
        made,
        kinds=(made.kinds[0], second),
        layers=(0, 0, 1, 1),
        stacks={"encoder": 2, "decoder": 2},
        embedding=replace(made.embedding, length_ratio=1.0 + second.length_ratio),
        head=replace(made.head, length_ratio=second.length_ratio),
    )


@pytest.mark.slow
def test_no_plan_of_two_stacks_is_faster_than_the_one_found():
    limits = Limits(sequence=("none",), sharding=("replicate", "zero3"), recompute=("none",), virtual_stages=1)
    for seed in range(2):
        model, work = two_stacks(seed), workload(2)
        hardware = random_hardware(seed, world_size=2, memory_bytes=1 << 40)
        every = list(every_estimate(hardware, model, work, limits))
        for budget in (min(max(one.memory_bytes) for one in every), 1 << 40):
            found = search_plan(hardware, model, work, memory_bytes=budget, limits=limits)
            assert found.best.step_ms == min(one.step_ms for one in every if max(one.memory_bytes) <= budget)
            assert estimate_plan(hardware, model, work, found.best.plan).step_ms == found.best.step_ms


@pytest.mark.slow
@pytest.mark.parametrize("family", ["t5", "bart"])
def test_searched_plans_run(family):
    """Searches on a cluster with slow links and little memory, and has the runtime look at the plans."""
    longer = dict(max_position_embeddings=128) if family == "bart" else {}  # those that are traced
    model = ENCODER_DECODERS[family].build(**longer)
    hardware = random_hardware(1, world_size=4, memory_bytes=1 << 40)
    found = profile_from_config(model, replace(hardware, flops_per_s={"fp32": 1e9}), "fp32", length=32, max_degree=4)
    adapter, work = adapter_for(model), Workload(rows=8, length=32, precision=Precision(compute="fp32"))
    plans = set()
    for limits in (Limits(), Limits(pipeline=(2,)), Limits(pipeline=(4,)), Limits(uniform=True)):
        best = search_plan(hardware, found, work, limits=limits).best
        check_model(model, adapter, best.plan)
        plans.add(best.plan.to_json())
    assert len(plans) >= 3


def test_what_is_wrong_with_lengths_is_said(tmp_path, capsys):
    with pytest.raises(ValueError, match="has one stack of layers, and target_length is for two"):
        profile_from_config(
            FAMILIES["llama"].build().config, hardware_preset("h100", 1, 1), length=16, target_length=4
        )
    CONFIG.save_pretrained(tmp_path)
    case = ["--cluster", "h100", "--devices-per-node", "2", "--global-batch", "4", "--seq-length", "64", "--json"]
    assert main(["search", "--model", str(tmp_path), *case, "--target-length", "0"]) != 0
    assert "--target-length" in capsys.readouterr().err
    assert main(["search", "--model", str(tmp_path), *case, "--target-length", "16"]) == 0
    plan = ParallelPlan.from_json(json.dumps(json.loads(capsys.readouterr().out)["plan"]))
    assert dict(plan.stacks) == {"encoder": 3, "decoder": 2}


@pytest.mark.slow
def test_times_of_both_stacks_are_measured():
    model = ENCODER_DECODERS["t5"].build()
    found = profile_model(model, tokens=256, length=64, target_length=16, max_degree=2, seconds=2, device="cpu")
    assert [kind.length_ratio for kind in found.kinds] == [1.0, 0.25]
    for kind in found.kinds:
        assert set(kind.times) == {1, 2}
        assert all(
            times.forward.ms(64, 64**2) > 0 and times.backward.ms(64, 64**2) > 0 for times in kind.times.values()
        )


@pytest.mark.slow
@pytest.mark.parametrize("family", ["t5", "bart"])
def test_auto_trains_as_one_process_under_the_plan_that_it_finds(tmp_path, family):
    # Plain Trainer does not divide the loss of these families by the number of accumulated batches.
    once = dict(gradient_accumulation_steps=1)
    options = dict(train_dataset=Pairs(27), data_collator=collate_pairs, options=once)
    wanted = run(tmp_path / "plain", "auto", model=ENCODER_DECODERS[family].build(), trainer_class=Trainer, **options)

    def work():
        found = run(
            tmp_path / "ranks",
            "auto",
            model=ENCODER_DECODERS[family].build(),
            then=lambda made: (made.parallel.plan.meta["predicted"]["step_ms"], dict(made.parallel.plan.stacks)),
            **options,
        )
        return found.steps(), found.result

    for steps, (predicted_ms, stacks) in on_ranks(work, 2):
        assert predicted_ms > 0 and set(stacks) == {"encoder", "decoder"}
        assert steps == [pytest.approx(step, rel=1e-5) for step in wanted.steps()]
