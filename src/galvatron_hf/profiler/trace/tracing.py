# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Makes a model's profile: from its configuration alone, by counting, or from counts and measured times."""

from __future__ import annotations

import os
import re
import sys
import textwrap
from dataclasses import replace

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from galvatron_hf.models.adapter import StackAdapter
from galvatron_hf.models.families import adapter_for
from galvatron_hf.models.lora import check_adapters, inner_model
from galvatron_hf.models.shape import ModelShape
from galvatron_hf.parallel.data_parallel.sharding import DTYPES
from galvatron_hf.parallel.packing_obstacle import packing_obstacle_of
from galvatron_hf.parallel.validate import check_model
from galvatron_hf.plan import ParallelPlan
from galvatron_hf.profiler.profiles.attention_rates import AttentionRates
from galvatron_hf.profiler.profiles.devices import DEVICES, known_device
from galvatron_hf.profiler.profiles.hardware import MADE_OF, HardwareProfile
from galvatron_hf.profiler.profiles.layers import EndProfile, LayerProfile
from galvatron_hf.profiler.profiles.model import EXPERT_IMBALANCE, MICRO_BATCHES, PACKED, ModelProfile
from galvatron_hf.profiler.trace.counted_model import CountedModel, PartTimes, Speed
from galvatron_hf.profiler.trace.model_files import adapter_file
from galvatron_hf.profiler.trace.shapes import model_shape_from_model, regions_of_kinds
from galvatron_hf.profiler.trace.small_models import empty_model, image_positions, layer_kinds, positions
from galvatron_hf.utils.compat import DataDependentOutputException, DynamicOutputShapeException
from galvatron_hf.utils.hub import hub_is_out_of_reach


# FLOP/s of a layer's matrix products over those of large ones.
EFFICIENCY = 0.9
# FLOPs per byte of memory of devices that are not known: GPUs, and one CPU core.
FLOPS_PER_BYTE = {"gpu": 240.0, "cpu": 20.0}
CPU_FLOPS = 1e13  # FLOP/s that no CPU core reaches
IMBALANCE_TEXT = (
    "most rows at a rank over their mean as in trained routers of 8 experts, for degrees that expert_imbalance lacks"
)
ADAM_BYTES = 7 * 4  # AdamW reads a weight, its gradient and two moments, and writes all but the gradient, in fp32
ADDING_BYTES = 3 * 4  # bytes moved per element by a sum of two gradients in fp32


def profile_from_config(
    config: PreTrainedConfig | PreTrainedModel | str | os.PathLike,
    hardware: HardwareProfile,
    dtype: str = "bf16",
    *,
    adapter: str | os.PathLike | None = None,
    length: int | None = None,
    target_length: int | None = None,
    packed: bool = True,
    max_degree: int = 64,
    efficiency: float = EFFICIENCY,
    speed: Speed | None = None,
    compiled: bool = False,
) -> ModelProfile:
    """Counts the work of a model from its configuration, without weights and without a device.

    Args:
        config (`PreTrainedConfig`, `str` or `os.PathLike`): Configuration of a causal language model of a known
            family, its file, or the folder of the file. Or a model, whose values do not matter: its adapters, and the
            weights that are frozen, count.
        hardware ([`HardwareProfile`]): Gives the rate of matrix products, from which the times follow.
        dtype (`str`, defaults to `"bf16"`): Number format of the layers' computation: "fp32" or "bf16".
        adapter (`str` or `os.PathLike`, *optional*): Folder of PEFT's adapter_config.json, for LoRA.
        length (`int`, *optional*): Tokens of the longest document; by default 4,096, or the positions of the model.
        target_length (`int`, *optional*): Tokens that a row has in the decoder, if the model has an encoder too, for
            `length` tokens in the encoder; by default as many.
        packed (`bool`, defaults to `True`): Whether micro-batches are packed documents, or rows without padding, as
            those of an encoder and a decoder are, and of a family that cannot be packed.
        max_degree (`int`, defaults to 64): Largest product of tensor and Ulysses degree of a layer.
        efficiency (`float`, *optional*): FLOP/s of a layer's matrix products over those of large ones.
        speed ([`Speed`], *optional*): Rates of the device; by default [`speed_of`] the hardware.
        compiled (`bool`, defaults to `False`): Whether torch.compile fuses the operations of layers.

    Raises:
        ValueError: If the configuration is missing, its family is unknown, or its sizes do not fit together.
    """
    model = _read_model(config, adapter)
    _check_heads(model)
    longest = positions(model)
    length = image_positions(model) or min(length or 4096, longest or sys.maxsize)
    packed, ratio = rows_of_stacks(model, packed, length, target_length)
    if dtype not in hardware.flops_per_s:
        raise ValueError(
            f"The hardware profile {hardware.name!r} has no rate for {dtype!r}; use one of "
            f"{', '.join(sorted(hardware.flops_per_s))}, or profile the machine."
        )
    speed = replace(speed or speed_of(hardware, dtype, efficiency), compiled=compiled)
    assumed = {
        **hardware.assumed,
        "times": f"counted FLOPs: products at {efficiency:g} of the rate of large ones, then what they write and "
        f"other operations' bytes at {speed.bytes_per_ms / 1e6:,.0f} GB/s; nothing was measured",
    }
    try:
        with torch.random.fork_rng(devices=[]):
            made = describe(length, packed, ratio) | {
                key: hardware.made[key] for key in MADE_OF if key in hardware.made
            }
            on_gpu = speed.attention is not None
            counts = CountedModel(model, DTYPES[dtype], length, packed, length_ratio=ratio, gpu_kernels=on_gpu)
            return profile_of(
                model,
                dtype,
                counts,
                counts.times(max_degree, speed),
                max_degree=max_degree,
                optimizer_ms=(ADAM_BYTES / speed.bytes_per_ms, 0.0),
                adding_ms=ADDING_BYTES / speed.bytes_per_ms,
                assumed=assumed,
                made=made,
            )
    except ValueError:
        raise
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise ValueError(
            f"The model of this {type(model.config).__name__} cannot be traced, because its forward depends on "
            f"values of tensors, not on their shapes alone ({error}); write a plan, or train with ZeRO-3."
        ) from error
    except Exception as error:  # some families build models of odd sizes that cannot run
        raise ValueError(
            f"The model of this {type(model.config).__name__} does not run ({type(error).__name__}: "
            f"{textwrap.shorten(str(error), 80, placeholder=' ...')}); give a configuration whose sizes fit together."
        ) from error


