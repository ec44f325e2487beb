# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Loading of checkpoints that were written under a plan into a model without a plan."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from galvatron_hf.checkpoint.folder import STATE_FOLDER
from galvatron_hf.models.families import adapter_for
from galvatron_hf.models.fused_weights import FusedNames
from galvatron_hf.models.lora import inner_model
from galvatron_hf.parallel.weights.distributed_state import load_plain_state, parameter_names
from galvatron_hf.plan.serialization import read_object
from galvatron_hf.trainer.checkpoint.checkpointer import unwrapped
from galvatron_hf.trainer.checkpoint.scheduler_state import SCHEDULER_FILE, SchedulerState, group_names


def is_written_under_a_plan(checkpoint: str | None) -> bool:
    """Returns whether a checkpoint holds a distributed state."""
    return checkpoint is not None and os.path.isdir(os.path.join(checkpoint, STATE_FOLDER))


def load_plain_weights(checkpoint: str, model: PreTrainedModel) -> None:
    """Loads the weights of a checkpoint of a plan into a model on one process."""
    load_plain_state(model, None, os.path.join(checkpoint, STATE_FOLDER))


def load_plain_optimizer_and_scheduler(
    checkpoint: str, model: PreTrainedModel, optimizer: torch.optim.Optimizer, scheduler: Any
) -> None:
    """Loads the optimizer and the scheduler of a checkpoint of a plan on one process."""
    optimizer = unwrapped(optimizer)
    load_plain_state(model, optimizer, os.path.join(checkpoint, STATE_FOLDER))
    saved = SchedulerState.from_json(read_object(Path(checkpoint) / SCHEDULER_FILE, "scheduler's state"))
    adapter, model = adapter_for(model), inner_model(model)
    fused = FusedNames.from_model(model, adapter)
    saved.load_into(scheduler, group_names(optimizer, parameter_names(model), fused))
