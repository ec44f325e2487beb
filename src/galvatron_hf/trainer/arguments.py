# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Training arguments, and what of them cannot go together with a plan."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from accelerate.utils import parse_flag_from_env
from huggingface_hub import split_torch_state_dict_into_shards
from transformers import Seq2SeqTrainingArguments, TrainingArguments

from galvatron_hf.data.packing import LONG_SEQUENCES
from galvatron_hf.data.placement import PLANNERS
from galvatron_hf.plan import ParallelPlan, Precision


# Those that treat every element by itself, so that a step on shards is the step on the whole.
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
    """[`~transformers.TrainingArguments`] with the plan.

    Args:
        parallel_plan (`str` or [`ParallelPlan`], *optional*, defaults to `"auto"`):
            How to parallelise: a plan, the path of one, or "auto", which measures the machine and the model and takes
            the plan that a search finds for them; on one process that is no parallelism.
        profile_dir (`str`, *optional*):
            Where "auto" keeps what it has measured; by default the environment variable `GALVATRON_CACHE`, or
            `~/.cache/galvatron-hf`.
        memory_gib (`float`, *optional*):
            Memory of a rank that "auto" may plan with; by default nearly all of a GPU, or the rank's share of the
            machine's memory.
        trace_dir (`str`, *optional*):
            Folder for `timeline.json`: when each rank computed and waited, as a trace for Chrome or Perfetto. The
            environment variable `GALVATRON_TRACE` says the same.
        async_save (`bool`, *optional*, defaults to `False`):
            Whether checkpoints are written while training goes on: each rank copies its part to host memory and waits
            only for an earlier checkpoint that is not complete yet.
        save_full_weights (`bool`, *optional*, defaults to `True`):
            Whether checkpoints also hold the whole weights, gathered by rank 0, for `from_pretrained`. Without, they
            hold each rank's pieces alone, and `galvatron checkpoint export` puts them together later.
        max_shard_size (`str`, *optional*, defaults to `"5GB"`):
            Largest file of whole weights; also what rank 0 holds of them at a time.
        on_save_failure (`str`, *optional*, defaults to `"stop"`):
            "stop" ends training when a checkpoint cannot be written (disk full, folder gone); "continue" goes on
            without it. Earlier checkpoints stay whole in either case.
        nonfinite_policy (`str`, *optional*, defaults to `"stop"`):
            What becomes of a step whose loss or gradient is infinite or not a number: "stop" ends training with a
            [`NonFiniteError`] that says where it came from, "skip" goes on without it and counts it.
        packing (`str`, *optional*, defaults to `"auto"`):
            Whether documents are computed without padding, side by side in packs, and placed on ranks by what they
            cost. The step's sequences stay the sampler's. "auto" packs where the collator only pads token rows,
            "static" packs or says why it cannot, "none" never packs.
        max_tokens_per_rank (`int`, *optional*):
            Tokens that a data rank computes at a time, and of the longest document. By default as many as the plan's
            micro-batches of the longest rows of the dataset would have if they were padded.
        long_sequences (`str`, *optional*, defaults to `"error"`):
            What becomes of a document with more tokens than that: "truncate" keeps its beginning, "split" makes
            documents of its pieces, "error" ends training. What is cut is counted and logged as `cut_sequences`.
        pack_to_multiple_of (`int`, *optional*):
            Packs are filled up to a multiple of so many tokens, so that few shapes occur; by default 64 on a GPU, 1 on
            the CPU.
        placement_planner (`str`, *optional*, defaults to `"longest_first"`):
            How places are found for packed documents: "longest_first" also starts from Karmarkar-Karp's, takes the
            better one and improves it, "karmarkar_karp" stays with that, "exact" solves small cases to the end. A step
            for which the planner finds nothing keeps the sampler's order, with a warning.
        model_init_kwargs (`dict` or `str`, *optional*):
            For a model that is given by its name: the keyword arguments of `from_pretrained`, such as `dtype`,
            `revision` and `attn_implementation`; a dictionary or JSON.
    """

    _VALID_DICT_FIELDS = [*TrainingArguments._VALID_DICT_FIELDS, "model_init_kwargs"]

    parallel_plan: str | None = field(
        default="auto",
        metadata={"help": 'The plan: the path of a JSON file, or "auto".'},
    )
    profile_dir: str | None = field(
        default=None, metadata={"help": 'Where measurements for "auto" are kept (default: ~/.cache/galvatron-hf).'}
    )
    memory_gib: float | None = field(default=None, metadata={"help": 'Memory of a rank that "auto" may plan with.'})
    trace_dir: str | None = field(
        default=None, metadata={"help": "Folder for a trace of what each rank did when (timeline.json)."}
    )
    async_save: bool = field(
        default=False, metadata={"help": "Write checkpoints in the background while training goes on."}
    )
    save_full_weights: bool = field(
        default=True, metadata={"help": "Put the whole weights into checkpoints, for from_pretrained."}
    )
    max_shard_size: str = field(default="5GB", metadata={"help": "Largest file of whole weights."})
    on_save_failure: str = field(
        default="stop",
        metadata={"help": "When a checkpoint cannot be written.", "choices": list(SAVE_FAILURE_POLICIES)},
    )
    nonfinite_policy: str = field(
        default="stop",
        metadata={
            "help": 'What becomes of a step whose loss or gradient is not finite: "stop" or "skip".',
            "choices": list(NONFINITE_POLICIES),
        },
    )
    packing: str = field(
        default="auto",
        metadata={"help": "Compute documents packed, without padding.", "choices": list(PACKING_MODES)},
    )
    max_tokens_per_rank: int | None = field(
        default=None, metadata={"help": "Tokens that a data rank computes at a time, where documents are packed."}
    )
    long_sequences: str = field(
        default="error",
        metadata={
            "help": "What becomes of documents above max_tokens_per_rank.",
            "choices": list(LONG_SEQUENCES),
        },
    )
    pack_to_multiple_of: int | None = field(
        default=None, metadata={"help": "Packs are filled up to a multiple of so many tokens."}
    )
    placement_planner: str = field(
        default="longest_first",
        metadata={"help": "How places are found for packed documents.", "choices": list(PLANNERS)},
    )
    model_init_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Keyword arguments of from_pretrained for a model given by its name, as JSON."}
    )

    def to_dict(self) -> dict[str, Any]:
        """The arguments as plain values; a plan becomes its JSON."""
        values = super().to_dict()
        if isinstance(self.parallel_plan, ParallelPlan):
            values["parallel_plan"] = self.parallel_plan.to_json()
        return values