def _check_heads(model: PreTrainedModel) -> None:
    """Raises `ValueError` for heads that cannot share key/value heads evenly."""
    for stack in adapter_for(model).stacks:
        heads = stack.heads(stack.config(model))
        if heads.query % heads.key_value:
            raise ValueError(
                f"The model of this {type(model.config).__name__} does not run ({heads.query} heads cannot share "
                f"{heads.key_value} key/value heads evenly); give a configuration whose sizes fit together."
            )


def rows_of_stacks(model: PreTrainedModel, packed: bool, length: int, target_length: int | None) -> tuple[bool, float]:
    """Returns whether micro-batches are packed, and the tokens of a row in the last stack for each in the first."""
    adapter = adapter_for(model)
    stacks = adapter.stacks
    if len(stacks) == 1 and target_length is not None:
        raise ValueError(
            f"{type(model).__name__} has one stack of layers, and target_length is for two: leave it out."
        )
    packs = packed and len(stacks) == 1 and adapter.structure is None and packing_obstacle_of(model) is None
    return packs, 1.0 if target_length is None else target_length / length


def speed_of(hardware: HardwareProfile, dtype: str, efficiency: float = EFFICIENCY) -> Speed:
    """Returns the assumed rates of a device: those of the known one that the profile names, or guesses."""
    products = hardware.flops_per_s[dtype]
    device = known_device(hardware)
    if device is not None:
        attention, bandwidth, launch_ms = (
            figure[0] for figure in (device.attention, device.memory_bytes_per_s, device.launch_ms)
        )
    else:
        fastest = max(hardware.flops_per_s.values())
        is_gpu = fastest > CPU_FLOPS
        share = fastest / DEVICES["h100"].flops[0]["bf16"]
        attention = AttentionRates(forward=share, backward=share) if is_gpu else None
        bandwidth = fastest / FLOPS_PER_BYTE["gpu" if is_gpu else "cpu"]
        launch_ms = DEVICES["h100" if is_gpu else "cpu"].launch_ms[0]
    return Speed(
        flops_per_ms=products * efficiency / 1e3,
        bytes_per_ms=bandwidth / 1e3,
        attention=attention,
        launch_ms=launch_ms,
    )


def _read_model(
    source: PreTrainedConfig | PreTrainedModel | str | os.PathLike, adapter: str | os.PathLike | None
) -> PreTrainedModel:
    """Returns a model without values, frozen but for its adapters if it has some."""
    model = inner_model(source) if isinstance(source, nn.Module) else empty_model(read_config(source))
    return model if adapter is None else with_adapter(model, adapter)


def with_adapter(model: PreTrainedModel, folder: str | os.PathLike) -> PreTrainedModel:
    """Adds the adapters of a folder's adapter_config.json to a model on the meta device."""
    from peft import PeftConfig, get_peft_model

    adapter_file(folder)
    config = PeftConfig.from_pretrained(str(folder))
    config.inference_mode = False
    adapted = get_peft_model(model, config, low_cpu_mem_usage=True)
    check_adapters(adapted)
    return inner_model(adapted).train()


