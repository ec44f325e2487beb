# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Saving and resuming under a plan: Hugging Face files for everybody, a distributed checkpoint for any plan."""

from __future__ import annotations

import json
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers.utils import logging

from galvatron_hf.parallel.checkpoint import (
    load_state,
    load_whole_weights,
    plain_model,
    read_whole_weights,
    save_state,
    whole_weights,
)
from galvatron_hf.plan import ParallelPlan


logger = logging.get_logger(__name__)

STATE_FOLDER = "parallel_state"
PLAN_FILE = "parallel_plan.json"
SCHEDULER_FILE = "scheduler.json"


def plan_of_checkpoint(folder: str, world_size: int) -> ParallelPlan | None:
    """The plan that a checkpoint was written under, if it is one for `world_size` ranks."""
    path = os.path.join(folder, PLAN_FILE)
    if not os.path.isfile(path):
        return None
    plan = ParallelPlan.from_json(path)
    return plan if plan.world_size == world_size else None


class CheckpointMixin:
    """The part of [`GalvatronMixin`] that saves and loads; see there."""

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Writes safetensors, configuration and tokenizer that `from_pretrained` opens anywhere; collective."""
        self.ensure_parallel()
        if self.parallel is None:
            super().save_model(output_dir, _internal_call)
            return
        output_dir = output_dir or self.args.output_dir
        weights = whole_weights(self.parallel)
        if self.args.should_save:
            if not weights:
                raise ValueError("save_on_each_node=True is not supported under a plan; use a shared output_dir.")
            self._save_whole(output_dir, weights)
            self.parallel.plan.to_json(os.path.join(output_dir, PLAN_FILE))
        dist.barrier()
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_whole(self, output_dir: str, weights: dict[str, torch.Tensor]) -> None:
        """Trainer's own saving, of a plain model: the parallelised one has parts where the family has one weight."""
        parallel, self.model = self.model, plain_model(self.parallel, weights, device=torch.device("cpu"))
        try:
            self._save(output_dir)
        finally:
            self.model = parallel

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.parallel is None:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        save_state(self.parallel, _unwrapped(self.optimizer), os.path.join(output_dir, STATE_FOLDER))
        if self.args.should_save:
            with open(os.path.join(output_dir, SCHEDULER_FILE), "w") as file:
                json.dump(self._scheduler_state(), file, indent=2)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        self.ensure_parallel()
        if self.parallel is None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        state = os.path.join(resume_from_checkpoint, STATE_FOLDER)
        if os.path.isdir(state):
            load_state(self.parallel, None, state)
        else:
            load_whole_weights(self.parallel, read_whole_weights(resume_from_checkpoint))

    def _load_best_model(self) -> None:
        if self.parallel is None:
            super()._load_best_model()
            return
        logger.info(f"Loading best model from {self.state.best_model_checkpoint} (score: {self.state.best_metric}).")
        self._load_from_checkpoint(self.state.best_model_checkpoint)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if self.parallel is None or checkpoint is None:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        state = os.path.join(checkpoint, STATE_FOLDER)
        if not os.path.isdir(state):
            logger.warning(f"{checkpoint} has no {STATE_FOLDER}, so the optimizer starts anew.")
            return
        load_state(self.parallel, _unwrapped(self.optimizer), state)
        with open(os.path.join(checkpoint, SCHEDULER_FILE)) as file:
            self._load_scheduler_state(json.load(file))

    # ---- Scheduler: by parameter, because a plan decides how many groups the optimizer has ----

    def _scheduler_state(self) -> dict[str, Any]:
        state = {
            name: value
            for name, value in self.lr_scheduler.state_dict().items()
            if isinstance(value, (int, float, str, bool, type(None)))
        }
        rates = {}
        groups = zip(self.optimizer.param_groups, *self._rates_of_groups(), strict=True)
        for group, base, last in groups:
            for name in self._group_names(group):
                rates[name] = [base, last]
        return {"state": state, "rates": rates}

    def _load_scheduler_state(self, saved: dict[str, Any]) -> None:
        state = self.lr_scheduler.state_dict()
        state.update({name: value for name, value in saved["state"].items() if name in state})
        rates = [saved["rates"][self._group_names(group)[0]] for group in self.optimizer.param_groups]
        if "base_lrs" in state:
            state["base_lrs"] = [base for base, _ in rates]
        if "_last_lr" in state:
            state["_last_lr"] = [last for _, last in rates]
        self.lr_scheduler.load_state_dict(state)

    def _rates_of_groups(self) -> tuple[list[float], list[float]]:
        last = [float(group["lr"]) for group in self.optimizer.param_groups]
        return [float(rate) for rate in getattr(self.lr_scheduler, "base_lrs", last)], last

    def _group_names(self, group: dict[str, Any]) -> list[str]:
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        return [names[id(parameter)] for parameter in group["params"]]


def _unwrapped(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer inside accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)
