# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters and frozen weights under every kind of plan: loss and gradients of one process."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from peft import IA3Config, PromptTuningConfig, get_peft_model

from adapted_models import adapted, injected, lora
from equivalence import (
    Reference,
    assert_near,
    assert_same_gradients,
    reference,
    whole_gradients,
)
from galvatron_hf.models.families import adapter_for
from galvatron_hf.models.lora import check_has_values, inner_model
from galvatron_hf.models.parameter_specs import _cut
from galvatron_hf.parallel.comm.mesh import WorldMesh
from galvatron_hf.parallel.layers import lora as lora_layer
from galvatron_hf.parallel.layers import stage_layers, tensor_parallel
from galvatron_hf.parallel.parallelize import parallelize
from galvatron_hf.plan import ParallelPlan
from plan_inputs import drawn
from plans import expert_plans, mixed_plans, pipeline_plans, shared_out, uniform, uniform_plans
from ranks import run_ranks
from test_mutations import complaint
from test_parallelize import check_cases, plans_and_inputs
from tiny_models import BATCHES, FAMILIES


BIASES = dict(bias="all", lora_bias=True, use_rslora=True)
ENDS = dict(modules_to_save=["embed_tokens", "lm_head", "norm", "input_layernorm", "gate_proj"])
MODELS = {
    "llama": lambda: adapted(),
    "biases": lambda: adapted("llama_biases", **BIASES),
    "one_kv_head": lambda: adapted("llama_one_kv_head", **BIASES),
    "ends": lambda: adapted(**ENDS),
    "gpt2": lambda: adapted("gpt2", fan_in_fan_out=True, **BIASES),
    "phi3": lambda: adapted("phi3", modules_to_save=["gate_up_proj"], target_modules=["qkv_proj", "o_proj"]),
    "tied": lambda: adapted("qwen2", bias="lora_only"),
    "injected": lambda: injected(target_modules=["q_proj", "o_proj"], layers_to_transform=[1, 3]),
    "deepseek_v3": lambda: adapted("deepseek_v3", target_modules=["kv_b_proj", "o_proj"]),
    "qwen3_moe": lambda: adapted("qwen3_moe", target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]),
}
PLANS = uniform_plans(4) | mixed_plans() | pipeline_plans()
# Each kind of plan with some model, and each model under tensor ranks or experts.
FAST = {
    "llama": ["zero3", "replicate", "tensor", "ulysses_recompute", "mixed_a", "zero_bubble"],
    "biases": ["mixed_b", "tensor_ulysses"],
    "one_kv_head": ["tensor", "1f1b_mixed"],
    "ends": ["mixed_a", "interleaved", "1f1b_of_four"],
    "gpt2": ["permuted", "megatron_sp_data", "zero_bubble_v"],
    "phi3": ["megatron_sp", "mixed_c"],
    "tied": ["shuffled", "zero_bubble_loop"],
    "injected": ["tensor_replicate"],
}
EXPERTS = {"deepseek_v3": ["expert_2"], "qwen3_moe": ["all_kinds", "tensor_1f1b"]}


def oracle_of(name: str, batch: str = "right") -> Reference:
    return reference(inner_model(MODELS[name]()), BATCHES[batch]())


@pytest.mark.slow
@pytest.mark.parametrize("part", [pytest.param(0, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.slow), 2])
def test_adapters_under_every_kind_of_plan(part):
    cases = {}
    for name in list(FAST)[part::3]:
        oracle = oracle_of(name)
        cases |= {f"{name} {plan}": (oracle, PLANS[plan]) for plan in FAST[name]}
    check_cases(4, cases, evaluation=part == 0)


@pytest.mark.slow
def test_adapters_of_layers_with_experts():
    cases = {}
    for name, plans in EXPERTS.items():
        oracle = oracle_of(name)
        counts = adapter_for(oracle.model).expert_counts(oracle.model)
        known = expert_plans(dense=[index for index, count in enumerate(counts) if not count])
        cases |= {f"{name} {plan}": (oracle, known[plan]) for plan in plans}
    check_cases(4, cases, evaluation=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(FAST))