def read_config(source: PreTrainedConfig | str | os.PathLike) -> PreTrainedConfig:
    """Returns a configuration, or reads it from a folder, a `config.json` or the Hub; raises `ValueError` if there is
    none.
    """
    if isinstance(source, PreTrainedConfig):
        return source
    is_here = os.path.exists(source)
    if not is_here and re.fullmatch(r"[\w.-]+(/[\w.-]+)?", os.fspath(source)) is None:
        raise ValueError(
            f"{str(source)!r} is no folder and no file, and no id of the Hub: give a folder with a config.json, or "
            "that file."
        )
    offline = not is_here and hub_is_out_of_reach()
    try:
        return AutoConfig.from_pretrained(source, local_files_only=is_here or offline)
    except Exception as error:  # configuration classes raise various errors
        problem = textwrap.shorten(str(error), 120, placeholder=" ...")
        if offline:
            problem = "the Hub cannot be reached, and none was downloaded before"
        if not is_here:
            raise ValueError(
                f"{str(source)!r} is no folder and no file, and the Hub gives no configuration for it ({problem}): "
                "give a folder with a config.json, or that file."
            ) from None
        raise ValueError(
            f"{str(source)!r} has no configuration that transformers knows ({problem}); give a config.json."
        ) from None


def profile_of(
    model: PreTrainedModel,
    dtype: str,
    counts: CountedModel,
    times: PartTimes,
    *,
    max_degree: int,
    optimizer_ms: tuple[float, float],
    adding_ms: float,
    assumed: dict[str, str],
    made: dict[str, str],
) -> ModelProfile:
    """Returns the profile of counted bytes and of counted or measured times. `optimizer_ms` is the time of an update
    for each element and for each weight; `adding_ms` is the time of adding gradients for each element.
    """
    shape, kinds = model_shape_from_model(model, counts.small), layer_kinds(model)
    regions, has_experts = regions_of_kinds(model), any(experts is not None for experts in times.experts)
    bytes_of, stacks = counts.layer_bytes(max_degree), adapter_for(model).stack_sizes(model)
    stacks_of_kinds = [place.stack for place in adapter_for(counts.small).places(counts.small)]
    ends = counts.end_bytes(sorted(times.embedding))
    return ModelProfile(
        name=os.path.basename(model.config.name_or_path.rstrip("/")) or model.config.model_type,
        hidden=shape.hidden,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        dtype=dtype,
        kinds=tuple(
            LayerProfile(
                weights=shape.layers[kinds.index(kind)],
                times=times.layers[kind],
                saved_bytes={strategy: found[kind][0] for strategy, found in bytes_of.items()},
                working_bytes={strategy: found[kind][1] for strategy, found in bytes_of.items()},
                regions=regions[kind],
                saves_after_last_region=shape.saves_after_last_region,
                experts=times.experts[kind],
                length_ratio=counts.length_ratios[kind],
                read_ratio=0.0 if stacks_of_kinds[kind].reads is None else 1.0,
                bias_heads=_bias_heads(stacks_of_kinds[kind], model),
            )
            for kind in range(max(kinds) + 1)
        ),
        layers=kinds,
        embedding=EndProfile(
            weights=shape.embedding,
            times=times.embedding,
            length_ratio=1.0 + (counts.length_ratio if len(stacks) > 1 else 0.0),
            **ends["embedding"],
        ),
        head=EndProfile(
            weights=_head_weights(shape), times=times.head, length_ratio=counts.length_ratio, **ends["head"]
        ),
        tied=shape.tied,
        stacks=stacks,
        max_length=positions(model),
        optimizer_ms_per_element=optimizer_ms[0],
        optimizer_ms_per_weight=optimizer_ms[1],
        adding_ms_per_element=adding_ms,
        router_loss=adapter_for(model).adds_router_loss(model),
        whole_rows=adapter_for(model).structure is not None,
        images=image_positions(model) is not None,
        shares_documents=_shares_documents(counts.small),
        assumed=assumed | ({EXPERT_IMBALANCE: IMBALANCE_TEXT} if has_experts else {}),
        made=made,
    )


def _shares_documents(model: PreTrainedModel) -> bool:
    """Returns whether the runtime lets ranks share the documents of packed rows."""
    adapter = adapter_for(model)
    plan = ParallelPlan.uniform(2, adapter.stack_sizes(model), context=2, sharding="replicate")
    try:
        check_model(model, adapter, plan)
    except ValueError:
        return False
    return True


def _bias_heads(stack: StackAdapter, model: PreTrainedModel) -> int:
    """Returns the heads of the bias of scores that the layers of a stack share."""
    return 0 if stack.bias is None else stack.heads(stack.config(model)).query


def _head_weights(shape: ModelShape) -> tuple:
    """Returns the weights of the final norm and of the head; a tied head has the weight of the embedding."""
    return (*shape.final_norm, *(shape.embedding[:1] if shape.tied else ()), *shape.head)


def describe(length: int, packed: bool, ratio: float = 1.0) -> dict[str, str]:
    """Returns document length and kind of micro-batches for a profile's `made`, and the ratio of two stacks' lengths
    if they differ.
    """
    made = {"longest document": f"{length} tokens", MICRO_BATCHES: PACKED if packed else "rows"}
    return made if ratio == 1.0 else made | {"tokens of the decoder": f"{ratio:.4g} for each of the encoder"}