@dataclass
class GalvatronSeq2SeqTrainingArguments(Seq2SeqTrainingArguments, GalvatronTrainingArguments):
    """[`~transformers.Seq2SeqTrainingArguments`] with the plan, see [`GalvatronTrainingArguments`]."""


def requested_plan(args: TrainingArguments) -> ParallelPlan | None:
    """The plan that the arguments give; None for "auto".

    Raises:
        ValueError: if the file is no plan.
    """
    plan = getattr(args, "parallel_plan", "auto")
    if plan is None or plan == "auto":
        return None
    if isinstance(plan, ParallelPlan):
        return plan
    try:
        return ParallelPlan.from_json(plan)
    except ValueError as error:
        raise ValueError(f"parallel_plan={str(plan)!r}: {error}") from error


def nonfinite_policy(args: TrainingArguments) -> str:
    """What becomes of a step with numbers that are not finite."""
    return getattr(args, "nonfinite_policy", "stop")


def packing_mode(args: TrainingArguments) -> str:
    """Whether batches are packed; TRL's arguments have a `packing` of their own, True or False, for their dataset."""
    packing = getattr(args, "packing", "auto")
    return "auto" if isinstance(packing, bool) else packing


def with_precision(plan: ParallelPlan, args: TrainingArguments) -> ParallelPlan:
    """The plan with the precision of the arguments where it has none of its own.

    Raises:
        ValueError: if both say something and it differs.
    """
    if args.bf16 and plan.precision is not None and plan.precision.compute != "bf16":
        raise ValueError(
            f'The plan computes in "{plan.precision.compute}" and the arguments say bf16=True; '
            'set the plan\'s precision.compute to "bf16" or bf16=False.'
        )
    if plan.precision is not None:
        return plan
    return replace(plan, precision=Precision(compute="bf16" if args.bf16 else "fp32"))


