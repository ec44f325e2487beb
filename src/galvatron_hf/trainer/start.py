# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Checks and preparations before a Trainer trains under a plan."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn
from transformers import Trainer, TrainingArguments
from transformers.utils import logging

from galvatron_hf.models.families import adapter_for
from galvatron_hf.models.lora import check_has_values, computes_in_bf16, has_adapters, inner_model
from galvatron_hf.models.losses import LossKind
from galvatron_hf.parallel.comm.objects import is_rank_0
from galvatron_hf.parallel.executor import Batch
from galvatron_hf.parallel.model import ParallelModel
from galvatron_hf.parallel.pipeline.trace import Timeline
from galvatron_hf.parallel.validate import check_model, check_plan
from galvatron_hf.plan import ParallelPlan
from galvatron_hf.plan.supported import require_runnable
from galvatron_hf.trainer.arguments import with_precision
from galvatron_hf.trainer.optimizers import check_elementwise
from galvatron_hf.trainer.overrides import check_overrides, computes_batches
from galvatron_hf.trainer.planning.auto_planner import AutoPlanner


logger = logging.get_logger(__name__)


def start_group_of_one(device: torch.device) -> None:
    """Makes this process a world of one rank, so that a plan for one rank runs without a launcher."""
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def check_trainer(trainer: Trainer, given: ParallelPlan | None, planner: AutoPlanner) -> None:
    """Refuses a Trainer that cannot train under a plan, before its model is changed. The ValueError is one sentence
    with the reason and the fix. If no plan is given, the planner makes a simple one: a model that fits it fits a
    search's plan.
    """
    if given is not None:
        require_runnable(given, trainer.args.world_size)
    if not dist.is_initialized():
        start_group_of_one(trainer.args.device)
    if trainer.optimizer is not None or trainer.lr_scheduler is not None:
        raise ValueError(
            "optimizers=... holds weights that a plan replaces by shards; pass optimizer_cls_and_kwargs, "
            "or override create_optimizer."
        )
    check_overrides(trainer)
    if trainer.optimizer_cls_and_kwargs is not None:
        check_elementwise(*trainer.optimizer_cls_and_kwargs)
    if given is not None and computes_batches(trainer):
        _warn_of_whole_batches(given, trainer.args)
    adapter, model = adapter_for(trainer.model), inner_model(trainer.model)
    check_has_values(model)
    plan = with_precision(given or planner.plan_without_search(model), trainer.args)
    if computes_in_bf16(model):
        plan = replace(plan, precision=replace(plan.precision, compute="bf16"))
    check_plan(plan)
    check_model(model, adapter, plan)
    if adapter.adds_router_loss(model):
        _check_router_loss(trainer)


def _check_router_loss(trainer: Trainer) -> None:
    """Refuses a loss of routers where Trainer's own step computes the batches of a step one after the other: that loss
    is no sum over batches.
    """
    batches = trainer.args.gradient_accumulation_steps
    if computes_batches(trainer) and trainer.compute_loss_func is None and batches > 1:
        raise ValueError(
            f"{type(trainer).__name__} computes {batches} batches in a step one by one, and the loss of the routers "
            f"(output_router_logits=True of {type(trainer.model).__name__}) is that of all tokens of a step; use "
            "gradient_accumulation_steps=1 with more rows in a batch."
        )


def _warn_of_whole_batches(plan: ParallelPlan, args: TrainingArguments) -> None:
    """Warns that a plan's micro-batches do not bound memory where Trainer's own step computes whole batches."""
    batches = args.gradient_accumulation_steps
    if len(plan.rank_groups) == 1 and plan.micro_batch_count > batches and args.should_log:
        logger.warning(
            f"micro_batches={plan.micro_batch_count} of the plan is not used: Trainer's own step computes "
            f"whole batches, {batches} in a step; raise gradient_accumulation_steps to need less memory."
        )


def with_fp32_weights(model: nn.Module, plan: ParallelPlan) -> ParallelPlan:
    """Converts the master weights of a model that was loaded in bf16, but for one with adapters, of which
    [`parallelize`] converts the trained ones; returns the plan to compute it in bf16.
    """
    if not computes_in_bf16(model):
        return plan
    if not has_adapters(model):
        if is_rank_0():
            logger.warning("The model was loaded in bf16; its master weights are kept in fp32 from here on.")
        model.float()
    return replace(plan, precision=replace(plan.precision, compute="bf16"))


@contextlib.contextmanager
def explained_empty_optimizer(parallel: ParallelModel | None, rank: int) -> Iterator[None]:
    """Explains the ValueError of an optimizer that is made on a rank without trained weights, and names the fix."""
    try:
        yield
    except ValueError as error:
        if "empty parameter list" not in str(error) or parallel is None or parallel.pipeline is None:
            raise
        raise ValueError(
            f"Nothing is trained in the stages of rank {rank}, and this optimizer takes no empty list; give it groups "
            "({'params': [...]}), which may be empty."
        ) from error


@contextlib.contextmanager
def explained_weights() -> Iterator[None]:
    """Explains PyTorch's error about a tensor of which this rank has a part, in a step of the user's own."""
    try:
        yield
    except RuntimeError as error:
        if "DTensor" not in str(error) and "DeviceMesh" not in str(error):
            raise
        raise ValueError(
            "A loss or step computes with the model's weights, of which this rank has a part; use weight_decay, or "
            "change gradients in a callback's on_pre_optimizer_step."
        ) from error


@contextlib.contextmanager
def traced(timeline: Timeline, folder: str | os.PathLike | None) -> Iterator[None]:
    """Records the timeline of the body, and writes that of all ranks to a folder, if one is given; collective."""
    if not folder:
        yield
        return
    timeline.on = True
    try:
        yield
    finally:
        timeline.on = False
    timeline.write(folder)


def require_labels(batch: Batch, loss: LossKind) -> None:
    """Raises ValueError for a padded batch without the labels of a loss."""
    if isinstance(batch, dict) and not loss.is_labelled(batch):
        raise ValueError(
            f"The batch has no labels, only {sorted(batch)}, so there is no loss to train on; "
            "use DataCollatorForLanguageModeling(tokenizer, mlm=False) or add a labels column."
        )
