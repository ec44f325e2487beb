# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Every private name of PyTorch and Hugging Face libraries that this package uses, behind a public name each. Written
for torch 2.13, transformers 5.23, accelerate 1.15 and datasets 5.2. `tests/test_compat.py` tests what each name is
expected to do, so that a new version of a library fails there first. Overrides of Trainer's private methods, and calls
of them, stay in `galvatron_hf.trainer`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import lru_cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.attention.varlen  # registers its operators
from torch import nn
from torch._C._profiler import _EventType as ProfilerEventType  # noqa: F401  kinds of `experimental_event_tree` events
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (  # noqa: F401  run operators on shapes alone; errors if one needs values
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: F401  `__torch_dispatch__` sees every operator
from torch.utils._pytree import tree_leaves  # noqa: F401  flattens nested tuples, lists and dicts
from transformers import masking_utils
from transformers.integrations import moe


if TYPE_CHECKING:
    import datasets
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.state import GradientState
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor
    from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

    from accelerate import Accelerator


# ---- Modules and tensors ----


def set_parameter_tensor(module: nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Puts any tensor in the place of the parameter `name`; `setattr` refuses all but an `nn.Parameter`. Expects that
    `nn.Module` reads its parameters from the dictionary `_parameters`.
    """
    module._parameters[name] = tensor


def in_layout_of(local: torch.Tensor, like: DTensor) -> DTensor:
    """Returns a DTensor of this rank's tensor with the mesh and the placements of another. `from_local` works them out
    anew, which takes ten times as long. Expects the constructor that FSDP2 uses, and `_spec`.
    """
    return type(like)(local, like._spec, requires_grad=False)


@contextlib.contextmanager
def without_forward_pre_hooks(module: nn.Module) -> Iterator[None]:
    """Removes the forward pre-hooks of a module while the body runs. Expects that `nn.Module` keeps them in the
    dictionary `_forward_pre_hooks`.
    """
    hooks = module._forward_pre_hooks.copy()
    module._forward_pre_hooks.clear()
    try:
        yield
    finally:
        module._forward_pre_hooks.update(hooks)


def storage_key(tensor: torch.Tensor) -> int:
    """Returns a number that living tensors have in common if they share memory, on the meta device and fake ones too.
    Expects that `UntypedStorage._cdata` is the address of the storage's C++ object.
    """
    return tensor.untyped_storage()._cdata


def tensor_norms(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Returns the 2-norm of each tensor, [n], by one kernel for all if the device has one."""
    return torch.stack(torch._foreach_norm(tensors))


def scale_tensors(tensors: list[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiplies tensors by a scalar tensor in place, by one kernel for all if the device has one."""
    if tensors:
        torch._foreach_mul_(tensors, factor)


def assert_without_waiting(condition: torch.Tensor, message: str) -> None:
    """Raises a `RuntimeError` if `condition`, one boolean, is false; a GPU does so later, without being waited for."""
    torch._assert_async(condition, message)


def is_experts_module(module: nn.Module) -> bool:
    """Tells whether a module holds the weights of all experts of a layer, [experts, ...] each, and is called with
    hidden states, and with the experts and weights of each token. Expects the attribute that
    `use_experts_implementation` sets.
    """
    return hasattr(module, "_is_expert_parallel")


def make_experts_module(module: nn.Module, *, is_transposed: bool) -> None:
    """Gives a module with the weights `gate_up_proj` and `down_proj` of all experts the form of [`is_experts_module`],
    with grouped matrix products. Expects the attributes that `use_experts_implementation` sets.
    """
    module.has_gate, module.has_bias, module.has_post_expert_norm = True, False, False
    module.is_concatenated, module.is_transposed, module._is_expert_parallel = True, is_transposed, False
    module._apply_gate = functools.partial(moe._default_apply_gate, module)
    module.forward = functools.partial(moe.grouped_mm_experts_forward, module)


@contextlib.contextmanager
def experts_on_shapes() -> Iterator[None]:
    """Lets the grouped matrix products of experts run on fake tensors of every format while the body runs: PyTorch's
    own have no shapes but for bf16. Expects that transformers asks `_can_use_grouped_mm` before each.
    """
    original = moe._can_use_grouped_mm
    moe._can_use_grouped_mm = lambda *unused: False
    try:
        yield
    finally:
        moe._can_use_grouped_mm = original


def router_output(model: PreTrainedModel) -> tuple[type[nn.Module] | None, int]:
    """Returns the class of a family's routers, and the index of the logits in their output; None if it declares none.
    Expects one entry "router_logits" of `_can_record_outputs`.
    """
    recorder = (getattr(model, "_can_record_outputs", None) or {}).get("router_logits")
    if recorder is None or isinstance(recorder, (list, tuple)):
        return None, 0
    return getattr(recorder, "target_class", recorder), getattr(recorder, "index", 1)


# ---- Operators ----

# What PyTorch's functional collectives (torch.distributed._functional_collectives) call, by group name.
functional_collectives = torch.ops._c10d_functional

# The CPU's attention kernel and its backward, for which `torch.utils.flop_counter` has no formula.
CPU_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
CPU_ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

# What `torch.nn.attention.varlen` calls, and its backward. `torch.utils.flop_counter` has formulas, without windows.
VARLEN_ATTENTION = torch.ops.torch_attn._varlen_attn
VARLEN_ATTENTION_BACKWARD = torch.ops.torch_attn._varlen_attn_backward


# What takes the place of grouped matrix products under `experts_on_shapes`, and its backward.
GROUPED_MM = torch.ops.transformers.grouped_mm_fallback
GROUPED_MM_BACKWARD = torch.ops.transformers.grouped_mm_fallback_backward


def written_arguments(operation: OpOverload) -> tuple[bool, ...]:
    """Returns, for each argument of an operator, True if the operator writes to it in place."""
    aliases = [argument.alias_info for argument in operation._schema.arguments]
    return tuple(alias is not None and alias.is_write for alias in aliases)


# ---- Autograd and the profiler ----


def call_after_backward(callback: Callable[[], None]) -> None:
    """Calls `callback` once at the end of the running backward pass; expects that autograd's engine queues
    callbacks.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def input_gradients(
    outputs: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor] | None,
    received: Sequence[torch.Tensor],
    weights: Sequence[nn.Parameter],
) -> list[dict[str, Any]]:
    """Computes the gradients of `received` alone (zero-bubble pipelines, arXiv 2401.10241), into their `grad`. Returns
    what [`weight_gradients`] continues from.

    Args:
        gradients (`Sequence[torch.Tensor]`, *optional*): the gradients of the results `outputs`; None for a scalar.
        received (`Sequence[torch.Tensor]`): leaves, the inputs of the forward pass.
        weights (`Sequence[nn.Parameter]`): the parameters that are used between them and need gradients.
    """
    from torch.distributed.pipelining._backward import stage_backward_input

    gradients = None if gradients is None else list(gradients)
    return stage_backward_input(list(outputs), gradients, list(received), iter(weights))[1]


def weight_gradients(weights: Sequence[nn.Parameter], found: list[dict[str, Any]]) -> None:
    """Adds the gradients that [`input_gradients`] has left out to the weights' `grad`; runs no hooks of
    accumulation.
    """
    from torch.distributed.pipelining._backward import stage_backward_weight

    stage_backward_weight(iter(weights), found)


def profiler_is_running() -> bool:
    """Returns True if a profiler of autograd records in this thread; a second one cannot."""
    return torch.autograd._profiler_enabled()


# ---- FSDP2 ----


def reset_sharded_parameters(module: FSDPModule) -> None:
    """Makes an FSDP2 module look up its sharded parameters again, after others were put into its modules. Expects that
    a state has `_fsdp_param_groups`, whose `fsdp_params` have `reset_sharded_param()`.
    """
    for group in module._get_fsdp_state()._fsdp_param_groups:
        for parameter in group.fsdp_params:
            parameter.reset_sharded_param()


def drop_gathered_weights(module: FSDPModule) -> None:
    """Waits for weights that an FSDP2 module has begun to gather, and forgets them: a forward that failed has left
    them behind, and the next one would use them. Expects `_all_gather_result`, its event and its work.
    """
    for group in module._get_fsdp_state()._fsdp_param_groups:
        result = group._all_gather_result
        if result is None:
            continue
        if result.all_gather_event is not None:
            torch.accelerator.current_stream().wait_event(result.all_gather_event)
        if isinstance(result.all_gather_work, dist.Work):
            result.all_gather_work.wait()
        group._all_gather_result = None


def finish_fsdp_backward(modules: Sequence[FSDPModule]) -> None:
    """Reduces the gradients that FSDP2 modules have accumulated, and frees their weights. The modules have one root,
    the last of them. `torch.distributed.pipelining` does the same at the end of a schedule, because FSDP2's own hooks
    do not see the end of a backward pass in pieces. Expects `post_backward()` of each parameter group, and
    `_root_post_backward_final_callback()` of the root.
    """
    states = [module._get_fsdp_state() for module in modules]
    for state in states:
        for group in state._fsdp_param_groups:
            group.post_backward()
    if states:
        states[-1]._root_post_backward_final_callback()


# ---- torch.distributed ----

# The logger that warns of a tensor gathered over several mesh axes, one after the other.
DTENSOR_LOGGER = "torch.distributed.tensor._redistribute"

# Functions of PyTorch that wait for other ranks: {end of the file's path: {function: (name of the collective, the
# local variable that holds the process group)}}.
WAITING_FUNCTIONS = {
    "torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py": {
        "wait_for_unshard": ("all_gather of weights", "self._all_gather_process_group"),
        "post_backward": ("reduce_scatter of gradients", "self._reduce_scatter_process_group"),
    },
    "torch/distributed/distributed_c10d.py": {
        name: (name, "group")
        for name in (
            "all_reduce",
            "all_gather",
            "all_gather_into_tensor",
            "all_gather_single",
            "all_gather_object",
            "barrier",
            "batch_isend_irecv",
            "broadcast",
            "broadcast_object_list",
            "gather",
            "gather_object",
            "reduce_scatter_single",
            "reduce_scatter_tensor",
            "scatter",
        )
    },
}


def keep_class_name(model: nn.Module, family: type[nn.Module]) -> None:
    """Has a model tell its family's name, from which Trainer knows whether a loss shifts labels. Sharding replaces the
    class. Expects Trainer to ask `_get_name()`.
    """
    model._get_name = lambda: family.__name__


def refuse_numbers_of_parts() -> None:
    """Has `item()`, `float()` and `bool()` of a DTensor of which this rank has a part raise RuntimeError. PyTorch
    returns the number of the part, such as the norm of a rank's piece of a weight. Expects DTensor's dispatcher to
    ask a dictionary of handlers first, and handlers to be called with (operation, arguments, keyword arguments).
    """

    from torch.distributed.tensor import DTensor

    def number(operation: OpOverload, args: tuple, kwargs: dict) -> Any:
        tensor = args[0]
        sizes = tensor.device_mesh.shape
        if any(size > 1 and not one.is_replicate() for one, size in zip(tensor.placements, sizes, strict=True)):
            raise RuntimeError(
                f"A number is read from a tensor of which this rank has a part ({tensor.placements}); call "
                ".full_tensor() on it first, on every rank."
            )
        return operation(tensor.to_local(), **kwargs)

    DTensor._op_dispatcher._custom_op_handlers[torch.ops.aten._local_scalar_dense.default] = number


def calls_of_group(group: dist.ProcessGroup) -> int:
    """Returns how many collectives this rank has called in a group since the group was made."""
    return group._get_sequence_number_for_group()


def set_default_group_timeout(timeout: timedelta) -> None:
    """Changes after how long the default group ends the process of a collective that waits."""
    dist.distributed_c10d._set_pg_timeout(timeout, dist.group.WORLD)


def default_store() -> dist.Store:
    """Returns the store in which the ranks of the default process group met."""
    return dist.distributed_c10d._get_default_store()


# ---- Pipeline schedules ----


def pipeline_action(stage: int, computation, micro_batch: int):
    """Returns an action of `torch.distributed.pipelining`, which takes part in [`with_transfers`]. Expects the
    attributes `stage_index`, `computation_type` and `microbatch_index`.
    """
    from torch.distributed.pipelining import schedules

    return schedules._Action(stage, computation, micro_batch)


def with_transfers(compute: dict[int, list], rank_of_stage: Callable[[int], int], stages: int) -> dict[int, list]:
    """Adds sends and receives to the orders of computations of all pipeline ranks."""
    from torch.distributed.pipelining import schedules

    return schedules._add_send_recv(compute, rank_of_stage, stages)


def pipeline_orders(schedule: type, stages: Sequence[int], total: int, ranks: int, micro_batches: int) -> dict:
    """Returns the order of computations of each pipeline rank under a schedule class with several stages a rank,
    without a model. Expects that a schedule reads from its stages only `stage_index`, `num_stages`, `group_size`,
    `group_rank` and `submod`. Its `pipeline_order` must have the actions of all ranks, None for an idle moment.
    `stages` are the first pipeline rank's, `total` counts all stages.
    """
    known = [
        SimpleNamespace(stage_index=stage, num_stages=total, group_size=ranks, group_rank=0, submod=None)
        for stage in stages
    ]
    order = schedule(known, micro_batches).pipeline_order
    return {rank: [action for action in row if action is not None] for rank, row in order.items()}


# ---- transformers, accelerate and datasets ----


def attention_implementation(config: PreTrainedConfig) -> str:
    """Returns the name under which transformers registers the attention function that a model calls."""
    return config._attn_implementation


def set_attention_implementation(config: PreTrainedConfig, name: str) -> None:
    """Makes the modules that have this configuration call another registered attention function."""
    config._attn_implementation = name


def calls_registered_attention(attention: nn.Module) -> bool:
    """Tells whether an attention module calls the attention function that its configuration names. Expects
    `ALL_ATTENTION_FUNCTIONS` in its forward.
    """
    return hasattr(attention, "config") and "ALL_ATTENTION_FUNCTIONS" in _source(type(attention).forward)


def masks_by_implementation(attention: nn.Module) -> bool:
    """Tells whether an attention module changes its mask only for attention functions of some names, as attention with
    an index of positions does. Expects `if self.config._attn_implementation in (...)` in its forward.
    """
    return re.search(r"_attn_implementation in \(", _source(type(attention).forward)) is not None


@lru_cache(maxsize=256)
def _source(function: Callable) -> str:
    """Returns the text of a function; none if there is no file, as of a class that was typed in, or of a built-in."""
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):
        return ""


@contextlib.contextmanager
def masks_of_rows(*, padded: bool) -> Iterator[None]:
    """Tells transformers whether rows have padding while the body makes their attention masks, so that it does not
    read the mask from the device. Expects that `masking_utils.fast_all` is what reads a causal mask, and
    `_ignore_bidirectional_mask_sdpa` what reads another.
    """

    def needs_no_mask(mask: torch.Tensor | None, length: int, window: int | None = None) -> bool:
        return (mask is None or not padded) and (window is None or length < window)

    read = masking_utils.fast_all, masking_utils._ignore_bidirectional_mask_sdpa
    masking_utils.fast_all = lambda mask: not padded
    masking_utils._ignore_bidirectional_mask_sdpa = needs_no_mask
    try:
        yield
    finally:
        masking_utils.fast_all, masking_utils._ignore_bidirectional_mask_sdpa = read


def model_from_config(family: type[PreTrainedModel], config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Returns a new model of a class; the public `from_config` exists for `AutoModel` classes alone."""
    return family._from_config(config, dtype=dtype)


def has_peft_adapters(model: PreTrainedModel) -> bool:
    """Returns True if `model.add_adapter` or `load_adapter` was called."""
    return model._hf_peft_config_loaded


def unsaved_keys(model: PreTrainedModel) -> set[str]:
    """Returns the names of weights that `save_pretrained` leaves out, such as a tied head's."""
    return set(model._keys_to_ignore_on_save or ())


def kept_in_float32(model: PreTrainedModel, dtype: torch.dtype | None) -> set[str]:
    """Returns the names of weights and buffers that `from_pretrained` keeps in fp32 in a model of another format."""
    kept = set()
    if dtype in (torch.bfloat16, torch.float16):
        kept |= set(model._keep_in_fp32_modules_strict or ())
    if dtype == torch.float16:
        kept |= set(model._keep_in_fp32_modules or ())
    pattern = re.compile("|".join(name.replace("*", ".*") for name in sorted(kept)))
    return {name for name in model.state_dict() if kept and pattern.search(name)}


def drop_harmless_keys(model: PreTrainedModel, report: Any) -> None:
    """Takes the keys that the family says are no loss out of a `LoadStateDictInfo`, in place."""
    model._adjust_missing_and_unexpected_keys(report)


def default_max_length(config: GenerationConfig) -> int:
    """Returns the number of tokens, prompt included, that `generate` stops at if nothing says otherwise."""
    return config._get_default_generation_params()["max_length"]


def register_dataloader(state: GradientState, loader: Any) -> None:
    """Makes a data loader the active one of accelerate, which asks it for `end_of_dataloader` and `remainder`."""
    state._add_dataloader(loader)


def unregister_dataloader(state: GradientState, loader: Any) -> None:
    """Takes back [`register_dataloader`]."""
    state._remove_dataloader(loader)


def keep_dataloader(accelerator: Accelerator, loader: Any) -> None:
    """Adds a data loader to those that `Accelerator.prepare` has made, whose states accelerate knows."""
    accelerator._dataloaders.append(loader)


def mark_step_skipped(optimizer: AcceleratedOptimizer, skipped: bool) -> None:
    """Sets `optimizer.step_was_skipped`, which Trainer asks before it steps the learning rate."""
    optimizer._is_overflow = skipped


def row_indices(dataset: datasets.Dataset) -> Any | None:
    """Returns the positions of a dataset's rows in its table, an array [rows]; None if they are in the table's order.
    Expects that `select`, `shuffle` and `sort` keep them in the first column of `_indices`.
    """
    return None if dataset._indices is None else dataset._indices.column(0).to_numpy()


def relative_position_buckets(attention: nn.Module, length: int, device: torch.device) -> torch.Tensor:
    """Returns the buckets [S, S] of the distances from each position to each other one, as T5's attention counts."""
    positions = torch.arange(length, device=device)
    distances = positions[None] - positions[:, None]
    if "bidirectional" not in inspect.signature(attention._relative_position_bucket).parameters:
        return attention._relative_position_bucket(distances)  # UMT5's, which reads its own attributes
    return attention._relative_position_bucket(
        distances,
        bidirectional=not attention.is_decoder,
        num_buckets=attention.relative_attention_num_buckets,
        max_distance=attention.relative_attention_max_distance,
    )


def decoder_ids_of_labels(model: PreTrainedModel, labels: torch.Tensor) -> torch.Tensor:
    """Returns the decoder's tokens [B, S] that a family's forward makes of labels [B, S]."""
    if hasattr(model, "prepare_decoder_input_ids_from_labels"):
        return model.prepare_decoder_input_ids_from_labels(labels)
    shift = vars(sys.modules[type(model).forward.__module__])["shift_tokens_right"]
    return shift(labels, model.config.pad_token_id, model.config.decoder_start_token_id)


def copy_generation_config(model: PreTrainedModel, other: PreTrainedModel) -> None:
    """Gives another model of the same family the options with which a model generates, if it is one that does."""
    if getattr(model, "generation_config", None) is not None:
        other.generation_config = model.generation_config


def generation_options(model: PreTrainedModel, given: Mapping[str, Any]) -> GenerationConfig:
    """Returns the options with which a model generates if its `generate` is given some. What these and the given
    `generation_config` leave open is that of the model's own. Expects `_prepare_generation_config`.
    """
    own = dict(given)
    return model._prepare_generation_config(own.pop("generation_config", None), **own)[0]


# ---- Attention kernels that return the log-sum-exp ----


def flash_forward_on_cpu(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns attention [1, heads, T, D] of queries to keys and values [1, key/value heads, T', D], and the
    log-sum-exp of the scores [1, heads, T] in float32. Causal queries have as many keys.
    """
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal, scale=scale)


def flash_backward_on_cpu(
    gradient: torch.Tensor,
    output: torch.Tensor,
    log_sum_exp: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the gradients of queries, keys and values; output and log-sum-exp may be those of more keys."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        gradient, query, key, value, output, log_sum_exp, 0.0, causal, scale=scale
    )


def varlen_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_offsets: torch.Tensor,
    key_offsets: torch.Tensor,
    most_queries: int,
    most_keys: int,
    *,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns attention [T, heads, D] of documents on CUDA, see [`torch.nn.attention.varlen.varlen_attn`], and the
    log-sum-exp of the scores [heads, T] in float32.
    """
    offsets = query_offsets, key_offsets, most_queries, most_keys
    gqa = query.shape[1] != key.shape[1]
    found = torch.ops.torch_attn._varlen_attn(
        query, key, value, *offsets, causal, scale, [-1, 0 if causal else -1], gqa
    )
    return found[:2]


def varlen_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    log_sum_exp: torch.Tensor,
    query_offsets: torch.Tensor,
    key_offsets: torch.Tensor,
    most_queries: int,
    most_keys: int,
    *,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the gradients of [`varlen_forward`]; output and log-sum-exp may be those of more keys."""
    offsets = query_offsets, key_offsets, most_queries, most_keys
    random_state = torch.zeros(2, dtype=torch.uint64, device=query.device)  # no weight is dropped
    states = gradient, query, key, value, output, log_sum_exp.contiguous()
    window = [-1, 0 if causal else -1]
    return torch.ops.torch_attn._varlen_attn_backward(*states, *offsets, causal, random_state, scale, window)
