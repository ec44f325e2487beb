# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Saving and resuming under a plan: Hugging Face files for everybody, a distributed checkpoint for any plan."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch
from torch import nn
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy
from transformers.utils import logging

from galvatron_hf.checkpoint.folder import (
    STATE_FOLDER,
)
from galvatron_hf.checkpoint.hugging_face import meta_model, weights_in, write_pretrained
from galvatron_hf.models.families import adapter_for
from galvatron_hf.models.fused_weights import FusedNames
from galvatron_hf.parallel.comm.objects import gather_objects
from galvatron_hf.parallel.weights.distributed_state import (
    WholeWeights,
    load_plain_state,
    load_state,
    parameter_names,
    shard_optimizer_state,
)
from galvatron_hf.parallel.weights.materialize import load_pretrained_weights
from galvatron_hf.parallel.weights.optimizer_state import NamedOptimizerState
from galvatron_hf.plan import ParallelPlan
from galvatron_hf.plan.serialization import read_object, write_file
from galvatron_hf.trainer.checkpoint.random_state import restore_random_state
from galvatron_hf.trainer.checkpoint.resuming import ResumeMixin
from galvatron_hf.trainer.checkpoint.saving import CheckpointWriter, SaveError, save_on_every_rank
from galvatron_hf.trainer.checkpoint.scheduler_state import SchedulerState


logger = logging.get_logger(__name__)

PLAN_FILE = "parallel_plan.json"
SCHEDULER_FILE = "scheduler.json"
RANDOM_FILE = "rng_state_{}.json"


def plan_of_checkpoint(folder: str, world_size: int) -> ParallelPlan | None:
    """The plan that a checkpoint was written under, if it is one for `world_size` ranks."""
    path = os.path.join(folder, PLAN_FILE)
    if not os.path.isfile(path):
        return None
    plan = ParallelPlan.from_json(path)
    return plan if plan.world_size == world_size else None


