# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""What a layer with experts sends and holds is the closed form, to the byte: exchanges of rows, weights, gradients,
optimizer state, and what its forward keeps for its backward.
"""

from __future__ import annotations

import contextlib
import copy
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from collective_counts import count_collectives
from equivalence import single_stage
from galvatron_hf.parallel.comm.dtensor import local_tensor
from galvatron_hf.parallel.comm.mesh import WorldMesh
from galvatron_hf.parallel.layers import experts
from galvatron_hf.parallel.layers.experts import ParallelExperts, Routing
from galvatron_hf.parallel.parallelize import parallelize
from galvatron_hf.plan import LayerStrategy
from memory_formulas import (
    ADAM_STEP_BYTES,
    ExpertShape,
    LayerShape,
    RoutedRows,
    adam_bytes,
    expert_collectives,
    expert_elements,
    saved_expert_layer_bytes,
)
from ranks import run_ranks
from test_memory import measure_saved
from tiny_models import BATCHES, EXPERT_FAMILIES


sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
from collective_recorder import CollectiveRecorder  # noqa: E402


S, RANKS = LayerStrategy, 4
SHAPE = ExpertShape(hidden=32, intermediate=40, experts=8, top_k=2)
STRATEGIES = {
    "data": S(),
    "expert_2": S(expert=2),
    "expert_4": S(expert=4),
    "recompute": S(expert=2, recompute="full"),
    "zero2": S(expert=2, sharding="zero2"),
    "replicate": S(expert=2, sharding="replicate"),
    "more_experts_than_shards": S(expert=4, shard_degree=2),
    "hybrid": S(expert=2, shard_degree=2),
    "tensor": S(tensor=2, expert=2),
    "tensor_recompute": S(tensor=2, expert=4, recompute="full"),
    "tensor_4": S(tensor=4, expert=4),
    "megatron_sp": S(tensor=2, expert=2, megatron_sp=True),
    "ulysses": S(ulysses=2, expert=4),
}


@contextlib.contextmanager
def routings() -> Iterator[list[Routing]]:
    """Yields a list of all routings that this rank makes."""
    found, route = [], experts.route

    def noted(*args) -> Routing:
        found.append(route(*args))
        return found[-1]

    with patch.object(experts, "route", noted):
        yield found


def rows_of(routing: Routing) -> RoutedRows:
    return RoutedRows(sent=sum(routing.sent), received=sum(routing.received))


# ---- What is sent ----


def sent_in_a_step(model, strategy: LayerStrategy, world: WorldMesh) -> tuple[Counter, Counter]:
    """Returns the collectives of activations, and all, of a step; by kind, ranks and bytes of this rank's input."""
    layers = (strategy,) * model.config.num_hidden_layers
    parallel = parallelize(copy.deepcopy(model), single_stage(layers, RANKS), world)
    with CollectiveRecorder() as recorder, count_collectives() as own:
        parallel.forward_backward(BATCHES["right"]())
    return Counter((call.kind, call.group_size, call.bytes) for call in own.calls), recorder.calls


def check_sent(model, strategy: LayerStrategy, world: WorldMesh) -> list[str]:
    """Compares a step of a model of one layer with one whose experts do and send nothing. Returns what differs."""
    tokens: list[int] = []

    def without_experts(self, hidden, choices, weights) -> torch.Tensor:
        tokens.append(len(hidden))
        return hidden * weights.sum(-1, keepdim=True).to(hidden.dtype)

    with patch.object(ParallelExperts, "__call__", without_experts):
        before, _ = sent_in_a_step(model, strategy, world)
    with routings() as found:
        own, everything = sent_in_a_step(model, strategy, world)
    rows = rows_of(found[0]) if found else None
    wanted = expert_collectives(SHAPE, strategy, RANKS, tokens=tokens[0], rows=rows)
    wrong = []
    if own - before != wanted.activations or before - own:
        wrong.append(f"{own - before} and not {wanted.activations}, {before - own}")
    for call, count in wanted.weights.items():
        if everything[call] != count:
            wrong.append(f"{everything[call]} of {call} and not {count}")
    if everything["all_reduce", RANKS, 8 * (2 * SHAPE.experts + 1)] != 1:
        wrong.append("the routers' loss")
    return wrong


