# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Memory per rank is the closed form, to the byte: weights, gradients, optimizer state, saved activations."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest
import torch

from equivalence import single_stage
from galvatron_hf.parallel.comm.dtensor import local_tensor
from galvatron_hf.parallel.comm.mesh import WorldMesh
from galvatron_hf.parallel.parallelize import parallelize
from galvatron_hf.plan import LayerStrategy, ParallelPlan
from memory_formulas import LayerShape, adam_bytes, piece, saved_activation_bytes, shard_elements
from plans import mixed_plans, uniform_plans
from ranks import run_ranks
from tiny_models import BATCHES, FAMILIES, VOCABULARY


HIDDEN, INTERMEDIATE, HEADS, KEY_VALUE_HEADS, HEAD_DIM = 32, 40, 8, 2, 4
# Whole shapes of a Llama layer's weights and the dimension that tensor ranks cut, None where each has the whole.
LAYER_WEIGHTS = {
    "self_attn.q_proj": ((HEADS * HEAD_DIM, HIDDEN), 0),
    "self_attn.k_proj": ((KEY_VALUE_HEADS * HEAD_DIM, HIDDEN), 0),
    "self_attn.v_proj": ((KEY_VALUE_HEADS * HEAD_DIM, HIDDEN), 0),
    "self_attn.o_proj": ((HIDDEN, HEADS * HEAD_DIM), 1),
    "mlp.gate_proj": ((INTERMEDIATE, HIDDEN), 0),
    "mlp.up_proj": ((INTERMEDIATE, HIDDEN), 0),
    "mlp.down_proj": ((HIDDEN, INTERMEDIATE), 1),
    "input_layernorm": ((HIDDEN,), None),
    "post_attention_layernorm": ((HIDDEN,), None),
}


def expected_elements(plan: ParallelPlan, index: int) -> dict[str, int]:
    """Returns the elements of every weight on the stage's rank `index`."""
    ranks, elements = plan.world_size, {}

    def add(name: str, shape: tuple[int, ...], tensor_dim: int | None, strategy) -> None:
        degree = strategy.resolved_shard_degree(ranks)
        tensor, shard = index % strategy.tensor, index // strategy.tensor % degree
        cuts = [] if tensor_dim is None else [(tensor_dim, strategy.tensor, tensor)]
        # FSDP2 takes the first dimension, unless tensor ranks have cut it into uneven pieces.
        taken = tensor_dim == 0 and strategy.tensor > 1 and shape[0] % (strategy.tensor * degree)
        elements[f"{name}.weight"] = shard_elements(shape, [*cuts, (1 if taken else 0, degree, shard)])

    for layer, strategy in enumerate(plan.layers):
        for name, (shape, dim) in LAYER_WEIGHTS.items():
            # More tensor ranks than key/value heads: each has all of them.
            copied = name.endswith(("k_proj", "v_proj")) and strategy.tensor > KEY_VALUE_HEADS
            add(f"model.layers.{layer}.{name}", shape, None if copied else dim, strategy)
    add("model.embed_tokens", (VOCABULARY, HIDDEN), 0, plan.embedding)
    add("model.norm", (HIDDEN,), None, plan.head)
    add("lm_head", (VOCABULARY, HIDDEN), 0, plan.head)
    return elements


def check_state(plan: ParallelPlan, world: WorldMesh) -> None:
    torch.manual_seed(0)
    parallel = parallelize(FAMILIES["llama"].build(), plan, world)
    parameters = dict(parallel.model.named_parameters())
    parallel.forward_backward(BATCHES["right"]())
    optimizer = torch.optim.AdamW(parameters.values(), foreach=False)
    optimizer.step()
    expected = expected_elements(plan, parallel.mesh.index)
    assert parameters.keys() == expected.keys()
    for name, parameter in parameters.items():
        assert local_tensor(parameter).numel() == expected[name], name
        assert local_tensor(parameter.grad).numel() * 4 == local_tensor(parameter.grad).nbytes == 4 * expected[name]
        state = sum(local_tensor(value).nbytes for value in optimizer.state[parameter].values())
        assert state == adam_bytes(expected[name]), name


ALONE = ["replicate", "zero2", "zero3", "tensor", "megatron_sp", "ulysses"]
COMBINED = ["hybrid_sharding", "tensor_data", "tensor_replicate", "megatron_sp_ulysses", "mixed_b"]


