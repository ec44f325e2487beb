# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Step 1 under every kind of plan: loss, gradients, their norm, clipping, evaluation and logits of one process."""

from __future__ import annotations

import copy
import dataclasses
import traceback
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st

from equivalence import (
    Reference,
    assert_same_gradients,
    check_equivalence,
    compare,
    observe,
    reference,
    single_stage,
    whole,
    whole_gradients,
)
from galvatron_hf.parallel import model_runner
from galvatron_hf.parallel.activation.micro_batch import has_padding, mask_on_device
from galvatron_hf.parallel.comm.mesh import WorldMesh
from galvatron_hf.parallel.data_parallel.replicated import ReplicatedUnit
from galvatron_hf.parallel.parallelize import parallelize
from galvatron_hf.plan import LayerStrategy, ParallelPlan, VocabularyStrategy
from plan_inputs import drawn
from plans import EVERY_UNIFORM_PLAN, mixed_plans, shared_out, uniform, uniform_plans, untied_plans
from ranks import run_ranks
from tiny_models import BATCHES, FAMILIES, LAYERS


def check_cases(world_size: int, cases: dict[str, tuple[Reference, ParallelPlan]], *, evaluation: bool = True) -> None:
    """Runs many cases in one world of ranks; fails with all cases that are wrong."""

    def work() -> dict[str, str]:
        wrong, world = {}, WorldMesh("cpu")
        for name, (oracle, plan) in cases.items():
            try:
                check_equivalence(oracle, plan, world, evaluation=evaluation)
            except AssertionError as error:  # it comes after all that is collective: the next case can run
                wrong[name] = str(error) or traceback.format_exc()
            except Exception as error:
                raise RuntimeError(f"case {name!r}") from error
        return wrong

    wrong: dict[str, str] = {}
    for rank, found in enumerate(run_ranks(work, world_size)):
        for name, message in found.items():
            wrong.setdefault(name, f"rank {rank}: {message}")
    assert not wrong, "\n".join(f"{name}: {message}" for name, message in wrong.items())


def oracle_of(family: str, batch: str = "right", num_items: int | None = None) -> Reference:
    return reference(FAMILIES[family].build(), BATCHES[batch](), num_items)


# Family, batch and number of items for each plan. Every kind of family, of batch and of layers that differ occurs:
# windows and additive masks with hidden positions, too, and batches of fewer rows and positions than ranks.
DIFFERENT = [
    ("gemma2", "left", None, "mixed_a"),
    ("llama_one_kv_head", "shifted", None, "mixed_b"),
    ("granite", "plain", 37, "mixed_c"),
    ("cohere", "odd", None, "mixed_c"),
    ("gpt2", "left", None, "permuted"),
    ("llama", "left", None, "head_tensor"),
    ("mistral", "packed", None, "mixed_b"),
    ("smollm3", "one_row", None, "mixed_b"),
    ("llama_eager", "left", None, "permuted"),
    ("phi3", "one_short_row", None, "permuted"),
    ("gemma3", "right", None, "shuffled"),
    ("llama_biases", "right", 37, "shuffled"),
    ("qwen3", "right", None, "embedding_tensor"),
    ("starcoder2", "odd", None, "embedding_tensor"),
]
EVALUATED = 7  # the first ones, whose logits differ: capped, scaled, of a tied weight, of a head that is cut, packed