def check_arguments(args: TrainingArguments, plan: ParallelPlan | None) -> None:
    """Refuses arguments that do not go together with a parallel plan.

    Args:
        args (`TrainingArguments`): the arguments.
        plan ([`ParallelPlan`], *optional*): a given plan; None where it is still to be made.

    Raises:
        ValueError: one sentence with the argument, the reason and what to do.
    """
    for refusal in chain(_refusals(args), _own_refusals(args), _packing_refusals(args)):
        raise ValueError(refusal)
    if args.activation_checkpointing and plan is not None:
        without = [index for index, layer in enumerate(plan.layers) if layer.recompute == "none"]
        if without:
            raise ValueError(
                f"gradient_checkpointing=True recomputes every layer, but layer {without[0]} of the plan has "
                'recompute "none"; set gradient_checkpointing=False or recompute "full" in every layer.'
            )


def _refusals(args: TrainingArguments) -> Iterator[str]:
    """Of arguments that plain Trainer has too."""
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
    if args.torch_compile:
        yield (
            "torch_compile=True is not supported under a parallel plan, because the collectives inside a layer are "
            "not traced yet; set it to False."
        )
    if args.train_sampling_strategy == "batch_rebalance":
        yield (
            "train_sampling_strategy 'batch_rebalance' places rows on ranks itself, which is the plan's part; "
            "use 'random' or 'group_by_length'."
        )
    if args.use_liger_kernel:
        yield "use_liger_kernel=True replaces the modules that a plan cuts; set it to False."


def _own_refusals(args: TrainingArguments) -> Iterator[str]:
    """Of arguments that [`GalvatronTrainingArguments`] adds."""
    policy = nonfinite_policy(args)
    if policy not in NONFINITE_POLICIES:
        yield f"nonfinite_policy {policy!r} is none of {', '.join(NONFINITE_POLICIES)}; use one of these."
    on_save_failure = getattr(args, "on_save_failure", "stop")
    if on_save_failure not in SAVE_FAILURE_POLICIES:
        yield f"on_save_failure {on_save_failure!r} is none of {', '.join(SAVE_FAILURE_POLICIES)}; use one of these."
    try:
        size = getattr(args, "max_shard_size", "5GB")
        split_torch_state_dict_into_shards({}, max_shard_size=size)
    except (ValueError, TypeError) as error:
        yield f"max_shard_size {size!r} is no size ({error}); use a number with a unit, such as '5GB'."


def _packing_refusals(args: TrainingArguments) -> Iterator[str]:
    for name, value, known in (
        ("packing", packing_mode(args), PACKING_MODES),
        ("long_sequences", getattr(args, "long_sequences", LONG_SEQUENCES[0]), LONG_SEQUENCES),
        ("placement_planner", getattr(args, "placement_planner", PLANNERS[0]), PLANNERS),
    ):
        if value not in known:
            yield f"{name} {value!r} is none of {', '.join(known)}; use one of these."
    memory = getattr(args, "memory_gib", None)
    if memory is not None and not 0 < memory < math.inf:
        yield f"memory_gib {memory!r} is no memory of a rank; give GiB above 0, such as 80, or leave it out."
    for name in ("max_tokens_per_rank", "pack_to_multiple_of"):
        value = getattr(args, name, None)
        if value is not None and (type(value) is not int or value < 1):
            yield f"{name} {value!r} is no number of tokens; use a positive integer, or leave it out."
