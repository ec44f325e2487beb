# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""`parallel_plan="auto"`: measures the machine and the model, and searches the plan to train under."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from torch import nn
from transformers.utils import logging

from galvatron_hf.data.lengths import sequence_lengths
from galvatron_hf.models.families import adapter_for
from galvatron_hf.parallel.comm.objects import from_rank_0
from galvatron_hf.parallel.data_parallel.sharding import DTYPES
from galvatron_hf.parallel.validate import check_model, check_plan
from galvatron_hf.plan import ParallelPlan, Precision
from galvatron_hf.planner.cost.workload import Workload
from galvatron_hf.planner.report.report import explain
from galvatron_hf.planner.search import SearchResult, search_plan
from galvatron_hf.planner.space import Limits
from galvatron_hf.profiler.cache import load_or_profile_hardware, load_or_profile_model
from galvatron_hf.profiler.measure.model import config_digest
from galvatron_hf.profiler.profiles.hardware import HardwareProfile
from galvatron_hf.profiler.profiles.model import ModelProfile
from galvatron_hf.profiler.trace.tracing import positions
from galvatron_hf.trainer.checkpoint.random_state import random_state, restore_random_state
from galvatron_hf.trainer.data.packable import only_pads
from galvatron_hf.trainer.planning.calibration import calibrated
from galvatron_hf.trainer.planning.step_meter import Outcome, StepMeter, held_bytes, outcome, prediction
from galvatron_hf.utils.units import GIB


logger = logging.get_logger(__name__)

SAMPLED_ROWS = 64  # of a dataset whose lengths are not known
SAMPLED_BATCHES = 256
MOST_TOKENS = 4096  # of a micro-batch that is timed
# Upper bounds for measuring the machine, the parts of the model and whole steps; accuracy usually ends them earlier.
HARDWARE_SECONDS, MODEL_SECONDS, CALIBRATION_SECONDS = 40.0, 30.0, 240.0
GPU_SHARE = 0.92  # of a GPU's memory: the rest is the driver's, NCCL's, and lost between allocations


