# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a parallelised model: Hugging Face files for other tools, a distributed checkpoint for any plan."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, TrainerState, TrainingArguments
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy
from transformers.utils import logging

from galvatron_hf.checkpoint.folder import STATE_FOLDER
from galvatron_hf.checkpoint.hugging_face import meta_model, weights_in, write_pretrained
from galvatron_hf.models.lora import inner_model
from galvatron_hf.parallel.comm.objects import gather_objects
from galvatron_hf.parallel.model import ParallelModel
from galvatron_hf.parallel.weights.distributed_state import (
    WholeWeights,
    load_state,
    parameter_names,
    plain_model,
    shard_optimizer_state,
    whole_weights,
)
from galvatron_hf.parallel.weights.materialize import load_adapters, load_pretrained_weights
from galvatron_hf.parallel.weights.optimizer_state import NamedOptimizerState
from galvatron_hf.plan import ParallelPlan
from galvatron_hf.plan.serialization import read_object, write_file
from galvatron_hf.planner.report.run_files import PLAN_FILE
from galvatron_hf.trainer.checkpoint.checkpoint_writer import CheckpointWriter, SaveError, save_on_every_rank
from galvatron_hf.trainer.checkpoint.random_state import RANDOM_FILE, random_state
from galvatron_hf.trainer.checkpoint.scheduler_state import SCHEDULER_FILE, SchedulerState, group_names
from galvatron_hf.utils.compat import copy_generation_config


logger = logging.get_logger(__name__)