def test_every_model_with_adapters(name):
    """Runs a sixth of the plans with each model, and each plan with one model or two."""
    tied = name in ("gpt2", "tied")
    oracles = [oracle_of(name, batch) for batch in ("left", "odd", "packed")]
    cases = {
        plan: (oracles[index % 3], one)
        for index, (plan, one) in enumerate(shared_out(PLANS, list(FAST).index(name), 6).items())
        if not tied or one.embedding.tensor == one.head.tensor
    }
    check_cases(4, cases)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "biases", "ends"])
def test_random_plans_with_adapters(name):
    plans = {plan.to_json(): (oracle_of(name, batch), plan) for _, batch, plan in drawn(plans_and_inputs(4), 3)}
    check_cases(4, plans)


# ---- What is trained, gathered and reduced ----


def test_frozen_weights_have_no_gradient_and_are_not_reduced():
    """Counts the bytes that all ranks reduce in a step: those of adapters alone, whatever the sharding."""
    model = adapted()
    plans = {"zero3": uniform(2), "zero2": PLANS_OF_TWO["zero2"], "replicate": PLANS_OF_TWO["replicate"]}
    trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)

    def work() -> dict[str, tuple[int, int]]:
        found, world = {}, WorldMesh("cpu")
        for name, plan in plans.items():
            parallel, reduced = parallelize(copy.deepcopy(model), plan, world), []
            with counted_reductions(reduced):
                parallel.forward_backward(BATCHES["plain"]())
            own = [(n, weight) for n, weight in parallel.model.named_parameters() if weight.grad is not None]
            assert all(weight.requires_grad for _, weight in own)
            assert len(own) == sum(weight.requires_grad for weight in parallel.model.parameters())
            found[name] = sum(reduced)
        return found

    for found in run_ranks(work, 2):
        assert found == dict.fromkeys(plans, trained)


PLANS_OF_TWO = uniform_plans(2)


@contextlib.contextmanager
def counted_reductions(sizes: list[int]) -> Iterator[None]:
    """Notes the elements of each reduce-scatter's input, and of each all-reduce of more than a number."""
    scatter, reduce = dist.reduce_scatter_single, dist.all_reduce

    def noted(original: Callable, sized: int) -> Callable:
        def call(*args, **kwargs):
            tensor = kwargs.get("input", args[sized] if len(args) > sized else None)
            if tensor.numel() > 1:
                sizes.append(tensor.numel())
            return original(*args, **kwargs)

        return call

    with (
        patch.object(dist, "reduce_scatter_single", noted(scatter, 1)),
        patch.object(dist, "all_reduce", noted(reduce, 0)),
    ):
        yield


FROZEN = {
    "norms": lambda name: "norm" in name,
    "embedding and first layers": lambda name: "embed" in name or ".0." in name or ".1." in name,
    "head": lambda name: "lm_head" in name,
    "biases": lambda name: not name.endswith("bias"),
    "one module of a fused one": lambda name: "c_attn" in name,
}


@pytest.mark.slow
def test_weights_that_the_user_has_frozen():
    """Trains each model under two of four plans: one of layers, and a pipeline."""
    cases = {}
    for index, (what, is_frozen) in enumerate(FROZEN.items()):
        model = FAMILIES["gpt2" if "fused" in what else "llama_biases"].build()
        for name, weight in model.named_parameters():
            weight.requires_grad_(not is_frozen(name))
        oracle = reference(model, BATCHES["right"]())
        for plan in (("mixed_a", "1f1b_mixed"), ("mixed_c", "zero_bubble"))[index % 2]:
            cases[f"{what} {plan}"] = oracle, PLANS[plan]
    check_cases(4, cases, evaluation=False)


@pytest.mark.slow
def test_a_second_adapter_stays_as_it_is_and_a_disabled_one_does_nothing():
    model = adapted()
    model.add_adapter("other", lora(target_modules=["q_proj"]))
    model.set_adapter("default")
    oracle = reference(inner_model(model), BATCHES["right"]())
    with model.disable_adapter():
        wanted = float(model.eval()(**BATCHES["right"]()).loss.detach())
    assert_near(
        "the loss without adapters", wanted, float(FAMILIES["llama"].build()(**BATCHES["right"]()).loss.detach())
    )

    def work() -> None:
        world = WorldMesh("cpu")
        for name in ("mixed_a", "1f1b_mixed"):
            given = copy.deepcopy(model).train()
            parallel = parallelize(given, PLANS[name], world)
            assert_near("loss", float(parallel.forward_backward(oracle.batch)), oracle.loss)
            assert all(weight.grad is None for n, weight in given.named_parameters() if ".other." in n)
            assert_same_gradients(whole_gradients(parallel.model, oracle.model), oracle.gradients, where=name)
            given.eval()
            with given.disable_adapter(), torch.no_grad():
                assert_near("the loss without adapters", float(given(**oracle.batch).loss), wanted)
            with torch.no_grad():
                assert_near("eval loss", float(given(**oracle.batch).loss), oracle.eval_loss)

    run_ranks(work, 4)


