# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Layers that `torch.compile` compiles one by one: results, graphs, and how often packed rows are compiled again."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from accelerate.utils import TorchDynamoPlugin
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention import varlen

import oracle as trainer_oracle
from equivalence import assert_near, assert_same_gradients, compare, observe, reference, single_stage, whole_gradients
from galvatron_hf.parallel.comm.mesh import WorldMesh
from galvatron_hf.parallel.layers import varlen_attention
from galvatron_hf.parallel.layers.varlen_attention import attention_by_document
from galvatron_hf.parallel.parallelize import parallelize
from galvatron_hf.plan import LayerStrategy, ParallelPlan
from galvatron_hf.trainer.arguments import compile_options
from plans import KEPT_LAYERS, pipelined, uniform
from ranks import run_ranks
from test_packed_rows import long_tailed, packed
from tiny_models import FAMILIES


def compiled(oracle, plan: ParallelPlan, world: WorldMesh, **options):
    """Returns the oracle's model under the plan with compiled layers, and the counter of their graphs."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    parallel = parallelize(copy.deepcopy(oracle.model), plan, world)
    parallel.compile(backend=counter, **options)
    return parallel, counter


def graphs_of(family: str, plans: dict[str, ParallelPlan], world_size: int = 2) -> dict[str, int]:
    """Compares compiled layers with one process; every layer must be one graph. Returns the graphs of each plan."""
    oracle = reference(FAMILIES[family].build(), long_tailed())

    def work() -> dict[str, int]:
        world, graphs = WorldMesh("cpu"), {}
        for name, plan in plans.items():
            parallel, counter = compiled(oracle, plan, world, fullgraph=True)
            compare(observe(parallel, oracle), oracle)
            graphs[name] = counter.frame_count
        return graphs

    found = run_ranks(work, world_size)
    return {name: max(graphs[name] for graphs in found) for name in plans}


ALTERNATING = (LayerStrategy(tensor=2, megatron_sp=True), LayerStrategy(recompute="full")) * 2


@pytest.mark.slow
def test_a_strategy_and_the_head_are_one_graph_for_training_and_one_for_evaluation():
    assert graphs_of("llama", {"two": single_stage(ALTERNATING, 2)}) == {"two": 6}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt2", "gemma2", "phi3"])
def test_families_compile_whole(family):
    assert graphs_of(family, {"two": single_stage(ALTERNATING, 2)})["two"] <= 8


@pytest.mark.slow
def test_other_strategies_and_pipelines_compile_whole():
    others = (LayerStrategy(ulysses=2, sharding="zero2"), LayerStrategy(sharding="replicate")) * 2
    pipeline = pipelined([(0,), (1,)], KEPT_LAYERS[::3] * 2)
    graphs = graphs_of("llama", {"others": single_stage(others, 2, micro_batches=3), "1f1b": pipeline})
    assert max(graphs.values()) <= 12, graphs


@pytest.mark.slow
def test_inductor_computes_the_same():
    oracle = reference(FAMILIES["llama"].build(), long_tailed())

    def work() -> None:
        parallel = parallelize(copy.deepcopy(oracle.model), uniform(2, tensor=2, megatron_sp=True))
        parallel.compile(fullgraph=True)
        compare(observe(parallel, oracle), oracle)

    run_ranks(work, 2)


# ---- Packed rows ----

PACKINGS = [
    (1, 9, 2, 14, 5, 5, 5, 1, 11, 3, 7),
    (8, 8, 2),
    (20, 1, 1, 3),
    (2, 30, 4, 4),
    (17, 6, 6, 9, 1),
    (5, 12, 12),
]


def _weights(query, key, value, offsets, causal, scale, window_size):
    """Returns the attention weights [heads, T, T] of documents in a row, and keys and values of every query head."""
    copies = query.shape[1] // key.shape[1]
    key, value = (states.repeat_interleave(copies, dim=1).transpose(0, 1) for states in (key, value))
    places = torch.arange(len(query))
    document = torch.bucketize(places, offsets[1:], right=True)
    distance = places[:, None] - places
    left, right = (len(query) if reach < 0 else reach for reach in window_size)
    seen = (document[:, None] == document) & (-right <= distance) & (distance <= left)
    scores = (query.transpose(0, 1) @ key.mT * scale).masked_fill(~seen, -torch.inf)
    return scores.softmax(-1), key, value


def _forward(query, key, value, offsets, _, most, __, causal, scale, window_size, *rest):
    weights, _, value = _weights(query, key, value, offsets, causal, scale, window_size)
    unused = query.new_zeros(query.shape[1], len(query)), torch.zeros(2, dtype=torch.uint64)
    return (weights @ value).transpose(0, 1), *unused


def _backward(gradient, query, key, value, output, lse, offsets, _, most, __, causal, state, scale, window_size):
    weights, keys, values = _weights(query, key, value, offsets, causal, scale, window_size)
    gradient, query = gradient.transpose(0, 1), query.transpose(0, 1)
    of_weights = gradient @ values.mT
    of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True)) * scale
    of_heads = of_scores @ keys, of_scores.mT @ query, weights.mT @ gradient
    of_query, of_key, of_value = (each.transpose(0, 1) for each in of_heads)
    return of_query, *(each.unflatten(1, (key.shape[1], -1)).sum(2) for each in (of_key, of_value))


@contextmanager
def varlen_kernel_on_the_cpu() -> Iterator[None]:
    """Gives the CPU a kernel in the place of flash attention's, so that packed layers take the path of a GPU."""
    with mock.patch.object(varlen_attention, "has_varlen_kernel", lambda query: True):
        yield


