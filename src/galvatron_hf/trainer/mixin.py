# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""GalvatronMixin: any Trainer, under a parallel plan.

Every rank runs the program of one process: loaders give it the batches of all ranks, the model takes and returns whole
batches, and methods that a subclass overrides see what they would see on one process.
"""

from __future__ import annotations

import contextlib
import os
import time
from abc import ABCMeta
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import cached_property, partial
from typing import Any

import torch
from accelerate.utils import TorchDynamoPlugin
from accelerate.utils.memory import clear_device_cache
from torch import nn
from transformers.utils import logging

from galvatron_hf.data.loader import GlobalBatchLoader
from galvatron_hf.models.lora import inner_model
from galvatron_hf.parallel.comm.mesh import WorldMesh
from galvatron_hf.parallel.comm.objects import gather_objects
from galvatron_hf.parallel.layers.float8 import uses_float8
from galvatron_hf.parallel.model import ParallelModel
from galvatron_hf.parallel.other_plan import empty_copy
from galvatron_hf.parallel.parallelize import parallelize
from galvatron_hf.plan import ParallelPlan
from galvatron_hf.planner.search import SearchResult
from galvatron_hf.trainer.argument_refusals import check_arguments
from galvatron_hf.trainer.arguments import (
    compile_options,
    packing_mode,
    requested_plan,
    step_rows,
    with_precision,
)
from galvatron_hf.trainer.checkpoint.checkpoint_finder import CheckpointFinder
from galvatron_hf.trainer.checkpoint.checkpointer import (
    plan_of_checkpoint,
    require_inside,
    without_pruning,
    write_plan,
)
from galvatron_hf.trainer.checkpoint.model_source import ModelSource, moves_to_device
from galvatron_hf.trainer.checkpoint.plain_model import (
    is_written_under_a_plan,
    load_plain_optimizer_and_scheduler,
    load_plain_weights,
)
from galvatron_hf.trainer.checkpoint.random_state import load_random_state, plain_random_files
from galvatron_hf.trainer.checkpoint.restart import checkpoint_of_restart
from galvatron_hf.trainer.components import (
    Components,
    added_callback,
    auto_planner,
    step_plans_of,
    with_groups,
)
from galvatron_hf.trainer.data.global_batches import GlobalBatches, SharedIterator, as_one_process
from galvatron_hf.trainer.data.packing_rules import ASKED
from galvatron_hf.trainer.data.step_packer import step_plans_of_checkpoint
from galvatron_hf.trainer.data.step_plans import StepPlans, as_precise
from galvatron_hf.trainer.evaluation import Prediction
from galvatron_hf.trainer.fault.stop_signal import StopSignal
from galvatron_hf.trainer.fault.watchdog import position_in_step, watched
from galvatron_hf.trainer.generation import generate
from galvatron_hf.trainer.hyperparameter_search import SharedStudy
from galvatron_hf.trainer.liger import apply_kernels, without_trainers_own
from galvatron_hf.trainer.neftune import add_embedding_noise
from galvatron_hf.trainer.overrides import Guard, computes_batches, overrides, predicts_batches, replaced
from galvatron_hf.trainer.planning.auto_planner import AutoPlanner
from galvatron_hf.trainer.planning.run_record import forget_run, write_profiles, write_run
from galvatron_hf.trainer.planning.step_meter import (
    Outcome,
    StepMeter,
    held_bytes,
    is_predicted,
    outcome,
    prediction,
)
from galvatron_hf.trainer.refusals import told_once
from galvatron_hf.trainer.start import (
    check_trainer,
    explained_empty_optimizer,
    explained_weights,
    require_labels,
    traced,
    with_fp32_weights,
)
from galvatron_hf.trainer.step_state import StepState
from galvatron_hf.utils.compat import mark_step_skipped
from galvatron_hf.utils.device import to_device
from galvatron_hf.utils.progress import tell


logger = logging.get_logger(__name__)


class _DirectlyAboveTrainer(ABCMeta):
    """Puts [`GalvatronMixin`] below the classes of users, wherever they name it among their bases: what they override
    calls the mixin's methods through `super()`, as it calls those of Trainer without a plan.
    """

    def mro(cls) -> list[type]:
        order = super().mro()
        mixins = [one for one in order if vars(one).get("_is_mixin", False)]
        others = [one for one in order if one not in mixins]
        place = next((at for at, one in enumerate(others) if one.__module__.startswith("transformers.")), None)
        return order if place is None else [*others[:place], *mixins, *others[place:]]

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Makes a model of a name before the constructors of users' classes run, and checks the Trainer after them."""
        source = ModelSource()
        args, kwargs = source.with_model(args, kwargs)
        trainer = cls.__new__(cls, *args, **kwargs)
        trainer._source = source
        with told_once():
            trainer.__init__(*args, **kwargs)
            trainer._check_trainer()
        return trainer


