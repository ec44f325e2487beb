# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Saving and resuming under a plan: Hugging Face files for everybody, a distributed checkpoint for any plan."""

from __future__ import annotations

import json
import os
import shutil
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME
from transformers.utils import logging

from galvatron_hf.parallel.checkpoint import (
    load_plain_state,
    load_state,
    load_whole_weights,
    parameter_names,
    plain_model,
    read_whole_weights,
    save_state,
    shard_optimizer_state,
    whole_weights,
)
from galvatron_hf.parallel.collectives import gather_objects
from galvatron_hf.parallel.fused import FusedNames
from galvatron_hf.parallel.models import adapter_for
from galvatron_hf.parallel.optimizer_state import NamedOptimizerState
from galvatron_hf.plan import ParallelPlan
from galvatron_hf.trainer.scheduler_state import SchedulerState


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
        state = SchedulerState.of(self.lr_scheduler.state_dict(), self._group_names())
        if self.parallel.pipeline is not None:
            state = SchedulerState.of_all_ranks(gather_objects(state))
        if self.args.should_save:
            with open(os.path.join(output_dir, SCHEDULER_FILE), "w") as file:
                json.dump(state.to_json(), file, indent=2)

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
        """Loads what this Trainer wrote under any plan, or what plain Trainer wrote; into a plan or a plain model."""
        if checkpoint is None:
            return
        state = os.path.join(checkpoint, STATE_FOLDER)
        plain_files = [os.path.join(checkpoint, name) for name in (OPTIMIZER_NAME, SCHEDULER_NAME)]
        if os.path.isdir(state):
            optimizer = _unwrapped(self.optimizer)
            if self.parallel is None:
                load_plain_state(self.model, optimizer, state)
            else:
                load_state(self.parallel, optimizer, state, weights=False)  # they came first
            with open(os.path.join(checkpoint, SCHEDULER_FILE)) as file:
                self._load_scheduler(SchedulerState.from_json(json.load(file)))
        elif self.parallel is None:
            super()._load_optimizer_and_scheduler(checkpoint)
        elif all(os.path.isfile(path) for path in plain_files):
            self._load_plain_files(*plain_files)
        else:
            logger.warning(f"{checkpoint} has no optimizer's state, so the optimizer and the scheduler start anew.")

    def _load_plain_files(self, optimizer_file: str, scheduler_file: str) -> None:
        """The `optimizer.pt` and `scheduler.pt` of plain Trainer, into a parallelised model's optimizer."""
        names, fused = self._plain_groups(), self.parallel.fused
        state = NamedOptimizerState.of_file(optimizer_file, names, fused)
        state = shard_optimizer_state(self.parallel, state)
        state.load_into(_unwrapped(self.optimizer), self.parallel.parameter_names(), fused)
        scheduler = torch.load(scheduler_file, map_location="cpu", weights_only=True)
        self._load_scheduler(SchedulerState.of(scheduler, names))

    def _load_scheduler(self, saved: SchedulerState) -> None:
        self.lr_scheduler.load_state_dict(saved.for_groups(self.lr_scheduler.state_dict(), self._group_names()))

    def _group_names(self) -> list[list[str]]:
        """The family's names of the weights in each of the optimizer's groups."""
        if self.parallel is None:
            fused, names = FusedNames.of(self.model, adapter_for(self.model)), parameter_names(self.model)
        else:
            fused, names = self.parallel.fused, self.parallel.parameter_names()
        return [[fused.family_name(names[id(p)]) for p in group["params"]] for group in self.optimizer.param_groups]

    def _plain_groups(self) -> list[list[str]]:
        """As [`_group_names`], of the optimizer that this Trainer would make for the plain model."""
        with torch.device("meta"):
            plain = self.parallel.family(self.parallel.model.config)
        plain.tie_weights()
        trained = {name: tensor.requires_grad for name, tensor in self.parallel.model.named_parameters()}
        if self.parallel.pipeline is not None:
            trained = {name: grad for one in gather_objects(trained) for name, grad in one.items()}
        trained = {self.parallel.fused.family_name(name): grad for name, grad in trained.items()}
        for name, parameter in plain.named_parameters():
            parameter.requires_grad_(trained[name])
        model, optimizer = self.model, self.optimizer
        self.model, self.optimizer = plain, None
        try:
            groups = self.create_optimizer().param_groups
        finally:
            self.model, self.optimizer = model, optimizer
        names = parameter_names(plain)
        return [[names[id(parameter)] for parameter in group["params"]] for group in groups]

    # ---- Random state: rank 0 reads the data, and layers have keyed streams, so that rank 0's is all there is ----

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """As Trainer's; where this rank has no file of its own, rank 0's, or that of a run of one process."""
        if checkpoint is None:
            return
        one, several = "rng_state.pth", f"rng_state_{self.args.process_index}.pth"
        wanted = several if self.args.world_size > 1 else one
        found = [name for name in (wanted, "rng_state_0.pth", one) if os.path.isfile(os.path.join(checkpoint, name))]
        if not found or found[0] == wanted:
            super()._load_rng_state(checkpoint)
            return
        with tempfile.TemporaryDirectory() as folder:
            shutil.copy(os.path.join(checkpoint, found[0]), os.path.join(folder, wanted))
            super()._load_rng_state(folder)


def _unwrapped(optimizer) -> torch.optim.Optimizer:
    """The optimizer inside accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)
