# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The planner of `parallel_plan="auto"`: measures the machine and the model, and searches the plan to train under."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from torch import nn
from transformers import TrainingArguments
from transformers.utils import logging

from galvatron_hf.data.lengths import sequence_lengths
from galvatron_hf.models.families import adapter_for
from galvatron_hf.models.lora import computes_in_bf16
from galvatron_hf.parallel.comm.objects import from_rank_0
from galvatron_hf.parallel.validate import check_model, check_plan
from galvatron_hf.plan import ParallelPlan, Precision
from galvatron_hf.planner.cost.workload import Workload
from galvatron_hf.planner.report.report import explain
from galvatron_hf.planner.search import SearchResult, search_plan
from galvatron_hf.planner.space import Limits
from galvatron_hf.profiler.cache import load_or_profile_hardware, load_or_profile_model
from galvatron_hf.profiler.measure.model import config_digest
from galvatron_hf.profiler.measure.rounds import WANTED_ERROR
from galvatron_hf.profiler.profiles.hardware import HardwareProfile
from galvatron_hf.profiler.profiles.model import ModelProfile
from galvatron_hf.profiler.trace.small_models import positions, search_obstacle
from galvatron_hf.trainer.arguments import step_rows
from galvatron_hf.trainer.checkpoint.random_state import random_state, restore_random_state
from galvatron_hf.trainer.planning.calibration import calibrated
from galvatron_hf.utils.units import GIB


logger = logging.get_logger(__name__)

SAMPLED_ROWS = 64  # rows that are read of a dataset whose lengths are not known
SAMPLED_BATCHES = 256
MOST_TOKENS = 4096  # tokens of a micro-batch that is timed
# Upper bounds for measuring the machine, the parts of the model and whole steps; accuracy usually ends them earlier.
HARDWARE_SECONDS, MODEL_SECONDS, CALIBRATION_SECONDS = 40.0, 30.0, 240.0
GPU_SHARE = 0.92  # of a GPU's memory; the driver, NCCL and fragmentation take the rest


