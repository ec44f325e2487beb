# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""The planner of `parallel_plan="auto"`: measures the machine and the model, and searches the plan to train under."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from torch import nn
from transformers import TrainingArguments
from transformers.utils import logging

from galvatron_hf.data.lengths import sequence_lengths
from galvatron_hf.models.families import adapter_for
from galvatron_hf.models.lora import computes_in_bf16, has_adapters, inner_model
from galvatron_hf.parallel.comm.objects import from_rank_0, is_rank_0
from galvatron_hf.parallel.packing_obstacle import packing_obstacle_of
from galvatron_hf.parallel.validate import check_model, check_plan
from galvatron_hf.plan import ParallelPlan, Precision, SequenceGroups
from galvatron_hf.planner.cost.workload import Workload
from galvatron_hf.planner.report.report import explain
from galvatron_hf.planner.search import SearchResult, search_plan
from galvatron_hf.planner.simplify import simplest
from galvatron_hf.planner.space import Limits
from galvatron_hf.planner.step_plan_search import search_step_plans
from galvatron_hf.planner.token_limit import most_tokens
from galvatron_hf.profiler.cache import load_or_profile_hardware, load_or_profile_model
from galvatron_hf.profiler.measure.model import config_digest
from galvatron_hf.profiler.measure.rounds import WANTED_ERROR
from galvatron_hf.profiler.profiles.hardware import HardwareProfile
from galvatron_hf.profiler.profiles.model import ModelProfile
from galvatron_hf.profiler.trace.small_models import image_positions, positions, search_obstacle
from galvatron_hf.trainer.arguments import step_rows
from galvatron_hf.trainer.checkpoint.random_state import random_state, restore_random_state
from galvatron_hf.trainer.planning.calibration import calibrated
from galvatron_hf.utils.cache_folder import cache_folder
from galvatron_hf.utils.units import GIB, gib_rounded_up


logger = logging.get_logger(__name__)

SAMPLED_ROWS = 64  # rows that are read of a dataset whose lengths are not known
SAMPLED_BATCHES = 256
MOST_TOKENS = 4096  # tokens of a micro-batch that is timed
# Upper bounds for measuring the machine, the parts of the model and whole steps; accuracy usually ends them earlier.
HARDWARE_SECONDS, MODEL_SECONDS, CALIBRATION_SECONDS = 40.0, 30.0, 240.0
USUAL_ROWS = 2  # mean rows that a rank should hold, at least, where it shares longer ones
SHARE_OF_TOKENS = 0.9  # of the budget: the memory of documents that ranks share is predicted up to 10% too low
GPU_SHARE = 0.92  # of a GPU's memory; the driver, NCCL and fragmentation take the rest


