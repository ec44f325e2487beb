# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""GalvatronMixin: any Trainer, under a parallel plan."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import Seq2SeqTrainer, Trainer
from transformers.utils import logging

from galvatron_hf.data.loader import batch_rows
from galvatron_hf.models.families import adapter_for
from galvatron_hf.models.losses import NEXT_TOKEN
from galvatron_hf.parallel.comm.mesh import WorldMesh
from galvatron_hf.parallel.model import ParallelModel
from galvatron_hf.parallel.parallelize import parallelize
from galvatron_hf.parallel.validate import check_model, check_plan
from galvatron_hf.plan import ParallelPlan
from galvatron_hf.plan.supported import require_runnable
from galvatron_hf.trainer.arguments import check_arguments, packing_mode, requested_plan, with_precision
from galvatron_hf.trainer.checkpoint.checkpoints import PLAN_FILE, CheckpointMixin, plan_of_checkpoint
from galvatron_hf.trainer.checkpoint.loading import LoadingMixin
from galvatron_hf.trainer.checkpoint.restart import checkpoint_of_restart
from galvatron_hf.trainer.checkpoint.saving import SaveError, save_on_every_rank
from galvatron_hf.trainer.data.global_batches import GlobalBatchMixin, as_one_process
from galvatron_hf.trainer.data.packing import PackingMixin
from galvatron_hf.trainer.evaluation import EvaluationMixin
from galvatron_hf.trainer.fault.nonfinite import HealthMixin
from galvatron_hf.trainer.fault.signals import StoppingMixin
from galvatron_hf.trainer.fault.watchdog import WatchdogMixin
from galvatron_hf.trainer.hyperparameter_search import SearchMixin
from galvatron_hf.trainer.loss.custom_loss import CustomLoss
from galvatron_hf.trainer.loss.neftune import add_embedding_noise
from galvatron_hf.trainer.planning.auto import AutoPlanMixin


logger = logging.get_logger(__name__)


