# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Packing under a plan: whether batches are packed, the packed batches, and what is said of them."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Trainer
from transformers.utils import logging

from galvatron_hf.data.lengths import sequence_lengths
from galvatron_hf.data.loader import read_once
from galvatron_hf.data.packing import NotPackable, Sequences, limit_lengths, pack
from galvatron_hf.data.placement import Placement
from galvatron_hf.models.losses import count_targets
from galvatron_hf.parallel.layers.attention_probe import attention_obstacle
from galvatron_hf.plan import ParallelPlan
from galvatron_hf.plan.serialization import read_object, write_file
from galvatron_hf.trainer.arguments import packing_mode
from galvatron_hf.trainer.checkpoint.random_state import random_state
from galvatron_hf.trainer.data.dataset_rows import DatasetRows
from galvatron_hf.trainer.data.pack_planner import Placer, pack_multiple
from galvatron_hf.trainer.data.packable import only_pads, rope_of_the_batch
from galvatron_hf.trainer.data.packing_record import PackingRecord
from galvatron_hf.trainer.data.sequence_cost import StepCost, estimated_cost, measure_cost
from galvatron_hf.trainer.data.step_prefetch import StepPlacement, StepsAhead, take


logger = logging.get_logger(__name__)

COST_FILE = "sequence_cost.json"
CUT_FILE = "cut_sequences.json"
_PREPARE = ("_prepare_inputs", "_prepare_input")  # methods of Trainer through which batches go


