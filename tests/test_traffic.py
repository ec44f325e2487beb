# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The closed form of a step's collectives is what real steps send: each one's kind, group size and input size."""

import copy
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from collective_counts import count_collectives
from equivalence import single_stage
from galvatron_hf.models.shape import ModelShape
from galvatron_hf.parallel.comm.mesh import WorldMesh
from galvatron_hf.parallel.parallelize import parallelize
from galvatron_hf.plan import LayerStrategy, ParallelPlan, Precision, Stage, VocabularyStrategy
from galvatron_hf.planner.cost.cost_model import CostModel
from galvatron_hf.planner.cost.workload import Workload
from galvatron_hf.profiler.profiles.layers import EndProfile, LayerProfile
from galvatron_hf.profiler.profiles.model import ModelProfile
from galvatron_hf.profiler.profiles.presets import hardware_preset
from galvatron_hf.profiler.trace.shapes import model_shape_from_model
from plans import mixed_plans, shared_out, uniform, uniform_plans, untied_plans
from ranks import run_ranks
from test_shared_documents import packed
from tiny_models import BATCHES, EXPERT_FAMILIES, FAMILIES


ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
from collective_recorder import CollectiveRecorder, totals  # noqa: E402
from communication import example_table  # noqa: E402
from step_traffic import KINDS, Traffic, step_traffic  # noqa: E402


S, V = LayerStrategy, VocabularyStrategy


def predicted(step: Traffic) -> Counter:
    """Returns the collectives that the recorder should see."""
    calls = Counter()
    for item in step.collectives:
        calls[item.kind, item.ranks, item.bytes] += item.count
    return calls


def long_rows() -> dict[str, torch.Tensor]:
    """More tokens than the head takes at a time, and a remainder."""
    ids = torch.randint(0, 97, (2, 1100), generator=torch.Generator().manual_seed(1))
    return dict(input_ids=ids, labels=ids)


def check_steps(world_size: int, cases: dict[str, tuple[str, str, ParallelPlan]]) -> None:
    """Runs one step of each case (family, batch, plan) and compares it with the formula on every rank."""
    batches = BATCHES | {"long": long_rows}
    models = {family: FAMILIES[family].build() for family, _, _ in cases.values()}
    shapes = {family: model_shape_from_model(model) for family, model in models.items()}

    def work() -> dict[str, tuple[int, Counter, bool]]:
        seen, world = {}, WorldMesh("cpu")
        for name, (family, batch, plan) in cases.items():
            parallel = parallelize(copy.deepcopy(models[family]), plan, world)
            for _ in range(2 if name == "zero2" else 1):  # a second step is like the first
                with CollectiveRecorder() as recorder, count_collectives() as own:
                    parallel.forward_backward(batches[batch]())
                    parallel.clip_grad_norm_(1.0)
            ours = Counter((call.kind, call.group_size, call.bytes) for call in own.calls)
            seen[name] = parallel.mesh.index, recorder.calls, ours <= recorder.calls
        return seen

    wrong = []
    for rank, found in enumerate(run_ranks(work, world_size)):
        for name, (index, seen, covers_own) in found.items():
            family, batch, plan = cases[name]
            rows, length = batches[batch]()["input_ids"].shape
            step = step_traffic(plan, shapes[family], rows=rows, length=length, rank_index=index)
            wanted = predicted(step)
            assert covers_own, f"{name}: the recorder misses some of our own collectives"
            if seen != wanted:
                wrong.append(f"{name}, rank {rank}: sent {seen - wanted}, and not {wanted - seen}")
                continue
            for kind in KINDS:
                assert totals(seen).get(kind, (0, 0)) == (step.count(kind), step.bytes(kind))
    assert not wrong, "\n".join(wrong)


def test_two_ranks_send_what_the_formula_says():
    cases = {name: ("llama", "right", plan) for name, plan in uniform_plans(2).items()}
    cases["long"] = "llama", "long", uniform(2, tensor=2, embedding=V(tensor=2))
    cases["tied"] = "llama_tied", "odd", uniform(2, embedding=V(tensor=2))
    cases["one row"] = "llama", "one_row", uniform(2, ulysses=2)
    check_steps(2, cases)