class CheckpointMixin(ResumeMixin):
    """The part of [`GalvatronMixin`] that saves and loads; see there."""

    _writer: CheckpointWriter | None = None
    failed_saves: int = 0
    _save_stall: float = 0.0  # seconds, since the last log

    # ---- Saving ----

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Writes safetensors, configuration and tokenizer that `from_pretrained` opens anywhere; collective."""
        self.ensure_parallel()
        if self.parallel is None:
            super().save_model(output_dir, _internal_call)
            return
        output_dir = output_dir or self.args.output_dir
        self._save_files(output_dir, weights=True)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_files(self, output_dir: str, weights: bool) -> None:
        """Everything of a model's folder, with or without the weights; collective.

        Raises:
            SaveError: on every rank, if it failed on one.
        """
        parallel, writes = self.parallel, self.args.should_save
        model = meta_model(parallel.family, parallel.model.config, torch.float32)
        if parallel.model.generation_config is not None:
            model.generation_config = parallel.model.generation_config

        def save_all_but_weights() -> None:
            if not writes:
                return
            if not self.is_world_process_zero():
                raise ValueError("save_on_each_node=True is not supported under a plan; use a shared output_dir.")
            os.makedirs(output_dir, exist_ok=True)
            for old in weights_in(output_dir):
                old.unlink()
            # Trainer's own saving, of a model of the family's own names, which knows no values.
            own, self.model = self.model, model
            bars = logging.is_progress_bar_enabled()
            logging.disable_progress_bar()  # of no weights
            try:
                self._save(output_dir, state_dict={})
            finally:
                self.model = own
                if bars:
                    logging.enable_progress_bar()
            parallel.plan.to_json(os.path.join(output_dir, PLAN_FILE))

        save_on_every_rank(save_all_but_weights, f"Saving to {output_dir}")
        if not weights:
            return
        problem: list[OSError] = []
        try:
            size = getattr(self.args, "max_shard_size", "5GB")
            write_pretrained(model, output_dir, WholeWeights(parallel).gather, max_shard_size=size, writes=writes)
        except OSError as error:  # comes when all is gathered
            problem.append(error)

        def report() -> None:
            if problem:
                raise problem[0]

        save_on_every_rank(report, f"Saving to {output_dir}")

    def _save_checkpoint(self, model: nn.Module, trial) -> None:
        """As Trainer's, in a folder that has its name only when it is complete."""
        if self.parallel is None:
            super()._save_checkpoint(model, trial)
            return
        began = time.monotonic()
        if self.hp_search_backend is None and trial is None:
            self.store_flos()
        run_dir = self._get_output_dir(trial=trial)
        checkpoint = os.path.join(run_dir, f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
        with self._survived_if_wanted():  # the one before
            self._finish_saving()
        if self._writer is None or self._writer.parallel is not self.parallel:
            self._writer = CheckpointWriter(
                parallel=self.parallel,
                in_background=getattr(self.args, "async_save", False),
                timeout=timedelta(seconds=self.args.ddp_timeout),
            )
        self._writer.limit = self.args.save_total_limit
        with self._survived_if_wanted():
            self._name_best_checkpoint(run_dir, checkpoint)
            self._write_checkpoint(Path(checkpoint))
            if self.args.push_to_hub:
                self._finish_saving()
                self._push_from_checkpoint(checkpoint)
        stall = time.monotonic() - began
        self._save_stall += stall
        logger.info(f"Training stood still for {stall:.3f} s to save {checkpoint}.")

    def log(self, logs: dict[str, float], *args, **kwargs) -> None:
        """As Trainer's; with how long saves in the background held up training since the last log."""
        if self._save_stall and getattr(self.args, "async_save", False):
            logs["save_stall_seconds"] = round(self._save_stall, 3)
        self._save_stall = 0.0
        super().log(logs, *args, **kwargs)

    def _write_checkpoint(self, checkpoint: Path) -> None:
        folder, only_model = self._writer.start(checkpoint), self.args.save_only_model
        self._save_files(str(folder), weights=only_model or getattr(self.args, "save_full_weights", True))
        if not only_model:
            scheduler = SchedulerState.of(self.lr_scheduler.state_dict(), self._group_names())
            if self.parallel.pipeline is not None:
                scheduler = SchedulerState.of_all_ranks(gather_objects(scheduler))
        random = self._random_state()

        def save_small_files() -> None:
            if not only_model:
                write_file(folder / RANDOM_FILE.format(self.args.process_index), json.dumps(random))
            if self.args.should_save:
                if not only_model:
                    write_file(folder / SCHEDULER_FILE, json.dumps(scheduler.to_json(), indent=2))
                self._save_packing(folder)
                self._export_callback_states()
                self.state.save_to_json(os.path.join(folder, TRAINER_STATE_NAME))

        save_on_every_rank(save_small_files, f"Writing {checkpoint}")
        optimizer = None if only_model else _unwrapped(self.optimizer)
        self._writer.complete(self.state.global_step, optimizer, keep=[self.state.best_model_checkpoint])

    def _name_best_checkpoint(self, run_dir: str, checkpoint: str) -> None:
        kinds = (SaveStrategy.STEPS, SaveStrategy.EPOCH, SaveStrategy.BEST)
        if self.args.save_strategy in kinds and self.state.best_global_step:
            best = os.path.join(run_dir, f"{PREFIX_CHECKPOINT_DIR}-{self.state.best_global_step}")
            if best == checkpoint or os.path.exists(best):
                self.state.best_model_checkpoint = best

    def _export_callback_states(self) -> None:
        for callback in [*self.callback_handler.callbacks, self.control]:
            if isinstance(callback, ExportableState):
                states, name = self.state.stateful_callbacks, type(callback).__name__
                if isinstance(states[name], list):
                    states[name].append(callback.state())
                else:
                    states[name] = callback.state()

    def _finish_saving(self) -> None:
        """Waits for a checkpoint that is written in the background.

        Raises:
            SaveError: if it could not be written.
        """
        if self._writer is not None:
            waited = self._writer.wait()
            if waited > 0:
                logger.info(f"Waited {waited:.3f} s for the checkpoint in the background.")

    @contextlib.contextmanager
    def _settled(self) -> Iterator[None]:
        """Where the body fails, lets the checkpoint in the background end: what trains next may write too."""
        try:
            yield
        except Exception:
            with contextlib.suppress(Exception):  # of ranks that are not there any more
                self._finish_saving()
            raise

    @contextlib.contextmanager
    def _survived_if_wanted(self) -> Iterator[None]:
        """Lets training go on without a checkpoint where the arguments say so."""
        try:
            yield
        except SaveError as error:
            lost = self._writer.abandon()
            if getattr(self.args, "on_save_failure", "stop") == "stop":
                raise
            self.failed_saves += 1
            logger.warning(f"{error}; training goes on, and {self.failed_saves} checkpoints are missing so far.")
            if self.state.best_model_checkpoint == str(lost):
                self.state.best_model_checkpoint = None
                logger.warning(f"{lost} had the best model, which cannot be loaded at the end.")

    # ---- Loading ----

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        self.ensure_parallel()
        state = os.path.join(resume_from_checkpoint, STATE_FOLDER)
        if self.parallel is None and os.path.isdir(state):
            load_plain_state(self.model, None, state)
        elif self.parallel is None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        elif os.path.isdir(state):
            load_state(self.parallel, None, state)
        else:
            load_pretrained_weights(self.parallel, resume_from_checkpoint)

    def _load_best_model(self) -> None:
        if self.parallel is None:
            super()._load_best_model()
            return
        best = self.state.best_model_checkpoint
        # A resumed run has the name from a file, which may name anything.
        if not Path(best).resolve().is_relative_to(Path(self.args.output_dir).resolve()):
            raise ValueError(f"The best checkpoint {best} is not below {self.args.output_dir}; move it there.")
        self._require_complete(best)
        logger.info(f"Loading best model from {best} (score: {self.state.best_metric}).")
        self._load_from_checkpoint(best)

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
            scheduler = read_object(Path(checkpoint) / SCHEDULER_FILE, "scheduler's state")
            self._load_scheduler(SchedulerState.from_json(scheduler))
        elif self.parallel is None:
            super()._load_optimizer_and_scheduler(checkpoint)
        elif all(os.path.isfile(path) for path in plain_files):
            self._load_plain_files(*plain_files)
        else:
            logger.warning(f"{checkpoint} has no optimizer's state, so the optimizer and the scheduler start anew.")

    def _load_plain_files(self, optimizer_file: str, scheduler_file: str) -> None:
        """The `optimizer.pt` and `scheduler.pt` of plain Trainer, into a parallelised model's optimizer."""
        names, fused = self._plain_groups(), self.parallel.fused
        state = NamedOptimizerState.from_file(optimizer_file, names, fused)
        state = shard_optimizer_state(self.parallel, state)
        state.load_into(_unwrapped(self.optimizer), self.parallel.parameter_names(), fused)
        scheduler = torch.load(scheduler_file, map_location="cpu", weights_only=True)
        self._load_scheduler(SchedulerState.of(scheduler, names))

    def _load_scheduler(self, saved: SchedulerState) -> None:
        self.lr_scheduler.load_state_dict(saved.for_groups(self.lr_scheduler.state_dict(), self._group_names()))

    def _group_names(self) -> list[list[str]]:
        """The family's names of the weights in each of the optimizer's groups."""
        if self.parallel is None:
            fused, names = FusedNames.from_model(self.model, adapter_for(self.model)), parameter_names(self.model)
        else:
            fused, names = self.parallel.fused, self.parallel.parameter_names()
        return [[fused.family_name(names[id(p)]) for p in group["params"]] for group in self.optimizer.param_groups]

    def _plain_groups(self) -> list[list[str]]:
        """As [`_group_names`], of the optimizer that this Trainer would make for the plain model."""
        plain = meta_model(self.parallel.family, self.parallel.model.config, torch.float32)
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
        if self._ahead is not None:
            self._ahead.state_before_look = None
        if checkpoint is None:
            return
        for index in (self.args.process_index, 0):
            path = os.path.join(checkpoint, RANDOM_FILE.format(index))
            if os.path.isfile(path):
                restore_random_state(read_object(Path(path), "random state"))
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
