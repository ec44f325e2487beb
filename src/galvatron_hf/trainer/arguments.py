# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Training arguments, and the refusal of those that a plan does not support."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from accelerate.utils import DynamoBackend, TorchDynamoPlugin, parse_flag_from_env
from huggingface_hub import split_torch_state_dict_into_shards
from transformers import Seq2SeqTrainingArguments, TrainingArguments
from transformers.debug_utils import DebugOption

from galvatron_hf.data.packing import LONG_SEQUENCES
from galvatron_hf.data.placement import PLANNERS
from galvatron_hf.plan import ParallelPlan, Precision
from galvatron_hf.plan.supported import require_compilable
from galvatron_hf.profiler.measure.rounds import WANTED_ERROR
from galvatron_hf.trainer.argument_table import unknown_arguments
from galvatron_hf.trainer.expert_dispatch import DISPATCHES, dispatch_refusals
from galvatron_hf.trainer.liger import refused_kernels


# Optimizers that treat every element by itself: a step on shards is the step on the whole.
_ELEMENTWISE_OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop")

NONFINITE_POLICIES = ("stop", "skip")
SAVE_FAILURE_POLICIES = ("stop", "continue")
PACKING_MODES = ("auto", "static", "none")

# Set by `accelerate launch` for its own tensor, context, sequence and data parallelism.
_SHARDING_VARIABLES = (
    "ACCELERATE_USE_FSDP",
    "ACCELERATE_USE_DEEPSPEED",
    "ACCELERATE_USE_MEGATRON_LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG",
)


@dataclass
class GalvatronTrainingArguments(TrainingArguments):
    """Adds a plan to [`~transformers.TrainingArguments`]; each field's `help` describes it. `parallel_plan` may also
    be a [`ParallelPlan`]. With "auto", one process trains without parallelism.
    """

    _VALID_DICT_FIELDS = [*TrainingArguments._VALID_DICT_FIELDS, "model_init_kwargs"]

    parallel_plan: str | None = field(
        default="auto",
        metadata={
            "help": 'The path of a plan, or "auto", which measures the machine and the model and trains under the '
            "fastest plan that a search finds."
        },
    )
    global_batch_size: int | None = field(
        default=None,
        metadata={
            "help": "Rows of an optimizer step on all ranks together, any number (default: "
            "per_device_train_batch_size * gradient_accumulation_steps * ranks). It may be smaller than the number of "
            "ranks. gradient_accumulation_steps must divide it."
        },
    )
    profile_dir: str | None = field(
        default=None,
        metadata={
            "help": 'Folder of the measurements for "auto" (default: $GALVATRON_CACHE or ~/.cache/galvatron-hf).'
        },
    )
    profile_accuracy: float = field(
        default=WANTED_ERROR,
        metadata={
            "help": 'How accurate the measurements for "auto" should be. They are repeated until their estimated '
            "relative error is at most this number, or to a limit of repetitions and time. Ranks that share CPU "
            "cores seldom reach 0.05; 0.15 ends earlier."
        },
    )
    memory_gib: float | None = field(
        default=None,
        metadata={
            "help": 'Memory in GiB that a plan of "auto" may use on a rank (default: most of a GPU, or the share of a '
            "rank in the machine's memory)."
        },
    )
    trace_dir: str | None = field(
        default=None,
        metadata={
            "help": "Folder for timeline.json, a trace for Chrome or Perfetto of when each rank computed and waited. "
            "The environment variable GALVATRON_TRACE does the same."
        },
    )
    async_save: bool = field(
        default=False,
        metadata={
            "help": "Write checkpoints while training goes on: each rank copies its part to host memory, and waits "
            "only for an earlier checkpoint that is not complete."
        },
    )
    save_full_weights: bool = field(
        default=True,
        metadata={
            "help": "Add the whole weights to checkpoints, gathered by rank 0, for from_pretrained. Without them, "
            "`galvatron checkpoint export` makes them later."
        },
    )
    max_shard_size: str = field(
        default="5GB",
        metadata={"help": "Largest file of whole weights, and the most that rank 0 holds of them at a time."},
    )
    on_save_failure: str = field(
        default="stop",
        metadata={
            "help": 'If a checkpoint cannot be written: "stop" ends training, "continue" goes on without it. Earlier '
            "checkpoints stay complete.",
            "choices": list(SAVE_FAILURE_POLICIES),
        },
    )
    nonfinite_policy: str = field(
        default="stop",
        metadata={
            "help": 'If the loss or a gradient is infinite or not a number: "stop" ends training with an error that '
            'names the origin, "skip" leaves the step out and counts it.',
            "choices": list(NONFINITE_POLICIES),
        },
    )
    packing: str = field(
        default="auto",
        metadata={
            "help": "Compute documents without padding, in packs that are placed on ranks by cost. A step keeps its "
            'sequences. "auto" packs if the collator only pads token rows, "static" packs or explains why it cannot, '
            '"none" never packs.',
            "choices": list(PACKING_MODES),
        },
    )
    max_tokens_per_rank: int | None = field(
        default=None,
        metadata={
            "help": "Most tokens of a pack, and of a document (default: those of the plan's padded micro-batches of "
            "the dataset's longest rows)."
        },
    )
    long_sequences: str = field(
        default="error",
        metadata={
            "help": 'Documents above max_tokens_per_rank: "truncate" keeps their beginning, "split" makes documents '
            'of their parts, "error" ends training. Cut documents are logged as cut_sequences.',
            "choices": list(LONG_SEQUENCES),
        },
    )
    pack_to_multiple_of: int | None = field(
        default=None,
        metadata={
            "help": "Fill packs up to a multiple of this number of tokens (default: 64 on a GPU, 1 on the CPU)."
        },
    )
    placement_planner: str = field(
        default="longest_first",
        metadata={
            "help": 'Algorithm that places packed documents: "longest_first" improves the better of two heuristics, '
            '"karmarkar_karp" is one of them, "exact" solves small cases optimally. If it fails, a step keeps the '
            "sampler's order.",
            "choices": list(PLANNERS),
        },
    )
    expert_dispatch: str = field(
        default="plain",
        metadata={
            "help": 'How rows travel to experts of other ranks: "plain" sends each, "lsh" sends the mean of rows that '
            'are alike (LSH-MoE), "auto" measures again and again which takes less time. The mean changes what '
            "training computes; evaluation sends each row.",
            "choices": list(DISPATCHES),
        },
    )
    lsh_hashes: int = field(
        default=8,
        metadata={"help": "Hashes that rows have in common to be alike; more of them leave less to save."},
    )
    lsh_width: int = field(default=32, metadata={"help": "Numbers that a hash projects a row to."})
    lsh_seed: int = field(default=0, metadata={"help": "Seed of the hashes."})
    lsh_max_residual: float | None = field(
        default=None,
        metadata={
            "help": "Most that a row may differ from the mean that is sent for it, as a part of its norm; rows of "
            "which one differs by more are sent each (default: no limit)."
        },
    )
    model_init_kwargs: dict[str, Any] | str | None = field(
        default=None,
        metadata={
            "help": "Keyword arguments of from_pretrained for a model given by name, such as dtype, revision and "
            "attn_implementation; a dictionary or JSON."
        },
    )

    def to_dict(self) -> dict[str, Any]:
        """Returns the arguments as plain values; a plan becomes its JSON."""
        values = super().to_dict()
        if isinstance(self.parallel_plan, ParallelPlan):
            values["parallel_plan"] = self.parallel_plan.to_json()
        return values