@dataclass(kw_only=True)
class Checkpointer:
    """Saves and loads the weights, optimizer, scheduler and Trainer's files of a parallelised model. All methods are
    collective. Callables stand for the parts of a checkpoint that belong to others.

    Args:
        save_files (`Callable`): writes configuration, tokenizer and arguments of a model to a folder, and the weights
            that it is given, by name; called on the rank that writes.
        make_optimizer (`Callable`): makes the optimizer that plain Trainer would make for a model.
        write_model (`Callable`, *optional*): writes the model's part of a checkpoint to a folder in place of
            [`Checkpointer.save_model`], which it may call; called on every rank.
        takes_weights (`Callable`): returns whether `save_files` is to be given the whole weights; else they are
            written in parts, and no rank holds them all.
        random_state (`Callable`): returns the random state to save.
        save_more (`Callable`): writes further small files to a checkpoint; called on the rank that writes.
        failed_saves (`int`): checkpoints that could not be written, if training goes on without them.
    """

    parallel: ParallelModel
    args: TrainingArguments
    save_files: Callable[[PreTrainedModel, str, dict[str, torch.Tensor]], None]
    make_optimizer: Callable[[PreTrainedModel], torch.optim.Optimizer]
    write_model: Callable[[str], None] | None = None
    takes_weights: Callable[[], bool] = lambda: False
    random_state: Callable[[], dict[str, Any]] = random_state
    save_more: Callable[[Path], None] = lambda folder: None
    failed_saves: int = 0
    _stall_seconds: float = 0.0  # since the last log

    @cached_property
    def _writer(self) -> CheckpointWriter:
        in_background, timeout = getattr(self.args, "async_save", False), timedelta(seconds=self.args.ddp_timeout)
        return CheckpointWriter(parallel=self.parallel, in_background=in_background, timeout=timeout)

    # ---- Saving ----

    def save_model(self, output_dir: str, weights: bool = True) -> None:
        """Writes safetensors (if `weights`), configuration and tokenizer that `from_pretrained` opens anywhere. If
        this fails on one rank, every rank raises SaveError.
        """
        if weights and self.takes_weights():
            whole = whole_weights(self.parallel)
            save_on_every_rank(lambda: self._save_whole(whole, output_dir), f"Saving to {output_dir}")
            return
        if self.parallel.adapted is not None:
            found = WholeWeights(self.parallel).gather(self.parallel.adapted.names)
            save_on_every_rank(lambda: self._save_adapters(found, output_dir), f"Saving to {output_dir}")
            return
        model = self._plain_model()
        copy_generation_config(self.parallel.model, model)
        save_on_every_rank(lambda: self._save_all_but_weights(model, output_dir, {}), f"Saving to {output_dir}")
        if not weights:
            return
        problem: list[OSError] = []
        try:
            size, gather = getattr(self.args, "max_shard_size", "5GB"), WholeWeights(self.parallel).gather
            write_pretrained(model, output_dir, gather, max_shard_size=size, writes=self.args.should_save)
        except OSError as error:  # raised when all weights have been gathered
            problem.append(error)

        def report() -> None:
            if problem:
                raise problem[0]

        save_on_every_rank(report, f"Saving to {output_dir}")

    def _save_whole(self, weights: dict[str, torch.Tensor], output_dir: str) -> None:
        """Has the user's own method save the whole weights, which rank 0 holds."""
        if self.args.should_save:
            model = plain_model(self.parallel, weights, torch.device("cpu"))
            adapted = self.parallel.adapted
            weights = weights if adapted is None else adapted.outer_names(weights)
            self._save_all_but_weights(model, output_dir, weights)

    def _save_adapters(self, weights: dict[str, torch.Tensor], output_dir: str) -> None:
        """Writes the adapters in PEFT's format, and no weights of the model that they adapt."""
        adapted = self.parallel.adapted
        if self.args.should_save:
            self._save_all_but_weights(adapted.copy_with(weights), output_dir, adapted.outer_names(weights))

    def _save_all_but_weights(self, model: PreTrainedModel, output_dir: str, weights: dict[str, torch.Tensor]) -> None:
        if not self.args.should_save:
            return
        os.makedirs(output_dir, exist_ok=True)
        for old in weights_in(output_dir):
            old.unlink()
        bars = logging.is_progress_bar_enabled()
        logging.disable_progress_bar()  # the bar of a model without weights
        try:
            self.save_files(model, output_dir, weights)
        finally:
            if bars:
                logging.enable_progress_bar()
        self.parallel.plan.to_json(os.path.join(output_dir, PLAN_FILE))

    def save(
        self,
        run_dir: str,
        *,
        state: TrainerState,
        optimizer: torch.optim.Optimizer,
        scheduler: Any,
        callbacks: Iterable[Any] = (),
        push: Callable[[str], None] | None = None,
    ) -> None:
        """Writes a checkpoint into a folder below `run_dir` that gets its name when it is complete. States of
        `callbacks` (and the control) are saved if they have one. `push` uploads the complete checkpoint. If it cannot
        be written and the arguments say that training stops then, every rank raises SaveError.
        """
        began = time.monotonic()
        checkpoint = os.path.join(run_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
        with self.tolerating_failure(state):  # a failure of the checkpoint before
            self.finish()
        self._writer.limit = self.args.save_total_limit
        with self.tolerating_failure(state):
            self._name_best_checkpoint(run_dir, checkpoint, state)
            self._write(Path(checkpoint), state, unwrapped(optimizer), scheduler, callbacks)
            if push is not None:
                self.finish()
                push(checkpoint)
        stall = time.monotonic() - began
        self._stall_seconds += stall
        logger.info(f"Training stood still for {stall:.3f} s to save {checkpoint}.")

    def _write(self, checkpoint: Path, state: TrainerState, optimizer, scheduler, callbacks: Iterable[Any]) -> None:
        folder, only_model = self._writer.start(checkpoint), self.args.save_only_model
        if self.write_model is not None:
            self.write_model(str(folder))
        else:
            self.save_model(str(folder), weights=only_model or getattr(self.args, "save_full_weights", True))
        if not only_model:
            schedule = SchedulerState.from_state_dict(scheduler.state_dict(), self._group_names(optimizer))
            if self.parallel.pipeline is not None:
                schedule = SchedulerState.from_ranks(gather_objects(schedule))
        random = self.random_state()

        def save_small_files() -> None:
            if not only_model:
                write_file(folder / RANDOM_FILE.format(self.args.process_index), json.dumps(random))
            if self.args.should_save:
                if not only_model:
                    write_file(folder / SCHEDULER_FILE, json.dumps(schedule.to_json(), indent=2))
                self.save_more(folder)
                _export_states(callbacks, state)
                state.save_to_json(os.path.join(folder, TRAINER_STATE_NAME))

        save_on_every_rank(save_small_files, f"Writing {checkpoint}")
        kept = [state.best_model_checkpoint]
        self._writer.complete(state.global_step, None if only_model else optimizer, keep=kept)

    def _name_best_checkpoint(self, run_dir: str, checkpoint: str, state: TrainerState) -> None:
        kinds = (SaveStrategy.STEPS, SaveStrategy.EPOCH, SaveStrategy.BEST)
        if self.args.save_strategy in kinds and state.best_global_step:
            best = os.path.join(run_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.best_global_step}")
            if best == checkpoint or os.path.exists(best):
                state.best_model_checkpoint = best

    def finish(self) -> None:
        """Waits for a checkpoint that is written in the background; raises SaveError if it could not be written."""
        waited = self._writer.wait()
        if waited > 0:
            logger.info(f"Waited {waited:.3f} s for the checkpoint in the background.")

    @contextlib.contextmanager
    def settled(self) -> Iterator[None]:
        """Lets the checkpoint in the background end if the body fails: the next run may write too."""
        try:
            yield
        except Exception:
            with contextlib.suppress(Exception):  # errors of ranks that are gone
                self.finish()
            raise

    @contextlib.contextmanager
    def tolerating_failure(self, state: TrainerState) -> Iterator[None]:
        """Lets training go on without a checkpoint if `on_save_failure` says so."""
        try:
            yield
        except SaveError as error:
            lost = self._writer.abandon()
            if stops_on_failure(self.args):
                raise
            self.failed_saves += 1
            logger.warning(f"{error}; training goes on, and {self.failed_saves} checkpoints are missing so far.")
            if state.best_model_checkpoint == str(lost):
                state.best_model_checkpoint = None
                logger.warning(f"{lost} had the best model, which cannot be loaded at the end.")

    def add_logs(self, logs: dict[str, float]) -> None:
        """Adds the time that saving in the background has held training up since the last log."""
        if self._stall_seconds and self._writer.in_background:
            logs["save_stall_seconds"] = round(self._stall_seconds, 3)
        self._stall_seconds = 0.0

    # ---- Loading ----

    def load_weights(self, checkpoint: str) -> None:
        """Loads weights that were saved under any plan, or by plain Trainer."""
        if os.path.isdir(os.path.join(checkpoint, STATE_FOLDER)):
            load_state(self.parallel, None, os.path.join(checkpoint, STATE_FOLDER))
        elif self.parallel.adapted is not None:
            load_adapters(self.parallel, checkpoint)
        else:
            load_pretrained_weights(self.parallel, checkpoint)

    def load_optimizer_and_scheduler(self, checkpoint: str, optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
        """Loads states that were saved under any plan, or by plain Trainer, after the weights."""
        optimizer, state = unwrapped(optimizer), os.path.join(checkpoint, STATE_FOLDER)
        files = [os.path.join(checkpoint, name) for name in (OPTIMIZER_NAME, SCHEDULER_NAME)]
        if os.path.isdir(state):
            load_state(self.parallel, optimizer, state, weights=False)
            saved = SchedulerState.from_json(read_object(Path(checkpoint) / SCHEDULER_FILE, "scheduler's state"))
        elif all(os.path.isfile(path) for path in files):
            groups, fused = self._plain_groups(), self.parallel.fused
            found = shard_optimizer_state(self.parallel, NamedOptimizerState.from_file(files[0], groups, fused))
            found.load_into(optimizer, self.parallel.parameter_names(), fused)
            schedule = torch.load(files[1], map_location="cpu", weights_only=True)
            saved = SchedulerState.from_state_dict(schedule, groups)
        else:
            logger.warning(f"{checkpoint} has no optimizer's state, so the optimizer and the scheduler start anew.")
            return
        saved.load_into(scheduler, self._group_names(optimizer))

    def _group_names(self, optimizer: torch.optim.Optimizer) -> list[list[str]]:
        return group_names(optimizer, self.parallel.parameter_names(), self.parallel.fused)

    def _plain_groups(self) -> list[list[str]]:
        """Returns the names in each group of the optimizer that plain Trainer would make."""
        plain = self._plain_model()
        trained = {name: tensor.requires_grad for name, tensor in self.parallel.model.named_parameters()}
        if self.parallel.pipeline is not None:
            trained = {name: grad for one in gather_objects(trained) for name, grad in one.items()}
        trained = {self.parallel.fused.family_name(name): grad for name, grad in trained.items()}
        for name, parameter in inner_model(plain).named_parameters():
            parameter.requires_grad_(trained[name])
        names = parameter_names(inner_model(plain))
        groups = self.make_optimizer(plain).param_groups
        return [[names[id(parameter)] for parameter in group["params"]] for group in groups]

    def _plain_model(self) -> PreTrainedModel:
        """Returns the model under its family's own names, without values."""
        if self.parallel.adapted is not None:
            return self.parallel.adapted.copy_with({})
        return meta_model(self.parallel.family, self.parallel.model.config, torch.float32)


def _export_states(callbacks: Iterable[Any], state: TrainerState) -> None:
    """Puts the states of callbacks into Trainer's state, as Trainer does."""
    for callback in callbacks:
        if isinstance(callback, ExportableState):
            states, name = state.stateful_callbacks, type(callback).__name__
            if isinstance(states[name], list):
                states[name].append(callback.state())
            else:
                states[name] = callback.state()


def unwrapped(optimizer: Any) -> torch.optim.Optimizer:
    """Returns the optimizer inside accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)


def stops_on_failure(args: TrainingArguments) -> bool:
    """Returns whether training stops if a checkpoint cannot be written."""
    return getattr(args, "on_save_failure", "stop") == "stop"


def write_plan(plan: ParallelPlan, args: TrainingArguments) -> None:
    """Writes the plan into the output folder; collective. After a failure every rank raises SaveError, if the
    arguments say that training stops then.
    """
    folder = args.output_dir

    def write() -> None:
        if args.should_save:
            os.makedirs(folder, exist_ok=True)
            plan.to_json(os.path.join(folder, PLAN_FILE))

    try:
        save_on_every_rank(write, f"Writing the plan to {folder}")
    except SaveError as error:
        if stops_on_failure(args):
            raise
        logger.warning(f"{error}; training goes on without it.")


def plan_of_checkpoint(folder: str, world_size: int) -> ParallelPlan | None:
    """Returns the plan that a checkpoint was written under, if it is a plan for `world_size` ranks."""
    path = os.path.join(folder, PLAN_FILE)
    if not os.path.isfile(path):
        return None
    plan = ParallelPlan.from_json(path)
    return plan if plan.world_size == world_size else None


def require_inside(checkpoint: str, output_dir: str) -> None:
    """Raises ValueError for a best checkpoint outside of `output_dir`: a resumed run has read its name from a file."""
    if not Path(checkpoint).resolve().is_relative_to(Path(output_dir).resolve()):
        raise ValueError(f"The best checkpoint {checkpoint} is not below {output_dir}; move it there.")


@contextlib.contextmanager
def without_pruning(args: TrainingArguments) -> Iterator[None]:
    """Keeps Trainer from deleting checkpoints: with a limit of 1 it deletes the newest one for the best one."""
    limit, args.save_total_limit = args.save_total_limit, None
    try:
        yield
    finally:
        args.save_total_limit = limit
