# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Plans of several stages compute what one process does: every schedule, cut, family and kind of batch."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
import torch.distributed as dist
from hypothesis import strategies as st

from equivalence import assert_same_gradients, compare, observe, reference, single_stage, total_norm, whole_gradients
from galvatron_hf.parallel.parallelize import parallelize
from galvatron_hf.plan import LayerStrategy, ParallelPlan, Precision, VocabularyStrategy
from galvatron_hf.plan.schedule import PipelineShape, can_order
from plan_inputs import drawn
from plans import PAIR_LAYERS, pipeline_plans, pipeline_plans_on_eight, pipelined, shared_out
from ranks import run_ranks
from test_parallelize import check_cases, check_random_plans, layer_strategies, oracle_of, shardings
from test_parallelize_dropout import MODELS, step
from test_parallelize_steps import (
    BATCH_NAMES,
    MORE_BATCHES,
    bf16_oracle,
    check_sgd_updates,
    distance,
    train_parallel,
    train_plain,
)
from tiny_models import BATCHES, FAMILIES, LAYERS


V = VocabularyStrategy


# Family, batch and number of items for each plan. Every kind of family and of batch occurs: learned positions, windows
# and soft caps, fused weights, layers without positions, scaled logits, tied embeddings, fewer rows than ranks.
DIFFERENT = {
    "gpipe": ("qwen3", "packed", None),
    "1f1b": ("smollm3", "one_row", None),
    "1f1b_mixed": ("gpt2", "left", None),
    "1f1b_uneven": ("llama", "right", 37),
    "gpipe_apart": ("phi3", "odd", 37),
    "interleaved": ("gemma3", "one_row", None),
    "interleaved_apart": ("granite", "shifted", None),
    "gpipe_of_four": ("gemma2", "plain", None),
    "1f1b_of_four": ("llama", "one_short_row", None),
    "zero_bubble": ("cohere", "right", None),
    "zero_bubble_of_four": ("starcoder2", "left", None),
    "zero_bubble_loop": ("mistral", "packed", None),
    "zero_bubble_v": ("llama_tied", "right", None),
}


@pytest.mark.parametrize("part", [0, 1])
def test_every_schedule_with_every_kind_of_family_and_batch(part):
    plans = pipeline_plans()
    assert DIFFERENT.keys() == plans.keys()
    cases = {name: (oracle_of(*DIFFERENT[name]), plans[name]) for name in list(plans)[part::2]}
    check_cases(4, cases, evaluation=part == 0)


@pytest.mark.slow
def test_every_schedule():
    oracle = oracle_of("llama")
    check_cases(4, {name: (oracle, plan) for name, plan in pipeline_plans().items()})