class AutoPlanMixin:
    """The part of [`GalvatronMixin`] that searches a plan and says how right the search was; see there.

    Attributes:
        search_result ([`SearchResult`], *optional*): on rank 0, of the last search.
        plan_outcome ([`Outcome`], *optional*): predicted and measured step time and memory of the last training run
            under a plan that a search has made.
    """

    search_result: SearchResult | None = None
    plan_outcome: Outcome | None = None
    _searched: tuple[Any, ParallelPlan] | None = None

    # ---- The search ----

    def _automatic_plan(self, model: nn.Module) -> ParallelPlan:
        """The fastest plan for this machine, model and batch; collective."""
        if self.train_dataset is None:
            return self._plan_without_search(model)
        key = self._searched_for(model)
        if self._searched is None or self._searched[0] != key:
            state = random_state()
            try:
                self._searched = key, self._search(model)
            finally:
                restore_random_state(state)  # models were made and dropout ran: training is not to draw anything else
        return self._searched[1]

    def _searched_for(self, model: nn.Module) -> tuple:
        """What a search goes by; while it stays, so does the plan that was found."""
        budget, tokens = (getattr(self.args, name, None) for name in ("memory_gib", "max_tokens_per_rank"))
        batch = self._rows_of_step(), id(self.train_dataset), self._packing, tokens
        return config_digest(model), self._precision(model), batch, self._limits(), budget

    def _plan_without_search(self, model: nn.Module) -> ParallelPlan:
        """ZeRO-3, which needs the least memory of what is simple."""
        stacks = adapter_for(model).stack_sizes(model)
        recompute = "full" if self.args.activation_checkpointing else "none"
        return ParallelPlan.uniform(self.args.world_size, stacks, recompute=recompute)

    def _rows_of_step(self) -> int:
        return self.args.train_batch_size * self.args.gradient_accumulation_steps * self.args.world_size

    def _search(self, model: nn.Module) -> ParallelPlan:
        shown = not self.args.disable_tqdm
        workload = from_rank_0(lambda: self._workload(model))
        folder = profile_folder(self.args)
        hardware = load_or_profile_hardware(
            folder,
            local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", self.args.world_size)),
            device=self.args.device,
            seconds=HARDWARE_SECONDS,
            progress=shown,
        )
        profile = load_or_profile_model(
            folder,
            model,
            dtype=workload.precision.compute,
            device=self.args.device,
            tokens=min(MOST_TOKENS, _rounded_up(workload.rows * workload.length)),
            length=min(_rounded_up(workload.length), positions(model) or sys.maxsize),
            packed=self._may_pack(),
            seconds=MODEL_SECONDS,
            progress=shown,
            finish=lambda measured: calibrated(
                measured,
                model,
                hardware,
                world=self._own_world(),
                rows=workload.rows,
                length=min(workload.computed_length, MOST_TOKENS),
                device=self.args.device,
                seconds=CALIBRATION_SECONDS,
                progress=shown,
            ),
        )
        text = from_rank_0(lambda: self._search_on_rank_0(hardware, profile, workload).to_json())
        plan = ParallelPlan.from_json(text)
        check_plan(plan)
        check_model(model, adapter_for(model), plan)
        return plan

    def _search_on_rank_0(self, hardware: HardwareProfile, profile: ModelProfile, workload: Workload) -> ParallelPlan:
        budget = memory_budget(self.args, hardware)
        shown = not self.args.disable_tqdm
        result = search_plan(hardware, profile, workload, memory_bytes=budget, limits=self._limits(), progress=shown)
        if result.best is None:
            raise ValueError(result.no_plan_message)
        self.search_result = result
        if shown:
            from rich.console import Console

            Console().print(explain(result, compare=False))
        return result.best.plan_with_prediction(workload)

    def _limits(self) -> Limits:
        """What the arguments and the Trainer's own methods leave of the space."""
        limits = Limits()
        if self.args.activation_checkpointing:
            limits = replace(limits, recompute=("full",))
        if self._overrides_compute_loss():
            limits = replace(limits, pipeline=(1,))  # no rank of a pipeline has the whole model
        return limits

    def _may_pack(self) -> bool:
        return self._packing == "static" or (self._packing == "auto" and only_pads(self.data_collator))

    def _workload(self, model: nn.Module) -> Workload:
        """What a step computes, from the lengths of the dataset's rows; on rank 0."""
        rows, precision = self._rows_of_step(), self._precision(model)
        lengths = self._row_lengths()
        if not len(lengths):
            length = min(positions(model) or 1024, getattr(self.args, "max_tokens_per_rank", None) or 1024)
            logger.warning(
                f"The dataset does not tell how long its rows are: the plan is searched for rows of {length} tokens."
            )
            return Workload(rows=rows, length=length, precision=precision)
        if not self._may_pack():  # rows are padded to the longest of their batch
            computed = np.random.default_rng(0).choice(lengths, (SAMPLED_BATCHES, rows)).max(axis=1)
        elif self._long_sequences != "error" and getattr(self.args, "max_tokens_per_rank", None):
            computed = lengths = np.minimum(lengths, self.args.max_tokens_per_rank)
        else:
            computed = lengths
        return Workload(
            rows=rows,
            length=int(lengths.max()),
            precision=precision,
            mean_length=max(1, round(float(computed.mean()))),
            mean_square=float(np.square(computed, dtype=float).mean()),
        )

    def _precision(self, model: nn.Module) -> Precision:
        weights = {parameter.dtype for parameter in model.parameters()}
        half = self.args.bf16 or weights == {DTYPES["bf16"]}
        return Precision(compute="bf16" if half else "fp32")

    def _row_lengths(self) -> np.ndarray:
        """Tokens of the training set's rows, of some of them where all are not known; empty if none can be read."""
        known = sequence_lengths(self.train_dataset, length_column=self.args.length_column_name)
        if known is not None:
            return known[known > 0]
        state = random_state()
        try:
            if hasattr(self.train_dataset, "__getitem__") and hasattr(self.train_dataset, "__len__"):
                count = len(self.train_dataset)
                places = np.unique(np.linspace(0, count - 1, min(SAMPLED_ROWS, count)).astype(int))
                rows = (self.train_dataset[int(place)] for place in places)
            elif isinstance(self.train_dataset, datasets.IterableDataset):
                rows = itertools.islice(iter(self.train_dataset), SAMPLED_ROWS)
            else:  # another stream may have only one beginning
                rows = ()
            return np.array([len(row["input_ids"]) for row in rows if len(row.get("input_ids", ()))], dtype=np.int64)
        except (TypeError, KeyError, AttributeError):  # rows that have no such column before they are collated
            return np.zeros(0, dtype=np.int64)
        finally:
            restore_random_state(state)

    # ---- What became of it ----

    @contextlib.contextmanager
    def _metered(self) -> Iterator[None]:
        """Around a training run: prints what was predicted beside what was measured; collective behind it."""
        self.plan_outcome = None
        noted = prediction(self.parallel.plan) if self.parallel is not None else None
        if noted is None or noted.get("rows", self._rows_of_step()) != self._rows_of_step():
            yield
            return
        meter = StepMeter(self.args.device, lambda: held_bytes(self.model, self.optimizer))
        self.add_callback(meter)
        try:
            yield
        finally:
            self.remove_callback(meter)
            meter.finish()
        self.plan_outcome = outcome(meter, self.parallel.plan)
        if self.is_world_process_zero() and not self.args.disable_tqdm:
            print(self.plan_outcome, flush=True)


def profile_folder(args: Any) -> Path:
    """Where profiles are kept: `profile_dir` of the arguments, `GALVATRON_CACHE`, or a folder of the user's cache."""
    given = getattr(args, "profile_dir", None) or os.environ.get("GALVATRON_CACHE")
    if given:
        return Path(given)
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(cache) / "galvatron-hf"


def memory_budget(args: Any, hardware: HardwareProfile) -> int:
    """Bytes of a rank that a plan may take: what the arguments say, or most of the device."""
    given = getattr(args, "memory_gib", None)
    if given is not None:
        return int(given * GIB)
    return int(hardware.memory_bytes * (GPU_SHARE if hardware.made.get("backend") == "nccl" else 1.0))


def _rounded_up(number: int) -> int:
    """A power of two, so that a profile serves datasets of about the same lengths."""
    return 1 << (number - 1).bit_length()