# ---- Dropout ----

COLUMNS = ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"]


def test_tensor_ranks_drop_the_same_inputs():
    """The masks of column-cut modules are those of one rank, under tensor ranks and Megatron-SP, with recompute."""
    model = adapted(target_modules=COLUMNS, lora_dropout=0.4)
    plain = inner_model(model)

    def step(plan: ParallelPlan, number: int = 0) -> tuple[float, dict[str, torch.Tensor]]:
        parallel = parallelize(copy.deepcopy(model), plan)
        parallel.streams.step = number
        return float(parallel.forward_backward(BATCHES["plain"]())), whole_gradients(parallel.model, plain)

    (wanted,) = run_ranks(lambda: [step(uniform(1)), step(uniform(1), 1)], 1)
    assert wanted[0][0] != wanted[1][0]
    plans = [uniform(2, tensor=2), uniform(2, tensor=2, megatron_sp=True, recompute="full")]

    def work() -> list[tuple[float, dict[str, torch.Tensor]]]:
        found = [step(plan) for plan in plans]
        with patch.object(stage_layers, "key_adapter_dropout", lambda *unused: None):
            return [*found, step(plans[1])]

    for *found, unkeyed in run_ranks(work, 2):
        for loss, gradients in found:
            assert_near("loss", loss, wanted[0][0])
            assert_same_gradients(gradients, wanted[0][1])
        assert abs(unkeyed[0] - wanted[0][0]) > 1e-3


def test_masks_of_adapters_differ_by_module_rank_and_step_and_are_replayed():
    plan = uniform(2, tensor=2, recompute="full")
    model = adapted(target_modules=["gate_proj", "up_proj", "down_proj"], lora_dropout=0.5)

    def work() -> dict[str, list[torch.Tensor]]:
        parallel, seen = parallelize(copy.deepcopy(model), plan), {}
        for name, module in parallel.layers[0].mlp.named_modules():
            if isinstance(module, torch.nn.Dropout):
                hook = lambda _, __, output, name=name: seen.setdefault(name, []).append(output == 0)  # noqa: E731
                module.register_forward_hook(hook)
        for number in range(2):
            parallel.streams.step = number
            parallel.forward_backward(BATCHES["plain"]())
        return seen

    first, second = run_ranks(work, 2)
    gate, up, down = ([one for name, one in first.items() if kind in name][0] for kind in ("gate", "up", "down"))
    other = [one for name, one in second.items() if "down" in name][0]
    assert len(down) == 4 and torch.equal(down[0], down[1]) and not torch.equal(down[0], down[2])
    assert not torch.equal(gate[0], up[0]) and not torch.equal(down[0], other[0])
    assert torch.equal(gate[0], [one for name, one in second.items() if "gate" in name][0][0])


# ---- Errors that must be seen ----


def unchanged(x: torch.Tensor, *unused) -> torch.Tensor:
    return x


def doubled(weight: torch.Tensor, group) -> torch.Tensor:
    summed = SUM(weight, group)
    return summed if group is None else 2 * summed - summed.detach()


@contextlib.contextmanager
def without_sums() -> Iterator[None]:
    """Leaves the gradients of `A` in column-cut and of `B` in row-cut modules as each rank has them."""
    with patch("galvatron_hf.models.parameter_specs._cut", lambda *args: (_cut(*args)[0], False)):
        yield


def with_each_rank_biased(module: torch.nn.Module, reduce: Callable) -> None:
    forward = module.forward
    module.forward = lambda hidden: reduce(forward(hidden))


def reduced_twice(module: torch.nn.Module, reduce: Callable) -> None:
    """Sums the base's share and leaves the adapter's."""
    base, forward = module.base_layer.forward, module.forward
    module.base_layer.forward = lambda hidden: reduce(base(hidden))
    module.forward = forward