@pytest.mark.parametrize("evaluation", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_every_family_kind_of_batch_and_mix_of_layers(evaluation):
    plans, cases = mixed_plans() | untied_plans(), DIFFERENT[:EVALUATED] if evaluation else DIFFERENT[EVALUATED:]
    check_cases(4, {f"{case}": (oracle_of(*case[:3]), plans[case[-1]]) for case in cases}, evaluation=evaluation)


UNDER_EVERY_MIX = ("llama", "llama_tied")  # with the batch "right"


@pytest.mark.slow
@pytest.mark.parametrize("family", list(FAMILIES))
def test_every_family_with_every_kind_of_batch(family):
    """Runs each family under every third plan, and each plan with every kind of batch in some family."""
    oracles, turn = [oracle_of(family, batch) for batch in ("left", "odd", "packed")], list(FAMILIES).index(family)
    plans = enumerate(shared_out(mixed_plans(), turn, 3).items())
    cases = {name: (oracles[(turn // 3 + index) % 3], plan) for index, (name, plan) in plans}
    if family not in UNDER_EVERY_MIX:
        cases["mixed_b, right"] = oracle_of(family), mixed_plans()["mixed_b"]
    check_cases(4, cases)


@pytest.mark.slow
@pytest.mark.parametrize("family", UNDER_EVERY_MIX)
def test_every_mix_of_layers_and_order_of_ranks(family):
    oracle = oracle_of(family)
    plans = mixed_plans() | (untied_plans() if family == "llama" else {})
    check_cases(4, {name: (oracle, plan) for name, plan in plans.items()})


@pytest.mark.slow
@EVERY_UNIFORM_PLAN
def test_every_strategy_by_itself(world_size, names):
    oracle, plans = oracle_of("llama"), uniform_plans(world_size)
    check_cases(world_size, {name: (oracle, plans[name]) for name in names})


@pytest.mark.slow
def test_eight_ranks():
    check_cases(8, {"one row": (oracle_of("llama", "one_row"), uniform_plans(8)["megatron_sp_ulysses"])})


ONE_ROW = ("tensor", "tensor_ulysses", "ulysses")


@pytest.mark.slow
def test_half_of_the_strategies_by_themselves_on_eight_ranks():
    oracles = [oracle_of(family, "odd") for family in ("llama", "gpt2", "llama_biases", "qwen3")]
    plans = enumerate(shared_out(uniform_plans(8), 0, 2).items())
    cases = {name: (oracles[index % 4], plan) for index, (name, plan) in plans}
    one_row = {f"{name}, one row": (oracle_of("llama", "one_row"), uniform_plans(8)[name]) for name in ONE_ROW}
    check_cases(8, cases | one_row)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_every_kind_of_batch(family):
    plan = mixed_plans()["mixed_a"]
    cases = {batch: (oracle_of(family, batch), plan) for batch in BATCHES}
    if family == "llama":
        cases["eager"] = oracle_of("llama_eager", "left"), plan
        cases["head_tensor"] = oracle_of("llama", "one_row"), untied_plans()["head_tensor"]
    check_cases(4, cases)


def and_mixed_a(fast: str) -> pytest.MarkDecorator:
    """Runs a test under a fast plan, and under mixed_a as a slow case."""
    return pytest.mark.parametrize("plan", [fast, pytest.param("mixed_a", marks=pytest.mark.slow)])


@and_mixed_a("permuted")
def test_added_positions_stay_inside_learned_position_embeddings(plan):
    """Eleven positions on four sequence ranks: the twelfth has no embedding."""
    batch = BATCHES["right"]()
    batch["position_ids"] = torch.arange(11).expand(6, -1).clone()
    oracle = reference(FAMILIES["gpt2"].build(n_positions=11), batch)
    check_cases(4, {plan: (oracle, mixed_plans()[plan])})


@and_mixed_a("mixed_b")
def test_a_batch_without_targets_has_zero_gradients(plan):
    model, batch = FAMILIES["llama"].build(), BATCHES["right"]()
    batch["labels"] = torch.full_like(batch["labels"], -100)

    def work():
        parallel = parallelize(copy.deepcopy(model), mixed_plans()[plan])
        assert parallel.forward_backward(batch).isnan()  # as the family's own mean over nothing
        assert all(not whole(parameter.grad).any() for parameter in parallel.model.parameters())

    run_ranks(work, 4)


@pytest.mark.parametrize("plans", [["mixed_c"], pytest.param(["mixed_a", "mixed_b"], marks=pytest.mark.slow)], ids=len)
def test_one_row_of_position_ids_stands_for_all_rows(plans):
    """Gives the position ids first: the rows of the batch are not those of its first tensor."""
    batch = BATCHES["right"]()
    oracle = reference(FAMILIES["llama"].build(), {"position_ids": torch.arange(11)[None], **batch})
    check_cases(4, {plan: (oracle, mixed_plans()[plan]) for plan in plans})


def test_a_plain_backward_trains_under_every_sharding():
    """Calls backward of `model(**batch).loss` without announcing it to the units, and after a step of their own."""
    oracle = oracle_of("llama")

    def work():
        for sharding in ("replicate", "zero2", "zero3"):
            plan = uniform(2, sharding=sharding, embedding=VocabularyStrategy(sharding=sharding))
            parallel = parallelize(copy.deepcopy(oracle.model), plan)
            for attempt in range(3):
                parallel.model.zero_grad()
                if attempt == 1:
                    parallel.forward_backward(oracle.batch)
                else:
                    parallel.model(**oracle.batch).loss.backward()
                assert_same_gradients(whole_gradients(parallel.model, oracle.model), oracle.gradients, sharding)

    run_ranks(work, 2)


@st.composite
def layer_strategies(draw, ranks: int) -> LayerStrategy:
    """Draws any strategy that `ranks` ranks and the tiny models' eight heads allow."""
    degrees = [degree for degree in (1, 2, 4, 8) if degree <= ranks]
    tensor = draw(st.sampled_from(degrees))
    return LayerStrategy(
        tensor=tensor,
        megatron_sp=tensor > 1 and draw(st.booleans()),
        ulysses=draw(st.sampled_from([degree for degree in degrees if tensor * degree <= ranks])),
        recompute=draw(st.sampled_from(["none", "full"])),
        **draw(shardings(ranks // tensor)),
    )


@st.composite
def shardings(draw, ranks: int) -> dict:
    sharding = draw(st.sampled_from(["replicate", "zero2", "zero3"]))
    fewer = [None, *(degree for degree in (1, 2, 4, 8) if degree <= ranks)]
    return dict(sharding=sharding, shard_degree=None if sharding == "replicate" else draw(st.sampled_from(fewer)))


@st.composite
def plans_and_inputs(draw, ranks: int) -> tuple[str, str, ParallelPlan]:
    family = draw(st.sampled_from(["llama", "llama_tied", "llama_one_kv_head", "qwen3", "phi3", "gemma2", "gpt2"]))
    tied = FAMILIES[family].build().config.tie_word_embeddings
    ends = []
    for _ in range(2):
        tensor = draw(st.sampled_from([degree for degree in (1, 2, 4, 8) if degree <= ranks]))
        ends.append(VocabularyStrategy(tensor=tensor, **draw(shardings(ranks // tensor))))
    plan = single_stage(
        tuple(draw(layer_strategies(ranks)) for _ in range(LAYERS)),
        ranks,
        ranks=tuple(draw(st.permutations(range(ranks)))),
        embedding=ends[0],
        head=ends[0] if tied else ends[1],
        micro_batches=draw(st.integers(1, 3)),
    )
    return family, draw(st.sampled_from(list(BATCHES))), plan


def check_random_plans(drawn: list[tuple[str, str, ParallelPlan]], *, evaluation: bool = True) -> None:
    """Runs plans of one number of ranks, each with its family and batch."""
    cases = {f"{family}, {batch}, {plan.to_json()}": (oracle_of(family, batch), plan) for family, batch, plan in drawn}
    check_cases(drawn[0][-1].world_size, cases, evaluation=evaluation)


@pytest.mark.slow
def test_random_plans():
    check_random_plans(drawn(plans_and_inputs(4), 3), evaluation=False)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_many_random_plans(ranks):
    check_random_plans(drawn(plans_and_inputs(ranks), 10 if ranks == 4 else 4))


def test_a_loss_of_ones_own_logits_has_the_gradient_of_one_process():
    """Computes the loss outside of the head, as a custom loss function or label smoothing does."""
    oracle = oracle_of("llama")
    labels = F.pad(oracle.batch["labels"], (0, 1), value=-100)[:, 1:]
    inputs = {name: oracle.batch[name] for name in ("input_ids", "attention_mask")}

    def loss_of(logits, targets):
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum", label_smoothing=0.1)

    oracle.model.zero_grad()
    loss_of(oracle.model(**inputs).logits, labels).backward()
    wanted = {name: parameter.grad.clone() for name, parameter in oracle.model.named_parameters()}

    def work():
        parallel = parallelize(copy.deepcopy(oracle.model), untied_plans()["head_tensor"])
        parallel.model.zero_grad()
        loss_of(parallel.model(**inputs).logits, labels).backward()
        assert_same_gradients(whole_gradients(parallel.model, oracle.model), wanted, floor=0.0)

    run_ranks(work, 4)


def test_evaluation_sees_weights_that_changed_since_the_last_one():
    """Changes weights after an evaluation, as a checkpoint does that is loaded there."""
    before = oracle_of("llama")
    after = reference(FAMILIES["llama"].build(seed=5), BATCHES["right"]())
    plans = uniform_plans(2)

    def work():
        for plan in (plans["zero2"], plans["replicate"], plans["zero3"], plans["tensor"]):
            parallel = parallelize(copy.deepcopy(before.model), plan)
            observe(parallel, before)
            with torch.no_grad():
                for (name, parameter), new in zip(
                    parallel.model.named_parameters(), after.model.parameters(), strict=True
                ):
                    source = torch.distributed.tensor.distribute_tensor(
                        new.data, parameter.device_mesh, parameter.placements, src_data_rank=None
                    )
                    parameter.to_local().copy_(source.to_local())
            compare(observe(parallel, after), after)

    run_ranks(work, 2)


@pytest.mark.parametrize(
    "plan, evaluation", [("mixed_c", False), pytest.param("mixed_a", True, marks=pytest.mark.slow)]
)
def test_a_second_step_starts_from_clean_gradients(plan, evaluation):
    oracle = oracle_of("llama")

    def work():
        parallel = parallelize(copy.deepcopy(oracle.model), mixed_plans()[plan])
        compare(observe(parallel, oracle), oracle)
        compare(observe(parallel, oracle, evaluation=evaluation), oracle)

    run_ranks(work, 4)


def test_micro_batches_accumulate_under_every_sharding():
    oracle, S = oracle_of("llama"), ("replicate", "zero2", "zero3")
    cases = {}
    for sharding in S:
        plan = uniform(2, sharding=sharding, embedding=VocabularyStrategy(sharding=sharding))
        cases[sharding] = oracle, dataclasses.replace(plan, micro_batches=3)
    check_cases(2, cases)


def test_gradients_of_a_replicated_unit_of_one_weight_are_summed_where_they_are(monkeypatch):
    """An embedding's gradient is not copied for its sum; those of a layer's weights are joined in one message."""
    oracle, summed = oracle_of("llama"), {}
    start = ReplicatedUnit._start

    def noting_storages(unit: ReplicatedUnit) -> None:
        before = [weight.summed.data_ptr() for weight in unit.weights]
        start(unit)
        after = [weight.summed.untyped_storage().data_ptr() for weight in unit.weights]
        summed.setdefault(len(unit.weights), []).append((before, after))

    monkeypatch.setattr(ReplicatedUnit, "_start", noting_storages)

    def work():
        parallel = parallelize(copy.deepcopy(oracle.model), uniform_plans(2)["replicate"])
        parallel.forward_backward(oracle.batch)
        return summed

    for found in run_ranks(work, 2):
        assert found[1] and all(before == after for before, after in found.pop(1))
        assert found and all(len(set(after)) == 1 for units in found.values() for _, after in units)


def test_a_mask_on_the_host_is_read_there():
    full, padded = torch.ones(2, 3, dtype=torch.long), torch.tensor([[0, 1, 1], [1, 1, 1]])
    elsewhere = torch.device("meta")
    for mask in (full, padded):
        found, hides = mask_on_device(mask, elsewhere)
        assert found.device == elsewhere and found.shape == mask.shape and hides is (mask is padded)
    # A mask that is there already is not read, and neither are those of a model on the CPU.
    for mask, device in ((padded.to(elsewhere), elsewhere), (full, full.device), (padded, full.device)):
        found, hides = mask_on_device(mask, device)
        assert found is mask and hides is None


def test_masks_that_the_host_reads_give_the_results_of_one_process():
    """As on a GPU. A mask that hides nothing keeps rows whole whose position ids begin anew."""
    batch, model = BATCHES["plain"](), FAMILIES["llama"].build()
    ids = batch["input_ids"]
    full = torch.ones_like(ids)
    anew = torch.arange(ids.shape[1]).remainder(4).expand_as(ids)
    some = full.clone()
    some[0, -3:] = 0
    batches = [batch | {"attention_mask": full, "position_ids": anew}, batch | {"attention_mask": some}]
    oracles = [reference(copy.deepcopy(model), one) for one in batches]
    assert oracles[0].loss != pytest.approx(reference(model, batch | {"position_ids": anew}).loss, rel=1e-3)

    def work() -> None:
        read = mock.patch.object(model_runner, "mask_on_device", lambda mask, device: (mask, has_padding(mask)))
        for oracle in oracles:
            for plan in (uniform(2), uniform(2, tensor=2)):
                parallel = parallelize(copy.deepcopy(model), plan)
                with read:
                    loss = parallel.forward_backward(oracle.batch)
                assert float(loss) == pytest.approx(oracle.loss, rel=1e-5)
                assert_same_gradients(whole_gradients(parallel.model, model), oracle.gradients)

    run_ranks(work, 2)


def test_weights_that_a_failed_pass_has_gathered_are_forgotten():
    model = FAMILIES["llama"].build()
    batch = BATCHES["plain"]()

    def fail(*unused) -> None:
        raise MemoryError("in the first layer, after the second one's weights were asked for")

    def work() -> tuple[float, float]:
        losses = []
        for fails in (True, False):
            parallel = parallelize(copy.deepcopy(model), uniform(2))
            parallel.forward_backward(batch)
            parallel.model.zero_grad()
            if fails:
                hook = parallel.model.model.layers[0].self_attn.register_forward_pre_hook(fail)
                with pytest.raises(MemoryError):
                    parallel.forward_backward(batch)
                hook.remove()
            parallel.units.reshard()
            with torch.no_grad():
                for weight in parallel.model.parameters():
                    weight.mul_(0.5)
            losses.append(float(parallel.forward_backward(batch)))
        return tuple(losses)

    after, expected = run_ranks(work, 2)[0]
    assert after == expected
