# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Products of layers in float8, which a CPU computes on rounded numbers, against torchao on one process."""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from equivalence import whole_gradients
from galvatron_hf.models.families import adapter_for
from galvatron_hf.parallel.layers import float8
from galvatron_hf.parallel.parallelize import parallelize
from galvatron_hf.plan import LayerStrategy, ParallelPlan, Precision
from galvatron_hf.plan.supported import unsupported
from plans import pipelined, single_stage
from ranks import run_ranks
from tiny_models import BATCHES, FAMILIES
from trainer_runs import trainer


PRECISION = Precision(compute="fp8", master="fp32", reduce="fp32")
SIZES = dict(hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, head_dim=32)

needs_torchao = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")


def converted(model: nn.Module) -> nn.Module:
    """Returns the model in bf16 with products of layers in float8, as torchao makes it."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    model = copy.deepcopy(model).bfloat16()
    for layer in model.model.layers:
        convert_to_float8_training(layer, config=Float8LinearConfig(emulate=True))
    return model


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    model(**BATCHES["plain"](), use_cache=False).loss.backward()
    return {name: weight.grad.float() for name, weight in model.named_parameters()}


def products(model: nn.Module, run: Callable[[], Any]) -> dict[str, torch.Tensor]:
    """Returns what the projections before the first attention compute while `run` runs."""
    found = {}
    for name in ("q_proj", "k_proj", "v_proj"):

        def keep(module, inputs, output, name=name):
            found[name] = output.detach()

        model.model.layers[0].self_attn.get_submodule(name).register_forward_hook(keep)
    run()
    return found


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Returns the norm of the difference of all gradients, relative to their norm."""
    squares = [((one[name] - other[name]).square().sum(), other[name].square().sum()) for name in other]
    return (sum(difference for difference, _ in squares) / sum(square for _, square in squares)).sqrt().item()


FULL = LayerStrategy(recompute="full")
PLANS = {
    "zero3": single_stage((LayerStrategy(), FULL) * 2, 2),
    "megatron_sp": single_stage((LayerStrategy(tensor=2, megatron_sp=True),) * 4, 2),
    "tensor": single_stage((LayerStrategy(tensor=2, sharding="replicate"),) * 4, 2),
    "1f1b": pipelined([(0,), (1,)], (LayerStrategy(sharding="zero2"),) * 4),
}


def in_float8(plan: ParallelPlan) -> ParallelPlan:
    return dataclasses.replace(plan, precision=PRECISION)


@needs_torchao
def test_products_are_those_of_torchao():
    model = FAMILIES["llama"].build(**SIZES)
    plain = converted(model)
    wanted = products(plain, lambda: plain(**BATCHES["plain"]()))

    def work() -> dict[str, torch.Tensor]:
        parallel = parallelize(copy.deepcopy(model), in_float8(ParallelPlan.uniform(1, 4)))
        return products(parallel.model, lambda: parallel.forward_backward(BATCHES["plain"]()))

    found = run_ranks(work, 1)[0]
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


@needs_torchao
@pytest.mark.parametrize("family", ["llama", "llama_biases", pytest.param("qwen2", marks=pytest.mark.slow)])
def test_gradients_are_as_near_to_single_precision_as_those_of_torchao(family):
    """Float8 rounds to 3 bits: a difference of a bf16 rounding in attention becomes another rounding of all after it,
    so that gradients are compared with exact ones.
    """
    model = FAMILIES[family].build(**SIZES)
    exact, rounded = gradients_of(copy.deepcopy(model)), gradients_of(converted(model))
    of_torchao = distance(rounded, exact)
    of_bf16 = distance(gradients_of(copy.deepcopy(model).bfloat16()), exact)
    assert of_torchao > 3 * of_bf16  # what float8 changes

    def work() -> dict[str, float]:
        found = {}
        for name, plan in PLANS.items():
            parallel = parallelize(copy.deepcopy(model), in_float8(plan))
            parallel.forward_backward(BATCHES["plain"]())
            gradients = whole_gradients(parallel.model, model)
            found[name] = distance({key: value.float() for key, value in gradients.items()}, exact)
        return found

    for name, error in run_ranks(work, 2)[0].items():
        assert 3 * of_bf16 < error < 1.5 * of_torchao, (name, error, of_torchao, of_bf16)


