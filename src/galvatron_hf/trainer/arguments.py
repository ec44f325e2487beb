# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Training arguments, and what a run reads from them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from accelerate.utils import DynamoBackend, TorchDynamoPlugin
from transformers import Seq2SeqTrainingArguments, TrainingArguments

from galvatron_hf.data.packing import LONG_SEQUENCES
from galvatron_hf.data.placement import PLANNERS
from galvatron_hf.plan import ParallelPlan, Precision
from galvatron_hf.plan.plan_words import PlanWords, check_is_plan
from galvatron_hf.plan.supported import require_compilable
from galvatron_hf.profiler.measure.rounds import WANTED_ERROR
from galvatron_hf.trainer.expert_dispatch import DISPATCHES


NONFINITE_POLICIES = ("stop", "skip")
SAVE_FAILURE_POLICIES = ("stop", "continue")
PACKING_MODES = ("auto", "static", "dynamic", "none")


@dataclass
class GalvatronTrainingArguments(TrainingArguments):
    """Adds a plan to [`~transformers.TrainingArguments`]; each field's `help` describes it. `parallel_plan` may also
    be a [`ParallelPlan`]. With "auto", one process trains without parallelism.
    """

    _VALID_DICT_FIELDS = [*TrainingArguments._VALID_DICT_FIELDS, "model_init_kwargs"]

    parallel_plan: str | None = field(
        default="auto",
        metadata={
            "help": 'The path of a plan; a plan in words for all layers, such as "ddp", "zero3" or "tp4+pp2+mb8"; or '
            '"auto", which measures the machine and the model and trains under the fastest plan that a search finds.'
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
            'sequences. "auto" packs if the collator only pads or masks tokens, "static" packs or explains why it '
            'cannot, "dynamic" also lets ranks share long documents, in groups chosen for each micro-batch, "none" '
            'never packs. "auto" is "dynamic" where documents exceed max_tokens_per_rank or are so long that other '
            "ranks would wait.",
            "choices": list(PACKING_MODES),
        },
    )
    max_tokens_per_rank: int | None = field(
        default=None,
        metadata={
            "help": "Most tokens of a pack, and of a document that ranks do not share (default: those of the plan's "
            "padded micro-batches of the dataset's longest rows)."
        },
    )
    long_sequences: str = field(
        default="error",
        metadata={
            "help": "Documents above max_tokens_per_rank, or above what ranks hold together that may share one (under "
            'packing="dynamic" or a plan with context): "truncate" keeps their beginning, "split" makes documents '
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
    per_step: bool = field(
        default=False,
        metadata={
            "help": "Choose for each packed step whether layers are recomputed: with recompute a rank holds more "
            "tokens, so that long documents need fewer micro-batches or ranks; without, a step of short ones is "
            "faster. Both ways are timed at the start. With parallel_plan='auto' a step may also be computed under "
            "another plan, where that is predicted to pay."
        },
    )
    step_plans: list[str] | None = field(
        default=None,
        metadata={
            "help": "Files of further plans under which a step may be computed, with per_step=True: weights move to "
            "the plan's layout before such a step, and gradients back after it. They are timed at the start, and a "
            "step is computed under the plan by which it takes least time, moves included."
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
        if isinstance(self.step_plans, (list, tuple)):
            values["step_plans"] = [
                plan.to_json() if isinstance(plan, ParallelPlan) else plan for plan in self.step_plans
            ]
        return values


@dataclass
class GalvatronSeq2SeqTrainingArguments(Seq2SeqTrainingArguments, GalvatronTrainingArguments):
    """Adds the plan to [`~transformers.Seq2SeqTrainingArguments`], see [`GalvatronTrainingArguments`]."""


def gives_plan(args: TrainingArguments) -> bool:
    """Returns whether the arguments give a plan, or leave it to a search."""
    return getattr(args, "parallel_plan", "auto") not in (None, "auto")


def requested_plan(args: TrainingArguments, stacks: Callable[[], Mapping[str, int]]) -> ParallelPlan | None:
    """Returns the plan that the arguments give; None for "auto". `stacks` returns the model's layers, for a plan in
    words. A file that is not a plan raises ValueError.
    """
    if not gives_plan(args):
        return None
    plan = args.parallel_plan
    if isinstance(plan, ParallelPlan):
        return with_micro_batches(plan, args)
    try:
        if isinstance(plan, (str, os.PathLike)):
            check_is_plan(plan)
            words = PlanWords.from_text(plan)
            if words is not None and not os.path.isfile(plan):
                return with_micro_batches(words.plan(args.world_size, stacks()), args)
        return with_micro_batches(ParallelPlan.from_json(plan), args)
    except ValueError as error:
        raise ValueError(f"parallel_plan={str(plan)!r}: {error}") from error


def requested_step_plans(args: TrainingArguments) -> list[ParallelPlan]:
    """Returns the further plans that the arguments give. A file that is not a plan raises ValueError."""
    found = []
    given = getattr(args, "step_plans", None)
    for index, plan in enumerate(given if isinstance(given, (list, tuple)) else ()):
        try:
            plan = plan if isinstance(plan, ParallelPlan) else ParallelPlan.from_json(plan)
        except ValueError as error:
            raise ValueError(f"step_plans[{index}]={str(plan)!r}: {error}") from error
        found.append(with_micro_batches(plan, args))
    return found


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
