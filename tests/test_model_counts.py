# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Counts of a model's parts: shapes and bytes are those of the real runtime, FLOPs the closed form."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import Gemma2Config, LlamaConfig, MistralConfig, PreTrainedConfig, PreTrainedModel

from equivalence import single_stage
from galvatron_hf.models.shape import ModelShape
from galvatron_hf.parallel.parallelize import parallelize
from galvatron_hf.plan import LayerStrategy
from galvatron_hf.plan.deal import Deal
from galvatron_hf.profiler.profiles.attention_rates import AttentionRates
from galvatron_hf.profiler.profiles.devices import DEVICES
from galvatron_hf.profiler.profiles.layers import TimeFit
from galvatron_hf.profiler.profiles.presets import hardware_preset
from galvatron_hf.profiler.trace.counted_model import CountedModel, Speed
from galvatron_hf.profiler.trace.counting import AttentionKernel, Counts, count, pairs_in_window
from galvatron_hf.profiler.trace.isolated_layers import Part
from galvatron_hf.profiler.trace.shapes import model_shape_from_model
from galvatron_hf.profiler.trace.small_models import empty_model, layer_kinds
from galvatron_hf.profiler.trace.tracing import speed_of
from memory_formulas import LayerShape, saved_activation_bytes
from ranks import run_ranks
from test_memory import measure_saved
from tiny_models import FAMILIES, LAYERS, VOCABULARY


TOKENS = 128
STRATEGIES = {
    "tensor": LayerStrategy(tensor=4),
    "megatron_sp_ulysses": LayerStrategy(tensor=2, megatron_sp=True, ulysses=2),
    "ulysses": LayerStrategy(ulysses=4),
}
aten = torch.ops.aten


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.mark.parametrize("family", FAMILIES)
def test_shapes_hold_every_parameter_of_the_model_once(family):
    model = FAMILIES[family].build()
    shape = model_shape_from_model(model)
    weights = [*shape.embedding, *shape.final_norm, *shape.head, *(w for layer in shape.layers for w in layer)]
    assert sum(math.prod(weight.shape) for weight in weights) == model.num_parameters()
    assert len(shape.layers) == LAYERS
    assert shape.tied == (model.get_output_embeddings().weight is model.get_input_embeddings().weight)
    # Families that normalise what their MLP leaves, by their own description.
    assert shape.saves_after_last_region == (family in ("gemma2", "gemma3", "olmo2"))


def test_layers_of_one_kind_are_found_by_shape_and_settings():
    assert layer_kinds(FAMILIES["llama"].build()) == (0, 0, 0, 0)
    assert layer_kinds(FAMILIES["smollm3"].build()) == (0, 1, 0, 1)  # every other layer has rotary embeddings
    assert layer_kinds(FAMILIES["gemma2"].build()) == (0, 1, 0, 1)  # sliding windows alternate
    model = FAMILIES["llama"].build()
    model.model.layers[2].mlp.gate_proj = torch.nn.Linear(32, 24, bias=False)
    assert layer_kinds(model) == (0, 0, 1, 0)


def test_shapes_of_a_model_without_memory_are_those_of_the_closed_form():
    heads = dict(num_attention_heads=8, num_key_value_heads=2, head_dim=4)
    config = LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=40, num_hidden_layers=3, tie_word_embeddings=True, **heads
    )
    expected = ModelShape.llama(
        vocab=97, hidden=32, intermediate=40, layers=3, heads=8, kv_heads=2, head_dim=4, tied=True
    )
    found = model_shape_from_model(empty_model(config))
    assert sorted(map(str, found.layers[2])) == sorted(map(str, expected.layers[2]))
    assert (found.embedding, found.head, found.final_norm) == (expected.embedding, expected.head, expected.final_norm)