@dataclass(kw_only=True)
class AutoPlanner:
    """Finds the fastest plan for this machine, model and batch.

    Args:
        dataset (`Callable`): returns the training set, or None.
        packing (`Callable`): returns the packing mode and whether the collator allows packing.
        whole_batches (`bool`): each batch of a step is computed as a whole, which leaves pipelines nothing to do.
        search_result ([`SearchResult`], *optional*): the result of the last search, on rank 0.
    """

    args: TrainingArguments
    dataset: Callable[[], Any]
    packing: Callable[[], tuple[str, bool]]
    whole_batches: bool = False
    search_result: SearchResult | None = None
    _found: tuple[Any, ParallelPlan] | None = None

    def plan_for(self, model: nn.Module) -> ParallelPlan:
        """Returns the fastest plan; collective. Without a training set it is a simple one, and so it is for a family
        whose layers cannot be run alone.
        """
        if self.dataset() is None:
            return self.plan_without_search(model)
        obstacle = search_obstacle(model)
        if obstacle is not None:
            logger.warning_once(
                f"{type(model).__name__} {obstacle}, so that no search covers it: its layers are sharded by ZeRO-3."
            )
            return self.plan_without_search(model)
        key = self._search_key(model)
        if self._found is None or self._found[0] != key:
            state = random_state()
            try:
                self._found = key, self._search(model)
            finally:
                restore_random_state(state)  # measuring draws random numbers, which must not change training
        return self._found[1]

    def plan_without_search(self, model: nn.Module) -> ParallelPlan:
        """Returns a plan with ZeRO-3 in all layers, which needs the least memory of simple plans."""
        stacks = adapter_for(model).stack_sizes(model)
        recompute = "full" if self.args.activation_checkpointing else "none"
        return ParallelPlan.uniform(self.args.world_size, stacks, recompute=recompute)

    @property
    def rows_of_step(self) -> int:
        """Returns the rows of a global batch."""
        return step_rows(self.args)

    def _search_key(self, model: nn.Module) -> tuple:
        """Returns the values that a search depends on; while they stay, a plan that was found is kept."""
        budget, tokens = (getattr(self.args, name, None) for name in ("memory_gib", "max_tokens_per_rank"))
        batch = self.rows_of_step, id(self.dataset()), self.packing()[0], tokens
        return config_digest(model), self._precision(model), batch, self.limits(), budget

    def _search(self, model: nn.Module) -> ParallelPlan:
        shown = not self.args.disable_tqdm
        accuracy = getattr(self.args, "profile_accuracy", WANTED_ERROR)
        workload, ratio = from_rank_0(lambda: (self.workload(model), self.target_ratio(model)))
        folder = profile_folder(self.args)
        hardware = load_or_profile_hardware(
            folder,
            local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", self.args.world_size)),
            device=self.args.device,
            accuracy=accuracy,
            seconds=HARDWARE_SECONDS,
            progress=shown,
        )
        length = min(_rounded_up(workload.length), positions(model) or sys.maxsize)
        profile = load_or_profile_model(
            folder,
            model,
            dtype=workload.precision.compute,
            device=self.args.device,
            tokens=min(MOST_TOKENS, _rounded_up(workload.rows * workload.length)),
            length=length,
            target_length=None if ratio is None else max(1, round(ratio * length)),
            packed=self.packing()[1],
            accuracy=accuracy,
            seconds=MODEL_SECONDS,
            progress=shown,
            finish=lambda measured: calibrated(
                measured,
                model,
                hardware,
                rows=workload.rows,
                length=min(workload.computed_length, MOST_TOKENS),
                device=self.args.device,
                accuracy=accuracy,
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
        result = search_plan(hardware, profile, workload, memory_bytes=budget, limits=self.limits(), progress=shown)
        if result.best is None:
            raise ValueError(result.no_plan_message)
        self.search_result = result
        from rich.console import Console

        if shown:
            Console().print(explain(result, compare=False))
        else:
            logger.warning(
                f"The fastest plan that was found takes {result.best.step_ms:.4g} ms a step, by prediction, and "
                f"{max(result.best.memory_bytes) / GIB:.4g} GiB on a rank at most."
            )
        return result.best.plan_with_prediction(workload)

    def limits(self) -> Limits:
        """Returns the part of the search space that the arguments and the Trainer's methods allow."""
        limits = Limits()
        if self.args.activation_checkpointing:
            limits = replace(limits, recompute=("full",))
        if self.whole_batches:
            limits = replace(limits, pipeline=(1,), micro_batches=(self.args.gradient_accumulation_steps,))
        return limits

    def workload(self, model: nn.Module) -> Workload:
        """Returns the size of a step's batch, from the lengths of the dataset's rows; on rank 0."""
        rows, precision, lengths = self.rows_of_step, self._precision(model), self.row_lengths()
        most = getattr(self.args, "max_tokens_per_rank", None)
        if not len(lengths):
            length = min(positions(model) or 1024, most or 1024)
            logger.warning(
                f"The lengths of the dataset's rows are not known: the plan is searched for rows of {length} tokens."
            )
            return Workload(rows=rows, length=length, precision=precision)
        if not self.packing()[1]:  # rows are padded to the longest of their batch
            computed = np.random.default_rng(0).choice(lengths, (SAMPLED_BATCHES, rows)).max(axis=1)
        elif most and getattr(self.args, "long_sequences", "error") != "error":
            computed = lengths = np.minimum(lengths, most)
        else:
            computed = lengths
        return Workload(
            rows=rows,
            length=int(lengths.max()),
            precision=precision,
            mean_length=max(1, round(float(computed.mean()))),
            mean_square=float(np.square(computed, dtype=float).mean()),
        )

    def target_ratio(self, model: nn.Module) -> float | None:
        """Returns the mean tokens of a row of labels over those of its input, if the model has a second stack for
        them; None for other models. On rank 0.
        """
        if len(adapter_for(model).stacks) == 1:
            return None
        sources, targets = self.row_lengths(), self.row_lengths("labels")
        return float(targets.mean() / sources.mean()) if len(sources) and len(targets) else 1.0

    def _precision(self, model: nn.Module) -> Precision:
        half = self.args.bf16 or computes_in_bf16(model)
        return Precision(compute="bf16" if half else "fp32")

    def row_lengths(self, column: str = "input_ids") -> np.ndarray:
        """Returns the tokens of the training set's rows, or of a sample; empty if no row can be read."""
        dataset = self.dataset()
        length_column = self.args.length_column_name if column == "input_ids" else ""
        known = sequence_lengths(dataset, column, length_column)
        if known is not None:
            return known[known > 0]
        state = random_state()
        try:
            if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
                count = len(dataset)
                indices = np.unique(np.linspace(0, count - 1, min(SAMPLED_ROWS, count)).astype(int))
                rows = (dataset[int(index)] for index in indices)
            elif isinstance(dataset, datasets.IterableDataset):
                rows = itertools.islice(iter(dataset), SAMPLED_ROWS)
            else:  # another stream may be readable only once
                rows = ()
            return np.array([len(row[column]) for row in rows if len(row.get(column, ()))], dtype=np.int64)
        except (TypeError, KeyError, AttributeError):  # rows without such a column before they are collated
            return np.zeros(0, dtype=np.int64)
        finally:
            restore_random_state(state)


def profile_folder(args: Any) -> Path:
    """Returns the folder of profiles: `profile_dir`, or `GALVATRON_CACHE`, or a folder in the user's cache."""
    given = getattr(args, "profile_dir", None) or os.environ.get("GALVATRON_CACHE")
    if given:
        return Path(given)
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(cache) / "galvatron-hf"


def memory_budget(args: Any, hardware: HardwareProfile) -> int:
    """Returns the bytes of a rank that a plan may take: those of the arguments, or most of the device."""
    given = getattr(args, "memory_gib", None)
    if given is not None:
        return int(given * GIB)
    return int(hardware.memory_bytes * (GPU_SHARE if hardware.made.get("backend") == "nccl" else 1.0))


def _rounded_up(number: int) -> int:
    """Returns the next power of two, so that one profile serves datasets of similar lengths."""
    return 1 << (number - 1).bit_length()
