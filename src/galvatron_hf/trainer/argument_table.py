# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""What a plan makes of each field of [`~transformers.TrainingArguments`]: one row for each.

`docs/reference/arguments.md` shows the rows. A field without a row, as a later version of transformers may add one, is
refused unless it has its default.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from transformers import TrainingArguments


@dataclass(frozen=True)
class Row:
    """Says what becomes of an argument under a plan.

    Attributes:
        kind (`str`): "honoured" as on one process, "refused" by ValueError, or "no effect" on any result.
        how (`str`): how it is honoured, why it is refused or has no effect; empty if there is nothing to say.
    """

    kind: str
    how: str = ""


_AS_TRAINER = Row("honoured")
_HUB = Row("honoured", "rank 0 pushes what all ranks have saved")
_DDP = Row("no effect", "the plan's own sharding takes the place of DistributedDataParallel")
_COMPILE = Row("honoured", "each layer is compiled by itself; modes with CUDA graphs are refused")
_SHARDING = Row("refused", "the plan shards every layer itself")
_SCRIPT = Row("no effect", "scripts read it, and Trainer does not")
_CAST = Row("refused", "it casts the whole model, which would lose the fp32 master weights")
_RECOMPUTE = Row("honoured", "a given plan must recompute every layer, and a search finds one that does")
_RECOMPUTE_OPTIONS = Row("honoured", "`offload` and `every_n_layers` are refused: the plan says what is recomputed")

