# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Packing under a plan: reads the batches of a step, places their documents on ranks, and packs them."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import TrainingArguments
from transformers.utils import logging

from galvatron_hf.data.loader import read_once
from galvatron_hf.data.packing import NotPackable, Sequences, limit_lengths, pack
from galvatron_hf.data.placement import Placement
from galvatron_hf.models.losses import IGNORED, count_targets
from galvatron_hf.parallel.comm.objects import is_rank_0
from galvatron_hf.parallel.executor import PackedBatch
from galvatron_hf.parallel.model import ParallelModel
from galvatron_hf.plan import ParallelPlan
from galvatron_hf.plan.serialization import read_object, write_file
from galvatron_hf.trainer.checkpoint.random_state import random_state
from galvatron_hf.trainer.data.dataset_rows import DatasetRows
from galvatron_hf.trainer.data.global_batches import join, pad_token_id
from galvatron_hf.trainer.data.kept_rings import keeps_rings
from galvatron_hf.trainer.data.pack_planner import PackPlanner, pack_multiple
from galvatron_hf.trainer.data.packing_record import PackingRecord
from galvatron_hf.trainer.data.packing_rules import PackingRules
from galvatron_hf.trainer.data.sequence_cost import StepCost, estimated_cost, kinds_of, measure_cost
from galvatron_hf.trainer.data.step_plans import StepPlans
from galvatron_hf.trainer.data.step_prefetch import StepPlacement, StepPrefetch, take
from galvatron_hf.trainer.step_state import StepState


logger = logging.get_logger(__name__)

COST_FILE = "sequence_cost.json"
CUT_FILE = "cut_sequences.json"
STEP_PLANS_FILE = "step_plans.json"