SUM = tensor_parallel.sum_gradient
TENSOR = uniform(2, tensor=2)
MUTATIONS = {
    "gradients of adapters not summed over tensor ranks": (without_sums, TENSOR, "lora_"),
    "gradients of adapters counted twice": (
        lambda: patch.object(tensor_parallel, "sum_gradient", doubled),
        TENSOR,
        "lora_",
    ),
    "an adapter's share of a row-cut module not summed": (
        lambda: patch.object(tensor_parallel, "sum_adapted_outputs", reduced_twice),
        TENSOR,
        "loss",
    ),
    "no sum of a row-cut module": (
        lambda: patch.object(tensor_parallel, "reduce_from_group", unchanged),
        TENSOR,
        "loss",
    ),
    "biases added by every rank": (
        lambda: patch.object(tensor_parallel, "sum_adapted_outputs", with_each_rank_biased),
        TENSOR,
        "loss",
    ),
    "biases of row-cut adapters left out": (
        lambda: patch.object(lora_layer, "_bias", lambda module: module.base_layer.bias),
        TENSOR,
        "loss",
    ),
}


@pytest.mark.slow
def test_every_injected_error_is_seen():
    oracle = oracle_of("biases")

    def work() -> dict[str, str]:
        found, world = {"nothing": complaint(oracle, TENSOR, world=WorldMesh("cpu"))}, WorldMesh("cpu")
        for name, (inject, plan, _) in MUTATIONS.items():
            with inject():
                found[name] = complaint(oracle, plan, world)
        return found

    for found in run_ranks(work, 2):
        assert found.pop("nothing") == ""
        for name, (_, _, seen_in) in MUTATIONS.items():
            assert seen_in in found[name], f"{name}: {found[name] or 'nothing was seen'}"


# ---- What is refused ----


def merged() -> torch.nn.Module:
    model = adapted()
    model.merge_adapter()
    return model


def quantised() -> torch.nn.Module:
    model = adapted()
    inner_model(model).is_quantized = True
    return model


REFUSED = {
    "IA3": (
        lambda: get_peft_model(
            FAMILIES["llama"].build(),
            IA3Config(target_modules=["k_proj"], feedforward_modules=[], task_type="CAUSAL_LM"),
        ),
        ("'default' of the type IA3", "use LoraConfig"),
    ),
    "prompts": (
        lambda: adapted(config=PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")),
        ("of the type PROMPT_TUNING", "use LoraConfig"),
    ),
    "DoRA": (lambda: adapted(use_dora=True), ("is a DoraLinearVariant", "use plain LoRA")),
    "head": (
        lambda: adapted(target_modules=["q_proj", "lm_head"]),
        ("lm_head has a LoRA adapter", "modules_to_save=['lm_head']"),
    ),
    "embedding": (
        lambda: adapted(target_modules=["q_proj", "embed_tokens"]),
        ("embed_tokens has a LoRA adapter", "leave it out of target_modules"),
    ),
    "rows of the embedding": (
        lambda: adapted(trainable_token_indices=[1, 2]),
        ("trainable_token_indices", "modules_to_save"),
    ),
    "experts": (
        lambda: adapted("qwen3_moe", target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj"]),
        ("target_parameters", "experts", "target_modules"),
    ),
    "tied ends": (
        lambda: adapted("llama_tied", modules_to_save=["lm_head"]),
        ("ties its embeddings", "tie_word_embeddings=False"),
    ),
    "a copied block": (lambda: adapted(modules_to_save=["mlp"]), ("modules_to_save has", "name these in its place")),
    "merged": (merged, ("are merged into its weight", "unmerge_adapter()")),
    "quantised": (quantised, ("quantised (QLoRA)", "load it in bf16 or fp32")),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", list(REFUSED))
def test_refused_by_name_with_reason_and_fix(name):
    build, parts = REFUSED[name]
    with pytest.raises(ValueError) as refused:
        model = build()
        adapter_for(model)
        check_has_values(model)
    message = str(refused.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


def test_adapters_on_the_meta_device_are_refused():
    with pytest.raises(ValueError, match="on the meta device.*outside of torch.device"):
        parallelize(adapted().to("meta"), uniform(2))
