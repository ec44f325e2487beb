# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Refuses training arguments that a plan does not support."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from itertools import chain

from accelerate.utils import parse_flag_from_env
from huggingface_hub import split_torch_state_dict_into_shards
from transformers import TrainingArguments
from transformers.debug_utils import DebugOption

from galvatron_hf.data.packing import LONG_SEQUENCES
from galvatron_hf.data.placement import PLANNERS
from galvatron_hf.plan import ParallelPlan
from galvatron_hf.profiler.measure.rounds import WANTED_ERROR
from galvatron_hf.trainer.argument_table import unknown_arguments
from galvatron_hf.trainer.arguments import (
    NONFINITE_POLICIES,
    PACKING_MODES,
    SAVE_FAILURE_POLICIES,
    nonfinite_policy,
    packing_mode,
)
from galvatron_hf.trainer.expert_dispatch import dispatch_refusals
from galvatron_hf.trainer.liger import refused_kernels


# Optimizers that treat every element by itself: a step on shards is the step on the whole.
_ELEMENTWISE_OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop")

# Set by `accelerate launch` for its own tensor, context, sequence and data parallelism.
_SHARDING_VARIABLES = (
    "ACCELERATE_USE_FSDP",
    "ACCELERATE_USE_DEEPSPEED",
    "ACCELERATE_USE_MEGATRON_LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG",
)


def check_arguments(args: TrainingArguments, plan: ParallelPlan | None) -> None:
    """Refuses arguments that a plan does not support; `plan` is None before a search. The ValueError is one sentence
    with the argument, the reason and the fix.
    """
    for refusal in chain(_refusals(args), _galvatron_refusals(args), unknown_arguments(args)):
        raise ValueError(refusal)
    kwargs = args.activation_checkpointing_kwargs or {}
    if args.activation_checkpointing and (kwargs.get("offload") or kwargs.get("every_n_layers", 1) != 1):
        raise ValueError(
            "activation_checkpointing_kwargs has offload or every_n_layers, and under a parallel plan the plan says "
            "which layers are recomputed, from activations on the device; leave both out, and set recompute in the "
            "plan."
        )
    if args.activation_checkpointing and plan is not None:
        without = [index for index, layer in enumerate(plan.layers) if layer.recompute == "none"]
        if without:
            raise ValueError(
                f"gradient_checkpointing=True recomputes every layer, but layer {without[0]} of the plan has "
                'recompute "none"; set gradient_checkpointing=False or recompute "full" in every layer.'
            )


def _refusals(args: TrainingArguments) -> Iterator[str]:
    """Yields refusals of arguments that plain Trainer has too."""
    if args.fsdp:
        yield "fsdp cannot go together with a parallel plan, which shards every layer itself; leave fsdp out."
    if args.deepspeed:
        yield "deepspeed cannot go together with a parallel plan, which shards every layer itself; leave it out."
    if args.parallelism_config is not None:
        yield (
            "parallelism_config cannot go together with a parallel plan, which says how every layer is parallelised; "
            "leave it out."
        )
    for variable in _SHARDING_VARIABLES:
        if parse_flag_from_env(variable):
            yield (
                f"{variable} is set, and accelerate's own sharding cannot go together with a parallel plan; "
                "launch with a configuration without FSDP, DeepSpeed, Megatron-LM or parallelism_config."
            )
    if args.n_gpu > 1:
        yield (
            f"One process sees {args.n_gpu} GPUs, which Trainer would use through DataParallel; start one process per "
            "GPU with accelerate launch or torchrun."
        )
    if args.auto_find_batch_size:
        yield "auto_find_batch_size would change the batch that the plan was made for; set it to False."
    if args.enable_jit_checkpoint:
        yield (
            "enable_jit_checkpoint=True saves when one rank gets SIGTERM, whatever the others do; set it to False: "
            "under a parallel plan SIGTERM and SIGUSR1 on any rank make all of them save and stop."
        )
    if args.save_on_each_node and int(os.environ.get("LOCAL_WORLD_SIZE", args.world_size)) < args.world_size:
        yield "save_on_each_node=True is not supported under a plan on several nodes; use a shared output_dir."
    if args.fp16:
        yield "fp16=True needs loss scaling, which is not supported under a parallel plan; use bf16=True."
    if args.bf16_full_eval or args.fp16_full_eval:
        yield (
            "bf16_full_eval and fp16_full_eval cast the whole model, which would lose the fp32 master weights; "
            "use bf16=True, under which evaluation computes in bf16 too."
        )
    optimizer = getattr(args.optim, "value", str(args.optim))
    if optimizer not in _ELEMENTWISE_OPTIMIZERS:
        yield (
            f"optim {optimizer!r} is not known to treat every element by itself, so it cannot step on shards; "
            f"use one of {', '.join(_ELEMENTWISE_OPTIMIZERS)}."
        )
    if args.train_sampling_strategy == "batch_rebalance":
        yield (
            "train_sampling_strategy 'batch_rebalance' places rows on ranks itself, which is the plan's part; "
            "use 'random' or 'group_by_length'."
        )
    if DebugOption.UNDERFLOW_OVERFLOW in args.debug:
        yield (
            "debug='underflow_overflow' reads whole weights in every layer, of which a rank has parts; leave it out: "
            "a number that is not finite is traced to its layer anyway, see nonfinite_policy."
        )
    yield from refused_kernels(args)
    yield from dispatch_refusals(args)