class GalvatronMixin(
    AutoPlanMixin,
    SearchMixin,
    LoadingMixin,
    EvaluationMixin,
    CheckpointMixin,
    GlobalBatchMixin,
    PackingMixin,
    HealthMixin,
    StoppingMixin,
    WatchdogMixin,
):
    """Trains under a plan; put it before any subclass of [`~transformers.Trainer`].

    The global batch of an optimizer step is `per_device_train_batch_size * gradient_accumulation_steps * WORLD_SIZE`
    sequences, read once and given to every rank; the plan says how it is computed, never what is computed. On one
    process without a plan it is the Trainer it is mixed into.

    Raises:
        ValueError: for plans, models and arguments that cannot run, before anything is changed.

    Example:

    ```python
    class GalvatronSFTTrainer(GalvatronMixin, trl.SFTTrainer): ...
    ```
    """

    def __init__(self, *args, **kwargs):
        self.parallel: ParallelModel | None = None
        self._world: WorldMesh | None = None
        self._pending_batches: list[dict[str, Any]] = []
        self._resumed_plan: ParallelPlan | None = None
        args, kwargs = self._with_model(args, kwargs)
        super().__init__(*args, **kwargs)
        if self._runs_parallel():
            self._check_before_start()
        elif packing_mode(self.args) == "static":
            raise ValueError("packing='static' needs a plan, and this process has none; give parallel_plan.")

    def create_accelerator_and_postprocess(self) -> None:
        """As Trainer's, which calls it before anything is done to the model and again for each trial of a search."""
        self._requested_plan = requested_plan(self.args)
        if self._runs_parallel():
            check_arguments(self.args, self._requested_plan)
        super().create_accelerator_and_postprocess()

    # ---- Plan ----

    def _runs_parallel(self) -> bool:
        """On one process only with a plan, whose recompute, micro-batches and precision count for one rank too."""
        return self.args.world_size > 1 or self._requested_plan is not None

    def _check_before_start(self) -> None:
        if self._requested_plan is not None:
            require_runnable(self._requested_plan, self.args.world_size)
        if not dist.is_initialized():
            start_group_of_one(self.args.device)
        if self.optimizer is not None or self.lr_scheduler is not None:
            raise ValueError(
                "optimizers=... holds weights that a plan replaces by shards; pass optimizer_cls_and_kwargs, "
                "or override create_optimizer."
            )
        # What fits a simple plan fits the one that a search finds later.
        plan = with_precision(self._requested_plan or self._plan_without_search(self.model), self.args)
        check_plan(plan)
        check_model(self.model, adapter_for(self.model), plan)
        if len(plan.stages) > 1 and self._overrides_compute_loss():
            raise ValueError(
                f"{type(self).__name__} overrides compute_loss, which needs the whole model, and under a plan of "
                f"{len(plan.stages)} stages no rank has it; pass compute_loss_func, or use a plan of one stage."
            )

    def plan_for(self, model: nn.Module) -> ParallelPlan:
        """The plan to train `model` under: the given one, the resumed checkpoint's, or a search's; collective."""
        plan = self._requested_plan or self._resumed_plan
        if plan is self._resumed_plan and plan is not None and self.args.bf16:
            plan = replace(plan, precision=None)  # nobody gave it to this run: the arguments decide
        if plan is None:
            plan = self._automatic_plan(model)
        return with_precision(plan, self.args)

    def ensure_parallel(self) -> None:
        """Puts the plan onto `self.model`, unless it is there; collective."""
        if not self._runs_parallel() or (self.parallel is not None and self.parallel.model is self.model):
            return
        self._set_signature_columns_if_needed()
        plan, weights = self.plan_for(self.model), self._weight_source()
        if {parameter.dtype for parameter in self.model.parameters()} == {torch.bfloat16}:
            logger.warning("The model was loaded in bf16; its master weights are kept in fp32 from here on.")
            plan = replace(plan, precision=replace(plan.precision, compute="bf16"))
            self.model.float()
        world, device = self._own_world(), self.args.device
        self.parallel = parallelize(self.model, plan, world=world, weights=weights, device=device)
        self.parallel.streams.seed = self.args.seed
        self._custom_loss = CustomLoss(
            parallel=self.parallel,
            compute_loss=as_one_process(self.args)(self.compute_loss),
            count_items=lambda batches: self._get_num_items_in_batch(batches, device),
            is_divided=self.loss_is_scaled_for_ga,
            name=type(self).__name__,
        )
        # Trainer then leaves placement and wrapping of the model to us.
        self.is_distributed_loading_by_transformers = True
        self._write_plan(plan)
        if self.is_world_process_zero() and not self.args.disable_tqdm:
            print(plan, flush=True)

    def _own_world(self) -> WorldMesh:
        """Groups of all plans of this trainer, made once."""
        if self._world is None:
            self._world = WorldMesh(self.args.device.type, timedelta(seconds=self.args.ddp_timeout))
        return self._world

    def _write_plan(self, plan: ParallelPlan) -> None:
        folder = self.args.output_dir

        def write() -> None:
            if self.args.should_save:
                os.makedirs(folder, exist_ok=True)
                plan.to_json(os.path.join(folder, PLAN_FILE))

        try:
            save_on_every_rank(write, f"Writing the plan to {folder}")
        except SaveError as error:
            if getattr(self.args, "on_save_failure", "stop") == "stop":
                raise
            logger.warning(f"{error}; training goes on without it.")

    # ---- Set-up of a training run ----

    def train(self, resume_from_checkpoint: str | bool | None = None, trial=None, *args, **kwargs):
        """See [`~transformers.Trainer.train`]; a resumed run takes the checkpoint's plan if none is given.

        An attempt that a launcher has restarted resumes by itself, see [`checkpoint_of_restart`].
        """
        if resume_from_checkpoint is None and trial is None and self._runs_parallel():
            resume_from_checkpoint = checkpoint_of_restart(self.args.output_dir, self._newest_checkpoint)
        else:
            resume_from_checkpoint = self._checkpoint_to_resume(resume_from_checkpoint)
        if resume_from_checkpoint is not None and self._runs_parallel():
            self._resumed_plan = plan_of_checkpoint(resume_from_checkpoint, self.args.world_size)
            self._load_packing(resume_from_checkpoint)
            self._weights_come_later = True
        try:
            return super().train(resume_from_checkpoint, trial, *args, **kwargs)
        finally:
            self._weights_come_later = False

    def _inner_training_loop(self, *args, **kwargs):
        self.ensure_parallel()
        if self.parallel is not None:
            # The plan says what is recomputed; gradient_checkpointing=True has made it say so for every layer.
            for layer in self.parallel.layers:
                layer.gradient_checkpointing = False
            self._pending_batches = []
            self._begin_packing()
            # An evaluation leaves some weights gathered; the optimizer is to hold the shards.
            self.parallel.units.reshard()
            if self.neftune_noise_alpha is not None:
                self.neftune_hook_handle.remove()
                self.neftune_hook_handle = add_embedding_noise(self.parallel, self.neftune_noise_alpha)
        with contextlib.ExitStack() as around:
            for context in (
                self._metered,
                self._settled,
                self._traced,
                self._nothing_filtered,
                self._stoppable,
                self._guarded,
            ):
                around.enter_context(context())
            around.callback(self._end_packing)
            return super()._inner_training_loop(*args, **kwargs)

    def _run_epoch(self, *args, resume_from_checkpoint: str | None = None, **kwargs) -> None:
        """As Trainer's, which takes one step too many in a run that resumes from its last step's checkpoint."""
        if self.parallel is not None and self.state.global_step >= self.state.max_steps:
            self._load_rng_state(resume_from_checkpoint)
            self.control.should_training_stop = True
            return
        super()._run_epoch(*args, resume_from_checkpoint=resume_from_checkpoint, **kwargs)

    def _finalize_training(self, *args, **kwargs):
        with self._survived_if_wanted():
            self._finish_saving()
        limit = self.args.save_total_limit
        if self.parallel is not None:
            self.args.save_total_limit = None  # where it is 1, Trainer deletes the newest checkpoint for the best one
        try:
            return super()._finalize_training(*args, **kwargs)
        finally:
            self.args.save_total_limit = limit

    @contextlib.contextmanager
    def _traced(self) -> Iterator[None]:
        """Writes the timeline of all ranks where `GALVATRON_TRACE` or the arguments ask for one."""
        folder = os.environ.get("GALVATRON_TRACE") or getattr(self.args, "trace_dir", None)
        if self.parallel is None or not folder:
            yield
            return
        timeline = self.parallel.timeline
        timeline.on = True
        try:
            yield
        finally:
            timeline.on = False
        timeline.write(folder)

    def _build_accelerator_args(self, **kwargs) -> dict[str, Any]:
        arguments = super()._build_accelerator_args(**kwargs)
        if self._runs_parallel():
            # The plan's precision is applied by sharding; accelerate would put autocast around the whole model.
            arguments["mixed_precision"] = "no"
        return arguments

    def _prepare_for_training(self, *args, **kwargs):
        try:
            prepared = super()._prepare_for_training(*args, **kwargs)
        except ValueError as error:
            if "empty parameter list" not in str(error) or self.parallel is None or self.parallel.pipeline is None:
                raise
            raise ValueError(
                f"Nothing is trained in the stages of rank {self.args.process_index}, and this optimizer takes no "
                "empty list; give it groups ({'params': [...]}), which may be empty."
            ) from error
        if self.parallel is not None and self.parallel.tied is not None:
            self.parallel.tied.check_options(self.optimizer)
        return prepared

    def get_num_trainable_parameters(self) -> int:
        """As Trainer's; under a pipeline those of all stages."""
        if self.parallel is None or self.parallel.pipeline is None:
            return super().get_num_trainable_parameters()
        return self.model.num_parameters(only_trainable=True)

    def _sync_replicated_trainable_parameters(self, model: nn.Module) -> None:
        if self.parallel is None:
            super()._sync_replicated_trainable_parameters(model)

    def _defer_fsdp_gradient_reduction(self) -> contextlib.AbstractContextManager:
        # A step's micro-batches are the plan's; they defer what their sharding kind says.
        return contextlib.nullcontext() if self.parallel is not None else super()._defer_fsdp_gradient_reduction()

    # ---- Steps ----

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch=None) -> torch.Tensor:
        """Forward and backward of one global batch; the earlier batches of an accumulation window only wait for it."""
        if self.parallel is None:
            return super().training_step(model, inputs, num_items_in_batch)
        self._pending_batches.append(inputs.whole)
        if not self.accelerator.gradient_state.sync_gradients:
            return torch.zeros((), device=self.args.device)
        pending, self._pending_batches = self._pending_batches, []
        batch = self._packed(pending)
        if batch is None:
            batch = self._prepare_inputs(self._joined(pending))
        else:
            num_items_in_batch = self._items_of_packed(batch, num_items_in_batch)
        model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        self.parallel.streams.step = self.parallel.timeline.step = self.state.global_step
        return self._watched_step(batch, num_items_in_batch)

    def _forward_backward(self, batch: dict[str, Any] | list[dict[str, Any]], num_items_in_batch) -> torch.Tensor:
        """Gradients of a global batch, or of its packed micro-batches, and the loss."""
        if self._loss_needs_logits():
            loss_of = self._custom_loss.loss_of(num_items_in_batch, batch_rows(batch))
            return self.parallel.forward_backward(batch, loss_of=loss_of)
        if isinstance(batch, dict):
            _require_labels(batch)
        return self.parallel.forward_backward(
            batch, num_items_in_batch, label_smoothing=self.args.label_smoothing_factor
        )

    def _loss_needs_logits(self) -> bool:
        """Whether the loss is somebody's own function of logits: compute_loss_func, or compute_loss overridden."""
        return self._overrides_compute_loss() or self.compute_loss_func is not None

    def _overrides_compute_loss(self) -> bool:
        return type(self).compute_loss is not Trainer.compute_loss