def batch_of(packed: bool) -> dict:
    """Returns one document of `TOKENS` tokens, packed or as a row."""
    ids = torch.randint(0, VOCABULARY, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    if not packed:
        return {"input_ids": ids, "labels": ids}
    documents = Deal.of_documents(bounds=(0, TOKENS), cuts=(0, TOKENS))
    return {
        "input_ids": ids,
        "shift_labels": ids,
        "position_ids": torch.arange(TOKENS)[None],
        "documents": documents,
    }


# The fast tests have both kinds of batch, of one family each.
RUNS = [
    (True, ("llama",)),
    (False, ("phi3",)),
    *(
        pytest.param(packed, families, marks=pytest.mark.slow)
        for packed, families in ((True, ("llama_one_kv_head", "qwen3", "phi3")), (False, ("llama", "qwen3")))
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("packed, families", RUNS)
def test_saved_bytes_are_those_of_the_runtime_on_real_ranks(packed, families):
    models = {family: FAMILIES[family].build(max_position_embeddings=TOKENS) for family in families}

    def work() -> dict[tuple[str, str], int]:
        found = {}
        for family, model in models.items():
            for name, strategy in STRATEGIES.items():
                torch.manual_seed(0)
                built = FAMILIES[family].build(max_position_embeddings=TOKENS)
                parallel = parallelize(built, single_stage((strategy,) * LAYERS, 4))
                found[family, name] = measure_saved(parallel, 1, batch_of(packed))
        return found

    counted = {}
    for family, model in models.items():
        counts = CountedModel(model, torch.float32, TOKENS, packed)
        for name, strategy in STRATEGIES.items():
            counted[family, name] = counts.layers(strategy, TOKENS, TOKENS)[0].saved_bytes
    for found in run_ranks(work, 4):
        assert found == counted


def test_saved_bytes_are_the_closed_form_of_llama():
    counts = CountedModel(FAMILIES["llama"].build(num_key_value_heads=8), torch.float32, TOKENS, packed=False)
    shape = LayerShape(hidden=32, intermediate=40, heads=8, key_value_heads=8, head_dim=4)
    strategies = list(counts.strategies(8))
    assert len(strategies) == 16
    for strategy in strategies:
        found = counts.layers(strategy, TOKENS, TOKENS)[0].saved_bytes
        assert found == saved_activation_bytes(shape, strategy, TOKENS), strategy


@pytest.mark.parametrize("tensor", [1, 2, 8])
def test_flops_are_the_closed_form_of_llama(tensor):
    hidden, intermediate, heads, dim = 64, 96, 8, 16
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=dim,
    )
    counts = CountedModel(empty_model(config), torch.bfloat16, TOKENS, packed=True)
    products = 2 * TOKENS * (4 * hidden * heads * dim + 3 * hidden * intermediate) // tensor
    scores = TOKENS**2 * heads * dim // tensor  # one of both products, without what the causal mask leaves out
    [layer] = counts.layers(LayerStrategy(tensor=tensor), TOKENS, TOKENS)
    assert layer.forward.flops == products + 2 * scores
    assert layer.backward.flops == 2 * products + 5 * scores  # the kernel makes the scores once more
    assert (
        layer.forward_after_last_saved.flops == 2 * TOKENS * hidden * intermediate // tensor
    )  # saves nothing after its input
    head = counts.ends(tensor, 2048)["head"]
    # The gradients are made on the way forward, so that its logits need not be kept.
    assert (head.forward.flops, head.backward.flops) == (3 * 2 * 2048 * hidden * 256 // tensor, 0)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_recomputing_leaves_out_what_comes_after_the_last_saved_tensor(family):
    """Compares the matrix products of PyTorch's checkpoints with the counts of a layer."""

    def build() -> PreTrainedModel:
        return FAMILIES[family].build(max_position_embeddings=TOKENS, use_cache=False)

    def products() -> list[int]:
        found = []
        for recompute in ("none", "full"):
            plan = single_stage((LayerStrategy(recompute=recompute),) * LAYERS, 1)
            with FlopCounterMode(display=False) as counter:
                parallelize(build(), plan).forward_backward(batch_of(packed=False))
            flops = counter.get_flop_counts()["Global"]
            found.append(sum(flops.get(operation, 0) for operation in (aten.mm, aten.addmm)))
        return found

    [(without, recomputed)] = run_ranks(products, 1)
    model, path = build(), {"llama": "layers.0.mlp.down_proj", "gpt2": "h.0.mlp.c_proj", "gemma2": None}[family]
    # Gemma2 normalises what its last product gives, and saves it.
    left_out = 0 if path is None else model.base_model.get_submodule(path).weight.numel()
    layer = sum(weight.numel() for name, weight in model.named_parameters() if ".0." in name and weight.ndim == 2)
    assert recomputed - without == 2 * TOKENS * LAYERS * (layer - left_out)
    counts = CountedModel(model, torch.float32, TOKENS, packed=False).layers(LayerStrategy(), TOKENS, TOKENS)
    assert {layer.forward_after_last_saved.flops for layer in counts} == {2 * TOKENS * left_out}


def test_most_bytes_alive_are_counted_step_by_step():
    given = torch.zeros(1000, requires_grad=True)
    counts = count(Part(run=lambda: given.exp().sin(), input=given, modules=()))
    assert counts.saved_bytes == 4000  # what exp left: its own result, and sin's input
    # The input, both results, the gradient that comes, the cosine, and their product.
    assert counts.backward_peak_bytes == 6 * 4000
    assert counts.forward_peak_bytes == 3 * 4000
    assert counts.forward.moved_bytes == 2 * 2 * 4000


def counted(run: Callable[[torch.Tensor], torch.Tensor], size: int = 1000) -> Counts:
    given = torch.ones(size, requires_grad=True)
    return count(Part(run=lambda: run(given), input=given, modules=()))


def test_bytes_are_those_that_an_operation_touches():
    """Memory is not moved by its allocation, is read and written in place, and is read where it is selected."""
    forward = counted(lambda given: given + torch.empty_like(given)).forward
    assert (forward.moved_bytes, forward.launches) == (3 * 4000, 1)
    assert counted(lambda given: given.clone().mul_(2)).forward.moved_bytes == 2 * 4000 + 2 * 4000
    where = torch.zeros(10, dtype=torch.long)
    assert counted(lambda given: given.gather(0, where)).forward.moved_bytes == 2 * 40
    added = counted(lambda given: torch.zeros(1000).scatter_add_(0, where, given[:10].clone())).forward
    assert added.moved_bytes == 4000 + 2 * 40 + 3 * (80 + 40)  # the zeros, the copy, and what is added


def test_products_write_their_results_and_are_priced_by_flops_and_bytes():
    weight = torch.ones(50, 30)
    forward = counted(lambda given: given.view(20, 50) @ weight).forward
    assert (forward.product_flops, forward.moved_bytes) == (2 * 20 * 50 * 30, 4 * 20 * 30)
    assert Speed(flops_per_ms=1e3, bytes_per_ms=10.0).ms(forward) == 60 + 240


def test_fused_operations_move_what_enters_and_what_leaves():
    """Compares with sums by hand."""
    counts = counted(lambda given: (given.exp().sin() * 2).exp())
    # One kernel. It reads the input and writes both results of exp, which the backward reads; sin saves the first.
    assert (counts.forward.fused_bytes, counts.forward.fused_launches) == (4000 + 2 * 4000, 1)
    assert counts.forward.moved_bytes == 4 * 2 * 4000
    weight = torch.ones(50, 20)
    split = counted(lambda given: (given.exp().view(20, 50) @ weight).cos().sin())
    # exp reads and writes, the product writes, and one kernel reads that and writes the results of cos and sin.
    assert split.forward.fused_launches == 3
    assert split.forward.fused_bytes == 2 * 4000 + 4 * 400 + (1600 + 2 * 1600)


def test_the_host_needs_time_for_each_operation():
    work = counted(lambda given: given.exp().sin()).forward
    eager, compiled = (Speed(flops_per_ms=1.0, bytes_per_ms=1e9, launch_ms=5.0, compiled=one) for one in (False, True))
    assert (eager.least_ms(work), compiled.least_ms(work)) == (10.0, 5.0)
    fit = TimeFit(per_token=1.0, least=10.0)
    assert (fit.ms(3, 0), fit.ms(30, 0), fit.ms(30, 0, without=5), fit.ms(12, 0, without=5)) == (10, 30, 25, 10)


def test_rates_are_those_of_the_device_that_a_profile_names():
    """A measured profile has its own rate of products, and the other rates of the device of its name."""
    preset = hardware_preset("a100-40g", 1, 2)
    speed = speed_of(preset, "bf16", efficiency=0.5)
    device = DEVICES["a100-40g"]
    assert (speed.flops_per_ms, speed.bytes_per_ms) == (0.5 * 265e9, device.memory_bytes_per_s[0] / 1e3)
    assert (speed.attention, speed.launch_ms) == (device.attention[0], device.launch_ms[0])
    measured = replace(preset, name="NVIDIA A100-SXM4-80GB", made={}, flops_per_s={"bf16": 200e12})
    speed = speed_of(measured, "bf16", efficiency=1.0)
    assert (speed.flops_per_ms, speed.bytes_per_ms) == (200e9, DEVICES["a100-80g"].memory_bytes_per_s[0] / 1e3)
    unknown = speed_of(replace(measured, name="some GPU"), "bf16", efficiency=1.0)
    assert unknown.attention.forward == pytest.approx(200 / 720) and unknown.launch_ms > 0
    core = speed_of(replace(measured, name="a core", flops_per_s={"bf16": 1e11}), "bf16", efficiency=1.0)
    assert core.attention is None and core.launch_ms == 0


@pytest.mark.parametrize(
    "head_dim, length, causal, backward, teraflops",
    [(128, 512, True, False, 191), (128, 16384, True, False, 335), (64, 4096, False, False, 321)]
    + [(128, 2048, False, True, 291), (64, 16384, False, True, 291), (128, 1 << 20, True, False, 335)]
    + [(128, 256, True, False, 191 / 2), (128, 2048, True, True, 291 * 298 / 362), (256, 16384, False, False, 298)],
)
def test_attention_has_the_rates_of_its_authors_charts(head_dim, length, causal, backward, teraflops):
    kernel = dict(head_dim=head_dim, length=length, causal=causal, backward=backward)
    assert AttentionRates(forward=1.0, backward=1.0).flops_per_s(**kernel) == pytest.approx(teraflops * 1e12)
    half = AttentionRates(forward=0.5, backward=0.25).flops_per_s(**kernel)
    assert half == pytest.approx((0.25 if backward else 0.5) * teraflops * 1e12)


def test_attention_is_counted_apart_with_its_shape():
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4
    )
    [layer] = CountedModel(empty_model(config), torch.bfloat16, TOKENS, packed=True).layers(
        LayerStrategy(), TOKENS, TOKENS // 2
    )
    shape = dict(head_dim=16, length=TOKENS // 2, causal=True)
    assert set(layer.forward.attention_flops) == {AttentionKernel(**shape, backward=False)}
    assert {kernel for kernel, flops in layer.backward.attention_flops.items() if flops} == {
        AttentionKernel(**shape, backward=True)
    }


@pytest.mark.parametrize("length, left, right", [(7, 2, 0), (7, 2, 2), (7, 9, 0), (7, -1, 0), (7, -1, -1), (1, 3, 3)])
def test_pairs_of_a_window_are_those_of_a_mask(length, left, right):
    seen = [
        (query, key)
        for query in range(length)
        for key in range(length)
        if (left < 0 or query - key <= left) and (right < 0 or key - query <= right)
    ]
    assert pairs_in_window(length, left, right) == len(seen)


def packed_layer(config: type[PreTrainedConfig], length: int, gpu_kernels: bool, **options) -> Counts:
    """Returns the counts of a layer with packed documents, 4 heads of 16 and 2 key/value heads."""
    sizes = dict(vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=1)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    model = empty_model(config(**sizes, **heads, **options))
    counts = CountedModel(model, torch.bfloat16, 2 * TOKENS, packed=True, gpu_kernels=gpu_kernels)
    [layer] = counts.layers(LayerStrategy(), 2 * TOKENS, length)
    return layer


@pytest.mark.parametrize("window", [8, 100, None])
def test_packed_rows_are_counted_as_the_kernel_of_a_gpu(window):
    """The documents are not of a length for which they are rows of one batch."""
    length = 64
    found = packed_layer(MistralConfig, length, True, sliding_window=window)
    pairs = 2 * TOKENS // length * sum(min(token + 1, window or length) for token in range(length))
    shape = dict(head_dim=16, length=min(2 * (window or length), length), causal=True)
    forward, backward = (AttentionKernel(**shape, backward=one) for one in (False, True))
    assert found.forward.attention_flops == {forward: 2 * 2 * 4 * 16 * pairs}
    assert {kernel: flops for kernel, flops in found.backward.attention_flops.items() if flops} == {
        backward: 5 * 2 * 4 * 16 * pairs
    }
    on_cpu = packed_layer(MistralConfig, length, False, sliding_window=window)
    assert found.forward.launches < on_cpu.forward.launches
    assert found.forward.product_flops == on_cpu.forward.product_flops


def test_rows_and_soft_caps_take_the_same_kernels_on_a_gpu():
    rows = MistralConfig, 2 * TOKENS
    assert packed_layer(*rows, True) == packed_layer(*rows, False)
    given = Gemma2Config, 64
    found = packed_layer(*given, True, sliding_window=8)
    assert found == packed_layer(*given, False, sliding_window=8) and not found.forward.attention_flops


def test_the_head_keeps_its_weight_gradient_and_works_on_a_chunk():
    counts = CountedModel(FAMILIES["llama"].build(), torch.float32, TOKENS, packed=True)
    ends = counts.end_bytes([1])["head"]
    hidden, token = 32, 4
    # The norm keeps its input, what it normalised and the root; the loss keeps the gradient of its input.
    assert ends["saved_bytes"][1] == token * (3 * hidden + 1)
    assert ends["saved_fixed_bytes"][1] == token * hidden * VOCABULARY
    logits = token * 1024 * VOCABULARY
    assert logits < ends["working_fixed_bytes"][1] < 4 * logits
    assert token * hidden < ends["working_bytes"][1] < 8 * token * hidden