@pytest.mark.slow
def test_a_layer_sends_what_the_formula_says():
    """Also that FSDP2 finds no fault with what experts return, see `with_router_gradient`."""
    model = EXPERT_FAMILIES["mixtral"].build(num_hidden_layers=1)

    def work() -> list[str]:
        world = WorldMesh("cpu")
        warnings.filterwarnings("error", message=".*returned a view.*")
        found = {name: check_sent(model, strategy, world) for name, strategy in STRATEGIES.items()}
        return [f"{name}: {text}" for name, wrong in found.items() for text in wrong]

    for wrong in run_ranks(work, RANKS):
        assert not wrong, "\n".join(wrong)


@pytest.mark.slow
def test_a_recompute_gathers_no_weights_again():
    """Experts next to shared ones run in a recompute before FSDP2 has begun their backward."""
    model = EXPERT_FAMILIES["deepseek_v3"].build(num_hidden_layers=3)

    def work() -> list[Counter]:
        world, found = WorldMesh("cpu"), []
        for recompute in ("none", "full"):
            layers = (S(recompute=recompute), *(S(expert=2, recompute=recompute),) * 2)
            parallel = parallelize(copy.deepcopy(model), single_stage(layers, RANKS, micro_batches=2), world)
            with CollectiveRecorder() as recorder:
                parallel.forward_backward(BATCHES["right"]())
            found.append(Counter({call: n for call, n in recorder.calls.items() if call[0] == "all_gather"}))
        return found

    for plain, recomputed in run_ranks(work, RANKS):
        assert plain == recomputed


# ---- What is held ----


@pytest.mark.slow
def test_weights_gradients_and_optimizer_state_of_experts():
    model = EXPERT_FAMILIES["mixtral"].build(num_hidden_layers=1)

    def work() -> None:
        world = WorldMesh("cpu")
        for name, strategy in STRATEGIES.items():
            parallel = parallelize(copy.deepcopy(model), single_stage((strategy,), RANKS), world)
            parallel.forward_backward(BATCHES["right"]())
            weights = parallel.blocks[0].experts.module.parameters()
            optimizer = torch.optim.AdamW(weights, foreach=False)
            optimizer.step()
            held = Counter()
            for weight, state in optimizer.state.items():
                held["weights"] += local_tensor(weight).nbytes
                held["gradients"] += local_tensor(weight.grad).nbytes
                held["optimizer"] += sum(local_tensor(value).nbytes for value in state.values())
            elements = expert_elements(SHAPE, strategy, RANKS)
            wanted = {"weights": 4 * elements, "gradients": 4 * elements}
            wanted["optimizer"] = adam_bytes(elements) + ADAM_STEP_BYTES  # of the second of two weights
            assert held == wanted, (name, held, wanted)

    run_ranks(work, RANKS)


@pytest.mark.slow
def test_saved_activations_of_a_layer_with_experts():
    """Counts an fp32 layer without a mask, with as many key/value heads as heads, whose experts are computed by
    `grouped_mm`; the routers' loss keeps what it needs apart.
    """
    rows, length = 8, 16
    batch = BATCHES["plain"]()
    batch = {name: torch.cat([x, x.flip(0)], dim=1)[:rows, :length] for name, x in batch.items()}
    options = dict(num_key_value_heads=8, num_hidden_layers=2, output_router_logits=False)
    model = EXPERT_FAMILIES["mixtral"].build(**options)
    layer = LayerShape(hidden=32, intermediate=0, heads=8, key_value_heads=8, head_dim=4)

    def work() -> None:
        world = WorldMesh("cpu")
        for name, strategy in STRATEGIES.items():
            parallel = parallelize(copy.deepcopy(model), single_stage((strategy,) * 2, RANKS), world)
            with routings() as found:
                saved = measure_saved(parallel, 1, batch)
            arrived = rows_of(found[1]) if found else None
            tokens = rows * length // strategy.data_degree(RANKS)
            wanted = saved_expert_layer_bytes(layer, SHAPE, strategy, tokens, arrived)
            assert saved == wanted, (name, saved, wanted)

    run_ranks(work, RANKS)
