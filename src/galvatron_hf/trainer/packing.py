# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Packing under a plan: each step's sequences are the sampler's own, where they are computed is chosen by cost."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import DataCollatorForSeq2Seq, DataCollatorWithPadding, DefaultDataCollator, default_data_collator
from transformers.data.data_collator import DataCollatorForLanguageModeling, DataCollatorWithFlattening
from transformers.utils import logging

from galvatron_hf.data.lengths import LookAhead, sequence_lengths
from galvatron_hf.data.loader import join_batches, read_once
from galvatron_hf.data.packing import BOUNDS, NotPackable, Sequences, limit_lengths, pack
from galvatron_hf.data.placement import Placement, in_order, place
from galvatron_hf.data.plan_ahead import PlanAhead
from galvatron_hf.parallel.attention_spy import attention_obstacle
from galvatron_hf.parallel.micro_batch import count_targets
from galvatron_hf.plan_json import read_object, write_file
from galvatron_hf.schedule import PipelineShape, orders
from galvatron_hf.trainer.arguments import packing_mode
from galvatron_hf.trainer.dataset_rows import DatasetRows
from galvatron_hf.trainer.random_state import random_state
from galvatron_hf.trainer.sequence_cost import StepCost, estimated_cost, measure_cost


logger = logging.get_logger(__name__)

COST_FILE = "sequence_cost.json"

_KNOWN_COLLATORS = (
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorWithFlattening,
    DataCollatorWithPadding,
    DefaultDataCollator,
)
_KNOWN_NAMES = {("trl.trainer.sft_trainer", "DataCollatorForLanguageModeling")}
# Their rotary embeddings depend on the longest row of the whole batch.
_ROPE_OF_THE_BATCH = ("dynamic", "longrope")


@dataclass(frozen=True, kw_only=True)
class StepPlacement:
    """How one step is packed, the same on every rank.

    Attributes:
        placement ([`Placement`]): of its documents.
        longest (`int`): tokens that a document may have.
        imbalance (`float`): slowest rank over the mean, as the cost model has it.
        seconds (`float`): that the planner took.
        hidden (`bool`): whether it had planned before it was asked.
    """

    placement: Placement
    longest: int
    imbalance: float
    seconds: float
    hidden: bool


@dataclass(kw_only=True)
class PackingRecord:
    """What was packed since the last log."""

    began: float
    steps: int = 0
    tokens: int = 0
    positions: int = 0
    imbalance: float = 0.0
    planner_seconds: float = 0.0
    hidden: int = 0

    def logs(self, now: float) -> dict[str, float]:
        """What a log says of it; the imbalance is the cost model's, all else was measured."""
        return {
            "useful_tokens_per_second": round(self.tokens / max(now - self.began, 1e-9), 1),
            "padding_percent": round(100 * (1 - self.tokens / max(self.positions, 1)), 2),
            "predicted_imbalance": round(self.imbalance / self.steps, 4),
            "planner_ms": round(1e3 * self.planner_seconds / self.steps, 2),
            "planner_hidden": round(self.hidden / self.steps, 2),
        }