@pytest.mark.slow
@pytest.mark.parametrize("part", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_eight_ranks(part):
    oracle, plans = oracle_of("llama", ["right", "odd"][part]), pipeline_plans_on_eight()
    names = list(plans) if part else ["gpipe"]
    check_cases(8, {name: (oracle, plans[name]) for name in names})


@pytest.mark.slow
def test_more_layers_than_stages():
    """Puts eight layers into eight virtual stages of four ranks, and into stages of one to five layers."""
    S, four = LayerStrategy, [(0,), (2,), (1,), (3,)]
    oracle = reference(FAMILIES["llama"].build(num_hidden_layers=8), BATCHES["right"]())
    alone = (S(), S(sharding="zero2"), S(sharding="replicate"), S(recompute="full")) * 2
    kept = (S(sharding="zero2"), S(sharding="replicate")) * 4
    plans = {
        "interleaved": pipelined(four * 2, alone, "interleaved"),
        "zero_bubble_v": pipelined(four + four[::-1], kept, "zero_bubble", ends=V(sharding="zero2")),
        "uneven": pipelined(four, alone, cuts=[1, 2, 7], micro_batches=6),
    }
    check_cases(4, {name: (oracle, plan) for name, plan in plans.items()})


def test_each_two_lists_have_groups_of_their_own():
    """Looks at the groups: with one communicator of a GPU, looped schedules of three lists would wait for ever."""
    S, four = LayerStrategy, [(0,), (2,), (1,), (3,)]
    looped = pipelined(four * 2, (S(),) * 8, "interleaved")
    once = pipelined(four, (S(),) * 4)

    def work():
        found = []
        for plan in (looped, once):
            parallel = parallelize(FAMILIES["llama"].build(num_hidden_layers=plan.num_layers), plan)
            members = {peer: map(dist.get_process_group_ranks, own) for peer, own in parallel.pipeline.pairs.items()}
            assert len({id(group) for own in parallel.pipeline.pairs.values() for group in own}) == 2 * len(members)
            found.append({peer: [sorted(ranks) for ranks in own] for peer, own in members.items()})
        return found

    results = run_ranks(work, 4)
    for place, (rank,) in enumerate(four):
        around, line = results[rank]
        behind, before = (place + 1) % 4, (place - 1) % 4
        assert around == {peer: [sorted([rank, *four[peer]])] * 2 for peer in (behind, before)}
        assert line == {peer: ranks for peer, ranks in around.items() if abs(peer - place) == 1}


def tied_plans() -> dict[str, ParallelPlan]:
    """Returns plans with the two copies of a tied weight cut alike, cut differently, and on the same ranks."""
    two, plans = [(0, 1), (3, 2)], pipeline_plans()
    names = ["1f1b", "1f1b_mixed", "1f1b_uneven", "interleaved", "1f1b_of_four", "zero_bubble", "zero_bubble_v"]
    different = {
        "zero3_zero2": (V(), V(sharding="zero2")),
        "zero3_replicate": (V(), V(sharding="replicate")),
        "whole_zero3": (V(sharding="zero2", shard_degree=1), V()),
    }
    return {name: plans[name] for name in names} | {
        name: pipelined(two, PAIR_LAYERS, "gpipe", ends=ends) for name, ends in different.items()
    }


# The fast test of every schedule has tied embeddings too.
FAST_TIED = ("zero3_zero2", "whole_zero3")


SLOW_TIED = tuple(name for name in tied_plans() if name not in FAST_TIED)


@pytest.mark.parametrize("names", [FAST_TIED, pytest.param(SLOW_TIED, marks=pytest.mark.slow)], ids=len)
def test_tied_embeddings(names):
    oracle = oracle_of("llama_tied")
    check_cases(4, {name: (oracle, tied_plans()[name]) for name in names})


@pytest.mark.slow
def test_tied_embeddings_of_families_and_eight_ranks():
    gpt2 = oracle_of("gpt2", "left")
    check_cases(4, {name: (gpt2, plan) for name, plan in tied_plans().items()})
    plans = pipeline_plans_on_eight()
    plans["gpipe"] = dataclasses.replace(plans["gpipe"], embedding=V(tensor=2), head=V(tensor=2, shard_degree=1))
    check_cases(8, {name: (oracle_of("gemma2"), plan) for name, plan in plans.items()})


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_every_kind_of_batch(family):
    """Runs, among others, batches of fewer rows than micro-batches, and than ranks."""
    plans = pipeline_plans()
    names = ["1f1b_mixed", "1f1b_of_four", "interleaved"]
    cases = {}
    for index, batch in enumerate(BATCHES):
        oracle = oracle_of(family, batch)
        for name in names if batch.startswith("one") else names[index % 2 : index % 2 + 1]:
            tied = oracle.model.config.tie_word_embeddings
            cases[f"{batch}, {name}"] = oracle, plans[name if not tied else "1f1b_mixed"]
    check_cases(4, cases)


@pytest.mark.slow
@pytest.mark.parametrize("family", list(FAMILIES))
def test_every_family(family):
    """Runs each family under every fifth plan, and each plan in several families, with several kinds of batch."""
    oracles, cases = [oracle_of(family, batch) for batch in ("right", "left", "odd", "packed")], {}
    turn = list(FAMILIES).index(family)
    for index, (name, plan) in enumerate(shared_out(pipeline_plans(), turn, 5).items()):
        oracle = oracles[(turn // 5 + index) % len(oracles)]
        if oracle.model.config.tie_word_embeddings and plan.embedding != plan.head:
            plan = dataclasses.replace(plan, head=plan.embedding)
        cases[name] = oracle, plan
    check_cases(4, cases)


@pytest.mark.slow
@pytest.mark.parametrize(
    "names, batches",
    [
        (["1f1b_mixed"], ["one_row", "plain", "right"]),
        pytest.param(["zero_bubble_v", "interleaved"], ["right", "one_row", "plain", "right"], marks=pytest.mark.slow),
    ],
    ids=["three", "four"],
)
def test_steps_of_other_shapes_and_clean_gradients(names, batches):
    """Gives one model batches of different shapes one after the other; nothing of a step is left in the next."""
    model = FAMILIES["llama_tied"].build()
    oracles = [reference(model, BATCHES[batch]()) for batch in batches]

    def work():
        for name in names:
            parallel = parallelize(copy.deepcopy(model), pipeline_plans()[name])
            for oracle in oracles:
                compare(observe(parallel, oracle, evaluation=oracle is not oracles[0]), oracle)

    run_ranks(work, 4)


@pytest.mark.parametrize(
    "names", [("1f1b_mixed", "zero_bubble_v"), pytest.param(("interleaved",), marks=pytest.mark.slow)], ids="-".join
)
def test_gradients_of_two_steps_add_up(names):
    """Runs two steps without `zero_grad` between them; gradients of a tied weight add up too."""
    model = FAMILIES["llama_tied"].build()
    oracles = [reference(model, BATCHES[batch]()) for batch in ("right", "plain")]
    wanted = {name: sum(oracle.gradients[name] for oracle in oracles) for name in oracles[0].gradients}

    def work():
        for name in names:
            parallel = parallelize(copy.deepcopy(model), pipeline_plans()[name])
            for oracle in oracles:
                parallel.forward_backward(oracle.batch)
            assert_same_gradients(whole_gradients(parallel.model, model), wanted, name, floor=0.0)

    run_ranks(work, 4)


def test_a_batch_without_targets_has_zero_gradients():
    model, batch = FAMILIES["llama"].build(), BATCHES["right"]()
    batch["labels"] = torch.full_like(batch["labels"], -100)

    def work():
        parallel = parallelize(copy.deepcopy(model), pipeline_plans()["1f1b_mixed"])
        assert parallel.forward_backward(batch).isnan()  # as the family's own mean over nothing
        assert all(not gradient.any() for gradient in whole_gradients(parallel.model, model).values())

    run_ranks(work, 4)


@pytest.mark.parametrize(
    "family, names, batches",
    [
        ("llama_tied", ["1f1b_mixed"], BATCH_NAMES),
        ("llama", ["zero_bubble_loop"], BATCH_NAMES),
        pytest.param("llama", ["1f1b_mixed", "interleaved", "gpipe_apart"], MORE_BATCHES, marks=pytest.mark.slow),
        pytest.param("llama_tied", ["interleaved", "zero_bubble_loop"], MORE_BATCHES, marks=pytest.mark.slow),
    ],
)
def test_sgd_updates_and_losses(family, names, batches):
    check_sgd_updates(FAMILIES[family].build(), {name: pipeline_plans()[name] for name in names}, batches)


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan, batches",
    [("zero3_zero2", BATCH_NAMES), pytest.param("1f1b_mixed", MORE_BATCHES, marks=pytest.mark.slow)],
)
def test_adamw_losses_of_tied_embeddings(plan, batches):
    """Trains: both copies of a tied weight take the same steps, or the losses drift apart."""
    start = FAMILIES["llama_tied"].build()
    losses = train_plain(copy.deepcopy(start), lambda p: torch.optim.AdamW(p, lr=3e-3), batches)

    def work():
        parallel = parallelize(copy.deepcopy(start), tied_plans()[plan])
        found = train_parallel(parallel, lambda p: torch.optim.AdamW(p, lr=3e-3, foreach=False), batches)
        assert found == pytest.approx(losses, rel=1e-5)

    run_ranks(work, 4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [("1f1b_mixed", "zero_bubble"), pytest.param(("gpipe_apart", "interleaved"), marks=pytest.mark.slow)],
    ids="-".join,
)
def test_bf16_is_as_near_to_fp32_as_one_process_in_bf16(names):
    """Has the bounds of plans of one stage: between half and one and a half of one process's distance to fp32."""
    start, batch = FAMILIES["llama"].build(), BATCHES["right"]()
    exact = reference(start, batch)
    loss, gradients = bf16_oracle(start, batch)
    oracle_distance, loss_distance = distance(gradients, exact.gradients), abs(loss - exact.loss)
    precision = Precision(compute="bf16", reduce="fp32", master="fp32")

    def work():
        found = {}
        for name in names:
            plan = dataclasses.replace(pipeline_plans()[name], precision=precision)
            parallel = parallelize(copy.deepcopy(start), plan)
            assert parallel.pipeline.dtype == torch.bfloat16
            loss = float(parallel.forward_backward(batch))
            assert all(p.dtype == p.grad.dtype == torch.float32 for p in parallel.model.parameters())
            found[name] = loss, distance(whole_gradients(parallel.model, start), exact.gradients)
        return found

    for found in run_ranks(work, 4):
        for name, (parallel_loss, parallel_distance) in found.items():
            assert 0.5 * oracle_distance <= parallel_distance <= 1.5 * oracle_distance, name
            assert abs(parallel_loss - exact.loss) <= max(2 * loss_distance, 2**-8 * exact.loss), name


@pytest.mark.slow
@pytest.mark.parametrize(
    "family, schedules, numbers",
    [
        ("gpt2", ["interleaved"], (0, 1)),
        pytest.param("gpt2", ["1f1b"], (0, 1, 0), marks=pytest.mark.slow),
        pytest.param("llama_eager", ["1f1b", "interleaved"], (0, 1, 0), marks=pytest.mark.slow),
    ],
)
def test_dropout_masks_are_those_of_the_plan_without_stages(family, schedules, numbers):
    """Compares two stages of two ranks with two ranks: streams have keys of layer, micro-batch and stage rank."""
    plain, ends = MODELS[family](), V(tensor=2)

    def steps(plan: ParallelPlan, **pipeline) -> list[tuple[float, dict[str, torch.Tensor]]]:
        parallel = parallelize(copy.deepcopy(plain), plan)
        return [step(parallel, plain, number) for number in numbers]

    one = single_stage(PAIR_LAYERS, 2, embedding=ends, head=ends, micro_batches=4)
    wanted = run_ranks(steps, 2, one)[0]
    assert total_norm({name: wanted[0][1][name] - wanted[1][1][name] for name in wanted[0][1]}) > 0.1
    cuts = {"1f1b": [(0, 1), (2, 3)], "interleaved": [(1, 0), (2, 3)] * 2}

    def work():
        return {name: steps(pipelined(cuts[name], PAIR_LAYERS, name, ends=ends)) for name in schedules}

    for found in run_ranks(work, 4):
        for name, results in found.items():
            for (loss, gradients), (wanted_loss, wanted_gradients) in zip(results, wanted, strict=True):
                assert loss == pytest.approx(wanted_loss, rel=1e-5), name
                assert_same_gradients(gradients, wanted_gradients, name)


@st.composite
def pipelines_and_inputs(draw, world_size: int) -> tuple[str, str, ParallelPlan]:
    """Draws a pipeline of four layers that this release runs, with a family and a batch."""
    family = draw(st.sampled_from(["llama", "llama_tied", "llama_one_kv_head", "qwen3", "phi3", "gemma2", "gpt2"]))
    degree = draw(st.sampled_from([2, 4]))
    ranks = draw(st.permutations(range(world_size)))
    size = world_size // degree
    lists = [tuple(ranks[start : start + size]) for start in range(0, world_size, size)]
    schedule = draw(st.sampled_from(["gpipe", "1f1b", "interleaved", "zero_bubble"]))
    if degree == 2 and schedule in ("interleaved", "zero_bubble"):
        behind = [[], lists, lists[::-1]] if schedule == "zero_bubble" else [[], lists]
        lists = lists + draw(st.sampled_from(behind))
    cuts = draw(st.sets(st.integers(1, LAYERS - 1), min_size=len(lists) - 1, max_size=len(lists) - 1))
    embedding, head = (draw(vocabulary_strategies(size)) for _ in range(2))
    if FAMILIES[family].build().config.tie_word_embeddings:
        head = embedding if lists[0] == lists[-1] or head.tensor != embedding.tensor else head
    layers = tuple(draw(layer_strategies(size)) for _ in range(LAYERS))
    if schedule == "zero_bubble":
        layers = tuple(kept(layer) for layer in layers)
        embedding, head = kept(embedding), kept(head)
    plan = pipelined(lists, layers, schedule, cuts=sorted(cuts), ends=(embedding, head), micro_batches=1)
    counts = [count for count in range(1, 9) if can_order(PipelineShape.from_plan(plan), count)]
    plan = dataclasses.replace(plan, micro_batches=draw(st.sampled_from(counts)))
    return family, draw(st.sampled_from(list(BATCHES))), plan


@st.composite
def vocabulary_strategies(draw, ranks: int) -> VocabularyStrategy:
    tensor = draw(st.sampled_from([degree for degree in (1, 2, 4) if degree <= ranks]))
    return VocabularyStrategy(tensor=tensor, **draw(shardings(ranks // tensor)))


def kept(strategy):
    return dataclasses.replace(strategy, sharding="zero2") if strategy.sharding == "zero3" else strategy


@pytest.mark.slow
def test_random_plans():
    check_random_plans(drawn(pipelines_and_inputs(4), 3), evaluation=False)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [4, 8])
def test_many_random_plans(ranks):
    check_random_plans(drawn(pipelines_and_inputs(ranks), 4 if ranks == 8 else 10))