ARGUMENTS: dict[str, Row] = {
    # ---- Steps and learning rate ----
    "output_dir": _AS_TRAINER,
    "per_device_train_batch_size": Row(
        "honoured", "the rows of a step are this times accumulation times ranks, unless `global_batch_size` is given"
    ),
    "num_train_epochs": _AS_TRAINER,
    "max_steps": _AS_TRAINER,
    "learning_rate": _AS_TRAINER,
    "lr_scheduler_type": _AS_TRAINER,
    "lr_scheduler_kwargs": _AS_TRAINER,
    "warmup_steps": _AS_TRAINER,
    "optim": Row("honoured", "optimizers that treat every element by itself; others are refused"),
    "optim_args": _AS_TRAINER,
    "weight_decay": _AS_TRAINER,
    "adam_beta1": _AS_TRAINER,
    "adam_beta2": _AS_TRAINER,
    "adam_epsilon": _AS_TRAINER,
    "optim_target_modules": Row("no effect", "only optimizers that are refused read it"),
    "gradient_accumulation_steps": Row("honoured", "also the micro-batches of a plan that does not say how many"),
    "average_tokens_across_devices": Row("no effect", "a loss is that of the global batch, as on one process"),
    "max_grad_norm": _AS_TRAINER,
    "label_smoothing_factor": _AS_TRAINER,
    # ---- Precision and memory ----
    "bf16": Row("honoured", "a plan without a precision computes in bf16, with fp32 master weights"),
    "fp16": Row("refused", "it needs loss scaling"),
    "bf16_full_eval": _CAST,
    "fp16_full_eval": _CAST,
    "tf32": _AS_TRAINER,
    "activation_checkpointing": _RECOMPUTE,
    "activation_checkpointing_kwargs": _RECOMPUTE_OPTIONS,
    "gradient_checkpointing": _RECOMPUTE,
    "gradient_checkpointing_kwargs": _RECOMPUTE_OPTIONS,
    "torch_compile": _COMPILE,
    "torch_compile_backend": _COMPILE,
    "torch_compile_mode": _COMPILE,
    "use_liger_kernel": Row("honoured", "but for the loss, which the head of a plan computes itself"),
    "liger_kernel_config": Row("honoured", "`cross_entropy` and `fused_linear_cross_entropy` are refused"),
    "use_cache": Row("no effect", "nothing is cached in training"),
    "neftune_noise_alpha": Row("honoured", "the noise is drawn for whole sequences; rows are not packed"),
    "torch_empty_cache_steps": _AS_TRAINER,
    "auto_find_batch_size": Row("refused", "it changes the batch that the plan was made for"),
    # ---- Logs ----
    "logging_strategy": _AS_TRAINER,
    "logging_steps": _AS_TRAINER,
    "logging_first_step": _AS_TRAINER,
    "log_on_each_node": _AS_TRAINER,
    "logging_nan_inf_filter": Row("honoured", "applies to steps that `nonfinite_policy` lets through"),
    "include_num_input_tokens_seen": Row("honoured", "the tokens of global batches"),
    "log_level": _AS_TRAINER,
    "log_level_replica": _AS_TRAINER,
    "disable_tqdm": Row("honoured", "the plan and the phases of a search are then logged"),
    "report_to": _AS_TRAINER,
    "run_name": _AS_TRAINER,
    "project": _AS_TRAINER,
    "trackio_space_id": _AS_TRAINER,
    "trackio_bucket_id": _AS_TRAINER,
    "trackio_static_space_id": _AS_TRAINER,
    # ---- Evaluation ----
    "eval_strategy": _AS_TRAINER,
    "eval_steps": _AS_TRAINER,
    "eval_delay": _AS_TRAINER,
    "per_device_eval_batch_size": _AS_TRAINER,
    "prediction_loss_only": _AS_TRAINER,
    "eval_on_start": _AS_TRAINER,
    "eval_do_concat_batches": _AS_TRAINER,
    "eval_use_gather_object": Row("no effect", "predictions are tensors of a known layout"),
    "eval_accumulation_steps": _AS_TRAINER,
    "include_for_metrics": _AS_TRAINER,
    "batch_eval_metrics": _AS_TRAINER,
    # ---- Checkpoints ----
    "save_only_model": _AS_TRAINER,
    "save_strategy": _AS_TRAINER,
    "save_steps": _AS_TRAINER,
    "save_on_each_node": Row(
        "honoured", "refused on several nodes: ranks write parts of one checkpoint in a shared folder"
    ),
    "save_total_limit": _AS_TRAINER,
    "enable_jit_checkpoint": Row("refused", "SIGTERM on any rank makes all of them save and stop already"),
    "push_to_hub": _HUB,
    "hub_token": _HUB,
    "hub_private_repo": _HUB,
    "hub_model_id": _HUB,
    "hub_strategy": _HUB,
    "hub_always_push": _HUB,
    "hub_revision": _HUB,
    "load_best_model_at_end": _AS_TRAINER,
    "metric_for_best_model": _AS_TRAINER,
    "greater_is_better": _AS_TRAINER,
    "ignore_data_skip": _AS_TRAINER,
    "restore_callback_states_from_checkpoint": _AS_TRAINER,
    # ---- Random numbers and devices ----
    "full_determinism": _AS_TRAINER,
    "seed": _AS_TRAINER,
    "data_seed": _AS_TRAINER,
    "use_cpu": _AS_TRAINER,
    "accelerator_config": Row(
        "honoured", "`dispatch_batches` and `even_batches` have no effect: rank 0 reads whole global batches"
    ),
    "parallelism_config": _SHARDING,
    # ---- Data ----
    "dataloader_drop_last": _AS_TRAINER,
    "dataloader_num_workers": Row("honoured", "on rank 0, which reads for all ranks"),
    "dataloader_pin_memory": _AS_TRAINER,
    "dataloader_persistent_workers": _AS_TRAINER,
    "dataloader_prefetch_factor": _AS_TRAINER,
    "dataloader_multiprocessing_context": _AS_TRAINER,
    "dataloader_in_order": _AS_TRAINER,
    "remove_unused_columns": _AS_TRAINER,
    "label_names": _AS_TRAINER,
    "train_sampling_strategy": Row("honoured", "'batch_rebalance' is refused: the plan places rows on ranks"),
    "length_column_name": _AS_TRAINER,
    # ---- Distribution ----
    "ddp_find_unused_parameters": _DDP,
    "ddp_bucket_cap_mb": _DDP,
    "ddp_broadcast_buffers": _DDP,
    "ddp_static_graph": _DDP,
    "ddp_backend": _AS_TRAINER,
    "ddp_timeout": Row("honoured", "also of the watchdog and of the meetings before collective calls"),
    "fsdp": _SHARDING,
    "fsdp_config": Row("no effect", "only `fsdp` reads it"),
    "deepspeed": _SHARDING,
    # ---- The rest ----
    "debug": Row("honoured", "'underflow_overflow' is refused: its hooks read whole weights; see `nonfinite_policy`"),
    "skip_memory_metrics": Row("honoured", "the memory is that of the rank that logs"),
    "do_train": _SCRIPT,
    "do_eval": Row("no effect", "Trainer sets it from `eval_strategy`, and scripts read it"),
    "do_predict": _SCRIPT,
    "resume_from_checkpoint": _SCRIPT,
    "local_rank": Row("no effect", "launchers set LOCAL_RANK"),
}


def unknown_arguments(args: TrainingArguments) -> Iterator[str]:
    """Yields refusals of fields that have no row and are not at their default."""
    for one in dataclasses.fields(TrainingArguments):
        default = one.default if one.default_factory is dataclasses.MISSING else one.default_factory()
        value = getattr(args, one.name, default)
        if one.name not in ARGUMENTS and value != default:
            yield (
                f"{one.name}={value!r} is an argument of this version of transformers that is not known to be right "
                f"under a parallel plan; leave it at {default!r}."
            )


def as_markdown() -> str:
    """Returns the table of `docs/reference/arguments.md`."""
    rows = (f"| `{name}` | {row.kind} | {row.how} |" for name, row in ARGUMENTS.items())
    return "\n".join(["| Argument | Under a plan | |", "|---|---|---|", *rows])