@needs_torchao
def test_layers_are_converted_and_ends_are_not():
    def work() -> list[list[str]]:
        kinds = []
        for tensor in (1, 2):
            layer = LayerStrategy(tensor=tensor)
            model = parallelize(FAMILIES["llama"].build(**SIZES), in_float8(single_stage((layer,) * 4, 2))).model
            names = [name for name, one in model.named_modules() if hasattr(one, "linear_mm_config")]
            kinds.append(sorted({name.split(".")[-1] for name in names}))
        return kinds

    projections = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert run_ranks(work, 2) == [[projections, projections]] * 2


@needs_torchao
def test_layers_with_biases_compile_whole():
    model = FAMILIES["llama_biases"].build(**SIZES)
    plan = in_float8(single_stage((LayerStrategy(tensor=2, megatron_sp=True),) * 4, 2))

    def work() -> list[float]:
        losses = []
        for compiles in (False, True):
            parallel = parallelize(copy.deepcopy(model), plan)
            if compiles:
                parallel.compile(backend="eager", fullgraph=True)
            losses.append(float(parallel.forward_backward(BATCHES["plain"]())))
        return losses

    eager, compiled = run_ranks(work, 2)[0]
    assert eager == compiled


@needs_torchao
@pytest.mark.parametrize("tokens", [24, 1])
def test_a_gpu_multiplies_any_number_of_tokens(tokens):
    """On meta tensors, whose products have the conditions of a GPU's."""
    with torch.device("meta"):
        layer, hidden = nn.Sequential(nn.Linear(32, 48)).bfloat16(), torch.ones(tokens, 32, dtype=torch.bfloat16)
    float8.make_float8(layer, 1, torch.device("cuda"))
    layer(hidden.requires_grad_()).sum().backward()
    assert layer[0].weight.grad.shape == (48, 32) and hidden.grad.shape == hidden.shape


@needs_torchao
def test_a_run_that_resumes_keeps_float8(tmp_path):
    def work() -> str:
        made = trainer(tmp_path, options=dict(bf16=True))
        made._resumed_plan = in_float8(ParallelPlan.uniform(1, 4))
        return made.plan_for(made.model).precision.compute

    assert run_ranks(work, 1) == ["fp8"]


# ---- Refusals ----


def refusal(device: str = "cpu", **sizes: int) -> str:
    model = FAMILIES["llama"].build(**(SIZES | sizes))
    plan = ParallelPlan.uniform(1, 4, precision=PRECISION)
    with pytest.raises(ValueError) as error:
        float8.check_float8(model, adapter_for(model), plan, torch.device(device))
    return str(error.value)


def test_without_torchao_it_is_named():
    with mock.patch.object(importlib.util, "find_spec", lambda name: None):
        assert "needs the package torchao" in refusal()


@needs_torchao
def test_gpus_without_products_in_float8_are_named():
    with mock.patch.object(torch.cuda, "get_device_capability", lambda device: (8, 0)):
        assert "needs a GPU of compute capability 8.9, and cuda:0 has 8.0" in refusal("cuda:0")


@needs_torchao
def test_layers_without_products_that_fit_are_named():
    odd = dict(hidden_size=24, intermediate_size=40, head_dim=6)
    assert "finds no linear module in layer 0 whose sizes are multiples of 16" in refusal(**odd)


def test_a_schedule_that_splits_the_backward_is_refused():
    layers = (LayerStrategy(sharding="zero2"),) * 4
    plan = pipelined([(0,), (1,)], layers, "zero_bubble")
    assert "use 'bf16', or schedule '1f1b'" in " ".join(unsupported(in_float8(plan)))