class PackingMixin:
    """The part of [`GalvatronMixin`] that packs; see there.

    Rank 0 reads the sampler's batches, says where each document goes, and tells the others. It plans the next step
    while this one is computed, where the dataset says how long its rows are or can be read ahead.

    Attributes:
        cut_sequences (`int`): documents that were truncated or split so far, because they were too long.
    """

    cut_sequences: int = 0
    _cost: StepCost | None = None
    _placement: StepPlacement | None = None
    _ahead: PlanAhead | None = None
    _record: PackingRecord | None = None
    _lengths: np.ndarray | None = None
    _rows: DatasetRows | None = None
    _looking: tuple[Iterator, LookAhead] | None = None
    _state_before_look: dict[str, Any] | None = None
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
        known = _is_known(self.data_collator)
        if known and obstacle is not None:
            self._padded_because(obstacle)
        return packing == "static" or (known and obstacle is None)

    def _packing_obstacle(self) -> str | None:
        if self._loss_needs_logits():
            return "a loss of one's own sees rows, not documents"
        if self.neftune_noise_alpha is not None:
            return "NEFTune's noise depends on the length of the padded rows"
        config = self.parallel.forward.current.config
        rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
        kinds = {rope.get("rope_type")} | {part.get("rope_type") for part in rope.values() if isinstance(part, dict)}
        changing = sorted(kind for kind in kinds if kind in _ROPE_OF_THE_BATCH)
        if changing:
            return f"{changing[0]!r} rotary embeddings depend on the longest row of the batch"
        if self._spied is None or self._spied[0] is not self.parallel:
            self._spied = self.parallel, attention_obstacle(self.parallel.family, config)
        return self._spied[1]

    # ---- Where ----

    def _begin_packing(self) -> None:
        """At the start of training: forgets what belonged to an earlier run; collective.

        Raises:
            ValueError: for documents that are too long, where their lengths are known.
        """
        self._end_packing()
        self._placement, self._record, self._lengths = None, None, None
        self.cut_sequences = 0
        if self._packs():
            read_once(self._check_lengths)

    def _end_packing(self) -> None:
        if self._ahead is not None:
            self._ahead.end()
        self._ahead, self._looking, self._rows, self._state_before_look = None, None, None, None

    def _check_lengths(self) -> None:
        lengths, bound = self._known_lengths(), self._bound()
        if bound is not None and self._long_sequences == "error" and (lengths > bound).any():
            row = int(lengths.argmax())
            raise ValueError(
                f"Row {row} of the dataset has {lengths[row]} tokens, above max_tokens_per_rank ({bound}), as "
                f"{int((lengths > bound).sum())} of {len(lengths)} rows; raise it, cut the rows, or set "
                "long_sequences to 'truncate' or 'split'."
            )

    def _read_step(self, batches: Iterator, count: int) -> list[dict[str, Any]]:
        """The batches of one optimizer step, and where their documents go; collective.

        Args:
            batches (`Iterator`): over the loader's batches; read on rank 0.
            count (`int`): how many make a step.
        """
        self._placement = None
        if not self._packs():
            return read_once(lambda: _take(batches, count))
        if self._cost is None:
            longest, most = read_once(lambda: self._to_time(batches, count))
            if self.args.full_determinism:
                self._cost = estimated_cost(self.parallel.forward.current.config)  # no clock has a say
            elif longest:
                self.model.train()
                self._cost = measure_cost(self.parallel, longest, most)
                self._say_cost()
        found, self._placement = read_once(lambda: self._read_and_place(batches, count))
        if self._placement is not None:
            self._note(self._placement)
        if self.args.process_index == 0:
            try:
                self._plan_next(batches, count)
            except Exception as error:  # the others do not wait for it: the step is planned when it is read
                logger.warning_once(f"Steps are not planned ahead ({type(error).__name__}: {error}).")
        return found

    def _to_time(self, batches: Iterator, count: int) -> tuple[int, int]:
        """Tokens of the longest document to time, and of a pack at most; zeros if nothing can be packed."""
        lengths = self._known_lengths()
        if not len(lengths):
            try:
                lengths = Sequences.of(self._look(batches).peek(count)).lengths
            except (NotPackable, ValueError):  # told when the step is read
                return 0, 0
        return (int(lengths.max()), self._capacity(lengths)) if len(lengths) else (0, 0)

    def _look(self, batches: Iterator) -> LookAhead:
        if self._looking is None or self._looking[0] is not batches:
            self._looking = (batches, LookAhead(batches))
        return self._looking[1]

    def _read_and_place(self, batches: Iterator, count: int) -> tuple[list[dict[str, Any]], StepPlacement | None]:
        found = _take(self._looked_at(batches), count)
        if not found:
            return found, None
        try:
            sequences = Sequences.of(found)
        except NotPackable as reason:
            self._padded_because(reason)
            return found, None
        if not len(sequences.rows):
            return found, None
        longest = self._capacity(sequences.lengths)
        lengths = limit_lengths(sequences, longest, self._long_sequences).lengths
        if self._ahead is None:
            self._ahead = PlanAhead(self._place, self._in_order)
        planned = self._ahead.take(lengths)
        if planned.failure is not None:
            logger.warning(
                f"This step's sequences stay in the sampler's order: the planner failed ({planned.failure})."
            )
        stages = len(self.parallel.plan.rank_lists)
        return found, StepPlacement(
            placement=planned.placement,
            longest=longest,
            imbalance=planned.placement.imbalance(lengths, self._step_cost.sequence, stages=stages),
            seconds=planned.seconds,
            hidden=planned.hidden,
        )

    def _padded_because(self, reason: NotPackable | str) -> None:
        if self._packing == "static":
            raise ValueError(f"packing='static' is not possible, because {reason}; set packing='none'.")
        logger.warning_once(f"Batches are padded and not packed, because {reason}.")

    def _joined(self, batches: list[dict[str, Any]]) -> dict[str, Any]:
        """One batch of all, without what collators say twice where they have packed already."""
        if all("position_ids" in batch for batch in batches):
            batches = [{name: x for name, x in batch.items() if name not in BOUNDS} for batch in batches]
        return join_batches(batches, self._pad_token_id)

    @property
    def _pad_token_id(self) -> int:
        pad = self.model.config.pad_token_id
        return pad if pad is not None and pad >= 0 else 0

    @property
    def _step_cost(self) -> StepCost:
        return self._cost or estimated_cost(self.parallel.forward.current.config)

    def _bound(self) -> int | None:
        """Tokens that a pack may have by the arguments, a multiple of what the plan asks for."""
        given = getattr(self.args, "max_tokens_per_rank", None)
        if given is None:
            return None
        multiple = self._pack_multiple()
        if given % multiple:
            raise ValueError(
                f"max_tokens_per_rank={given} is no multiple of {multiple}, which the tokens of a pack are under this "
                f"plan and pack_to_multiple_of; give {max(given // multiple, 1) * multiple}."
            )
        return given

    def _capacity(self, lengths: np.ndarray) -> int:
        """Tokens of a pack at most: by default what the plan's padded micro-batches of the longest rows would have."""
        bound = self._bound()
        if bound is not None:
            return bound
        rows = self.args.train_batch_size * self.args.gradient_accumulation_steps * self.args.world_size
        shares = self.parallel.plan.micro_batches * self.parallel.forward.packs
        longest = max(int(lengths.max()), int(self._known_lengths().max(initial=0)))
        multiple = self._pack_multiple()
        return -(-(-(-rows // shares) * longest) // multiple) * multiple

    def _known_lengths(self) -> np.ndarray:
        """Tokens of the training set's rows; none where they are not known. On rank 0."""
        if self._lengths is None:
            known = None
            if self.train_dataset is not None:
                known = sequence_lengths(self.train_dataset, length_column=self.args.length_column_name)
            self._lengths = np.zeros(0, dtype=np.int64) if known is None else known
        return self._lengths

    def _pack_multiple(self) -> int:
        wanted = getattr(self.args, "pack_to_multiple_of", None)
        if wanted is None:
            wanted = 64 if self.args.device.type == "cuda" else 1
        return int(np.lcm(self.parallel.forward.pack_multiple, wanted))

    def _place(self, lengths: np.ndarray, max_tokens: int | None = None) -> Placement:
        cost, plan, least = self._step_cost, self.parallel.plan, 1
        while True:
            placement = place(
                lengths,
                self.parallel.forward.packs,
                cost.sequence,
                max_tokens=max_tokens or self._capacity(lengths),
                overhead=cost.overhead,
                stages=len(plan.rank_lists),
                least_micro_batches=least,
            )
            count = len(placement.micro_batches)
            if len(plan.stages) == 1 or orders(PipelineShape.of(plan), count):
                return placement
            least = count + 1

    def _in_order(self, lengths: np.ndarray) -> Placement:
        return in_order(lengths, self.parallel.forward.packs, max_tokens=self._capacity(lengths))

    # ---- Ahead ----

    def _looked_at(self, batches: Iterator) -> Iterator:
        """The iterator that may have been read ahead."""
        self._state_before_look = None
        return self._looking[1] if self._looking is not None and self._looking[0] is batches else batches

    def _plan_next(self, batches: Iterator, count: int) -> None:
        """Has the next step planned in the background; on rank 0."""
        if self._ahead is None or self.state.global_step + 1 >= self.state.max_steps:
            return
        step, longest, known = self.state.global_step + 1, self._bound(), self._known_lengths()
        if self._rows is None:
            self._rows = DatasetRows(self.callback_handler.train_dataloader, self.args.gradient_accumulation_steps)
        if len(known) and self._rows.known:
            self._ahead.begin(lambda: _limited(known[self._rows.of_step(step)], longest, self._long_sequences))
            return
        if self.accelerator.dataloader_config.use_stateful_dataloader:
            return  # its state would be a step ahead of training
        before = random_state()
        following = self._look(batches).peek(count)
        if random_state() != before:  # what is drawn for the next step comes after a checkpoint of this one
            self._state_before_look = before
        if following:
            self._ahead.begin(lambda: _limited(Sequences.of(following).lengths, longest, self._long_sequences))

    # ---- Packed batches ----

    def _packed(self, batches: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
        """The step's micro-batches; None where its rows stay padded."""
        step, self._placement = self._placement, None
        if step is None:
            return None
        sequences = limit_lengths(Sequences.of(batches), step.longest, self._long_sequences)
        if sequences.cut:
            self.cut_sequences += sequences.cut
        return self._micro_batches(sequences, step.placement)

    def _items_of_packed(self, parts: list[dict[str, Any]], num_items: torch.Tensor | None) -> torch.Tensor | None:
        """Targets of the global batch, counted again where documents may have been cut."""
        if num_items is None or not self.cut_sequences:
            return num_items
        return count_targets(parts).to(num_items)

    def _micro_batches(self, sequences: Sequences, placement: Placement) -> list[dict[str, Any]]:
        parts = pack(sequences, placement, self._pack_multiple(), self._pad_token_id)
        if self._record is not None:
            self._record.tokens += int(sequences.bounds[-1])
            self._record.positions += sum(part["input_ids"].shape[1] for part in parts)
        return [self._prepare_inputs(part) for part in parts]

    def _packed_for_evaluation(self, batch: dict[str, Any]) -> list[dict[str, Any]] | None:
        """As [`PackingMixin._packed`], planned on rank 0 there and then; long documents are not cut; collective."""
        if not self._packs():
            return None
        try:
            sequences = Sequences.of([batch])
        except NotPackable as reason:
            self._padded_because(reason)
            return None
        if not len(sequences.rows):
            return None
        record, self._record = self._record, None
        try:
            return self._micro_batches(sequences, read_once(lambda: self._place_evaluation(sequences.lengths)))
        finally:
            self._record = record

    def _place_evaluation(self, lengths: np.ndarray) -> Placement:
        return self._place(lengths, max(self._capacity(lengths), int(lengths.max())))

    # ---- What is said of it ----

    def _note(self, step: StepPlacement) -> None:
        if self._record is None:
            self._record = PackingRecord(began=time.perf_counter())
        self._record.steps += 1
        self._record.planner_seconds += step.seconds
        self._record.hidden += step.hidden
        self._record.imbalance += step.imbalance

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

    def _save_cost(self, folder: Path) -> None:
        if self._cost is not None and self._cost.measured:
            write_file(folder / COST_FILE, json.dumps(self._cost.to_json()))

    def _load_cost(self, checkpoint: str) -> None:
        """Rank 0's; collective."""
        path = os.path.join(checkpoint, COST_FILE)
        raw = read_once(lambda: read_object(path, "cost of sequences") if os.path.isfile(path) else None)
        self._cost = None if raw is None else StepCost.from_json(raw)


def _is_known(collator: Any) -> bool:
    """Whether a collator pads token rows and does nothing else."""
    if collator is default_data_collator:
        return True
    kind = type(collator)
    if kind is DataCollatorForLanguageModeling:
        return not collator.mlm
    return kind in _KNOWN_COLLATORS or (kind.__module__, kind.__name__) in _KNOWN_NAMES


def _limited(lengths: np.ndarray, longest: int | None, policy: str) -> np.ndarray | None:
    """Lengths as [`limit_lengths`] leaves them; None where it would refuse them."""
    lengths = lengths[lengths > 0]
    if longest is None or not (lengths > longest).any():
        return lengths
    if policy == "error":
        return None
    if policy == "truncate":
        return np.minimum(lengths, longest)
    return np.concatenate(
        [
            np.append(np.full(length // longest, longest), [length % longest] * bool(length % longest))
            for length in lengths
        ]
    )


def _take(iterator: Iterator, count: int) -> list:
    return [item for _, item in zip(range(count), iterator, strict=False)]
