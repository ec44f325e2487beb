# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The components of a Trainer under a plan, and the values and callables of the Trainer that they are given."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel, Trainer, TrainerCallback
from transformers.trainer_callback import CallbackHandler
from transformers.utils import logging

from galvatron_hf.data.lengths import sequence_lengths
from galvatron_hf.data.loader import read_once
from galvatron_hf.models.families import adapter_for
from galvatron_hf.models.lora import inner_model
from galvatron_hf.parallel.comm.objects import is_rank_0
from galvatron_hf.parallel.model import ParallelModel
from galvatron_hf.parallel.validate import check_model, check_plan, sharing_obstacle
from galvatron_hf.plan import ParallelPlan, SequenceGroups
from galvatron_hf.profiler.trace.small_models import empty_model
from galvatron_hf.profiler.trace.training_flops import TrainingFlops
from galvatron_hf.trainer.arguments import nonfinite_policy, packing_mode, requested_step_plans
from galvatron_hf.trainer.checkpoint.checkpointer import Checkpointer
from galvatron_hf.trainer.data.dataset_rows import DatasetRows
from galvatron_hf.trainer.data.packing_rules import (
    ASKED,
    PackingRules,
    is_padding_collator,
)
from galvatron_hf.trainer.data.step_packer import StepPacker
from galvatron_hf.trainer.data.step_plans import require_one_layout
from galvatron_hf.trainer.evaluation import Evaluator
from galvatron_hf.trainer.expert_dispatch import ExpertDispatch, dispatch_mode, lsh_options
from galvatron_hf.trainer.fault.nonfinite_guard import NonfiniteGuard
from galvatron_hf.trainer.overrides import computes_batches, has_custom_step, overrides, replaced
from galvatron_hf.trainer.planning.auto_planner import AutoPlanner
from galvatron_hf.trainer.planning.pace import Pace
from galvatron_hf.trainer.planning.sequence_groups import with_sequence_groups
from galvatron_hf.trainer.planning.step_meter import is_predicted, prediction
from galvatron_hf.utils.progress import tell


if TYPE_CHECKING:
    from galvatron_hf.trainer.mixin import GalvatronMixin


logger = logging.get_logger(__name__)

_PREPARE = ("_prepare_inputs", "_prepare_input")  # Trainer's methods that batches go through


@dataclass(frozen=True, kw_only=True)
class Components:
    """Holds the components that work on a parallelised model."""

    packer: StepPacker
    guard: NonfiniteGuard
    evaluator: Evaluator
    checkpointer: Checkpointer
    dispatch: ExpertDispatch
    pace: Pace

    @classmethod
    def from_trainer(cls, trainer: GalvatronMixin) -> Components:
        """Makes the components of a Trainer whose model has been parallelised."""
        parallel, args = trainer.parallel, trainer.args

        def count_items(batches: list) -> torch.Tensor | None:
            return trainer._get_num_items_in_batch(batches, args.device)

        def prepare(batch: dict[str, Any]) -> dict[str, Any]:
            return trainer._prepare_inputs(batch)

        def prepare_for_step(batch: dict[str, Any]) -> dict[str, Any]:
            """Leaves the mask in the host's memory, where the runner reads it without waiting for the device."""
            prepared = prepare(batch)
            if "attention_mask" in batch and not any(overrides(trainer, name) for name in _PREPARE):
                prepared["attention_mask"] = batch["attention_mask"]
            return prepared

        pace = _pace(trainer)
        packer = StepPacker(
            parallel=parallel,
            args=args,
            rules=PackingRules(
                parallel=parallel,
                mode=lambda: packing_mode(trainer.args),
                only_pads=lambda: is_padding_collator(trainer.data_collator),
                obstacle=lambda: trainer_obstacle(trainer),
            ),
            known_lengths=lambda: _known_lengths(trainer),
            dataset_rows=lambda: dataset_rows(trainer),
            prepare=prepare_for_step,
            count=pace.count,
            plans=trainer._step_plans,
            may_change=lambda: has_callbacks_of_others(trainer),
            stateful_loader=trainer.accelerator.dataloader_config.use_stateful_dataloader,
        )
        guard = NonfiniteGuard(
            parallel=parallel,
            policy=lambda: nonfinite_policy(trainer.args),
            compute=lambda step: trainer._forward_backward(step),
            dataset_rows=lambda: dataset_rows(trainer),
            computing=lambda step: packer.plans.model(step.plan),
        )
        evaluator = Evaluator(
            parallel=parallel,
            args=args,
            label_names=lambda: trainer.label_names,
            prepare=prepare,
            count_items=count_items,
            pack=packer.pack_for_evaluation,
            pack_for_logits=packer.pack_for_logits,
        )
        checkpointer = Checkpointer(
            parallel=parallel,
            args=args,
            save_files=lambda model, folder, weights: _save_files(trainer, model, folder, weights),
            takes_weights=lambda: overrides(trainer, "_save"),
            make_optimizer=lambda model: _make_optimizer(trainer, model),
            write_model=lambda folder: trainer.save_model(folder, _internal_call=True),
            random_state=packer.random_state,
            save_more=packer.save,
        )
        dispatch = ExpertDispatch(
            parallel=parallel,
            options=lsh_options(args),
            mode=dispatch_mode(args),
            tell=lambda text: trainer.is_world_process_zero() and tell(text, not args.disable_tqdm, result=True),
        )
        return cls(
            packer=packer,
            guard=guard,
            evaluator=evaluator,
            checkpointer=checkpointer,
            dispatch=dispatch,
            pace=pace,
        )


