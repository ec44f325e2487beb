# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The components of a Trainer under a plan, and the values and callables of the Trainer that they are given."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import PreTrainedModel, Trainer, TrainerCallback
from transformers.trainer_callback import CallbackHandler

from galvatron_hf.data.lengths import sequence_lengths
from galvatron_hf.trainer.arguments import nonfinite_policy, packing_mode
from galvatron_hf.trainer.checkpoint.checkpointer import Checkpointer
from galvatron_hf.trainer.data.dataset_rows import DatasetRows
from galvatron_hf.trainer.data.global_batches import as_one_process
from galvatron_hf.trainer.data.packing_rules import PackingRules, is_padding_collator
from galvatron_hf.trainer.data.step_packer import StepPacker
from galvatron_hf.trainer.evaluation import Evaluator
from galvatron_hf.trainer.fault.nonfinite_guard import NonfiniteGuard
from galvatron_hf.trainer.loss.custom_loss import CustomLoss
from galvatron_hf.trainer.planning.auto_planner import AutoPlanner


if TYPE_CHECKING:
    from galvatron_hf.trainer.trainer import GalvatronMixin


_PREPARE = ("_prepare_inputs", "_prepare_input")  # Trainer's methods that batches go through


@dataclass(frozen=True, kw_only=True)
class Components:
    """Holds the components that work on a parallelised model."""

    packer: StepPacker
    custom_loss: CustomLoss
    guard: NonfiniteGuard
    evaluator: Evaluator
    checkpointer: Checkpointer

    @classmethod
    def from_trainer(cls, trainer: GalvatronMixin) -> Components:
        """Makes the components of a Trainer whose model has been parallelised."""
        parallel, args = trainer.parallel, trainer.args

        def count_items(batches: list) -> torch.Tensor | None:
            return trainer._get_num_items_in_batch(batches, args.device)

        def prepare(batch: dict[str, Any]) -> dict[str, Any]:
            return trainer._prepare_inputs(batch)

        def compute_loss(*inputs: Any, **options: Any) -> Any:
            with as_one_process(trainer.args):
                return trainer.compute_loss(*inputs, **options)

        packer = StepPacker(
            parallel=parallel,
            args=args,
            rules=PackingRules(
                parallel=parallel,
                mode=lambda: packing_mode(trainer.args),
                only_pads=lambda: is_padding_collator(trainer.data_collator),
                obstacle=lambda: packing_obstacle(trainer),
            ),
            known_lengths=lambda: _known_lengths(trainer),
            dataset_rows=lambda: dataset_rows(trainer),
            prepare=prepare,
            stateful_loader=trainer.accelerator.dataloader_config.use_stateful_dataloader,
        )
        custom_loss = CustomLoss(
            parallel=parallel,
            compute_loss=compute_loss,
            count_items=count_items,
            declared=lambda: trainer.loss_is_scaled_for_ga,
            name=type(trainer).__name__,
        )
        guard = NonfiniteGuard(
            parallel=parallel,
            policy=lambda: nonfinite_policy(trainer.args),
            compute=lambda step: trainer._forward_backward(step),
            dataset_rows=lambda: dataset_rows(trainer),
        )
        evaluator = Evaluator(
            parallel=parallel,
            args=args,
            prepare=prepare,
            count_items=count_items,
            pack=packer.pack_for_evaluation,
            custom_loss=lambda: custom_loss if has_custom_loss(trainer) else None,
        )
        checkpointer = Checkpointer(
            parallel=parallel,
            args=args,
            save_files=lambda model, folder: _save_files(trainer, model, folder),
            make_optimizer=lambda model: _make_optimizer(trainer, model),
            random_state=packer.random_state,
            save_more=packer.save,
        )
        return cls(packer=packer, custom_loss=custom_loss, guard=guard, evaluator=evaluator, checkpointer=checkpointer)


def auto_planner(trainer: GalvatronMixin) -> AutoPlanner:
    """Makes the planner that `parallel_plan="auto"` uses."""

    def packing() -> tuple[str, bool]:
        mode = packing_mode(trainer.args)
        return mode, mode == "static" or (mode == "auto" and is_padding_collator(trainer.data_collator))

    return AutoPlanner(
        args=trainer.args,
        dataset=lambda: trainer.train_dataset,
        packing=packing,
        world=lambda: trainer._world,
        whole_model=overrides_compute_loss(trainer),
    )


def dataset_rows(trainer: Trainer) -> DatasetRows:
    """Returns the finder of the dataset rows of each step, for the current data loader."""
    return DatasetRows(trainer.callback_handler.train_dataloader, trainer.args.gradient_accumulation_steps)


def _known_lengths(trainer: Trainer) -> np.ndarray | None:
    if trainer.train_dataset is None:
        return None
    return sequence_lengths(trainer.train_dataset, length_column=trainer.args.length_column_name)


def overrides_compute_loss(trainer: Trainer) -> bool:
    """Returns whether a subclass has its own `compute_loss`."""
    return type(trainer).compute_loss is not Trainer.compute_loss


def has_custom_loss(trainer: Trainer) -> bool:
    """Returns whether the loss is a function of logits: `compute_loss_func`, or an own `compute_loss`."""
    return overrides_compute_loss(trainer) or trainer.compute_loss_func is not None


def packing_obstacle(trainer: Trainer) -> str | None:
    """Returns why the Trainer's methods or arguments forbid packing, or None."""
    if has_custom_loss(trainer):
        return "a custom loss sees rows, not documents"
    if any(getattr(type(trainer), name) is not getattr(Trainer, name) for name in _PREPARE):
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


@contextlib.contextmanager
def _replaced(trainer: Trainer, **values) -> Iterator[None]:
    before = {name: getattr(trainer, name) for name in values}
    vars(trainer).update(values)
    try:
        yield
    finally:
        vars(trainer).update(before)


def _save_files(trainer: Trainer, model: PreTrainedModel, folder: str) -> None:
    """Has Trainer save a model without values, which has the family's own parameter names."""
    with _replaced(trainer, model=model):
        trainer._save(folder, state_dict={})


def _make_optimizer(trainer: Trainer, model: PreTrainedModel) -> torch.optim.Optimizer:
    with _replaced(trainer, model=model, optimizer=None):
        return trainer.create_optimizer()