@dataclass(kw_only=True)
class AutoPlanner:
    """Finds the fastest plan for this machine, model and batch.

    Args:
        dataset (`Callable`): returns the training set, or None.
        packing (`Callable`): returns the packing mode and whether the collator allows packing.
        shares (`Callable`): returns whether ranks may share the documents of batches of a model.
        whole_batches (`bool`): each batch of a step is computed as a whole, which leaves pipelines nothing to do.
        search_result ([`SearchResult`], *optional*): the result of the last search, on rank 0.
        step_plans (`list[ParallelPlan]`): further plans for some of the steps, if the arguments allow them.
    """

    args: TrainingArguments
    dataset: Callable[[], Any]
    packing: Callable[[], tuple[str, bool]]
    shares: Callable[[nn.Module], bool] = lambda model: False
    whole_batches: bool = False
    search_result: SearchResult | None = None
    step_plans: list[ParallelPlan] = field(default_factory=list)
    _found: tuple[Any, ParallelPlan] | None = None

    def plan_for(self, model: nn.Module) -> ParallelPlan:
        """Returns the fastest plan; collective. Without a training set it is a simple one, and so it is for a family
        whose layers cannot be run alone.
        """
        if self.dataset() is None:
            return self.plan_without_search(model)
        obstacle = search_obstacle(model)
        if obstacle is not None:
            if is_rank_0():
                family = type(model).__name__
                logger.warning_once(
                    f"{family} {obstacle}, so that no search covers it: its layers are sharded by ZeRO-3."
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
        self.step_plans = []
        stacks = adapter_for(model).stack_sizes(model)
        recompute = "full" if self.args.activation_checkpointing else "none"
        return ParallelPlan.uniform(self.args.world_size, stacks, recompute=recompute)

    @property
    def rows_of_step(self) -> int:
        """Returns the rows of a global batch."""
        return step_rows(self.args)

    def _search_key(self, model: nn.Module) -> tuple:
        """Returns the values that a search depends on; while they stay, a plan that was found is kept."""
        names = "memory_gib", "max_tokens_per_rank", "per_step"
        budget, tokens, per_step = (getattr(self.args, name, None) for name in names)
        batch = self.rows_of_step, id(self.dataset()), self.packing()[0], tokens
        return config_digest(model), self._precision(model), batch, self.limits(), budget, per_step

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
            packed=self._packs(model),
            accuracy=accuracy,
            seconds=MODEL_SECONDS,
            progress=shown,
            finish=lambda measured: calibrated(
                measured,
                model,
                hardware,
                rows=workload.rows,
                length=image_positions(model) or min(workload.computed_length, MOST_TOKENS),
                device=self.args.device,
                accuracy=accuracy,
                seconds=CALIBRATION_SECONDS,
                progress=shown,
            ),
        )
        several = getattr(self.args, "per_step", False) and self._packs(model) and not has_adapters(model)

        def search() -> list[str]:
            found = self._search_on_rank_0(hardware, profile, workload)
            others = self._search_step_plans() if several else []
            return [one.to_json() for one in (found, *others)]

        plan, *self.step_plans = map(ParallelPlan.from_json, from_rank_0(search))
        for one in (plan, *self.step_plans):
            check_plan(one)
            check_model(model, adapter_for(model), one)
        return plan

    def _search_step_plans(self) -> list[ParallelPlan]:
        """Searches plans for some of the steps beside the one that was found; on rank 0."""
        lengths, most = self.row_lengths(), getattr(self.args, "max_tokens_per_rank", None)
        if most and getattr(self.args, "long_sequences", "error") != "error":
            lengths = np.minimum(lengths, most)
        if not len(lengths) or getattr(self.args, "expert_dispatch", "plain") != "plain":
            return []
        found = search_step_plans(self.search_result, lengths)
        for one in found:
            logger.warning(
                f"{100 * one.share:.0f}% of the steps, those with rows of up to {one.longest} tokens, are predicted "
                f"to take {one.estimate.step_ms + one.move_ms:.4g} ms under another plan, moves included, and "
                f"{one.own_ms:.4g} ms under the optimizer's."
            )
        return [one.estimate.plan for one in found]

    def _search_on_rank_0(self, hardware: HardwareProfile, profile: ModelProfile, workload: Workload) -> ParallelPlan:
        shown = not self.args.disable_tqdm
        result, groups = self._fastest(hardware, profile, workload)
        self.search_result = result
        from rich.console import Console

        if shown:
            # The plan's own table is printed where the plan is applied, with its number formats and groups.
            Console().print(replace(explain(result, compare=False), shows_plan=False))
        else:
            logger.warning(
                f"The plan that was found takes {result.best.step_ms:.4g} ms a step, by prediction, and "
                f"{max(result.best.memory_bytes) / GIB:.4g} GiB on a rank at most."
            )
        return replace(result.best.plan_with_prediction(result.workload), sequence_groups=groups)

    def _fastest(
        self, hardware: HardwareProfile, profile: ModelProfile, workload: Workload
    ) -> tuple[SearchResult, SequenceGroups | None]:
        """Searches the simplest plan of those that are about as fast as the fastest one. If groups are chosen for each
        micro-batch, a rank need not hold the longest row: it has to hold a part of it and what is usual. The tokens
        that it can hold follow from the memory that the plan leaves. If all ranks together cannot hold the longest
        row, a plan for longer ones is searched.
        """
        budget, shown = memory_budget(self.args, hardware), not self.args.disable_tqdm
        searches = self.packing()[0] == "dynamic" and getattr(self.args, "max_tokens_per_rank", None) is None
        longest = int(self.row_lengths().max(initial=0)) if searches else 0
        if longest:
            budget = int(SHARE_OF_TOKENS * budget)
        usual = workload.length
        while True:
            options = dict(memory_bytes=budget, limits=self.limits(), progress=shown)
            result = search_plan(hardware, profile, workload, **options)
            if result.best is None and workload.length > usual:
                given = gib_rounded_up(memory_budget(self.args, hardware))
                raise ValueError(
                    f"No plan leaves memory for the longest row of {longest} tokens, which all ranks may share; allow "
                    f"more than {given} GiB a device, or use more devices or shorter rows."
                )
            if result.best is None:
                raise ValueError(result.no_plan_message)
            result = replace(result, best=simplest(result))
            plan = result.best.plan
            degree = plan.most_data_ranks
            if not searches or not longest:
                return result, None
            tokens = most_tokens(hardware, profile, workload, plan, budget)
            if tokens * degree >= longest or workload.length >= longest:
                tokens = max(tokens, workload.length)  # which the search has priced
                groups = SequenceGroups(max_tokens_per_rank=tokens, max_degree=degree)
                return result, groups if degree > 1 else None
            part = min(2 * workload.length, -(-longest // degree))  # at least a little more
            workload = replace(workload, length=min(max(part, -(-11 * workload.length // 10)), longest))

    def limits(self) -> Limits:
        """Returns the part of the search space that the arguments and the Trainer's methods allow."""
        limits = Limits()
        if self.packing()[0] == "dynamic":
            limits = replace(limits, context=(1,))  # groups are chosen for each micro-batch
        if self.args.activation_checkpointing:
            limits = replace(limits, recompute=("full",))
        if self.whole_batches:
            limits = replace(limits, pipeline=(1,), micro_batches=(self.args.gradient_accumulation_steps,))
        return limits

    def workload(self, model: nn.Module) -> Workload:
        """Returns the size of a step's batch, from the lengths of the dataset's rows; on rank 0."""
        rows, precision, of_image = self.rows_of_step, self._precision(model), image_positions(model)
        if of_image is not None:
            return Workload(rows=rows, length=of_image, precision=precision)
        lengths = self.row_lengths()
        most = getattr(self.args, "max_tokens_per_rank", None)
        if not len(lengths):
            length = min(positions(model) or 1024, most or 1024)
            logger.warning(
                f"The lengths of the dataset's rows are not known: the plan is searched for rows of {length} tokens."
            )
            return Workload(rows=rows, length=length, precision=precision)
        if not self._packs(model):  # rows are padded to the longest of their batch
            computed = np.random.default_rng(0).choice(lengths, (SAMPLED_BATCHES, rows)).max(axis=1)
        elif most and getattr(self.args, "long_sequences", "error") != "error":
            computed = lengths = np.minimum(lengths, most)
        else:
            computed = lengths
        longest, mean = int(lengths.max()), max(1, round(float(computed.mean())))
        packed = self._packs(model) and self.shares(model)
        if packed and self.packing()[0] == "dynamic":
            usual = USUAL_ROWS * mean if most is None else most
            longest = min(longest, max(usual, -(-longest // self.args.world_size)))
        return Workload(
            rows=rows,
            length=longest,
            precision=precision,
            packed=packed,
            mean_length=mean,
            mean_square=float(np.square(computed, dtype=float).mean()),
        )

    def _packs(self, model: nn.Module) -> bool:
        """Tells whether the batches of training will be packed."""
        return self.packing()[1] and packing_obstacle_of(inner_model(model)) is None

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
    given = getattr(args, "profile_dir", None)
    return Path(given) if given else cache_folder()


def memory_budget(args: Any, hardware: HardwareProfile) -> int:
    """Returns the bytes of a rank that a plan may take: those of the arguments, or most of the device."""
    given = getattr(args, "memory_gib", None)
    if given is not None:
        return int(given * GIB)
    return int(hardware.memory_bytes * (GPU_SHARE if hardware.made.get("backend") == "nccl" else 1.0))


def _rounded_up(number: int) -> int:
    """Returns the next power of two, so that one profile serves datasets of similar lengths."""
    return 1 << (number - 1).bit_length()