def _pace(trainer: GalvatronMixin) -> Pace:
    parallel, args = trainer.parallel, trainer.args
    plan, rows = parallel.plan, trainer._planner.rows_of_step
    return Pace(
        device=args.device,
        devices=args.world_size,
        dtype=parallel.resolved.precision.compute,
        flops=lambda: _training_flops(parallel),
        predicted=prediction(plan) if is_predicted(plan, rows) else None,
        waits=None if parallel.pipeline is None else parallel.timeline.waits,
    )


def _training_flops(parallel: ParallelModel) -> TrainingFlops | None:
    """Returns the FLOPs of a model; None, with a warning, for a family in which they cannot be counted."""
    try:
        return TrainingFlops.of(empty_model(parallel.model.config, parallel.family))
    except Exception as error:  # of a family's forward: any; training needs no MFU
        if is_rank_0():
            logger.warning_once(
                f"mfu_percent is not logged, because the FLOPs of {parallel.family.__name__} cannot be counted "
                f"({type(error).__name__}: {' '.join(str(error).split())[:120]})."
            )
        return None


def auto_planner(trainer: GalvatronMixin) -> AutoPlanner:
    """Makes the planner that `parallel_plan="auto"` uses."""

    def packing() -> tuple[str, bool]:
        mode = packing_mode(trainer.args)
        return mode, mode in ASKED or (mode == "auto" and is_padding_collator(trainer.data_collator))

    return AutoPlanner(
        args=trainer.args,
        dataset=lambda: trainer.train_dataset,
        packing=packing,
        shares=lambda model: sharing_obstacle_of(trainer, model) is None,
        whole_batches=computes_batches(trainer),
    )


def dataset_rows(trainer: Trainer) -> DatasetRows:
    """Returns the finder of the dataset rows of each step, for the current data loader."""
    return DatasetRows(trainer.callback_handler.train_dataloader, trainer.args.gradient_accumulation_steps)


def _known_lengths(trainer: Trainer) -> np.ndarray | None:
    if trainer.train_dataset is None:
        return None
    return sequence_lengths(trainer.train_dataset, length_column=trainer.args.length_column_name)


def row_lengths(trainer: Trainer) -> np.ndarray:
    """Returns the tokens of the training set's rows as rank 0 knows them, empty if it does not; collective."""
    found = read_once(lambda: _known_lengths(trainer))
    return np.zeros(0, dtype=np.int64) if found is None else found


def sharing_obstacle_of(trainer: Trainer, model: nn.Module) -> str | None:
    """Returns why data ranks cannot share the documents of this Trainer's batches, or None."""
    if not is_padding_collator(trainer.data_collator):
        return "the collator does more than padding"
    model = inner_model(model)
    return trainer_obstacle(trainer) or sharing_obstacle(model, adapter_for(model))


def with_groups(
    trainer: GalvatronMixin, plan: ParallelPlan, model: nn.Module, known: SequenceGroups | None = None
) -> ParallelPlan:
    """Returns a plan under which ranks may share documents, if the arguments say so; collective. `known` are the
    groups of the search that found the plan.
    """
    return with_sequence_groups(
        plan,
        trainer.args,
        inner_model(model).config,
        obstacle=lambda: sharing_obstacle_of(trainer, model),
        lengths=lambda: row_lengths(trainer),
        known=known,
    )


def step_plans_of(trainer: GalvatronMixin) -> list[ParallelPlan]:
    """Returns further plans under which steps may be computed: given ones, the checkpoint's, or those of the search
    that found the plan. Plans that cannot run raise ValueError; collective.
    """
    args, model = trainer.args, trainer.model
    if not getattr(args, "per_step", False):
        return []
    found = requested_step_plans(args)
    if not found and trainer._requested_plan is None:
        known = trainer._planner.step_plans if trainer._resumed_plan is None else trainer._resumed_step_plans
        found = [replace(plan, precision=None, sequence_groups=None) for plan in known]
    found = [with_groups(trainer, plan, model) for plan in found]
    if found:
        require_one_layout(args, model)
    for plan in found:
        check_plan(plan)
        check_model(inner_model(model), adapter_for(inner_model(model)), plan)
    return found


def has_callbacks_of_others(trainer: Trainer) -> bool:
    """Returns whether there are callbacks of unknown effect: one may change the dataset, as a curriculum does."""
    modules = {type(callback).__module__.split(".")[0] for callback in trainer.callback_handler.callbacks}
    return not modules <= {"transformers", "galvatron_hf"}


def trainer_obstacle(trainer: Trainer) -> str | None:
    """Returns why the Trainer's methods or arguments forbid packing, or None."""
    if has_custom_step(trainer):
        return "a custom loss or training step sees rows, not documents"
    if computes_batches(trainer):
        return "a step's loss is divided by the number of its batches, not of their targets"
    if any(overrides(trainer, name) for name in _PREPARE):
        return "the Trainer's own preparation of inputs sees rows, not documents"
    if trainer.neftune_noise_alpha is not None:
        return "NEFTune's noise depends on the length of the padded rows"
    return None


@contextlib.contextmanager
def added_callback(handler: CallbackHandler, callback: TrainerCallback) -> Iterator[None]:
    """Keeps a callback in the handler while the body runs."""
    handler.add_callback(callback)
    try:
        yield
    finally:
        handler.remove_callback(callback)


def _save_files(trainer: Trainer, model: PreTrainedModel, folder: str, weights: dict[str, torch.Tensor]) -> None:
    """Has Trainer save a model that has the family's own parameter names, and perhaps no values."""
    with replaced(trainer, model=model):
        trainer._save(folder, state_dict=weights)


def _make_optimizer(trainer: Trainer, model: PreTrainedModel) -> torch.optim.Optimizer:
    with replaced(trainer, model=model, optimizer=None):
        return trainer.create_optimizer()