class PackingMixin:
    """The part of [`GalvatronMixin`] that packs; see there.

    Rank 0 reads the sampler's batches, says where each document goes, and tells the others. It plans the next step
    while this one is computed, where the dataset says how long its rows are or can be read ahead.

    Attributes:
        cut_sequences (`int`): documents that were truncated or split so far, because they were too long.
    """

    cut_sequences: int = 0
    _cut_before: int = 0
    _cost: StepCost | None = None
    _placement: StepPlacement | None = None
    _ahead: StepsAhead | None = None
    _record: PackingRecord | None = None
    _lengths: np.ndarray | None = None
    _rows: DatasetRows | None = None
    _spied: tuple[Any, str | None] | None = None

    # ---- Whether ----

    @property
    def _packing(self) -> str:
        return packing_mode(self.args)

    @property
    def _long_sequences(self) -> str:
        return getattr(self.args, "long_sequences", "error")

    def _packs(self) -> bool:
        """Whether batches are packed, as far as that does not depend on them.

        Raises:
            ValueError: if the arguments ask for it and it cannot be done.
        """
        packing = self._packing
        if self.parallel is None or packing == "none":
            return False
        obstacle = self._packing_obstacle()
        if packing == "static" and obstacle is not None:
            raise ValueError(f"packing='static' is not possible, because {obstacle}; set packing='none'.")
        known = only_pads(self.data_collator)
        if known and obstacle is not None:
            self._padded_because(obstacle)
        return packing == "static" or (known and obstacle is None)

    def _packing_obstacle(self) -> str | None:
        if self._loss_needs_logits():
            return "a loss of one's own sees rows, not documents"
        if any(getattr(type(self), name) is not getattr(Trainer, name) for name in _PREPARE):
            return "inputs that are prepared in one's own way are rows, not documents"
        if self.neftune_noise_alpha is not None:
            return "NEFTune's noise depends on the length of the padded rows"
        config = self.parallel.forward.current.config
        rope = rope_of_the_batch(config)
        if rope is not None:
            return f"{rope!r} rotary embeddings depend on the longest row of the batch"
        if self._spied is None or self._spied[0] is not self.parallel:
            self._spied = self.parallel, attention_obstacle(self.parallel.family, config)
        return self._spied[1]

    def _padded_because(self, reason: NotPackable | str) -> None:
        if self._packing == "static":
            raise ValueError(f"packing='static' is not possible, because {reason}; set packing='none'.")
        logger.warning_once(f"Batches are padded and not packed, because {reason}.")

    # ---- A training run ----

    def _begin_packing(self) -> None:
        """At the start of training: forgets what belonged to an earlier run; collective.

        Raises:
            ValueError: for documents that are too long, where their lengths are known.
        """
        self._end_packing()
        self._placement, self._record, self._lengths = None, None, None
        self.cut_sequences, self._cut_before = self._cut_before, 0
        if self._packs():
            read_once(self._check_lengths)

    def _end_packing(self) -> None:
        if self._ahead is not None:
            self._ahead.end()
        self._ahead, self._rows = None, None

    def _check_lengths(self) -> None:
        """Before the first step, where rows have the tokens that the collator gives: others may cut them."""
        lengths, bound = self._known_lengths(), self._placer().bound
        if not only_pads(self.data_collator):
            return
        if bound is not None and self._long_sequences == "error" and (lengths > bound).any():
            row = int(lengths.argmax())
            raise ValueError(
                f"Row {row} of the dataset has {lengths[row]} tokens, above max_tokens_per_rank ({bound}), as "
                f"{int((lengths > bound).sum())} of {len(lengths)} rows; raise it, cut the rows, or set "
                "long_sequences to 'truncate' or 'split'."
            )

    def _known_lengths(self) -> np.ndarray:
        """Tokens of the training set's rows; none where they are not known. On rank 0."""
        if self._lengths is None:
            known = None
            if self.train_dataset is not None:
                known = sequence_lengths(self.train_dataset, length_column=self.args.length_column_name)
            self._lengths = np.zeros(0, dtype=np.int64) if known is None else known
        return self._lengths

    def _placer(self) -> Placer:
        """On rank 0."""
        cost = self._cost or estimated_cost(self.parallel.forward.current.config)
        return Placer.of(self.parallel, self.args, cost, self._known_lengths())

    # ---- A step ----

    def _read_step(self, batches: Iterator, count: int) -> list[dict[str, Any]]:
        """The batches of one optimizer step, and where their documents go; collective.

        Args:
            batches (`Iterator`): over the loader's batches; read on rank 0.
            count (`int`): how many make a step.
        """
        self._placement = None
        if not self._packs():
            return read_once(lambda: take(batches, count))
        if self._ahead is None:
            self._ahead = StepsAhead(self._placer, self._long_sequences)
        if self._cost is None:
            self._find_cost(batches, count)
        found, self._placement = read_once(lambda: self._read_and_place(batches, count))
        if self._placement is None:
            return found
        if self._record is None:
            self._record = PackingRecord(began=time.perf_counter())
        self._record.add(self._placement)
        if self.args.process_index == 0:
            try:
                self._plan_next(batches, count)
            except Exception as error:  # the others do not wait for it: the step is planned when it is read
                logger.warning_once(f"Steps are not planned ahead ({type(error).__name__}: {error}).")
        return found

    def _find_cost(self, batches: Iterator, count: int) -> None:
        """Measures what documents cost, unless nothing of the first step can be packed; collective."""
        if self.args.full_determinism:
            self._cost = estimated_cost(self.parallel.forward.current.config)  # no clock has a say
            return
        longest, most = read_once(lambda: self._to_time(batches, count))
        if longest:
            self.model.train()
            self._cost = measure_cost(self.parallel, longest, most)
            self._say_cost()

    def _to_time(self, batches: Iterator, count: int) -> tuple[int, int]:
        """Tokens of the longest document to time, and of a pack at most; zeros if nothing can be packed."""
        lengths, placer = self._known_lengths(), self._placer()
        if not len(lengths):
            sequences = self._sequences(self._ahead.peek(batches, count))
            if sequences is None:
                return 0, 0
            lengths = limit_lengths(sequences, placer.capacity(sequences.lengths), self._long_sequences).lengths
        return int(lengths.max()), placer.capacity(lengths)

    def _read_and_place(self, batches: Iterator, count: int) -> tuple[list[dict[str, Any]], StepPlacement | None]:
        found = self._ahead.take(batches, count)
        sequences = self._sequences(found)
        return found, None if sequences is None else self._ahead.place(sequences)

    def _sequences(self, batches: list[dict[str, Any]]) -> Sequences | None:
        """The documents of batches; None where there are none, or the batches stay padded."""
        if not batches:
            return None
        try:
            sequences = Sequences.from_batches(batches)
        except NotPackable as reason:
            self._padded_because(reason)
            return None
        return sequences if len(sequences.rows) else None

    def _plan_next(self, batches: Iterator, count: int) -> None:
        """Has the next step placed in the background; on rank 0."""
        step, known = self.state.global_step + 1, self._known_lengths()
        if step >= self.state.max_steps:
            return
        if self._rows is None:
            self._rows = DatasetRows(self.callback_handler.train_dataloader, self.args.gradient_accumulation_steps)
        if len(known) and self._rows.known:
            self._ahead.plan(lambda: known[self._rows.of_step(step)])
        elif self._rows.may_learn or self.accelerator.dataloader_config.use_stateful_dataloader:
            return  # rows would be chosen too early; a stateful loader's state would be a step ahead
        else:
            self._ahead.read_and_plan(batches, count)

    def _random_state(self) -> dict[str, Any]:
        """As a checkpoint of this step is to have it: see [`StepsAhead`]."""
        before = None if self._ahead is None else self._ahead.state_before_look
        return before or random_state()

    # ---- Packed batches ----

    def _packed(self, batches: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
        """The step's micro-batches; None where its rows stay padded."""
        step, self._placement = self._placement, None
        if step is None:
            return None
        sequences = limit_lengths(Sequences.from_batches(batches), step.longest, self._long_sequences)
        if sequences.cut:
            self.cut_sequences += sequences.cut
        return self._micro_batches(sequences, step.placement)

    def _items_of_packed(self, parts: list[dict[str, Any]], num_items: torch.Tensor | None) -> torch.Tensor | None:
        """Targets of the global batch, counted again where documents may have been cut."""
        if num_items is None or not self.cut_sequences:
            return num_items
        return count_targets(parts).to(num_items)

    def _micro_batches(self, sequences: Sequences, placement: Placement) -> list[dict[str, Any]]:
        parts = pack(sequences, placement, pack_multiple(self.parallel, self.args), self._pad_token_id)
        if self._record is not None:
            self._record.tokens += int(sequences.bounds[-1])
            self._record.positions += sum(part["input_ids"].shape[1] for part in parts)
        return [self._prepare_inputs(part) for part in parts]

    def _packed_for_evaluation(self, batch: dict[str, Any]) -> list[dict[str, Any]] | None:
        """As [`PackingMixin._packed`], planned on rank 0 there and then; long documents are not cut; collective."""
        if not self._packs():
            return None
        sequences = self._sequences([batch])
        if sequences is None:
            return None
        record, self._record = self._record, None
        try:
            return self._micro_batches(sequences, read_once(lambda: self._place_evaluation(sequences.lengths)))
        finally:
            self._record = record

    def _place_evaluation(self, lengths: np.ndarray) -> Placement:
        placer = self._placer()
        most = max(placer.capacity(lengths), int(lengths.max()))
        try:
            return placer.place(lengths, most)
        except Exception as error:  # as in a step of training
            logger.warning_once(
                f"Rows of an evaluation stay in order: the planner failed ({type(error).__name__}: {error})."
            )
            return placer.in_order(lengths, most)

    # ---- What is said of it ----

    def _say_cost(self) -> None:
        cost = self._cost.sequence
        logger.info(
            f"A document of s tokens was measured to take {cost.per_token:.3g} s + {cost.per_token_squared:.3g} s^2 + "
            f"{cost.per_sequence:.3g} seconds, a micro-batch {self._cost.overhead:.3g} more."
        )

    def log(self, logs: dict[str, float], *args, **kwargs) -> None:
        """As Trainer's; with what was packed since the last log, in a log of training."""
        record = self._record
        if record is not None and record.steps and "loss" in logs:
            now = time.perf_counter()
            logs.update(record.logs(now))
            self._record = PackingRecord(began=now)
            if self.cut_sequences:
                logs["cut_sequences"] = self.cut_sequences
        super().log(logs, *args, **kwargs)

    # ---- A resumed run places as the run before ----

    def _save_packing(self, folder: Path) -> None:
        if self.cut_sequences:
            write_file(folder / CUT_FILE, json.dumps({"cut_sequences": self.cut_sequences}))
        if self._cost is not None and self._cost.measured:
            write_file(folder / COST_FILE, json.dumps(self._cost.to_json()))

    def _load_packing(self, checkpoint: str) -> None:
        """What documents take and how many were cut, as rank 0 reads it; collective.

        Under another plan documents take other times, which are measured anew.
        """
        path = os.path.join(checkpoint, COST_FILE)
        raw = read_once(lambda: read_object(path, "cost of sequences") if os.path.isfile(path) else None)
        plan = self._requested_plan if self.parallel is None else self.parallel.plan
        before = self._resumed_plan
        same = before is not None and (plan is None or _places(plan) == _places(before))
        self._cost = StepCost.from_json(raw) if raw is not None and same else None
        path = os.path.join(checkpoint, CUT_FILE)
        raw = read_once(lambda: read_object(path, "number of cut sequences") if os.path.isfile(path) else None)
        self._cut_before = 0 if raw is None else int(raw.get("cut_sequences", 0))


def _places(plan: ParallelPlan) -> tuple:
    """What a document's time hangs on, of a plan."""
    return plan.stages, plan.layers, plan.embedding, plan.head