@pytest.mark.parametrize(
    "world_size, names",
    [(2, ALONE), *(pytest.param(4, names, marks=pytest.mark.slow) for names in (COMBINED, ALONE))],
    ids=["2", "4_combined", "4"],
)
def test_weights_gradients_and_optimizer_state(world_size, names):
    plans = uniform_plans(world_size) | mixed_plans()

    def work():
        world = WorldMesh("cpu")
        for name in names:
            check_state(plans[name], world)

    run_ranks(work, world_size)


def test_pieces_of_uneven_dimensions():
    assert [piece(97, 4, index) for index in range(4)] == [25, 25, 25, 22]
    assert [piece(5, 4, index) for index in range(4)] == [2, 2, 1, 0]
    assert shard_elements((97, 33), [(0, 2, 1), (1, 4, 3)]) == 48 * 6


def measure_saved(parallel, layer: int, batch: dict) -> int:
    """Returns the bytes that autograd saves in one layer's forward, without weights and position embeddings."""
    module = parallel.model.base_model.layers[layer]
    inner, found = module.forward, {}

    def forward(*args, **kwargs):
        def pack(tensor):
            found[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
            return tensor

        def weights():  # those of zero2 are gathered in the forward
            return [local_tensor(p) for part in module.modules() for p in part._parameters.values() if p is not None]

        shared = [*kwargs["position_embeddings"], *weights()]
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = inner(*args, **kwargs)
        for tensor in (*shared, *weights()):
            found.pop(tensor.untyped_storage()._cdata, None)
        return output

    module.forward = forward
    parallel.units.begin_micro_batch(last=True)
    loss = parallel.runner(**batch).loss
    total = sum(storage.nbytes() for storage in found.values())
    found.clear()
    loss.backward()
    module.forward = inner
    return total


STRATEGIES = {
    "data": LayerStrategy(),
    "tensor": LayerStrategy(tensor=2),
    "tensor_4": LayerStrategy(tensor=4),
    "megatron_sp": LayerStrategy(tensor=2, megatron_sp=True),
    "megatron_sp_4": LayerStrategy(tensor=4, megatron_sp=True),
    "ulysses": LayerStrategy(ulysses=2),
    "ulysses_4": LayerStrategy(ulysses=4),
    "tensor_ulysses": LayerStrategy(tensor=2, ulysses=2),
    "megatron_sp_ulysses": LayerStrategy(tensor=2, ulysses=2, megatron_sp=True),
    "recompute": LayerStrategy(recompute="full"),
    "recompute_tensor": LayerStrategy(tensor=4, recompute="full"),
    "recompute_megatron_sp": LayerStrategy(tensor=2, megatron_sp=True, recompute="full"),
}


@pytest.mark.slow
def test_saved_activations():
    """Counts an fp32 Llama layer without a mask, with as many key/value heads as heads (the kernel repeats none)."""
    rows, length = 8, 16
    batch = BATCHES["plain"]()
    batch = {name: torch.cat([x, x.flip(0)], dim=1)[:rows, :length] for name, x in batch.items()}
    assert batch["input_ids"].shape == (rows, length)
    shape = LayerShape(hidden=HIDDEN, intermediate=INTERMEDIATE, heads=HEADS, key_value_heads=HEADS, head_dim=HEAD_DIM)

    def work():
        found, world = {}, WorldMesh("cpu")
        for name, strategy in STRATEGIES.items():
            # Both layers are alike, so that the input is not a moved copy that the second would own.
            model = FAMILIES["llama"].build(num_key_value_heads=HEADS, num_hidden_layers=2)
            parallel = parallelize(model, single_stage((strategy,) * 2, 4), world)
            found[name] = measure_saved(parallel, 1, batch)
        return found

    for found in run_ranks(work, 4):
        for name, saved in found.items():
            strategy = STRATEGIES[name]
            tokens = rows * length // strategy.data_degree(4)
            assert saved == saved_activation_bytes(shape, strategy, tokens), name


# At first glibc puts the ends that it cuts off an aligned block into its small bins, and the rest is too small for the
# next block. After some 10 blocks the place of one block serves the next.
FAULTS = """
import resource, torch
from galvatron_hf.utils.allocator import keep_freed_memory
def faults():
    for count in range(34):
        torch.ones(1 << 24)
        if count == 23:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(faults())
keep_freed_memory()
print(faults())
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library has no mallopt")
def test_freed_memory_stays_with_the_process():
    """Counts pages that a process gets from the kernel while it makes and frees 64 MiB ten times."""
    printed = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True).stdout
    anew, kept = map(int, printed.split())
    assert anew > 10 * (64 << 20) // (2 << 20) // 2  # 2 MiB a page at the most
    assert kept < 10