@pytest.mark.slow
def test_four_ranks_send_what_the_formula_says():
    plans = uniform_plans(4)
    mixed = mixed_plans() | untied_plans()
    families = {
        "mixed_b": "gemma2",
        "mixed_c": "qwen3",
        "permuted": "gpt2",
        "shuffled": "llama_one_kv_head",
        "embedding_tensor": "llama_biases",
        "head_tensor": "llama",
    }
    cases = {name: (family, "odd", mixed[name]) for name, family in families.items()}
    cases["tensor_ulysses"] = "llama", "right", plans["tensor_ulysses"]
    # micro-batches with copies of sharded weights; precision
    cases["accumulated copies"] = "llama", "right", replace(plans["hybrid_sharding"], micro_batches=2)
    cases["accumulated zero2"] = "llama", "right", replace(plans["zero2"], micro_batches=2)
    for compute, reduce in (("bf16", "fp32"), ("fp32", "bf16")):
        precision = Precision(compute=compute, reduce=reduce)
        plan = replace(mixed_plans()["mixed_c"], precision=precision, micro_batches=1)
        cases[f"{compute}, reduced in {reduce}"] = "llama", "right" if compute == "bf16" else "one_row", plan
    check_steps(4, cases)


@pytest.mark.slow
def test_four_ranks_send_what_the_formula_says_in_more_cases():
    plans, mixed = uniform_plans(4), mixed_plans() | untied_plans()
    cases = {
        name: ("llama", "right", plans[name]) for name in ("replicate", "hybrid_sharding", "megatron_sp_recompute")
    }
    for family in ("llama_one_kv_head", "llama_biases", "qwen3", "gpt2"):
        cases[family] = family, "right", mixed["mixed_b"]
    for name in ("mixed_a", "mixed_b", "mixed_c", "permuted", "shuffled", "embedding_tensor"):
        cases[name] = "llama", "odd", mixed[name]
    cases["accumulated copies"] = "llama", "right", replace(plans["hybrid_sharding"], micro_batches=3)
    cases["accumulated zero2"] = "llama", "right", replace(plans["zero2"], micro_batches=4)
    cases["one row"] = "llama", "one_row", mixed["mixed_c"]
    check_steps(4, cases)


@pytest.mark.slow
def test_eight_ranks_send_what_the_formula_says():
    """Every other plan, with families and kinds of batch in turn."""
    families, kinds = ("llama", "llama_one_kv_head", "qwen3", "gemma2", "gpt2"), ("right", "odd", "one_row")
    plans = enumerate(shared_out(uniform_plans(8), 1, 2).items(), start=2)
    check_steps(8, {name: (families[index % 5], kinds[index % 3], plan) for index, (name, plan) in plans})


CONTEXT_CASES = {
    "context 4": (uniform(4, context=4), 1),
    "context 2, two rows": (uniform(4, context=2), 4),
    "context 2, recompute": (uniform(4, context=2, recompute="full"), 2),
    "context 2, ulysses 2": (uniform(4, context=2, ulysses=2), 2),
    "context 2, megatron 2": (uniform(4, context=2, tensor=2, megatron_sp=True), 1),
    "context 2, bf16": (replace(uniform(4, context=2), precision=Precision(compute="bf16")), 2),
}


@pytest.mark.slow
def test_rings_send_what_the_cost_model_says():
    """Shares rows of one length, so that all blocks are equally long; one message for all rows of a ring."""
    length, model = 24, FAMILIES["llama"].build()
    shape = model_shape_from_model(model)

    def work() -> dict[str, Counter]:
        seen, world = {}, WorldMesh("cpu")
        for name, (plan, rows) in CONTEXT_CASES.items():
            parallel = parallelize(copy.deepcopy(model), plan, world)
            ids = torch.randint(0, 97, (rows, length), generator=torch.Generator().manual_seed(1))
            batch = dict(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids)
            packs, degree = parallel.resolved.packs, plan.layers[0].context
            blocks = [tuple(range(first, first + degree)) for first in range(0, packs, degree)]
            places = [[(row, blocks[row % len(blocks)]) for row in range(rows)]]
            with count_collectives() as log:
                parallel.forward_backward(packed(parallel, batch, places, "ring"))
            seen[name] = Counter(call.bytes for call in log.calls if call.kind == "send")
        return seen

    found = run_ranks(work, 4)
    for name, (plan, rows) in CONTEXT_CASES.items():
        precision, strategy = plan.precision or Precision(), plan.layers[0]
        workload = Workload(rows=rows, length=length, precision=precision)
        costs = CostModel(
            hardware_preset("cpu", 1, 4), profile_of_heads(shape), workload, 4, rows, context=strategy.context
        )
        ring = costs.ring_traffic(strategy, length)
        again = strategy.recompute == "full"
        wanted = Counter({ring.block_bytes: (2 + again) * ring.block_sends * plan.num_layers})
        wanted[ring.gradient_bytes] += ring.gradient_sends * plan.num_layers
        for rank, seen in enumerate(found):
            assert seen[name] == wanted, f"{name}, rank {rank}"
            total = sum(size * count for size, count in seen[name].items())
            assert total == plan.num_layers * ring.sent_bytes(recompute=again)


