# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The private names of other libraries: each does what `galvatron_hf.utils.compat` expects.

A failure here after an upgrade says which expectation the new version breaks.
"""

import inspect
import logging
from datetime import timedelta
from pathlib import Path

import datasets
import pytest
import torch
import torch.distributed as dist
from accelerate.state import GradientState
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import schedules
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.attention.varlen import varlen_attn
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, MistralConfig, T5Config
from transformers.masking_utils import create_bidirectional_mask, create_masks_for_generate
from transformers.modeling_utils import LoadStateDictInfo

import galvatron_hf
from accelerate import Accelerator
from galvatron_hf.utils import compat
from ranks import run_ranks


SOURCE = Path(galvatron_hf.__file__).parent
aten = torch.ops.aten


def tiny_llama(**settings) -> LlamaForCausalLM:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=16, **sizes, **settings))


# ---- Modules and tensors ----


def test_a_tensor_takes_the_layout_of_a_dtensor_as_from_local_gives_it():
    def work() -> None:
        mesh, whole = init_device_mesh("cpu", (2,)), torch.arange(6.0).view(3, 2)
        for like in (distribute_tensor(whole, mesh, [Shard(0)]), nn.Parameter(distribute_tensor(whole, mesh))):
            local = torch.full_like(like.to_local(), dist.get_rank())
            sizes = dict(shape=whole.shape, stride=whole.stride(), run_check=False)
            expected = DTensor.from_local(local, mesh, like.placements, **sizes)
            found = compat.in_layout_of(local, like)
            assert type(found) is DTensor and not found.requires_grad
            assert (found.placements, found.device_mesh) == (expected.placements, expected.device_mesh)
            assert torch.equal(found.full_tensor(), expected.full_tensor())

    run_ranks(work, 2)


def test_a_module_computes_with_the_tensor_in_its_parameters_place():
    layer = nn.Linear(2, 1, bias=False)
    weight = layer.weight
    with pytest.raises(TypeError):
        layer.weight = torch.ones(1, 2)
    compat.set_parameter_tensor(layer, "weight", torch.ones(1, 2))
    assert layer(torch.tensor([[3.0, 4.0]])).item() == 7.0
    compat.set_parameter_tensor(layer, "weight", weight)
    assert list(layer.parameters()) == [weight]


def test_forward_pre_hooks_do_not_run_in_the_body_and_do_again_after_it():
    layer, calls = nn.Identity(), []
    layer.register_forward_pre_hook(lambda *unused: calls.append(1))
    with pytest.raises(ZeroDivisionError), compat.without_forward_pre_hooks(layer):
        layer(1)
        assert calls == []
        raise ZeroDivisionError
    layer(1)
    assert calls == [1]


@pytest.mark.parametrize("device", ["cpu", "meta", "fake"])
def test_tensors_have_one_storage_key_if_they_share_memory(device):
    with compat.FakeTensorMode() if device == "fake" else torch.device(device):
        first, second = torch.zeros(4), torch.zeros(4)
        assert compat.storage_key(first[1:]) == compat.storage_key(first) == compat.storage_key(first.detach())
        assert compat.storage_key(first) != compat.storage_key(second)


def test_norms_of_several_tensors_are_those_of_each():
    tensors = [torch.tensor([3.0, 4.0]), torch.full((2, 2), 5.0)]
    assert compat.tensor_norms(tensors).tolist() == [5.0, 10.0]


def test_several_tensors_are_scaled_in_place_by_a_tensor():
    tensors = [torch.tensor([3.0, 4.0]), torch.full((2, 2), 5.0)]
    compat.scale_tensors(tensors, torch.tensor(0.5))
    assert tensors[0].tolist() == [1.5, 2.0] and tensors[1].tolist() == [[2.5, 2.5]] * 2
    compat.scale_tensors([], torch.tensor(0.5))


def test_an_assertion_on_a_tensor_raises_its_message():
    compat.assert_without_waiting(torch.tensor(True), "all is well")
    with pytest.raises(RuntimeError, match="the third is wrong"):
        compat.assert_without_waiting(torch.tensor(False), "the third is wrong")


def test_a_group_counts_the_collectives_that_are_called():
    def work() -> tuple[int, int]:
        group = dist.new_group([0, 1])
        before = compat.calls_of_group(group)
        dist.all_reduce(torch.zeros(1), group=group)
        compat.set_default_group_timeout(timedelta(seconds=90))
        dist.barrier()
        return before, compat.calls_of_group(group)

    assert run_ranks(work, 2) == [(0, 1), (0, 1)]


# ---- Operators ----


class Seen(compat.TorchDispatchMode):
    """Keeps what it sees."""

    def __init__(self):
        super().__init__()
        self.operations, self.arguments = [], []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        assert isinstance(operation, compat.OpOverload)
        self.operations.append(operation)
        self.arguments.append(args)
        return operation(*args, **(kwargs or {}))


def test_a_dispatch_mode_sees_the_operators_of_forward_and_backward():
    x = torch.ones(2, 2, requires_grad=True)
    with Seen() as seen:
        (x @ x).sum().backward()
    packets = [operation.overloadpacket for operation in seen.operations]
    assert packets.count(aten.mm) == 3


def test_the_attention_of_a_cpu_is_the_kernel_that_is_counted():
    query = torch.randn(1, 2, 4, 8, requires_grad=True)
    with Seen() as seen:
        nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True).sum().backward()
    packets = {operation.overloadpacket for operation in seen.operations}
    assert {compat.CPU_ATTENTION, compat.CPU_ATTENTION_BACKWARD} <= packets


def test_attention_by_document_on_a_gpu_is_the_kernel_that_is_counted():
    """The places of what is counted among the arguments: query, longest document, and window."""
    with compat.FakeTensorMode(), Seen() as seen:
        query = torch.ones(8, 2, 16, dtype=torch.bfloat16, requires_grad=True)
        bounds = torch.tensor([0, 4, 8], dtype=torch.int32)
        varlen_attn(query, query, query, bounds, bounds, 4, 4, window_size=(2, 0)).sum().backward()
    forward, backward = (
        next(args for operation, args in zip(seen.operations, seen.arguments) if operation.overloadpacket is kind)
        for kind in (compat.VARLEN_ATTENTION, compat.VARLEN_ATTENTION_BACKWARD)
    )
    assert (forward[0].shape, forward[6], forward[9]) == (query.shape, 4, [2, 0])
    assert (backward[1].shape, backward[8], backward[13]) == (query.shape, 4, [2, 0])


def test_the_schema_tells_which_arguments_an_operator_writes():
    assert compat.written_arguments(aten.add_.Tensor) == (True, False, False)
    assert not any(compat.written_arguments(aten.add.Tensor))
    assert not any(compat.written_arguments(aten.view.default))  # an alias, but not written


def test_fake_tensors_have_shapes_and_no_memory():
    with compat.FakeTensorMode(allow_non_fake_inputs=True):
        product = torch.ones(1 << 20, 1 << 20) @ torch.ones(1 << 20, 3)
    assert product.shape == (1 << 20, 3) and product.device.type == "cpu"


def test_tree_leaves_are_those_of_nested_containers():
    assert compat.tree_leaves(((1, [2]), {"a": 3})) == [1, 2, 3]


def functional(x):
    name, operations = dist.group.WORLD.group_name, compat.functional_collectives
    wait = operations.wait_tensor
    return (
        wait(operations.all_reduce(x, "sum", name)).tolist(),
        wait(operations.all_gather_into_tensor(x[None], 2, name)).flatten().tolist(),
        wait(operations.reduce_scatter_tensor(x, "sum", 2, name)).tolist(),
        wait(operations.all_to_all_single(x, [1, 1], [1, 1], name)).tolist(),
    )


def test_functional_collectives_take_the_name_of_a_group():
    results = run_ranks(lambda: functional(torch.tensor([1.0, 2.0]) + 10 * dist.get_rank()), 2)
    assert results[0] == ([12.0, 14.0], [1.0, 2.0, 11.0, 12.0], [12.0], [1.0, 11.0])
    assert results[1] == ([12.0, 14.0], [1.0, 2.0, 11.0, 12.0], [14.0], [2.0, 12.0])


# ---- Autograd and the profiler ----


def test_a_callback_runs_once_when_the_running_backward_ends():
    order = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(lambda gradient: compat.call_after_backward(lambda: order.append("end")))
    x.register_hook(lambda gradient: order.append("last gradient"))
    y.sum().backward()
    y.detach().sum()
    assert order == ["last gradient", "end"]


def test_the_two_halves_of_a_backward_give_the_gradients_of_the_whole():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 2))
    weights, gradient = list(model.parameters()), torch.randn(3, 2)
    whole = torch.randn(3, 4, requires_grad=True)
    wanted = torch.autograd.grad(model(whole), [whole, *weights], gradient)

    received = whole.detach().requires_grad_()
    found = compat.input_gradients([model(received)], [gradient], [received], weights)
    torch.testing.assert_close(received.grad, wanted[0])
    assert all(weight.grad is None for weight in weights)
    compat.weight_gradients(weights, found)
    for weight, expected in zip(weights, wanted[1:], strict=True):
        torch.testing.assert_close(weight.grad, expected)


def test_a_running_profiler_is_known_and_its_events_tell_allocations_and_operators():
    assert not compat.profiler_is_running()
    with torch.autograd.profiler.profile(profile_memory=True, record_shapes=True) as profiler:
        assert compat.profiler_is_running()
        kept = torch.ones(1000) + 1
    found, events = {}, list(profiler.kineto_results.experimental_event_tree())
    while events:
        event = events.pop()
        events += event.children
        kind, fields = event.typed
        found.setdefault(kind, []).append(fields)
    sizes = {fields.ptr: fields.alloc_size for fields in found[compat.ProfilerEventType.Allocation]}
    assert sizes[kept.data_ptr()] == 4000
    inputs = compat.tree_leaves([list(fields.inputs) for fields in found[compat.ProfilerEventType.TorchOp]])
    assert any(getattr(value, "storage_data_ptr", None) in sizes for value in inputs)


# ---- FSDP2 ----


def sharded_pair():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, mesh


def test_fsdp_computes_with_the_parameters_that_were_put_in_place():
    def body():
        model, mesh = sharded_pair()
        for layer in model:
            eye = distribute_tensor(2 * torch.eye(4), mesh, [Shard(0)])
            layer.weight = nn.Parameter(eye)
        for module in (model[0], model):
            compat.reset_sharded_parameters(module)
        return model(torch.ones(1, 4)).tolist()

    assert run_ranks(body, 2) == [[[4.0] * 4]] * 2


def test_fsdp_reduces_kept_gradients_when_it_is_told_that_the_backward_is_over():
    def body():
        model, _ = sharded_pair()
        modules = [model[0], model]
        for module in modules:
            module.set_requires_gradient_sync(False, recurse=False)
            module.set_reshard_after_backward(False, recurse=False)
        model.set_is_last_backward(False)
        for scale in (1.0, 2.0):
            model(torch.full((1, 4), scale * (1 + dist.get_rank()))).sum().backward()
        kept = [isinstance(parameter.grad, DTensor) for parameter in model.parameters()]
        model.set_is_last_backward(True)
        for module in modules:
            module.set_requires_gradient_sync(True, recurse=False)
            module.set_reshard_after_backward(True, recurse=False)
        compat.finish_fsdp_backward(modules)
        return kept, [parameter.grad.full_tensor() for parameter in model.parameters()]

    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    for rank in range(2):
        for scale in (1.0, 2.0):
            (plain(torch.full((1, 4), scale * (1 + rank))).sum() / 2).backward()  # FSDP2 takes the mean of the ranks
    for kept, gradients in run_ranks(body, 2):
        assert kept == [False, False]  # whole, on each rank its own
        for gradient, weight in zip(gradients, plain.parameters(), strict=True):
            torch.testing.assert_close(gradient, weight.grad)


# ---- torch.distributed ----


def test_a_tensor_cut_twice_is_gathered_with_a_warning_of_the_known_logger():
    def body():
        mesh = init_device_mesh("cpu", (2, 2))
        tensor = distribute_tensor(torch.arange(8.0), mesh, [Shard(0), Shard(0)])
        said = []
        handler = logging.Handler()
        handler.emit = lambda entry: said.append(entry.getMessage())
        logging.getLogger(compat.DTENSOR_LOGGER).addHandler(handler)
        return tensor.full_tensor().tolist(), said

    for whole, said in run_ranks(body, 4):
        assert whole == list(range(8))
        assert len(said) == 1 and "redistribut" in said[0]


def test_functions_that_wait_exist_where_they_are_looked_for():
    import torch.distributed.fsdp._fully_shard._fsdp_param_group as param_group

    for path, functions in compat.WAITING_FUNCTIONS.items():
        module = {"_fsdp_param_group.py": param_group, "distributed_c10d.py": dist.distributed_c10d}[Path(path).name]
        assert Path(module.__file__).as_posix().endswith(path)
        for name, (_, group) in functions.items():
            attribute = group.removeprefix("self.")
            owner = param_group.FSDPParamGroup if group != attribute else module
            function = inspect.unwrap(getattr(owner, name))
            if group != attribute:
                assert hasattr(owner, attribute)
            elif name != "batch_isend_irecv":  # whose operations each have their group
                assert attribute in inspect.signature(function).parameters, name


def test_the_default_store_is_the_one_in_which_the_ranks_met():
    def body():
        compat.default_store().set(f"rank {dist.get_rank()}", "is here")
        dist.barrier()
        return [compat.default_store().get(f"rank {rank}").decode() for rank in range(2)]

    assert run_ranks(body, 2) == [["is here"] * 2] * 2


# ---- Pipeline schedules ----


def test_transfers_join_the_computations_of_two_ranks():
    compute = {
        rank: [compat.pipeline_action(rank, work, 0) for work in (schedules.FORWARD, schedules.FULL_BACKWARD)]
        for rank in range(2)
    }
    orders = compat.with_transfers(compute, lambda stage: stage, 2)
    found = {
        rank: [(action.stage_index, action.computation_type, action.microbatch_index) for action in order]
        for rank, order in orders.items()
    }
    forward, backward = schedules.FORWARD, schedules.FULL_BACKWARD
    assert found == {
        0: [(0, forward, 0), (0, schedules.SEND_F, 0), (0, schedules.RECV_B, 0), (0, backward, 0)],
        1: [(1, schedules.RECV_F, 0), (1, forward, 0), (1, backward, 0), (1, schedules.SEND_B, 0)],
    }


@pytest.mark.parametrize(
    "schedule, works",
    [
        (schedules.ScheduleInterleaved1F1B, {schedules.FORWARD, schedules.FULL_BACKWARD}),
        (
            schedules.ScheduleInterleavedZeroBubble,
            {schedules.FORWARD, schedules.BACKWARD_INPUT, schedules.BACKWARD_WEIGHT},
        ),
    ],
)
def test_a_schedule_orders_the_work_of_all_ranks_without_a_model(schedule, works):
    orders = compat.pipeline_orders(schedule, [0, 2], 4, 2, 4)
    for rank, order in orders.items():
        done = [(action.stage_index, action.computation_type, action.microbatch_index) for action in order]
        wanted = {(stage, work, part) for stage in (rank, rank + 2) for work in works for part in range(4)}
        assert set(done) == wanted and len(done) == len(wanted)


# ---- transformers, accelerate and datasets ----


def test_a_model_calls_the_attention_function_of_its_configuration():
    from transformers import AttentionInterface

    calls = []

    def attention(module, query, key, value, attention_mask, **unused):
        calls.append(query.shape)
        return query.transpose(1, 2), None

    AttentionInterface.register("counted", attention)
    model = tiny_llama()
    assert compat.attention_implementation(model.config) == "sdpa"
    compat.set_attention_implementation(model.config, "counted")
    model(torch.zeros(1, 3, dtype=torch.long))
    assert calls == [(1, 2, 3, 4)] and compat.attention_implementation(model.config) == "counted"


@pytest.mark.parametrize("window", [None, 2])
def test_masks_are_those_of_padded_rows_without_being_read(window):
    config = LlamaConfig(attn_implementation="sdpa") if window is None else MistralConfig(sliding_window=window)
    config._attn_implementation = "sdpa"
    mask = torch.tensor([[0, 1, 1], [1, 1, 1]])
    inputs = dict(config=config, inputs_embeds=torch.empty(2, 3, 1), past_key_values=None)
    wanted = create_masks_for_generate(attention_mask=mask, **inputs)
    full = torch.ones_like(mask)
    with compat.masks_of_rows(padded=True):
        assert torch.equal(create_masks_for_generate(attention_mask=mask, **inputs), wanted)
        causal = create_masks_for_generate(attention_mask=full, **inputs)
    assert causal.shape == (2, 1, 3, 3)  # not left out, though the rows have no padding
    if window is None:
        with compat.masks_of_rows(padded=False):
            assert create_masks_for_generate(attention_mask=mask, **inputs) is None  # it is not read
        assert create_masks_for_generate(attention_mask=full, **inputs) is None


def test_masks_of_an_encoder_are_those_of_padded_rows_without_being_read():
    config = T5Config(attn_implementation="sdpa")
    mask = torch.tensor([[0, 1, 1], [1, 1, 1]])
    inputs = dict(config=config, inputs_embeds=torch.empty(2, 3, 1))
    wanted = create_bidirectional_mask(attention_mask=mask, **inputs)
    with compat.masks_of_rows(padded=True):
        assert torch.equal(create_bidirectional_mask(attention_mask=mask, **inputs), wanted)
        assert create_bidirectional_mask(attention_mask=torch.ones_like(mask), **inputs) is not None
    with compat.masks_of_rows(padded=False):
        assert create_bidirectional_mask(attention_mask=mask, **inputs) is None  # it is not read
    assert create_bidirectional_mask(attention_mask=torch.ones_like(mask), **inputs) is None


def test_a_model_of_a_class_and_a_configuration_has_its_dtype():
    model = compat.model_from_config(LlamaForCausalLM, tiny_llama().config, torch.bfloat16)
    assert type(model) is LlamaForCausalLM and model.dtype is torch.bfloat16


def test_a_model_knows_whether_it_has_peft_adapters():
    import peft

    model = tiny_llama()
    assert not compat.has_peft_adapters(model)
    model.add_adapter(peft.LoraConfig(target_modules=["q_proj"]))
    assert compat.has_peft_adapters(model)


def test_keys_that_are_not_saved_are_those_that_the_class_names():
    class Leaves(LlamaForCausalLM):
        _keys_to_ignore_on_save = {"lm_head.weight"}

    model = tiny_llama()
    assert compat.unsaved_keys(model) == set()
    assert compat.unsaved_keys(Leaves(model.config)) == {"lm_head.weight"}


def test_weights_that_stay_in_fp32_are_those_that_from_pretrained_keeps(tmp_path):
    class Keeps(LlamaForCausalLM):
        _keep_in_fp32_modules_strict = {"input_layernorm", "up_*.weight"}
        _keep_in_fp32_modules = {"lm_head"}

    model = Keeps(tiny_llama().config)
    model.save_pretrained(tmp_path)
    for dtype, count in ((torch.float32, 0), (torch.bfloat16, 2), (torch.float16, 3)):
        kept = compat.kept_in_float32(model, dtype)
        loaded = Keeps.from_pretrained(tmp_path, dtype=dtype).state_dict()
        assert len(kept) == count
        assert {name for name in loaded if loaded[name].dtype != dtype} == kept


def test_keys_that_the_family_ignores_are_dropped_from_a_report():
    class Forgiving(LlamaForCausalLM):
        _keys_to_ignore_on_load_unexpected = [r"rotary"]
        _keys_to_ignore_on_load_missing = [r"lm_head"]

    report = LoadStateDictInfo(
        missing_keys={"lm_head.weight", "model.norm.weight"},
        unexpected_keys={"model.rotary", "other"},
        mismatched_keys=set(),
        error_msgs=[],
        conversion_errors={},
        skipped_pp_keys=set(),
    )
    compat.drop_harmless_keys(Forgiving(tiny_llama().config), report)
    assert (report.missing_keys, report.unexpected_keys) == ({"model.norm.weight"}, {"other"})


def test_generation_without_settings_stops_at_the_default_length():
    assert compat.default_max_length(GenerationConfig()) == 20


def test_accelerate_asks_the_registered_dataloader_for_its_end():
    GradientState._reset_state()  # a Trainer of an earlier test may have left its loader
    state = GradientState()
    loader = torch.utils.data.DataLoader([])
    loader.end_of_dataloader, loader.remainder = True, 3
    compat.register_dataloader(state, loader)
    try:
        assert state.in_dataloader and state.end_of_dataloader and state.remainder == 3
    finally:
        compat.unregister_dataloader(state, loader)
    assert not state.in_dataloader and not state.end_of_dataloader


def test_accelerate_lets_go_of_a_kept_dataloader():
    accelerator, loader = Accelerator(cpu=True), object()
    compat.keep_dataloader(accelerator, loader)
    assert loader in accelerator._dataloaders
    accelerator.free_memory()
    assert loader not in accelerator._dataloaders


def test_an_optimizer_says_that_its_step_was_skipped():
    optimizer = Accelerator(cpu=True).prepare(torch.optim.SGD([nn.Parameter(torch.ones(1))]))
    for skipped in (True, False):
        compat.mark_step_skipped(optimizer, skipped)
        assert optimizer.step_was_skipped is skipped


def test_the_rows_of_a_dataset_have_positions_in_its_table():
    rows = datasets.Dataset.from_dict({"length": [10, 11, 12, 13]})
    assert compat.row_indices(rows) is None
    chosen = rows.select([3, 0, 2])
    assert chosen.data.column("length").to_numpy()[compat.row_indices(chosen)].tolist() == chosen["length"][:]