@dataclass
class GalvatronSeq2SeqTrainingArguments(Seq2SeqTrainingArguments, GalvatronTrainingArguments):
    """Adds the plan to [`~transformers.Seq2SeqTrainingArguments`], see [`GalvatronTrainingArguments`]."""


def requested_plan(args: TrainingArguments) -> ParallelPlan | None:
    """Returns the plan that the arguments give; None for "auto". A file that is not a plan raises ValueError."""
    plan = getattr(args, "parallel_plan", "auto")
    if plan is None or plan == "auto":
        return None
    if isinstance(plan, ParallelPlan):
        return with_micro_batches(plan, args)
    try:
        return with_micro_batches(ParallelPlan.from_json(plan), args)
    except ValueError as error:
        raise ValueError(f"parallel_plan={str(plan)!r}: {error}") from error


def batch_rows_of(args: TrainingArguments) -> int:
    """Returns the rows of one batch of a step on all ranks together; a step has `gradient_accumulation_steps`."""
    given = getattr(args, "global_batch_size", None)
    if given is not None:
        return given // args.gradient_accumulation_steps
    return args.train_batch_size * (1 if args.accelerator_config.split_batches else args.world_size)


def step_rows(args: TrainingArguments) -> int:
    """Returns the rows of an optimizer step on all ranks together."""
    return batch_rows_of(args) * args.gradient_accumulation_steps


def with_micro_batches(plan: ParallelPlan, args: TrainingArguments) -> ParallelPlan:
    """Returns the plan with the micro-batches of the arguments, if it does not say how many there are."""
    return plan if plan.micro_batches is not None else replace(plan, micro_batches=args.gradient_accumulation_steps)


def nonfinite_policy(args: TrainingArguments) -> str:
    """Returns `nonfinite_policy` of the arguments, "stop" for plain `TrainingArguments`."""
    return getattr(args, "nonfinite_policy", "stop")


def packing_mode(args: TrainingArguments) -> str:
    """Returns the packing mode; the `packing` of TRL's arguments, True or False, packs the dataset instead."""
    packing = getattr(args, "packing", "auto")
    return "auto" if isinstance(packing, bool) else packing


def with_precision(plan: ParallelPlan, args: TrainingArguments) -> ParallelPlan:
    """Returns the plan with the precision of the arguments, if it has none; raises ValueError if the two differ."""
    if args.bf16 and plan.precision is not None and plan.precision.activations != "bf16":
        raise ValueError(
            f'The plan computes in "{plan.precision.compute}" and the arguments say bf16=True; '
            'set the plan\'s precision.compute to "bf16" or bf16=False.'
        )
    if plan.precision is not None:
        return plan
    return replace(plan, precision=Precision(compute="bf16" if args.bf16 else "fp32"))


def compile_options(plugin: TorchDynamoPlugin, plan: ParallelPlan | None) -> dict[str, Any] | None:
    """Returns the options for `torch.compile`, from the arguments or from `accelerate launch`; None if nothing is
    compiled. Raises ValueError for what a plan does not support; `plan` is None before a search.
    """
    if plugin.backend == DynamoBackend.NO:
        return None
    options = plugin.to_kwargs()
    require_compilable(plan, options["backend"], options.get("mode"))
    return options


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
    for name in ("max_tokens_per_rank", "pack_to_multiple_of"):
        value = getattr(args, name, None)
        if value is not None and (type(value) is not int or value < 1):
            yield f"{name} {value!r} is not a number of tokens; use a positive integer, or leave it out."