class GalvatronMixin(metaclass=_DirectlyAboveTrainer):
    """Trains under a plan; put it before any subclass of [`~transformers.Trainer`].

    The global batch of an optimizer step is `global_batch_size` sequences, by default
    `per_device_train_batch_size * gradient_accumulation_steps * WORLD_SIZE`. Rank 0 reads it once and every rank gets
    it. The plan changes how it is computed, never the result. On one process without a plan the Trainer is unchanged.
    The methods override those of Trainer, in the order in which a run calls them, and delegate to components that know
    nothing of the Trainer. Methods that a subclass overrides call them through `super()`, with the batches of all
    ranks. Plans, models and arguments that cannot run raise ValueError before anything is changed.

    Attributes:
        parallel ([`ParallelModel`], *optional*): the model under the plan, once the plan has been applied.
        plan_outcome ([`Outcome`], *optional*): predicted and measured step time and memory of the last training run
            under a plan that a search has made.

    Example:

    ```python
    class GalvatronSFTTrainer(GalvatronMixin, trl.SFTTrainer): ...
    ```
    """

    _is_mixin = True

    parallel: ParallelModel | None = None
    plan_outcome: Outcome | None = None
    _components: Components | None = None
    _step_state: StepState | None = None
    _step_plans: StepPlans | None = None
    _resumed_plan: ParallelPlan | None = None
    _resumed_step_plans: Sequence[ParallelPlan] = ()
    _compile_options: dict[str, Any] | None = None
    _source: ModelSource

    def _check_trainer(self) -> None:
        """Refuses what cannot train under a plan, when all constructors have run."""
        if self._runs_parallel():
            check_trainer(self, self._requested_plan, self._planner)
        elif packing_mode(self.args) in ASKED:
            raise ValueError(
                f"packing={packing_mode(self.args)!r} needs a plan, and this process has none; give parallel_plan."
            )

    # ---- Setting up ----

    def create_accelerator_and_postprocess(self) -> None:
        """Checks the arguments first: Trainer calls this before it changes the model, and for each trial."""
        self._requested_plan = requested_plan(self.args, self._source.stacks)
        if self._runs_parallel():
            check_arguments(self.args, self._requested_plan)
        super().create_accelerator_and_postprocess()
        if self._runs_parallel():
            self._batches.set_up(self.accelerator)

    def _build_accelerator_args(self, **kwargs) -> dict[str, Any]:
        """Keeps accelerate from autocasting or compiling the whole model: sharding applies the plan's precision, and
        layers are compiled one by one.
        """
        arguments = super()._build_accelerator_args(**kwargs)
        if not self._runs_parallel():
            return arguments
        self._compile_options = compile_options(arguments["dynamo_plugin"], self._requested_plan)
        return arguments | {"mixed_precision": "no", "dynamo_plugin": TorchDynamoPlugin(backend="no")}

    def call_model_init(self, trial=None) -> nn.Module:
        """Lets `model_init` return a model's name, or a model on the meta device."""
        return self._source.model(super().call_model_init(trial), self.args)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Leaves a model without weights alone: its weights come to the device with the plan."""
        if moves_to_device(model, self._runs_parallel()):
            super()._move_model_to_device(model, device)

    def _runs_parallel(self) -> bool:
        """Returns whether a plan applies; one process needs a given plan, for recompute, micro-batches, precision."""
        return self.args.world_size > 1 or self._requested_plan is not None

    def plan_for(self, model: nn.Module) -> ParallelPlan:
        """Returns the plan to train `model` under: the given one, the checkpoint's, or a search's; collective."""
        plan = self._requested_plan or self._resumed_plan or self._planner.plan_for(inner_model(model))
        if plan is self._resumed_plan and self.args.bf16 and not uses_float8(plan):
            plan = replace(plan, precision=None)  # the arguments decide, as no plan was given to this run
        known = None
        if plan is not self._requested_plan:
            plan, known = replace(plan, sequence_groups=None), plan.sequence_groups  # the arguments decide
        return with_groups(self, with_precision(plan, self.args), model, known)

    def ensure_parallel(self) -> None:
        """Applies the plan to `self.model`, unless that is done; collective."""
        if not self._runs_parallel() or (self.parallel is not None and self.parallel.model is inner_model(self.model)):
            return
        self._set_signature_columns_if_needed()
        if self.args.use_liger_kernel:
            apply_kernels(self.model, self.args)
        with told_once():
            plan, weights = self.plan_for(self.model), self._source.weights(self.model)
            plan, device = with_fp32_weights(self.model, plan), self.args.device
            others = [as_precise(other, plan, number) for number, other in enumerate(step_plans_of(self), 1)]
            models = [empty_copy(self.model) for _ in others]
            parallel = parallelize(self.model, plan, world=self._world, weights=weights, device=device)
            self._step_plans = StepPlans.make(parallel, others, models)
            self.parallel = parallel
        if self._compile_options is not None:
            self._step_plans.compile(**self._compile_options)
        self.parallel.streams.seed = self.args.seed
        self.model.generate = partial(GalvatronMixin.generate, self)  # a subclass's own `generate` may call it
        self._components = Components.from_trainer(self)
        # Trainer then leaves placement and wrapping of the model to us.
        self.is_distributed_loading_by_transformers = True
        write_plan(plan, self.args)
        if self._requested_plan is None and self._resumed_plan is None:
            write_profiles(self.search_result, plan, self.args)
        if self.is_world_process_zero():
            tell(str(plan), not self.args.disable_tqdm, result=True)

    # ---- A training run ----

    def hyperparameter_search(
        self, hp_space=None, compute_objective=None, n_trials=20, direction="minimize", backend=None, *args, **kwargs
    ):
        """Runs the study on rank 0 alone; the other ranks follow its trials. Every rank returns rank 0's result. A
        backend other than optuna on several ranks raises ValueError.
        """
        self._meet("hyperparameter_search")
        search = super().hyperparameter_search
        best = self._study.search(search, hp_space, compute_objective, n_trials, direction, backend, *args, **kwargs)
        self.hp_search_backend = None
        return best

    def train(self, resume_from_checkpoint: str | bool | None = None, trial=None, *args, **kwargs):
        """Resumes only from complete checkpoints, under their plan if none is given. An attempt that a launcher has
        restarted resumes by itself, see [`checkpoint_of_restart`].
        """
        if trial is None:  # all ranks of a study get its trials, and its end, from rank 0
            self._meet("train")
        if resume_from_checkpoint is None and trial is None and self._runs_parallel():
            checkpoint = checkpoint_of_restart(self.args.output_dir, self._finder.newest)
        else:
            checkpoint = self._finder.to_resume(resume_from_checkpoint, self.args.output_dir)
        resumes = checkpoint is not None and self._runs_parallel()
        if resumes:
            if self.is_world_process_zero():
                logger.warning(f"Training resumes from {checkpoint}.")
            self._resumed_plan = plan_of_checkpoint(checkpoint, self.args.world_size)
            self._resumed_step_plans = step_plans_of_checkpoint(checkpoint, self.args.world_size)
        run, searching = super().train, self.hp_search_backend is not None
        kernels = without_trainers_own() if self._runs_parallel() else contextlib.nullcontext()
        with kernels, self._source.resuming(resumes):
            return self._study.train(lambda: run(checkpoint, trial, *args, **kwargs), trial, searching)

    def _inner_training_loop(self, *args, **kwargs):
        """Applies the plan first, and trains with everything that accompanies a run."""
        self.ensure_parallel()
        if self.parallel is None:
            return super()._inner_training_loop(*args, **kwargs)
        forget_run(self.args)
        self._prepare_run(kwargs.get("resume_from_checkpoint"))
        with self._accompanied():
            result = super()._inner_training_loop(*args, **kwargs)
            self._components.dispatch.measure_imbalance()
        placed, trace = self._components.packer.last_placed, self._trace_dir
        model, plan = inner_model(self.model), self.parallel.plan
        write_run(self.state, self.args, self.plan_outcome, placed, trace, model, plan)
        return result

    def _prepare_run(self, checkpoint: str | None) -> None:
        """Brings model and components into the state in which a training run begins; collective."""
        # The plan decides what is recomputed; gradient_checkpointing=True requires that it recomputes every layer.
        for layer in self.parallel.layers:
            layer.gradient_checkpointing = False
        self._step_state = None
        self._components.packer.begin(checkpoint, self._resumed_plan)
        self._components.guard.begin()
        self.parallel.units.reshard()  # evaluation leaves some weights gathered; the optimizer holds the shards
        if self.neftune_noise_alpha is not None:
            self.neftune_hook_handle.remove()
            self.neftune_hook_handle = add_embedding_noise(self.parallel, self.neftune_noise_alpha)

    @contextlib.contextmanager
    def _accompanied(self) -> Iterator[None]:
        """Accompanies a training run: measurement, saving, timeline, logs of losses, signals, watchdog, packing."""
        parts, args = self._components, self.args
        self._stop_signal = StopSignal()
        with contextlib.ExitStack() as run:
            for part in (parts.dispatch, parts.pace):
                run.enter_context(added_callback(self.callback_handler, part))
            run.enter_context(self._measured())
            run.enter_context(parts.checkpointer.settled())
            run.enter_context(traced(self.parallel.timeline, self._trace_dir))
            run.enter_context(parts.guard.unfiltered(args))
            run.enter_context(added_callback(self.callback_handler, self._stop_signal))
            run.enter_context(self._stop_signal.listening())
            run.enter_context(watched(self._position, float(args.ddp_timeout), self._world.own_groups()))
            run.callback(parts.packer.end)
            run.enter_context(replaced(self, **self._guarded_methods()))
            yield

    @property
    def _trace_dir(self) -> str | None:
        return os.environ.get("GALVATRON_TRACE") or getattr(self.args, "trace_dir", None)

    def _make_train_loader(self, method):
        """Joins as many batches of a subclass's own loader as make a global batch."""
        with self._batches.of_training():
            return method()

    def _guarded_methods(self) -> dict[str, Any]:
        """Returns what stands in front of methods that a subclass overrides while it trains."""
        works = {"get_train_dataloader": self._make_train_loader}
        if computes_batches(self):
            works["training_step"] = self._compute_batch
        if overrides(self, "get_batch_samples"):
            works["get_batch_samples"] = self._read_batches
        return {name: Guard(self, name, work) for name, work in works.items()}

    @contextlib.contextmanager
    def _measured(self) -> Iterator[None]:
        """Measures a run under a plan that a search has made for this batch; prints the outcome; collective."""
        self.plan_outcome, plan = None, self.parallel.plan
        if not is_predicted(plan, self._planner.rows_of_step):
            if self.is_world_process_zero() and prediction(plan) is not None:
                logger.warning(
                    f"The plan's prediction is for steps of {prediction(plan)['rows']} rows and this run has "
                    f"{self._planner.rows_of_step}: nothing is compared with it."
                )
            yield
            return
        apart, device = self._components.packer.paused, self.args.device
        meter = StepMeter(device, lambda: held_bytes(self.model, self.optimizer), apart)
        with meter.measuring(), added_callback(self.callback_handler, meter):
            yield
        self.plan_outcome = outcome(meter, plan)
        if self.is_world_process_zero():
            tell(str(self.plan_outcome), not self.args.disable_tqdm, result=True)

    def _position(self) -> tuple[str, bool]:
        return position_in_step(self._step_plans.active, self.state.global_step + 1)

    def _prepare_for_training(self, *args, **kwargs):
        """Refuses optimizers that a plan cannot use."""
        with explained_empty_optimizer(self.parallel, self.args.process_index):
            prepared = super()._prepare_for_training(*args, **kwargs)
        if self.parallel is not None and self.parallel.tied is not None:
            self.parallel.tied.check_options(self.optimizer)
        return prepared

    def get_total_train_batch_size(self, args) -> int:
        """Counts the rows of a step on all ranks."""
        return step_rows(args) if self._runs_parallel() else super().get_total_train_batch_size(args)

    def _sync_replicated_trainable_parameters(self, model: nn.Module) -> None:
        """Leaves replicated parameters to the plan."""
        if self.parallel is None:
            super()._sync_replicated_trainable_parameters(model)

    def _defer_fsdp_gradient_reduction(self) -> contextlib.AbstractContextManager:
        """Leaves the reduction of gradients to the plan's sharding."""
        return contextlib.nullcontext() if self.parallel is not None else super()._defer_fsdp_gradient_reduction()

    def get_num_trainable_parameters(self) -> int:
        """Counts the parameters of all stages under a pipeline."""
        if self.parallel is None or self.parallel.pipeline is None:
            return super().get_num_trainable_parameters()
        return self.model.num_parameters(only_trainable=True)

    def _run_epoch(self, *args, resume_from_checkpoint: str | None = None, **kwargs) -> None:
        """Ends a run that resumes from its last step's checkpoint; Trainer would take one more step."""
        if self.parallel is not None and self.state.global_step >= self.state.max_steps:
            self._load_rng_state(resume_from_checkpoint)
            self.control.should_training_stop = True
            return
        super()._run_epoch(*args, resume_from_checkpoint=resume_from_checkpoint, **kwargs)

    # ---- A step, from its batches to the check of its gradients ----

    def get_batch_samples(self, epoch_iterator: Iterator, num_batches: int, device: torch.device):
        """Reads the batches of a step on rank 0, and gives every rank the global batches."""
        if self.parallel is None or overrides(self, "get_batch_samples"):
            return super().get_batch_samples(epoch_iterator, num_batches, device)
        number, last = self.state.global_step, self.state.global_step + 1 >= self.state.max_steps
        found, placement = self._components.packer.read_step(epoch_iterator, num_batches, step=number, last=last)
        self._step_state = StepState(number=number, placement=placement, count=len(found))
        return found, self._get_num_items_in_batch(found, device)

    def _read_batches(self, method, epoch_iterator: Iterator, num_batches: int, device: torch.device):
        """Has a subclass's own method choose the batches of a step, on every rank from what rank 0 reads."""
        samples, num_items = method(SharedIterator(epoch_iterator), num_batches, device)
        self._step_state = StepState(number=self.state.global_step, count=len(samples))
        return samples, num_items

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device):
        """Counts the targets of global batches, so that nothing is summed over ranks."""
        if self.parallel is None:
            return super()._get_num_items_in_batch(batch_samples, device)
        with as_one_process(self.args):
            items = super()._get_num_items_in_batch(batch_samples, torch.device("cpu"))
        return to_device(items, device) if isinstance(items, torch.Tensor) else items

    def _prepare_input(self, data: Any) -> Any:
        """Copies tensors to a GPU without waiting for it."""
        if self.parallel is None or not isinstance(data, torch.Tensor):
            return super()._prepare_input(data)
        return to_device(data, self.args.device)

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch=None) -> torch.Tensor:
        """Computes the batches of a step as one global batch, at the last of them. If a subclass computes batches or
        their loss itself, it is called for each batch instead, see [`GalvatronMixin._compute_batch`].
        """
        if self.parallel is None or computes_batches(self):
            return super().training_step(model, inputs, num_items_in_batch)
        step = self._step_state or StepState(number=self.state.global_step)
        self._step_state = step = step.with_batch(inputs, num_items_in_batch)
        # Where a stream ends inside a step, Trainer keeps the gradients of its last batches for the next step.
        if len(step.batches) < step.count and not self.accelerator.gradient_state.sync_gradients:
            return torch.zeros((), device=self.args.device)
        step = self._components.packer.pack(step)
        # A second call in a step brings its own batch.
        step = self._step_state = replace(step, batches=(), placement=None)
        model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        self.parallel.streams.step = self.parallel.timeline.step = step.number
        began = time.thread_time()
        self._step_state = replace(step, loss=self._forward_backward(step))
        self._components.packer.add_seconds(time.thread_time() - began)
        every = self.args.torch_empty_cache_steps
        if every is not None and step.number % every == 0:
            clear_device_cache()
        return self._step_state.loss

    def _compute_batch(
        self, method, model: nn.Module, inputs: dict[str, Any], num_items_in_batch=None
    ) -> torch.Tensor:
        """Has a subclass's own methods, or Trainer's with its own loss, compute one global batch of a step."""
        step = self._step_state or StepState(number=self.state.global_step)
        step = self._step_state = step.with_batch(dict(inputs), num_items_in_batch)
        self.current_gradient_accumulation_steps = step.count
        loss = self._trusted_step(method, step, len(step.batches) - 1, inputs)
        total = loss.float() if step.loss is None else step.loss + loss
        self._step_state = replace(step, batch=step.batches, loss=total)
        return loss

    def _trusted_step(self, method, step: StepState, index: int, inputs: dict[str, Any]) -> torch.Tensor:
        """Calls the method that computes one of a step's batches; returns the loss."""
        self.parallel.streams.step = self.parallel.timeline.step = step.number
        ends_step = overrides(self, "training_step") or index + 1 == step.count
        forward, backward = self.parallel.forward, self.accelerator.backward

        def checked_backward(loss: torch.Tensor, **kwargs: Any) -> None:
            forward.check_graph(loss)
            backward(loss, **kwargs)

        with contextlib.ExitStack() as stack:
            stack.enter_context(as_one_process(self.args))
            stack.enter_context(forward.of_step(index, ends_step=ends_step))
            stack.enter_context(replaced(self.accelerator, backward=checked_backward))
            stack.enter_context(explained_weights())
            return method(self.model, inputs, step.num_items)

    def _forward_backward(self, step: StepState) -> torch.Tensor:
        """Returns the loss of a step's batch, after the backward of all its micro-batches."""
        if computes_batches(self):
            method = super().training_step
            losses = [self._trusted_step(method, step, at, dict(inputs)) for at, inputs in enumerate(step.batches)]
            return torch.stack(losses).sum()
        require_labels(step.batch, self.parallel.runner.loss)
        smoothing = self.args.label_smoothing_factor
        return self._step_plans.forward_backward(step.plan, step.batch, step.num_items, label_smoothing=smoothing)

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        """Clips by the norm of all ranks' gradients."""
        if self.parallel is None:
            return super()._clip_grad_norm(model)
        return self.parallel.clip_grad_norm_(self.args.max_grad_norm, self._reduced_norm())

    def _reduced_norm(self) -> torch.Tensor:
        """Returns the norm of all gradients. The same collective sums the votes to stop. The numbers of the step
        are copied to the host from here on, while a GPU scales its gradients.
        """
        norm, votes = self.parallel.sum_with_grad_norm(self._stop_signal.vote)
        if self._step_state is not None and self._step_state.loss is not None:  # a callback may clip at another time
            self._step_state = self._step_state.with_numbers(norm, votes)
        return norm

    def _get_grad_norm(self, model: nn.Module, grad_norm=None):
        """Checks the step before the optimizer's update, besides returning the norm of all gradients. If the step is
        not finite and the policy is to stop, every rank raises NonFiniteError.
        """
        if self.parallel is None:
            return super()._get_grad_norm(model, grad_norm=grad_norm)
        norm = self._reduced_norm() if grad_norm is None or self._step_state.numbers is None else grad_norm
        step, self._step_state = self._step_state.with_norm(norm), None
        norm_value, loss, votes = step.numbers.tolist()
        self._stop_signal.count_votes(votes, step.number + 1, self.args.process_index)
        # Trainer asks for it before it steps the learning rate; without gradients optimizers change nothing.
        mark_step_skipped(self.optimizer, self._components.guard.skips(step, norm_value, loss))
        self.parallel.timeline.action = None
        return norm if grad_norm is None else grad_norm

    # ---- After a step, and after the last one ----

    def _maybe_log_save_evaluate(self, tr_loss: torch.Tensor, *args, **kwargs) -> None:
        """Sets the sum of losses to zero after a log; Trainer subtracts it from itself, which leaves NaN as it is. All
        ranks log rank 0's learning rate: the groups of later stages may be others. They tell each other their waits.
        """
        if self.parallel is not None and self.parallel.pipeline is not None and self.control.should_log:
            pace = self._components.pace
            rates, shares = zip(*gather_objects((kwargs.get("learning_rate"), pace.waited_share)), strict=True)
            kwargs["learning_rate"] = rates[0]
            pace.note_bubble(shares, self.parallel.plan.rank_groups)
        logged_before = self._globalstep_last_logged
        super()._maybe_log_save_evaluate(tr_loss, *args, **kwargs)
        if self.parallel is not None and self._globalstep_last_logged > logged_before:
            tr_loss.zero_()

    def store_flos(self) -> None:
        """Adds up the operations of global batches, which every rank counts."""
        if self.parallel is None:
            super().store_flos()
            return
        self.state.total_flos += self.current_flos
        self.current_flos = 0

    def log(self, logs: dict[str, float], *args, **kwargs) -> None:
        """Adds the pace of steps, the time that saving has taken, measurements of packing, and skipped steps."""
        if self.parallel is not None:
            parts = self._components
            for part in (parts.checkpointer, parts.packer, parts.guard, parts.dispatch, parts.pace):
                part.add_logs(logs)
        super().log(logs, *args, **kwargs)

    def _report_to_hp_search(self, trial, step: int, metrics: dict[str, float]) -> None:
        """Prunes a trial on all ranks if rank 0's study prunes it."""
        report = super()._report_to_hp_search
        if self.hp_search_backend is None or trial is None or self.args.world_size == 1:
            report(trial, step, metrics)
        else:
            self._study.report(lambda: report(trial, step, metrics))

    def _finalize_training(self, *args, **kwargs):
        """Waits for the checkpoint in the background, and keeps Trainer from deleting checkpoints."""
        if self.parallel is None:
            return super()._finalize_training(*args, **kwargs)
        with self._components.checkpointer.tolerating_failure(self.state):
            self._components.checkpointer.finish()
        with without_pruning(self.args):
            return super()._finalize_training(*args, **kwargs)

    # ---- Loaders ----

    def get_train_dataloader(self):
        """Makes a loader of the batches of all ranks."""
        with self._batches.of_training():
            return super().get_train_dataloader()

    def get_eval_dataloader(self, *args, **kwargs):
        """Makes a loader that rank 0 reads for all ranks."""
        return self._shared(super().get_eval_dataloader(*args, **kwargs))

    def get_test_dataloader(self, *args, **kwargs):
        """Makes a loader that rank 0 reads for all ranks."""
        return self._shared(super().get_test_dataloader(*args, **kwargs))

    def _shared(self, loader):
        if not self._runs_parallel() or isinstance(loader, GlobalBatchLoader):
            return loader
        return GlobalBatchLoader(loader)

    def _get_train_sampler(self, *args, **kwargs):
        """Groups rows by length over the global batch."""
        sampler = super()._get_train_sampler(*args, **kwargs)
        with self._batches.of_training():
            return self._batches.sampler(sampler) if self._runs_parallel() else sampler

    def _get_eval_sampler(self, *args, **kwargs):
        """Groups rows by length over the global batch."""
        sampler = super()._get_eval_sampler(*args, **kwargs)
        return self._batches.sampler(sampler) if self._runs_parallel() else sampler

    # ---- Evaluation and generation ----

    def evaluation_loop(self, dataloader, *args, **kwargs):
        """Applies the plan first, and gathers predictions in the order of the global batch."""
        self._meet("evaluate or predict")
        self.ensure_parallel()
        if self.parallel is None:
            return super().evaluation_loop(dataloader, *args, **kwargs)
        guarded = {}
        if predicts_batches(self):
            guarded["prediction_step"] = Guard(self, "prediction_step", self._predict_batch)
        # Seq2SeqTrainer gathers with this function, and Trainer with the one that drops what a last batch repeats.
        self._components.evaluator.repeats = self.gather_function is self.accelerator.gather
        self.gather_function = self._components.evaluator.gather
        try:
            with replaced(self, **guarded):
                with self._components.packer.paused():
                    return super().evaluation_loop(self._shared(dataloader), *args, **kwargs)
        finally:
            self.gather_function = self.accelerator.gather_for_metrics

    def prediction_step(
        self, model: nn.Module, inputs, prediction_loss_only: bool, ignore_keys=None, **gen_kwargs
    ) -> Prediction:
        """Computes the loss of the global batch, and logits and labels of this rank's equal share of it. If a subclass
        predicts batches or computes their loss itself, they are whole, see [`GalvatronMixin._predict_batch`].
        """
        if self.parallel is None or predicts_batches(self):
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys=ignore_keys, **gen_kwargs)
        evaluator = self._components.evaluator
        if getattr(self.args, "predict_with_generate", False) and not prediction_loss_only:
            options = gen_kwargs or getattr(self, "_gen_kwargs", {})
            return evaluator.generate(
                inputs, self.model.generate, getattr(self, "_pad_tensors_to_max_len", None), options
            )
        if ignore_keys is None:
            ignore_keys = getattr(self.model.config, "keys_to_ignore_at_inference", ())
        return evaluator.predict(inputs, prediction_loss_only, ignored=ignore_keys)

    def _predict_batch(self, method, model: nn.Module, inputs, *args, **kwargs) -> Prediction:
        """Has a subclass's own methods, or Trainer's with its own loss, predict one global batch."""
        with as_one_process(self.args), self.parallel.forward.of_step():
            prediction = method(self.model, inputs, *args, **kwargs)
        return self._components.evaluator.whole(inputs, prediction)

    def generate(self, *args, **kwargs) -> torch.Tensor:
        """Generates tokens with the trained model; collective, and allowed in callbacks; see [`generate`]."""
        self._meet("generate")
        self.ensure_parallel()
        if self.parallel is None:
            return self.model.generate(*args, **kwargs)
        return generate(self.parallel, *args, **kwargs)

    # ---- Checkpoints ----

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Writes safetensors, configuration and tokenizer that `from_pretrained` opens anywhere; collective."""
        self._meet("save_model")
        self.ensure_parallel()
        if self.parallel is None:
            super().save_model(output_dir, _internal_call)
            return
        weights = not _internal_call or self.args.save_only_model or getattr(self.args, "save_full_weights", True)
        self._components.checkpointer.save_model(output_dir or self.args.output_dir, weights=weights)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_checkpoint(self, model: nn.Module, trial) -> None:
        """Writes a checkpoint that any plan can load, into a folder that gets its name when it is complete."""
        if self.parallel is None:
            super()._save_checkpoint(model, trial)
            return
        if self.hp_search_backend is None and trial is None:
            self.store_flos()
        self._components.checkpointer.save(
            self._get_output_dir(trial=trial),
            state=self.state,
            optimizer=self.optimizer,
            scheduler=self.lr_scheduler,
            callbacks=[*self.callback_handler.callbacks, self.control],
            push=self._push_from_checkpoint if self.args.push_to_hub else None,
        )

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Loads weights that were saved under any plan, or by plain Trainer; into a plan or a plain model."""
        self.ensure_parallel()
        if self.parallel is not None:
            self._components.checkpointer.load_weights(resume_from_checkpoint)
        elif is_written_under_a_plan(resume_from_checkpoint):
            load_plain_weights(resume_from_checkpoint, self.model)
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        """Loads the best checkpoint only if it is complete and lies in the output folder."""
        if self.parallel is None:
            super()._load_best_model()
            return
        best = self.state.best_model_checkpoint
        require_inside(best, self.args.output_dir)
        self._finder.require_complete(best)
        logger.info(f"Loading best model from {best} (score: {self.state.best_metric}).")
        self._load_from_checkpoint(best)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Loads states that were saved under any plan, or by plain Trainer; into a plan or a plain model."""
        if self.parallel is not None and checkpoint is not None:
            self._components.checkpointer.load_optimizer_and_scheduler(checkpoint, self.optimizer, self.lr_scheduler)
        elif is_written_under_a_plan(checkpoint):
            load_plain_optimizer_and_scheduler(checkpoint, self.model, self.optimizer, self.lr_scheduler)
        else:
            super()._load_optimizer_and_scheduler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Restores rank 0's random state, or that of a run of one process, if this rank has no file of its own."""
        rank, world_size = self.args.process_index, self.args.world_size
        if self.parallel is not None:
            self._components.packer.forget_random_state()
        if checkpoint is None or load_random_state(checkpoint, rank):
            return
        with plain_random_files(checkpoint, rank, world_size) as folder:
            super()._load_rng_state(folder)

    # ---- Components, and what they have counted ----

    @cached_property
    def _batches(self) -> GlobalBatches:
        return GlobalBatches(self.args)

    @cached_property
    def _finder(self) -> CheckpointFinder:
        return CheckpointFinder(self.args.process_index, self.args.world_size)

    @cached_property
    def _planner(self) -> AutoPlanner:
        return auto_planner(self)

    @cached_property
    def _study(self) -> SharedStudy:
        return SharedStudy(self.args.process_index, self.args.world_size)

    def _meet(self, call: str) -> None:
        """Has all ranks enter a collective call together: a rank that does not come is named, see [`Meetings`]."""
        if self._runs_parallel():
            self._world.meetings.meet(call)

    @cached_property
    def _world(self) -> WorldMesh:
        return WorldMesh(self.args.device.type, timedelta(seconds=self.args.ddp_timeout))

    @property
    def search_result(self) -> SearchResult | None:
        """Returns the result of the last search for a plan, on rank 0."""
        return self._planner.search_result

    @property
    def expert_imbalance(self) -> Mapping[int, float]:
        """Returns most rows at a rank over their mean in the last training run, by expert degree; empty if no experts
        are spread over ranks.
        """
        return {} if self._components is None else self._components.dispatch.imbalance

    @property
    def failed_saves(self) -> int:
        """Counts checkpoints that could not be written while training went on."""
        return 0 if self._components is None else self._components.checkpointer.failed_saves

    @property
    def skipped_steps(self) -> int:
        """Counts steps without an update since training began."""
        return 0 if self._components is None else self._components.guard.skipped_steps

    @property
    def cut_sequences(self) -> int:
        """Counts documents that were truncated or split since training began."""
        return 0 if self._components is None else self._components.packer.cut_sequences