def profile_of_heads(shape: ModelShape) -> ModelProfile:
    """Returns a profile of no layers with the heads of a model."""
    end = EndProfile(weights=(), times={}, saved_bytes={})
    sizes = dict(hidden=shape.hidden, heads=shape.heads, kv_heads=shape.kv_heads, head_dim=shape.head_dim)
    layer = LayerProfile(weights=(), times={}, saved_bytes={})
    return ModelProfile(
        name="heads", dtype="fp32", kinds=(layer,), layers=(0,), embedding=end, head=end, tied=False, **sizes
    )


def test_the_recorder_sees_every_kind_of_collective_however_it_is_issued():
    def work():
        x = torch.ones(6)
        group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        with CollectiveRecorder() as recorder:
            dist.all_reduce(x)
            dist.all_reduce(x, group=group)  # one rank: nothing is sent
            dist.all_gather([torch.empty(6), torch.empty(6)], x)
            dist.all_to_all_single(torch.empty(6), x)
            dist.broadcast(x, src=0)
            functional.all_reduce(x, "sum", dist.group.WORLD).sum()
            leaf = x.clone().requires_grad_()
            functional.all_gather_single_autograd(leaf, 0, dist.group.WORLD).sum().backward()
            dist.barrier()
        return recorder.calls

    for calls in run_ranks(work, 2):
        assert {kind for kind, _, _ in calls} >= {"barrier"}
        assert {call: count for call, count in calls.items() if call[0] != "barrier"} == {
            ("all_reduce", 2, 24): 2,
            ("all_gather", 2, 24): 2,
            ("all_to_all", 2, 24): 1,
            ("broadcast_", 2, 24): 1,
            ("reduce_scatter", 2, 48): 1,
        }


def test_llamas_shape_is_the_models():
    for family in ("llama", "llama_tied", "llama_biases", "llama_one_kv_head"):
        model = FAMILIES[family].build()
        config = model.config
        shape = ModelShape.llama(
            vocab=config.vocab_size,
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            layers=config.num_hidden_layers,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            tied=config.tie_word_embeddings,
            attention_bias=config.attention_bias,
            mlp_bias=config.mlp_bias,
        )
        read = model_shape_from_model(model)
        assert [Counter(weights) for weights in shape.layers] == [Counter(weights) for weights in read.layers]
        assert replace(shape, layers=read.layers) == read


def test_one_rank_sends_nothing():
    shape = ModelShape.llama(vocab=97, hidden=32, intermediate=40, layers=1, heads=4)
    assert step_traffic(ParallelPlan.uniform(1, 1, micro_batches=4), shape, rows=8, length=8).count() == 0


def test_plans_that_do_not_run_and_other_models_are_refused():
    shape = ModelShape.llama(vocab=97, hidden=32, intermediate=40, layers=2, heads=4)
    with pytest.raises(ValueError, match="3 layers and the model has 2; make a plan for 2 layers"):
        step_traffic(ParallelPlan.uniform(2, 3), shape, rows=4, length=8)
    with pytest.raises(ValueError, match="2 pipeline stages, whose traffic has no formula yet"):
        step_traffic(ParallelPlan.uniform(2, 2, pipeline=2), shape, rows=4, length=8)
    with pytest.raises(ValueError, match="has ranks share documents.*give a plan with context=1"):
        step_traffic(ParallelPlan.uniform(2, 2, context=2), shape, rows=4, length=8)
    shape = model_shape_from_model(EXPERT_FAMILIES["mixtral"].build())
    with pytest.raises(ValueError, match="The model has experts"):
        step_traffic(ParallelPlan.uniform(2, 4), shape, rows=4, length=8)


def test_a_rank_is_counted_by_its_place_in_the_stage():
    shape = ModelShape.llama(vocab=97, hidden=32, intermediate=40, layers=1, heads=4)
    plan = single_stage((S(tensor=2),), 2, embedding=V(tensor=2), head=V(tensor=2))
    turned = replace(plan, stages=(Stage(ranks=(1, 0), layers=(0, 1)),))
    assert step_traffic(plan, shape, rows=4, length=8) == step_traffic(turned, shape, rows=4, length=8)


def test_the_documentations_example_is_the_formulas():
    assert example_table() in (ROOT / "docs" / "communication.md").read_text()