class GalvatronTrainer(GalvatronMixin, Trainer):
    """[`~transformers.Trainer`] under a parallel plan: same signature, same results.

    Args:
        model ([`~transformers.PreTrainedModel`], `str` or `os.PathLike`, *optional*): a model; one on the meta device,
            whose weights are then initialised here; or a folder or an id on the Hub. Of the last two no rank ever has
            more than its own pieces.
        args ([`GalvatronTrainingArguments`] or [`~transformers.TrainingArguments`]): with the plan, else "auto".

    Example:

    ```python
    args = GalvatronTrainingArguments(output_dir="out", parallel_plan="plan.json")
    GalvatronTrainer(model, args, train_dataset=data).train()
    ```
    """


class GalvatronSeq2SeqTrainer(GalvatronMixin, Seq2SeqTrainer):
    """[`~transformers.Seq2SeqTrainer`] under a parallel plan; `predict_with_generate` generates on rank 0."""


def start_group_of_one(device: torch.device) -> None:
    """Makes this process a world of one rank, so that a plan for one rank runs without a launcher."""
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def _require_labels(batch: dict[str, Any]) -> None:
    if not NEXT_TOKEN.is_labelled(batch):
        raise ValueError(
            f"The batch has no labels, only {sorted(batch)}, so there is no loss to train on; "
            "use DataCollatorForLanguageModeling(tokenizer, mlm=False) or add a labels column."
        )