def _galvatron_refusals(args: TrainingArguments) -> Iterator[str]:
    """Yields refusals of arguments that [`GalvatronTrainingArguments`] adds."""
    for name, value, known in (
        ("nonfinite_policy", nonfinite_policy(args), NONFINITE_POLICIES),
        ("on_save_failure", getattr(args, "on_save_failure", "stop"), SAVE_FAILURE_POLICIES),
        ("packing", packing_mode(args), PACKING_MODES),
        ("long_sequences", getattr(args, "long_sequences", LONG_SEQUENCES[0]), LONG_SEQUENCES),
        ("placement_planner", getattr(args, "placement_planner", PLANNERS[0]), PLANNERS),
    ):
        if value not in known:
            yield f"{name} {value!r} is not one of {', '.join(known)}; use one of these."
    try:
        size = getattr(args, "max_shard_size", "5GB")
        split_torch_state_dict_into_shards({}, max_shard_size=size)
    except (ValueError, TypeError) as error:
        yield f"max_shard_size {size!r} is not a size ({error}); use a number with a unit, such as '5GB'."
    memory = getattr(args, "memory_gib", None)
    if memory is not None and not 0 < memory < math.inf:
        yield f"memory_gib {memory!r} is not a positive number of GiB; use a number such as 80, or leave it out."
    accuracy = getattr(args, "profile_accuracy", WANTED_ERROR)
    if type(accuracy) not in (int, float) or not 0 < accuracy < math.inf:
        yield f"profile_accuracy {accuracy!r} is not a positive number; use one such as 0.05."
    rows, steps = getattr(args, "global_batch_size", None), args.gradient_accumulation_steps
    if rows is not None and (type(rows) is not int or rows < 1):
        yield f"global_batch_size {rows!r} is not a number of rows; use a positive integer, or leave it out."
    elif rows is not None and rows % steps:
        yield (
            f"global_batch_size {rows} is not a multiple of gradient_accumulation_steps {steps}; use one that is, or "
            "gradient_accumulation_steps=1 and a plan with micro_batches."
        )
    if getattr(args, "per_step", False) and args.full_determinism:
        yield (
            "per_step=True chooses by measured times, and full_determinism=True measures none; leave one of them out."
        )
    if getattr(args, "per_step", False) and (args.activation_checkpointing or packing_mode(args) == "none"):
        name = "gradient_checkpointing=True" if args.activation_checkpointing else "packing='none'"
        yield f"per_step=True chooses for packed steps whether layers are recomputed, against {name}; leave one out."
    if getattr(args, "step_plans", None) and not getattr(args, "per_step", False):
        yield "step_plans are for steps that may differ, and per_step is False; set per_step=True."
    if not isinstance(getattr(args, "step_plans", None), (list, tuple, type(None))):
        yield f"step_plans is a {type(args.step_plans).__name__}; use a list of files, or of plans."
    for name in ("max_tokens_per_rank", "pack_to_multiple_of"):
        value = getattr(args, name, None)
        if value is not None and (type(value) is not int or value < 1):
            yield f"{name} {value!r} is not a number of tokens; use a positive integer, or leave it out."