@pytest.fixture(scope="module", autouse=True)
def _kernels():
    varlen._varlen_attn.register_kernel("cpu")(_forward)
    varlen._varlen_attn_backward.register_kernel("cpu")(_backward)


def graphs_after_each_packing(plan: ParallelPlan, kernel: bool, world_size: int = 2) -> list[int]:
    """Compares packed steps of other lengths each with one process; returns the graphs after each step."""
    model = FAMILIES["llama"].build()
    oracles = [reference(copy.deepcopy(model), long_tailed(lengths)) for lengths in PACKINGS]

    def work() -> list[int]:
        parallel, counter = compiled(oracles[0], plan, WorldMesh("cpu"), fullgraph=kernel)
        graphs = []
        for oracle in oracles:
            parts = packed(parallel, oracle.batch, plan.micro_batch_count)
            assert_near("loss", float(parallel.forward_backward(parts)), oracle.loss)
            assert_same_gradients(whole_gradients(parallel.model, oracle.model), oracle.gradients)
            parallel.model.zero_grad()
            graphs.append(counter.frame_count)
        return graphs

    if not kernel:
        return run_ranks(work, world_size)[0]
    with varlen_kernel_on_the_cpu():
        return run_ranks(work, world_size)[0]


def test_the_kernel_in_this_test_is_the_one_of_the_gpu():
    """Compares the CPU's stand-in with attention that is computed document by document."""
    draw = torch.Generator().manual_seed(0)
    states = [torch.randn(1, heads, 12, 8, generator=draw) for heads in (4, 2, 2)]
    for window in (None, 3):
        options = dict(causal=True, scale=None, sliding_window=window)
        with varlen_kernel_on_the_cpu():
            seen = attention_by_document(*states, [0, 5, 6, 12], **options)
        torch.testing.assert_close(seen, attention_by_document(*states, [0, 5, 6, 12], **options))


@pytest.mark.slow
def test_packed_layers_are_whole_graphs_and_compiled_a_handful_of_times():
    graphs = graphs_after_each_packing(uniform(2, ulysses=2), kernel=True)
    assert graphs[-1] <= 4 and graphs[-1] == graphs[2], graphs


@pytest.mark.slow
def test_packed_layers_without_such_a_kernel_leave_attention_out():
    graphs = graphs_after_each_packing(uniform(2), kernel=False)
    assert graphs[-1] <= 14 and graphs[-1] == graphs[-2], graphs


# ---- The Trainer ----


def _is_compiled(trainer) -> None:
    """Asserts that a Trainer under a plan compiled the layers, and that nothing compiled the whole model."""
    if hasattr(trainer, "parallel"):
        assert all(hasattr(block.original, "_torchdynamo_orig_callable") for block in trainer.parallel.blocks)
        assert type(trainer.model_wrapped) is type(trainer.model)


@contextmanager
def launched_with_dynamo() -> Iterator[None]:
    """Sets what `accelerate launch --dynamo_backend aot_eager` sets."""
    with mock.patch.dict(os.environ, ACCELERATE_DYNAMO_BACKEND="aot_eager"):
        yield


@pytest.mark.parametrize("given", ["arguments", pytest.param("launched", marks=pytest.mark.slow)])
def test_trainers_compile_layers_and_equal_plain_trainer(given):
    options = dict(
        arguments=dict(own_options=dict(torch_compile_backend="eager", torch_compile_mode="default")),
        launched=dict(fault=launched_with_dynamo),
    )[given]
    case = trainer_oracle.Case(plan=uniform(2, tensor=2), options=dict(max_steps=2), after=_is_compiled, **options)
    trainer_oracle.check_cases({given: case}, world_size=2)


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(mode="max-autotune"), "'max-autotune' records CUDA graphs.*use mode 'default'"),
        (dict(backend="cudagraphs"), "'cudagraphs' records CUDA graphs.*use mode 'default'"),
        ({}, "schedule 'zero_bubble' computes.*use schedule '1f1b', or do not compile"),
    ],
)
def test_what_cannot_be_compiled_is_refused(options, message):
    plan = pipelined([(0,), (1,)], KEPT_LAYERS[:1] * 4, "zero_bubble")
    with pytest.raises(ValueError, match=message) as error:
        compile_options(TorchDynamoPlugin(**(dict(backend="inductor") | options)), plan)
    assert "\n" not in str(error.value)


def test_nothing_is_compiled_by_default():
    assert compile_options(SimpleNamespace(backend=TorchDynamoPlugin(backend="no").backend), None) is None