@dataclass(kw_only=True)
class StepPacker:
    """Reads the batches of each step and makes its global batch, or its packed micro-batches. Rank 0 reads the
    sampler's batches, places each document, and sends the result to all ranks. It places the next step while this step
    is computed, if the dataset knows the length of its rows or can be read ahead.

    Args:
        known_lengths (`Callable`): returns the tokens of the training set's rows, or None if they are not known.
        prepare (`Callable`): moves a batch to the device, as Trainer's `_prepare_inputs`.
        count (`Callable`): is called with a function that returns the real tokens of each document, or row, of a step.
        plans ([`StepPlans`], *optional*): the plans of steps; by default that of `parallel` alone.
        stateful_loader (`bool`): the loader's own state is saved, so it must not be read ahead.
        may_change (`Callable`): returns whether something may change the dataset's rows between two steps.
        cut_sequences (`int`): documents that were truncated or split so far, because they were too long.
        last_placed (`tuple`, *optional*): the placement of the last packed step, and the tokens of its documents.
    """

    parallel: ParallelModel
    args: TrainingArguments
    rules: PackingRules
    known_lengths: Callable[[], np.ndarray | None]
    dataset_rows: Callable[[], DatasetRows]
    prepare: Callable[[dict[str, Any]], dict[str, Any]]
    count: Callable[[Callable[[], np.ndarray]], None] = lambda lengths: None
    plans: StepPlans | None = None
    stateful_loader: bool = False
    may_change: Callable[[], bool] = lambda: False
    cut_sequences: int = 0
    cost: StepCost | None = None
    last_placed: tuple[StepPlacement, np.ndarray] | None = None
    prefetch: StepPrefetch | None = None
    _record: PackingRecord | None = None
    _lengths: np.ndarray | None = None
    _rows: DatasetRows | None = None

    def __post_init__(self):
        self.plans = self.plans or StepPlans(owner=self.parallel)

    @property
    def per_step(self) -> bool:
        return getattr(self.args, "per_step", False)

    @property
    def long_sequences(self) -> str:
        return getattr(self.args, "long_sequences", "error")

    # ---- A training run ----

    def begin(self, checkpoint: str | None = None, saved_plan: ParallelPlan | None = None) -> None:
        """Starts a training run, perhaps from a checkpoint and its plan, if that is one for as many ranks; collective.
        Documents that are too long raise ValueError, if their lengths are known.
        """
        self.end()
        self._record, self._lengths, self.cut_sequences, self.last_placed = None, None, 0, None
        if checkpoint is not None:
            self._load(checkpoint, saved_plan)
        if self.rules.packs():
            read_once(self._check_lengths)
        elif self.plans.others and is_rank_0():
            logger.warning_once("Batches are padded, so that all steps are computed under the optimizer's plan.")

    def end(self) -> None:
        """Ends a training run and its planning in the background."""
        if self.prefetch is not None:
            self.prefetch.end()
        self.prefetch, self._rows = None, None

    def _check_lengths(self) -> None:
        """Refuses rows that are too long before the first step. A collator that does more than padding may cut."""
        lengths, planner = self._known_lengths(), self.planner()
        bound = planner.bound_of_documents
        if not self.rules.only_pads() or (self.per_step and (self.cost is None or not self.plans.is_measured)):
            return  # it is not known yet how many tokens a rank holds in a step with recompute
        if bound is not None and self.long_sequences == "error" and (lengths > bound).any():
            row = int(lengths.argmax())
            shared = ", or have ranks share documents by packing='dynamic'" if planner.degree == 1 else ""
            raise ValueError(
                f"Row {row} of the dataset has {lengths[row]} tokens, above {planner.limit} ({bound}), as "
                f"{int((lengths > bound).sum())} of {len(lengths)} rows; raise it, cut the rows, or set "
                f"long_sequences to 'truncate' or 'split'{shared}."
            )

    def _known_lengths(self) -> np.ndarray:
        if self._lengths is None:
            # The tokens of a target are not known before its labels are collated.
            known = None if self.parallel.packing.pairs is not None else self.known_lengths()
            self._lengths = np.zeros(0, dtype=np.int64) if known is None else known
        return self._lengths

    def planner(self) -> PackPlanner:
        """Returns the planner with the present cost of documents; on rank 0."""
        cost = self.cost or self._estimated_cost()
        return PackPlanner.from_model(self.parallel, self.args, cost, self._known_lengths(), self.plans)

    # ---- Reading a step ----

    def read_step(
        self, batches: Iterator, count: int, *, step: int, last: bool
    ) -> tuple[list[dict[str, Any]], StepPlacement | None]:
        """Reads the `count` batches of an optimizer step on rank 0, and places their documents if they are packed;
        collective. `step` counts the steps before this one; `last` tells that no step follows.
        """
        if not self.rules.packs():
            return read_once(lambda: take(batches, count)), None
        if self.prefetch is None:
            self.prefetch = StepPrefetch(self.planner, self.long_sequences, self.parallel.packing)
        if self.cost is None or not self.plans.is_measured:
            self._find_cost(batches, count)
        found, placement = read_once(lambda: self._read_and_place(batches, count))
        if placement is None:
            return found, None
        if self._record is None:
            self._record = PackingRecord(began=time.perf_counter())
        self._record.add(placement)
        if dist.get_rank() == 0:
            try:
                self.plan_ahead(batches, count, None if last else step + 1)
            except Exception as error:  # the other ranks do not wait for it: the step is placed when it is read
                logger.warning_once(f"Steps are not planned ahead ({type(error).__name__}: {error}).")
        return found, placement

    def _read_and_place(self, batches: Iterator, count: int) -> tuple[list[dict[str, Any]], StepPlacement | None]:
        found = self.prefetch.take(batches, count)
        sequences = self._sequences(found)
        if sequences is None:
            return found, None
        placed = self.prefetch.place(sequences)
        lengths = self._limited(sequences, placed.longest, placed.limit).lengths
        number = placed.placement.plan
        keeps = keeps_rings(self.plans.model(number), placed.placement, lengths, self.plans.held_bytes(number))
        return found, replace(placed, keeps_rings=keeps)

    def _sequences(self, batches: list[dict[str, Any]]) -> Sequences | None:
        """Returns the documents of batches; None if there are none, or the batches stay padded."""
        if not batches:
            return None
        try:
            sequences = Sequences.from_batches(batches, self.parallel.packing)
        except NotPackable as reason:
            self.rules.pad_because(reason)
            return None
        return sequences if len(sequences.rows) else None

    def plan_ahead(self, batches: Iterator, count: int, step: int | None) -> None:
        """Has a step placed in the background before it is read, if there is one; on rank 0."""
        if step is None:
            return
        known = self._known_lengths()
        if self._rows is None:
            self._rows = self.dataset_rows()
        if len(known) and self._rows.known:
            self.prefetch.plan(lambda: known[self._rows.of_step(step)])
        elif self._rows.may_learn or self.stateful_loader or self.may_change():
            return  # rows would be read too early; a stateful loader's state would be a step ahead
        else:
            self.prefetch.read_and_plan(batches, count)

    # ---- The cost of documents ----

    def _estimated_cost(self) -> StepCost:
        return estimated_cost(self.parallel.config, self.parallel.plan.num_layers)

    def _find_cost(self, batches: Iterator, count: int) -> None:
        """Measures the cost of documents, unless nothing of the first step can be packed; collective."""
        if self.args.full_determinism:
            self.cost = self._estimated_cost()  # independent of any clock
            return
        longest, most = read_once(lambda: self._lengths_to_time(batches, count))
        if not longest:
            return
        self.parallel.model.train()
        if self.cost is None:
            self.cost = measure_cost(self.parallel, longest, most, per_step=self.per_step)
        self.plans.measure(longest, most)
        cost = self.cost.sequence
        logger.info(
            f"A document of s tokens was measured to take {cost.per_token:.3g} s + {cost.per_token_squared:.3g} s^2 + "
            f"{cost.per_sequence:.3g} seconds, a micro-batch {self.cost.overhead:.3g} more."
        )

    def _lengths_to_time(self, batches: Iterator, count: int) -> tuple[int, int]:
        """Returns the tokens of the longest document to time and of a pack; zeros if nothing can be packed."""
        lengths, planner = self._known_lengths(), self.planner()
        if not len(lengths):
            sequences = self._sequences(self.prefetch.peek(batches, count))
            if sequences is None:
                return 0, 0
            most = planner.longest_document(sequences.lengths)
            if self.per_step:  # it is not known yet what a rank holds with recompute
                lengths = np.minimum(sequences.lengths, most)
            else:
                lengths = self._limited(sequences, most, planner.limit).lengths
        return int(lengths.max()), planner.capacity(lengths)

    # ---- The batch of a step ----

    def pack(self, step: StepState) -> StepState:
        """Returns the step with its batch: packed micro-batches if it has a placement, else one padded batch."""
        placement = None if step.placement is None else step.placement.placement
        parallel = self.plans.model(0 if placement is None else placement.plan)
        parallel.recompute_layers(None if placement is None else placement.recompute)
        parallel.keep_rings(placement is not None and step.placement.keeps_rings)
        if placement is None:
            batch = join(list(step.batches), pad_token_id(self.parallel.model))
            self.count(lambda: _row_tokens(batch))
            return replace(step, batch=self.prepare(batch))
        sequences = Sequences.from_batches(step.batches, self.parallel.packing)
        sequences = self._limited(sequences, step.placement.longest, step.placement.limit)
        self.cut_sequences += sequences.cut
        self.count(lambda: sequences.lengths)
        self.last_placed = step.placement, sequences.lengths
        parts, items = self._micro_batches(sequences, placement), step.num_items
        if self._record is not None:
            self._record.tokens += sequences.tokens
            self._record.positions += sum(_positions(part) for part in parts)
        if items is not None and self.cut_sequences:  # documents may have lost targets
            items = count_targets(parts, self.parallel.packing.loss).to(items)
        return replace(step, batch=parts, num_items=items, plan=placement.plan)

    def pack_for_evaluation(self, batch: dict[str, Any]) -> list[dict[str, Any]] | None:
        """Returns packed micro-batches of whole documents for evaluation, or None for a padded batch; collective."""
        sequences = self._sequences([batch]) if self.rules.packs() else None
        if sequences is None:
            return None
        return self._evaluated(sequences)

    def pack_for_logits(self, batch: dict[str, Any]) -> PackedBatch | None:
        """Returns the documents of a batch whose logits are wanted, if the plan has ranks share documents: then a rank
        may not hold whole rows. None if they are to be computed whole; collective.
        """
        packing, names = self.parallel.packing, self.parallel.packing.loss.names
        of_rows = self.parallel.adapter.structure is not None  # the family's own head needs whole rows
        if of_rows or not self.parallel.plan.shares_documents or not self.rules.packs():
            return None
        if not packing.loss.is_labelled(batch):
            batch = {**batch, names[0]: torch.full_like(batch["input_ids"], IGNORED)}
        try:  # refuses targets at positions that are no token of a document, whose loss counts too
            sequences = Sequences.from_batches([batch], packing)
        except NotPackable as reason:
            if is_rank_0():
                logger.warning_once(f"Ranks hold the whole rows whose logits they compute, because {reason}.")
            return None
        if not len(sequences.rows):
            return None
        return PackedBatch(micro_batches=self._evaluated(sequences), columns=sequences.columns)

    def _evaluated(self, sequences: Sequences) -> list[dict[str, Any]]:
        return self._micro_batches(sequences, read_once(lambda: self._place_evaluation(sequences.lengths)))

    def _place_evaluation(self, lengths: np.ndarray) -> Placement:
        planner = self.planner()
        most = planner.capacity(lengths)
        if lengths.max() > planner.longest_document_of_plan(lengths):
            most = int(lengths.max())
        try:
            return planner.place(lengths, most)
        except Exception as error:  # as in a step of training
            logger.warning_once(
                f"Rows of an evaluation stay in order: the planner failed ({type(error).__name__}: {error})."
            )
            return planner.in_order(lengths, most)

    def _micro_batches(self, sequences: Sequences, placement: Placement) -> list[dict[str, Any]]:
        multiple = pack_multiple(self.plans.model(placement.plan), self.args)
        pad = pad_token_id(self.parallel.model)
        return [self.prepare(part) for part in pack(sequences, placement, multiple, pad, self.parallel.packing)]

    def _limited(self, sequences: Sequences, longest: int, limit: str) -> Sequences:
        return limit_lengths(sequences, longest, self.long_sequences, self.parallel.packing, limit)

    # ---- Logs and checkpoints ----

    def add_logs(self, logs: dict[str, float]) -> None:
        """Adds the measurements of packing since the last log to a log of training."""
        record = self._record
        if record is None or not record.steps or "loss" not in logs:
            return
        now = time.perf_counter()
        logs.update(record.logs(now))
        self._record = PackingRecord(began=now)
        if self.cut_sequences:
            logs["cut_sequences"] = self.cut_sequences

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leaves the time of the body, which evaluates, out of the time since the last log."""
        began = time.perf_counter()
        try:
            yield
        finally:
            if self._record is not None:
                self._record.began += time.perf_counter() - began

    def add_seconds(self, seconds: float) -> None:
        """Counts the CPU seconds that this rank computed in the step; collective. On a GPU nothing is measured: the
        host does not know when a kernel waits for another rank.
        """
        if self._record is None or self.args.device.type != "cpu":
            return
        every = torch.zeros(dist.get_world_size(), dtype=torch.float64)
        every[dist.get_rank()] = seconds
        dist.all_reduce(every)
        self._record.add_seconds(every.tolist())

    def random_state(self) -> dict[str, Any]:
        """Returns the random state for a checkpoint of this step; see [`StepPrefetch.state_before_look`]."""
        before = None if self.prefetch is None else self.prefetch.state_before_look
        return before or random_state()

    def forget_random_state(self) -> None:
        """Forgets the random state before reading ahead, after another one has been loaded."""
        if self.prefetch is not None:
            self.prefetch.state_before_look = None

    def save(self, folder: Path) -> None:
        """Writes the cost of documents, the number of cut ones and the other plans of steps into a checkpoint."""
        if self.cut_sequences:
            write_file(folder / CUT_FILE, json.dumps({"cut_sequences": self.cut_sequences}))
        if self.cost is not None and self.cost.measured:
            write_file(folder / COST_FILE, json.dumps(self.cost.to_json()))
        if self.plans.others:
            plans = [json.loads(other.parallel.plan.to_json()) for other in self.plans.others]
            write_file(folder / STEP_PLANS_FILE, json.dumps({"plans": plans}))

    def _load(self, checkpoint: str, saved_plan: ParallelPlan | None) -> None:
        """Reads on rank 0 what [`StepPacker.save`] wrote; collective. Under another plan the cost is measured anew."""
        cost = _read(os.path.join(checkpoint, COST_FILE), "cost of sequences")
        same = saved_plan is not None and _parts_that_cost(saved_plan) == _parts_that_cost(self.parallel.plan)
        self.cost = StepCost.from_json(cost) if cost is not None and same else None
        kinds = set(kinds_of(self.parallel.plan)) if self.parallel.plan.shares_documents else set()
        if self.cost is not None and not kinds - {"ulysses"} <= set(self.cost.sharing):
            self.cost = None  # it was measured without sharing, or for other executions
        if self.cost is not None and self.per_step != bool(self.cost.variants):
            self.cost = None
        cut = _read(os.path.join(checkpoint, CUT_FILE), "number of cut sequences")
        self.cut_sequences = 0 if cut is None else int(cut.get("cut_sequences", 0))


def step_plans_of_checkpoint(folder: str, world_size: int) -> list[ParallelPlan]:
    """Returns the other plans of steps with which a checkpoint was written, if they are for `world_size` ranks."""
    path = os.path.join(folder, STEP_PLANS_FILE)
    if not os.path.isfile(path):
        return []
    found = [ParallelPlan.from_json(plan) for plan in read_object(path, "plans of steps").get("plans", ())]
    return [plan for plan in found if plan.world_size == world_size]


def _row_tokens(batch: Mapping[str, Any]) -> np.ndarray:
    """Returns the tokens of each row of a batch, without padding if its mask is in the host's memory; empty if it has
    none.
    """
    mask, ids = batch.get("attention_mask"), batch.get("input_ids")
    if isinstance(mask, torch.Tensor) and mask.ndim == 2 and mask.device.type == "cpu":
        return mask.sum(dim=1).numpy()
    return np.full(ids.shape[0], ids.shape[1]) if isinstance(ids, torch.Tensor) else np.zeros(0, dtype=np.int64)


def _positions(part: dict[str, Any]) -> int:
    """Returns the positions of the packed rows of a micro-batch."""
    documents = part["documents"]
    return sum(each.tokens for each in (documents.values() if isinstance(documents, dict) else (documents,)))


def _read(path: str, what: str) -> dict[str, Any] | None:
    return read_once(lambda: read_object(path, what) if os.path.isfile(path) else None)


def _parts_that_cost(plan: ParallelPlan) -> tuple:
    """Returns the parts of a plan that decide how long a document takes."""
    return plan.stages, plan.layers, plan.embedding, plan.head
